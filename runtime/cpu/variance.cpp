// Variances and their gradients, in f64: of what lies apart from the first element of each fold, which is 0
// where all are equal, as on GPUs.
#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/cpu/reduce.h"
#include "runtime/cpu/rows.h"
#include "runtime/ops.h"
#include "runtime/ops/sum.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// Sums of how far elements lie from the first one of their fold, and of the squares of that. What f64 rounds
/// of them is less than f32 elements are rounded by.
struct Moments {
  double sum = 0, squares = 0;
  void add(double apart) {
    sum += apart;
    squares += apart * apart;
  }
  void add(const Moments& other) {
    sum += other.sum;
    squares += other.squares;
  }
};

/// What deviations of a fold are from: its first element, unless all were NaN then.
template <class T>
double origin_of(T first) {
  const auto value = static_cast<double>(static_cast<compute_t<T>>(first));
  return std::isfinite(value) ? value : 0;
}

constexpr std::int64_t row_chunk = 1 << 14;  // elements of a row that one task takes

/// Along contiguous elements: as many sums side by side as a register and more hold, then one after the
/// other.
template <class T>
Moments moments_of_row(const T* x, std::int64_t n, double first) {
  constexpr std::int64_t width = 32;
  double sums[width] = {}, squares[width] = {};
  std::int64_t i = 0;
  for (; i + width <= n; i += width)
    for (std::int64_t k = 0; k < width; ++k) {
      const double apart = static_cast<double>(static_cast<compute_t<T>>(x[i + k])) - first;
      sums[k] += apart;
      squares[k] += apart * apart;
    }
  Moments all;
  for (; i < n; ++i) all.add(static_cast<double>(static_cast<compute_t<T>>(x[i])) - first);
  for (std::int64_t k = 0; k < width; ++k) all.add(Moments{sums[k], squares[k]});
  return all;
}

/// `rows` rows of `columns` elements, each `step` from the last, added to the moments of their columns.
template <class T>
void add_rows(const T* x, std::int64_t rows, std::int64_t step, std::int64_t columns, const T* first,
              Moments* to) {
  double origin[piece_width];
  std::transform(first, first + columns, origin, origin_of<T>);
  for (std::int64_t r = 0; r < rows; ++r, x += step)
    for (std::int64_t j = 0; j < columns; ++j)
      to[j].add(static_cast<double>(static_cast<compute_t<T>>(x[j])) - origin[j]);
}

/// Moments of [chunks][outer][inner], each of a chunk of the reduced axis; chunks depend on the sizes alone.
struct Chunks {
  std::int64_t length, count, across;  // across: pieces of neighbouring columns
  explicit Chunks(const StridedReduction& r) {
    constexpr std::int64_t most_moments = 1 << 17, least_rows = 64;
    const std::int64_t wanted = std::max<std::int64_t>(1, most_moments / (r.outer * r.inner));
    length = r.inner == 1 ? row_chunk : std::max(least_rows, ceil_div(r.reduce, wanted));
    count = ceil_div(r.reduce, length);
    across = ceil_div(r.inner, piece_width);
  }
};

template <class T>
void add_chunk(const StridedReduction& r, const Chunks& chunks, const T* x, std::int64_t task,
               Moments* moments) {
  const std::int64_t j = task % chunks.across * piece_width, fold = task / chunks.across, o = fold % r.outer,
                     begin = fold / r.outer * chunks.length, n = std::min(chunks.length, r.reduce - begin);
  const T* from = x + o * r.reduce * r.inner;
  Moments* to = moments + fold * r.inner + j;
  if (r.inner == 1)
    *to = moments_of_row(from + begin, n, origin_of(*from));
  else
    add_rows(from + begin * r.inner + j, n, r.inner, std::min(piece_width, r.inner - j), from + j, to);
}

