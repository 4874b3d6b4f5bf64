// What users do with gradients between backwards, and what a backward leaves alone: equal to an unsharded
// net with averages by hand.
#include <sherd.h>

#include <atomic>

#include "autograd/autograd.h"
#include "collectives/observe.h"
#include "shard/data_parallel.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "tests/message_of.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Two layers, sharded one by one and with the rest.
struct Pair final : nn::Layer<Pair> {
  nn::Linear a, b;
  bool use_b = true;
  explicit Pair(std::int64_t width) : a(seeded(width), width), b(width, width) {}
  Tensor forward(const Tensor& x) const {
    const Tensor y = tanh(a(x));
    return use_b ? b(y) : y;
  }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
  }

 private:
  static std::int64_t seeded(std::int64_t width) {
    manual_seed(7);
    return width;
  }
};

struct Scale final : nn::Layer<Scale> {
  nn::Param w{ones({60, 64})};
  Tensor forward(const Tensor& x) const { return add(w, x); }
  void visit(auto&& on) { on("w", w); }
};

struct Scalar final : nn::Layer<Scalar> {
  nn::Param scale{ones({})};
  Tensor forward(const Tensor& x) const { return mul(x, scale); }
  void visit(auto&& on) { on("scale", scale); }
};

/// Ways to give back something that depends on no parameter.
struct Gate final : nn::Layer<Gate> {
  nn::Linear layer{3, 3};
  int way = 0;
  Tensor forward(const Tensor& x) const {
    return way == 0 ? layer(x) : way == 1 ? mul(x, 2.0) : layer(x).detach();
  }
  void visit(auto&& on) { on("layer", layer); }
};

void shard_both(Pair& net, const shard::Options& options) {
  shard::fully_shard(net.a, options);
  shard::fully_shard(net, options);
}

Tensor loss_of(const Pair& net, int rank, int step, std::int64_t width) {
  return sum(square(net(batch_of(rank, step, width).x)));
}

Gradients averages(Pair& by_hand, World& world, std::vector<int> steps, std::int64_t width) {
  return average_by_hand(by_hand, world.size(), [&](int rank) {
    for (const int step : steps) loss_of(by_hand, rank, step, width).backward();
  });
}

void backward(Pair& net, World& world, int step, std::int64_t width) {
  loss_of(net, world.rank(), step, width).backward();
}
void backward_alone(Pair& net, World& world, int step, std::int64_t width) {
  const auto guard = shard::no_sync(net);
  backward(net, world, step, width);
}

}  // namespace

