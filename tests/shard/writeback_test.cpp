// What the user puts in the place of parameters and gradients: it is taken into the shard before the next
// gather, or refused in FSDP1's words.
#include <array>

#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "tests/sanitizer.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Pair final : nn::Layer<Pair> {
  nn::Linear first{5, 5}, second{5, 7};
  Tensor forward(const Tensor& x) const { return second(relu(first(x))); }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
  }
};

Pair seeded_pair() {
  manual_seed(42);
  return {};
}

enum class Form { per_parameter, flat, fsdp };

void shard_pair(Pair& pair, Form form, shard::ShardingStrategy strategy, bool inner,
                shard::WritebackCheck check = shard::WritebackCheck::on) {
  if (form == Form::fsdp) {
    const shard::FullyShardedDataParallel handle(
        pair, {.strategy = strategy,
               .auto_wrap = inner ? shard::wrap_classes({"Linear"}) : shard::AutoWrap(),
               .writeback_check = check,
               .use_orig_params = true});
    return;
  }
  const shard::Options options{
      .layout = form == Form::flat ? shard::GroupLayout::flat : shard::GroupLayout::per_parameter,
      .strategy = strategy,
      .writeback_check = check};
  if (inner) shard::fully_shard(pair.first, options);
  shard::fully_shard(pair, options);
}

/// `body(world, form, strategy, inner)`.
template <class F>
void on_all(F&& body) {
  using enum shard::ShardingStrategy;
  for (const int ranks : worlds())
    for (const Form form : {Form::per_parameter, Form::flat, Form::fsdp})
      for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
        for (const bool inner : {false, true}) {
          INFO(ranks << " ranks, form " << static_cast<int>(form) << ", strategy "
                     << static_cast<int>(strategy) << ", inner " << inner);
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, form, strategy, inner); }));
        }
}

Tensor input_of(int rank, int step) { return batch_of(rank, step, 5).x; }

/// A step by hand and one of the sharded pair.
void step_both(World& world, Pair& pair, Pair& by_hand, nn::Optimizer& optimizer, nn::Optimizer& reference,
               int step) {
  sum(square(pair(input_of(world.rank(), step)))).backward();
  const Gradients before = gradients(by_hand);
  set_gradients(by_hand, plus(before, average_by_hand(by_hand, world.size(), [&](int rank) {
                                sum(square(by_hand(input_of(rank, step)))).backward();
                              })));
  optimizer.step();
  reference.step();
}

}  // namespace

TEST_CASE("a replaced parameter counts from the next forward on, by its object or its values") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    for (const bool change_first : {false, true})
      for (const bool change_data : {false, true})
        for (const bool ran : {false, true}) {
          Pair pair = seeded_pair(), by_hand = seeded_pair();
          shard_pair(pair, form, strategy, inner);
          if (ran) sum(pair(input_of(0, 0))).backward();
          pair.zero_grad();
          for (Pair* p : {&pair, &by_hand}) {
            nn::Param& target = change_first ? p->first.weight : p->second.weight;
            nn::Parameter fresh(full(target.data().shape(), 2.0));
            if (change_data)
              target.set_data(fresh.data());
            else
              target = fresh;
          }
          nn::AdamW optimizer(pair.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
          expect_values(pair, by_hand, "at once");
          for (int step = 0; step < 2; ++step) {
            step_both(world, pair, by_hand, optimizer, reference, step);
            expect_values(pair, by_hand, "after a step");
            optimizer.zero_grad();
            reference.zero_grad();
          }
        }
  });
}

