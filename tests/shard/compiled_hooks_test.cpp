// What the sharding's hooks do within a program of the module that is sharded is eager's: what their casts
// follow from, what ends when it throws, and what is none of the program's.
#include "autograd/autograd.h"
#include "autograd/recompute.h"
#include "nn/compile.h"
#include "nn/optimizer.h"
#include "runtime/ops.h"
#include "shard/data_parallel.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "shard/lost_steps.h"
#include "shard/summon.h"
#include "tests/shard/compiles.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

const CompileOptions inside{.sharding_hooks = ShardingHooks::inside};

/// A sum in f32 of its input as it is given.
struct Trunk final : nn::Layer<Trunk> {
  nn::Linear linear{4, 4};
  Tensor forward(const Tensor& x) const {
    return to(linear(to(x, linear.weight.tensor().dtype())), f32) + to(x, f32);
  }
  void visit(auto&& on) { on("linear", linear); }
};
struct Model final : nn::Layer<Model> {
  Trunk trunk;
  nn::Linear head{4, 4};
  Tensor forward(const Tensor& x) const {
    return to(head(to(trunk(mul(to(x, f32), 1. / 3)), head.weight.tensor().dtype())), f32);
  }
  void visit(auto&& on) {
    on("trunk", trunk);
    on("head", head);
  }
};

struct Lines final : nn::Layer<Lines> {
  nn::ModuleList<nn::Linear> blocks;
  std::size_t again = 3;                   ///< the block that a backward computes again; none has this number
  std::vector<std::size_t> uses{0, 1, 2};  ///< blocks, in turn
  bool reads = false;                      ///< a block's weight before that runs
  Lines() {
    for (int i = 0; i < 3; ++i) blocks.emplace_back(6, 6);
  }
  Tensor forward(const Tensor& x) const {
    Tensor y = x;
    for (const std::size_t i : uses) {
      if (reads) y = matmul(y, to(blocks[(i + 1) % 3].weight.tensor(), y.dtype()));
      const auto run = [&] { return tanh(blocks[i](y)); };
      y = i == again ? recompute(run) : run();
    }
    return y;
  }
  void visit(auto&& on) { on("blocks", blocks); }
};

Tensor input(const World& world, int step) { return full({2, 6}, 0.1 * (step + 1 + world.rank())); }

}  // namespace

TEST_CASE("hooks in a program: casts are those of the model's precision, and of who runs as its root") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const auto in_precisions = [&](bool compiles) {
      manual_seed(1);
      Model net;
      shard::Options options{.mesh = world.mesh(),
                             .mixed_precision = {.param_dtype = bf16, .evaluation = shard::Precision::full}};
      shard::Options trunk = options;
      trunk.mixed_precision.param_dtype_override = [](const std::string&, const nn::Parameter&) {
        return std::optional(f32);
      };
      shard::fully_shard(net.trunk, trunk);
      shard::fully_shard(net, options);
      if (compiles) nn::compile(net.trunk, inside);
      const NoGrad guard;
      std::vector<std::vector<float>> all;
      for (int i = 0; i < 6; ++i) {
        net.train(i % 2 == 0);
        net.trunk.eval();
        all.push_back(net(full({2, 4}, 1. / 3)).to_vector<float>());
      }
      expect(!compiles || nn::compiled_programs(net.trunk).stats().hits == 4, "no hits");
      return all;
    };
    const auto as_root = [&](bool compiles) {
      manual_seed(1);
      Model net;
      const shard::FullyShardedDataParallel wrapped(net, {.mesh = world.mesh(),
                                                          .auto_wrap = shard::wrap_classes({"Trunk"}),
                                                          .mixed_precision = {.param_dtype = bf16}});
      if (compiles) nn::compile(net.trunk, inside);
      const NoGrad guard;
      std::vector<std::vector<float>> all;
      for (int i = 0; i < 6; ++i) {
        const Tensor x = full({2, 4}, 1. / 3);
        const Tensor y = i % 2 == 0 ? net(x) : std::as_const(net.trunk)(x);
        all.push_back(to(y, f32).to_vector<float>());
      }
      expect(!compiles || nn::compiled_programs(net.trunk).stats().hits == 4, "no hits");
      return all;
    };
    expect(in_precisions(true) == in_precisions(false), "other values in a precision");
    expect(as_root(true) == as_root(false), "other values as a root");
  }));
}

namespace {

struct Table final : nn::Layer<Table> {
  nn::Embedding table{10, 4};
  Tensor forward(const Tensor& tokens) const { return table(tokens); }
  void visit(auto&& on) { on("table", table); }
};
/// Calls a sharded module that is not its own, and twice.
struct Reader final : nn::Layer<Reader> {
  const Table* table = nullptr;
  nn::Linear linear{4, 4};
  Tensor forward(const Tensor& tokens) const { return linear((*table)(tokens) + (*table)(tokens)); }
  void visit(auto&& on) { on("linear", linear); }
};
struct Book final : nn::Layer<Book> {
  Table table;
  Reader reader;
  Tensor forward(const Tensor& tokens) const { return reader(tokens); }
  void visit(auto&& on) {
    on("table", table);
    on("reader", reader);
  }
};

}  // namespace

