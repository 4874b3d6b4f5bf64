// What sharding refuses: models on meta that are asked for values, options that mean nothing, objects that
// were moved from; and in which dtype buffers are saved.
#include <sherd.h>

#include <map>

#include "shard/data_parallel.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using sherd::test::expect;

namespace {

constexpr shard::GroupLayout layouts[] = {shard::GroupLayout::flat, shard::GroupLayout::per_parameter};

struct Normed final : nn::Layer<Normed> {
  nn::Linear linear{4, 6};
  nn::BatchNorm1d norm{6};
  Tensor forward(const Tensor& x) { return norm(linear(x)); }
  void visit(auto&& on) {
    on("linear", linear);
    on("norm", norm);
  }
};

/// One that computes in whatever dtype its buffer has.
struct Shifted final : nn::Layer<Shifted> {
  nn::Linear linear{4, 4};
  nn::Buffer shift{full({4}, 0.1)};
  nn::Buffer scratch{full({4}, 0.1), nn::Persistence::transient};
  Tensor forward(const Tensor& x) { return add(linear(x), sherd::to(shift, f32)); }
  void visit(auto&& on) {
    on("linear", linear);
    on("shift", shift);
    on("scratch", scratch);
  }
};

/// Layers without parameters, which may become more.
struct Offset final : nn::Layer<Offset> {
  nn::Buffer by{full({4}, 0.1)};
  Tensor forward(const Tensor& x) const { return add(x, sherd::to(by, f32)); }
  void visit(auto&& on) { on("by", by); }
};
struct Growing final : nn::Layer<Growing> {
  nn::Linear linear{4, 4};
  nn::ModuleList<Offset> offsets;
  Tensor forward(const Tensor& x) const {
    Tensor y = linear(x);
    for (const Offset& offset : offsets) y = offset(y);
    return y;
  }
  void visit(auto&& on) {
    on("linear", linear);
    on("offsets", offsets);
  }
};

/// The message of the `E` that `call` throws.
template <class E>
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another: ") + error.what();
  }
  return "nothing was thrown";
}

template <class E>
void expect_refusals(const std::map<std::string, std::function<void()>>& calls, const std::string& word) {
  for (const auto& [name, call] : calls) {
    const std::string text = refusal<E>(call);
    expect(text.find(word) != std::string::npos && text.find('\n') == std::string::npos, "{}: '{}'", name,
           text);
  }
}

void fill_with_ones(const std::string&, const Tensor& whole) { fill_(whole, 1); }

}  // namespace

TEST_CASE("a sharded model on meta says materialize, whatever asks it for values") {
  for (int ranks : {1, 2})
    for (shard::GroupLayout layout : layouts)
      for (bool handle : {false, true})
        CHECK_NOTHROW(run_ranks(ranks, [&](World&) {
          Normed net, real;
          net.to(Device::meta());
          if (handle)
            const shard::FullyShardedDataParallel wrapped(net);
          else
            shard::fully_shard(net, {.layout = layout});
          const Tensor x = ones({2, 4});
          expect_refusals<DeviceError>(
              {{"forward", [&] { net(x); }},
               {"to(cpu)", [&] { net.to(Device::cpu()); }},
               {"full_state_dict", [&] { shard::full_state_dict(net); }},
               {"load_full_state_dict", [&] { shard::load_full_state_dict(net, real.state_dict()); }},
               {"gather_whole",
                [&] { shard::gather_whole(net.linear.weight.object(), net.linear.weight.local().detach()); }},
               {"values", [&] { net.parameters()[0].local().to_vector<float>(); }}},
              "materialize()");
          expect_refusals<DeviceError>(
              {{"to meta", [&] { net.materialize(Device::meta(), fill_with_ones); }}}, "materialize()");
          const Tensor shapes = net(empty({2, 4}, {f32, Device::meta()}));
          expect(shapes.shape() == Shape{2, 6}, "shapes on meta");

          const auto gives_up = [](const std::string& name, const Tensor&) {
            if (name == "norm.bias") fail<ValueError>("no values for {}", name);
          };
          expect_refusals<ValueError>({{"materialize", [&] { net.materialize(Device::cpu(), gives_up); }}},
                                      "no values");
          expect_refusals<DeviceError>({{"after that", [&] { net(x); }}}, "materialize()");

          net.materialize(Device::cpu(), fill_with_ones);
          for (const auto& [name, t] : shard::full_state_dict(net))
            for (double v : to(t, f64).to_vector<double>()) expect(v == 1, "{} holds {}", name, v);
          shard::load_full_state_dict(net, real.state_dict());
          expect(net(x).shape() == Shape{2, 6}, "forward");
        }));
}

