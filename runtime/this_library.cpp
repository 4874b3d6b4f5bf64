#include "runtime/this_library.h"

// By itself: a compiler that has already made use of this name in the same unit takes no declaration of it.
extern "C" void* __dso_handle;

namespace sherd {

void* this_library() noexcept { return &__dso_handle; }

}  // namespace sherd
