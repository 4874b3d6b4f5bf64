// Runs a fuzz target over the files of its corpus, so that what fuzzing once found is tested by every build.
//   replay FOLDER...
#include <cstdint>
#include <cstdio>
#include <string>

#include "runtime/io/file_system.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
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
