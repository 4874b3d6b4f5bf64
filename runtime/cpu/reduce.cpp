#include "runtime/cpu/reduce.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "runtime/cpu/column_sums.h"
#include "runtime/cpu/row_sum.h"
#include "runtime/cpu/rows.h"
#include "runtime/instances.h"
#include "runtime/ops.h"
#include "runtime/ops/power.h"
#include "runtime/ops/sum.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

// The reduced dimension is cut into chunks of a fixed length; every chunk gives a partial result of [inner].

/// What elements are summed in: sums of integers wrap around.
template <class T>
using summed_t = std::conditional_t<std::is_integral_v<T>, std::uint64_t, compute_t<T>>;

// `of` is a functor: what is summed of an element.

/// How many of bools hold, by vectors of bytes: as many rounds as a byte counts, then they are added up.
std::uint64_t count_true(const bool* x, std::int64_t n) {
  constexpr std::int64_t width = 64, rounds = 255;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(x);  // of bools none is a vector
  std::uint64_t count = 0;
  std::int64_t i = 0;
  while (n - i >= width) {
    std::uint8_t held[width] = {};
    for (const std::int64_t end = i + std::min(rounds, (n - i) / width) * width; i < end; i += width)
      for (std::int64_t k = 0; k < width; ++k) held[k] = static_cast<std::uint8_t>(held[k] + bytes[i + k]);
    for (const std::uint8_t one : held) count += one;
  }
  for (; i < n; ++i) count += bytes[i];
  return count;
}

/// The same of `rows` rows, for each column.
void count_true_rows(const bool* x, std::int64_t rows, std::int64_t row_stride, std::int64_t columns,
                     std::uint64_t* counts) {
  constexpr std::int64_t width = 256, rounds = 255;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(x);
  for (std::int64_t j = 0; j < columns; j += width) {
    const std::int64_t n = std::min(width, columns - j);
    for (std::int64_t r = 0; r < rows;) {
      std::uint8_t held[width] = {};
      for (const std::int64_t end = std::min(r + rounds, rows); r < end; ++r)
        for (std::int64_t k = 0; k < n; ++k)
          held[k] = static_cast<std::uint8_t>(held[k] + bytes[r * row_stride + j + k]);
      for (std::int64_t k = 0; k < n; ++k) counts[j + k] += held[k];
    }
  }
}

/// Along contiguous elements.
template <class T, class Of, class C = summed_t<T>>
C sum_row(const T* x, std::int64_t n, Of of) {
  if constexpr (std::is_same_v<T, bool>) return count_true(x, n);
  return sum_vectors<C>(n, [&](std::int64_t j, auto count) { return of(Lanes<C>(take<C>(x + j, count))).vector(); });
}

constexpr std::int64_t run =
    RowRuns::longest;  // rows that are added one after the other; more are a tree over such runs

/// Adds the rows from `first` on to `sums` as that tree: `add_run(first, rows, sums)` adds those of a run.
template <class C, class F>
void add_runs(std::int64_t first, std::int64_t rows, std::int64_t columns, C* sums, const F& add_run) {
  if (rows <= run) return add_run(first, rows, sums);
  const std::int64_t half = (rows / run + 1) / 2 * run;
  C rest[piece_width];  // so many rows only where they are short (see chunk_of)
  std::fill_n(rest, columns, C(0));
  add_runs(first, half, columns, sums, add_run);
  add_runs(first + half, rows - half, columns, rest, add_run);
  for (std::int64_t j = 0; j < columns; ++j) sums[j] += rest[j];
}

/// Adds the rows of a run to `sums`, four at a time.
template <class T, class Of, class C = summed_t<T>>
void add_run(const T* x, std::int64_t rows, std::int64_t row_stride, std::int64_t columns, C* sums, Of of) {
  static_assert(RowRuns::together == 4);
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T *a = x + r * row_stride, *b = a + row_stride, *c = b + row_stride, *d = c + row_stride;
    for (std::int64_t j = 0; j < columns; ++j)
      sums[j] += (of(C(a[j])) + of(C(b[j]))) + (of(C(c[j])) + of(C(d[j])));
  }
  for (; r < rows; ++r) {
    for (std::int64_t j = 0; j < columns; ++j) sums[j] += of(C(x[r * row_stride + j]));
  }
}

