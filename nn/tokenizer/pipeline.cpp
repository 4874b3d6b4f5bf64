#include "nn/tokenizer/pipeline.h"

#include <utility>

#include "runtime/error.h"

namespace sherd::nn::tokens {

void Pipeline::make_texts() {
  texts.resize(vocabulary.end());
  special.resize(vocabulary.end());
  constexpr std::size_t most_bytes = 2 * most_token_bytes;
  std::size_t bytes = 0;
  for (Id id = 0; id < vocabulary.end(); ++id) {
    if (!vocabulary.has(id)) continue;
    texts[id] = decoder.text_of(vocabulary.text(id));
    bytes += texts[id].text.size();
    check<ValueError>(bytes <= most_bytes,
                      "tokenizer: the decoder makes more than {} bytes of the tokens, the limit", most_bytes);
  }
}

class Coder::Loan {
 public:
  explicit Loan(const Coder& coder) : coder_(coder) {
    const std::lock_guard lock(coder.mutex_);
    if (!coder.idle_.empty()) {
      workspace_ = std::move(coder.idle_.back());
      coder.idle_.pop_back();
    }
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan() {
    if (!workspace_) return;
    const std::lock_guard lock(coder_.mutex_);
    if (coder_.idle_.size() < most_idle) coder_.idle_.push_back(std::move(workspace_));
  }
  Workspace& get() {
    if (!workspace_) workspace_ = std::make_unique<Workspace>();
    return *workspace_;
  }

 private:
  static constexpr std::size_t most_idle = 256;
  const Coder& coder_;
  std::unique_ptr<Workspace> workspace_;
};

std::vector<std::int64_t> Coder::encode(std::string_view text, bool add_special, bool special_in_text) const {
  constexpr std::size_t longest = std::size_t{1} << 31;
  check<ValueError>(text.size() < longest, "tokenizer: a text of {} bytes; encode less than {} at a time",
                    text.size(), longest);
  std::string repaired;
  if (sound_prefix(text) < text.size()) {
    append_repaired(repaired, text, parts_->malformed);
    text = repaired;
  }
  Loan loan(*this);
  Workspace& workspace = loan.get();
  std::vector<std::int64_t> ids;
  ids.reserve(text.size() / 4 + 8);
  if (add_special) ids.insert(ids.end(), parts_->prefix.begin(), parts_->prefix.end());
  if (parts_->raw.empty()) {
    encode_part(text, true, special_in_text, workspace, ids);
  } else {
    for (const TextPart& part : parts_->raw.split(text, special_in_text, workspace.match))
      if (part.id)
        ids.push_back(*part.id);
      else
        encode_part(text.substr(part.range.begin, part.range.end - part.range.begin), part.range.begin == 0,
                    special_in_text, workspace, ids);
  }
  if (add_special) ids.insert(ids.end(), parts_->suffix.begin(), parts_->suffix.end());
  return ids;
}

void Coder::encode_part(std::string_view part, bool first, bool special, Workspace& workspace,
                        std::vector<std::int64_t>& ids) const {
  std::string memory;
  const std::string_view text = parts_->normalizer.run(part, memory);
  const auto encode_words = [&](std::string_view piece, bool begins) {
    parts_->pre_tokenizer.run(piece, begins, workspace.match,
                              [&](std::string_view word) { parts_->bpe->encode(word, workspace.bpe, ids); });
  };
  if (parts_->normalized.empty()) return encode_words(text, first);
  for (const TextPart& piece : parts_->normalized.split(text, special, workspace.match))
    if (piece.id)
      ids.push_back(*piece.id);
    else
      encode_words(text.substr(piece.range.begin, piece.range.end - piece.range.begin),
                   first && piece.range.begin == 0);
}

const TokenText* Coder::text_of(std::int64_t id, bool skip_special) const {
  if (id < 0 || id >= std::int64_t{parts_->vocabulary.end()}) return nullptr;
  const auto place = static_cast<std::size_t>(id);
  if (!parts_->vocabulary.has(static_cast<Id>(id)) || (skip_special && parts_->special[place]))
    return nullptr;
  return &parts_->texts[place];
}

}  // namespace sherd::nn::tokens