TEST_CASE("what was sharded together moves together, and a group has one device") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Normed net;
    net.linear.to(Device::meta());
    expect_refusals<DeviceError>({{"fully_shard", [&] { shard::fully_shard(net); }}}, "norm.weight");
    expect(!shard::is_sharded(net), "it was sharded all the same");
    net.norm.to(Device::meta());
    shard::fully_shard(net);
    expect_refusals<StateError>(
        {{"to", [&] { net.linear.to(f64); }},
         {"materialize", [&] { net.linear.materialize(Device::cpu(), fill_with_ones); }}},
        "'weight' was sharded with a module");
    net.materialize(Device::cpu(), fill_with_ones);
    expect_refusals<StateError>({{"to", [&] { net.to(f64, nn::is_batch_norm); }}}, "call it before sharding");
    expect(net.linear.weight.local().dtype() == f32, "nothing was cast");
    net.to(f64);
    expect(net.linear.weight.local().dtype() == f64, "the whole was cast");
  }));
}

TEST_CASE("replicas need values") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    Normed net;
    net.to(Device::meta());
    expect_refusals<DeviceError>(
        {{"data parallel", [&] { static_cast<void>(shard::DataParallel(net, world.group())); }}},
        "materialize()");
    Normed real;
    shard::DataParallel first(real, world.group());
    const shard::DataParallel second = std::move(first);
    expect_refusals<StateError>(
        {{"module", [&] { first.module(); }}, {"no_sync", [&] { const auto guard = first.no_sync(); }}},
        "moved from");
    expect(&second.module() == &real, "the module");
  }));
}

TEST_CASE("modules that were moved from are not sharded, listed or gathered") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    Normed net;
    const Normed kept = std::move(net);
    expect_refusals<StateError>(
        {{"fully_shard", [&] { shard::fully_shard(net); }},
         {"is_sharded", [&] { shard::is_sharded(net); }},
         {"handle", [&] { const shard::FullyShardedDataParallel handle(net); }},
         {"data parallel", [&] { static_cast<void>(shard::DataParallel(net, world.group())); }},
         {"no_sync", [&] { const auto guard = shard::no_sync(net); }},
         {"set_requires_gradient_sync", [&] { shard::set_requires_gradient_sync(net, true); }},
         {"set_reshard_after_backward", [&] { shard::set_reshard_after_backward(net, true); }},
         {"reshard", [&] { shard::reshard(net); }},
         {"groups_of", [&] { shard::groups_of(net); }},
         {"full_state_dict", [&] { shard::full_state_dict(net); }},
         {"load_full_state_dict", [&] { shard::load_full_state_dict(net, {}); }}},
        "moved from");
    const nn::Parameter none[] = {nn::Parameter{}};
    expect_refusals<StateError>({{"gather_whole", [&] { shard::gather_whole({}, ones({1})); }},
                                 {"part_of", [&] { shard::part_of({}, ones({1})); }},
                                 {"clip_grad_norm_", [&] { shard::clip_grad_norm_(none, 1); }}},
                                "empty");
  }));
}

TEST_CASE("reshard_after_forward is true, false or a number of ranks that divides them") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    for (shard::GroupLayout layout : layouts)
      for (int k : {-2, -1, 0, 3}) {
        Normed net;
        expect_refusals<ValueError>(
            {{"fully_shard",
              [&] { shard::fully_shard(net, {.layout = layout, .reshard_after_forward = k}); }}},
            fmt::format("not {}", k));
      }
    for (shard::ShardingStrategy strategy :
         {shard::ShardingStrategy::shard_grad_op, shard::ShardingStrategy::zero1,
          shard::ShardingStrategy::no_shard})
      for (int k : {-1, 0}) {
        Normed net;
        expect_refusals<ValueError>(
            {{"fully_shard",
              [&] { shard::fully_shard(net, {.strategy = strategy, .reshard_after_forward = k}); }}},
            fmt::format("not {}", k));
      }
    for (const shard::ReshardAfterForward& good : {shard::ReshardAfterForward(true), {false}, {1}, {2}}) {
      Normed net;
      shard::fully_shard(net, {.reshard_after_forward = good});
      expect(net(ones({2, 4})).shape() == Shape{2, 6}, "forward");
    }
  }));
}

