// Rules of a sharded module that nothing else would notice broken: tools/mutants breaks each of them.
#include <sherd.h>

#include "collectives/dry_run.h"
#include "shard/data_parallel.h"
#include "shard/fully_shard.h"
#include "shard/unit.h"
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

/// A root with a parameter of its own.
struct Rooted final : nn::Layer<Rooted> {
  nn::Linear a{3, 3}, b{3, 3};
  nn::Param scale{ones({3})};
  Tensor forward(const Tensor& x) { return mul(b(a(x)), scale); }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
    on("scale", scale);
  }
};

}  // namespace

TEST_CASE("floating buffers are cast once, when the root first runs; parameters and counts are not") {
  for (shard::GroupLayout layout : layouts)
    CHECK_NOTHROW(run_ranks(2, [&](World&) {
      Normed net;
      shard::fully_shard(net, {.layout = layout, .mixed_precision = {.buffer_dtype = f64}});
      const auto dtypes = [&] {
        std::vector<DType> all;
        for (const nn::NamedBuffer& b : net.named_buffers()) all.push_back(b.tensor.dtype());
        return all;
      };
      expect(dtypes() == std::vector{f32, f32, i64}, "cast too early");
      net.eval();
      const NoGrad guard;
      try {
        net(ones({2, 4}));
      } catch (const Error&) {  // f32 values beside f64 statistics may be refused; the cast comes first
      }
      expect(dtypes() == std::vector{f64, f64, i64}, "not cast");
      expect(net.linear.weight.local().dtype() == f32, "a parameter was cast");
    }));
}

TEST_CASE("the root's parameters stay from forward to backward, the others' do not") {
  for (shard::GroupLayout layout : layouts) {
    DryRun run({.size = 2});
    Rooted net;
    const shard::Options options{.mesh = run.world().mesh(), .layout = layout};
    for (nn::Linear* m : {&net.a, &net.b}) shard::fully_shard(*m, options);
    shard::fully_shard(net, options);
    for (int step = 0; step < 2; ++step) {
      const std::size_t from = run.steps().size();
      sum(net(ones({2, 3}))).backward();
      std::map<std::string, int> gathers;
      for (std::size_t i = from; i < run.steps().size(); ++i)
        if (run.steps()[i].kind == DryStep::Kind::post && run.steps()[i].call == CollectiveKind::all_gather)
          ++gathers[run.steps()[i].label];
      CHECK(gathers == std::map<std::string, int>{{"a", 2}, {"b", 2}, {"root", 1}});
    }
  }
}

TEST_CASE("a shard's padding between aligned parameters is 42, behind the last row it is 0") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    // Flat: 9 elements and 3 of padding, 3 elements and 1: 8 a rank.
    nn::Linear flat(3, 3), rows(3, 3);
    for (nn::Linear* m : {&flat, &rows})
      for (nn::Parameter p : m->parameters()) p.set_data(ones(p.shape()));
    shard::fully_shard(flat, {.layout = shard::GroupLayout::flat});
    shard::fully_shard(rows);
    const auto shard_of = [](nn::Linear& m) {
      return shard::unit_of(m)->members()[0].group->shard().to_vector<float>();
    };
    using Values = std::vector<float>;
    expect(shard_of(flat) ==
               (world.rank() == 0 ? Values{1, 1, 1, 1, 1, 1, 1, 1} : Values{1, 42, 42, 42, 1, 1, 1, 42}),
           "flat, rank {}", world.rank());
    expect(shard_of(rows) == (world.rank() == 0 ? Values{1, 1, 1, 1, 1, 1, 0, 0, 1, 1}
                                                : Values{1, 1, 1, 0, 0, 0, 0, 0, 1, 0}),
           "rows, rank {}", world.rank());
  }));
}

TEST_CASE("outputs of a root and of a module within it are cast to their own output dtypes") {
  for (shard::GroupLayout layout : layouts)
    CHECK_NOTHROW(run_ranks(2, [&](World&) {
      nn::Sequential net(nn::Linear(3, 3), nn::Linear(3, 3));
      const auto options = [&](DType output) {
        return shard::Options{.layout = layout,
                              .mixed_precision = {.param_dtype = bf16, .output_dtype = output}};
      };
      shard::fully_shard(net[0], options(bf16));
      shard::fully_shard(net, options(f64));
      expect(net(ones({2, 3})).dtype() == f64, "the root's");
      expect(net[0].call(ones({2, 3})).dtype() == bf16, "the inner module's");
    }));
}

