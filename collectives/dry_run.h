// One rank's view of a world that is not there: every call is written down, nothing moves.
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
  std::uint64_t sequence;  ///< of the call, in its order
  std::string label;
  std::string words;  ///< the call in words: "all_gather(f32, 24 elements) of 'layers.3'"
  /// Of a post: bytes that this rank sends to and takes from its peers, each of which sends what another
  /// needs straight to it; a long all_reduce goes in slices, two rounds.
  std::int64_t sent = 0, received = 0;

  /// "0:all_gather(f32, 24 elements) of 'layers.3'", "0:wait all_gather of 'layers.3'"; in front of it the
  /// group, unless it is the world; for a label that is empty the number of the call.
  SHERD_API std::string text() const;
  /// "all_gather(layers.3)", "wait all_gather(layers.3)".
  SHERD_API std::string brief() const;
};

struct DryRunOptions {
  int rank = 0, size = 1;
  int local_size = 0;  ///< ranks of one machine; 0: all
  /// What `Work::done` says before a wait.
  enum class Done : std::uint8_t { when_waited, always } done = Done::when_waited;
};

/// A world of any size, seen by one of its ranks, in the calling thread: for schedules and plans. Tensors may
/// be on meta; outputs of others keep the values they have. Groups and meshes of any shape need no peers.
class SHERD_API DryRun {
 public:
  explicit DryRun(DryRunOptions options);
  ~DryRun();
  DryRun(const DryRun&) = delete;
  DryRun& operator=(const DryRun&) = delete;

  const World& world() const;
  /// All groups' steps, in the order in which the rank made them.
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
  /// What the steps with calls of this kind post.
  Traffic traffic(CollectiveKind kind) const;

 private:
  struct Record;
  class DryLine;
  class DryTransport;
  std::shared_ptr<Record> record_;
  std::unique_ptr<World> world_;
};

}  // namespace sherd