/// Adds `rows` contiguous rows to `sums`.
template <class T, class Of, class C = summed_t<T>>
void add_rows(const T* x, std::int64_t rows, std::int64_t row_stride, std::int64_t columns, C* sums, Of of) {
  if constexpr (std::is_same_v<T, bool>) return count_true_rows(x, rows, row_stride, columns, sums);
  add_runs(0, rows, columns, sums, [&](std::int64_t first, std::int64_t n, C* to) {
    add_run(x + first * row_stride, n, row_stride, columns, to, of);
  });
}

template <class T, class Of, class C = summed_t<T>>
C sum_strided(const T* x, std::int64_t n, std::int64_t stride, Of of) {
  constexpr std::int64_t leaf = 16;
  if (n > leaf) {
    const std::int64_t half = (n / leaf + 1) / 2 * leaf;
    return sum_strided(x, half, stride, of) + sum_strided(x + half * stride, n - half, stride, of);
  }
  C total = 0;
  for (std::int64_t i = 0; i < n; ++i) total += of(C(x[i * stride]));
  return total;
}

/// `n` steps of the reduced dimension from `x`, added to `sums` [inner].
template <class T, class Of, class C = summed_t<T>>
void add_chunk(const StridedReduction& r, const T* x, std::int64_t n, C* sums, Of of) {
  if (r.inner_stride == 1 && r.inner > 1) return add_rows(x, n, r.reduce_stride, r.inner, sums, of);
  for (std::int64_t j = 0; j < r.inner; ++j, x += r.inner_stride)
    sums[j] += r.reduce_stride == 1 ? sum_row(x, n, of) : sum_strided(x, n, r.reduce_stride, of);
}

/// Steps of the reduced dimension that one task adds up: enough for a thread.
std::int64_t chunk_of(const StridedReduction& r) {
  return r.inner_stride == 1 && r.inner > 1 ? std::max<std::int64_t>(run, (1 << 16) / r.inner) : 1 << 14;
}

template <class To, class C>
To finished(C total, double divisor) {
  if constexpr (std::is_integral_v<To>) {
    return static_cast<To>(total);
  } else {
    return To(total / static_cast<C>(divisor));
  }
}

/// Many results with a short way each.
template <class T, class To, class Of>
void sum_whole(const StridedReduction& r, const T* x, double divisor, To* out, Of of) {
  using C = summed_t<T>;
  for_pieces(r, [&](const StridedReduction& part, std::int64_t from, std::int64_t to) {
    if (part.inner == 1 && part.reduce_stride == 1) {
      out[to] = finished<To>(sum_row(x + from, part.reduce, of), divisor);
      return;
    }
    C sums[piece_width];
    std::fill_n(sums, part.inner, C(0));
    add_chunk(part, x + from, part.reduce, sums, of);
    for (std::int64_t j = 0; j < part.inner; ++j) out[to + j] = finished<To>(sums[j], divisor);
  });
}

/// The sums of chunks, of which there is one at least: a tree, over the divisor.
template <class To, class C>
void join_chunks(C* sums, std::int64_t chunks, std::int64_t inner, double divisor, To* out) {
  add_rows_in_pairs(sums, chunks, inner);
  for (std::int64_t j = 0; j < inner; ++j) out[j] = finished<To>(sums[j], divisor);
}

/// Few results with a long way each: chunks of the reduced dimension first, then a tree over the chunks.
template <class T, class To, class Of>
void sum_chunks(const StridedReduction& r, std::int64_t chunk, const T* x, double divisor, To* out, Of of) {
  using C = summed_t<T>;
  const std::int64_t chunks = ceil_div(r.reduce, chunk);
  std::vector<C> partial(static_cast<std::size_t>(r.outer * chunks * r.inner));
  parallel_for(r.outer * chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t o = t / chunks, first = t % chunks * chunk;
      add_chunk(r, x + o * r.outer_stride + first * r.reduce_stride, std::min(chunk, r.reduce - first),
                partial.data() + t * r.inner, of);
    }
  });
  for (std::int64_t o = 0; o < r.outer; ++o)
    join_chunks(partial.data() + o * chunks * r.inner, chunks, r.inner, divisor, out + o * r.inner);
}