TEST_CASE("a gradient is read by peers where it lies only if nobody else sees its memory", "[threads meet]") {
  for (const auto layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    for (const bool by_hook :
         {false, true}) {  // the upstream gradient is the parameter's, as is what a hook keeps
      std::atomic<bool> written = false;
      CHECK_NOTHROW(run_ranks(3, [&](World& world) {
        Scale net;
        shard::fully_shard(net, {.layout = layout});
        const Tensor seed = ones({60, 64}), kept = ones({60, 64});
        Tensor x = zeros({60, 64}).requires_grad_();
        register_hook(x,
                      [&](const Tensor& g) {  // the others do not read before rank 0 has written
                        if (world.rank() != 0) written.wait(false);
                        return g;
                      })
            .keep();
        const Tensor y = net(x);
        if (by_hook) register_hook(y, [&](const Tensor&) { return kept; }).keep();
        y.backward(seed);
        if (world.rank() == 0) {
          const NoGrad guard;
          fill_(seed, 101);
          fill_(kept, 101);
          written = true;
          written.notify_all();
        }
        for (const float g : net.w.grad().to_vector<float>()) expect(g == 1, "{} is not 1", g);
      }));
    }
}

TEST_CASE("an own gradient is what the user says, however it is said, and other writes change nothing") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    struct Change {
      const char* what;
      bool keeps;  ///< what was summed and averaged before
      std::function<void(nn::Parameter, nn::Optimizer&)> act;
    };
    const Change changes[] = {
        {"nothing", true, [](nn::Parameter, nn::Optimizer&) {}},
        {"written in place", true,
         [](nn::Parameter p, nn::Optimizer&) {
           const NoGrad guard;
           mul_(p.grad(), 1.0);
         }},
        {"none", false, [](nn::Parameter p, nn::Optimizer&) { p.set_grad({}); }},
        {"zeros of the same shape", false,
         [](nn::Parameter p, nn::Optimizer&) { p.set_grad(zeros(p.grad().shape())); }},
        {"zeros of the part", false,
         [](nn::Parameter p, nn::Optimizer&) { p.set_grad(zeros(p.local().shape())); }},
        {"zero_grad", false, [](nn::Parameter, nn::Optimizer& o) { o.zero_grad(); }},
        {"zero_grad to zero", false,
         [](nn::Parameter, nn::Optimizer& o) { o.zero_grad(nn::ZeroGrad::to_zero); }},
    };
    for (const Change& change : changes)
      for (const bool dead : {false, true}) {  // the own gradient of rank 0 is zero by itself
        Pair by_hand(width), net(width);
        shard_both(net, {.layout = layout});
        nn::Sgd optimizer(net.parameters());
        const auto own = [&](const Pair& of, int rank) {
          return mul(loss_of(of, rank, 2, width), dead && rank == 0 ? 0.0 : 1.0);
        };
        backward(net, world, 1, width);
        {
          const auto guard = shard::no_sync(net);
          own(net, world.rank()).backward();
        }
        for (const nn::Parameter& p : net.parameters()) change.act(p, optimizer);
        backward(net, world, 3, width);
        const Gradients first = averages(by_hand, world, {1}, width);
        const Gradients second = average_by_hand(by_hand, world.size(), [&](int rank) {
          own(by_hand, rank).backward();
          loss_of(by_hand, rank, 3, width).backward();
        });
        expect_gradients(net, world,
                         change.keeps ? plus(first, second) : averages(by_hand, world, {3}, width),
                         change.what);
      }
  });
}

TEST_CASE("an own gradient may be replaced by any layout and dtype of its values, and by no other shape") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    const auto moved = [](const Tensor& g) {  // into the middle of something larger
      const Tensor big = full({g.numel() + 20}, 7.0);
      const Tensor part = narrow(big, 0, 10, g.numel());
      copy_(part, reshape(g, {g.numel()}));
      return reshape(part, g.shape());
    };
    const auto strided = [](const Tensor& g) -> Tensor {
      return g.rank() == 2 ? transpose(clone(transpose(g, 0, 1)), 0, 1) : g;
    };
    const auto wider = [](const Tensor& g) { return to(g, f64); };
    const std::function<Tensor(const Tensor&)> ways[] = {moved, strided, wider};
    for (const auto& way : ways) {
      Pair by_hand(width), net(width);
      shard_both(net, {.layout = layout});
      backward_alone(net, world, 1, width);
      {
        const NoGrad guard;
        for (nn::Parameter p : net.parameters()) p.set_grad(way(p.grad()));
      }
      backward(net, world, 2, width);
      expect_gradients(net, world, averages(by_hand, world, {1, 2}, width), "replaced");
    }
    Pair net(width);
    shard_both(net, {.layout = layout});
    backward_alone(net, world, 1, width);
    const auto refused = [&](const std::function<void()>& act) {
      const std::string message = message_of<ShapeError>(act);
      expect(message.find("(3, 1, 2)") != std::string::npos && message.find("b.weight") != std::string::npos,
             "'{}'", message);
    };
    const nn::Parameter first = net.a.weight.object();
    const auto before = first.grad().defined() ? first.grad().to_vector<float>() : std::vector<float>();
    nn::Parameter(net.b.weight.object()).set_grad(zeros({3, 1, 2}));
    refused([&] { backward_alone(net, world, 2, width); });
    expect((first.grad().defined() ? first.grad().to_vector<float>() : std::vector<float>()) == before,
           "another group's gradient changed");
    net.zero_grad();
    backward_alone(net, world, 1, width);
    nn::Parameter(net.b.weight.object()).set_grad(zeros({3, 1, 2}));
    refused([&] { backward(net, world, 2, width); });
  });
}

