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

/// The pixels along one axis of `size` that window `i` sees, which begins at `first`, padding counted.
struct PixelsOfWindow {
  std::int64_t first, begin, end;
  PixelsOfWindow(const ops::PoolRule::Axis& axis, std::int64_t i, std::int64_t size)
      : first(i * axis.stride - axis.padding),
        begin(std::max<std::int64_t>(first, 0)),
        end(std::min(first + axis.kernel, size)) {}
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

/// Calls `see(block, number, pixels)` for the pixels that `count` windows side by side see, in order:
/// `pixels` are those of the windows from lanes * block on, `number` is theirs in a window of the rows that
/// are seen. The windows see `rows`, the first of them from pixel `first` on.
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
        see(block, r * kernel + c, spaced<stride>(line + c + block * lanes<C> * stride));
  }
}

template <int stride, class T, class N>
void largest_together(const Planes& p, const T* image, PixelsOfWindow rows, std::int64_t first,
                      std::int64_t count, T* y, N* numbers) {
  using C = compute_t<T>;
  using Number = std::conditional_t<sizeof(C) == 8, std::int64_t, std::int32_t>;
  constexpr std::int64_t L = lanes<C>;
  Vec<C> best[most_together / L];
  Vec<Number> seen[most_together / L];
  for_pixels<stride>(p, image, rows, first, count, [&](std::int64_t b, std::int64_t number, Vec<C> v) {
    if (number == 0) return void((best[b] = v, seen[b] = Vec<Number>{}));
    const Vec<Number> replaces = ~(v <= best[b]) & (best[b] == best[b]);  // the first NaN stays for good
    best[b] = replaces ? v : best[b];
    seen[b] = replaces ? splat(static_cast<Number>(number)) : seen[b];
  });
  const std::int64_t above = (rows.begin - rows.first) * p.rule.across.kernel;
  for (std::int64_t i = 0; i < count; ++i) {
    y[i] = T(best[i / L][i % L]);
    numbers[i] = static_cast<N>(above + seen[i / L][i % L]);
  }
}

template <class T, class N>
void largest_of(const Planes& p, const T* image, PixelsOfWindow rows, PixelsOfWindow columns, T& y,
                N& number) {
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
  number =
      static_cast<N>((place / p.width - rows.first) * p.rule.across.kernel + place % p.width - columns.first);
}

/// Calls `alone(j)` for single windows of a row, and `side_by_side(stride, j, first, count)` for runs of
/// those that see no padding across, the first of them from pixel `first` on.
template <class A, class B>
void for_windows(const Planes& p, const A& alone, const B& side_by_side) {
  const ops::PoolRule::Axis& axis = p.rule.across;
  PixelsOfWindow inside = whole(axis, p.across, p.width);
  const bool as_vectors = axis.stride <= 2 && axis.kernel <= most_pixels - 2 * most_together &&
                          p.height * p.width <= INT32_MAX;  // numbers are 32 bits
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

template <class T, class N>
void largest_of(const Planes& p, const T* x, T* y, N* all_numbers) {
  p.for_each([&](std::int64_t plane) {
    const T* image = x + plane * p.height * p.width;
    for (std::int64_t i = 0; i < p.down; ++i) {
      const PixelsOfWindow rows(p.rule.down, i, p.height);
      T* const to = y + (plane * p.down + i) * p.across;
      N* const numbers = all_numbers + (plane * p.down + i) * p.across;
      for_windows(
          p,
          [&](std::int64_t j) {
            largest_of(p, image, rows, PixelsOfWindow(p.rule.across, j, p.width), to[j], numbers[j]);
          },
          [&](auto stride, std::int64_t j, std::int64_t first, std::int64_t count) {
            largest_together<stride>(p, image, rows, first, count, to + j, numbers + j);
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

/// Each pixel's sum of the gradients of windows that it is the largest of, in their order.
template <class T, class N>
void give_to_largest(const Planes& p, const T* gy, const N* numbers, T* gx) {
  using C = compute_t<T>;
  using Count = std::conditional_t<sizeof(N) == 1, std::int32_t, std::int64_t>;
  const auto& [down, across] = p.rule;
  const auto width = static_cast<Count>(across.kernel);
  p.for_each([&](std::int64_t plane) {
    const std::int64_t windows = plane * p.down * p.across;
    T* to = gx + plane * p.height * p.width;
    std::vector<C> sums(static_cast<std::size_t>(p.height * p.width));
    for (std::int64_t i = 0, at = windows; i < p.down; ++i)
      for (std::int64_t j = 0; j < p.across; ++j, ++at) {
        const Count number = static_cast<Count>(numbers[at]);
        const std::int64_t row = i * down.stride - down.padding + number / width,
                           column = j * across.stride - across.padding + number % width;
        if (row >= 0 && row < p.height && column >= 0 && column < p.width)
          sums[static_cast<std::size_t>(row * p.width + column)] += C(gy[at]);
      }
    for (const C sum : sums) *to++ = T(sum);
  });
}

/// Calls `body.operator()<N>()` for the type of a rule's numbers.
template <class F>
void with_numbers(const ops::PoolRule& rule, F&& body) {
  rule.numbers() == DType::u8 ? body.template operator()<std::uint8_t>()
                              : body.template operator()<std::int64_t>();
}

void max_pool2d(const ops::MaxPool2d& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  with_floating(op.name, x.dtype(), [&]<class T>() {
    with_numbers(op.rule, [&]<class N>() {
      largest_of(Planes(op.rule, x.shape(), out[0].shape()), x.data<T>(), reinterpret_cast<T*>(out[0].raw()),
                 reinterpret_cast<N*>(out[1].raw()));
    });
  });
}

void max_pool2d_grad(const ops::MaxPool2dGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor gy = contiguous(in[0]), numbers = contiguous(in[1]);
  with_floating(op.name, gy.dtype(), [&]<class T>() {
    with_numbers(op.rule, [&]<class N>() {
      give_to_largest(Planes(op.rule, out[0].shape(), gy.shape()), gy.data<T>(),
                      reinterpret_cast<const N*>(numbers.raw()), reinterpret_cast<T*>(out[0].raw()));
    });
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
  add_kernel<max_pool2d_grad>(DeviceType::cpu);
  add_kernel<avg_pool2d>(DeviceType::cpu);
  add_kernel<avg_pool2d_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