TEST_CASE("hooks in a program: what it began is over when it throws, whoever's module that is", "[faults]") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto losses = [&](bool compiles) {
      manual_seed(1);
      Book net;
      net.reader.table = &net.table;
      const shard::Options options{.mesh = world.mesh(), .layout = layout};
      shard::fully_shard(net.table, options);
      shard::fully_shard(net.reader, options);
      shard::fully_shard(net, options);
      if (compiles) nn::compile(net.reader, inside);
      nn::Sgd optimizer(net.parameters(), {.lr = 0.5});
      std::vector<double> all;
      for (int i = 0; i < 5; ++i) {
        const Tensor tokens =
            Tensor::from<std::int64_t>({1, 2 + world.rank(), i == 2 ? 77 : 3}, {3}, Device::cpu());
        try {
          const Tensor loss = mean(square(net(tokens)));
          loss.backward();
          optimizer.step();
          all.push_back(loss.item());
        } catch (const Error&) {
          all.push_back(-1);
        }
        optimizer.zero_grad();
        world.group().barrier();
      }
      const auto scope = shard::summon_full_params(net);
      return all;
    };
    const std::vector<double> eager = losses(false);
    expect(eager[2] == -1 && losses(true) == eager, "other losses");
  });
}

TEST_CASE("hooks in a program: what hooks on gradients do beside it they do once") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const Compiles who : somebody) {
      manual_seed(1);
      Lines net;
      const shard::Options options{.mesh = world.mesh(), .layout = layout};
      for (nn::Linear& block : net.blocks) shard::fully_shard(block, options);
      shard::fully_shard(net, options);
      nn::Linear probe(6, 1);
      const shard::DataParallel replicas(probe, world.group());
      nn::Sgd small(probe.parameters(), {.lr = 0.01});
      for (nn::Parameter p : probe.parameters()) p.set_grad(full_like(p.data(), 0.01));
      const Subscription hook = register_hook(net.blocks[1].weight.tensor(), [&](const Tensor&) -> Tensor {
        small.step();
        return {};
      });
      if (compiles_here(who, world)) nn::compile(net, inside);
      nn::Adam optimizer(net.parameters(), {.lr = 0.01});
      for (int i = 0; i < 4; ++i) {
        mean(square(net(input(world, i)))).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      expect(shard::steps_taken(probe) == 4 && shard::steps_taken(net) == 4, "{} and {} steps",
             shard::steps_taken(probe), shard::steps_taken(net));
    }
  });
}

TEST_CASE("hooks in a program: calls of a traced backward are eager's, also where hooks read other groups") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const std::size_t on : {0u, 1u, 2u})
      for (const std::size_t read : {0u, 1u, 2u}) {
        const auto losses = [&](Compiles who) {
          manual_seed(1);
          Lines net;
          const shard::Options options{.mesh = world.mesh(), .layout = layout};
          for (nn::Linear& block : net.blocks) shard::fully_shard(block, options);
          shard::fully_shard(net, options);
          if (compiles_here(who, world)) nn::compile(net, inside);
          nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
          const Subscription hook =
              register_hook(net.blocks[on].weight.tensor(), [&](const Tensor& gradient) -> Tensor {
                return add(gradient, mul(sum(net.blocks[read].weight.tensor()), 0.01));
              });
          std::vector<double> all;
          for (int i = 0; i < 4; ++i) {
            const Tensor loss = mean(square(net(input(world, i))));
            loss.backward();
            optimizer.step();
            optimizer.zero_grad();
            all.push_back(loss.item());
          }
          return all;
        };
        const std::vector<double> eager = losses(Compiles::nobody);
        for (const Compiles who : somebody)
          expect(losses(who) == eager, "a hook on {} that reads {}: other losses", on, read);
      }
  });
}