TEST_CASE("a whole gradient where no backward left one is this rank's own as well") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const bool used : {false, true}) {
      Pair by_hand(5), net(5);
      shard_both(net, {.layout = layout});
      const auto given = [&](int rank) { return full({5, 5}, 1.0 + rank); };
      net.use_b = by_hand.use_b = false;
      {
        const auto guard = shard::no_sync(net);
        loss_of(net, world.rank(), 0, 5).backward();
      }
      net.b.weight.set_grad(given(world.rank()));
      net.use_b = used;
      loss_of(net, world.rank(), 1, 5).backward();
      expect_gradients(net, world,
                       as_sharded(average_by_hand(by_hand, world.size(),
                                                  [&](int rank) {
                                                    by_hand.use_b = false;
                                                    loss_of(by_hand, rank, 0, 5).backward();
                                                    by_hand.b.weight.set_grad(given(rank));
                                                    by_hand.use_b = used;
                                                    loss_of(by_hand, rank, 1, 5).backward();
                                                  }),
                                  net),
                       used ? "used" : "not used");
    }
  });
}

TEST_CASE("an average is added to what the user put there, of any dtype and wherever it lies") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Pair by_hand(5), net(5);
    shard_both(net, {.layout = layout});
    const nn::Parameter p = net.b.weight.object();
    net.b.weight.set_grad(to(full(p.local().shape(), 1.0, {DType::f64}), Device::cpu(1)));
    by_hand.b.weight.set_grad(full({5, 5}, 1.0));
    const Gradients before = gradients(by_hand);
    loss_of(net, world.rank(), 0, 5).backward();
    expect_gradients(
        net, world,
        plus(before, average_by_hand(by_hand, world.size(),
                                     [&](int rank) { loss_of(by_hand, rank, 0, 5).backward(); })),
        "added");
  });
}

TEST_CASE("averages from before a fault are stepped after it, also where a rank has all of a parameter") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Pair by_hand(5), net(5);
    shard_both(net, {.layout = layout});
    nn::Sgd optimizer(net.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
    loss_of(net, world.rank(), 0, 5).backward();
    set_gradients(by_hand, average_by_hand(by_hand, world.size(),
                                           [&](int rank) { loss_of(by_hand, rank, 0, 5).backward(); }));
    const std::string fault = message_of<CollectiveError>([&] {
      world.group().barrier();  // in which a rank may hear of it
      if (world.rank() == 1) return world.group().barrier();
      loss_of(net, world.rank(), 1, 5).backward();
    });
    expect(!fault.empty(), "ranks wait for each other");
    world.group().renew();
    optimizer.step();
    reference.step();
    expect_values(net, by_hand, "after the step");
  });
}

TEST_CASE("a gradient of another shape is refused before a backward computes") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Pair net(5);
    shard_both(net, {.layout = layout});
    const Tensor loss = loss_of(net, world.rank(), 0, 5);
    for (nn::Parameter p : net.parameters()) p.set_grad(zeros({2, 2, 2}));
    const std::string message = message_of<ShapeError>([&] { loss.backward(); });
    expect(message.find("Cannot writeback when the gradient shape changes") != std::string::npos, "{}",
           message);
    world.group().barrier();
    net.zero_grad();
    loss_of(net, world.rank(), 0, 5).backward();
  });
}

