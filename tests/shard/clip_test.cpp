// The gradient norm over ranks: its steps over any cut into ranks, and clipping of sharded modules against
// clipping of the whole.
#include <sherd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <random>

#include "collectives/observe.h"
#include "runtime/apply.h"
#include "runtime/ops/order_free_norm.h"
#include "shard/build.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "shard/group.h"
#include "tests/catch.h"
#include "tests/message_of.h"
#include "tests/ranks.h"

using namespace sherd;
using sherd::test::expect;
using sherd::test::message_of;

namespace {

constexpr std::array worlds = {1, 2, 3, 4, 5};
constexpr double infinity = std::numeric_limits<double>::infinity();

bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

/// The two steps, with the ranks' parts meeting between them.
double norm_over(const Group& ranks, std::span<const Tensor> parts) {
  const Tensor none = zeros({0});
  const Tensor sums = apply_many(ops::SquareSums{}, parts.empty() ? std::span(&none, 1) : parts)[0];
  ranks.all_reduce(sums);
  return apply(ops::NormOfSums{}, sums).item();
}

/// Values of very unlike magnitudes, in a dtype that may not hold them all.
Tensor wild(std::int64_t n, DType dtype, unsigned seed, int exponents) {
  std::mt19937 random(seed);
  std::vector<double> values(static_cast<std::size_t>(n));
  for (double& v : values) {
    const int exponent = static_cast<int>(random() % static_cast<unsigned>(2 * exponents + 1)) - exponents;
    v = std::ldexp(static_cast<double>(random()) / 0x1p31 - 1, exponent);
  }
  return to(Tensor::from(values, {n}), dtype);
}

/// This rank's pieces of tensors that are cut at random places and dealt out at random, some ranks getting
/// none.
std::vector<Tensor> dealt(std::span<const Tensor> tensors, unsigned seed, int ranks, int rank) {
  std::mt19937 random(seed);
  std::vector<Tensor> mine;
  for (const Tensor& t : tensors)
    for (std::int64_t at = 0; at < t.numel();) {
      const std::int64_t n = std::min<std::int64_t>(t.numel() - at, 1 + random() % 300);
      if (static_cast<int>(random() % static_cast<unsigned>(ranks)) == rank)
        mine.push_back(narrow(t, 0, at, n));
      at += n;
    }
  std::ranges::shuffle(mine, random);
  return mine;
}

void expect_one_norm(const std::vector<Tensor>& tensors, std::string_view what) {
  const double whole = order_free_norm(tensors).item();
  for (int ranks : worlds)
    for (unsigned seed : {1U, 2U, 3U})
      run_ranks(ranks, [&](World& world) {
        const double norm = norm_over(world.group(), dealt(tensors, seed, ranks, world.rank()));
        expect(same_bits(norm, whole), "{}: {} on {} ranks, {} whole (cut {})", what, norm, ranks, whole,
               seed);
      });
}

}  // namespace

TEST_CASE("the norm's steps give the uncut norm's bits for every cut into ranks") {
  for (DType dtype : {f64, f32, f16, bf16}) {
    expect_one_norm({wild(5003, dtype, 1, 3)}, "alike");
    expect_one_norm({wild(2000, dtype, 2, 14), wild(1, dtype, 3, 0), wild(777, dtype, 4, 14)}, "unlike");
  }
  expect_one_norm({wild(999, f32, 5, 120), wild(999, bf16, 6, 120)}, "at the ends of f32");
  expect_one_norm({wild(999, f64, 7, 1000)}, "at the ends of f64");
  expect_one_norm({mul(wild(300, f64, 8, 5), 0x1p-1060)}, "below the normal numbers");
  expect_one_norm({wild(301, f32, 9, 9), wild(302, bf16, 10, 9), wild(303, f64, 11, 9)}, "several dtypes");
  expect_one_norm({zeros({400}), zeros({0})}, "zeros");
  SUCCEED();
}

