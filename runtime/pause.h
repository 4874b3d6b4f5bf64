// What a thread does between two looks while it spins.
#pragma once

namespace sherd {

/// Lets the other thread of the core run, for some tens of cycles.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace sherd
