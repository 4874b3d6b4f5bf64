// Ranks post the same calls, whatever one rank's inputs, graph or hooks ask for; and what would make them
// differ is refused before anything is changed.
#include "autograd/autograd.h"
#include "shard/data_parallel.h"
#include "shard/fully_shard.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

Tensor input_of(int rank) { return batch_of(rank, 0, 5).x; }

/// Two layers; the second one's weight may be another module's, by a tie.
struct Pair final : nn::Layer<Pair> {
  nn::Linear first{5, 5}, second{5, 5};
  bool uses_second = true;
  Tensor forward(const Tensor& x) const {
    const Tensor y = tanh(first(x)), z = second(y);
    return uses_second ? z : y;
  }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
  }
};

void shard_pair(Pair& pair, const shard::Options& options) {
  shard::fully_shard(pair.first, options);
  shard::fully_shard(pair.second, options);
  shard::fully_shard(pair, options);
}

/// One output that comes of parameters, and one that does not.
struct Fork final : nn::Layer<Fork> {
  nn::Linear layer{5, 5};
  std::pair<Tensor, Tensor> forward(const Tensor& x) const { return {layer(x), mul(x, 2)}; }
  void visit(auto&& on) { on("layer", layer); }
};

/// Of a loss that takes the output which comes of parameters on rank `user` alone.
void backward(Fork& fork, int rank, int user) {
  const auto [of_layer, of_none] = fork(input_of(rank));
  const Tensor loss = sum(rank == user ? of_layer : of_none);
  if (loss.requires_grad()) loss.backward();
}

/// A layer below a frozen pair.
struct Model final : nn::Layer<Model> {
  nn::Linear own{5, 5};
  Pair frozen;
  bool passes_by = false;
  Tensor forward(const Tensor& x) {
    const Tensor y = own(x), z = frozen(y);
    return passes_by ? y : z;
  }
  void visit(auto&& on) {
    on("own", own);
    on("frozen", frozen);
  }
};

}  // namespace

TEST_CASE("a tie across two models that is replaced in one of them is refused, and neither is changed") {
  on_ranks([](World&, shard::GroupLayout layout) {
    for (const bool other_first : {false, true}) {
      manual_seed(1);
      Pair a, b;
      nn::tie(a.first.weight, b.second.weight);
      shard_pair(a, {.layout = layout});
      shard_pair(b, {.layout = layout});
      for (Pair* pair : {&a, &b}) (*pair)(ones({2, 5}));
      const nn::StateDict before = shard::full_state_dict(a);
      Pair& replaced = other_first ? b : a;
      nn::Param& member = other_first ? b.second.weight : a.first.weight;
      const nn::Parameter old = member.object();
      member = nn::Parameter(zeros(old.local().shape()));
      expect_refused<NotImplementedError>([&] { replaced(ones({2, 5})); }, "is tied");
      member = old;
      expect(nn::StateDict(shard::full_state_dict(a)).size() == before.size(), "as many entries");
      for (const auto& [name, value] : shard::full_state_dict(a))
        expect(value.to_vector<float>() == before.at(name).to_vector<float>(), "'{}' was changed", name);
      for (Pair* pair : {&a, &b}) (*pair)(ones({2, 5}));
    }
  });
}

TEST_CASE("a tie within a model is known to a module of it that ran alone") {
  on_ranks([](World&, shard::GroupLayout layout) {
    for (const bool alone_first : {false, true}) {
      manual_seed(1);
      Pair pair;
      nn::tie(pair.first.weight, pair.second.weight);
      shard_pair(pair, {.layout = layout});
      if (!alone_first) pair(ones({2, 5}));
      pair.first(ones({2, 5}));
      const auto values = [&] { return shard::full_state_dict(pair).at("first.weight").to_vector<float>(); };
      const std::vector<float> before = values();
      const nn::Parameter old = pair.first.weight.object();
      pair.first.weight = nn::Parameter(zeros(old.local().shape()));
      expect_refused<NotImplementedError>([&] { pair.first(ones({2, 5})); }, "is tied");
      pair.first.weight = old;
      expect(values() == before, "the shard was changed");
    }
  });
}

TEST_CASE("a tie ends with a module that is gone") {
  on_ranks([](World&, shard::GroupLayout layout) {
    manual_seed(1);
    Pair a;
    shard_pair(a, {.layout = layout});
    {
      Pair b;
      nn::tie(a.first.weight, b.second.weight);
      shard_pair(b, {.layout = layout});
      b(ones({2, 5}));
    }
    a.first.weight = nn::Parameter(zeros(a.first.weight.local().shape()));
    a(ones({2, 5}));
    const std::vector<float> now = shard::full_state_dict(a).at("first.weight").to_vector<float>();
    expect(std::ranges::all_of(now, [](float v) { return v == 0; }), "what was put in counts");
  });
}

