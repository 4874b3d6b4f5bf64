// Whether the ranks that share a model have taken the same steps: the model's first call after a renewal of
// groups asks, since a fault between two steps may have cost a slow rank one that the others took.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/group.h"
#include "nn/module.h"
#include "shard/call_name.h"

namespace sherd::shard {

class ParameterGroup;
class Unit;
struct Ranks;

/// Up to which renewal of this rank's groups ranks were found alike: that of its making at first.
class StepCheck {
 public:
  StepCheck();
  /// Whether there was one since, as of both.
  bool due() const;
  std::uint64_t steps, gradients;
};

/// What is compared, and over which ranks.
struct Compared {
  std::string_view call;
  std::string model;
  Identity identity;  ///< of the model
  const Ranks& ranks;
  int channel;
  std::vector<nn::Parameter> parameters{};  ///< that are stepped
  std::vector<std::int64_t> gradients{};  ///< averages that each holds; `no_number` where it has no elements
  std::vector<StepCheck*> checks{};
  std::vector<ParameterGroup*> groups{};        ///< of sharded modules
  std::string_view label = "steps of a model";  ///< of the call
  std::size_t kinds = 3;                        ///< of the numbers of a parameter, the first ones
};
inline constexpr std::int64_t no_number = std::numeric_limits<std::int64_t>::min();

/// What holds replicas of a model, and compares by itself.
class Replicated {
 public:
  virtual ~Replicated() = default;
  virtual void check_ranks() = 0;
};

/// StateError on all ranks where one lost a step that others took, or a part of one, and where some ranks
/// have not renewed what others did. Makes calls after a renewal alone.
void check_steps(const Compared& compared);
/// The same where `.grad` has the averages of a failed backward on some ranks, before others are added.
void check_gradients(const Compared& compared);

// ---- of sharded modules ----

/// Before the forward of a root: of all units in it, which are not made parts of it before they were found
/// alike, so that one that is refused leaves each rank's next call to be of what it was.
void check_steps(StepCheck& of_root, nn::Module& root);
/// Before a backward, both.
void check_backward(const std::vector<std::shared_ptr<Unit>>& units);
/// Of the root of a group.
void check_steps(const ParameterGroup& group);
/// Of all units in a module, or that have one of `parameters`; of a module also of what replicates it.
void check_steps(nn::Module& module);
void check_steps(std::span<const nn::Parameter> parameters);

/// What of a model a checkpoint has.
enum class Saved : std::uint8_t { values, optimizer_too };
/// Before a checkpoint of `module` by `ranks`, which are unlike also without a fault where they made unlike
/// numbers of steps. Of ranks with modules of other names nothing is known. Collective.
void check_saved_steps(const nn::Module& module, Saved saved, const Group& ranks);

// ---- what both this and `bring_up` do ----

/// The least and the most of any rank that has the number.
struct Range {
  std::int64_t least = no_number, most = no_number;
  bool alike() const { return least == most; }
  void add(std::int64_t number) {
    if (number == no_number) return;
    least = least == no_number ? number : std::min(least, number);
    most = std::max(most, number);
  }
};
std::vector<Range> over_ranks(std::span<const std::int64_t> numbers, const Ranks& ranks,
                              const CallOptions& options);
/// What optimizers did to each, as numbers that are alike on ranks at one step, three a parameter. The first
/// is odd where a step was broken off; the others are `no_number` where this rank has no elements.
std::vector<std::int64_t> numbers_of(std::span<const nn::Parameter> parameters);
inline constexpr std::size_t numbers_a_parameter = 3;
/// Whether ranks are alike in number `i` of those, and none of them is within a step.
bool whole(std::span<const Range> ranges, std::size_t i);

/// For messages: the folder of the last checkpoint that was saved or loaded of a model, and the way out of
/// what its `parameters` came to.
void remember_checkpoint(const nn::Module& model, const std::string& folder);
std::string load_a_checkpoint(std::span<const nn::Parameter> parameters);

}  // namespace sherd::shard
