// Everything that can go wrong between ranks, once each: who hears of it, when, in which words, and what
// works after.
#include <sherd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>

#include "collectives/fault.h"
#include "tests/catch.h"
#include "tests/collectives/suite.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;
using test::CallCase;
using test::expect;
using test::message_of;
using test::Part;
using Kind = CollectiveKind;

namespace {

using Clock = std::chrono::steady_clock;

constexpr bool in_time_counts = !test::sanitized;

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

/// What a rank saw of a fault.
struct Seen {
  bool heard = false;  ///< a CollectiveError reached it
  std::string text, again, renewal, posted;
  std::vector<int> ranks;
  std::uint64_t sequence = 0;
  double seconds = 0;  ///< from the fault to the error
  bool renewed = false;
};

struct Outcome {
  std::vector<Seen> seen;
  std::string thrown;  ///< by run_ranks
};

using Act = std::function<void(const Group&, Seen&)>;

void work_again(const Group& group) {
  const Tensor x = full({700}, group.rank() + 1.0);
  group.all_reduce(x, {}, {.label = "after the renewal"});
  const auto sum = static_cast<float>(group.size() * (group.size() + 1) / 2);
  for (float y : x.to_vector<float>()) expect(y == sum, "{} is not {}", y, sum);
}

/// Two good calls; then `culprit` does `wrong` while the others do `right`. Who hears of a fault tries once
/// more, and asks for a renewal.
Outcome play(int world, int culprit, const Act& right, const Act& wrong, int good_calls = 2) {
  Outcome outcome{.seen = std::vector<Seen>(static_cast<std::size_t>(world)), .thrown = {}};
  std::atomic<Clock::rep> fault{0};
  const auto body = [&](World& w) {
    const Group& group = w.group();
    Seen& seen = outcome.seen[static_cast<std::size_t>(w.rank())];
    try {  // a rank may hear of the fault in the call before it
      for (int i = 0; i < good_calls; ++i) group.barrier({.label = "good"});
      if (w.rank() == culprit) {
        fault = Clock::now().time_since_epoch().count();
        wrong(group, seen);
      } else {
        right(group, seen);
      }
    } catch (const CollectiveError& error) {
      const Clock::duration since = Clock::now().time_since_epoch() - Clock::duration(fault.load());
      seen.heard = true;
      seen.text = error.what();
      seen.ranks = error.ranks();
      seen.sequence = error.sequence();
      seen.seconds = std::chrono::duration<double>(since).count();
    }
    if (!seen.heard) return;
    expect(group.failed(), "a group that threw has failed");
    seen.again = message_of<CollectiveError>([&] { group.barrier({.label = "again"}); });
    seen.renewal = message_of<CollectiveError>([&] {
      group.renew();
      seen.renewed = true;
    });
    if (seen.renewed) work_again(group);
  };
  try {
    run_ranks(world, body);
  } catch (const std::exception& error) {
    outcome.thrown = error.what();
  }
  return outcome;
}

enum class Culprit { lives, gone };

/// Every rank but a culprit that is gone heard the same, in time, and for good until the renewal.
void check_heard(const Outcome& outcome, int culprit, Culprit fate) {
  const std::string name = fmt::format("rank {}", culprit);
  const std::string& told = outcome.seen[culprit == 0 ? 1 : 0].text;
  for (std::size_t rank = 0; rank < outcome.seen.size(); ++rank) {
    const Seen& seen = outcome.seen[rank];
    if (fate == Culprit::gone && static_cast<int>(rank) == culprit) continue;
    INFO("rank " << rank << " heard: " << seen.text);
    CHECK(seen.heard);
    CHECK(seen.text == told);
    CHECK_THAT(seen.text, ContainsSubstring(name));
    CHECK(seen.again == seen.text);
    if (in_time_counts) CHECK(seen.seconds < 2);
    CHECK(seen.renewed == (fate == Culprit::lives));
    if (fate == Culprit::gone) CHECK_THAT(seen.renewal, ContainsSubstring(name + " is gone"));
  }
}

void check_says(const Outcome& outcome, int culprit, std::uint64_t sequence,
                const std::vector<std::string>& words) {
  const Seen& seen = outcome.seen[culprit == 0 ? 1 : 0];
  CHECK(seen.sequence == sequence);
  CHECK(std::ranges::count(seen.ranks, culprit) == 1);
  for (const std::string& word : words) CHECK_THAT(seen.text, ContainsSubstring(word));
  CHECK_THAT(seen.text, ContainsSubstring(fmt::format("#{}", sequence)));
}

/// Worlds of several sizes, the first and the last rank at fault.
template <class F>
void for_each_culprit(F&& check) {
  for (int world : {2, 3, 5})
    for (int culprit : {0, world - 1}) {
      INFO("world of " << world << ", rank " << culprit << " at fault");
      check(world, culprit);
    }
}

Act call_of(const CallCase& c) {
  return [c](const Group& group, Seen& seen) {
    const Part part(group, c);
    if (part.takes_part()) seen.posted = signature_of(part.collective()).text();
    part.call();
    group.barrier({.label = "a rank that a message passes by"});
  };
}
Act barriers(std::vector<std::string> labels) {
  return [labels = std::move(labels)](const Group& group, Seen&) {
    for (const std::string& label : labels) group.barrier({.label = label});
  };
}
void return_early(const Group&, Seen&) {}
void throw_boom(const Group&, Seen&) { throw Boom(); }

// ---- mismatches ----

struct Mismatch {
  std::string field;
  CallCase right, wrong;
};

std::vector<Mismatch> mismatches(std::int64_t n) {
  const CallCase base{.kind = Kind::all_reduce,
                      .reduction = ReduceOp::prescaled_sum(0.5f),
                      .sizes = {n, 30},
                      .label = "layers.3"};
  std::vector<Mismatch> all;
  const auto add = [&](std::string field, CallCase right, auto change) {
    CallCase wrong = right;
    change(wrong);
    all.push_back({std::move(field), std::move(right), std::move(wrong)});
  };
  for (Kind kind : {Kind::all_gather, Kind::reduce_scatter, Kind::broadcast, Kind::all_to_all, Kind::barrier})
    add(fmt::format("kind {}", to_string(kind)), base, [&](CallCase& c) {
      c.kind = kind;
      if (kind == Kind::barrier) c.sizes.clear();
    });
  for (DType dtype : {f64, f16, bf16})
    add(fmt::format("dtype {}", name_of(dtype)), base, [&](CallCase& c) { c.dtype = dtype; });
  add("first size", base, [](CallCase& c) { ++c.sizes[0]; });
  add("second size", base, [](CallCase& c) { ++c.sizes[1]; });
  add("sizes swapped", base, [](CallCase& c) { std::swap(c.sizes[0], c.sizes[1]); });
  add("a segment more", base, [](CallCase& c) { c.sizes.push_back(0); });
  add("a segment less", base, [](CallCase& c) { c.sizes.pop_back(); });
  add("reduction", base, [](CallCase& c) { c.reduction = ReduceOp::max(); });
  add("scale", base, [](CallCase& c) { c.reduction.scale = 0.25f; });
  add("label", base, [](CallCase& c) { c.label = "layers.4"; });
  add("a label that differs late", base, [](CallCase& c) { c.label = "layers.3" + std::string(200, '+'); });
  CallCase broadcast = base;
  broadcast.kind = Kind::broadcast;
  add("root", broadcast, [](CallCase& c) { c.root = 1; });
  CallCase message = base;
  message.kind = Kind::send;
  message.destination = 1;
  add("dtype of a message", message, [](CallCase& c) { c.dtype = f64; });
  add("size of a message", message, [](CallCase& c) { ++c.sizes[1]; });
  add("segments of a message", message, [](CallCase& c) { c.sizes.pop_back(); });
  add("label of a message", message, [](CallCase& c) { c.label = "layers.4"; });
  return all;
}

}  // namespace