TEST_CASE("an infinite element makes the norm infinite, a NaN makes it NaN, wherever they are") {
  const auto with = [](std::initializer_list<double> specials) {
    Tensor x = wild(1000, f32, 1, 4);
    std::int64_t at = 123;
    for (double special : specials) fill_(narrow(x, 0, at += 321, 1), special);
    return x;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_one_norm({with({infinity})}, "infinity");
  expect_one_norm({with({-infinity})}, "minus infinity");
  expect_one_norm({with({infinity, -nan})}, "NaN beside infinity");
  expect_one_norm({with({nan, infinity})}, "infinity beside NaN");
  for (double special : {infinity, -infinity}) {
    const std::vector<Tensor> x{with({special})};
    CHECK(order_free_norm(x).item() == infinity);
  }
  const std::vector<Tensor> x{with({infinity, nan})};
  CHECK(std::isnan(order_free_norm(x).item()));
}

// ---- sharded modules

namespace {

/// No dimension divides by 2, 3 or 4 alike, and one has fewer rows than there are ranks.
struct Net final : nn::Layer<Net> {
  nn::Linear a{5, 7}, b{7, 3}, c{3, 1};
  Tensor forward(const Tensor& x) { return c(b(a(x))); }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
    on("c", c);
  }
};

Net net_of(std::uint64_t seed = 0) {
  manual_seed(seed);
  return {};
}

std::vector<Tensor> whole_gradients(const nn::Module& net) {
  std::vector<Tensor> all;
  for (const nn::Parameter& p : net.parameters())
    all.push_back(
        reshape(wild(p.numel(), f32, static_cast<unsigned>(all.size()) + 1, static_cast<int>(all.size())),
                p.shape()));
  return all;
}

/// Where each rank's part of a parameter begins in the flattened whole; the last entry is the end.
std::vector<std::int64_t> cuts_of(const nn::Parameter& p) {
  const Group* ranks = shard::shard_group_of(p);
  if (!ranks || ranks->size() == 1) return {0, p.numel()};
  const Tensor numels = zeros({ranks->size()}, {i64});
  ranks->all_gather(numels, Tensor::from({p.local().numel()}, {1}));
  std::vector<std::int64_t> cuts{0};
  for (std::int64_t n : numels.to_vector<std::int64_t>()) cuts.push_back(cuts.back() + n);
  expect(cuts.back() == p.numel(), "the ranks' parts have {} elements, the parameter {}", cuts.back(),
         p.numel());
  return cuts;
}

std::size_t place(const nn::Parameter& p) {
  const Group* ranks = shard::shard_group_of(p);
  return !ranks || ranks->size() == 1 ? 0 : static_cast<std::size_t>(ranks->rank());
}

/// Whether a rank among those that share a parameter has a gradient of it.
using Has = std::function<bool(std::size_t parameter, std::size_t rank)>;

/// Sets this rank's part of the gradients; what a rank has not is zero in `whole`.
void set_parts(const nn::Module& net, std::vector<Tensor>& whole, const Has& has) {
  const std::vector<nn::Parameter> params = net.parameters();
  for (std::size_t i = 0; i < params.size(); ++i) {
    nn::Parameter p = params[i];
    const std::vector<std::int64_t> cuts = cuts_of(p);
    for (std::size_t rank = 0; rank + 1 < cuts.size(); ++rank) {
      const Tensor part = narrow(flatten(whole[i]), 0, cuts[rank], cuts[rank + 1] - cuts[rank]);
      if (!has(i, rank)) fill_(part, 0);
      if (rank == place(p)) p.set_grad(has(i, rank) ? reshape(clone(part), p.local().shape()) : Tensor{});
    }
  }
}

/// The part of `whole` that this rank holds.
std::vector<float> part_of(const nn::Parameter& p, const Tensor& whole) {
  const std::vector<std::int64_t> cuts = cuts_of(p);
  const std::size_t at = place(p);
  return narrow(flatten(whole), 0, cuts[at], cuts[at + 1] - cuts[at]).to_vector<float>();
}

/// Ways to cut the net.
struct Way {
  std::string name;
  std::function<bool(int ranks)> possible;
  std::function<void(Net&, World&)> wrap;
};

void each_and_rest(Net& net, const shard::Options& options) {
  for (nn::Module* m : {static_cast<nn::Module*>(&net.a), static_cast<nn::Module*>(&net.b)})
    shard::fully_shard(*m, options);
  shard::fully_shard(net, options);
}

std::vector<Way> ways() {
  using shard::GroupLayout, shard::ShardingStrategy;
  const auto any = [](int) { return true; };
  std::vector<Way> all;
  for (const auto& [layout, layout_name] :
       {std::pair{GroupLayout::flat, "flat"}, std::pair{GroupLayout::per_parameter, "per parameter"}})
    for (const auto& [strategy, strategy_name] :
         {std::pair{ShardingStrategy::full_shard, "full_shard"},
          std::pair{ShardingStrategy::shard_grad_op, "shard_grad_op"},
          std::pair{ShardingStrategy::zero1, "zero1"}, std::pair{ShardingStrategy::no_shard, "no_shard"}}) {
      const shard::Options options{.layout = layout, .strategy = strategy};
      const std::string name = fmt::format("{}, {}", layout_name, strategy_name);
      all.push_back({name + ", one group", any, [=](Net& net, World&) { shard::fully_shard(net, options); }});
      all.push_back({name + ", three groups", any, [=](Net& net, World&) { each_and_rest(net, options); }});
      if (strategy != ShardingStrategy::full_shard) continue;
      all.push_back({name + ", hybrid", [](int ranks) { return ranks % 2 == 0; },
                     [=](Net& net, World& world) {
                       shard::Options hybrid = options;
                       hybrid.mesh = world.mesh({world.size() / 2, 2}, {"replica", "shard"});
                       each_and_rest(net, hybrid);
                     }});
      all.push_back({name + ", over other ranks each", [](int ranks) { return ranks % 2 == 0; },
                     [=](Net& net, World& world) {
                       shard::Options hybrid = options;
                       hybrid.mesh = world.mesh({world.size() / 2, 2}, {"replica", "shard"});
                       shard::fully_shard(net.a, hybrid);
                       shard::fully_shard(net.c, options);  // b stays whole
                     }});
    }
  return all;
}

/// Clips in every way on every number of ranks, and in the whole; hands both to `compare`.
template <class Compare>
void clip_in_all_ways(double limit, const Has& has, const Compare& compare) {
  for (const Way& way : ways())
    for (int ranks : {1, 2, 3, 4}) {
      if (!way.possible(ranks)) continue;
      INFO(way.name << " on " << ranks << " ranks");
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net net = net_of(), whole = net_of();
        way.wrap(net, world);
        std::vector<Tensor> gradients = whole_gradients(whole);
        set_parts(net, gradients, has);
        std::vector<nn::Parameter> params = whole.parameters();
        for (std::size_t i = 0; i < params.size(); ++i) params[i].set_grad(clone(gradients[i]));
        const double expected = nn::clip_grad_norm_(params, limit).item();
        compare(net, params, shard::clip_grad_norm_(net.parameters(), limit).item(), expected);
      }));
    }
}

