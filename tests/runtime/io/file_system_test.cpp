#include "runtime/io/file_system.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <thread>

#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

FileSystem& files() { return posix_file_system(); }

std::string text_of(InputFile& file) {
  std::string text(file.size(), ' ');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace

TEST_CASE("what is written is read, whatever its size") {
  const TempDirectory directory;
  for (const std::size_t size : {0, 1, 4095, 65536, 65537, 1000003}) {
    const auto path = directory / std::to_string(size);
    std::string text(size, ' ');
    for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 31 >> 3);
    const auto file = files().create(path);
    file->write(std::string_view(text).substr(0, size / 3));
    file->write(std::string_view(text).substr(size / 3));
    file->sync();
    file->close();
    CHECK(files().read(path) == text);
    CHECK(text_of(*files().open(path)) == text);
  }
}

TEST_CASE("append keeps what is there") {
  const TempDirectory directory;
  for (const std::string_view line : {"one\n", "two\n"}) {
    const auto file = files().append(directory / "log");
    file->write(line);
    file->close();
  }
  CHECK(files().read(directory / "log") == "one\ntwo\n");
}

TEST_CASE("an open file survives the replacement of its name, and reads any part") {
  const TempDirectory directory;
  files().create(directory / "a")->write("old one");
  files().create(directory / "b")->write("new");
  const auto open = files().open(directory / "a");
  files().rename(directory / "b", directory / "a");
  CHECK(text_of(*open) == "old one");
  char part[3];
  open->read(4, std::as_writable_bytes(std::span(part)));
  CHECK(std::string_view(part, 3) == "one");
  CHECK_THAT(message_of<FileError>([&] { open->read(5, std::as_writable_bytes(std::span(part))); }),
             ContainsSubstring("ends at byte 7, 1 more"));
  CHECK(files().read(directory / "a") == "new");
}

TEST_CASE("only regular files are opened, at once and by one line") {
  const TempDirectory directory;
  REQUIRE(::mkfifo((directory / "fifo").c_str(), 0600) == 0);
  std::filesystem::create_symlink(directory / "fifo", directory / "link");
  std::vector<std::filesystem::path> wrong = {directory / "fifo", directory / "link", directory.path()};
  for (const char* device : {"/dev/zero", "/dev/full", "/dev/null"})
    if (files().exists(device)) wrong.emplace_back(device);
  for (const auto& path : wrong) {
    const std::function<void()> calls[] = {[&] { files().open(path); }, [&] { files().read(path); },
                                           [&] { files().append(path); }, [&] { files().try_lock(path); }};
    for (const auto& call : calls) {
      const std::string message = message_of<FileError>(call);
      CHECK_THAT(message, ContainsSubstring("open: '" + path.string() + "'"));
      CHECK(message.find('\n') == std::string::npos);
    }
  }
}

TEST_CASE("a file above the limit is refused before it is read") {
  const TempDirectory directory;
  files().create(directory / "huge")->write("x");
  std::filesystem::resize_file(directory / "huge", std::uintmax_t{1} << 40);
  CHECK_THAT(message_of<FileError>([&] { files().read(directory / "huge"); }),
             ContainsSubstring("1099511627776") && ContainsSubstring("1073741824"));
  CHECK_THAT(message_of<FileError>([&] { files().read(directory / "huge", 100); }), ContainsSubstring("100"));
  files().create(directory / "ten")->write("0123456789");
  CHECK(files().read(directory / "ten", 10) == "0123456789");
  CHECK_THROWS_AS(files().read(directory / "ten", 9), FileError);
}

