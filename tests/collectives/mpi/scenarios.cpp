// One rank of a scenario that mpi_test starts as several processes:
//
//   mpi_scenarios NAME [SEED [DEVICE]]     tensors of faults lie on DEVICE
//
// Every rank that lives to the end prints "verdict RANK ok", or what went wrong.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "sherd.h"
#include "tests/collectives/fault_memory.h"
#include "tests/collectives/random_faults.h"
#include "tests/late_device.h"
#include "tests/rank_device.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"

namespace {

using namespace sherd;
using sherd::test::expect;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t large = 1 << 20;  // far beyond what a frame takes along

/// The second argument of the program.
std::uint64_t seed = 0;
/// The third.
std::string place = "cpu";  ///< where tensors lie, as of `rank_device`

Tensor filled(std::int64_t n, double value = 0) { return full({n}, value, {f32, test::rank_device(place)}); }

constexpr double in_time = sherd::test::sanitized ? 30 : 2;

/// What `call` threw, and that it came in time.
CollectiveError error_of(const std::function<void()>& call) {
  const auto start = Clock::now();
  try {
    call();
  } catch (const CollectiveError& error) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    expect(seconds < in_time, "the error took {} s: {}", seconds, error.what());
    return error;
  }
  throw test::RankFailure("no CollectiveError was thrown");
}

void expect_blames(const CollectiveError& error, int rank, const std::string& words) {
  expect(std::ranges::find(error.ranks(), rank) != error.ranks().end(), "rank {} is not named: {}", rank,
         error.what());
  expect(std::string(error.what()).find(words) != std::string::npos, "'{}' is not in: {}", words,
         error.what());
}

/// The sums of 1..size arrive everywhere, short and long.
void expect_works(const Group& group) {
  for (const std::int64_t n : {std::int64_t{3}, large}) {
    const Tensor x = filled(n, group.rank() + 1.0);
    group.all_reduce(x);
    const float sum = static_cast<float>(group.size() * (group.size() + 1) / 2);
    const auto values = x.to_vector<float>();
    expect(values.front() == sum && values.back() == sum, "all_reduce of {}: {} and {} instead of {}", n,
           values.front(), values.back(), sum);
  }
}

// ---- everything works ----

void calls(const Group& group) {
  const int size = group.size(), rank = group.rank();
  const auto value = [](int r, std::int64_t i) { return static_cast<double>(100 * r + i % 7); };
  for (const std::int64_t n :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{5}, std::int64_t{999}, large / 8}) {
    std::vector<double> own(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) own[static_cast<std::size_t>(i)] = value(rank, i);
    const Tensor mine = Tensor::from(own, {n});
    const Tensor gathered = zeros({n * size}, {f64, Device::cpu()});
    group.all_gather(gathered, mine);
    const auto all = gathered.to_vector<double>();
    for (int r = 0; r < size; ++r)
      for (std::int64_t i = 0; i < n; ++i)
        expect(all[static_cast<std::size_t>(r * n + i)] == value(r, i), "all_gather of {} at {} of rank {}",
               n, i, r);

    const Tensor slice = zeros({n}, {f64, Device::cpu()});
    group.reduce_scatter(slice, gathered);
    const auto sums = slice.to_vector<double>();
    for (std::int64_t i = 0; i < n; ++i)
      expect(sums[static_cast<std::size_t>(i)] == size * value(rank, i), "reduce_scatter of {} at {}", n, i);

    const Tensor turned = zeros({n * size}, {f64, Device::cpu()});
    group.all_to_all(turned, gathered);
    const auto slices = turned.to_vector<double>();
    for (std::int64_t i = 0; i < n * size; ++i)
      expect(slices[static_cast<std::size_t>(i)] == value(rank, n == 0 ? 0 : i % n), "all_to_all of {} at {}",
             n, i);

    for (int root = 0; root < size; ++root) {
      const Tensor x = rank == root ? Tensor::from(own, {n}) : zeros({n}, {f64, Device::cpu()});
      group.broadcast(x, root);
      const auto got = x.to_vector<double>();
      for (std::int64_t i = 0; i < n; ++i)
        expect(got[static_cast<std::size_t>(i)] == value(root, i), "broadcast of {} at {}", n, i);
    }
    if (size > 1) {  // round the circle
      const int next = (rank + 1) % size, before = (rank + size - 1) % size;
      const Tensor x = zeros({n}, {f64, Device::cpu()});
      Work sending = group.enqueue({CollectiveKind::send, {mine}, {}, {}, next});
      group.recv(x, before);
      sending.wait();
      sending.wait_inputs();
      const auto got = x.to_vector<double>();
      for (std::int64_t i = 0; i < n; ++i)
        expect(got[static_cast<std::size_t>(i)] == value(before, i), "recv of {} at {}", n, i);
    }
  }
  expect_works(group);
  group.barrier();
}

