#include "autograd/recompute.h"

#include <cstring>
#include <optional>
#include <set>
#include <thread>

#include "autograd/autograd.h"
#include "autograd/node.h"
#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;

namespace {

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
  const Tensor x = contiguous(a.detach()), y = contiguous(b.detach());
  return std::memcmp(x.raw(), y.raw(), static_cast<std::size_t>(x.numel() * size_of(x.dtype()))) == 0;
}

Tensor leaf(Shape shape, double scale = 1) {
  Tensor t = mul(randn(std::move(shape)), scale);
  return t.requires_grad_();
}

/// Bytes that the graph behind some tensors keeps and that are here now.
class GraphMemory {
 public:
  explicit GraphMemory(const Tensor& output) {
    std::vector<Ref<Node>> stack{record_of(output)->edge.node};
    while (!stack.empty()) {
      const Ref<Node> node = stack.back();
      stack.pop_back();
      if (!node || !seen_.insert(node.get()).second) continue;
      nodes_.push_back(node);
      for (const Edge& edge : node->edges) stack.push_back(edge.node);
    }
  }
  std::size_t resident() const {
    std::set<const Storage*> storages;
    for (const Ref<Node>& node : nodes_) {
      for (const SavedTensor& saved : node->saved_inputs) add(saved, storages);
      for (const SavedTensor& saved : node->saved_outputs) add(saved, storages);
    }
    std::size_t bytes = 0;
    for (const Storage* storage : storages) bytes += storage->resident() ? storage->bytes() : 0;
    return bytes;
  }

 private:
  static void add(const SavedTensor& saved, std::set<const Storage*>& storages) {
    if (saved.value.defined()) storages.insert(&saved.value.storage());
  }
  std::set<const Node*> seen_;
  std::vector<Ref<Node>> nodes_;
};

/// Calls a function after every op.
class AfterOps final : public Listener {
 public:
  explicit AfterOps(std::function<void(const AnyOp&)> call) : call_(std::move(call)) {}
  void after(const AnyOp& op, Inputs, Outputs) override { call_(op); }

 private:
  std::function<void(const AnyOp&)> call_;
};

/// Keeps a parameter's values elsewhere, like a sharded group: brings them when needed, lets go after the
/// last announced read.
class Gatherer final : public StorageOwner {
 public:
  explicit Gatherer(const Tensor& parameter) : values_(parameter.to_vector<float>()) {}
  void need(Storage& storage) override {
    storage.provide();
    std::memcpy(storage.data(), values_.data(), values_.size() * sizeof(float));
    ++gathers;
  }
  void expect_reads(Storage&, int reads) override { pending += reads; }
  void read_done(Storage& storage) override {
    if (--pending == 0 && storage.pins() == 0) storage.release();
  }
  void forget_reads(Storage&) noexcept override { pending = 0; }
  int pending = 0, gathers = 0;

 private:
  std::vector<float> values_;
};

using Block = std::function<Tensor(const Tensor&)>;

/// Gradients of the leaves after `loss` of the blocks one after the other, each recomputed or none.
std::vector<Tensor> gradients(const std::vector<Block>& blocks, const Tensor& x,
                              const std::vector<Tensor>& leaves, bool recomputed, int backwards = 1) {
  manual_seed(5);
  for (const Tensor& t : leaves) t.set_grad({});
  Tensor h = x;
  for (const Block& block : blocks) h = recomputed ? recompute([&] { return block(h); }) : block(h);
  const Tensor loss = sum(mul(h, h));
  for (int i = 0; i < backwards; ++i) loss.backward({}, /*retain_graph=*/i + 1 < backwards);
  std::vector<Tensor> grads;
  for (const Tensor& t : leaves) grads.push_back(t.grad());
  return grads;
}

void check_equal_gradients(const std::vector<Block>& blocks, const Tensor& x,
                           const std::vector<Tensor>& leaves) {
  for (const int backwards : {1, 2, 3}) {
    const auto plain = gradients(blocks, x, leaves, false, backwards),
               again = gradients(blocks, x, leaves, true, backwards);
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      INFO("leaf " << i << ", backwards " << backwards);
      REQUIRE(plain[i].defined());
      REQUIRE(again[i].defined());
      CHECK(same_bits(plain[i], again[i]));
    }
  }
}

