// How cases call ops: what reads their arguments, and the tables of calls that stand in files of their own.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "runtime/ops.h"
#include "tests/golden/golden.h"

namespace sherd::test {

using nlohmann::json;
using TensorList = std::vector<Tensor>;
using Run = std::function<Tensors(const json& args, const TensorList& in)>;
using Runs = std::map<std::string, Run>;

/// Where cases run.
extern Device place;

inline std::int64_t integer(const json& args, const char* key) { return args.at(key).get<std::int64_t>(); }
inline double number(const json& args, const char* key) { return to_number(args.at(key)); }
inline Keep keep(const json& args) { return args.value("keepdim", false) ? Keep::dims : Keep::drop; }
inline TensorOptions options_of(const json& args) { return {to_dtype(args.at("dtype")), place}; }

inline Shape shape_of(const json& args, const char* key) {
  Shape shape;
  if (args.contains(key)) {
    for (const json& size : args.at(key)) shape.push_back(size.get<std::int64_t>());
  }
  return shape;
}

inline Tensor optional_input(const TensorList& in, std::size_t i) { return i < in.size() ? in[i] : Tensor(); }

inline Tensors outputs(const std::vector<Tensor>& tensors) {
  Tensors out;
  for (const Tensor& tensor : tensors) out.push_back(tensor);
  return out;
}

inline Reduction reduction_of(const json& args) {
  const std::string name = args.at("reduction");
  return name == "mean" ? Reduction::mean : name == "sum" ? Reduction::sum : Reduction::none;
}

Runs indexing_runs();
Runs statistics_runs();
Runs losses_runs();
Runs networks_runs();
Runs images_runs();
Runs compositions_runs();

}  // namespace sherd::test
