// Gradients that are recorded for a second derivative beside those that are not.
#include <fstream>
#include <set>
#include <sstream>

#include "autograd/autograd.h"
#include "runtime/ops.h"
#include "tests/runtime/op_cases.h"
#include "tests/source_root.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// What docs/edges.md says has other bits: the words in backticks in the list of its section.
std::set<std::string> said() {
  std::ifstream file(std::string(source_root) + "/docs/edges.md");
  std::set<std::string> names;
  bool here = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) here = line == "## Recorded gradients";
    if (!here || !line.starts_with("- ")) continue;
    std::istringstream in(line);
    std::string word;
    for (bool inside = false; std::getline(in, word, '`'); inside = !inside)
      if (inside) names.insert(word);
  }
  return names;
}

/// What the page calls a case: the first word of its name; what a norm goes round is that norm's.
std::string family_of(const std::string& name) {
  return name.find("normalised") != std::string::npos ? "layer_norm" : name.substr(0, name.find_first_of(" ,"));
}

/// Gradients of the first output, plain or recorded.
std::vector<Tensor> gradients_of(const Case& c, std::span<const Tensor> in, bool create_graph) {
  std::vector<Tensor> all, leaves;
  for (const Tensor& x : in) {
    all.push_back(x.detach());
    if (is_floating(x.dtype())) leaves.push_back(all.back().requires_grad_());
  }
  const Tensor y = run(c, all)[0];
  return grad(y, leaves, to(numbers(y.shape(), f16, 5), y.dtype()), {.create_graph = create_graph});
}

}  // namespace

TEST_CASE("recorded gradients: all but those that the page names have the bits of plain ones") {
  const std::set<std::string> named = said();
  std::set<std::string> other;
  for_each_case_and_dtype([&](const Case& c, DType dtype) {
    if (!c.gradients || !c.second_derivative || !is_floating(dtype)) return;
    for (const std::vector<Shape>& shapes : {small_shapes(c), large_shapes(c)}) {
      const std::vector<Tensor> in = draw(c, dtype, shapes);
      const std::vector<Tensor> plain = gradients_of(c, in, false), recorded = gradients_of(c, in, true);
      for (std::size_t i = 0; i < plain.size(); ++i)
        if (plain[i].defined() && recorded[i].defined() && !same_bits(plain[i], recorded[i]))
          other.insert(family_of(c.name));
    }
  });
  for (const std::string& name : other) {
    INFO(name);
    CHECK(named.contains(name));
  }
  for (const std::string& name : named) {
    INFO(name);
    CHECK(other.contains(name));
  }
}
