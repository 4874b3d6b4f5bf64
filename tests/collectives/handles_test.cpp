// Handles on groups, wherever and whenever the last of them goes.
#include <pthread.h>
#include <sherd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "collectives/transport_home.h"
#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;
using test::expect;
using test::message_of;
using Kind = CollectiveKind;

namespace {

/// Anything that owns a group.
using Owner = std::shared_ptr<void>;
template <class T>
Owner owner_of(T value) {
  return std::make_shared<T>(std::move(value));
}

/// Threads that drop what they are given, in no order.
class Droppers {
 public:
  explicit Droppers(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this, i] { run(static_cast<unsigned>(i)); });
  }
  ~Droppers() {
    over_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  Droppers(const Droppers&) = delete;
  Droppers& operator=(const Droppers&) = delete;
  void give(Owner owner) {
    const std::scoped_lock lock(mutex_);
    given_.push_back(std::move(owner));
  }

 private:
  void run(unsigned seed) {
    std::mt19937 random(seed);
    for (bool last = false; !last;) {
      last = over_;
      Owner owner;
      {
        const std::scoped_lock lock(mutex_);
        if (!given_.empty()) {
          std::swap(given_[random() % given_.size()], given_.back());
          owner = std::move(given_.back());
          given_.pop_back();
          last = false;
        }
      }
      if (!owner) std::this_thread::yield();
    }
  }

  std::atomic<bool> over_{false};
  std::mutex mutex_;
  std::deque<Owner> given_;
  std::vector<std::thread> threads_;
};

Tensor loss_of(const Group& group) {
  Tensor weight = full({4}, 1.0);
  weight.requires_grad_();
  return sum(mul(gather_params(group, weight), gather_values(group, weight)));
}

Work under_way(const Group& group, std::int64_t n) {
  const Tensor x = full({n}, 1.0);
  return group.enqueue({.kind = Kind::all_reduce, .inputs = {x}, .outputs = {x}, .channel = 3});
}

/// Owners of groups cut from `world`, which keep no other handle alive.
std::vector<Owner> owners(const Group& world, int round) {
  std::vector<Owner> all;
  all.push_back(owner_of(world.blocks(world.size())));
  all.push_back(owner_of(DeviceMesh(world, {world.size(), 1}, {"a", "b"})));
  all.push_back(owner_of(loss_of(world.blocks(world.size()))));
  all.push_back(owner_of(under_way(world.strided(1), round % 2 == 0 ? 3 : 5000)));
  return all;
}

void expect_works(const Group& group) {
  const Tensor x = full({700}, group.rank() + 1.0);
  group.all_reduce(x);
  const int size = group.size();
  expect(x.to_vector<float>()[699] == static_cast<float>(size * (size + 1) / 2), "the sum is wrong");
}

/// False in a child of a rank, whose exit finds the memory of threads that it has not.
bool leaks_are_told = true;

/// How a child of `fork` ends that does this and then returns from `main`, in effect.
int status_of_child(const std::function<void()>& deed) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    deed();
    std::exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

/// What outlives `main`.
std::vector<Owner>& globals() {
  static std::vector<Owner> all;
  return all;
}

}  // namespace

// The leak checker asks for it.
extern "C" int __lsan_is_turned_off() { return leaks_are_told ? 0 : 1; }

namespace {

/// Counts where transports end.
struct Ends {
  std::atomic<int> at_home = 0, abroad = 0;
};
class Witness final : public Transport {
 public:
  explicit Witness(Ends& ends) : ends_(ends) {}
  ~Witness() override { ++(home_ == std::this_thread::get_id() ? ends_.at_home : ends_.abroad); }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Line& channel(int) override { fail<InternalError>("no calls"); }
  Line& messages(int, int, int) override { fail<InternalError>("no calls"); }
  const GroupKey& key() const override { fail<InternalError>("no key"); }
  Offer offer(std::span<const int>, const std::string&) override { return {}; }
  std::unique_ptr<Transport> join(std::span<const int>, std::span<const Offer>, const std::string&) override {
    return nullptr;
  }
  std::unique_ptr<Transport> renew() override { return nullptr; }
  bool failed() const override { return false; }

