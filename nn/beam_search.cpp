#include <algorithm>
#include <cmath>

#include "nn/generate.h"
#include "nn/language_model.h"
#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

using Tokens = std::vector<std::int64_t>;

/// What no sequence has as its score. Scores are f32 as transformers', whose sums are repeated here.
constexpr float none = -1e9F;

struct Candidate {
  Tokens tokens;
  float score = none;
  std::int64_t parent = 0;  // the row that it continues
  bool ended = false;
};

/// The best `count` of them, equal ones in their order.
std::vector<Candidate> best_of(std::vector<Candidate> all, std::size_t count) {
  std::ranges::stable_sort(all, std::greater{}, &Candidate::score);
  all.resize(count);
  return all;
}

/// The search for one prompt.
class Search {
 public:
  Search(const LanguageModel& model, const Tokens& prompt, const BeamOptions& o)
      : model_(model), options_(o), width_(static_cast<std::size_t>(o.beams)), newest_(prompt) {
    running_.resize(width_), ended_.resize(width_);
    running_[0].score = 0;
  }

  bool over() const { return over_; }
  /// Sequences that ended, the best one first.
  std::vector<Beam> result() const {
    std::vector<Beam> beams;
    for (const Candidate& c : ended_)
      if (c.ended) beams.push_back({c.tokens, c.score});
    return beams;
  }

  void step() {
    const std::int64_t rows = written_ == 0 ? 1 : options_.beams;  // they are all alike at first
    const Tensor logits = model_.last_logits(newest_, rows, cache_);
    if (written_ == 0) cache_.select(std::vector<std::int64_t>(width_, 0));
    ++written_;
    const std::vector<Candidate> found = candidates(logits);
    keep_ended(found);
    go_on(found);
    const bool all_ended = std::ranges::all_of(ended_, &Candidate::ended);
    improvable_ = improvable_ && (!all_ended || running_[0].score / penalty() > ended_.back().score);
    over_ = !improvable_ || (all_ended && options_.end == BeamEnd::at_once) ||
            std::ranges::all_of(found, &Candidate::ended);
  }

 private:
  float penalty() const {
    return static_cast<float>(std::pow(static_cast<double>(written_), options_.length_penalty));
  }
  /// The likeliest continuations of all beams: as many as leave enough to go on with when others end.
  std::vector<Candidate> candidates(const Tensor& logits) const {
    const NoGrad guard;
    const std::int64_t rows = logits.size(0), vocab = logits.size(1);
    std::vector<float> scores;
    for (std::int64_t row = 0; row < rows; ++row)
      scores.push_back(running_[static_cast<std::size_t>(row)].score);
    const Tensor before = to(Tensor::from(scores, {rows, 1}, Device::cpu()), logits.device());
    const Tensor all = reshape(add(log_softmax(to(logits, DType::f32)), before), {rows * vocab});
    const TopK best = topk(all, count(options_));
    const std::vector<float> values = best.values.to_vector<float>();
    const std::vector<std::int64_t> places = best.indices.to_vector<std::int64_t>();
    check<StateError>(std::isfinite(values[0]),
                      "beam_search: the largest log-probability is {}; the model's weights are of no use",
                      values[0]);
    std::vector<Candidate> found;
    for (std::size_t i = 0; i < places.size(); ++i) {
      const std::int64_t parent = places[i] / vocab, token = places[i] % vocab;
      Candidate c{running_[static_cast<std::size_t>(parent)].tokens, values[i], parent};
      c.tokens.push_back(token);
      c.ended = written_ == options_.max_new_tokens ||
                std::ranges::find(options_.stop_tokens, token) != options_.stop_tokens.end();
      found.push_back(std::move(c));
    }
    return found;
  }
  /// Of the best `beams` candidates those that ended, with the others that did.
  void keep_ended(const std::vector<Candidate>& found) {
    const bool full = options_.end == BeamEnd::at_once && std::ranges::all_of(ended_, &Candidate::ended);
    if (full || !improvable_) return;
    std::vector<Candidate> all = ended_;
    for (std::size_t i = 0; i < width_; ++i) {
      if (!found[i].ended) continue;
      all.push_back(found[i]);
      all.back().score /= penalty();
    }
    ended_ = best_of(std::move(all), width_);
  }
  /// The best candidates that did not end are the new beams.
  void go_on(std::vector<Candidate> found) {
    for (Candidate& c : found)
      if (c.ended) c.score += none;
    running_ = best_of(std::move(found), width_);
    newest_.clear();
    std::vector<std::int64_t> parents;
    for (const Candidate& c : running_) {
      newest_.push_back(c.tokens.back());
      parents.push_back(c.parent);
    }
    cache_.select(parents);
  }

 public:
  static std::int64_t count(const BeamOptions& o) {
    return std::max<std::int64_t>(2, 1 + std::ssize(o.stop_tokens)) * o.beams;
  }

 private:
  const LanguageModel& model_;
  const BeamOptions& options_;
  std::size_t width_;
  Tokens newest_;  // row by row
  std::int64_t written_ = 0;
  std::vector<Candidate> running_, ended_;
  KeyValueCache cache_;
  bool improvable_ = true, over_ = false;
};

void validate(const LanguageModel& model, std::span<const Tokens> prompts, const BeamOptions& o) {
  check<ValueError>(o.beams >= 1 && o.beams <= 1 << 16, "beam_search: {} beams, it takes from 1 to {}",
                    o.beams, 1 << 16);
  check<ValueError>(o.max_new_tokens >= 1, "beam_search: max_new_tokens {} is below 1", o.max_new_tokens);
  check<ValueError>(std::isfinite(o.length_penalty), "beam_search: length_penalty {} is not finite",
                    o.length_penalty);
  check<ValueError>(Search::count(o) <= model.vocab,
                    "beam_search: {} beams and {} stop tokens take {} candidates, of a vocabulary of {}",
                    o.beams, o.stop_tokens.size(), Search::count(o), model.vocab);
  for (const Tokens& prompt : prompts) {
    model.check_prompt(prompt);
    // The last token is not read.
    check<ValueError>(std::ssize(prompt) + o.max_new_tokens - 1 <= model.context,
                      "beam_search: a prompt of {} tokens and {} new ones are beyond the context of {}",
                      prompt.size(), o.max_new_tokens, model.context);
  }
}

template <class Model>
std::vector<std::vector<Beam>> searched(const Model& of, std::span<const Tokens> prompts,
                                        const BeamOptions& options) {
  const LanguageModel model(of);
  std::vector<std::vector<Beam>> found;
  std::unique_ptr<Search> search;
  const auto begin_next = [&] {
    search.reset();
    if (found.size() < prompts.size())
      search = std::make_unique<Search>(model, prompts[found.size()], options);
  };
  const auto step = [&] {
    if (search == nullptr) return model.idle();
    search->step();
    if (!search->over()) return;
    found.push_back(search->result());
    begin_next();
  };
  const auto begin = [&] {
    validate(model, prompts, options);
    begin_next();
  };
  run_on_all_ranks(model, begin, [&] { return search != nullptr; }, step);
  return found;
}

}  // namespace

std::vector<std::vector<Beam>> beam_search(const Gpt& model, std::span<const Tokens> prompts,
                                           const BeamOptions& options) {
  return searched(model, prompts, options);
}
std::vector<std::vector<Beam>> beam_search(const Llama& model, std::span<const Tokens> prompts,
                                           const BeamOptions& options) {
  return searched(model, prompts, options);
}

}  // namespace sherd::nn