void basics() {
  run_ranks(0, [](World& world) {
    calls(world.group());
    const Group pairs = world.group().strided(world.size() > 1 && world.size() % 2 == 0 ? 2 : 1);
    calls(pairs);
  });
}

/// Bodies one after another are worlds of their own, also after one that failed.
void bodies() {
  for (int body = 0; body < 3; ++body)
    run_ranks(0, [&](World& world) {
      expect_works(world.group());
      for (int channel = 0; channel <= body; ++channel) world.group().barrier({.channel = channel});
    });
  try {
    run_ranks(0, [](World& world) {
      if (world.rank() == 0) throw test::RankFailure("on purpose");
      error_of([&] { world.group().barrier(); });
    });
  } catch (const test::RankFailure& error) {
    if (std::string(error.what()) != "on purpose") throw;
  }
  run_ranks(0, [](World& world) { expect_works(world.group()); });
}

void initial() {
  expect_works(init().group());
  run_ranks(3, [](World& world) { expect_works(world.group()); });  // within a rank: threads
  expect_works(init().group());
}

// ---- faults ----

/// The group's key is not `before`, and the same on all ranks.
void expect_new_key(const Group& group, const GroupKey& before) {
  expect(group.key() != before, "the renewed group has the key that it had");
  const Tensor first = zeros({std::ssize(before)}, {u8});
  const auto* key = reinterpret_cast<const std::uint8_t*>(group.key().data());
  std::copy_n(key, before.size(), first.mutable_data<std::uint8_t>());
  group.broadcast(first, 0);
  expect(std::equal(key, key + before.size(), first.data<std::uint8_t>()), "rank 0 has another key");
}

void mismatches() {
  run_ranks(0, [](World& world) {
    const Group& group = world.group();
    const bool odd = world.rank() == 1;
    const auto differ = [&](const std::string& words, const std::function<void()>& usual,
                            const std::function<void()>& other) {
      // Who is slow may hear of the fault in the call before.
      const CollectiveError error = error_of([&] {
        expect_works(group);
        odd ? other() : usual();
      });
      expect_blames(error, 1, words);
      expect(group.failed(), "the group has not failed");
      error_of([&] { group.barrier(); });
      const GroupKey before = group.key();
      group.renew();
      expect_new_key(group, before);
    };
    const Tensor x = filled(16), y = filled(17), d = zeros({16}, {f64, test::rank_device(place)}),
                 l = filled(large);
    differ("barrier", [&] { group.all_reduce(x); }, [&] { group.barrier(); });
    differ("f64", [&] { group.all_reduce(x); }, [&] { group.all_reduce(d); });
    differ("17", [&] { group.all_reduce(x); }, [&] { group.all_reduce(y); });
    differ("1048576", [&] { group.all_reduce(x); }, [&] { group.all_reduce(l); });
    differ("max", [&] { group.all_reduce(l); }, [&] { group.all_reduce(l, ReduceOp::max()); });
    differ(
        "'b'", [&] { group.all_reduce(l, {}, {.label = "a"}); },
        [&] { group.all_reduce(l, {}, {.label = "b"}); });
    differ("root 1", [&] { group.broadcast(l, 0); }, [&] { group.broadcast(l, 1); });
    expect_works(group);
  });
}

template <class Leave>
void one_goes(const std::string& words, const Leave& leave) {
  run_ranks(0, [&](World& world) {
    const Group& group = world.group();
    const int last = world.size() - 1;
    if (world.rank() == last) {
      group.barrier();
      return leave(group);
    }
    const CollectiveError error = error_of([&] {
      group.barrier();
      const Tensor x = filled(large);
      for (int call = 0; call < 1000; ++call) {
        group.all_reduce(x, {}, {.label = "layers.3"});
        if (call % 8 == 0) x.to_vector<float>();  // the host waits for the device, which waits for peers
      }
    });
    expect_blames(error, last, words);
    expect(std::string(error.what()).find("layers.3") != std::string::npos, "no label: {}", error.what());
    const CollectiveError again = error_of([&] { group.renew(); });
    expect_blames(again, last, "gone");
  });
}

void returns() {
  one_goes("left the body", [](const Group&) {});
  run_ranks(0, [](World& world) { expect_works(world.group()); });
}

