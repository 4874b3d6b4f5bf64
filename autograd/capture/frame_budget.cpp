// How a frame comes to keep what its budget has room for.
#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "autograd/capture/frame.h"
#include "autograd/capture/passes/copies.h"
#include "autograd/capture/passes/dead_code.h"
#include "autograd/capture/passes/late.h"
#include "autograd/capture/passes/rewrite.h"

namespace sherd {
namespace {

constexpr int most_quarters = 4 * 20;  // of a doubling of what a byte that is kept costs

/// Rounded up to what two digits say.
double part_of(std::int64_t bytes, std::int64_t whole) {
  return std::ceil(100 * static_cast<double>(bytes) / static_cast<double>(whole)) / 100;
}

}  // namespace

/// Looks for the programs of a forward and a backward that were heard with all that eager code keeps.
struct Frame::Fitting {
  struct Candidate {
    Partitioning::Choice choice;
    std::vector<MadeAgain> parts;
    std::vector<KeptFrom> kept;  // of the frame, and what is kept besides
    Recorded recorded;           // the backward, before the passes
    std::unique_ptr<Program::Impl> forward, backward;
    std::vector<std::uint32_t> reads;  // numbers of what is kept
    std::int64_t peak = 0;             // in bytes
    std::int64_t cost = 0;             // of what is made again
  };

  static constexpr std::uint32_t none = TracedTensor::none;

  const Frame& frame;
  const FrameCall& call;
  const Recorded& backward;
  const std::vector<Program::Impl::Rounding>& roundings;
  const Partitioning values{frame.to_fit_->forward, frame.to_fit_->values, MakesAgain::all,
                            frame.keeping_.costs};

  Partitioning::Choice nothing() const {
    return Partitioning::Choice(frame.to_fit_->forward.trace.storages.size());
  }
  /// What the executor would make again without a budget.
  Partitioning::Choice usual() const {
    if (frame.keeping_.keeps == Keeps::as_eager) return nothing();
    return Partitioning(frame.to_fit_->forward, frame.to_fit_->values, MakesAgain::small,
                        frame.keeping_.costs)
        .cheapest(0);
  }

  Candidate attempt(Partitioning::Choice choice) const {
    Candidate made{std::move(choice), {}, frame.kept_, {}, {}, {}, {}};
    made.parts = values.made_again(made.choice);
    made.cost = values.cost(made.choice);
    number_others(made);
    made.forward = frame.program_of(forward_without(made));
    made.recorded = backward_with(made);
    made.backward = frame.program_of(made.recorded);
    made.peak = peak_of(*made.forward, *made.backward, roundings);
    return made;
  }

  /// Where it takes more than `limit` values are made again for each use: as far as they must, and where
  /// packing leaves no room for that as far as they can.
  void copy_for_uses(Candidate& made, std::int64_t limit) const {
    if (made.peak <= limit) return;
    const Recorded placed = late(dead_code(made.recorded));
    const std::int64_t cost = made.cost, all = made.peak;
    for (const std::int64_t less : {made.peak - limit, all}) {
      if (made.peak <= limit) return;
      Copied copied = copied_for_uses(placed, frame.keeping_.costs, less);
      if (copied.cost == 0) return;
      std::unique_ptr<Program::Impl> program = frame.program_of(std::move(copied.program));
      const std::int64_t peak = peak_of(*made.forward, *program, roundings);
      if (peak < made.peak) {
        made.backward = std::move(program);
        made.peak = peak;
        made.cost = cost + copied.cost;
      }
      if (less == all) return;
    }
  }

  /// What is kept of others than eager code keeps has the numbers behind.
  void number_others(Candidate& made) const {
    const std::vector<TracedStorage>& storages = frame.to_fit_->forward.trace.storages;
    std::unordered_map<std::uint32_t, std::uint32_t> number_of;
    for (MadeAgain& part : made.parts)
      for (auto& [index, number] : part.read) {
        if (number < Partitioning::first_other) continue;
        const std::uint32_t storage = number - Partitioning::first_other;
        const auto [known, is_new] =
            number_of.try_emplace(storage, static_cast<std::uint32_t>(made.kept.size()));
        number = known->second;
        if (!is_new) continue;
        const Ref<Storage>& outside = storages[storage].outside;
        made.kept.push_back({outside && !is_input(storage) ? none : storage,
                             outside && !is_input(storage) ? outside : Ref<Storage>{}});
      }
  }
  bool is_input(std::uint32_t storage) const {
    return std::ranges::find(frame.to_fit_->forward.inputs, storage, &TracedTensor::storage) !=
           frame.to_fit_->forward.inputs.end();
  }

