// Ranks that came apart, by a fault or by what their graphs hold, go on with the same calls: numbers and
// names of models, parts of roots, what was read before other forwards, and ends of backwards of two kinds.
#include <atomic>
#include <set>
#include <thread>

#include "autograd/autograd.h"
#include "collectives/observe.h"
#include "shard/checkpoint.h"
#include "shard/data_parallel.h"
#include "shard/fully_shard.h"
#include "shard/summon.h"
#include "tests/shard/twins.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};
Tensor input_of(int rank) { return batch_of(rank, 0, 5).x; }

/// One output that comes of parameters, and one that does not.
struct Pair final : nn::Layer<Pair> {
  nn::Linear first{5, 5}, second{5, 5};
  std::pair<Tensor, Tensor> forward(const Tensor& x) const { return {second(tanh(first(x))), mul(x, 2)}; }
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
Pair seeded() {
  manual_seed(1);
  return {};
}

/// A part that is in several models.
struct WithShared final : nn::Layer<WithShared> {
  std::shared_ptr<nn::Linear> shared;
  nn::Linear own{5, 5};
  explicit WithShared(std::shared_ptr<nn::Linear> shared) : shared(std::move(shared)) {}
  Tensor forward(const Tensor& x) const { return own(tanh((*shared)(x))); }
  void visit(auto&& on) {
    on("shared", *shared);
    on("own", own);
  }
};

/// What `each_tensor` cannot look into.
struct Found {
  Tensor y;
};
struct InStruct final : nn::Layer<InStruct> {
  nn::Linear layer{5, 5};
  Found forward(const Tensor& x) const { return {layer(x)}; }
  void visit(auto&& on) { on("layer", layer); }
};
struct Count {
  int rows;
};
struct OfNumbers final : nn::Layer<OfNumbers> {
  nn::Linear layer{5, 5};
  std::pair<Count, Tensor> forward(const Tensor& x) const {
    return {Count{static_cast<int>(x.size(0))}, layer(x)};
  }
  void visit(auto&& on) { on("layer", layer); }
};

/// The gradients of a loss on all ranks are those by hand.
void expect_averages(Pair& net, World& world, const std::function<Tensor(Pair&, int)>& loss_of,
                     const char* when) {
  net.zero_grad();
  Pair by_hand = seeded();
  loss_of(net, world.rank()).backward();
  const Gradients expected =
      average_by_hand(by_hand, world.size(), [&](int rank) { loss_of(by_hand, rank).backward(); });
  expect_gradients(net, world, as_sharded(expected, net), when);
  net.zero_grad();
}
Tensor plain_loss(Pair& net, int rank) { return sum(square(net(input_of(rank)).first)); }
void expect_training(Pair& net, World& world, const char* when) {
  expect_averages(net, world, plain_loss, when);
}

/// Rank 0 throws when the others go on with `act`, in which they hear of it; all renew.
class Parting {
 public:
  void operator()(World& world, const std::function<void()>& act) {
    bool heard = false;
    try {
      if (world.rank() == 0) wait_and_throw(world.size() - 1);
      ++gone_on_;
      act();
      world.group().barrier();
    } catch (const Boom&) {
      heard = true;
    } catch (const CollectiveError&) {
      heard = true;
    }
    expect(heard, "rank {} heard nothing", world.rank());
    world.mesh().renew();
  }

 private:
  void wait_and_throw(int others) {
    while (gone_on_ < others) std::this_thread::yield();
    gone_on_ = 0;
    throw Boom();
  }
  std::atomic<int> gone_on_ = 0;
};

}  // namespace

TEST_CASE("a new model trains where some ranks alone had run the one before") {
  Parting part;
  on_ranks([&](World& world, shard::GroupLayout layout) {
    {
      Pair net = seeded();
      shard_pair(net, {.layout = layout});
      part(world, [&] { net(input_of(1)); });
    }
    Pair net = seeded();
    shard_pair(net, {.layout = layout});
    expect_training(net, world, "a new model");
  });
}

