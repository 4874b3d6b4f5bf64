#include "tests/bench/op_rows.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "runtime/apply.h"
#include "runtime/ops/listing.h"
#include "runtime/ops/optimizer_steps.h"

namespace sherd::bench {

namespace {

using Call = std::function<Tensor(const List&)>;
using Make = std::function<List(std::int64_t, DType)>;

Tensor normal(Shape shape, DType dtype) { return to(randn(shape), dtype); }
Tensor positive(Shape shape, DType dtype) { return to(rand(shape, {}, 0.1, 2), dtype); }

// Up to 4096 rows of at least 256 numbers, square matrices, and images of 16 channels and 32 x 32.
Shape rows(std::int64_t n) {
  const std::int64_t count = std::clamp<std::int64_t>(n / 256, 1, 4096);
  return {count, n / count};
}
Shape short_rows(std::int64_t n) { return {std::max<std::int64_t>(1, n / 256), 256}; }
std::int64_t side(std::int64_t n) { return static_cast<std::int64_t>(std::sqrt(static_cast<double>(n))); }
Shape images(std::int64_t n) { return {std::max<std::int64_t>(1, n / (16 * 32 * 32)), 16, 32, 32}; }

List one(std::int64_t n, DType d) { return {normal({n}, d)}; }
List one_positive(std::int64_t n, DType d) { return {positive({n}, d)}; }
List two(std::int64_t n, DType d) { return {normal({n}, d), normal({n}, d)}; }
List two_positive(std::int64_t n, DType d) { return {positive({n}, d), positive({n}, d)}; }
List table(std::int64_t n, DType d) { return {normal(rows(n), d)}; }
List square_one(std::int64_t n, DType d) { return {normal({side(n), side(n)}, d)}; }
List square_pair(std::int64_t n, DType d) {
  return {normal({side(n), side(n)}, d), normal({side(n), side(n)}, d)};
}
List normalised(std::int64_t n, DType d) {
  return {normal(rows(n), d), normal({rows(n)[1]}, d), normal({rows(n)[1]}, d)};
}
List heads(std::int64_t n, DType d) {  // (B, 4, T, 32)
  const std::int64_t t = n <= 1024 ? 8 : 128, b = std::max<std::int64_t>(1, n / (4 * t * 32));
  return {normal({b, 4, t, 32}, d), normal({b, 4, t, 32}, d), normal({b, 4, t, 32}, d)};
}
List classes(std::int64_t n, DType d) { return {normal(rows(n), d), randint(0, rows(n)[1], {rows(n)[0]})}; }
List picks(std::int64_t n, DType d) { return {normal(rows(n), d), randint(0, rows(n)[0], {rows(n)[0]})}; }
List image(std::int64_t n, DType d) { return {normal(images(n), d)}; }
Make convolution(std::int64_t channels, std::int64_t kernel, std::int64_t groups) {
  return [=](std::int64_t n, DType d) -> List {
    const std::int64_t b = std::max<std::int64_t>(1, n / (channels * 256));
    return {normal({b, channels, 16, 16}, d), normal({channels, channels / groups, kernel, kernel}, d)};
  };
}

// 64 steps of 128 features: what comes in, the weights and the biases.
Make sequences(std::int64_t gates) {
  return [=](std::int64_t n, DType d) -> List {
    const std::int64_t b = std::max<std::int64_t>(1, n / (64 * 128)), rows = gates * 128;
    return {normal({64, b, 128}, d), normal({rows, 128}, d), normal({rows, 128}, d), normal({rows}, d),
            normal({rows}, d)};
  };
}
Call recurrent_layer(ops::RecurrentCell cell) {
  return [=](const List& in) {
    const Tensor start = zeros({in[0].size(1), 128}, {in[0].dtype()});
    return ops::recurrent({cell}, linear(in[0], in[1], in[3]), in[2], in[4], start,
                          cell == ops::RecurrentCell::lstm ? start : Tensor())
        .hidden;
  };
}

Make heads_and(Shape (*shape)(std::int64_t batch, std::int64_t length)) {
  return [=](std::int64_t n, DType d) {
    List in = heads(n, d);
    in.push_back(greater(randn(shape(in[0].size(0), in[0].size(2))), -1));
    return in;
  };
}
List products(std::int64_t n, DType d) {
  return {normal(short_rows(n), d), normal({256, 256}, d), normal({256}, d)};
}
Make of_linear(List (*more)(std::int64_t, DType)) {
  return [=](std::int64_t n, DType d) {
    List in = products(n, d);
    for (Tensor& x : more(n, d)) in.push_back(std::move(x));
    return in;
  };
}
Tensor attend_masked(const List& in) { return attention(in[0], in[1], in[2], {.mask = in[3]}); }

/// Of one parameter, and its gradient, in f32: `state` tensors of its shape follow, and a count where
/// `counts`.
template <class O>
OpRow step_row(std::string name, O op, int state, bool counts) {
  const auto make = [=](std::int64_t n, DType) {
    List in{Tensor::scalar(0.001, {DType::f64})};
    for (int i = 0; i < 2 + state; ++i) in.push_back(rand({n}));
    if (counts) in.push_back(Tensor::scalar(1, {DType::f64}));
    return in;
  };
  const auto call = [op](const List& in) { return apply_many(op, std::span(in))[0]; };
  return {std::move(name), make, call, false};
}
void put_steps(std::vector<OpRow>& list) {
  list.push_back(step_row("adamw", ops::AdamStep{.weight_decay = 0.01, .decoupled = true}, 2, true));
  list.push_back(step_row("sgd", ops::SgdStep{.momentum = 0.9}, 1, true));
  list.push_back(step_row("rmsprop", ops::RmspropStep{}, 1, false));
  list.push_back(step_row("lion", ops::LionStep{.weight_decay = 0.01}, 1, false));
  list.push_back(step_row("adagrad", ops::AdagradStep{}, 1, true));
}

std::vector<OpRow> written_rows() {
  std::vector<OpRow> list;
  const auto put = [&](std::string name, Make make, Call call, bool gradient = true) {
    list.push_back({std::move(name), std::move(make), std::move(call), gradient});
  };
  const auto unary = [&](std::string name, Tensor (*f)(const Tensor&), bool gradient = true) {
    put(std::move(name), one, [f](const List& in) { return f(in[0]); }, gradient);
  };
  unary("neg", neg), unary("abs", abs), unary("exp", exp), unary("sin", sin), unary("cos", cos);
  unary("tanh", tanh), unary("sigmoid", sigmoid), unary("erf", erf), unary("relu", relu), unary("silu", silu);
  unary("square", square), unary("floor", floor, false), unary("isfinite", isfinite, false);
  const auto of_positive = [&](std::string name, Tensor (*f)(const Tensor&)) {
    put(std::move(name), one_positive, [f](const List& in) { return f(in[0]); });
  };
  of_positive("log", log), of_positive("log1p", log1p), of_positive("sqrt", sqrt);
  of_positive("rsqrt", rsqrt), of_positive("reciprocal", reciprocal);
  put("gelu", one, [](const List& in) { return gelu(in[0]); });
  put("gelu_tanh", one, [](const List& in) { return gelu(in[0], GeluForm::tanh); });
  put("leaky_relu", one, [](const List& in) { return leaky_relu(in[0]); });
  put("clamp", one, [](const List& in) { return clamp(in[0], -1, 1); });
  put("pow2", one, [](const List& in) { return pow(in[0], 2); });
  put("pow3", one, [](const List& in) { return pow(in[0], 3); });
  put("pow_half", one_positive, [](const List& in) { return pow(in[0], 0.5); });
  put("pow_tensor", two_positive, [](const List& in) { return pow(in[0], in[1]); });
  put("add", two, [](const List& in) { return add(in[0], in[1]); });
  put("sub", two, [](const List& in) { return sub(in[0], in[1]); });
  put("mul", two, [](const List& in) { return mul(in[0], in[1]); });
  put("div", two_positive, [](const List& in) { return div(in[0], in[1]); });
  put("maximum", two, [](const List& in) { return maximum(in[0], in[1]); });
  put("add_number", one, [](const List& in) { return add(in[0], 2); });
  put("mul_number", one, [](const List& in) { return mul(in[0], 2); });
  put(
      "add_row",
      [](std::int64_t n, DType d) -> List { return {normal(rows(n), d), normal({rows(n)[1]}, d)}; },
      [](const List& in) { return add(in[0], in[1]); });
  put(
      "add_column",
      [](std::int64_t n, DType d) -> List { return {normal(rows(n), d), normal({rows(n)[0], 1}, d)}; },
      [](const List& in) { return add(in[0], in[1]); });
  put("less", two, [](const List& in) { return less(in[0], in[1]); }, false);
  put("equal_number", one, [](const List& in) { return equal(in[0], 0); }, false);
  put("where", two, [](const List& in) { return where(greater(in[0], 0), in[0], in[1]); });
  put("masked_fill", two, [](const List& in) { return masked_fill(in[0], greater(in[1], 0), 0); });
  put("to_other", one,
      [](const List& in) { return to(in[0], in[0].dtype() == DType::f32 ? DType::bf16 : DType::f32); });
  put("clone", one, [](const List& in) { return clone(in[0]); });
  put(
      "transpose_copy", [](std::int64_t n, DType d) -> List { return {normal({side(n), side(n)}, d)}; },
      [](const List& in) { return contiguous(transpose(in[0], 0, 1)); });
  put("cat", table, [](const List& in) { return cat({in[0], in[0]}, 1); });
  put("flip", table, [](const List& in) { return flip(in[0], {1}); });
  put("roll", table, [](const List& in) { return roll(in[0], 3, 1); });
  put("pad", table, [](const List& in) { return pad(in[0], {1, 2}); });
  put("repeat", table, [](const List& in) { return repeat(in[0], {2, 1}); });
  put(
      "tril", [](std::int64_t n, DType d) -> List { return {normal({side(n), side(n)}, d)}; },
      [](const List& in) { return tril(in[0]); });
  put("embedding", picks, [](const List& in) { return embedding(in[0], in[1]); });
  put("index_select", picks, [](const List& in) { return index_select(in[0], 0, in[1]); });
  put("gather", classes, [](const List& in) { return gather(in[0], 1, unsqueeze(in[1], 1)); });
  put(
      "one_hot",
      [](std::int64_t n, DType) -> List { return {randint(0, 16, {std::max<std::int64_t>(1, n / 16)})}; },
      [](const List& in) { return one_hot(in[0], 16); }, false);
  const auto positions = [](Shape shape) { return randint(0, shape[0], shape); };
  const auto line = [=](std::int64_t n, DType d) -> List {
    return {normal({n}, d), positions({n}), normal({n}, d)};
  };
  const auto square_at = [=](std::int64_t n, DType d) -> List {
    return {normal({side(n), side(n)}, d), positions({side(n), side(n)}), normal({side(n), side(n)}, d)};
  };
  const auto without_values = [](const Make& make) -> Make {
    return [=](std::int64_t n, DType d) {
      List in = make(n, d);
      in.pop_back();
      return in;
    };
  };
  put("gather_line", without_values(line), [](const List& in) { return gather(in[0], in[1]); });
  put("gather_axis0", without_values(square_at), [](const List& in) { return gather(in[0], 0, in[1]); });
  put("gather_axis1", without_values(square_at), [](const List& in) { return gather(in[0], 1, in[1]); });
  put("scatter_line", line, [](const List& in) { return scatter(in[0], 0, in[1], in[2]); });
  put("scatter_axis0", square_at, [](const List& in) { return scatter(in[0], 0, in[1], in[2]); });
  put("scatter_axis1", square_at, [](const List& in) { return scatter(in[0], 1, in[1], in[2]); });
  put("scatter_add_line", line, [](const List& in) { return scatter_add(in[0], 0, in[1], in[2]); });
  put("scatter_add_axis1", square_at, [](const List& in) { return scatter_add(in[0], 1, in[1], in[2]); });
  const auto masked = [](std::int64_t n, DType d) -> List {
    return {normal({n}, d), greater(randn({n}), 0)};
  };
  put("mask_read", masked, [](const List& in) { return masked_select(in[0], in[1]); });
  put(
      "mask_write", masked,
      [](const List& in) {
        in[0][in[1]] = 0;
        return in[0];
      },
      false);
  put(
      "multinomial", [](std::int64_t n, DType d) -> List { return {positive({256}, d), ones({n})}; },
      [](const List& in) { return multinomial(in[0], in[1].numel()); }, false);
  put("topk", table, [](const List& in) { return topk(in[0], 8).values; });
  put("sort", table, [](const List& in) { return sort(in[0]).values; });
  put("argmax", table, [](const List& in) { return argmax(in[0], 1); }, false);
  put("max_axis", table, [](const List& in) { return max(in[0], 1).values; });
  put("sum_all", one, [](const List& in) { return sum(in[0]); });
  put("sum_rows", table, [](const List& in) { return sum(in[0], {1}); });
  put("sum_columns", table, [](const List& in) { return sum(in[0], {0}); });
  put("mean", one, [](const List& in) { return mean(in[0]); });
  put("amax", table, [](const List& in) { return amax(in[0], {1}); });
  put("var", table, [](const List& in) { return var(in[0], {1}); });
  put("std", table, [](const List& in) { return stddev(in[0], {1}); });
  put("norm", one, [](const List& in) { return norm(in[0]); });
  put(
      "prod", [](std::int64_t n, DType d) -> List { return {positive(rows(n), d)}; },
      [](const List& in) { return prod(in[0], {1}); });
  put("cumsum", table, [](const List& in) { return cumsum(in[0], 1); });
  put("logsumexp", table, [](const List& in) { return logsumexp(in[0], {1}); });
  put(
      "any", [](std::int64_t n, DType) -> List { return {greater(randn(rows(n)), 0)}; },
      [](const List& in) { return any(in[0], {1}); }, false);
  put("amax_all", one, [](const List& in) { return amax(in[0]); });
  put("norm_1", one, [](const List& in) { return norm(in[0], 1); });
  put(
      "prod_all", [](std::int64_t n, DType d) -> List { return {add(mul(normal({n}, d), 1e-4), 1)}; },
      [](const List& in) { return prod(in[0]); });
  put("softmax", table, [](const List& in) { return softmax(in[0]); });
  put("log_softmax", table, [](const List& in) { return log_softmax(in[0]); });
  put("layer_norm", normalised, [](const List& in) { return layer_norm(in[0], in[1], in[2]); });
  put(
      "rms_norm",
      [](std::int64_t n, DType d) -> List { return {normal(rows(n), d), normal({rows(n)[1]}, d)}; },
      [](const List& in) { return rms_norm(in[0], in[1]); });
  put(
      "group_norm",
      [](std::int64_t n, DType d) -> List {
        return {normal(images(n), d), normal({16}, d), normal({16}, d)};
      },
      [](const List& in) { return group_norm(in[0], 4, in[1], in[2]); });
  put("dropout", one, [](const List& in) { return dropout(in[0], 0.5); });
  put("cross_entropy", classes, [](const List& in) { return cross_entropy(in[0], in[1]); });
  put("nll_loss", classes, [](const List& in) { return nll_loss(in[0], in[1]); });
  put("mse_loss", two, [](const List& in) { return mse_loss(in[0], in[1]); });
  put("mse_loss_none", two, [](const List& in) { return mse_loss(in[0], in[1], Reduction::none); });
  put("l1_loss", two, [](const List& in) { return l1_loss(in[0], in[1]); });
  put("huber_loss", two, [](const List& in) { return huber_loss(in[0], in[1]); });
  put(
      "bce_with_logits", [](std::int64_t n, DType d) -> List { return {normal({n}, d), to(rand({n}), d)}; },
      [](const List& in) { return bce_with_logits(in[0], in[1]); });
  put("matmul", square_pair, [](const List& in) { return matmul(in[0], in[1]); });
  put(
      "matmul_batch",
      [](std::int64_t n, DType d) -> List {
        const std::int64_t b = std::max<std::int64_t>(1, n / 4096), s = std::min<std::int64_t>(64, side(n));
        return {normal({b, s, s}, d), normal({b, s, s}, d)};
      },
      [](const List& in) { return matmul(in[0], in[1]); });
  put("linear", products, [](const List& in) { return linear(in[0], in[1], in[2]); });
  put("linear_gelu", products, [](const List& in) { return linear_gelu(in[0], in[1], in[2]); });
  put("rotary", heads, [](const List& in) { return rotary(in[0]); });
  put("attention", heads, [](const List& in) { return attention(in[0], in[1], in[2]); });
  put("attention_causal", heads,
      [](const List& in) { return attention(in[0], in[1], in[2], {.causal = true}); });
  put("conv2d_3x3", convolution(64, 3, 1),
      [](const List& in) { return conv2d(in[0], in[1], {}, {.padding = 1}); });
  put("conv2d_1x1", convolution(64, 1, 1), [](const List& in) { return conv2d(in[0], in[1]); });
  put("conv2d_groups", convolution(64, 3, 4),
      [](const List& in) { return conv2d(in[0], in[1], {}, {.padding = 1, .groups = 4}); });
  put("conv2d_depthwise", convolution(64, 3, 64),
      [](const List& in) { return conv2d(in[0], in[1], {}, {.padding = 1, .groups = 64}); });
  put("conv2d_stride2", convolution(64, 3, 1),
      [](const List& in) { return conv2d(in[0], in[1], {}, {.stride = 2, .padding = 1}); });
  put("lstm", sequences(4), recurrent_layer(ops::RecurrentCell::lstm));
  put("gru", sequences(3), recurrent_layer(ops::RecurrentCell::gru));
  put("rnn", sequences(1), recurrent_layer(ops::RecurrentCell::tanh));
  put("max_pool2d", image, [](const List& in) { return max_pool2d(in[0], 2); });
  put("avg_pool2d", image, [](const List& in) { return avg_pool2d(in[0], 2); });
  put(
      "batch_norm",
      [](std::int64_t n, DType d) -> List {
        return {normal(images(n), d), normal({16}, d), normal({16}, d)};
      },
      [](const List& in) {
        const TensorOptions like{in[0].dtype()};
        return batch_norm(in[0], zeros({16}, like), ones({16}, like), in[1], in[2], {.training = true});
      });
  put(
      "batch_norm_residual_relu",
      [](std::int64_t n, DType d) -> List {
        return {normal(images(n), d), normal({16}, d), normal({16}, d), normal(images(n), d)};
      },
      [](const List& in) {
        const TensorOptions like{in[0].dtype()};
        return batch_norm(in[0], zeros({16}, like), ones({16}, like), in[1], in[2],
                          {.training = true, .residual = in[3], .activation = Activation::relu});
      });
  put("attention_keys", heads_and([](std::int64_t b, std::int64_t t) -> Shape { return {b, 1, 1, t}; }),
      attend_masked, true);
  put("attention_pairs", heads_and([](std::int64_t, std::int64_t t) -> Shape { return {t, t}; }),
      attend_masked, true);
  put(
      "attention_bias",
      [](std::int64_t n, DType d) {
        List in = heads(n, d);
        in.push_back(normal({in[0].size(2), in[0].size(2)}, d));
        return in;
      },
      [](const List& in) { return attention(in[0], in[1], in[2], {.mask = in[3].detach()}); });
  put(
      "attention_grouped",
      [](std::int64_t n, DType d) {
        List in = heads(n, d);
        for (std::size_t i = 1; i < 3; ++i) in[i] = contiguous(narrow(in[i], 1, 0, 1));
        return in;
      },
      [](const List& in) { return attention(in[0], in[1], in[2], {.causal = true}); });
  put(
      "conv1d",
      [](std::int64_t n, DType d) -> List {
        return {normal({std::max<std::int64_t>(1, n / (64 * 256)), 64, 256}, d), normal({64, 64, 3}, d)};
      },
      [](const List& in) { return conv1d(in[0], in[1], {}, {.padding = 1}); });
  put("conv2d_dilated", convolution(64, 3, 1),
      [](const List& in) { return conv2d(in[0], in[1], {}, {.padding = 2, .dilation = 2}); });
  put("conv_transpose2d", convolution(64, 2, 1),
      [](const List& in) { return conv_transpose2d(in[0], in[1], {}, {.stride = 2}); });
  put("interpolate_nearest", image, [](const List& in) { return interpolate(in[0], {.scale = 2}); });
  put("interpolate_bilinear", image,
      [](const List& in) { return interpolate(in[0], {.scale = 2, .mode = Interpolation::bilinear}); });
  put("adaptive_avg_pool2d", image, [](const List& in) { return adaptive_avg_pool2d(in[0], 4, 4); });
  put("max_pool2d_overlap", image,
      [](const List& in) { return max_pool2d(in[0], 3, {.stride = 2, .padding = 1}); });
  put(
      "cumprod", [](std::int64_t n, DType d) -> List { return {positive(rows(n), d)}; },
      [](const List& in) { return cumprod(in[0], 1); });
  put("cumsum_columns", table, [](const List& in) { return cumsum(in[0], 0); });
  put("sort_columns", table, [](const List& in) { return sort(in[0], 0).values; });
  put("argsort", table, [](const List& in) { return argsort(in[0]); }, false);
  put(
      "nonzero", [](std::int64_t n, DType) -> List { return {greater(randn({n}), 0)}; },
      [](const List& in) { return nonzero(in[0]); }, false);
  put("index_rows", picks, [](const List& in) { return index(in[0], {in[1]}); });
  put(
      "index_put",
      [](std::int64_t n, DType d) {
        List in = picks(n, d);
        in.push_back(normal(rows(n), d));
        return in;
      },
      [](const List& in) { return index_put_(in[0], {in[1]}, in[2]); }, false);
  put(
      "slice_write", square_pair,
      [](const List& in) {
        const std::int64_t half = in[0].size(0) / 2;
        copy_(narrow(in[0], 1, 0, half), narrow(in[1], 1, 0, half));
        return in[0];
      },
      false);
  put("amax_columns", table, [](const List& in) { return amax(in[0], {0}); });
  put("max_columns", table, [](const List& in) { return max(in[0], 0).values; });
  put("norm_rows", table, [](const List& in) { return norm(in[0], 2, {1}); });
  put("var_columns", table, [](const List& in) { return var(in[0], {0}); });
  put("logsumexp_columns", table, [](const List& in) { return logsumexp(in[0], {0}); });
  put("softmax_columns", table, [](const List& in) { return softmax(in[0], 0); });
  put(
      "prod_columns", [](std::int64_t n, DType d) -> List { return {positive(rows(n), d)}; },
      [](const List& in) { return prod(in[0], {0}); });
  put(
      "all", [](std::int64_t n, DType) -> List { return {greater(randn(rows(n)), 0)}; },
      [](const List& in) { return all(in[0], {1}); }, false);
  put("diagonal", square_one, [](const List& in) { return clone(diagonal(in[0])); });
  put("permute_copy", heads, [](const List& in) { return contiguous(permute(in[0], {0, 2, 1, 3})); });
  put("stack", table, [](const List& in) { return stack({in[0], in[0]}, 0); });
  put(
      "expand_copy",
      [](std::int64_t n, DType d) -> List { return {normal({rows(n)[0], 1}, d), normal(rows(n), d)}; },
      [](const List& in) { return contiguous(expand(in[0], in[1].shape())); });
  put("full", one, [](const List& in) { return full(in[0].shape(), 2, {in[0].dtype()}); }, false);
  put("fill", one, [](const List& in) { return fill_(in[0], 2); }, false);
  put("arange", one, [](const List& in) { return arange(0, in[0].numel(), 1, {DType::i64}); }, false);
  put("rand", one, [](const List& in) { return rand(in[0].shape(), {in[0].dtype()}); }, false);
  put("randn", one, [](const List& in) { return randn(in[0].shape(), {in[0].dtype()}); }, false);
  put("randint", one, [](const List& in) { return randint(0, 1000, in[0].shape()); }, false);
  put("randperm", one, [](const List& in) { return randperm(in[0].numel()); }, false);
  put(
      "bernoulli", [](std::int64_t n, DType d) -> List { return {to(rand({n}), d)}; },
      [](const List& in) { return bernoulli(in[0]); }, false);
  put(
      "multinomial_once", [](std::int64_t n, DType d) -> List { return {positive({n}, d)}; },
      [](const List& in) { return multinomial(in[0], 8, Replacement::without); }, false);
  put(
      "multinomial_rows", [](std::int64_t n, DType d) -> List { return {positive(rows(n), d)}; },
      [](const List& in) { return multinomial(in[0]); }, false);
  put("masked_fill_", masked, [](const List& in) { return masked_fill_(in[0], in[1], 0); }, false);
  put("add_", two, [](const List& in) { return add_(in[0], in[1]); }, false);
  put("relu_", one, [](const List& in) { return relu_(in[0]); }, false);
  put(
      "bce_loss",
      [](std::int64_t n, DType d) -> List { return {to(rand({n}, {}, 0.1, 0.9), d), to(rand({n}), d)}; },
      [](const List& in) { return bce_loss(in[0], in[1].detach()); });
  put("cross_entropy_", classes, [](const List& in) { return cross_entropy_(mul(in[0], 1), in[1]); });
  put(
      "self_attention",
      [](std::int64_t n, DType d) -> List {
        const std::int64_t t = n <= 1024 ? 8 : 128;
        return {normal({std::max<std::int64_t>(1, n / (3 * 128 * t)), t, 3 * 128}, d)};
      },
      [](const List& in) { return self_attention(in[0], 4, {.causal = true}); });
  put("layer_norm_linear",
      of_linear([](std::int64_t, DType d) -> List { return {normal({256}, d), normal({256}, d)}; }),
      [](const List& in) { return layer_norm(linear(in[0], in[1], in[2]), in[3], in[4]); });
  put("cross_entropy_linear",
      of_linear([](std::int64_t n, DType) -> List { return {randint(0, 256, {short_rows(n)[0]})}; }),
      [](const List& in) { return cross_entropy(linear(in[0], in[1], in[2]), in[3]); });
  put("linear_cross_entropy",
      of_linear([](std::int64_t n, DType) -> List { return {randint(0, 256, {short_rows(n)[0]})}; }),
      [](const List& in) { return linear_cross_entropy(in[0], in[1], in[3], {.bias = in[2]}); });
  put("box_write", square_pair, [](const List& in) {
    const std::int64_t half = in[0].size(0) / 2;
    const Tensor y = clone(in[0]);
    index_put_(y, {Slice{.start = half}}, narrow(in[1], 0, 0, half));
    return y;
  });
  put("order_free_norm", one, [](const List& in) { return order_free_norm(in); }, false);
  put_steps(list);
  return list;
}

/// By construction all of them: whoever adds one has a row.
void add_elementwise(std::vector<OpRow>& rows) {
  std::set<std::string> named;
  for (const OpRow& row : rows) named.insert(row.name);
  for (const ElementwiseListing& entry : elementwise_listing()) {
    OpRow row{std::string(entry.op->name()),
              {},
              {},
              entry.op->differentiable() && !entry.gives_bool,
              entry.arity,
              entry.low,
              entry.high};
    if (named.contains(row.name)) continue;
    row.make = [entry](std::int64_t n, DType d) {
      List in;
      for (int i = 0; i < entry.arity; ++i) in.push_back(to(rand({n}, {}, entry.low, entry.high), d));
      return in;
    };
    row.call = [op = entry.op](const List& in) { return sherd::apply(*op, Inputs(in))[0]; };
    rows.push_back(std::move(row));
  }
}

}  // namespace

std::vector<OpRow> op_rows() {
  std::vector<OpRow> rows = written_rows();
  add_elementwise(rows);
  return rows;
}

}  // namespace sherd::bench
