// What holds for attention with projections, whatever its numbers are.
#include "nn/multihead_attention.h"

#include <cmath>

#include "autograd/autograd.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

MultiheadAttention make(std::int64_t width, std::int64_t heads, MultiheadAttentionOptions options = {}) {
  manual_seed(3);
  MultiheadAttention layer(width, heads, options);
  copy_(layer.in_proj_bias.data(), numbers({3 * width}, options.tensor.dtype, 9));
  return layer;
}

}  // namespace

TEST_CASE("attention layers: names, shapes and start are PyTorch's") {
  MultiheadAttention layer(32, 8);
  std::vector<std::string> names;
  for (const auto& [name, parameter] : layer.named_parameters()) names.push_back(name);
  CHECK(names ==
        std::vector<std::string>{"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"});
  CHECK(layer.in_proj_weight.shape() == Shape{96, 32});
  const double bound = std::sqrt(6.0 / (96 + 32));
  for (double v : doubles(layer.in_proj_weight.data())) CHECK(std::abs(v) <= bound);
  for (const Param* bias : {&layer.in_proj_bias, &layer.out_proj.bias})
    CHECK(same_bits(bias->data(), zeros(bias->shape())));
}

TEST_CASE("attention layers: gradients are those of finite differences") {
  for (bool batch_first : {false, true})
    for (Causal causal : {Causal::no, Causal::yes}) {
      MultiheadAttention layer = make(4, 2, {.batch_first = batch_first, .tensor = {f64}});
      const std::vector<Tensor> in = {numbers({3, 3, 4}, f64, 1), numbers({3, 3, 4}, f64, 2),
                                      numbers({3, 3, 4}, f64, 3)};
      const auto three = [&](std::span<const Tensor> x) { return layer(x[0], x[1], x[2], causal); };
      const auto one = [&](std::span<const Tensor> x) { return layer(x[0], x[0], x[0], causal); };
      CHECK(gradient_error(three, in) < 1e-6);
      CHECK(gradient_error(one, std::span(in).first(1)) < 1e-6);
    }
}

TEST_CASE("attention layers: sharing a tensor saves products and changes no value") {
  for (const Shape& shape : {Shape{5, 2, 12}, Shape{1, 1, 12}, Shape{70, 3, 12}}) {
    MultiheadAttention layer = make(12, 3);
    const Tensor x = numbers(shape, f32), y = numbers(shape, f32, 2);
    CHECK(distance(layer(x, x, x), layer(x, clone(x), clone(x))) < 1e-5);
    CHECK(distance(layer(x, y, y), layer(x, y, clone(y))) < 1e-5);
    const Tensor packed = linear(transpose(x, 0, 1), layer.in_proj_weight, layer.in_proj_bias);
    CHECK(distance(layer(x, x, x), layer.out_proj(transpose(self_attention(packed, 3), 0, 1))) < 1e-5);
  }
}

TEST_CASE("attention layers: batch first is the same with the first axes exchanged") {
  MultiheadAttention steps = make(12, 3), rows = make(12, 3, {.batch_first = true});
  const Tensor q = numbers({5, 2, 12}, f32), k = numbers({7, 2, 12}, f32, 2);
  const Tensor qt = transpose(q, 0, 1), kt = transpose(k, 0, 1);
  CHECK(distance(transpose(steps(q, k, k), 0, 1), rows(qt, kt, kt)) < 1e-6);
}

TEST_CASE("attention layers: dropout falls on the weights while training, and follows the seed") {
  MultiheadAttention layer = make(12, 3, {.dropout = 0.5});
  const Tensor x = numbers({5, 2, 12}, f32);
  const auto run = [&](unsigned seed) {
    manual_seed(seed);
    return layer(x, x, x).detach();
  };
  CHECK(same_bits(run(1), run(1)));
  CHECK_FALSE(same_bits(run(1), run(2)));
  layer.eval();
  CHECK(same_bits(run(1), run(2)));
  CHECK(distance(run(1), make(12, 3)(x, x, x)) < 1e-6);
}