TEST_CASE("a model trains whose first forward some ranks alone had begun, whatever of it runs next") {
  Parting part;
  on_ranks([&](World& world, shard::GroupLayout layout) {
    const std::array<std::function<void(Pair&)>, 5> nexts = {
        [](Pair&) {}, [](Pair& net) { shard::full_state_dict(net); },
        [](Pair& net) { const auto scope = shard::summon_full_params(net); },
        [](Pair& net) { shard::unshard(net.second); },
        [&](Pair& net) { sum(net.first(input_of(world.rank()))).backward(); }};
    for (const auto& next : nexts) {
      Pair net = seeded();
      shard_pair(net, {.layout = layout});
      part(world, [&] { net(input_of(1)); });
      next(net);
      expect_training(net, world, "first");
      expect_training(net, world, "second");
    }
  });
}

TEST_CASE("models have other numbers since a renewal, the same on ranks that had run unlike many") {
  Parting part;
  on_ranks([&](World& world, shard::GroupLayout layout) {
    Pair one = seeded(), late = seeded(), other = seeded();
    for (Pair* p : {&one, &late, &other}) shard_pair(*p, {.layout = layout});
    expect_training(one, world, "before");
    part(world, [&] { late(input_of(1)); });
    for (Pair* p : {&other, &late, &one}) expect_training(*p, world, "after");
  });
}

TEST_CASE("what was read of a group that other forwards kept is of the plan on all ranks") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const bool evaluates : {true, false})
      for (const int user : {0, 1}) {
        Pair net = seeded();
        shard_pair(net, {.layout = layout, .reshard_after_forward = false});
        const auto loss_of = [&](Pair& of, int rank) {
          const auto forward = [&] {
            const GradMode mode(!evaluates);
            return of(input_of(rank)).first;
          };
          const Tensor before = forward();
          const Tensor term = sum(square(of.first.weight.tensor()));
          const Tensor again = forward(), loss = plain_loss(of, rank);
          return rank == user ? add(loss, term) : loss;
        };
        for (int step = 0; step < 2; ++step) expect_averages(net, world, loss_of, "kept");
      }
  });
}

namespace {

/// `spare` does not run.
struct Spare final : nn::Layer<Spare> {
  nn::Linear own{5, 5}, spare{5, 5};
  Tensor forward(const Tensor& x) const { return own(x); }
  void visit(auto&& on) {
    on("own", own);
    on("spare", spare);
  }
};

}  // namespace

TEST_CASE("a backward of a model that is gone has on all ranks what was read of it after its forward") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const int user : {0, 1}) {
      Tensor loss;
      {
        manual_seed(1);
        Spare net;
        shard::fully_shard(net.spare, {.layout = layout});
        shard::fully_shard(net, {.layout = layout});
        loss = sum(square(net(input_of(world.rank()))));
        const Tensor term = sum(square(net.spare.weight.tensor()));
        if (world.rank() == user) loss = add(loss, term);
      }
      loss.backward();
      world.group().barrier();
    }
  });
}

TEST_CASE("backwards of a sharded model and of replicas end alike, in whichever order graphs have them") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const auto strategy : {shard::ShardingStrategy::full_shard, shard::ShardingStrategy::zero1})
      for (unsigned how = 0; how < 64; ++how) {
        Pair sharded = seeded(), replica = seeded();
        shard::fully_shard(sharded, {.layout = layout, .strategy = strategy});
        const shard::DataParallel replicas(replica, world.group());
        const unsigned mine = world.rank() == 0 ? how % 8 : how / 8;
        const auto s = sharded(input_of(0)), r = replica(input_of(0));
        const Tensor of_s = sum((mine & 1) != 0 ? s.first : s.second);
        const Tensor of_r = sum((mine & 2) != 0 ? r.first : r.second);
        const Tensor loss = (mine & 4) != 0 ? add(of_s, of_r) : add(of_r, of_s);
        loss.backward();
        world.group().barrier();
      }
  });
}

