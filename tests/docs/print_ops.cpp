// print_ops ROOT: docs/ops.md on the standard output.
#include <cstdio>
#include <exception>

#include "tests/docs/ops_page.h"

int main(int argc, char** argv) try {
  std::fputs(sherd::test::ops_page(argc > 1 ? argv[1] : ".").c_str(), stdout);
} catch (const std::exception& e) {
  std::fprintf(stderr, "print_ops: %s\n", e.what());
  return 1;
}
