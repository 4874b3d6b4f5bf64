#include "shard/run_state.h"

#include <algorithm>
#include <vector>

#include "runtime/error.h"
#include "runtime/shown.h"
#include "shard/checkpoint_files.h"
#include "shard/checkpoint_part.h"
#include "shard/group.h"

namespace sherd::shard {

struct RunState::Impl {
  std::vector<std::unique_ptr<CheckpointPart>> parts{};
  NumbersPart numbers{std::string(run_name)};
  std::vector<std::string> names{};

  /// The name, now taken.
  const std::string& take(std::string name) {
    check<ValueError>(is_part_name(name) && name != run_name && name != "index",
                      "RunState: '{}' is no name of a part; give it letters, digits, '_' and '-', and not "
                      "\"run\" or \"index\"",
                      shown(name));
    check<ValueError>(std::ranges::find(names, name) == names.end(), "RunState: '{}' is there already", name);
    return names.emplace_back(std::move(name));
  }
  std::vector<CheckpointPart*> all() {
    std::vector<CheckpointPart*> all;
    for (const auto& part : parts) all.push_back(part.get());
    all.push_back(&numbers);
    return all;
  }
};

RunState::RunState() : impl_(std::make_unique<Impl>()) {}
RunState::~RunState() = default;
RunState::RunState(RunState&&) noexcept = default;
RunState& RunState::operator=(RunState&&) noexcept = default;

RunState::Impl& RunState::impl() const {
  check<StateError>(impl_ != nullptr, "RunState: it was moved from; use the one that it was moved to");
  return *impl_;
}

RunState& RunState::add(std::string name, nn::Module& model, Frozen frozen) {
  impl().parts.push_back(std::make_unique<ModelPart>(impl().take(std::move(name)), model, frozen));
  return *this;
}
RunState& RunState::add(std::string name, nn::Optimizer& optimizer, nn::Module& model) {
  impl().parts.push_back(std::make_unique<OptimizerPart>(impl().take(std::move(name)), optimizer, model));
  return *this;
}
RunState& RunState::add(std::string name, nn::Ema& ema, nn::Module& model) {
  impl().parts.push_back(std::make_unique<AveragePart>(impl().take(std::move(name)), ema, model));
  return *this;
}
RunState& RunState::add(std::string name, nn::GradScaler& scaler) {
  impl().numbers.add(impl().take(std::move(name)), scaler);
  return *this;
}
RunState& RunState::add(std::string name, std::int64_t& number) {
  return add_count(
      std::move(name), [&number] { return number; }, [&number](std::int64_t to) { number = to; });
}
RunState& RunState::add(std::string name, double& number) {
  impl().numbers.add({impl().take(std::move(name)), std::function<double()>([&number] { return number; }),
                      std::function<void(double)>([&number](double to) { number = to; })});
  return *this;
}
RunState& RunState::add_count(std::string name, std::function<std::int64_t()> get,
                              std::function<void(std::int64_t)> set) {
  impl().numbers.add({impl().take(std::move(name)), std::move(get), std::move(set)});
  return *this;
}

void save_checkpoint(const RunState& run, const FileSystem::Path& folder, const Group& ranks,
                     const CheckpointOptions& options) {
  check<ValueError>(options.frozen == Frozen::saved,
                    "save_checkpoint: a RunState is told which models leave out what is frozen when they are "
                    "added; add(name, model, Frozen::left_out)");
  save_parts(run.impl().all(), folder, ranks, options);
}

void load_checkpoint(const RunState& run, const FileSystem::Path& folder, const Group& ranks,
                     FileSystem& files) {
  run.impl().numbers.set_rank(RankOfGroup(ranks).rank);
  load_parts(run.impl().all(), folder, ranks, files);
}

}  // namespace sherd::shard
