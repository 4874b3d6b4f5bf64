// Modules that change after they were sharded, and parts of them that are copied.
#include <array>

#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "tests/sanitizer.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// A list that may grow, and layers that may be replaced.
struct Growing final : nn::Layer<Growing> {
  nn::Linear first{4, 4}, second{4, 4};
  nn::ModuleList<nn::Linear> list;
  nn::Sequential rest{nn::Linear(4, 4)};
  Growing() { list.emplace_back(4, 4); }
  Tensor forward(const Tensor& x) {
    Tensor y = second(tanh(first(x)));
    for (nn::Linear& layer : list) y = layer(tanh(y));
    return rest(y);
  }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("list", list);
    on("rest", rest);
  }
};

Growing seeded_growing() {
  manual_seed(5);
  return {};
}

using Shard = std::function<void(Growing&)>;

/// Every layout and strategy, and both forms of the handle; inner groups, or one for all.
template <class F>
void on_all_ways(F&& body) {
  using enum shard::ShardingStrategy;
  for (const int ranks : worlds())
    for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
      for (const int way : {0, 1, 2, 3})
        for (const bool inner : {false, true}) {
          INFO(ranks << " ranks, strategy " << static_cast<int>(strategy) << ", way " << way
                     << ", inner groups " << inner);
          const Shard shard = [=](Growing& m) {
            if (way < 2) {
              const shard::Options options{
                  .layout = way == 0 ? shard::GroupLayout::per_parameter : shard::GroupLayout::flat,
                  .strategy = strategy};
              if (inner) shard::fully_shard(m.second, options);
              if (inner) shard::fully_shard(m.list, options);
              shard::fully_shard(m, options);
              return;
            }
            const auto is_list = [&m](const nn::Module& module) { return &module == &m.list; };
            const shard::FullyShardedDataParallel handle(
                m, {.strategy = strategy,
                    .auto_wrap = inner ? shard::AutoWrap(is_list) : shard::AutoWrap(),
                    .use_orig_params = way == 2});
          };
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, shard); }));
        }
}

struct Replaceable final : nn::Layer<Replaceable> {
  nn::Linear first{4, 4};
  std::unique_ptr<nn::Linear> second =
      std::make_unique<nn::Linear>(4, 4, nn::LinearOptions{.bias = nn::Bias::no});
  Tensor forward(const Tensor& x) const { return (*second)(first(x)); }
  void visit(auto&& on) {
    on("first", first);
    on("second", *second);
  }
};

Tensor loss_of(Growing& m, int rank) { return sum(square(m(batch_of(rank, 0, 4).x))); }

}  // namespace

TEST_CASE("what is put into a module after it was sharded is refused by name, at the next forward") {
  const std::vector<std::pair<std::string, std::function<void(Growing&)>>> changes = {
      {"list.1.weight", [](Growing& m) { m.list.emplace_back(4, 4); }},
      {"rest.1.weight", [](Growing& m) { m.rest.append(nn::Linear(4, 4)); }}};
  for (const auto& [name, change] : changes)
    on_all_ways([&](World& world, const Shard& shard) {
      for (const bool ran : {false, true}) {
        Growing m = seeded_growing();
        shard(m);
        if (ran) loss_of(m, world.rank()).backward();
        change(m);
        for (const bool training : {true, false}) {
          m.train(training);
          const std::string message = message_of<StateError>([&] { loss_of(m, world.rank()); });
          expect(message.find("'" + name + "'") != std::string::npos &&
                     message.find("shard a module when it is complete") != std::string::npos,
                 "{}", message);
        }
      }
    });
}

TEST_CASE("what is put in at the address of what was taken out is refused too") {
  for (const int replacements : {1, 2, 3, 4})
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      Replaceable net;
      shard::fully_shard(*net.second);
      shard::fully_shard(net);
      const Tensor x = batch_of(world.rank(), 0, 4).x;
      net(x);
      for (int i = 0; i < replacements; ++i) {
        net.second.reset();
        net.second = std::make_unique<nn::Linear>(4, 4, nn::LinearOptions{.bias = nn::Bias::no});
      }
      for (int i = 0; i < 3; ++i) {
        const std::string message = message_of<StateError>([&] { net(x); });
        expect(message.find("'second.weight'") != std::string::npos, "{} replaced: '{}'", replacements,
               message);
        net.second = std::make_unique<nn::Linear>(4, 4, nn::LinearOptions{.bias = nn::Bias::no});
      }
    }));
}