 private:
  Ends& ends_;
  std::thread::id home_ = std::this_thread::get_id();
};

}  // namespace

TEST_CASE("a transport ends on its rank's thread, whoever drops it, and no later than the rank") {
  for (const int count : {1, 5, 500}) {
    Ends ends;
    std::vector<Owner> late;
    {
      Droppers droppers(3);
      std::thread([&] {
        for (int i = 0; i < count; ++i) {
          const std::shared_ptr<Transport> kept =
              TransportHome::current()->keep(std::make_unique<Witness>(ends));
          if (i % 3 == 0) droppers.give(owner_of(kept));
          if (i % 5 == 0) late.push_back(owner_of(kept));
          if (i % 7 == 0) TransportHome::current()->sweep();
        }
        const int before = ends.at_home;
        TransportHome::current()->keep(std::make_unique<Witness>(ends));
        CHECK(ends.at_home >= before + 1);  // dropped at home: at once
      }).join();
      CHECK(ends.at_home == count + 1);
    }
    late.clear();
    CHECK(ends.at_home == count + 1);
    CHECK(ends.abroad == 0);
  }
}

TEST_CASE("handles go on other threads while their ranks go on") {
  for (const int ranks : {1, 2, 3}) {
    Droppers droppers(2);
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      for (int round = 0; round < 30; ++round) {
        for (Owner& owner : owners(world.group(), round)) droppers.give(std::move(owner));
        expect_works(world.group());
      }
    }));
  }
}

TEST_CASE("handles outlive their ranks, are refused by others, and go on any thread") {
  for (const int ranks : {1, 2, 3}) {
    std::vector<Group> groups(static_cast<std::size_t>(ranks));
    std::vector<Owner> kept;
    std::mutex mutex;
    run_ranks(ranks, [&](World& world) {
      groups[static_cast<std::size_t>(world.rank())] = world.group().blocks(ranks);
      for (Owner& owner : owners(world.group(), 0)) {
        const std::scoped_lock lock(mutex);
        kept.push_back(std::move(owner));
      }
    });
    // Later ranks may have the thread ids and addresses of earlier ones.
    for (int again = 0; again < 10; ++again)
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        for (const Group& group : groups) {
          expect(group.size() == ranks && group.defined(), "what it is stays");
          for (const std::function<void()>& use : {std::function<void()>([&] { group.barrier(); }),
                                                   std::function<void()>([&] { (void)group.failed(); }),
                                                   std::function<void()>([&] { group.renew(); }),
                                                   std::function<void()>([&] { group.blocks(1); })})
            expect(message_of<StateError>(use).find("another thread") != std::string::npos, "it is refused");
        }
        expect_works(world.group());
      }));
    std::thread([&] {
      kept.erase(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(kept.size() / 2));
    }).join();
  }
}

TEST_CASE("handles that outlive main end with it") {
  const std::vector<std::function<void()>> deeds = {
      [] { globals().push_back(owner_of(init().group())); },
      [] { globals() = owners(init().group(), 1); },
      [] { run_ranks(1, [](World& world) { globals() = owners(world.group(), 1); }); },
      [] {
        run_ranks(2, [](World& world) {
          std::vector<Owner> mine = owners(world.group(), 1);
          if (world.rank() == 0) globals() = std::move(mine);
          world.group().barrier();
        });
      },
      [] { globals().push_back(owner_of(DryRun({.rank = 0, .size = 4}).world().group())); },
      [] { globals().push_back(std::make_shared<OrderLog>()); },
      [] {
        globals().push_back(
            std::make_shared<Interception>([](const ObservedCall&, const Interception::Proceed&) {}));
      },
      // A child of a rank's that leaves by `exit`.
      [] {
        run_ranks(2, [](World& world) {
          const Group group = world.group().blocks(2);
          const Work work = under_way(group, 5000);
          if (world.rank() == 0)
            expect(status_of_child([] { leaks_are_told = false; }) == 0, "the child of a rank ended badly");
          expect_works(group);
        });
      },
  };
  for (std::size_t i = 0; i < deeds.size(); ++i) {
    INFO("deed " << i);
    globals();  // older than the child's Context, so it goes later
    CHECK(status_of_child(deeds[i]) == 0);
  }
}