void throws() {
  const auto run = [] {
    one_goes("on purpose", [](const Group&) { throw test::RankFailure("on purpose"); });
  };
  try {
    run();
  } catch (const test::RankFailure& error) {
    if (std::string(error.what()) != "on purpose") throw;
  }
  run_ranks(0, [](World& world) { expect_works(world.group()); });
}

void killed_before() {
  one_goes("died", [](const Group&) { std::raise(SIGKILL); });
}

/// The victim's call is known to the others, its data on the way.
void killed_within() {
  one_goes("died", [](const Group& group) {
    const Tensor x = filled(large);
    for (int call = 0; call < 3; ++call) group.all_reduce(x, {}, {.label = "layers.3"});
    Work work = group.enqueue({CollectiveKind::all_reduce, {x}, {x}, {}, -1, 0, "layers.3"});
    std::raise(SIGKILL);
  });
}

void killed_waiting() {
  one_goes("died", [](const Group& group) {
    const Tensor x = filled(large);
    std::thread([] { std::raise(SIGKILL); }).detach();
    for (;;) group.all_reduce(x, {}, {.label = "layers.3"});
  });
}

/// Who waits only for ranks that live hears of a death too.
void killed_elsewhere() {
  run_ranks(0, [](World& world) {
    const Group& group = world.group();
    const int size = world.size();
    if (world.rank() == size - 1) {
      group.barrier();
      std::raise(SIGKILL);
    }
    // Rank 0 waits for rank 1, which waits for the dead one.
    const Tensor x = filled(4);
    const CollectiveError error = error_of([&] {
      group.barrier();
      if (world.rank() == 1)
        group.recv(x, size - 1);
      else
        group.recv(x, 1);
    });
    expect_blames(error, size - 1, "died");
  });
}

/// Frames to the dead rank stay on their way for ever. The others' are taken back behind them, and the others
/// leave.
void killed_unread() {
  run_ranks(0, [](World& world) {
    const Group& group = world.group();
    const int last = world.size() - 1;
    std::vector<int> living(static_cast<std::size_t>(last));
    std::iota(living.begin(), living.end(), 0);
    const Group others = group.subgroup(living);
    const Tensor victim = Tensor::from<std::int64_t>({::getpid()}, {1});
    group.broadcast(victim, last);
    if (world.rank() == last)
      for (;;) ::pause();
    std::vector<Work> works;
    for (int call = 0; call < 64; ++call)
      works.push_back(group.enqueue({CollectiveKind::all_gather,
                                     {filled(large)},
                                     {empty({large * world.size()})},
                                     {},
                                     -1,
                                     call % 8,
                                     "layers.3"}));
    others.barrier();
    if (world.rank() == 0) ::kill(static_cast<pid_t>(victim.to_vector<std::int64_t>()[0]), SIGKILL);
    const CollectiveError error = error_of([&] {
      for (Work& work : works) work.wait();
    });
    expect_blames(error, last, "died");
    for (int call = 0; call < 1000; ++call) others.barrier();
  });
}

/// A child of its own stops the calling process.
template <int seconds>
void stop_for() {
  const pid_t rank = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) {
    ::kill(rank, SIGSTOP);
    ::sleep(seconds);
    ::kill(rank, SIGCONT);
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
}

/// The last rank stops for a while; nobody minds.
void stopped() {
  run_ranks(0, [](World& world) {
    const Group& group = world.group();
    group.barrier();
    if (world.rank() == world.size() - 1) stop_for<3>();
    expect_works(group);
    expect(!group.failed(), "the group failed");
  });
}

/// Calls that nobody waits for reach the peers all the same.
void dropped() {
  run_ranks(0, [](World& world) {
    const Group& group = world.group();
    const Tensor x = filled(large, world.rank() + 1.0);
    Work work = group.enqueue({CollectiveKind::all_reduce, {x}, {x}});
    if (world.rank() == 0) return;
    work.wait();
    expect(x.to_vector<float>().back() == static_cast<float>(world.size() * (world.size() + 1) / 2),
           "wrong sum");
  });
}

/// Children of the ranks end in every way a program can; no peer hears of it.
void forks() {
  run_ranks(0, [](World& world) {
    const Group& group = world.group();
    const Tensor x = full({large}, world.rank() + 1.0);
    for (const bool early : {true, false}) {
      Work work = group.enqueue({CollectiveKind::all_reduce, {x}, {x}});
      const pid_t child = ::fork();
      if (child == 0 && early) std::exit(0);
      if (child == 0) throw std::runtime_error("in the child");
      int status = -1;
      ::waitpid(child, &status, 0);
      expect(status == (early ? 0 : 7 << 8), "the child ended with {}", status);
      work.wait();
      expect_works(group);
    }
  });
}

