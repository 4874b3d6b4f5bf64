// What a thread that spins does between two looks at what it waits for.
#pragma once

namespace sherd {

/// Pauses for some tens of cycles, in which the other hardware thread of the core runs faster.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // `yield` does nothing on most of these processors
#endif
}

}  // namespace sherd
