#include "nn/lora.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <unordered_set>

#include "nn/gpt.h"
#include "nn/llama.h"
#include "nn/lora_layers.h"
#include "runtime/context.h"
#include "runtime/element.h"
#include "runtime/shown.h"

namespace sherd::nn {
namespace lora {

std::vector<NamedLinear> linears_in(const Module& model) {
  std::vector<NamedLinear> found;
  std::unordered_set<const Module*> heads;
  for (const auto& [name, module] : const_cast<Module&>(model).named_modules()) {  // this only reads
    if (const auto* gpt = dynamic_cast<const Gpt*>(module)) heads.insert(&gpt->head);
    if (const auto* llama = dynamic_cast<const Llama*>(module)) heads.insert(&llama->lm_head);
    if (auto* linear = dynamic_cast<Linear*>(module)) found.push_back({name, linear, heads.contains(linear)});
  }
  return found;
}

std::vector<NamedLinear> adapted_in(const Module& model) {
  std::vector<NamedLinear> all = linears_in(model);
  std::erase_if(all, [](const NamedLinear& l) { return !l.linear->lora; });
  return all;
}

bool names(std::string_view target, std::string_view name, bool is_head) {
  if (target == all_linear) return !is_head;
  return name == target || (name.ends_with(target) && name[name.size() - target.size() - 1] == '.');
}

namespace {

void check_options(const LoraOptions& o) {
  check<ValueError>(o.rank > 0, "add_lora: rank {} must be above 0", o.rank);
  check<ValueError>(std::isfinite(o.alpha) && o.alpha > 0, "add_lora: alpha {} must be finite and above 0",
                    o.alpha);
  check<ValueError>(o.dropout >= 0 && o.dropout < 1, "add_lora: dropout {} must be from 0, below 1",
                    o.dropout);
  check<ValueError>(!o.dtype || is_floating(*o.dtype), "add_lora: dtype {} is not floating",
                    o.dtype.value_or(f32));
  check<ValueError>(!o.targets.empty(),
                    "add_lora: no targets; name Linear layers, as {{\"q_proj\", \"v_proj\"}}, or "
                    "\"all-linear\"");
}

void check_unsharded(const Module& model, std::string_view call, std::string_view way_out) {
  for (const auto& [name, module] : const_cast<Module&>(model).named_modules())
    check<StateError>(!module->extension(), "{}: '{}' ({}) is sharded; {}", call, name, module->type_name(),
                      way_out);
  for (const auto& [name, linear, is_head] : linears_in(model))
    check<StateError>(linear->weight.object().owner() == nullptr, "{}: '{}' is sharded; {}", call, name,
                      way_out);
}

/// For messages: what targets may be called, each last word once.
std::string last_words(const std::vector<NamedLinear>& all) {
  std::set<std::string> words;
  for (const NamedLinear& l : all) words.insert(l.name.substr(l.name.rfind('.') + 1));
  return fmt::format("{}", fmt::join(words, ", "));
}

/// The layers that the targets name, each of which must name some.
std::vector<NamedLinear> targets_in(const Module& model, const LoraOptions& o) {
  const std::vector<NamedLinear> all = linears_in(model);
  for (const std::string& target : o.targets)
    check<ValueError>(
        std::ranges::any_of(all, [&](const auto& l) { return names(target, l.name, l.is_head); }),
        "add_lora: no Linear of the {} is named '{}'; there are: {}", model.type_name(), shown(target),
        all.empty() ? "none" : last_words(all));
  std::vector<NamedLinear> chosen;
  for (const NamedLinear& l : all) {
    const bool is_named =
        std::ranges::any_of(o.targets, [&](const auto& target) { return names(target, l.name, l.is_head); });
    if (!is_named) continue;
    check<StateError>(!l.linear->lora,
                      "add_lora: '{}' has an adapter; merge_lora or remove_lora takes it away first", l.name);
    chosen.push_back(l);
  }
  return chosen;
}

LoraAdapter adapter_of(const Linear& linear, const LoraOptions& o) {
  const std::int64_t out = linear.weight.shape()[0], in = linear.weight.shape()[1];
  const TensorOptions options{o.dtype.value_or(compute_dtype(linear.weight.dtype())), linear.weight.device()};
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  LoraAdapter adapter{LoraFactor(rand({o.rank, in}, options, -bound, bound)),
                      LoraFactor(zeros({out, o.rank}, options)),
                      {o.alpha, o.dropout, o.scaling}};
  adapter.lora_A.train(linear.training());
  adapter.lora_B.train(linear.training());
  return adapter;
}

/// All but the adapters.
void freeze(Module& model) {
  std::unordered_set<const void*> trained;
  for (const Parameter& p : lora_parameters(model)) trained.insert(p.id());
  for (Parameter& p : model.parameters())
    if (!trained.contains(p.id())) p.set_requires_grad(false);
}

}  // namespace

std::vector<std::string> add_to(Module& model, const std::vector<NamedLinear>& layers,
                                const LoraOptions& options) {
  check_options(options);
  check_unsharded(model, "add_lora", "add adapters before fully_shard");
  const NoGrad guard;
  std::vector<LoraAdapter> adapters;
  for (const NamedLinear& l : layers) adapters.push_back(adapter_of(*l.linear, options));
  std::vector<std::string> named;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    layers[i].linear->lora.emplace(std::move(adapters[i]));
    named.push_back(layers[i].name);
  }
  freeze(model);
  return named;
}

namespace {

std::vector<NamedLinear> removable_in(Module& model, std::string_view call) {
  check_unsharded(model, call,
                  "save_lora within shard::summon_full_params, and load_lora into a model that is not");
  std::vector<NamedLinear> adapted = adapted_in(model);
  check<StateError>(!adapted.empty(), "{}: the {} has no adapters; add_lora gives it some", call,
                    model.type_name());
  return adapted;
}

/// StateError where what is merged would change another layer.
void check_untied(const Module& model, const std::vector<NamedLinear>& adapted) {
  std::map<const void*, std::vector<std::string>> names;
  for (const NamedParameter& p : model.named_parameters(Ties::all)) names[p.parameter.id()].push_back(p.name);
  for (const NamedLinear& l : adapted) {
    const std::vector<std::string>& same = names[l.linear->weight.object().id()];
    check<StateError>(same.size() < 2,
                      "merge_lora: '{}.weight' is one parameter with others ({}), which would change too; "
                      "untie it, or leave '{}' without an adapter",
                      l.name, fmt::join(same, ", "), l.name);
  }
}

}  // namespace
}  // namespace lora

std::vector<std::string> add_lora(Module& model, const LoraOptions& options) {
  lora::check_options(options);
  return lora::add_to(model, lora::targets_in(model, options), options);
}

std::vector<Parameter> lora_parameters(const Module& model) {
  std::vector<Parameter> found;
  for (const lora::NamedLinear& l : lora::adapted_in(model)) {
    found.push_back(l.linear->lora->lora_A.weight.object());
    found.push_back(l.linear->lora->lora_B.weight.object());
  }
  return found;
}

void merge_lora(Module& model) {
  const std::vector<lora::NamedLinear> adapted = lora::removable_in(model, "merge_lora");
  lora::check_untied(model, adapted);
  const NoGrad guard;
  for (const lora::NamedLinear& l : adapted) {
    const Tensor weight = l.linear->weight.data();
    copy_(weight, l.linear->lora->merged_into(weight));
    l.linear->lora.reset();
  }
}

void remove_lora(Module& model) {
  for (const lora::NamedLinear& l : lora::removable_in(model, "remove_lora")) l.linear->lora.reset();
}

}  // namespace sherd::nn
