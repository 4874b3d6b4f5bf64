#include "runtime/cuda/multinomial.h"

#include "runtime/cuda/types.cuh"
#include "runtime/random.h"

namespace sherd::cuda {
namespace {

/// Each thread sums a run of columns, one adds the runs up and walks the one that it wants.
template <class T>
__device__ void draw_row(const MultinomialCall& c, std::int64_t row, double (&sums)[threads_per_block]) {
  const T* w = static_cast<const T*>(c.weights) + row * c.columns;
  const auto weight = [&](std::int64_t j) { return static_cast<double>(static_cast<compute_t<T>>(w[j])); };
  const std::int64_t length = (c.columns + threads_per_block - 1) / threads_per_block;
  const std::int64_t begin = threadIdx.x * length, end = min(begin + length, c.columns);
  double mine = 0;
  bool bad = false;
  for (std::int64_t j = begin; j < end; ++j) {
    const double x = weight(j);
    if (!(x >= 0 && x <= std::numeric_limits<double>::max())) {
      c.faults(FaultKind::multinomial_weight, x, row, c.columns);
      bad = true;
    }
    mine += x;
  }
  sums[threadIdx.x] = mine;
  bad = __syncthreads_or(bad);
  if (threadIdx.x != 0) return;
  c.places[row] = 0;
  if (bad) return;
  double total = 0;
  for (int i = 0; i < threads_per_block; ++i) total += sums[i];
  if (!(total > 0)) return c.faults(FaultKind::multinomial_zero, total, row, c.columns);
  if (total > std::numeric_limits<double>::max())
    return c.faults(FaultKind::multinomial_total, total, row, c.columns);
  const RandomKey key = c.key.read();
  const std::uint64_t counter = key.offset + static_cast<std::uint64_t>(row / 4);
  const double share = uniform_numbers(key.seed, counter)[static_cast<int>(row % 4)] * total;
  double running = 0;
  std::int64_t last = 0;
  for (int i = 0; i < threads_per_block; ++i) {
    const bool here = running + sums[i] > share;
    // The last run with a weight is walked too where rounding leaves the share at the very end.
    if (here || sums[i] > 0) {
      double inside = running;
      for (std::int64_t j = i * length; here && j < min((i + 1) * length, c.columns); ++j) {
        if (weight(j) <= 0) continue;
        last = j;
        inside += weight(j);
        if (inside > share) break;
      }
      if (here) break;
      for (std::int64_t j = min((i + 1) * length, c.columns) - 1; j >= i * length; --j)
        if (weight(j) > 0) {
          last = j;
          break;
        }
    }
    running += sums[i];
  }
  c.places[row] = last;
}

/// The running sums of a row as `draw_row` adds them; of a row that is reported they are 0.
template <class T>
__global__ void __launch_bounds__(threads_per_block) running_sums(const MultinomialCall c, double* running) {
  __shared__ double sums[threads_per_block];
  const std::int64_t length = blocks_of(c.columns, threads_per_block);
  const std::int64_t begin = threadIdx.x * length, end = min(begin + length, c.columns);
  for (std::int64_t row = blockIdx.x; row < c.rows; row += gridDim.x) {
    const T* w = static_cast<const T*>(c.weights) + row * c.columns;
    double mine = 0;
    bool bad = false;
    for (std::int64_t j = begin; j < end; ++j) {
      const auto x = static_cast<double>(widen(w[j]));
      if (!(x >= 0 && x <= std::numeric_limits<double>::max())) {
        c.faults(FaultKind::multinomial_weight, x, row, c.columns);
        bad = true;
      }
      mine += x;
    }
    __syncthreads();  // the sums have been read
    sums[threadIdx.x] = mine;
    bad = __syncthreads_or(bad);
    double before = 0, total = 0;
    for (int i = 0; i < threads_per_block; ++i) {
      if (i == static_cast<int>(threadIdx.x)) before = total;
      total += sums[i];
    }
    if (!bad && threadIdx.x == 0) {
      if (!(total > 0)) c.faults(FaultKind::multinomial_zero, total, row, c.columns);
      if (total > std::numeric_limits<double>::max())
        c.faults(FaultKind::multinomial_total, total, row, c.columns);
    }
    const bool usable = !bad && total > 0 && total <= std::numeric_limits<double>::max();
    for (std::int64_t j = begin; j < end; ++j) {
      before += static_cast<double>(widen(w[j]));
      running[row * c.columns + j] = usable ? before : 0;
    }
  }
}

/// Four draws a thread, which is a counter of random words.
__global__ void __launch_bounds__(threads_per_block)
    many_draws(const MultinomialCall c, std::int64_t draws, const double* running) {
  const RandomKey key = c.key.read();
  const std::int64_t n = c.rows * draws, step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t four = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
       4 * four < n; four += step) {
    const UniformNumbers numbers = uniform_numbers(key.seed, key.offset + static_cast<std::uint64_t>(four));
    for (int j = 0; j < 4 && 4 * four + j < n; ++j) {
      const double* sums = running + (4 * four + j) / draws * c.columns;
      const double total = sums[c.columns - 1], share = numbers[j] * total;
      // The first sum above the share; where rounding leaves none, the first that is all.
      std::int64_t low = 0, high = c.columns - 1;
      while (low < high) {
        const std::int64_t middle = (low + high) / 2;
        sums[middle] > share || sums[middle] >= total ? high = middle : low = middle + 1;
      }
      c.places[4 * four + j] = total > 0 ? low : 0;
    }
  }
}

/// A block a row.
template <class T>
__global__ void __launch_bounds__(threads_per_block) draw(const MultinomialCall c) {
  __shared__ double sums[threads_per_block];
  for (std::int64_t row = blockIdx.x; row < c.rows; row += gridDim.x) {
    draw_row<T>(c, row, sums);
    __syncthreads();  // the sums have been read
  }
}

}  // namespace

void launch_many_draws(const MultinomialCall& c, std::int64_t draws, double* running) {
  for_floating(c.dtype, [&]<class T>() {
    running_sums<T><<<looping_grid_of(c.rows), threads_per_block, 0, c.stream>>>(c, running);
  });
  many_draws<<<blocks_for((c.rows * draws + 3) / 4), threads_per_block, 0, c.stream>>>(c, draws, running);
}

void launch_multinomial(const MultinomialCall& c) {
  for_floating(c.dtype,
               [&]<class T>() { draw<T><<<looping_grid_of(c.rows), threads_per_block, 0, c.stream>>>(c); });
}

}  // namespace sherd::cuda
