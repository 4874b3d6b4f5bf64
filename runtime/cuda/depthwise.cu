#include "runtime/cuda/depthwise.h"

#include <algorithm>

#include "runtime/cuda/block.cuh"

namespace sherd::cuda {
namespace {

constexpr int block = threads_per_block;
constexpr int rows_of_thread = 8;  // results below each other, which share what they read

/// Dividends are rarely beyond 32 bits, whose division is several times faster.
__device__ std::int64_t divided(std::int64_t a, std::int64_t by) {
  return (a | by) >> 32 == 0 ? static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(by) : a / by;
}
/// Takes the last of two axes off `at`.
__device__ std::int64_t taken(std::int64_t& at, std::int64_t size) {
  const std::int64_t quotient = divided(at, size), rest = at - quotient * size;
  at = quotient;
  return rest;
}

/// Planes `to` correlated with kernels: plane p is made of plane p / multiplier and of kernel p % kernels.
struct Correlation {
  const void *from, *w, *bias;
  void* to;
  std::int64_t planes, kernels, multiplier;
  std::int64_t from_size[2], to_size[2], kernel[2], stride[2], padding[2], dilation[2];
  bool turned;  // kernels by their last tap first
  constexpr std::int64_t taps() const { return kernel[0] * kernel[1]; }
};

template <class T, class Call>
__device__ float bias_of(const Call& c, std::int64_t channel) {
  return c.bias != nullptr ? widen(static_cast<const T*>(c.bias)[channel]) : 0.f;
}

/// What a column of windows of K x K sees whose rows move by one: rows of K pixels. A plane has less than
/// 2^31.
template <class T, int K>
class Strip {
 public:
  __device__ Strip(const T* plane, int height, int width, int top, int left, int dilation)
      : plane_(plane), height_(height), width_(width), top_(top) {
#pragma unroll
    for (int j = 0; j < K; ++j) {
      column_[j] = left + j * dilation;
      inside_[j] = column_[j] >= 0 && column_[j] < width;
    }
  }
  __device__ void load(int i, float (&seen)[K]) const {
    const int y = top_ + i;
    const bool inside = y >= 0 && y < height_;
    const T* row = plane_ + y * width_;
#pragma unroll
    for (int j = 0; j < K; ++j) seen[j] = inside && inside_[j] ? widen(row[column_[j]]) : 0.f;
  }

