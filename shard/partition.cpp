#include "shard/partition.h"

#include <algorithm>
#include <numeric>

#include "runtime/error.h"

namespace sherd::shard {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t multiple) { return ceil_div(a, multiple) * multiple; }

/// Catalogue value: it shows in a debugger, and in every test that reads where it should not.
constexpr int between_parameters = 42;

}  // namespace

Partition::Partition(int ranks) : ranks_(ranks) {
  check<ValueError>(ranks > 0, "partition: {} ranks; there is at least one", ranks);
}

void Partition::add_segment(std::int64_t begin, std::int64_t shard_numel) {
  shard_numels_.push_back(shard_numel);
  starts_.push_back(begin);
  end_ = begin + shard_numel;
}

Partition Partition::flat(std::span<const Shape> parameters, int ranks, FlatPadding padding,
                          std::int64_t alignment) {
  check<ValueError>(!parameters.empty(), "Cannot construct a FlatParamHandle with an empty parameter list");
  check<ValueError>(alignment > 0, "partition: alignment {} in elements; it is at least 1", alignment);
  const bool aligned = padding == FlatPadding::aligned;
  Partition partition(ranks);
  std::int64_t at = 0;
  const auto pad_to = [&](std::int64_t end) {
    if (end > at) partition.padding_.push_back({0, at, end - at, aligned ? between_parameters : 0});
    at = end;
  };
  for (const Shape& shape : parameters) {
    if (aligned) pad_to(round_up(at, alignment));
    partition.spans_.push_back({0, at, shape.numel()});
    at += shape.numel();
  }
  pad_to(round_up(at, ranks));
  partition.add_segment(0, at / ranks);
  return partition;
}

Partition Partition::per_parameter(std::span<const Shape> parameters, int ranks) {
  Partition partition(ranks);
  for (const Shape& shape : parameters) {
    check<ShapeError>(
        shape.rank() > 0,
        "partition: parameter {} is a scalar and has no rows to cut; give it the shape (1), or use the flat "
        "layout",
        partition.spans_.size());
    const std::int64_t rows = shape[0], numel = shape.numel();
    const std::int64_t row = rows == 0 ? 0 : numel / rows;
    const int segment = partition.segments();
    partition.add_segment(round_up(partition.end_, segment_alignment), ceil_div(rows, ranks) * row);
    partition.spans_.push_back({segment, 0, numel});
    if (partition.gathered_numel(segment) > numel)
      partition.padding_.push_back({segment, numel, partition.gathered_numel(segment) - numel, 0});
  }
  return partition;
}

std::int64_t Partition::segments_numel() const {
  return std::accumulate(shard_numels_.begin(), shard_numels_.end(), std::int64_t{0});
}

OwnedPart Partition::part(int parameter, int rank) const {
  const std::int64_t slice = shard_numel(span(parameter).segment);
  return part_between(parameter, slice * rank, slice * (rank + 1));
}

OwnedPart Partition::part_between(int parameter, std::int64_t begin, std::int64_t end) const {
  const ParameterSpan& span = this->span(parameter);
  const std::int64_t first = std::max(begin, span.offset), last = std::min(end, span.offset + span.numel);
  if (last <= first) return {};
  return {first - span.offset, first - begin, last - first};
}

Partition Partition::over(int ranks) const {
  check<ValueError>(ranks > 0 && ranks_ % ranks == 0,
                    "If passing reshard_after_forward as an int, it should be a factor of {}, not {}", ranks_,
                    ranks);
  Partition partition(ranks);
  for (std::size_t s = 0; s < starts_.size(); ++s)
    partition.add_segment(starts_[s] * (ranks_ / ranks), shard_numels_[s] * (ranks_ / ranks));
  partition.spans_ = spans_;
  partition.padding_ = padding_;
  return partition;
}

}  // namespace sherd::shard
