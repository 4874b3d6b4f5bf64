// A small Llama that learns a sentence by heart, byte by byte, and then writes it with a cache of keys and
// values.
#include <sherd.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

using namespace sherd;

constexpr std::string_view text =
    "Of all the sherds that lay about, one had a line of writing; of all the lines, one could be read. ";
constexpr std::int64_t context = 24;

/// What the model thinks follows `prompt`: always the likeliest byte.
std::string continued(const nn::Llama& model, std::string_view prompt, std::size_t count) {
  const NoGrad guard;
  nn::KeyValueCache cache;
  std::string written;
  Tensor newest = Tensor::from(prompt, {1, static_cast<std::int64_t>(prompt.size())});
  while (written.size() < count) {
    const Tensor logits = model(newest, cache);  // of the new positions; the cache has those before
    newest = argmax(logits[{Slice{}, Slice{-1}}], -1);
    written += static_cast<char>(newest.item<int>());
  }
  return written;
}

int main() {
  manual_seed(0);
  nn::Llama model({.vocab_size = 128,
                   .hidden_size = 32,
                   .intermediate_size = 64,
                   .num_hidden_layers = 2,
                   .num_attention_heads = 4,
                   .num_key_value_heads = 2,
                   .max_position_embeddings = 128});
  nn::AdamW optimizer(model.parameters(), {.lr = 1e-2, .weight_decay = 0.1});
  const nn::CosineSchedule schedule{.lr = 1e-2, .min_lr = 1e-3, .warmup = 10, .steps = 120};

  const std::vector<std::uint8_t> bytes(text.begin(), text.end());
  nn::BatchSampler sampler(static_cast<std::int64_t>(bytes.size()) - context, {.batch = 16});
  for (int step = 0; step < 120; ++step) {
    optimizer.set_lr(schedule(step));
    const auto [tokens, targets] = nn::text_batch(bytes, sampler.next(), context);
    const Tensor loss = cross_entropy(flatten(model(tokens), 0, 1), flatten(targets));
    optimizer.zero_grad();
    loss.backward();
    const Tensor norm = nn::clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    if (step % 20 == 0) std::printf("loss.%d %.9g\nnorm.%d %.9g\n", step, loss.item(), step, norm.item());
  }

  const std::string_view prompt = text.substr(0, 12), rest = text.substr(12, context);
  const std::string written = continued(model, prompt, rest.size());
  std::printf("written \"%s\"\n", written.c_str());
  return written == rest ? 0 : 1;
}
