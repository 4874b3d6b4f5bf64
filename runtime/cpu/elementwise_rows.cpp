// Walks from row to row of an elementwise call, and makes of any row one that its loop takes.
#include <algorithm>

#include "runtime/cpu/operands.h"
#include "runtime/cpu/row_copy.h"
#include "runtime/cpu/rows.h"
#include "runtime/half.h"
#include "runtime/parallel.h"

namespace sherd::detail {
namespace {

constexpr std::int64_t elements_per_tile = 16384;
constexpr std::int64_t block = 512;     // elements that are copied at a time
constexpr std::int64_t short_row = 64;  // so short that setting it up takes longer than computing it

/// Where every operand of a call stands.
struct RowPointers {
  std::byte* at[Operands::most] = {};

  explicit RowPointers(const Operands& w) { std::copy_n(w.data, w.count, at); }
  /// At the beginning of a row.
  RowPointers(const Operands& w, std::int64_t row) : RowPointers(w) {
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

/// One call: its operands, each as it lies or through a block.
class RowsOfCall {
 public:
  RowsOfCall(const Operands& w, const Loop& loop, const void* functor)
      : w_(w), loop_(loop), functor_(functor) {
    const bool one = w.inner() == 1;
    for (int k = 0; k < w.count; ++k) {
      through_[k] = is_widened(k) || (w.step(k) != 1 && !one);
      steps_[k] = 1;
    }
    for (int k = 1; k < w.count && !one; ++k) {
      if (((loop.numbers >> k) & 1) == 0 || w.step(k) != 0) continue;
      through_[k] = is_widened(k);
      steps_[k] = 0;
      break;
    }
    any_through_ = std::any_of(through_, through_ + w.count, [](bool t) { return t; });
  }

  void run() const {
    const std::int64_t n = w_.inner();
    if (w_.rank == 0) return run_row(w_.data, n);
    if (w_.rank == 1)
      return parallel_for(n, elements_per_tile, [&](std::int64_t begin, std::int64_t end) {
        RowPointers places(w_);
        places.advance(w_, 0, begin);
        run_row(places.at, end - begin);
      });
    const bool together = any_through_ && n <= short_row;
    const std::int64_t at_once = together ? block / n : 1;
    parallel_for(w_.outer(), std::max<std::int64_t>(1, elements_per_tile / n),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t i = begin; i < end; i += at_once)
                     together ? run_together(i, std::min(at_once, end - i))
                              : run_row(RowPointers(w_, i).at, n);
                 });
  }

 private:
  struct alignas(64) Room {
    std::byte of[Operands::most][block * sizeof(std::int64_t)];
  };

  bool is_widened(int k) const { return loop_.in_f32 && is_half(w_.dtypes[k]); }
  std::int64_t size_in_room(int k) const { return is_widened(k) ? 4 : size_of(w_.dtypes[k]); }

  void take(int k, std::byte* from, std::int64_t n, std::byte* to) const {
    if (!is_widened(k)) return cpu::copy_elements(size_of(w_.dtypes[k]), from, w_.step(k), to, 1, n);
    with_half(w_.dtypes[k], from,
              [&](auto* x) { widen_row(x, w_.step(k), n, reinterpret_cast<float*>(to)); });
  }
  void give(const std::byte* from, std::int64_t n, std::byte* to) const {
    if (!is_widened(0)) return cpu::copy_elements(size_of(w_.dtypes[0]), from, 1, to, w_.step(0), n);
    with_half(w_.dtypes[0], to,
              [&](auto* y) { narrow_row(reinterpret_cast<const float*>(from), n, y, w_.step(0)); });
  }

  void run_row(std::byte* const* at, std::int64_t n) const {
    if (!any_through_) return loop_.row(functor_, n, at, steps_);
    Room room;
    for (std::int64_t begin = 0; begin < n; begin += block)
      run_block(at, begin, std::min(block, n - begin), room);
  }

  void run_block(std::byte* const* at, std::int64_t begin, std::int64_t n, Room& room) const {
    std::byte *first[Operands::most], *given[Operands::most];
    for (int k = 0; k < w_.count; ++k) {
      first[k] = at[k] + begin * w_.step(k) * size_of(w_.dtypes[k]);
      given[k] = through_[k] ? room.of[k] : first[k];
      if (through_[k] && k > 0) take(k, first[k], steps_[k] == 0 ? 1 : n, given[k]);
    }
    loop_.row(functor_, n, given, steps_);
    if (through_[0]) give(given[0], n, first[0]);
  }

  /// Short rows as one.
  void run_together(std::int64_t row, std::int64_t rows) const {
    Room room;
    std::byte* given[Operands::most];
    std::int64_t steps[Operands::most];
    for (int k = 0; k < w_.count; ++k) given[k] = room.of[k], steps[k] = 1;
    const std::int64_t n = w_.inner();
    for (std::int64_t r = 0; r < rows; ++r) {
      const RowPointers places(w_, row + r);
      for (int k = 1; k < w_.count; ++k) take(k, places.at[k], n, given[k] + r * n * size_in_room(k));
    }
    loop_.row(functor_, rows * n, given, steps);
    for (std::int64_t r = 0; r < rows; ++r)
      give(given[0] + r * n * size_in_room(0), n, RowPointers(w_, row + r).at[0]);
  }

  const Operands& w_;
  const Loop& loop_;
  const void* functor_;
  bool through_[Operands::most], any_through_;
  std::int64_t steps_[Operands::most];  // in the loop
};

}  // namespace

void run_rows(const Operands& w, const Loop& loop, const void* functor) {
  RowsOfCall(w, loop, functor).run();
}

}  // namespace sherd::detail
