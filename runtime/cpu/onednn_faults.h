// What oneDNN's own code gets wrong and is therefore not asked for, or not as it is: one list, each entry
// with the versions and what is done instead. Whether an entry holds depends on its arguments alone, so tests
// ask on any processor.
#pragma once

#include "runtime/cpu/conv_tiles.h"

namespace sherd::cpu::faults {

/// Which of oneDNN's code may run.
struct Library {
  int major = 0, minor = 0;
  bool amx = false;     ///< it may multiply 16-bit floats in the processor's tiles (AMX)
  bool avx512 = false;  ///< it may compute in registers of 512 bits

  constexpr bool is_before(int other_major, int other_minor) const {
    return major != other_major ? major < other_major : minor < other_minor;
  }
};

/// The one that is loaded, on this processor and below the limit that the environment sets it. Without oneDNN
/// all zero.
Library library_here() noexcept;

/// Convolutions of 16-bit floats in AMX with a stride above the kernel's taps along an axis: the copy of the
/// images is given less memory than it fills, so values are wrong or the process dies. Seen in 2.6; oneDNN
/// says that 3.13 has mended the forward, and nothing of the gradients. Not known to be mended, so it is off
/// in every version; it goes in f32, or through our tiles.
bool writes_beyond(const ops::ConvRule& rule, std::int64_t height, std::int64_t width, DType dtype,
                   const Library& library);

/// The gradient of kernels in 16 bits: 2.6 brings memory that nobody wrote where a column of the kernel sees
/// padding alone, and in some other narrow shapes. Not known to be mended; it goes in f32.
bool brings_unwritten(conv::Way way, DType dtype);

/// Products of 16-bit floats in AMX of more than 32 terms, no multiple of 32: from 3.7 until 3.14 the last
/// terms of a row are read on into the next row and multiplied by zero, so its NaN and infinities spread.
/// Such products go in f32.
bool spreads_nan(std::int64_t terms, DType dtype, const Library& library);

/// Products of floats by AVX-512 keep data in the stack pointer, so that a signal that is handled meanwhile
/// writes its frame over whatever lies there: seen in 2.6, not known to be mended. Signals are held.
bool leaves_stack(const Library& library);

}  // namespace sherd::cpu::faults
