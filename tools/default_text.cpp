#include "tools/default_text.h"

#include <filesystem>
#include <fstream>

#include "runtime/error.h"

namespace sherd::tools {
namespace {

namespace fs = std::filesystem;

/// The paths that the build wrote into a file beside the program; none for an installed program.
std::vector<std::string> listed_by_build(const fs::path& program) {
  std::ifstream in(program.parent_path() / "default_text.list");
  std::vector<std::string> paths;
  for (std::string line; std::getline(in, line);) paths.push_back(line);
  return paths;
}

}  // namespace

std::vector<std::string> default_text() {
  const fs::path program = fs::read_symlink("/proc/self/exe");
  if (std::vector<std::string> paths = listed_by_build(program); !paths.empty()) return paths;
  const fs::path installed = (program.parent_path() / SHERD_TEXT_FROM_PROGRAM).lexically_normal();
  check<ValueError>(fs::exists(installed),
                    "data: the text of this project is not at '{}'; name files or folders with --data",
                    installed.string());
  return {installed.string()};
}

}  // namespace sherd::tools
