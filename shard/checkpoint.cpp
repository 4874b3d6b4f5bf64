#include "shard/checkpoint.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "runtime/context.h"
#include "runtime/shown.h"
#include "shard/agree.h"
#include "shard/checkpoint_files.h"
#include "shard/group.h"
#include "shard/holders.h"
#include "shard/part_file.h"
#include "shard/saved_state.h"
#include "shard/state_source.h"

namespace sherd::shard {
namespace {

using Path = FileSystem::Path;

constexpr std::string_view model_name = "model", optimizer_name = "optimizer";

/// As one rank finds it: of what each group of ranks has another, its own.
class SavedSource final : public StateSource {
 public:
  /// ValueError where two tensors get one name.
  SavedSource(const SavedState& state, const CheckpointPart& part, const NameGroups& groups)
      : state_(state), part_(part), groups_(groups) {
    for (const SavedTensor& t : state_.tensors()) {
      if (t.group != 0) continue;
      const std::string name = part.renamed(std::string(t.name));
      if (name.empty()) continue;
      const auto [other, is_new] = tensors_.emplace(name, &t);
      check<ValueError>(is_new, "{}: '{}' and '{}' of the save are both renamed to '{}'", loading,
                        shown(other->second->name), shown(t.name), shown(name));
      names_.push_back(name);
    }
  }
  std::vector<std::string> names() const override { return names_; }
  std::optional<Shape> shape(const std::string& name) const override {
    const SavedTensor* found = find(name);
    return found == nullptr || !state_.why_unread(*found).empty() ? std::nullopt
                                                                  : std::optional<Shape>(found->shape);
  }
  std::int64_t steps(const std::string& name) const override {
    const SavedTensor* found = find(name);
    return found == nullptr ? 0 : state_.steps(found->name);
  }
  std::string instead_of(const std::string& name) const override {
    const SavedTensor* found = find(name);
    return found == nullptr ? StateSource::instead_of(name) : not_read(state_.why_unread(*found));
  }
  Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) const override {
    return state_.read(*find(name), begin, numel);
  }
  std::string whose(const std::string& name) const override {
    const SavedTensor* found = find(name);
    const GroupOfName& here = group_of(name);
    return found == nullptr || (found->groups == 1 && here.words.empty())
               ? std::string()
               : fmt::format("; here it is on {}, in the save on {}", in_words(here.words),
                             in_words(found->saved_by));
  }

 private:
  static std::string in_words(std::string_view group) { return group.empty() ? "all ranks" : shown(group); }
  const GroupOfName& group_of(const std::string& name) const { return groups_.of(part_.parameter_of(name)); }
  const SavedTensor* find(const std::string& name) const {
    const auto found = tensors_.find(name);
    const SavedTensor* first = found == tensors_.end() ? nullptr : found->second;
    if (first == nullptr || first->groups == 1) return first;
    const GroupOfName& here = group_of(name);
    if (here.groups != first->groups)
      fail<ValueError>(
          "{}: '{}' was saved as {} tensors, one of each group of ranks (the first of {}), and here {} "
          "of that name (this rank's of {}); load it on as many groups",
          loading, shown(name), first->groups, shown(first->saved_by),
          here.groups == 1 ? "there is one" : fmt::format("there are {}", here.groups), in_words(here.words));
    return first + here.number;
  }

  const SavedState& state_;
  const CheckpointPart& part_;
  const NameGroups& groups_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, const SavedTensor*> tensors_;  ///< the first group's of each name
};

/// The groups of each model that parts are of, in the parts' order.
class GroupsOfModels {
 public:
  /// Collective.
  GroupsOfModels(std::string_view call, std::span<CheckpointPart* const> parts, const Group& ranks) {
    for (const CheckpointPart* part : parts)
      if (part->model() != nullptr && !of_.contains(part->model()))
        of_.emplace(part->model(), NameGroups(call, *part->model(), ranks));
  }
  const NameGroups& of(const CheckpointPart& part) const { return of_.at(part.model()); }
  void check_complete(std::string_view call) const {
    for (const auto& [model, groups] : of_) groups.check_complete(call);
  }

