#include "nn/generate.h"

#include <algorithm>
#include <optional>

#include "nn/language_model.h"
#include "nn/next_token.h"
#include "runtime/error.h"

namespace sherd::nn {
namespace {

using Tokens = std::vector<std::int64_t>;

struct Sequence {
  std::int64_t number;
  GenerateOptions options;
  RandomKey random;
  Tokens tokens{};           // with the prompt
  std::int64_t written = 0;  // of these behind the prompt
  std::size_t read = 0;      // of these that the model reads anew, at the end
};

}  // namespace

struct SequenceBatch::State {
  LanguageModel model;
  std::int64_t next = 0;          // number
  std::vector<Sequence> waiting;  // to be read
  std::vector<Sequence> running;  // row by row of the cache
  KeyValueCache cache;

  void add(Sequence sequence) {
    const auto context = static_cast<std::size_t>(model.context);
    sequence.read = sequence.tokens.size();
    if (sequence.read > context) sequence.read = std::max<std::size_t>(context / 2, 1);
    waiting.push_back(std::move(sequence));
  }
  /// Takes the sequences that `out` names out of the running ones.
  std::vector<Sequence> take(const std::function<bool(std::size_t row)>& out) {
    std::vector<Sequence> taken, kept;
    std::vector<std::int64_t> rows;
    for (std::size_t row = 0; row < running.size(); ++row) {
      if (!out(row)) rows.push_back(static_cast<std::int64_t>(row));
      (out(row) ? taken : kept).push_back(std::move(running[row]));
    }
    running = std::move(kept);
    if (running.empty())
      cache.clear();
    else if (!taken.empty())
      cache.select(rows);
    return taken;
  }
  /// Those whose keys and values fill the context are to be read anew.
  void make_room() {
    const std::vector<std::int64_t> seen(cache.rows().begin(), cache.rows().end());
    for (Sequence& s : take([&](std::size_t row) { return seen[row] >= model.context; })) {
      s.read = std::max<std::size_t>(static_cast<std::size_t>(model.context) / 2, 1);
      waiting.push_back(std::move(s));
    }
  }
  /// Reads what waits and is as long as the first of it; logits of the rows that joined the running ones.
  Tensor read_waiting() {
    const std::size_t length = waiting.front().read;
    const auto begin =
        std::ranges::stable_partition(waiting, [&](const Sequence& s) { return s.read != length; });
    Tokens tokens;
    for (const Sequence& s : begin)
      tokens.insert(tokens.end(), s.tokens.end() - static_cast<std::ptrdiff_t>(length), s.tokens.end());
    KeyValueCache fresh;
    const Tensor logits = model.last_logits(tokens, std::ssize(begin), fresh);
    if (running.empty())
      cache = std::move(fresh);
    else
      cache.join(fresh);
    std::ranges::move(begin, std::back_inserter(running));
    waiting.erase(begin.begin(), begin.end());
    return logits;
  }
  Tensor read_newest() {
    Tokens tokens;
    for (const Sequence& s : running) tokens.push_back(s.tokens.back());
    return model.last_logits(tokens, std::ssize(running), cache);
  }
  /// A token for each of the last rows, of which the logits are.
  std::vector<NextToken> choose(const Tensor& logits) {
    const std::span<Sequence> rows = std::span(running).last(static_cast<std::size_t>(logits.size(0)));
    std::vector<Chooser> choosers;
    for (Sequence& s : rows) choosers.push_back({&s.options, &s.random});
    const Tokens chosen = next_tokens(logits, choosers);
    std::vector<NextToken> found;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      Sequence& s = rows[i];
      s.tokens.push_back(chosen[i]);
      const bool stops = std::ranges::find(s.options.stop_tokens, chosen[i]) != s.options.stop_tokens.end();
      found.push_back({s.number, chosen[i], ++s.written == s.options.max_new_tokens || stops});
    }
    const std::size_t before = running.size() - rows.size();
    take([&](std::size_t row) { return row >= before && found[row - before].last; });
    std::ranges::sort(found, {}, &NextToken::sequence);
    return found;
  }
};