TEST_CASE("like models that a rank runs first in another order than it made them are told apart") {
  using Run = std::function<void(Pair&)>;
  const std::array<Run, 5> first_runs = {
      [](Pair& net) { plain_loss(net, 0).backward(); },
      [](Pair& net) {
        shard::unshard(net.second);
        net.second(input_of(0));
      },
      [](Pair& net) { net.second(input_of(0)); },
      [](Pair& net) { shard::full_state_dict(net); },
      [](Pair& net) { shard::grad_norm(net.parameters()); },
  };
  on_ranks([&](World& world, shard::GroupLayout layout) {
    const auto expect_told_apart = [&](const Run& run, const std::function<Pair(const Pair&)>& another) {
      const auto unlike = [&] {
        Pair one = seeded();
        shard_pair(one, {.layout = layout});
        Pair two = another(one);
        run(world.rank() == 0 ? two : one);
        world.group().barrier();
      };
      expect_refused<CollectiveError>(unlike, " of model ");
      world.mesh().renew();
    };
    for (const Run& run : first_runs) {
      expect_told_apart(run, [&](const Pair&) {
        Pair two = seeded();
        shard_pair(two, {.layout = layout});
        return two;
      });
      expect_told_apart(run, [](const Pair& one) { return one.clone(); });
    }
  });
}

TEST_CASE("parts of a model that a rank runs in another order are told apart") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto unlike = [&] {
      Pair net = seeded();
      shard_pair(net, {.layout = layout});
      (world.rank() == 0 ? net.first : net.second)(input_of(0));
      world.group().barrier();
    };
    expect_refused<CollectiveError>(unlike, "part ");
    world.mesh().renew();
  });
}

TEST_CASE("models count as they are made, their parts with them") {
  on_ranks([](World&, shard::GroupLayout layout) {
    std::vector<Pair> nets;
    for (int i = 0; i < 3; ++i) {
      nets.push_back(seeded());
      shard_pair(nets.back(), {.layout = layout});
    }
    std::set<std::string> labels;
    const Interception hears([&](const ObservedCall& call, const Interception::Proceed& proceed) {
      labels.insert(call.collective.label);
      proceed(call.collective);
    });
    const auto names = [&](const std::string& label) {
      return std::ranges::count_if(labels, [&](const auto& l) { return l.starts_with(label); });
    };
    nets[2].first(input_of(0));
    expect(names("root, part 1 of model 3") == 1, "{}", fmt::join(labels, "; "));
    for (const int net : {2, 1, 0}) nets[static_cast<std::size_t>(net)](input_of(0));
    for (const char* label : {"second of model 3", "second of model 2", "second"})
      expect(labels.contains(label), "{} is not in: {}", label, fmt::join(labels, "; "));
  });
}

TEST_CASE("what is read before two forwards of one loss is used on some ranks") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const int user : {0, 1})
      for (const int used : {0, 1, 2}) {
        Pair net = seeded();
        shard_pair(net, {.layout = layout});
        const auto loss_of = [&](Pair& of, int rank) {
          const Tensor term = sum(square(of.first.weight.tensor()));
          const Tensor one = plain_loss(of, rank), two = plain_loss(of, rank);
          const Tensor loss = used == 0 ? add(one, two) : used == 1 ? one : two;
          return rank == user ? add(loss, term) : loss;
        };
        for (int step = 0; step < 2; ++step) expect_averages(net, world, loss_of, "read before");
      }
  });
}

