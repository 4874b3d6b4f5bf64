#include "tools/tokens.h"

#include <fmt/format.h>

#include <charconv>

#include "nn/training_text.h"
#include "runtime/error.h"

namespace sherd::tools {
namespace {

Tokens packed(nn::TrainingText text, const TrainOptions& options, std::uint64_t digest) {
  for (const auto& [part, name] :
       {std::pair(&text.train, "training"), std::pair(&text.validation, "validation")})
    check<ValueError>(part->learnt() > 0,
                      "--data: the {} part has no token that follows another; give more data", name);
  const nn::PackingOptions rows{.context = options.context};
  return {nn::Packing(std::move(text.train), rows), nn::Packing(std::move(text.validation), rows), text.files,
          digest};
}

std::string text_of(std::uint64_t digest) { return fmt::format("{:016x}", digest); }

}  // namespace

std::uint64_t tokens_digest(const TrainOptions& options, FileSystem& files) {
  const std::string text = nn::training_text_digest(options.data, options.model, files);
  std::uint64_t digest = 0;
  std::from_chars(text.data(), text.data() + text.size(), digest, 16);
  return digest;
}

Tokens make_tokens(const TrainOptions& options, FileSystem& files) {
  const nn::Tokenizer tokenizer = nn::Tokenizer::read(options.model, files);
  const std::uint64_t digest = tokens_digest(options, files);
  return packed(nn::read_training_text(options.data, tokenizer, files), options, digest);
}

void save_tokens(const Tokens& tokens, const FileSystem::Path& out, FileSystem& files) {
  nn::save_training_text({tokens.train.text(), tokens.validation.text(), tokens.files},
                         text_of(tokens.digest), out / tokens_name, files);
}

Tokens load_tokens(const TrainOptions& options, std::uint64_t digest, const FileSystem::Path& out,
                   FileSystem& files) {
  return packed(nn::load_training_text(out / tokens_name, text_of(digest), files), options, digest);
}

}  // namespace sherd::tools
