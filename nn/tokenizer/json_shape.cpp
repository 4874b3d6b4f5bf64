#include "nn/tokenizer/json_shape.h"

#include "runtime/error.h"

namespace sherd::nn::tokens {
namespace {

constexpr std::size_t longest_string = 8192, longest_number = 64, longest_gap = 8192;
constexpr int most_levels = 16;

/// Bytes up to the quote that ends the string, or to the limit.
std::size_t string_length(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size() && at <= longest_string && text[at] != '"') at += text[at] == '\\' ? 2 : 1;
  return at;
}

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }
bool is_mark(char c) { return std::string_view(",:\"[]{}").find(c) != std::string_view::npos; }

}  // namespace

void check_json_shape(std::string_view text, std::string_view where) {
  int level = 0;
  std::size_t plain = 0, gap = 0;  // bytes of a number or a word, and of white space
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (is_space(c)) {
      plain = 0;
      check<ValueError>(++gap <= longest_gap, "{}: white space of more than {} bytes, the limit, at byte {}",
                        where, longest_gap, at - longest_gap);
      continue;
    }
    gap = 0;
    if (!is_mark(c)) {
      check<ValueError>(++plain <= longest_number,
                        "{}: is not valid JSON: a number of more than {} bytes at byte {}", where,
                        longest_number, at - longest_number);
      continue;
    }
    plain = 0;
    if (c == '"') {
      const std::size_t length = string_length(text.substr(at + 1));
      check<ValueError>(length <= longest_string, "{}: a string of more than {} bytes, the limit, at byte {}",
                        where, longest_string, at);
      at += length + 1;
    } else if (c == '[' || c == '{') {
      check<ValueError>(++level <= most_levels, "{}: nested deeper than {} levels", where, most_levels);
    } else if (c == ']' || c == '}') {
      --level;
    }
  }
}

}  // namespace sherd::nn::tokens
