#include "tools/among_ranks.h"

#include <nlohmann/json.hpp>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::tools {
namespace {

using nlohmann::json;

/// Names, dtypes and shapes, so that ranks that never saw the state make room for it.
std::string contents_of(const nn::StateDict& state) {
  json list = json::array();
  for (const auto& [name, tensor] : state) {
    const Shape& shape = tensor.shape();
    list.push_back({name, static_cast<int>(tensor.dtype()), std::vector(shape.begin(), shape.end())});
  }
  return list.dump();
}

nn::StateDict room_for(const std::string& contents) {
  nn::StateDict state;
  for (const json& entry : json::parse(contents)) {
    const auto sizes = entry[2].get<std::vector<std::int64_t>>();
    const Shape shape{std::span<const std::int64_t>(sizes)};
    state.emplace_back(entry[0].get<std::string>(), empty(shape, {static_cast<DType>(entry[1].get<int>())}));
  }
  return state;
}

}  // namespace

std::string first_ones(const Group& group, std::string bytes) {
  const Tensor size = Tensor::from({static_cast<std::int64_t>(bytes.size())}, {1});
  group.broadcast(size, 0, {.label = "size"});
  bytes.resize(size.item<std::size_t>());
  if (bytes.empty()) return bytes;
  const Tensor text = from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, DType::u8);
  group.broadcast(text, 0, {.label = "bytes"});
  return bytes;
}

nn::StateDict first_ones(const Group& group, nn::StateDict state) {
  if (group.size() == 1) return state;
  const NoGrad guard;
  const bool first = group.rank() == 0;
  const std::string contents = first_ones(group, first ? contents_of(state) : std::string());
  if (!first) state = room_for(contents);
  for (auto& [name, tensor] : state) {
    tensor = contiguous(tensor);
    group.broadcast(tensor, 0, {.label = name});
  }
  return state;
}

double mean(const Group& group, double value) {
  const Tensor sum = Tensor::scalar(value, {DType::f64});
  group.all_reduce(sum, ReduceOp::average(), {.label = "mean"});
  return sum.item();
}

bool any(const Group& group, bool value) {
  const Tensor most = Tensor::scalar(value ? 1 : 0, {DType::i32});
  group.all_reduce(most, ReduceOp::max(), {.label = "any"});
  return most.item() != 0;
}

std::vector<double> everyones(const Group& group, double value) {
  const Tensor all = empty({group.size()}, {DType::f64});
  group.all_gather(all, Tensor::from({value}, {1}), {.label = "everyone's"});
  return all.to_vector<double>();
}

}  // namespace sherd::tools
