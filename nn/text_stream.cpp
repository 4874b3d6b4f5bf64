#include "nn/text_stream.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "nn/tokenizer/utf8.h"
#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::nn {

StopTexts::StopTexts(std::vector<std::string> texts) : texts_(std::move(texts)) {
  for (const std::string& text : texts_) {
    check<ValueError>(!text.empty(), "stop texts: one is empty, and would end every text; leave it out");
    check<ValueError>(tokens::sound_prefix(text) == text.size(), "stop texts: '{}' is not UTF-8",
                      shown(text));
  }
}

std::string StopTexts::step(std::string_view piece) {
  if (stopped_) return {};
  held_ += piece;
  struct Match {
    std::size_t begin, end;
  };
  std::optional<Match> first;
  for (const std::string& text : texts_) {
    const std::size_t begin = held_.find(text), end = begin + text.size();
    if (begin == std::string::npos) continue;
    if (!first || end < first->end || (end == first->end && begin < first->begin)) first = {begin, end};
  }
  if (first) {
    stopped_ = true;
    return std::exchange(held_, {}).substr(0, first->begin);
  }
  // The longest end of it that a text begins with stays.
  std::size_t keep = 0;
  for (const std::string& text : texts_)
    for (std::size_t n = std::min(text.size() - 1, held_.size()); n > keep; --n)
      if (held_.ends_with(std::string_view(text).substr(0, n))) keep = n;
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, out.size());
  return out;
}

std::string StopTexts::finish() { return std::exchange(held_, {}); }

TextStream::TextStream(const Tokenizer& tokenizer, const TextStreamOptions& options)
    : decode_(tokenizer, options.decode), stops_(options.stop_texts) {
  for (const std::int64_t token : options.behind) decode_.step(token);
}

std::string TextStream::step(std::int64_t token) { return stops_.step(decode_.step(token)); }

std::string TextStream::finish() {
  std::string rest = stops_.step(decode_.finish());
  return rest + stops_.finish();
}

}  // namespace sherd::nn