TEST_CASE("a call that differs in one field is named on every rank", "[faults]") {
  for (std::int64_t n : {40, 5000})  // in the post box, and from memory
    for (const Mismatch& m : mismatches(n))
      for_each_culprit([&](int world, int culprit) {
        const bool message = m.right.kind == Kind::send;
        if (message) culprit = culprit == 0 ? 0 : 1;
        INFO(m.field << ", " << n << " elements");
        const Outcome outcome = play(world, culprit, call_of(m.right), call_of(m.wrong));
        check_heard(outcome, culprit, Culprit::lives);
        const auto& wrong = outcome.seen[static_cast<std::size_t>(culprit)].posted;
        std::string right;  // of a rank that has come as far
        for (int rank = 0; rank < world; ++rank)
          if (const std::string& posted = outcome.seen[static_cast<std::size_t>(rank)].posted;
              rank != culprit && !posted.empty())
            right = posted;
        check_says(outcome, culprit, message ? 0 : 2,
                   {wrong, right, m.right.label, m.wrong.label.substr(0, 64)});
        CHECK(outcome.thrown.empty());
      });
}

TEST_CASE("two ranks that differ hear of it while a third computes", "[faults]") {
  for (int busy : {0, 1, 2}) {
    std::atomic<int> heard{0};
    run_ranks(3, [&](World& w) {
      const auto barrier = [&] { w.group().barrier({.label = fmt::format("of rank {}", w.rank())}); };
      if (w.rank() == busy) {
        const auto end = Clock::now() + std::chrono::seconds(30);
        while (heard < 2 && Clock::now() < end) std::this_thread::yield();
      }
      const std::string text = message_of<CollectiveError>(barrier);
      expect(text.find(fmt::format("of rank {}", (busy + 1) % 3)) != std::string::npos, "{}", text);
      ++heard;
    });
    CHECK(heard == 3);
  }
}

