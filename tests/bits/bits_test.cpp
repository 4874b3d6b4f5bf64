// What the library's own kernels compute has the bits that are stored beside this file, on whatever processor
// and with whatever C library. After a change that means to change them, bits_test "[write]" writes them
// anew.
#include "tests/bits/bits.h"

#include <fstream>
#include <map>

#include "runtime/ops/list.h"
#include "tests/catch.h"
#include "tests/source_root.h"

using namespace sherd;
using namespace sherd::test;

namespace {

const std::string path = std::string(source_root) + "/tests/bits/digests.txt";

std::map<std::string, std::string> stored() {
  std::ifstream file(path);
  std::map<std::string, std::string> lines;
  for (std::string line; std::getline(file, line);) {
    const std::size_t end = line.rfind(':');
    lines[line.substr(0, end)] = line.substr(end + 1);
  }
  return lines;
}

}  // namespace

TEST_CASE("bits: every kernel but products gives the stored bits, on every processor", "[one thread]") {
  std::map<std::string, std::string> expected = stored();
  for (const BitsLine& line : all_bits()) {
    INFO(line.name);
    const auto found = expected.find(line.name);
    CHECK(found != expected.end());
    if (found == expected.end()) continue;
    CHECK(line.digests == found->second);
    expected.erase(found);
  }
  for (const auto& [name, digests] : expected) {
    INFO("stored and not computed: " << name);
    CHECK(digests.empty());
  }
  ops::for_each_structural([&]<class O>() {
    INFO(O::name << " was in no line");
    const std::string name(O::name);
    CHECK((ops_in_bits().contains(name) || products().contains(name)));
  });
}

TEST_CASE("bits: the file is written anew", "[.write]") {
  std::ofstream file(path);
  for (const BitsLine& line : all_bits()) file << line.name << ":" << line.digests << "\n";
  CHECK(file.flush().good());
}
