// What MPI's functions return.
#pragma once

#include <string>
#include <string_view>

namespace sherd::mpi {

/// Whether an MPI function returned success. Not to be dropped.
[[nodiscard]] bool succeeded(int code);
/// "MPI_Isend failed (MPI_ERR_OTHER: known error not in list)": the call, and MPI's own text for the code.
std::string failure(std::string_view call, int code);
/// StateError with that text unless `code` is success.
void check_code(int code, std::string_view call);
/// "MPI_THREAD_FUNNELED", ...
std::string level_name(int level);

}  // namespace sherd::mpi
