// Images beside convolutions, pooling and interpolation (runtime/ops.h): their windows as columns, their
// channels as pixels, and what stands at any place in them. All of it is made of other ops.
#pragma once

#include <initializer_list>
#include <span>
#include <vector>

#include "runtime/ops.h"

namespace sherd {

/// (..., C r^2, H, W) to (..., C, H r, W r): channel c r^2 + i r + j is the pixel (i, j) of each block of
/// `factor` r (Shi et al., 2016). ShapeError for fewer than three axes and channels that do not divide.
SHERD_API Tensor pixel_shuffle(const Tensor& x, std::int64_t factor);
/// The way back: (..., C, H r, W r) to (..., C r^2, H, W).
SHERD_API Tensor pixel_unshuffle(const Tensor& x, std::int64_t factor);

/// Of windows as a convolution sees them.
struct WindowOptions {
  PerAxis stride = 1, padding = 0;  ///< zeros around the image
  PerAxis dilation = 1;             ///< pixels between those of a window
};
/// Images (N, C, H, W), or one (C, H, W), to (N, C kh kw, L): a column for each of the L windows of
/// `kernel` (kh, kw), row by row. ShapeError for a window that does not fit.
SHERD_API Tensor unfold(const Tensor& x, PerAxis kernel, const WindowOptions& options = {});
/// The transposed map: columns (N, C kh kw, L), or (C kh kw, L), to images of `size`, each pixel the sum of
/// its places in all windows, 16-bit floats in f32.
SHERD_API Tensor fold(const Tensor& x, PerAxis size, PerAxis kernel, const WindowOptions& options = {});

/// Whether -1 and 1 are the centres of the outermost pixels, or their outer edges.
enum class GridCorners { edges, centres };
/// Places (N, H, W, 2) in an image, x before y, of affine maps `theta` (N, 2, 3): theta (x, y, 1) for the
/// pixels of an image of `size`, whose coordinates go from -1 to 1.
SHERD_API Tensor affine_grid(const Tensor& theta, PerAxis size, GridCorners corners = GridCorners::edges);

/// What stands outside of an image: zeros, its nearest pixel, or its mirror image.
enum class GridPadding { zeros, border, reflection };
struct GridSampleOptions {
  Interpolation mode = Interpolation::bilinear;
  GridPadding outside = GridPadding::zeros;
  GridCorners corners = GridCorners::edges;
};
/// Images (N, C, H, W) at places `grid` (N, h, w, 2), x before y, of -1 to 1 across each image: (N, C, h, w)
/// (Jaderberg et al., 2015). Both have gradients, nearest pixels only the images.
SHERD_API Tensor grid_sample(const Tensor& x, const Tensor& grid, const GridSampleOptions& options = {});

/// Which of two axes the first tensor runs along: ij the first, xy the second.
enum class MeshIndexing { ij, xy };
/// For 0-d or 1-D tensors of lengths n, m, ...: each along an axis of its own, as views of shape (n, m, ...).
SHERD_API std::vector<Tensor> meshgrid(std::span<const Tensor> along, MeshIndexing order = MeshIndexing::ij);
inline std::vector<Tensor> meshgrid(std::initializer_list<Tensor> along,
                                    MeshIndexing order = MeshIndexing::ij) {
  return meshgrid(std::span(along.begin(), along.size()), order);
}

/// (x - mean) / sqrt(var + eps) of each channel of each sample alone, x (N, C, ...), times `weight` (C) plus
/// `bias` (C) where they are given (Ulyanov et al., 2016).
SHERD_API Tensor instance_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {},
                               double eps = 1e-5);

}  // namespace sherd
