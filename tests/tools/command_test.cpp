// The program itself, from its command line to its exit code.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <sstream>
#include <utility>

#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/temp_directory.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

using Arguments = std::vector<std::string>;

/// `sherd ARGUMENTS...` in `folder`. What it prints comes through a pipe, so that a test can act at a line;
/// errors go to a file.
class Command {
 public:
  Command(const TempDirectory& folder, const Arguments& arguments, const char* output = nullptr)
      : err_(folder / "err") {
    std::vector<std::string> words = arguments;
    words.insert(words.begin(), SHERD_PROGRAM);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    process_ = ::fork();
    REQUIRE(process_ >= 0);
    if (process_ == 0) {
      const int out = output ? ::open(output, O_WRONLY) : ends[1];
      const int err = ::open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
      if (::dup2(out, 1) == 1 && ::dup2(err, 2) == 2 && ::chdir(folder.path().c_str()) == 0)
        ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    pipe_ = ends[0];
  }
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;
  ~Command() {
    if (process_ != 0) {
      ::kill(process_, SIGKILL);
      wait();
    }
    ::close(pipe_);
  }

  /// Returns when it has printed `text`; false if it ends without.
  bool prints(const std::string& text) {
    while (out_.find(text) == std::string::npos)
      if (!read_more()) return false;
    return true;
  }
  void signal(int number) const { ::kill(process_, number); }
  /// The exit code; 128 + the signal that ended it.
  int wait() {
    while (read_more()) {
    }
    int status = 0;
    ::waitpid(std::exchange(process_, 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  const std::string& out() const { return out_; }
  std::string err() const { return posix_file_system().read(err_); }

 private:
  bool read_more() {
    char bytes[4096];
    const ssize_t count = ::read(pipe_, bytes, sizeof bytes);
    if (count > 0) out_.append(bytes, static_cast<std::size_t>(count));
    return count > 0;
  }

  std::filesystem::path err_;
  std::string out_;
  pid_t process_ = 0;
  int pipe_ = -1;
};

const Arguments train = {"train", "--data",    "text", "--layers",  "1", "--heads",
                         "1",     "--width",   "8",    "--context", "8", "--batch",
                         "2",     "--dropout", "0.1",  "--threads", "1"};

Arguments with(Arguments all, const Arguments& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

TEST_CASE("the program trains, samples, and ends with its figures") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  Command run(folder, with(train, {"--steps", "5"}));
  CHECK(run.wait() == 0);
  INFO(run.err());
  const std::string out = run.out();
  const std::string last = out.substr(out.rfind('\n', out.size() - 2) + 1);
  CHECK_THAT(last, Catch::Matchers::Matches(
                       "final: step=5 loss=[0-9.]+ val_loss=[0-9.]+ bigram=[0-9.]+ tokens_per_s=[0-9]+\n"));
  CHECK(out.find('\r') == std::string::npos);

  Command sample(folder,
                 {"sample", "--checkpoint", "runs/1", "--prompt", "line", "--tokens", "7", "--seed", "3"});
  CHECK(sample.wait() == 0);
  CHECK(sample.out().size() == 4 + 7 + 1);
  CHECK(sample.out().starts_with("line"));
}

TEST_CASE("a run without a name gets the next number, and resuming takes the newest") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  for (int i = 0; i < 2; ++i) CHECK(Command(folder, with(train, {"--steps", "2"})).wait() == 0);
  CHECK(Command(folder, {"train", "--resume", "--steps", "3"}).wait() == 0);
  CHECK(tools::saved_steps(folder / "runs/1", posix_file_system()).back() == 2);
  CHECK(tools::saved_steps(folder / "runs/2", posix_file_system()).back() == 3);
}

TEST_CASE("killed at any moment and resumed, the program ends at the same bits") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments arguments = with(train, {"--steps", "300", "--eval-every", "20", "--out"});
  CHECK(Command(folder, with(arguments, {"whole"})).wait() == 0);
  for (const int steps : {1, 40, 160}) {
    const std::string out = "killed-" + std::to_string(steps);
    Command run(folder, with(arguments, {out}));
    REQUIRE(run.prints("step " + std::to_string(steps)));
    run.signal(SIGKILL);
    run.wait();
    Command again(folder, {"train", "--resume", "--out", out});
    CHECK(again.wait() == 0);
    INFO(again.err());
    CHECK(contents(folder / out) == contents(folder / "whole"));
  }
}

TEST_CASE("Ctrl-C saves and ends well; going on ends at the same bits") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments arguments = with(train, {"--steps", "3000", "--eval-every", "1000", "--out"});
  CHECK(Command(folder, with(arguments, {"whole"})).wait() == 0);
  Command run(folder, with(arguments, {"stopped"}));
  REQUIRE(run.prints("step 1/"));
  run.signal(SIGINT);
  CHECK(run.wait() == 0);
  CHECK_THAT(run.out(), ContainsSubstring("stopped after step "));
  CHECK(tools::saved_steps(folder / "stopped", posix_file_system()).back() > 0);
  CHECK(Command(folder, {"train", "--resume", "--out", "stopped"}).wait() == 0);
  const auto stopped = contents(folder / "stopped"), whole = contents(folder / "whole");
  for (const std::string name :
       {"metrics.jsonl", "step-3000/model.safetensors", "step-3000/optimizer.safetensors"}) {
    CHECK(stopped.at(name) == whole.at(name));
  }
}

TEST_CASE("wrong command lines end in one line and the exit code 1") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const std::pair<Arguments, std::string> wrong[] = {
      {{}, "subcommand"},
      {{"dance"}, "subcommand"},
      {{"train", "--no-such-flag"}, "--no-such-flag"},
      {{"train", "--steps", "many"}, "--steps"},
      {{"train", "--steps", "1.5"}, "--steps"},
      {{"train", "--steps", "99999999999999999999"}, "--steps"},
      {{"train", "--steps"}, "--steps"},
      {{"train", "--data", "text", "--seed", "-1"}, "--seed"},
      {{"sample", "--checkpoint", "nowhere", "--seed", "-1"}, "--seed"},
      {{"train", "--lr", "fast"}, "--lr"},
      {{"train", "--data", "nowhere"}, "nowhere"},
      {{"train", "--data", "text", "--context", "100000"}, "--context 100000"},
      {{"train", "--resume", "--out", "nowhere"}, "nowhere"},
      {{"train", "--data", "text", "--out", "/dev/full/run"}, "/dev/full"},
      {{"sample"}, "--checkpoint"},
      {{"sample", "--checkpoint", "nowhere"}, "nowhere"},
      {{"sample", "--checkpoint", "nowhere", "--temperature", "-1"}, "--temperature"},
  };
  for (const auto& [arguments, part] : wrong) {
    Command run(folder, arguments);
    CHECK(run.wait() == 1);
    const std::string err = run.err();
    INFO(err);
    CHECK(err.starts_with("sherd: "));
    CHECK(std::ranges::count(err, '\n') == 1);
    CHECK_THAT(err, ContainsSubstring(part));
    CHECK(run.out().empty());
  }
}

TEST_CASE("output that cannot be written is an error") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  Command run(folder, with(train, {"--steps", "2"}), "/dev/full");
  CHECK(run.wait() == 1);
  CHECK_THAT(run.err(), ContainsSubstring("output"));
}

TEST_CASE("every flag says its default and an example") {
  const TempDirectory folder;
  for (const std::string command : {"train", "sample"}) {
    Command run(folder, {command, "--help"});
    CHECK(run.wait() == 0);
    std::istringstream help(run.out());
    int flags = 0;
    for (std::string line; std::getline(help, line);) {
      const std::size_t dashes = line.find("--");
      if (dashes != 2) continue;
      const std::string flag = line.substr(dashes, line.find_first_of(" =,", dashes) - dashes);
      INFO(line);
      CHECK_THAT(line, ContainsSubstring("default "));
      CHECK_THAT(line, ContainsSubstring("e.g. "));
      CHECK(line.find(flag, line.find("e.g. ")) != std::string::npos);
      ++flags;
    }
    CHECK(flags >= 6);
  }
}
