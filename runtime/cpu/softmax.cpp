#include "runtime/cpu/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/cpu/reduce.h"
#include "runtime/cpu/rows.h"
#include "runtime/cpu/targets.h"
#include "runtime/instances.h"
#include "runtime/math.h"
#include "runtime/ops.h"
#include "runtime/ops/softmax.h"
#include "runtime/ops/sum.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

constexpr std::int64_t block = 256;  // elements whose exponentials are made at a time, on the stack

template <class F>
void for_rows(std::int64_t rows, std::int64_t columns, const F& body) {
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 13) / std::max<std::int64_t>(columns, 1));
  parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) body(r);
  });
}

/// NaN may be missed here; the exponentials bring it back.
template <class T, class C = compute_t<T>>
C maximum(const T* x, std::int64_t n) {
  constexpr C low = -std::numeric_limits<C>::infinity();
  Vec<C> top = splat(low);
  for_vectors<C>(n, [&](std::int64_t j, auto count) {
    const Vec<C> v = take<C>(x + j, count, low);
    top = v > top ? v : top;
  });
  return largest(top);
}

/// y[j] = f(j, count) for the vectors of a row.
template <class C, class T, class F>
void map_row(T* y, std::int64_t n, const F& f) {
  for_vectors<C>(n, [&](std::int64_t j, auto count) { put<C>(y + j, f(j, count), count); });
}

/// e[i] = e^(x[i] - shift).
template <class T, class C>
void exponentials(const T* x, std::int64_t n, C shift, C* e) {
  map_row<C>(e, n, [&](std::int64_t i, auto count) {
    return math::exp(Lanes<C>(take<C>(x + i, count)) - Lanes<C>(shift)).vector();
  });
}

/// Calls `body(j, e, count)` for blocks of the row, where e[i] = e^(x[j + i] - shift).
template <class T, class C, class F>
void for_exponentials(const T* x, std::int64_t n, C shift, const F& body) {
  C e[block];
  for (std::int64_t j = 0; j < n; j += block) {
    const std::int64_t count = std::min(block, n - j);
    exponentials(x + j, count, shift, e);
    body(j, e, count);
  }
}

template <class C>
C sum_of(const C* e, std::int64_t n) {
  return sum_vectors<C>(n, [&](std::int64_t i, auto count) { return take<C>(e + i, count); });
}

template <class T, class C>
C sum_of_exponentials(const T* x, std::int64_t n, C shift) {
  double total = 0;  // there may be many blocks
  for_exponentials(x, n, shift,
                   [&](std::int64_t, const C* e, std::int64_t count) { total += sum_of(e, count); });
  return static_cast<C>(total);
}

/// The same, with the exponentials left in `e`.
template <class T, class C>
C write_exponentials(const T* x, std::int64_t n, C shift, C* e) {
  double total = 0;
  for (std::int64_t j = 0; j < n; j += block) {
    const std::int64_t count = std::min(block, n - j);
    exponentials(x + j, count, shift, e + j);
    total += sum_of(e + j, count);
  }
  return static_cast<C>(total);
}

constexpr std::int64_t held = 2048;  // of a 16-bit row that is kept as f32, on the stack

/// Calls `body` with the row in the compute type where it is short enough to be held, else as it is.
template <class T, class F>
void with_wide_row(const T* x, std::int64_t n, const F& body) {
  using C = compute_t<T>;
  if constexpr (!std::is_same_v<T, C>) {
    if (n <= held) {
      C wide[held];
      for_vectors<C>(n, [&](std::int64_t j, auto count) { put<C>(wide + j, take<C>(x + j, count), count); });
      return body(static_cast<const C*>(wide));
    }
  }
  body(x);
}

}  // namespace

template <class T>
void softmax(const T* x, std::int64_t rows, std::int64_t columns, T* y) {
  using C = compute_t<T>;
  for_rows(rows, columns, [&](std::int64_t r) {
    const T* in = x + r * columns;
    T* out = y + r * columns;
    const C top = maximum(in, columns);
    const auto scale = [&](const C* e, C total) {
      const C factor = C(1) / total;
      map_row<C>(out, columns, [&](std::int64_t j, auto count) { return take<C>(e + j, count) * factor; });
    };
    if constexpr (std::is_same_v<T, C>) {
      scale(out, write_exponentials(in, columns, top, out));
    } else if (columns <= held) {
      C e[held];
      scale(e, write_exponentials(in, columns, top, e));
    } else {
      // The output cannot hold exponentials without rounding them, so they are made twice.
      const C factor = C(1) / sum_of_exponentials(in, columns, top);
      for_exponentials(in, columns, top, [&](std::int64_t j, const C* e, std::int64_t count) {
        map_row<C>(out + j, count,
                   [&](std::int64_t i, auto lanes) { return take<C>(e + i, lanes) * factor; });
      });
    }
  });
}

template <class T>
void softmax_backward(const T* y, const T* g, std::int64_t rows, std::int64_t columns, T* gx) {
  using C = compute_t<T>;
  for_rows(rows, columns, [&](std::int64_t r) {
    const T *p = y + r * columns, *grad = g + r * columns;
    const C along = sum_vectors<C>(columns, [&](std::int64_t j, auto count) {
      return take<C>(p + j, count) * take<C>(grad + j, count);
    });
    map_row<C>(gx + r * columns, columns, [&](std::int64_t j, auto count) {
      return take<C>(p + j, count) * (take<C>(grad + j, count) - along);
    });
  });
}