TEST_CASE("buffers that compute in another dtype are saved in their own, before and after they were cast") {
  for (shard::GroupLayout layout : layouts)
    for (DType computes : {bf16, f16, f64})
      CHECK_NOTHROW(run_ranks(2, [&](World&) {
        Shifted net;
        shard::fully_shard(net.linear, {.layout = layout});
        shard::fully_shard(net, {.layout = layout, .mixed_precision = {.buffer_dtype = computes}});
        const auto check_saved = [&](DType used, const char* when) {
          expect(net.shift.tensor().dtype() == used, "{}: it computes in {}", when,
                 name_of(net.shift.tensor().dtype()));
          const auto saved = [&](const nn::StateDict& state) {
            for (const auto& [name, t] : state)
              if (name == "shift") {
                expect(t.dtype() == f32, "{}: saved in {}", when, name_of(t.dtype()));
                expect(t.to_vector<float>() == full({4}, 0.1).to_vector<float>(), "{}: values", when);
                return;
              }
            expect(false, "{}: the state has no buffer", when);
          };
          saved(shard::full_state_dict(net));
          saved(net.state_dict());
          Shifted copy = net.clone();
          saved(shard::full_state_dict(copy));
        };
        check_saved(f32, "before");
        net(ones({2, 4}));
        check_saved(computes, "after");
        shard::load_full_state_dict(net, shard::full_state_dict(net));
        check_saved(computes, "after loading");
        net.load_state_dict(net.state_dict());
        check_saved(computes, "after loading parts");
        net.to(Device::cpu(1));
        net.to(Device::cpu());
        check_saved(computes, "after moving");
        for (const auto& [name, t] : shard::full_state_dict(net)) expect(name != "scratch", "transient");
      }));
}

TEST_CASE("buffers of layers that are put in later are cast too, and go with a module that is moved") {
  for (shard::GroupLayout layout : layouts)
    CHECK_NOTHROW(run_ranks(2, [&](World&) {
      auto first = std::make_unique<Growing>();
      shard::fully_shard(*first, {.layout = layout, .mixed_precision = {.buffer_dtype = bf16}});
      const Tensor x = ones({2, 4});
      (*first)(x);
      Growing net = std::move(*first);
      first.reset();
      for (const int count : {1, 2, 3}) {
        net.offsets.emplace_back();
        net(x);
        for (const nn::NamedBuffer& b : net.named_buffers())
          expect(b.tensor.dtype() == bf16, "{} of {} is in {}", b.name, count, name_of(b.tensor.dtype()));
      }
    }));
}

TEST_CASE("whole values where parts go name the call that takes them") {
  for (const int ranks : {2, 3, 4})
    for (const bool handle : {false, true})
      for (shard::GroupLayout layout : layouts)
        CHECK_NOTHROW(run_ranks(ranks, [&](World&) {
          nn::Linear by_hand(4, 8), net(4, 8);
          if (handle)
            const shard::FullyShardedDataParallel wrapped(net);
          else
            shard::fully_shard(net, {.layout = layout});
          nn::Adam whole(by_hand.parameters()), adam(net.parameters());
          const Tensor x = ones({2, 4});
          sum(by_hand(x)).backward();
          whole.step();
          expect_refusals<Error>({{"a module's state", [&] { net.load_state_dict(by_hand.state_dict()); }}},
                                 "shard::load_full_state_dict");
          expect_refusals<Error>({{"an optimizer's", [&] { adam.load_state_dict(whole.state_dict()); }}},
                                 "shard::load_full_optimizer_state");
        }));
}

TEST_CASE("a step with gradients that were not averaged is refused on every rank") {
  for (const int ranks : {2, 3, 4})
    for (const std::int64_t rows : {1, 2, 8})
      for (const bool handle : {false, true})
        for (shard::GroupLayout layout : layouts)
          CHECK_NOTHROW(run_ranks(ranks, [&](World&) {
            nn::Linear net(4, rows);
            if (handle)
              const shard::FullyShardedDataParallel wrapped(net);
            else
              shard::fully_shard(net, {.layout = layout});
            nn::Sgd sgd(net.parameters(), {.lr = 0.1});
            const auto before = shard::full_state_dict(net);
            {
              const auto own = shard::no_sync(net);
              sum(net(ones({2, 4}))).backward();
            }
            expect_refusals<StateError>({{"step", [&] { sgd.step(); }}}, "no_sync");
            const auto after = shard::full_state_dict(net);
            for (std::size_t i = 0; i < before.size(); ++i)
              expect(before[i].second.to_vector<float>() == after[i].second.to_vector<float>(), "stepped");
            sum(net(ones({2, 4}))).backward();
            sgd.step();
          }));
}

