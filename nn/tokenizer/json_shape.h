// What a JSON text may hold before a parser sees it.
#pragma once

#include <string_view>

namespace sherd::nn::tokens {

/// ValueError, which begins with `where`, for a text that is nested deeper than any tokenizer, or has a
/// string or number longer than any token: a parser would take memory for it.
void check_json_shape(std::string_view text, std::string_view where);

}  // namespace sherd::nn::tokens
