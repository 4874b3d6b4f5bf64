#include "tools/merge.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "nn/pretrained.h"
#include "runtime/error.h"
#include "runtime/shown.h"
#include "shard/convert.h"
#include "shard/saved_state.h"
#include "tools/checkpoint.h"
#include "tools/output.h"
#include "tools/tuned_model.h"

namespace sherd::tools {
namespace {

using Path = FileSystem::Path;

const MergeOptions plain;

/// The folder of a run's newest checkpoint, or what was given.
Path checkpoint_in(const Path& given, FileSystem& files) {
  if (files.is_file(given)) return given;
  const std::optional<std::int64_t> step = newest_checkpoint(given, files);
  return step ? checkpoint_path(given, *step) : given;
}

bool has_optimizer(const Path& checkpoint, FileSystem& files) {
  return files.exists(checkpoint / shard::part_name("optimizer", 0, 1)) ||
         files.exists(checkpoint / shard::part_name("optimizer", 0, 2));
}

/// ValueError where a group was named, and the ranks saved all tensors together.
void check_group(const std::optional<int>& group, int groups, const Path& from) {
  check<ValueError>(!group || groups > 1,
                    "--group {}: all ranks saved the tensors in '{}' together; leave --group out",
                    group.value_or(0), shown(from.string(), 300));
}

std::string report(std::string_view part, const Path& from, const Path& to, std::size_t tensors) {
  return fmt::format("{} of {} in {}: {} tensors\n", part, shown(from.string(), 300), shown(to.string(), 300),
                     tensors);
}

std::string merge_pretrained(const MergeOptions& options, const Path& checkpoint,
                             const shard::WholeTensors& whole, FileSystem& files) {
  const Path out = options.out.empty() ? "pretrained" : options.out;
  check_new_folder("--out", out, {checkpoint.string(), options.config_from}, files);
  nn::SavePretrainedOptions saved{.max_shard_size = options.max_shard_size, .files = files};
  if (!options.config_from.empty()) {
    saved.config_from = options.config_from;
    nn::save_pretrained(whole.tensors, out, saved);
    return report(options.part, checkpoint, out, whole.tensors.size());
  }
  check<ValueError>(files.exists(checkpoint / "config.json"),
                    "--config-from: '{}' is no checkpoint of sherd train, whose config.json says of what "
                    "model it is; name a folder with the config.json of such a model",
                    shown(checkpoint.string(), 300));
  const RunConfig run = read_config(checkpoint, files);
  check<ValueError>(run.options.lora == 0 || options.max_shard_size == plain.max_shard_size,
                    "--max-shard-size {}: adapters lie in one file; leave it out", options.max_shard_size);
  if (run.options.model.empty()) {
    nn::save_pretrained(model_options(run.options), whole.tensors, out, saved);
  } else {
    if (run.options.lora > 0) check_base(run, nn::pretrained_digest(run.options.model, files));
    save_tuned(run.options, checkpoint, options.part, out, saved);
  }
  return report(options.part, checkpoint, out, whole.tensors.size());
}

}  // namespace

std::string merge(const MergeOptions& options, FileSystem& files) {
  check<ValueError>(options.pretrained || options.config_from.empty(),
                    "--config-from '{}': one file of tensors has no config.json; give --pretrained too",
                    shown(options.config_from, 300));
  check<ValueError>(options.pretrained || options.max_shard_size == plain.max_shard_size,
                    "--max-shard-size {}: without --pretrained all tensors go into one file; leave it out",
                    options.max_shard_size);
  check<ValueError>(options.part == plain.part || !files.is_file(options.checkpoint),
                    "--part {}: '{}' is one file of tensors, which are taken as they are; leave --part out",
                    shown(options.part), shown(options.checkpoint, 300));
  const Path checkpoint = checkpoint_in(options.checkpoint, files);
  const shard::CheckpointTensorsOptions from{options.part, options.group, files};
  const shard::WholeTensors whole = shard::checkpoint_tensors(checkpoint, from);
  check_group(options.group, whole.groups, checkpoint);
  if (options.pretrained) return merge_pretrained(options, checkpoint, whole, files);
  const Output out{"--out",
                   options.out.empty() ? options.part + ".safetensors" : options.out,
                   {checkpoint.string()},
                   {},
                   Holds::tensors};
  check_output(out, files);
  shard::merge_checkpoint(checkpoint, out.path, from);
  return report(options.part, checkpoint, out.path, SafetensorsFile(out.path, files).entries().size());
}

std::string split(const SplitOptions& options, FileSystem& files) {
  constexpr int most = 4096;
  check<ValueError>(options.ranks > 0 && options.ranks <= most, "--ranks: {} is not from 1 to {}",
                    options.ranks, most);
  const Path from = checkpoint_in(options.from, files);
  check_new_folder("--out", options.out, {from.string()}, files);
  std::vector<shard::NamedTensors> parts;
  if (nn::is_pretrained(from, files)) {
    parts.push_back({"model", {nn::pretrained_tensors(from, files)}});
  } else {
    for (const std::string part : {"model", "optimizer"})
      if (part == "model" || has_optimizer(from, files))
        parts.push_back({part, shard::checkpoint_tensors(from, {part, options.group, files})});
  }
  int groups = 1;
  for (const shard::NamedTensors& part : parts) groups = std::max(groups, part.whole.groups);
  check_group(options.group, groups, from);
  shard::split_checkpoint(parts, options.out, options.ranks, files);
  std::string text;
  for (const shard::NamedTensors& part : parts)
    text += report(part.part, from, options.out, part.whole.tensors.size());
  return text;
}

}  // namespace sherd::tools
