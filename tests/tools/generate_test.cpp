#include "tools/generate.h"

#include <cmath>

#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;
using tools::GenerateOptions;

namespace {

nn::Gpt small_model(std::int64_t context) {
  manual_seed(3);
  nn::Gpt model({.layers = 2, .heads = 2, .width = 16, .context = context, .vocab = 256});
  // Far from uniform, so that a wrong logit shows in the bytes.
  const NoGrad guard;
  for (const nn::Parameter& p : model.parameters())
    if (p.shape().rank() == 2) mul_(p.data(), 30.0);
  model.eval();
  return model;
}

/// Greedy text without a cache, the window read anew at every byte.
std::string plain_greedy(const nn::Gpt& model, std::string text, int tokens) {
  const NoGrad guard;
  const std::size_t prompt = text.size();
  for (int i = 0; i < tokens; ++i) {
    const std::vector<std::int64_t> window = [&] {
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(text.data());
      return std::vector<std::int64_t>(bytes, bytes + text.size());
    }();
    const Tensor logits = model(Tensor::from(window, {1, static_cast<std::int64_t>(window.size())}));
    text.push_back(static_cast<char>(argmax(select(logits, 1, -1), -1).item<std::int64_t>()));
  }
  return text.substr(prompt);
}

}  // namespace

TEST_CASE("with the cache the same text comes out as without") {
  const nn::Gpt model = small_model(32);
  for (const std::string prompt : {"a", "some prompt"}) {
    CHECK(tools::generate(model, prompt, {.tokens = 20, .temperature = 0}) ==
          plain_greedy(model, prompt, 20));
  }
}

TEST_CASE("text goes on past the context, and prompts may be longer than it") {
  for (const std::int64_t context : {1, 2, 5, 16}) {
    const nn::Gpt model = small_model(context);
    CHECK(tools::generate(model, "x", {.tokens = 40}).size() == 40);
    CHECK(tools::generate(model, std::string(100, 'y'), {.tokens = 3}).size() == 3);
    CHECK(tools::generate(model, "", {.tokens = 3}).size() == 3);
    CHECK(tools::generate(model, "x", {.tokens = 0}).empty());
  }
}

TEST_CASE("a seed decides the text, and the caller's generator stays") {
  const nn::Gpt model = small_model(16);
  const RandomKey before = Context::current().generator().state();
  const std::string text = tools::generate(model, "x", {.tokens = 30, .temperature = 3, .seed = 1});
  CHECK(text == tools::generate(model, "x", {.tokens = 30, .temperature = 3, .seed = 1}));
  CHECK(text != tools::generate(model, "x", {.tokens = 30, .temperature = 3, .seed = 2}));
  CHECK(Context::current().generator().state() == before);
}

TEST_CASE("drawing from the one likeliest byte, or nearly without temperature, is greedy") {
  const nn::Gpt model = small_model(16);
  const std::string greedy = tools::generate(model, "x", {.tokens = 30, .temperature = 0});
  CHECK(tools::generate(model, "x", {.tokens = 30, .temperature = 5, .top_k = 1}) == greedy);
  CHECK(tools::generate(model, "x", {.tokens = 30, .temperature = 1e-6}) == greedy);
  CHECK(tools::generate(model, "x", {.tokens = 30, .temperature = 3, .top_k = 1000, .seed = 4}) ==
        tools::generate(model, "x", {.tokens = 30, .temperature = 3, .top_k = 0, .seed = 4}));
}

TEST_CASE("however small the temperature and large the logits, text is drawn, in the limit the greedy one") {
  const nn::Gpt model = small_model(16);
  for (const double scale : {1.0, 1e15}) {
    const NoGrad guard;
    mul_(model.parameters()[0].data(), scale);  // of the bytes, tied to the logits
    const std::string greedy = tools::generate(model, "x", {.tokens = 10, .temperature = 0});
    for (const double temperature : {4.9e-324, 1e-310, 1e-300, 1e-100, 1e-46, 1e-45, 1e-40, 1.1e-38, 1.2e-38,
                                     1e-37, 1e-30, 1e-20, 1e-10, 1e-7}) {
      INFO(scale << " " << temperature);
      for (const std::int64_t top_k : {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, std::int64_t{256},
                                       std::int64_t{257}, std::int64_t{1} << 30})
        CHECK(tools::generate(model, "x", {.tokens = 10, .temperature = temperature, .top_k = top_k}) ==
              greedy);
    }
    CHECK(tools::generate(model, "x", {.tokens = 10, .temperature = 1e6, .top_k = 1 << 30}).size() == 10);
    mul_(model.parameters()[0].data(), 1 / scale);
  }
}

TEST_CASE("a model that gives no numbers is refused in one line") {
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    const nn::Gpt model = small_model(16);
    const NoGrad guard;
    for (const nn::Parameter& p : model.parameters()) fill_(p.data(), bad);
    for (const double temperature : {0.0, 1e-300, 1e-30, 1.0, 1e6}) {
      const std::string message = test::message_of<StateError>(
          [&] { tools::generate(model, "x", {.tokens = 3, .temperature = temperature}); });
      CHECK(message.starts_with("generate: the model's largest logit is "));
      CHECK(message.find('\n') == std::string::npos);
    }
  }
}

TEST_CASE("generating refuses options out of range") {
  CHECK_THROWS_AS(tools::validate({.tokens = -1}), ValueError);
  CHECK_THROWS_AS(tools::validate({.temperature = -0.1}), ValueError);
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL, 1.1e6, -1e-300})
    CHECK_THROWS_AS(tools::validate({.temperature = bad}), ValueError);
  CHECK_THROWS_AS(tools::validate({.top_k = -1}), ValueError);
}

TEST_CASE("text for a terminal has neither control characters nor broken UTF-8") {
  CHECK(tools::printable("a\tb\nc\x1b[0m\x7f") == "a\tb\nc?[0m?");
  CHECK(tools::printable("gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x99\x82") ==
        "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x99\x82");
  for (const std::string broken :
       {"\xc3", "\xe2\x82", "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xff", "\x80"}) {
    CHECK(tools::printable(broken) == std::string(broken.size(), '?'));
  }
}