  void find_reads(Candidate& made) const {
    const Program::Impl& program = *made.backward;
    for (const auto& [storage, number] : program.cut->kept)
      if (!program.places[storage].tensors.empty()) made.reads.push_back(number);
    for (std::uint32_t k = 0; k < made.kept.size(); ++k)
      if (made.kept[k].outside && std::ranges::find(program.trace.storages, made.kept[k].outside,
                                                    &TracedStorage::outside) != program.trace.storages.end())
        made.reads.push_back(k);
  }

  /// Keeps what is not made again.
  Recorded forward_without(const Candidate& made) const {
    Recorded forward = frame.to_fit_->forward;
    forward.cut = cut_of_forward(made.kept);
    std::erase_if(forward.cut->made, [&](const auto& kept) { return is_made(made.parts, kept.second); });
    return forward;
  }
  static bool is_made(const std::vector<MadeAgain>& parts, std::uint32_t number) {
    return std::ranges::any_of(parts, [&](const MadeAgain& part) {
      return std::ranges::find(part.made, number, &std::pair<std::uint32_t, std::uint32_t>::second) !=
             part.made.end();
    });
  }

  /// Makes the rest first; passes put each op where it is needed.
  Recorded backward_with(Candidate& made) const {
    Recorded program = backward;
    std::vector<TracedStorage>& storages = program.trace.storages;
    std::unordered_map<std::uint32_t, std::uint32_t> place_of;  // by number
    for (const auto& [storage, number] : program.cut->kept) place_of.emplace(number, storage);
    for (std::uint32_t s = 0; s < storages.size(); ++s)
      for (std::uint32_t k = 0; k < made.kept.size() && storages[s].outside; ++k)
        if (made.kept[k].outside == storages[s].outside) place_of.emplace(k, s);
    const auto add = [&](TracedStorage storage) {
      storages.push_back(std::move(storage));
      return static_cast<std::uint32_t>(storages.size() - 1);
    };
    std::vector<TracedOp> ops;
    for (const MadeAgain& part : made.parts) {
      std::vector<std::uint32_t> place(part.trace.storages.size(), none);
      for (const auto& [index, number] : part.read) {
        const auto [known, is_new] = place_of.try_emplace(number, none);
        if (is_new) {
          TracedStorage storage = part.trace.storages[index];
          storage.outside = made.kept[number].outside;
          if (storage.outside) storage.version = storage.outside->version();
          known->second = add(std::move(storage));
          if (made.kept[number].storage != none) program.cut->kept.emplace_back(known->second, number);
        }
        place[index] = known->second;
      }
      for (const auto& [index, number] : part.made) {
        const auto known = place_of.find(number);
        if (known == place_of.end()) continue;
        place[index] = known->second;
        storages[known->second].outside = {};
        storages[known->second].maker = 0;  // anew below
        std::erase_if(program.cut->kept, [&](const auto& kept) { return kept.second == number; });
      }
      for (std::uint32_t index = 0; index < place.size(); ++index)
        if (place[index] == none) place[index] = add(part.trace.storages[index]);
      for (TracedOp traced : part.trace.ops) {
        traced.op = frame.op_of(call, traced.op);
        each_tensor_of(traced, [&](TracedTensor& t) { t.storage = place[t.storage]; });
        ops.push_back(std::move(traced));
      }
    }
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i <= program.trace.ops.size(); ++i) places.push_back(ops.size() + i);
    std::ranges::move(program.trace.ops, std::back_inserter(ops));
    replace_ops(program, std::move(ops), places);
    return program;
  }

