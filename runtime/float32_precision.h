// How precisely products of f32 are made on devices that have a faster way.
#pragma once

#include <cstdint>

#include "runtime/export.h"

namespace sherd {

/// `highest`: factors are the f32 that they are. `high`: a GPU may round them to TF32, which has the range of
/// f32 and 10 bits after the leading one, where its tensor cores are faster for it; sums stay in f32.
enum class Float32MatmulPrecision : std::uint8_t { highest, high };

/// The calling thread's, `highest` until it is set. It counts for products of matrices, linear and recurrent
/// layers and convolutions of f32 on a GPU, when they run: a gradient's products follow what is set when the
/// backward runs, `recompute` and a captured step what was set when they ran first. Other dtypes, other ops
/// and the CPU do not look at it. Each setting repeats to the bit.
SHERD_API Float32MatmulPrecision float32_matmul_precision();
/// Sets it for the calling thread and for ranks that it starts.
SHERD_API void set_float32_matmul_precision(Float32MatmulPrecision precision);

namespace detail {
/// Where the calling thread keeps it, for code that sets it op by op.
SHERD_API Float32MatmulPrecision& float32_matmul_precision_here();
}  // namespace detail

/// A scope with another precision: `const Float32MatmulPrecisionScope
/// scope(Float32MatmulPrecision::high);`. Must end on its thread.
class SHERD_API Float32MatmulPrecisionScope {
 public:
  [[nodiscard]] explicit Float32MatmulPrecisionScope(Float32MatmulPrecision precision)
      : before_(float32_matmul_precision()) {
    set_float32_matmul_precision(precision);
  }
  ~Float32MatmulPrecisionScope() { set_float32_matmul_precision(before_); }
  Float32MatmulPrecisionScope(const Float32MatmulPrecisionScope&) = delete;
  Float32MatmulPrecisionScope& operator=(const Float32MatmulPrecisionScope&) = delete;

 private:
  Float32MatmulPrecision before_;
};

}  // namespace sherd