SequenceBatch::SequenceBatch(const Gpt& model) : state_(new State{.model = LanguageModel(model)}) {}
SequenceBatch::SequenceBatch(const Llama& model) : state_(new State{.model = LanguageModel(model)}) {}
SequenceBatch::SequenceBatch(SequenceBatch&&) noexcept = default;
SequenceBatch& SequenceBatch::operator=(SequenceBatch&&) noexcept = default;
SequenceBatch::~SequenceBatch() = default;

std::int64_t SequenceBatch::add(std::span<const std::int64_t> prompt, const GenerateOptions& options) {
  validate(options);
  state_->model.check_prompt(prompt);
  const std::int64_t number = state_->next++;
  if (options.max_new_tokens > 0)
    state_->add({number, options, {.seed = options.seed}, Tokens(prompt.begin(), prompt.end())});
  return number;
}

void SequenceBatch::end(std::int64_t sequence) {
  std::erase_if(state_->waiting, [&](const Sequence& s) { return s.number == sequence; });
  state_->take([&](std::size_t row) { return state_->running[row].number == sequence; });
}

std::size_t SequenceBatch::size() const { return state_->waiting.size() + state_->running.size(); }

bool SequenceBatch::done() const { return largest_of_ranks(state_->model, size() > 0 ? 1 : 0) == 0; }

std::vector<NextToken> SequenceBatch::step() {
  if (size() == 0) {
    state_->model.idle();
    return {};
  }
  state_->make_room();
  return state_->choose(state_->waiting.empty() ? state_->read_newest() : state_->read_waiting());
}

namespace {

template <class Model>
std::vector<Tokens> continued(const Model& model, std::span<const Tokens> prompts, const GenerateOptions& o,
                              const OnRowToken& on_token) {
  SequenceBatch batch(model);
  std::vector<Tokens> written(prompts.size());
  const auto begin = [&] {
    GenerateOptions own = o;
    for (std::size_t row = 0; row < prompts.size(); ++row) {
      own.seed = derived_seed(o.seed, row);
      batch.add(prompts[row], own);
    }
  };
  const auto step = [&] {
    for (const NextToken& t : batch.step()) {
      const auto row = static_cast<std::size_t>(t.sequence);
      written[row].push_back(t.token);
      if (on_token && on_token(row, t.token) == Sequel::ends) batch.end(t.sequence);
    }
  };
  run_on_all_ranks(LanguageModel(model), begin, [&] { return batch.size() > 0; }, step);
  return written;
}

template <class Model>
Tokens continued_alone(const Model& model, std::span<const std::int64_t> prompt, const GenerateOptions& o,
                       const OnToken& on_token) {
  const Tokens one(prompt.begin(), prompt.end());
  return continued(model, std::span(&one, 1), o, [&](std::size_t, std::int64_t token) {
    if (on_token) on_token(token);
    return Sequel::goes_on;
  })[0];
}

}  // namespace

std::vector<std::int64_t> generate(const Gpt& model, std::span<const std::int64_t> prompt,
                                   const GenerateOptions& options, const OnToken& on_token) {
  return continued_alone(model, prompt, options, on_token);
}
std::vector<std::int64_t> generate(const Llama& model, std::span<const std::int64_t> prompt,
                                   const GenerateOptions& options, const OnToken& on_token) {
  return continued_alone(model, prompt, options, on_token);
}
std::vector<Tokens> generate(const Gpt& model, std::span<const Tokens> prompts,
                             const GenerateOptions& options, const OnRowToken& on_token) {
  return continued(model, prompts, options, on_token);
}
std::vector<Tokens> generate(const Llama& model, std::span<const Tokens> prompts,
                             const GenerateOptions& options, const OnRowToken& on_token) {
  return continued(model, prompts, options, on_token);
}

}  // namespace sherd::nn