 private:
  std::map<const nn::Module*, NameGroups> of_{{nullptr, {}}};
};

/// A checksum of hexadecimal digits as a number, 0 where there is none.
std::uint64_t number_of(std::string_view checksum) {
  std::uint64_t number = 0;
  std::from_chars(checksum.data(), checksum.data() + checksum.size(), number, 16);
  return number;
}

/// A state to save.
struct Named {
  const CheckpointPart* part;
  PartOfState state;
};

/// Of a part that has this state, with the groups of its entries. Collective.
PartOfState part_of_state(const CheckpointPart& part, ShardedStateDict tensors, const NameGroups& groups,
                          const Group& ranks) {
  PartOfState state{std::move(tensors), {}};
  std::vector<std::int64_t> keys;  // of what one rank of several that have it writes
  const auto has_key = [](const ShardedTensor& t) { return t.replicas == 0 || t.shape.numel() == 0; };
  for (const ShardedTensor& t : state.tensors) {
    const GroupOfName& group = state.groups.emplace_back(groups.of(part.parameter_of(t.name)));
    if (has_key(t)) keys.push_back(key_of(fmt::format("{} {}", group.first, t.name)));
  }
  const std::vector<bool> first = first_to_have(ranks, keys, saving);
  for (std::size_t i = 0, k = 0; i < state.tensors.size(); ++i)
    if (has_key(state.tensors[i])) state.groups[i].is_first = first[k++];
  return state;
}

/// This rank's parts. The only rank's numbers come last, and say beside which files they are; its optimizers
/// say beside which model.
void write_parts(const Path& partial, std::span<Named> states, const RankOfGroup& me, FileSystem& files) {
  DirectoryWriter writer(files, partial);
  std::vector<std::pair<const CheckpointPart*, std::string>> written;  // and their checksums
  for (Named& named : states) {
    for (const auto& [part, checksum] : written) {
      if (named.part->name() == run_name) {
        named.state.tensors.push_back(NumbersPart::of_part(part->name(), number_of(checksum)));
        named.state.groups.push_back({.is_first = true});
      }
      if (named.part->is_optimizer() && part->is_model() && part->model() == named.part->model())
        named.state.beside = checksum;
    }
    writer.add(part_name(named.part->name(), me.rank, me.ranks),
               [&](OutputFile& file) { write_part(file, named.state); });
    if (me.ranks == 1 && &named != &states.back())
      written.emplace_back(named.part, signature_of(partial, named.part->name(), files).checksum);
  }
}

/// All parts lie on the disk and are complete, as the first rank sees them.
void finish(PendingDirectory& pending, const Path& partial, std::span<const Named> states, int ranks,
            const CheckpointOptions& options) {
  DirectoryWriter writer(options.files, partial);
  if (ranks > 1) {
    std::vector<std::string_view> what;
    for (const Named& named : states) what.push_back(named.part->name());
    const std::string index = index_of(partial, what, ranks, options.files);
    writer.add(index_name, [&](OutputFile& file) { file.write(index); });
  }
  for (const Named& named : states) {
    const SavedState written(partial, named.part->name(), options.files);
    for (const ShardedTensor& t : named.state.tensors)
      check<ValueError>(written.find(t.name) != nullptr,
                        "save_checkpoint: the {} ranks of the call do not hold '{}'; give the group of all "
                        "that share the model",
                        ranks, t.name);
  }
  if (options.also) options.also(writer);
  pending.commit();
}

void save(std::span<Named> states, const Path& folder, const Group& ranks, const CheckpointOptions& options) {
  const RankOfGroup me(ranks);
  const Path partial = PendingDirectory::partial_of(folder);
  std::optional<PendingDirectory> pending;
  together(ranks, saving, [&] {
    if (me.rank == 0) pending.emplace(folder, options.files);
  });
  together(ranks, saving, [&] { write_parts(partial, states, me, options.files); });
  together(ranks, saving, [&] {
    if (pending) finish(*pending, partial, states, me.ranks, options);
  });
}

/// Runs `act`, and puts the name of the file before what it says does not fit.
void naming(const Path& file, const std::function<void()>& act) {
  std::string why;
  try {
    return act();
  } catch (const ValueError& error) {
    why = error.what();
  } catch (const ShapeError& error) {
    why = error.what();
  }
  check<ValueError>(why.find(shown(file.string(), 300)) == std::string::npos, "{}", why);
  fail<ValueError>("checkpoint: '{}': {}", shown(file.string(), 300), why);
}

/// All ranks have read the save of that number; on all of them alike.
void check_one_save(std::span<const std::uint64_t> saves, const Path& file) {
  const auto other = std::ranges::find_if(saves, [&](std::uint64_t save) { return save != saves[0]; });
  if (other == saves.end()) return;
  fail<ValueError>(
      "checkpoint: '{}': rank {} finds another save there than rank 0: its checksum is {:016x}, rank 0's is "
      "{:016x}; give all ranks the same folder",
      shown(file.string(), 300), other - saves.begin(), *other, saves[0]);
}

/// That this part of a run is the one that was saved beside its numbers, as far as these say.
void check_beside_numbers(const SavedState& saved, std::string_view part, const SavedState& numbers) {
  const SavedTensor* entry = numbers.find(NumbersPart::checksum_entry(part));
  if (entry == nullptr || !saved.has_checksums()) return;
  const auto expected = std::bit_cast<std::uint64_t>(numbers.read(*entry, 0, 1).item<std::int64_t>());
  check<ValueError>(
      number_of(saved.checksum()) == expected,
      "checkpoint: '{}' is of another save than '{}', which was saved beside one with the checksum "
      "{:016x}; take all files from one save",
      shown(saved.path().string(), 300), shown(numbers.path().string(), 300), expected);
}

/// The parts of a checkpoint, opened.
class OpenParts {
 public:
  OpenParts(std::span<CheckpointPart* const> parts, const Path& folder, FileSystem& files) : parts_(parts) {
    if (has_numbers())
      check<ValueError>(files.exists(folder / part_name(run_name, 0, 1)) || files.exists(folder / index_name),
                        "checkpoint: '{}': was saved without a RunState; load its model and optimizer, or "
                        "whichever of them it has, without one",
                        shown(folder.string(), 300));
    for (const CheckpointPart* part : parts) saved_.emplace_back(folder, part->name(), files);
    for (std::size_t i = 0; i < parts.size(); ++i) check_beside(i);
  }
  const SavedState& operator[](std::size_t i) const { return saved_[i]; }
  /// That by which the save is known: of the numbers, or of the first part.
  const SavedState& key() const { return has_numbers() ? saved_.back() : saved_.front(); }

