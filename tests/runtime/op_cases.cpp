#include "tests/runtime/op_cases.h"

#include <cmath>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/ops/list.h"
#include "runtime/ops/order_free_norm.h"

namespace sherd::test {

std::vector<Tensor> draw(const Case& c, DType dtype, const std::vector<Shape>& shapes, unsigned seed) {
  std::vector<Tensor> list;
  for (std::size_t i = 0; i < c.inputs.size(); ++i) {
    const Input& in = c.inputs[i];
    const unsigned s = seed + 10 * static_cast<unsigned>(i);
    if (in.kind == Kind::number)
      list.push_back(numbers(shapes[i], dtype, s, in.low, in.high));
    else if (in.kind == Kind::mask)
      list.push_back(numbers(shapes[i], boolean, s));
    else
      list.push_back(numbers(shapes[i], i64, s, 0, static_cast<double>(in.bound - 1)));
  }
  return list;
}

std::vector<Shape> small_shapes(const Case& c) {
  std::vector<Shape> list;
  for (const Input& in : c.inputs) list.push_back(in.shape);
  return list;
}

std::vector<Shape> large_shapes(const Case& c) {
  std::vector<Shape> list;
  for (const Input& in : c.inputs) list.push_back(in.large);
  return list;
}

std::vector<Tensor> run(const Case& c, std::span<const Tensor> in) {
  manual_seed(7);
  return c.call(in);
}

bool agree(const Tensor& a, const Tensor& b, Bits bits) {
  if (bits == Bits::exact) return same_bits(a, b);
  const double rounding = a.dtype() == f64 ? 1e-12 : a.dtype() == f32 ? 1e-5 : a.dtype() == f16 ? 4e-3 : 4e-2;
  return a.dtype() == b.dtype() && distance(a, b) <= rounding;
}

void check_agree(std::span<const Tensor> got, std::span<const Tensor> expected, Bits bits) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("output " << i << ": " << to_string(got[i].detach()) << " against "
                   << to_string(expected[i].detach()));
    CHECK(agree(got[i], expected[i], bits));
  }
}

std::vector<Tensor> as(std::span<const Tensor> in, DType dtype) {
  std::vector<Tensor> list;
  for (const Tensor& x : in) list.push_back(is_floating(x.dtype()) ? to(x, dtype) : x);
  return list;
}

std::vector<Tensor> gradients(const Case& c, std::span<const Tensor> in, Lay upstream) {
  std::vector<Tensor> all, leaves;
  for (const Tensor& x : in) {
    all.push_back(x.detach());
    if (is_floating(x.dtype())) leaves.push_back(all.back().requires_grad_());
  }
  const Tensor y = run(c, all)[0];
  const Tensor up = to(to(numbers(y.shape(), f16, 5), y.dtype()), y.device());  // the same in every dtype
  return grad(y, leaves, laid(up, upstream));
}

