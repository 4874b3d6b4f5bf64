// Models that are given targets give their loss: the same as by all logits, compiled and with adapters too.
#include <algorithm>

#include "autograd/autograd.h"
#include "nn/compile.h"
#include "nn/gpt.h"
#include "nn/llama.h"
#include "nn/lora.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

const Tensor tokens = Tensor::from<std::int64_t>({3, 1, 4, 1, 5, 9, 2, 6, 5, 3}, {2, 5});
const Tensor next = Tensor::from<std::int64_t>({1, 4, 1, 5, -100, 2, 6, 5, 3, -100}, {2, 5});

Gpt small_gpt() {
  manual_seed(3);
  return Gpt({.layers = 2, .heads = 2, .width = 8, .context = 8, .vocab = 11});
}

Llama small_llama(std::optional<double> cap) {
  manual_seed(3);
  LlamaOptions options{.vocab_size = 11,
                       .hidden_size = 8,
                       .intermediate_size = 12,
                       .num_hidden_layers = 2,
                       .num_attention_heads = 2,
                       .max_position_embeddings = 8};
  options.final_logit_softcapping = cap;
  return Llama(options);
}

Tensor by_logits(const Tensor& logits, CrossEntropyOptions options = {}) {
  return cross_entropy(reshape(logits, {-1, logits.size(-1)}), reshape(next, {-1}), options);
}

/// Compares the loss and each parameter's gradient with those by all logits.
template <class M>
void check_losses(M& model, const ClassTargets& targets) {
  const LinearCrossEntropyOptions& o = targets.options;
  model.zero_grad();
  const Tensor whole =
      by_logits(model(tokens), {.reduction = o.reduction, .label_smoothing = o.label_smoothing});
  whole.backward();
  std::vector<Tensor> wanted;
  for (const Parameter& p : model.parameters()) wanted.push_back(p.grad());
  model.zero_grad();
  const Tensor loss = model(tokens, targets);
  CHECK(distance(loss.detach(), whole.detach()) < 1e-5);
  loss.backward();
  std::size_t i = 0;
  for (const auto& [name, p] : model.named_parameters()) {
    INFO(name);
    CHECK(p.grad().defined() == wanted[i].defined());
    if (p.grad().defined() && wanted[i].defined()) CHECK(distance(p.grad(), wanted[i]) < 1e-5);
    ++i;
  }
}

}  // namespace

TEST_CASE("class targets: a Gpt and a Llama give the loss of their logits, and its gradients") {
  for (const Reduction reduction : {Reduction::mean, Reduction::sum})
    for (const double smoothing : {0.0, 0.1}) {
      const ClassTargets targets{next, {.reduction = reduction, .label_smoothing = smoothing, .chunk = 3}};
      Gpt gpt = small_gpt();
      check_losses(gpt, targets);
      for (const std::optional<double> cap : {std::optional<double>(), std::optional<double>(2)}) {
        Llama llama = small_llama(cap);
        check_losses(llama, targets);
      }
    }
  Gpt gpt = small_gpt();
  const Tensor rows = gpt(tokens, ClassTargets{next, {.reduction = Reduction::none}}).detach();
  CHECK(rows.shape() == next.shape());
  CHECK(distance(reshape(rows, {-1}), by_logits(gpt(tokens), {.reduction = Reduction::none})) < 1e-5);
}

TEST_CASE("class targets: a head with an adapter, or in 8 bits, gives the loss of its own logits") {
  Gpt gpt = small_gpt();
  add_lora(gpt, {.rank = 2, .targets = {"head"}});
  fill_(gpt.head.lora->lora_B.weight.data(), 0.5);
  CHECK(distance(gpt(tokens, ClassTargets{next}).detach(), by_logits(gpt(tokens)).detach()) < 1e-5);
  manual_seed(1);
  Linear eight(16, 16, {.products = Products::fp8});
  const Tensor x = numbers({3, 16}, f32), t = Tensor::from<std::int64_t>({1, 15, 0}, {3});
  CHECK(distance(eight(x, ClassTargets{t}).detach(), cross_entropy(eight(x), t).detach()) < 1e-6);
}

TEST_CASE("class targets: a compiled model gives eager's bits, and observers see the targets") {
  Gpt plain = small_gpt(), compiled = plain.clone();
  nn::compile(compiled);
  for (int call = 0; call < 3; ++call)
    for (const std::int64_t chunk : {0, 2}) {
      const ClassTargets targets{next, {.chunk = chunk}};
      const auto run = [&](Gpt& model) {
        model.zero_grad();
        const Tensor loss = model(tokens, targets);
        loss.backward();
        std::vector<Tensor> all{loss.detach()};
        for (const Parameter& p : model.parameters()) all.push_back(p.grad());
        return all;
      };
      const std::vector<Tensor> found = run(compiled), wanted = run(plain);
      for (std::size_t i = 0; i < wanted.size(); ++i) CHECK(same_bits(found[i], wanted[i]));
    }
  struct Observer final : ModuleObserver {
    std::size_t inputs = 0;
    void before_forward(Module&, std::span<Tensor* const> in) override { inputs = in.size(); }
  } observer;
  const Subscription scope = plain.observe(observer);
  plain(tokens, ClassTargets{next});
  CHECK(observer.inputs == 2);
}

TEST_CASE("class targets: none, and those of another shape, are refused in one line") {
  Linear layer(4, 3);
  const Tensor x = numbers({2, 4}, f32);
  CHECK(one_line_about(message_of<ValueError>([&] { layer(x, ClassTargets{}); }), "Linear"));
  CHECK(one_line_about(message_of<ShapeError>([&] { layer(x, ClassTargets{zeros({3}, {i64})}); }),
                       "linear_cross_entropy"));
}
