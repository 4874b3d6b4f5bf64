#include "runtime/cpu/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/cpu/rows.h"
#include "runtime/in_parts.h"
#include "runtime/instances.h"
#include "runtime/ops.h"
#include "runtime/ops/batch_norm.h"
#include "runtime/ops/relu.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// Elements of one channel, the `j`th of its tile: its values are the same in all lanes.
struct InChannel {
  std::int64_t j;
  template <class C, class Count>
  Vec<C> value(const C* p, Count) const {
    return splat(p[j]);
  }
  template <class C>
  C fill(const C* p) const {
    return p[j];
  }
};

/// Elements of neighbouring channels, one each, from the `j`th on.
struct Across {
  std::int64_t j;
  template <class C, class Count>
  Vec<C> value(const C* p, Count count) const {
    return take<C>(p + j, count);
  }
  template <class C>
  C fill(const C*) const {
    return C(0);
  }
};

/// x - mean with zeros in the lanes beyond `count`.
template <class C, class T, class Count, class Channel>
Vec<C> centred_on(const T* x, Count count, Channel channel, const C* mean) {
  return take<C>(x, count, channel.fill(mean)) - channel.value(mean, count);
}

/// Channels [begin, end) of a shape, which one thread works on.
template <class C>
struct Tile {
  ChannelShape s;
  std::int64_t begin, end;

  std::int64_t channels() const { return end - begin; }
  std::int64_t at(std::int64_t b, std::int64_t j) const { return (b * s.channels + begin + j) * s.inner; }

  /// Calls `body(at, count, channel)` for vectors that cover the tile. Without inner elements they lie across
  /// the channels, since a walk down one would use a cache line for each element.
  template <class F>
  void for_each(const F& body) const {
    if (s.inner == 1) {
      for (std::int64_t b = 0; b < s.batch; ++b) for_row(b, body);
      return;
    }
    for (std::int64_t j = 0; j < channels(); ++j)
      for (std::int64_t b = 0; b < s.batch; ++b)
        for_vectors<C>(s.inner, [&](std::int64_t i, auto count) { body(at(b, j) + i, count, InChannel{j}); });
  }

  /// Sums of `term(at, count, channel)` for each channel; its lanes beyond `count` must be zero. Short sums
  /// add up in f64: there may be many.
  template <class F>
  std::vector<double> sum(const F& term) const {
    std::vector<double> totals(static_cast<std::size_t>(channels()));
    if (s.inner == 1) {
      sum_rows(term, totals);
      return totals;
    }
    for (std::int64_t j = 0; j < channels(); ++j)
      for (std::int64_t b = 0; b < s.batch; ++b)
        totals[j] += sum_vectors<C>(
            s.inner, [&](std::int64_t i, auto count) { return term(at(b, j) + i, count, InChannel{j}); });
    return totals;
  }

 private:
  template <class F>
  void for_row(std::int64_t b, const F& body) const {
    for_vectors<C>(channels(), [&](std::int64_t j, auto count) { body(at(b, j), count, Across{j}); });
  }
  template <class F>
  void sum_rows(const F& term, std::vector<double>& totals) const {
    constexpr std::int64_t block = 32;
    for (std::int64_t first = 0; first < s.batch; first += block) {
      std::vector<C> part(totals.size());
      for (std::int64_t b = first; b < std::min(first + block, s.batch); ++b)
        for_row(b, [&](std::int64_t at, auto count, Across channel) {
          C* to = part.data() + channel.j;
          put<C>(to, channel.value(part.data(), count) + term(at, count, channel), count);
        });
      for (std::size_t j = 0; j < totals.size(); ++j) totals[j] += part[j];
    }
  }
};

/// Calls `body(tile)` for all channels.
template <class C, class F>
void for_tiles(ChannelShape s, const F& body) {
  const std::int64_t large =
      std::max<std::int64_t>(1, (1 << 14) / std::max<std::int64_t>(1, s.batch * s.inner));
  const std::int64_t grain = s.inner == 1 ? std::max<std::int64_t>(large, 64) : large;
  parallel_for(s.channels, grain,
               [&](std::int64_t begin, std::int64_t end) { body(Tile<C>{s, begin, end}); });
}

