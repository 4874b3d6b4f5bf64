// The flat parameter: what lies where in it, what a range of it holds, and what it refuses.
#include "shard/flat_param_handle.h"

#include "nn/layers.h"
#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;
using namespace sherd::shard;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Three layers; the last shares the weight of the first.
struct Tied final : nn::Layer<Tied> {
  nn::Linear first{3, 3}, second{3, 5, {nn::Bias::no}}, third{3, 3};
  Tied() { nn::tie(first.weight, third.weight); }
  Tensor forward(const Tensor& x) const { return third(first(x)); }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("third", third);
  }
};

/// One parameter of a dtype that nobody trains beside one that somebody does.
struct Counted final : nn::Layer<Counted> {
  nn::Linear layer{2, 2};
  nn::Param count{zeros({1}, {i64}), false};
  Tensor forward(const Tensor& x) const { return layer(x); }
  void visit(auto&& on) {
    on("layer", layer);
    on("count", count);
  }
};

FlatParamHandle handle_of(const nn::Module& module, FlatParamOptions options = {}) {
  return {module.parameters(), module, options};
}

/// What a plain walk over the layout says that the flat parameter holds.
std::vector<float> by_hand(const FlatParamHandle& handle) {
  std::vector<float> flat(static_cast<std::size_t>(handle.numel()), 42);
  for (std::size_t i = 0; i < handle.parameters().size(); ++i) {
    const auto values = handle.parameters()[i].local().to_vector<float>();
    const std::int64_t offset = handle.partition().span(static_cast<int>(i)).offset;
    std::ranges::copy(values, flat.begin() + offset);
  }
  return flat;
}

}  // namespace

TEST_CASE("a shared parameter lies once, under its first name") {
  const Tied model;
  const FlatParamHandle handle = handle_of(model);
  CHECK(handle.names() ==
        std::vector<std::string>{"first.weight", "first.bias", "second.weight", "third.bias"});
  CHECK(handle.ties() == std::vector<FlatParamHandle::Tie>{{"third.weight", "first.weight"}});
  CHECK(handle.numel() == model.parameter_count());
}

TEST_CASE("the order is the walk's, not the list's") {
  const Tied model;
  std::vector<nn::Parameter> some = model.parameters();
  std::ranges::reverse(some);
  some.pop_back();  // first.weight, and with it the tie
  const FlatParamHandle handle(some, model);
  CHECK(handle.names() == std::vector<std::string>{"first.bias", "second.weight", "third.bias"});
  CHECK(handle.ties().empty());
}

TEST_CASE("the flat tensor holds the values, and 42 where parameters are aligned") {
  Tied model;
  for (const bool use_orig_params : {false, true})
    for (const int ranks : {1, 2, 3, 4, 7}) {
      INFO(use_orig_params << ", " << ranks << " ranks");
      const FlatParamHandle handle = handle_of(model, {.ranks = ranks, .use_orig_params = use_orig_params});
      if (use_orig_params)
        CHECK(handle.numel() == handle.partition().gathered_numel());
      else
        CHECK(handle.numel() == model.parameter_count());
      CHECK(handle.flat().to_vector<float>() == by_hand(handle));
      CHECK_FALSE(handle.flat().requires_grad());
    }
}

TEST_CASE("the compute dtype aligns, the stored one stays") {
  Tied model;
  const auto second = [](const FlatParamHandle& handle) { return handle.partition().span(1).offset; };
  CHECK(second(handle_of(model, {.use_orig_params = true})) == 12);
  const FlatParamHandle mixed = handle_of(model, {.param_dtype = f16, .use_orig_params = true});
  CHECK(second(mixed) == 16);
  CHECK(mixed.dtype() == f32);
  CHECK(mixed.flat().dtype() == f32);
  CHECK(second(handle_of(model, {.param_dtype = f16})) == 9);
  model.to(f64);
  CHECK(second(handle_of(model, {.use_orig_params = true})) == 10);
}