template <class T, class To, class Of>
void sum_of(const StridedReduction& r, const T* x, double divisor, To* out, Of of) {
  if (r.outer == 0 || r.inner == 0) return;
  const std::int64_t chunk = chunk_of(r);
  if (r.reduce > chunk) return sum_chunks(r, chunk, x, divisor, out, of);
  sum_whole(r, x, divisor, out, of);
}

}  // namespace

template <class T>
void sum(const StridedReduction& r, const T* x, double divisor, sum_t<T>* out) {
  sum_of(r, x, divisor, out, std::identity{});
}

SumOfRow sum_of_row(DType dtype) {
  return with_floating("sum", dtype, []<class T>() -> SumOfRow {
    return [](const std::byte* x, std::int64_t n, double divisor, std::byte* out) {
      *reinterpret_cast<T*>(out) =
          finished<T>(sum_row(reinterpret_cast<const T*>(x), n, std::identity{}), divisor);
    };
  });
}

RowRuns::RowRuns(std::int64_t rows, std::int64_t columns)
    : rows_(rows),
      columns_(columns),
      chunk_(chunk_of(StridedReduction::contiguous(1, rows, columns))),
      per_chunk_(runs_of(chunk_)) {}

std::int64_t RowRuns::rows_in(std::int64_t chunk) const { return std::min(chunk_, rows_ - chunk * chunk_); }

RowRuns::Run RowRuns::at(std::int64_t i) const {
  const std::int64_t chunk = i / per_chunk_, first = i % per_chunk_ * longest;
  return {chunk * chunk_ + first, std::min(longest, rows_in(chunk) - first)};
}

namespace {
/// As `add_run` adds all of a run: of four rows that come by twos the first two wait in `pending`.
template <class T, class C = summed_t<T>>
void add_part(const T* x, PartOfRun part, std::int64_t columns, C* pending, C* sums) {
  constexpr std::int64_t together = RowRuns::together;
  const bool halves = part.rows == together / 2 && part.first / together * together + together <= part.run;
  if (!halves) return add_run(x, part.rows, columns, columns, sums, std::identity{});
  const T* next = x + columns;
  if (part.first % together == 0)
    for (std::int64_t j = 0; j < columns; ++j) pending[j] = C(x[j]) + C(next[j]);
  else
    for (std::int64_t j = 0; j < columns; ++j) sums[j] += pending[j] + (C(x[j]) + C(next[j]));
}

template <class T, class C = summed_t<T>>
void join_runs(const RowRuns& runs, const C* sums, double divisor, T* out) {
  const std::int64_t columns = runs.columns();
  std::vector<C> totals(static_cast<std::size_t>(runs.chunks() * columns));
  for (std::int64_t chunk = 0; chunk < runs.chunks(); ++chunk) {
    const C* of_chunk = sums + runs.first_of(chunk) * columns;
    add_runs(0, runs.rows_in(chunk), columns, totals.data() + chunk * columns,
             [&](std::int64_t first, std::int64_t, C* to) {
               for (std::int64_t j = 0; j < columns; ++j) to[j] += of_chunk[first / run * columns + j];
             });
  }
  join_chunks(totals.data(), runs.chunks(), columns, divisor, out);
}
}  // namespace

SumOfColumns sum_of_columns(DType dtype) {
  return with_floating("sum", dtype, []<class T>() -> SumOfColumns {
    using C = summed_t<T>;
    return {
        sizeof(C),
        [](const std::byte* x, PartOfRun part, std::int64_t columns, std::byte* pending, std::byte* sums) {
          add_part(reinterpret_cast<const T*>(x), part, columns, reinterpret_cast<C*>(pending),
                   reinterpret_cast<C*>(sums));
        },
        [](const RowRuns& runs, const std::byte* sums, double divisor, std::byte* out) {
          join_runs(runs, reinterpret_cast<const C*>(sums), divisor, reinterpret_cast<T*>(out));
        }};
  });
}