template <class T>
void variances(const ops::Variance& op, const StridedReduction& r, const T* x, double* variance,
               double* mean) {
  const Chunks chunks(r);
  const std::int64_t results = r.outer * r.inner,
                     of_task = std::min(chunks.length, r.reduce) * std::min(r.inner, piece_width);
  std::vector<Moments> moments(static_cast<std::size_t>(chunks.count * results));
  parallel_for(chunks.count * r.outer * chunks.across, std::max<std::int64_t>(1, (1 << 15) / of_task),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t t = begin; t < end; ++t) add_chunk(r, chunks, x, t, moments.data());
               });
  const double left = op.left(r.reduce), n = static_cast<double>(r.reduce);
  parallel_for(results, 1 << 12, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Moments all;
      for (std::int64_t c = 0; c < chunks.count; ++c)
        all.add(moments[static_cast<std::size_t>(c * results + i)]);
      const double apart = all.sum / n, squares = all.squares - all.sum * apart;
      const T first = x[i / r.inner * r.reduce * r.inner + i % r.inner];
      mean[i] = origin_of(first) + apart;
      variance[i] = (squares < 0 ? 0 : squares) / left;
    }
  });
}

double* doubles(const Tensor& t) { return reinterpret_cast<double*>(t.raw()); }

void variance_op(const ops::Variance& op, Inputs in, Outputs out) {
  // There is nothing wider than f64 to add its squares up in, so it needs its mean first.
  if (in[0].dtype() == DType::f64 || in[0].numel() == 0)
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const Operand p = operand(in[0], op.axes);
  with_floating(op.name, in[0].dtype(), [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>)
      variances(op, p.r, p.x.data<T>(), doubles(out[0]), doubles(out[1]));
  });
}

/// gx = (x - mean) times what is one number for a fold.
template <class T>
void gradients_of_fold(const StridedReduction& r, const T* x, const double* mean, const double* by, T* gx) {
  for (std::int64_t k = 0; k < r.reduce; ++k, x += r.inner, gx += r.inner)
    for (std::int64_t j = 0; j < r.inner; ++j)
      gx[j] = T(static_cast<compute_t<T>>((static_cast<double>(static_cast<compute_t<T>>(x[j])) - mean[j]) *
                                          by[j]));
}
template <class T>
void gradients_of_row(std::int64_t n, const T* x, double mean, double by, T* gx) {
  for (std::int64_t k = 0; k < n; ++k)
    gx[k] = T(static_cast<compute_t<T>>((static_cast<double>(static_cast<compute_t<T>>(x[k])) - mean) * by));
}

void variance_grad_op(const ops::VarianceGrad& op, Inputs in, Outputs out) {
  const Operand p = operand(in[1], op.of.axes);
  if (in[1].dtype() == DType::f64 || in[1].numel() == 0 || p.x.raw() != in[1].raw())
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const StridedReduction& r = p.r;
  const Tensor by = div(mul(in[0], 2), op.of.left(r.reduce));
  const double *factor = doubles(by), *mean = doubles(in[2]);
  const std::int64_t length = r.inner == 1 ? row_chunk : std::max<std::int64_t>(1, row_chunk / r.inner),
                     chunks = ceil_div(r.reduce, length);
  with_floating(op.name, in[1].dtype(), [&]<class T>() {
    const T* x = p.x.data<T>();
    auto* gx = reinterpret_cast<T*>(out[0].raw());
    parallel_for(
        r.outer * chunks, std::max<std::int64_t>(1, (1 << 15) / (length * r.inner)),
        [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t t = begin; t < end; ++t) {
            const std::int64_t o = t / chunks, from = t % chunks * length,
                               n = std::min(length, r.reduce - from), at = (o * r.reduce + from) * r.inner;
            if (r.inner == 1)
              gradients_of_row(n, x + at, mean[o], factor[o], gx + at);
            else
              gradients_of_fold({1, n, r.inner}, x + at, mean + o * r.inner, factor + o * r.inner, gx + at);
          }
        });
  });
}

}  // namespace

void add_variance() {
  add_kernel<variance_op>(DeviceType::cpu);
  add_kernel<variance_grad_op>(DeviceType::cpu);
}

}  // namespace sherd::cpu
