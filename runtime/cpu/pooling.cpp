// Pooling, plane by plane.
#include <algorithm>
#include <vector>

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
    const std::int64_t grain = std::max<std::int64_t>(1, (1 << 14) / (height * width));
    parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t p = begin; p < end; ++p) body(p);
    });
  }
};

/// The pixels along one axis of `size` that window `i` sees.
struct Seen {
  std::int64_t begin, end;
  Seen(const ops::PoolRule::Axis& axis, std::int64_t i, std::int64_t size)
      : begin(std::max<std::int64_t>(i * axis.stride - axis.padding, 0)),
        end(std::min(i * axis.stride - axis.padding + axis.kernel, size)) {}
};

template <class T>
void largest(const Planes& p, const T* x, T* y, std::int64_t* at) {
  using C = compute_t<T>;
  p.for_each([&](std::int64_t plane) {
    const T* image = x + plane * p.height * p.width;
    std::int64_t to = plane * p.down * p.across;
    for (std::int64_t i = 0; i < p.down; ++i) {
      const Seen rows(p.rule.down, i, p.height);
      for (std::int64_t j = 0; j < p.across; ++j, ++to) {
        const Seen columns(p.rule.across, j, p.width);
        std::int64_t place = rows.begin * p.width + columns.begin;
        C best = C(image[place]);
        for (std::int64_t r = rows.begin; r < rows.end; ++r)
          for (std::int64_t c = columns.begin; c < columns.end; ++c) {
            const C v = C(image[r * p.width + c]);
            const bool replaces = !(v <= best) && best == best;  // the first NaN stays for good
            best = replaces ? v : best;
            place = replaces ? r * p.width + c : place;
          }
        y[to] = T(best);
        at[to] = place;
      }
    }
  });
}

template <class T>
void means(const Planes& p, const T* x, T* y) {
  using C = compute_t<T>;
  const C area = static_cast<C>(p.rule.down.kernel * p.rule.across.kernel);
  p.for_each([&](std::int64_t plane) {
    const T* image = x + plane * p.height * p.width;
    T* to = y + plane * p.down * p.across;
    for (std::int64_t i = 0; i < p.down; ++i) {
      const Seen rows(p.rule.down, i, p.height);
      for (std::int64_t j = 0; j < p.across; ++j) {
        const Seen columns(p.rule.across, j, p.width);
        C sum = 0;
        for (std::int64_t r = rows.begin; r < rows.end; ++r)
          for (std::int64_t c = columns.begin; c < columns.end; ++c) sum += C(image[r * p.width + c]);
        *to++ = T(sum / area);
      }
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
      const Seen rows(p.rule.down, i, p.height);
      for (std::int64_t j = 0; j < p.across; ++j) {
        const Seen columns(p.rule.across, j, p.width);
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
  dispatch_floating(op.name, in[0].dtype(), [&]<class T>(TypeTag<T>) {
    largest(Planes(op.rule, in[0].shape(), out[0].shape()), in[0].data<T>(),
            reinterpret_cast<T*>(out[0].raw()), reinterpret_cast<std::int64_t*>(out[1].raw()));
  });
}

void avg_pool2d(const ops::AvgPool2d& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  dispatch_floating(op.name, in[0].dtype(), [&]<class T>(TypeTag<T>) {
    means(Planes(op.rule, in[0].shape(), out[0].shape()), in[0].data<T>(),
          reinterpret_cast<T*>(out[0].raw()));
  });
}

void avg_pool2d_grad(const ops::AvgPool2dGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  dispatch_floating(op.name, in[0].dtype(), [&]<class T>(TypeTag<T>) {
    spread(Planes(op.rule, out[0].shape(), in[0].shape()), in[0].data<T>(),
           reinterpret_cast<T*>(out[0].raw()));
  });
}

}  // namespace

void add_pooling() {
  add_kernel<max_pool2d>(DeviceType::cpu);
  add_kernel<avg_pool2d>(DeviceType::cpu);
  add_kernel<avg_pool2d_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
