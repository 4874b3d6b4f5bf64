#include "collectives/mpi/codes.h"

#include <fmt/format.h>
#include <mpi.h>

#include <array>

#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::mpi {

bool succeeded(int code) { return code == MPI_SUCCESS; }

std::string failure(std::string_view call, int code) {
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0, started = 0;
  // Before MPI has started it may not be asked for texts: then the number alone.
  if (succeeded(MPI_Initialized(&started)) && started != 0 &&
      !succeeded(MPI_Error_string(code, text.data(), &length)))
    length = 0;
  return fmt::format("{} failed ({})", call,
                     length > 0 ? one_line(std::string(text.data())) : fmt::format("code {}", code));
}

void check_code(int code, std::string_view call) {
  if (!succeeded(code)) fail<StateError>("mpi: {}", failure(call, code));
}

std::string level_name(int level) {
  for (const auto& [known, name] : {std::pair{MPI_THREAD_SINGLE, "MPI_THREAD_SINGLE"},
                                    {MPI_THREAD_FUNNELED, "MPI_THREAD_FUNNELED"},
                                    {MPI_THREAD_SERIALIZED, "MPI_THREAD_SERIALIZED"},
                                    {MPI_THREAD_MULTIPLE, "MPI_THREAD_MULTIPLE"}})
    if (level == known) return name;
  return fmt::format("level {}", level);
}

}  // namespace sherd::mpi
