#include "nn/tokenizer.h"

#include <utility>

#include "nn/pretrained_config.h"
#include "nn/tokenizer/json_reader.h"
#include "nn/tokenizer/sentence_pieces.h"
#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::nn {

using TokenizerPath = FileSystem::Path;

struct Tokenizer::Parts {
  explicit Parts(std::unique_ptr<const tokens::Pipeline> read) : coder(std::move(read)) {}
  tokens::Coder coder;
};

namespace {

std::string tokenizer_where(const TokenizerPath& file) {
  return "tokenizer: '" + shown(file.string(), 300) + "'";
}

/// The text that a setting such as `bos_token` is, or has as its content.
std::optional<std::string> token_name(const nlohmann::json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end()) return {};
  if (found->is_string()) return found->get<std::string>();
  if (!found->is_object() || !found->contains("content") || !found->at("content").is_string()) return {};
  return found->at("content").get<std::string>();
}

bool flag_of(const nlohmann::json& config, const char* key, bool fallback) {
  const auto found = config.find(key);
  return found != config.end() && found->is_boolean() ? found->get<bool>() : fallback;
}

/// What the files beside the tokenizer's own say of special tokens.
void read_names(tokens::Pipeline& parts, const TokenizerPath& folder, FileSystem& files) {
  for (const char* name : {"special_tokens_map.json", "tokenizer_config.json"}) {
    if (!files.exists(folder / name)) continue;
    constexpr std::uint64_t most_bytes = std::uint64_t{1} << 22;
    const nlohmann::json config = pretrained::read_object(folder / name, files, most_bytes);
    if (const auto bos = token_name(config, "bos_token")) parts.bos = parts.vocabulary.find(*bos);
    if (const auto eos = token_name(config, "eos_token")) parts.eos = parts.vocabulary.find(*eos);
  }
}

/// A SentencePiece model does not say itself which tokens begin and end a text.
void read_surroundings(tokens::Pipeline& parts, const TokenizerPath& folder, FileSystem& files) {
  const TokenizerPath file = folder / "tokenizer_config.json";
  const nlohmann::json config = files.exists(file)
                                    ? pretrained::read_object(file, files, std::uint64_t{1} << 22)
                                    : nlohmann::json::object();
  if (parts.bos && flag_of(config, "add_bos_token", true)) parts.prefix = {*parts.bos};
  if (parts.eos && flag_of(config, "add_eos_token", false)) parts.suffix = {*parts.eos};
}

/// The same error, which names the file.
template <class E>
[[noreturn]] void rethrow_of(const E& error, const std::string& where) {
  constexpr std::string_view begin = "tokenizer: ";
  std::string_view message = error.what();
  if (message.starts_with(where)) throw error;
  if (message.starts_with(begin)) message.remove_prefix(begin.size());
  throw E(fmt::format("{}: {}", where, message), error.where());
}

std::unique_ptr<tokens::Pipeline> parse_file(const TokenizerPath& file, FileSystem& files,
                                             const std::string& where) {
  if (file.extension() == ".json") return tokens::read_json(files.read(file, tokens::largest_json), where);
  return tokens::read_sentence_pieces(files.read(file, tokens::largest_model), where);
}

std::unique_ptr<tokens::Pipeline> read_file(const TokenizerPath& file, FileSystem& files) {
  const std::string where = tokenizer_where(file);
  try {
    return parse_file(file, files, where);
  } catch (const ValueError& error) {
    rethrow_of(error, where);
  } catch (const NotImplementedError& error) {
    rethrow_of(error, where);
  }
}

}  // namespace

Tokenizer::Tokenizer(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

Tokenizer Tokenizer::read(const FileSystem::Path& path, FileSystem& files) {
  TokenizerPath file = path, folder;
  if (files.is_directory(path)) {
    folder = path;
    file = folder / "tokenizer.json";
    if (!files.exists(file)) file = folder / "tokenizer.model";
    check<FileError>(files.exists(file), "{}: has no tokenizer.json and no tokenizer.model",
                     tokenizer_where(path));
  }
  std::unique_ptr<tokens::Pipeline> parts = read_file(file, files);
  if (!folder.empty()) read_names(*parts, folder, files);
  if (file.extension() != ".json") read_surroundings(*parts, folder, files);
  return Tokenizer(std::make_shared<const Parts>(std::move(parts)));
}

std::vector<std::int64_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  return parts_->coder.encode(text, options.add_special_tokens, options.special_tokens_in_text);
}

std::string Tokenizer::decode(std::span<const std::int64_t> ids, const DecodeOptions& options) const {
  tokens::Decoding decoding(parts_->coder.parts().decoder.rules());
  for (const std::int64_t id : ids)
    if (const tokens::TokenText* text = parts_->coder.text_of(id, options.skip_special_tokens))
      decoding.add(*text);
  decoding.finish();
  return decoding.take();
}

std::int64_t Tokenizer::vocab_size() const { return parts_->coder.parts().vocabulary.end(); }

std::optional<std::int64_t> Tokenizer::token_to_id(std::string_view token) const {
  return parts_->coder.parts().vocabulary.find(token);
}

std::string Tokenizer::id_to_token(std::int64_t id) const {
  const tokens::Vocabulary& vocabulary = parts_->coder.parts().vocabulary;
  check<ValueError>(id >= 0 && id < vocab_size() && vocabulary.has(static_cast<tokens::Id>(id)),
                    "tokenizer: no token has the number {}; they go up to {}", id, vocab_size() - 1);
  return std::string(vocabulary.text(static_cast<tokens::Id>(id)));
}

bool Tokenizer::is_special(std::int64_t id) const {
  return parts_->coder.text_of(id, false) != nullptr && parts_->coder.text_of(id, true) == nullptr;
}

std::optional<std::int64_t> Tokenizer::bos_token_id() const { return parts_->coder.parts().bos; }
std::optional<std::int64_t> Tokenizer::eos_token_id() const { return parts_->coder.parts().eos; }

struct DecodeStream::State {
  std::shared_ptr<const Tokenizer::Parts> parts;
  DecodeOptions options;
  tokens::Decoding decoding{parts->coder.parts().decoder.rules()};
};

DecodeStream::DecodeStream(const Tokenizer& tokenizer, const DecodeOptions& options)
    : state_(std::make_unique<State>(tokenizer.parts_, options)) {}
DecodeStream::~DecodeStream() = default;

std::string DecodeStream::step(std::int64_t id) {
  if (const tokens::TokenText* text = state_->parts->coder.text_of(id, state_->options.skip_special_tokens))
    state_->decoding.add(*text);
  state_->decoding.settle();
  return state_->decoding.take();
}

std::string DecodeStream::finish() {
  state_->decoding.finish();
  std::string rest = state_->decoding.take();
  state_->decoding = tokens::Decoding(state_->parts->coder.parts().decoder.rules());
  return rest;
}

}  // namespace sherd::nn
