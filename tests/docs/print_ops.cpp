// print_ops ROOT: docs/ops.md on the standard output; print_ops ROOT nn: docs/nn.md.
#include <cstdio>
#include <exception>
#include <string_view>

#include "tests/docs/nn_page.h"
#include "tests/docs/ops_page.h"

int main(int argc, char** argv) try {
  const char* root = argc > 1 ? argv[1] : ".";
  const bool nn = argc > 2 && std::string_view(argv[2]) == "nn";
  std::fputs((nn ? sherd::test::nn_page(root) : sherd::test::ops_page(root)).c_str(), stdout);
} catch (const std::exception& e) {
  std::fprintf(stderr, "print_ops: %s\n", e.what());
  return 1;
}
