#include "nn/tokenizer/added_tokens.h"

#include <algorithm>

#include "nn/tokenizer/utf8.h"

namespace sherd::nn::tokens {
namespace {

/// Where the character that ends `text` begins.
std::size_t last_character(std::string_view text) {
  std::size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

/// Where the white space at the end of `text` begins, not before `least`.
std::size_t trailing_space(std::string_view text, std::size_t least) {
  while (text.size() > least) {
    const std::size_t last = last_character(text);
    if (!is_white_space(first_character(text.substr(last)).code)) break;
    text = text.substr(0, last);
  }
  return std::max(text.size(), least);
}

std::size_t leading_space(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Character c = first_character(text.substr(at));
    if (!is_white_space(c.code)) break;
    at += c.bytes;
  }
  return at;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::ranges::sort(tokens_, {}, &AddedToken::content);
  for (std::uint32_t i = 0; i < tokens_.size(); ++i) {
    auto& [first, last] = begin_[static_cast<unsigned char>(tokens_[i].content.front())];
    if (first == last) first = i;
    last = i + 1;
    // What Rust's regular expressions call a character of a word.
    if (tokens_[i].single_word && !word_) word_.emplace("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\u200C\u200D]");
  }
}

const AddedToken* AddedTokens::longest_at(std::string_view text) const {
  auto [first, last] = begin_[static_cast<unsigned char>(text.front())];
  const AddedToken* longest = nullptr;
  // Of the tokens that begin as the text does, the shortest stands first.
  for (std::size_t length = 1; first < last; ++length) {
    if (tokens_[first].content.size() == length) longest = &tokens_[first++];
    if (length == text.size()) break;
    const auto byte_of = [&](const AddedToken& token) {
      return static_cast<unsigned char>(token.content[length]);
    };
    const auto found = std::ranges::equal_range(tokens_.begin() + first, tokens_.begin() + last,
                                                static_cast<unsigned char>(text[length]), {}, byte_of);
    first = static_cast<std::uint32_t>(found.begin() - tokens_.begin());
    last = static_cast<std::uint32_t>(found.end() - tokens_.begin());
  }
  return longest;
}

bool AddedTokens::is_single_word(std::string_view text, Range range, MatchWorkspace& workspace) const {
  const auto is_word = [&](std::string_view character) {
    return word_->find(character, 0, workspace).has_value();
  };
  const std::string_view before = text.substr(0, range.begin), after = text.substr(range.end);
  return (before.empty() || !is_word(before.substr(last_character(before)))) &&
         (after.empty() || !is_word(after.substr(0, first_character(after).bytes)));
}

std::vector<TextPart> AddedTokens::split(std::string_view text, bool special,
                                         MatchWorkspace& workspace) const {
  std::vector<TextPart> parts;
  std::size_t done = 0, space_end = 0;  // where white space ends that was looked at
  for (std::size_t at = 0; at < text.size() && !tokens_.empty();) {
    const auto& [first, last] = begin_[static_cast<unsigned char>(text[at])];
    const AddedToken* token = first == last ? nullptr : longest_at(text.substr(at));
    if (token == nullptr) {
      ++at;
      continue;
    }
    Range range{at, at + token->content.size()};
    at = range.end;
    if ((token->special && !special) || (token->single_word && !is_single_word(text, range, workspace)))
      continue;
    if (token->lstrip) range.begin = trailing_space(text.substr(0, range.begin), std::min(done, range.begin));
    if (token->rstrip) {
      if (range.end > space_end) space_end = range.end + leading_space(text.substr(range.end));
      range.end = space_end;
    }
    if (done < range.begin) parts.push_back({{done, range.begin}, {}});
    parts.push_back({range, token->id});
    done = range.end;
  }
  if (done < text.size()) parts.push_back({{done, text.size()}, {}});
  return parts;
}

}  // namespace sherd::nn::tokens