TEST_CASE("modules have the names of the outermost one, whichever ran alone, before or since") {
  on_ranks([](World&, shard::GroupLayout layout) {
    for (const bool alone_first : {false, true}) {
      manual_seed(1);
      Pair pair;
      shard_pair(pair, {.layout = layout});
      if (alone_first) pair.second(ones({2, 5}));
      pair(ones({2, 5}));
      pair.second(ones({2, 5}));
      shard::reshard(pair);
      const auto refusal = [](const nn::Linear& layer) {
        try {
          layer.weight.tensor().to_vector<float>();
        } catch (const Error& e) {
          return std::string(e.what());
        }
        return std::string();
      };
      expect(refusal(pair.first).find("'first'") != std::string::npos, "{}", refusal(pair.first));
      expect(refusal(pair.second).find("'second'") != std::string::npos, "{}", refusal(pair.second));
    }
  });
}

TEST_CASE("frozen layers above an ignored one that is trained, whichever a rank's graph has") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const int user : {0, world.size()}) {
      manual_seed(1);
      Model by_hand;
      by_hand.frozen.set_requires_grad(false);
      Model model = by_hand.clone();
      const std::vector<const nn::Module*> ignored = {&model.own};
      for (nn::Linear* layer : {&model.frozen.first, &model.frozen.second})
        shard::fully_shard(*layer, {.layout = layout});
      shard::fully_shard(model, {.layout = layout, .ignored_modules = ignored});
      const auto backward = [&](Model& m) {
        m.zero_grad();
        m.passes_by = user != world.size() && world.rank() != user;
        sum(square(m(input_of(world.rank())))).backward();
        return m.own.weight.grad().to_vector<float>();
      };
      for (int times = 0; times < 2; ++times)
        expect(backward(model) == backward(by_hand), "{} uses the frozen layers", user);
    }
  });
}

TEST_CASE("a hook on all ranks reads the parameters of a layer that one rank's graph leaves out") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const int user : {0, 1})
      for (const int at : {0, 1, 2})  // the input's gradient, that between the layers, the output's
        for (const bool second : {false, true}) {
          manual_seed(1);
          Pair by_hand;
          Pair pair = by_hand.clone();
          shard_pair(pair, {.layout = layout});
          std::vector<float> seen;
          const auto backward = [&](Pair& p) {
            Tensor x = input_of(world.rank()).requires_grad_();
            p.uses_second = world.rank() == user;
            const auto look = [&](const Tensor&) {
              const Tensor& weight = second ? p.second.weight.tensor() : p.first.weight.tensor();
              seen.push_back(sum(square(weight.detach())).template item<float>());
              return Tensor{};
            };
            struct Between final : nn::ModuleObserver {
              std::function<Tensor(const Tensor&)> look;
              void after_forward(nn::Module&, std::span<Tensor* const> outputs) override {
                register_hook(*outputs[0], look).keep();
              }
            } between;
            between.look = look;
            const Subscription watching = p.first.observe(between);
            if (at == 0) register_hook(x, look).keep();
            const Tensor y = p(x);
            if (at == 2) register_hook(y, look).keep();
            sum(y).backward();
          };
          backward(by_hand);
          const std::vector<float> expected = std::exchange(seen, {});
          for (int times = 0; times < 2; ++times) {
            seen.clear();
            backward(pair);
            expect(seen == expected, "user {}, hook {}, second {}: {} values for {}", user, at, second,
                   seen.size(), expected.size());
          }
        }
  });
}

TEST_CASE("a loss on one rank of an output that comes of no parameter takes part in the others' backward") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const int user : {0, 1}) {
      manual_seed(1);
      Fork by_hand;
      Fork fork = by_hand.clone();
      shard::fully_shard(fork, {.layout = layout});
      for (int times = 0; times < 2; ++times) {
        fork.zero_grad();
        backward(fork, world.rank(), user);
        const Gradients expected =
            average_by_hand(by_hand, world.size(), [&](int rank) { backward(by_hand, rank, user); });
        expect_gradients(fork, world, expected, "with one user");
      }
    }
  });
}

TEST_CASE("a replica whose loss reaches none of its parameters takes part in the others' average") {
  on_ranks([](World& world, shard::GroupLayout) {
    for (const int user : {0, 1}) {
      manual_seed(1);
      Fork by_hand;
      Fork fork = by_hand.clone();
      const shard::DataParallel replica(fork, world.group());
      for (int times = 0; times < 2; ++times) {
        fork.zero_grad();
        backward(fork, world.rank(), user);
        const Gradients expected =
            average_by_hand(by_hand, world.size(), [&](int rank) { backward(by_hand, rank, user); });
        const std::string found = difference(gradients(fork), expected);
        expect(found.empty(), "user {}: {}", user, found);
      }
    }
  });
}