TEST_CASE("the flat layout aligns to 16 bytes of what computes, not of what is stored") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    const auto shard_numel = [](std::optional<DType> param_dtype) {
      nn::Linear m(3, 3);
      shard::fully_shard(
          m, {.layout = shard::GroupLayout::flat, .mixed_precision = {.param_dtype = param_dtype}});
      return shard::groups_of(m).at(0).shard_numel;
    };
    expect(shard_numel({}) == 8, "f32: 9 and 3 of padding, 3 and 1");
    expect(shard_numel(f16) == 10, "f16: 9 and 7 of padding, 3 and 1");
  }));
}

TEST_CASE("in the flat layout a module that is not to cast as a root does not cast at all by default") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    for (bool cast : {false, true}) {
      nn::Linear m(3, 3);
      shard::MixedPrecisionPolicy mixed{.param_dtype = bf16, .cast_root_forward_inputs = false};
      if (cast) mixed.cast_forward_inputs = true;
      shard::fully_shard(m, {.layout = shard::GroupLayout::flat, .mixed_precision = mixed});
      bool refused = false;
      try {
        m(ones({2, 3}));
      } catch (const DTypeError&) {
        refused = true;
      }
      expect(refused != cast, "cast {}: refused {}", cast, refused);
    }
  }));
}

namespace {

struct Scale final : nn::Layer<Scale> {
  nn::Param weight{ones({6})};
  Tensor forward(const Tensor& x) const { return mul(x, weight); }
  void visit(auto&& on) { on("weight", weight); }
};

}  // namespace

TEST_CASE("an average in f16 is rounded once, after the division") {
  for (shard::GroupLayout layout : layouts)
    CHECK_NOTHROW(run_ranks(3, [&](World& world) {
      Scale net;
      shard::fully_shard(net, {.layout = layout, .mixed_precision = {.reduce_dtype = f16}});
      // 2050 lies between two values of f16, and a third of it does not round to a third of either.
      sum(net(full({6}, world.rank() == 0 ? 2048 : 1))).backward();
      const Tensor grad = net.weight.grad();
      expect(grad.dtype() == f32, "dtype");
      expect(grad.to_vector<float>() == std::vector<float>(2, 683.5F), "{}", to_string(grad));
    }));
}

TEST_CASE("a rank without rows has an empty gradient, in the flat layout it has none") {
  for (shard::GroupLayout layout : layouts)
    CHECK_NOTHROW(run_ranks(4, [&](World& world) {
      nn::Linear m(2, 1);  // flat: the ranks hold the weight, padding, the bias, padding
      shard::fully_shard(m, {.layout = layout});
      sum(m(ones({2, 2}))).backward();
      const bool flat = layout == shard::GroupLayout::flat;
      const bool has_weight = world.rank() == 0, has_bias = world.rank() == (flat ? 2 : 0);
      for (const auto& [has, p] :
           {std::pair{has_weight, m.weight.object()}, std::pair{has_bias, m.bias.object()}}) {
        expect((p.local().numel() > 0) == has, "rank {} holds {}", world.rank(), p.local().numel());
        expect(p.grad().defined() == (has || !flat), "presence on rank {}", world.rank());
        if (p.grad().defined()) expect(p.grad().shape() == p.local().shape(), "shape {}", p.grad().shape());
      }
    }));
}

TEST_CASE("what is frozen between forward and backward has no gradient") {
  for (shard::GroupLayout layout : layouts)
    CHECK_NOTHROW(run_ranks(2, [&](World&) {
      nn::Linear m(3, 4);
      shard::fully_shard(m, {.layout = layout});
      const Tensor loss = sum(m(ones({2, 3})));
      nn::Parameter(m.bias.object()).set_requires_grad(false);
      loss.backward();
      expect(!m.bias.grad().defined(), "the bias has a gradient");
      const bool has = m.weight.local().numel() > 0;
      expect(m.weight.grad().defined() == has, "the weight has none");
    }));
}

TEST_CASE("a graph from before a write is refused, on every rank") {
  for (shard::GroupLayout layout : layouts)
    for (bool reshard : {true, false})
      CHECK_NOTHROW(run_ranks(2, [&](World&) {
        nn::Sequential net(nn::Linear(3, 4), nn::Linear(4, 2));
        shard::fully_shard(net[1], {.layout = layout, .reshard_after_forward = reshard});
        shard::fully_shard(net, {.layout = layout});
        const Tensor loss = sum(net(ones({2, 3})));
        shard::load_full_state_dict(net, shard::full_state_dict(net));
        bool refused = false;
        try {
          loss.backward();
        } catch (const StateError&) {
          refused = true;
        }
        expect(refused, "the backward ran");
        sum(net(ones({2, 3}))).backward();
      }));
}

