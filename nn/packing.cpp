#include "nn/packing.h"

#include <algorithm>
#include <limits>
#include <map>

#include "nn/llama.h"
#include "runtime/error.h"
#include "runtime/losses.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

constexpr std::int64_t ignored_target = -100;

ClassTargets targets_of(const Tensor& classes) {
  LinearCrossEntropyOptions options;
  options.reduction = Reduction::sum;
  options.ignore_index = ignored_target;
  options.precision = LossPrecision::wide;
  return {classes, options};
}

Tensor over(const Tensor& sum, std::int64_t learnt) {
  check<ValueError>(learnt > 0, "packed_loss: divided by {} targets; there is at least one", learnt);
  return mul(sum, 1 / static_cast<double>(learnt));
}

template <class Model>
Tensor loss_of(const Model& model, const PackedBatch& batch, std::int64_t learnt) {
  const Device device = model.parameters().front().local().device();
  return over(model(to(batch.tokens, device), batch.documents, targets_of(to(batch.targets, device))),
              learnt);
}

}  // namespace

void TokenizedText::add(std::span<const std::int64_t> document, std::int64_t prompt) {
  const auto length = static_cast<std::int64_t>(document.size());
  sherd::check<ValueError>(length > 0, "TokenizedText: a document without tokens");
  sherd::check<ValueError>(prompt >= 0 && prompt <= length,
                           "TokenizedText: a prompt of {} tokens in a document of {}", prompt, length);
  for (const std::int64_t token : document)
    sherd::check<ValueError>(token >= 0 && token <= std::numeric_limits<std::int32_t>::max(),
                             "TokenizedText: token {} is not from 0 to 2^31 - 1", token);
  tokens.insert(tokens.end(), document.begin(), document.end());
  ends.push_back(static_cast<std::int64_t>(tokens.size()));
  prompts.push_back(prompt);
}

std::int64_t TokenizedText::learnt() const {
  std::int64_t count = 0, begin = 0;
  for (std::size_t i = 0; i < ends.size(); begin = ends[i++])
    count += ends[i] - begin - std::max<std::int64_t>(prompts[i], 1);
  return count;
}

void TokenizedText::check() const {
  sherd::check<ValueError>(ends.size() == prompts.size(), "TokenizedText: {} ends and {} prompts",
                           ends.size(), prompts.size());
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    sherd::check<ValueError>(ends[i] > begin && prompts[i] >= 0 && prompts[i] <= ends[i] - begin,
                             "TokenizedText: document {} is from {} to {} with a prompt of {} tokens", i,
                             begin, ends[i], prompts[i]);
    begin = ends[i];
  }
  sherd::check<ValueError>(begin == static_cast<std::int64_t>(tokens.size()),
                           "TokenizedText: documents of {} tokens, and there are {}", begin, tokens.size());
}

Packing::Packing(TokenizedText text, PackingOptions options) : text_(std::move(text)), options_(options) {
  check<ValueError>(options_.context >= 2, "Packing: context {}; a token and the one it predicts are 2",
                    options_.context);
  text_.check();
  check<ValueError>(text_.learnt() > 0,
                    "Packing: a text of {} documents of which nothing is learnt; one that has a token behind "
                    "its prompt and its first is needed",
                    text_.documents());
  pack(cut());
}

std::vector<Packing::Piece> Packing::cut() const {
  std::vector<Piece> pieces;
  std::int64_t begin = 0;
  for (std::size_t d = 0; d < text_.ends.size(); ++d) {
    const std::int64_t end = text_.ends[d], behind_prompt = begin + text_.prompts[d];
    while (begin < end) {
      const std::int64_t length = std::min(options_.context, end - begin);
      const Piece piece{begin, length, std::max(begin + 1, behind_prompt), std::min(begin + length + 1, end)};
      if (piece.learnt() > 0) pieces.push_back(piece);
      begin += length;
    }
  }
  return pieces;
}

void Packing::pack(std::vector<Piece> pieces) {
  std::ranges::stable_sort(pieces, std::ranges::greater(), &Piece::length);
  std::vector<std::vector<Piece>> rows;
  std::map<std::int64_t, std::vector<std::size_t>> open;  // rows by the room that they have
  for (const Piece& piece : pieces) {
    std::int64_t room = options_.context;
    std::size_t row = rows.size();
    if (const auto fullest = open.lower_bound(piece.length); fullest != open.end()) {
      room = fullest->first;
      row = fullest->second.back();
      fullest->second.pop_back();
      if (fullest->second.empty()) open.erase(fullest);
    } else {
      rows.emplace_back();
    }
    rows[row].push_back(piece);
    if (room > piece.length) open[room - piece.length].push_back(row);
  }
  for (const std::vector<Piece>& row : rows) {
    pieces_.insert(pieces_.end(), row.begin(), row.end());
    row_ends_.push_back(static_cast<std::int64_t>(pieces_.size()));
  }
}

std::span<const Packing::Piece> Packing::pieces_of(std::int64_t row) const {
  check<ValueError>(row >= 0 && row < rows(), "Packing: row {} of {}", row, rows());
  const auto at = static_cast<std::size_t>(row);
  const std::int64_t begin = row == 0 ? 0 : row_ends_[at - 1];
  return std::span(pieces_).subspan(static_cast<std::size_t>(begin),
                                    static_cast<std::size_t>(row_ends_[at] - begin));
}

std::int64_t Packing::tokens(std::int64_t row) const {
  std::int64_t count = 0;
  for (const Piece& piece : pieces_of(row)) count += piece.length;
  return count;
}

std::int64_t Packing::learnt(std::int64_t row) const {
  std::int64_t count = 0;
  for (const Piece& piece : pieces_of(row)) count += piece.learnt();
  return count;
}

PackedBatch Packing::batch(std::span<const std::int64_t> rows) const {
  check<ValueError>(!rows.empty(), "Packing: a batch of no rows");
  std::vector<Piece> pieces;
  for (const std::int64_t row : rows) std::ranges::copy(pieces_of(row), std::back_inserter(pieces));
  // Equal lengths lie beside each other, so that attention takes them at once.
  std::ranges::stable_sort(pieces, std::ranges::greater(), &Piece::length);
  PackedBatch batch;
  std::vector<std::int64_t> tokens, targets;
  for (const Piece& piece : pieces) {
    batch.documents.lengths.push_back(piece.length);
    batch.learnt += piece.learnt();
    for (std::int64_t i = piece.begin; i < piece.begin + piece.length; ++i) {
      const std::int64_t next = i + 1;
      const bool learnt = next >= piece.learnt_begin && next < piece.learnt_end;
      tokens.push_back(text_.tokens[static_cast<std::size_t>(i)]);
      targets.push_back(learnt ? text_.tokens[static_cast<std::size_t>(next)] : ignored_target);
    }
  }
  const Shape shape{1, static_cast<std::int64_t>(tokens.size())};
  batch.tokens = Tensor::from(tokens, shape, Device::cpu());
  batch.targets = Tensor::from(targets, shape, Device::cpu());
  return batch;
}

Tensor packed_loss(const Tensor& logits, const Tensor& targets, std::int64_t learnt) {
  return over(detail::loss_of_logits(logits, targets_of(targets)), learnt);
}
Tensor packed_loss(const Gpt& model, const PackedBatch& batch, std::int64_t learnt) {
  return loss_of(model, batch, learnt);
}
Tensor packed_loss(const Llama& model, const PackedBatch& batch, std::int64_t learnt) {
  return loss_of(model, batch, learnt);
}

}  // namespace sherd::nn
