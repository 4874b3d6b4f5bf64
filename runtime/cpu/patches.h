// The windows of images that a convolution multiplies.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"

namespace sherd::cpu {

/// Windows of `kernel` pixels, `stride` apart, over images with `padding` zeros around: [0] down, [1] across.
struct Windows {
  std::int64_t batch = 0, channels = 0;
  std::int64_t size[2] = {}, count[2] = {};  ///< pixels of an image, windows in it
  std::int64_t kernel[2] = {}, stride = 1, padding = 0;
};

/// images (batch, channels, size) to rows (batch, count, channels, kernel). T is double, float, Half or
/// BFloat16.
template <class T>
void gather_windows(const Windows& w, const T* images, T* rows);

/// Sums every pixel's places in `rows`, always in the same order.
template <class T>
void sum_windows(const Windows& w, const T* rows, T* images);

}  // namespace sherd::cpu
