// Where a runtime dtype becomes a C++ type in device code, and where 16-bit floats are widened and rounded.
#pragma once

#include <type_traits>

#include "runtime/element.h"

namespace sherd::cuda {

/// Calls `f.operator()<T>()` with the element type of a floating dtype; others were refused before.
template <class F>
void for_floating(DType dtype, F&& f) {
  with_element<floating_dtypes>(dtype, f);
}

/// The same for any dtype.
template <class F>
void for_any(DType dtype, F&& f) {
  with_element(dtype, f);
}

/// `x` in the type that arithmetic is done in.
template <class T>
__device__ compute_t<T> widen(T x) {
  if constexpr (std::is_same_v<T, Half>) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
  } else {
    return static_cast<compute_t<T>>(x);
  }
}

/// `x` as a `T`, rounded to nearest, ties to even. One instruction for 16-bit floats; the bits are those of
/// the host's conversion, which takes a dozen, but that every NaN becomes the same one.
template <class T, class C>
__device__ T narrow(C x) {
  if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<C, float>) {
    std::uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return BFloat16::from_bits(bits);
  } else if constexpr (std::is_same_v<T, Half> && std::is_same_v<C, float>) {
    std::uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return Half::from_bits(bits);
  } else {
    return static_cast<T>(x);
  }
}

}  // namespace sherd::cuda
