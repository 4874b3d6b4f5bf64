#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "runtime/cpu/copy.h"
#include "runtime/cpu/element_bits.h"
#include "runtime/cpu/operands.h"
#include "runtime/cpu/rows.h"
#include "runtime/error.h"
#include "runtime/math.h"
#include "runtime/ops.h"
#include "runtime/ops/cat.h"
#include "runtime/ops/copy.h"
#include "runtime/ops/flip.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

struct Dim {
  std::int64_t size, from, to;
};

/// Dimensions from the outermost to the innermost.
struct Dims {
  std::array<Dim, max_rank> dims;
  int count = 0;

  Dim& inner() { return dims[count - 1]; }
  const Dim& inner() const { return dims[count - 1]; }
};

/// In the order of the target's memory, whatever the order of its dimensions.
Dims collapsed(std::span<const std::int64_t> sizes, std::span<const std::int64_t> from,
               std::span<const std::int64_t> to) {
  std::array<int, max_rank> order;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.begin() + sizes.size(), [&](int a, int b) {
    return std::abs(to[static_cast<std::size_t>(a)]) > std::abs(to[static_cast<std::size_t>(b)]);
  });
  sherd::detail::Operands o;
  o.count = 2;
  o.rank = static_cast<int>(sizes.size());
  for (int d = 0; d < o.rank; ++d) {
    const auto at = static_cast<std::size_t>(order[d]);
    o.sizes[d] = sizes[at];
    o.strides[0][d] = to[at];
    o.strides[1][d] = from[at];
  }
  o.collapse();
  Dims dims;
  for (int d = 0; d < o.rank; ++d) dims.dims[dims.count++] = {o.sizes[d], o.strides[1][d], o.strides[0][d]};
  if (dims.count == 0) dims.dims[dims.count++] = {1, 1, 1};
  return dims;
}

template <class To, class From>
constexpr To converted(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<To, bool>) {
    return static_cast<compute_t<From>>(x) != compute_t<From>(0);
  } else if constexpr (std::is_integral_v<To> && !std::is_integral_v<From>) {
    return math::to_integer<To>(static_cast<compute_t<From>>(x));
  } else {
    return static_cast<To>(static_cast<compute_t<From>>(x));
  }
}

/// Rows of some vectors, one after another, are copied faster by a plain loop than by the C library, which
/// sets out for long ones.
void copy_bytes(const void* from, void* to, std::int64_t n) {
  constexpr std::int64_t vector = 64, shortest = 8 * vector, longest = 64 * vector;
  if (n <= shortest || n > longest) {
    std::memcpy(to, from, static_cast<std::size_t>(n));
    return;
  }
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);
  for (std::int64_t i = 0; i + vector <= n; i += vector) std::memcpy(target + i, source + i, vector);
  std::memcpy(target + n - vector, source + n - vector, vector);
}

template <class To, class From>
void copy_row(const Dim& d, const From* from, To* to) {
  if (d.from == 1 && d.to == 1) {
    if constexpr (std::is_same_v<To, From>) {
      copy_bytes(from, to, d.size * static_cast<std::int64_t>(sizeof(To)));
    } else {
      for (std::int64_t i = 0; i < d.size; ++i) to[i] = converted<To>(from[i]);
    }
  } else if (d.from == -1 && d.to == 1) {  // with the steps known it is made of vectors
    for (std::int64_t i = 0; i < d.size; ++i) to[i] = converted<To>(from[-i]);
  } else if (d.from == 0 && d.to == 1) {
    std::fill_n(to, d.size, converted<To>(*from));
  } else {
    for (std::int64_t i = 0; i < d.size; ++i) to[i * d.to] = converted<To>(from[i * d.from]);
  }
}

/// A square of `edge` rows, each in one register.
template <class T>
struct Square {
  static constexpr int edge = sizeof(T) == 8 ? 8 : 16;
  typedef T Row [[gnu::vector_size(edge * sizeof(T))]];
  Row row[edge];

  void transpose() {
    exchange<1>(std::make_integer_sequence<int, edge>());
    exchange<2>(std::make_integer_sequence<int, edge>());
    exchange<4>(std::make_integer_sequence<int, edge>());
    if constexpr (edge == 16) exchange<8>(std::make_integer_sequence<int, edge>());
  }