const std::vector<Case>& cases() {
  static const std::vector<Case> list = [] {
    std::vector<Case> all;
    const auto put = [&](std::string name, std::vector<Input> inputs, Call call, Rules rules = {}) {
      all.push_back({std::move(rules), std::move(name), std::move(inputs), std::move(call)});
    };
    const auto one = [](auto f) {
      return Call([f](std::span<const Tensor> in) { return std::vector<Tensor>{f(in[0])}; });
    };
    const auto two = [](auto f) {
      return Call([f](std::span<const Tensor> in) { return std::vector<Tensor>{f(in[0], in[1])}; });
    };
    const auto three = [](auto f) {
      return Call([f](std::span<const Tensor> in) { return std::vector<Tensor>{f(in[0], in[1], in[2])}; });
    };
    const auto reference = [](auto op) {
      return Call([op](std::span<const Tensor> in) {
        const Tensors out = op.reference(in);
        return std::vector<Tensor>(out.begin(), out.end());
      });
    };
    const Input block{{3, 4, 5}, {7, 300, 41}}, matrix{{6, 7}, {301, 257}}, other{{7, 5}, {257, 130}};
    const std::vector<std::vector<Shape>> any = {{{}}, {{1}}, {{0}}, {{2, 0, 3}}, {{1, 1, 1}}};
    const std::vector<std::vector<Shape>> blocks = {{{1, 1, 1}}, {{0, 4, 5}}, {{3, 4, 1}}};

    // ---- reductions
    put("sum", {block}, one([](const Tensor& x) { return sum(x); }), {.more = any});
    put("sum over the first axis", {block}, one([](const Tensor& x) { return sum(x, {0}); }),
        {.more = blocks});
    put("sum over outer axes", {block}, one([](const Tensor& x) { return sum(x, {0, -1}, Keep::dims); }),
        {.more = blocks});
    put("mean", {block}, one([](const Tensor& x) { return mean(x, {-1}); }),
        {.dtypes = floating_dtypes, .more = blocks});
    put("amax", {block}, one([](const Tensor& x) { return amax(x, {1}); }),
        {.more = {{{1, 1, 1}}, {{0, 2, 2}}}});
    put("amin", {block}, one([](const Tensor& x) { return amin(x); }), {.more = {{{}}, {{1}}}});
    put("argmax", {block}, one([](const Tensor& x) { return argmax(x, 1, Keep::dims); }),
        {.gradients = false, .more = {{{1, 1, 1}}, {{0, 2, 2}}}});
    put("order_free_norm", {block}, one([](const Tensor& x) { return order_free_norm(std::span(&x, 1)); }),
        {.dtypes = floating_dtypes, .gradients = false, .more = any});
    put("largest_magnitude", {block},
        one([](const Tensor& x) { return apply_many(ops::LargestMagnitude{}, std::span(&x, 1))[0]; }),
        {.dtypes = floating_dtypes, .gradients = false, .more = any});
    put("multinomial", {{{4, 5}, {300, 40}, Kind::number, 0, 0.1, 2}},
        one([](const Tensor& x) { return multinomial(x); }),
        {.dtypes = floating_dtypes, .gradients = false, .more = {{{1}}, {{0, 3}}}});
    for (const Replacement how : {Replacement::with, Replacement::without})
      put(how == Replacement::with ? "multinomial, many" : "multinomial, many without replacement",
          {{{4, 5}, {30, 400}, Kind::number, 0, 0.1, 2}},
          one([how](const Tensor& x) { return multinomial(x, 4, how); }),
          {.dtypes = floating_dtypes, .gradients = false});

    // ---- rows
    put("softmax", {block}, one([](const Tensor& x) { return softmax(x); }),
        {.dtypes = floating_dtypes, .reference = reference(ops::Softmax{}), .more = any});
    put("softmax along the first axis", {block}, one([](const Tensor& x) { return softmax(x, 0); }),
        {.dtypes = floating_dtypes});
    put("log_softmax", {block}, one([](const Tensor& x) { return log_softmax(x); }),
        {.dtypes = floating_dtypes, .reference = reference(ops::Softmax{true}), .more = any});
    const auto norm = [](const Tensor& x, const Tensor& w, const Tensor& b) { return layer_norm(x, w, b); };
    put("layer_norm", {block, {{5}, {41}}, {{5}, {41}}}, three(norm),
        {.dtypes = floating_dtypes,
         .reference = reference(ops::LayerNorm{}),
         .more = {{{0, 5}, {5}, {5}}, {{5}, {5}, {5}}}});
    put("layer_norm, plain", {block}, one([](const Tensor& x) { return layer_norm(x, {}, {}); }),
        {.dtypes = floating_dtypes});
    put("layer_norm that a residual stream goes round", {block, {{5}, {41}}, {{5}, {41}}},
        three([](const Tensor& x, const Tensor& w, const Tensor& b) { return add(x, layer_norm(x, w, b)); }),
        {.dtypes = floating_dtypes, .sixteen = Bits::rounded});
    put("layer_norm without bias", {block, {{5}, {41}}},
        two([](const Tensor& x, const Tensor& w) { return layer_norm(x, w, {}); }),
        {.dtypes = floating_dtypes});
    const Input rows{{3, 4, 5}, {7, 40, 41}};  // few enough for sums over them to be near in any order
    put("rms_norm", {rows, {{5}, {41}}}, two([](const Tensor& x, const Tensor& w) { return rms_norm(x, w); }),
        {.dtypes = floating_dtypes,
         .reference = reference(ops::RmsNorm{}),
         .more = {{{0, 5}, {5}}, {{5}, {5}}, {{3, 1}, {1}}}});
    put("rms_norm, plain", {rows}, one([](const Tensor& x) { return rms_norm(x); }),
        {.dtypes = floating_dtypes});
    put("rms_norm that a residual stream goes round", {rows, {{5}, {41}}},
        two([](const Tensor& x, const Tensor& w) { return add(x, rms_norm(x, w)); }),
        {.dtypes = floating_dtypes, .sixteen = Bits::rounded});
    const std::vector<std::vector<Shape>> channels = {
        {{2, 1}, {1}, {1}}, {{3, 4, 1}, {4}, {4}}, {{2, 4, 2, 3}, {4}, {4}}, {{0, 4, 5}, {4}, {4}}};
    const auto batch = three([](const Tensor& x, const Tensor& w, const Tensor& b) {
      return batch_norm(x, {}, {}, w, b, {.training = true});
    });
    const Call batch_reference = [](std::span<const Tensor> in) {
      const Tensor all[] = {in[0], in[1], in[2], {}, {}, {}};
      return std::vector<Tensor>{ops::BatchNorm{}.reference(all)[0]};
    };
    put("batch_norm", {block, {{4}, {300}}, {{4}, {300}}}, batch,
        {.dtypes = floating_dtypes, .reference = batch_reference, .more = channels});
    put("batch_norm of rows", {matrix, {{7}, {257}}, {{7}, {257}}}, batch,
        {.dtypes = floating_dtypes, .reference = batch_reference});
    put("batch_norm, its statistics", {block}, one([](const Tensor& x) {
          return apply_many(ops::BatchNorm{}, std::vector<Tensor>{x, {}, {}, {}, {}, {}})[2];
        }),
        {.dtypes = floating_dtypes, .gradients = false});
    const Input beside{{3, 4, 5}, {7, 300, 41}};
    for (bool training : {true, false})
      put(training ? "batch_norm of training with a residual and ReLU"
                   : "batch_norm with a residual and ReLU",
          {block, {{4}, {300}}, {{4}, {300}}, beside},
          [training](std::span<const Tensor> in) {
            const TensorOptions o{in[0].dtype(), in[0].device()};
            const Shape c{in[0].size(1)};
            return std::vector<Tensor>{
                batch_norm(in[0], full(c, 0.25, o), full(c, 1.5, o), in[1], in[2],
                           {.training = training, .residual = in[3], .activation = Activation::relu})};
          },
          {.dtypes = floating_dtypes,
           .sixteen = Bits::rounded,
           .more = {{{3, 4, 1}, {4}, {4}, {3, 4, 1}}, {{0, 4, 5}, {4}, {4}, {0, 4, 5}}}});
    put("batch_norm with ReLU", {block, {{4}, {300}}, {{4}, {300}}},
        three([](const Tensor& x, const Tensor& w, const Tensor& b) {
          return batch_norm(x, {}, {}, w, b, {.training = true, .activation = Activation::relu});
        }),
        {.dtypes = floating_dtypes,
         .reference =
             [](std::span<const Tensor> in) {
               const Tensor all[] = {in[0], in[1], in[2], {}, {}, {}};
               return std::vector<Tensor>{ops::BatchNorm{.relu = true}.reference(all)[0]};
             },
         .more = channels});
    put("batch_norm by running statistics", {block, {{4}, {300}}, {{4}, {300}}},
        three([](const Tensor& x, const Tensor& w, const Tensor& b) {
          const TensorOptions o{x.dtype() == f64 ? f64 : f32, x.device()};
          const Shape c{x.size(1)};
          return batch_norm(x, full(c, 0.25, o), full(c, 1.5, o), w, b);
        }),
        {.dtypes = floating_dtypes, .more = channels});
    const Input targets{{6}, {301}, Kind::index, 7};
    for (Reduction r : {Reduction::mean, Reduction::sum, Reduction::none})
      put("cross_entropy " + std::to_string(static_cast<int>(r)), {matrix, targets},
          two([r](const Tensor& x, const Tensor& t) { return cross_entropy(x, t, {r, 3}); }),
          {.dtypes = floating_dtypes,
           .reference = reference(ops::CrossEntropy{r, 3}),
           .more = {{{1, 7}, {1}}}});

    for (Reduction r : {Reduction::mean, Reduction::none})
      put("cross_entropy in wide numbers " + std::to_string(static_cast<int>(r)), {matrix, targets},
          two([r](const Tensor& x, const Tensor& t) {
            return cross_entropy(x, t, {r, 3, LossPrecision::wide});
          }),
          {.dtypes = floating_dtypes,
           .reference = reference(ops::CrossEntropy{r, 3, LossPrecision::wide}),
           .more = {{{1, 7}, {1}}}});
    for (Reduction r : {Reduction::mean, Reduction::sum})
      put("cross_entropy_ " + std::to_string(static_cast<int>(r)), {matrix, targets},
          two([r](const Tensor& x, const Tensor& t) { return cross_entropy_(clone(x), t, {r, 3}); }),
          {.dtypes = floating_dtypes,
           .second_derivative = false,
           .sixteen = Bits::rounded,
           .reference = reference(ops::CrossEntropy{r, 3}),
           .more = {{{1, 7}, {1}}}});
    for (const double smoothing : {0.0, 0.1})
      put("linear_cross_entropy" + std::string(smoothing > 0 ? ", smoothed" : ""),
          {matrix, {{5, 7}, {130, 257}}, {{6}, {301}, Kind::index, 5}},
          three([smoothing](const Tensor& x, const Tensor& w, const Tensor& t) {
            return linear_cross_entropy(x, w, t,
                                        {.ignore_index = 3, .label_smoothing = smoothing, .chunk = 4});
          }),
          {.dtypes = floating_dtypes,
           .layouts = Bits::rounded,
           .sixteen = Bits::rounded,
           .reference = three([smoothing](const Tensor& x, const Tensor& w, const Tensor& t) {
             return cross_entropy(linear(x, w), t, {.ignore_index = 3, .label_smoothing = smoothing});
           }),
           .more = {{{1, 7}, {5, 7}, {1}}}});
    put("cross_entropy of logits that nobody keeps", {matrix, targets},
        two([](const Tensor& x, const Tensor& t) { return cross_entropy(mul(x, 2), t); }),
        {.dtypes = floating_dtypes, .sixteen = Bits::rounded});

    // ---- products
    put("matmul", {matrix, other}, two([](const Tensor& a, const Tensor& b) { return matmul(a, b); }),
        {.dtypes = floating_dtypes,
         .on_cpu = integral_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded,
         .more = {{{1, 1}, {1, 1}},
                  {{0, 3}, {3, 2}},
                  {{2, 0}, {0, 3}},
                  {{2, 3}, {3, 0}},
                  {{4}, {4}},
                  {{4}, {4, 2}},
                  {{2, 4}, {4}},
                  {{2, 3, 0}, {0, 4}},
                  {{0, 3, 2}, {2, 4}}}});
    put("matmul, batched", {{{2, 1, 3, 4}, {3, 1, 40, 30}}, {{5, 4, 2}, {2, 30, 20}}},
        two([](const Tensor& a, const Tensor& b) { return matmul(a, b); }),
        {.dtypes = floating_dtypes,
         .on_cpu = integral_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded,
         .more = {{{0, 1, 2, 3}, {2, 3, 4}}, {{2, 3, 4}, {4, 2}}}});
    const auto transposed = [](bool a, bool b) {
      return [a, b](const Tensor& x, const Tensor& y) { return apply(ops::MatMul{a, b}, x, y); };
    };
    put("matmul, left transposed", {{{7, 6}, {257, 301}}, other}, two(transposed(true, false)),
        {.dtypes = floating_dtypes,
         .on_cpu = integral_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded});
    put("matmul, right transposed", {matrix, {{5, 7}, {130, 257}}}, two(transposed(false, true)),
        {.dtypes = floating_dtypes,
         .on_cpu = integral_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded});
    put("matmul, both transposed", {{{7, 6}, {257, 301}}, {{5, 7}, {130, 257}}}, two(transposed(true, true)),
        {.dtypes = floating_dtypes,
         .on_cpu = integral_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded});
    put("linear", {{{2, 6, 7}, {3, 101, 257}}, {{5, 7}, {130, 257}}, {{5}, {130}}},
        three([](const Tensor& x, const Tensor& w, const Tensor& b) { return linear(x, w, b); }),
        {.dtypes = floating_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded,
         .reference = Call([](std::span<const Tensor> in) {
           const Tensor all[] = {in[0], in[1], in[2], {}};
           return std::vector{ops::Linear{}.reference(all)[0]};
         }),
         .more = {{{7}, {5, 7}, {5}}, {{0, 7}, {5, 7}, {5}}, {{1, 1}, {1, 1}, {1}}}});
    const Call linear_then_gelu =
        three([](const Tensor& x, const Tensor& w, const Tensor& b) { return gelu(linear(x, w, b)); });
    put("linear_gelu", {{{2, 6, 7}, {3, 101, 257}}, {{5, 7}, {130, 257}}, {{5}, {130}}},
        three([](const Tensor& x, const Tensor& w, const Tensor& b) { return linear_gelu(x, w, b); }),
        {.dtypes = floating_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded,
         .reference = linear_then_gelu,
         .more = {{{7}, {5, 7}, {5}}, {{0, 7}, {5, 7}, {5}}, {{1, 1}, {1, 1}, {1}}, {{4, 7}, {0, 7}, {0}}}});
    put("linear_gelu without bias", {{{2, 6, 7}, {3, 101, 257}}, {{5, 7}, {130, 257}}},
        two([](const Tensor& x, const Tensor& w) { return linear_gelu(x, w); }),
        {.dtypes = floating_dtypes, .layouts = Bits::rounded, .sixteen = Bits::rounded});
    put("linear into a residual stream",
        {{{2, 6, 7}, {3, 101, 257}}, {{5, 7}, {130, 257}}, {{2, 6, 5}, {3, 101, 130}}},
        three([](const Tensor& x, const Tensor& w, const Tensor& r) { return linear(x, w, {}, r); }),
        {.dtypes = floating_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded,
         .more = {{{7}, {5, 7}, {5}}, {{0, 7}, {5, 7}, {0, 5}}, {{4, 0}, {5, 0}, {4, 5}}}});
    put("linear into a stream that is normalised",
        {{{2, 6, 7}, {3, 41, 257}}, {{5, 7}, {136, 257}}, {{5}, {136}}},
        three([](const Tensor& x, const Tensor& w, const Tensor& b) {
          const Tensor y = linear(x, w, b);
          return add(y, layer_norm(y, {}, {}));
        }),
        {.dtypes = floating_dtypes, .layouts = Bits::rounded, .sixteen = Bits::rounded});
    put("linear without bias", {{{2, 6, 7}, {3, 101, 257}}, {{5, 7}, {130, 257}}},
        two([](const Tensor& x, const Tensor& w) { return linear(x, w); }),
        {.dtypes = floating_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded,
         .more = {{{0, 7}, {5, 7}}, {{4, 0}, {5, 0}}, {{4, 7}, {0, 7}}}});

    // ---- convolution
    for (const Conv2dOptions o : {Conv2dOptions{}, Conv2dOptions{2, 1}, Conv2dOptions{3, 0}}) {
      const Call direct = three([o](const Tensor& x, const Tensor& w, const Tensor& b) {  // a product a tap
        const std::int64_t n = x.size(0), c = x.size(1), h = x.size(2), v = x.size(3), p = o.padding.down;
        const TensorOptions like{x.dtype(), x.device()};
        const Tensor sides[] = {zeros({n, c, h, p}, like), x, zeros({n, c, h, p}, like)};
        const Tensor wide = cat(sides, 3), edge = zeros({n, c, p, v + 2 * p}, like);
        const Tensor rows[] = {edge, wide, edge}, padded = permute(cat(rows, 2), {0, 2, 3, 1});
        const std::int64_t down = h + 2 * p - w.size(2), across = v + 2 * p - w.size(3);
        Tensor y = b;
        for (std::int64_t i = 0; i < w.size(2); ++i)
          for (std::int64_t j = 0; j < w.size(3); ++j) {
            const Tensor seen = slice(padded, 1, i, i + down + 1, o.stride.down);
            y = add(y,
                    linear(slice(seen, 2, j, j + across + 1, o.stride.down), select(select(w, 3, j), 2, i)));
          }
        return permute(y, {0, 3, 1, 2});
      });
      put(fmt::format("conv2d, stride {}, padding {}", o.stride.down, o.padding.down),
          {{{2, 3, 5, 4}, {3, 5, 40, 31}}, {{4, 3, 3, 2}, {40, 5, 5, 4}}, {{4}, {40}}},
          three([o](const Tensor& x, const Tensor& w, const Tensor& b) { return conv2d(x, w, b, o); }),
          {.dtypes = floating_dtypes,
           .layouts = Bits::rounded,
           .sixteen = Bits::rounded,
           .reference = direct,
           .more = {{{1, 1, 1, 1}, {1, 1, 1, 1}, {1}},
                    {{0, 2, 3, 3}, {4, 2, 3, 2}, {4}},
                    {{2, 1, 3, 7}, {2, 1, 3, 1}, {2}},
                    {{2, 2, 3, 3}, {0, 2, 2, 2}, {0}}}});
    }
    put("conv2d without bias", {{{2, 3, 5, 4}, {3, 5, 40, 31}}, {{4, 3, 3, 2}, {40, 5, 5, 4}}},
        two([](const Tensor& x, const Tensor& w) { return conv2d(x, w); }),
        {.dtypes = floating_dtypes, .layouts = Bits::rounded, .sixteen = Bits::rounded});

    // ---- attention
    const Input heads{{2, 2, 5, 4}, {2, 3, 70, 16}}, keys{{2, 2, 7, 4}, {2, 3, 90, 16}};
    for (bool causal : {false, true})
      for (double p : {0.0, 0.4}) {
        const AttentionOptions options{.causal = causal, .dropout = p};
        const std::string form = std::string(causal ? ", causal" : "") + (p > 0 ? ", dropout" : "");
        put("attention" + form, {heads, keys, keys},
            three([options](const Tensor& q, const Tensor& k, const Tensor& v) {
              return attention(q, k, v, options);
            }),
            {.dtypes = floating_dtypes,
             .f64_by_reference = true,
             .more = {{{1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}},
                      {{0, 2, 3, 4}, {0, 2, 3, 4}, {0, 2, 3, 4}}}});
        put("self_attention" + form, {{{2, 5, 24}, {2, 70, 96}}},
            one([options](const Tensor& x) { return self_attention(x, 2, options); }),
            {.dtypes = floating_dtypes, .f64_by_reference = true, .more = {{{1, 1, 6}}, {{0, 3, 12}}}});
      }
    put("attention, its reference", {heads, keys, keys},
        three([](const Tensor& q, const Tensor& k, const Tensor& v) {
          return attention(q, k, v, {.causal = true, .scale = 0.3});
        }),
        {.dtypes = floating_dtypes,
         .f64_by_reference = true,
         .reference = reference(ops::Attention{{0.3, true}})});
    const Input shared{{2, 1, 7, 4}, {2, 1, 90, 16}}, pairs{{2, 1, 5, 7}, {2, 1, 70, 90}, Kind::mask};
    for (double p : {0.0, 0.4}) {
      const ops::MaskedAttention op{{0.3, true, p, {7, 0}}};
      put("attention with a mask and shared heads, its op" + std::string(p > 0 ? ", dropout" : ""),
          {heads, shared, shared, pairs},
          Call([op](std::span<const Tensor> in) { return std::vector{apply_many(op, in)[0]}; }),
          {.dtypes = floating_dtypes,
           .layouts = Bits::rounded,
           .sixteen = Bits::rounded,
           .reference = reference(op)});
    }

    // ---- moving and picking
    const auto index = [](Shape s, Shape large, std::int64_t bound) {
      return Input{s, large, Kind::index, bound};
    };
    put("embedding", {matrix, index({2, 3}, {90, 70}, 6)},
        two([](const Tensor& t, const Tensor& i) { return embedding(t, i); }),
        {.dtypes = floating_dtypes, .more = {{{6, 1}, {1}}, {{6, 7}, {0}}, {{6, 7}, {}}, {{6}, {3}}}});
    put("index_select", {block, index({6}, {500}, 4)},
        two([](const Tensor& x, const Tensor& i) { return index_select(x, 1, i); }),
        {.dtypes = floating_dtypes, .more = {{{1, 4, 1}, {2}}}});
    put("gather", {matrix, index({6, 3}, {301, 90}, 7)},
        two([](const Tensor& x, const Tensor& i) { return gather(x, i); }),
        {.more = {{{1, 7}, {1, 1}}, {{0, 7}, {0, 2}}}});
    put("topk", {matrix}, one([](const Tensor& x) { return topk(x, 3).values; }),
        {.more = {{{1, 3}}, {{0, 4}}}});
    put("topk positions", {matrix}, one([](const Tensor& x) { return topk(x, 3).indices; }),
        {.gradients = false});
    put("cat", {block, {{3, 2, 5}, {7, 150, 41}}}, two([](const Tensor& a, const Tensor& b) {
          const Tensor parts[] = {a, b, a};
          return cat(parts, 1);
        }),
        {.more = {{{1, 1, 1}, {1, 1, 1}}, {{3, 0, 5}, {3, 2, 5}}, {{0, 2, 1}, {0, 3, 1}}}});
    put("stack", {matrix, matrix}, two([](const Tensor& a, const Tensor& b) {
          const Tensor parts[] = {a, b};
          return stack(parts, -1);
        }),
        {.more = {{{}, {}}, {{0}, {0}}, {{1}, {1}}}});
    put("split", {block}, Call([](std::span<const Tensor> in) { return split(in[0], 2, 2); }),
        {.more = {{{0, 1, 3}}}});
    put("where", {{{3, 1, 5}, {7, 1, 41}, Kind::mask}, block, {{4, 5}, {300, 41}}},
        three([](const Tensor& m, const Tensor& a, const Tensor& b) { return where(m, a, b); }),
        {.more = {{{}, {}, {}}, {{0}, {0}, {0}}, {{2}, {}, {1}}}});
    put("masked_fill", {block, {{4, 5}, {300, 41}, Kind::mask}},
        two([](const Tensor& x, const Tensor& m) { return masked_fill(x, m, 1); }));
    put("clone", {block}, one([](const Tensor& x) { return clone(x); }), {.more = any});
    put("contiguous", {block}, one([](const Tensor& x) { return contiguous(x); }), {.more = any});
    for (DType to_dtype : {f64, i32, boolean})
      put("to " + std::string(name_of(to_dtype)), {block},
          one([to_dtype](const Tensor& x) { return to(x, to_dtype); }),
          {.gradients = to_dtype == f64, .more = any});
    put("to another device and back", {block}, one([](const Tensor& x) {
          return to(to(x, x.device() == Device::cpu(1) ? Device::cpu(0) : Device::cpu(1)), x.device());
        }),
        {.more = any});
    put("copy_", {block, {{4, 1}, {300, 1}}},
        two([](const Tensor& x, const Tensor& y) { return copy_(clone(x), y); }),
        {.more = {{{}, {}}, {{0}, {1}}}});
    put("fill_", {block}, one([](const Tensor& x) { return fill_(clone(x), 1); }), {.more = any});
    put("bernoulli", {{{3, 4, 5}, {7, 300, 41}, Kind::number, 0, 0, 1}},
        one([](const Tensor& x) { return apply(ops::Bernoulli{{7, 0}}, x); }),
        {.dtypes = floating_dtypes, .gradients = false, .more = any});
    put("dropout", {block}, one([](const Tensor& x) { return dropout(x, 0.3); }),
        {.dtypes = floating_dtypes, .more = any});

    // ---- views
    put("reshape", {block}, one([](const Tensor& x) { return reshape(x, {x.size(0), -1}); }),
        {.more = {{{1, 1, 1}}, {{2, 3, 0}}}});
    put("permute", {block}, one([](const Tensor& x) { return permute(x, {2, 0, -2}); }), {.more = blocks});
    put("transpose", {block}, one([](const Tensor& x) { return transpose(x, 0, -1); }), {.more = blocks});
    put("expand", {{{4, 1}, {300, 1}}}, one([](const Tensor& x) { return expand(x, {2, -1, 3}); }),
        {.more = {{{0, 1}}, {{1, 1}}}});
    put("slice", {block}, one([](const Tensor& x) { return slice(x, 1, 1, -1, 2); }),
        {.more = {{{1, 1, 1}}, {{2, 0, 1}}}});
    put("narrow", {block}, one([](const Tensor& x) { return narrow(x, 2, 1, 2); }));
    put("select", {block}, one([](const Tensor& x) { return select(x, 1, -2); }));
    put("squeeze", {{{4, 1}, {300, 1}}}, one([](const Tensor& x) { return squeeze(x, -1); }),
        {.more = {{{0, 1}}, {{1, 1}}}});
    put("unsqueeze", {block}, one([](const Tensor& x) { return unsqueeze(x, -1); }), {.more = any});
    put("flatten", {block}, one([](const Tensor& x) { return flatten(x, 1); }), {.more = blocks});
    for (Case& made : made_cases()) all.push_back(std::move(made));
    return all;
  }();
  return list;
}

