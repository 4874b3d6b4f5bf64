#include "tools/write_text.h"

#include <algorithm>
#include <utility>

#include "nn/next_token.h"
#include "nn/text_stream.h"
#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::tools {
namespace {

using TokenList = std::vector<std::int64_t>;

nn::GenerateOptions drawing(const WriteOptions& o) {
  return {.max_new_tokens = o.tokens,
          .temperature = o.temperature,
          .top_k = o.top_k,
          .top_p = o.top_p,
          .seed = o.seed};
}

/// Whether it says how to draw.
bool draws(const WriteOptions& o) {
  const WriteOptions plain;
  return o.temperature != plain.temperature || o.top_k != plain.top_k || o.top_p != plain.top_p ||
         o.seed != plain.seed;
}

void validate(const WriteOptions& o) {
  nn::validate(drawing(o), nn::OptionNames::flags);
  check<ValueError>(o.tokens >= 1, "--tokens {}: asks for no text; take 1 or more", o.tokens);
  check<ValueError>(o.beams >= 1 && o.beams <= 1024, "--beams {}: takes values from 1 to 1024", o.beams);
  check<ValueError>(o.beams == 1 || !draws(o),
                    "--beams {}: beams draw nothing; leave out --temperature, --top-k, --top-p and --seed",
                    o.beams);
  for (const std::string& text : o.stop)
    check<ValueError>(!text.empty(), "--stop: one is empty; leave it out");
}

/// Several texts that come at the same time, shown one after the other: the first that has not ended as it
/// comes, the others when it is their turn. Nothing is shown before a first piece comes.
class InTurn {
 public:
  InTurn(std::vector<std::string> beginnings, const std::function<void(std::string_view)>& show)
      : held_(std::move(beginnings)), ended_(held_.size()), show_(show) {}

  void add(std::size_t text, std::string_view piece) {
    held_[text] += piece;
    if (text == now_) show_held();
  }
  void end(std::size_t text) {
    for (ended_[text] = true; now_ < held_.size() && ended_[now_]; ++now_) {
      show_held();
      show_("\n");
    }
    if (now_ < held_.size()) show_held();
  }

 private:
  void show_held() {
    if (!held_[now_].empty()) show_(std::exchange(held_[now_], {}));
  }
  std::vector<std::string> held_;
  std::vector<bool> ended_;
  const std::function<void(std::string_view)>& show_;
  std::size_t now_ = 0;
};

/// What ends a text: the model's own tokens, and special ones that a stop text spells, which have no text.
/// The spelling of another token is none of what it says ("Ġ" for a space).
TokenList stop_tokens_of(const PretrainedModel& from, const WriteOptions& o) {
  TokenList tokens = from.end_tokens;
  for (const std::string& text : o.stop)
    if (const auto token = from.tokenizer.token_to_id(text); token && from.tokenizer.is_special(*token))
      tokens.push_back(*token);
  return tokens;
}

/// The texts of prompts, each behind its own tokens.
std::vector<std::unique_ptr<nn::TextStream>> streams_of(const PretrainedModel& from, const WriteOptions& o,
                                                        const std::vector<TokenList>& prompts) {
  std::vector<std::unique_ptr<nn::TextStream>> streams;
  for (const TokenList& prompt : prompts)
    streams.push_back(std::make_unique<nn::TextStream>(
        from.tokenizer, nn::TextStreamOptions{.stop_texts = o.stop, .behind = prompt}));
  return streams;
}

void write_drawn(const PretrainedModel& from, const WriteOptions& o, const std::vector<TokenList>& prompts,
                 InTurn& texts) {
  const auto streams = streams_of(from, o, prompts);
  std::vector<std::int64_t> left(prompts.size(), o.tokens);
  nn::GenerateOptions options = drawing(o);
  options.stop_tokens = stop_tokens_of(from, o);
  const auto on_token = [&](std::size_t row, std::int64_t token) {
    const bool last = std::ranges::find(options.stop_tokens, token) != options.stop_tokens.end();
    if (!last) texts.add(row, streams[row]->step(token));
    if (!last && --left[row] > 0 && !streams[row]->stopped()) return nn::Sequel::goes_on;
    texts.add(row, streams[row]->finish());
    texts.end(row);
    return nn::Sequel::ends;
  };
  from.with([&](const auto& model) { nn::generate(model, prompts, options, on_token); });
}

/// Stop texts cut what the best beam has; they do not end the search.
void write_beams(const PretrainedModel& from, const WriteOptions& o, const std::vector<TokenList>& prompts,
                 InTurn& texts) {
  const nn::BeamOptions options{
      .beams = o.beams, .max_new_tokens = o.tokens, .stop_tokens = stop_tokens_of(from, o)};
  const auto streams = streams_of(from, o, prompts);
  for (std::size_t row = 0; row < prompts.size(); ++row) {
    const auto found = from.with(
        [&](const auto& model) { return nn::beam_search(model, std::span(&prompts[row], 1), options); });
    for (const std::int64_t token : found.at(0).at(0).tokens) {
      if (std::ranges::find(options.stop_tokens, token) != options.stop_tokens.end()) break;
      texts.add(row, streams[row]->step(token));
    }
    texts.add(row, streams[row]->finish());
    texts.end(row);
  }
}

}  // namespace

void write_texts(const WriteOptions& o, FileSystem& files,
                 const std::function<void(std::string_view)>& show) {
  validate(o);
  const nn::StopTexts checked(o.stop);
  const PretrainedModel from = read_pretrained(o.model, files);
  std::vector<TokenList> prompts;
  for (const std::string& prompt : o.prompts) {
    prompts.push_back(from.tokenizer.encode(prompt));
    check<ValueError>(
        !prompts.back().empty(),
        "--prompt '{}': has no tokens, and the model's texts begin with none; give it some text",
        shown(prompt));
  }
  InTurn texts(o.prompts, show);
  if (o.beams > 1)
    write_beams(from, o, prompts, texts);
  else
    write_drawn(from, o, prompts, texts);
}

}  // namespace sherd::tools
