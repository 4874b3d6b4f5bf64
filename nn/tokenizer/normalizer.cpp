#include "nn/tokenizer/normalizer.h"

#include <algorithm>
#include <utility>

#include "nn/tokenizer/utf8.h"
#include "runtime/error.h"

namespace sherd::nn::tokens {
namespace {

void append_spaced(std::string& out, std::string_view text, const Spaces& spaces) {
  std::size_t begin = 0, end = text.size();
  if (spaces.remove_extra) {
    while (begin < end && text[begin] == ' ') ++begin;
    while (end > begin && text[end - 1] == ' ') --end;
  }
  if (begin == end) return;
  if (spaces.add_dummy && !spaces.suffix) out.append(spaces.symbol);
  for (std::size_t at = begin; at < end;) {
    const std::size_t space = std::min(text.find(' ', at), end);
    out.append(text.substr(at, space - at));
    at = space;
    if (at == end) break;
    out.append(spaces.symbol);
    ++at;
    while (spaces.remove_extra && at < end && text[at] == ' ') ++at;
  }
  if (spaces.add_dummy && spaces.suffix) out.append(spaces.symbol);
}

struct Run {
  std::string_view text;
  std::string& out;
  void operator()(const Nfc&) const { append_nfc(out, text); }
  void operator()(const Prepend& step) const { out.append(step.text).append(text); }
  void operator()(const Replace& step) const { append_replaced(out, text, step.from, step.to); }
  void operator()(const Spaces& step) const { append_spaced(out, text, step); }
};

}  // namespace

void Normalizer::add(NormalizerStep step) {
  if (std::string nothing; std::holds_alternative<Nfc>(step)) append_nfc(nothing, "");
  steps_.push_back(std::move(step));
}

std::string_view Normalizer::run(std::string_view text, std::string& memory) const {
  if (text.empty()) return text;
  // A space becomes 3 bytes, a character that is composed no more than 3 times as many.
  const std::size_t bytes = text.size(), most = 16 * bytes + (std::size_t{1} << 16);
  std::string other;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    other.clear();
    std::visit(Run{text, other}, steps_[i]);
    check<ValueError>(other.size() <= most,
                      "tokenizer: the normalizer makes more than {} bytes of a text of {}", most, bytes);
    std::swap(memory, other);
    text = memory;
    if (text.empty()) break;
  }
  return text;
}

}  // namespace sherd::nn::tokens