namespace {

/// Sharded layers of one shape, run in an order that the program chooses.
struct Ordered final : nn::Layer<Ordered> {
  nn::ModuleList<nn::Linear> layers;
  std::vector<std::size_t> order;
  std::function<void(nn::Linear&)> after_each = [](nn::Linear&) {};
  explicit Ordered(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) layers.emplace_back(3, 3);
  }
  Tensor forward(Tensor x) {
    for (const std::size_t i : order) {
      x = layers[i](x);
      after_each(layers[i]);
    }
    return x;
  }
  void visit(auto&& on) { on("layers", layers); }
};

/// Labels of the gathers that `act` posts.
/// The labels of the calls of one kind that `act` posts.
std::vector<std::string> calls_of(CollectiveKind kind, DryRun& run, const std::function<void()>& act) {
  const std::size_t from = run.steps().size();
  act();
  std::vector<std::string> labels;
  for (std::size_t i = from; i < run.steps().size(); ++i)
    if (run.steps()[i].kind == DryStep::Kind::post && run.steps()[i].call == kind)
      labels.push_back(run.steps()[i].label);
  return labels;
}
std::vector<std::string> gathers_of(DryRun& run, const std::function<void()>& act) {
  return calls_of(CollectiveKind::all_gather, run, act);
}

}  // namespace

TEST_CASE("a forward that departs from the last one's list gathers nothing ahead by it any more") {
  for (const shard::GroupLayout layout : layouts) {
    DryRun run({.size = 2});
    Ordered net(4);
    const shard::Options options{.mesh = run.world().mesh(), .layout = layout};
    for (nn::Linear& m : net.layers) shard::fully_shard(m, options);
    shard::fully_shard(net, options);
    const NoGrad guard;
    const auto gathers = [&](std::vector<std::size_t> order) {
      net.order = std::move(order);
      return gathers_of(run, [&] { net(ones({2, 3})); });
    };
    using Labels = std::vector<std::string>;
    const Labels in_order{"layers.0", "layers.1", "layers.2", "layers.3"};
    CHECK(gathers({0, 1, 2, 3}) == in_order);
    CHECK(gathers({0, 1, 2, 3}) == in_order);
    // The first guess is wrong. What comes at its old place again is followed by no second one.
    CHECK(gathers({0, 3, 2, 1}) == Labels{"layers.0", "layers.1", "layers.3", "layers.2"});
    CHECK(gathers({0, 3, 2, 1}) == Labels{"layers.0", "layers.3", "layers.2", "layers.1"});
  }
}

namespace {

/// A layer that doubles its own weight when it has run.
struct Doubling final : nn::Layer<Doubling> {
  nn::Linear linear{3, 3, {.bias = nn::Bias::no}};
  Tensor forward(const Tensor& x) {
    Tensor y = linear(x);
    const Tensor own = linear.weight.local().detach();
    copy_(own, mul(own, 2.0));
    return y;
  }
  void visit(auto&& on) { on("linear", linear); }
};

struct Twice final : nn::Layer<Twice> {
  Doubling inner;
  Tensor forward(const Tensor& x) {
    const Tensor before = inner(x);
    return sub(before, inner(x));
  }
  void visit(auto&& on) { on("inner", inner); }
};

}  // namespace

TEST_CASE("what a module writes of itself while it runs its next run reads, also of what is kept") {
  for (const shard::GroupLayout layout : layouts)
    for (const bool reshard : {true, false})
      CHECK_NOTHROW(run_ranks(2, [&](World&) {
        const NoGrad guard;
        Twice net;
        net.inner.linear.weight.set_data(ones({3, 3}));
        shard::fully_shard(net.inner, {.layout = layout, .reshard_after_forward = reshard});
        shard::fully_shard(net, {.layout = layout});
        for (const float weight : {1.0F, 4.0F}) {
          const auto y = net(ones({1, 3})).to_vector<float>();
          expect(y == std::vector<float>(3, 3 * weight - 6 * weight), "{}, reshard {}", y[0], reshard);
        }
      }));
}

namespace {

struct Tied final : nn::Layer<Tied> {
  nn::Linear first{4, 4}, second{4, 4};
  Tensor forward(const Tensor& x) const { return second(first(x)); }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
  }
};

}  // namespace

