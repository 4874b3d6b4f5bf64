// weave OUTPUT ROOT PAGE...: the source that compiles and runs the C++ of the pages, named from ROOT.
#include "tests/docs/weave.h"

#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>

int main(int argc, char** argv) try {
  std::vector<sherd::test::Page> pages;
  for (int i = 3; i < argc; ++i) {
    const std::filesystem::path page = argv[i];
    std::ifstream in(page);
    if (!in) throw std::runtime_error(page.string() + ": cannot be read");
    pages.push_back(sherd::test::parse_page(std::filesystem::relative(page, argv[2]).string(), in));
  }
  std::ofstream out(argc > 1 ? argv[1] : "");
  out << sherd::test::weave(pages);
  if (!out.flush()) throw std::runtime_error("the output cannot be written");
} catch (const std::exception& e) {
  std::fprintf(stderr, "weave: %s\n", e.what());
  return 1;
}