// ---- who is at fault ----

namespace {

Signature labelled(const std::string& label) { return signature_of({.label = label}); }

}  // namespace

TEST_CASE("the call that most ranks made is right; where none has most, all are named", "[faults]") {
  const Signature a = labelled("a"), b = labelled("b"), c = labelled("c");
  const std::vector<int> world{10, 11, 12, 13, 14};
  const auto posts = [&](const std::string& calls) {
    std::vector<RankCall> all;
    for (std::size_t rank = 0; rank < calls.size(); ++rank)
      if (calls[rank] != '-')
        all.push_back({static_cast<int>(rank), calls[rank] == 'a' ? &a : calls[rank] == 'b' ? &b : &c});
    return mismatch({.group = "g", .world_ranks = world}, all);
  };
  struct Row {
    std::string calls, words;
    std::vector<int> ranks;
  };
  for (const Row& row : std::vector<Row>{
           {"ab", "rank 0 posted barrier of 'a', but rank 1 posted barrier of 'b';", {10, 11}},
           {"a--b", "rank 0 posted barrier of 'a', but rank 3 posted barrier of 'b';", {10, 13}},
           {"bab", "rank 1 posted barrier of 'a', but ranks 0 and 2 posted barrier of 'b';", {11}},
           {"abb", "rank 0 posted barrier of 'a', but ranks 1 and 2 posted barrier of 'b';", {10}},
           {"aabb", "ranks 0 and 1 posted barrier of 'a', but ranks 2 and 3 posted", {10, 11, 12, 13}},
           {"caaba",
            "rank 0 posted barrier of 'c', rank 3 posted barrier of 'b', but ranks 1, 2 and 4",
            {10, 13}},
           {"abc", "rank 0 posted barrier of 'a', rank 1 posted barrier of 'b', but rank 2", {10, 11, 12}}}) {
    INFO(row.calls);
    const Fault fault = posts(row.calls);
    CHECK(fault.ranks == row.ranks);
    CHECK_THAT(fault.text, ContainsSubstring(row.words));
  }
}