 private:
  bool has_numbers() const { return parts_.back()->name() == run_name; }
  void check_beside(std::size_t i) const {
    if (has_numbers()) {
      if (i + 1 < parts_.size()) check_beside_numbers(saved_[i], parts_[i]->name(), saved_.back());
      return;
    }
    for (std::size_t k = 0; k < parts_.size() && parts_[i]->is_optimizer(); ++k)
      if (parts_[k]->is_model() && parts_[k]->model() == parts_[i]->model())
        saved_[i].check_beside(saved_[k]);
  }

  std::span<CheckpointPart* const> parts_;
  std::deque<SavedState> saved_;
};

/// Models first: an optimizer's state may begin with their values.
std::vector<CheckpointPart*> in_order(std::span<CheckpointPart* const> parts) {
  std::vector<CheckpointPart*> ordered(parts.begin(), parts.end());
  std::ranges::stable_partition(ordered, [](const CheckpointPart* part) { return part->is_model(); });
  return ordered;
}

/// ValueError on all ranks where one has other parts, or in another order.
void check_alike(std::span<CheckpointPart* const> parts, const Group& ranks, std::string_view call) {
  std::string names;
  for (const CheckpointPart* part : parts) names += part->description() + " ";
  const std::vector<std::uint64_t> all =
      together_all(ranks, call, [&] { return static_cast<std::uint64_t>(key_of(names)); });
  const auto other = std::ranges::find_if(all, [&](std::uint64_t key) { return key != all[0]; });
  check<ValueError>(
      other == all.end(),
      "{}: rank {} has other parts than rank 0; here they are {}; add the same ones in the same "
      "order on all ranks",
      call, other - all.begin(), names);
}

/// The models whose values are parts.
std::vector<nn::Module*> models_of(std::span<CheckpointPart* const> parts) {
  std::vector<nn::Module*> models;
  for (const CheckpointPart* part : parts)
    if (part->is_model()) models.push_back(part->model());
  return models;
}

}  // namespace

void save_parts(std::span<CheckpointPart* const> given, const Path& folder, const Group& ranks,
                const CheckpointOptions& options) {
  const NoGrad guard;
  const std::vector<CheckpointPart*> parts = in_order(given);
  if (parts.back()->name() == run_name) check_alike(parts, ranks, saving);
  for (nn::Module* model : models_of(parts)) check_steps(*model);
  const GroupsOfModels groups(saving, parts, ranks);
  together(ranks, saving, [&] {
    for (const CheckpointPart* part : parts) part->check_savable();
    groups.check_complete(saving);
  });
  std::vector<Named> states;
  for (const CheckpointPart* part : parts)
    states.push_back({part, part_of_state(*part, part->state(ranks), groups.of(*part), ranks)});
  for (nn::Module* model : models_of(parts)) {
    const bool stepped = std::ranges::any_of(
        parts, [&](const CheckpointPart* part) { return part->is_optimizer() && part->model() == model; });
    check_saved_steps(*model, stepped ? Saved::optimizer_too : Saved::values, ranks);
  }
  save(states, folder, ranks, options);
  for (nn::Module* model : models_of(parts)) remember_checkpoint(*model, folder.string());
}