TEST_CASE("a lock is one holder's, says who that is, and goes with the object or the process") {
  const TempDirectory directory;
  const auto path = directory / ".lock";
  auto lock = files().try_lock(path);
  REQUIRE(lock != nullptr);
  CHECK(files().read(path) == std::to_string(::getpid()));
  CHECK(files().try_lock(path) == nullptr);
  lock.reset();
  CHECK_FALSE(files().exists(path));

  // A killed holder leaves the file, which holds nobody up.
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto held = files().try_lock(path);
    const char done = held ? 'y' : 'n';
    if (::write(ready[1], &done, 1) == 1) ::pause();
    ::_exit(1);
  }
  char done = 'n';
  REQUIRE(::read(ready[0], &done, 1) == 1);
  CHECK(done == 'y');
  CHECK(files().try_lock(path) == nullptr);
  CHECK(files().read(path) == std::to_string(child));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  CHECK(files().exists(path));
  CHECK(files().try_lock(path) != nullptr);
  CHECK_FALSE(files().exists(path));
  files().create(directory / "elsewhere")->write("mine");
  std::filesystem::create_symlink(directory / "elsewhere", path);
  CHECK_THROWS_AS(files().try_lock(path), FileError);
  CHECK(files().read(directory / "elsewhere") == "mine");
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_CASE("of many that want a lock at once exactly one has it at any time") {
  const TempDirectory directory;
  std::atomic<int> holders = 0, most = 0, taken = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int got = 0; got < 200;) {
        const auto lock = files().try_lock(directory / "lock");
        if (!lock) continue;
        const int now = ++holders;
        for (int before = most; before < now && !most.compare_exchange_weak(before, now);) {
        }
        ++taken;
        ++got;
        --holders;
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(taken == 800);
  CHECK(most == 1);
}

TEST_CASE("names are listed in order, and trees are removed whole") {
  const TempDirectory directory;
  files().create_directory(directory / "tree");
  files().create_directory(directory / "tree/inner");
  for (const char* name : {"tree/b", "tree/a", "tree/inner/c", "beside"})
    files().create(directory / name)->write("x");
  std::filesystem::create_symlink(directory / "beside", directory / "tree/link");
  std::filesystem::create_directory_symlink(directory.path(), directory / "tree/up");
  CHECK(files().list(directory / "tree") == std::vector<std::string>{"a", "b", "inner", "link", "up"});
  CHECK(files().is_directory(directory / "tree"));
  CHECK_FALSE(files().is_directory(directory / "beside"));
  files().remove_tree(directory / "tree");
  files().remove_tree(directory / "tree");
  CHECK(files().list(directory.path()) == std::vector<std::string>{"beside"});  // links are not followed
}

TEST_CASE("every refusal names the call, the path and the system's reason in one line") {
  const TempDirectory directory;
  const auto missing = directory / "missing", there = directory / "there";
  files().create(there)->write("x");
  struct Case {
    const char* call;
    std::string path;
    const char* reason;
    std::function<void()> run;
  };
  const std::string at_missing = missing.string(), at_there = there.string(),
                    root = directory.path().string();
  const Case cases[] = {
      {"open", at_there, "File exists", [&] { files().create(there); }},
      {"open", at_missing + "/x", "No such file or directory", [&] { files().append(missing / "x"); }},
      {"rename", at_missing, "No such file or directory", [&] { files().rename(missing, there); }},
      {"open", at_missing, "No such file or directory", [&] { files().sync_directory(missing); }},
      {"mkdir", at_there, "File exists", [&] { files().create_directory(there); }},
      {"remove", at_missing, "No such file or directory", [&] { files().remove(missing); }},
      {"remove", root, "Directory not empty", [&] { files().remove(directory.path()); }},
      {"list", at_there, "Not a directory", [&] { files().list(there); }},
      {"open", at_missing, "No such file or directory", [&] { files().read(missing); }},
      {"open", root, "Is a directory", [&] { files().read(directory.path()); }},
      {"open", at_missing, "No such file or directory", [&] { files().open(missing); }},
      {"open", at_missing + "/x", "No such file or directory", [&] { files().try_lock(missing / "x"); }},
  };
  for (const Case& c : cases) {
    const std::string message = message_of<FileError>(c.run);
    INFO(message);
    CHECK_THAT(message, ContainsSubstring(std::string(c.call) + ": '" + c.path + "'"));
    CHECK_THAT(message, ContainsSubstring(c.reason));
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("what does not fit is an error of the write, after all that fits") {
  const TempDirectory directory;
  const auto path = directory / "file";
  const auto file = files().create(path);
  struct rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  struct sigaction ignore{}, action{};
  ignore.sa_handler = SIG_IGN;
  REQUIRE(::sigaction(SIGXFSZ, &ignore, &action) == 0);
  struct rlimit small = before;
  small.rlim_cur = 100'000;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  const std::string message = message_of<FileError>([&] { file->write(std::string(300'000, 'x')); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::sigaction(SIGXFSZ, &action, nullptr);
  CHECK_THAT(message, ContainsSubstring("write: '" + path.string() + "': File too large"));
  CHECK(std::filesystem::file_size(path) == 100'000);
}
