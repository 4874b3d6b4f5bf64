// What the program does when its streams are closed or full, and when its folder is another run's.
#include <algorithm>
#include <csignal>
#include <deque>

#include "runtime/error.h"
#include "tests/tools/command.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

const Arguments train = {"train",   "--data", "text",      "--layers", "1",         "--heads", "1",
                         "--width", "8",      "--context", "8",        "--threads", "1"};

struct Folder : TempDirectory {
  Folder() { write_file(*this / "text", small_text()); }
};

}  // namespace

TEST_CASE("whichever streams are closed, a run writes what it always writes") {
  const Folder folder;
  const Arguments arguments = with(train, {"--steps", "4", "--eval-every", "2", "--out"});
  CHECK(Command(folder, with(arguments, {"open"})).wait() == 0);
  const auto expected = contents(folder / "open");
  for (const std::string closed : {"<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"}) {
    INFO(closed);
    std::filesystem::remove_all(folder / "closed");
    Command run(folder, with(arguments, {"closed"}), {}, {"/bin/sh", "-c", "exec \"$0\" \"$@\" " + closed});
    CHECK(run.wait() == 0);
    CHECK(contents(folder / "closed") == expected);
  }
}

TEST_CASE("output that cannot be written is an error, at the end of a run that is complete") {
  if (skip_if(!posix_file_system().exists("/dev/full"), "this system has no /dev/full")) return;
  const Folder folder;
  Command run(folder, with(train, {"--steps", "2"}), {.out = "/dev/full"});
  CHECK(run.wait() == 1);
  CHECK_THAT(run.err(), ContainsSubstring("output"));
  CHECK(tools::saved_steps(folder / "runs/1", posix_file_system()).back() == 2);
  for (const Arguments& arguments : {Arguments{"inspect"}, Arguments{"sample", "--checkpoint", "runs/1"},
                                     Arguments{"--help"}, Arguments{"train", "--help"}}) {
    Command other(folder, arguments, {.out = "/dev/full"});
    CHECK(other.wait() == 1);
    CHECK_THAT(other.err(), ContainsSubstring("output"));
  }
}

TEST_CASE("an error that nobody can hear is still exit code 1") {
  if (skip_if(!posix_file_system().exists("/dev/full"), "this system has no /dev/full")) return;
  const Folder folder;
  for (const Arguments& wrong :
       {Arguments{"dance"}, Arguments{"train", "--steps", "many"}, Arguments{"train", "--data", "nowhere"},
        Arguments{"inspect", "--ranks", "0"}, Arguments{"sample", "--checkpoint", "nowhere"}})
    CHECK(Command(folder, wrong, {.err = "/dev/full"}).wait() == 1);
}

TEST_CASE("a run has its folder to itself: others are told who has it, and readers may read") {
  const Folder folder;
  const Arguments arguments = with(train, {"--steps", "4000", "--eval-every", "2000", "--out"});
  CHECK(Command(folder, with(arguments, {"alone"})).wait() == 0);
  Command run(folder, with(arguments, {"run"}));
  REQUIRE(run.prints("step 1/"));
  run.signal(SIGSTOP);
  for (const Arguments& other : {with(arguments, {"run"}), Arguments{"train", "--resume", "--out", "run"},
                                 Arguments{"train", "--resume", "--steps", "9", "--out", "run"}}) {
    Command second(folder, other);
    CHECK(second.wait() == 1);
    INFO(second.err());
    CHECK_THAT(second.err(), ContainsSubstring("'run'") &&
                                 ContainsSubstring("process " + std::to_string(run.process()) + " "));
    CHECK(std::ranges::count(second.err(), '\n') == 1);
  }
  Command sample(folder, {"sample", "--checkpoint", "run", "--tokens", "3"});
  CHECK(sample.wait() == 0);
  run.signal(SIGCONT);
  CHECK(run.wait() == 0);
  CHECK(contents(folder / "run") == contents(folder / "alone"));
}

TEST_CASE("of runs that start in one folder at once one trains, and the others say so") {
  const Folder folder;
  const Arguments arguments = with(train, {"--steps", "300", "--eval-every", "100", "--out"});
  CHECK(Command(folder, with(arguments, {"alone"})).wait() == 0);
  std::deque<Command> runs;
  for (int i = 0; i < 4; ++i) runs.emplace_back(folder, with(arguments, {"together"}));
  int trained = 0;
  for (Command& run : runs) {
    const int code = run.wait();
    CHECK((code == 0 || code == 1));
    trained += code == 0;
  }
  CHECK(trained == 1);
  CHECK(contents(folder / "together") == contents(folder / "alone"));
}

TEST_CASE("a killed run's folder is free again") {
  const Folder folder;
  const Arguments arguments = with(train, {"--steps", "2000", "--eval-every", "1000", "--out"});
  CHECK(Command(folder, with(arguments, {"alone"})).wait() == 0);
  Command run(folder, with(arguments, {"killed"}));
  REQUIRE(run.prints("step 1/"));
  run.signal(SIGKILL);
  run.wait();
  CHECK(std::filesystem::exists(folder / "killed/.lock"));
  CHECK(Command(folder, {"train", "--resume", "--out", "killed"}).wait() == 0);
  CHECK(contents(folder / "killed") == contents(folder / "alone"));
}