void expect_equal(const Net& net, const std::vector<nn::Parameter>& whole, double norm, double expected) {
  expect(same_bits(norm, expected), "norm {}, whole {}", norm, expected);
  const std::vector<nn::Parameter> params = net.parameters();
  for (std::size_t i = 0; i < params.size(); ++i) {
    const std::vector<float> wanted = part_of(params[i], whole[i].grad());
    if (params[i].grad().defined())
      expect(params[i].grad().to_vector<float>() == wanted, "gradient {} is not the whole one's part", i);
  }
}

bool everywhere(std::size_t, std::size_t) { return true; }

}  // namespace

TEST_CASE("clipping a sharded module is clipping the whole, to the bit") {
  for (double limit : {0.5, 1e6}) clip_in_all_ways(limit, everywhere, expect_equal);
}

TEST_CASE("clipping by norms of other orders is clipping the whole, by the largest element to the bit") {
  const std::vector<Way> all = ways();
  for (const double order : {0.5, 1.0, 3.0, infinity})
    for (std::size_t w = 0; w < all.size(); w += 3)
      for (int ranks : {1, 2, 4}) {
        INFO(all[w].name << " on " << ranks << " ranks, order " << order);
        if (!all[w].possible(ranks)) continue;
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          Net net = net_of(), whole = net_of();
          all[w].wrap(net, world);
          std::vector<Tensor> gradients = whole_gradients(whole);
          set_parts(net, gradients, everywhere);
          std::vector<nn::Parameter> params = whole.parameters();
          for (std::size_t i = 0; i < params.size(); ++i) params[i].set_grad(clone(gradients[i]));
          const double expected = nn::clip_grad_norm_(params, 0.5, order).item(),
                       alone = shard::grad_norm(net.parameters(), order).item(),
                       norm = shard::clip_grad_norm_(net.parameters(), 0.5, order).item();
          expect(same_bits(norm, alone), "norm {}, without clipping {}", norm, alone);
          if (std::isinf(order)) return expect_equal(net, params, norm, expected);
          expect(std::abs(norm / expected - 1) < 1e-12, "norm {}, whole {}", norm, expected);
        }));
      }
  for (double special : {infinity, std::numeric_limits<double>::quiet_NaN()})
    CHECK_NOTHROW(run_ranks(3, [&](World& world) {
      Net net = net_of();
      shard::fully_shard(net);
      std::vector<Tensor> gradients = whole_gradients(net_of());
      fill_(narrow(flatten(gradients[0]), 0, 0, 1), special);
      set_parts(net, gradients, everywhere);
      for (const double order : {1.0, infinity}) {
        const double norm = shard::grad_norm(net.parameters(), order).item();
        expect(std::isnan(special) ? std::isnan(norm) : norm == special, "norm {} on rank {}", norm,
               world.rank());
      }
    }));
}

