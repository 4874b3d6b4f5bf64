// A generative adversarial network (Goodfellow et al., 2014) that learns points on a circle: two networks, an
// optimizer each, and what one learns from the other's loss without changing it.
#include <sherd.h>

#include <cmath>
#include <cstdio>
#include <numbers>

using namespace sherd;

/// Points (N, 2) on the unit circle, nearly.
Tensor circle(std::int64_t count) {
  const Tensor angle = rand({count}, {}, 0, 2 * std::numbers::pi), noise = randn({count, 2});
  return stack({cos(angle), sin(angle)}, 1) + noise * 0.05;
}

int main() {
  manual_seed(0);
  nn::Sequential generator{nn::Linear(4, 32), nn::Relu(), nn::Linear(32, 2)};
  nn::Sequential discriminator{nn::Linear(2, 32), nn::LeakyRelu(0.2), nn::Linear(32, 32), nn::LeakyRelu(0.2),
                               nn::Linear(32, 1)};
  nn::Adam generator_optimizer(generator.parameters(), {.lr = 5e-3, .beta1 = 0.5});
  nn::Adam discriminator_optimizer(discriminator.parameters(), {.lr = 5e-3, .beta1 = 0.5});
  const Tensor yes = ones({64, 1}), no = zeros({64, 1});

  for (int step = 0; step < 200; ++step) {
    const Tensor real = circle(64), made = generator(randn({64, 4}));

    // The discriminator learns from what was made, the generator does not.
    const Tensor discriminator_loss =
        bce_with_logits(discriminator(real), yes) + bce_with_logits(discriminator(made.detach()), no);
    discriminator_optimizer.zero_grad();
    discriminator_loss.backward();
    discriminator_optimizer.step();

    // The generator's loss leaves gradients in the discriminator too, which `zero_grad` above drops.
    const Tensor generator_loss = bce_with_logits(discriminator(made), yes);
    generator_optimizer.zero_grad();
    generator_loss.backward();
    generator_optimizer.step();

    if (step % 40 == 0) {
      std::printf("discriminator.%d %.9g\n", step, discriminator_loss.item());
      std::printf("generator.%d %.9g\n", step, generator_loss.item());
    }
  }

  const NoGrad guard;
  const Tensor radius = norm(generator(randn({1000, 4})), 2, {1});
  std::printf("radius.mean %.9g\nradius.deviation %.9g\n", mean(radius).item(), stddev(radius).item());
  return std::abs(mean(radius).item() - 1) < 0.25 ? 0 : 1;
}
