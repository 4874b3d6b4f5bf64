// Pooling, plane by plane.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "runtime/cpu/simd.h"
#include "runtime/ops.h"
#include "runtime/ops/pool2d.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// Planes of images and of what their windows give.
struct Planes {
  ops::PoolRule rule;
  std::int64_t count, height, width, down, across;

  Planes(const ops::PoolRule& rule, const Shape& images, const Shape& windows)
      : rule(rule),
        count(images[0] * images[1]),
        height(images[2]),
        width(images[3]),
        down(windows[2]),
        across(windows[3]) {}

  /// Calls `body(plane)` for each.
  template <class F>
  void for_each(const F& body) const {
    const std::int64_t grain = std::max<std::int64_t>(1, (1 << 12) / (height * width));
    parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t p = begin; p < end; ++p) body(p);
    });
  }
};

/// The pixels along one axis of `size` that window `i` sees.
struct PixelsOfWindow {
  std::int64_t begin, end;
  PixelsOfWindow(const ops::PoolRule::Axis& axis, std::int64_t i, std::int64_t size)
      : begin(std::max<std::int64_t>(i * axis.stride - axis.padding, 0)),
        end(std::min(i * axis.stride - axis.padding + axis.kernel, size)) {}
};

/// The windows along an axis of `size` that see no padding: [begin, end).
PixelsOfWindow whole(const ops::PoolRule::Axis& axis, std::int64_t windows, std::int64_t size) {
  PixelsOfWindow seen(axis, 0, size);
  seen.begin = std::min(windows, (axis.padding + axis.stride - 1) / axis.stride);
  const std::int64_t last = size + axis.padding - axis.kernel;  // where such a window may begin
  seen.end = last < 0 ? seen.begin : std::clamp(last / axis.stride + 1, seen.begin, windows);
  return seen;
}

/// Windows side by side as vectors: up to so many at a time, of so many pixels of a row.
constexpr std::int64_t most_together = 64, most_pixels = 192;

/// Every `stride`-th of the numbers from `p` on.
template <int stride, class C>
Vec<C> spaced(const C* p) {
  const Vec<C> a = load(p);
  if constexpr (stride == 1) return a;
  const Vec<C> b = load(p + lanes<C>);
  if constexpr (lanes<C> == 16)
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  else
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
}

/// Calls `see(block, place, pixels)` for the pixels that `count` windows side by side see, in order: `pixels`
/// are those of the windows from lanes * block on, `place` is theirs, counted from the corner of a window.
/// The windows see `rows`, the first of them from pixel `first` on.
template <int stride, class T, class F>
void for_pixels(const Planes& p, const T* image, PixelsOfWindow rows, std::int64_t first, std::int64_t count,
                const F& see) {
  using C = compute_t<T>;
  C line[most_pixels + 2 * lanes<C>];
  const std::int64_t kernel = p.rule.across.kernel, width = (count - 1) * stride + kernel;
  std::fill(line + width, std::end(line), C(0));
  for (std::int64_t r = 0; r < rows.end - rows.begin; ++r) {
    const T* from = image + (rows.begin + r) * p.width + first;
    std::transform(from, from + width, line, [](T x) { return C(x); });
    for (std::int64_t c = 0; c < kernel; ++c)
      for (std::int64_t block = 0; block * lanes<C> < count; ++block)
        see(block, r * p.width + c, spaced<stride>(line + c + block * lanes<C> * stride));
  }
}

template <int stride, class T>
void largest_together(const Planes& p, const T* image, PixelsOfWindow rows, std::int64_t first,
                      std::int64_t count, T* y, std::int64_t* at) {
  using C = compute_t<T>;
  using Place = std::conditional_t<sizeof(C) == 8, std::int64_t, std::int32_t>;
  constexpr std::int64_t L = lanes<C>;
  Vec<C> best[most_together / L];
  Vec<Place> places[most_together / L];
  for_pixels<stride>(p, image, rows, first, count, [&](std::int64_t b, std::int64_t place, Vec<C> v) {
    if (place == 0) return void((best[b] = v, places[b] = Vec<Place>{}));
    const Vec<Place> replaces = ~(v <= best[b]) & (best[b] == best[b]);  // the first NaN stays for good
    best[b] = replaces ? v : best[b];
    places[b] = replaces ? splat(static_cast<Place>(place)) : places[b];
  });
  const std::int64_t corner = rows.begin * p.width + first;
  for (std::int64_t i = 0; i < count; ++i) {
    y[i] = T(best[i / L][i % L]);
    at[i] = corner + i * stride + places[i / L][i % L];
  }
}

template <class T>
void largest_of(const Planes& p, const T* image, PixelsOfWindow rows, PixelsOfWindow columns, T& y,
                std::int64_t& at) {
  using C = compute_t<T>;
  std::int64_t place = rows.begin * p.width + columns.begin;
  C best = C(image[place]);
  for (std::int64_t r = rows.begin; r < rows.end; ++r)
    for (std::int64_t c = columns.begin; c < columns.end; ++c) {
      const C v = C(image[r * p.width + c]);
      const bool replaces = !(v <= best) && best == best;
      best = replaces ? v : best;
      place = replaces ? r * p.width + c : place;
    }
  y = T(best);
  at = place;
}

