#include "shard/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "runtime/context.h"
#include "runtime/shown.h"
#include "shard/agree.h"
#include "shard/group.h"
#include "shard/saved_state.h"
#include "shard/state_source.h"

namespace sherd::shard {
namespace {

using Path = FileSystem::Path;

constexpr std::string_view saving = "save_checkpoint", loading = "load_checkpoint";
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

/// A state to save, and what its files are named by.
struct Named {
  std::string_view what;
  ShardedStateDict state;
};

/// What one rank's module refuses, all refuse.
Named state_of(nn::Module& model, const Group& ranks) {
  Named named{model_name, {}};
  together(ranks, saving, [&] { named.state = sharded_state_dict(model); });
  return named;
}

/// This rank's parts.
void write_parts(const Path& partial, std::span<const Named> states, const RankOfGroup& me,
                 FileSystem& files) {
  DirectoryWriter writer(files, partial);
  std::string beside;
  for (const Named& named : states) {
    writer.add(part_name(named.what, me.rank, me.ranks),
               [&](OutputFile& file) { write_part(file, named.state, me.rank, beside); });
    if (me.ranks == 1 && &named != &states.back()) beside = signature_of(partial, named.what, files).checksum;
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

void save(std::span<const Named> states, const Path& folder, const Group& ranks,
          const CheckpointOptions& options) {
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

/// A checksum of hexadecimal digits as a number, 0 where there is none.
std::uint64_t number_of(std::string_view checksum) {
  std::uint64_t number = 0;
  std::from_chars(checksum.data(), checksum.data() + checksum.size(), number, 16);
  return number;
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

void load(nn::Module& model, nn::Optimizer* optimizer, const Path& given, const Group& ranks,
          FileSystem& files) {
  std::optional<StagedModel> weights;
  nn::StateDict moments;
  Path weights_file, moments_file;
  const std::vector<std::uint64_t> saves = together_all(ranks, loading, [&] {
    const Path folder = committed_directory(given, files);
    const SavedState saved_model(folder, model_name, files);
    weights_file = saved_model.path();
    const std::uint64_t save = number_of(saved_model.checksum());
    std::optional<SavedState> saved_optimizer;
    if (optimizer != nullptr)
      saved_optimizer.emplace(folder, optimizer_name, files).check_beside(saved_model);
    naming(weights_file, [&] { weights.emplace(loading, model, SavedSource(saved_model)); });
    if (!saved_optimizer) return save;
    moments_file = saved_optimizer->path();
    naming(moments_file,
           [&] { moments = staged_optimizer_state(*optimizer, SavedSource(*saved_optimizer), &model); });
    return save;
  });
  check_one_save(saves, weights_file);
  // What it refuses it refuses on all ranks: they read the same names, shapes, rates and counts.
  together(ranks, loading, [&] {
    if (optimizer != nullptr) naming(moments_file, [&] { optimizer->load_state_dict(std::move(moments)); });
  });
  weights->commit();
  remember_checkpoint(model, given.string());
}

}  // namespace

void save_checkpoint(nn::Module& model, const nn::Optimizer& optimizer, const Path& folder,
                     const Group& ranks, const CheckpointOptions& options) {
  const NoGrad guard;
  check_steps(model);
  together(ranks, saving, [&] { check_optimizer(optimizer); });
  const Named states[] = {state_of(model, ranks),
                          {optimizer_name, sharded_optimizer_state(model, optimizer)}};
  check_saved_steps(model, Saved::optimizer_too, ranks);
  save(states, folder, ranks, options);
  remember_checkpoint(model, folder.string());
}

void save_checkpoint(nn::Module& model, const Path& folder, const Group& ranks,
                     const CheckpointOptions& options) {
  const NoGrad guard;
  check_steps(model);
  const Named states[] = {state_of(model, ranks)};
  check_saved_steps(model, Saved::values, ranks);
  save(states, folder, ranks, options);
  remember_checkpoint(model, folder.string());
}

void load_checkpoint(nn::Module& model, nn::Optimizer& optimizer, const Path& folder, const Group& ranks,
                     FileSystem& files) {
  load(model, &optimizer, folder, ranks, files);
}

void load_checkpoint(nn::Module& model, const Path& folder, const Group& ranks, FileSystem& files) {
  load(model, nullptr, folder, ranks, files);
}

}  // namespace sherd::shard
