// Kernels that are not elementwise functors, as calls on plain pointers. Safe to include in device code. Each
// launches on the given stream; `check_launch` after it says whether it was accepted.
#pragma once

#include "runtime/cuda/device_key.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/slots.h"
#include "runtime/number.h"
#include "runtime/random.h"

namespace sherd::cuda {

/// Operand 0 becomes operand 1, converted to the output's dtype: floats to integers by `math::to_integer`,
/// anything but 0 is true.
void launch_copy(const Operands& p);
/// Dense lines of words of `bytes`, 1 to 16, each moved by `by` of them, 0 <= by <= length, the last ones to
/// the front.
struct RollCall {
  std::int64_t lines = 1, length = 0, by = 0, bytes = 4;
  const void* x = nullptr;
  void* y = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_roll(const RollCall& call);
/// Operand 0 becomes one value, given as the bits of its dtype.
void launch_fill(const Operands& p, std::uint64_t bits);
/// out[i] = start + i step, in f64 for floats and in i64 for integers.
void launch_arange(DType dtype, Number start, Number step, void* out, std::int64_t n, cudaStream_t stream);

// Element i uses word i % 4 of the Philox counter `key.offset + i / 4`, as on the CPU.
// They are made in f32; 16-bit floats are those rounded.
void launch_uniform(DeviceKey key, UniformRange range, DType dtype, void* out, std::int64_t n,
                    cudaStream_t stream);
void launch_uniform(DeviceKey key, UniformRangeOf<double> range, double* out, std::int64_t n,
                    cudaStream_t stream);
void launch_normal(DeviceKey key, float mean, float deviation, DType dtype, void* out, std::int64_t n,
                   cudaStream_t stream);
/// Integers in [low, low + range).
void launch_integers(DeviceKey key, std::int64_t low, std::uint64_t range, std::int64_t* out, std::int64_t n,
                     cudaStream_t stream);
/// 1 where the number in `range` is below p, else 0; floating dtypes but f64.
void launch_bernoulli(DType dtype, DeviceKey key, UniformRange range, const void* p, void* out,
                      std::int64_t n, cudaStream_t stream);
/// x scale where the word is at least `threshold`, else 0; floating dtypes.
void launch_dropout(DType dtype, DeviceKey key, std::uint32_t threshold, double scale, const void* x,
                    void* out, std::int64_t n, cudaStream_t stream);

/// A fold of an (outer, reduce, inner) array over its middle axis. The tree depends on the sizes alone.
struct FoldCall {
  DType dtype = DType::f32;
  std::int64_t outer = 1, reduce = 1, inner = 1;
  std::int64_t pitch = 0;  ///< elements from one row of `inner` to the next where there are gaps, else 0
  const void* x = nullptr;
  cudaStream_t stream = nullptr;
  /// Pieces that the reduced axis is cut into so that few results keep many blocks busy.
  std::int64_t pieces() const;
  /// Room for pieces() outer inner accumulators where there is more than one piece.
  void* partial = nullptr;
};
/// Sums, over `divisor`; accumulators have 8 bytes.
struct SumCall : FoldCall {
  double divisor = 1;   ///< integers take 1 only
  void* out = nullptr;  ///< i64 for integers and bool, else of `dtype`
};
void launch_sum(const SumCall& call);
/// Sums of |x|^power, 1 or 2, of floats, or their roots.
struct PowerSumCall : FoldCall {
  int power = 2;
  bool root = false;
  double* wide = nullptr;
  void* out = nullptr;  ///< the same in `dtype`, unless null
};
void launch_power_sum(const PowerSumCall& call);

/// The rows of a sum over all axes but the last in lanes, which `launch_sum` has threads for: each of the
/// `block_rows` threads that share a column of a piece adds every so manyth row, `run_length` of them in a
/// run. A lane is the rows of one run; in the order of pieces, then of runs, then of threads.
struct ColumnLanes {
  std::int64_t rows, pieces;
  std::int64_t length;  ///< rows of a piece; the last ones may have fewer
  std::int64_t runs;    ///< of a thread

  ColumnLanes(std::int64_t rows, std::int64_t columns, DType dtype);
  std::int64_t of_piece() const;
  std::int64_t count() const { return pieces * of_piece(); }
};
/// The same sums of what lanes have added up: `x` is [lane][column] in the dtype that `call.dtype` is summed
/// in. Of at most `run_length` runs a thread.
void launch_sum_of_lanes(const SumCall& call);
/// Products in f64 of floats, in i64 (wrapping) of integers and bool. Accumulators have 8 bytes.
struct ProductCall : FoldCall {
  void* out = nullptr;  ///< i64 for integers and bool, else of `dtype`
};
void launch_product(const ProductCall& call);
/// gx of rows (outer, reduce) of floats whose products have the gradients gy; `partial` is room for
/// `product_grad_room()` numbers of f64.
std::int64_t product_grad_room(const ProductCall& call);
void launch_product_grad(const ProductCall& call, const void* gy, void* gx);

/// Means, and squares of deviations from them over `left`; floats but f64. Accumulators have 16 bytes.
struct VarianceCall : FoldCall {
  double left = 1;
  bool root = false;  ///< of the variance
  double *variance = nullptr, *mean = nullptr;
  void* out = nullptr;  ///< the variance in `dtype`, unless null
};
void launch_variance(const VarianceCall& call);
/// gx = gy 2 (x - mean) / left, of `dtype`.
void launch_variance_grad(const VarianceCall& call, const double* gy, void* gx);

/// A dense copy of `n` elements; f32 and 16-bit floats become one another, other dtypes stay.
struct CopySlot {
  void* to;
  const void* from;
  std::int64_t n;
  DType to_dtype, from_dtype;
};
using CopySlots = Slots<CopySlot, 96>;
/// Dense rows, each of parts side by side, which lie in rows of their own, `pitch` elements of `bytes` from
/// one to the next.
struct JoinCall {
  static constexpr int most = 32;
  struct Part {
    const void* x;
    std::int64_t pitch, length, first;  ///< elements of a row, and where they begin in the whole one
  };
  std::int64_t rows = 1, columns = 0, bytes = 4;  ///< of the whole; less than 2^31 elements
  int count = 0;
  Part part[most];
  void* y = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_join(const JoinCall& call);
/// Whether a launch of many copies takes one between these dtypes.
bool takes_copy(DType to, DType from);
void launch_copy_each(const CopySlots& slots, cudaStream_t stream);

}  // namespace sherd::cuda
