// Normalisation of groups of channels: a group is a row of whole planes.
#include "runtime/ops/group_norm.h"

#include <algorithm>
#include <vector>

#include "runtime/cpu/moments.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// Planes of `plane` elements; each channel is one, each group `channels / groups` of them.
struct Groups {
  std::int64_t batch, channels, groups, plane;

  Groups(const Shape& x, std::int64_t rows)
      : batch(x[0]), channels(x[1]), groups(rows / x[0]), plane(x.numel() / (batch * channels)) {}
  std::int64_t each() const { return channels / groups; }

  /// Calls `body(row, first plane)` for the groups of the batch.
  template <class F>
  void for_each(const F& body) const {
    const std::int64_t grain = std::max<std::int64_t>(1, (1 << 14) / (each() * plane));
    parallel_for(batch * groups, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) body(r, r * each());
    });
  }
};

template <class T, class C = compute_t<T>>
void normalise(const Groups& s, const T* x, const C* weight, const C* bias, double eps, T* y, C* mean,
               C* rstd) {
  s.for_each([&](std::int64_t row, std::int64_t first) {
    const auto [m, scale] = moments_of(x + first * s.plane, s.each() * s.plane, eps);
    mean[row] = m;
    rstd[row] = scale;
    for (std::int64_t p = first; p < first + s.each(); ++p) {
      const Vec<C> w = splat(weight ? weight[p % s.channels] : C(1)),
                   b = splat(bias ? bias[p % s.channels] : C(0));
      const T* from = x + p * s.plane;
      T* to = y + p * s.plane;
      for_vectors<C>(s.plane, [&, m = m, scale = scale](std::int64_t j, auto count) {
        put<C>(to + j, fma(centred(from + j, count, m) * scale, w, b), count);
      });
    }
  });
}

template <class T, class C = compute_t<T>>
void backward(const Groups& s, const T* gy, const T* x, const C* weight, const C* mean, const C* rstd, T* gx,
              C* gweight, C* gbias) {
  // Of each plane the sums of gy times what was normalised, then of gy, so that a channel's are a tree.
  std::vector<C> sums(static_cast<std::size_t>(2 * s.batch * s.channels));
  s.for_each([&](std::int64_t row, std::int64_t first) {
    const C m = mean[row], scale = rstd[row], n = static_cast<C>(s.each() * s.plane);
    C along_ones = 0, along_x = 0;
    for (std::int64_t p = first; p < first + s.each(); ++p) {
      const T *g = gy + p * s.plane, *in = x + p * s.plane;
      const std::int64_t channel = p % s.channels;
      C* sum = sums.data() + p / s.channels * 2 * s.channels + channel;
      sum[0] = scale * sum_vectors<C>(s.plane, [&](std::int64_t j, auto count) {
                 return take<C>(g + j, count) * centred(in + j, count, m);
               });
      sum[s.channels] =
          sum_vectors<C>(s.plane, [&](std::int64_t j, auto count) { return take<C>(g + j, count); });
      const C w = weight ? weight[channel] : C(1);
      along_x += w * sum[0] / n;
      along_ones += w * sum[s.channels] / n;
    }
    for (std::int64_t p = first; p < first + s.each(); ++p) {
      const T *g = gy + p * s.plane, *in = x + p * s.plane;
      const Vec<C> w = splat(weight ? weight[p % s.channels] : C(1));
      T* to = gx + p * s.plane;
      for_vectors<C>(s.plane, [&](std::int64_t j, auto count) {
        const Vec<C> normal = centred(in + j, count, m) * scale;
        put<C>(to + j, (fma(normal, splat(-along_x), take<C>(g + j, count) * w) - along_ones) * scale, count);
      });
    }
  });
  add_rows_in_pairs(sums.data(), s.batch, 2 * s.channels);
  std::copy_n(sums.data(), s.channels, gweight);
  std::copy_n(sums.data() + s.channels, s.channels, gbias);
}

void group_norm(const ops::GroupNorm& op, Inputs in, Outputs out) {
  const Tensor& x = in[0];
  if (x.numel() == 0) return;
  with_floating(op.name, x.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    normalise(Groups(x.shape(), out[1].numel()), x.data<T>(), data_or_null<C>(in[1]), data_or_null<C>(in[2]),
              op.eps, reinterpret_cast<T*>(out[0].raw()), reinterpret_cast<C*>(out[1].raw()),
              reinterpret_cast<C*>(out[2].raw()));
  });
}

void group_norm_grad(const ops::GroupNormGrad& op, Inputs in, Outputs out) {
  const Tensor &gy = in[0], &x = in[1];
  if (x.numel() == 0) {
    for (int i : {1, 2}) zero_(alias(out[i], out[i].layout()));
    return;
  }
  with_floating(op.name, x.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    backward(Groups(x.shape(), in[3].numel()), gy.data<T>(), x.data<T>(), data_or_null<C>(in[2]),
             in[3].data<C>(), in[4].data<C>(), reinterpret_cast<T*>(out[0].raw()),
             reinterpret_cast<C*>(out[1].raw()), reinterpret_cast<C*>(out[2].raw()));
  });
}

}  // namespace

void add_group_norm() {
  add_kernel<group_norm>(DeviceType::cpu);
  add_kernel<group_norm_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
