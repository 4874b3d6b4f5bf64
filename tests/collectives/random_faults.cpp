// Random programs in which one rank does one thing wrong: whoever waits hears of it, and of whom.
#include "tests/collectives/random_faults.h"

#include <fmt/ranges.h>
#include <sherd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <numeric>
#include <random>

#include "tests/rank_device.h"
#include "tests/sanitizer.h"

namespace sherd::test {
namespace {

using Kind = CollectiveKind;

using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;

constexpr double in_time = sanitized ? 30 : 2;
constexpr int steps = 16, most_channels = 3;

int below(Random& random, int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); }

enum class Wrong { skips, repeats, adds, shape, dtype, label, kind, group, channel, throws, returns, dies };
constexpr const char* names[] = {"skips it",      "makes it twice", "makes one before it", "other shape",
                                 "other dtype",   "other label",    "other kind",          "other group",
                                 "other channel", "throws instead", "returns instead",     "dies instead"};
constexpr int wrongs = static_cast<int>(Wrong::dies);  // that a rank can do to itself

/// What a rank does when it hears of a fault.
enum class Then { returns, throws, renews_it, renews_the_world };

struct Call {
  Kind kind = Kind::barrier;
  DType dtype = f32;
  std::vector<std::int64_t> sizes{};  ///< of what a rank brings, a segment each
  int root = 0;                       ///< of a broadcast; of a message the sender
  int destination = 0;                ///< of a message
  int channel = 0;
  std::string label{};
};

struct Step {
  std::size_t group;  ///< of the program's
  Call call;
  bool blocks;
};

/// The same on every rank: groups, as members of the world, and calls on them.
struct Program {
  int world, culprit;
  std::vector<std::vector<int>> groups;
  std::vector<Step> steps;
  std::size_t at = 0;  ///< the step that the culprit does wrong
  Wrong wrong{};
  int slow = 0;             ///< another rank, which may be stopped
  std::size_t slow_at = 0;  ///< before this step