TEST_CASE("two objects of data parallelism average in one order, whichever forwards a rank's loss has") {
  using Loss = std::function<Tensor(Pair&, Pair&, int rank)>;
  const auto parts = [](Pair& one, Pair& two) {
    return std::array{sum(square(one(input_of(0)).first)), sum(square(two(input_of(1)).first)),
                      sum(square(one(input_of(2)).first))};
  };
  std::vector<Loss> losses;
  for (const int apart : {0, 1}) {
    for (const std::size_t left_out : {std::size_t{0}, std::size_t{1}, std::size_t{2}})
      losses.emplace_back([=](Pair& one, Pair& two, int rank) {
        auto all = parts(one, two);
        if (rank == apart) all[left_out] = mul(all[left_out], 0);
        if (rank == apart && left_out == 0) return add(all[1], all[2]);
        if (rank == apart && left_out == 2) return add(all[0], all[1]);
        return add(add(all[0], all[1]), all[2]);
      });
    // By the mark alone, in the loss before or after the other one.
    for (const bool swapped : {false, true})
      losses.emplace_back([=](Pair& one, Pair& two, int rank) {
        const Tensor a = sum(one(input_of(0)).first);
        const auto [y, of_none] = two(input_of(1));
        const Tensor b = sum(rank == apart ? of_none : y);
        return swapped ? add(b, a) : add(a, b);
      });
  }
  Parting part;
  on_ranks([&](World& world, shard::GroupLayout) {
    Pair one = seeded(), two = seeded(), hand_one = seeded(), hand_two = seeded();
    const shard::DataParallel of_one(one, world.group()), of_two(two, world.group());
    std::size_t number = 0;
    for (const Loss& loss : losses) {
      if (number++ % 2 == 1) part(world, [] {});  // what is compared after a fault comes in that order too
      loss(one, two, world.rank()).backward();
      const auto expect_average = [&](Pair& net, Pair& by_hand) {
        const auto backward = [&](int rank) { loss(hand_one, hand_two, rank).backward(); };
        expect_gradients(net, world, average_by_hand(by_hand, world.size(), backward), "two objects");
      };
      expect_average(one, hand_one);
      expect_average(two, hand_two);
      for (Pair* net : {&one, &two}) net->zero_grad();
    }
  });
}

TEST_CASE(
    "a model that some ranks alone had made before a fault is compared with none of the others' after it") {
  Parting part;
  on_ranks([&](World& world, shard::GroupLayout layout) {
    for (const bool replicas : {false, true}) {
      std::optional<shard::DataParallel> of_net;
      const auto share = [&](Pair& net) {
        if (replicas)
          of_net.emplace(net, world.group());
        else
          shard_pair(net, {.layout = layout});
      };
      part(world, [&] {
        Pair lost = seeded();
        share(lost);
      });
      of_net.reset();
      Pair net = seeded();
      share(net);
      expect_training(net, world, "made after a fault");
      part(world, [] {});
      expect_training(net, world, "after the next one");
    }
  });
}

TEST_CASE("what was read between forwards changes no later backward than the next one") {
  on_ranks([](World&, shard::GroupLayout layout) {
    std::vector<std::vector<std::string>> orders;
    for (const bool reads : {false, true}) {
      Pair net = seeded();
      shard_pair(net, {.layout = layout});
      Tensor loss = plain_loss(net, 0);
      if (reads) loss = add(loss, sum(square(net.second.weight.tensor())));
      loss.backward();
      plain_loss(net, 0).backward();  // lists of forwards are alike from the second one on
      std::vector<std::string>& order = orders.emplace_back();
      const Interception hears([&](const ObservedCall& call, const Interception::Proceed& proceed) {
        const std::string& label = call.collective.label;
        order.push_back(std::string(to_string(call.collective.kind)) +
                        label.substr(0, label.find(" of model")));
        proceed(call.collective);
      });
      plain_loss(net, 0).backward();
    }
    expect(orders[0] == orders[1], "{} and {}", fmt::join(orders[0], ", "), fmt::join(orders[1], ", "));
  });
}

TEST_CASE("what a backward left is read alike where one rank's graph alone had read it") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const int used : {0, 1, 2})
      for (const int reader : {0, 1}) {
        Pair net = seeded();
        shard_pair(net, {.layout = layout});
        shard::set_reshard_after_backward(net, false);
        Tensor x = input_of(0);
        if (world.rank() == reader) x.requires_grad_();  // so its gradient reads the first weight
        sum(net(x).first).backward();
        shard::set_reshard_after_backward(net, true);
        const auto loss_of = [&](Pair& of, int rank) {
          const Tensor term = sum(square(of.first.weight.tensor()));
          const Tensor one = plain_loss(of, rank), two = plain_loss(of, rank);
          const Tensor loss = used == 0 ? add(one, two) : used == 1 ? one : two;
          return rank == 0 ? add(loss, term) : loss;
        };
        for (int step = 0; step < 2; ++step) expect_averages(net, world, loss_of, "left and read");
      }
  });
}

