#include "runtime/cuda/gather.h"

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// Picks `y` from `x`, or, if `Put`, puts `x` into `y`. `Inner`: whether picks lie in columns, `inner` beside
/// each other.
template <class Bits, bool Inner, bool Put>
__global__ void __launch_bounds__(threads_per_block) move_picks(const PickCall c, std::int64_t inner) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  const std::int64_t of_row = Inner ? c.picks * inner : c.picks, n = c.rows * of_row;
  const bool small = n <= 0x7fffffff;  // division in 64 bits is slow
  const auto quotient = [small](std::int64_t a, std::int64_t b) {
    return small ? static_cast<std::int64_t>(static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b))
                 : a / b;
  };
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += step) {
    const std::int64_t row = quotient(i, of_row), at = c.index[i];
    const bool valid = at >= 0 && at < c.columns;
    if (!valid) c.faults(Put ? FaultKind::scatter_index : FaultKind::gather_index, at, i, c.columns);
    const std::int64_t place =
        Inner ? (row * c.columns + at) * inner + i - quotient(i, inner) * inner : row * c.columns + at;
    const Bits* x = static_cast<const Bits*>(c.x);
    Bits* y = static_cast<Bits*>(c.y);
    if constexpr (!Put)
      y[i] = valid ? x[place] : static_cast<Bits>(~Bits{0});
    else if (valid)
      y[place] = x[i];
  }
}

template <bool Put, class Bits>
void move_bits(const PickCall& c, std::int64_t inner) {
  const unsigned blocks = blocks_for(c.rows * c.picks * inner);
  if (inner == 1)
    move_picks<Bits, false, Put><<<blocks, threads_per_block, 0, c.stream>>>(c, 1);
  else
    move_picks<Bits, true, Put><<<blocks, threads_per_block, 0, c.stream>>>(c, inner);
}

template <bool Put>
void move(const PickCall& c, std::int64_t inner) {
  switch (size_of(c.dtype)) {
    case 1:
      return move_bits<Put, std::uint8_t>(c, inner);
    case 2:
      return move_bits<Put, std::uint16_t>(c, inner);
    case 4:
      return move_bits<Put, std::uint32_t>(c, inner);
    default:
      return move_bits<Put, std::uint64_t>(c, inner);
  }
}

/// A warp a row. Picks are taken 32 at a time; of those with one position the first lane adds all, in order.
template <class T>
__global__ void __launch_bounds__(threads_per_block) scatter(const PickCall c) {
  using C = compute_t<T>;
  constexpr int groups = threads_per_block / warp_size;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * groups + threadIdx.x / warp_size;
  if (row >= c.rows) return;
  const T* x = static_cast<const T*>(c.x) + row * c.picks;
  const std::int64_t* index = c.index + row * c.picks;
  T* y = static_cast<T*>(c.y) + row * c.columns;
  for (std::int64_t first = 0; first < c.picks; first += warp_size) {
    const std::int64_t j = first + lane;
    const std::int64_t at = j < c.picks ? index[j] : -1;
    const bool valid = at >= 0 && at < c.columns;
    if (!valid && j < c.picks) c.faults(FaultKind::scatter_index, at, row * c.picks + j, c.columns);
    const unsigned same = __match_any_sync(whole_warp, static_cast<long long>(valid ? at : -1));
    if (valid && lane == __ffs(static_cast<int>(same)) - 1) {
      T place = y[at];
      for (unsigned left = same; left != 0; left &= left - 1) {
        const T value = x[first + __ffs(static_cast<int>(left)) - 1];
        place = static_cast<T>(static_cast<C>(static_cast<C>(place) + static_cast<C>(value)));
      }
      y[at] = place;
    }
    __syncwarp();
  }
}

}  // namespace

void launch_gather_along(const PickCall& c, std::int64_t inner) { move<false>(c, inner); }
void launch_gather(const PickCall& c) { move<false>(c, 1); }
void launch_scatter_apart(const PickCall& c, std::int64_t inner) { move<true>(c, inner); }

void launch_scatter(const PickCall& c) {
  constexpr int groups = threads_per_block / warp_size;
  const auto blocks = grid_of(blocks_of(c.rows, groups));
  for_any(c.dtype, [&]<class T>() { scatter<T><<<blocks, threads_per_block, 0, c.stream>>>(c); });
}

}  // namespace sherd::cuda
