// Layouts: every element of every parameter has one owner, and what is sharded comes back.
#include "shard/partition.h"

#include "tests/catch.h"

using namespace sherd;
using namespace sherd::shard;

namespace {

const std::vector<int> worlds = {1, 2, 3, 4, 5, 7, 8};

std::vector<std::vector<Shape>> groups() {
  return {{{1}},
          {{5, 3}},
          {{16, 16}, {16}},
          {{7}, {1, 1}, {3, 2, 2}, {0, 4}, {13, 5}},
          {{4, 5}, {4}, {7, 4}, {7}, {3, 7}},
          {{2}, {2}, {2}, {2}, {2}, {2}, {2}, {2}, {2}}};
}

struct Case {
  std::string name;
  std::vector<Shape> shapes;
  Partition layout;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::vector<Shape>& shapes : groups())
    for (int ranks : worlds) {
      const std::string where = fmt::format(" of {} parameters over {} ranks", shapes.size(), ranks);
      all.push_back({"flat" + where, shapes, Partition::flat(shapes, ranks, FlatPadding::end)});
      for (std::int64_t alignment : {4, 8})
        all.push_back({fmt::format("aligned({})", alignment) + where, shapes,
                       Partition::flat(shapes, ranks, FlatPadding::aligned, alignment)});
      all.push_back({"per parameter" + where, shapes, Partition::per_parameter(shapes, ranks)});
    }
  return all;
}

/// Marks what spans and padding cover of each gathered segment.
std::vector<std::vector<int>> coverage(const Partition& layout) {
  std::vector<std::vector<int>> covered;
  for (int s = 0; s < layout.segments(); ++s)
    covered.emplace_back(static_cast<std::size_t>(layout.gathered_numel(s)));
  const auto mark = [&](int segment, std::int64_t offset, std::int64_t numel) {
    for (std::int64_t i = offset; i < offset + numel; ++i)
      ++covered[static_cast<std::size_t>(segment)].at(static_cast<std::size_t>(i));
  };
  for (int p = 0; p < layout.parameters(); ++p) {
    const ParameterSpan& span = layout.span(p);
    mark(span.segment, span.offset, span.numel);
  }
  for (const shard::Padding& pad : layout.padding()) mark(pad.segment, pad.offset, pad.numel);
  return covered;
}

}  // namespace

TEST_CASE("parameters and padding cover every segment once") {
  for (const Case& c : cases()) {
    INFO(c.name);
    for (const std::vector<int>& segment : coverage(c.layout))
      CHECK(segment == std::vector<int>(segment.size(), 1));
    for (int p = 0; p < c.layout.parameters(); ++p)
      CHECK(c.layout.span(p).numel == c.shapes[static_cast<std::size_t>(p)].numel());
  }
}

TEST_CASE("segments follow each other, each where addresses are aligned, in the shard and gathered") {
  for (const Case& c : cases())
    for (const Partition& layout : {c.layout, c.layout.over(1)}) {
      INFO(c.name << " on " << layout.ranks());
      std::int64_t end = 0;
      for (int s = 0; s < layout.segments(); ++s) {
        CHECK(layout.shard_offset(s) % Partition::segment_alignment == 0);
        CHECK(layout.shard_offset(s) >= end);
        CHECK(layout.shard_offset(s) - end < Partition::segment_alignment * c.layout.ranks());
        end = layout.shard_offset(s) + layout.shard_numel(s);
      }
      CHECK(layout.shard_numel() == end);
    }
}

TEST_CASE("the ranks' parts of a parameter follow each other and are all of it") {
  for (const Case& c : cases()) {
    INFO(c.name);
    for (int p = 0; p < c.layout.parameters(); ++p) {
      std::int64_t next = 0;
      for (int rank = 0; rank < c.layout.ranks(); ++rank) {
        const OwnedPart part = c.layout.part(p, rank);
        if (part.numel == 0) continue;
        CHECK(part.in_parameter == next);
        CHECK(part.in_shard >= 0);
        CHECK(part.in_shard + part.numel <= c.layout.shard_numel(c.layout.span(p).segment));
        next += part.numel;
      }
      CHECK(next == c.layout.span(p).numel);
    }
  }
}

