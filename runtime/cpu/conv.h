// A convolution's sizes, and what a library of convolutions has to offer conv2d.cpp.
#pragma once

#include <algorithm>

#include "runtime/dtype.h"
#include "runtime/ops/conv2d.h"
#include "runtime/shape.h"

namespace sherd::cpu {

/// Channels, outputs and taps are those of one group.
struct Conv {
  ops::ConvRule rule;
  std::int64_t images, channels, rows, columns, outputs, height, width, down, across;
  struct {
    std::int64_t image, channel, row, pixel;
  } steps;  ///< from one of the images' to the next

  Conv(const ops::ConvRule& rule, const Shape& x, const Shape& w, const Shape& y)
      : rule(rule),
        images(x[0]),
        channels(w[1]),
        rows(x[2]),
        columns(x[3]),
        outputs(w[0] / rule.groups),
        height(w[2]),
        width(w[3]),
        down(y[2]),
        across(y[3]),
        steps{x[1] * x[2] * x[3], x[2] * x[3], x[3], 1} {}
  std::int64_t taps() const { return channels * height * width; }
  std::int64_t input() const { return channels * rows * columns; }  // elements of a group of an image
  std::int64_t output() const { return outputs * down * across; }
};

/// Dense tensors of one floating dtype: images, kernels, a bias or null, and outputs.
struct ConvData {
  std::byte *x, *weight, *bias, *y;
};

/// Each computes what its name says and returns true, or returns false and has done nothing, where oneDNN has
/// no code of its own for such a convolution. Sums are f32 and rounded once, the same for any number of
/// threads. Throws InternalError when oneDNN fails.
bool conv_forward_onednn(const Conv& c, DType dtype, const ConvData& data);
bool conv_grad_input_onednn(const Conv& c, DType dtype, const ConvData& data);   ///< x from weight and y
bool conv_grad_weight_onednn(const Conv& c, DType dtype, const ConvData& data);  ///< weight from x and y

}  // namespace sherd::cpu
