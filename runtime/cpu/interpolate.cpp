// Scaling of images, a plane at a time.
#include "runtime/ops/interpolate.h"

#include <algorithm>
#include <vector>

#include "runtime/cpu/element_bits.h"
#include "runtime/cpu/rows.h"
#include "runtime/cpu/scratch.h"
#include "runtime/kernel.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

using ops::PixelPair;
using ops::ResampledAxis;

constexpr std::int64_t task_pixels = 1 << 14;  // of one task

template <class C>
std::vector<PixelPair<C>> pairs_of(const ResampledAxis& axis) {
  std::vector<PixelPair<C>> pairs;
  pairs.reserve(static_cast<std::size_t>(axis.to));
  for (std::int64_t i = 0; i < axis.to; ++i) pairs.push_back(axis.pair(i, axis.step<C>()));
  return pairs;
}

/// Calls `body(plane)` for each of them.
template <class F>
void for_planes(std::int64_t planes, std::int64_t pixels, const F& body) {
  parallel_for(planes, std::max<std::int64_t>(1, task_pixels / pixels),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t p = begin; p < end; ++p) body(p);
               });
}

template <class T>
void nearest(const ops::Interpolate& op, std::int64_t planes, const T* x, T* y) {
  const auto rows = pairs_of<float>(op.down), columns = pairs_of<float>(op.across);
  for_planes(planes, op.down.to * op.across.to, [&](std::int64_t p) {
    T* to = y + p * op.down.to * op.across.to;
    for (std::int64_t i = 0; i < op.down.to; ++i, to += op.across.to) {
      if (i > 0 && rows[i].first == rows[i - 1].first) {
        std::copy_n(to - op.across.to, op.across.to, to);
        continue;
      }
      const T* from = x + (p * op.down.from + rows[i].first) * op.across.from;
      for (std::int64_t j = 0; j < op.across.to; ++j) to[j] = from[columns[j].first];
    }
  });
}

template <class C>
Scratch<C> room_for(std::int64_t count) {
  Scratch<C> room = scratch<C>(count);
  check<OutOfMemoryError>(room != nullptr, "interpolate: no memory for {} pixels", count);
  return room;
}

/// a (1 - share) + b share, of whole rows.
template <class T, class C>
void row_between(const T* a, const T* b, C share, std::int64_t n, C* row) {
  for (std::int64_t c = 0; c < n; ++c) row[c] = C(a[c]) * (C(1) - share) + C(b[c]) * share;
}

template <class T, class C = compute_t<T>>
void between(const ops::Interpolate& op, std::int64_t planes, const T* x, T* y) {
  const auto rows = pairs_of<C>(op.down), columns = pairs_of<C>(op.across);
  const std::int64_t width = op.across.from;
  for_planes(planes, op.down.to * op.across.to, [&](std::int64_t p) {
    const Scratch<C> row = room_for<C>(width);
    T* to = y + p * op.down.to * op.across.to;
    for (std::int64_t i = 0; i < op.down.to; ++i, to += op.across.to) {
      const T* from = x + p * op.down.from * width;
      if (op.down.stays())
        std::transform(from + i * width, from + (i + 1) * width, row.get(), [](T v) { return C(v); });
      else
        row_between(from + rows[i].first * width, from + rows[i].second * width, rows[i].share, width,
                    row.get());
      for (std::int64_t j = 0; j < op.across.to; ++j) {
        const PixelPair<C>& c = columns[j];
        to[j] = op.across.stays() ? T(row[j]) : T(row[c.first] * (C(1) - c.share) + row[c.second] * c.share);
      }
    }
  });
}

template <class T, class C = compute_t<T>>
void gradient(const ops::InterpolateGrad& op, std::int64_t planes, const T* gy, T* gx) {
  // Nearest pixels are found in f32.
  const auto pairs = [&](const ResampledAxis& axis) {
    std::vector<PixelPair<C>> all;
    if (axis.lines) return pairs_of<C>(axis);
    for (const auto& pair : pairs_of<float>(axis)) all.push_back({pair.first, pair.second, C(pair.share)});
    return all;
  };
  const auto rows = pairs(op.down), columns = pairs(op.across);
  const std::int64_t width = op.across.from, pixels = op.down.from * width;
  for_planes(planes, op.down.to * op.across.to, [&](std::int64_t p) {
    const Scratch<C> room = room_for<C>(pixels + width);
    C *sums = room.get(), *row = sums + pixels;
    std::fill_n(sums, pixels, C(0));
    const T* from = gy + p * op.down.to * op.across.to;
    for (std::int64_t i = 0; i < op.down.to; ++i, from += op.across.to) {
      std::fill_n(row, width, C(0));
      for (std::int64_t j = 0; j < op.across.to; ++j) {
        const PixelPair<C>& c = columns[j];
        row[c.first] += C(from[j]) * (C(1) - c.share);
        if (op.across.lines && !op.across.stays()) row[c.second] += C(from[j]) * c.share;
      }
      const PixelPair<C>& r = rows[i];
      C *first = sums + r.first * width, *second = sums + r.second * width;
      for (std::int64_t c = 0; c < width; ++c) first[c] += row[c] * (C(1) - r.share);
      if (!op.down.lines || op.down.stays()) continue;
      for (std::int64_t c = 0; c < width; ++c) second[c] += row[c] * r.share;
    }
    std::transform(sums, sums + pixels, gx + p * pixels, [](C sum) { return T(sum); });
  });
}

std::int64_t planes_of(const Tensor& x) { return x.shape()[0] * x.shape()[1]; }

void interpolate(const ops::Interpolate& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  if (!op.down.lines)
    return with_bits(in[0].dtype(), [&]<class T>(T) {
      nearest(op, planes_of(in[0]), reinterpret_cast<const T*>(in[0].raw()),
              reinterpret_cast<T*>(out[0].raw()));
    });
  with_floating(op.name, in[0].dtype(), [&]<class T>() {
    between(op, planes_of(in[0]), in[0].data<T>(), reinterpret_cast<T*>(out[0].raw()));
  });
}

void interpolate_grad(const ops::InterpolateGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  with_floating(op.name, in[0].dtype(), [&]<class T>() {
    gradient(op, planes_of(in[0]), in[0].data<T>(), reinterpret_cast<T*>(out[0].raw()));
  });
}

}  // namespace

void add_interpolate() {
  add_kernel<interpolate>(DeviceType::cpu);
  add_kernel<interpolate_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
