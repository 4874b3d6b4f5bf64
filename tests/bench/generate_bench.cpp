// Tokens a second of greedy generation with a random Llama, alone and in batches; beside it
// tests/bench/torch_generate.py, in turn.
//
//   generate_bench [--threads 2] [--layers 8] [--width 512] [--prompt 32] [--tokens 64]
#include <sherd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

using namespace sherd;

namespace {

struct Sizes {
  int threads = 2;
  std::int64_t layers = 8, width = 512, prompt = 32, tokens = 64;
};

nn::Llama model_of(const Sizes& s) {
  manual_seed(0);
  nn::Llama model({.vocab_size = 8000,
                   .hidden_size = s.width,
                   .intermediate_size = s.width * 43 / 16,
                   .num_hidden_layers = s.layers,
                   .num_attention_heads = s.width / 64,
                   .num_key_value_heads = s.width / 128,
                   .max_position_embeddings = 4096});
  model.eval();
  return model;
}

/// The best of three.
double tokens_per_second(const nn::Llama& model, const Sizes& s, std::int64_t batch, bool unlike) {
  std::vector<std::vector<std::int64_t>> prompts(static_cast<std::size_t>(batch));
  for (std::int64_t row = 0; row < batch; ++row)
    for (std::int64_t i = 0; i < s.prompt - (unlike ? row : 0); ++i)
      prompts[static_cast<std::size_t>(row)].push_back((row * 131 + i * 17 + 5) % 8000);
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    const auto start = std::chrono::steady_clock::now();
    nn::generate(model, prompts, {.max_new_tokens = s.tokens, .temperature = 0});
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(batch * s.tokens) / took.count());
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  Sizes s;
  CLI::App app("Tokens a second of greedy generation.");
  app.add_option("--threads", s.threads);
  app.add_option("--layers", s.layers);
  app.add_option("--width", s.width, "a multiple of 128");
  app.add_option("--prompt", s.prompt);
  app.add_option("--tokens", s.tokens);
  CLI11_PARSE(app, argc, argv);
  Context::current().set_threads(s.threads);
  const nn::Llama model = model_of(s);
  for (const std::int64_t batch : {1, 8})
    std::printf("sherd batch %d: %.1f tokens/s\n", static_cast<int>(batch),
                tokens_per_second(model, s, batch, false));
  std::printf("sherd batch 8 of unlike prompts: %.1f tokens/s\n", tokens_per_second(model, s, 8, true));
}