TEST_CASE("a tie that is made after the sharding is one when a member of it is replaced") {
  for (const shard::GroupLayout layout : layouts)
    for (const bool inner : {false, true})
      for (const bool at_first : {false, true})
        CHECK_NOTHROW(run_ranks(2, [&](World&) {
          Tied net;
          const shard::Options options{.layout = layout};
          if (inner) shard::fully_shard(net.first, options);
          shard::fully_shard(net, options);
          net.second.weight = net.first.weight.object();
          net(ones({2, 4}));
          (at_first ? net.first : net.second).weight = nn::Parameter(ones(net.first.weight.local().shape()));
          std::string said;
          try {
            net(ones({2, 4}));
          } catch (const NotImplementedError& e) {
            said = e.what();
          }
          expect(
              said.find("'first.weight' is tied") != said.npos || said.find("'weight' is tied") != said.npos,
              "'{}', at first {}", said, at_first);
        }));
}

namespace {

/// Adds nothing of its own to the layer that it shares with another one.
struct Around final : nn::Layer<Around> {
  std::shared_ptr<nn::Linear> layer;
  explicit Around(std::shared_ptr<nn::Linear> layer) : layer(std::move(layer)) {}
  Tensor forward(const Tensor& x) const { return (*layer)(x); }
  void visit(auto&& on) { on("layer", *layer); }
};

struct Sharing final : nn::Layer<Sharing> {
  std::shared_ptr<nn::Linear> layer = std::make_shared<nn::Linear>(3, 3);
  Around a{layer}, b{layer};
  Tensor forward(const Tensor& x) const { return b(a(x)); }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
  }
};

}  // namespace

TEST_CASE("a module that runs alone leaves the names that the model gave to what it shares") {
  for (const shard::GroupLayout layout : layouts) {
    DryRun run({.size = 2});
    Sharing net;
    const shard::Options options{.mesh = run.world().mesh(), .layout = layout};
    for (nn::Module* m : {static_cast<nn::Module*>(net.layer.get()), static_cast<nn::Module*>(&net.a),
                          static_cast<nn::Module*>(&net.b), static_cast<nn::Module*>(&net)})
      shard::fully_shard(*m, options);
    const NoGrad guard;
    const auto in_model = gathers_of(run, [&] { net(ones({2, 3})); });
    REQUIRE(!in_model.empty());
    for (Around* alone : {&net.a, &net.b})
      CHECK(gathers_of(run, [&] { (*alone)(ones({2, 3})); }) == std::vector{in_model[0]});
  }
}

TEST_CASE("what was read between forwards, and then written on one rank, all ranks gather anew") {
  for (const shard::GroupLayout layout : layouts)
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      const NoGrad guard;
      Ordered net(2), by_hand(2);
      net.order = by_hand.order = {0, 1};
      for (nn::Linear& m : net.layers) shard::fully_shard(m, {.layout = layout});
      shard::fully_shard(net, {.layout = layout});
      for (int times = 0; times < 2; ++times) {
        net(ones({2, 3}));
        const Tensor read = mul(net.layers[0].weight.tensor(), 1.0);
        if (world.rank() == 0) mul_(net.layers[0].weight.local(), 2.0);
        const Tensor y = net(ones({2, 3}));
        by_hand.load_state_dict(shard::full_state_dict(net));
        expect(y.to_vector<float>() == by_hand(ones({2, 3})).to_vector<float>(), "{}", to_string(y));
      }
    }));
}

namespace {

struct Holder final : nn::Layer<Holder> {
  std::shared_ptr<nn::Linear> shared;
  nn::Linear own{3, 3};
  explicit Holder(std::shared_ptr<nn::Linear> shared) : shared(std::move(shared)) {}
  Tensor forward(const Tensor& x) { return own((*shared)(x)); }
  void visit(auto&& on) {
    on("shared", *shared);
    on("own", own);
  }
};

}  // namespace

TEST_CASE("a model whose layer ran in another one gathers as before when it runs again") {
  for (const shard::GroupLayout layout : layouts) {
    DryRun run({.size = 2});
    const auto layer = std::make_shared<nn::Linear>(3, 3);
    Holder first(layer), second(layer);
    const shard::Options options{.mesh = run.world().mesh(), .layout = layout};
    for (nn::Module* m : {static_cast<nn::Module*>(layer.get()), static_cast<nn::Module*>(&first),
                          static_cast<nn::Module*>(&second)})
      shard::fully_shard(*m, options);
    const auto gathers = [&](Holder& model) {
      return gathers_of(run, [&] { sum(model(ones({2, 3}))).backward(); });
    };
    gathers(first);
    const auto before = gathers(first);
    CHECK(std::ranges::count(before, std::string("shared")) == 2);
    for (int times = 0; times < 2; ++times) {
      gathers(second);
      CHECK(gathers(first) == before);
    }
  }
}

