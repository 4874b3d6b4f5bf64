// Convolutions by cuDNN's kernels, where the library is installed and has one that fits.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <compare>
#include <cstdint>
#include <memory>

#include "runtime/device.h"
#include "runtime/element.h"

namespace sherd::cuda {

/// Images x, kernels w and what they give, y: one of them is made of the other two.
enum class ConvMakes : std::uint8_t { y, x, w };

/// What decides which kernel is right.
struct ConvForm {
  ConvMakes makes = ConvMakes::y;
  DType dtype = DType::f32;
  bool tf32 = false;           ///< f32 may be rounded to it
  bool bias = false;           ///< one for each channel is added to y, which is made
  bool channels_last = false;  ///< dense so, all three, instead of in row-major order
  /// (N, C, H, W), (out, C / groups, height, width) and (N, out, H, W).
  std::array<std::int64_t, 4> x{}, w{}, y{};
  std::array<std::int64_t, 2> stride{}, padding{}, dilation{};
  friend auto operator<=>(const ConvForm&, const ConvForm&) = default;
};

/// Where they lie, aligned to 16 bytes.
struct ConvData {
  void *x, *w, *y, *bias;
};

/// The plans of one rank on one GPU.
class CudnnConv {
 public:
  explicit CudnnConv(Device device);
  ~CudnnConv();
  CudnnConv(const CudnnConv&) = delete;
  CudnnConv& operator=(const CudnnConv&) = delete;

  /// Whether cuDNN is installed.
  bool is_there() const;
  /// Whether cuDNN has a kernel for it whose sums are in f32 and repeat to the bit.
  bool has(const ConvForm& form);
  /// Queues it; false, and nothing is done, where there is no kernel or the library refuses.
  bool run(const ConvForm& form, const ConvData& data, cudaStream_t stream);

 private:
  struct Plans;
  std::unique_ptr<Plans> plans_;
};

}  // namespace sherd::cuda
