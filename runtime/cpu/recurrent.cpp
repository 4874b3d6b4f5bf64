// Recurrent layers step by step: a product for all gates, and one pass over them.
#include "runtime/ops/recurrent.h"

#include <algorithm>

#include "runtime/cpu/gemm_repeated.h"
#include "runtime/cpu/scratch.h"
#include "runtime/math.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

using math::sigmoid;
using math::tanh;
using ops::RecurrentCell;

struct Sizes {
  ops::Recurrent op;
  std::int64_t steps, batch, hidden, gates;

  Sizes(const ops::Recurrent& op, const Shape& hidden, std::int64_t gates)
      : op(op), steps(hidden[0]), batch(hidden[1]), hidden(hidden[2]), gates(gates) {}
  std::int64_t state() const { return batch * hidden; }
  std::int64_t gated() const { return batch * gates; }
  /// The n-th step that is taken.
  std::int64_t step(std::int64_t n) const { return op.reverse ? steps - 1 - n : n; }
  /// What was before the n-th step.
  template <class T>
  const T* before(std::int64_t n, const T* first, const T* states) const {
    return n == 0 ? first : states + step(n - 1) * state();
  }
  /// Calls `body(row)` for each of the batch.
  template <class F>
  void for_rows(const F& body) const {
    const std::int64_t grain = std::max<std::int64_t>(1, (1 << 12) / gates);
    parallel_for(batch, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) body(row);
    });
  }
};

template <class T>
Scratch<T> memory_for(std::int64_t count) {
  Scratch<T> room = scratch<T>(count);
  check<OutOfMemoryError>(room != nullptr, "recurrent: no memory for a step of {} numbers", count);
  return room;
}

// ---- One row of a step: `n` features, whose gates lie one after another.

template <class T>
void tanh_row(std::int64_t n, const T* x, const T* m, T* h) {
  using C = compute_t<T>;
  for (std::int64_t j = 0; j < n; ++j) h[j] = T(tanh(C(x[j]) + C(m[j])));
}

template <class T>
void lstm_row(std::int64_t n, const T* x, const T* m, const T* before, T* __restrict h, T* __restrict c,
              T* __restrict kept) {
  using C = compute_t<T>;
  for (std::int64_t j = 0; j < n; ++j) {
    const C i = sigmoid(C(x[j]) + C(m[j])), f = sigmoid(C(x[n + j]) + C(m[n + j])),
            g = tanh(C(x[2 * n + j]) + C(m[2 * n + j])), o = sigmoid(C(x[3 * n + j]) + C(m[3 * n + j]));
    const C next = f * C(before[j]) + i * g;
    c[j] = T(next);
    h[j] = T(o * tanh(next));
    kept[j] = T(i), kept[n + j] = T(f), kept[2 * n + j] = T(g), kept[3 * n + j] = T(o);
  }
}

template <class T>
void gru_row(std::int64_t n, const T* x, const T* m, const T* before, T* __restrict h, T* __restrict kept) {
  using C = compute_t<T>;
  for (std::int64_t j = 0; j < n; ++j) {
    const C r = sigmoid(C(x[j]) + C(m[j])), z = sigmoid(C(x[n + j]) + C(m[n + j])), own = C(m[2 * n + j]);
    const C fresh = tanh(C(x[2 * n + j]) + r * own);
    h[j] = T(fresh + z * (C(before[j]) - fresh));
    kept[j] = T(r), kept[n + j] = T(z), kept[2 * n + j] = T(fresh), kept[3 * n + j] = T(own);
  }
}

template <class T>
void tanh_grad_row(std::int64_t n, const compute_t<T>* gh, const T* h, T* __restrict gx) {
  using C = compute_t<T>;
  for (std::int64_t j = 0; j < n; ++j) gx[j] = T(gh[j] * (1 - C(h[j]) * C(h[j])));
}

