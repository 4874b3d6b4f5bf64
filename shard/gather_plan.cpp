#include "shard/gather_plan.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>

#include "shard/agree.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

using Moment = Record::Moment;
constexpr std::string_view call = "plan_gathers";
/// Further ahead than that the channel is busy anyway, and what is gathered waits for it.
constexpr int most_ahead = 4;

/// A forward's list as numbers, and the memory that steps like it take in whole parameters.
class Forecast {
 public:
  struct Whole {
    std::shared_ptr<Gathered> gathered;
    std::int64_t bytes;
    bool keeps;         ///< its module's options say that it stays
    bool ends = false;  ///< its module runs; else it is read outside it alone, and goes when that is over
    std::uint64_t first = std::uint64_t(-1), last = 0;  ///< places between which a backward reads it
  };
  using Staying = std::vector<bool>;  ///< by whole, beside those that `keeps`

  /// `uses`: of groups that are there.
  Forecast(std::span<const Record::Use> uses, const std::function<bool(const ParameterGroup&)>& keeps) {
    std::unordered_map<const Gathered*, std::size_t> known;
    for (const Record::Use& use : uses) {
      const auto gathered = use.gathered.lock();
      const auto [at, fresh] = known.emplace(gathered.get(), wholes_.size());
      if (fresh) {
        const std::int64_t numel = gathered->group().spec().partition.gathered_numel();
        const std::int64_t bytes = gathered->is_shard_itself() ? 0 : numel * size_of(gathered->dtype());
        wholes_.push_back({gathered, bytes, keeps(gathered->group())});
      }
      Whole& whole = wholes_[at->second];
      forward_.push_back({at->second, use.moment});
      if (use.moment == Moment::end) whole.ends = true;
      if (!use.planned) continue;
      whole.first = std::min(whole.first, use.place);
      whole.last = std::max({whole.last, use.place, use.region ? use.region->end : 0});
    }
    for (std::size_t i = 0; i < wholes_.size(); ++i)
      if (wholes_[i].last > 0)
        backward_.push_back({i, wholes_[i].last}), backward_.push_back({i, wholes_[i].first, true});
    std::ranges::stable_sort(backward_, [](const Turn& a, const Turn& b) {
      return a.place != b.place ? a.place > b.place : !a.leaves && b.leaves;  // of one use, read once
    });
  }

  const std::vector<Whole>& wholes() const { return wholes_; }
  bool trains() const { return !backward_.empty(); }
  /// What else may stay, whose backward comes first first.
  std::vector<std::size_t> candidates() const {
    std::vector<std::size_t> list;
    for (const Turn& turn : backward_) {
      const Whole& whole = wholes_[turn.whole];
      if (!turn.leaves && whole.ends && !whole.keeps && whole.bytes > 0) list.push_back(turn.whole);
    }
    return list;
  }
  /// The most bytes at once.
  std::int64_t peak(const Staying& staying, int ahead) const {
    Held held(wholes_);
    walk_forward(held, staying, ahead);
    walk_backward(held, ahead);
    return held.most;
  }
  /// Alike on ranks whose forwards were (FNV-1a).
  std::uint64_t digest() const {
    std::uint64_t hash = 0xcbf29ce484222325;
    const auto add = [&](std::uint64_t word) { hash = (hash ^ word) * 0x100000001b3; };
    for (const Whole& whole : wholes_) {
      for (const char c : whole.gathered->group().label()) add(static_cast<unsigned char>(c));
      add(static_cast<std::uint64_t>(whole.bytes));
      add(whole.keeps ? 1 : 0);
    }
    for (const Use& use : forward_) add(use.whole), add(static_cast<std::uint64_t>(use.moment));
    for (const Turn& turn : backward_) add(turn.whole);
    return hash;
  }

 private:
  struct Use {
    std::size_t whole;
    Moment moment;
  };
  /// Of a backward: a whole is needed from there on, or no longer.
  struct Turn {
    std::size_t whole;
    std::uint64_t place;
    bool leaves = false;
  };
  /// What is here, and why.
  struct Held {
    explicit Held(const std::vector<Whole>& all) : wholes(all), reasons(all.size()), stays(all.size()) {}
    void begin(std::size_t i) {
      if (reasons[i]++ == 0) bytes += wholes[i].bytes, most = std::max(most, bytes);
    }
    void end(std::size_t i) {
      if (--reasons[i] == 0) bytes -= wholes[i].bytes;
    }
    bool here(std::size_t i) const { return reasons[i] > 0; }

    const std::vector<Whole>& wholes;
    std::vector<int> reasons;
    std::vector<bool> stays;
    std::int64_t bytes = 0, most = 0;
  };

