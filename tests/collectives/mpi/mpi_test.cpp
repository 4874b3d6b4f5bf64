// Ranks as processes: starts every scenario of mpi_scenarios and reads the verdicts of the ranks that live to
// the end. SHERD_STARTER, if it is set, starts them; else `sherd launch` does, over MPI.
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/rank_device.h"
#include "tests/sanitizer.h"
#include "tests/temp_directory.h"

// What a build without MPI has not.
#ifndef SHERD_TOOL
#define SHERD_TOOL ""
#define SHERD_CODES ""
#define SHERD_MEMORY ""
#endif

namespace {

struct Outcome {
  int status = 0;
  std::set<std::string> verdicts;
  std::string output;
};

/// One that hangs is ended and so fails by its status. OpenMPI's plugins leak and are unloaded before the
/// leak checker looks: no suppression can name their frames.
Outcome launch(int ranks, const std::string& scenario, const std::string& program = SHERD_SCENARIOS) {
  const char* const starter = std::getenv("SHERD_STARTER");
  const std::string command = std::string("LSAN_OPTIONS=detect_leaks=0 timeout -k 5 ") +
                              (sherd::test::sanitized ? "300 " : "100 ") +
                              (starter != nullptr ? starter : SHERD_TOOL " launch") + " -n " +
                              std::to_string(ranks) + " " + program + " " + scenario + " 2>&1";
  Outcome outcome;
  FILE* const pipe = ::popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  for (char buffer[4096]; const auto got = std::fread(buffer, 1, sizeof buffer, pipe);)
    outcome.output.append(buffer, got);
  const int status = ::pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  for (std::size_t at = 0; (at = outcome.output.find("verdict ", at)) != std::string::npos;) {
    const std::size_t end = outcome.output.find('\n', at);
    outcome.verdicts.insert(outcome.output.substr(at, end - at));
    at = end;
  }
  return outcome;
}

std::set<std::string> ok_from(int ranks) {
  std::set<std::string> verdicts;
  for (int rank = 0; rank < ranks; ++rank) verdicts.insert("verdict " + std::to_string(rank) + " ok");
  return verdicts;
}

void expect_all_well(int ranks, const std::string& scenario, const std::string& program = SHERD_SCENARIOS) {
  const Outcome outcome = launch(ranks, scenario, program);
  INFO(scenario << " on " << ranks << " processes:\n" << outcome.output);
  CHECK(outcome.verdicts == ok_from(ranks));
  CHECK(outcome.status == 0);
}

void expect_survivors_report(int ranks, const std::string& scenario) {
  const Outcome outcome = launch(ranks, scenario);
  INFO(scenario << " on " << ranks << " processes:\n" << outcome.output);
  CHECK(outcome.verdicts == ok_from(ranks - 1));
  CHECK(outcome.status == 128 + SIGKILL);
}

/// Whichever rank was killed.
void expect_others_report(int ranks, const std::string& scenario) {
  const Outcome outcome = launch(ranks, scenario);
  INFO(scenario << " on " << ranks << " processes:\n" << outcome.output);
  CHECK(outcome.verdicts.size() == static_cast<std::size_t>(ranks - 1));
  for (const std::string& verdict : outcome.verdicts) CHECK(verdict.ends_with(" ok"));
  CHECK(outcome.status == 128 + SIGKILL);
}

/// The launcher ends a job in which a rank ends before all have met, so one verdict is enough.
void expect_refused_start(int ranks, const std::string& scenario, const std::string& program = SHERD_CODES) {
  const Outcome outcome = launch(ranks, scenario, program);
  INFO(scenario << " on " << ranks << " processes:\n" << outcome.output);
  CHECK_FALSE(outcome.verdicts.empty());
  for (const std::string& verdict : outcome.verdicts) CHECK(verdict.ends_with(" ok"));
}

}  // namespace

TEST_CASE("processes make every kind of call, on worlds of any size") {
  for (int ranks : {1, 2, 3, 4, 5, 8}) expect_all_well(ranks, "basics");
}

