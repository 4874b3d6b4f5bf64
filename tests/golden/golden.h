// What PyTorch answered: the cases stored beside this file (README.md describes the format), and how to
// compare with them.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/io/safetensors.h"
#include "runtime/tensor.h"

namespace sherd::test {

/// One call of an op: its arguments, inputs, outputs and gradients.
struct GoldenCase {
  std::string name, op;
  nlohmann::json args;
  /// Multiplies the tolerances of `difference`; 0 asks for equal bits.
  double tolerance = 1;
  std::map<std::string, Tensor> tensors;

  bool has(const std::string& key) const { return tensors.contains(key); }
  /// The tensor `key`, or an empty handle.
  Tensor find(const std::string& key) const;
  /// The tensors `prefix`0, `prefix`1, ... without a gap.
  std::vector<Tensor> list(const std::string& prefix) const;
};

/// Path of `area`.safetensors.
std::string golden_path(std::string_view area);

/// All cases of a file, sorted by name. A tensor that belongs to no case is an error (ValueError).
std::vector<GoldenCase> load_goldens(std::string_view area);

/// A number, or one of the strings that stand for what JSON lacks: "inf", "-inf", "nan".
double to_number(const nlohmann::json& value);

/// The dtype of that name ("f32", "bool", ...); ValueError for others.
DType to_dtype(const std::string& name);

/// What an error is measured against: each element's own size, or the largest of the tensor.
enum class Scale { element, largest };

/// Why `actual` is not `expected`: other shape or dtype, or the element that is farthest outside |a - e| <=
/// atol + rtol scale, with the dtype's tolerances times `tolerance`. Empty when they agree. NaN equals NaN.
std::string difference(const Tensor& actual, const Tensor& expected, double tolerance = 1,
                       Scale scale = Scale::element);

/// The same values behind a layout with holes: every stride doubled, and an offset.
Tensor with_holes(const Tensor& tensor);

/// Whether cases can run on cuda:0 here.
bool has_gpu();

}  // namespace sherd::test