TEST_CASE("the object that was replaced goes on alone, and the new one's gradient counts") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    Pair pair = seeded_pair(), by_hand = seeded_pair();
    shard_pair(pair, form, strategy, inner);
    nn::Parameter old = pair.first.weight.object();
    const Tensor part = clone(old.local().detach());
    sum(pair(input_of(0, 0))).backward();
    set_gradients(by_hand, average_by_hand(by_hand, world.size(),
                                           [&](int) { sum(by_hand(input_of(0, 0))).backward(); }));
    for (Pair* p : {&pair, &by_hand}) {
      nn::Parameter fresh(full(p->first.weight.local().shape(), 2.0));
      fresh.set_grad(full(fresh.local().shape(), 3.0));
      p->first.weight = fresh;
    }
    nn::Sgd optimizer(pair.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
    nn::Sgd of_old({old}, {.lr = 1.0});
    step_both(world, pair, by_hand, optimizer, reference, 1);
    expect(old.local().to_vector<float>() == part.to_vector<float>(), "old values");
    of_old.step();
    expect_values(pair, by_hand, "after the old one's step");
    old.set_data(zeros({2}));
    expect_values(pair, by_hand, "after the old one's writing");
  });
}

TEST_CASE("what the object before kept does not come to the new one") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    for (const bool frozen : {false, true}) {
      Pair pair = seeded_pair(), by_hand = seeded_pair();
      shard_pair(pair, form, strategy, inner);
      const auto backward = [&](Pair& p, int rank, int step) {
        sum(square(p(input_of(rank, step)))).backward();
      };
      {
        const auto guard = shard::no_sync(pair);
        backward(pair, world.rank(), 0);
      }
      for (Pair* p : {&pair, &by_hand})
        p->second.weight = nn::Parameter(full(p->second.weight.local().shape(), 2.0), !frozen);
      backward(pair, world.rank(), 1);
      const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
        // This rank's own gradient of the first step, with the values of then, by all but the one that is
        // new.
        Pair before = seeded_pair();
        backward(before, rank, 0);
        backward(by_hand, rank, 1);
        for (std::size_t i = 0; i < 4; ++i) {
          nn::Parameter p = by_hand.parameters()[i];
          if (i != 2) add_(p.grad(), before.parameters()[i].grad());
        }
      });
      expect_gradients(pair, world, expected, frozen ? "beside a frozen one" : "beside a new one");
    }
  });
}

TEST_CASE("a gradient that is replaced counts in place of the average, one that is dropped begins anew") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    for (const bool none : {false, true}) {
      Pair pair = seeded_pair(), by_hand = seeded_pair();
      shard_pair(pair, form, strategy, inner);
      nn::Adam optimizer(pair.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
      sum(square(pair(input_of(world.rank(), 0)))).backward();
      set_gradients(by_hand, average_by_hand(by_hand, world.size(), [&](int rank) {
                      sum(square(by_hand(input_of(rank, 0)))).backward();
                    }));
      for (Pair* p : {&pair, &by_hand}) {
        nn::Param& target = p->second.weight;
        target.set_grad(none ? Tensor{} : full(target.local().shape(), 2.0));
      }
      optimizer.step();
      reference.step();
      expect_values(pair, by_hand, "with the replaced gradient");
      step_both(world, pair, by_hand, optimizer, reference, 1);
      expect_values(pair, by_hand, "without clearing");
    }
  });
}

TEST_CASE("other shapes than this rank's are refused before any call, and nothing is changed") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    for (const bool gradient : {false, true}) {
      Pair pair = seeded_pair(), by_hand = seeded_pair();
      shard_pair(pair, form, strategy, inner);
      nn::Param& target = world.rank() == 0 ? pair.first.weight : pair.second.weight;
      const nn::Parameter own = target.object();
      const bool part = own.local().numel() > 0;
      const Tensor odd = zeros({own.local().numel() + 1});
      if (gradient)
        target.set_grad(odd);
      else
        target = nn::Parameter(odd);
      const auto attempt = [&] { pair(input_of(0, 0)); };
      if (part) {
        const std::string message = message_of<ShapeError>(attempt);
        const std::string start = std::string("Cannot writeback when the ") +
                                  (gradient ? "gradient" : "parameter") + " shape changes";
        expect(message.starts_with(start) && message.find("weight'") != std::string::npos, "{}", message);
      }
      world.group().barrier();
      if (gradient)
        target.set_grad({});
      else
        target = own;
      expect_values(pair, by_hand, "as before");
      sum(pair(input_of(0, 0))).backward();
    }
  });
}