TEST_CASE("gradients that are none on some ranks add nothing") {
  clip_in_all_ways(0.5, [](std::size_t i, std::size_t rank) { return (i + rank) % 3 != 0; }, expect_equal);
  clip_in_all_ways(0.5, [](std::size_t, std::size_t rank) { return rank == 0; }, expect_equal);
}

TEST_CASE("without any gradient the norm is zero, and every rank makes the same calls") {
  clip_in_all_ways(
      0.5, [](std::size_t, std::size_t) { return false; },
      [](const Net& net, const std::vector<nn::Parameter>&, double norm, double) {
        expect(norm == 0, "norm {}", norm);
        const std::uint64_t before = collective_calls();
        shard::clip_grad_norm_(net.parameters(), 1);
        std::vector<Group> groups;
        for (const nn::Parameter& p : net.parameters())
          if (const Group* g = shard::shard_group_of(p);
              g && g->size() > 1 && std::ranges::find(groups, *g) == groups.end())
            groups.push_back(*g);
        const std::uint64_t calls = collective_calls() - before;
        expect(calls == groups.size(), "{} calls for {} groups", calls, groups.size());
      });
}

TEST_CASE("an infinite gradient on one rank is every rank's norm, a NaN makes every gradient NaN") {
  for (double special : {infinity, std::numeric_limits<double>::quiet_NaN()})
    for (shard::GroupLayout layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter})
      CHECK_NOTHROW(run_ranks(3, [&](World& world) {
        Net net = net_of();
        shard::fully_shard(net, {.layout = layout});
        std::vector<Tensor> gradients = whole_gradients(net_of());
        fill_(narrow(flatten(gradients[0]), 0, 0, 1), special);  // the first rank's
        set_parts(net, gradients, everywhere);
        const double norm = shard::clip_grad_norm_(net.parameters(), 1).item();
        expect(std::isnan(special) ? std::isnan(norm) : norm == special, "norm {}", norm);
        const std::vector<nn::Parameter> params = net.parameters();
        for (std::size_t i = 0; i < params.size(); ++i) {
          const bool infected = world.rank() == 0 && i == 0;
          const std::vector<float> values =
              params[i].grad().defined() ? params[i].grad().to_vector<float>() : std::vector<float>{};
          for (float v : values)
            expect(std::isnan(special) ? std::isnan(v) : infected || v == 0, "gradient {}: {}", i, v);
        }
      }));
}

TEST_CASE("gradients of a backward have one norm in every layout, as one flat parameter too") {
  const auto norm_of = [](World& world, const std::function<void(Net&)>& wrap) {
    Net net = net_of();
    wrap(net);
    manual_seed(static_cast<std::uint64_t>(world.rank()) + 1);
    sum(net(randn({4, 5}))).backward();
    return shard::clip_grad_norm_(net.parameters(), 1).item();
  };
  for (int ranks : {1, 2, 3, 4})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      const double norm = norm_of(world, [](Net& net) { shard::fully_shard(net); });
      expect(norm > 0, "norm {}", norm);
      const double flat =
          norm_of(world, [](Net& net) { each_and_rest(net, {.layout = shard::GroupLayout::flat}); });
      expect(same_bits(flat, norm), "flat {}, per parameter {}", flat, norm);
      for (bool use_orig_params : {false, true}) {
        const double wrapped = norm_of(world, [&](Net& net) {
          shard::FullyShardedDataParallel model(net, {.use_orig_params = use_orig_params});
        });
        expect(same_bits(wrapped, norm), "wrapped {}, per parameter {}", wrapped, norm);
      }
    }));
}

TEST_CASE("a limit of 0 makes every gradient 0") {
  for (shard::GroupLayout layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter})
    CHECK_NOTHROW(run_ranks(3, [&](World&) {
      Net net = net_of();
      shard::fully_shard(net, {.layout = layout});
      std::vector<Tensor> gradients = whole_gradients(net_of());
      set_parts(net, gradients, everywhere);
      expect(shard::clip_grad_norm_(net.parameters(), 0).item() > 0, "the norm");
      for (const nn::Parameter& p : net.parameters())
        if (p.grad().defined())
          for (float v : p.grad().to_vector<float>()) expect(v == 0, "a gradient of {}", v);
    }));
}