  /// Of choices `less`, which does not fit, and `more`, which does, the cheapest mixture that fits: what is
  /// made early in the forward is the last that a backward needs.
  Candidate between(const Partitioning::Choice& less, Candidate more, std::int64_t limit) const {
    std::size_t low = 0, high = frame.to_fit_->forward.trace.ops.size();
    const Partitioning::Choice whole = more.choice;
    while (high - low > 1) {
      const std::size_t middle = low + (high - low) / 2;
      Candidate mixture = attempt(values.mixed(less, whole, middle));
      (mixture.peak <= limit ? high : low) = middle;
      if (mixture.peak <= limit && mixture.cost < more.cost) more = std::move(mixture);
    }
    return more;
  }

  /// Choices that do not fit without copies, and what they take.
  struct Tight {
    Partitioning::Choice choice;
    std::int64_t peak;
  };
  static constexpr std::size_t most_tight = 6;
  /// Keeps the few that take least.
  static void keep(std::vector<Tight>& tight, const Candidate& found) {
    const auto at = std::ranges::upper_bound(tight, found.peak, {}, &Tight::peak);
    tight.insert(at, {found.choice, found.peak});
    if (tight.size() > most_tight) tight.pop_back();
  }

  /// Of choices that make more and more again, the first that fits; ValueError where none does. A minimal cut
  /// knows what is kept, not what waits while it is made again, which segments bound. Copies make room where
  /// no choice fits, and are taken in place of one that costs more.
  Candidate cheapest(std::int64_t eager_peak) const {
    const MemoryBudget& budget = frame.keeping_.budget;
    std::int64_t limit = budget.limit(eager_peak, 0);
    Candidate found = attempt(usual());
    if (found.peak > limit && eager_peak < found.peak) found = attempt(nothing());
    std::vector<Tight> tight;
    if (found.peak > limit) keep(tight, found);
    const auto next = [&](Partitioning::Choice choice) {
      if (found.peak <= limit || choice == found.choice) return;
      found = attempt(std::move(choice));
      if (found.peak <= limit)
        found = between(Partitioning::Choice(tight.front().choice), std::move(found), limit);
      else
        keep(tight, found);
    };
    for (int quarters = 0; quarters <= most_quarters; ++quarters) next(values.cheapest(quarters));
    const std::size_t ops = frame.to_fit_->forward.trace.ops.size();
    for (std::size_t segments = ops / 2; segments > 1; segments -= (segments + 3) / 4)
      next(values.in_segments(segments));
    if (found.peak > limit) found = attempt(tight.front().choice);
    for (Tight& other : tight) {
      if (found.peak <= limit && other.peak > limit + limit / 4) continue;  // much would have to be copied
      Candidate copied = attempt(std::move(other.choice));
      copy_for_uses(copied, limit);
      const bool fits = copied.peak <= limit;
      if (found.peak > limit ? copied.peak < found.peak : fits && copied.cost < found.cost)
        found = std::move(copied);
    }
    limit = budget.limit(eager_peak, found.peak);
    check<ValueError>(
        found.peak <= limit,
        "compile: a call {}and its backward take {} bytes at the least that is found, {} with all that eager "
        "code keeps, and the budget is {}; give them {}, or MemoryBudget::least()",
        shapes_of(frame.to_fit_->forward.inputs, [](const TracedTensor& t) { return t.layout.shape; }),
        found.peak, eager_peak, limit,
        budget.is_part() ? fmt::format("MemoryBudget::part({:.2f})", part_of(found.peak, eager_peak))
                         : "as much");
    find_reads(found);
    return found;
  }
};

/// When the first backward is known.
void Frame::fit(const FrameCall& call, const Recorded& backward, Backward& made) {
  const Fitting fitting{*this, call, backward, made.roundings};
  const std::int64_t eager_peak = peak_of(*forward_, *made.program, made.roundings);
  Fitting::Candidate found = fitting.cheapest(eager_peak);
  eager_peak_ = eager_peak;
  kept_ = std::move(found.kept);
  keep_less(std::move(found.parts));
  set_forward(std::move(found.forward));
  made.program = std::move(found.backward);
  made.reads = std::move(found.reads);
  to_fit_.reset();
}

}  // namespace sherd