[[gnu::used]] const auto reduce_instances =
    instances_for<any_dtype>([]<class T>() { return std::tuple(&sum<T>); });

Operand operand(const Tensor& x, Mask axes) {
  int first = x.rank(), last = -1;
  for (int i = 0; i < x.rank(); ++i)
    if (has(axes, static_cast<std::size_t>(i))) {
      first = std::min(first, i);
      last = i;
    }
  bool block = true;
  for (int i = first; i <= last; ++i) block = block && has(axes, static_cast<std::size_t>(i));
  if (!block || !x.is_contiguous()) {
    if (block) return operand(clone(x), axes);
    Shape order;
    for (int pass = 0; pass < 2; ++pass)
      for (int i = 0; i < x.rank(); ++i)
        if (has(axes, static_cast<std::size_t>(i)) == (pass == 1)) order.push_back(i);
    const Tensor moved = clone(permute(x, order));
    Mask tail = 0;
    for (int i = 0; i < x.rank(); ++i)
      if (has(axes, static_cast<std::size_t>(order[i]))) tail |= bit(static_cast<std::size_t>(i));
    return operand(moved, tail);
  }
  std::int64_t outer = 1, reduce = 1, inner = 1;
  for (int i = 0; i < x.rank(); ++i) (i < first ? outer : i > last ? inner : reduce) *= x.shape()[i];
  return {x, StridedReduction::contiguous(outer, reduce, inner)};
}

namespace {

void sum_op(const ops::Sum& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operand p = operand(in[0], op.axes);
  with_element(in[0].dtype(), [&]<class T>() {
    const double divisor = op.mean ? static_cast<double>(p.r.reduce) : 1.0;
    if (op.mean && p.r.reduce == 0) {  // the mean of nothing
      fill_(alias(out[0], out[0].layout()), std::numeric_limits<double>::quiet_NaN());
    } else {
      sum(p.r, reinterpret_cast<const T*>(p.x.raw()), divisor, reinterpret_cast<sum_t<T>*>(out[0].raw()));
    }
  });
}

/// The sums in `y` of squares that were too large or too small for f32, again in f64.
template <class T>
void sum_again(const StridedReduction& r, const T* x, const float* sums, double* y) {
  parallel_for(r.outer * r.inner, std::max<std::int64_t>(1, (1 << 14) / r.reduce), [&](auto begin, auto end) {
    for (std::int64_t i = begin; i < end; ++i) {
      if (sums[i] > 0x1p-100f && sums[i] < std::numeric_limits<float>::infinity()) continue;
      const T* from = x + i / r.inner * r.outer_stride + i % r.inner * r.inner_stride;
      double sum = 0;
      for (std::int64_t k = 0; k < r.reduce; ++k)
        sum += ops::Square{}(static_cast<double>(static_cast<compute_t<T>>(from[k * r.reduce_stride])));
      y[i] = sum;
    }
  });
}

void power_sum_op(const ops::PowerSum& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operand p = operand(in[0], op.axes);
  auto* y = reinterpret_cast<double*>(out[0].raw());
  with_floating(op.name, in[0].dtype(), [&]<class T>() {
    const T* x = p.x.data<T>();
    const auto sum = [&](auto* to) {
      ops::with_size_to(op.power, [&](auto of) { sum_of(p.r, x, 1, to, of); });
    };
    if constexpr (std::is_same_v<T, double>) {
      sum(y);
    } else {
      const Tensor narrow = empty(out[0].shape(), {DType::f32, Device::cpu()});
      auto* sums = reinterpret_cast<float*>(narrow.raw());
      sum(sums);
      std::copy_n(sums, narrow.numel(), y);
      if (op.power == 2 && p.r.reduce > 0) sum_again(p.r, x, sums, y);
    }
  });
}

}  // namespace

void add_reduce() {
  add_kernel<sum_op>(DeviceType::cpu);
  add_kernel<power_sum_op>(DeviceType::cpu);
}

}  // namespace sherd::cpu
