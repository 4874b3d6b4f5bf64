#include "nn/tokenizer/splitting_rule.h"

#include "nn/tokenizer/splitting_syntax.h"
#include "runtime/error.h"
#include "runtime/shown.h"

#ifdef SHERD_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <cstdint>
#endif

namespace sherd::nn::tokens {

#ifdef SHERD_PCRE2
namespace {

// Far above what a sound rule takes, which is some ten steps for each byte.
constexpr std::uint32_t most_matching_steps = 1'000'000, most_depth = 10'000, most_memory = 20'000;  // KiB
constexpr std::size_t longest_expression = 4096, longest_compiled = 1 << 20, jit_stack = 1 << 20;

template <auto release>
struct Releaser {
  template <class T>
  void operator()(T* object) const {
    release(object);
  }
};

std::string message_of_pcre2(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

struct MatchWorkspace::State {
  std::unique_ptr<pcre2_match_data, Releaser<pcre2_match_data_free>> data{
      pcre2_match_data_create(1, nullptr)};
  std::unique_ptr<pcre2_match_context, Releaser<pcre2_match_context_free>> context{
      pcre2_match_context_create(nullptr)};
  std::unique_ptr<pcre2_jit_stack, Releaser<pcre2_jit_stack_free>> stack{
      pcre2_jit_stack_create(std::size_t{32} << 10, jit_stack, nullptr)};
  State() {
    if (!data || !context) fail<OutOfMemoryError>("tokenizer: no memory to search with");
    pcre2_set_match_limit(context.get(), most_matching_steps);
    pcre2_set_depth_limit(context.get(), most_depth);
    pcre2_set_heap_limit(context.get(), most_memory);
    if (stack) pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }
};

struct SplittingRule::Compiled {
  std::string expression;
  std::unique_ptr<pcre2_code, Releaser<pcre2_code_free>> code;
  bool jit = false;
};

MatchWorkspace::MatchWorkspace() : state_(std::make_unique<State>()) {}

SplittingRule::SplittingRule(std::string_view expression) {
  const std::string name = shown(expression, 300);
  check<ValueError>(expression.size() <= longest_expression,
                    "tokenizer: the splitting rule '{}' has {} bytes; the limit is {}", name,
                    expression.size(), longest_expression);
  const std::string text = pcre2_expression(expression);
  const std::unique_ptr<pcre2_compile_context, Releaser<pcre2_compile_context_free>> context(
      pcre2_compile_context_create(nullptr));
  if (!context) fail<OutOfMemoryError>("tokenizer: no memory to compile the splitting rule '{}'", name);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.get(), 32);
  const auto compiled = std::make_shared<Compiled>();
  compiled->expression = name;
  int code = 0;
  PCRE2_SIZE at = 0;
  compiled->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                     PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE,
                                     &code, &at, context.get()));
  check<ValueError>(compiled->code != nullptr, "tokenizer: the splitting rule '{}' is not sound: {}", name,
                    message_of_pcre2(code));
  std::uint32_t matches_nothing = 0;
  std::size_t bytes = 0;
  pcre2_pattern_info(compiled->code.get(), PCRE2_INFO_MATCHEMPTY, &matches_nothing);
  pcre2_pattern_info(compiled->code.get(), PCRE2_INFO_SIZE, &bytes);
  check<ValueError>(matches_nothing == 0,
                    "tokenizer: the splitting rule '{}' matches an empty text; write + in place of *", name);
  check<ValueError>(bytes <= longest_compiled,
                    "tokenizer: the splitting rule '{}' takes {} bytes when compiled; the limit is {}", name,
                    bytes, longest_compiled);
  compiled->jit = pcre2_jit_compile(compiled->code.get(), PCRE2_JIT_COMPLETE) == 0;
  compiled_ = compiled;
}

std::optional<Range> SplittingRule::find(std::string_view text, std::size_t from,
                                         MatchWorkspace& workspace) const {
  const MatchWorkspace::State& state = *workspace.state_;
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const int found =
      compiled_->jit && state.stack
          ? pcre2_jit_match(compiled_->code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK,
                            state.data.get(), state.context.get())
          : pcre2_match(compiled_->code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                        state.data.get(), state.context.get());
  if (found == PCRE2_ERROR_NOMATCH) return {};
  check<ValueError>(
      found >= 0, "tokenizer: the splitting rule '{}' cannot be searched for from byte {} of the text on: {}",
      compiled_->expression, from, message_of_pcre2(found));
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(state.data.get());
  check<ValueError>(
      ends[0] >= from && ends[1] > ends[0],
      "tokenizer: the splitting rule '{}' matches an empty text; write it without \\K and look-behind",
      compiled_->expression);
  return Range{ends[0], ends[1]};
}
#else
struct MatchWorkspace::State {};
struct SplittingRule::Compiled {};

MatchWorkspace::MatchWorkspace() = default;

SplittingRule::SplittingRule(std::string_view expression) {
  pcre2_expression(expression);
  fail<NotImplementedError>(
      "tokenizer: the splitting rule '{}' needs libpcre2, which this build was made without; install "
      "libpcre2-dev "
      "and build again",
      shown(expression, 300));
}

std::optional<Range> SplittingRule::find(std::string_view, std::size_t, MatchWorkspace&) const { return {}; }
#endif

MatchWorkspace::~MatchWorkspace() = default;

}  // namespace sherd::nn::tokens
