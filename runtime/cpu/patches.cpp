#include "runtime/cpu/patches.h"

#include "runtime/instances.h"
#include "runtime/ops/patches.h"

#include <algorithm>

#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// Calls `body(window, place)` for the windows along one axis that see `pixel`, and where they see it.
template <class F>
void for_windows_at(const Windows& w, int axis, std::int64_t pixel, const F& body) {
  const std::int64_t at = pixel + w.padding;
  const std::int64_t first = std::max<std::int64_t>(0, (at - w.kernel[axis] + w.stride) / w.stride);
  for (std::int64_t i = first; i < w.count[axis] && i * w.stride <= at; ++i) body(i, at - i * w.stride);
}

}  // namespace

template <class T>
void gather_windows(const Windows& w, const T* images, T* rows) {
  const std::int64_t plane = w.size[0] * w.size[1], row = w.channels * w.kernel[0] * w.kernel[1];
  const std::int64_t line = w.count[1] * row,
                     grain = std::max<std::int64_t>(1, (1 << 14) / std::max<std::int64_t>(line, 1));
  const auto pixel = [&](const T* image, std::int64_t y, std::int64_t x) {
    return y >= 0 && y < w.size[0] && x >= 0 && x < w.size[1] ? image[y * w.size[1] + x] : T(0.0F);
  };
  parallel_for(w.batch * w.count[0], grain, [&](std::int64_t begin, std::int64_t end) {
    T* to = rows + begin * line;
    for (std::int64_t r = begin; r < end; ++r) {
      const T* image = images + r / w.count[0] * w.channels * plane;
      const std::int64_t top = r % w.count[0] * w.stride - w.padding;
      for (std::int64_t i = 0; i < w.count[1]; ++i)
        for (std::int64_t c = 0; c < w.channels; ++c)
          for (std::int64_t y = 0; y < w.kernel[0]; ++y)
            for (std::int64_t x = 0; x < w.kernel[1]; ++x)
              *to++ = pixel(image + c * plane, top + y, i * w.stride - w.padding + x);
    }
  });
}

template <class T>
void sum_windows(const Windows& w, const T* rows, T* images) {
  using C = compute_t<T>;
  const std::int64_t row = w.channels * w.kernel[0] * w.kernel[1], lines = w.batch * w.channels * w.size[0];
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 12) / std::max<std::int64_t>(w.size[1], 1));
  parallel_for(lines, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t line = begin; line < end; ++line) {
      const std::int64_t channel = line / w.size[0] % w.channels, image = line / w.size[0] / w.channels;
      for (std::int64_t x = 0; x < w.size[1]; ++x) {
        C sum = 0;
        for_windows_at(w, 0, line % w.size[0], [&](std::int64_t down, std::int64_t y_in) {
          for_windows_at(w, 1, x, [&](std::int64_t across, std::int64_t x_in) {
            const std::int64_t window = (image * w.count[0] + down) * w.count[1] + across;
            sum += C(rows[window * row + (channel * w.kernel[0] + y_in) * w.kernel[1] + x_in]);
          });
        });
        images[line * w.size[1] + x] = T(sum);
      }
    }
  });
}

[[gnu::used]] const auto patches_instances =
    instances_for<floating_dtypes>([]<class T>() { return std::tuple(&gather_windows<T>, &sum_windows<T>); });

namespace {

Windows describe(const ops::PatchRule& rule, const Shape& images, const Shape& windows) {
  return {
      images[0],   images[1],   {images[2], images[3]}, {windows[1], windows[2]}, {rule.height, rule.width},
      rule.stride, rule.padding};
}

void patches(const ops::Patches& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor& x = in[0];
  with_floating(op.name, x.dtype(), [&]<class T>() {
    gather_windows(describe(op.rule, x.shape(), out[0].shape()), x.data<T>(),
                   reinterpret_cast<T*>(out[0].raw()));
  });
}

void patches_grad(const ops::PatchesGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor& windows = in[0];
  with_floating(op.name, windows.dtype(), [&]<class T>() {
    sum_windows(describe(op.rule, out[0].shape(), windows.shape()), windows.data<T>(),
                reinterpret_cast<T*>(out[0].raw()));
  });
}

}  // namespace

void add_patches() {
  add_kernel<patches>(DeviceType::cpu);
  add_kernel<patches_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