Tensor mlp(const Tensor& x, const Tensor& w1, const Tensor& w2) { return linear(gelu(linear(x, w1)), w2); }

}  // namespace

TEST_CASE("gradients through a recomputed region are equal to the bit") {
  const Tensor x = leaf({6, 8});
  SECTION("elementwise") {
    const Tensor w = leaf({8});
    check_equal_gradients({[&](const Tensor& h) { return tanh(mul(exp(mul(h, 0.1)), sigmoid(add(h, w)))); }},
                          x, {x, w});
  }
  SECTION("matrix products, several regions") {
    const Tensor w1 = leaf({16, 8}, 0.3), w2 = leaf({8, 16}, 0.3), w3 = leaf({16, 8}, 0.3),
                 w4 = leaf({8, 16}, 0.3);
    check_equal_gradients(
        {[&](const Tensor& h) { return mlp(h, w1, w2); }, [&](const Tensor& h) { return mlp(h, w3, w4); }}, x,
        {x, w1, w2, w3, w4});
  }
  SECTION("parameters shared by two regions and the outside") {
    const Tensor w1 = leaf({16, 8}, 0.3), w2 = leaf({8, 16}, 0.3);
    const Block shared = [&](const Tensor& h) { return mlp(h, w1, w2); };
    const auto run = [&](bool recomputed) {
      for (const Tensor& t : {x, w1, w2}) t.set_grad({});
      Tensor h = mul(x, sum(w1));
      for (int i = 0; i < 2; ++i) h = recomputed ? recompute([&] { return shared(h); }) : shared(h);
      sum(mul(h, mean(w2))).backward();
      return std::vector{x.grad(), w1.grad(), w2.grad()};
    };
    const auto plain = run(false), again = run(true);
    for (std::size_t i = 0; i < plain.size(); ++i) CHECK(same_bits(plain[i], again[i]));
  }
  SECTION("dropout draws the same numbers again") {
    const Tensor w = leaf({8, 8}, 0.3);
    const Block block = [&](const Tensor& h) { return dropout(silu(dropout(matmul(h, w), 0.3)), 0.5); };
    check_equal_gradients({block, block}, x, {x, w});
  }
  SECTION("layer_norm, views, softmax") {
    const Tensor weight = leaf({8}), bias = leaf({8});
    check_equal_gradients(
        {[&](const Tensor& h) {
          const Tensor y = layer_norm(h, weight, bias);
          return reshape(softmax(matmul(reshape(y, {2, 3, 8}), transpose(reshape(y, {2, 3, 8}), 1, 2))),
                         {6, 3});
        }},
        x, {x, weight, bias});
  }
  SECTION("attention") {
    const Tensor w = leaf({24, 8}, 0.3);
    check_equal_gradients({[&](const Tensor& h) {
                            const auto parts =
                                split(transpose(reshape(linear(h, w), {1, 6, 6, 4}), 1, 2), 2, 1);
                            return attention(parts[0], parts[1], parts[2], {.causal = true, .dropout = 0.2});
                          }},
                          x, {x, w});
  }
  SECTION("in-place writes to tensors of the region") {
    const Tensor w = leaf({8});
    check_equal_gradients({[&](const Tensor& h) {
                            Tensor y = mul(h, w);
                            add_(y, w);
                            const Tensor z = exp(mul(y, 0.1));
                            Tensor mask = zeros({8});
                            {
                              const NoGrad guard;
                              fill_(mask, 0.5);
                              add_(mask, 0.25);
                            }
                            return mul(z, mask);
                          }},
                          x, {x, w});
  }
  SECTION("a value from before an in-place write, and the value after it") {
    const Tensor w = leaf({8});
    check_equal_gradients({[&](const Tensor& h) {
                            Tensor y = add(h, w);
                            const Tensor before = tanh(add(y, 1.0));
                            add_(y, 2.0);
                            return mul(before, exp(mul(y, 0.1)));
                          }},
                          x, {x, w});
  }
  SECTION("low precision") {
    const Tensor w = leaf({8, 8}, 0.3);
    check_equal_gradients({[&](const Tensor& h) {
                            return to(gelu(matmul(to(h, DType::bf16), to(w, DType::bf16))), DType::f32);
                          }},
                          x, {x, w});
  }
}

