#include "runtime/io/file_system.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

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

std::string text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

}  // namespace

TEST_CASE("what is written is read and mapped, whatever its size") {
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
    CHECK(text_of(files().map(path)) == text);
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

TEST_CASE("a mapping survives its move and the replacement of its file") {
  const TempDirectory directory;
  files().create(directory / "a")->write("old");
  files().create(directory / "b")->write("new");
  MappedFile mapped = files().map(directory / "a");
  files().rename(directory / "b", directory / "a");
  MappedFile moved = std::move(mapped);
  CHECK(text_of(moved) == "old");
  moved = files().map(directory / "a");
  CHECK(text_of(moved) == "new");
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
      {"read", root, "Is a directory", [&] { files().read(directory.path()); }},
      {"open", at_missing, "No such file or directory", [&] { files().map(missing); }},
      {"map", root, "Is a directory", [&] { files().map(directory.path()); }},
  };
  for (const Case& c : cases) {
    const std::string message = message_of<FileError>(c.run);
    INFO(message);
    CHECK_THAT(message, ContainsSubstring(std::string(c.call) + ": '" + c.path + "'"));
    CHECK_THAT(message, ContainsSubstring(c.reason));
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("a full disk is an error of the write") {
  if (skip_if(!files().exists("/dev/full"), "this system has no /dev/full")) return;
  const auto file = files().append("/dev/full");
  CHECK_THAT(message_of<FileError>([&] { file->write("x"); }),
             ContainsSubstring("write: '/dev/full': No space left on device"));
}

TEST_CASE("writes that are interrupted or cut short go on until everything is written") {
  const TempDirectory directory;
  const auto pipe = directory / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  struct sigaction action{}, before{};
  action.sa_handler = [](int) {};  // without SA_RESTART, so that calls return early
  REQUIRE(::sigaction(SIGUSR1, &action, &before) == 0);

  std::string text(std::size_t{1} << 20, ' '), received;
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7 >> 5);
  std::thread reader([&, writer = ::pthread_self()] {
    const int fd = ::open(pipe.c_str(), O_RDONLY);
    char chunk[5000];
    for (ssize_t got = 0; (got = ::read(fd, chunk, sizeof(chunk))) > 0;) {
      received.append(chunk, static_cast<std::size_t>(got));
      ::pthread_kill(writer, SIGUSR1);
    }
    ::close(fd);
  });
  const auto file = files().append(pipe);
  file->write(text);
  file->close();
  reader.join();
  ::sigaction(SIGUSR1, &before, nullptr);
  CHECK((received == text));
}