TEST_CASE("attention layers: a causal position sees its past alone") {
  MultiheadAttention layer = make(12, 3);
  Tensor x = numbers({6, 2, 12}, f32);
  const Tensor before = layer(x, x, x, Causal::yes).detach();
  fill_(narrow(x, 0, 4, 2), 9);
  const Tensor after = layer(x, x, x, Causal::yes).detach();
  CHECK(same_bits(narrow(before, 0, 0, 4), narrow(after, 0, 0, 4)));
  CHECK_FALSE(same_bits(before, after));
}

TEST_CASE("attention layers: keys that a mask hides change nothing, and a causal mask is Causal::yes") {
  for (const DType dtype : {f32, f64, f16, bf16})
    for (const bool batch_first : {false, true})
      for (const auto& [steps, keys] : {std::pair<std::int64_t, std::int64_t>{5, 7}, {1, 4}, {6, 6}}) {
        INFO(name_of(dtype) << " " << batch_first << " " << steps << " " << keys);
        MultiheadAttention layer = make(12, 3, {.batch_first = batch_first, .tensor = {dtype}});
        const auto turned = [&](const Tensor& x) { return batch_first ? transpose(x, 0, 1) : x; };
        const Tensor q = numbers({steps, 2, 12}, dtype), k = numbers({keys, 2, 12}, dtype, 2);
        const double near = dtype == f64 ? 1e-12 : dtype == f32 ? 1e-5 : dtype == f16 ? 1e-2 : 8e-2;
        const auto call = [&](const Tensor& y, const AttentionMasks& masks) {
          return turned(layer(turned(q), turned(y), turned(y), masks)).detach();
        };
        // Without the last two keys.
        const Tensor fewer = call(narrow(k, 0, 0, keys - 2), {});
        const Tensor hidden = expand(greater_equal(arange(0, keys), keys - 2), {2, keys});
        const Tensor added = masked_fill(zeros({2, keys}, {dtype}), hidden, -1e4);
        CHECK(distance(call(k, {.key_padding_mask = hidden}), fewer) < near);
        CHECK(distance(call(k, {.key_padding_mask = added}), fewer) < near);
        const Tensor pairs = expand(select(hidden, 0, 0), {steps, keys});
        CHECK(distance(call(k, {.attn_mask = pairs}), fewer) < near);
        CHECK(distance(call(k, {.attn_mask = pairs, .key_padding_mask = hidden}), fewer) < near);
        CHECK(distance(call(k, {.attn_mask = expand(pairs, {6, steps, keys})}), fewer) < near);
        CHECK(distance(call(k, {.attn_mask = zeros({steps, keys}, {dtype}), .key_padding_mask = hidden}),
                       fewer) < near);
        CHECK(distance(call(k, {.attn_mask = expand(select(added, 0, 0), {2, 3, steps, keys})}), fewer) <
              near);
        if (steps != keys) continue;
        const Tensor later = triu(ones({steps, keys}, {boolean}), 1);
        CHECK(distance(call(k, {.attn_mask = later}), call(k, {.causal = Causal::yes})) < near);
        CHECK(distance(call(k, {.causal = Causal::yes, .attn_mask = later}), call(k, {Causal::yes})) < near);
      }
}

TEST_CASE("attention layers: a mask is of its sequence alone, of all keys leaves zeros, and has a gradient") {
  MultiheadAttention layer = make(12, 3);
  const Tensor x = numbers({5, 2, 12}, f32);
  const Tensor second = Tensor::from<bool>({0, 0, 0, 0, 0, 0, 1, 1, 0, 0}, {2, 5});
  const Tensor y = layer(x, x, x, {.key_padding_mask = second}).detach(), all = layer(x, x, x).detach();
  CHECK(distance(select(y, 1, 0), select(all, 1, 0)) < 1e-5);
  CHECK(distance(select(y, 1, 1), select(all, 1, 1)) > 1e-2);
  const Tensor none = layer(x, x, x, {.attn_mask = ones({5, 5}, {boolean})}).detach();
  CHECK(distance(none, expand(layer.out_proj.bias.data(), {5, 2, 12})) < 1e-6);

  MultiheadAttention exact = make(4, 2, {.tensor = {f64}});
  const std::vector<Tensor> in = {numbers({3, 2, 4}, f64), numbers({4, 2, 4}, f64, 2),
                                  numbers({3, 4}, f64, 3)};
  const auto call = [&](std::span<const Tensor> t) {
    return exact(t[0], t[1], t[1], {.attn_mask = t[2], .key_padding_mask = zeros({2, 4}, {boolean})});
  };
  CHECK(gradient_error(call, in) < 1e-6);
}

