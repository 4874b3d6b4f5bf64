#include "collectives/launch.h"

#include <charconv>
#include <string_view>

#include "runtime/shown.h"

namespace sherd {

ProcessRun::~ProcessRun() = default;

namespace {

constexpr const char* port_name = "MASTER_PORT";

using Variable = std::function<const char*(const char*)>;

/// Of ranks, for each of which every process keeps a little: far above any machine, far below its memory.
constexpr int most_ranks = 1 << 16;

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
  const std::string cut = shown(text);
  if (std::string_view(name) == port_name)
    fail<ValueError>("launch: MASTER_PORT is '{}', which is no number; set it to a free port from 1 to 65534",
                     cut);
  fail<ValueError>("launch: {} is '{}', which is no rank or count; start the program through its launcher",
                   name, cut);
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
    if (!value || !repeats || *repeats > most_ranks - nodes) refuse(name, text);
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
    check<ValueError>(launch.size <= most_ranks,
                      "launch: {} is {}, at most {} ranks are supported; start fewer", names.size,
                      launch.size, most_ranks);
    check<ValueError>(launch.rank < launch.size, "launch: {} is {} and {} is {}; a rank is below the size",
                      names.rank, launch.rank, names.size, launch.size);
    check<ValueError>(variable(names.local_rank) == nullptr || variable(names.local_size) == nullptr ||
                          launch.local_rank < launch.local_size,
                      "launch: {} is {} and {} is {}; a rank is below the size", names.local_rank,
                      launch.local_rank, names.local_size, launch.local_size);
    return launch;
  }
  return {};
}

namespace {

/// The first name of a list like Slurm's "node[01-04,07],login".
std::string first_node(std::string_view list) {
  const std::size_t bracket = list.find('['), comma = list.find(',');
  if (bracket == std::string_view::npos || comma < bracket) return std::string(list.substr(0, comma));
  const std::size_t close = list.find(']', bracket), first = bracket + 1;
  const std::string_view number = list.substr(first, list.find_first_of("-,]", first) - first);
  std::string_view rest = close == std::string_view::npos ? std::string_view() : list.substr(close + 1);
  return fmt::format("{}{}{}", list.substr(0, bracket), number, rest.substr(0, rest.find(',')));
}

std::string text_or(const Variable& variable, std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (const char* text = variable(name); text != nullptr && *text != '\0') return text;
  return {};
}

}  // namespace

MeetingPlace read_meeting_place(const Launch& launch, const Variable& variable) {
  MeetingPlace place;
  place.host = text_or(variable, {"MASTER_ADDR"});
  place.port = number(variable, port_name, 0);
  const char *const job = "SLURM_JOB_ID", *const step = "SLURM_STEP_ID";
  if (launch.launcher == Launcher::slurm) {
    if (place.host.empty())
      place.host = first_node(text_or(variable, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}));
    // Steps of one job may run side by side.
    if (place.port == 0)
      place.port = 20000 + (number(variable, job, 0) % 12000 + number(variable, step, 0) % 12000) % 12000;
  }
  // On one machine it is loopback, whatever is said.
  if (place.host.empty() && launch.local_size == launch.size) place.host = "127.0.0.1";
  check<ValueError>(!place.host.empty(),
                    "launch: MASTER_ADDR is not set; it names the machine of rank 0, where {} processes meet",
                    launch.size);
  check<ValueError>(
      launch.launcher == Launcher::slurm || variable(port_name) != nullptr,
      "launch: MASTER_PORT is not set; set it to a port of {} from 1 to 65534 that is free, on which "
      "{} processes meet",
      shown(place.host), launch.size);
  if (text_or(variable, {"TORCHELASTIC_USE_AGENT_STORE"}) == "True" && place.port != 0) ++place.port;
  check<ValueError>(place.port > 0 && place.port < 65536,
                    "launch: MASTER_PORT gives port {}; set it to a port of {} from 1 to 65534 that is free",
                    place.port, shown(place.host));
  place.token = text_or(variable, {"SHERD_JOB_TOKEN", "TORCHELASTIC_RUN_ID"});
  if (place.token.empty())
    place.token = fmt::format("{}.{}", text_or(variable, {job}), text_or(variable, {step}));
  return place;
}

WireKind read_wire(const Launch& launch, const Variable& variable, bool has_mpi) {
  const std::string said = text_or(variable, {"SHERD_WIRE"});
  if (said == "mpi") return WireKind::mpi;
  if (said == "tcp") return WireKind::tcp;
  check<ValueError>(said.empty(), "launch: SHERD_WIRE is '{}'; it is mpi or tcp", shown(said));
  return launch.launcher == Launcher::torchrun || !has_mpi ? WireKind::tcp : WireKind::mpi;
}

}  // namespace sherd
