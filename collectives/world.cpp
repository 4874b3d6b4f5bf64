#include "collectives/world.h"

#include <cxxabi.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <thread>

#include "collectives/group_end.h"
#include "collectives/launch.h"
#include "collectives/processes/run.h"
#include "collectives/threads/transport.h"
#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/float32_precision.h"

namespace sherd {
namespace {

/// The innermost world of a rank's thread.
struct Worlds {
  World* current = nullptr;
  static Worlds& here() { return Context::current().slot<Worlds>(); }
};

/// A scope in which a body runs: `World::current` returns its world.
class InWorld {
 public:
  explicit InWorld(World& world) : outer_(Worlds::here().current) { Worlds::here().current = &world; }
  ~InWorld() { Worlds::here().current = outer_; }
  InWorld(const InWorld&) = delete;
  InWorld& operator=(const InWorld&) = delete;

 private:
  World* outer_;
};

World make_world(std::unique_ptr<Transport> transport, int local_rank, int local_size) {
  std::vector<int> ranks(static_cast<std::size_t>(transport->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return {Group(std::make_shared<GroupEnd>(std::move(transport), "world", std::move(ranks))), local_rank,
          local_size};
}

/// Why a rank ended whose thread ended by `pthread_exit` or cancellation. These unwind the stack with an
/// exception that must be rethrown.
constexpr std::string_view thread_ended =
    "its thread was ended (by pthread_exit or a cancellation); a rank returns from its body or throws";

std::string reason_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "something that is no std::exception";
  }
}

// ---- ranks as threads ----

/// What a rank's thread takes over from the thread that called `run_ranks`.
struct Inheritance {
  RandomKey generator;
  bool grad_enabled;
  TensorOptions default_options;
  int threads;
  Float32MatmulPrecision precision;

  static Inheritance from(Context& parent, int ranks) {
    return {parent.generator().state(), parent.grad_enabled(), parent.default_options(),
            std::max(1, parent.threads() / ranks), float32_matmul_precision()};
  }
  void enter(Context& rank) const {
    rank.set_generator(Generator(generator));
    rank.set_grad_enabled(grad_enabled);
    rank.set_default_options(default_options);
    rank.set_threads(threads);
    set_float32_matmul_precision(precision);
  }
};

using Body = std::function<void(World&)>;

class ThreadRun {
 public:
  explicit ThreadRun(int ranks)
      : crew_(std::make_shared<threads::Crew>(ranks, spins_for(ranks))),
        core_(threads::make_world(crew_)),
        errors_(static_cast<std::size_t>(ranks)) {}

  void operator()(const Body& body) {
    synchronize();  // what this thread gave to its devices is there for the ranks
    const Inheritance inheritance = Inheritance::from(Context::current(), crew_->size());
    std::vector<std::thread> threads;
    threads.reserve(errors_.size());
    try {
      for (int rank = 0; rank < crew_->size(); ++rank)
        threads.emplace_back([&, rank] { run(rank, inheritance, body); });
    } catch (const std::exception& error) {  // the ranks that were started get a CollectiveError and end
      const int started = static_cast<int>(threads.size());
      for (int rank = started; rank < crew_->size(); ++rank)
        note(rank, std::make_exception_ptr(StateError(
                       fmt::format("run_ranks: the system starts only {} of {} ranks' threads ({}); ask for "
                                   "fewer ranks, or raise its limits",
                                   started, crew_->size(), error.what()))));
    }
    for (std::thread& thread : threads) thread.join();
    rethrow();
  }

 private:
  /// Spinning pays only when every rank has a core.
  static int spins_for(int ranks) {
    return ranks <= static_cast<int>(std::thread::hardware_concurrency()) ? 4000 : 20;
  }

  // A forced unwind has no object behind its exception, which the sanitizer of null references reports.
  __attribute__((no_sanitize("null"))) void run(int rank, const Inheritance& inheritance, const Body& body) {
    try {
      inheritance.enter(Context::current());
      Context::current().slot<PeerThreads>().there = crew_->size() > 1;
      World world = make_world(threads::make_end(core_, rank), rank, crew_->size());
      const InWorld in(world);
      body(world);
      threads::post_queued();
    } catch (const abi::__forced_unwind&) {
      note(rank, std::make_exception_ptr(StateError(fmt::format("rank {}: {}", rank, thread_ended))));
      throw;
    } catch (...) {
      return note(rank, std::current_exception());
    }
    crew_->leave(rank, threads::Presence::left, {});
  }
  void note(int rank, std::exception_ptr error) {
    errors_[static_cast<std::size_t>(rank)] = error;
    crew_->leave(rank, threads::Presence::threw, reason_of(error));
  }