TEST_CASE("of a rank that returned and those that wait for it, the fewer are at fault", "[faults]") {
  const Signature call = labelled("a");
  const std::vector<int> world{10, 11, 12, 13, 14}, other{7}, member{13};
  const auto ranks = [&](Departure how, std::span<const int> blames, std::size_t made, std::size_t missed) {
    const Leaver leaver{1, how, "left", blames, {}};
    return departed({.group = "g", .world_ranks = world}, leaver, {2, &call}, made, missed).ranks;
  };
  using Ranks = std::vector<int>;
  CHECK(ranks(Departure::left, {}, 4, 1) == Ranks{11});      // it skipped the call
  CHECK(ranks(Departure::left, {}, 1, 4) == Ranks{12});      // the other made one too many
  CHECK(ranks(Departure::left, {}, 1, 1) == Ranks{11, 12});  // nobody can tell
  CHECK(ranks(Departure::threw, {}, 1, 4) == Ranks{11});
  CHECK(ranks(Departure::died, {}, 1, 4) == Ranks{11});
  CHECK(ranks(Departure::left, member, 1, 1) == Ranks{13});     // it told whose fault it was
  CHECK(ranks(Departure::threw, other, 1, 1) == Ranks{7, 11});  // a rank outside, and the one that is missing
}

TEST_CASE("a rank that renews, or leaves, because of a fault says whose it was", "[faults]") {
  for (int world : {3, 5})
    for (const bool renews : {true, false}) {
      std::vector<std::string> heard(static_cast<std::size_t>(world));
      std::vector<std::vector<int>> ranks(heard.size());
      run_ranks(world, [&](World& w) {
        const auto self = static_cast<std::size_t>(w.rank());
        const Group pair = w.group().subgroup({0, 1}), all = w.group().strided(1);
        w.group().barrier();
        try {
          if (w.rank() < 2) pair.barrier({.label = fmt::format("of rank {}", w.rank())});
        } catch (const CollectiveError&) {
          if (!renews) return;
          message_of<CollectiveError>([&] { all.renew(); });
        }
        if (w.rank() < 2) return;
        try {
          all.barrier();
        } catch (const CollectiveError& error) {
          heard[self] = error.what();
          ranks[self] = error.ranks();
        }
        if (renews) message_of<CollectiveError>([&] { all.renew(); });
      });
      for (std::size_t rank = 2; rank < heard.size(); ++rank) {
        CHECK(ranks[rank] == std::vector<int>{0, 1});
        CHECK_THAT(heard[rank],
                   ContainsSubstring(" after it heard of a fault of ranks 0 and 1 of the world") &&
                       ContainsSubstring("'of rank 0'") && ContainsSubstring("'of rank 1'") &&
                       ContainsSubstring(renews ? "it is being renewed by rank" : "left the body"));
      }
    }
}

// ---- calls out of step ----

TEST_CASE("a call skipped, one too many, or two in another order are named on every rank", "[faults]") {
  const std::vector<std::vector<std::string>> wrongs{{"a", "c"}, {"a", "x", "b", "c"}, {"a", "c", "b"}};
  for (const auto& wrong : wrongs)
    for_each_culprit([&](int world, int culprit) {
      const Outcome outcome = play(world, culprit, barriers({"a", "b", "c"}), barriers(wrong));
      check_heard(outcome, culprit, Culprit::lives);
      check_says(outcome, culprit, 3, {"barrier of 'b'", fmt::format("barrier of '{}'", wrong[1])});
    });
}