 private:
  /// Squares of `step` that lie beside each other off the diagonal.
  template <int step, int... j>
  [[gnu::always_inline]] void exchange(std::integer_sequence<int, j...>) {
#pragma GCC unroll 16
    for (int i = 0; i < edge; ++i) {
      if ((i & step) != 0) continue;
      const Row a = row[i], b = row[i + step];
      row[i] = __builtin_shufflevector(a, b, ((j & step) == 0 ? j : edge + j - step)...);
      row[i + step] = __builtin_shufflevector(a, b, ((j & step) == 0 ? j + step : edge + j)...);
    }
  }
};

/// A plane that is contiguous along `a` in the source and along `b` in the target, square by square; cast, or
/// what squares leave over, in blocks that stay in the cache.
template <class To, class From>
void copy_transposed(const Dim& a, const Dim& b, const From* from, To* to) {
  const auto block = [&](std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1) {
    for (std::int64_t i = i0; i < i1; ++i)
      for (std::int64_t j = j0; j < j1; ++j) to[i * a.to + j] = converted<To>(from[i + j * b.from]);
  };
  constexpr bool squares = std::is_same_v<To, From> && std::is_integral_v<To>;
  constexpr std::int64_t edge = squares ? Square<std::conditional_t<squares, To, int>>::edge : 32;
  for (std::int64_t j0 = 0; j0 < b.size; j0 += edge) {
    const std::int64_t j1 = std::min(j0 + edge, b.size);
    for (std::int64_t i0 = 0; i0 < a.size; i0 += edge) {
      const std::int64_t i1 = std::min(i0 + edge, a.size);
      if constexpr (squares) {
        if (i1 - i0 == edge && j1 - j0 == edge) {
          Square<To> s;
          for (int j = 0; j < edge; ++j)
            std::memcpy(&s.row[j], from + i0 + (j0 + j) * b.from, sizeof s.row[j]);
          s.transpose();
          for (int i = 0; i < edge; ++i) std::memcpy(to + (i0 + i) * a.to + j0, &s.row[i], sizeof s.row[i]);
          continue;
        }
      }
      block(i0, i1, j0, j1);
    }
  }
}

/// Copies what `dims` describe, recursing over the outer ones.
template <class To, class From>
void copy_dims(std::span<const Dim> dims, const From* from, To* to) {
  if (dims.size() == 1) return copy_row(dims[0], from, to);
  const Dim &outer = dims[0], &inner = dims.back();
  if (dims.size() == 2 && outer.from == 1 && inner.to == 1 && inner.from != 0) {
    return copy_transposed(outer, inner, from, to);
  }
  for (std::int64_t i = 0; i < outer.size; ++i)
    copy_dims(dims.subspan(1), from + i * outer.from, to + i * outer.to);
}

/// Cuts the outermost dimension into tiles.
template <class To, class From>
void copy_shape(const Dims& shape, const From* from, To* to) {
  const Dim& outer = shape.dims[0];
  std::int64_t below = 1;
  for (int d = 1; d < shape.count; ++d) below *= shape.dims[d].size;
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 15) / std::max<std::int64_t>(below, 1));
  parallel_for(outer.size, grain, [&](std::int64_t begin, std::int64_t end) {
    std::array<Dim, max_rank> dims = shape.dims;
    dims[0].size = end - begin;
    copy_dims(std::span<const Dim>(dims.data(), static_cast<std::size_t>(shape.count)),
              from + begin * outer.from, to + begin * outer.to);
  });
}

/// Puts the dimension that is contiguous in the source next to the innermost one, where a plane can be
/// transposed.
void bring_plane_inside(Dims& s) {
  for (int d = 0; d + 2 < s.count && s.inner().to == 1 && s.inner().from != 1; ++d) {
    if (s.dims[d].from == 1) {
      std::rotate(s.dims.begin() + d, s.dims.begin() + d + 1, s.dims.begin() + s.count - 1);
      return;
    }
  }
}

}  // namespace

void copy(std::span<const std::int64_t> sizes, DType from_dtype, const void* from,
          std::span<const std::int64_t> from_strides, DType to_dtype, void* to,
          std::span<const std::int64_t> to_strides) {
  check<InternalError>(sizes.size() <= max_rank, "copy: {} dimensions, at most {} are supported",
                       sizes.size(), max_rank);
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return;
  Dims shape = collapsed(sizes, from_strides, to_strides);
  bring_plane_inside(shape);
  if (from_dtype == to_dtype) {
    return with_bits(
        to_dtype, [&]<class T>(T) { copy_shape(shape, static_cast<const T*>(from), static_cast<T*>(to)); });
  }
  with_element(from_dtype, [&]<class From>() {
    with_element(to_dtype, [&]<class To>() {
      if constexpr (!std::is_same_v<To, From>)
        copy_shape(shape, static_cast<const From*>(from), static_cast<To*>(to));
    });
  });
}

