#include "tools/pretrained_model.h"

#include <optional>

#include "nn/pretrained.h"
#include "runtime/backend.h"
#include "runtime/error.h"
#include "runtime/shown.h"
#include "tools/train_options.h"

namespace sherd::tools {
namespace {

using Path = FileSystem::Path;

std::optional<DType> dtype_of(const std::string& name) {
  if (name.empty()) return {};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    if (name == name_of(dtype)) return dtype;
  fail<ValueError>("--dtype {}: takes f32, bf16 or f16", shown(name));
}

Device device_of(const std::string& name) {
  check<ValueError>(name == "cpu" || name == "cuda", "--device {}: takes cpu or cuda", shown(name));
  const Device device = device_named(name);
  backend(device.type).synchronize(device);  // says so where there is none
  return device;
}

}  // namespace

PretrainedModel read_pretrained(const PretrainedChoice& choice, FileSystem& files) {
  const std::optional<DType> dtype = dtype_of(choice.dtype);
  const Device device = device_of(choice.device);
  const Path folder = choice.folder;
  check<ValueError>(files.is_directory(folder), "'{}' is no folder; name one of Hugging Face's format",
                    shown(choice.folder, 300));
  check<ValueError>(
      files.exists(folder / "config.json"),
      "'{}' has no config.json, so it is no model of Hugging Face's format; a run of sherd train is "
      "for sherd sample",
      shown(choice.folder, 300));
  nn::Tokenizer tokenizer = nn::Tokenizer::read(folder, files);
  std::vector<std::int64_t> ends = nn::end_tokens(folder, files);
  if (ends.empty() && tokenizer.eos_token_id()) ends.push_back(*tokenizer.eos_token_id());
  PretrainedModel found{nn::load_gpt_or_llama(folder, dtype, device, files), std::move(tokenizer),
                        std::move(ends)};
  std::visit([](auto& model) { model.eval(); }, found.model);
  return found;
}

}  // namespace sherd::tools
