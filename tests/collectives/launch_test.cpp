// What launchers say in the environment.
#include <map>
#include <string>

#include "collectives/launch.h"
#include "tests/catch.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;
using sherd::test::message_of;

namespace {

using Environment = std::map<std::string, std::string>;

std::optional<Launch> read(const Environment& environment) {
  return read_launch([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

struct Flavour {
  Launcher launcher;
  std::string rank, size, local_rank, local_size;

  Environment say(const std::string& r, const std::string& s, const std::string& lr,
                  const std::string& ls) const {
    return {{rank, r}, {size, s}, {local_rank, lr}, {local_size, ls}};
  }
};
const std::vector<Flavour> flavours = {
    {Launcher::mpirun, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {Launcher::torchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {Launcher::slurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
};

}  // namespace

TEST_CASE("each launcher's variables are read") {
  for (const Flavour& f : flavours) {
    INFO(f.rank);
    const std::optional<Launch> launch = read(f.say("5", "8", "1", "4"));
    REQUIRE(launch.has_value());
    CHECK(launch->launcher == f.launcher);
    CHECK(launch->rank == 5);
    CHECK(launch->size == 8);
    CHECK(launch->local_rank == 1);
    CHECK(launch->local_size == 4);
  }
}

TEST_CASE("what a launcher leaves out means alone on its machine") {
  for (const Flavour& f : flavours) {
    const std::optional<Launch> launch = read({{f.rank, "1"}, {f.size, "2"}});
    REQUIRE(launch.has_value());
    CHECK(launch->local_rank == 0);
    CHECK(launch->local_size == 1);
  }
}

TEST_CASE("without a rank and a size there is no launcher") {
  CHECK_FALSE(read({}).has_value());
  for (const Flavour& f : flavours) {
    CHECK_FALSE(read({{f.rank, "0"}}).has_value());
    CHECK_FALSE(read({{f.size, "2"}}).has_value());
    CHECK_FALSE(read({{f.local_rank, "0"}, {f.local_size, "2"}}).has_value());
  }
}

TEST_CASE("inside a Slurm allocation the launcher within wins") {
  const Environment slurm = flavours[2].say("0", "1", "0", "1");
  for (const std::size_t inner : {0u, 1u}) {
    Environment both = flavours[inner].say("3", "4", "3", "4");
    both.insert(slurm.begin(), slurm.end());
    CHECK(read(both)->launcher == flavours[inner].launcher);
    CHECK(read(both)->rank == 3);
  }
}

TEST_CASE("Slurm's way of counting tasks is understood, machine by machine") {
  const auto local_sizes = [](const char* per_node, int nodes) {
    std::vector<int> sizes;
    for (int node = 0; node < nodes; ++node) {
      Environment environment = flavours[2].say("1", "9", "0", per_node);
      environment["SLURM_NODEID"] = std::to_string(node);
      sizes.push_back(read(environment)->local_size);
    }
    return sizes;
  };
  CHECK(local_sizes("4", 1) == std::vector{4});
  CHECK(local_sizes("4(x2)", 2) == std::vector{4, 4});
  CHECK(local_sizes("4,3", 2) == std::vector{4, 3});
  CHECK(local_sizes("2(x3),1,5(x2)", 6) == std::vector{2, 2, 2, 1, 5, 5});
  for (const char* bad :
       {"4(", "4(x", "4(x2", "4(2)", "4,", "4x2", "(x2)", "4(x-1)", "4 ,3", "4(x2147483647),4(x2147483647)"})
    CHECK_THROWS_AS(local_sizes(bad, 1), ValueError);
  CHECK_THROWS_AS(local_sizes("4(x2)", 3), ValueError);  // a machine that the list lacks
}

TEST_CASE("values that are no ranks are named with their variable") {
  for (const Flavour& f : flavours) {
    for (const char* bad : {"", "x", "-1", "1x", "3 4", "0x1", "99999999999999999999", "1.5"}) {
      INFO(f.rank << "='" << bad << "'");
      CHECK_THAT(message_of<ValueError>([&] { read(f.say(bad, "8", "0", "1")); }), ContainsSubstring(f.rank));
      CHECK_THAT(message_of<ValueError>([&] { read(f.say("0", bad, "0", "1")); }), ContainsSubstring(f.size));
      CHECK_THAT(message_of<ValueError>([&] { read(f.say("0", "8", bad, "1")); }),
                 ContainsSubstring(f.local_rank));
      CHECK_THAT(message_of<ValueError>([&] { read(f.say("0", "8", "0", bad)); }),
                 ContainsSubstring(f.local_size));
    }
    const std::string text = message_of<ValueError>([&] { read(f.say("8", "8", "0", "1")); });
    CHECK_THAT(text, ContainsSubstring(f.rank + " is 8 and " + f.size + " is 8"));
    CHECK_THROWS_AS(read(f.say("0", "0", "0", "1")), ValueError);
    CHECK_THAT(message_of<ValueError>([&] { read(f.say("0", "8", "4", "4")); }),
               ContainsSubstring(f.local_rank + " is 4 and " + f.local_size + " is 4"));
    CHECK(read(f.say("0", "65536", "0", "1"))->size == 65536);
    for (const char* many : {"65537", "50000000", "2147483647"})
      CHECK_THAT(message_of<ValueError>([&] { read(f.say("0", many, "0", "1")); }),
                 ContainsSubstring(f.size + " is " + many) && ContainsSubstring("at most 65536"));
  }
}

TEST_CASE("where processes meet is read from MASTER_ADDR and MASTER_PORT, or from Slurm") {
  const auto place = [](Environment environment, const Environment& more) {
    environment.insert(more.begin(), more.end());
    return read_meeting_place(*read(environment), [&](const char* name) -> const char* {
      const auto found = environment.find(name);
      return found == environment.end() ? nullptr : found->second.c_str();
    });
  };
  const Environment torchrun = flavours[1].say("1", "4", "1", "4"),
                    slurm = flavours[2].say("1", "4", "1", "4");
  for (const Flavour& f : flavours) {
    const MeetingPlace read = place(f.say("1", "4", "1", "4"), {{"MASTER_ADDR", "node7"},
                                                                {"MASTER_PORT", "29500"},
                                                                {"SLURM_JOB_ID", "5"},
                                                                {"SHERD_JOB_TOKEN", "secret"}});
    CHECK(read.host == "node7");
    CHECK(read.port == 29500);
    CHECK(read.token == "secret");
  }
  const Environment there = {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "run"}};
  CHECK(place(torchrun, there).token == "run");
  CHECK(place(torchrun, there).port == 29500);
  Environment shared = there;  // torchrun's own store listens there
  shared["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  CHECK(place(torchrun, shared).port == 29501);

  Environment within = there;  // Slurm's number of a step that is a shell
  within["SLURM_STEP_ID"] = "4294967290";
  CHECK(place(torchrun, within).token == "run");

  const std::pair<const char*, const char*> lists[] = {
      {"a1", "a1"},           {"a1,b2", "a1"},          {"a[01-04]", "a01"},      {"a[3,7-9],b", "a3"},
      {"a-[2]-ib", "a-2-ib"}, {"a[1-2]-ib,b", "a1-ib"}, {"login,a[1-2]", "login"}};
  for (const auto& [list, first] : lists) {
    const Environment job = {{"SLURM_STEP_NODELIST", list}, {"SLURM_JOB_ID", "123"}, {"SLURM_STEP_ID", "4"}};
    CHECK(place(slurm, job).host == first);
    CHECK(place(slurm, job).port == 20127);
    CHECK(place(slurm, job).token == "123.4");
  }
  const auto error = [&](const Environment& environment, const Environment& more) {
    return message_of<ValueError>([&] { place(environment, more); });
  };
  const Environment two_machines = flavours[1].say("1", "4", "1", "2");
  CHECK_THAT(error(two_machines, {{"MASTER_PORT", "29500"}}), ContainsSubstring("MASTER_ADDR is not set"));
  for (const Flavour& f : {flavours[0], flavours[1]})
    CHECK(place(f.say("1", "4", "1", "4"), {{"MASTER_PORT", "29500"}}).host == "127.0.0.1");
  for (const char* bad : {"", "0", "65536", "port", "-1"})
    CHECK_THAT(error(torchrun, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", bad}}),
               ContainsSubstring("MASTER_PORT"));
  CHECK_THAT(error(torchrun, {{"MASTER_ADDR", "a"}}), ContainsSubstring("MASTER_PORT is not set"));
  for (const std::size_t length : {1, 100, 5000}) {
    const std::string text(length, 'x');
    const std::string said = error(torchrun, {{"MASTER_ADDR", text}, {"MASTER_PORT", text}});
    CHECK_THAT(said, ContainsSubstring("which is no number"));
    CHECK(said.size() < 300);
  }
}

TEST_CASE("what connects processes follows from their launcher, unless SHERD_WIRE says it") {
  for (const Flavour& f : flavours) {
    const Launch launch = *read(f.say("1", "4", "1", "4"));
    for (const bool has_mpi : {false, true}) {
      const auto wire = [&](const char* said) {
        return read_wire(launch, [said](const char*) { return said; }, has_mpi);
      };
      const bool over_mpi = has_mpi && launch.launcher != Launcher::torchrun;
      CHECK(wire(nullptr) == (over_mpi ? WireKind::mpi : WireKind::tcp));
      CHECK(wire("") == wire(nullptr));
      CHECK(wire("tcp") == WireKind::tcp);
      CHECK(wire("mpi") == WireKind::mpi);
      CHECK_THAT(message_of<ValueError>([&] { wire("nccl"); }), ContainsSubstring("SHERD_WIRE is 'nccl'"));
    }
  }
}