TEST_CASE("a layer that was sharded before it is put in trains with the others") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    for (const int ranks : {1, 2, 3})
      CHECK_NOTHROW(run_ranks(ranks, [layout](World& world) {
        Growing m = seeded_growing(), by_hand = seeded_growing();
        shard::fully_shard(m, {.layout = layout});
        loss_of(m, world.rank()).backward();
        m.zero_grad();
        for (Growing* g : {&m, &by_hand}) {
          manual_seed(6);
          g->list.emplace_back(4, 4);
        }
        shard::fully_shard(m.list[1], {.layout = layout});
        loss_of(m, world.rank()).backward();
        expect_gradients(
            m, world,
            average_by_hand(by_hand, world.size(), [&](int rank) { loss_of(by_hand, rank).backward(); }),
            "of the new layer too");
        const Growing copy = m.clone();
        expect(shard::is_sharded(copy.list[1]), "the clone's");
      }));
}

TEST_CASE("a sharded layer takes another's place, and a parameter is taken away") {
  on_all_ways([](World& world, const Shard& shard) {
    Growing m = seeded_growing(), by_hand = seeded_growing();
    shard(m);
    const bool flat_param = m.named_parameters()[0].name.ends_with("_flat_param");
    const auto train = [&] {
      nn::Sgd sgd(m.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
      sgd.zero_grad();
      loss_of(m, world.rank()).backward();
      set_gradients(by_hand, average_by_hand(by_hand, world.size(),
                                             [&](int rank) { loss_of(by_hand, rank).backward(); }));
      sgd.step();
      reference.step();
      const nn::StateDict whole = shard::full_state_dict(m), expected = by_hand.state_dict();
      expect(whole.size() == expected.size(), "{} entries", whole.size());
      for (std::size_t i = 0; i < whole.size(); ++i)
        expect(whole[i].second.to_vector<float>() == expected[i].second.to_vector<float>(), "'{}' differs",
               whole[i].first);
    };
    train();
    for (Growing* g : {&m, &by_hand}) {
      manual_seed(7);
      nn::Linear layer(4, 4);
      if (g == &m) shard::fully_shard(layer, {.layout = shard::GroupLayout::flat});
      g->second = std::move(layer);
      g->first.bias = nn::Parameter();
    }
    train();
    for (Growing* g : {&m, &by_hand})
      g->second.weight = nn::Parameter(mul(g->second.weight.local().detach(), 2.0));
    train();
    if (!flat_param) {
      m.first.weight = nn::Parameter(mul(m.first.weight.local().detach(), 2.0));
      by_hand.first.weight = nn::Parameter(mul(by_hand.first.weight.local().detach(), 2.0));
      train();
    }
  });
}

TEST_CASE("parameters that are tied after they were sharded train as one, in a clone too") {
  on_all_ways([](World& world, const Shard& shard) {
    Growing m = seeded_growing(), by_hand = seeded_growing();
    shard(m);
    for (Growing* g : {&m, &by_hand}) nn::tie(g->first.weight, g->second.weight);
    Growing copy = m.clone(), copy_by_hand = by_hand.clone();
    expect(copy.first.weight.object() == copy.second.weight.object(), "the clone's are tied");
    for (auto& [module, plain] : {std::pair<Growing&, Growing&>(m, by_hand), {copy, copy_by_hand}}) {
      nn::Sgd sgd(module.parameters(), {.lr = 0.1}), reference(plain.parameters(), {.lr = 0.1});
      for (int step = 0; step < 2; ++step) {
        sgd.zero_grad();
        loss_of(module, world.rank()).backward();
        set_gradients(
            plain, average_by_hand(plain, world.size(), [&](int rank) { loss_of(plain, rank).backward(); }));
        sgd.step();
        reference.step();
      }
      const nn::StateDict whole = shard::full_state_dict(module), expected = plain.state_dict();
      expect(whole.size() == expected.size(), "{} entries", whole.size());
      for (std::size_t i = 0; i < whole.size(); ++i)
        expect(whole[i].second.to_vector<float>() == expected[i].second.to_vector<float>(), "'{}' differs",
               whole[i].first);
    }
  });
}

TEST_CASE("a module is moved and cast whose tied parameter belongs to the unit of a later name") {
  on_all_ways([](World& world, const Shard& shard) {
    Growing m = seeded_growing(), by_hand = seeded_growing();
    for (Growing* g : {&m, &by_hand}) nn::tie(g->first.weight, g->second.weight);
    shard(m);
    m.to(DType::f64);
    m.to(Device::cpu(1));
    m.to(Device::cpu());
    m.to(DType::f32);
    const Tensor x = batch_of(world.rank(), 0, 4).x;
    expect(m(x).to_vector<float>() == by_hand(x).to_vector<float>(), "outputs");
  });
}

TEST_CASE("a clone of a module whose parameters a module above keeps is refused and says what to clone") {
  on_all_ways([](World& world, const Shard& shard) {
    Growing m = seeded_growing();
    shard(m);
    const auto check_refused = [](const auto& copy, std::string_view name) {
      const std::string message = message_of<StateError>(copy);
      expect(message.starts_with("clone: ") && message.find(name) != std::string::npos &&
                 message.find("full_state_dict") != std::string::npos,
             "{}", message);
    };
    check_refused([&] { m.first.clone(); }, "first.");
    check_refused([&] { m.rest.clone_module(); }, "rest.0.");
    const Growing whole = m.clone();
    nn::tie(m.first.weight, m.list[0].weight);
    if (shard::is_sharded(m.list)) {
      check_refused([&] { m.list.clone(); }, "first.weight");
      Growing untied = whole.clone();
      auto list = untied.list.clone();
      expect(shard::is_sharded(list), "a unit within is cloned alone");
      sum(list[0](ones({2, 4}))).backward();
    }
    loss_of(m, world.rank()).backward();
  });
}

TEST_CASE("a module is not sharded after one that holds it") {
  on_all_ways([](World& world, const Shard& shard) {
    Growing m = seeded_growing();
    shard(m);
    const auto check_refused = [](const auto& shard_inner, const std::string& words) {
      const std::string message = message_of<StateError>(shard_inner);
      expect(message.find(words) != std::string::npos && message.find('\n') == std::string::npos, "'{}'",
             message);
    };
    const std::string way_out = "which holds this module; shard inner modules first, ";
    check_refused(
        [&] { shard::fully_shard(m.first); },
        "'weight' of Linear was sharded as 'first.weight' of Growing, " + way_out + "Linear before Growing");
    check_refused([&] { shard::FullyShardedDataParallel handle(m.first, {.mesh = world.mesh()}); },
                  "as 'first.weight' of Growing, ");
    check_refused(
        [&] {
          const auto rule = shard::wrap_classes({"Linear"});
          shard::FullyShardedDataParallel handle(m.rest, {.mesh = world.mesh(), .auto_wrap = rule});
        },
        "as 'rest.0.weight' of Growing, ");
    check_refused([&] { shard::fully_shard(m.list[0]); }, shard::is_sharded(m.list)
                                                              ? "as '0.weight' of ModuleList"
                                                              : "as 'list.0.weight' of Growing, ");
    loss_of(m, world.rank()).backward();

    // A tied parameter counts as the outer module's under each of its names.
    Growing shared = seeded_growing();
    nn::Linear& last = shared.rest.append(nn::Linear(4, 4));
    nn::tie(shared.first.weight, last.weight);
    shard(shared);
    for (nn::Linear* holder : {&shared.first, &last})
      check_refused([&] { shard::fully_shard(*holder); },
                    "'weight' of Linear was sharded as 'first.weight' of ");
    loss_of(shared, world.rank()).backward();

    Growing tied = seeded_growing();
    nn::tie(tied.first.weight, tied.second.weight);
    nn::tie(tied.first.bias, tied.second.bias);
    shard::fully_shard(tied.first);
    shard::fully_shard(tied.second);  // has nothing of its own, and holds nothing that is not sharded
    shard::fully_shard(tied);
    loss_of(tied, world.rank()).backward();
  });
}

TEST_CASE("a wrapping that throws leaves nothing that a second one takes for its own, or that runs") {
  for (const int ranks : {1, 2})
    CHECK_NOTHROW(run_ranks(ranks, [](World& world) {
      Growing m = seeded_growing();
      nn::Parameter(m.first.bias.object())
          .set_requires_grad(false);  // beside one that is trained, in the root's unit
      const auto inner = [&](const nn::Module& child) { return &child == &m.second; };
      const auto wrap = [&](bool use_orig_params) {
        return message_of<Error>([&] {
          shard::FullyShardedDataParallel(
              m, {.mesh = world.mesh(), .auto_wrap = inner, .use_orig_params = use_orig_params});
        });
      };
      const std::string first = wrap(false);
      expect(first.find("uniform") != std::string::npos, "'{}'", first);
      for (const std::string& message : {wrap(true), message_of<StateError>([&] { m(ones({2, 4})); })})
        expect(message.find("anew") != std::string::npos, "'{}'", message);
    }));
}

TEST_CASE("a part of a flat parameter is not frozen alone") {
  for (const int ranks : {1, 2})
    CHECK_NOTHROW(run_ranks(ranks, [](World& world) {
      Growing m = seeded_growing();
      const shard::FullyShardedDataParallel wrapped(m, {.mesh = world.mesh()});
      for (nn::Linear* layer : {&m.first, &m.second}) {
        const std::string message = message_of<StateError>([&] { layer->set_requires_grad(false); });
        expect(message.find("weight") != std::string::npos &&
                   message.find("use_orig_params") != std::string::npos,
               "'{}'", message);
        for (const nn::Parameter& p : layer->parameters()) expect(p.requires_grad(), "it stays as it was");
      }
      wrapped.flat_param().set_requires_grad(false);
      for (const nn::Parameter& p : m.first.parameters()) expect(!p.requires_grad(), "all are frozen");
    }));
}

// ---- what sharding looks at ----

namespace {

/// Counts how often members are asked for.
struct Counting final : nn::Layer<Counting> {
  nn::Param weight;
  nn::ModuleList<Counting> children;
  int* visits;
  explicit Counting(int& visits) : weight(ones({2})), visits(&visits) {}
  Tensor forward(const Tensor& x) {
    Tensor y = mul(x, weight);
    for (Counting& child : children) y = child(y);
    return y;
  }
  void visit(auto&& on) {
    ++*visits;
    on("weight", weight);
    on("children", children);
  }
};

enum class Units { beside_each_other, within_each_other };

void nest(Counting& module, int depth, int& visits) {
  if (depth > 0) nest(module.children.emplace_back(visits), depth - 1, visits);
}

void shard_below(Counting& module, const shard::Options& options) {
  for (Counting& child : module.children) {
    shard_below(child, options);
    shard::fully_shard(child, options);
  }
}

/// How often members are asked for when a module is sharded that has `count` units below, which leave one
/// parameter alone, and when it runs.
int visits_of(Units units, int count, shard::GroupLayout layout) {
  int visits = 0;
  Counting root(visits);
  if (units == Units::within_each_other) nest(root, count, visits);
  for (int i = 0; units == Units::beside_each_other && i < count; ++i) root.children.emplace_back(visits);
  const shard::Options options{.layout = layout, .ignored_parameters = {root.parameters().back()}};
  shard_below(root, options);
  visits = 0;
  shard::fully_shard(root, options);
  sum(root(ones({2}))).backward();
  return visits;
}

}  // namespace

TEST_CASE("sharding a module asks for each member as often, however many units are below it") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    for (const Units units : {Units::beside_each_other, Units::within_each_other}) {
      INFO("units " << int(units) << ", layout " << int(layout));
      const int few = visits_of(units, 20, layout), more = visits_of(units, 40, layout),
                most = visits_of(units, 60, layout);
      CHECK(most - more == more - few);
    }
}
