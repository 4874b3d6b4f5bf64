#include "runtime/cuda/norm.h"

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"
#include "runtime/exact_squares.h"

namespace sherd::cuda {
namespace {

/// Calls `body(value)` for this thread's elements of its block's chunk; what it returns is stored when
/// `Store`.
template <class T, class F>
__device__ void for_chunk(const ValueList& list, const F& body) {
  const int low = list.of_chunk(blockIdx.x);
  T* data = static_cast<T*>(list.data[low]);
  const std::int64_t begin = (blockIdx.x - list.first_chunk[low]) * ValueList::chunk;
  const std::int64_t end = min(begin + ValueList::chunk, list.n[low]);
  constexpr int V = wide_count<T>;
  std::int64_t i = begin;
  if (reinterpret_cast<std::uintptr_t>(data) % 16 == 0) {
    for (i += static_cast<std::int64_t>(threadIdx.x) * V; i + V <= end; i += threads_per_block * V)
      body(data + i, load_pack<V>(data + i));
    i = begin + (end - begin) / V * V;
  }
  for (i += threadIdx.x; i < end; i += threads_per_block) body(data + i, load_pack<1>(data + i));
}

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    largest_magnitude(const __grid_constant__ ValueList list, double* largest) {
  using C = compute_t<T>;
  using Bits = typename math::detail::Format<C>::Int;
  // Magnitudes order like integers, NaN above all.
  Bits top = 0;
  for_chunk<T>(list, [&](T*, const auto& pack) {
    for (const T& value : pack.at) top = max(top, std::bit_cast<Bits>(std::fabs(widen(value))));
  });
  for (int step = warp_size / 2; step > 0; step /= 2) top = max(top, __shfl_xor_sync(whole_warp, top, step));
  if (threadIdx.x % warp_size != 0) return;
  auto value = static_cast<double>(std::bit_cast<C>(top));
  if (value != value) value = std::numeric_limits<double>::quiet_NaN();  // one of many bit patterns
  atomicMax(reinterpret_cast<unsigned long long*>(largest), std::bit_cast<unsigned long long>(value));
}

constexpr int per_lane = 32;  // elements of a piece that a lane holds; a bit of `add_some` each
constexpr std::int64_t piece = per_lane * warp_size;

/// Elements [i, i + V) of `data`, those from `end` on as 0.
template <int V, class T>
__device__ Raw<V, T> load_until(const T* data, std::int64_t i, std::int64_t end, bool aligned) {
  if (aligned && i + V <= end) return Raw<V, T>::load(data + i);
  Packed<V, T> pack{};
  for (int j = 0; j < V; ++j)
    if (i + j < end) pack.at[j] = data[i + j];
  return std::bit_cast<Raw<V, T>>(pack);
}

/// The sum of the squares of a warp's pieces, which goes to `add` when their largest magnitudes are no longer
/// near each other's: of a grid much coarser than a piece's own too many elements would be taken one by one.
template <class T, class Add>
class WarpSquares {
 public:
  __device__ explicit WarpSquares(const Add& add) : add_(add) {}

  /// Of [begin, end), a piece at most.
  __device__ void add_piece(const T* data, std::int64_t begin, std::int64_t end, bool aligned) {
    Raw<V, T> packs[per_lane / V];
#pragma unroll
    for (int k = 0; k < per_lane / V; ++k)
      packs[k] = load_until<V>(data, begin + (k * warp_size + lane()) * V, end, aligned);
    const auto each = [&](const auto& body) {
#pragma unroll
      for (int k = 0; k < per_lane / V; ++k) {
        C wide[V];
        packs[k].widen_to(wide);
#pragma unroll
        for (int j = 0; j < V; ++j) body(std::fabs(wide[j]));
      }
    };
    unsigned top = 0, bottom = ~0u;  // bits order as magnitudes do; of 0, less 1, they are above all
    each([&](C x) {
      const auto bits = std::bit_cast<unsigned>(x);
      top = max(top, bits);
      bottom = min(bottom, bits - 1);
    });
    for (int step = warp_size / 2; step > 0; step /= 2)
      top = max(top, __shfl_xor_sync(whole_warp, top, step));
    const C largest = std::bit_cast<C>(top);
    if (largest == 0) return;
    if (!std::isfinite(largest)) return add_some(data, begin, end, ~0u);
    lie_on_grid_of(static_cast<double>(largest));
    double above = 0, below = 0;
    each([&](C x) {
      const double wide = static_cast<double>(x < least_ ? C(0) : x);
      // All are exact but the sum with the splitter, which rounds as it does of the square itself.
      if constexpr (Grid::split) {
        const double on_grid = __fma_rn(wide, wide, grid_.splitter) - grid_.splitter;
        above += on_grid;
        below += __fma_rn(wide, wide, -on_grid);
      } else {
        above = __fma_rn(wide, wide, above);
      }
    });
    if (bottom < std::bit_cast<unsigned>(least_) - 1) {
      unsigned smaller = 0, bit = 1;
      each([&](C x) {
        if (x < least_ && x > 0) smaller |= bit;
        bit <<= 1;
      });
      add_some(data, begin, end, smaller);
    }
    above_ += static_cast<long long>(above * grid_.to_high);
    if (Grid::split) below_ += static_cast<long long>(below * grid_.to_low);
    ++pieces_;
  }
  __device__ void finish() {
    if (pieces_ == 0) return;
    const long long above = warp_sum(above_), below = Grid::split ? warp_sum(below_) : 0;
    if (lane() == 0) grid_.finish(above, below, add_);
    above_ = below_ = 0;
    pieces_ = 0;
  }