TEST_CASE("a region returns several tensors, of which some may be used") {
  const Tensor x = leaf({4, 8}), w = leaf({8, 8}, 0.3);
  const auto region = [&] {
    const Tensor h = matmul(x, w);
    return std::tuple{exp(h), tanh(h), std::vector{sigmoid(h)}};
  };
  for (const int used : {0, 1, 2}) {
    const auto run = [&](bool recomputed) {
      x.set_grad({});
      w.set_grad({});
      const auto [a, b, c] = recomputed ? recompute(region) : region();
      const Tensor y = used == 0   ? a
                       : used == 1 ? mul(b, b)
                                   : mul(mul(a, c[0]), c[0]);  // a region output used twice
      sum(y).backward();
      return std::pair{x.grad(), w.grad()};
    };
    const auto plain = run(false), again = run(true);
    INFO("used " << used);
    CHECK(same_bits(plain.first, again.first));
    CHECK(same_bits(plain.second, again.second));
  }
}

TEST_CASE("a region keeps no activations, brings back one region at a time, and lets go again") {
  constexpr int blocks = 6;
  const Tensor x = randn({32, 64});
  std::vector<Tensor> w1, w2;
  for (int i = 0; i < blocks; ++i) {
    w1.push_back(leaf({256, 64}, 0.1));
    w2.push_back(leaf({64, 256}, 0.1));
  }
  struct Figures {
    std::size_t forward, peak, after;
  };
  const auto run = [&](bool recomputed) {
    Tensor h = x;
    for (int i = 0; i < blocks; ++i) {
      const auto block = [&] {
        return add(h, mlp(h, w1[static_cast<std::size_t>(i)], w2[static_cast<std::size_t>(i)]));
      };
      h = recomputed ? recompute(block) : block();
    }
    const Tensor loss = sum(h);
    h = {};
    const GraphMemory memory(loss);
    Figures figures{memory.resident(), 0, 0};
    AfterOps watch([&](const AnyOp&) { figures.peak = std::max(figures.peak, memory.resident()); });
    const Listening listening(watch);
    loss.backward({}, /*retain_graph=*/true);
    figures.after = memory.resident();
    return figures;
  };
  const std::size_t weights = blocks * 2 * 256 * 64 * 4, wide = 32 * 256 * 4, narrow = 32 * 64 * 4;
  const Figures plain = run(false), again = run(true);
  CHECK(plain.forward == again.forward + blocks * 2 * wide);
  CHECK(again.forward <= weights + (blocks + 1) * narrow);
  CHECK(again.peak <= again.forward + 2 * wide + 2 * narrow);
  CHECK(again.after == again.forward);
  CHECK(plain.after == plain.forward);
}

TEST_CASE("the pool sees the memory that recomputation saves") {
  std::optional<std::size_t> plain, again;
  const auto run = [](bool recomputed) {
    std::size_t bytes = 0;
    std::thread([&] {  // a pool of its own, so what it caches at the end is what the step needed at once
      const Tensor w = leaf({256, 256}, 0.05);
      Tensor h = randn({512, 256});
      for (int i = 0; i < 8; ++i) {
        const auto block = [&] { return gelu(matmul(gelu(matmul(gelu(matmul(h, w)), w)), w)); };
        h = recomputed ? recompute(block) : block();
      }
      Tensor loss = sum(h);
      h = {};
      loss.backward();
      loss = {};
      bytes = Context::current().cpu_pool().cached_bytes();
    })
        .join();
    return bytes;
  };
  const std::size_t without = run(false), with = run(true);
  if (test::skip_if(without == 0, "the pool caches nothing in sanitizer builds")) return;
  CHECK(with < without / 2);
}

TEST_CASE("freed as the backward goes") {
  const Tensor x = leaf({16, 16});
  Tensor h = x;
  for (int i = 0; i < 4; ++i) h = recompute([&] { return exp(tanh(mul(h, 0.5))); });
  const Tensor loss = sum(h);
  h = {};
  const GraphMemory memory(loss);
  loss.backward();
  CHECK(memory.resident() == 0);
  CHECK_THROWS_AS(loss.backward(), StateError);
}

