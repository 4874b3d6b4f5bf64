#include "shard/checkpoint.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <deque>
#include <optional>

#include "runtime/context.h"
#include "runtime/shown.h"
#include "shard/agree.h"
#include "shard/checkpoint_files.h"
#include "shard/group.h"
#include "shard/saved_state.h"
#include "shard/state_source.h"

namespace sherd::shard {
namespace {

using Path = FileSystem::Path;

constexpr std::string_view model_name = "model", optimizer_name = "optimizer";

class SavedSource final : public StateSource {
 public:
  explicit SavedSource(const SavedState& state) : state_(state) {}
  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const SavedTensor& t : state_.tensors()) names.emplace_back(t.name);
    return names;
  }
  std::optional<Shape> shape(const std::string& name) const override {
    const SavedTensor* found = state_.find(name);
    return found == nullptr ? std::nullopt : std::optional<Shape>(found->shape);
  }
  std::int64_t steps(const std::string& name) const override { return state_.steps(name); }
  Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) const override {
    return state_.read(*state_.find(name), begin, numel);
  }

 private:
  const SavedState& state_;
};

/// A checksum of hexadecimal digits as a number, 0 where there is none.
std::uint64_t number_of(std::string_view checksum) {
  std::uint64_t number = 0;
  std::from_chars(checksum.data(), checksum.data() + checksum.size(), number, 16);
  return number;
}

/// A state to save, and what its files are named by.
struct Named {
  std::string_view what;
  ShardedStateDict state;
};

/// This rank's parts. The only rank's numbers come last, and say beside which files they are.
void write_parts(const Path& partial, std::span<Named> states, const RankOfGroup& me, FileSystem& files) {
  DirectoryWriter writer(files, partial);
  std::string beside;
  std::vector<std::pair<std::string, std::uint64_t>> written;
  for (Named& named : states) {
    if (named.what == run_name)
      for (const auto& [part, checksum] : written)
        named.state.push_back(
            {NumbersPart::checksum_entry(part), Shape{}, 0,
             Tensor::from(std::vector{std::bit_cast<std::int64_t>(checksum)}, {1}, Device::cpu()), 0, 0});
    writer.add(part_name(named.what, me.rank, me.ranks),
               [&](OutputFile& file) { write_part(file, named.state, me.rank, beside); });
    if (me.ranks > 1 || &named == &states.back()) continue;
    const std::string checksum = signature_of(partial, named.what, files).checksum;
    written.emplace_back(named.what, number_of(checksum));
    if (beside.empty()) beside = checksum;
  }
}

/// All parts lie on the disk and are complete, as the first rank sees them.
void finish(PendingDirectory& pending, const Path& partial, std::span<const Named> states, int ranks,
            const CheckpointOptions& options) {
  DirectoryWriter writer(options.files, partial);
  if (ranks > 1) {
    std::vector<std::string_view> what;
    for (const Named& named : states) what.push_back(named.what);
    const std::string index = index_of(partial, what, ranks, options.files);
    writer.add(index_name, [&](OutputFile& file) { file.write(index); });
  }
  for (const Named& named : states) {
    const SavedState written(partial, named.what, options.files);
    for (const ShardedTensor& t : named.state)
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
    for (const CheckpointPart* part : parts) saved_.emplace_back(folder, part->name(), files);
    for (std::size_t i = 0; i < parts.size(); ++i) check_beside(i);
  }
  const SavedState& operator[](std::size_t i) const { return saved_[i]; }
  /// That by which the save is known: of the numbers, or of the first part.
  const SavedState& key() const { return parts_.back()->name() == run_name ? saved_.back() : saved_.front(); }

 private:
  void check_beside(std::size_t i) const {
    if (parts_.back()->name() == run_name && i + 1 < parts_.size())
      check_beside_numbers(saved_[i], parts_[i]->name(), saved_.back());
    else if (parts_[i]->is_optimizer() && i == 1 && parts_[0]->is_model())
      saved_[i].check_beside(saved_[0]);
  }

  std::span<CheckpointPart* const> parts_;
  std::deque<SavedState> saved_;
};