TEST_CASE("forwards under data parallelism that one rank makes alone change no call") {
  Parting part;
  on_ranks([&](World& world, shard::GroupLayout) {
    Pair one = seeded(), two = seeded(), hand_one = seeded(), hand_two = seeded();
    const shard::DataParallel of_one(one, world.group()), of_two(two, world.group());
    const auto loss_of = [](Pair& a, Pair& b, int rank) {
      return add(plain_loss(a, rank), plain_loss(b, rank));
    };
    for (const bool renewed : {false, true}) {
      if (renewed) part(world, [] {});
      if (world.rank() == 0) {
        const NoGrad guard;
        two(input_of(0));
      }
      const Tensor loss = loss_of(one, two, world.rank());
      if (world.rank() == 0) one(input_of(0));
      loss.backward();
      for (auto [net, by_hand] : {std::pair{&one, &hand_one}, {&two, &hand_two}}) {
        const auto backward = [&](int rank) { loss_of(hand_one, hand_two, rank).backward(); };
        expect_gradients(*net, world, average_by_hand(*by_hand, world.size(), backward), "forwards alone");
      }
      for (Pair* net : {&one, &two}) net->zero_grad();
    }
  });
}

TEST_CASE("a part that a later object of data parallelism took over keeps what it had not averaged") {
  on_ranks([](World& world, shard::GroupLayout) {
    Pair net = seeded(), by_hand = seeded();
    shard::DataParallel whole(net, world.group());
    {
      const auto scope = whole.no_sync();
      plain_loss(net, world.rank()).backward();
    }
    const shard::DataParallel part(net.second, world.group());
    plain_loss(net, world.rank()).backward();
    const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
      for (int times = 0; times < 2; ++times) plain_loss(by_hand, rank).backward();
    });
    expect_gradients(net, world, expected, "taken over");
  });
}

TEST_CASE("what a tie to another root kept is gathered anew once all ranks have written it") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Pair by_hand = seeded(), one = seeded(), two = seeded();
    nn::tie(one.first.weight, two.first.weight);
    for (Pair* net : {&two, &one}) shard::fully_shard(*net, {.layout = layout});
    const NoGrad guard;
    for (int times = 0; times < 2; ++times) {
      const Tensor y = one(input_of(0)).first, expected = by_hand(input_of(0)).first;
      expect(y.to_vector<float>() == expected.to_vector<float>(), "rank {} read old values", world.rank());
      std::set<const void*> written;
      for (Pair* net : {&one, &two})
        for (const nn::Parameter& p : net->parameters())
          if (written.insert(p.id()).second) mul_(p.local(), 0.5);
      for (const nn::Parameter& p : by_hand.parameters()) mul_(p.local(), 0.5);
    }
  });
}

TEST_CASE("a checkpoint of what a fault left apart is refused on all ranks, also of replicas") {
  Parting part;
  const TempDirectory folder;
  on_ranks([&](World& world, shard::GroupLayout layout) {
    for (const bool replicas : {false, true}) {
      Pair net = seeded();
      std::optional<shard::DataParallel> of_net;
      if (replicas)
        of_net.emplace(net, world.group());
      else
        shard_pair(net, {.layout = layout});
      nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
      plain_loss(net, 0).backward();
      if (world.rank() != 0) optimizer.step();
      part(world, [] {});
      for (int times = 0; times < 2; ++times)
        expect_refused<StateError>(
            [&] { shard::save_checkpoint(net, optimizer, folder / "save", world.group()); },
            "cost some ranks of Pair a step");
    }
  });
}

TEST_CASE("what was sharded with a module that is gone is neither saved nor used as a whole") {
  using Call = std::function<void(nn::Linear&)>;
  const std::array<Call, 6> calls = {
      [](nn::Linear& left) { shard::full_state_dict(left); },
      [](nn::Linear& left) { shard::sharded_state_dict(left); },
      [](nn::Linear& left) { shard::gather_whole(left.weight, left.weight.local()); },
      [](nn::Linear& left) { shard::fully_shard(left); },
      [](nn::Linear& left) { shard::load_full_state_dict(left, nn::Linear(5, 5).state_dict()); },
      [](nn::Linear& left) { shard::grad_norm(left.parameters()); },
  };
  on_ranks([&](World&, shard::GroupLayout layout) {
    for (const bool tied : {false, true})
      for (const Call& call : calls) {
        Pair other = seeded();
        std::optional<Pair> gone(seeded());
        if (tied) nn::tie(other.first.weight, gone->first.weight);
        shard::fully_shard(*gone, {.layout = layout});
        nn::Linear left = std::move(tied ? other.first : gone->first);
        gone.reset();
        expect_refused<StateError>([&] { call(left); }, "a module that is gone");
      }
  });
}

