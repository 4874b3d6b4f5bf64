// Meshes: who is in which group, for every grid of up to 8 ranks.
#include "collectives/mesh.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

#include "collectives/dry_run.h"
#include "collectives/world.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;
using sherd::test::expect;
using sherd::test::message_of;

namespace {

const std::vector<std::string> letters = {"a", "b", "c"};

/// Every way to write `ranks` as a product of 1 to 3 sizes.
std::vector<std::vector<int>> grids_of(int ranks) {
  std::vector<std::vector<int>> grids = {{ranks}};
  for (int a = 1; a <= ranks; ++a)
    if (ranks % a == 0) {
      grids.push_back({a, ranks / a});
      for (int b = 1; b <= ranks / a; ++b)
        if (ranks / a % b == 0) grids.push_back({a, b, ranks / a / b});
    }
  return grids;
}

std::vector<std::string> names_for(const std::vector<int>& sizes) {
  return {letters.begin(), letters.begin() + static_cast<std::ptrdiff_t>(sizes.size())};
}

/// The definition: a rank is its coordinates read as digits, the last one running fastest.
int rank_at(const std::vector<int>& coordinates, const std::vector<int>& sizes) {
  int rank = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) rank = rank * sizes[d] + coordinates[d];
  return rank;
}

std::vector<int> list(std::span<const int> ranks) { return {ranks.begin(), ranks.end()}; }

/// The ranks that are met when the dimensions of `free` run, the last of them fastest.
std::vector<int> members(std::vector<int> at, const std::vector<int>& sizes, std::vector<std::size_t> free) {
  if (free.empty()) return {rank_at(at, sizes)};
  const std::size_t d = free.front();
  free.erase(free.begin());
  std::vector<int> all;
  for (at[d] = 0; at[d] < sizes[d]; ++at[d]) {
    const std::vector<int> inner = members(at, sizes, free);
    all.insert(all.end(), inner.begin(), inner.end());
  }
  return all;
}

void expect_group(const Group& group, const std::vector<int>& ranks, int world_rank) {
  expect(list(group.world_ranks()) == ranks, "group {} has other members", group.name());
  expect(ranks[static_cast<std::size_t>(group.rank())] == world_rank, "group {}: this rank's place",
         group.name());
}

/// The members really reach each other.
void expect_sum(const Group& group) {
  Tensor x = full({1}, World::current().rank());
  group.all_reduce(x);
  const std::span<const int> ranks = group.world_ranks();
  expect(x.item<int>() == std::accumulate(ranks.begin(), ranks.end(), 0), "sum over {}", group.name());
}

void check_mesh(World& world, const std::vector<int>& sizes) {
  const std::vector<std::string> names = names_for(sizes);
  const DeviceMesh mesh = world.mesh(sizes, names);
  expect(mesh.sizes() == sizes && mesh.names() == names, "what was asked for");
  expect(mesh.dimensions() == static_cast<int>(sizes.size()), "dimensions");
  expect(rank_at(mesh.coordinates(), sizes) == world.rank(), "coordinates are the rank's digits");
  expect(mesh.all() == world.group(), "all ranks");
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    expect(mesh.size(names[d]) == sizes[d] && mesh.coordinate(names[d]) == mesh.coordinates()[d], "by name");
    expect_group(mesh.group(names[d]), members(mesh.coordinates(), sizes, {d}), world.rank());
    expect_sum(mesh.group(names[d]));
  }
}

}  // namespace

TEST_CASE("every grid of up to 8 ranks has the right group along every dimension") {
  for (int ranks = 1; ranks <= 8; ++ranks)
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      for (const std::vector<int>& sizes : grids_of(ranks)) check_mesh(world, sizes);
    }));
}

TEST_CASE("a slice has the groups of its dimensions, and all of its ranks in the order given") {
  for (int ranks : {1, 4, 6, 8})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      for (const std::vector<int>& sizes : grids_of(ranks)) {
        const std::vector<std::string> names = names_for(sizes);
        const DeviceMesh mesh = world.mesh(sizes, names);
        std::vector<std::size_t> order(sizes.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        do {
          for (std::size_t count = 1; count <= order.size(); ++count) {
            const std::vector<std::size_t> free(order.begin(),
                                                order.begin() + static_cast<std::ptrdiff_t>(count));
            std::vector<std::string> kept;
            for (std::size_t d : free) kept.push_back(names[d]);
            const DeviceMesh part = mesh.slice(kept);
            expect(part.names() == kept, "names of the slice");
            for (const std::string& name : kept) {
              expect(part.group(name) == mesh.group(name), "a slice shares its groups");
              expect(part.coordinate(name) == mesh.coordinate(name), "and its coordinates");
            }
            expect_group(part.all(), members(mesh.coordinates(), sizes, free), world.rank());
            expect_sum(part.all());
          }
        } while (std::next_permutation(order.begin(), order.end()));
      }
    }));
}

TEST_CASE("a slice of one dimension makes no call, nor does the whole") {
  CHECK_NOTHROW(run_ranks(4, [](World& world) {
    const DeviceMesh mesh = world.mesh({2, 2}, {"replica", "shard"});
    if (world.rank() != 0) return;  // alone: whoever waited for others would hear that they left
    expect(mesh["shard"].group() == mesh.group("shard"), "one dimension");
    expect(mesh["shard"].all() == mesh.group("shard"), "all of one dimension");
    expect(mesh.slice({"replica", "shard"}).all() == mesh.all(), "the whole");
  }));
}