// ---- ranks that wait for each other ----

struct Groups {
  Group world, all;  ///< of the same ranks
  Group pair;        ///< the rank at fault and the next one; undefined elsewhere
};
using Calls = std::function<void(const Groups&)>;

/// What one rank does other than its peers, so that all wait for each other.
struct Circle {
  std::string name;
  Calls right, wrong;
  std::vector<std::string> words;  ///< of the message
};

void call(const Group& group, int channel) {
  group.barrier({.label = "on " + std::to_string(channel), .channel = channel});
}
/// Calls of the world on these channels.
Calls on(std::vector<int> channels) {
  return [=](const Groups& g) {
    for (const int channel : channels) call(g.world, channel);
  };
}
/// First what `first` does, then the call that all expect.
Calls before_the_call(const std::function<void(const Groups&)>& first) {
  return [=](const Groups& g) {
    first(g);
    call(g.world, 2);
  };
}

std::vector<Circle> circles() {
  const std::string all = "group world.strided(1)[0]", pair = "group world.[", world = "group world,";
  const Calls usual = on({2});
  return {
      {"another channel", usual, on({4}), {"'on 2'", "'on 4'", "channel 4 of " + world}},
      {"channels in another order", on({3, 2}), on({2, 3}), {"'on 2'", "'on 3'"}},
      {"another group", usual, [](const Groups& g) { call(g.all, 2); }, {world, all}},
      {"another sub-group", usual, [](const Groups& g) { call(g.pair, 2); }, {world, pair}},
      {"a skipped call", before_the_call([](const Groups& g) { call(g.all, 1); }), usual, {world, all}},
      {"an extra call", usual, before_the_call([](const Groups& g) { call(g.all, 1); }), {world, all}},
      {"an extra call that is queued",
       usual,
       before_the_call([](const Groups& g) {
         for (int i = 0; i < 20; ++i) (void)g.all.enqueue({.channel = 1, .label = "queued"}, WhenFull::queue);
         call(g.all, 1);
       }),
       {world, all, "'queued'"}},
      {"an extra message",
       usual,
       before_the_call([](const Groups& g) { g.pair.send(zeros({large}), 1, {.label = "extra"}); }),
       {world, "send #0 from rank 0 to rank 1", "'extra'"}},
      {"renewals in another order",
       [](const Groups& g) {
         g.all.renew();
         if (g.pair.defined()) g.pair.renew();
       },
       [](const Groups& g) {
         g.pair.renew();
         g.all.renew();
       },
       {"renew of " + all, "renew of " + pair}},
  };
}

/// What this rank hears when `culprit` does wrong.
std::string heard_of(const World& world, const Circle& circle, int culprit) {
  const Group& group = world.group();
  const Calls& calls = world.rank() == culprit ? circle.wrong : circle.right;
  std::string text =
      error_of([&] {  // who is slow may hear while the groups are made
        calls({group, group.strided(1), group.subgroup({culprit, (culprit + 1) % world.size()})});
      })
          .what();
  std::vector<std::string> words = circle.words;
  words.push_back("wait for each other");
  words.push_back("rank " + std::to_string(culprit) + " of the world is in ");
  for (const std::string& word : words)
    expect(text.find(word) != std::string::npos, "{}: '{}' is not in: {}", circle.name, word, text);
  return text;
}

/// Every rank hears who waits for whom, in the words of threads.
void waits_in_circles() {
  for (const Circle& circle : circles())
    for (const bool last : {false, true})
      run_ranks(0, [&](World& world) {
        const int culprit = last ? world.size() - 1 : 0;
        world.group().barrier();
        const std::string text = heard_of(world, circle, culprit);
        if (world.rank() != culprit) return;
        std::string of_threads;
        run_ranks(world.size(), [&](World& threads) {
          const std::string heard = heard_of(threads, circle, culprit);
          if (threads.rank() == culprit) of_threads = heard;
        });
        // Who is in it a rank may hear from one that has left because of it, before it hears of it itself.
        const std::size_t begin = of_threads.find("ranks wait for each other"),
                          end = of_threads.find("; every rank");
        expect(text.find(of_threads.substr(begin, end - begin)) != std::string::npos,
               "threads hear: {}, processes: {}", of_threads, text);
      });
}

