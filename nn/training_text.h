// What a model is tuned on: files of text, or of lines of JSON, as tokens for training and for validation.
//
//   const auto tokenizer = nn::Tokenizer::read("TinyLlama-1.1B");
//   const nn::TrainingText text = nn::read_training_text({"notes.txt", "answers.jsonl"}, tokenizer);
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "nn/packing.h"
#include "nn/tokenizer.h"

namespace sherd::nn {

struct TrainingText {
  TokenizedText train, validation;
  std::int64_t files = 0;
};

/// Reads and tokenises files in their order, and of folders, in the order of their paths, every file below
/// that is text: not empty, not hidden, without zero bytes; links inside a folder are not followed.
///
/// A file whose name ends in .jsonl has an object on each line, with a string `text`, or with the strings
/// `prompt` and `completion`, of which the second is learnt; what else it has says nothing here, and blank
/// lines are passed over. Each is a document; the last tenth of the file's are for validation, and if that
/// leaves none, the last of all. Any other file is two documents: its first nine tenths, and the last one for
/// validation.
///
/// Around a document stands what the tokenizer puts there, and `eos_token_id` at its end. Of `prompt` and
/// `completion`, encoded as one text, the tokens are given as far as they are those of the prompt alone.
///
/// ValueError names the file, and of lines of JSON the line, with what is wrong: what is no JSON, lacks the
/// keys or has empty texts, a line of more than 2^24 bytes or nested deeper than 64 levels, a text of more
/// than 2^30 bytes, a file or folder without text. ValueError too where nothing is left to train on.
/// FileError.
SHERD_API TrainingText read_training_text(std::span<const std::string> paths, const Tokenizer& tokenizer,
                                          FileSystem& files = posix_file_system());
inline TrainingText read_training_text(std::initializer_list<std::string> paths, const Tokenizer& tokenizer,
                                       FileSystem& files = posix_file_system()) {
  return read_training_text(std::span(paths.begin(), paths.size()), tokenizer, files);
}

/// What such a read comes from: a checksum of the bytes of the same files in their order, and of those files
/// of the folder `tokenizer` that say how text is encoded. FileError and ValueError as of reading them.
SHERD_API std::string training_text_digest(std::span<const std::string> paths,
                                           const FileSystem::Path& tokenizer,
                                           FileSystem& files = posix_file_system());

/// Writes tokens into one file, durably, with checksums and the digest of what they are of.
SHERD_API void save_training_text(const TrainingText& text, const std::string& digest,
                                  const FileSystem::Path& file, FileSystem& files = posix_file_system());
/// Reads it back. ValueError for a file that is damaged or of another digest; FileError.
SHERD_API TrainingText load_training_text(const FileSystem::Path& file, const std::string& digest,
                                          FileSystem& files = posix_file_system());

}  // namespace sherd::nn