/// Calls `alone(j)` for single windows of a row, and `side_by_side(stride, j, first, count)` for runs of
/// those that see no padding across, the first of them from pixel `first` on.
template <class A, class B>
void for_windows(const Planes& p, const A& alone, const B& side_by_side) {
  const ops::PoolRule::Axis& axis = p.rule.across;
  PixelsOfWindow inside = whole(axis, p.across, p.width);
  const bool as_vectors = axis.stride <= 2 && axis.kernel <= most_pixels - 2 * most_together &&
                          p.height * p.width <= INT32_MAX;  // places are 32 bits
  if (!as_vectors) inside.end = inside.begin;
  for (std::int64_t j = 0; j < inside.begin; ++j) alone(j);
  for (std::int64_t j = inside.begin; j < inside.end; j += most_together) {
    const std::int64_t first = j * axis.stride - axis.padding,
                       count = std::min(most_together, inside.end - j);
    if (axis.stride == 1)
      side_by_side(std::integral_constant<int, 1>(), j, first, count);
    else
      side_by_side(std::integral_constant<int, 2>(), j, first, count);
  }
  for (std::int64_t j = inside.end; j < p.across; ++j) alone(j);
}

template <class T>
void largest_of(const Planes& p, const T* x, T* y, std::int64_t* at) {
  p.for_each([&](std::int64_t plane) {
    const T* image = x + plane * p.height * p.width;
    for (std::int64_t i = 0; i < p.down; ++i) {
      const PixelsOfWindow rows(p.rule.down, i, p.height);
      T* const to = y + (plane * p.down + i) * p.across;
      std::int64_t* const places = at + (plane * p.down + i) * p.across;
      for_windows(
          p,
          [&](std::int64_t j) {
            largest_of(p, image, rows, PixelsOfWindow(p.rule.across, j, p.width), to[j], places[j]);
          },
          [&](auto stride, std::int64_t j, std::int64_t first, std::int64_t count) {
            largest_together<stride>(p, image, rows, first, count, to + j, places + j);
          });
    }
  });
}

template <class T>
T mean_of(const Planes& p, const T* image, PixelsOfWindow rows, PixelsOfWindow columns) {
  using C = compute_t<T>;
  C sum = 0;
  for (std::int64_t r = rows.begin; r < rows.end; ++r)
    for (std::int64_t c = columns.begin; c < columns.end; ++c) sum += C(image[r * p.width + c]);
  return T(sum / static_cast<C>(p.rule.down.kernel * p.rule.across.kernel));
}

template <int stride, class T>
void means_together(const Planes& p, const T* image, PixelsOfWindow rows, std::int64_t first,
                    std::int64_t count, T* y) {
  using C = compute_t<T>;
  constexpr std::int64_t L = lanes<C>;
  const C area = static_cast<C>(p.rule.down.kernel * p.rule.across.kernel);
  Vec<C> sums[most_together / L] = {};
  for_pixels<stride>(p, image, rows, first, count,
                     [&](std::int64_t b, std::int64_t, Vec<C> v) { sums[b] += v; });
  for (std::int64_t i = 0; i < count; ++i) y[i] = T(sums[i / L][i % L] / area);
}

template <class T>
void means(const Planes& p, const T* x, T* y) {
  p.for_each([&](std::int64_t plane) {
    const T* image = x + plane * p.height * p.width;
    for (std::int64_t i = 0; i < p.down; ++i) {
      const PixelsOfWindow rows(p.rule.down, i, p.height);
      T* const to = y + (plane * p.down + i) * p.across;
      for_windows(
          p,
          [&](std::int64_t j) { to[j] = mean_of(p, image, rows, PixelsOfWindow(p.rule.across, j, p.width)); },
          [&](auto stride, std::int64_t j, std::int64_t first, std::int64_t count) {
            means_together<stride>(p, image, rows, first, count, to + j);
          });
    }
  });
}

template <class T>
void spread(const Planes& p, const T* gy, T* gx) {
  using C = compute_t<T>;
  const C area = static_cast<C>(p.rule.down.kernel * p.rule.across.kernel);
  p.for_each([&](std::int64_t plane) {
    const T* from = gy + plane * p.down * p.across;
    T* to = gx + plane * p.height * p.width;
    std::vector<C> sums(static_cast<std::size_t>(p.height * p.width));
    for (std::int64_t i = 0; i < p.down; ++i) {
      const PixelsOfWindow rows(p.rule.down, i, p.height);
      for (std::int64_t j = 0; j < p.across; ++j) {
        const PixelsOfWindow columns(p.rule.across, j, p.width);
        const C share = C(*from++) / area;
        for (std::int64_t r = rows.begin; r < rows.end; ++r)
          for (std::int64_t c = columns.begin; c < columns.end; ++c)
            sums[static_cast<std::size_t>(r * p.width + c)] += share;
      }
    }
    for (const C sum : sums) *to++ = T(sum);
  });
}

void max_pool2d(const ops::MaxPool2d& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  with_floating(op.name, x.dtype(), [&]<class T>() {
    largest_of(Planes(op.rule, x.shape(), out[0].shape()), x.data<T>(), reinterpret_cast<T*>(out[0].raw()),
               reinterpret_cast<std::int64_t*>(out[1].raw()));
  });
}

void avg_pool2d(const ops::AvgPool2d& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  with_floating(op.name, x.dtype(), [&]<class T>() {
    means(Planes(op.rule, x.shape(), out[0].shape()), x.data<T>(), reinterpret_cast<T*>(out[0].raw()));
  });
}

void avg_pool2d_grad(const ops::AvgPool2dGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  with_floating(op.name, x.dtype(), [&]<class T>() {
    spread(Planes(op.rule, out[0].shape(), x.shape()), x.data<T>(), reinterpret_cast<T*>(out[0].raw()));
  });
}

}  // namespace

void add_pooling() {
  add_kernel<max_pool2d>(DeviceType::cpu);
  add_kernel<avg_pool2d>(DeviceType::cpu);
  add_kernel<avg_pool2d_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