TEST_CASE("the last call skipped: the others hear that the rank left", "[faults]") {
  for_each_culprit([](int world, int culprit) {
    const Outcome outcome = play(world, culprit, barriers({"a", "b"}), barriers({"a"}));
    check_heard(outcome, culprit, Culprit::gone);
    check_says(outcome, culprit, 3, {"left the body", "last call here was barrier of 'a'", "barrier of 'b'"});
  });
}

TEST_CASE("a call after all others left: the one that waits hears of it", "[faults]") {
  for_each_culprit([](int world, int culprit) {
    const Outcome outcome = play(world, culprit, barriers({"a"}), barriers({"a", "b"}));
    const Seen& seen = outcome.seen[static_cast<std::size_t>(culprit)];
    CHECK(seen.heard);
    CHECK(seen.sequence == 3);
    CHECK_THAT(seen.text, ContainsSubstring("left the body"));
    CHECK_THAT(seen.text, ContainsSubstring("barrier of 'b'"));
    CHECK_THAT(seen.renewal, ContainsSubstring("is gone"));
  });
}

// ---- circles ----

TEST_CASE("ranks that wait for each other on two channels are named", "[faults]") {
  const auto on = [](std::vector<int> channels) -> Act {
    return [=](const Group& group, Seen&) {
      for (int channel : channels)
        group.barrier({.label = fmt::format("on {}", channel), .channel = channel});
    };
  };
  const std::vector<std::pair<std::vector<int>, std::vector<int>>> orders{{{3}, {4}}, {{3, 4}, {4, 3}}};
  for (const auto& [right, wrong] : orders)
    for_each_culprit([&](int world, int culprit) {
      const Outcome outcome = play(world, culprit, on(right), on(wrong));
      check_heard(outcome, culprit, Culprit::lives);
      for (const char* word : {"wait for each other", "channel 3", "channel 4", "'on 3'", "'on 4'"})
        CHECK_THAT(outcome.seen[0].text, ContainsSubstring(word));
    });
}

TEST_CASE("ranks that wait for each other on two groups are named", "[faults]") {
  for_each_culprit([](int world, int culprit) {
    std::barrier made(world);
    const auto act = [&](bool swapped) -> Act {
      return [&, swapped](const Group& group, Seen&) {
        const Group other = group.strided(1);
        made.arrive_and_wait();  // a fault ends whatever is under way, so also making the group
        try {
          (swapped ? other : group).barrier({.label = "first"});
          (swapped ? group : other).barrier({.label = "second"});
        } catch (const CollectiveError&) {
          expect(
              message_of<CollectiveError>([&] { group.barrier(); }).find("each other") != std::string::npos,
              "the group hears of the circle");
          expect(
              message_of<CollectiveError>([&] { other.barrier(); }).find("each other") != std::string::npos,
              "the other group hears of the circle");
          other.renew();
          work_again(other);
          throw;
        }
      };
    };
    const Outcome outcome = play(world, culprit, act(false), act(true));
    for (std::size_t rank = 0; rank < outcome.seen.size(); ++rank) {
      CHECK(outcome.seen[rank].renewed);
      for (const std::string& word : {std::string("group world,"), std::string("group world.strided(1)[0],"),
                                      fmt::format("rank {} of the world is in barrier", culprit)})
        CHECK_THAT(outcome.seen[rank].text, ContainsSubstring(word));
    }
  });
}

TEST_CASE("messages to and from the wrong ranks close a circle", "[faults]") {
  const auto message = [](int source, int destination) -> Act {
    return [=](const Group& group, Seen&) {
      const Tensor x = zeros({900});
      if (group.rank() == source) group.send(x, destination, {.label = "letter"});
      if (group.rank() == destination) group.recv(x, source, {.label = "letter"});
      group.barrier();
    };
  };
  for (int world : {3, 5}) {
    const Outcome outcome = play(world, 1, message(0, 1), message(2, 1));
    check_heard(outcome, 1, Culprit::lives);
    for (const char* word :
         {"wait for each other", "send #0 from rank 0 to rank 1", "recv #0 from rank 2 to rank 1"})
      CHECK_THAT(outcome.seen[0].text, ContainsSubstring(word));
  }
  const Outcome both_send = play(2, 1, message(0, 1), message(1, 0));
  check_heard(both_send, 1, Culprit::lives);
  for (const char* word : {"send #0 from rank 0 to rank 1", "send #0 from rank 1 to rank 0"})
    CHECK_THAT(both_send.seen[0].text, ContainsSubstring(word));
}

