#include "tools/text.h"

#include <cmath>

#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/temp_directory.h"
#include "tests/tools/small_run.h"

using namespace sherd;
using namespace sherd::test;
using tools::Text;

namespace {

Text read(const std::vector<std::string>& paths) { return tools::read_text(paths, posix_file_system()); }
std::string as_string(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

TEST_CASE("the last tenth of every file is for validation") {
  const TempDirectory folder;
  std::string train, validation;
  std::vector<std::string> paths;
  for (const std::size_t size : {1, 9, 10, 11, 19, 100, 1234}) {
    const std::string content = small_text(size);
    paths.push_back((folder / std::to_string(size)).string());
    write_file(paths.back(), content);
    train += content.substr(0, size * 9 / 10);
    validation += content.substr(size * 9 / 10);
  }
  const Text text = read(paths);
  CHECK(as_string(text.train) == train);
  CHECK(as_string(text.validation) == validation);
  CHECK(text.files == static_cast<std::int64_t>(paths.size()));
}

TEST_CASE("a folder gives its text files in the order of their paths") {
  const TempDirectory folder;
  std::filesystem::create_directories(folder / "b" / "deep");
  write_file(folder / "c", "0123456789");
  write_file(folder / "a", "abcdefghij");
  write_file(folder / "b" / "deep" / "x", "ABCDEFGHIJ");
  write_file(folder / ".hidden", "hidden");
  write_file(folder / "empty", "");
  write_file(folder / "binary", std::string("\0\1\2", 3));
  std::filesystem::create_directory_symlink(folder.path(), folder / "loop");
  const Text text = read({folder.path().string()});
  CHECK(as_string(text.train) == "abcdefghiABCDEFGHI012345678");
  CHECK(as_string(text.validation) == "jJ9");
}

TEST_CASE("a file that is named is read whatever it holds") {
  const TempDirectory folder;
  const std::string content("\0\1\2\3\4\5\6\7\x80\xff", 10);
  write_file(folder / ".binary", content);
  std::filesystem::create_symlink(folder / ".binary", folder / "link");
  CHECK(as_string(read({(folder / "link").string()}).train) == content.substr(0, 9));
}

TEST_CASE("the digest tells texts apart") {
  const TempDirectory folder;
  const auto digest = [&](const std::string& a, const std::string& b) {
    write_file(folder / "a", a);
    write_file(folder / "b", b);
    return read({(folder / "a").string(), (folder / "b").string()}).digest;
  };
  const std::uint64_t first = digest("some text", "more");
  CHECK(first == digest("some text", "more"));
  CHECK(first != digest("some texT", "more"));
  CHECK(first != digest("some tex", "tmore"));
  CHECK(first != digest("more", "some text"));
}

TEST_CASE("the bigram model's loss is the one of its probabilities") {
  Text text;
  text.train = {1, 2, 1, 2, 1, 3};
  text.validation = {1, 2, 2, 9};
  // Pairs: 1 2 twice, 2 1 twice, 1 3 once; one is added to each of 256.
  const double expected = -(std::log(3.0 / 259) + std::log(1.0 / 258) + std::log(1.0 / 258)) / 3;
  CHECK(tools::bigram_loss(text) == Approx(expected).epsilon(1e-12));
}
