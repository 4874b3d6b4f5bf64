#include "runtime/cuda/lanes.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>

#include "runtime/cuda/rank.h"

namespace sherd::cuda {
namespace {

using Part = WorkInParts::Part;

/// Less keeps a device busy for no longer than a launch.
constexpr std::size_t few_bytes = std::size_t{1} << 20;
constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();
/// In launches: what a part takes, and what it takes to hear that another lane is done.
constexpr float launch = 1, hearing = 0.5F;
float time_of(const Part& part) {
  return launch + static_cast<float>(part.bytes) / static_cast<float>(4 * few_bytes);
}

/// What the parts' order leaves open, if no part had to wait for a lane.
struct Ways {
  std::vector<float> latest;         ///< by part: when it must begin for the whole not to take longer
  std::vector<std::uint32_t> heirs;  ///< by part: of those that follow it, which must begin first
};

Ways ways_of(const std::vector<Part>& parts) {
  std::vector<float> way(parts.size());  // to the end
  Ways ways{{}, std::vector<std::uint32_t>(parts.size(), none)};
  for (auto i = static_cast<std::uint32_t>(parts.size()); i-- > 0;) {
    way[i] = (ways.heirs[i] == none ? 0 : way[ways.heirs[i]]) + time_of(parts[i]);
    for (const std::uint32_t before : parts[i].after)
      if (ways.heirs[before] == none || way[i] >= way[ways.heirs[before]]) ways.heirs[before] = i;
  }
  const float whole = parts.empty() ? 0 : *std::ranges::max_element(way);
  for (const float its : way) ways.latest.push_back(whole - its);
  return ways;
}

/// The last part of each lane that is done.
struct Done {
  std::array<std::int64_t, most_lanes> last;
  Done() { last.fill(-1); }
  void hear(const Done& other) {
    for (std::size_t k = 0; k < last.size(); ++k) last[k] = std::max(last[k], other.last[k]);
  }
};

/// Lanes as they fill.
class Placing {
 public:
  Placing(const std::vector<Part>& parts, int lanes)
      : parts_(parts), ways_(ways_of(parts)), lanes_(static_cast<std::size_t>(lanes)) {}

  InLane place(std::uint32_t i) {
    const std::size_t lane = lane_for(i);
    InLane placed{static_cast<int>(lane)};
    const float begin = begin_in(lane, i);
    Done done;
    if (lanes_[lane].last != none) done = done_[lanes_[lane].last];
    for (auto before = parts_[i].after.rbegin(); before != parts_[i].after.rend(); ++before) {
      std::int64_t& heard = done.last[of_[*before]];
      if (heard >= *before) continue;
      placed.behind.push_back(*before);
      done.hear(done_[*before]);
    }
    done.last[lane] = i;
    lanes_[lane] = {i, begin + time_of(parts_[i])};
    of_.push_back(lane);
    ends_.push_back(lanes_[lane].free);
    done_.push_back(done);
    return placed;
  }

 private:
  struct Lane {
    std::uint32_t last = none;
    float free = 0;
  };
  /// When a part could begin there.
  float begin_in(std::size_t lane, std::uint32_t i) const {
    float begin = lanes_[lane].free;
    for (const std::uint32_t before : parts_[i].after)
      begin = std::max(begin, ends_[before] + (of_[before] == lane ? 0 : hearing));
    return begin;
  }
  std::size_t lane_for(std::uint32_t i) const {
    if (parts_[i].bytes > few_bytes) return 0;
    std::size_t best = 0;
    float best_begin = std::numeric_limits<float>::infinity();
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      float begin = begin_in(lane, i);
      if (const std::uint32_t last = lanes_[lane].last; last != none) {
        const std::uint32_t heir = ways_.heirs[last];
        if (heir == i)
          begin -= hearing;
        else if (heir != none && heir > i)
          begin += std::max(0.F, begin + time_of(parts_[i]) - ways_.latest[heir]);
      }
      if (begin >= best_begin) continue;
      best = lane;
      best_begin = begin;
    }
    return best;
  }

  const std::vector<Part>& parts_;
  const Ways ways_;
  std::vector<Lane> lanes_;
  // By part that is placed: its lane, when it ends, and what is done then.
  std::vector<std::size_t> of_;
  std::vector<float> ends_;
  std::vector<Done> done_;
};

}  // namespace

std::vector<InLane> place_in_lanes(const WorkInParts& work, int lanes) {
  Placing placing(work.parts, lanes);
  std::vector<InLane> placed;
  for (std::uint32_t i = 0; i < work.parts.size(); ++i) placed.push_back(placing.place(i));
  return placed;
}

void give_in_lanes(const WorkInParts& work, DeviceState& state) {
  const std::vector<InLane> placed = place_in_lanes(work, most_lanes);
  std::vector<std::unique_ptr<Event>> after(work.parts.size());  // of parts that another lane waits for
  for (const InLane& its : placed)
    for (const std::uint32_t before : its.behind) {
      if (placed[before].lane != its.lane && !after[before]) after[before] = std::make_unique<Event>();
    }
  struct Lanes {  // left however it ends: the recording is the own stream's
    DeviceState& state;
    ~Lanes() { state.work_in_lane(0); }
  } const lanes{state};
  Event begin, end;
  begin.record(state.stream());
  std::array<bool, most_lanes> used{true};
  for (std::uint32_t i = 0; i < work.parts.size(); ++i) {
    state.work_in_lane(placed[i].lane);
    bool& known = used[static_cast<std::size_t>(placed[i].lane)];
    if (!known) begin.precede(state.stream());
    known = true;
    for (const std::uint32_t before : placed[i].behind) after[before]->precede(state.stream());
    work.give(i);
    if (after[i]) after[i]->record(state.stream());
  }
  for (int lane = 1; lane < most_lanes; ++lane) {
    if (!used[static_cast<std::size_t>(lane)]) continue;
    state.work_in_lane(lane);
    end.record(state.stream());
    state.work_in_lane(0);
    end.precede(state.stream());
  }
}

}  // namespace sherd::cuda