// ---- departures ----

TEST_CASE("a rank that returns early is named", "[faults]") {
  for_each_culprit([](int world, int culprit) {
    const Outcome outcome = play(world, culprit, call_of({.label = "layers.3"}), return_early);
    check_heard(outcome, culprit, Culprit::gone);
    check_says(outcome, culprit, 2,
               {"left the body", "last call here was barrier of 'good'", "all_reduce(f32", "'layers.3'"});
    CHECK_THAT(outcome.thrown, ContainsSubstring("nothing") || Catch::Matchers::Equals(""));
  });
}

TEST_CASE("a rank that throws is named with its reason, and run_ranks throws what it threw", "[faults]") {
  const Act inside_before = [](const Group& group, Seen&) {
    const Interception thrower([](const ObservedCall&, const Interception::Proceed&) { throw Boom(); });
    group.barrier();
  };
  const Act inside_after = [](const Group& group, Seen&) {
    const Interception thrower([](const ObservedCall& call, const Interception::Proceed& proceed) {
      proceed(call.collective);
      throw Boom();
    });
    group.all_reduce(zeros({5000}), {}, {.label = "layers.3"});
  };
  const Act refused = [](const Group& group, Seen&) { group.broadcast(zeros({2}), group.size()); };
  const Act right = [](const Group& group, Seen&) {
    group.all_reduce(zeros({5000}), {}, {.label = "layers.3"});
    group.barrier({.label = "last"});
  };
  for_each_culprit([&](int world, int culprit) {
    for (const Act& wrong : {Act(throw_boom), inside_before}) {
      const Outcome outcome = play(world, culprit, right, wrong);
      check_heard(outcome, culprit, Culprit::gone);
      check_says(outcome, culprit, 2,
                 {"threw \"boom\"", "last call here was barrier of 'good'", "'layers.3'"});
      CHECK(outcome.thrown == "boom");
    }
    const Outcome later = play(world, culprit, right, inside_after);
    check_heard(later, culprit, Culprit::gone);
    check_says(later, culprit, 3, {"threw \"boom\"", "'layers.3'", "barrier of 'last'"});
    CHECK(later.thrown == "boom");

    const Outcome wrong_root = play(world, culprit, right, refused);
    check_heard(wrong_root, culprit, Culprit::gone);
    check_says(wrong_root, culprit, 2, {"threw \"broadcast: rank"});
    CHECK_THAT(wrong_root.thrown, ContainsSubstring("broadcast: rank"));

    const Outcome at_once = play(world, culprit, right, throw_boom, 0);
    check_heard(at_once, culprit, Culprit::gone);
    check_says(at_once, culprit, 0, {"threw \"boom\"", "made no call here"});
  });
}

