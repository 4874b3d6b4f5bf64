// Which rank owns which elements of which parameter: arithmetic on integers alone, which needs neither memory
// nor other ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/export.h"
#include "runtime/shape.h"

namespace sherd::shard {

/// Where a parameter lies, once gathered: `numel` elements from `offset` of a segment.
struct ParameterSpan {
  int segment = 0;
  std::int64_t offset = 0, numel = 0;
  friend bool operator==(const ParameterSpan&, const ParameterSpan&) = default;
};

/// The part of a parameter that one rank owns; `numel` 0 is none.
struct OwnedPart {
  std::int64_t in_parameter = 0;  ///< offset of its first element in the parameter
  std::int64_t in_shard = 0;      ///< and in the rank's slice of the segment
  std::int64_t numel = 0;
  friend bool operator==(const OwnedPart&, const OwnedPart&) = default;
};

/// Elements of a segment that belong to no parameter and hold `value`.
struct Padding {
  int segment = 0;
  std::int64_t offset = 0, numel = 0;
  int value = 0;
  friend bool operator==(const Padding&, const Padding&) = default;
};

/// How the flat layout pads.
enum class FlatPadding : std::uint8_t {
  end,      ///< parameters touch; zeros after the last, up to a multiple of the ranks
  aligned,  ///< every parameter begins at a multiple of the alignment; the value 42 between and after
};

/// A group of parameters as a list of segments. Every rank owns an equal slice of every segment: rank r has
/// the elements from r * shard_numel to (r + 1) * shard_numel. A value; the same on every rank.
class SHERD_API Partition {
 public:
  /// 16 bytes of the smallest dtype that parameters compute in.
  static constexpr std::int64_t segment_alignment = 8;
  /// One segment for all parameters, one after another. `alignment` in elements, for FlatPadding::aligned (16
  /// bytes of the compute dtype). Throws ValueError without parameters.
  static Partition flat(std::span<const Shape> parameters, int ranks, FlatPadding padding,
                        std::int64_t alignment = 1);
  /// One segment a parameter, cut along dim 0 in ceil(n / ranks) rows a rank: all padding (zeros) is at the
  /// very end, so a gathered segment begins with the parameter as it is. Segments begin at multiples of
  /// `segment_alignment` elements, in the shard and gathered: kernels, and the algorithms that libraries
  /// choose, depend on how addresses are aligned. Throws ShapeError for a scalar.
  static Partition per_parameter(std::span<const Shape> parameters, int ranks);

  int ranks() const { return ranks_; }
  int segments() const { return static_cast<int>(shard_numels_.size()); }
  int parameters() const { return static_cast<int>(spans_.size()); }
  /// Elements of a segment that one rank owns, and all together.
  std::int64_t shard_numel(int segment) const { return shard_numels_[static_cast<std::size_t>(segment)]; }
  std::int64_t gathered_numel(int segment) const { return shard_numel(segment) * ranks_; }
  /// Of all segments, with the gaps between them.
  std::int64_t shard_numel() const { return end_; }
  std::int64_t gathered_numel() const { return shard_numel() * ranks_; }
  /// What of them lies in segments, without the gaps.
  std::int64_t segments_numel() const;
  /// Where a segment's slice begins in a rank's shard; a gathered segment begins at so many times `ranks()`.
  std::int64_t shard_offset(int segment) const { return starts_[static_cast<std::size_t>(segment)]; }

  const ParameterSpan& span(int parameter) const { return spans_[static_cast<std::size_t>(parameter)]; }
  /// What of a parameter lies in a rank's slice; and in the elements from `begin` to `end`, exclusive, of the
  /// segment, counted from there.
  OwnedPart part(int parameter, int rank) const;
  OwnedPart part_between(int parameter, std::int64_t begin, std::int64_t end) const;
  /// In order, within and behind parameters; zeros and 42s alike.
  const std::vector<Padding>& padding() const { return padding_; }

  /// The same segments over fewer ranks, of which each owns a proportionally larger slice: what stays after a
  /// forward that reshards to a smaller group. `ranks` divides the ranks (ValueError).
  Partition over(int ranks) const;
  friend bool operator==(const Partition&, const Partition&) = default;

 private:
  explicit Partition(int ranks);
  void add_segment(std::int64_t begin, std::int64_t shard_numel);

  int ranks_ = 1;
  std::vector<std::int64_t> shard_numels_, starts_;
  std::int64_t end_ = 0;
  std::vector<ParameterSpan> spans_;
  std::vector<Padding> padding_;
};

}  // namespace sherd::shard
