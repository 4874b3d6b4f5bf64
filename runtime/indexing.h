// Picking parts of tensors and writing them, with NumPy's and PyTorch's rules.
//
//   x[0], x[-1]                              a row
//   x[{Slice{1, 4}, 0}], x[{Ellipsis{}, 2}]  as x[1:4, 0] and x[..., 2]
//   x[greater(x, 0)], x[{rows, columns}]     picked by a mask, or by tensors of positions
//   x[{Slice{}, 0}] = y;  x[mask] = 0;       written in x, recorded where gradients are
#pragma once

#include <concepts>
#include <optional>
#include <span>
#include <variant>

#include "runtime/inline_vec.h"
#include "runtime/number.h"
#include "runtime/tensor.h"

namespace sherd {

/// Elements start, start + step, ... below end, as `slice`; what is not given is the axis's own end.
struct Slice {
  std::optional<std::int64_t> start{}, end{};
  std::int64_t step = 1;
};
/// As many whole axes as the other entries leave over.
struct Ellipsis {};
/// An axis of size 1 that `x` does not have.
struct NewAxis {};

/// One entry of an index. A position drops its axis and counts from the end where it is negative. A tensor
/// of positions (integers, any shape, negative ones from the end) picks along its axis, several together
/// (their shapes broadcast); a bool one stands for the positions where it holds, over as many axes as it
/// has. Axes of such picks stand where the first of them was if they are neighbours, else in front.
class At {
 public:
  template <std::integral T>
    requires(!std::same_as<T, bool>)
  At(T position) : what_(static_cast<std::int64_t>(position)) {}
  At(Slice slice) : what_(slice) {}
  At(Ellipsis rest) : what_(rest) {}
  At(NewAxis axis) : what_(axis) {}
  At(Tensor positions) : what_(std::move(positions)) {}

  using What = std::variant<std::int64_t, Slice, Ellipsis, NewAxis, Tensor>;
  const What& what() const { return what_; }

 private:
  What what_;
};

/// What `x[...]` is: the part as a tensor (`index`), and for what is done to it at once a place in `x` to
/// write (`index_put_`). A name for it, `auto row = x[0]`, is the part alone.
class SHERD_API Indexed final : public Tensor {
 public:
  Indexed(const Tensor& x, std::span<const At> at);
  Indexed(const Indexed&) = default;
  void operator=(const Tensor& values) &&;
  void operator=(const Indexed& values) && { write(values); }
  void operator=(Number value) &&;
  void operator+=(const Tensor& values) &&;
  void operator-=(const Tensor& values) &&;
  void operator*=(const Tensor& values) &&;
  void operator/=(const Tensor& values) &&;
  void operator+=(Number value) &&;
  void operator-=(Number value) &&;
  void operator*=(Number value) &&;
  void operator/=(Number value) &&;

 private:
  void write(const Tensor& values);
  Tensor x_;
  InlineVec<At, 2> at_;
};

/// The part of `x` that the entries name: a view unless tensors are among them, whose repeated positions add
/// up in the gradient. ShapeError for more entries than axes and for a mask of another shape, ValueError for
/// a position outside. A mask is read on the host.
SHERD_API Tensor index(const Tensor& x, std::span<const At> at);
inline Tensor index(const Tensor& x, std::initializer_list<At> at) {
  return index(x, std::span(at.begin(), at.size()));
}
/// Whether what is written replaces what was there, of repeated positions the last, or is added to it.
enum class Put { replace, add };
/// Writes `values`, broadcast and cast, to that part of `x`, and returns `x`.
SHERD_API Tensor index_put_(const Tensor& x, std::span<const At> at, const Tensor& values,
                            Put put = Put::replace);
inline Tensor index_put_(const Tensor& x, std::initializer_list<At> at, const Tensor& values,
                         Put put = Put::replace) {
  return index_put_(x, std::span(at.begin(), at.size()), values, put);
}

/// Along `axis`: x[..., index[..., j, ...], ...] at j, where the other axes of `index` (integers) are as long
/// as x's or shorter. Repeated positions add up in the gradient.
SHERD_API Tensor gather(const Tensor& x, std::int64_t axis, const Tensor& index);
/// `x` with values[..., j, ...] at index[..., j, ...] along `axis`, of repeated positions the last; shapes as
/// for `gather`.
SHERD_API Tensor scatter(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& values);
SHERD_API Tensor scatter(const Tensor& x, std::int64_t axis, const Tensor& index, Number value);
/// The same, but values are added; repeated positions add up, 16-bit floats in f32.
SHERD_API Tensor scatter_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& values);

/// Positions of what is not zero, in row-major order: (n, rank) i64. Read on the host.
SHERD_API Tensor nonzero(const Tensor& x);
/// The elements of `x` where the bool `mask` holds, both broadcast: 1-D, in row-major order.
SHERD_API Tensor masked_select(const Tensor& x, const Tensor& mask);

}  // namespace sherd
