// The compiler that makes kernels while the program runs.
#pragma once

#include <string>

namespace sherd::cuda {

/// Whether NVRTC is installed; loads it.
bool has_nvrtc();
/// Its version and what it is asked for: machine code of two compilers is not the same.
std::string nvrtc_identity(const std::string& architecture);
/// Machine code of a source for an architecture, as "sm_90a". DeviceError, with the first of what the
/// compiler said.
std::string compile_source(const std::string& source, const std::string& architecture);

}  // namespace sherd::cuda
