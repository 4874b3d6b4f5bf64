#include "shard/layout.h"

#include <algorithm>

#include "runtime/error.h"

namespace sherd::shard {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t multiple) { return ceil_div(a, multiple) * multiple; }

/// Catalogue value: it shows in a debugger, and in every test that reads where it should not.
constexpr int between_parameters = 42;

}  // namespace

GroupLayout::GroupLayout(int ranks) : ranks_(ranks) {
  check<ValueError>(ranks > 0, "layout: {} ranks; there is at least one", ranks);
}

void GroupLayout::add_segment(std::int64_t shard_numel) {
  shard_numels_.push_back(shard_numel);
  starts_.push_back(starts_.back() + shard_numel);
}

GroupLayout GroupLayout::flat(std::span<const Shape> parameters, int ranks, FlatPadding padding,
                              std::int64_t alignment) {
  check<ValueError>(!parameters.empty(), "Cannot construct a FlatParamHandle with an empty parameter list");
  check<ValueError>(alignment > 0, "layout: alignment {} in elements; it is at least 1", alignment);
  const bool aligned = padding == FlatPadding::aligned;
  GroupLayout layout(ranks);
  std::int64_t at = 0;
  const auto pad_to = [&](std::int64_t end) {
    if (end > at) layout.padding_.push_back({0, at, end - at, aligned ? between_parameters : 0});
    at = end;
  };
  for (const Shape& shape : parameters) {
    if (aligned) pad_to(round_up(at, alignment));
    layout.spans_.push_back({0, at, shape.numel()});
    at += shape.numel();
  }
  pad_to(round_up(at, ranks));
  layout.add_segment(at / ranks);
  return layout;
}

GroupLayout GroupLayout::per_parameter(std::span<const Shape> parameters, int ranks) {
  GroupLayout layout(ranks);
  for (const Shape& shape : parameters) {
    check<ShapeError>(shape.rank() > 0,
                      "layout: parameter {} is a scalar and has no rows to cut; leave it out of the group, "
                      "or use the flat layout",
                      layout.spans_.size());
    const std::int64_t rows = shape[0], numel = shape.numel();
    const std::int64_t row = rows == 0 ? 0 : numel / rows;
    const int segment = layout.segments();
    layout.add_segment(ceil_div(rows, ranks) * row);
    layout.spans_.push_back({segment, 0, numel});
    if (layout.gathered_numel(segment) > numel)
      layout.padding_.push_back({segment, numel, layout.gathered_numel(segment) - numel, 0});
  }
  return layout;
}

OwnedPart GroupLayout::part(int parameter, int rank) const {
  const ParameterSpan& span = this->span(parameter);
  const std::int64_t slice = shard_numel(span.segment), begin = slice * rank;
  const std::int64_t first = std::max(begin, span.offset);
  const std::int64_t last = std::min(begin + slice, span.offset + span.numel);
  if (last <= first) return {};
  return {first - span.offset, first - begin, last - first};
}

GroupLayout GroupLayout::over(int ranks) const {
  check<ValueError>(ranks > 0 && ranks_ % ranks == 0,
                    "If passing reshard_after_forward as an int, it should be a factor of {}, not {}", ranks_,
                    ranks);
  GroupLayout layout(ranks);
  for (std::int64_t numel : shard_numels_) layout.add_segment(numel * (ranks_ / ranks));
  layout.spans_ = spans_;
  layout.padding_ = padding_;
  return layout;
}

}  // namespace sherd::shard
