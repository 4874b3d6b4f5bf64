// The small parts of a tokenizer.json.
#pragma once

#include <vector>

#include "nn/tokenizer/pipeline.h"
#include "nn/tokenizer/setting.h"

namespace sherd::nn::tokens {

Normalizer normalizer_of(const Setting& setting);

/// What the pre-tokenizer is, and which alphabet words come in.
struct WordRules {
  PreTokenizer pre_tokenizer;
  Alphabet alphabet = Alphabet::characters;
};
WordRules word_rules_of(const Setting& setting);

DecoderRules decoder_rules_of(const Setting& setting);

/// Special tokens around a text.
struct Surroundings {
  std::vector<Id> prefix, suffix;
};
Surroundings surroundings_of(const Setting& setting, const Vocabulary& vocabulary);

}  // namespace sherd::nn::tokens