TEST_CASE("what is replaced between a forward and its backward is refused by the backward") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    for (const bool change_data : {false, true}) {
      Pair pair = seeded_pair();
      shard_pair(pair, form, strategy, inner);
      const Tensor loss = sum(pair(input_of(world.rank(), 0)));
      nn::Param& target = pair.second.weight;
      const nn::Parameter own = target.object();
      const Tensor other = clone(target.data());
      if (change_data)
        target.set_data(other);
      else
        target = nn::Parameter(other);
      const std::string message = message_of<StateError>([&] { loss.backward(); });
      const bool keeps = strategy == shard::ShardingStrategy::shard_grad_op && world.size() > 1;
      if (!change_data || keeps)
        expect(message.find("does not support changing the parameters between forward and backward") !=
                   std::string::npos,
               "{}", message);
      if (keeps)
        expect(message.find("HandleShardingStrategy.SHARD_GRAD_OP") != std::string::npos, "{}", message);
      world.group().barrier();
      target = own;
      sum(pair(input_of(world.rank(), 0))).backward();
    }
  });
}

TEST_CASE(
    "set_data takes a part or the whole whatever is gathered, and is kept also where no backward follows") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    for (const bool whole : {true, false})
      for (const int when : {0, 1, 2, 3})
        for (const int times : {1, 2}) {
          Pair pair = seeded_pair(), by_hand = seeded_pair();
          shard_pair(pair, form, strategy, inner);
          Tensor abandoned;
          if (when == 1) abandoned = sum(pair(input_of(world.rank(), 0)));
          if (when == 2) shard::unshard(pair);
          if (when == 3) {
            const NoGrad guard;
            pair(input_of(world.rank(), 0));
          }
          manual_seed(7);
          for (int i = 0; i < times; ++i)
            for (const bool first : {true, false}) {
              const Tensor values = randn({first ? 5 : 7, 5});
              nn::Param& target = first ? pair.first.weight : pair.second.weight;
              (first ? by_hand.first : by_hand.second).weight.set_data(values);
              target.set_data(whole ? values : shard::part_of(target.object(), values));
            }
          shard::reshard(pair);
          expect_values(pair, by_hand, "set");
          nn::Sgd optimizer(pair.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
          step_both(world, pair, by_hand, optimizer, reference, 1);
          expect_values(pair, by_hand, "after a step");
        }
  });
}

TEST_CASE("tied parameters are replaced together or not at all") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool) {
    for (const bool both : {true, false}) {
      Pair pair = seeded_pair();
      Pair other = seeded_pair();
      pair.second = nn::Linear(5, 5);
      nn::tie(pair.first.weight, pair.second.weight);
      shard_pair(pair, form, strategy, false);
      const nn::Parameter fresh(full(pair.first.weight.local().shape(), 2.0));
      pair.first.weight = fresh;
      if (both) pair.second.weight = fresh;
      const auto attempt = [&] { return pair(input_of(world.rank(), 0)); };
      if (!both) {
        const std::string message = message_of<NotImplementedError>(attempt);
        expect(message.starts_with("Changing shared parameters is not supported yet"), "{}", message);
      } else {
        sum(attempt()).backward();
        const nn::StateDict whole = shard::full_state_dict(pair);
        expect(whole[0].second.to_vector<float>() == std::vector<float>(25, 2.0F), "both have it");
      }
    }
  });
}

TEST_CASE("without the check what was replaced is refused, not taken") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    Pair pair = seeded_pair(), by_hand = seeded_pair();
    shard_pair(pair, form, strategy, inner, shard::WritebackCheck::off);
    const nn::Parameter own = pair.first.weight.object();
    pair.first.weight = nn::Parameter(full(own.local().shape(), 2.0));
    const std::string message = message_of<StateError>([&] { pair(input_of(world.rank(), 0)); });
    expect(message.find("'first.weight'") != std::string::npos, "{}", message);
    pair.first.weight = own;
    expect_values(pair, by_hand, "as before");
  });
}