  /// The list of forwards in which these stay: what is kept is read without notice.
  std::vector<Use> listed(const Staying& staying) const {
    std::vector<Use> list;
    std::vector<bool> kept(wholes_.size());
    for (const Use& use : forward_) {
      if (use.moment == Moment::read && kept[use.whole]) continue;
      if (use.moment == Moment::end && (wholes_[use.whole].keeps || staying[use.whole]))
        kept[use.whole] = true;
      list.push_back(use);
    }
    return list;
  }

  /// As `Root`'s cursor goes.
  void walk_forward(Held& held, const Staying& staying, int ahead) const {
    const std::vector<Use> uses = listed(staying);
    const auto gathers = [](Moment moment) { return moment == Moment::begin || moment == Moment::read; };
    std::vector<bool> guessed(wholes_.size());
    std::optional<std::size_t> read;  // outside its module, until the cursor goes on
    const auto end_read = [&] {
      if (const auto last = std::exchange(read, {})) held.end(*last);
    };
    for (std::size_t u = 0; u < uses.size(); ++u) {
      const auto [i, moment] = uses[u];
      if (moment == Moment::end) {
        if ((wholes_[i].keeps || staying[i]) && !held.stays[i]) held.stays[i] = true, held.begin(i);
        held.end(i);
        continue;
      }
      if (!gathers(moment)) continue;
      end_read();
      held.begin(i);
      if (moment == Moment::read) read = i;
      int count = 0;
      for (std::size_t next = u + 1; next < uses.size() && count < ahead; ++next) {
        const std::size_t j = uses[next].whole;
        if (!gathers(uses[next].moment)) continue;
        ++count;
        if (!held.here(j)) guessed[j] = true, held.begin(j);
      }
      if (guessed[i]) guessed[i] = false, held.end(i);
    }
    end_read();
    for (std::size_t i = 0; i < guessed.size(); ++i)
      if (guessed[i]) held.end(i);
  }

  /// As a `Plan` gathers and lets go.
  void walk_backward(Held& held, int ahead) const {
    std::vector<std::size_t> gathers;
    for (const Turn& turn : backward_)
      if (!turn.leaves && !held.stays[turn.whole]) gathers.push_back(turn.whole);
    std::vector<bool> listed(wholes_.size());
    const auto list = [&](std::size_t i) {
      if (!listed[i]) listed[i] = true, held.begin(i);
    };
    std::size_t due = 0;
    for (const Turn& turn : backward_) {
      const std::size_t i = turn.whole;
      if (!turn.leaves && held.stays[i]) continue;
      if (turn.leaves) {
        held.end(i);
      } else {
        list(i);
        ++due;
      }
      const SchedulePolicy& policy = wholes_[i].gathered->group().root()->policy();
      if (turn.leaves != policy.backward_prefetch.after_reduction()) continue;
      for (std::size_t k = due; k < gathers.size() && k < due + static_cast<std::size_t>(ahead); ++k)
        list(gathers[k]);
    }
  }

  std::vector<Whole> wholes_;
  std::vector<Use> forward_;
  std::vector<Turn> backward_;
};

/// The cheapest step whose peak is no more than `bytes`: first one group ahead, so that gathers run beside
/// computing, then as many that stay as fit, then more ahead.
struct Choice {
  Forecast::Staying staying;
  int ahead = 0;
  std::int64_t peak = 0;
};
Choice choose(const Forecast& forecast, std::int64_t bytes) {
  Choice choice{Forecast::Staying(forecast.wholes().size())};
  const auto fits = [&](const Forecast::Staying& staying, int ahead) {
    const std::int64_t peak = forecast.peak(staying, ahead);
    if (peak > bytes) return false;
    choice = {staying, ahead, peak};
    return true;
  };
  const Forecast::Staying none = choice.staying;
  check<ValueError>(fits(none, 0), "{}: {} bytes, where whole parameters take {} at least; give that", call,
                    bytes, forecast.peak(none, 0));
  fits(none, 1);
  const std::vector<std::size_t> candidates = forecast.candidates();
  const auto first = [&](std::size_t count) {
    Forecast::Staying staying = none;
    for (std::size_t k = 0; k < count; ++k) staying[candidates[k]] = true;
    return staying;
  };
  std::size_t low = 0, high = candidates.size();  // of those that stay
  while (low < high) {
    const std::size_t middle = (low + high + 1) / 2;
    fits(first(middle), choice.ahead) ? low = middle : high = middle - 1;
  }
  while (choice.ahead < most_ahead && fits(choice.staying, choice.ahead + 1)) {
  }
  return choice;
}

/// The groups of ranks on which the model's calls are, each once, in the order of its modules.
std::vector<Group> ranks_of(std::span<const std::shared_ptr<Unit>> units) {
  std::vector<Group> all;
  for (const auto& unit : units)
    for (const Members& m : unit->members()) {
      const Ranks& ranks = m.group->spec().ranks;
      for (const Group& group : {ranks.shard, ranks.replicas})
        if (group.defined() && std::ranges::find(all, group) == all.end()) all.push_back(group);
    }
  return all;
}