template <class T>
void log_softmax(const T* x, std::int64_t rows, std::int64_t columns, T* y) {
  using C = compute_t<T>;
  for_rows(rows, columns, [&](std::int64_t r) {
    with_wide_row(x + r * columns, columns, [&](const auto* in) {
      const C top = maximum(in, columns);
      const C log_total = math::log(sum_of_exponentials(in, columns, top));
      map_row<C>(y + r * columns, columns,
                 [&](std::int64_t j, auto count) { return (take<C>(in + j, count) - top) - log_total; });
    });
  });
}

template <class T>
void log_softmax_backward(const T* y, const T* g, std::int64_t rows, std::int64_t columns, T* gx) {
  using C = compute_t<T>;
  for_rows(rows, columns, [&](std::int64_t r) {
    const T *in = y + r * columns, *grad = g + r * columns;
    const C total =
        sum_vectors<C>(columns, [&](std::int64_t j, auto count) { return take<C>(grad + j, count); });
    T* out = gx + r * columns;
    for_exponentials(in, columns, C(0), [&](std::int64_t j, const C* e, std::int64_t count) {
      map_row<C>(out + j, count, [&](std::int64_t i, auto lanes) {
        return take<C>(grad + j + i, lanes) - take<C>(e + i, lanes) * total;
      });
    });
  });
}

template <class T>
std::int64_t cross_entropy(const T* x, const std::int64_t* targets, std::int64_t ignore_index,
                           std::int64_t rows, std::int64_t columns, compute_t<T>* loss, compute_t<T>* tops,
                           compute_t<T>* logs) {
  using C = compute_t<T>;
  if (const std::int64_t bad = first_bad_target(targets, rows, columns, ignore_index); bad >= 0) return bad;
  for_rows(rows, columns, [&](std::int64_t r) {
    const T* in = x + r * columns;
    tops[r] = maximum(in, columns);
    logs[r] = math::log(sum_of_exponentials(in, columns, tops[r]));
    loss[r] = targets[r] == ignore_index ? C(0) : (tops[r] - C(in[targets[r]])) + logs[r];
  });
  return -1;
}

template <class T>
void cross_entropy_backward(const T* x, const std::int64_t* targets, std::int64_t ignore_index,
                            const compute_t<T>* tops, const compute_t<T>* logs, compute_t<T> scale,
                            const compute_t<T>* row_scale, std::int64_t rows, std::int64_t columns, T* gx) {
  using C = compute_t<T>;
  for_rows(rows, columns, [&](std::int64_t r) {
    const T* in = x + r * columns;
    T* out = gx + r * columns;
    if (targets[r] == ignore_index) {
      std::fill_n(out, columns, T(C(0)));
      return;
    }
    const C factor = row_scale ? scale * row_scale[r] : scale, top = tops[r], log = logs[r];
    const std::int64_t t = targets[r];
    const C share = math::exp((C(in[t]) - top) - log);  // before it may be written over
    const T at_target = T((share - C(1)) * factor);
    map_row<C>(out, columns, [&](std::int64_t j, auto count) {
      const Lanes<C> logits(take<C>(in + j, count));
      return (math::exp((logits - Lanes<C>(top)) - Lanes<C>(log)) * Lanes<C>(factor)).vector();
    });
    out[t] = at_target;
  });
}

[[gnu::used]] const auto softmax_instances = instances_for<floating_dtypes>([]<class T>() {
  return std::tuple(&softmax<T>, &softmax_backward<T>, &log_softmax<T>, &log_softmax_backward<T>,
                    &cross_entropy<T>, &cross_entropy_backward<T>);
});

namespace {

std::int64_t columns_of(const Tensor& x) { return x.rank() == 0 ? 1 : x.shape().back(); }

void softmax_op(const ops::Softmax& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor& x = in[0];
  const std::int64_t columns = columns_of(x), rows = x.numel() / columns;
  with_floating(op.name, x.dtype(), [&]<class T>() {
    auto* y = reinterpret_cast<T*>(out[0].raw());
    op.log ? log_softmax(x.data<T>(), rows, columns, y) : softmax(x.data<T>(), rows, columns, y);
  });
}

void softmax_grad_op(const ops::SoftmaxGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor &y = in[0], &gy = in[1];
  const std::int64_t columns = columns_of(y), rows = y.numel() / columns;
  with_floating(op.name, y.dtype(), [&]<class T>() {
    auto* gx = reinterpret_cast<T*>(out[0].raw());
    op.log ? log_softmax_backward(y.data<T>(), gy.data<T>(), rows, columns, gx)
           : softmax_backward(y.data<T>(), gy.data<T>(), rows, columns, gx);
  });
}

void logsumexp_op(const ops::LogSumExp& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  Operand p = operand(in[0], op.axes);
  if (p.r.inner > 1) {  // rows of what is summed
    const Tensor blocks = reshape(p.x, {p.r.outer, p.r.reduce, p.r.inner});
    p = {contiguous(transpose(blocks, 1, 2)), {}};
    p.r = StridedReduction::contiguous(out[0].numel(), blocks.shape()[1], 1);
  }
  with_floating(op.name, p.x.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    const std::int64_t columns = p.r.reduce;
    const T* x = p.x.data<T>();
    auto* y = reinterpret_cast<C*>(out[0].raw());
    for_rows(p.r.outer, columns, [&](std::int64_t r) {
      with_wide_row(x + r * columns, columns, [&](const auto* in) {
        const C top = maximum(in, columns), shift = std::isfinite(top) ? top : C(0);
        y[r] = math::log(sum_of_exponentials(in, columns, shift)) + shift;
      });
    });
  });
}

}  // namespace

void add_softmax() {
  add_kernel<logsumexp_op>(DeviceType::cpu);
  add_kernel<softmax_op>(DeviceType::cpu);
  add_kernel<softmax_grad_op>(DeviceType::cpu);
}

}  // namespace sherd::cpu
