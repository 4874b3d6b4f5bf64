// Runs a fuzz target over the files of its corpus, so that what fuzzing once found is tested by every build.
//   replay FOLDER...
//   replay --random CASES SEED    so many random inputs beside, where no fuzzer is at hand
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/io/file_system.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

/// Inputs of random length and bytes; the last line names the one that broke it.
int run_random(long cases, unsigned long seed) {
  std::vector<std::uint8_t> bytes;
  for (long i = 0; i < cases; ++i) {
    std::mt19937_64 random(seed + static_cast<unsigned long>(i));
    bytes.resize(1 + random() % 256);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    if (i % 1000 == 0) {
      std::printf("from seed %lu\n", seed + static_cast<unsigned long>(i));
      std::fflush(stdout);
    }
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%ld inputs\nsherd-tests: 1 passed, 0 failed, 0 skipped\n", cases);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::string_view(argv[1]) == "--random")
    return run_random(std::stol(argv[2]), std::stoul(argv[3]));
  sherd::FileSystem& files = sherd::posix_file_system();
  int count = 0;
  for (int i = 1; i < argc; ++i) {
    const std::filesystem::path folder = argv[i];
    for (const std::string& name : files.list(folder)) {
      std::printf("%s\n", name.c_str());  // the last line names the file that broke it
      std::fflush(stdout);
      const std::string bytes = files.read(folder / name);
      LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
      ++count;
    }
  }
  std::printf("sherd-tests: %d passed, %d failed, 0 skipped\n", count > 0, count == 0);
  return count == 0 ? 1 : 0;
}
