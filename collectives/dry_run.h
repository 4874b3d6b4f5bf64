// Dry runs: a program runs as one rank of a world without other ranks; its calls are written down and nothing
// moves.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/world.h"

namespace sherd {

/// What a rank did at one moment of a dry run.
struct DryStep {
  enum class Kind : std::uint8_t { post, wait, wait_inputs };

  Kind kind;
  CollectiveKind call;
  std::string group;
  int channel;
  std::uint64_t sequence;  ///< number of the call in its order, from 0
  std::string label;
  std::string words;  ///< the call in words: "all_gather(f32, 24 elements) of 'layers.3'"
  /// For a post: bytes that this rank sends to and takes from its peers if every piece goes straight from the
  /// rank that has it to the one that needs it. An all_reduce counts as two rounds of slices.
  std::int64_t sent = 0, received = 0;

  /// "0:all_gather(f32, 24 elements) of 'layers.3'", "0:wait all_gather of 'layers.3'"; the number is the
  /// channel. Before it stands the group, unless it is "world"; an empty label is replaced by "#" and the
  /// number of the call.
  SHERD_API std::string text() const;
  /// "all_gather(layers.3)", "wait all_gather(layers.3)".
  SHERD_API std::string brief() const;
};

struct DryRunOptions {
  int rank = 0, size = 1;
  int local_size = 0;  ///< ranks of one machine; 0: all
  /// What `Work::done` answers: true once the work was waited for, or always.
  enum class Done : std::uint8_t { when_waited, always } done = Done::when_waited;
};

/// A world of any size, seen by one of its ranks, on the calling thread: to test schedules and forecast
/// traffic. Tensors may be on meta; outputs keep the values they have. Groups and meshes of any shape can be
/// made. `World::current` does not return this world.
class SHERD_API DryRun {
 public:
  /// ValueError for a rank outside [0, size), and when `local_size` does not divide `size`.
  explicit DryRun(DryRunOptions options);
  ~DryRun();
  DryRun(const DryRun&) = delete;
  DryRun& operator=(const DryRun&) = delete;

  const World& world() const;
  /// The steps of all groups, in the order in which the rank made them.
  const std::vector<DryStep>& steps() const;
  /// `text()` of every step, one a line.
  std::string log() const;
  /// `brief()` of every step, comma between: "all_gather(a), all_gather(b), wait all_gather(a)".
  std::string brief() const;
  /// Forgets the steps so far; calls keep their numbers.
  void clear();

  struct Traffic {
    std::uint64_t calls = 0;
    std::int64_t sent = 0, received = 0;  ///< bytes
    friend bool operator==(const Traffic&, const Traffic&) = default;
  };
  /// Calls of this kind that were posted, and their bytes.
  Traffic traffic(CollectiveKind kind) const;

 private:
  struct Record;
  class DryLine;
  class DryTransport;
  std::shared_ptr<Record> record_;
  std::unique_ptr<World> world_;
};

}  // namespace sherd