TEST_CASE("what is sharded and gathered comes back") {
  for (const Case& c : cases()) {
    INFO(c.name);
    const Partition& layout = c.layout;
    std::vector<std::vector<int>> gathered;
    for (int s = 0; s < layout.segments(); ++s)
      gathered.emplace_back(static_cast<std::size_t>(layout.gathered_numel(s)), -1);
    int stamp = 0;
    std::vector<int> first_stamp;
    for (int p = 0; p < layout.parameters(); ++p) {
      first_stamp.push_back(stamp);
      stamp += static_cast<int>(layout.span(p).numel);
    }
    for (int rank = 0; rank < layout.ranks(); ++rank)
      for (int p = 0; p < layout.parameters(); ++p) {
        const OwnedPart part = layout.part(p, rank);
        const int s = layout.span(p).segment;
        for (std::int64_t i = 0; i < part.numel; ++i)
          gathered[static_cast<std::size_t>(s)].at(
              static_cast<std::size_t>(rank * layout.shard_numel(s) + part.in_shard + i)) =
              first_stamp[static_cast<std::size_t>(p)] + static_cast<int>(part.in_parameter + i);
      }
    for (int p = 0; p < layout.parameters(); ++p) {
      const ParameterSpan& span = layout.span(p);
      for (std::int64_t i = 0; i < span.numel; ++i)
        REQUIRE(gathered[static_cast<std::size_t>(span.segment)][static_cast<std::size_t>(span.offset + i)] ==
                first_stamp[static_cast<std::size_t>(p)] + static_cast<int>(i));
    }
  }
}

TEST_CASE("the flat layout pads behind, or aligns and fills with 42") {
  for (const Case& c : cases()) {
    INFO(c.name);
    if (c.name.starts_with("per parameter")) continue;
    CHECK(c.layout.segments() == 1);
    const bool aligned = c.name.starts_with("aligned");
    const std::int64_t alignment = c.name.starts_with("aligned(8)") ? 8 : aligned ? 4 : 1;
    std::int64_t padding = 0;
    for (const shard::Padding& pad : c.layout.padding()) {
      CHECK(pad.value == (aligned ? 42 : 0));
      padding += pad.numel;
    }
    std::int64_t numel = 0;
    for (int p = 0; p < c.layout.parameters(); ++p) {
      CHECK(c.layout.span(p).offset % alignment == 0);
      numel += c.layout.span(p).numel;
    }
    CHECK(c.layout.gathered_numel() == numel + padding);
    if (!aligned) CHECK(padding < c.layout.ranks());
  }
}

TEST_CASE("the per-parameter layout cuts rows, uneven and empty ones included") {
  for (const Case& c : cases()) {
    if (!c.name.starts_with("per parameter")) continue;
    INFO(c.name);
    for (int p = 0; p < c.layout.parameters(); ++p) {
      const Shape& shape = c.shapes[static_cast<std::size_t>(p)];
      const std::int64_t n = shape[0], row = n == 0 ? 0 : shape.numel() / n;
      const std::int64_t rows = (n + c.layout.ranks() - 1) / c.layout.ranks();
      CHECK(c.layout.span(p) == ParameterSpan{p, 0, shape.numel()});
      for (int rank = 0; rank < c.layout.ranks(); ++rank) {
        const std::int64_t begin = std::min(rank * rows, n), end = std::min((rank + 1) * rows, n);
        CHECK(c.layout.part(p, rank).numel == (end - begin) * row);
      }
    }
  }
}

TEST_CASE("a layout over fewer ranks keeps every element where it is") {
  for (const Case& c : cases())
    for (int k = 1; k <= c.layout.ranks(); ++k) {
      if (c.layout.ranks() % k != 0) {
        CHECK_THROWS_AS(c.layout.over(k), ValueError);
        continue;
      }
      const Partition fewer = c.layout.over(k);
      INFO(c.name << " over " << k);
      CHECK(fewer.gathered_numel() == c.layout.gathered_numel());
      CHECK(fewer.padding() == c.layout.padding());
      for (int p = 0; p < fewer.parameters(); ++p) CHECK(fewer.span(p) == c.layout.span(p));
    }
}

TEST_CASE("layouts refuse what they cannot cut") {
  CHECK(test::message_of<ValueError>([] { Partition::flat({}, 2, FlatPadding::end); }) ==
        "Cannot construct a FlatParamHandle with an empty parameter list");
  const std::vector<Shape> scalar = {Shape{}};
  CHECK_THROWS_AS(Partition::per_parameter(scalar, 2), ShapeError);
  CHECK_THROWS_AS(Partition::flat(scalar, 0, FlatPadding::end), ValueError);
  CHECK(test::message_of<ValueError>([] { Partition::per_parameter(std::vector<Shape>{{4}}, 4).over(3); }) ==
        "If passing reshard_after_forward as an int, it should be a factor of 4, not 3");
}
