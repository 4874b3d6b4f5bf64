// Sharded training on four ranks: shards within pairs of ranks, replicas across them (HSDP), gradients
// clipped by the norm of the whole, a checkpoint, and a run that goes on from it on two ranks.
#include <sherd.h>

#include <unistd.h>
#include <cstdio>
#include <filesystem>
#include <string>

using namespace sherd;

struct Mlp final : nn::Layer<Mlp> {
  nn::ModuleList<nn::Linear> hidden;
  nn::Linear out{32, 4};

  Mlp() {
    hidden.emplace_back(8, 32);
    hidden.emplace_back(32, 32);
  }
  Tensor forward(Tensor x) const {
    for (const nn::Linear& layer : hidden) x = gelu(layer(x));
    return out(x);
  }
  void visit(auto&& on) {
    on("hidden", hidden);
    on("out", out);
  }
};

/// Trains from step `first` on; every number of ranks sees the same batches, of which each rank has its part.
struct Training {
  World& world;
  Mlp model;
  nn::AdamW optimizer;

  Training(World& world, const shard::Options& options)
      : world(world), model(sharded(options)), optimizer(model.parameters(), {.lr = 1e-2}) {}

  static Mlp sharded(const shard::Options& options) {
    manual_seed(0);  // the same model on every rank
    Mlp model;
    for (nn::Linear& layer : model.hidden) shard::fully_shard(layer, options);
    shard::fully_shard(model, options);
    return model;
  }

  /// The last loss, over all ranks.
  double run(int first, int last) {
    Tensor whole;
    for (int step = first; step < last; ++step) {
      manual_seed(100 + step);
      const Tensor batch = randn({32, 8}), labels = argmax(batch[{Slice{}, Slice{0, 4}}], 1);
      const Tensor x = chunk(batch, world.size())[world.rank()],
                   y = chunk(labels, world.size())[world.rank()];
      const Tensor loss = cross_entropy(model(x), y);
      optimizer.zero_grad();
      loss.backward();
      const Tensor norm = shard::clip_grad_norm_(model.parameters(), 0.5);
      optimizer.step();

      whole = loss.detach();
      world.group().all_reduce(whole, ReduceOp::average());
      if (world.rank() == 0 && step % 5 == 4)
        std::printf("loss.%d %.9g\nnorm.%d %.9g\n", step, whole.item(), step, norm.item());
    }
    return whole.item();
  }
};

int main() {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("sherd-sharded-" + std::to_string(getpid()));

  run_ranks(4, [&](World& world) {
    Training training(world, {.mesh = world.mesh({2, 2}, {"replicas", "shards"})});
    training.run(0, 10);
    shard::save_checkpoint(training.model, training.optimizer, folder, world.group());
  });

  double last = 0;
  run_ranks(2, [&](World& world) {
    Training training(world, {.layout = shard::GroupLayout::flat});
    shard::load_checkpoint(training.model, training.optimizer, folder, world.group());
    const double loss = training.run(10, 20);
    const nn::StateDict whole = shard::full_state_dict(training.model);
    if (world.rank() != 0) return;
    std::printf("weights %.9g\n", norm(whole.at("out.weight")).item());
    last = loss;
  });

  std::filesystem::remove_all(folder);
  return last < 0.7 ? 0 : 1;
}
