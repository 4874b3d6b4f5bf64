#include "tools/sample.h"

#include "runtime/backend.h"
#include "runtime/error.h"
#include "runtime/io/durable.h"
#include "runtime/shown.h"
#include "tools/checkpoint.h"
#include "tools/forecast.h"

namespace sherd::tools {

using Path = FileSystem::Path;

Path find_checkpoint(const Path& given, FileSystem& files) {
  const Path path = committed_directory(given, files);
  check<ValueError>(files.exists(path), "--checkpoint '{}': there is no such folder", given.string());
  if (files.exists(path / "config.json")) return path;
  const std::optional<std::int64_t> step = newest_checkpoint(path, files);
  check<ValueError>(step.has_value(), "--checkpoint '{}': holds no checkpoint", given.string());
  const Path newest = checkpoint_path(path, *step);
  const auto best = read_config(newest, files).best;
  if (!best) return newest;
  const Path found = checkpoint_path(path, best->step);
  return files.exists(found) ? found : newest;
}

void sample(const SampleOptions& options, FileSystem& files, const std::function<void(char)>& on_byte) {
  validate(options.generate);
  check<ValueError>(options.device == "cpu" || options.device == "cuda", "--device {}: takes cpu or cuda",
                    shown(options.device));
  const Device device = device_named(options.device);
  backend(device.type).synchronize(device);  // says so where there is none
  const Path checkpoint = find_checkpoint(options.checkpoint, files);
  const TrainOptions sizes = read_config(checkpoint, files).options;
  check<ValueError>(
      sizes.model.empty(),
      "--checkpoint '{}': is of a run that tunes the model in '{}', and not of a model of bytes; "
      "what it has made is a folder as that one",
      shown(checkpoint.string(), 300), shown(sizes.model, 300));
  check_fits(sampling_needs(sizes), sizes, memory_of_machine());
  check_weights(checkpoint, sizes, files);
  nn::Gpt model(model_options(sizes));
  load_model(checkpoint, model, files);
  model.to(device);
  model.eval();
  generate(model, options.prompt, options.generate, on_byte);
}

}  // namespace sherd::tools