TEST_CASE("what has another module in its place is gathered and reduced by nobody's list") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const bool keeps : {false, true}) {
      Pair net = seeded(), by_hand = seeded();
      shard::fully_shard(net.first, {.layout = layout, .reshard_after_forward = !keeps});
      shard::fully_shard(net.second, {.layout = layout, .reshard_after_forward = !keeps});
      shard::fully_shard(net, {.layout = layout, .reshard_after_forward = !keeps});
      for (int times = 0; times < 3; ++times) {
        Tensor old = net(input_of(world.rank())).first;
        {
          const auto scope = shard::no_sync(net);
          plain_loss(net, world.rank()).backward();
        }
        net.zero_grad();
        if (world.rank() != 0) old = {};
        for (Pair* of : {&net, &by_hand}) {
          manual_seed(static_cast<std::uint64_t>(times) + 7);
          of->second = nn::Linear(5, 5);
        }
        shard::fully_shard(net.second, {.layout = layout, .reshard_after_forward = !keeps});
        for (const bool trains : {false, true}) {
          if (!trains) {
            const NoGrad guard;
            for (int forwards = 0; forwards < 2; ++forwards)
              expect(
                  net(input_of(1)).first.to_vector<float>() == by_hand(input_of(1)).first.to_vector<float>(),
                  "rank {} computed with other values", world.rank());
            continue;
          }
          plain_loss(net, world.rank()).backward();
          const Gradients expected =
              average_by_hand(by_hand, world.size(), [&](int rank) { plain_loss(by_hand, rank).backward(); });
          expect_gradients(net, world, expected, "a new head");
          net.zero_grad();
        }
      }
    }
  });
}

TEST_CASE("what was cast while one rank kept a loss of it is gathered by nobody's list as it was") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Pair net = seeded(), by_hand = seeded();
    shard_pair(net, {.layout = layout});
    for (const DType dtype : {f64, f32, f64}) {
      net(to(input_of(1), net.first.weight.local().dtype()));  // a list that the next forward follows
      Tensor old = net(to(input_of(1), net.first.weight.local().dtype())).first;
      if (world.rank() != 0) old = {};
      for (Pair* of : {&net, &by_hand}) of->to(dtype);
      for (int forwards = 0; forwards < 2; ++forwards) {
        const Tensor x = to(input_of(1), dtype);
        expect(to(net(x).first, f64).to_vector<double>() == to(by_hand(x).first, f64).to_vector<double>(),
               "{}", name_of(dtype));
      }
    }
  });
}

TEST_CASE("a term of another model's parameters is used on some ranks, whatever forwards the loss has") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const int user : {0, 1})
      for (const bool ran : {false, true})
        for (const bool reads_first : {false, true}) {
          Pair net = seeded(), other = seeded(), by_hand = seeded(), other_by_hand = seeded();
          for (Pair* of : {&net, &other}) shard_pair(*of, {.layout = layout});
          const auto loss_of = [&](Pair& of, Pair& term_of, int rank) {
            if (ran) term_of(input_of(rank));
            const auto term = [&] { return sum(square(term_of.first.weight.tensor())); };
            const Tensor before = reads_first ? term() : Tensor();
            const Tensor loss = plain_loss(of, rank);
            const Tensor its = reads_first ? before : term();
            return rank == user ? add(loss, its) : loss;
          };
          for (int step = 0; step < 2; ++step) {
            loss_of(net, other, world.rank()).backward();
            for (auto [of, hand] : {std::pair{&net, &by_hand}, {&other, &other_by_hand}}) {
              const Gradients expected = average_by_hand(
                  *hand, world.size(), [&](int rank) { loss_of(by_hand, other_by_hand, rank).backward(); });
              expect_gradients(*of, world, as_sharded(expected, *of), "a term of another model");
            }
            for (Pair* of : {&net, &other, &by_hand, &other_by_hand}) of->zero_grad();
          }
        }
  });
}

