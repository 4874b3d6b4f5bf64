// What a job needs at least, before it begins.
#pragma once

#include "tools/train_options.h"

namespace sherd::tools {

/// Bytes over all ranks. Never more than the job takes: what is left out are buffers and copies.
struct Forecast {
  double parameters = 0, gradients = 0, moments = 0, activations = 0;
  double total() const { return parameters + gradients + moments + activations; }
};

/// Of `sherd train`. The options are within their ranges.
Forecast training_needs(const TrainOptions& options);
/// Of a model that only generates.
Forecast sampling_needs(const TrainOptions& options);

/// Bytes that the ranks on this machine can have: its memory and swap, or what its container may take.
double memory_of_machine();

/// ValueError that names the sizes when `share` of what is needed is more than `memory`.
void check_fits(const Forecast& needs, const TrainOptions& options, double memory, double share = 1);

}  // namespace sherd::tools
