#include "tools/evaluate.h"

#include <algorithm>

#include "nn/batch_sampler.h"
#include "runtime/context.h"

namespace sherd::tools {
namespace {

/// Positions a forward; more would only take more memory.
constexpr std::int64_t positions_at_once = 4096;

double summed_loss(const nn::Gpt& model, std::span<const std::uint8_t> text,
                   std::span<const std::int64_t> starts) {
  const nn::Batch batch = nn::text_batch(text, starts, model.options.context);
  const Tensor loss = cross_entropy(flatten(model(batch.tokens), 0, 1), flatten(batch.targets));
  return loss.item() * static_cast<double>(starts.size());
}

}  // namespace

std::int64_t window_count(std::size_t size, std::int64_t context) {
  return (static_cast<std::int64_t>(size) - 1) / context;
}

double evaluate(nn::Gpt& model, std::span<const std::uint8_t> text, std::int64_t windows) {
  const std::int64_t context = model.options.context, all = window_count(text.size(), context);
  windows = std::min(windows, all);
  std::vector<std::int64_t> starts;
  for (std::int64_t i = 0; i < windows; ++i) starts.push_back(i * all / windows * context);

  const NoGrad guard;
  model.eval();
  double loss = 0;
  const auto rows = static_cast<std::size_t>(std::max<std::int64_t>(positions_at_once / context, 1));
  for (std::span<const std::int64_t> rest = starts; !rest.empty();) {
    const std::size_t n = std::min(rows, rest.size());
    loss += summed_loss(model, text, rest.first(n));
    rest = rest.subspan(n);
  }
  model.train();
  return loss / static_cast<double>(windows);
}

}  // namespace sherd::tools