TEST_CASE("a tensor put aside inside a region stays readable") {
  const Tensor x = leaf({4, 4});
  Tensor aside;
  const Tensor y = recompute([&] {
    aside = exp(x);
    return tanh(mul(aside, exp(aside)));
  });
  CHECK(aside.storage().resident());
  CHECK(same_bits(aside, exp(x)));
  sum(y).backward();
  const Tensor grad = x.grad();
  x.set_grad({});
  const Tensor e = exp(x);
  sum(tanh(mul(e, exp(e)))).backward();
  CHECK(same_bits(grad, x.grad()));
}

TEST_CASE("the region's output may be written in place outside it") {
  const Tensor x = leaf({4, 4});
  const auto run = [&](bool recomputed) {
    x.set_grad({});
    const auto region = [&] {
      const Tensor h = exp(mul(x, 0.3));
      return std::pair{add(h, 1.0), tanh(h)};
    };
    const auto [a, b] = recomputed ? recompute(region) : region();
    mul_(a, 3.0);
    sum(add(a, b)).backward();
    return x.grad();
  };
  CHECK(same_bits(run(false), run(true)));
}

TEST_CASE("a region that writes a tensor from outside is refused by name") {
  const Tensor x = leaf({4}), counter = zeros({4});
  const auto write = [&] {
    return recompute([&] {
      const NoGrad guard;
      add_(counter, 1.0);
      return exp(x);
    });
  };
  CHECK_THAT(test::message_of<StateError>(write),
             ContainsSubstring("recompute: add_") && ContainsSubstring("(4)"));
  CHECK(counter.to_vector<float>() == std::vector<float>(4, 0.0f));
  sum(recompute([&] { return exp(x); })).backward();  // the rank is usable
  CHECK(same_bits(x.grad(), exp(x)));
}

TEST_CASE("an outside input written after the region ran is refused by name") {
  const Tensor x = leaf({4});
  Tensor scale = full({4}, 2.0);
  const Tensor loss = sum(recompute([&] { return exp(mul(tanh(x), scale)); }));
  fill_(scale, 3.0);
  CHECK_THAT(test::message_of<StateError>([&] { loss.backward(); }),
             ContainsSubstring("mul") && ContainsSubstring("changed in place"));
}

TEST_CASE("a host write to a tensor of the region is refused by name") {
  const Tensor x = leaf({4});
  const auto run = [&] {
    return recompute([&] {
      Tensor h = exp(x);
      h.mutable_data<float>()[0] = 7;
      return tanh(h);
    });
  };
  CHECK_THAT(test::message_of<StateError>(run), ContainsSubstring("recompute: an input of tanh"));
}

TEST_CASE("without grad mode, or with nothing to differentiate, a region is a plain call") {
  const Tensor x = leaf({4}), data = randn({4});
  {
    const NoGrad guard;
    const Tensor y = recompute([&] { return exp(x); });
    CHECK_FALSE(y.requires_grad());
    CHECK_FALSE(y.storage().owned());
  }
  Tensor inner;
  const Tensor y = recompute([&] {
    inner = exp(data);
    return tanh(inner);
  });
  CHECK(inner.storage().resident());
  CHECK_FALSE(inner.storage().owned());
}

TEST_CASE("a region inside a region is part of the outer one") {
  const Tensor x = leaf({4, 8}), w = leaf({8, 8}, 0.3);
  const auto layer = [&](const Tensor& h) { return gelu(matmul(h, w)); };
  const auto run = [&](bool outer, bool inner) {
    x.set_grad({});
    w.set_grad({});
    const auto two = [&] {
      Tensor h = x;
      for (int i = 0; i < 2; ++i) h = inner ? recompute([&] { return layer(h); }) : layer(h);
      return exp(mul(h, 0.1));
    };
    sum(outer ? recompute(two) : two()).backward();
    return std::pair{x.grad(), w.grad()};
  };
  const auto plain = run(false, false);
  for (const bool outer : {false, true}) {
    const auto again = run(outer, true);
    CHECK(same_bits(plain.first, again.first));
    CHECK(same_bits(plain.second, again.second));
  }
}

TEST_CASE("exceptions inside a region pass, and the rank stays usable") {
  const Tensor x = leaf({4});
  CHECK_THROWS_AS(recompute([&]() -> Tensor {
                    const Tensor h = exp(x);
                    throw std::runtime_error("mine");
                  }),
                  std::runtime_error);
  CHECK_THROWS_AS(recompute([&] { return add(exp(x), zeros({3})); }), ShapeError);
  sum(recompute([&] { return exp(tanh(x)); })).backward();
  const Tensor grad = x.grad();
  x.set_grad({});
  sum(exp(tanh(x))).backward();
  CHECK(same_bits(grad, x.grad()));
}

