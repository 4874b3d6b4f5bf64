#include "nn/tokenizer/splitting_syntax.h"

#include <algorithm>

#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::nn::tokens {
namespace {

// White_Space, to which PCRE2's own \s adds U+180E.
constexpr std::string_view white_space =
    R"(\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

class Translation {
 public:
  explicit Translation(std::string_view from) : from_(from) {}

  std::string run() {
    while (at_ < from_.size()) {
      const char c = from_[at_];
      if (c == '\\') {
        escape();
      } else if (in_class_) {
        inside_class(c);
      } else {
        outside(c);
      }
    }
    return std::move(to_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    fail<ValueError>(
        "tokenizer: the splitting rule '{}': {} at byte {} is not supported; use classes as \\p{{L}} and "
        "\\s, "
        "groups, look-aheads and plain repetitions",
        shown(from_, 300), what, at_);
  }
  bool next_is(char c) const { return at_ + 1 < from_.size() && from_[at_ + 1] == c; }
  void copy(std::size_t bytes) {
    to_.append(from_.substr(at_, bytes));
    at_ += bytes;
  }

  void escape() {
    if (at_ + 1 == from_.size()) refuse("a lone \\");
    const char c = from_[at_ + 1];
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (c == 's' || (c == 'S' && !in_class_)) {
      if (in_class_)
        to_.append(white_space);
      else
        to_.append(c == 's' ? "[" : "[^").append(white_space).append("]");
      at_ += 2;
      return;
    }
    if (static_cast<unsigned char>(c) >= 0x80 ||
        (letter && std::string_view("pPdDrntfv").find(c) == std::string_view::npos))
      refuse("\\" + std::string(1, letter ? c : '?'));
    if (in_class_ && (c == 'D')) refuse("\\D within a class");
    if ((c == 'p' || c == 'P') && !(at_ + 2 < from_.size() && from_[at_ + 2] == '{'))
      refuse("\\p without braces");
    if (c == 'v') {
      to_.append("\\x{B}");
      at_ += 2;
      return;
    }
    if (c == 'p' || c == 'P') return property();
    copy(2);
  }

  /// A category, or a script, of which PCRE2 would take the extended form.
  void property() {
    const std::size_t close = from_.find('}', at_);
    if (close == std::string_view::npos) refuse("\\p without its end");
    const std::string_view name = from_.substr(at_ + 3, close - at_ - 3);
    const auto is_letter = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    };
    if (name.empty() || !std::ranges::all_of(name, is_letter)) refuse("the name in \\p");
    to_.append(from_.substr(at_, 3));
    if (name.size() > 2 && name != "Any" && name != "Alphabetic") to_.append("sc:");
    to_.append(name).append("}");
    at_ = close + 1;
  }

  void inside_class(char c) {
    if (c == '[') refuse("a class within a class");
    if (c == '&' && next_is('&')) refuse("an intersection of classes");
    if (c == ']' && at_ > class_begin_) in_class_ = false;
    copy(1);
  }

  void outside(char c) {
    if (c == '[') {
      in_class_ = true;
      copy(next_is('^') ? 2 : 1);
      class_begin_ = at_;
      if (at_ < from_.size() && from_[at_] == ']') refuse("a ] that begins a class");
      return;
    }
    if (c == '^' || c == '$') refuse(c == '^' ? "^" : "$");
    if (c == '(' && next_is('*')) refuse("(*");
    if (c == '(' && next_is('?') && at_ + 2 < from_.size() &&
        std::string_view("P#&R|'0123456789+-(C").find(from_[at_ + 2]) != std::string_view::npos)
      refuse("this group");
    if (c == '}' && (next_is('+') || next_is('?'))) refuse("what follows }");
    copy(1);
  }

  std::string_view from_;
  std::string to_;
  std::size_t at_ = 0, class_begin_ = 0;
  bool in_class_ = false;
};

}  // namespace

std::string pcre2_expression(std::string_view expression) { return Translation(expression).run(); }

}  // namespace sherd::nn::tokens