/// `gc` is the gradient of c, and then of the c before.
template <class T>
void lstm_grad_row(std::int64_t n, const compute_t<T>* gh, compute_t<T>* __restrict gc, const T* c,
                   const T* before, const T* kept, T* __restrict gx) {
  using C = compute_t<T>;
  for (std::int64_t j = 0; j < n; ++j) {
    const C i = C(kept[j]), f = C(kept[n + j]), g = C(kept[2 * n + j]), o = C(kept[3 * n + j]);
    const C t = tanh(C(c[j])), all = gc[j] + gh[j] * o * (1 - t * t);
    gx[j] = T(all * g * (i * (1 - i)));
    gx[n + j] = T(all * C(before[j]) * (f * (1 - f)));
    gx[2 * n + j] = T(all * i * (1 - g * g));
    gx[3 * n + j] = T(gh[j] * t * (o * (1 - o)));
    gc[j] = all * f;
  }
}

/// `gh` is the gradient of h, and then what the h before has of it beside its product.
template <class T>
void gru_grad_row(std::int64_t n, compute_t<T>* __restrict gh, const T* before, const T* kept,
                  T* __restrict gx, T* __restrict gm) {
  using C = compute_t<T>;
  for (std::int64_t j = 0; j < n; ++j) {
    const C r = C(kept[j]), z = C(kept[n + j]), fresh = C(kept[2 * n + j]), own = C(kept[3 * n + j]);
    const C gz = gh[j] * (C(before[j]) - fresh) * (z * (1 - z)), gn = gh[j] * (1 - z) * (1 - fresh * fresh),
            gr = gn * own * (r * (1 - r));
    gx[j] = gm[j] = T(gr), gx[n + j] = gm[n + j] = T(gz);
    gx[2 * n + j] = T(gn), gm[2 * n + j] = T(gn * r);
    gh[j] = gh[j] * z;
  }
}

// ---- The steps.

template <class T>
const T* data_of(const Tensor& x) {
  return reinterpret_cast<const T*>(raw_or_null(x));
}
template <class T>
T* result_of(const Tensor& x) {
  return reinterpret_cast<T*>(x.raw());
}

template <class T>
void forward(const Sizes& s, Inputs in, Outputs out) {
  const T *x = data_of<T>(in[0]), *w = data_of<T>(in[1]), *bias = data_of<T>(in[2]), *h0 = data_of<T>(in[3]),
          *c0 = data_of<T>(in[4]);
  T *h = result_of<T>(out[0]), *c = result_of<T>(out[1]), *kept = result_of<T>(out[2]);
  const std::int64_t n = s.hidden;
  const RepeatedGemm<T> product({.m = s.batch,
                                 .n = s.gates,
                                 .k = n,
                                 .lda = n,
                                 .b = w,
                                 .ldb = n,
                                 .transpose_b = true,
                                 .ldc = s.gates,
                                 .bias = bias});
  const Scratch<T> products = memory_for<T>(s.gated());
  for (std::int64_t i = 0; i < s.steps; ++i) {
    const std::int64_t t = s.step(i);
    const T *before = s.before(i, h0, h), *cell = s.before(i, c0, c);
    product(before, products.get());
    s.for_rows([&](std::int64_t row) {
      const std::int64_t at = t * s.batch + row;
      const T *from = x + at * s.gates, *m = products.get() + row * s.gates;
      if (s.op.cell == RecurrentCell::tanh)
        tanh_row(n, from, m, h + at * n);
      else if (s.op.cell == RecurrentCell::lstm)
        lstm_row(n, from, m, cell + row * n, h + at * n, c + at * n, kept + at * 4 * n);
      else
        gru_row(n, from, m, before + row * n, h + at * n, kept + at * 4 * n);
    });
  }
}

/// sum += added, where there is something to add.
template <class T, class C>
void add_row(std::int64_t n, const T* added, C* sum) {
  if (added)
    for (std::int64_t j = 0; j < n; ++j) sum[j] += C(added[j]);
}