TEST_CASE("what is put in the place of a part of a flat parameter is refused by name, also by states") {
  for (const int ranks : {1, 2})
    CHECK_NOTHROW(run_ranks(ranks, [](World&) {
      Pair pair = seeded_pair(), by_hand = seeded_pair();
      const shard::FullyShardedDataParallel handle(pair);
      const nn::Parameter own = pair.first.weight.object();
      pair.first.weight = nn::Parameter(zeros(own.local().shape()));
      const std::function<void()> calls[] = {[&] { pair(input_of(0, 0)); },
                                             [&] { shard::full_state_dict(pair); },
                                             [&] { const auto scope = shard::summon_full_params(pair); }};
      for (const auto& call : calls)
        expect(message_of<StateError>(call).find("'first.weight'") != std::string::npos, "refused");
      pair.first.weight = own;
      expect_values(pair, by_hand, "as before");
    }));
}

TEST_CASE("a module that was moved over another one takes what is put into it") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    Pair pair = seeded_pair(), by_hand = seeded_pair(), over = seeded_pair();
    shard_pair(pair, form, strategy, inner);
    over = std::move(pair);
    for (const double value : {2.0, 3.0}) {  // before its first forward, and after it
      over.first.weight = nn::Parameter(full(over.first.weight.local().shape(), value));
      by_hand.first.weight = nn::Parameter(full({5, 5}, value));
      nn::Sgd optimizer(over.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
      step_both(world, over, by_hand, optimizer, reference, 0);
      expect_values(over, by_hand, "after a step");
    }
  });
}

TEST_CASE("a clone takes what was put into it, or into what it is of, before anything is gathered") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    enum class First { step, state, summon, unshard, clip };
    for (const bool before : {true, false})
      for (const First use : {First::step, First::state, First::summon, First::unshard, First::clip}) {
        Pair pair = seeded_pair(), by_hand = seeded_pair();
        shard_pair(pair, form, strategy, inner);
        const auto put = [](Pair& p) {
          p.first.weight = nn::Parameter(full(p.first.weight.local().shape(), 2.0));
        };
        if (before) put(pair);
        Pair copy = pair.clone();
        if (!before) put(copy);
        put(by_hand);
        const auto expect_put = [&] {
          expect(copy.first.weight.data().to_vector<float>() == std::vector<float>(25, 2.f), "whole");
        };
        if (use == First::state) expect_values(copy, by_hand, "of the clone");
        if (use == First::summon) {
          const auto scope = shard::summon_full_params(copy);
          expect_put();
        }
        if (use == First::unshard) {
          inner ? shard::unshard(copy.first) : shard::unshard(copy);
          expect_put();
          shard::reshard(copy);
        }
        if (use == First::clip) {
          const auto norm_of_ones = [](Pair& p) {
            for (nn::Parameter parameter : p.parameters())
              parameter.set_grad(ones(parameter.local().shape()));
            const double norm = shard::clip_grad_norm_(p.parameters(), 1e9).item();
            for (nn::Parameter parameter : p.parameters()) parameter.set_grad({});
            return norm;
          };
          const double norm = norm_of_ones(copy), expected = norm_of_ones(by_hand);
          expect(norm == expected, "a norm of {} in place of {}", norm, expected);
        }
        nn::Sgd optimizer(copy.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
        step_both(world, copy, by_hand, optimizer, reference, 0);
        expect_values(copy, by_hand, "after a step");
      }
  });
}

