// MPI functions that fail on demand, by MPI's profiling interface: this program has functions of their names,
// which the library then calls. mpi_test starts it as several processes:
//
//   mpi_codes NAME
//
// Every rank prints "verdict RANK ok", or what went wrong.
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>

#include "sherd.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"

namespace {

using namespace sherd;
using sherd::test::expect;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t large = 1 << 20;  // its payload follows the frame as a message with a tag of its own
constexpr double in_time = sherd::test::sanitized ? 30 : 2;

/// Which calls of MPI fail on this rank.
struct Failing {
  bool init = false, frames_out = false, messages_out = false, frames_in = false, messages_in = false,
       tests = false;
  int level = -1;  ///< what MPI_Init_thread says it grants, if not -1
} failing;

constexpr const char* own_text = "MPI_ERR_OTHER";

}  // namespace

extern "C" {

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  if (failing.init) return MPI_ERR_OTHER;
  const int code = PMPI_Init_thread(argc, argv, required, provided);
  if (failing.level >= 0) *provided = failing.level;
  return code;
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request* request) {
  if (tag == 0 ? failing.frames_out : failing.messages_out) return MPI_ERR_OTHER;
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request* request) {
  if (tag == 0 ? failing.frames_in : failing.messages_in) return MPI_ERR_OTHER;
  return PMPI_Irecv(data, count, type, from, tag, comm, request);
}

int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) {
  if (failing.tests) return MPI_ERR_OTHER;
  return PMPI_Test(request, flag, status);
}

}  // extern "C"

namespace {

template <class E, class F>
std::string error_of(const F& body, std::initializer_list<std::string> words) {
  const auto begin = Clock::now();
  std::string text = "nothing was thrown";
  try {
    body();
  } catch (const E& error) {
    text = error.what();
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  expect(seconds < in_time, "the error took {} s: {}", seconds, text);
  for (const std::string& word : words)
    expect(text.find(word) != std::string::npos, "'{}' is not in: {}", word, text);
  return text;
}

/// A call that cannot be moved is a fault of its group: all ranks hear of it, in the same words; a new group
/// works.
template <class Fail>
void call_fails(std::int64_t elements, const std::string& function, const Fail& fail) {
  run_ranks(0, [&](World& world) {
    const Group& group = world.group();
    const Tensor x = full({elements}, 1.0);
    error_of<CollectiveError>(
        [&] {  // who is slow hears in the call before
          group.barrier();
          if (world.rank() == 0) fail(true);
          group.all_reduce(x, {}, {.label = "layers.3"});
          group.barrier();
        },
        {function + " failed (", own_text, "all_reduce #1", "'layers.3'", "rank 0"});
    fail(false);
    group.renew();
    group.all_reduce(full({elements}, 1.0));
  });
}

/// Frames fail that belong to no call or to this one: the process says so and leaves, or the group fails.
template <class Fail>
void rank_fails(const std::string& function, const Fail& fail) {
  const auto body = [&] {
    run_ranks(0, [&](World& world) {
      const Group& group = world.group();
      group.barrier();
      if (world.rank() == 0) fail(true);
      for (int call = 0; call < 1000; ++call) group.barrier({.label = "layers.3"});
    });
  };
  try {
    body();
    throw test::RankFailure("nothing was thrown");
  } catch (const CollectiveError& error) {
    error_of<CollectiveError>([&] { throw error; }, {"rank 0", function + " failed (", own_text});
  } catch (const StateError& error) {
    error_of<StateError>([&] { throw error; }, {function + " failed (", own_text, "receive nothing more"});
  }
}

void start_fails(std::initializer_list<std::string> words) {
  error_of<StateError>([] { run_ranks(0, [](World&) {}); }, words);
}

const std::map<std::string, void (*)()> scenarios = {
    {"frames_out", [] { call_fails(3, "MPI_Isend", [](bool on) { failing.frames_out = on; }); }},
    {"messages_out", [] { call_fails(large, "MPI_Isend", [](bool on) { failing.messages_out = on; }); }},
    {"messages_in", [] { call_fails(large, "MPI_Irecv", [](bool on) { failing.messages_in = on; }); }},
    {"frames_in", [] { rank_fails("MPI_Irecv", [](bool on) { failing.frames_in = on; }); }},
    {"tests", [] { rank_fails("MPI_Test", [](bool on) { failing.tests = on; }); }},
    {"init",
     [] {
       failing.init = true;
       start_fails({"MPI_Init_thread failed (code "});
     }},
    {"level",
     [] {
       failing.level = MPI_THREAD_SINGLE;
       start_fails({"MPI grants MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED is needed"});
       PMPI_Finalize();
     }},
};

}  // namespace

int main(int argc, char** argv) {
  const auto scenario = scenarios.find(argc == 2 ? argv[1] : "");
  if (scenario == scenarios.end()) {
    std::puts("usage: mpi_codes NAME, under mpirun");
    return 2;
  }
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  std::string verdict = "ok";
  try {
    scenario->second();
  } catch (const std::exception& error) {
    verdict = error.what();
  }
  std::printf("verdict %s %s\n", rank == nullptr ? "?" : rank, verdict.c_str());
  std::fflush(stdout);
  return verdict == "ok" ? 0 : 1;
}
