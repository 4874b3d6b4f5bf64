// A variational autoencoder (Kingma and Welling, 2014) of small images: sampling that gradients pass, and new
// images from the prior.
#include <sherd.h>

#include <cstdio>

using namespace sherd;

constexpr std::int64_t pixels = 64, latents = 2;

struct Vae final : nn::Layer<Vae> {
  nn::Linear encoder{pixels, 32}, mean{32, latents}, log_variance{32, latents};
  nn::Sequential decoder{nn::Linear(latents, 32), nn::Relu(), nn::Linear(32, pixels)};

  struct Output {
    Tensor logits, mean, log_variance;
  };
  Output forward(const Tensor& x) const {
    const Tensor hidden = relu(encoder(x)), m = mean(hidden), v = log_variance(hidden);
    const Tensor z = m + exp(v * 0.5) * randn(m.shape());  // the noise depends on no parameter
    return {decoder(z), m, v};
  }
  void visit(auto&& on) {
    on("encoder", encoder);
    on("mean", mean);
    on("log_variance", log_variance);
    on("decoder", decoder);
  }
};

/// Pictures (N, 64) of 8 x 8 pixels with one bright row or column.
Tensor bars(std::int64_t count) {
  const Tensor place = reshape(randint(0, 8, {count}), {count, 1, 1});
  const Tensor upright = bernoulli(full({count, 1, 1}, 0.5)) > 0.5;
  const Tensor column = arange(0, 8), row = unsqueeze(column, 1);
  const Tensor bright = (upright & (column == place)) | (~upright & (row == place));
  return flatten(to(bright, f32), 1);
}

int main() {
  manual_seed(0);
  Vae vae;
  nn::Adam optimizer(vae.parameters(), {.lr = 1e-2});
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const Tensor x = bars(64);
    const auto [logits, m, v] = vae(x);
    const Tensor reconstruction = bce_with_logits(logits, x, {.reduction = Reduction::sum}) / 64;
    const Tensor divergence = sum(exp(v) + square(m) - 1 - v) * (0.5 / 64);  // from the standard normal
    const Tensor loss = reconstruction + divergence;
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item();
    if (step == 0) first = last;
    if (step % 40 == 0) std::printf("loss.%d %.9g\n", step, last);
  }

  const NoGrad guard;
  const Tensor samples = sigmoid(vae.decoder(randn({1000, latents})));
  std::printf("samples.mean %.9g\n", mean(samples).item());
  return last < 0.6 * first ? 0 : 1;
}
