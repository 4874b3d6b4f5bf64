#include "nn/tokenizer/bpe.h"

#include "nn/tokenizer/bytes.h"
#include "nn/tokenizer/utf8.h"

namespace sherd::nn::tokens {
namespace {

char32_t first_code(std::string_view text) { return first_character(text).code; }

char32_t last_code(std::string_view text) {
  std::size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return first_code(text.substr(at));
}

}  // namespace

Bpe::Bpe(const Vocabulary& vocabulary, Merges merges, const BpeOptions& options)
    : vocabulary_(vocabulary),
      merges_(std::move(merges)),
      options_(options),
      has_(vocabulary.end()),
      leaves_out_(!options.byte_fallback && !options.unknown) {
  for (Id id = 0; id < vocabulary.end(); ++id) has_[id] = vocabulary.has(id);
  if (options_.alphabet == Alphabet::bytes) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string text;
      append_utf8(text, character_of_byte(static_cast<unsigned char>(byte)));
      const std::optional<Id> id = vocabulary.find(text);
      symbols_.push_back(id ? *id : bare_character(static_cast<char32_t>(byte)));
    }
    return;
  }
  symbols_.resize(0x10000);
  for (char32_t code = 0; code < symbols_.size(); ++code) symbols_[code] = bare_character(code);
  for (Id id = 0; id < vocabulary.end(); ++id) {
    const std::string_view text = vocabulary.text(id);
    if (text.empty() || text.size() > 4) continue;
    const Character c = first_character(text);
    if (!c.sound || c.bytes != text.size()) continue;
    if (c.code < symbols_.size())
      symbols_[c.code] = id;
    else
      more_symbols_.emplace(c.code, id);
  }
  add_junctions();
}

void Bpe::add_junctions() {
  const auto is_bare = [](Symbol symbol) { return symbol >= first_bare_character; };
  merges_.visit([&](Symbol left, Symbol right, const Merge&) {
    junctions_.add(is_bare(left) ? left - first_bare_character : last_code(vocabulary_.text(left)),
                   is_bare(right) ? right - first_bare_character : first_code(vocabulary_.text(right)));
  });
}

Symbol Bpe::symbol_of(char32_t code) const {
  if (code < symbols_.size()) return symbols_[code];
  const auto found = more_symbols_.find(code);
  return found == more_symbols_.end() ? bare_character(code) : found->second;
}

std::optional<Id> Bpe::whole(std::string_view word) const {
  const std::optional<Id> id = options_.alphabet == Alphabet::bytes
                                   ? vocabulary_.find(characters_of_bytes(word))
                                   : vocabulary_.find(word);
  return id && *id < has_.size() && has_[*id] ? id : std::nullopt;
}

void Bpe::encode(std::string_view word, BpeWorkspace& workspace, std::vector<std::int64_t>& ids) const {
  if (word.empty()) return;
  if (options_.alphabet == Alphabet::bytes || leaves_out_) return encode_piece(word, workspace, ids, false);
  if (options_.ignore_merges)
    if (const std::optional<Id> id = whole(word)) return ids.push_back(*id);
  encode_cut(word, workspace, ids);
}

/// Cuts the word where no merge ever happens.
void Bpe::encode_cut(std::string_view word, BpeWorkspace& workspace, std::vector<std::int64_t>& ids) const {
  std::size_t begin = 0, at = 0;
  char32_t before = 0;
  while (at < word.size()) {
    const Character c = first_character(word.substr(at));
    if (at > begin && !junctions_.has(before, c.code)) {
      encode_piece(word.substr(begin, at - begin), workspace, ids, begin > 0);
      begin = at;
    }
    before = c.code;
    at += c.bytes;
  }
  encode_piece(word.substr(begin), workspace, ids, begin > 0);
}

void Bpe::encode_piece(std::string_view piece, BpeWorkspace& workspace, std::vector<std::int64_t>& ids,
                       bool goes_on) const {
  const auto add = [&](std::span<const Id> found) {
    const bool fused = options_.fuse_unknown && goes_on && !found.empty() && !ids.empty() &&
                       found.front() == options_.unknown && ids.back() == std::int64_t{found.front()};
    ids.insert(ids.end(), found.begin() + (fused ? 1 : 0), found.end());
  };
  if (piece.size() > WordCache::longest_word) {
    merge(piece, workspace);
    return add(workspace.ids);
  }
  if (const Character c = first_character(piece);
      c.bytes == piece.size() && options_.alphabet == Alphabet::characters) {
    // Alone between two cuts, as most characters are that have no token or few merges.
    workspace.ids.clear();
    append(symbol_of(c.code), workspace.ids);
    return add(workspace.ids);
  }
  const std::uint64_t hash = hash_of(piece);
  if (const auto found = workspace.cache.find(piece, hash)) return add(*found);
  merge(piece, workspace);
  workspace.cache.put(piece, hash, workspace.ids);
  add(workspace.ids);
}

void Bpe::merge(std::string_view piece, BpeWorkspace& workspace) const {
  std::vector<Symbol>& symbols = workspace.symbols;
  workspace.ids.clear();
  if (options_.ignore_merges && (options_.alphabet == Alphabet::bytes || leaves_out_))
    if (const std::optional<Id> id = whole(piece)) return workspace.ids.push_back(*id);
  symbols.clear();
  const auto add = [&](Symbol symbol) {
    if (symbol < first_bare_character || !leaves_out_) symbols.push_back(symbol);
  };
  if (options_.alphabet == Alphabet::bytes) {
    for (const char byte : piece) add(symbols_[static_cast<unsigned char>(byte)]);
  } else {
    while (!piece.empty()) {
      const Character c = first_character(piece);
      add(symbol_of(c.code));
      piece.remove_prefix(c.bytes);
    }
  }
  workspace.merging.run(merges_, symbols);
  for (const Symbol symbol : symbols) append(symbol, workspace.ids);
}

void Bpe::append(Symbol symbol, std::vector<Id>& ids) const {
  if (symbol < first_bare_character) return ids.push_back(symbol);
  if (options_.byte_fallback) {
    std::string bytes;
    append_utf8(bytes, symbol - first_bare_character);
    for (const char byte : bytes) ids.push_back((*options_.byte_fallback)[static_cast<unsigned char>(byte)]);
  } else if (options_.unknown &&
             !(options_.fuse_unknown && !ids.empty() && ids.back() == *options_.unknown)) {
    ids.push_back(*options_.unknown);
  }
}

}  // namespace sherd::nn::tokens
