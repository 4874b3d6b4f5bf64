// Every op that a user calls, in f32 and bf16 and three sizes: microseconds of the forward alone, and of
// forward and backward, the least of many. ops_table.py beside it runs PyTorch's in turn and prints both with
// their ratio.
//
//   ops_bench [--threads 2] [--only NAME] [--list]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>

#include "sherd.h"

namespace {

using namespace sherd;

constexpr std::int64_t sizes[] = {1 << 10, 1 << 16, 1 << 22};  // elements of the first input

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The least microseconds of a call: other programs make a call longer and never shorter.
double least_us(const std::function<void()>& call) {
  for (int i = 0; i < 3; ++i) call();
  double least = 1e9;
  const double start = now();
  for (int i = 0; i < 7 || (now() - start < 0.06 && i < 20000); ++i) {
    const double t = now();
    call();
    least = std::min(least, now() - t);
  }
  return least * 1e6;
}

using List = std::vector<Tensor>;
using Call = std::function<Tensor(const List&)>;
using Make = std::function<List(std::int64_t, DType)>;

struct Op {
  std::string name;
  Make make;
  Call call;
  bool gradient = true;
};

Tensor normal(Shape shape, DType dtype) { return to(randn(shape), dtype); }
Tensor positive(Shape shape, DType dtype) { return to(rand(shape, {}, 0.1, 2), dtype); }

// Rows of 256 numbers, square matrices, and images of 16 channels and 32 x 32.
Shape rows(std::int64_t n) { return {n / 256 > 0 ? n / 256 : 1, n < 256 ? n : 256}; }
std::int64_t side(std::int64_t n) { return static_cast<std::int64_t>(std::sqrt(static_cast<double>(n))); }
Shape images(std::int64_t n) { return {std::max<std::int64_t>(1, n / (16 * 32 * 32)), 16, 32, 32}; }

List one(std::int64_t n, DType d) { return {normal({n}, d)}; }
List one_positive(std::int64_t n, DType d) { return {positive({n}, d)}; }
List two(std::int64_t n, DType d) { return {normal({n}, d), normal({n}, d)}; }
List two_positive(std::int64_t n, DType d) { return {positive({n}, d), positive({n}, d)}; }
List table(std::int64_t n, DType d) { return {normal(rows(n), d)}; }
List square_pair(std::int64_t n, DType d) {
  return {normal({side(n), side(n)}, d), normal({side(n), side(n)}, d)};
}
List normalised(std::int64_t n, DType d) { return {normal(rows(n), d), normal({256}, d), normal({256}, d)}; }
List heads(std::int64_t n, DType d) {  // (B, 4, T, 32)
  const std::int64_t t = n <= 1024 ? 8 : 128, b = std::max<std::int64_t>(1, n / (4 * t * 32));
  return {normal({b, 4, t, 32}, d), normal({b, 4, t, 32}, d), normal({b, 4, t, 32}, d)};
}
List classes(std::int64_t n, DType d) { return {normal(rows(n), d), randint(0, 256, {rows(n)[0]})}; }
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

std::vector<Op> all_ops() {
  std::vector<Op> list;
  const auto put = [&](std::string name, Make make, Call call, bool gradient = true) {
    list.push_back({std::move(name), std::move(make), std::move(call), gradient});
  };
  const auto unary = [&](std::string name, Tensor (*f)(const Tensor&), bool gradient = true) {
    put(
        std::move(name), one, [f](const List& in) { return f(in[0]); }, gradient);
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
      [](std::int64_t n, DType d) -> List {
        return {normal(rows(n), d), normal({256}, d)};
      },
      [](const List& in) { return add(in[0], in[1]); });
  put(
      "add_column",
      [](std::int64_t n, DType d) -> List {
        return {normal(rows(n), d), normal({rows(n)[0], 1}, d)};
      },
      [](const List& in) { return add(in[0], in[1]); });
  put(
      "less", two, [](const List& in) { return less(in[0], in[1]); }, false);
  put(
      "equal_number", one, [](const List& in) { return equal(in[0], 0); }, false);
  put("where", two, [](const List& in) { return where(greater(in[0], 0), in[0], in[1]); });
  put("masked_fill", two, [](const List& in) { return masked_fill(in[0], greater(in[1], 0), 0); });
  put("to_other", one,
      [](const List& in) { return to(in[0], in[0].dtype() == DType::f32 ? DType::bf16 : DType::f32); });
  put("clone", one, [](const List& in) { return clone(in[0]); });
  put(
      "transpose_copy",
      [](std::int64_t n, DType d) -> List {
        return {normal({side(n), side(n)}, d)};
      },
      [](const List& in) { return contiguous(transpose(in[0], 0, 1)); });
  put("cat", table, [](const List& in) { return cat({in[0], in[0]}, 1); });
  put("flip", table, [](const List& in) { return flip(in[0], {1}); });
  put("roll", table, [](const List& in) { return roll(in[0], 3, 1); });
  put("pad", table, [](const List& in) { return pad(in[0], {1, 2}); });
  put("repeat", table, [](const List& in) { return repeat(in[0], {2, 1}); });
  put(
      "tril",
      [](std::int64_t n, DType d) -> List {
        return {normal({side(n), side(n)}, d)};
      },
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
      "multinomial",
      [](std::int64_t n, DType d) -> List {
        return {positive({256}, d), ones({n})};
      },
      [](const List& in) { return multinomial(in[0], in[1].numel()); }, false);
  put("topk", table, [](const List& in) { return topk(in[0], 8).values; });
  put("sort", table, [](const List& in) { return sort(in[0]).values; });
  put(
      "argmax", table, [](const List& in) { return argmax(in[0], 1); }, false);
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
      [](std::int64_t n, DType d) -> List {
        return {normal(rows(n), d), normal({256}, d)};
      },
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
      "bce_with_logits",
      [](std::int64_t n, DType d) -> List {
        return {normal({n}, d), to(rand({n}), d)};
      },
      [](const List& in) { return bce_with_logits(in[0], in[1]); });
  put("matmul", square_pair, [](const List& in) { return matmul(in[0], in[1]); });
  put(
      "matmul_batch",
      [](std::int64_t n, DType d) -> List {
        const std::int64_t b = std::max<std::int64_t>(1, n / 4096), s = std::min<std::int64_t>(64, side(n));
        return {normal({b, s, s}, d), normal({b, s, s}, d)};
      },
      [](const List& in) { return matmul(in[0], in[1]); });
  put(
      "linear",
      [](std::int64_t n, DType d) -> List {
        return {normal(rows(n), d), normal({256, 256}, d), normal({256}, d)};
      },
      [](const List& in) { return linear(in[0], in[1], in[2]); });
  put(
      "linear_gelu",
      [](std::int64_t n, DType d) -> List {
        return {normal(rows(n), d), normal({256, 256}, d), normal({256}, d)};
      },
      [](const List& in) { return linear_gelu(in[0], in[1], in[2]); });
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
  return list;
}

