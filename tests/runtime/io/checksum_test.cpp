#include "runtime/io/checksum.h"

#include <span>

#include "runtime/error.h"
#include "runtime/shown.h"
#include "tests/catch.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("a checksum is XXH3's, and of every byte") {
  CHECK(checksum_of({}) == "2d06800538d394c2");  // as `xxhsum -H3` says of an empty file
  for (const std::size_t size : {1, 3, 16, 17, 128, 129, 240, 241, 5000}) {
    std::vector<std::byte> bytes(size, std::byte{7});
    const std::string whole = checksum_of(bytes);
    CHECK(whole.size() == checksum_digits);
    for (std::byte& byte : bytes) {
      byte ^= std::byte{0x10};
      CHECK(checksum_of(bytes) != whole);
      byte ^= std::byte{0x10};
    }
  }
}

TEST_CASE("a sealed text shows every change but that of its marker") {
  const std::string marker = "sum=";
  std::string text = "before sum=0000000000000000 after sum=1111111111111111";
  CHECK(seal_of(text, marker) == Seal::broken);
  seal(text, marker);
  CHECK(seal_of(text, marker) == Seal::whole);
  CHECK(text.starts_with("before sum="));
  CHECK(text.ends_with(" after sum=1111111111111111"));
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string changed = text;
    changed[at] = '#';
    const bool in_marker = at >= 7 && at < 7 + marker.size();
    if (!in_marker) CHECK(seal_of(changed, marker) == Seal::broken);
    CHECK(seal_of(changed, marker) != Seal::whole);
  }
  CHECK(seal_of("nothing", marker) == Seal::none);
  CHECK(seal_of("sum=123", marker) == Seal::none);
}

TEST_CASE("what is shown is one line of whole characters, and not long") {
  CHECK(shown("plain") == "plain");
  CHECK(shown("a\nb\x7f\x1b[0m") == "a?b??[0m");
  std::string long_text;
  for (int i = 0; i < 1000; ++i) long_text += "é";
  for (std::size_t limit = 1; limit < 20; ++limit) {
    const std::string text = shown(long_text, limit);
    CHECK(text.ends_with("..."));
    CHECK(text.size() <= limit + 3);
    CHECK(text.size() % 2 == 1);  // characters of two bytes, and three dots
  }
}

TEST_CASE("every error is one line, whatever it tells of, and keeps both of its ends") {
  const std::string text = "open: '" + std::string(100'000, 'x') + "\n': \x1b no";
  const std::string message = message_of<FileError>([&] { fail<FileError>("{}", text); });
  CHECK(message.size() < 2100);
  CHECK(message.starts_with("open: 'xxx"));
  CHECK(message.ends_with("x ': ? no"));
  CHECK(message.find('\n') == std::string::npos);
  CHECK_THAT(message, ContainsSubstring("x...x"));
  const std::string line = "short ones stay as they are: é ü";
  CHECK(message_of<ValueError>([&] { fail<ValueError>("{}", line); }) == line);
}