TEST_CASE("bodies run one after another, each in a world of its own, also after a failed one") {
  for (int ranks : {2, 3}) expect_all_well(ranks, "bodies");
}

TEST_CASE("init gives a process its world, in which run_ranks starts threads") {
  for (int ranks : {1, 2, 4}) expect_all_well(ranks, "initial");
}

TEST_CASE("calls that nobody waits for reach the peers") {
  for (int ranks : {2, 3}) expect_all_well(ranks, "dropped");
}

TEST_CASE("two different calls fail on every process, and the group works again once renewed") {
  for (int ranks : {2, 3, 4}) expect_all_well(ranks, "mismatches");
}

TEST_CASE("a process that leaves its body or throws is named by the others, and a new body works") {
  for (int ranks : {2, 4}) {
    expect_all_well(ranks, "returns");
    expect_all_well(ranks, "throws");
  }
}

TEST_CASE("survivors of a killed process name it within two seconds") {
  for (const char* scenario : {"killed_before", "killed_within", "killed_waiting"})
    for (int ranks : {2, 3}) expect_survivors_report(ranks, scenario);
  expect_survivors_report(4, "killed_elsewhere");
  expect_survivors_report(3, "killed_unread");
}

/// The word behind `before` in what a program printed.
std::int64_t number_behind(const std::string& before, const std::string& output) {
  const std::size_t at = output.find(before);
  return at == std::string::npos ? -1 : std::stoll(output.substr(at + before.size()));
}