/// 1 / deviation of the tile's channels, and the factor of y: that times the weight.
template <class T, class C = compute_t<T>>
struct Scales {
  std::vector<C> rstd, factor;
  Scales(const BatchNorm<T>& n, const Tile<C>& tile) {
    for (std::int64_t c = tile.begin; c < tile.end; ++c) {
      rstd.push_back(C(1) / std::sqrt(n.variance[c] + static_cast<C>(n.eps)));
      factor.push_back(rstd.back() * (n.weight ? n.weight[c] : C(1)));
    }
  }
};

}  // namespace

template <class T>
void channel_statistics(const T* x, ChannelShape s, compute_t<T>* mean, compute_t<T>* variance) {
  using C = compute_t<T>;
  const auto elements = static_cast<double>(s.batch * s.inner);
  for_tiles<C>(s, [&](const Tile<C>& tile) {
    C* m = mean + tile.begin;
    const auto keep = [&](const std::vector<double>& sums, C* to) {
      for (std::size_t j = 0; j < sums.size(); ++j) to[j] = static_cast<C>(sums[j] / elements);
    };
    keep(tile.sum([&](std::int64_t at, auto count, auto) { return take<C>(x + at, count); }), m);
    const auto squared = [&](std::int64_t at, auto count, auto channel) {
      const Vec<C> d = centred_on(x + at, count, channel, m);
      return d * d;
    };
    keep(tile.sum(squared), variance + tile.begin);
  });
}

namespace {

/// Normalised values of the elements from `at` on, plus the residual and after ReLU.
template <class C, class T, class Count>
Vec<C> finished(const BatchNorm<T>& n, Vec<C> v, std::int64_t at, Count count) {
  if (n.residual) v = rounded<T, C>(v) + take<C>(n.residual + at, count);
  return n.relu ? ops::Relu{}(Lanes<C>(rounded<T, C>(v))).vector() : v;
}

/// What comes from above for normalised values: gy, where ReLU kept none of them back.
template <class C, class T, class Count>
Vec<C> upstream(const BatchNormGrad<T>& g, std::int64_t at, Count count) {
  const Vec<C> gy = take<C>(g.gy + at, count);
  if (g.y == nullptr) return gy;
  const Lanes<C> up(gy), y(take<C>(g.y + at, count));
  return ops::Relu{}.grad_a(up, y, y).vector();
}

}  // namespace

template <class T>
void batch_norm(const BatchNorm<T>& n, T* y) {
  using C = compute_t<T>;
  for_tiles<C>(n.shape, [&](const Tile<C>& tile) {
    const Scales<T> scales(n, tile);
    std::vector<C> shift(scales.factor.size());
    if (n.bias) std::copy(n.bias + tile.begin, n.bias + tile.end, shift.begin());
    tile.for_each([&](std::int64_t at, auto count, auto channel) {
      const Vec<C> v = fma(centred_on(n.x + at, count, channel, n.mean + tile.begin),
                           channel.value(scales.factor.data(), count), channel.value(shift.data(), count));
      put<C>(y + at, finished<C>(n, v, at, count), count);
    });
  });
}

template <class T>
void batch_norm_backward(const BatchNorm<T>& n, const BatchNormGrad<T>& given) {
  using C = compute_t<T>;
  const auto elements = static_cast<double>(n.shape.batch * n.shape.inner);
  for_tiles<C>(n.shape, [&](const Tile<C>& tile) {
    const Scales<T> scales(n, tile);
    const C* mean = n.mean + tile.begin;
    const std::vector<double> along_ones = tile.sum([&](std::int64_t at, auto count, auto) {
      const Vec<C> up = upstream<C>(given, at, count);
      if (given.gresidual) put<C>(given.gresidual + at, up, count);
      return up;
    });
    BatchNormGrad<T> g = given;
    if (g.gresidual) g.gy = g.gresidual, g.y = nullptr;  // which has just been written
    const std::vector<double> along_x = tile.sum([&](std::int64_t at, auto count, auto channel) {
      return upstream<C>(g, at, count) * centred_on(n.x + at, count, channel, mean);
    });
    std::vector<C> back(along_x.size()), shift(along_x.size());
    for (std::size_t j = 0; j < along_x.size(); ++j) {
      const double rstd = scales.rstd[j];
      g.gbias[tile.begin + static_cast<std::int64_t>(j)] = static_cast<C>(along_ones[j]);
      g.gweight[tile.begin + static_cast<std::int64_t>(j)] = static_cast<C>(along_x[j] * rstd);
      if (!g.through_statistics) continue;
      back[j] = static_cast<C>(-along_x[j] * rstd * rstd / elements);
      shift[j] = static_cast<C>(along_ones[j] / elements);
    }
    tile.for_each([&](std::int64_t at, auto count, auto channel) {
      const Vec<C> up = upstream<C>(g, at, count) - channel.value(shift.data(), count);
      const Vec<C> d = centred_on(n.x + at, count, channel, mean);
      put<C>(g.gx + at,
             fma(d, channel.value(back.data(), count), up) * channel.value(scales.factor.data(), count),
             count);
    });
  });
}