 private:
  using C = compute_t<T>;
  using Grid = SquaresGrid<mantissa_bits<T>>;
  static constexpr int V = wide_count<T>;
  static constexpr int near = 4;          // powers of two
  static constexpr int most_pieces = 32;  // sums of a piece have 57 bits

  __device__ static int lane() { return static_cast<int>(threadIdx.x % warp_size); }
  __device__ void lie_on_grid_of(double largest) {
    const int top = static_cast<int>(std::bit_cast<std::uint64_t>(largest) >> 52);
    if (pieces_ > 0 && pieces_ < most_pieces && top <= top_ && top >= top_ - near) return;
    finish();
    top_ = top;
    grid_ = Grid::of(largest);
    least_ = static_cast<C>(grid_.least);
  }
  /// Those of this lane that have a bit in `which`. One by one, and read again: unrolled, and of packs, it
  /// would be nearly all of the kernel's code.
  __device__ void add_some(const T* data, std::int64_t begin, std::int64_t end, unsigned which) {
#pragma unroll 1
    for (; which != 0; which &= which - 1) {
      const int n = __ffs(static_cast<int>(which)) - 1;
      const std::int64_t i = begin + (n / V * warp_size + lane()) * V + n % V;
      if (i < end) add_square(static_cast<double>(static_cast<C>(data[i])), add_);
    }
  }

  const Add& add_;
  Grid grid_{0};
  C least_ = 0;
  int top_ = 0, pieces_ = 0;
  long long above_ = 0, below_ = 0;
};

constexpr int blocks_of_short = 4;  // on a processor, of elements of 16 bits

template <class T>
__global__ void __launch_bounds__(threads_per_block, sizeof(T) == 2 ? blocks_of_short : 1)
    square_sums(const __grid_constant__ ValueList list, unsigned long long* limbs) {
  __shared__ unsigned long long sums[ExactSquares::limbs];
  for (int i = threadIdx.x; i < ExactSquares::limbs; i += threads_per_block) sums[i] = 0;
  __syncthreads();
  const auto add = [&](int limb, std::uint64_t value) {
    atomicAdd(sums + limb, static_cast<unsigned long long>(value));
  };
  const auto for_chunks = [&](const auto& body) {  // with the elements [begin, end) of one stretch
    for (std::int64_t chunk = blockIdx.x; chunk < list.first_chunk[list.count]; chunk += gridDim.x) {
      const int which = list.of_chunk(chunk);
      const std::int64_t begin = (chunk - list.first_chunk[which]) * ValueList::chunk;
      body(static_cast<const T*>(list.data[which]), begin, min(begin + ValueList::chunk, list.n[which]));
    }
  };
  if constexpr (std::is_same_v<T, double>) {
    for_chunks([&](const T* data, std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin + threadIdx.x; i < end; i += threads_per_block) add_square(data[i], add);
    });
  } else {
    WarpSquares<T, decltype(add)> squares(add);
    for_chunks([&](const T* data, std::int64_t begin, std::int64_t end) {
      const bool aligned = reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
      for (std::int64_t i = begin + threadIdx.x / warp_size * piece; i < end;
           i += threads_per_block / warp_size * piece)
        squares.add_piece(data, i, min(i + piece, end), aligned);
    });
    squares.finish();
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ExactSquares::limbs; i += threads_per_block)
    if (sums[i] != 0) atomicAdd(limbs + i, sums[i]);
}

__global__ void norm_of_sums(const std::int64_t* limbs, double* norm) { *norm = root_of(limbs); }

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    clip_scale(const __grid_constant__ ValueList list, double limit, const double* norm) {
  const double factor = limit / (*norm + 1e-6);
  if (factor >= 1.0) return;  // NaN is for all
  for_chunk<T>(list, [&](T* at, auto pack) {
    for (T& value : pack.at)
      value = narrow<T>(static_cast<compute_t<T>>(static_cast<double>(widen(value)) * factor));
    store_pack(at, pack);
  });
}

template <class F>
void launch(const ValueList& list, F&& f) {
  if (const auto blocks = static_cast<unsigned>(list.first_chunk[list.count]); blocks > 0)
    for_floating(list.dtype, [&]<class T>() { f.template operator()<T>(blocks); });
}

}  // namespace

void launch_largest_magnitude(const ValueList& list, double* largest, cudaStream_t stream) {
  launch(list, [&]<class T>(unsigned blocks) {
    largest_magnitude<T><<<blocks, threads_per_block, 0, stream>>>(list, largest);
  });
}

void launch_square_sums(const ValueList& list, std::int64_t* limbs, cudaStream_t stream) {
  launch(list, [&]<class T>(unsigned blocks) {
    // Each adds its limbs once; some on each of 132 processors, of 16 bits as many as there is room for.
    constexpr unsigned most_blocks = 132 * (sizeof(T) == 2 ? blocks_of_short : 8);
    square_sums<T><<<std::min(blocks, most_blocks), threads_per_block, 0, stream>>>(
        list, reinterpret_cast<unsigned long long*>(limbs));
  });
}

void launch_norm_of_sums(const std::int64_t* limbs, double* norm, cudaStream_t stream) {
  norm_of_sums<<<1, 1, 0, stream>>>(limbs, norm);
}

void launch_clip_scale(const ValueList& list, double limit, const double* norm, cudaStream_t stream) {
  launch(list, [&]<class T>(unsigned blocks) {
    clip_scale<T><<<blocks, threads_per_block, 0, stream>>>(list, limit, norm);
  });
}

}  // namespace sherd::cuda