/// Those that wait for a rank that left because of a fault hear whose fault it was.
void fault_elsewhere() {
  run_ranks(0, [](World& world) {
    const int last = world.size() - 1;
    std::vector<int> others;
    for (int rank = 1; rank <= last; ++rank) others.push_back(rank);
    const Group pair = world.group().subgroup({0, 1}), rest = world.group().subgroup(others);
    const std::string pair_name = "group world.[0,1]";
    world.group().barrier();
    if (world.rank() == 0) return;
    const Group& waits = world.rank() == 1 ? pair : rest;
    const std::string text = error_of([&] { waits.barrier({.label = waits.name()}); }).what();
    for (const std::string& words : {std::string("rank 0 left the body"), pair_name})
      expect(text.find(words) != std::string::npos, "'{}' is not in: {}", words, text);
    if (world.rank() > 1)
      expect(text.find("rank 0 left the body after it heard of a fault of ranks 0 and 1 of the world") !=
                 std::string::npos,
             "whose fault it was is not in: {}", text);
  });
}

/// Every rank waits for the next one in a call of its own, and the last one computes, or stops, for longer
/// than it takes to look for circles: all are waited for.
void slow_chain() {
  run_ranks(0, [](World& world) {
    const int last = world.size() - 1;
    const Tensor x = full({3}, 7.0);
    for (const bool stops : {false, true}) {
      world.group().barrier();
      if (world.rank() == last && stops) stop_for<3>();
      if (world.rank() == last && !stops) {
        const auto end = Clock::now() + std::chrono::seconds(1);
        while (Clock::now() < end) full({1000}, 1.0);
      }
      if (world.rank() < last) world.group().recv(x, world.rank() + 1);
      if (world.rank() > 0) world.group().send(x, world.rank() - 1);
      expect_works(world.group());
    }
  });
}

/// Random programs, in each of which one rank does one thing wrong, or dies.
void random_faults(std::uint64_t first, std::uint64_t count, const test::Fate& fate = {}) {
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    std::string complaint;
    try {
      run_ranks(0, [&](World& world) { test::random_fault(world, seed, complaint, fate); });
    } catch (const CollectiveError&) {
    } catch (const test::Boom&) {
    }
    expect(complaint.empty(), "{}", complaint);
  }
}

void fault_memory(int faults, std::int64_t elements) {
  if (seed > 0) faults = static_cast<int>(seed);
  run_ranks(0, [=](World& world) { test::faults_leave_nothing(world, faults, elements); });
}

void die() { std::raise(SIGKILL); }

const std::map<std::string, void (*)()> scenarios = {
    {"basics", basics},
    {"bodies", bodies},
    {"dropped", dropped},
    {"fault_elsewhere", fault_elsewhere},
    {"fault_memory", [] { fault_memory(300, large / 4); }},
    {"fault_memory_long", [] { fault_memory(10000, large / 4); }},
    {"fault_memory_small", [] { fault_memory(1000, large / 256); }},
    {"forks", forks},
    {"initial", initial},
    {"killed_before", killed_before},
    {"killed_elsewhere", killed_elsewhere},
    {"killed_waiting", killed_waiting},
    {"killed_unread", killed_unread},
    {"killed_within", killed_within},
    {"mismatches", mismatches},
    {"random_death", [] { random_faults(seed, 1, {.die = die, .device = place}); }},
    {"random_faults", [] { random_faults(seed, 60, {.device = place}); }},
    {"random_faults_stopped",
     [] { random_faults(seed, 5, {.stop = stop_for<3>, .seconds = 3, .device = place}); }},
    {"random_faults_stopped_long",
     [] { random_faults(seed, 4, {.stop = stop_for<20>, .seconds = 20, .device = place}); }},
    {"returns", returns},
    {"slow_chain", slow_chain},
    {"stopped", stopped},
    {"throws", throws},
    {"waits_in_circles", waits_in_circles},
};

}  // namespace

int main(int argc, char** argv) {
  const auto scenario = scenarios.find(argc >= 2 ? argv[1] : "");
  if (scenario == scenarios.end()) {
    std::puts("usage: mpi_scenarios NAME [SEED [DEVICE]], under mpirun");
    return 2;
  }
  if (argc > 2) seed = std::strtoull(argv[2], nullptr, 10);
  test::late_network_device();  // its name is known from now on
  if (argc > 3) place = argv[3];
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (rank == nullptr) rank = std::getenv("RANK");
  std::string verdict = "ok";
  try {
    scenario->second();
  } catch (const std::exception& error) {
    verdict = error.what();
    if (verdict == "in the child") return 7;
  }
  std::printf("verdict %s %s\n", rank == nullptr ? "?" : rank, verdict.c_str());
  std::fflush(stdout);
  return verdict == "ok" ? 0 : 1;
}
