// What files of weights and files of adapters have in common.
#pragma once

#include <string>

#include "nn/module.h"

namespace sherd::nn::pretrained {

/// What Hugging Face's files call the member `own` of a model, its adapters' too: another name in a `Gpt`.
std::string stored_name(const Module& model, const std::string& own);

/// Gives a parameter new values, of which it keeps this rank's part.
void give(const Parameter& p, const Tensor& whole);
/// The values of a parameter. StateError, in the name of `call`, for one on `meta`, and for a part.
Tensor whole_of(const Parameter& p, const std::string& name, std::string_view call);

}  // namespace sherd::nn::pretrained
