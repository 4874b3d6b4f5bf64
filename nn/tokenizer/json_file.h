// A tokenizer.json as it stands: its large parts as tables, the others as JSON.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "nn/tokenizer/merges.h"
#include "nn/tokenizer/vocabulary.h"

namespace sherd::nn::tokens {

struct JsonFile {
  std::map<std::string, nlohmann::json, std::less<>> sections;  // all but those that are not for encoding
  std::map<std::string, nlohmann::json, std::less<>> model;     // all but these two:
  bool has_vocabulary = false, has_merges = false;
  Vocabulary vocabulary;
  Merges merges;
};

/// ValueError, which begins with `where`, for what is no sound JSON, exceeds a limit, or where the vocabulary
/// or the merges contradict themselves.
JsonFile parse_json_file(std::string_view text, const std::string& where);

}  // namespace sherd::nn::tokens
