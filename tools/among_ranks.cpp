#include "tools/among_ranks.h"

#include <algorithm>
#include <iterator>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::tools {
std::string first_ones(const Group& group, std::string bytes) {
  const Tensor size = Tensor::from({static_cast<std::int64_t>(bytes.size())}, {1});
  group.broadcast(size, 0, {.label = "size"});
  bytes.resize(size.item<std::size_t>());
  if (bytes.empty()) return bytes;
  const Tensor text = from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, DType::u8);
  group.broadcast(text, 0, {.label = "bytes"});
  return bytes;
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

std::vector<double> shared_out(const Group& group, std::int64_t count,
                               const std::function<double(std::int64_t)>& value_of) {
  std::vector<double> values;
  while (std::ssize(values) < count) {
    const std::int64_t mine = std::ssize(values) + group.rank();
    std::ranges::copy(everyones(group, value_of(std::min(mine, count - 1))), std::back_inserter(values));
  }
  values.resize(static_cast<std::size_t>(count));
  return values;
}

}  // namespace sherd::tools
