// A language model of Hugging Face's format with its tokenizer, as commands use it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "nn/gpt.h"
#include "nn/llama.h"
#include "nn/tokenizer.h"
#include "runtime/io/file_system.h"

namespace sherd::tools {

/// Which folder, and how it is run.
struct PretrainedChoice {
  std::string folder;
  std::string device = "cpu";  ///< cpu or cuda
  std::string dtype = "";      ///< f32, bf16 or f16; "" for that of config.json
};

struct PretrainedModel {
  std::variant<nn::Gpt, nn::Llama> model;  ///< in eval mode
  nn::Tokenizer tokenizer;
  std::vector<std::int64_t> end_tokens;  ///< that end a text

  /// Calls `body` with the model.
  decltype(auto) with(auto&& body) const { return std::visit(std::forward<decltype(body)>(body), model); }
};

/// ValueError and FileError name the flag, the folder or the file that is at fault.
PretrainedModel read_pretrained(const PretrainedChoice& choice, FileSystem& files);

}  // namespace sherd::tools
