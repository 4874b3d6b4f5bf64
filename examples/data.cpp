// Data and files: a table is sliced, masked and mended, gaps in it get learned values, epochs are shuffled,
// and a run is saved and goes on in the middle of an epoch. With an argument it starts from a state dict that
// PyTorch's `safetensors.torch.save_file(model.state_dict(), path)` wrote.
#include <sherd.h>

#include <unistd.h>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

using namespace sherd;

constexpr std::int64_t features = 4;

/// A regression whose inputs have gaps (NaN), which it fills with numbers that it learns.
struct Regression final : nn::Layer<Regression> {
  nn::Param gap{zeros({features})};
  nn::Sequential net{nn::Linear(features, 16), nn::Tanh(), nn::Linear(16, 1)};

  Tensor forward(const Tensor& x) const {
    Tensor whole = clone(x);
    const Tensor gaps = ~isfinite(x);
    whole[gaps] = expand(gap, x.shape())[gaps];  // gradients pass through what is assigned
    return net(whole)[{Slice{}, 0}];
  }
  void visit(auto&& on) {
    on("gap", gap);
    on("net", net);
  }
};

/// A table (N, 5): four features, some of which are unknown, and what they come to, which is unknown for
/// some.
Tensor table(std::int64_t count) {
  Tensor rows = randn({count, features + 1});
  rows[{Slice{}, -1}] = rows[{Slice{}, 0}] * 2 - rows[{Slice{}, 1}] + rows[{Slice{}, -1}] * 0.1;
  rows[{Slice{.step = 9}, -1}] = NAN;
  rows[{Slice{1, {}, 5}, 1}] = NAN;
  rows[{7, Slice{1, 3}}] += 50;  // an outlier
  return rows;
}

struct Training {
  Tensor x, y;
  Regression model;
  nn::Adam optimizer{model.parameters(), {.lr = 2e-2}};
  nn::EpochSampler sampler{x.size(0), {.batch = 32, .last = nn::LastBatch::keep}};

  shard::RunState state() {
    shard::RunState run;
    run.add("model", model).add("optimizer", optimizer, model).add("sampler", sampler);
    return run;
  }
  double step() {
    const std::vector<std::int64_t> samples = sampler.next();
    const Tensor at = Tensor::from(samples, {std::ssize(samples)});
    const Tensor loss = mse_loss(model(x[at]), y[at]);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    return loss.item();
  }
  /// The mean loss of the next epoch, or of what is left of this one.
  double epoch() {
    double sum = 0;
    const std::int64_t now = sampler.epoch(), first = sampler.step();
    while (sampler.epoch() == now) sum += step();
    return sum / static_cast<double>(sampler.step() - first);
  }
};

int main(int argc, char** argv) {
  manual_seed(0);
  Tensor rows = table(200);
  rows = rows[isfinite(rows[{Ellipsis{}, -1}])];  // those whose result is known
  Tensor x = rows[{Slice{}, Slice{0, -1}}];
  const Tensor y = rows[{Slice{}, -1}];
  x[abs(x) > 10] = NAN;  // outliers are gaps too
  std::printf("rows %lld\n", static_cast<long long>(rows.size(0)));
  std::printf("known.sum %.9g\n", sum(x[isfinite(x)]).item());

  Training training{x, y};
  if (argc > 1) training.model.load_state_dict(nn::load_state(argv[1]));
  for (int epoch = 0; epoch < 8; ++epoch) std::printf("loss.%d %.9g\n", epoch, training.epoch());

  // In the middle of an epoch, all that the run goes on from.
  for (int step = 0; step < 2; ++step) training.step();
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("sherd-data-" + std::to_string(getpid()));
  shard::save_checkpoint(training.state(), folder, {});

  Training resumed{x, y};
  shard::load_checkpoint(resumed.state(), folder, {});
  const double last = training.epoch(), again = resumed.epoch();
  std::printf("loss.last %.9g\n", last);
  std::printf("gap.norm %.9g\n", norm(training.model.gap).item());
  std::filesystem::remove_all(folder);
  return last == again && last < 0.7 ? 0 : 1;
}