TEST_CASE("a part of two models is a part of each while that runs") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto make = [] {
      manual_seed(3);
      auto part = std::make_shared<nn::Linear>(5, 5);
      return std::pair{std::make_unique<WithShared>(part), std::make_unique<WithShared>(part)};
    };
    const auto [one, two] = make();
    const auto [hand_one, hand_two] = make();
    shard::fully_shard(*one->shared, {.layout = layout});
    for (const auto& net : {one.get(), two.get()}) shard::fully_shard(*net, {.layout = layout});
    for (int step = 0; step < 4; ++step) {
      const bool first = step % 2 == 0;
      WithShared &net = first ? *one : *two, &by_hand = first ? *hand_one : *hand_two;
      sum(square(net(input_of(world.rank())))).backward();
      const Gradients expected = average_by_hand(
          by_hand, world.size(), [&](int rank) { sum(square(by_hand(input_of(rank)))).backward(); });
      expect_gradients(net, world, expected, "a shared part");
      net.zero_grad();
    }
  });
}

TEST_CASE("a forward whose result's tensors cannot be found is refused where it is to have a backward") {
  on_ranks([](World&, shard::GroupLayout layout) {
    InStruct net;
    shard::fully_shard(net, {.layout = layout});
    expect_refused<NotImplementedError>([&] { net(input_of(0)); }, "returns a Found, in which no tensors");
    {
      const NoGrad guard;
      expect(net(input_of(0)).y.defined(), "no result");
    }
    for (const nn::Parameter& p : net.parameters()) nn::Parameter(p).set_requires_grad(false);
    expect(net(input_of(0)).y.defined(), "no result");
    OfNumbers with_tensor;
    shard::fully_shard(with_tensor, {.layout = layout});
    sum(with_tensor(input_of(0)).second).backward();
    expect(with_tensor.layer.weight.grad().defined(), "no gradient");
  });
}

TEST_CASE("after unlike numbers of batches a model goes on once its optimizer is brought up") {
  Parting part;
  const TempDirectory folder;
  on_ranks([&](World& world, shard::GroupLayout) {
    for (const bool renews : {false, true}) {
      Pair net = seeded(), one_process = seeded();
      shard::DataParallel of_net(net, world.group());
      nn::Adam optimizer(net.parameters(), {.lr = 0.1});
      {
        const auto scope = of_net.join({.divide_by_initial_world_size = false});
        for (int step = 0; step <= world.rank(); ++step) {
          optimizer.zero_grad();
          plain_loss(net, 0).backward();
          optimizer.step();
        }
      }
      const auto checkpoint = [&] { shard::save_checkpoint(net, optimizer, folder / "both", world.group()); };
      shard::save_checkpoint(net, folder / "model", world.group());
      expect(shard::steps_taken(net) == world.size(), "{} steps", shard::steps_taken(net));
      optimizer.zero_grad();
      if (renews) {
        part(world, [] {});
        expect_refused<StateError>([&] { plain_loss(net, 0).backward(); }, "bring_up");
      } else {
        expect_refused<StateError>(checkpoint, "bring_up");
      }
      shard::bring_up(net, optimizer);
      checkpoint();
      plain_loss(net, 0).backward();
      optimizer.step();
      nn::Adam alone(one_process.parameters(), {.lr = 0.1});
      for (int step = 0; step <= world.size(); ++step) {
        alone.zero_grad();
        plain_loss(one_process, 0).backward();
        alone.step();
      }
      for (std::size_t p = 0; p < net.parameters().size(); ++p) {
        const Tensor own = net.parameters()[p].local(), theirs = clone(own.detach());
        world.group().broadcast(theirs, 0);
        expect(own.to_vector<float>() == theirs.to_vector<float>(), "replicas differ");
        expect(allclose(own, one_process.parameters()[p].local(), 1e-5, 1e-6), "not as in one process");
      }
    }
  });
}