TEST_CASE("lines of one dimension share no rank and cover the world") {
  // Seen from every rank of a dry world, so that large grids are covered too.
  const std::vector<int> sizes = {4, 3, 5};
  for (const char* name : {"a", "b", "c"}) {
    std::set<std::vector<int>> lines;
    for (int rank = 0; rank < 60; ++rank) {
      DryRun dry({.rank = rank, .size = 60});
      const DeviceMesh mesh = dry.world().mesh(sizes, letters);
      lines.insert(list(mesh.group(name).world_ranks()));
    }
    std::vector<int> seen;
    for (const std::vector<int>& line : lines) seen.insert(seen.end(), line.begin(), line.end());
    std::ranges::sort(seen);
    std::vector<int> world(60);
    std::iota(world.begin(), world.end(), 0);
    CHECK(seen == world);
  }
}

TEST_CASE("a world is a mesh of one dimension") {
  CHECK_NOTHROW(run_ranks(3, [](World& world) {
    expect(world.mesh().dimensions() == 1 && world.mesh().size("world") == 3, "its shape");
    expect(world.mesh().group() == world.group(), "its group");
  }));
}

TEST_CASE("meshes of meshes: a group from a mesh carries one of its own") {
  CHECK_NOTHROW(run_ranks(8, [](World& world) {
    const DeviceMesh outer = world.mesh({2, 4}, {"replica", "shard"});
    const DeviceMesh inner(outer.group("shard"), {2, 2}, {"x", "y"});
    expect(inner.coordinate("x") == world.rank() % 4 / 2 && inner.coordinate("y") == world.rank() % 2,
           "place");
    expect_sum(inner.group("x"));
    expect_sum(inner.group("y"));
  }));
}

TEST_CASE("blocks, strides and lists of ranks") {
  for (int ranks = 1; ranks <= 8; ++ranks)
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      const int self = world.rank();
      for (int count = 1; count <= ranks; ++count) {
        if (ranks % count != 0) continue;
        std::vector<int> block(static_cast<std::size_t>(count)), line;
        std::iota(block.begin(), block.end(), self / count * count);
        for (int r = self % count; r < ranks; r += count) line.push_back(r);
        expect_group(world.group().blocks(count), block, self);
        expect_group(world.group().strided(count), line, self);
        expect_sum(world.group().blocks(count));
        expect_sum(world.group().strided(count));
      }
      std::vector<int> odd;  // backwards, so that the list's order is seen
      for (int r = ranks - 1; r >= 0; --r)
        if (r % 2 == 1) odd.push_back(r);
      const Group group = world.group().subgroup(odd);
      expect(group.defined() == (self % 2 == 1), "only the listed are in");
      if (!group.defined()) return;
      expect_group(group, odd, self);
      expect_sum(group);
    }));
}

TEST_CASE("meshes and groups that cannot be") {
  const DryRun dry({.rank = 0, .size = 8});
  const World& world = dry.world();
  const auto mesh = [&](std::vector<int> sizes, std::vector<std::string> names) {
    return [&world, sizes, names] { world.mesh(sizes, names); };
  };
  CHECK_THAT(message_of<ShapeError>(mesh({2, 3}, {"a", "b"})),
             ContainsSubstring("[2, 3] has 6 places for the 8 ranks of group world"));
  CHECK_THAT(message_of<ShapeError>(mesh({-2, -4}, {"a", "b"})), ContainsSubstring("size -2"));
  CHECK_THAT(message_of<ShapeError>(mesh({0, 8}, {"a", "b"})), ContainsSubstring("size 0"));
  CHECK_THAT(message_of<ValueError>(mesh({2, 4}, {"a"})), ContainsSubstring("2 sizes and 1 names"));
  CHECK_THAT(message_of<ValueError>(mesh({}, {})), ContainsSubstring("at least one dimension"));
  CHECK_THAT(message_of<ValueError>(mesh({2, 4}, {"a", "a"})),
             ContainsSubstring("two dimensions are named 'a'"));

  const DeviceMesh good = world.mesh({2, 4}, {"a", "b"});
  CHECK_THAT(message_of<ValueError>([&] { good.group("z"); }),
             ContainsSubstring("no dimension is named 'z'"));
  CHECK_THAT(message_of<ValueError>([&] { good.size("z"); }), ContainsSubstring("no dimension is named 'z'"));
  CHECK_THAT(message_of<ValueError>([&] { good.slice({"a", "z"}); }), ContainsSubstring("'z'"));
  CHECK_THAT(message_of<ValueError>([&] { good.slice({"a", "a"}); }), ContainsSubstring("'a'"));
  CHECK_THROWS_AS(good.slice({}), ValueError);
  CHECK_THAT(message_of<ValueError>([&] { good.group(); }), ContainsSubstring("it has 2 dimensions"));

  const Group& g = world.group();
  for (int bad : {0, -1, 3, 16}) {
    CHECK_THROWS_AS(g.blocks(bad), ValueError);
    CHECK_THROWS_AS(g.strided(bad), ValueError);
  }
  CHECK_THAT(message_of<ValueError>([&] { g.subgroup({1, 8}); }), ContainsSubstring("rank 8 is not in 0..7"));
  CHECK_THAT(message_of<ValueError>([&] { g.subgroup({1, 1}); }), ContainsSubstring("listed twice"));
  CHECK_THAT(message_of<StateError>([] { Group().size(); }), ContainsSubstring("not in the group"));
}
