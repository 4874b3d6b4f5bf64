// A recurrent critic with a gradient penalty (Gulrajani et al., 2017): the loss holds a gradient, so training
// takes the second derivative through a GRU.
#include <sherd.h>

#include <cmath>
#include <cstdio>
#include <numbers>

using namespace sherd;

struct Critic final : nn::Layer<Critic> {
  nn::Gru gru{1, 16, {.batch_first = true}};
  nn::Linear score{16, 1};

  /// Sequences (B, T, 1) to scores (B).
  Tensor forward(const Tensor& x) const {
    const auto [y, state] = gru(x);
    return squeeze(score(state.hidden[0]), 1);
  }
  void visit(auto&& on) {
    on("gru", gru);
    on("score", score);
  }
};

/// Sine waves (B, 12, 1) from a random phase.
Tensor waves(std::int64_t batch) {
  const Tensor phase = rand({batch, 1}, {}, 0, 2 * std::numbers::pi);
  return unsqueeze(sin(arange(0, 12, 1, {f32}) * 0.5 + phase), -1);
}

/// How far the norm of the score's gradient is from 1, between real and made sequences.
Tensor gradient_penalty(const Critic& critic, const Tensor& real, const Tensor& made) {
  const Tensor t = rand({real.size(0), 1, 1});
  const Tensor between = (t * real + (1 - t) * made).requires_grad_();
  const Tensor slope = grad(sum(critic(between)), {between}, {}, {.create_graph = true})[0];
  return mean(square(norm(slope, 2, {1, 2}) - 1));
}

int main() {
  manual_seed(0);
  Critic critic;
  nn::Adam optimizer(critic.parameters(), {.lr = 5e-3});
  double penalty_at_the_end = 0;
  for (int step = 0; step < 40; ++step) {
    const Tensor real = waves(16), made = randn({16, 12, 1});
    const Tensor distance = mean(critic(real)) - mean(critic(made));
    const Tensor penalty = gradient_penalty(critic, real, made);
    optimizer.zero_grad();
    (10 * penalty - distance).backward();
    optimizer.step();
    penalty_at_the_end = penalty.item();
    if (step % 10 == 9) {
      std::printf("distance.%d %.9g\n", step, distance.item());
      std::printf("penalty.%d %.9g\n", step, penalty_at_the_end);
    }
  }

  // The second derivative agrees with finite differences, in f64.
  critic.to(f64);
  manual_seed(1);
  const Tensor x = randn({2, 3, 1}, {f64}).requires_grad_();
  const double error = gradcheck(
      [&](std::span<const Tensor> in) {
        const Tensor slope = grad(sum(critic(in[0])), {in[0]}, {}, {.create_graph = true})[0];
        return square(slope);
      },
      {x});
  return error < 1e-6 && penalty_at_the_end < 0.5 ? 0 : 1;
}
