#include "runtime/cuda/elementwise.cuh"
#include "runtime/cuda/launchers.h"

namespace sherd::cuda {
namespace {

/// Converts to what `To` is computed in; the store converts to `To` itself.
template <class To>
struct Convert {
  template <class V>
  __device__ compute_t<To> operator()(V x) const {
    if constexpr (std::is_same_v<To, bool>)
      return x != V(0);
    else
      return static_cast<compute_t<To>>(x);
  }
};

struct Same {
  template <class V>
  __device__ V operator()(V x) const {
    return x;
  }
};

template <class V>
struct Constant {
  V value;
  __device__ V operator()() const { return value; }
};

template <class From>
void copy_from(const Operands& p, DType to) {
  switch (to) {
    case DType::f64:
      return launch<Convert<double>, double, From>({}, p);
    case DType::f32:
      return launch<Convert<float>, float, From>({}, p);
    case DType::f16:
      return launch<Convert<Half>, Half, From>({}, p);
    case DType::bf16:
      return launch<Convert<BFloat16>, BFloat16, From>({}, p);
    case DType::i64:
      return launch<Convert<std::int64_t>, std::int64_t, From>({}, p);
    case DType::i32:
      return launch<Convert<std::int32_t>, std::int32_t, From>({}, p);
    case DType::u8:
      return launch<Convert<std::uint8_t>, std::uint8_t, From>({}, p);
    case DType::boolean:
      return launch<Convert<bool>, bool, From>({}, p);
  }
}

/// Equal dtypes are copied as plain bits of their size.
template <class Bits>
void copy_bits(const Operands& p) {
  launch<Same, Bits, Bits>({}, p);
}

template <class Bits>
void fill_bits(const Operands& p, std::uint64_t bits) {
  launch<Constant<Bits>, Bits>({static_cast<Bits>(bits)}, p);
}

template <class T>
__global__ void arange_kernel(double start, double step, T* out, std::int64_t n) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += stride)
    out[i] = static_cast<T>(static_cast<compute_t<T>>(start + static_cast<double>(i) * step));
}

template <class T>
void arange(double start, double step, void* out, std::int64_t n, cudaStream_t stream) {
  arange_kernel<<<blocks_for(n), threads_per_block, 0, stream>>>(start, step, static_cast<T*>(out), n);
}

}  // namespace

void launch_copy(const Operands& p, DType to) {
  if (p.dtype == to) {
    switch (size_of(to)) {
      case 1:
        return copy_bits<std::uint8_t>(p);
      case 2:
        return copy_bits<std::uint16_t>(p);
      case 4:
        return copy_bits<std::uint32_t>(p);
      default:
        return copy_bits<std::uint64_t>(p);
    }
  }
  switch (p.dtype) {
    case DType::f64:
      return copy_from<double>(p, to);
    case DType::f32:
      return copy_from<float>(p, to);
    case DType::f16:
      return copy_from<Half>(p, to);
    case DType::bf16:
      return copy_from<BFloat16>(p, to);
    case DType::i64:
      return copy_from<std::int64_t>(p, to);
    case DType::i32:
      return copy_from<std::int32_t>(p, to);
    case DType::u8:
      return copy_from<std::uint8_t>(p, to);
    case DType::boolean:
      return copy_from<bool>(p, to);
  }
}

void launch_fill(const Operands& p, std::uint64_t bits) {
  switch (size_of(p.dtype)) {
    case 1:
      return fill_bits<std::uint8_t>(p, bits);
    case 2:
      return fill_bits<std::uint16_t>(p, bits);
    case 4:
      return fill_bits<std::uint32_t>(p, bits);
    default:
      return fill_bits<std::uint64_t>(p, bits);
  }
}

void launch_arange(DType dtype, double start, double step, void* out, std::int64_t n, cudaStream_t stream) {
  switch (dtype) {
    case DType::f64:
      return arange<double>(start, step, out, n, stream);
    case DType::f32:
      return arange<float>(start, step, out, n, stream);
    case DType::f16:
      return arange<Half>(start, step, out, n, stream);
    case DType::bf16:
      return arange<BFloat16>(start, step, out, n, stream);
    case DType::i64:
      return arange<std::int64_t>(start, step, out, n, stream);
    case DType::i32:
      return arange<std::int32_t>(start, step, out, n, stream);
    case DType::u8:
      return arange<std::uint8_t>(start, step, out, n, stream);
    case DType::boolean:
      return arange<bool>(start, step, out, n, stream);
  }
}

}  // namespace sherd::cuda
