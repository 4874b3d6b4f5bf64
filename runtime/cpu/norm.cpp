#include "runtime/cpu/norm.h"

#include <algorithm>
#include <vector>

#include "runtime/cpu/moments.h"
#include "runtime/instances.h"
#include "runtime/ops/layer_norm.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// Rows of one tile of forward: enough elements to be worth a thread.
std::int64_t row_grain(std::int64_t columns) {
  return std::max<std::int64_t>(1, (1 << 14) / std::max<std::int64_t>(columns, 1));
}

template <class T, class C>
void normalise_row(const T* x, const T* weight, const T* bias, C mean, C rstd, std::int64_t columns, T* y) {
  for_vectors<C>(columns, [&](std::int64_t j, auto count) {
    const Vec<C> normal = centred(x + j, count, mean) * rstd;
    const Vec<C> shift = bias ? take<C>(bias + j, count) : Vec<C>{};
    put<C>(y + j, weight ? fma(normal, take<C>(weight + j, count), shift) : normal + shift, count);
  });
}

/// The inputs of backward.
template <class T>
struct Gradient {
  using C = compute_t<T>;
  const T *gy, *x, *weight;
  const C *mean, *rstd;
  const T* more;
  std::int64_t columns;

  /// gx of row `r`; adds its share to the sums for weight and bias.
  void row(std::int64_t r, T* gx, C* gweight, C* gbias) const {
    const T *g = gy + r * columns, *in = x + r * columns;
    const C m = mean ? mean[r] : C(0), s = rstd[r], n = static_cast<C>(columns);
    const C along_ones =
        mean ? sum_vectors<C>(columns, [&](std::int64_t j, auto count) { return scaled(g, j, count); }) / n
             : C(0);
    const C along_x = s * (sum_vectors<C>(columns,
                                          [&](std::int64_t j, auto count) {
                                            return scaled(g, j, count) * centred(in + j, count, m);
                                          }) /
                           n);
    for_vectors<C>(columns, [&](std::int64_t j, auto count) {
      const Vec<C> normal = centred(in + j, count, m) * s, v = take<C>(g + j, count);
      const Vec<C> own = (fma(normal, splat(-along_x), scaled(g, j, count)) - along_ones) * s;
      put<C>(gx + j, more ? own + take<C>(more + r * columns + j, count) : own, count);
      put<C>(gweight + j, fma(v, normal, take<C>(gweight + j, count)), count);
      put<C>(gbias + j, v + take<C>(gbias + j, count), count);
    });
  }

 private:
  template <class Count>
  Vec<C> scaled(const T* g, std::int64_t j, Count count) const {
    const Vec<C> v = take<C>(g + j, count);
    return weight ? v * take<C>(weight + j, count) : v;
  }
};

}  // namespace

template <class T>
void layer_norm(const T* x, const T* weight, const T* bias, double eps, std::int64_t rows,
                std::int64_t columns, T* y, compute_t<T>* mean, compute_t<T>* rstd) {
  using C = compute_t<T>;
  parallel_for(rows, row_grain(columns), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* row = x + r * columns;
      const Moments<C> m = moments_of(row, columns, eps, mean != nullptr);
      if (mean) mean[r] = m.mean;
      rstd[r] = m.rstd;
      normalise_row(row, weight, bias, m.mean, m.rstd, columns, y + r * columns);
    }
  });
}

template <class T>
void layer_norm_backward(const T* gy, const T* x, const T* weight, const compute_t<T>* mean,
                         const compute_t<T>* rstd, const T* more, std::int64_t rows, std::int64_t columns,
                         T* gx, T* gweight, T* gbias) {
  using C = compute_t<T>;
  constexpr std::int64_t grain = 128;
  const Gradient<T> gradient{gy, x, weight, mean, rstd, more, columns};
  const std::int64_t tiles = std::max<std::int64_t>((rows + grain - 1) / grain, 1);
  std::vector<C> partial(static_cast<std::size_t>(tiles * 2 * columns));
  parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    C* sums = partial.data() + begin / grain * 2 * columns;
    for (std::int64_t r = begin; r < end; ++r) gradient.row(r, gx + r * columns, sums, sums + columns);
  });
  add_rows_in_pairs(partial.data(), tiles, 2 * columns);
  for (std::int64_t j = 0; gweight && j < columns; ++j) gweight[j] = T(partial[j]);
  for (std::int64_t j = 0; gbias && j < columns; ++j) gbias[j] = T(partial[columns + j]);
}

[[gnu::used]] const auto norm_instances = instances_for<floating_dtypes>(
    []<class T>() { return std::tuple(&layer_norm<T>, &layer_norm_backward<T>); });

namespace {

void layer_norm_op(const ops::LayerNorm& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor &x = in[0], &weight = in[1], &bias = in[2];
  const std::int64_t columns = x.shape().back();
  with_floating(op.name, x.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    layer_norm(x.data<T>(), data_or_null<T>(weight), data_or_null<T>(bias), op.eps, x.numel() / columns,
               columns, reinterpret_cast<T*>(out[0].raw()), reinterpret_cast<C*>(out[1].raw()),
               reinterpret_cast<C*>(out[2].raw()));
  });
}

void layer_norm_grad_op(const ops::LayerNormGrad& op, Inputs in, Outputs out) {
  const Tensor &gy = in[0], &x = in[1], &weight = in[2];
  const std::int64_t columns = x.shape().back(), rows = columns == 0 ? 0 : x.numel() / columns;
  with_floating(op.name, x.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    layer_norm_backward(gy.data<T>(), x.data<T>(), data_or_null<T>(weight), in[3].data<C>(), in[4].data<C>(),
                        data_or_null<T>(in[5]), rows, columns, reinterpret_cast<T*>(out[0].raw()),
                        reinterpret_cast<T*>(out[1].raw()), reinterpret_cast<T*>(out[2].raw()));
  });
}

}  // namespace

void add_norm() {
  add_kernel<layer_norm_op>(DeviceType::cpu);
  add_kernel<layer_norm_grad_op>(DeviceType::cpu);
}

}  // namespace sherd::cpu
