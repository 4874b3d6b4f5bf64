// When groups are gathered and reduced, as one string: a world that is not there writes the calls down.
#include "autograd/autograd.h"
#include "autograd/recompute.h"
#include "collectives/dry_run.h"
#include "nn/layers.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/engine.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

struct Mlp final : nn::Layer<Mlp> {
  nn::Linear in, out;
  explicit Mlp(std::int64_t d) : in(d, 4 * d), out(4 * d, d) {}
  Tensor forward(const Tensor& x) const { return relu(out(relu(in(x)))); }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
  }
};

struct Stack final : nn::Layer<Stack> {
  Mlp a, b, c;
  explicit Stack(std::int64_t d) : a(d), b(d), c(d) {}
  Tensor forward(const Tensor& x) const { return c(b(a(x))); }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
    on("c", c);
  }
};

/// Calls `left` with the name of a block as a backward leaves it.
struct Watched final : nn::Layer<Watched> {
  Mlp a{4}, b{4}, c{4};
  std::function<void(std::string_view)> left;
  Tensor forward(const Tensor& x) const {
    Tensor y = add(x, zeros({4}).requires_grad_());
    const std::pair<std::string_view, const Mlp*> blocks[] = {{"a", &a}, {"b", &b}, {"c", &c}};
    for (const auto& [name, block] : blocks) {
      register_hook(y, [this, name = name](const Tensor& g) {
        left(name);
        return g;
      }).keep();
      y = (*block)(y);
    }
    return y;
  }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
    on("c", c);
  }
};

/// Uses the weights of layers that it does not run, the first one twice.
struct Borrower final : nn::Layer<Borrower> {
  nn::Linear a{4, 4}, b{4, 4}, c{4, 4};
  Tensor forward(const Tensor& x) const {
    Tensor y = x;
    for (const nn::Linear* layer : {&a, &b, &c, &a}) y = linear(y, layer->weight, {});
    return y;
  }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
    on("c", c);
  }
};

/// "Ga Gb ... | Ra": posts only, of modules whatever their model; G gather, R reduce, P pass on to replicas;
/// a bar where the forward ends.
std::string posts(const DryRun& run, std::size_t from = 0) {
  std::string text;
  for (std::size_t i = from; i < run.steps().size(); ++i) {
    const DryStep& step = run.steps()[i];
    if (step.kind != DryStep::Kind::post) continue;
    text += (text.empty() ? "" : " ") +
            std::string(step.call == CollectiveKind::all_gather ? "G"
                        : step.call == CollectiveKind::barrier  ? "|"
                        : step.group.ends_with("replica")       ? "P"
                                                                : "R") +
            step.label.substr(0, step.label.find(' '));
  }
  return text;
}

Stack sharded(const DryRun& run, shard::Options options) {
  if (options.mesh.dimensions() == 0) options.mesh = run.world().mesh();
  Stack model(4);
  for (Mlp* m : {&model.a, &model.b, &model.c}) shard::fully_shard(*m, options);
  shard::fully_shard(model, options);
  return model;
}

/// The third step's calls, when guesses have settled.
std::string step_of(const DryRunOptions& world, shard::Options options, const std::vector<int>& grid = {},
                    Device device = Device::cpu()) {
  const DefaultOptions scope({.device = device});
  DryRun run(world);
  if (!grid.empty()) options.mesh = run.world().mesh(grid, {"replica", "shard"});
  Stack model = sharded(run, options);
  std::size_t from = 0;
  for (int step = 0; step < 3; ++step) {
    from = run.steps().size();
    const Tensor loss = sum(model(ones({2, 4})));
    run.world().group().barrier();
    loss.backward();
  }
  return posts(run, from);
}

}  // namespace

TEST_CASE("a dry run on meta comes to the end of its backward, and reduces what one with values does",
          "[schedule]") {
  using enum shard::ShardingStrategy;
  const auto backward = [](const std::string& step) { return step.substr(step.find('|')); };
  for (const auto layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter})
    for (const auto strategy : {full_shard, shard_grad_op, zero1, no_shard})
      for (const std::vector<int>& grid : {std::vector<int>{}, {2, 4}}) {
        const shard::Options options{.layout = layout, .strategy = strategy};
        const DryRunOptions world{.rank = 3, .size = 8};
        CHECK(backward(step_of(world, options, grid, Device::meta())) ==
              backward(step_of(world, options, grid)));
      }
}

