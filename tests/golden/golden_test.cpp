// Every op against what PyTorch answers: values and gradients, with dense and with strided inputs.
#include "tests/golden/golden.h"

#include <functional>
#include <set>

#include "autograd/autograd.h"
#include "nn/functional.h"
#include "runtime/ops.h"
#include "tests/catch.h"

namespace sherd::test {
namespace {

using nlohmann::json;
using Run = std::function<Tensors(const json& args, const std::vector<Tensor>& in)>;
using Runs = std::map<std::string, Run>;

Shape shape_of(const json& args, const char* key) {
  Shape shape;
  for (const json& size : args.at(key)) shape.push_back(size.get<std::int64_t>());
  return shape;
}
std::int64_t integer(const json& args, const char* key) { return args.at(key).get<std::int64_t>(); }
double number(const json& args, const char* key) { return to_number(args.at(key)); }
bool flag(const json& args, const char* key) { return args.at(key).get<bool>(); }
TensorOptions options_of(const json& args) { return {.dtype = to_dtype(args.at("dtype"))}; }

Tensor input(const std::vector<Tensor>& in, std::size_t i) { return i < in.size() ? in[i] : Tensor(); }

/// A function of one tensor.
Run unary(Tensor (*op)(const Tensor&)) {
  return [op](const json&, const std::vector<Tensor>& in) { return Tensors{op(in.at(0))}; };
}