TEST_CASE("a rank that throws with calls under way: the others hear, and nothing hangs", "[faults]") {
  for (std::int64_t n : {10, 5000})
    for_each_culprit([n](int world, int culprit) {
      const auto act = [n](bool throws) -> Act {
        return [=](const Group& group, Seen&) {
          const Group other = group.blocks(group.size());
          std::vector<Work> works;
          for (int i = 0; i < 6; ++i) {
            const Tensor x = zeros({n});
            works.push_back((i % 2 ? other : group)
                                .enqueue({.kind = Kind::all_reduce,
                                          .inputs = {x},
                                          .outputs = {x},
                                          .channel = i % 3,
                                          .label = "layers.3"}));
            if (throws && i == 3) throw Boom();
          }
          for (Work& work : works) work.wait();
          group.barrier({.label = "last"});
        };
      };
      const Outcome outcome = play(world, culprit, act(false), act(true));
      CHECK(outcome.thrown == "boom");
      for (std::size_t rank = 0; rank < outcome.seen.size(); ++rank) {
        if (static_cast<int>(rank) == culprit) continue;
        const Seen& seen = outcome.seen[rank];
        CHECK(seen.heard);
        CHECK_THAT(seen.text, ContainsSubstring(fmt::format("rank {} threw \"boom\"", culprit)));
        if (in_time_counts) CHECK(seen.seconds < 2);
      }
    });
}

TEST_CASE("the root cause comes out of run_ranks, not what others tell of it", "[faults]") {
  for_each_culprit([](int world, int culprit) {
    const auto run = [&] {
      run_ranks(world, [&](World& w) {
        if (w.rank() == culprit) throw Boom();
        w.group().barrier();
      });
    };
    CHECK(message_of<Boom>(run) == "boom");
    const auto mismatch = [&] {
      run_ranks(world,
                [&](World& w) { w.group().barrier({.label = w.rank() == culprit ? "one" : "other"}); });
    };
    CHECK_THAT(message_of<CollectiveError>(mismatch),
               ContainsSubstring("'one'") && ContainsSubstring("'other'"));
  });
}

TEST_CASE("a message is one line, whatever was named or thrown", "[faults]") {
  const auto is_line = [](const std::string& text, std::string_view word) {
    expect(text.find_first_of("\n\r\t") == std::string::npos, "more than a line: {}", text);
    expect(text.find(word) != std::string::npos, "'{}' is not in: {}", word, text);
  };
  for (int world : {2, 3}) {
    CHECK_NOTHROW(run_ranks(world, [&](World& w) {
      const DeviceMesh mesh = w.mesh({w.size(), 1}, {"a\nb", "c"});
      const Group& group = mesh.group("a\nb");
      const std::string label = fmt::format("of\nrank\t{}", w.rank());
      is_line(message_of<CollectiveError>([&] { group.barrier({.label = label}); }), "'of rank?");
      DryRun dry({.size = 2});
      dry.world().group().barrier({.label = label});
      for (const DryStep& step : dry.steps()) is_line(step.text(), "of rank");
      is_line(dry.brief(), "of rank");
    }));
    std::vector<std::string> heard(static_cast<std::size_t>(world));
    CHECK_THROWS_AS(run_ranks(world,
                              [&](World& w) {
                                if (w.rank() == 1) throw std::runtime_error("two\r\nlines");
                                heard[static_cast<std::size_t>(w.rank())] =
                                    message_of<CollectiveError>([&] { w.group().barrier(); });
                              }),
                    std::runtime_error);
    is_line(heard[0], "threw \"two? lines\"");
  }
}

// ---- what still works ----

TEST_CASE("a group can fail and be renewed many times", "[faults]") {
  for (int world : {2, 3, 5}) {
    std::atomic<int> faults{0};
    std::barrier all_work(world);
    CHECK_NOTHROW(run_ranks(world, [&](World& w) {
      for (int i = 0; i < 20; ++i) {
        all_work.arrive_and_wait();
        const int culprit = i % w.size();
        const Tensor x = zeros({i % 2 ? 5000 : 5});
        Work before = w.group().enqueue({.kind = Kind::all_reduce, .inputs = {x}, .outputs = {x}});
        const std::string text = message_of<CollectiveError>(
            [&] { w.group().barrier({.label = fmt::format("{} {}", i, w.rank() == culprit)}); });
        faults += text.find("posted barrier") != std::string::npos;
        w.group().renew();
        expect(message_of<CollectiveError>([&] { before.wait(); }).find("renewed") != std::string::npos,
               "a work from before a renewal says so");
        work_again(w.group());
      }
    }));
    CHECK(faults == 20 * world);
  }
}

