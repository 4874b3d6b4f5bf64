// Text to the numbers of tokens, and back, as the tokenizer of a folder of the Hub does it.
//
//   const auto tokenizer = nn::Tokenizer::read("TinyLlama-1.1B");
//   std::vector<std::int64_t> ids = tokenizer.encode("Once upon a time");
//   std::string text = tokenizer.decode(ids);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/io/file_system.h"

namespace sherd::nn {

/// For `Tokenizer::encode`.
struct EncodeOptions {
  bool add_special_tokens = true;      ///< what the model wants around a text, as a token that begins it
  bool special_tokens_in_text = true;  ///< false: text that spells a special token is text as any other
};

/// For `Tokenizer::decode` and `DecodeStream`.
struct DecodeOptions {
  bool skip_special_tokens = true;  ///< leaves out tokens that are marked as special
};

/// Encodes and decodes as `tokenizers` (a tokenizer.json with byte-level BPE, or BPE with bytes for what has
/// no token) and `sentencepiece` (a tokenizer.model of the type BPE without a map of characters) do. Copies
/// share what was read; threads may call the same one.
class SHERD_API Tokenizer {
 public:
  /// Reads a folder's tokenizer.json or, where there is none, its tokenizer.model; or one such file. Names of
  /// special tokens, and for tokenizer.model whether texts begin with one, are those of the folder's
  /// tokenizer_config.json. ValueError names what is damaged, beyond a limit or not supported,
  /// NotImplementedError what this build lacks; FileError.
  static Tokenizer read(const FileSystem::Path& path, FileSystem& files = posix_file_system());

  /// The tokens of `text`, UTF-8 in which malformed bytes count as U+FFFD. ValueError where the splitting
  /// rule of the file takes too long for the text.
  std::vector<std::int64_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  /// The text of tokens, sound UTF-8: bytes that are none become U+FFFD. Numbers without a token give
  /// nothing.
  std::string decode(std::span<const std::int64_t> ids, const DecodeOptions& options = {}) const;

  /// One more than the largest number of a token; a model's `vocab_size` may be larger.
  std::int64_t vocab_size() const;
  /// The number of a token as the file spells it, added tokens included.
  std::optional<std::int64_t> token_to_id(std::string_view token) const;
  /// How the file spells a token. ValueError for a number without one.
  std::string id_to_token(std::int64_t id) const;
  /// Whether a token is marked as special, so that `decode` leaves it out. False for a number without one.
  bool is_special(std::int64_t id) const;
  /// The tokens that begin and end a text, where the files name them.
  std::optional<std::int64_t> bos_token_id() const;
  std::optional<std::int64_t> eos_token_id() const;

 private:
  friend class DecodeStream;
  struct Parts;
  explicit Tokenizer(std::shared_ptr<const Parts> parts);
  std::shared_ptr<const Parts> parts_;
};

/// Decodes tokens as they come, in whole characters:
///
///   nn::DecodeStream stream(tokenizer);
///   nn::generate(model, ids, {}, [&](std::int64_t id) { std::cout << stream.step(id) << std::flush; });
///   std::cout << stream.finish();
///
/// What it gives is together what `decode` gives for all of them, but for tokens of bytes (`<0x0A>`) of which
/// a tokenizer.json makes no sound text: those before the first malformed one are not lost here.
class SHERD_API DecodeStream {
 public:
  explicit DecodeStream(const Tokenizer& tokenizer, const DecodeOptions& options = {});
  DecodeStream(const DecodeStream&) = delete;
  DecodeStream& operator=(const DecodeStream&) = delete;
  ~DecodeStream();

  /// The text that is complete with this token; may be empty.
  std::string step(std::int64_t id);
  /// The rest. Then it begins anew.
  std::string finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sherd::nn
