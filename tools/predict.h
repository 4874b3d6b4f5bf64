// `sherd evaluate`: how well a model of Hugging Face's format predicts a text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/pretrained_model.h"

namespace sherd::tools {

struct PredictOptions {
  PretrainedChoice model;
  std::vector<std::string> data;  ///< text files
  std::int64_t context = 0;       ///< tokens of a window; 0 for the model's, up to 2048
  std::int64_t stride = 0;        ///< tokens from one window's beginning to the next; 0 for half of it
};

/// One line: tokens that were scored, loss in nats a token and perplexity, of all files, each of which is a text of
/// its own. ValueError and FileError name the flag, the folder or the file that is at fault.
std::string predict(const PredictOptions& options, FileSystem& files);

}  // namespace sherd::tools
