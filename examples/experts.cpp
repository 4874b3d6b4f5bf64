// A mixture of experts on four ranks: each pair of ranks has two of the four experts, in shards, and tokens
// go to the ranks of the expert that the gate chooses, and back (Shazeer et al., 2017; top-1 as Fedus et al.,
// 2022).
#include <sherd.h>

#include <cstdio>
#include <vector>

using namespace sherd;

constexpr std::int64_t width = 8, experts = 4;

struct Expert final : nn::Layer<Expert> {
  nn::Linear up{width, 32}, down{32, width};

  Tensor forward(const Tensor& x) const { return down(gelu(up(x))); }
  void visit(auto&& on) {
    on("up", up);
    on("down", down);
  }
};

/// Positions in which rows come back to where they were before `index_select` by `order`.
Tensor inverse(const Tensor& order) { return argsort(order); }

struct Mixture final : nn::Layer<Mixture> {
  nn::Linear gate{width, experts}, out{width, 4};
  nn::ModuleList<Expert> own;  ///< of this rank
  Group peers;                 ///< one rank for each of the experts' places

  explicit Mixture(const DeviceMesh& mesh) : peers(mesh.group("experts")) {
    const std::int64_t each = experts / peers.size();
    for (std::int64_t e = 0; e < experts; ++e) {  // all are drawn, so that ranks have the same first values
      Expert expert;
      if (e / each == peers.rank()) own.append(std::move(expert));
    }
  }

  Tensor forward(const Tensor& x) const {
    const Picked best = max(softmax(gate(x)), 1);
    const Tensor order = argsort(best.indices);  // tokens by their expert
    const RowRoute route = route_rows(peers, tokens_by_rank(best.indices));
    const Tensor here = exchange_rows(route, index_select(x, 0, order));
    const Tensor whose = exchange_rows(route, index_select(best.indices, 0, order));
    const Tensor back = exchange_rows(route.back(), by_experts(here, whose));
    return out(x + index_select(back, 0, inverse(order)) * unsqueeze(best.values, 1));
  }
  void visit(auto&& on) {
    on("gate", gate);
    on("out", out);
    on("own", own);
  }

 private:
  std::vector<std::int64_t> tokens_by_rank(const Tensor& chosen) const {
    const auto by_expert = bincount(chosen, {}, experts).to_vector<std::int64_t>();
    std::vector<std::int64_t> by_rank(static_cast<std::size_t>(peers.size()));
    for (std::size_t e = 0; e < by_expert.size(); ++e)
      by_rank[e * by_rank.size() / by_expert.size()] += by_expert[e];
    return by_rank;
  }

  /// Every expert runs, also without tokens: what ranks tell each other does not depend on the tokens.
  Tensor by_experts(const Tensor& tokens, const Tensor& whose) const {
    const Tensor order = argsort(whose), sorted = index_select(tokens, 0, order);
    const auto counts = bincount(whose, {}, experts).to_vector<std::int64_t>();
    std::vector<Tensor> done;
    std::int64_t at = 0;
    auto e = static_cast<std::size_t>(peers.rank() * std::ssize(own));
    for (const Expert& expert : own) {
      done.push_back(expert(narrow(sorted, 0, at, counts[e])));
      at += counts[e++];
    }
    return index_select(cat(done), 0, inverse(order));
  }
};

int main() {
  double last = 0;
  run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = world.mesh({2, 2}, {"experts", "shards"});
    manual_seed(0);
    Mixture model(mesh);
    for (Expert& expert : model.own) {
      shard::fully_shard(expert, {.mesh = mesh["shards"]});
      shard::set_gradient_divide_factor(expert, world.size());  // its tokens are those of all ranks
    }
    for (nn::Linear* dense : {&model.gate, &model.out}) shard::fully_shard(*dense, {.mesh = world.mesh()});
    nn::AdamW optimizer(model.parameters(), {.lr = 1e-2});

    for (int step = 0; step < 20; ++step) {
      manual_seed(100 + step);
      const Tensor batch = randn({32, width}), labels = argmax(batch[{Slice{}, Slice{0, 4}}], 1);
      const Tensor x = chunk(batch, world.size())[world.rank()],
                   y = chunk(labels, world.size())[world.rank()];
      const Tensor loss = cross_entropy(model(x), y);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      const Tensor whole = loss.detach();
      world.group().all_reduce(whole, ReduceOp::average());
      if (world.rank() != 0) continue;
      last = whole.item();
      if (step % 5 == 4) std::printf("loss.%d %.9g\n", step, last);
    }
  });
  return last < 1.2 ? 0 : 1;
}