namespace {

template <class To, class From>
void convert_row(const void*, std::int64_t n, std::byte* const* at, const std::int64_t*) {
  const auto* from = reinterpret_cast<const From*>(at[1]);
  auto* to = reinterpret_cast<To*>(at[0]);
  if constexpr (std::is_same_v<compute_t<From>, float> && std::is_same_v<compute_t<To>, float> &&
                !std::is_same_v<From, To>)
    for_vectors<float>(
        n, [&](std::int64_t j, auto count) { put<float>(to + j, take<float>(from + j, count), count); });
  else
    copy_row(Dim{n, 1, 1}, from, to);
}

}  // namespace

sherd::detail::Row conversion(DType from, DType to) {
  return with_element(from, [&]<class From>() {
    return with_element(to, [&]<class To>() -> sherd::detail::Row { return convert_row<To, From>; });
  });
}

namespace {

/// `from` broadcast to `to`'s shape.
void copy_tensor(const Tensor& from, const Tensor& to) {
  Shape steps = to.shape();
  const int extra = to.rank() - from.rank();
  for (int i = 0; i < to.rank(); ++i) {
    const bool repeated = i < extra || (from.shape()[i - extra] == 1 && to.shape()[i] != 1);
    steps[i] = repeated ? 0 : from.strides()[i - extra];
  }
  copy(to.shape(), from.dtype(), from.raw(), steps, to.dtype(), to.raw(), to.strides());
}

void cast(const ops::Cast&, Inputs in, Outputs out) { copy_tensor(in[0], out[0]); }
void clone(const ops::Clone&, Inputs in, Outputs out) { copy_tensor(in[0], out[0]); }
void copy_into(const ops::CopyInto&, Inputs in, Outputs) { copy_tensor(in[1], in[0]); }

/// The parts of a few rows before the next rows, so that the target goes through the caches once.
void cat(const ops::Cat& op, Inputs in, Outputs out) {
  const Tensor& y = out[0];
  const DType dtype = y.dtype();
  if (y.numel() == 0) return;
  const std::int64_t rows = op.axis > 0 ? y.shape()[0] : 1;
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 15) / (y.numel() / rows));
  const auto copy_rows = [&](std::int64_t begin, std::int64_t end) {
    std::byte* to = y.raw() + begin * y.strides()[0] * size_of(dtype);
    for (const Tensor& part : in) {
      Shape sizes = part.shape();
      if (op.axis > 0) sizes[0] = end - begin;
      copy(sizes, dtype, part.raw() + begin * part.strides()[0] * size_of(dtype), part.strides(), dtype, to,
           y.strides());
      to += part.shape()[op.axis] * y.strides()[op.axis] * size_of(dtype);
    }
  };
  if (op.axis > 0)
    parallel_for(rows, grain, copy_rows);
  else
    copy_rows(0, 0);
}

void roll(const ops::Roll& op, Inputs in, Outputs out) {
  const std::int64_t n = in[0].shape()[op.axis];
  const Tensor parts[] = {narrow(in[0], op.axis, n - op.by, op.by), narrow(in[0], op.axis, 0, n - op.by)};
  cat(ops::Cat{op.axis}, parts, out);
}

/// A copy that starts at the end of the axes and walks back.
void flip(const ops::Flip& op, Inputs in, Outputs out) {
  const Tensor& x = in[0];
  if (x.numel() == 0) return;
  Shape steps = x.strides();
  std::int64_t first = 0;
  for (int i = 0; i < x.rank(); ++i) {
    if (!has(op.axes, static_cast<std::size_t>(i))) continue;
    first += (x.shape()[i] - 1) * steps[i];
    steps[i] = -steps[i];
  }
  copy(x.shape(), x.dtype(), x.raw() + first * size_of(x.dtype()), steps, x.dtype(), out[0].raw(),
       out[0].strides());
}

}  // namespace

void add_copy() {
  add_kernel<cast>(DeviceType::cpu);
  add_kernel<clone>(DeviceType::cpu);
  add_kernel<copy_into>(DeviceType::cpu);
  add_kernel<cat>(DeviceType::cpu);
  add_kernel<roll>(DeviceType::cpu);
  add_kernel<flip>(DeviceType::cpu);
}

}  // namespace sherd::cpu