TEST_CASE("attention layers: observers see the masks") {
  struct Observer final : ModuleObserver {
    std::size_t inputs = 0;
    void before_forward(Module&, std::span<Tensor* const> in) override { inputs = in.size(); }
  } observer;
  MultiheadAttention layer = make(12, 3);
  const Subscription scope = layer.observe(observer);
  const Tensor x = numbers({5, 2, 12}, f32), hidden = zeros({2, 5}, {boolean});
  const Tensor y = layer(x, x, x, {.key_padding_mask = hidden});
  CHECK(observer.inputs == 4);
  const AttentionMasks masks{.attn_mask = zeros({5, 5}, {boolean}), .key_padding_mask = hidden};
  CHECK(distance(layer(x, x, x, masks), y) < 1e-6);
  CHECK(observer.inputs == 5);
}

TEST_CASE("attention layers: 16 bits come out as they go in") {
  for (DType low : {f16, bf16}) {
    MultiheadAttention layer = make(12, 3, {.tensor = {low}}), wide = make(12, 3);
    StateDict state = layer.state_dict();
    wide.load_state_dict(state);
    const Tensor x = numbers({5, 2, 12}, low);
    const Tensor y = layer(x, x, x), expected = wide(to(x, f32), to(x, f32), to(x, f32));
    CHECK(y.dtype() == low);
    CHECK(distance(y, expected) < (low == f16 ? 1e-2 : 8e-2));
  }
}

TEST_CASE("attention layers: what does not fit is refused in one line") {
  CHECK(one_line_about(message_of<ValueError>([] { MultiheadAttention(10, 3); }), "MultiheadAttention"));
  CHECK(one_line_about(message_of<ValueError>([] { MultiheadAttention(10, 0); }), "MultiheadAttention"));
  CHECK(one_line_about(message_of<ValueError>([] { MultiheadAttention(9, 3, {.dropout = 1}); }), "dropout"));
  MultiheadAttention layer(9, 3);
  const Tensor x = numbers({5, 2, 9}, f32), rows = numbers({5, 9}, f32), wide = numbers({5, 2, 12}, f32);
  CHECK(one_line_about(message_of<ShapeError>([&] { layer(rows, rows, rows); }), "MultiheadAttention"));
  CHECK(one_line_about(message_of<ShapeError>([&] { layer(x, wide, wide); }), "MultiheadAttention"));
  CHECK(one_line_about(message_of<ShapeError>([&] { layer(x, numbers({5, 3, 9}, f32), x); }), "attention"));
  for (const Shape& shape : {Shape{5}, Shape{5, 2}, Shape{2, 4}})
    CHECK(one_line_about(
        message_of<ShapeError>([&] { layer(x, x, x, {.key_padding_mask = zeros(shape, {boolean})}); }),
        "MultiheadAttention: key_padding_mask"));
  for (const Shape& shape : {Shape{5, 4}, Shape{7, 5, 5}, Shape{1, 2, 3, 5, 5}})
    CHECK(one_line_about(
        message_of<ShapeError>([&] { layer(x, x, x, {.attn_mask = zeros(shape, {boolean})}); }),
        "MultiheadAttention"));
  for (const DType dtype : {i64, f64, f16}) {
    CHECK(
        one_line_about(message_of<DTypeError>([&] { layer(x, x, x, {.attn_mask = zeros({5, 5}, {dtype})}); }),
                       "MultiheadAttention: attn_mask"));
    CHECK(one_line_about(
        message_of<DTypeError>([&] { layer(x, x, x, {.key_padding_mask = zeros({2, 5}, {dtype})}); }),
        "MultiheadAttention: key_padding_mask"));
  }
  CHECK(one_line_about(message_of<DTypeError>([&] { layer(to(x, f16), to(x, f16), to(x, f16)); }),
                       "mat1 and mat2 must have the same dtype"));
}