TEST_CASE("a renewal waits without holding up calls on other groups", "[faults]") {
  for (int world : {2, 3, 5})
    CHECK_NOTHROW(run_ranks(world, [](World& w) {
      const Group other = w.group().blocks(w.size());
      const Tensor x = full({5000}, 1.0);
      Work work = w.group().enqueue({.kind = Kind::all_reduce, .inputs = {x}, .outputs = {x}});
      if (w.rank() != 0) work.wait();  // which takes rank 0's part
      other.renew();
      work.wait();
      expect(x.to_vector<float>()[4999] == static_cast<float>(w.size()), "the sum is wrong");
      work_again(other);
    }));
}

TEST_CASE("groups renewed in different orders: nobody waits for ever", "[faults]") {
  for_each_culprit([](int world, int culprit) {
    std::atomic<int> named{0};
    CHECK_NOTHROW(run_ranks(world, [&](World& w) {
      const Group one = w.group().blocks(w.size()), other = w.group().blocks(w.size());
      w.group().barrier();
      const Group& first = w.rank() == culprit ? one : other;
      const std::string text = message_of<CollectiveError>([&] { first.renew(); });
      named += text.find("wait for each other") != std::string::npos;
      // Who was no part of the circle finds the other group's renewal failed or its peers gone.
    }));
    CHECK(named >= 2);
  });
}

TEST_CASE("a fault in one group leaves others alone", "[faults]") {
  for (int world : {2, 3, 5}) {
    std::barrier made(world);
    CHECK_NOTHROW(run_ranks(world, [&](World& w) {
      const Group other = w.group().blocks(w.size());
      made.arrive_and_wait();
      const std::string text =
          message_of<CollectiveError>([&] { w.group().barrier({.label = w.rank() == 0 ? "one" : "other"}); });
      expect(w.group().failed() && !other.failed(), "the wrong group failed: {}", text);
      work_again(other);
    }));
  }
}

TEST_CASE("worlds within a world fail alone, and one after another", "[faults]") {
  for (int world : {2, 3})
    CHECK_NOTHROW(run_ranks(world, [](World& outer) {
      for (int i = 0; i < 3; ++i) {
        const auto inner = [&] {
          run_ranks(3, [&](World& w) {
            work_again(w.group());
            if (w.rank() == i) throw Boom();
            w.group().barrier();
          });
        };
        expect(message_of<Boom>(inner) == "boom", "the inner world throws");
        work_again(outer.group());
        run_ranks(2, [](World& w) { work_again(w.group()); });
      }
      work_again(outer.group());
    }));
}

TEST_CASE("handles that outlive their world are refused and harmless", "[faults]") {
  std::vector<Group> groups(3);
  std::vector<Work> works(3);
  run_ranks(3, [&](World& w) {
    const auto rank = static_cast<std::size_t>(w.rank());
    groups[rank] = w.group();
    works[rank] =
        w.group().enqueue({.kind = Kind::all_reduce, .inputs = {zeros({5000})}, .outputs = {zeros({5000})}});
  });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    CHECK_THAT(message_of<StateError>([&] { groups[rank].barrier(); }), ContainsSubstring("another thread"));
    CHECK_THAT(message_of<StateError>([&] { works[rank].wait(); }), ContainsSubstring("another thread"));
  }
}

// ---- slow is not dead ----

TEST_CASE("a rank that computes for half a minute is waited for", "[.soak]") {
  for (int world : {2, 3, 5})
    CHECK_NOTHROW(run_ranks(world, [](World& w) {
      const auto end = Clock::now() + std::chrono::seconds(30);
      if (w.rank() == w.size() - 1)
        while (Clock::now() < end) full({1000}, 1.0);
      work_again(w.group());
      w.group().renew();
      work_again(w.group());
    }));
}
