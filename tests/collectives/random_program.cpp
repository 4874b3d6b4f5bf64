// Random programs: one seed, the same calls on every rank, waits in any order.
#include <algorithm>
#include <deque>
#include <numeric>
#include <random>

#include "tests/collectives/suite.h"
#include "tests/ranks.h"

namespace sherd::test {
namespace {

using Kind = CollectiveKind;
using Random = std::mt19937_64;

int below(Random& random, int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); }

/// A way to cut the world: this rank's group of it, if any, and the smallest group of all, so that a root
/// exists in each.
struct Cut {
  Group mine;
  int smallest;
};

std::vector<std::vector<int>> random_lists(Random& random, int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::ranges::shuffle(ranks, random);
  const int cut = 1 + below(random, size), end = cut + below(random, size - cut + 1);
  std::vector<std::vector<int>> lists{{ranks.begin(), ranks.begin() + cut}};
  if (end > cut) lists.emplace_back(ranks.begin() + cut, ranks.begin() + end);
  return lists;
}

std::vector<Cut> random_cuts(const Group& world, Random& random) {
  const int size = world.size();
  std::vector<Cut> cuts{{world, size}};
  for (int count = 1; count <= size; ++count) {
    if (size % count != 0) continue;
    cuts.push_back({world.blocks(count), count});
    cuts.push_back({world.strided(count), size / count});
  }
  for (int i = 0; i < 3; ++i) {
    const auto lists = random_lists(random, size);
    const auto smaller = [](const auto& a, const auto& b) { return a.size() < b.size(); };
    const auto smallest = static_cast<int>(std::ranges::min_element(lists, smaller)->size());
    cuts.push_back({world.split(lists, fmt::format("random {}", i)), smallest});
  }
  return cuts;
}

CallCase random_case(Random& random, int ranks) {
  constexpr Kind kinds[] = {Kind::all_gather, Kind::reduce_scatter, Kind::all_reduce, Kind::broadcast,
                            Kind::all_to_all, Kind::send,           Kind::barrier};
  constexpr DType dtypes[] = {f32, f64, f16, bf16, i32, i64, u8};
  constexpr int limits[] = {4, 200, 2000, 20000};
  CallCase c{.kind = kinds[below(random, ranks > 1 ? 7 : 5)], .dtype = dtypes[below(random, 7)]};
  const int reduction = below(random, 4);
  c.reduction = reduction == 0 || (reduction > 1 && !is_floating(c.dtype)) ? ReduceOp::sum()
                : reduction == 1                                           ? ReduceOp::max()
                : reduction == 2                                           ? ReduceOp::average()
                                                                           : ReduceOp::prescaled_sum(1.7f);
  c.sizes.clear();
  const int segments = c.kind == Kind::barrier ? 0 : 1 + below(random, 4), limit = limits[below(random, 4)];
  for (int s = 0; s < segments; ++s) c.sizes.push_back(below(random, limit));
  c.in_place = below(random, 2) == 0 && c.kind != Kind::all_to_all && c.kind != Kind::send;
  c.root = below(random, ranks);
  c.destination = ranks > 1 ? (c.root + 1 + below(random, ranks - 1)) % ranks : 0;
  c.channel = below(random, 3);
  c.seed = random();
  return c;
}

/// What is under way on this rank.
class Pending {
 public:
  explicit Pending(Random own) : own_(own) {}
  void add(Part part) {
    part.post();
    parts_.push_back(std::move(part));
    while (parts_.size() > 30 || (!parts_.empty() && below(own_, 3) == 0)) finish_one();
  }
  void finish_all() {
    while (!parts_.empty()) finish_one();
  }

 private:
  void finish_one() {
    const auto it = parts_.begin() + below(own_, static_cast<int>(parts_.size()));
    if (below(own_, 2) == 0) it->wait_inputs();
    it->wait();
    it->wait_inputs();
    it->check();
    parts_.erase(it);
  }
  Random own_;  // another on every rank
  std::deque<Part> parts_;
};

}  // namespace

void random_program(const Group& world, std::uint64_t seed) {
  Random random(seed);
  const std::vector<Cut> cuts = random_cuts(world, random);
  Pending pending(Random(seed * 1000 + static_cast<std::uint64_t>(world.rank())));
  for (int i = 0; i < 200; ++i) {
    const Cut& cut = cuts[static_cast<std::size_t>(below(random, static_cast<int>(cuts.size())))];
    CallCase c = random_case(random, cut.smallest);
    c.label = fmt::format("seed {} call {}", seed, i);
    const bool blocking = below(random, 3) == 0;
    if (!cut.mine.defined()) continue;
    Part part(cut.mine, c);
    if (blocking) {
      part.call();
      part.check();
    } else {
      pending.add(std::move(part));
    }
  }
  pending.finish_all();
  world.barrier();
}

}  // namespace sherd::test
