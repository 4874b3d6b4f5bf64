// How a convolution is cut into tiles, each a convolution of its own, and where a tile lies in the caller's
// tensors. It depends on the shape alone.
#pragma once

#include "runtime/cpu/conv.h"

namespace sherd::cpu::conv {

enum class Way : std::int64_t { forward, grad_input, grad_weight };

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
/// Pixels from the first that kernels of so many taps see to the last.
constexpr std::int64_t extent(const ops::ConvRule::Axis& axis, std::int64_t taps) {
  return (taps - 1) * axis.dilation + 1;
}

struct Range {
  std::int64_t begin, end;
  std::int64_t size() const { return end - begin; }
};
/// One of `parts` parts of [0, n), cut at multiples of `unit`.
Range part_of(std::int64_t n, std::int64_t unit, std::int64_t parts, std::int64_t index);

/// What one call computes. `rows` are the images', `down` the outputs', `top` and `bottom` its own padding.
struct Tile {
  Range images, groups, channels, outputs, rows, down;
  std::int64_t top, bottom;
};

/// How many parts there are of the batch, of the rows, and of the outputs, channels or groups.
struct Cuts {
  std::int64_t images, rows, width;
  std::int64_t units() const { return images * rows; }
};

Cuts cuts_of(const Conv& c, Way way);
/// The tile of a unit, which is some images and rows, and of a part of the width.
Tile tile_of(const Conv& c, Way way, const Cuts& cuts, std::int64_t unit, std::int64_t width);

/// The elements before a tile's in the caller's tensors.
std::int64_t images_at(const Conv& c, const Tile& t);
std::int64_t outputs_at(const Conv& c, const Tile& t);
std::int64_t kernels_at(const Conv& c, const Tile& t);
std::int64_t biases_at(const Conv& c, const Tile& t);

}  // namespace sherd::cpu::conv
