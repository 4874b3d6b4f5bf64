// Ways to shard a net whose parameters keep their names, and what each rank has of them.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "shard/fsdp.h"
#include "tests/sanitizer.h"
#include "tests/shard/twins.h"

namespace sherd::test {

/// A way to shard a net whose parameters keep their names.
struct Way {
  shard::GroupLayout layout;
  shard::ShardingStrategy strategy;
  int ranks;

  bool flat() const { return layout == shard::GroupLayout::flat; }
  /// Whether every rank has all of each parameter.
  bool whole() const { return ranks == 1 || strategy == shard::ShardingStrategy::no_shard; }
  /// Whether what a forward gathers stays until the backward.
  bool keeps() const { return strategy != shard::ShardingStrategy::full_shard; }
  void wrap(Net& net) const {
    if (!flat()) return shard_blocks_and_rest(net, {.strategy = strategy});
    const shard::FullyShardedDataParallel handle(
        net, {.strategy = strategy, .auto_wrap = shard::wrap_classes({"Block"}), .use_orig_params = true});
  }
};

/// Runs `body(world, way)` on worlds of 1 to 4.
template <class F>
void on_ways(F&& body) {
  using enum shard::ShardingStrategy;
  for (const int ranks : worlds())
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard}) {
        const Way way{layout, strategy, ranks};
        INFO(ranks << " ranks, " << (way.flat() ? "flat" : "per parameter") << ", strategy "
                   << static_cast<int>(strategy));
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, way); }));
      }
}

inline Net uneven() { return Net({.uneven = true}); }

inline bool is_bias(std::string_view name) { return name.ends_with("bias"); }

/// The parameters whose name fits, in walk order.
template <class F>
std::vector<nn::Parameter> parameters_of(const nn::Module& module, F&& fits) {
  std::vector<nn::Parameter> found;
  for (const nn::NamedParameter& p : module.named_parameters())
    if (fits(p.name)) found.push_back(p.parameter);
  return found;
}

/// This rank's part of each parameter of a net, by name.
class Parts {
 public:
  Parts(Net& net, const Way& way, int rank) : way_(way) {
    if (way_.whole()) return;
    for (const shard::GroupReport& group : shard::groups_of(net))
      for (const shard::ParameterReport& p : group.parameters) {
        const std::string name = group.label.empty() ? p.name : group.label + "." + p.name;
        Range& range = ranges_[name];
        for (int r = 0; r <= rank; ++r) {
          range.begin += range.numel;
          range.numel = p.owned_numels[static_cast<std::size_t>(r)];
        }
      }
  }
  bool empty(const std::string& name) const { return !way_.whole() && ranges_.at(name).numel == 0; }
  Tensor of(const std::string& name, const Tensor& whole) const {
    if (way_.whole()) return whole;
    const auto [begin, numel] = ranges_.at(name);
    const Tensor part = narrow(flatten(whole), 0, begin, numel);
    if (way_.flat()) return part;
    Shape shape = whole.shape();
    const std::int64_t row = whole.numel() / shape[0];
    shape[0] = numel / row;
    return reshape(part, shape);
  }

 private:
  struct Range {
    std::int64_t begin = 0, numel = 0;
  };
  const Way& way_;
  std::map<std::string, Range> ranges_;
};

inline void expect_same(const Tensor& actual, const Tensor& expected, std::string_view name,
                        std::string_view when) {
  expect(actual.shape() == expected.shape(), "{}: '{}' has shape {} instead of {}", when, name,
         actual.shape(), expected.shape());
  expect(actual.to_vector<float>() == expected.to_vector<float>(), "{}: values of '{}'", when, name);
}

}  // namespace sherd::test
