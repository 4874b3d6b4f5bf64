#include "tools/tuned_model.h"

#include <algorithm>

#include "nn/lora.h"
#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::tools {
namespace {

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

}  // namespace

TunedModel TunedModel::read(const TrainOptions& o, FileSystem& files) {
  manual_seed(o.seed);
  const DType dtype = stored_dtype(o);
  TunedModel tuned(nn::pretrained_kind(o.model, files) == nn::PretrainedKind::gpt
                       ? Model(nn::load_gpt(o.model, dtype, Device::cpu(), files))
                       : Model(nn::load_llama(o.model, dtype, Device::cpu(), files)));
  manual_seed(o.seed);
  tuned.add_adapters(o);
  return tuned;
}

TunedModel TunedModel::on_meta(const TrainOptions& o, FileSystem& files) {
  const TensorOptions meta{stored_dtype(o), Device::meta()};
  const auto make = [&](auto options) {
    options.tensor = meta;
    return options;
  };
  TunedModel tuned(nn::pretrained_kind(o.model, files) == nn::PretrainedKind::gpt
                       ? Model(nn::Gpt(make(nn::gpt_options(o.model, files))))
                       : Model(nn::Llama(make(nn::llama_options(o.model, files)))));
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

Tensor TunedModel::logits(const nn::PackedBatch& batch) {
  const Device device = module().parameters().front().local().device();
  const Tensor tokens = to(batch.tokens, device);
  return std::visit([&](auto& model) { return model(tokens, batch.documents); }, model_);
}

std::int64_t TunedModel::vocabulary() const {
  if (const auto* gpt = std::get_if<nn::Gpt>(&model_)) return gpt->options.vocab;
  return std::get<nn::Llama>(model_).options.vocab_size;
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