TEST_CASE("a lost step's message names the last checkpoint of its own model") {
  Parting part;
  const TempDirectory folder;
  on_ranks([&](World& world, shard::GroupLayout layout) {
    Pair one = seeded(), two = seeded();
    for (Pair* net : {&one, &two}) shard_pair(*net, {.layout = layout});
    nn::Sgd of_one(one.parameters(), {.lr = 0.1}), of_two(two.parameters(), {.lr = 0.1});
    shard::save_checkpoint(one, of_one, folder / "of one", world.group());
    shard::save_checkpoint(two, of_two, folder / "of two", world.group());
    plain_loss(one, world.rank()).backward();
    if (world.rank() == 1) of_one.step();
    one.zero_grad();
    part(world, [] {});
    expect_refused<StateError>([&] { one(input_of(0)); }, (folder / "of one").string());
    shard::load_checkpoint(one, of_one, folder / "of one", world.group());
    one(input_of(0)), two(input_of(0));
  });
}

TEST_CASE("what was averaged before gradients were cleared does not count after a fault") {
  Parting part;
  on_ranks([&](World& world, shard::GroupLayout) {
    for (const nn::ZeroGrad mode : {nn::ZeroGrad::to_none, nn::ZeroGrad::to_zero})
      for (const int accumulated : {1, 2}) {
        Pair net = seeded(), by_hand = seeded();
        shard::DataParallel of_net(net, world.group(), {.bucket_bytes = 100});
        nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
        // As a fault leaves it that one rank hears of and the others do not.
        if (world.rank() == 1) net.second.set_requires_grad(false);
        plain_loss(net, world.rank()).backward();
        if (world.rank() == 1) net.second.set_requires_grad(true);
        part(world, [] {});
        optimizer.zero_grad(mode);
        for (int times = 0; times < accumulated; ++times) {
          std::optional<shard::DataParallel::NoSync> scope;
          if (times + 1 < accumulated) scope.emplace(of_net);
          plain_loss(net, world.rank()).backward();
        }
        const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
          for (int times = 0; times < accumulated; ++times) plain_loss(by_hand, rank).backward();
        });
        expect_gradients(net, world, expected, "after zero_grad");
      }
  });
}

TEST_CASE("after a renewal a refused call leaves each rank's next one to be of what it was") {
  Parting part;
  on_ranks([&](World& world, shard::GroupLayout layout) {
    Pair net = seeded();
    shard_pair(net, {.layout = layout});
    plain_loss(net, world.rank()).backward();
    net.zero_grad();
    part(world, [] {});
    for (int times = 0; times < 2; ++times)
      expect_refused<StateError>(
          [&] {
            if (world.rank() == 0)
              net(input_of(0));
            else
              shard::unshard(net.first);
          },
          "unlike calls after renew()");
    for (int times = 0; times < 2; ++times) shard::unshard(net.first);
    expect_training(net, world, "after both");
  });
}

/// A parameter that is left to the program, and used where `uses` says so.
struct WithOwn final : nn::Layer<WithOwn> {
  nn::Linear layer{5, 5};
  nn::Param scale{ones({1})};
  bool uses = true;
  Tensor forward(const Tensor& x) const {
    const Tensor y = layer(x);
    return uses ? mul(y, scale) : y;
  }
  void visit(auto&& on) {
    on("layer", layer);
    on("scale", scale);
  }
};

TEST_CASE("a checkpoint's ranks may have stepped what is their own unlike times") {
  const TempDirectory folder;
  on_ranks([&](World& world, shard::GroupLayout layout) {
    WithOwn net;
    shard::fully_shard(net, {.layout = layout, .ignored_parameters = {net.scale.object()}});
    nn::Adam optimizer(net.parameters(), {.lr = 0.1});
    for (int step = 0; step < 2; ++step) {
      net.uses = step == 0 || world.rank() != 1;
      optimizer.zero_grad();
      sum(net(input_of(world.rank()))).backward();
      optimizer.step();
    }
    shard::save_checkpoint(net, optimizer, folder / "both", world.group());
    shard::save_checkpoint(net, folder / "model", world.group());
  });
}
