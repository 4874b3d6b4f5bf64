#include "tools/tuned_model.h"

#include <algorithm>

#include "nn/lora.h"
#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/io/durable.h"
#include "runtime/ops.h"
#include "runtime/shown.h"
#include "shard/convert.h"

namespace sherd::tools {
namespace {

using Path = FileSystem::Path;

DType stored_dtype(const TrainOptions& o) { return o.lora > 0 ? dtype_named(o.base_dtype) : f32; }

std::vector<std::string> names_in_list(std::string_view list) {
  std::vector<std::string> names;
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    names.emplace_back(list.substr(at, end - at));
    at = end + 1;
  }
  return names;
}

std::variant<nn::Gpt, nn::Llama> made_of(const nn::GptOptions& options) { return nn::Gpt(options); }
std::variant<nn::Gpt, nn::Llama> made_of(const nn::LlamaOptions& options) { return nn::Llama(options); }

/// The record in another dtype, cast when it is read.
TensorRecord cast_record(const TensorRecord& from, DType dtype) {
  return {from.name, dtype, from.shape, {}, [&from, dtype](std::span<std::byte> into) {
            const NoGrad guard;
            const Shape shape(std::span(from.shape));
            const Tensor values = empty(shape, {from.dtype, Device::cpu()});
            const std::span<std::byte> bytes{values.raw(), static_cast<std::size_t>(values.spec().bytes())};
            if (from.read)
              from.read(bytes);
            else
              std::ranges::copy(from.bytes, bytes.begin());
            copy_(from_blob(into.data(), shape, dtype), to(values, dtype));
          }};
}

/// What lies beside a model for those who use it.
void copy_beside(const Path& from, const Path& to, FileSystem& files) {
  for (const char* name :
       {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"}) {
    if (!files.exists(from / name)) continue;
    const std::unique_ptr<InputFile> file = files.open(from / name);
    write_durably(
        to / name,
        [&](OutputFile& copy) {
          std::vector<std::byte> part;
          for (std::uint64_t at = 0; at < file->size(); at += part.size()) {
            part.resize(std::min<std::uint64_t>(1 << 20, file->size() - at));
            file->read(at, part);
            copy.write(part);
          }
        },
        files);
  }
}

}  // namespace

TunedModel TunedModel::read(const TrainOptions& o, FileSystem& files) {
  manual_seed(o.seed);
  const DType dtype = stored_dtype(o);
  TunedModel tuned(nn::load_gpt_or_llama(o.model, dtype, Device::cpu(), files));
  manual_seed(o.seed);
  tuned.add_adapters(o);
  return tuned;
}

TunedModel TunedModel::on_meta(const TrainOptions& o, FileSystem& files) {
  TunedModel tuned(std::visit(
      [&](auto options) {
        options.tensor = {stored_dtype(o), Device::meta()};
        return made_of(options);
      },
      nn::pretrained_options(o.model, files)));
  tuned.add_adapters(o);
  return tuned;
}

TunedModel TunedModel::to_share(const TrainOptions& o, FileSystem& files) {
  if (o.ranks > 1 && o.lora == 0 && o.strategy != "data_parallel")
    if (TunedModel model = on_meta(o, files); !model.has_tied_head()) return model;
  TunedModel model = read(o, files);
  model.module().to(device_named(o.device));
  return model;
}

void TunedModel::load(const TrainOptions& o, FileSystem& files) {
  if (module().parameters().front().local().device().type != DeviceType::meta) return;
  std::visit(
      [&](auto& model) {
        nn::load_pretrained(model, o.model, {.device = device_named(o.device), .files = files});
      },
      model_);
}

bool TunedModel::has_tied_head() const {
  return std::visit([](const auto& model) { return model.options.tie_word_embeddings; }, model_);
}

void TunedModel::add_adapters(const TrainOptions& o) {
  if (o.lora == 0) return;
  try {
    nn::add_lora(module(), {.rank = o.lora,
                            .alpha = o.lora_alpha,
                            .dropout = o.lora_dropout,
                            .targets = names_in_list(o.lora_layers),
                            .dtype = f32});
  } catch (const ValueError& error) {
    fail<ValueError>("--lora-layers {}: {}", shown(o.lora_layers), error.what());
  }
}

nn::Module& TunedModel::module() {
  return std::visit([](auto& model) -> nn::Module& { return model; }, model_);
}

std::vector<nn::Module*> TunedModel::blocks() {
  std::vector<nn::Module*> blocks;
  if (auto* gpt = std::get_if<nn::Gpt>(&model_))
    for (nn::GptBlock& block : gpt->blocks) blocks.push_back(&block);
  if (auto* llama = std::get_if<nn::Llama>(&model_))
    for (nn::LlamaBlock& block : llama->model.layers) blocks.push_back(&block);
  return blocks;
}

Tensor TunedModel::loss(const nn::PackedBatch& batch, std::int64_t learnt) {
  return std::visit([&](auto& model) { return nn::packed_loss(model, batch, learnt); }, model_);
}

std::int64_t TunedModel::vocabulary() const {
  if (const auto* gpt = std::get_if<nn::Gpt>(&model_)) return gpt->options.vocab;
  return std::get<nn::Llama>(model_).options.vocab_size;
}

void save_tuned(const TrainOptions& o, const Path& checkpoint, const std::string& part, const Path& folder,
                nn::SavePretrainedOptions saved) {
  FileSystem& files = saved.files;
  if (o.lora > 0) {
    TunedModel whole = TunedModel::read(o, files);
    shard::load_checkpoint(whole.module(), checkpoint, {},
                           {.part = part, .frozen = shard::Frozen::left_out, .files = files});
    nn::save_lora(whole.module(), folder, {o.model, files});
    return;
  }
  const DType dtype = std::visit([](const auto& options) { return options.tensor.dtype; },
                                 nn::pretrained_options(o.model, files));
  const shard::WholeTensors whole = shard::checkpoint_tensors(checkpoint, {.part = part, .files = files});
  std::vector<TensorRecord> records;
  for (const TensorRecord& record : whole.tensors) records.push_back(cast_record(record, dtype));
  saved.config_from = o.model;
  nn::save_pretrained(records, folder, saved);
  copy_beside(o.model, folder, files);
}

Forecast tuning_needs(const TrainOptions& o, FileSystem& files) {
  TunedModel model = TunedModel::on_meta(o, files);
  double all = 0, trained = 0;
  for (const nn::Parameter& p : model.module().parameters()) {
    const auto values = static_cast<double>(p.shape().numel());
    all += values * static_cast<double>(size_of(p.dtype()));
    if (p.requires_grad()) trained += 4 * values;
  }
  const auto ranks = static_cast<double>(std::max<std::int64_t>(o.ranks, 1));
  const bool replicas = o.strategy == "no_shard" || o.strategy == "data_parallel";
  const double copies = replicas ? ranks : 1, whole = replicas || o.strategy == "zero1" ? ranks : 1;
  const auto rows = o.micro_batch > 0
                        ? std::min(static_cast<double>(o.micro_batch) * ranks, static_cast<double>(o.batch))
                        : static_cast<double>(o.batch);
  // As of a Gpt; what a row holds may be less than the context.
  const double a_position =
      16 * static_cast<double>(o.width * o.layers) + static_cast<double>(model.vocabulary());
  return {.parameters = all * copies,
          .gradients = trained * whole,
          .moments = 2 * trained * copies,
          .activations = rows * a_position * static_cast<double>(size_of(dtype_named(o.param_dtype)))};
}

}  // namespace sherd::tools
