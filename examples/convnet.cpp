// A convolutional network that learns which way the stripes of an image run: batch normalisation, pooling,
// SGD with Nesterov momentum, a rate that falls in steps, and an evaluation.
#include <sherd.h>

#include <cmath>
#include <cstdio>
#include <numbers>

using namespace sherd;

struct ConvNet final : nn::Layer<ConvNet> {
  nn::Conv2d conv1{1, 8, 3, {.padding = 1, .bias = nn::Bias::no}};
  nn::BatchNorm2d norm1{8};
  nn::Conv2d conv2{8, 16, 3, {.padding = 1, .bias = nn::Bias::no}};
  nn::BatchNorm2d norm2{16};
  nn::Linear head{16, 4};

  Tensor forward(const Tensor& x) const {
    const Tensor half = max_pool2d(relu(norm1(conv1(x))), 2);
    const Tensor features = adaptive_avg_pool2d(relu(norm2(conv2(half))), 1, 1);
    return head(flatten(features, 1));
  }
  void visit(auto&& on) {
    on("conv1", conv1);
    on("norm1", norm1);
    on("conv2", conv2);
    on("norm2", norm2);
    on("head", head);
  }
};

struct Images {
  Tensor pixels, labels;  ///< (N, 1, 16, 16) and (N) i64
};

/// Stripes under noise, in one of four directions, which is the label.
Images stripes(std::int64_t count) {
  const Tensor labels = randint(0, 4, {count});
  const Tensor phase = rand({count, 1, 1, 1}, {}, 0, 2 * std::numbers::pi);
  const Tensor noise = randn({count, 1, 16, 16});
  const Tensor angle = reshape(to(labels, f32) * (std::numbers::pi / 4), {count, 1, 1, 1});
  const Tensor across = arange(0, 16, 1, {f32}), down = unsqueeze(across, 1);
  return {sin(cos(angle) * across + sin(angle) * down + phase) + noise * 0.5, labels};
}

int main() {
  manual_seed(0);
  ConvNet net;
  nn::Sgd optimizer(net.parameters(), {.lr = 0.1, .momentum = 0.9, .weight_decay = 5e-4, .nesterov = true});
  const nn::StepSchedule schedule{.lr = 0.1, .every = 15, .factor = 0.3};

  for (int step = 0; step < 40; ++step) {
    optimizer.set_lr(schedule(step));
    const Images batch = stripes(32);
    const Tensor loss = cross_entropy(net(batch.pixels), batch.labels);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 10 == 0) std::printf("loss.%d %.9g\n", step, loss.item());
  }

  net.eval();
  const NoGrad guard;
  const Images test = stripes(256);
  const Tensor logits = net(test.pixels);
  const double accuracy = mean(to(argmax(logits, 1) == test.labels, f32)).item();
  std::printf("test.loss %.9g\n", cross_entropy(logits, test.labels).item());
  std::printf("test.accuracy %.9g\n", accuracy);
  return accuracy > 0.9 ? 0 : 1;
}