TEST_CASE("whatever a rank is at in a meeting when it is killed, the others name it within two seconds",
          "[tcp]") {
  constexpr int ranks = 3, step = sherd::test::sanitized ? 11 : 1;
  constexpr std::int64_t in_time = (sherd::test::sanitized ? 30 : 2) * std::int64_t{1'000'000'000};
  for (int victim = 0; victim < ranks; ++victim) {
    int deaths = 0;
    for (int call = 1;; call += step) {
      const sherd::test::TempDirectory started;
      const Outcome outcome =
          launch(ranks, std::to_string(victim) + " " + std::to_string(call) + " " + started.path().string(),
                 SHERD_MEETING_KILLS);
      INFO("rank " << victim << " at its call " << call << ":\n" << outcome.output);
      const std::int64_t killed = number_behind("killed ", outcome.output);
      if (killed < 0) {  // it made fewer
        CHECK(outcome.status == 0);
        break;
      }
      ++deaths;
      REQUIRE(outcome.verdicts.size() == ranks - 1);
      for (const std::string& verdict : outcome.verdicts) {
        const std::int64_t heard = number_behind(verdict.substr(0, std::strlen("verdict 0 ")), verdict);
        CHECK(heard - killed < in_time);
        CHECK_THAT(verdict, Catch::Matchers::ContainsSubstring("rank " + std::to_string(victim) + " "));
      }
    }
    CHECK(deaths > 20 / step);
  }
}

TEST_CASE("a process that is stopped for a while is only slow") {
  for (int ranks : {2, 3}) expect_all_well(ranks, "stopped");
}

TEST_CASE("processes that wait for each other in a circle hear of it within two seconds, as threads do") {
  for (int ranks : {2, 3, 4}) expect_all_well(ranks, "waits_in_circles");
}

TEST_CASE("a random fault in a random program: every process hears whose it is") {
  for (int ranks : {2, 3, 4}) expect_all_well(ranks, "random_faults");
}

TEST_CASE("a random fault beside a process that is stopped: every process hears whose it is") {
  for (int ranks : {2, 4}) expect_all_well(ranks, "random_faults_stopped 100");
}

TEST_CASE("a process that is killed at a random moment is named by all others") {
  for (int seed = 0; seed < 6; ++seed)
    expect_others_report(2 + seed % 4, "random_death " + std::to_string(seed));
}

TEST_CASE("faults and renewals leave nothing in a process, whatever their number") {
  for (int ranks : {2, 3}) {
    expect_all_well(ranks, "fault_memory");
    expect_all_well(ranks, "fault_memory_small");
  }
}

TEST_CASE("ten thousand faults of large calls leave nothing in a process", "[.soak]") {
  expect_all_well(2, "fault_memory_long");
}

TEST_CASE("thousands of random faults among processes", "[.soak]") {
  for (int round = 0; round < 10; ++round)
    for (int ranks = 2; ranks <= 8; ++ranks)
      expect_all_well(ranks, "random_faults " + std::to_string(1000 + 60 * (7 * round + ranks)));
  for (int seed = 0; seed < 200; ++seed)
    expect_others_report(2 + seed % 7, "random_death " + std::to_string(100 + seed));
  for (int ranks = 2; ranks <= 8; ++ranks)
    expect_all_well(ranks, "random_faults_stopped_long " + std::to_string(4 * ranks));
}

TEST_CASE("who waits for a process that left because of a fault hears whose it was") {
  for (int ranks : {3, 4}) expect_all_well(ranks, "fault_elsewhere");
}

TEST_CASE("a chain of processes that wait for one that is slow waits for it") {
  for (int ranks : {2, 4}) expect_all_well(ranks, "slow_chain");
}

TEST_CASE("an MPI function that fails is named with MPI's own text", "[mpi]") {
  for (const char* scenario : {"frames_out", "messages_out", "messages_in", "frames_in", "tests"})
    for (int ranks : {2, 3}) expect_all_well(ranks, scenario, SHERD_CODES);
}

TEST_CASE("memory that MPI may use is neither freed nor used again, whatever MPI_Test says of its request",
          "[mpi]") {
  for (const char* scenario : {"frames_out", "frames_in", "messages_out", "messages_in"})
    for (int ranks : {2, 3}) expect_all_well(ranks, scenario, SHERD_MEMORY);
}

TEST_CASE("a process that cannot start leaves MPI the memory that it was lent", "[mpi]") {
  expect_refused_start(2, "start", SHERD_MEMORY);
}

TEST_CASE("groups that come and go leave nothing in a process", "[mpi]") {
  for (int ranks : {2, 3}) expect_all_well(ranks, "dropped_groups", SHERD_MEMORY);
}

TEST_CASE("an MPI that does not start, or grants too few threads, is refused by name", "[mpi]") {
  for (const char* scenario : {"init", "level"}) expect_refused_start(2, scenario);
}

TEST_CASE("a child of a process ends without a word to the peers") {
  for (int ranks : {2, 3}) expect_all_well(ranks, "forks");
}

/// Faults among `ranks` processes whose tensors lie on devices of that name.
void expect_faults_heard(const std::string& device, const std::vector<int>& worlds) {
  const auto on_devices = [&](const std::string& scenario, int seed = 0) {
    return scenario + ' ' + std::to_string(seed) + ' ' + device;
  };
  for (const char* scenario : {"bodies", "mismatches", "returns", "throws", "dropped", "stopped"})
    for (const int ranks : worlds) expect_all_well(ranks, on_devices(scenario));
  for (const char* scenario : {"killed_before", "killed_within", "killed_waiting"})
    for (const int ranks : worlds) expect_survivors_report(ranks, on_devices(scenario));
  for (const int ranks : worlds) expect_all_well(ranks, on_devices("random_faults"));
  for (int seed = 0; seed < 4; ++seed)
    expect_others_report(worlds[static_cast<std::size_t>(seed) % worlds.size()],
                         on_devices("random_death", seed));
}

TEST_CASE("faults among processes whose devices wait for each other are heard of as among hosts",
          "[devices]") {
  expect_faults_heard("late-network:0", {2, 3});
  expect_all_well(4, "random_faults 0 late-network:0");
}

TEST_CASE("faults among processes with a GPU each are heard of as among hosts", "[.gpus]") {
  const std::string not_here = sherd::test::why_not_here("cuda:each", 2);
  if (sherd::test::skip_if(!not_here.empty(), not_here)) return;
  expect_faults_heard("cuda:each", {2});
}
