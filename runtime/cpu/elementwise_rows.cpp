// Walks from row to row of an elementwise call.
#include <algorithm>

#include "runtime/cpu/operands.h"
#include "runtime/cpu/rows.h"
#include "runtime/half.h"
#include "runtime/parallel.h"

namespace sherd::detail {
namespace {

constexpr std::int64_t elements_per_tile = 16384;
constexpr std::int64_t block = 512;  // elements that are f32 at a time

/// Where every operand of a call stands.
struct Places {
  std::byte* at[Operands::most];

  explicit Places(const Operands& w) { std::copy_n(w.data, w.count, at); }
  /// At the beginning of a row.
  Places(const Operands& w, std::int64_t row) : Places(w) {
    for (int d = w.rank - 2; d >= 0; --d) {
      advance(w, d, row % w.sizes[d]);
      row /= w.sizes[d];
    }
  }
  void advance(const Operands& w, int dimension, std::int64_t by) {
    for (int k = 0; k < w.count; ++k) at[k] += by * w.strides[k][dimension] * size_of(w.dtypes[k]);
  }
};

constexpr bool is_half(DType d) { return d == DType::f16 || d == DType::bf16; }

template <class T>
void widen_row(const T* from, std::int64_t step, std::int64_t n, float* to) {
  using namespace cpu;
  if (step == 1)
    for_vectors<float>(
        n, [&](std::int64_t j, auto count) { put<float>(to + j, take<float>(from + j, count), count); });
  else
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i * step]);
}

template <class T>
void narrow_row(const float* from, std::int64_t n, T* to, std::int64_t step) {
  using namespace cpu;
  if (step == 1)
    for_vectors<float>(
        n, [&](std::int64_t j, auto count) { put<float>(to + j, take<float>(from + j, count), count); });
  else
    for (std::int64_t i = 0; i < n; ++i) to[i * step] = static_cast<T>(from[i]);
}

template <class F>
void with_half(DType d, std::byte* at, const F& f) {
  d == DType::f16 ? f(reinterpret_cast<Half*>(at)) : f(reinterpret_cast<BFloat16*>(at));
}

/// A row over operands of which some are f16 or bf16: blocks that stay in the nearest cache are widened to
/// f32, computed there, and rounded.
struct RowInF32 {
  const Operands& operands;
  Row row;
  const void* functor;

  static void run(const void* self, std::int64_t n, std::byte* const* at, const std::int64_t* steps) {
    for (std::int64_t begin = 0; begin < n; begin += block)
      static_cast<const RowInF32*>(self)->run_block(begin, std::min(block, n - begin), at, steps);
  }

  void run_block(std::int64_t begin, std::int64_t n, std::byte* const* at, const std::int64_t* steps) const {
    alignas(64) float wide[Operands::most][block];
    std::byte* block_at[Operands::most];
    std::int64_t block_steps[Operands::most];
    for (int k = 0; k < operands.count; ++k) {
      const DType d = operands.dtypes[k];
      std::byte* first = at[k] + begin * steps[k] * size_of(d);
      block_at[k] = is_half(d) ? reinterpret_cast<std::byte*>(wide[k]) : first;
      block_steps[k] = is_half(d) && steps[k] != 0 ? 1 : steps[k];
      if (is_half(d) && k > 0)
        with_half(d, first, [&](auto* x) { widen_row(x, steps[k], steps[k] == 0 ? 1 : n, wide[k]); });
    }
    row(functor, n, block_at, block_steps);
    if (!is_half(operands.dtypes[0])) return;
    with_half(operands.dtypes[0], at[0] + begin * steps[0] * 2,
              [&](auto* y) { narrow_row(wide[0], n, y, steps[0]); });
  }
};

/// Rows so short that setting one up takes longer than computing it: as many as fill a block go as one.
struct ShortRowsInF32 {
  const Operands& operands;
  Row row;
  const void* functor;

  static constexpr std::int64_t longest = 64;

  void run_block(std::int64_t first, std::int64_t rows) const {
    alignas(64) float wide[Operands::most][block];
    const std::int64_t n = operands.inner();
    std::byte* at[Operands::most];
    std::int64_t steps[Operands::most];
    for (int k = 0; k < operands.count; ++k) {
      at[k] = reinterpret_cast<std::byte*>(wide[k]);
      steps[k] = 1;
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      const Places places(operands, first + r);
      for (int k = 1; k < operands.count; ++k) {
        const std::int64_t step = operands.step(k);
        if (is_half(operands.dtypes[k]))
          with_half(operands.dtypes[k], places.at[k],
                    [&](auto* x) { widen_row(x, step, n, wide[k] + r * n); });
        else  // a condition
          for (std::int64_t j = 0; j < n; ++j) at[k][r * n + j] = places.at[k][j * step];
      }
    }
    row(functor, rows * n, at, steps);
    for (std::int64_t r = 0; r < rows; ++r) {
      const Places places(operands, first + r);
      const std::int64_t step = operands.step(0);
      if (is_half(operands.dtypes[0]))
        with_half(operands.dtypes[0], places.at[0],
                  [&](auto* y) { narrow_row(wide[0] + r * n, n, y, step); });
      else  // truths
        for (std::int64_t j = 0; j < n; ++j) places.at[0][j * step] = at[0][r * n + j];
    }
  }
};

}  // namespace

void run_rows(const Operands& w, Row row, const void* functor) {
  const std::int64_t n = w.inner();
  std::int64_t steps[Operands::most];
  for (int k = 0; k < w.count; ++k) steps[k] = w.step(k);
  if (w.rank == 0) return row(functor, n, w.data, steps);
  if (w.rank == 1)
    return parallel_for(n, elements_per_tile, [&](std::int64_t begin, std::int64_t end) {
      Places places(w);
      places.advance(w, 0, begin);
      row(functor, end - begin, places.at, steps);
    });
  const std::int64_t rows_per_tile = std::max<std::int64_t>(1, elements_per_tile / n);
  parallel_for(w.outer(), rows_per_tile, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) row(functor, n, Places(w, i).at, steps);
  });
}

void run_rows_in_f32(const Operands& w, Row row, const void* functor) {
  const std::int64_t n = w.inner();
  if (w.rank < 2 || n > ShortRowsInF32::longest) {
    const RowInF32 in_f32{w, row, functor};
    return run_rows(w, &RowInF32::run, &in_f32);
  }
  const ShortRowsInF32 in_f32{w, row, functor};
  const std::int64_t together = block / n;
  parallel_for(w.outer(), elements_per_tile / n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += together) in_f32.run_block(i, std::min(together, end - i));
  });
}

}  // namespace sherd::detail
