// Continuing sequences of tokens with a language model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "nn/llama.h"

namespace sherd::nn {

/// How the next token is chosen: of the `top_k` likeliest ones (0: of all), of these the fewest that are
/// together at least `top_p` likely, one is drawn.
struct GenerateOptions {
  std::int64_t max_new_tokens = 20;         ///< at most 2^30
  double temperature = 1;                   ///< divides the logits; 0 takes the likeliest token
  std::int64_t top_k = 0;                   ///< 0 for all, at most 2^30
  double top_p = 1;                         ///< above 0, at most 1
  std::vector<std::int64_t> stop_tokens{};  ///< the sequence ends behind one of these
  std::uint64_t seed = 0;                   ///< the caller's generator stays as it is
};

/// Called with each token as soon as it is chosen.
using OnToken = std::function<void(std::int64_t)>;
/// Whether a sequence goes on behind a token.
enum class Sequel { goes_on, ends };
/// The same for several sequences: which one it is, by its place among the prompts, and its token.
using OnRowToken = std::function<Sequel(std::size_t row, std::int64_t token)>;

/// A token that was chosen for a sequence of a `SequenceBatch`.
struct NextToken {
  std::int64_t sequence, token;
  bool last;  ///< the sequence has ended with it
};

/// Sequences that a model in eval mode continues together, and which come and go between steps:
///
///   nn::SequenceBatch batch(model);
///   batch.add(prompt, {.max_new_tokens = 50});
///   while (!batch.done())
///     for (const nn::NextToken& t : batch.step()) answer(t.sequence, t.token, t.last);
///
/// A sequence's tokens do not depend on its neighbours, but for the rounding of products of other sizes. Its
/// keys and values are kept; when they fill the model's context, the last half of it is read anew. What a new
/// sequence says already is read in a step of its own, with those of the same length.
///
/// Of a sharded model all ranks that have parts of it call `done` and `step` alike, each with sequences of
/// its own or none: a rank without any computes one token for nothing, since the others gather from it. The
/// model outlives the batch, whose calls are of one thread.
class SHERD_API SequenceBatch {
 public:
  explicit SequenceBatch(const Gpt& model);
  explicit SequenceBatch(const Llama& model);
  SequenceBatch(SequenceBatch&&) noexcept;
  SequenceBatch& operator=(SequenceBatch&&) noexcept;
  ~SequenceBatch();

  /// A sequence that begins with `prompt`; its number, from 0 on in the order of the calls. ValueError for an
  /// empty prompt, tokens outside the vocabulary and options out of range.
  std::int64_t add(std::span<const std::int64_t> prompt, const GenerateOptions& options = {});
  /// Ends a sequence, if it has not ended.
  void end(std::int64_t sequence);
  /// How many sequences go on.
  std::size_t size() const;
  /// Whether none goes on, on any rank.
  bool done() const;
  /// The next token of some or all sequences, in the order of their numbers; nothing where there are none.
  /// StateError for logits that are not finite, behind which the batch is of no use.
  std::vector<NextToken> step();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The tokens that follow `prompt`, without it, as a SequenceBatch chooses them. ValueError for an empty
/// prompt, for tokens outside the vocabulary and options out of range; StateError for logits that are not
/// finite.
SHERD_API std::vector<std::int64_t> generate(const Gpt& model, std::span<const std::int64_t> prompt,
                                             const GenerateOptions& options = {},
                                             const OnToken& on_token = {});
SHERD_API std::vector<std::int64_t> generate(const Llama& model, std::span<const std::int64_t> prompt,
                                             const GenerateOptions& options = {},
                                             const OnToken& on_token = {});

/// The same of several prompts, of any lengths, in one batch; row r draws from the stream
/// `derived_seed(options.seed, r)`. Of a sharded model every rank calls, with prompts of its own or none.
/// Where one throws, before the model runs or in `on_token`, it does so once its step is over, and the others
/// get a StateError that names the rank; what a model's forward throws on one rank ends the group's calls
/// with a CollectiveError on the others.
SHERD_API std::vector<std::vector<std::int64_t>> generate(const Gpt& model,
                                                          std::span<const std::vector<std::int64_t>> prompts,
                                                          const GenerateOptions& options = {},
                                                          const OnRowToken& on_token = {});
SHERD_API std::vector<std::vector<std::int64_t>> generate(const Llama& model,
                                                          std::span<const std::vector<std::int64_t>> prompts,
                                                          const GenerateOptions& options = {},
                                                          const OnRowToken& on_token = {});

/// When a beam search ends that has as many ended sequences as beams: at once, or when none that goes on
/// could be better at its present length.
enum class BeamEnd { at_once, none_better };

/// For `beam_search`.
struct BeamOptions {
  std::int64_t beams = 4;
  std::int64_t max_new_tokens = 20;
  double length_penalty = 1;  ///< a sequence of n new tokens is scored by log p / n^length_penalty
  BeamEnd end = BeamEnd::none_better;
  std::vector<std::int64_t> stop_tokens{};  ///< a sequence ends behind one of these
};

/// A sequence of new tokens, and its score.
struct Beam {
  std::vector<std::int64_t> tokens;
  double score;
};

/// The best sequences that follow each prompt, without it, the best one first, `beams` of each: those of
/// `generate(num_beams=beams, do_sample=False)` in transformers. Ranks as in `generate`. ValueError for
/// options out of range, for fewer than (1 + stop_tokens) `beams` tokens in the vocabulary (2 `beams`
/// without), and where prompt and new tokens are beyond the model's context.
SHERD_API std::vector<std::vector<Beam>> beam_search(const Gpt& model,
                                                     std::span<const std::vector<std::int64_t>> prompts,
                                                     const BeamOptions& options = {});
SHERD_API std::vector<std::vector<Beam>> beam_search(const Llama& model,
                                                     std::span<const std::vector<std::int64_t>> prompts,
                                                     const BeamOptions& options = {});

}  // namespace sherd::nn