template <class T>
void backward(const Sizes& s, Inputs in, Outputs out) {
  using C = compute_t<T>;
  const T *gy = data_of<T>(in[0]), *gcells = s.op.has_cell() ? data_of<T>(in[1]) : nullptr,
          *w = data_of<T>(in[2]), *h0 = data_of<T>(in[3]), *c0 = data_of<T>(in[4]), *h = data_of<T>(in[5]),
          *c = data_of<T>(in[6]), *kept = data_of<T>(in[7]);
  T* const gx = result_of<T>(out[0]);
  T* const gm = s.op.cell == RecurrentCell::gru ? result_of<T>(out[1]) : gx;
  const std::int64_t n = s.hidden;
  const Scratch<C> gh = memory_for<C>(s.state()), gc = memory_for<C>(s.op.has_cell() ? s.state() : 0);
  const Scratch<T> back = memory_for<T>(s.state());
  std::fill_n(gh.get(), s.state(), C(0));
  std::fill_n(gc.get(), s.op.has_cell() ? s.state() : 0, C(0));
  std::fill_n(back.get(), s.state(), T(0.0F));
  const RepeatedGemm<T> product(
      {.m = s.batch, .n = n, .k = s.gates, .lda = s.gates, .b = w, .ldb = n, .ldc = n});
  // What a step passes to the one before it: its product, and in a GRU what `gh` then holds.
  const auto collect = [&](std::int64_t row) {
    C* const sum = gh.get() + row * n;
    if (s.op.cell != RecurrentCell::gru) std::fill_n(sum, n, C(0));
    add_row(n, back.get() + row * n, sum);
  };
  for (std::int64_t i = s.steps - 1; i >= 0; --i) {
    const std::int64_t t = s.step(i);
    const T *before = s.before(i, h0, h), *cell = s.before(i, c0, c);
    s.for_rows([&](std::int64_t row) {
      const std::int64_t at = t * s.batch + row;
      C* const g = gh.get() + row * n;
      collect(row);
      add_row(n, gy ? gy + at * n : nullptr, g);
      if (s.op.cell == RecurrentCell::tanh) {
        tanh_grad_row(n, g, h + at * n, gx + at * n);
      } else if (s.op.cell == RecurrentCell::lstm) {
        add_row(n, gcells ? gcells + at * n : nullptr, gc.get() + row * n);
        lstm_grad_row(n, g, gc.get() + row * n, c + at * n, cell + row * n, kept + at * 4 * n,
                      gx + at * s.gates);
      } else {
        gru_grad_row(n, g, before + row * n, kept + at * 4 * n, gx + at * s.gates, gm + at * s.gates);
      }
    });
    product(gm + t * s.gated(), back.get());
  }
  s.for_rows([&](std::int64_t row) {
    collect(row);
    std::transform(gh.get() + row * n, gh.get() + (row + 1) * n, result_of<T>(out[2]) + row * n,
                   [](C g) { return T(g); });
  });
  if (s.op.has_cell())
    std::transform(gc.get(), gc.get() + s.state(), result_of<T>(out[3]), [](C g) { return T(g); });
}

void recurrent(const ops::Recurrent& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Sizes sizes(op, out[0].shape(), in[1].shape()[0]);
  dispatch_floating(op.name, out[0].dtype(),
                    [&](auto tag) { forward<typename decltype(tag)::type>(sizes, in, out); });
}

void recurrent_grad(const ops::RecurrentGrad& op, Inputs in, Outputs out) {
  if (in[5].numel() == 0) return;
  const Sizes sizes(op.of, in[5].shape(), in[2].shape()[0]);
  dispatch_floating(op.name, out[0].dtype(),
                    [&](auto tag) { backward<typename decltype(tag)::type>(sizes, in, out); });
}

}  // namespace

void add_recurrent() {
  add_kernel<recurrent>(DeviceType::cpu);
  add_kernel<recurrent_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
