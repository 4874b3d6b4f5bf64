#include "tools/evaluate.h"

#include <algorithm>
#include <numeric>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "tools/among_ranks.h"

namespace sherd::tools {
namespace {

/// Positions a forward; more would only take more memory.
constexpr std::int64_t positions_at_once = 4096;

double summed_loss(const nn::Gpt& model, std::span<const std::uint8_t> text,
                   std::span<const std::int64_t> starts) {
  const nn::Batch batch = batch_for(model, text, starts);
  const Tensor loss = cross_entropy(flatten(model(batch.tokens), 0, 1), flatten(batch.targets),
                                    {.precision = LossPrecision::wide});
  return loss.item() * static_cast<double>(starts.size());
}

}  // namespace

nn::Batch batch_for(const nn::Gpt& model, std::span<const std::uint8_t> text,
                    std::span<const std::int64_t> starts) {
  const nn::Batch batch = nn::text_batch(text, starts, model.options.context);
  const Device device = model.parameters().front().local().device();
  return {to(batch.tokens, device), to(batch.targets, device)};
}

Tensor training_loss(Tensor logits, const Tensor& targets, double factor) {
  const CrossEntropyOptions options{.precision = LossPrecision::wide};
  // f16 would lose small gradients before they are scaled, and a pass that scales them would eat the gain.
  if (logits.dtype() == bf16 && factor == 1)
    return cross_entropy_(std::exchange(logits, {}), targets, options);
  return cross_entropy(std::exchange(logits, {}), targets, options);
}

std::int64_t window_starts(std::size_t size, std::int64_t context) {
  return std::max<std::int64_t>(static_cast<std::int64_t>(size) - context, 0);
}

std::int64_t window_count(std::size_t size, std::int64_t context) {
  return (window_starts(size, context) + context - 1) / context;
}

double evaluate(nn::Gpt& model, std::span<const std::uint8_t> text, std::int64_t windows,
                const Group& group) {
  const std::int64_t context = model.options.context, all = window_count(text.size(), context);
  windows = std::min(windows, all);
  std::vector<std::int64_t> starts;
  for (std::int64_t i = 0; i < windows; ++i) starts.push_back(i * all / windows * context);

  const NoGrad guard;
  model.eval();
  const std::int64_t rows = std::max<std::int64_t>(positions_at_once / context, 1);
  const std::vector<double> losses = shared_out(group, (windows + rows - 1) / rows, [&](std::int64_t part) {
    const std::int64_t first = part * rows, count = std::min(rows, windows - first);
    return summed_loss(
        model, text,
        std::span(starts).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)));
  });
  model.train();
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(windows);
}

}  // namespace sherd::tools