TEST_CASE("a backward that throws halfway can be followed by another") {
  const Tensor x = leaf({4, 4});
  Tensor h = recompute([&] { return exp(tanh(x)); });
  bool throwing = true;
  Subscription hook = register_hook(h, [&](const Tensor&) -> Tensor {
    if (throwing) throw std::runtime_error("mine");
    return {};
  });
  const Tensor loss = sum(recompute([&] { return exp(sigmoid(h)); }));
  CHECK_THROWS_AS(loss.backward({}, true), std::runtime_error);
  throwing = false;
  loss.backward({}, true);
  const Tensor grad = x.grad();
  x.set_grad({});
  sum(exp(sigmoid(exp(tanh(x))))).backward();
  CHECK(same_bits(grad, x.grad()));
}

TEST_CASE("the loss outlives parameters and inputs") {
  Tensor loss, expected;
  const auto build = [&](bool recomputed) {
    manual_seed(3);
    const Tensor x = leaf({4, 8}), w1 = leaf({16, 8}), w2 = leaf({8, 16});
    const auto block = [&] { return mlp(x, w1, w2); };
    return std::pair{sum(recomputed ? recompute(block) : block()), x};
  };
  const auto [plain, x] = build(false);
  plain.backward();
  const auto [again, y] = build(true);
  again.backward();
  CHECK(same_bits(x.grad(), y.grad()));
}

TEST_CASE("second derivatives through a region") {
  const Tensor x = leaf({5});
  const auto run = [&](bool recomputed) {
    const auto region = [&] { return mul(exp(mul(x, 0.5)), tanh(x)); };
    const Tensor loss = sum(recomputed ? recompute(region) : region());
    const Tensor first = grad(loss, std::span(&x, 1), {}, {.create_graph = true})[0];
    return grad(sum(mul(first, first)), std::span(&x, 1))[0];
  };
  CHECK(same_bits(run(false), run(true)));
}

TEST_CASE("a region may take gradients inside") {
  const Tensor x = leaf({5}), w = leaf({5});
  const auto run = [&](bool recomputed) {
    for (const Tensor& t : {x, w}) t.set_grad({});
    const auto penalty = [&] {
      const Tensor y = sum(mul(tanh(mul(x, w)), exp(w)));
      const Tensor slope = grad(y, std::span(&x, 1), {}, {.create_graph = true})[0];
      return add(sum(mul(slope, slope)), y);
    };
    (recomputed ? recompute(penalty) : penalty()).backward();
    return std::pair{x.grad(), w.grad()};
  };
  const auto plain = run(false), again = run(true);
  CHECK(same_bits(plain.first, again.first));
  CHECK(same_bits(plain.second, again.second));
}

TEST_CASE("a hundred regions in a row, each fed by the one before") {
  const Tensor x = leaf({8}), w = leaf({8}, 0.1);
  const Block block = [&](const Tensor& h) { return tanh(add(mul(h, w), exp(mul(h, 0.1)))); };
  check_equal_gradients(std::vector<Block>(100, block), x, {x, w});
}

TEST_CASE("grad() of a part of a region's outputs, and views of kept tensors") {
  const Tensor x = leaf({4, 6});
  const auto run = [&](bool recomputed) {
    const auto region = [&] {
      const Tensor h = exp(x);
      const auto halves = split(h, 3, 1);
      return std::pair{mul(halves[0], tanh(halves[1])), sigmoid(h)};
    };
    const auto [a, b] = recomputed ? recompute(region) : region();
    const Tensor from_a = grad(sum(a), std::span(&x, 1), {}, {.retain_graph = true})[0];
    const Tensor from_b = grad(sum(b), std::span(&x, 1))[0];
    return std::pair{from_a, from_b};
  };
  const auto plain = run(false), again = run(true);
  CHECK(same_bits(plain.first, again.first));
  CHECK(same_bits(plain.second, again.second));
}