  bool has(std::size_t group, int rank) const { return std::ranges::count(groups[group], rank) > 0; }
  std::string text() const {
    const Step& step = steps[at];
    return fmt::format("rank {} of {}, at {} #{} on channel {} of the ranks {}: {}", culprit, world,
                       to_string(step.call.kind), at, step.call.channel, fmt::join(groups[step.group], ","),
                       names[static_cast<int>(wrong)]);
  }
};

Call random_call(Random& random, int ranks, std::string label) {
  constexpr Kind kinds[] = {Kind::all_reduce, Kind::all_gather, Kind::broadcast, Kind::barrier, Kind::send};
  Call c{.kind = kinds[below(random, 5)], .sizes = {below(random, 3) == 0 ? 3000 : 3}};
  if (c.kind == Kind::barrier) c.sizes.clear();
  c.root = below(random, ranks);
  c.destination = (c.root + 1 + below(random, ranks - 1)) % ranks;
  c.channel = below(random, most_channels);
  c.label = std::move(label);
  return c;
}

/// Whether a call is one of this rank's, where a message is between two.
bool takes_part(const Program& p, const Step& step, int rank) {
  if (!p.has(step.group, rank)) return false;
  const auto& members = p.groups[step.group];
  const auto is = [&](int member) { return members[static_cast<std::size_t>(member)] == rank; };
  return step.call.kind != Kind::send || is(step.call.root) || is(step.call.destination);
}

Program random_program(std::uint64_t seed, int world) {
  Random random(seed + 1);
  Program p{.world = world, .culprit = 0, .groups = {}, .steps = {}};
  std::vector<int> ranks(static_cast<std::size_t>(p.world));
  std::iota(ranks.begin(), ranks.end(), 0);
  p.groups = {ranks, ranks};
  for (int i = 0; i < 3; ++i) {
    std::ranges::shuffle(ranks, random);
    p.groups.emplace_back(ranks.begin(), ranks.begin() + 2 + below(random, p.world - 1));
  }
  const bool labels = below(random, 3) > 0;
  for (int i = 0; i < steps; ++i) {
    const auto group = static_cast<std::size_t>(below(random, static_cast<int>(p.groups.size())));
    const int size = static_cast<int>(p.groups[group].size());
    p.steps.push_back(
        {group, random_call(random, size, labels ? fmt::format("step {}", i) : ""), below(random, 2) == 0});
  }
  p.culprit = below(random, p.world);
  p.wrong = static_cast<Wrong>(below(random, wrongs));
  std::vector<std::size_t> own;
  for (std::size_t i = 0; i < p.steps.size(); ++i)
    if (takes_part(p, p.steps[i], p.culprit)) own.push_back(i);
  if (own.empty()) {
    p.steps.push_back({0, {.kind = Kind::barrier, .sizes = {}}, true});
    own.push_back(p.steps.size() - 1);
  }
  p.at = own[static_cast<std::size_t>(below(random, static_cast<int>(own.size())))];
  p.slow = (p.culprit + 1 + below(random, p.world - 1)) % p.world;
  p.slow_at = static_cast<std::size_t>(below(random, static_cast<int>(p.steps.size())));
  return p;
}

/// The calls that the culprit makes in place of the right one.
std::vector<Step> wrong_calls(const Program& p) {
  const Step right = p.steps[p.at];
  Step wrong = right;
  switch (p.wrong) {
    case Wrong::skips:
    case Wrong::throws:
    case Wrong::returns:
    case Wrong::dies:
      return {};
    case Wrong::repeats:
      return {right, right};
    case Wrong::adds:
      wrong.call.kind = Kind::all_reduce;
      wrong.call.sizes = {5};
      wrong.call.label = "one more";
      return {wrong, right};
    case Wrong::shape:
      wrong.call.sizes.push_back(1);
      if (right.call.kind == Kind::barrier) wrong.call.kind = Kind::all_reduce;
      break;
    case Wrong::dtype:
      wrong.call.dtype = f64;
      if (right.call.kind == Kind::barrier) wrong.call.kind = Kind::all_reduce, wrong.call.sizes = {1};
      break;
    case Wrong::label:
      wrong.call.label += "!";
      break;
    case Wrong::kind:
      wrong.call.kind = right.call.kind == Kind::all_reduce ? Kind::all_gather : Kind::all_reduce;
      if (wrong.call.sizes.empty()) wrong.call.sizes = {1};
      break;
    case Wrong::group:
      wrong.group = right.group == 0 ? 1 : 0;
      wrong.call.kind = Kind::barrier;
      wrong.call.sizes.clear();
      break;
    case Wrong::channel:
      wrong.call.channel = most_channels;
      break;
  }
  return {wrong};
}

/// What a rank came to know of the fault.
struct Seen {
  bool heard = false, ended = false;
  std::string text;
  std::vector<int> world_ranks;  ///< at fault
  double seconds = 0;
};

/// The tensors of a rank's part in a call.
Collective part_of(const Group& group, const Call& call, Device device) {
  const int size = group.size(), rank = group.rank();
  const bool receives = call.kind == Kind::send && rank == call.destination;
  Collective c{.kind = receives ? Kind::recv : call.kind, .channel = call.channel, .label = call.label};
  if (call.kind == Kind::broadcast || receives) c.peer = call.root;
  if (c.kind == Kind::send) c.peer = call.destination;
  const bool brings = !receives && (call.kind != Kind::broadcast || rank == call.root);
  for (std::int64_t n : call.sizes) {
    const std::int64_t gets = call.kind == Kind::all_gather ? n * size : n;
    if (brings) c.inputs.push_back(zeros({n}, {call.dtype, device}));
    if (c.kind != Kind::send) c.outputs.push_back(zeros({gets}, {call.dtype, device}));
  }
  return c;
}

/// One rank's way through a program.
class Walk {
 public:
  Walk(const Program& p, const Fate& fate, const World& world, std::uint64_t seed)
      : p_(p),
        fate_(fate),
        rank_(world.rank()),
        own_(seed * 100 + static_cast<std::uint64_t>(rank_)),
        in_(world.group()) {}

  void run() {
    groups_ = {in_, in_.strided(1)};
    for (std::size_t i = 2; i < p_.groups.size(); ++i) groups_.push_back(groups_[0].subgroup(p_.groups[i]));
    for (std::size_t i = 0; i < p_.steps.size(); ++i) {
      if (fate_.stop && rank_ == p_.slow && i == p_.slow_at) fate_.stop();
      if (i != p_.at || rank_ != p_.culprit) {
        if (takes_part(p_, p_.steps[i], rank_)) make(p_.steps[i]);
        continue;
      }
      if (p_.wrong == Wrong::dies) fate_.die();
      if (p_.wrong == Wrong::throws) throw Boom();
      if (p_.wrong == Wrong::returns) return;
      for (const Step& step : wrong_calls(p_)) make(step);
    }
    while (!pending_.empty()) finish_one();
    enter(groups_[0]);
    in_.barrier({.label = "the end"});
  }
  /// The group of the call that the rank is in.
  const Group& in() const { return in_; }
  /// Since it went into that call.
  double seconds() const { return std::chrono::duration<double>(Clock::now() - entered_).count(); }

