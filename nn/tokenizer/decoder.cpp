#include "nn/tokenizer/decoder.h"

#include <utility>

#include "nn/tokenizer/bytes.h"
#include "nn/tokenizer/utf8.h"
#include "runtime/error.h"

namespace sherd::nn::tokens {

constexpr std::size_t longest_text = std::size_t{1} << 15;  // of one token

TokenText Decoder::text_of(std::string_view token) const {
  if (rules_.bytes) {
    std::optional<std::string> bytes = bytes_of_characters(token);
    return {bytes ? std::move(*bytes) : std::string(token)};
  }
  TokenText text{std::string(token)};
  for (const auto& [from, to] : rules_.replace) {
    std::string replaced;
    append_replaced(replaced, text.text, from, to);
    check<ValueError>(replaced.size() <= longest_text,
                      "tokenizer: the decoder makes more than {} bytes of a token of {}", longest_text,
                      token.size());
    text.text = std::move(replaced);
  }
  if (rules_.byte_tokens) text.byte = byte_of_token(text.text);
  return text;
}

void Decoding::add(const TokenText& token) {
  if (token.byte) {
    pending_.push_back(static_cast<char>(*token.byte));
    first_ = false;
    return;
  }
  if (rules_->bytes) {
    pending_ += token.text;
    return;
  }
  finish_run();
  std::string_view text = token.text;
  std::string changed;
  if (rules_->metaspace) {
    append_replaced(changed, text, *rules_->metaspace, first_ ? "" : " ");
    text = changed;
  }
  if (rules_->leading_symbol) {
    const std::string& symbol = *rules_->leading_symbol;
    if (symbol_gone_ || begun_) {
      symbol_gone_ = true;  // from now on
    } else if (rules_->leading_is_taken && token.in_front && text.starts_with(symbol)) {
      text.remove_prefix(symbol.size());
      symbol_gone_ = !rules_->all_leading;
    }
    append_replaced(changed, text, symbol, " ");
    text = changed;
  }
  if (!first_) add_text(rules_->separator);
  first_ = false;
  add_text(text);
}

void Decoding::add_text(std::string_view text) {
  while (strips_left_ > 0 && !text.empty()) {
    if (!text.starts_with(rules_->strip)) {
      strips_left_ = 0;
      break;
    }
    text.remove_prefix(rules_->strip.size());
    --strips_left_;
  }
  if (!text.empty()) begun_ = true;
  out_ += text;
}

void Decoding::finish_run() {
  if (pending_.empty()) return;
  std::string text;
  if (rules_->bytes) {
    append_repaired(text, pending_, Malformed::beginnings);
  } else if (*rules_->byte_tokens == UnsoundRun::characters || sound_prefix(pending_) == pending_.size()) {
    append_repaired(text, pending_, Malformed::bytes);
  } else {
    for (std::size_t i = 0; i < pending_.size(); ++i) text += replacement;
  }
  pending_.clear();
  add_text(text);
}

void Decoding::settle() {
  if (rules_->bytes || rules_->byte_tokens == UnsoundRun::characters) {
    const std::size_t whole = pending_.size() - unfinished_suffix(pending_);
    std::string rest = pending_.substr(whole);
    pending_.resize(whole);
    finish_run();
    pending_ = std::move(rest);
  } else if (sound_prefix(pending_) == pending_.size()) {
    finish_run();
  }
}

void Decoding::finish() { finish_run(); }

std::string Decoding::take() { return std::exchange(out_, {}); }

}  // namespace sherd::nn::tokens