TEST_CASE("what is frozen after a backward without communication is averaged with the next one") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    for (const bool whole_group : {false, true}) {
      Pair by_hand(width), net(width);
      shard_both(net, {.layout = layout});
      const auto freeze = [&](Pair& of) {
        if (whole_group)
          of.a.set_requires_grad(false);
        else
          nn::Parameter(of.a.weight.object()).set_requires_grad(false);
      };
      backward_alone(net, world, 1, width);
      freeze(net);
      backward(net, world, 2, width);
      const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
        by_hand.set_requires_grad(true);
        loss_of(by_hand, rank, 1, width).backward();
        freeze(by_hand);
        loss_of(by_hand, rank, 2, width).backward();
      });
      expect_gradients(net, world, expected, "frozen");
      for (const nn::Parameter& p : net.parameters())
        if (p.grad().defined()) expect(p.grad().shape() == p.local().shape(), "shape {}", p.grad().shape());
    }
  });
}

TEST_CASE("a unit with one matrix in one flat parameter trains on any number of ranks") {
  for (const int ranks : {1, 2, 3})
    CHECK_NOTHROW(run_ranks(ranks, [](World& world) {
      manual_seed(7);
      nn::Linear by_hand(6, 4, {.bias = nn::Bias::no});
      nn::Linear net = by_hand.clone();
      const shard::FullyShardedDataParallel flat(net, {.mesh = world.mesh()});
      nn::Sgd sgd(net.parameters(), {.lr = 0.5}), sgd_by_hand(by_hand.parameters(), {.lr = 0.5});
      const auto loss = [&](nn::Linear& of, int rank) { return sum(square(of(batch_of(rank, 0, 6).x))); };
      for (int step = 0; step < 3; ++step) {
        sgd.zero_grad();
        {
          const auto guard = shard::no_sync(net);
          loss(net, world.rank()).backward();
          expect(net.parameters()[0].grad().rank() == 1, "a flat gradient has one dimension");
        }
        loss(net, world.rank()).backward();
        set_gradients(by_hand, average_by_hand(by_hand, world.size(), [&](int rank) {
                        loss(by_hand, rank).backward();
                        loss(by_hand, rank).backward();
                      }));
        sgd.step();
        sgd_by_hand.step();
      }
      expect_values(net, by_hand, "after three steps");
    }));
}

TEST_CASE("gradients of a forward in full precision are averaged in that") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    for (const bool alone_first : {false, true}) {
      Pair by_hand(width), net(width);
      shard_both(net, {.layout = layout,
                       .mixed_precision = {.param_dtype = bf16, .evaluation = shard::Precision::full}});
      net.eval();
      if (alone_first) backward_alone(net, world, 1, width);
      backward(net, world, 2, width);
      expect_gradients(net, world,
                       averages(by_hand, world, alone_first ? std::vector{1, 2} : std::vector{2}, width),
                       "in f32");
    }
  });
}

TEST_CASE("clipping refuses what is no average, and what another parameter stands for") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Pair net(40);
    shard_both(net, {.layout = layout});
    backward_alone(net, world, 1, 40);
    std::string message = message_of<StateError>([&] { shard::clip_grad_norm_(net.parameters(), 1.0); });
    expect(message.find("no_sync") != std::string::npos, "'{}'", message);

    Pair flat(5);
    const std::vector<nn::Parameter> before = flat.parameters();
    const shard::FullyShardedDataParallel wrapped(flat, {.mesh = world.mesh()});
    backward(flat, world, 1, 5);
    message = message_of<StateError>([&] { shard::clip_grad_norm_(before, 1.0); });
    expect(message.find("flat parameter") != std::string::npos, "'{}'", message);
  });
}

TEST_CASE("a module with gradients is not sharded") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Pair net(5);
    sum(net(batch_of(world.rank(), 0, 5).x)).backward();
    const std::string message = message_of<StateError>([&] { shard::fully_shard(net, {.layout = layout}); });
    expect(message.find("a.weight") != std::string::npos && message.find("zero_grad") != std::string::npos,
           "'{}'", message);
    net.zero_grad();
    shard::fully_shard(net, {.layout = layout});
    backward(net, world, 1, 5);
  });
}

