#include "runtime/cuda/kernels.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "runtime/cpu/operands.h"
#include "runtime/cuda/backend.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/image_order.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/tensor.h"

namespace sherd::cuda {

static_assert(Operands::most_dims == max_rank && Operands::most_operands == detail::Operands::most);

bool launches_early() {
  static const bool all = [] {
    const int count = cuda_device_count();
    int lowest = count > 0 ? 9 : 0;
    for (int i = 0; i < count; ++i) {
      int major = 0;
      check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i), "cuda device");
      lowest = std::min(lowest, major);
    }
    // Who asks CUDA for launches one by one (debuggers, the sanitizer's search for races) gets them.
    const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
    return lowest >= 9 && (blocking == nullptr || std::string_view(blocking) != "1");
  }();
  return all;
}

Operands operands_of(Inputs in, Outputs out) {
  follow_operands(in, out[0]);
  return operands_as_they_lie(in, out);
}

void with_operands(Inputs in, Outputs out, void (*body)(const void* data, const Operands& operands),
                   const void* data) {
  follow_operands(in, out[0]);
  std::size_t first = 0;
  while (first < in.size() && !lies_across(in[first], out[0])) ++first;
  if (first == in.size()) return body(data, operands_as_they_lie(in, out));
  Tensors turned(in);
  for (std::size_t i = first; i < in.size(); ++i)
    if (lies_across(in[i], out[0]))
      turned[i] = out[0].is_contiguous() ? contiguous(in[i]) : channels_last(in[i]);
  body(data, operands_as_they_lie(Inputs(turned.begin(), turned.size()), out));
}

Operands operands_as_they_lie(Inputs in, Outputs out) {
  Operands p;
  const Tensor& y = out[0];
  p.dtype = in.empty() ? y.dtype() : in.back().dtype();
  p.out_dtype = y.dtype();
  p.numel = y.numel();
  if (p.numel == 0) return p;
  p.stream = stream_of(y.device());
  const detail::Operands o = detail::operands_of(in, y);
  p.rank = o.rank;
  p.dense = o.rank <= 1;
  constexpr std::int64_t whole = 16;  // elements, so at least 16 bytes of any dtype
  const int last = o.rank - 1;
  p.dense_rows = (o.rank == 1 || o.rank == 2) && o.sizes[last] % whole == 0;
  std::copy_n(o.sizes, o.rank, p.sizes);
  for (int k = 0; k < o.count; ++k) {
    p.data[k] = o.data[k];
    std::copy_n(o.strides[k], o.rank, p.strides[k]);
    const bool aligned = reinterpret_cast<std::uintptr_t>(p.data[k]) % 16 == 0;
    p.dense = p.dense && aligned && (o.rank == 0 || o.strides[k][0] == 1);
    if (!p.dense_rows) continue;
    const bool one = k > 0 && o.strides[k][last] == 0;  // an element for the whole row
    p.dense_rows = one || (aligned && o.strides[k][last] == 1 && (last == 0 || o.strides[k][0] % whole == 0));
  }
  return p;
}

int attribute_of_device(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

unsigned grid_of(std::int64_t blocks) {
  check<NotImplementedError>(blocks <= most_blocks_of_grid,
                             "cuda: this size takes {} blocks of threads, and a launch has room for {}; take "
                             "it in parts",
                             blocks, most_blocks_of_grid);
  return static_cast<unsigned>(blocks);
}

void check_launch(std::string_view op) { check_cuda(cudaGetLastError(), op); }

}  // namespace sherd::cuda