TEST_CASE("the metadata of all ranks cover every parameter once, as the layout cuts it") {
  const Tied model;
  for (const bool use_orig_params : {false, true})
    for (const int ranks : {1, 2, 3, 4, 5, 8}) {
      const FlatParamHandle handle = handle_of(model, {.ranks = ranks, .use_orig_params = use_orig_params});
      const Partition& partition = handle.partition();
      std::vector<std::int64_t> next(handle.names().size());
      for (int rank = 0; rank < ranks; ++rank) {
        const std::int64_t start = rank * partition.shard_numel(), end = start + partition.shard_numel() - 1;
        const std::vector<FlatShardEntry> entries = handle.shard_metadata(start, end);
        std::size_t at = 0;
        for (int p = 0; p < partition.parameters(); ++p) {
          INFO(use_orig_params << ", rank " << rank << " of " << ranks << ", parameter " << p);
          const OwnedPart part = partition.part(p, rank);
          if (part.numel == 0) continue;
          REQUIRE(at < entries.size());
          const auto i = static_cast<std::size_t>(p);
          const Shape& shape = handle.parameters()[i].shape();
          CHECK(entries[at] == FlatShardEntry{handle.names()[i], shape, shape.numel(), part.in_parameter,
                                              part.in_parameter + part.numel - 1, part.in_shard});
          CHECK(entries[at].first == next[i]);
          next[i] = entries[at++].last + 1;
        }
        CHECK(at == entries.size());
      }
      for (std::size_t i = 0; i < next.size(); ++i) CHECK(next[i] == handle.parameters()[i].numel());
    }
}

TEST_CASE("both bounds of a range are inclusive") {
  const Tied model;
  const FlatParamHandle handle = handle_of(model);  // 9, 3, 15, 3
  CHECK(handle.shard_metadata(8, 8) == std::vector<FlatShardEntry>{{"first.weight", {3, 3}, 9, 8, 8, 0}});
  CHECK(handle.shard_metadata(8, 9) ==
        std::vector<FlatShardEntry>{{"first.weight", {3, 3}, 9, 8, 8, 0}, {"first.bias", {3}, 3, 0, 0, 1}});
  CHECK(handle.shard_metadata(29, 99) == std::vector<FlatShardEntry>{{"third.bias", {3}, 3, 2, 2, 0}});
  CHECK(handle.shard_metadata(30, 99).empty());
}

TEST_CASE("a flat parameter refuses what cannot be one tensor") {
  Tied model;
  CHECK(test::message_of<ValueError>([&] { FlatParamHandle({}, model); }) ==
        "Cannot construct a FlatParamHandle with an empty parameter list");
  CHECK_THAT(test::message_of<ValueError>([&] { FlatParamHandle(Tied().parameters(), model); }),
             ContainsSubstring("4 parameters were given, 0 of them in the Tied"));
  CHECK_THAT(test::message_of<DTypeError>([&] { handle_of(Counted()); }),
             ContainsSubstring("'count' is i64"));

  model.second.to(f16);
  CHECK_THAT(test::message_of<DTypeError>([&] { handle_of(model); }),
             ContainsSubstring("'first.weight' is f32 and 'second.weight' is f16"));
  model.second.to(f32);
  model.second.to(Device::cpu(1));
  CHECK_THAT(test::message_of<DeviceError>([&] { handle_of(model); }),
             ContainsSubstring("'first.weight' is on cpu:0 and 'second.weight' on cpu:1"));
  model.second.to(Device::cpu());

  model.second.set_requires_grad(false);
  CHECK_THAT(
      test::message_of<ValueError>([&] { handle_of(model); }),
      ContainsSubstring("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"));
  CHECK_NOTHROW(handle_of(model, {.use_orig_params = true}));
  model.set_requires_grad(false);
  CHECK_NOTHROW(handle_of(model));
}
