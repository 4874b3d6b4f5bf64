// Mixed precision on four ranks: parameters kept in f32 and computed with in bf16; in f16, with scaled
// losses; and kept in bf16, with f32 masters in the optimizer.
#include <sherd.h>

#include <cstdio>
#include <string>

using namespace sherd;

struct Recipe {
  std::string name;
  DType stored;                           ///< what parameters are kept in
  shard::MixedPrecisionPolicy precision;  ///< what is computed with, and what gradients are averaged in
  nn::Masters masters = nn::Masters::none;
  nn::Scaling scaling = nn::Scaling::off;
};

nn::Sequential network() {
  return nn::Sequential{nn::Linear(16, 64), nn::Gelu(), nn::Linear(64, 64), nn::Gelu(), nn::Linear(64, 4)};
}

/// Trains on all ranks and returns the last loss.
double train(World& world, const Recipe& recipe) {
  manual_seed(0);
  nn::Sequential model = network();
  model.to(recipe.stored);
  shard::fully_shard(model, {.mixed_precision = recipe.precision});
  nn::AdamW optimizer(model.parameters(), {.lr = 3e-3, .masters = recipe.masters});
  nn::GradScaler scaler({.init_scale = 1.5e6, .scaling = recipe.scaling});

  double last = 0;
  for (int step = 0; step < 30; ++step) {
    manual_seed(100 + step);
    const Tensor batch = randn({64, 16}), labels = argmax(batch[{Slice{}, Slice{0, 4}}], 1);
    const Tensor x = chunk(batch, world.size())[world.rank()], y = chunk(labels, world.size())[world.rank()];
    const Tensor loss = cross_entropy(to(model(to(x, recipe.stored)), f32), y);
    optimizer.zero_grad();
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    shard::clip_grad_norm_(model.parameters(), 1.0);
    scaler.step(optimizer);  // skipped where a gradient overflowed on any rank
    scaler.update();

    const Tensor whole = loss.detach();
    world.group().all_reduce(whole, ReduceOp::average());
    last = whole.item();
    if (world.rank() == 0 && step % 10 == 9)
      std::printf("%s.loss.%d %.9g\n", recipe.name.c_str(), step, last);
  }
  if (world.rank() == 0 && scaler.enabled())
    std::printf("%s.scale %.9g\n", recipe.name.c_str(), scaler.scale_tensor().item());
  return last;
}

int main() {
  const Recipe recipes[] = {
      {"bf16", f32, {.param_dtype = bf16, .reduce_dtype = f32}},
      {"f16", f32, {.param_dtype = f16, .reduce_dtype = f32}, nn::Masters::none, nn::Scaling::on},
      {"masters", bf16, {.reduce_dtype = f32}, nn::Masters::in_f32},
  };
  bool learned = true;
  run_ranks(4, [&](World& world) {
    for (const Recipe& recipe : recipes) {
      const double loss = train(world, recipe);
      if (world.rank() == 0) learned = learned && loss < 1;
    }
  });
  return learned ? 0 : 1;
}