TEST_CASE("a clipped step of sharded parameters has the bits of clipping and then stepping") {
  for (int ranks : worlds)
    for (shard::GroupLayout layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter})
      for (const double limit : {0.25, 1e9})
        CHECK_NOTHROW(run_ranks(ranks, [&](World&) {
          const auto stepped = [&](bool at_once) {
            Net net = net_of();
            shard::fully_shard(net, {.layout = layout});
            nn::AdamW optimizer(net.parameters(), {.lr = 0.1});
            std::vector<Tensor> gradients = whole_gradients(net_of());
            set_parts(net, gradients, everywhere);
            if (at_once) {
              optimizer.step_clipped(shard::grad_norm(net.parameters()), limit);
            } else {
              shard::clip_grad_norm_(net.parameters(), limit);
              optimizer.step();
            }
            return shard::full_state_dict(net);
          };
          const nn::StateDict one = stepped(true), two = stepped(false);
          expect(one.size() == two.size() && !one.empty(), "{} and {} entries", one.size(), two.size());
          for (std::size_t i = 0; i < one.size(); ++i)
            expect(one[i].second.to_vector<float>() == two[i].second.to_vector<float>(), "{} differs",
                   one[i].first);
        }));
}

TEST_CASE("a limit that is negative or NaN is refused before anything is sent") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Net net = net_of();
    shard::fully_shard(net);
    const std::uint64_t before = collective_calls();
    for (double limit : {-1.0, -infinity, std::numeric_limits<double>::quiet_NaN()}) {
      bool refused = false;
      try {
        shard::clip_grad_norm_(net.parameters(), limit);
      } catch (const ValueError&) {
        refused = true;
      }
      expect(refused, "limit {}", limit);
    }
    expect(collective_calls() == before, "calls were made");
  }));
}

TEST_CASE("the norm of a rank's own gradients is refused where parameters are sharded") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Net net = net_of();
    shard::fully_shard(net);
    const std::string clips = message_of<StateError>([&] { nn::clip_grad_norm_(net.parameters(), 1); }),
                      asks = message_of<StateError>([&] { nn::grad_norm(net.parameters()); });
    expect(clips.find("shard::clip_grad_norm_") != std::string::npos, "it said '{}'", clips);
    expect(asks.find("shard::grad_norm") != std::string::npos, "it said '{}'", asks);
  }));
}

TEST_CASE(
    "what was put in the place of parameters is clipped as the parts that it is, and what was there is "
    "refused") {
  for (int ranks : worlds)
    for (shard::GroupLayout layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter})
      for (const bool ran : {false, true})
        CHECK_NOTHROW(run_ranks(ranks, [&](World&) {
          Net net = net_of();
          shard::fully_shard(net, {.layout = layout});
          const std::vector<nn::Parameter> before = net.parameters();
          if (ran) shard::full_state_dict(net);
          std::vector<Tensor> gradients = whole_gradients(net_of());
          set_parts(net, gradients, everywhere);
          const double expected = order_free_norm(gradients).item();
          std::vector<nn::Param*> members;
          for (const shard::FoundParameter& p : shard::find_members(net).parameters)
            members.push_back(p.member);
          for (nn::Param* member : members) {
            nn::Parameter fresh(clone(member->local().detach()));
            fresh.set_grad(member->grad());
            *member = fresh;
          }
          const double norm = shard::clip_grad_norm_(net.parameters(), 1).item();
          expect(same_bits(norm, expected), "norm {}, whole {}", norm, expected);
          const std::string text = message_of<StateError>([&] { shard::clip_grad_norm_(before, 1); });
          expect(text.find("was replaced") != std::string::npos && text.find("weight'") != std::string::npos,
                 "it said '{}'", text);
        }));
}

TEST_CASE("parts whose module is gone are refused: their norm would be each rank's own") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    std::vector<nn::Parameter> parameters;
    {
      Net net = net_of();
      shard::fully_shard(net);
      parameters = net.parameters();
    }
    std::string text;
    try {
      shard::clip_grad_norm_(parameters, 1);
    } catch (const StateError& error) {
      text = error.what();
    }
    expect(text.find("a module that is gone") != std::string::npos, "it said '{}'", text);
  }));
}
