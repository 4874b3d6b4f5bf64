// Several ops over one space of rows and columns as one op, which passes make of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/op.h"
#include "runtime/ops/sum.h"

namespace sherd::ops {

/// The elements of one tensor, as the rows of its last axis. What an op of a region computes is such a
/// tensor, one element a row, or the sum of each column.
struct RowSpace {
  Shape shape;

  std::int64_t columns() const { return shape.empty() ? 1 : shape.back(); }
  std::int64_t rows() const { return columns() == 0 ? 0 : shape.numel() / columns(); }
  bool operator==(const RowSpace&) const = default;
};

/// How a tensor lies over a space: an element for each of it, one behind another; for each row; for each
/// column; one for all; or `apart`, otherwise, read as of the space's very shape.
enum class Lies : std::uint8_t { full, row, column, number, apart };

/// The space of a member of a region over `space` whose result has that shape: the same, or the rows of
/// another length that are as many; none where it has neither.
SHERD_API std::optional<RowSpace> space_of_member(const RowSpace& space, const Shape& result);

/// How a tensor of this layout lies over the space in a call whose result has `shape`, to which it is
/// broadcast; none where element i of the call is not element i, or row i, of the space.
SHERD_API std::optional<Lies> lies_over(const RowSpace& space, const Layout& layout, const Shape& shape);

/// Sums over more columns are no members of a region: `Sum` adds them up in several parts.
inline constexpr std::int64_t most_columns = 1 << 14;

/// Whether regions on a device of this type have code for an op: elementwise, a cast, a sum, or one that puts
/// rows together of parts.
using IsMember = bool (*)(const AnyOp& op);
SHERD_API bool joins_regions(const AnyOp& op, DeviceType device);
/// Whether such regions sum the columns of so many rows of a dtype: it may be that too few could do so at
/// once.
using SumsColumns = bool (*)(std::int64_t rows, std::int64_t columns, DType dtype);
SHERD_API bool sums_columns(std::int64_t rows, std::int64_t columns, DType dtype, DeviceType device);
/// A back end that has a kernel for regions says so, and whether that sums columns.
SHERD_API void set_members(DeviceType device, IsMember is_member, SumsColumns sums_columns = nullptr);
/// The ops of which regions do the work by code of their own (`Cast`, `Clone`, `Sum`, `Cat`, `Unslice`), with
/// the kernels that a device has for them when this is made: whoever puts another one in its place means that
/// one.
class SHERD_API KnownMembers {
 public:
  explicit KnownMembers(DeviceType device);
  /// Whether it is one of them and has its kernel still; none for another op.
  std::optional<bool> stands(const AnyOp& op) const;

 private:
  DeviceType device_;
  std::vector<std::pair<const KernelRow*, Kernel>> kernels_;
};
/// What an elementwise op costs beside reading and writing: as good as nothing, or as much.
enum class Effort : std::uint8_t { light, heavy };
/// Of an elementwise op or a cast; none of others, and of those that nobody told of.
SHERD_API std::optional<Effort> effort_of(const AnyOp& op);
SHERD_API void set_effort(const KernelRow& row, Effort effort);
/// The op, if it sums the rows of a tensor of that shape, or takes their means, as a member of a region may.
SHERD_API const Sum* row_sum(const AnyOp& op, const Shape& shape, DType dtype);
/// The op, if it sums the columns of such a tensor (all axes but the last), or takes their means. As a member
/// of a region it sums what another one makes; its result, known when all rows are done, no other one reads.
SHERD_API const Sum* column_sum(const AnyOp& op, const Shape& shape, DType dtype);
/// Of one region: its threads keep sums for all of them. They are of one dtype and of rows of one length, so
/// all are made in the same parts.
inline constexpr std::size_t most_column_sums = 4;

/// Which elements of each row of a larger tensor a smaller one is.
struct RowPart {
  std::int64_t first, step;
};
/// Where an op that puts its inputs into the rows of its result (`Cat`, `Unslice`) has each of them, as a
/// member of a region may; the rest is 0. Empty for other ops, and along another axis than the last.
SHERD_API std::vector<RowPart> row_parts(const AnyOp& op, std::span<const Shape> in);
/// Which part of the rows of `columns` elements, one behind another, a tensor over `space` shows; none for
/// another one.
SHERD_API std::optional<RowPart> row_part(const RowSpace& space, const Layout& layout, std::int64_t columns);

/// What a region consists of. Its values are numbered: its inputs, then what each member gives.
struct Region {
  struct Operand {
    std::uint32_t value;
    Layout layout;  ///< in the value's memory, of a value that a member made; inputs have their own
  };
  struct Member {
    Ref<const AnyOp> op;
    std::vector<Operand> in;
    Spec result;  ///< dense; of one that writes, that of the first operand, in whose memory it is
    bool writes() const { return op->writes(0); }
  };
  RowSpace space;
  std::vector<std::pair<DType, Layout>> inputs{};
  std::vector<bool> written{};  ///< by input: a member writes it
  std::vector<Member> members{};
  std::vector<std::uint32_t> results{};  ///< values whose memory is given, beside the written inputs

  bool operator==(const Region& other) const;
  std::string text() const;
  /// Of the results that nobody stores.
  std::int64_t bytes_saved() const;
  mutable std::atomic<std::shared_ptr<const void>>
      plan{};  ///< a kernel's own; the tensors of a region are on one device
};

/// The members of a region in turn. Outputs: the written inputs, then the region's results.
struct FusedRegion {
  static constexpr std::string_view name = "fused";
  static constexpr Arity arity = Arity::at_least(0);
  static constexpr bool differentiable = false;
  static constexpr bool orders_overlap = true;
  std::shared_ptr<const Region> region;

  bool writes(std::size_t i) const { return region->written[i]; }
  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  void fields(auto&& on) const { on("ops", region->text()); }
  bool operator==(const FusedRegion& other) const {
    return region == other.region || *region == *other.region;
  }
};

/// The region of such an op; null for others.
SHERD_API const Region* region_of(const AnyOp& op);

}  // namespace sherd::ops