TEST_CASE("a weight tied to another model's is averaged in backwards of either, whichever rank used it") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const int user : {0, 1, world.size()}) {
      manual_seed(1);
      Pair of_a, of_b;
      nn::tie(of_a.first.weight, of_b.second.weight);
      Pair a, b;
      a.load_state_dict(of_a.state_dict());
      b.load_state_dict(of_b.state_dict());
      nn::tie(a.first.weight, b.second.weight);
      shard_pair(a, {.layout = layout});
      shard_pair(b, {.layout = layout});
      const auto backward = [&](Pair& p, int rank) {
        p.uses_second = rank == user || user == world.size();
        sum(square(p(input_of(rank)))).backward();
        p.uses_second = true;
      };
      for (int times = 0; times < 2; ++times) {
        a.zero_grad(), b.zero_grad();
        a.uses_second = true;
        a(input_of(world.rank()));  // ahead, so that what it keeps is here
        backward(b, world.rank());
        const Gradients expected =
            average_by_hand(of_b, world.size(), [&](int rank) { backward(of_b, rank); });
        const std::string found =
            difference(as_sharded(whole_gradients(b, world.group()), b), as_sharded(expected, b));
        expect(found.empty(), "user {}: {}", user, found);
      }
    }
  });
}

TEST_CASE("a parameter read before the forward is there in the backward, whichever rank's loss uses it") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const int user : {0, 1})
      for (const bool after : {false, true}) {
        manual_seed(1);
        Pair by_hand;
        Pair pair = by_hand.clone();
        shard_pair(pair, {.layout = layout});
        const auto backward = [&](Pair& p, int rank) {
          const auto read = [&] { return sum(square(p.first.weight.tensor())); };
          Tensor term = after ? Tensor() : read();
          const Tensor y = p(input_of(rank));
          if (after) term = read();
          const Tensor loss = sum(square(y));
          (rank == user ? add(loss, term) : loss).backward();
        };
        for (int times = 0; times < 2; ++times) {
          pair.zero_grad();
          backward(pair, world.rank());
          const Gradients expected =
              average_by_hand(by_hand, world.size(), [&](int rank) { backward(by_hand, rank); });
          const std::string found =
              difference(whole_gradients(pair, world.group()), as_sharded(expected, pair));
          expect(found.empty(), "user {}, after the forward {}: {}", user, after, found);
        }
      }
  });
}

TEST_CASE("a backward of a model that is gone makes the same calls, whichever rank's graph has its layers") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const int user : {0, 1}) {
      manual_seed(1);
      Tensor loss;
      {
        Pair pair;
        shard_pair(pair, {.layout = layout});
        pair.uses_second = world.rank() == user;
        loss = sum(square(pair(input_of(world.rank()))));
      }
      loss.backward();
      world.group().barrier();
    }
  });
}

TEST_CASE("a backward that failed keeps nothing of what it would not have gathered") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(1);
    Pair pair;
    pair.first.set_requires_grad(false);
    shard::fully_shard(pair.first, {.layout = layout, .backward_gather = shard::BackwardGather::no});
    shard::fully_shard(pair.second, {.layout = layout});
    shard::fully_shard(pair, {.layout = layout});
    shard::unshard(pair.first);
    const Tensor y = pair(input_of(world.rank()));
    shard::unshard(pair.first);
    const Subscription hook =
        register_hook(y, [](const Tensor&) -> Tensor { throw std::runtime_error("not this one"); });
    expect_refused<std::runtime_error>([&] { sum(y).backward(); }, "not this one");
    world.group().barrier();
    expect(!pair.first.weight.tensor().storage().resident(), "it is here still");
  });
}

TEST_CASE("calls of two like models never pass for each other's, when a rank's graph leaves a forward out") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(1);
    Pair one;
    shard::fully_shard(one, {.layout = layout});
    const auto step = [&](int leaves_out) {
      manual_seed(1);
      one.zero_grad();
      Pair other;
      shard::fully_shard(other, {.layout = layout});
      const Tensor first = one(input_of(0));
      shard::reshard(one);  // what is kept comes before `other` in the last forward's list too
      const Tensor between = other(input_of(1)), last = one(input_of(2));
      const Tensor loss = add(sum(between), sum(last));
      (world.rank() == leaves_out ? loss : add(sum(first), loss)).backward();
    };
    step(-1);
    // After a renewal too, which one of the two was made before.
    for (const int leaves_out : {0, 1, 0}) {
      // A slow rank may hear of it before its backward.
      expect_refused<CollectiveError>([&] { step(leaves_out); }, " of model ");
      world.group().renew();
    }
  });
}