TEST_CASE("what was put in the place of an inner unit's parameter stays that unit's in an outer one") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    if (!inner) return;
    Pair pair = seeded_pair(), by_hand = seeded_pair();
    const shard::Options options{
        .layout = form == Form::per_parameter ? shard::GroupLayout::per_parameter : shard::GroupLayout::flat,
        .strategy = strategy};
    shard::fully_shard(pair.first, options);
    for (Pair* p : {&pair, &by_hand})
      p->first.weight = nn::Parameter(full(p->first.weight.local().shape(), 2.0));
    if (form == Form::fsdp)
      const shard::FullyShardedDataParallel handle(pair, {.strategy = strategy, .use_orig_params = true});
    else
      shard::fully_shard(pair, options);
    nn::Sgd optimizer(pair.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
    step_both(world, pair, by_hand, optimizer, reference, 0);
    expect_values(pair, by_hand, "after a step");
  });
}

TEST_CASE("a member that is set to none leaves the others to be trained") {
  on_all([](World& world, Form form, shard::ShardingStrategy strategy, bool inner) {
    Pair pair = seeded_pair(), by_hand = seeded_pair();
    shard_pair(pair, form, strategy, inner);
    for (Pair* p : {&pair, &by_hand}) p->first.bias = nn::Parameter();
    nn::Sgd optimizer(pair.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
    step_both(world, pair, by_hand, optimizer, reference, 0);
    expect_values(pair, by_hand, "after a step");
  });
}

TEST_CASE("what is put into a module on meta is kept until that has memory") {
  on_all([](World&, Form form, shard::ShardingStrategy strategy, bool inner) {
    Pair pair = seeded_pair();
    pair.to(Device::meta());
    shard_pair(pair, form, strategy, inner);
    pair.first.weight = nn::Parameter(full(pair.first.weight.local().shape(), 2.0));
    expect(!message_of<DeviceError>([&] { shard::full_state_dict(pair); }).empty(), "no values yet");
    pair.materialize(Device::cpu(), [](const std::string&, const Tensor& t) { fill_(t, 1.0); });
    const nn::StateDict state = shard::full_state_dict(pair);
    expect(state[0].second.to_vector<float>() == std::vector<float>(25, 2.0F), "it is kept");
    expect(state[1].second.to_vector<float>() == std::vector<float>(5, 1.0F), "beside others");
    pair.second.bias = nn::Parameter(to(pair.second.bias.local().detach(), Device::meta()));
    const std::string message = message_of<DeviceError>([&] { pair(input_of(0, 0)); });
    expect(message.find("bias'") != std::string::npos, "{}", message);
  });
}

TEST_CASE("sums over shards that wait for the replicas are of the object that was there") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    CHECK_NOTHROW(run_ranks(4, [&](World& world) {
      Pair pair = seeded_pair(), by_hand = seeded_pair();
      shard::fully_shard(pair, {.mesh = world.mesh({2, 2}, {"replica", "shard"}), .layout = layout});
      const auto backward = [](Pair& p) { sum(p(ones({2, 5}))).backward(); };
      shard::set_requires_all_reduce(pair, false);
      backward(pair);
      shard::set_requires_all_reduce(pair, true);
      pair.second.bias = nn::Parameter(clone(pair.second.bias.local().detach()));
      backward(pair);
      backward(by_hand);
      by_hand.second.bias.set_grad(mul(by_hand.second.bias.grad(), 0.5));
      Gradients expected = gradients(by_hand);
      for (std::vector<float>& g : expected)
        for (float& x : g) x *= 2;
      const auto scope = shard::summon_full_params(pair, {.with_grads = true});
      expect(difference(gradients(pair), expected).empty(), "twice, but for the new one: {}",
             difference(gradients(pair), expected));
    }));
}

TEST_CASE("a parameter without elements is replaced by none with some, in any layout") {
  for (const int ranks : worlds())
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      CHECK_NOTHROW(run_ranks(ranks, [&](World&) {
        Pair pair = seeded_pair();
        pair.first.bias = nn::Parameter(zeros({0}));
        shard::fully_shard(pair, {.layout = layout});
        pair.first.bias = nn::Parameter(zeros({3}));
        const std::string message = message_of<ShapeError>([&] { shard::full_state_dict(pair); });
        expect(message.starts_with("Cannot writeback when the parameter shape changes"), "{}", message);
      }));
}
