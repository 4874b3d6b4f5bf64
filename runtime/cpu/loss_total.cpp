// The mean or sum of a loss over all elements, and its gradients, in one pass over input and target.
#include "runtime/ops/loss_total.h"

#include <limits>
#include <vector>

#include "runtime/cpu/rows.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

constexpr std::int64_t chunk = 1 << 14;  // as `sum` cuts it, so that the sum has the bits of sum(loss)
constexpr std::int64_t block = 512;      // elements in the nearest cache

/// A copy of the functor in registers, and loops that are vectors.
template <class F, class C>
[[gnu::flatten]] void losses(const F f, const C* x, const C* t, std::int64_t n, C* y) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = f(x[i], t[i]);
}
template <int input, class F, class C>
[[gnu::flatten]] void gradients(const F f, const C gy, const C* x, const C* t, std::int64_t n, C* gx) {
  for (std::int64_t i = 0; i < n; ++i)
    gx[i] = sherd::detail::grad_of<input>(f, gy, x[i], t[i], std::numeric_limits<C>::quiet_NaN());
}

template <class T, class F, class C = compute_t<T>>
C sum_of_chunk(const F& f, const T* x, const T* t, std::int64_t n) {
  alignas(64) C loss[chunk];
  alignas(64) C held[2][block];
  for (std::int64_t i = 0; i < n; i += block) {
    const std::int64_t count = std::min(block, n - i);
    losses(f, widened(x + i, count, held[0]), widened(t + i, count, held[1]), count, loss + i);
  }
  return sum_vectors<C>(n, [&](std::int64_t j, auto count) { return take<C>(loss + j, count); });
}

template <class T, class F, class C = compute_t<T>>
C total(const F& f, const T* x, const T* t, std::int64_t n) {
  const std::int64_t chunks = (n + chunk - 1) / chunk;
  std::vector<C> sums(static_cast<std::size_t>(chunks));
  parallel_for(n, chunk, [&](std::int64_t begin, std::int64_t end) {
    sums[static_cast<std::size_t>(begin / chunk)] = sum_of_chunk(f, x + begin, t + begin, end - begin);
  });
  add_rows_in_pairs(sums.data(), chunks, 1);
  return n == 0 ? C(0) : sums[0];
}

void loss_total(const ops::LossTotal& op, Inputs in, Outputs out) {
  const std::int64_t n = in[0].numel();
  with_floating(op.name, in[0].dtype(), [&]<class T>() {
    op.kind.visit([&](const auto& f) {
      const auto sum = total(f, in[0].data<T>(), in[1].data<T>(), n);
      using C = std::remove_const_t<decltype(sum)>;
      *reinterpret_cast<T*>(out[0].raw()) = T(op.mean ? sum / static_cast<C>(n) : sum);
    });
  });
}

/// One of the gradients, element by element.
template <int input, class T, class F, class C = compute_t<T>>
void gradient_of_block(const F& f, C gy, const C* x, const C* t, std::int64_t n, T* gx) {
  if constexpr (std::is_same_v<T, C>) {
    gradients<input>(f, gy, x, t, n, gx);
  } else {
    alignas(64) C wide[block];
    gradients<input>(f, gy, x, t, n, wide);
    for_vectors<C>(n, [&](std::int64_t j, auto count) { put<C>(gx + j, take<C>(wide + j, count), count); });
  }
}

void loss_total_grad(const ops::LossTotalGrad& op, Inputs in, Outputs out) {
  const std::int64_t n = in[1].numel();
  with_floating(op.name, in[0].dtype(), [&]<class T>() {
    using C = compute_t<T>;
    const C g = C(*in[0].data<T>()), gy = op.forward.mean ? g / static_cast<C>(n) : g;
    const T *x = in[1].data<T>(), *t = in[2].data<T>();
    T* gx = has(op.needs, 0) ? reinterpret_cast<T*>(out[0].raw()) : nullptr;
    T* gt = has(op.needs, 1) ? reinterpret_cast<T*>(out[gx ? 1 : 0].raw()) : nullptr;
    op.forward.kind.visit([&](const auto& f) {
      parallel_for(n, chunk, [&](std::int64_t begin, std::int64_t end) {
        alignas(64) C held[2][block];
        for (std::int64_t i = begin; i < end; i += block) {
          const std::int64_t count = std::min(block, end - i);
          const C *a = widened(x + i, count, held[0]), *b = widened(t + i, count, held[1]);
          if (gx) gradient_of_block<0>(f, gy, a, b, count, gx + i);
          if (gt) gradient_of_block<1>(f, gy, a, b, count, gt + i);
        }
      });
    });
  });
}

}  // namespace

void add_loss_total() {
  add_kernel<loss_total>(DeviceType::cpu);
  add_kernel<loss_total_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
