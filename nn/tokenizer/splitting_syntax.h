// Oniguruma's expressions in the words of PCRE2.
#pragma once

#include <string>
#include <string_view>

namespace sherd::nn::tokens {

/// The same expression for PCRE2 with its Unicode classes. ValueError names what the two read in other ways.
std::string pcre2_expression(std::string_view expression);

}  // namespace sherd::nn::tokens
