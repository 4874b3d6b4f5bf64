// Tensor cores by tiles of 16-bit floats in shared memory, summed in f32. A warp's tile of C is 16 x 8: a
// thread holds the rows g and g + 8 at the columns 2t and 2t + 1, g = lane / 4, t = lane % 4.
#pragma once

#include <cstdint>

#include "runtime/cuda/block.cuh"

namespace sherd::cuda {

/// A tile of rows in shared memory, padded so that the eight rows that are read at once lie in different
/// banks.
template <int Width>
struct TileRows {
  static constexpr int row = Width + 8;
  std::uint16_t* at;
  __device__ std::uint32_t address(int r, int d) const {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(at + r * row + d));
  }
};

__device__ inline void copy_16_bytes(std::uint32_t to, const void* from, bool inside) {
  const int bytes = inside ? 16 : 0;  // the rest becomes zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
/// Until all but the latest `left` groups of copies are there, for this thread.
template <int left>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(left) : "memory");
}

/// Starts to copy `Rows` rows from `first` on, zeros from `end` on.
template <int Rows, int Width, int Threads>
__device__ void copy_rows(const TileRows<Width>& to, const std::uint16_t* from, std::int64_t stride,
                          int first, int end) {
  constexpr int packs = Width / 8, passes = Rows * packs / Threads;
  static_assert(Rows * packs % Threads == 0);
  const int thread = static_cast<int>(threadIdx.x);
  if (Threads % packs == 0 && first + Rows <= end) {
    // A pass takes whole rows: addresses are steps from one.
    constexpr int rows = Threads / packs;
    const int r = thread / packs, d = thread % packs * 8;
    const std::uint16_t* at = from + (first + r) * stride + d;
    const std::uint32_t target = to.address(r, d);
#pragma unroll
    for (int p = 0; p < passes; ++p, at += rows * stride)
      copy_16_bytes(target + p * rows * TileRows<Width>::row * 2, at, true);
    return;
  }
#pragma unroll
  for (int p = 0; p < passes; ++p) {
    const int i = p * Threads + thread, r = i / packs, d = i % packs * 8;
    const bool inside = first + r < end;
    copy_16_bytes(to.address(r, d), inside ? from + (first + r) * stride + d : from, inside);
  }
}

/// Four 8 x 8 matrices, from the row addresses of this thread's quarter of the warp.
__device__ inline void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_transposed(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

/// Rows r.. (16) and columns d.. (16) as the left operand.
template <int Width>
__device__ void load_left(std::uint32_t (&a)[4], const TileRows<Width>& rows, int r, int d) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  load_matrices(a, rows.address(r + lane % 16, d + lane / 16 * 8));
}
/// Rows r.. (16) as columns of the right operand, over the inner d.. (16): two tiles of 8 columns.
template <int Width>
__device__ void load_right_of_rows(std::uint32_t (&b)[4], const TileRows<Width>& rows, int r, int d) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  load_matrices(b, rows.address(r + lane % 8 + lane / 16 * 8, d + lane / 8 % 2 * 8));
}
/// Columns d.. (16) of the right operand, over the inner rows r.. (16): two tiles of 8 columns.
template <int Width>
__device__ void load_right(std::uint32_t (&b)[4], const TileRows<Width>& rows, int r, int d) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  load_transposed(b, rows.address(r + lane % 16, d + lane / 16 * 8));
}

template <class T>
__device__ void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<T, BFloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two floats rounded to `T`, `low` in the lower half.
template <class T>
__device__ std::uint32_t pack_pair(float low, float high) {
  std::uint32_t pair;
  if constexpr (std::is_same_v<T, BFloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Two neighbouring tiles of C as the left operand of the next product.
template <class T>
__device__ void as_left(std::uint32_t (&a)[4], const float (&first)[4], const float (&second)[4]) {
  a[0] = pack_pair<T>(first[0], first[1]);
  a[1] = pack_pair<T>(first[2], first[3]);
  a[2] = pack_pair<T>(second[0], second[1]);
  a[3] = pack_pair<T>(second[2], second[3]);
}

/// 2^x by the fast instruction.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace sherd::cuda