TEST_CASE("calls of making a group that an interception keeps back are an error, and no more") {
  for (const int ranks : {1, 2, 3})
    for (int culprit = 0; culprit <= ranks; ++culprit)  // the last: all of them
      for (const Kind kept : {Kind::all_gather, Kind::barrier}) {
        INFO(ranks << " ranks, culprit " << culprit << ", " << to_string(kept));
        std::atomic<int> refused = 0;
        const auto make = [&](const Group& world) {
          const Interception keeper([&](const ObservedCall& call, const Interception::Proceed& proceed) {
            const bool mine = culprit == ranks || culprit == world.rank();
            if (!mine || call.collective.kind != kept) proceed(call.collective);
          });
          try {
            world.blocks(ranks);
          } catch (const StateError& error) {
            expect(std::string(error.what()).find("Interception") != std::string::npos, "{}", error.what());
            ++refused;
            throw;
          }
        };
        try {
          run_ranks(ranks, [&](World& world) { make(world.group()); });
        } catch (const StateError&) {
        } catch (const CollectiveError&) {
        }
        if (kept == Kind::all_gather)
          CHECK(refused == (culprit == ranks ? ranks : 1));
        else
          CHECK(refused == 0);
      }
}

TEST_CASE("a rank that ends its thread is named, and the others hear of it") {
  for (const int ranks : {1, 2, 3})
    for (int culprit = 0; culprit < ranks; ++culprit) {
      std::atomic<int> heard = 0;
      const std::string text = message_of<StateError>([&] {
        run_ranks(ranks, [&](World& world) {
          const Group group = world.group().blocks(ranks);
          if (world.rank() == culprit) ::pthread_exit(nullptr);
          const std::string told = message_of<CollectiveError>([&] { group.barrier(); });
          expect(told.find("pthread_exit") != std::string::npos, "{}", told);
          ++heard;
        });
      });
      CHECK_THAT(text, ContainsSubstring(fmt::format("rank {}", culprit)));
      CHECK_THAT(text, ContainsSubstring("pthread_exit"));
      CHECK(heard == ranks - 1);
      CHECK_NOTHROW(run_ranks(ranks, [](World& world) { expect_works(world.group()); }));
    }
}

TEST_CASE("more ranks than a process may have are refused at once") {
  for (const int ranks : {max_thread_ranks + 1, 100000, std::numeric_limits<int>::max()}) {
    bool ran = false;
    const std::string text = message_of<ValueError>([&] { run_ranks(ranks, [&](World&) { ran = true; }); });
    CHECK_FALSE(ran);
    CHECK(text ==
          fmt::format("run_ranks: {} ranks asked for; one process has at most {} as threads; start more "
                      "processes, or imagine the ranks in a DryRun",
                      ranks, max_thread_ranks));
  }
  std::atomic<int> ran = 0;
  CHECK_NOTHROW(run_ranks(max_thread_ranks, [&](World&) { ++ran; }));
  CHECK(ran == max_thread_ranks);
}

TEST_CASE("a thread that the system does not start is one error, and those that run come home") {
  // Stacks so large that few fit into a process.
  const auto run = [] {
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setstacksize(&attributes, std::size_t{1} << 44);
    ::pthread_setattr_default_np(&attributes);
    std::atomic<int> heard = 0;
    try {
      run_ranks(20, [&](World& world) {
        try {
          world.group().barrier();
        } catch (const CollectiveError&) {
          ++heard;
        }
      });
    } catch (const StateError& error) {
      const std::string text = error.what();
      const bool named = text.find(fmt::format("starts only {} of 20", heard.load())) != std::string::npos;
      ::_exit(named && text.find('\n') == std::string::npos ? 0 : 1);
    } catch (...) {
      ::_exit(2);
    }
    ::_exit(3);
  };
  CHECK(status_of_child(run) == 0);
}
