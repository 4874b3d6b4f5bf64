// Whether this processor can run what the library was built for.
#pragma once

#include "runtime/export.h"

namespace sherd {

/// Throws NotImplementedError, which names the missing instructions, when the processor lacks something that
/// the library was built for (the Meson option `cpu_arch`). The first `Context` calls it; call it at the
/// start of `main` to fail there.
SHERD_API void check_processor();

namespace detail {

/// One instruction set: its name as GCC spells it, and whether this processor has it.
struct ProcessorFeature {
  const char* name;
  bool present;
};

/// The check itself, over any list.
SHERD_API void check_processor(const ProcessorFeature* begin, const ProcessorFeature* end);

}  // namespace detail
}  // namespace sherd