/// The models whose values are parts.
std::vector<nn::Module*> models_of(std::span<CheckpointPart* const> parts) {
  std::vector<nn::Module*> models;
  for (const CheckpointPart* part : parts)
    if (part->is_model()) models.push_back(part->model());
  return models;
}

}  // namespace

void save_parts(std::span<CheckpointPart* const> parts, const Path& folder, const Group& ranks,
                const CheckpointOptions& options) {
  const NoGrad guard;
  for (nn::Module* model : models_of(parts)) check_steps(*model);
  together(ranks, saving, [&] {
    for (const CheckpointPart* part : parts) part->check_savable();
  });
  std::vector<Named> states;
  for (const CheckpointPart* part : parts) states.push_back({part->name(), part->state(ranks)});
  for (nn::Module* model : models_of(parts)) {
    const bool stepped = std::ranges::any_of(
        parts, [&](const CheckpointPart* part) { return part->is_optimizer() && part->model() == model; });
    check_saved_steps(*model, stepped ? Saved::optimizer_too : Saved::values, ranks);
  }
  save(states, folder, ranks, options);
  for (nn::Module* model : models_of(parts)) remember_checkpoint(*model, folder.string());
}

void load_parts(std::span<CheckpointPart* const> parts, const Path& folder, const Group& ranks,
                FileSystem& files) {
  std::vector<Path> paths(parts.size());
  Path key;
  const std::vector<std::uint64_t> saves = together_all(ranks, loading, [&] {
    const OpenParts saved(parts, committed_directory(folder, files), files);
    key = saved.key().path();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      paths[i] = saved[i].path();
      naming(paths[i], [&] { parts[i]->stage(SavedSource(saved[i])); });
    }
    return number_of(saved.key().checksum());
  });
  check_one_save(saves, key);
  // What these refuse they refuse on all ranks: they read the same names, shapes, rates and counts.
  together(ranks, loading, [&] {
    for (std::size_t i = 0; i < parts.size(); ++i) naming(paths[i], [&] { parts[i]->settle(); });
  });
  for (CheckpointPart* part : parts) part->commit();
  for (nn::Module* model : models_of(parts)) remember_checkpoint(*model, folder.string());
}

bool is_part_name(std::string_view name) {
  return !name.empty() && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
}

void merge_checkpoint(const Path& folder, const Path& file, std::string_view part, FileSystem& files) {
  check<ValueError>(is_part_name(part),
                    "merge_checkpoint: '{}' is no name of a part, as \"model\" and \"optimizer\" are",
                    shown(part));
  const SavedState saved(committed_directory(folder, files), part, files);
  save_safetensors(file, saved.records(), saved.notes(), files);
}

void save_checkpoint(nn::Module& model, const nn::Optimizer& optimizer, const Path& folder,
                     const Group& ranks, const CheckpointOptions& options) {
  ModelPart values(std::string(model_name), model);
  // Which saving leaves as it is.
  OptimizerPart moments(std::string(optimizer_name), const_cast<nn::Optimizer&>(optimizer), model);
  CheckpointPart* const parts[] = {&values, &moments};
  save_parts(parts, folder, ranks, options);
}

void save_checkpoint(nn::Module& model, const Path& folder, const Group& ranks,
                     const CheckpointOptions& options) {
  ModelPart values(std::string(model_name), model);
  CheckpointPart* const parts[] = {&values};
  save_parts(parts, folder, ranks, options);
}

void load_checkpoint(nn::Module& model, nn::Optimizer& optimizer, const Path& folder, const Group& ranks,
                     FileSystem& files) {
  ModelPart values(std::string(model_name), model);
  OptimizerPart moments(std::string(optimizer_name), optimizer, model);
  CheckpointPart* const parts[] = {&values, &moments};
  load_parts(parts, folder, ranks, files);
}

void load_checkpoint(nn::Module& model, const Path& folder, const Group& ranks, FileSystem& files) {
  ModelPart values(std::string(model_name), model);
  CheckpointPart* const parts[] = {&values};
  load_parts(parts, folder, ranks, files);
}

}  // namespace sherd::shard