TEST_CASE("what is asked of a module that another one's sharding has is refused, not ignored") {
  const auto hook = [](const Tensor&, const Tensor&, const Group&) {};
  const auto calls_of = [&](nn::Module& m) {
    return std::map<std::string, std::function<void()>>{
        {"no_sync", [&] { const auto scope = shard::no_sync(m); }},
        {"set_requires_gradient_sync", [&] { shard::set_requires_gradient_sync(m, false); }},
        {"set_requires_all_reduce", [&] { shard::set_requires_all_reduce(m, false); }},
        {"set_reshard_after_backward", [&] { shard::set_reshard_after_backward(m, false); }},
        {"register_comm_hook", [&] { shard::register_comm_hook(m, hook); }},
        {"reshard", [&] { shard::reshard(m); }}};
  };
  const auto calls_of_one = [&](nn::Module& m, nn::Module& sharded) {
    return std::map<std::string, std::function<void()>>{
        {"unshard", [&] { shard::unshard(m); }},
        {"set_gradient_divide_factor", [&] { shard::set_gradient_divide_factor(m, 2); }},
        {"set_modules_to_forward_prefetch", [&] { shard::set_modules_to_forward_prefetch(sharded, {&m}); }},
        {"set_modules_to_backward_prefetch",
         [&] { shard::set_modules_to_backward_prefetch(sharded, {&m}); }}};
  };
  for (const int ranks : {1, 2})
    for (shard::GroupLayout layout : layouts)
      for (bool handle : {false, true})
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          Normed net, replica, plain;
          if (handle)
            const shard::FullyShardedDataParallel wrapped(net);
          else
            shard::fully_shard(net, {.layout = layout});
          expect_refusals<StateError>(calls_of(net.linear),
                                      "'weight' of Linear was sharded with a module around");
          expect_refusals<StateError>(calls_of_one(net.linear, net), "Linear is not sharded");
          const shard::DataParallel parallel(replica, world.group());
          expect_refusals<StateError>(calls_of(replica), "(DataParallel)");
          for (const auto& [name, call] : calls_of(plain)) call();
        }));
}

TEST_CASE("what is ignored is in the module that is wrapped") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Normed net, other;
    const auto wrap = [&](shard::FsdpOptions options) {
      const shard::FullyShardedDataParallel handle(net, std::move(options));
    };
    expect_refusals<ValueError>({{"module", [&] { wrap({.ignored_modules = {&other.norm}}); }}},
                                "BatchNorm1d of ignored_modules is not in Normed");
    expect_refusals<ValueError>({{"null", [&] { wrap({.ignored_modules = {nullptr}}); }},
                                 {"null", [&] { shard::fully_shard(net, {.ignored_modules = {nullptr}}); }}},
                                "null");
    expect_refusals<ValueError>(
        {{"parameter", [&] { wrap({.ignored_parameters = {other.linear.weight.object()}}); }}},
        "shape (6, 4) of ignored_parameters is not in Normed");
    expect(!shard::is_sharded(net), "it was sharded all the same");
    wrap({.ignored_parameters = {net.linear.weight.object()}, .ignored_modules = {&net.norm}});
  }));
}

TEST_CASE("a sharded table whose rows a forward would scale is refused, one that is left out scales them") {
  for (const shard::GroupLayout layout : layouts)
    CHECK_NOTHROW(run_ranks(2, [&](World&) {
      const auto make = [] {
        manual_seed(3);
        nn::Embedding table(6, 4, nn::EmbeddingOptions{.max_norm = 0.5});
        return nn::Sequential{std::move(table), nn::Linear(4, 2)};
      };
      nn::Sequential sharded = make(), left_out = make();
      const Tensor index = Tensor::from<std::int64_t>({0, 2, 5});
      shard::fully_shard(sharded, {.layout = layout});
      const std::string text = refusal<StateError>([&] { sharded(index); });
      expect(text.find("max_norm") != std::string::npos, "says {}", text);
      const nn::Parameter table = left_out.parameters()[0];
      shard::fully_shard(left_out, {.layout = layout, .ignored_parameters = {table}});
      left_out(index);
      expect(amax(norm(index_select(table.local().detach(), 0, index), 2, {1})).item() < 0.501,
             "rows are not scaled");
    }));
}
