// Gradients of gradients for some inputs of an op: what is not asked for has a history all the same.
#include <algorithm>
#include <atomic>
#include <thread>

#include "autograd/autograd.h"
#include "runtime/ops.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Fused {
  const char* name;
  std::vector<Shape> shapes;
  std::function<Tensor(std::span<const Tensor>)> call;
};

const Fused fused[] = {
    {"layer_norm",
     {{3, 4}, {4}, {4}},
     [](std::span<const Tensor> in) { return layer_norm(in[0], in[1], in[2]); }},
    {"batch_norm",
     {{5, 3, 2}, {3}, {3}},
     [](std::span<const Tensor> in) { return batch_norm(in[0], {}, {}, in[1], in[2], {.training = true}); }},
    {"batch_norm with a residual and ReLU",
     {{5, 3, 2}, {3}, {3}, {5, 3, 2}},
     [](std::span<const Tensor> in) {
       return batch_norm(in[0], {}, {}, in[1], in[2],
                         {.training = true, .residual = in[3], .activation = Activation::relu});
     }},
    {"attention",
     {{1, 2, 3, 4}, {1, 2, 5, 4}, {1, 2, 5, 4}},
     [](std::span<const Tensor> in) { return attention(in[0], in[1], in[2], {.causal = true}); }},
    {"linear", {{3, 4}, {5, 4}, {5}}, [](std::span<const Tensor> in) { return linear(in[0], in[1], in[2]); }},
    {"matmul", {{3, 4}, {4, 2}}, [](std::span<const Tensor> in) { return matmul(in[0], in[1]); }},
};

}  // namespace

TEST_CASE("create_graph: every subset of an op's inputs gets what all of them get, and once more") {
  for (const Fused& f : fused)
    for (const bool computed : {false, true})
      for (unsigned subset = 1; subset < (1u << f.shapes.size()); ++subset) {
        INFO(f.name << ", subset " << subset << ", computed inputs: " << computed);
        std::vector<Tensor> leaves, in, some;
        std::vector<std::size_t> places;
        for (std::size_t i = 0; i < f.shapes.size(); ++i) {
          leaves.push_back(numbers(f.shapes[i], f64, 1 + static_cast<unsigned>(i)).requires_grad_());
          in.push_back(computed ? mul(leaves[i], 1.5) : leaves[i]);
          if ((subset >> i) & 1) {
            some.push_back(in[i]);
            places.push_back(i);
          }
        }
        const auto loss = [&] { return sum(square(f.call(in))); };
        const std::vector<Tensor> all = grad(loss(), in),
                                  got = grad(loss(), some, {}, {.create_graph = true});
        Tensor penalty = zeros({}, {f64});
        for (std::size_t k = 0; k < got.size(); ++k) {
          CHECK(distance(got[k], all[places[k]]) < 1e-12);
          penalty = add(penalty, sum(square(got[k])));
        }
        penalty.backward({}, true);

        // The same by asking for all and using some.
        const std::vector<Tensor> whole = grad(loss(), in, {}, {.create_graph = true});
        Tensor same = zeros({}, {f64});
        for (const std::size_t i : places) same = add(same, sum(square(whole[i])));
        const std::vector<Tensor> expected = grad(same, leaves);
        for (std::size_t i = 0; i < leaves.size(); ++i)
          CHECK(distance(leaves[i].grad(), expected[i]) < 1e-10);
      }
}

TEST_CASE("create_graph: gradcheck sees through a function that takes gradients itself") {
  const Tensor x = numbers({3, 4}, f64, 1), w = numbers({4}, f64, 2, 0.5, 1.5);
  const double error = gradcheck(
      [](std::span<const Tensor> in) {
        const std::vector<Tensor> one{in[0]};
        const Tensor g = grad(sum(square(layer_norm(in[0], in[1], {}))), one, {}, {.create_graph = true})[0];
        return sum(square(g));
      },
      std::vector{x, w});
  CHECK(error < 1e-5);
}

TEST_CASE("backward: from a view taken before a recorded write it is refused") {
  const Tensor x = numbers({4}, f64).requires_grad_(), h = mul(x, 2.0), before = select(h, 0, 0);
  mul_(h, 3.0);
  CHECK(one_line_about(message_of<StateError>([&] { before.backward(); }), "backward"));
  CHECK(one_line_about(message_of<StateError>([&] { grad(sum(h), std::vector{before}); }), "grad"));
  sum(h).backward();
  CHECK(same_bits(x.grad(), full({4}, 6, {f64})));
}

TEST_CASE("grad: a branch that was freed and is not needed is no error") {
  const Tensor w = numbers({3}, f64).requires_grad_(), b = numbers({3}, f64, 2).requires_grad_();
  const Tensor h = square(w);
  sum(square(h)).backward();
  const Tensor y = sum(mul(h, b));
  CHECK(same_bits(grad(y, std::vector{b})[0], h.detach()));
  CHECK_THROWS_AS(grad(y, std::vector{w}), StateError);
  CHECK_THROWS_AS(y.backward(), StateError);
}

TEST_CASE("in place: what a function computes may be written, also where it ends in a view") {
  const Tensor x = numbers({2, 3, 4}, f64).requires_grad_(), w = numbers({4, 5}, f64, 2);
  const Tensor y = relu_(matmul(x, w));
  sum(y).backward();
  const Tensor leaf = x.detach().requires_grad_();
  sum(relu(matmul(leaf, w))).backward();
  CHECK(same_bits(x.grad(), leaf.grad()));
}

TEST_CASE("backward: on threads that share leaves each one counts whole, or is refused") {
  std::vector<Tensor> leaves;
  for (unsigned i = 0; i < 20; ++i) leaves.push_back(numbers({2}, f64, i).requires_grad_());
  std::atomic<int> counted = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int repeat = 0; repeat < 50; ++repeat) {
        Tensor total = zeros({2}, {f64});
        for (const Tensor& leaf : leaves) total = add(total, mul(leaf, 2.0));
        try {
          const std::vector<Tensor> g = grad(sum(total), leaves);  // adds to nothing that is shared
          if (std::all_of(g.begin(), g.end(),
                          [](const Tensor& x) { return doubles(x) == std::vector<double>{2, 2}; }))
            ++counted;
        } catch (const StateError& error) {
          if (one_line_about(error.what(), "under way")) ++counted;
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(counted == 200);
}