 private:
  const T* plane_;
  int height_, width_, top_, column_[K];
  bool inside_[K];
};
constexpr std::int64_t most_of_strip = std::int64_t{1} << 30;  // of a plane, with what is around it

/// Kernels of K x K whose rows move by one: a thread makes some results of a column.
template <class T, int K>
__global__ void __launch_bounds__(block) columns(const Correlation c, std::int64_t n) {
  constexpr int V = rows_of_thread;
  std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * block + threadIdx.x;
  if (at >= n) return;
  const int column = static_cast<int>(taken(at, c.to_size[1]));
  const int row = static_cast<int>(taken(at, (c.to_size[0] + V - 1) / V)) * V;
  const std::int64_t plane = at, kernel = plane - divided(plane, c.kernels) * c.kernels;
  float w[K * K];
  const T* weights = static_cast<const T*>(c.w) + kernel * (K * K);
#pragma unroll
  for (int i = 0; i < K * K; ++i) w[i] = widen(weights[c.turned ? K * K - 1 - i : i]);

  const int height = static_cast<int>(c.from_size[0]), width = static_cast<int>(c.from_size[1]);
  const Strip<T, K> strip(
      static_cast<const T*>(c.from) + divided(plane, c.multiplier) * c.from_size[0] * c.from_size[1], height,
      width, row - static_cast<int>(c.padding[0]),
      column * static_cast<int>(c.stride[1]) - static_cast<int>(c.padding[1]),
      static_cast<int>(c.dilation[1]));
  float total[V] = {};
#pragma unroll
  for (int i = 0; i < V + K - 1; ++i) {
    float seen[K];
    strip.load(i, seen);
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (i - v >= 0 && i - v < K)
#pragma unroll
        for (int j = 0; j < K; ++j) total[v] = std::fma(seen[j], w[(i - v) * K + j], total[v]);
  }
  const int left = static_cast<int>(c.to_size[0]) - row, step = static_cast<int>(c.to_size[1]);
  T* to = static_cast<T*>(c.to) + (plane * c.to_size[0] + row) * c.to_size[1] + column;
  const float bias = bias_of<T>(c, kernel);
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (v < left) to[v * step] = narrow<T>(total[v] + bias);
}

/// Any kernels: a thread makes a result.
template <class T>
__global__ void __launch_bounds__(block) pixels(const Correlation c, std::int64_t n) {
  const std::int64_t out = static_cast<std::int64_t>(blockIdx.x) * block + threadIdx.x;
  if (out >= n) return;
  std::int64_t at = out;
  const std::int64_t column = taken(at, c.to_size[1]), row = taken(at, c.to_size[0]), plane = at;
  const std::int64_t kernel = plane - divided(plane, c.kernels) * c.kernels, taps = c.taps();
  const T* w = static_cast<const T*>(c.w) + kernel * taps;
  const T* from =
      static_cast<const T*>(c.from) + divided(plane, c.multiplier) * c.from_size[0] * c.from_size[1];
  float total = 0;
  std::int64_t tap = 0, y = row * c.stride[0] - c.padding[0];
  for (std::int64_t i = 0; i < c.kernel[0]; ++i, y += c.dilation[0]) {
    if (y < 0 || y >= c.from_size[0]) {
      tap += c.kernel[1];
      continue;
    }
    std::int64_t x = column * c.stride[1] - c.padding[1];
    for (std::int64_t j = 0; j < c.kernel[1]; ++j, ++tap, x += c.dilation[1])
      if (x >= 0 && x < c.from_size[1])
        total =
            std::fma(widen(from[y * c.from_size[1] + x]), widen(w[c.turned ? taps - 1 - tap : tap]), total);
  }
  static_cast<T*>(c.to)[out] = narrow<T>(total + bias_of<T>(c, kernel));
}

/// A result that sees pixel `at`, padding counted, through a tap at `offset`; -1 for none.
__device__ std::int64_t seen_by(std::int64_t at, std::int64_t offset, std::int64_t stride,
                                std::int64_t count) {
  const std::int64_t from = at - offset;
  if (from < 0) return -1;
  const std::int64_t place = divided(from, stride);
  return place * stride == from && place < count ? place : -1;
}

/// The gradient of a pixel.
template <class T>
__global__ void __launch_bounds__(block) grad_pixels(const DepthwiseCall c, std::int64_t n) {
  const std::int64_t out = static_cast<std::int64_t>(blockIdx.x) * block + threadIdx.x;
  if (out >= n) return;
  std::int64_t at = out;
  const std::int64_t x = taken(at, c.size[1]) + c.padding[1], y = taken(at, c.size[0]) + c.padding[0];
  const std::int64_t plane = at, channel = plane - divided(plane, c.channels) * c.channels;
  float total = 0;
  for (std::int64_t m = 0; m < c.multiplier; ++m) {
    const T* w = static_cast<const T*>(c.w) + (channel * c.multiplier + m) * c.kernel[0] * c.kernel[1];
    const T* from = static_cast<const T*>(c.y) + (plane * c.multiplier + m) * c.count[0] * c.count[1];
    for (std::int64_t i = 0; i < c.kernel[0]; ++i) {
      const std::int64_t down = seen_by(y, i * c.dilation[0], c.stride[0], c.count[0]);
      if (down < 0) continue;
      for (std::int64_t j = 0; j < c.kernel[1]; ++j) {
        const std::int64_t across = seen_by(x, j * c.dilation[1], c.stride[1], c.count[1]);
        if (across >= 0)
          total = std::fma(widen(from[down * c.count[1] + across]), widen(w[i * c.kernel[1] + j]), total);
      }
    }
  }
  static_cast<T*>(c.out)[out] = narrow<T>(total + bias_of<T>(c, channel));
}

constexpr std::int64_t piece = std::int64_t{1} << 13;  // results of an output, in the gradient of its kernel
constexpr std::int64_t most_pieces = 512, most_sums = std::int64_t{1} << 24;

/// A piece's part of the gradient of a kernel of K x K; of one of its taps where K is 0.
template <class T, int K>
__global__ void __launch_bounds__(block) grad_taps(const DepthwiseCall c, std::int64_t pieces) {
  constexpr int across = K == 0 ? 1 : K, taps_here = across * across;
  __shared__ float shared[block / warp_size];
  std::int64_t at = blockIdx.x;
  const std::int64_t taps = c.kernel[0] * c.kernel[1];
  const std::int64_t tap = taken(at, taps / taps_here), part = taken(at, pieces), output = at;
  const std::int64_t tap_row = divided(tap, c.kernel[1]), tap_column = tap - tap_row * c.kernel[1];

  const std::int64_t plane = c.count[0] * c.count[1], all = c.batch * plane;
  const std::int64_t length = (all + pieces - 1) / pieces, first = part * length;
  const std::int64_t last = first + length < all ? first + length : all;
  const std::int64_t outputs = c.channels * c.multiplier, channel = divided(output, c.multiplier);
  float total[taps_here] = {};
  for (std::int64_t i = first + threadIdx.x; i < last; i += block) {
    std::int64_t place = i;
    const std::int64_t column = taken(place, c.count[1]), row = taken(place, c.count[0]), image = place;
    const float g =
        widen(static_cast<const T*>(c.y)[(image * outputs + output) * plane + row * c.count[1] + column]);
    const T* x = static_cast<const T*>(c.x) + (image * c.channels + channel) * c.size[0] * c.size[1];
    const std::int64_t top = row * c.stride[0] - c.padding[0] + tap_row * c.dilation[0],
                       left = column * c.stride[1] - c.padding[1] + tap_column * c.dilation[1];
#pragma unroll
    for (int p = 0; p < across; ++p) {
      const std::int64_t down = top + p * c.dilation[0];
      if (down < 0 || down >= c.size[0]) continue;
#pragma unroll
      for (int q = 0; q < across; ++q) {
        const std::int64_t right = left + q * c.dilation[1];
        if (right >= 0 && right < c.size[1])
          total[p * across + q] = std::fma(g, widen(x[down * c.size[1] + right]), total[p * across + q]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < taps_here; ++i) {
    const float sum = group_sum<block / warp_size>(total[i], shared);
    if (threadIdx.x == 0) c.partial[(part * outputs + output) * taps + tap + i] = sum;
  }
}

/// The same of all taps of K x K where rows of the kernel move by one: a thread takes some results of a
/// column at a time.
template <class T, int K>
__global__ void __launch_bounds__(block) grad_strips(const DepthwiseCall c, std::int64_t pieces) {
  constexpr int V = rows_of_thread;
  __shared__ float shared[block / warp_size];
  std::int64_t at = blockIdx.x;
  const std::int64_t part = taken(at, pieces), output = at, channel = divided(output, c.multiplier);
  const int height = static_cast<int>(c.size[0]), width = static_cast<int>(c.size[1]),
            rows = static_cast<int>(c.count[0]), columns = static_cast<int>(c.count[1]);
  const std::int64_t strips = (rows + V - 1) / V, all = c.batch * strips * columns;
  const std::int64_t length = (all + pieces - 1) / pieces, first = part * length;
  const std::int64_t last = first + length < all ? first + length : all;
  float total[K * K] = {};
  for (std::int64_t i = first + threadIdx.x; i < last; i += block) {
    std::int64_t place = i;
    const int column = static_cast<int>(taken(place, columns)),
              row = static_cast<int>(taken(place, strips)) * V;
    const std::int64_t image = place;
    const T* y = static_cast<const T*>(c.y) + (image * c.outputs() + output) * rows * columns;
    const Strip<T, K> strip(static_cast<const T*>(c.x) + (image * c.channels + channel) * height * width,
                            height, width, row - static_cast<int>(c.padding[0]),
                            column * static_cast<int>(c.stride[1]) - static_cast<int>(c.padding[1]),
                            static_cast<int>(c.dilation[1]));
    float g[V];
#pragma unroll
    for (int v = 0; v < V; ++v) g[v] = row + v < rows ? widen(y[(row + v) * columns + column]) : 0.f;
#pragma unroll
    for (int k = 0; k < V + K - 1; ++k) {
      float seen[K];
      strip.load(k, seen);
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (k - v >= 0 && k - v < K)
#pragma unroll
          for (int j = 0; j < K; ++j)
            total[(k - v) * K + j] = std::fma(g[v], seen[j], total[(k - v) * K + j]);
    }
  }
#pragma unroll
  for (int i = 0; i < K * K; ++i) {
    const float sum = group_sum<block / warp_size>(total[i], shared);
    if (threadIdx.x == 0) c.partial[(part * c.outputs() + output) * (K * K) + i] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(block)
    add_pieces(const DepthwiseCall c, std::int64_t pieces, std::int64_t n) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * block + threadIdx.x;
  if (i >= n) return;
  double total = 0;
  for (std::int64_t part = 0; part < pieces; ++part) total += c.partial[part * n + i];
  static_cast<T*>(c.out)[i] = narrow<T>(static_cast<float>(total));
}

constexpr DTypeSet short_floats{
    static_cast<std::uint16_t>(floating_dtypes.mask & ~(1 << static_cast<int>(DType::f64)))};
/// Calls `f.operator()<T>()`; f64 was refused before.
template <class F>
void for_short(DType dtype, F&& f) {
  with_element<short_floats>(dtype, f);
}
/// Calls `f.operator()<K>()` with the side of square kernels that are usual, else with 0.
template <class F>
void for_side(const std::int64_t (&kernel)[2], F&& f) {
  const std::int64_t side = kernel[0] == kernel[1] ? kernel[0] : 0;
  side == 3   ? f.template operator()<3>()
  : side == 5 ? f.template operator()<5>()
  : side == 7 ? f.template operator()<7>()
              : f.template operator()<0>();
}

/// Whether windows slide down planes of such sizes by one row, as a `Strip` has them.
bool in_strips(const std::int64_t (&size)[2], const std::int64_t (&kernel)[2],
               const std::int64_t (&stride)[2], const std::int64_t (&padding)[2],
               const std::int64_t (&dilation)[2]) {
  std::int64_t around[2];
  for (int i : {0, 1}) {
    if (size[i] >= most_of_strip || padding[i] >= most_of_strip || dilation[i] * kernel[i] >= most_of_strip)
      return false;
    around[i] = size[i] + 2 * padding[i] + dilation[i] * kernel[i];
  }
  return stride[0] == 1 && dilation[0] == 1 && stride[1] < most_of_strip &&
         around[0] < most_of_strip / around[1];
}

void launch_correlation(DType dtype, const Correlation& c, cudaStream_t stream) {
  const bool slides = in_strips(c.from_size, c.kernel, c.stride, c.padding, c.dilation);
  for_short(dtype, [&]<class T>() {
    for_side(c.kernel, [&]<int K>() {
      if (K != 0 && slides) {
        const std::int64_t n = c.planes * blocks_of(c.to_size[0], rows_of_thread) * c.to_size[1];
        if constexpr (K != 0) columns<T, K><<<grid_of(blocks_of(n, block)), block, 0, stream>>>(c, n);
      } else {
        const std::int64_t n = c.planes * c.to_size[0] * c.to_size[1];
        pixels<T><<<grid_of(blocks_of(n, block)), block, 0, stream>>>(c, n);
      }
    });
  });
}

}  // namespace

std::int64_t DepthwiseCall::pieces() const {
  const std::int64_t most = std::min(most_pieces, most_sums / (outputs() * taps()));
  return std::max<std::int64_t>(std::min(blocks_of(batch * count[0] * count[1], piece), most), 1);
}

void launch_depthwise(const DepthwiseCall& c) {
  launch_correlation(c.dtype,
                     {c.x,
                      c.w,
                      c.bias,
                      c.out,
                      c.batch * c.outputs(),
                      c.outputs(),
                      c.multiplier,
                      {c.size[0], c.size[1]},
                      {c.count[0], c.count[1]},
                      {c.kernel[0], c.kernel[1]},
                      {c.stride[0], c.stride[1]},
                      {c.padding[0], c.padding[1]},
                      {c.dilation[0], c.dilation[1]},
                      false},
                     c.stream);
}

void launch_depthwise_grad_input(const DepthwiseCall& c) {
  if (c.stride[0] == 1 && c.stride[1] == 1 && c.multiplier == 1) {  // a correlation with turned kernels
    launch_correlation(
        c.dtype,
        {c.y,
         c.w,
         c.bias,
         c.out,
         c.batch * c.channels,
         c.channels,
         1,
         {c.count[0], c.count[1]},
         {c.size[0], c.size[1]},
         {c.kernel[0], c.kernel[1]},
         {1, 1},
         {(c.kernel[0] - 1) * c.dilation[0] - c.padding[0], (c.kernel[1] - 1) * c.dilation[1] - c.padding[1]},
         {c.dilation[0], c.dilation[1]},
         true},
        c.stream);
    return;
  }
  const std::int64_t n = c.batch * c.channels * c.size[0] * c.size[1];
  for_short(c.dtype,
            [&]<class T>() { grad_pixels<T><<<grid_of(blocks_of(n, block)), block, 0, c.stream>>>(c, n); });
}

void launch_depthwise_grad_weight(const DepthwiseCall& c) {
  const std::int64_t pieces = c.pieces(), n = c.outputs() * c.taps();
  for_short(c.dtype, [&]<class T>() {
    for_side(c.kernel, [&]<int K>() {
      const unsigned blocks = grid_of(pieces * (K == 0 ? n : c.outputs()));
      if constexpr (K != 0)
        if (in_strips(c.size, c.kernel, c.stride, c.padding, c.dilation))
          return grad_strips<T, K><<<blocks, block, 0, c.stream>>>(c, pieces);
      grad_taps<T, K><<<blocks, block, 0, c.stream>>>(c, pieces);
    });
    add_pieces<T><<<grid_of(blocks_of(n, block)), block, 0, c.stream>>>(c, pieces, n);
  });
}

}  // namespace sherd::cuda
