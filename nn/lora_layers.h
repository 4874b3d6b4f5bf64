// The linear layers of a model, by the names that adapters know them by.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "nn/layers.h"
#include "nn/lora.h"

namespace sherd::nn::lora {

/// A layer and its name in the model.
struct NamedLinear {
  std::string name;
  Linear* linear;
  bool is_head;  ///< of a `Gpt` or `Llama`
};
std::vector<NamedLinear> linears_in(const Module& model);
/// Those that have an adapter.
std::vector<NamedLinear> adapted_in(const Module& model);

/// `add_lora` of just these layers, which have no adapters; what the options' targets say is passed over.
std::vector<std::string> add_to(Module& model, const std::vector<NamedLinear>& layers,
                                const LoraOptions& options);

inline constexpr std::string_view all_linear = "all-linear";
/// Whether `target` is a layer's name, or what follows a dot in it, or all of them.
bool names(std::string_view target, std::string_view name, bool is_head);

}  // namespace sherd::nn::lora