void measure(const Op& op) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t n : sizes) {
      manual_seed(0);
      const List in = op.make(n, dtype);
      nlohmann::json line{{"op", op.name}, {"dtype", name_of(dtype)}, {"n", n}};
      Tensor upstream;
      {
        const NoGrad guard;
        line["forward"] = least_us([&] { op.call(in); });
        const Tensor y = op.call(in);
        upstream = ones_like(y);
      }
      if (op.gradient) {
        List leaves, wanted;
        for (const Tensor& x : in) {
          leaves.push_back(x.detach());
          if (is_floating(x.dtype())) wanted.push_back(leaves.back().requires_grad_());
        }
        line["both"] = least_us([&] { grad(op.call(leaves), wanted, upstream); });
      }
      std::puts(line.dump().c_str());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  int threads = 2;
  std::string only;
  bool list = false;
  CLI::App app("Every op, in f32 and bf16 and three sizes");
  app.add_option("--threads", threads, "threads of the rank");
  app.add_option("--only", only, "one op");
  app.add_flag("--list", list, "the names of all ops");
  CLI11_PARSE(app, argc, argv);
  Context::current().set_threads(threads);
  for (const Op& op : all_ops()) {
    if (!only.empty() && op.name != only) continue;
    if (list)
      std::puts(op.name.c_str());
    else
      measure(op);
  }
}
