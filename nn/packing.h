// Tokenised texts as batches to train on: documents packed one behind another, each with positions of its own
// and seeing itself alone, with nothing between them.
//
//   const nn::Packing packing(text.train, {.context = 1024});
//   nn::EpochSampler sampler(packing.rows(), {.batch = 8});
//   const nn::PackedBatch batch = packing.batch(sampler.next());
//   nn::packed_loss(model, batch, batch.learnt).backward();
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nn/documents.h"

namespace sherd::nn {

struct Gpt;
struct Llama;

/// Documents as numbers of tokens, one behind another.
struct TokenizedText {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> ends;     ///< by document: where it ends in `tokens`
  std::vector<std::int64_t> prompts;  ///< by document: how many of its first tokens are given, and not learnt

  std::int64_t documents() const { return static_cast<std::int64_t>(ends.size()); }
  /// One more document. ValueError for one without tokens, for a token that is not from 0 to 2^31 - 1, and
  /// for a prompt that is longer than the document or negative.
  SHERD_API void add(std::span<const std::int64_t> document, std::int64_t prompt = 0);
  /// How many tokens are learnt: those that follow another of their document, behind the prompt.
  SHERD_API std::int64_t learnt() const;
  /// ValueError unless the ends rise to the number of tokens, and prompts lie in their documents.
  SHERD_API void check() const;
};

/// For `Packing`.
struct PackingOptions {
  std::int64_t context = 1024;  ///< most tokens of a row, and of a piece of a document
};

/// Rows of documents as one sequence. Where the loss ignores a target it is -100: at the last token of a
/// document, and where the next token is of its prompt.
struct PackedBatch {
  Tensor tokens, targets;   ///< (1, N) i64: N is what the documents have, there is no padding
  Documents documents;      ///< the longest first
  std::int64_t learnt = 0;  ///< targets that are not ignored, one at least
};

/// Puts documents into rows of at most `context` tokens. One that is longer is cut into pieces of `context`
/// tokens and a rest, and each piece is a document to attention; the last token of a piece has the first of
/// the next as its target, so every token behind a prompt or a beginning is learnt once an epoch. A piece
/// that teaches nothing, all of it prompt or the last token alone, is left out, so every row teaches
/// something. The longest piece comes first, each into the fullest row that has room (Ding et al., 2024:
/// best-fit packing). Which row holds what follows from text and context alone.
class SHERD_API Packing {
 public:
  /// Keeps the text. ValueError for a context below 2, for a text of which nothing is learnt, and as of
  /// `TokenizedText::check`.
  explicit Packing(TokenizedText text, PackingOptions options = {});

  std::int64_t rows() const { return static_cast<std::int64_t>(row_ends_.size()); }
  /// Tokens, and targets that are not ignored (one at least), of a row. ValueError for a number that is no
  /// row's.
  std::int64_t tokens(std::int64_t row) const;
  std::int64_t learnt(std::int64_t row) const;
  const TokenizedText& text() const { return text_; }
  const PackingOptions& options() const { return options_; }
  /// These rows, on the CPU, from any thread. ValueError for none, and for a number that is no row's.
  PackedBatch batch(std::span<const std::int64_t> rows) const;

 private:
  /// Of a document: a run of tokens, and of the tokens that they predict those that are learnt.
  struct Piece {
    std::int64_t begin, length;
    std::int64_t learnt_begin, learnt_end;
    std::int64_t learnt() const { return learnt_end - learnt_begin; }
  };
  std::vector<Piece> cut() const;
  void pack(std::vector<Piece> pieces);
  std::span<const Piece> pieces_of(std::int64_t row) const;

  TokenizedText text_;
  PackingOptions options_;
  std::vector<Piece> pieces_;           // row after row
  std::vector<std::int64_t> row_ends_;  // in pieces_
};

/// The sum of the losses of logits (1, N, vocab) at targets (1, N) that are not ignored, in nats and at least
/// f32, divided by `learnt`: of one batch its `learnt`, for a mean; of a batch in parts, over micro-batches
/// or ranks, the number of all of them, so that parts add up to the mean of the whole.
SHERD_API Tensor packed_loss(const Tensor& logits, const Tensor& targets, std::int64_t learnt);
/// The same of a model, to whose device the batch goes, and whose head takes the losses without holding all
/// logits, as `model(tokens, documents, ClassTargets)` says.
SHERD_API Tensor packed_loss(const Gpt& model, const PackedBatch& batch, std::int64_t learnt);
SHERD_API Tensor packed_loss(const Llama& model, const PackedBatch& batch, std::int64_t learnt);

}  // namespace sherd::nn
