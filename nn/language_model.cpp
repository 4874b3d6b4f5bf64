#include "nn/language_model.h"

#include <algorithm>
#include <exception>

#include "nn/llama.h"
#include "nn/scaler_ranks.h"
#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

template <class Model>
auto forward_of(const Model& model) {
  return [&model](const Tensor& tokens, KeyValueCache& cache) { return model(tokens, cache, Logits::last); };
}

/// This rank's number in the world.
std::int64_t own_number(const Group& group) {
  return group.world_ranks()[static_cast<std::size_t>(group.rank())];
}

}  // namespace

LanguageModel::LanguageModel(const Gpt& model)
    : forward(forward_of(model)),
      context(model.options.context),
      vocab(model.options.vocab),
      device(model.parameters().front().local().device()),
      ranks(owners_of(model.parameters())) {}

LanguageModel::LanguageModel(const Llama& model)
    : forward(forward_of(model)),
      context(model.options.context()),
      vocab(model.options.vocab_size),
      device(model.parameters().front().local().device()),
      ranks(owners_of(model.parameters())) {}

Tensor LanguageModel::last_logits(std::span<const std::int64_t> tokens, std::int64_t rows,
                                  KeyValueCache& cache) const {
  const NoGrad guard;
  const Tensor ids = Tensor::from(tokens, {rows, std::ssize(tokens) / rows}, Device::cpu());
  const Tensor logits = forward(to(ids, device), cache);
  return to(select(logits, 1, 0), compute_dtype(logits.dtype()));
}

void LanguageModel::idle() const {
  if (ranks.empty()) return;
  KeyValueCache cache;
  constexpr std::int64_t token = 0;
  last_logits(std::span(&token, 1), 1, cache);
}

void LanguageModel::check_prompt(std::span<const std::int64_t> prompt) const {
  check<ValueError>(!prompt.empty(), "generate: the prompt is empty; give it one token at least");
  for (const std::int64_t token : prompt)
    check<ValueError>(token >= 0 && token < vocab, "generate: token {} is outside the vocabulary of {}",
                      token, vocab);
}

std::int64_t largest_of_ranks(const LanguageModel& model, std::int64_t mine) {
  if (model.ranks.empty()) return mine;
  const NoGrad guard;
  const Tensor most = Tensor::from({mine}, {1}, Device::cpu());
  for (const Group& group : model.ranks) group.all_reduce(most, ReduceOp::max(), {.label = "generate"});
  return most.item<std::int64_t>();
}

void run_on_all_ranks(const LanguageModel& model, const std::function<void()>& begin,
                      const std::function<bool()>& wanted, const std::function<void()>& step) {
  std::exception_ptr error;
  const auto attempt = [&](const std::function<void()>& act) {
    if (model.ranks.empty()) return act();
    try {
      act();
    } catch (const CollectiveError&) {
      throw;  // its group carries nothing any more
    } catch (...) {
      error = std::current_exception();
    }
  };
  attempt(begin);
  for (;;) {
    // 0: nothing to do; 1: something; 2 + r: rank r of the world has thrown.
    const std::int64_t mine = error ? 2 + own_number(model.ranks.back()) : wanted() ? 1 : 0;
    std::int64_t all = 0;
    try {
      all = largest_of_ranks(model, mine);
    } catch (const CollectiveError&) {
      if (error) std::rethrow_exception(error);  // the others are in the midst of a forward
      throw;
    }
    if (error) std::rethrow_exception(error);
    check<StateError>(all < 2, "generate: rank {} has ended by an error of its own", all - 2);
    if (all == 0) return;
    attempt(step);
  }
}

}  // namespace sherd::nn