namespace {

/// Of the names of the save that this rank has no use for those that no rank has.
std::vector<std::string> unknown_to_all(std::vector<std::string> names, const Group& ranks) {
  std::vector<std::int64_t> keys;
  for (const std::string& name : names) keys.push_back(key_of(name));
  for (const auto& list : lists_of_all(ranks, keys, {.label = std::string(loading)})) {
    const std::set<std::int64_t> other(list.begin(), list.end());
    std::erase_if(names, [&](const std::string& name) { return !other.contains(key_of(name)); });
  }
  return names;
}

/// Reads and checks all; then the parts have taken what can still be refused.
void stage_parts(std::span<CheckpointPart* const> parts, const Path& folder, const Group& ranks,
                 FileSystem& files) {
  const GroupsOfModels groups(loading, parts, ranks);
  std::vector<Path> paths(parts.size());
  Path key;
  const std::vector<std::uint64_t> saves = together_all(ranks, loading, [&] {
    const OpenParts saved(parts, committed_directory(folder, files), files);
    key = saved.key().path();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      paths[i] = saved[i].path();
      naming(paths[i], [&] { parts[i]->stage(SavedSource(saved[i], *parts[i], groups.of(*parts[i]))); });
    }
    return number_of(saved.key().checksum());
  });
  check_one_save(saves, key);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::vector<std::string> unknown = unknown_to_all(parts[i]->unknown(), ranks);
    naming(paths[i], [&] { parts[i]->take_unknown(std::move(unknown)); });
  }
  // What these refuse they refuse on all ranks: they read the same names, shapes, rates and counts.
  together(ranks, loading, [&] {
    for (std::size_t i = 0; i < parts.size(); ++i) naming(paths[i], [&] { parts[i]->settle(); });
  });
}

}  // namespace

void load_parts(std::span<CheckpointPart* const> given, const Path& folder, const Group& ranks,
                FileSystem& files) {
  const std::vector<CheckpointPart*> parts = in_order(given);
  if (parts.back()->name() == run_name) check_alike(parts, ranks, loading);
  try {
    stage_parts(parts, folder, ranks, files);
  } catch (...) {
    for (CheckpointPart* part : parts) part->undo();
    throw;
  }
  for (CheckpointPart* part : parts) part->commit();
  for (nn::Module* model : models_of(parts)) remember_checkpoint(*model, folder.string());
}

bool is_part_name(std::string_view name) {
  return !name.empty() && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
}

void check_part_name(std::string_view call, std::string_view part) {
  check<ValueError>(is_part_name(part), "{}: '{}' is no name of a part, as \"model\" and \"optimizer\" are",
                    call, shown(part));
}

void save_checkpoint(nn::Module& model, const nn::Optimizer& optimizer, const Path& folder,
                     const Group& ranks, const CheckpointOptions& options) {
  ModelPart values(std::string(model_name), model, options.frozen);
  // Which saving leaves as it is.
  OptimizerPart moments(std::string(optimizer_name), const_cast<nn::Optimizer&>(optimizer), model);
  CheckpointPart* const parts[] = {&values, &moments};
  save_parts(parts, folder, ranks, options);
}

void save_checkpoint(nn::Module& model, const Path& folder, const Group& ranks,
                     const CheckpointOptions& options) {
  ModelPart values(std::string(model_name), model, options.frozen);
  CheckpointPart* const parts[] = {&values};
  save_parts(parts, folder, ranks, options);
}

void load_checkpoint(nn::Module& model, nn::Optimizer& optimizer, const Path& folder, const Group& ranks,
                     FileSystem& files) {
  load_checkpoint(model, optimizer, folder, ranks, LoadCheckpointOptions{.files = files});
}

void load_checkpoint(nn::Module& model, const Path& folder, const Group& ranks, FileSystem& files) {
  load_checkpoint(model, folder, ranks, LoadCheckpointOptions{.files = files});
}

nn::Mismatch load_checkpoint(nn::Module& model, const Path& from, const Group& ranks,
                             const LoadCheckpointOptions& options) {
  check_part_name(loading, options.part);
  ModelPart values(options, model);
  CheckpointPart* const parts[] = {&values};
  load_parts(parts, from, ranks, options.files);
  return values.mismatch();
}

nn::Mismatch load_checkpoint(nn::Module& model, nn::Optimizer& optimizer, const Path& folder,
                             const Group& ranks, const LoadCheckpointOptions& options) {
  check_part_name(loading, options.part);
  ModelPart values(options, model);
  OptimizerPart moments(std::string(optimizer_name), optimizer, model);
  CheckpointPart* const parts[] = {&values, &moments};
  load_parts(parts, folder, ranks, options.files);
  return values.mismatch();
}

}  // namespace sherd::shard
