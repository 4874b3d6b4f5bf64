#include "shard/sharded_state.h"

#include <algorithm>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/agree.h"
#include "shard/group.h"
#include "shard/state_source.h"

namespace sherd::shard {
namespace {

/// What ranks hold together. All of them read the same tensors in the same order.
class RanksSource final : public StateSource {
 public:
  RanksSource(const ShardedStateDict& state, const Group& ranks) : ranks_(ranks) {
    for (const ShardedTensor& t : state)
      check<ValueError>(tensors_.emplace(t.name, &t).second, "load_sharded: the state has '{}' twice",
                        t.name);
  }
  std::size_t size() const override { return tensors_.size(); }
  std::optional<Shape> shape(const std::string& name) const override {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? std::nullopt : std::optional(found->second->shape);
  }
  Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) const override {
    const ShardedTensor mine = share_of(*tensors_.at(name), RankOfGroup(ranks_).rank);
    const Tensor whole = empty({mine.shape.numel()}, {mine.values.dtype(), mine.values.device()});
    std::int64_t filled = 0;
    const std::vector<std::int64_t> bounds = everyones_bounds(mine);
    for (std::size_t rank = 0; 2 * rank < bounds.size(); ++rank) {
      const std::int64_t first = bounds[2 * rank], count = bounds[2 * rank + 1];
      if (count == 0) continue;
      const Tensor run = narrow(whole, 0, first, count);
      if (static_cast<int>(rank) == RankOfGroup(ranks_).rank) copy_(run, mine.values);
      if (bounds.size() > 2) ranks_.broadcast(run, static_cast<int>(rank), {.label = name});
      filled += count;
    }
    check<ValueError>(
        filled == whole.numel(),
        "load_sharded: the ranks have {} of the {} elements of '{}'; give the group of all that "
        "hold it",
        filled, whole.numel(), name);
    return clone(narrow(whole, 0, begin, numel));
  }

 private:
  /// Begin and number of each rank's elements.
  std::vector<std::int64_t> everyones_bounds(const ShardedTensor& mine) const {
    const Tensor own = Tensor::from({mine.begin, mine.values.numel()}, {2});
    if (!ranks_.defined()) return own.to_vector<std::int64_t>();
    const Tensor all = empty({ranks_.size(), 2}, {DType::i64});
    ranks_.all_gather(all, own, {.label = mine.name});
    return all.to_vector<std::int64_t>();
  }

  const Group& ranks_;
  std::unordered_map<std::string, const ShardedTensor*> tensors_;
};

}  // namespace

ShardedTensor share_of(const ShardedTensor& t, int rank) {
  ShardedTensor share = t;
  const std::int64_t numel = t.values.numel();
  std::int64_t begin = 0, end = numel;
  if (t.replicas == 0) {
    if (rank > 0) end = 0;
  } else {
    begin = numel * t.replica / t.replicas;
    end = numel * (t.replica + 1) / t.replicas;
  }
  share.begin += begin;
  share.values = narrow(t.values, 0, begin, end - begin);
  return share;
}

WholeSource::WholeSource(std::string_view call, const nn::StateDict& state) {
  for (const auto& [name, tensor] : state)
    check<ValueError>(tensors_.emplace(name, tensor).second, "{}: the state has '{}' twice", call, name);
}

std::optional<Shape> WholeSource::shape(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? std::nullopt : std::optional(found->second.shape());
}

Tensor WholeSource::read(const std::string& name, std::int64_t begin, std::int64_t numel) const {
  const Tensor& whole = tensors_.at(name);
  return clone(narrow(reshape(whole, {whole.numel()}), 0, begin, numel));
}

void load_sharded_state_dict(nn::Module& module, const ShardedStateDict& state, const Group& ranks) {
  std::optional<StagedModel> staged;
  together(ranks, [&] { staged.emplace("load_sharded_state_dict", module, RanksSource(state, ranks)); });
  staged->commit();
}

void load_sharded_optimizer_state(nn::Optimizer& optimizer, const ShardedStateDict& state,
                                  const Group& ranks) {
  const NoGrad guard;
  nn::StateDict staged;
  together(ranks, [&] { staged = staged_optimizer_state(optimizer, RanksSource(state, ranks)); });
  optimizer.load_state_dict(std::move(staged));
}

}  // namespace sherd::shard
