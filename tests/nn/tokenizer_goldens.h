// The small tokenizers that tests/golden/make_tokenizers.py makes, and copies of them that tests change.
#pragma once

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "nn/tokenizer.h"
#include "tests/source_root.h"
#include "tests/temp_directory.h"

namespace sherd::test {

using Ids = std::vector<std::int64_t>;

#ifdef SHERD_PCRE2
inline constexpr bool has_pcre2 = true;
#else
inline constexpr bool has_pcre2 = false;
#endif
#ifdef SHERD_UTF8PROC
inline constexpr bool has_utf8proc = true;
#else
inline constexpr bool has_utf8proc = false;
#endif

FileSystem::Path tokenizer_file(std::string_view name);
std::string text_of_file(const FileSystem::Path& file);
/// All of them.
std::vector<std::string> tokenizer_names();
/// Whether this build has what the tokenizer needs.
bool is_supported(std::string_view name);
nn::Tokenizer golden_tokenizer(std::string_view name);
/// What PyPI's libraries answer: by name, and `texts`.
const nlohmann::json& golden_answers();

/// A tokenizer from a text that is written to a file of its own.
nn::Tokenizer tokenizer_of(std::string_view content, std::string_view name = "tokenizer.json");
/// The message of the ValueError or NotImplementedError that reading it gives.
std::string refusal(std::string_view content, std::string_view name = "tokenizer.json");

/// A golden tokenizer.json that may be changed.
nlohmann::json golden_json(std::string_view name);

/// Characters of all planes, and ASCII half of the time.
std::string random_text(std::mt19937_64& draw, int characters);
std::string utf8_of(char32_t code);

}  // namespace sherd::test