TEST_CASE("parameters with an owner of their own come for the second run and go again") {
  const Tensor x = leaf({4, 8}), w = leaf({8, 8}, 0.3), bias = leaf({8});
  const auto run = [&](bool recomputed) {
    for (const Tensor& t : {x, w, bias}) t.set_grad({});
    const auto block = [&] { return tanh(gelu(add(matmul(x, w), bias))); };
    const Tensor loss = sum(recomputed ? recompute(block) : block());
    const bool owned = bias.storage().owned();
    if (owned) {  // after the forward
      w.storage().release();
      bias.storage().release();
    }
    loss.backward();
    return std::vector{x.grad(), w.grad(), bias.grad()};
  };
  const auto plain = run(false);
  const auto w_owner = std::make_shared<Gatherer>(w), bias_owner = std::make_shared<Gatherer>(bias);
  w.storage().set_owner(w_owner);
  bias.storage().set_owner(bias_owner);
  const auto again = run(true);
  for (std::size_t i = 0; i < plain.size(); ++i) CHECK(same_bits(plain[i], again[i]));
  for (const auto& owner : {w_owner, bias_owner}) {
    CHECK(owner->pending == 0);
    CHECK(owner->gathers == 1);
  }
  CHECK_FALSE(w.storage().resident());
  CHECK_FALSE(bias.storage().resident());
}

TEST_CASE("what several regions read comes once for all of them") {
  const Tensor x = leaf({4, 8}), bias = leaf({8});
  const auto owner = std::make_shared<Gatherer>(bias);
  bias.storage().set_owner(owner);
  // No gradient reads the bias; only the second runs of the regions do.
  const auto region = [&](const Tensor& t) { return recompute([&] { return tanh(exp(add(t, bias))); }); };
  const Tensor loss = sum(mul(region(region(x)), region(x)));
  bias.storage().release();
  for (int backwards = 1; backwards <= 2; ++backwards) {
    loss.backward({}, /*retain_graph=*/true);
    CHECK(owner->gathers == backwards);
    CHECK(owner->pending == 0);
    CHECK_FALSE(bias.storage().resident());
  }
}

TEST_CASE("a backward that fails before a region ran leaves nobody waiting for it") {
  const Tensor x = leaf({4, 8}), bias = leaf({8});
  const auto owner = std::make_shared<Gatherer>(bias);
  bias.storage().set_owner(owner);
  const Tensor y = recompute([&] { return tanh(exp(add(x, bias))); });
  const Tensor loss = sum(mul(y, y));
  bias.storage().release();
  {
    const Subscription hook =
        register_hook(y, [](const Tensor&) -> Tensor { throw std::runtime_error("in a hook"); });
    CHECK_THROWS_WITH(loss.backward({}, true), Catch::Matchers::ContainsSubstring("in a hook"));
  }
  CHECK(owner->pending == 0);
}

TEST_CASE("a second run that fails gives back what it borrowed, and the next backward works") {
  const Tensor x = leaf({4, 8}), bias = leaf({8}), scale = leaf({8});
  struct Failing final : StorageOwner {
    void need(Storage& storage) override {
      if (failing) throw std::runtime_error("mine");
      storage.provide();
      std::memset(storage.data(), 0, storage.bytes());
    }
    bool failing = false;
  };
  const auto owner = std::make_shared<Gatherer>(bias);
  const auto failing = std::make_shared<Failing>();
  bias.storage().set_owner(owner);
  scale.storage().set_owner(failing);
  const Tensor y = recompute([&] { return tanh(exp(add(add(x, bias), scale))); });
  const Tensor loss = sum(mul(y, y));
  bias.storage().release();
  scale.storage().release();
  failing->failing = true;
  CHECK_THROWS_WITH(loss.backward({}, true), ContainsSubstring("mine"));
  CHECK(owner->pending == 0);
  CHECK_FALSE(x.grad().defined());
  failing->failing = false;
  CHECK_NOTHROW(loss.backward({}, true));
  CHECK(owner->pending == 0);
  CHECK_FALSE(bias.storage().resident());
}

TEST_CASE("listeners hear a region once") {
  const Tensor x = leaf({4});
  int exps = 0;
  AfterOps watch([&](const AnyOp& op) { exps += op.name() == "exp"; });
  const Listening listening(watch);
  const Tensor loss = sum(recompute([&] { return tanh(exp(x)); }));
  loss.backward();
  CHECK(exps == 1);
}