TEST_CASE("a hook after accumulation that throws leaves the next backward its own hooks alone") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Pair net(5);
    shard_both(net, {.layout = layout});
    int of_b = 0;
    std::vector<Subscription> hooks;
    struct Boom : std::runtime_error {
      Boom() : std::runtime_error("boom") {}
    };
    bool throws = true;
    for (const nn::Parameter& p : net.a.parameters())
      hooks.push_back(register_post_accumulate_hook(p.tensor(), [&](Leaf&) {
        if (throws) throw Boom();
      }));
    for (const nn::Parameter& p : net.b.parameters())
      hooks.push_back(register_post_accumulate_hook(p.tensor(), [&](Leaf&) { ++of_b; }));
    bool thrown = false;
    try {
      backward(net, world, 0, 5);
    } catch (const Boom&) {
      thrown = true;
    }
    expect(thrown, "nothing was thrown");
    throws = false;
    of_b = 0;
    net.use_b = false;
    backward(net, world, 1, 5);
    expect(of_b == 0, "{} hooks of what the backward did not reach", of_b);
  });
}

TEST_CASE("a root may give back what depends on nothing") {
  for (const int ranks : {1, 2, 3})
    for (const int way : {1, 2})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        manual_seed(7);
        Gate by_hand;
        Gate net = by_hand.clone();
        shard::fully_shard(net);
        const auto loss = [&](Gate& of, int rank) {
          of.way = rank == 0 ? way : 0;
          return sum(of(batch_of(rank, 0, 3).x));
        };
        const Tensor y = loss(net, world.rank());
        y.backward();
        expect_gradients(net, world,
                         average_by_hand(by_hand, world.size(),
                                         [&](int rank) {
                                           const Tensor of_rank = loss(by_hand, rank);
                                           if (of_rank.requires_grad()) of_rank.backward();
                                         }),
                         "a rank that has none");
      }));
}

TEST_CASE("a parameter without a dimension is cut in the flat layout only") {
  on_ranks([](World&, shard::GroupLayout layout) {
    Scalar net;
    const auto shard = [&] { shard::fully_shard(net, {.layout = layout}); };
    if (layout == shard::GroupLayout::flat) return shard();
    const std::string message = message_of<ShapeError>(shard);
    expect(message.find("'scale'") != std::string::npos && message.find("flat") != std::string::npos, "'{}'",
           message);
  });
}

TEST_CASE("what was read between forwards is gathered anew where any one rank wrote its part since") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Pair by_hand(5), net(5);
    shard_both(net, {.layout = layout});
    const NoGrad guard;
    mul(net.a.weight.tensor(), 1.0);
    if (world.rank() == 0) fill_(net.a.weight.local(), 0.5);
    const Tensor of_all = clone(shard::full_state_dict(net)[0].second);
    by_hand.a.weight.set_data(of_all);
    const Tensor x = batch_of(0, 0, 5).x;
    expect(net(x).to_vector<float>() == by_hand(x).to_vector<float>(), "as written");
  });
}

TEST_CASE("values and gradients gather whole, also where a rank has no element of a parameter") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    Pair by_hand(width), net(width);
    shard_both(net, {.mesh = world.mesh(), .layout = layout});
    const Gradients expected = averages(by_hand, world, {0}, width);
    backward(net, world, 0, width);
    const auto named = net.named_parameters();
    int without = 0;
    for (std::size_t i = 0; i < named.size(); ++i) {
      const nn::Parameter& p = named[i].parameter;
      without += p.local().numel() == 0;
      expect(shard::gather_whole(p, p.local().detach()).to_vector<float>() ==
                 by_hand.parameters()[i].local().to_vector<float>(),
             "the values of {}", named[i].name);
      expect(shard::gather_whole(p, p.grad()).to_vector<float>() == expected[i], "the gradient of {}",
             named[i].name);
      if (p.local().numel() == 0) continue;
      const std::string refused = message_of<StateError>([&] { shard::gather_whole(p, {}); });
      expect(refused.starts_with("gather_whole: the part is an empty handle"), "it said '{}'", refused);
    }
    const double ranks_without = [&] {
      const Tensor all = Tensor::scalar(without, {f64});
      world.group().all_reduce(all, ReduceOp::sum(), {.label = "without"});
      return all.item();
    }();
    if (layout == shard::GroupLayout::flat) expect(ranks_without > 0, "every rank has all parameters");
  });
}

