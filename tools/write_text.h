// `sherd generate`: text from a model of Hugging Face's format.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/pretrained_model.h"

namespace sherd::tools {

struct WriteOptions {
  PretrainedChoice model;
  std::vector<std::string> prompts;
  std::int64_t tokens = 200;  ///< at most, behind each prompt
  double temperature = 1;     ///< divides the logits; 0 takes the likeliest token
  std::int64_t top_k = 0;     ///< draws from the k likeliest tokens; 0 from all
  double top_p = 1;           ///< of these from the fewest that are together so likely
  std::uint64_t seed = 0;
  std::vector<std::string> stop;  ///< a text ends before the first of these
  std::int64_t beams = 1;         ///< above 1: the likeliest sequences that are found, without any draws
};

/// Continues each prompt: `show` gets the first one and what follows it as it comes, whole characters, a
/// line's end, and then the next. ValueError for options out of range; errors of reading the folder.
void write_texts(const WriteOptions& options, FileSystem& files,
                 const std::function<void(std::string_view)>& show);

}  // namespace sherd::tools