  static bool tells_of_others(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const CollectiveError&) {
      return true;
    } catch (...) {
      return false;
    }
  }
  void rethrow() const {
    std::exception_ptr first;
    for (const std::exception_ptr& error : errors_) {
      if (!error) continue;
      if (!tells_of_others(error)) std::rethrow_exception(error);
      if (!first) first = error;
    }
    if (first) std::rethrow_exception(first);
  }

  std::shared_ptr<threads::Crew> crew_;
  std::shared_ptr<threads::Core> core_;
  std::vector<std::exception_ptr> errors_;
};

// ---- ranks as processes ----

std::optional<Launch> this_launch() {
  return read_launch([](const char* name) { return std::getenv(name); });
}

/// Divides the cores of a machine among its processes, unless they are bound to cores of their own or the
/// number of threads was set before.
void share_cores(const Launch& launch) {
  Context& context = Context::current();
  const int cores = static_cast<int>(std::thread::hardware_concurrency());  // those this process may run on
  if (cores == sysconf(_SC_NPROCESSORS_ONLN) && context.threads() == cores)
    context.set_threads(std::max(1, cores / std::max(1, launch.local_size)));
}

void run_as_process(const Launch& launch, const Body& body) {
  share_cores(launch);
  const std::unique_ptr<ProcessRun> run = processes::begin_run(launch);
  try {
    World world = make_world(run->world(), launch.local_rank, launch.local_size);
    const InWorld in(world);
    body(world);
  } catch (const abi::__forced_unwind&) {
    run->leave(Departure::threw, std::string(thread_ended));
    throw;
  } catch (...) {
    run->leave(Departure::threw, reason_of(std::current_exception()));
    throw;
  }
  run->leave(Departure::left, {});
}

/// The world that `init` made, for the rest of the thread's life.
struct InitialWorld {
  std::unique_ptr<ProcessRun> run;
  std::optional<World> world;
  ~InitialWorld() {
    world.reset();
    if (run) run->leave(Departure::left, {});
  }
};

}  // namespace

World::World(Group group, int local_rank, int local_size)
    : group_(std::move(group)),
      mesh_(group_, {group_.size()}, {"world"}),
      local_rank_(local_rank),
      local_size_(local_size) {}

DeviceMesh World::mesh(std::vector<int> sizes, std::vector<std::string> names) const {
  return {group_, std::move(sizes), std::move(names)};
}

World* World::current_or_null() { return Worlds::here().current; }
World& World::current() {
  World* world = current_or_null();
  check<StateError>(world != nullptr,
                    "world: this thread is no rank; call it inside run_ranks, or after init()");
  return *world;
}

void run_ranks(int ranks, const Body& body) {
  check<ValueError>(ranks >= 0, "run_ranks: {} ranks asked for; 1 or more, or 0 for as many as there are",
                    ranks);
  const bool outermost = Worlds::here().current == nullptr;
  const std::optional<Launch> launch = outermost ? this_launch() : std::nullopt;
  if (launch && launch->size > 1) {
    check<ValueError>(
        ranks == 0 || ranks == launch->size,
        "run_ranks: {} ranks asked for, but the launcher started {} processes; start {} or pass 0", ranks,
        launch->size, ranks);
    return run_as_process(*launch, body);
  }
  check<ValueError>(
      ranks <= max_thread_ranks,
      "run_ranks: {} ranks asked for; one process has at most {} as threads; start more processes, "
      "or imagine the ranks in a DryRun",
      ranks, max_thread_ranks);
  ThreadRun(ranks > 0 ? ranks : std::max(1, static_cast<int>(std::thread::hardware_concurrency())))(body);
}

int launched_ranks() {
  const std::optional<Launch> launch = this_launch();
  return launch ? launch->size : 1;
}

World& init() {
  if (World* world = Worlds::here().current) return *world;
  InitialWorld& initial = Context::current().slot<InitialWorld>();
  const std::optional<Launch> launch = this_launch();
  if (launch && launch->size > 1) {
    share_cores(*launch);
    initial.run = processes::begin_run(*launch);
    initial.world = make_world(initial.run->world(), launch->local_rank, launch->local_size);
  } else {
    auto alone = std::make_shared<threads::Crew>(1, 0);
    initial.world = make_world(threads::make_end(threads::make_world(std::move(alone)), 0), 0, 1);
  }
  Worlds::here().current = &*initial.world;
  return *initial.world;
}

}  // namespace sherd