TEST_CASE("a step of three groups gathers, regathers and reduces in the order of PyTorch's", "[schedule]") {
  for (int size : {2, 3, 4, 5, 7, 8, 1024})
    for (int rank : {0, size - 1}) {
      const DryRunOptions world{.rank = rank, .size = size};
      for (const auto layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter}) {
        shard::Options options{.layout = layout};
        CHECK(step_of(world, options) == "Ga Gb Gc | Gc Gb Rc Ga Rb Ra");
        options.reshard_after_forward = false;
        CHECK(step_of(world, options) == "Ga Gb Gc | Rc Rb Ra");
        options.strategy = shard::ShardingStrategy::shard_grad_op;
        CHECK(step_of(world, options) == "Ga Gb Gc | Rc Rb Ra");
        options.strategy = shard::ShardingStrategy::no_shard;
        CHECK(step_of(world, options) == "| Rc Rb Ra");
      }
    }
}

TEST_CASE("a backward's plan is there before anything is computed") {
  DryRun run({.size = 3});
  Stack model = sharded(run, {});
  std::string plan;
  Tensor y = model(ones({2, 4}));
  register_hook(y, [&](const Tensor& g) {
    plan = shard::Engine::current().plan().text();
    return g;
  }).keep();
  sum(y).backward();
  CHECK(plan == "gather c, gather b, reduce c, gather a, reduce b, reduce a");
  CHECK(shard::Engine::current().plan().text().empty());
}

TEST_CASE("what is kept from step to step is reduced before the walk leaves the next block", "[schedule]") {
  for (const bool kept : {false, true})
    for (const bool by_unshard : {false, true}) {
      INFO("kept " << kept << ", unsharded before each step " << by_unshard);
      DryRun run({.size = 3});
      Watched model;
      const shard::Options options{.mesh = run.world().mesh()};
      for (Mlp* m : {&model.a, &model.b, &model.c}) shard::fully_shard(*m, options);
      shard::fully_shard(model, options);
      if (kept) shard::set_reshard_after_backward(model, false);
      std::string order;
      std::size_t from = 0;
      model.left = [&](std::string_view name) {
        order += posts(run, from) + " " + std::string(name) + " ";
        from = run.steps().size();
      };
      for (int step = 0; step < 3; ++step) {
        if (by_unshard)
          for (Mlp* m : {&model.a, &model.b, &model.c}) shard::unshard(*m);
        const Tensor loss = sum(model(ones({2, 4})));
        from = run.steps().size();
        order.clear();
        loss.backward();
        order += posts(run, from);
      }
      order += " ";
      INFO(order);
      CHECK(order.find("Rc ") < order.find(" b "));
      CHECK(order.find("Rb ") < order.find(" a "));
      CHECK(order.find("Ra ") != order.npos);
    }
}

TEST_CASE("prefetch changes when, never what", "[schedule]") {
  const DryRunOptions world{.size = 4};
  CHECK(step_of(world, {.forward_prefetch = 0, .backward_prefetch = 0}) == "Ga Gb Gc | Gc Rc Gb Rb Ga Ra");
  CHECK(step_of(world, {.forward_prefetch = 2, .backward_prefetch = 2}) == "Ga Gb Gc | Gc Gb Ga Rc Rb Ra");
}

