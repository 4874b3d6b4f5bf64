// What the C++ runtime calls the library that this code is linked into.
#pragma once

namespace sherd {

/// Given with a function that is to be called at an end, so that it is not called once the library is
/// unloaded.
void* this_library() noexcept;

}  // namespace sherd