TEST_CASE("a gradient for a part of a flat parameter is refused, and the flat one takes it") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Pair net(5);
    nn::Param &weight = net.a.weight, &bias = net.b.bias;
    const shard::FullyShardedDataParallel handle(net);
    for (nn::Param* p : {&weight, &bias}) {
      const std::string refused = message_of<StateError>([&] { p->set_grad(ones(p->local().shape())); });
      expect(refused.starts_with("set_grad: a parameter of shape ") &&
                 refused.find("flat parameter") != std::string::npos,
             "it said '{}'", refused);
      p->set_grad({});  // there is none
    }
    nn::Parameter flat = handle.flat_param();
    nn::Sgd optimizer(net.parameters(), {.lr = 1});
    const std::vector<float> before = flat.local().to_vector<float>();
    flat.set_grad(ones(flat.local().shape()));
    optimizer.step();
    const std::vector<float> after = flat.local().to_vector<float>();
    for (std::size_t i = 0; i < before.size(); ++i) expect(after[i] == before[i] - 1, "element {}", i);
    // Those that have their own take theirs.
    Pair own(5);
    const shard::FullyShardedDataParallel originals(own, {.use_orig_params = true});
    own.a.weight.set_grad(ones(own.a.weight.local().shape()));
  }));
}

TEST_CASE("gradient penalties have the bits of averages by hand, in every layout and strategy") {
  // Of the slope in the inputs, as in WGAN-GP, alone and beside a loss, and of the parameters' own gradients.
  const auto penalised = [](Pair& net, int way, int rank, std::int64_t width) {
    const Tensor x = batch_of(rank, 0, width).x.detach().requires_grad_();
    const Tensor y = net(x);
    std::vector<Tensor> in = {x};
    if (way == 2) in = {net.a.weight.tensor(), net.b.weight.tensor()};
    const std::vector<Tensor> slopes = grad(sum(square(y)), in, {}, {.create_graph = true});
    Tensor loss = way == 0 ? mul(sum(square(slopes[0])), 10.0) : mean(square(y));
    if (way != 0)
      for (const Tensor& slope : slopes) loss = add(loss, sum(square(slope)));
    return loss;
  };
  on_ranks_and_widths([&](World& world, shard::GroupLayout layout, std::int64_t width) {
    for (const int way : {0, 1, 2}) {
      Pair by_hand(width);
      const Gradients expected = average_by_hand(
          by_hand, world.size(), [&](int rank) { penalised(by_hand, way, rank, width).backward(); });
      for (const auto strategy : {shard::ShardingStrategy::full_shard, shard::ShardingStrategy::shard_grad_op,
                                  shard::ShardingStrategy::zero1, shard::ShardingStrategy::no_shard}) {
        Pair net(width);
        shard_both(net, {.mesh = world.mesh(), .layout = layout, .strategy = strategy});
        penalised(net, way, world.rank(), width).backward();
        expect_gradients(net, world, as_sharded(expected, net), "sharded");
      }
      Pair replica(width);
      const shard::DataParallel replicas(replica, world.group());
      penalised(replica, way, world.rank(), width).backward();
      const std::string found = difference(gradients(replica), expected);
      expect(found.empty(), "DataParallel: {}", found);
    }
  });
}