[[gnu::used]] const auto batch_norm_instances = instances_for<floating_dtypes>(
    []<class T>() { return std::tuple(&channel_statistics<T>, &batch_norm<T>, &batch_norm_backward<T>); });

namespace {

DType wide(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

template <class T>
BatchNorm<T> describe(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                      const Tensor& variance, double eps) {
  using C = compute_t<T>;
  const std::int64_t batch = x.shape()[0], channels = x.shape()[1];
  return {{batch, channels, x.numel() / (batch * channels)},
          x.data<T>(),
          data_or_null<C>(weight),
          data_or_null<C>(bias),
          data_or_null<C>(mean),
          data_or_null<C>(variance),
          eps};
}

/// Dense and in the dtype of the statistics.
Tensor as_statistics(const Tensor& t, const Tensor& x) {
  return t.defined() ? contiguous(to(t, wide(x.dtype()))) : t;
}

Tensor contiguous_if_given(const Tensor& t) { return t.defined() ? contiguous(t) : t; }

void batch_norm_op(const ops::BatchNorm& op, Inputs in, Outputs out) {
  const Tensor x = contiguous(in[0]), weight = as_statistics(in[1], x), bias = as_statistics(in[2], x),
               residual = contiguous_if_given(in[5]);
  if (!op.training) {
    copy_(out[1], in[3]);
    copy_(out[2], in[4]);
  }
  if (x.numel() == 0) return;
  with_floating(op.name, x.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    BatchNorm<T> norm = describe<T>(x, weight, bias, out[1], out[2], op.eps);
    norm.residual = data_or_null<T>(residual);
    norm.relu = op.relu;
    if (op.training)
      channel_statistics(norm.x, norm.shape, reinterpret_cast<C*>(out[1].raw()),
                         reinterpret_cast<C*>(out[2].raw()));
    batch_norm(norm, reinterpret_cast<T*>(out[0].raw()));
  });
}

void batch_norm_grad_op(const ops::BatchNormGrad& op, Inputs in, Outputs out) {
  const Tensor gy = contiguous(ops::in_one({op.first_part, op.second_part}, in)), x = contiguous(in[1]),
               weight = as_statistics(in[2], x), y = contiguous_if_given(in[5]);
  if (x.numel() == 0) {
    zero_(out[1]);
    zero_(out[2]);
    return;
  }
  with_floating(op.name, x.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    BatchNormGrad<T> g{op.training, gy.data<T>(), data_or_null<T>(y), reinterpret_cast<T*>(out[0].raw())};
    g.gresidual = op.of_residual ? reinterpret_cast<T*>(out[3].raw()) : nullptr;
    g.gweight = reinterpret_cast<C*>(out[1].raw());
    g.gbias = reinterpret_cast<C*>(out[2].raw());
    batch_norm_backward(describe<T>(x, weight, {}, in[3], in[4], op.eps), g);
  });
}

void running_statistics(const ops::RunningStatistics& op, Inputs in, Outputs) {
  if (op.moved_others(in)) return;
  with_floating(op.name, in[0].dtype(), [&]<class R>() {
    const auto move = [&]<class C>(std::size_t i, double factor) {
      R* const running = reinterpret_cast<R*>(in[i].raw());
      const C* const batch = reinterpret_cast<const C*>(in[i + 1].raw());
      const C kept = C(1 - op.momentum), taken = C(op.momentum * factor);
      for (std::int64_t c = 0; c < in[i].numel(); ++c)
        running[c] = R(C(compute_t<R>(running[c])) * kept + batch[c] * taken);
    };
    const auto both = [&]<class C>() {
      move.template operator()<C>(0, 1);
      move.template operator()<C>(2, op.unbiased);
    };
    in[1].dtype() == DType::f64 ? both.template operator()<double>() : both.template operator()<float>();
  });
}

}  // namespace

void add_batch_norm() {
  add_kernel<batch_norm_op>(DeviceType::cpu);
  add_kernel<batch_norm_grad_op>(DeviceType::cpu);
  add_kernel<running_statistics>(DeviceType::cpu);
}

}  // namespace sherd::cpu