TEST_CASE("a list gathers no group ahead that another one replaced, though a graph still has it") {
  for (const shard::GroupLayout layout : layouts) {
    DryRun run({.size = 2});
    Ordered net(3);
    net.order = {0, 1, 2};
    const shard::Options options{.mesh = run.world().mesh(), .layout = layout};
    for (nn::Linear& m : net.layers) shard::fully_shard(m, options);
    shard::fully_shard(net, options);
    const auto gathers = [&](Tensor& y) { return gathers_of(run, [&] { y = net(ones({2, 3})); }); };
    Tensor before, after;
    const auto expected = gathers(before);
    net.layers[1].to(f64);
    net.layers[1].to(f32);
    CHECK(gathers(after) == expected);
    sum(after).backward();
  }
}

TEST_CASE("what a model keeps from its forwards a backward of another model leaves alone") {
  for (const shard::GroupLayout layout : layouts) {
    DryRun run({.size = 2});
    nn::Linear keeping(3, 3), other(3, 3);
    for (nn::Linear* m : {&keeping, &other})
      shard::fully_shard(*m, {.mesh = run.world().mesh(), .layout = layout, .reshard_after_forward = false});
    const auto reduced = [&](const Tensor& loss) {
      return calls_of(CollectiveKind::reduce_scatter, run, [&] { loss.backward(); }).size();
    };
    const Tensor kept = keeping(ones({2, 3})), again = keeping(ones({2, 3}));
    CHECK(reduced(sum(other(ones({2, 3})))) == 1);
    CHECK(reduced(sum(add(kept, again))) == 1);
  }
}

TEST_CASE("parts of one average that were added to one after the other are no writes, whichever a rank has") {
  for (const shard::GroupLayout layout : layouts)
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      nn::Linear net(4, 4);  // in the flat layout the bias is rank 1's alone
      const DeviceMesh mesh = world.mesh();
      shard::fully_shard(net, {.mesh = mesh, .layout = layout});
      const Group meeting = world.group().blocks(world.size());  // which is not renewed
      const auto backward = [&] { sum(net(ones({2, 4}))).backward(); };
      for (int times = 0; times < 3; ++times) backward();
      meeting.barrier();
      mesh.renew();
      backward();
      const Tensor grad = net.bias.grad();
      expect(!grad.defined() || grad.numel() == 0 || grad.to_vector<float>()[0] == 8, "{}", to_string(grad));
    }));
}

TEST_CASE("a replica's own sum in the place of an average that was cleared is of no number of averages") {
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    nn::Linear net(4, 4);
    shard::DataParallel replicas(net, world.group());
    const Group meeting = world.group().blocks(world.size());  // which is not renewed
    const auto backward = [&](double by) { mul(sum(net(ones({2, 4}))), by).backward(); };
    backward(1);
    net.zero_grad();
    if (world.rank() == 0) {  // a fault keeps rank 1 from it
      const auto guard = replicas.no_sync();
      backward(2);
    }
    meeting.barrier();
    world.group().renew();
    backward(1);
    expect(net.bias.grad().to_vector<float>()[0] == 4, "{}", to_string(net.bias.grad()));
  }));
}

TEST_CASE("a module's inputs are cast behind the call that gathers it, beside which the cast then runs") {
  struct Casts final : Listener {
    explicit Casts(DryRun& run) : run(run) {}
    void after(const AnyOp& op, Inputs, Outputs) override {
      if (op.name() == "cast") steps.push_back(run.steps().size());
    }
    DryRun& run;
    std::vector<std::size_t> steps;
  };
  for (const shard::GroupLayout layout : layouts) {
    DryRun run({.size = 2});
    nn::Linear net(3, 3);
    shard::fully_shard(net, {.mesh = run.world().mesh(),
                             .layout = layout,
                             .mixed_precision = {.param_dtype = bf16, .cast_root_forward_inputs = true}});
    const NoGrad guard;
    Casts casts(run);
    const std::size_t before = run.steps().size();
    {
      const Listening scope(casts);
      net(ones({2, 3}));
    }
    REQUIRE(!casts.steps.empty());
    CHECK(casts.steps.back() > before);
  }
}
