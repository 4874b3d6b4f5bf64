#include "collectives/processes.h"

#include <charconv>
#include <string_view>

#ifdef SHERD_MPI
#include "collectives/mpi/run.h"
#endif

namespace sherd {

ProcessRun::~ProcessRun() = default;

namespace {

using Variable = std::function<const char*(const char*)>;

struct Names {
  Launcher launcher;
  const char *rank, *size, *local_rank, *local_size;
};
constexpr Names known[] = {
    {Launcher::mpirun, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {Launcher::torchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {Launcher::slurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
};

[[noreturn]] void refuse(const char* name, const char* text) {
  fail<ValueError>("launch: {} is '{}', which is no rank or count; start the program through its launcher",
                   name, text);
}

/// Takes a number off `text`.
std::optional<int> take_number(std::string_view& text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return {};
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}
bool take(std::string_view& text, std::string_view expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(expected.size());
  return true;
}

int number(const Variable& variable, const char* name, int otherwise) {
  const char* text = variable(name);
  if (text == nullptr) return otherwise;
  std::string_view rest = text;
  const std::optional<int> value = take_number(rest);
  if (!value || !rest.empty()) refuse(name, text);
  return *value;
}

/// The entry of machine `node` in a list like Slurm's "4(x2),1": 4 tasks on each of two machines, then 1.
int number_of_node(const Variable& variable, const char* name, int node, int otherwise) {
  const char* text = variable(name);
  if (text == nullptr) return otherwise;
  std::string_view rest = text;
  std::optional<int> found;
  int nodes = 0;
  do {
    const std::optional<int> value = take_number(rest);
    std::optional<int> repeats = 1;
    if (take(rest, "(x")) {
      repeats = take_number(rest);
      if (!take(rest, ")")) refuse(name, text);
    }
    if (!value || !repeats) refuse(name, text);
    nodes += *repeats;
    if (!found && node < nodes) found = value;
  } while (take(rest, ","));
  if (!rest.empty() || !found) refuse(name, text);
  return *found;
}

}  // namespace

std::optional<Launch> read_launch(const Variable& variable) {
  for (const Names& names : known) {
    if (variable(names.rank) == nullptr || variable(names.size) == nullptr) continue;
    const int node = names.launcher == Launcher::slurm ? number(variable, "SLURM_NODEID", 0) : 0;
    const Launch launch{names.launcher, number(variable, names.rank, 0), number(variable, names.size, 1),
                        number(variable, names.local_rank, 0),
                        number_of_node(variable, names.local_size, node, 1)};
    check<ValueError>(launch.rank < launch.size, "launch: {} is {} and {} is {}; a rank is below the size",
                      names.rank, launch.rank, names.size, launch.size);
    return launch;
  }
  return {};
}

std::unique_ptr<ProcessRun> begin_process_run(const Launch& launch) {
#ifdef SHERD_MPI
  return mpi::begin_run(launch);
#else
  fail<NotImplementedError>(
      "launch: {} processes were started, but this build has no MPI to connect them; build with "
      "-Dmpi=enabled, or run the ranks as threads of one process",
      launch.size);
#endif
}

}  // namespace sherd
