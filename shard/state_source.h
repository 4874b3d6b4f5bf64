// Loading a state, wherever it comes from: tensors in memory, other ranks, files.
#pragma once

#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "nn/optimizer.h"
#include "shard/checkpoint.h"
#include "shard/holders.h"
#include "shard/sharded_state.h"

namespace sherd::shard {

/// Whole tensors by name, of which runs of elements are read.
class StateSource {
 public:
  virtual ~StateSource() = default;
  /// Of all tensors, in any order.
  virtual std::vector<std::string> names() const = 0;
  /// The shape of one; none where it is not there.
  virtual std::optional<Shape> shape(const std::string& name) const = 0;
  /// `numel` elements from `begin` on of one that is there: in one dimension, in memory of their own.
  virtual Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) const = 0;
  /// That optimizers took of one; 0 where it is not there or nobody says.
  virtual std::int64_t steps(const std::string&) const { return 0; }
  /// The end of a message that it lacks `name`: what it has in its place, and the way out.
  virtual std::string instead_of(const std::string& name) const;
  /// The end of a message that a tensor of it does not fit: whose it is, where not everyone's.
  virtual std::string whose(const std::string&) const { return {}; }
};

/// `StateSource::instead_of` of a tensor that no tensor here can hold.
inline std::string not_read(std::string_view why) {
  return fmt::format("; its file has it, and it was not read: {}", why);
}

/// Whole tensors in memory.
class WholeSource final : public StateSource {
 public:
  /// ValueError, under the name of `call`, for a name that comes twice.
  WholeSource(std::string_view call, const nn::StateDict& state);
  std::vector<std::string> names() const override;
  std::optional<Shape> shape(const std::string& name) const override;
  Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) const override;
  std::string instead_of(const std::string& name) const override;

 private:
  std::vector<std::string> names_;
  std::unordered_map<std::string, Tensor> tensors_;
  std::unordered_map<std::string, std::string> unread_;  ///< and why
};

/// Those of a source that were read.
class UsedNames {
 public:
  void add(const std::string& name) { used_.insert(name); }
  /// Those that were not, in the source's order.
  std::vector<std::string> others(const StateSource& from) const;

 private:
  std::unordered_set<std::string> used_;
};
/// ValueError, under the name of `call`, where a state has names that belong to no `what`.
void check_none_left(std::string_view call, std::span<const std::string> left, std::string_view what);

/// The elements of a parameter that this rank has.
struct Run {
  std::int64_t begin = 0, numel = 0;
  int replica = 0, replicas = 0;  ///< as in `ShardedTensor`
};
Run run_of(const nn::Parameter& p);
/// Of a tensor that has one number for each `per` elements of a parameter (`nn::StateForm`) those that this
/// rank keeps, and those that it saves. A number of elements that several ranks have some of is kept by each
/// of them, and saved by who has the first.
Run kept_of(const Run& elements, std::int64_t per);
Run saved_of(const Run& elements, std::int64_t per);
/// Of what `t` says that several ranks hold alike, the share of this rank: the shares of all ranks are
/// disjoint. `rank` is this rank's number among all.
ShardedTensor share_of(const ShardedTensor& t, int rank);

/// Values for a module that are read and checked. The module has them after `commit`, which fails for nothing
/// that could be known before.
class StagedModel {
 public:
  static constexpr std::string_view what = "parameter or buffer";
  /// Errors are those of `load_full_state_dict`, under the name of `call`, but that names of the state which
  /// the module lacks are none.
  StagedModel(std::string_view call, nn::Module& module, const StateSource& from,
              nn::Strict strict = nn::Strict::yes, Frozen frozen = Frozen::saved);
  /// What one side alone has.
  const nn::Mismatch& mismatch() const { return mismatch_; }
  void commit();

 private:
  nn::Mismatch mismatch_;
  std::vector<std::pair<Tensor, Tensor>> copies_;  // into, from
  std::vector<std::pair<nn::Buffer*, Tensor>> buffers_;
  std::vector<nn::ParameterOwner*> owners_;
  std::vector<std::pair<nn::Parameter, std::int64_t>> loaded_;  // and their steps
};

// ---- optimizers ----

/// In the order of its state, which has each under "state.<place>.<what>".
std::vector<nn::Parameter> all_parameters(const nn::Optimizer& optimizer);
std::string state_entry(std::size_t place, std::string_view what);
/// One number a parameter, not one an element.
inline bool counts_steps(std::string_view what) { return what == "step"; }
/// What there is by that name of a parameter that has no state yet.
Tensor no_state(const nn::Optimizer& optimizer, const nn::Parameter& p, std::string_view name);
/// Who holds each of an optimizer's parameters, under what names it in a state: its name in `model`, and its
/// number unless the state, which has entries of the parameters `in_state`, goes by names.
std::vector<Held> held_in_state(const nn::Optimizer& optimizer, nn::Module* model,
                                const std::set<std::string>& in_state);
/// What an optimizer keeps with the options that the state has.
std::vector<std::string> state_names_with(const nn::Optimizer& optimizer, const nn::StateDict& state);
/// StateError where a parameter of the optimizer was replaced in its module, whose state would be of no
/// parameter; takes in what it has been replaced by.
void check_optimizer(const nn::Optimizer& optimizer);
/// Of an optimizer's whole state this rank's part, in memory of its own, for `load_state_dict`, and what
/// belongs to none of its parameters.
struct StagedOptimizer {
  static constexpr std::string_view what = "parameter";
  nn::StateDict part{};
  std::vector<std::string> unknown{};
};
/// With a `model` the state may be by its names.
StagedOptimizer staged_optimizer_state(const nn::Optimizer& optimizer, const StateSource& from,
                                       nn::Module* model = nullptr);

}  // namespace sherd::shard
