// Validation.
#pragma once

#include <cstdint>
#include <span>

#include "collectives/group.h"
#include "nn/batch_sampler.h"
#include "nn/gpt.h"

namespace sherd::tools {

/// The windows of `text` from `starts` on, on the model's device.
nn::Batch batch_for(const nn::Gpt& model, std::span<const std::uint8_t> text,
                    std::span<const std::int64_t> starts);

/// Mean loss in nats, in f32, of logits (n, vocab) that the caller has let go of, and which may be written
/// over. `factor` is what it will be multiplied by before its backward.
Tensor training_loss(Tensor logits, const Tensor& targets, double factor);

/// Bytes of a text of `size` with which a window begins that fits, with the byte that follows it.
std::int64_t window_starts(std::size_t size, std::int64_t context);
/// Of such windows those that fit side by side.
std::int64_t window_count(std::size_t size, std::int64_t context);

/// Mean loss in nats a byte over at most `windows` windows side by side, spread evenly over the text; shared
/// out over the ranks of `group`, the same to the bit for any number of them. Leaves the model in training
/// mode.
double evaluate(nn::Gpt& model, std::span<const std::uint8_t> text, std::int64_t windows, const Group& group);

}  // namespace sherd::tools