namespace {

std::vector<Tensor> on(Device device, std::span<const Tensor> in) {
  std::vector<Tensor> list;
  for (const Tensor& x : in) list.push_back(to(x.detach(), device));
  return list;
}

/// Of sums in another order (products), the rounding is that of their largest terms.
double scale_of(const Tensor& x, Bits bits) {
  double largest = 1;
  if (bits == Bits::rounded)
    for (double v : doubles(x))
      if (std::isfinite(v)) largest = std::max(largest, std::abs(v));
  return largest;
}

void check_near(std::span<const Tensor> got, std::span<const Tensor> expected, Device device, Bits bits) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    REQUIRE(got[i].defined() == expected[i].defined());
    if (!got[i].defined()) continue;
    CHECK(got[i].device() == device);
    CHECK(got[i].dtype() == expected[i].dtype());
    const DType d = got[i].dtype();
    const double rounding = d == f64 ? 1e-9 : d == f32 ? 2e-5 : d == f16 ? 1e-2 : d == bf16 ? 8e-2 : 0;
    INFO("output " << i << ": " << to_string(got[i].detach()) << " against "
                   << to_string(expected[i].detach()));
    CHECK(distance(got[i], expected[i]) <= rounding * scale_of(expected[i], bits));
  }
}

/// First gradients under create_graph, and those of their sum.
std::vector<Tensor> second_gradients(const Case& c, std::span<const Tensor> in) {
  std::vector<Tensor> all, leaves;
  for (const Tensor& x : in) {
    all.push_back(x.detach());
    if (is_floating(x.dtype())) leaves.push_back(all.back().requires_grad_());
  }
  const Tensor y = run(c, all)[0];
  const Tensor up = to(to(numbers(y.shape(), f16, 5), y.dtype()), y.device());
  std::vector<Tensor> first = grad(y, leaves, up, {.create_graph = true});
  Tensor total;
  for (const Tensor& g : first)
    if (g.defined() && g.requires_grad())
      total = total.defined() ? add(total, sum(square(g))) : sum(square(g));
  if (total.defined())
    for (Tensor& g : grad(total, leaves)) first.push_back(std::move(g));
  return first;
}

}  // namespace

void check_device(Device device) {
  for_each_case_and_dtype([&](const Case& c, DType dtype) {
    std::vector<std::vector<Shape>> shapes = c.more;
    shapes.push_back(small_shapes(c));
    if (dtype == f32 || dtype == bf16) shapes.push_back(large_shapes(c));
    for (const auto& s : shapes) {
      INFO(fmt::format("{}", fmt::join(s, " ")));
      const std::vector<Tensor> in = draw(c, dtype, s);
      for (Lay lay : {Lay::dense, Lay::holes}) {
        const std::vector<Tensor> there = laid(on(device, in), lay);
        check_near(run(c, there), run(c, in), device, c.layouts);
        if (c.gradients && is_floating(dtype))
          check_near(gradients(c, there, lay), gradients(c, in, Lay::dense), device, c.layouts);
      }
      if (c.gradients && c.second_derivative && dtype == f64)
        check_near(second_gradients(c, on(device, in)), second_gradients(c, in), device, c.layouts);
    }
  });
}

}  // namespace sherd::test