TEST_CASE("a prefetch after reductions comes before what it is for is needed", "[schedule]") {
  using shard::BackwardPrefetch;
  const DryRunOptions world{.size = 4};
  struct Case {
    BackwardPrefetch prefetch;
    std::string posts, plan, at_b;  ///< the last: when the gradient comes to b
  };
  for (const Case& c :
       {Case{BackwardPrefetch::none(), "Gc Rc Gb Rb Ga Ra",
             "gather c, reduce c, gather b, reduce b, gather a, reduce a", "Gc Rc Gb"},
        Case{BackwardPrefetch::post(), "Gc Rc Gb Rb Ga Ra",
             "gather c, reduce c, gather early b, reduce b, gather early a, reduce a", "Gc Rc Gb"},
        Case{BackwardPrefetch::post(2), "Gc Rc Gb Ga Rb Ra",
             "gather c, reduce c, gather early b, gather early a, reduce b, reduce a", "Gc Rc Gb Ga"},
        Case{BackwardPrefetch::pre(), "Gc Gb Rc Ga Rb Ra",
             "gather c, gather b, reduce c, gather a, reduce b, reduce a", "Gc Gb Rc Ga"}}) {
    CHECK(step_of(world, {.backward_prefetch = c.prefetch}) == "Ga Gb Gc | " + c.posts);
    DryRun run(world);
    Stack model = sharded(run, {.backward_prefetch = c.prefetch});
    std::string plan, at_b;
    std::size_t from = 0;
    struct Watch final : nn::ModuleObserver {
      std::function<void()> act;
      void after_forward(nn::Module&, std::span<Tensor* const> outputs) override {
        register_hook(*outputs[0], [this](const Tensor&) {
          act();
          return Tensor{};
        }).keep();
      }
    } watch;
    watch.act = [&] {
      plan = shard::Engine::current().plan().text();
      at_b = posts(run, from);
    };
    const Subscription watching = model.b.observe(watch);
    const Tensor loss = sum(model(ones({2, 4})));
    from = run.steps().size();
    loss.backward();
    CHECK(plan == c.plan);
    CHECK(at_b == c.at_b);
  }
}

TEST_CASE("what the program names is gathered ahead, in place of what comes next", "[schedule]") {
  DryRun run({.size = 4});
  Stack model = sharded(run, {});
  const auto step = [&](Stack& m) {
    const std::size_t from = run.steps().size();
    const Tensor loss = sum(m(ones({2, 4})));
    run.world().group().barrier();
    loss.backward();
    return posts(run, from);
  };
  step(model);
  shard::set_modules_to_forward_prefetch(model.a, {&model.c});
  shard::set_modules_to_forward_prefetch(model.b, {});
  shard::set_modules_to_backward_prefetch(model.c, {&model.a});
  CHECK(step(model) == "Ga Gc Gb | Gc Ga Rc Gb Rb Ra");
  Stack copy = model.clone();
  step(copy);
  CHECK(step(copy) == "Ga Gb Gc | Gc Gb Rc Ga Rb Ra");
  model.to(f64);
  model.to(f32);
  CHECK(step(model) == "Ga Gc Gb | Gc Ga Rc Gb Rb Ra");
  shard::set_modules_to_forward_prefetch(model.a, {});
  for (Mlp* m : {&model.a, &model.b, &model.c}) shard::set_modules_to_backward_prefetch(*m, {});
  CHECK(step(model) == "Ga Gb Gc | Gc Rc Gb Rb Ga Ra");
  shard::set_modules_to_forward_prefetch(model.a, {&model.b, &model.c});
  shard::set_modules_to_backward_prefetch(model.c, {&model.b, &model.a});
  CHECK(step(model) == "Ga Gb Gc | Gc Gb Ga Rc Rb Ra");
  CHECK_THROWS_AS(shard::set_modules_to_forward_prefetch(model.a.in, {}), StateError);
  CHECK_THROWS_AS(shard::set_modules_to_backward_prefetch(model.a, {&model.b.in}), StateError);
}

TEST_CASE("what was summed over shards goes on to replicas in the end, whatever is here before",
          "[schedule]") {
  for (const auto done : {DryRunOptions::Done::always, DryRunOptions::Done::when_waited})
    CHECK(step_of({.size = 6, .done = done}, {}, {3, 2}) == "Ga Gb Gc | Gc Gb Rc Ga Rb Ra Pc Pb Pa");
  for (const int size : {2, 4}) {
    CHECK(step_of({.size = size}, {}, {1, size}) == "Ga Gb Gc | Gc Gb Rc Ga Rb Ra");
    CHECK(step_of({.size = size}, {}, {size, 1}) == "| Pc Pb Pa");
  }
}

TEST_CASE("what is read outside its module stays until the next place of the forward", "[schedule]") {
  DryRun run({.size = 3});
  Borrower model;
  const shard::Options options{.mesh = run.world().mesh()};
  for (nn::Linear* layer : {&model.a, &model.b, &model.c}) shard::fully_shard(*layer, options);
  shard::fully_shard(model, options);
  const NoGrad guard;
  for (const std::string expected : {"Ga Gb Gc Ga", "Ga Gb Gc Ga"}) {  // without and with a list
    const std::size_t from = run.steps().size();
    model(ones({2, 4}));
    CHECK(posts(run, from) == expected);
  }
}
