#include "runtime/cuda/block.cuh"
#include "runtime/cuda/elementwise.cuh"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/slots.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// Converts to what `To` is computed in; the store converts to `To` itself.
template <class To>
struct Convert {
  using Copies = void;
  template <class V>
  __device__ compute_t<To> operator()(V x) const {
    if constexpr (std::is_same_v<To, bool>)
      return x != V(0);
    else if constexpr (std::is_integral_v<To> && !std::is_integral_v<V>)
      return math::to_integer<To>(x);
    else
      return static_cast<compute_t<To>>(x);
  }
};

struct Same {
  using Copies = void;
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

bool is_small_float(DType d) { return d == DType::f32 || d == DType::f16 || d == DType::bf16; }

/// Small floats wide; other pairs are rare, and one by one.
template <class From>
void copy_from(const Operands& p) {
  for_any(p.out_dtype, [&]<class To>() {
    using C = compute_t<To>;
    if constexpr (std::is_same_v<To, From>)
      return;  // bits
    else if constexpr (std::is_same_v<C, float> && std::is_same_v<compute_t<From>, float>)
      launch<Convert<C>, To, From>({}, p);
    else
      launch_strided<Convert<C>, To, From>({}, p);
  });
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

template <class T, class Wide>
__global__ void arange_kernel(Wide start, Wide step, T* out, std::int64_t n) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += stride)
    out[i] = static_cast<T>(static_cast<compute_t<T>>(start + static_cast<Wide>(i) * step));
}

template <class T>
void arange(Number start, Number step, void* out, std::int64_t n, cudaStream_t stream) {
  using Wide = std::conditional_t<std::is_integral_v<T>, std::int64_t, double>;  // exact beyond 2^53
  arange_kernel<<<blocks_for(n), threads_per_block, 0, stream>>>(start.as<Wide>(), step.as<Wide>(),
                                                                 static_cast<T*>(out), n);
}

/// A block's chunk of one copy, 16 bytes of the wider type at a time where both are aligned to that.
template <class To, class From>
__device__ void copy_chunk(const Chunk& chunk, const CopySlot& s) {
  To* const to = static_cast<To*>(s.to);
  const From* const from = static_cast<const From*>(s.from);
  constexpr int width = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  const auto bits = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  chunk.for_each<width>(bits % 16 == 0, [&]<int V>(std::int64_t i) {
    const Packed<V, From> pack = load_pack<V>(from + i);
    Packed<V, To> result;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if constexpr (std::is_same_v<To, From>)
        result.at[j] = pack.at[j];
      else
        result.at[j] = narrow<To>(widen(pack.at[j]));
    }
    store_pack(to + i, result);
  });
}

/// The same bits, of an element's size (`size_of` reads a table of the host's).
__device__ void copy_chunk_of_bits(const Chunk& chunk, const CopySlot& s) {
  switch (s.to_dtype) {
    case DType::u8:
    case DType::boolean:
      return copy_chunk<std::uint8_t, std::uint8_t>(chunk, s);
    case DType::f16:
    case DType::bf16:
      return copy_chunk<std::uint16_t, std::uint16_t>(chunk, s);
    case DType::f32:
    case DType::i32:
      return copy_chunk<std::uint32_t, std::uint32_t>(chunk, s);
    case DType::f64:
    case DType::i64:
      return copy_chunk<std::uint64_t, std::uint64_t>(chunk, s);
  }
}

template <class From>
__device__ void copy_chunk_from(const Chunk& chunk, const CopySlot& s) {
  switch (s.to_dtype) {
    case DType::bf16:
      return copy_chunk<BFloat16, From>(chunk, s);
    case DType::f16:
      return copy_chunk<Half, From>(chunk, s);
    default:
      return copy_chunk<float, From>(chunk, s);
  }
}

__global__ void __launch_bounds__(threads_per_block) copies(const __grid_constant__ CopySlots slots) {
  wait_for_earlier();
  const Chunk chunk(slots);
  const CopySlot& s = slots.slot[chunk.slot];
  if (s.to_dtype == s.from_dtype) return copy_chunk_of_bits(chunk, s);
  switch (s.from_dtype) {
    case DType::bf16:
      return copy_chunk_from<BFloat16>(chunk, s);
    case DType::f16:
      return copy_chunk_from<Half>(chunk, s);
    default:
      return copy_chunk_from<float>(chunk, s);
  }
}

}  // namespace

bool takes_copy(DType to, DType from) { return to == from || (is_small_float(to) && is_small_float(from)); }

void launch_copy_each(const CopySlots& slots, cudaStream_t stream) {
  if (slots.blocks() > 0) launch_early(copies, slots.blocks(), threads_per_block, stream, slots);
}

void launch_copy(const Operands& p) {
  if (p.dtype == p.out_dtype) {
    switch (size_of(p.dtype)) {
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
  for_any(p.dtype, [&]<class From>() { copy_from<From>(p); });
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

void launch_arange(DType dtype, Number start, Number step, void* out, std::int64_t n, cudaStream_t stream) {
  for_any(dtype, [&]<class T>() { arange<T>(start, step, out, n, stream); });
}

}  // namespace sherd::cuda