 private:
  void enter(const Group& group) {
    in_ = group;
    entered_ = Clock::now();
  }
  void make(const Step& step) {
    enter(groups_[step.group]);
    pending_.emplace_back(in_, in_.enqueue(part_of(in_, step.call, rank_device(fate_.device))));
    if (step.blocks)
      while (!pending_.empty()) finish_one();
    else if (below(own_, 3) == 0)
      finish_one();
  }
  void finish_one() {
    const auto it = pending_.begin() + below(own_, static_cast<int>(pending_.size()));
    enter(it->first);
    it->second.wait();
    it->second.wait_inputs();
    pending_.erase(it);
  }

  const Program& p_;
  const Fate& fate_;
  int rank_;
  Random own_;
  Group in_;
  Clock::time_point entered_ = Clock::now();
  std::vector<Group> groups_;
  std::deque<std::pair<Group, Work>> pending_;
};

/// Whether a text has "rank 3 of the world", or a list of ranks with 3 in it. (std::regex, where ranks use it
/// at once, is a race for the thread sanitizer.)
bool names_of_the_world(const std::string& text, int rank) {
  const std::string name = std::to_string(rank);
  for (std::size_t end = 0; (end = text.find(" of the world", end)) != std::string::npos; ++end) {
    const std::size_t begin = text.rfind("rank", end);
    std::string list = text.substr(begin, end - begin) + ' ';
    std::ranges::replace(list, ',', ' ');
    if (list.find(' ' + name + ' ') != std::string::npos) return true;
  }
  return false;
}

/// Empty when the rank knows what it should.
std::string complaint_of(const Program& p, const Fate& fate, int rank, const Seen& seen) {
  const bool culprit = rank == p.culprit;
  if (!seen.heard) {
    const bool gone = p.wrong == Wrong::throws || p.wrong == Wrong::returns || seen.ended;
    return culprit && gone ? "" : "heard nothing";
  }
  // Of the group's ranks in the error, of others in the text.
  const bool named =
      std::ranges::count(seen.world_ranks, p.culprit) > 0 || names_of_the_world(seen.text, p.culprit);
  if (!named) return fmt::format("does not hear of rank {}", p.culprit);
  if (seen.seconds > in_time + fate.seconds) return fmt::format("hears after {} s", seen.seconds);
  return "";
}

}  // namespace

int random_fault_ranks(std::uint64_t seed) {
  Random random(seed);
  return 2 + below(random, 7);
}

void random_fault(World& world, std::uint64_t seed, std::string& complaint, const Fate& fate) {
  Program p = random_program(seed, world.size());
  if (fate.die) p.wrong = Wrong::dies;
  Walk walk(p, fate, world, seed);
  Seen seen;
  const auto judge = [&] {
    if (const std::string text = complaint_of(p, fate, world.rank(), seen); !text.empty())
      complaint = fmt::format("seed {}, {}; rank {} {}: {}", seed, p.text(), world.rank(), text, seen.text);
  };
  try {
    walk.run();
    seen.ended = true;
    judge();
  } catch (const CollectiveError& error) {
    seen.heard = true;
    seen.text = error.what();
    seen.seconds = walk.seconds();
    for (int rank : error.ranks())
      seen.world_ranks.push_back(walk.in().world_ranks()[static_cast<std::size_t>(rank)]);
    judge();
    Random random(seed * 1000 + static_cast<std::uint64_t>(world.rank()));
    const auto then = static_cast<Then>(below(random, 4));
    if (then == Then::throws) throw;
    if (then == Then::renews_it) walk.in().renew();
    if (then == Then::renews_the_world) world.group().renew();
  }
}

std::vector<std::string> complaints_of_random_faults(std::uint64_t first, std::uint64_t count,
                                                     const Fate& fate) {
  std::vector<std::string> all;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    std::vector<std::string> complaints(static_cast<std::size_t>(random_fault_ranks(seed)));
    try {
      run_ranks(static_cast<int>(complaints.size()), [&](World& world) {
        random_fault(world, seed, complaints[static_cast<std::size_t>(world.rank())], fate);
      });
    } catch (const CollectiveError&) {
    } catch (const Boom&) {
    }
    std::ranges::copy_if(complaints, std::back_inserter(all),
                         [](const std::string& complaint) { return !complaint.empty(); });
  }
  return all;
}

}  // namespace sherd::test