/// The least and the largest of what ranks give, and whose they are.
struct Span {
  std::int64_t least, whose_least, most, whose_most;
  void join(const Span& other) {
    if (other.least < least) least = other.least, whose_least = other.whose_least;
    if (other.most > most) most = other.most, whose_most = other.whose_most;
  }
};

/// ValueError or StateError on all ranks, which names two that do not give the same. Of groups that cross
/// (shards and replicas) each hears of the others' in a second round.
void agree(std::span<const Group> groups, std::int64_t bytes, std::uint64_t digest) {
  if (groups.empty()) return;
  const std::int64_t me = groups[0].world_ranks()[static_cast<std::size_t>(groups[0].rank())];
  const auto forward = static_cast<std::int64_t>(digest);
  std::array<Span, 2> seen{Span{bytes, me, bytes, me}, Span{forward, me, forward, me}};
  for (int round = 0; round < (groups.size() > 1 ? 2 : 1); ++round)
    for (const Group& group : groups) {
      std::array<std::int64_t, 8> own;
      std::memcpy(own.data(), seen.data(), sizeof(own));
      const std::vector<std::int64_t> all = of_all_ranks(group, own, {.label = std::string(call)});
      for (std::size_t r = 0; r < all.size(); r += own.size()) {
        std::array<Span, 2> theirs;
        std::memcpy(theirs.data(), all.data() + r, sizeof(own));
        for (std::size_t k = 0; k < seen.size(); ++k) seen[k].join(theirs[k]);
      }
    }
  const Span &given = seen[0], &forwards = seen[1];
  check<ValueError>(given.least == given.most,
                    "{}: rank {} gives {} bytes, rank {} {}; give all ranks the same", call,
                    given.whose_least, given.least, given.whose_most, given.most);
  check<StateError>(forwards.least == forwards.most,
                    "{}: the last forward of rank {} was another one than that of rank {}, or one without "
                    "gradients; call it after one that all ranks ran alike",
                    call, forwards.whose_least, forwards.whose_most);
}

/// The unit of a model that has run a forward and runs none now.
const Unit& outermost(nn::Module& model) {
  const Unit* const unit = unit_of(model);
  check<StateError>(unit != nullptr, "{}: {} is not sharded; call it of the outermost module that is", call,
                    model.type_name());
  const Root& root = unit->root();
  check<StateError>(!root.running() && !Engine::current().in_backward(),
                    "{}: a forward or backward of {} is under way; call it between steps", call,
                    model.type_name());
  const std::vector<NamedUnit> own = units_of(model);
  for (const auto& other : root.units())
    check<StateError>(std::ranges::find(own, other.get(), &NamedUnit::unit) != own.end(),
                      "{}: {} is within a sharded model; call it of that one", call, model.type_name());
  check<StateError>(
      root.last() != nullptr,
      "{}: {} has run no forward to its end since it was sharded, or its ranks renewed; call it "
      "after one",
      call, model.type_name());
  for (const Record::Use& use : root.last()->listed()) {
    const auto gathered = use.gathered.lock();
    check<StateError>(
        gathered && !gathered->group().retired(),
        "{}: a module of {} was cast, moved to a device or sharded anew since the last forward; "
        "call it after another one",
        call, model.type_name());
  }
  return *unit;
}

}  // namespace

GatherPlan plan_gathers(nn::Module& model, std::int64_t bytes) {
  const Unit& unit = outermost(model);
  const auto units = unit.root().units();
  const auto keeps = [&](const ParameterGroup& group) {
    for (const auto& u : units)
      for (const Members& m : u->members())
        if (m.group.get() == &group)
          return u.get() == &unit || u->policy().after_forward == AfterForward::keep;
    return true;  // another root's: its own policy says
  };
  const Forecast forecast(unit.root().last()->listed(), keeps);
  agree(ranks_of(units), bytes, forecast.digest());
  check<StateError>(forecast.trains(),
                    "{}: the last forward of {} was one without gradients; call it after one with", call,
                    model.type_name());
  const Choice choice = choose(forecast, bytes);
  GatherPlan plan{.ahead = choice.ahead, .peak_bytes = choice.peak};
  for (const auto& u : units)
    for (const Members& m : u->members()) m.group->switches.stays_after_forward = false;
  for (std::size_t i = 0; i < choice.staying.size(); ++i) {
    if (!choice.staying[i]) continue;
    ParameterGroup& group = forecast.wholes()[i].gathered->group();
    group.switches.stays_after_forward = true;
    plan.staying.push_back(group.label());
  }
  for (const auto& u : units) u->gather_ahead(choice.ahead);
  return plan;
}

}  // namespace sherd::shard