namespace {

/// How to train `Lines`: the loss of an output and its input, ahead of the step's own backward.
struct Ride {
  shard::Options options;
  std::size_t again = 3;
  std::vector<std::size_t> uses{0, 1, 2};
  bool reads = false;
  std::function<Tensor(const Tensor& x, const Tensor& y, int step)> loss_of =
      [](const Tensor&, const Tensor& y, int) { return mean(square(to(y, f32))); };
};

/// Losses, and the weights after them.
std::vector<double> trained(World& world, const Ride& ride, Compiles who) {
  manual_seed(1);
  Lines net;
  net.again = ride.again;
  net.uses = ride.uses;
  net.reads = ride.reads;
  for (nn::Linear& block : net.blocks) shard::fully_shard(block, ride.options);
  shard::fully_shard(net, ride.options);
  if (compiles_here(who, world)) nn::compile(net, inside);
  nn::Sgd optimizer(net.parameters(), {.lr = 0.05});
  std::vector<double> all;
  for (int i = 0; i < 5; ++i) {
    Tensor x = input(world, i).requires_grad_();
    const Tensor loss = ride.loss_of(x, net(x), i);
    loss.backward();
    x.set_grad({});  // of a backward that was recorded it has a history, which leads to x
    optimizer.step();
    optimizer.zero_grad();
    all.push_back(loss.item());
  }
  const auto scope = shard::summon_full_params(net);
  for (const nn::Linear& block : net.blocks)
    for (const float w : block.weight.tensor().detach().to_vector<float>()) all.push_back(double{w});
  expect(all.size() > 100, "{} values", all.size());
  return all;
}

void expect_eager(World& world, const Ride& ride) {
  const std::vector<double> eager = trained(world, ride, Compiles::nobody);
  for (const Compiles who : somebody) expect(trained(world, ride, who) == eager, "other values");
}

/// `body(options)` in f32 and in 16 bits.
template <class F>
void in_precisions(World& world, shard::GroupLayout layout, F&& body) {
  shard::Options options{.mesh = world.mesh(), .layout = layout};
  body(options);
  options.mixed_precision = {.param_dtype = bf16, .reduce_dtype = f32};
  body(options);
}

}  // namespace

TEST_CASE("hooks in a program: backwards that are recorded make eager's calls and have eager's bits") {
  using enum shard::ShardingStrategy;
  const auto penalty = [](const Tensor& x, const Tensor& y, int) {
    const Tensor slope = grad(sum(square(y)), {x}, {}, {.create_graph = true})[0];
    return add(mean(square(to(y, f32))), mean(square(slope)));
  };
  const auto twice = [](const Tensor&, const Tensor& y, int step) {
    const Tensor loss = mean(square(to(y, f32)));
    if (step % 2 == 0) loss.backward({}, true, true);
    return loss;
  };
  on_ranks([&](World& world, shard::GroupLayout layout) {
    in_precisions(world, layout, [&](shard::Options options) {
      for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1})
        for (const std::size_t again : {std::size_t{1}, std::size_t{3}}) {  // the second is no block
          options.strategy = strategy;
          for (const bool reads : {false, true}) {
            expect_eager(world, {.options = options, .again = again, .reads = reads, .loss_of = penalty});
            expect_eager(world, {.options = options, .again = again, .reads = reads, .loss_of = twice});
          }
        }
    });
  });
}

TEST_CASE("hooks in a program: blocks that run several times are reduced where eager backwards reduce them") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    in_precisions(world, layout, [&](const shard::Options& options) {
      for (const std::vector<std::size_t>& uses :
           {std::vector<std::size_t>{0, 1, 1, 2}, {0, 1, 2, 1}, {0, 1, 0, 1, 2}, {1, 0, 1, 1, 2, 2}})
        for (const std::size_t again : {std::size_t{1}, std::size_t{3}})
          expect_eager(world, {.options = options, .again = again, .uses = uses});
    });
  });
}

namespace {

/// A parameter that is used before and behind another one.
struct Weave final : nn::Layer<Weave> {
  nn::Param a{ones({4})}, b{ones({4})};
  nn::Linear c{4, 4};
  Tensor forward(const Tensor& x) const { return mul(mul(mul(c(x), a.tensor()), b.tensor()), a.tensor()); }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
    on("c", c);
  }
};

}  // namespace

TEST_CASE("hooks in a program: leaves of 16 bits are whole in the order of eager backwards, used how often") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const std::optional<DType> dtype : {std::optional<DType>(), std::optional(bf16)}) {
      const auto sums = [&](Compiles who) {
        manual_seed(1);
        Weave net;
        const shard::Options options{.layout = layout,
                                     .mixed_precision = {.param_dtype = dtype, .cast_forward_inputs = true}};
        shard::fully_shard(net.c, options);
        shard::fully_shard(net, options);
        if (compiles_here(who, world)) nn::compile(net, inside);
        std::vector<float> seen;
        std::vector<Subscription> hooks;
        for (nn::Param* p : {&net.a, &net.b})
          hooks.push_back(register_hook(p->tensor(), [&](const Tensor& g) -> Tensor {
            const Tensor all = clone(to(g.detach(), f32));
            world.group().all_reduce(all);
            seen.push_back(all.to_vector<float>()[0]);
            return {};
          }));
        for (int i = 0; i < 3; ++i) sum(to(net(full({4}, 1.0 + world.rank())), f32)).backward();
        return seen;
      };
      const std::vector<float> eager = sums(Compiles::nobody);
      for (const Compiles who : somebody) expect(sums(who) == eager, "other sums");
    }
  });
}
