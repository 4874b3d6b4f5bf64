// What the door sees to for every op: how many inputs, numbers in their range, views inside their storage,
// and nothing written that another input still reads.
#include <cmath>
#include <limits>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/cpu/elementwise_loop.h"
#include "runtime/indexing.h"
#include "runtime/losses.h"
#include "runtime/ops/list.h"
#include "runtime/ops/listing.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

/// An op without outputs.
struct Silent {
  static constexpr std::string_view name = "silent";
  static constexpr Arity arity = 1;
  static constexpr bool differentiable = false;
  Specs infer(SpecSpan) const { return {}; }
  void run(Inputs, Outputs) const {}
  bool operator==(const Silent&) const = default;
};

/// Promises the shape of its input; its reference keeps that only if told so.
struct Sums {
  static constexpr std::string_view name = "sums";
  Keep keep = Keep::dims;
  Specs infer(SpecSpan in) const { return {in[0]}; }
  Tensors reference(Inputs in) const { return {keep == Keep::dims ? mul(in[0], sum(in[0])) : sum(in[0])}; }
  bool operator==(const Sums&) const = default;
};

/// x^2, but its gradient looks at x, which it does not name.
struct Forgetful {
  static constexpr std::string_view name = "forgetful";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{};
  template <class T>
  constexpr T operator()(T x) const {
    return x * x;
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy * x * T(2);
  }
  bool operator==(const Forgetful&) const = default;
};

/// Doubles a tensor that it wants dense.
struct DoubleIt {
  static constexpr std::string_view name = "double_it";
  static constexpr Arity arity = 1;
  static constexpr Mask dense = 0b1, mutates = 0b1;
  static constexpr bool differentiable = false;
  Specs infer(SpecSpan) const { return {}; }
  bool operator==(const DoubleIt&) const = default;
};
void double_it(const DoubleIt&, Inputs in, Outputs) {
  for (std::int64_t i = 0; i < in[0].numel(); ++i) in[0].mutable_data<float>()[i] *= 2;
}

/// A structural op that wants its first input dense, and says what its kernel got.
struct Probe {
  static constexpr std::string_view name = "probe";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b01;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const { return {in[0]}; }
  bool operator==(const Probe&) const = default;
};

void probe(const Probe&, Inputs in, Outputs out) {
  CHECK(in[0].is_contiguous());
  CHECK_FALSE(in[1].is_contiguous());
  copy_(alias(out[0], out[0].layout()), in[0]);
}

}  // namespace

TEST_CASE("door: every op refuses a wrong number of inputs and empty handles, by name") {
  const auto refused = [](const AnyOp& op, std::size_t count, bool defined) {
    std::vector<Tensor> in(count);
    if (defined)
      for (Tensor& x : in) x = ones({2, 2});
    const std::string text = message_of<ValueError>([&] { sherd::apply(op, in); });
    INFO(text);
    CHECK(one_line_about(text, op.name()));
  };
  const auto sweep = [&](const AnyOp& op, Arity arity, Mask optional) {
    INFO(op.name());
    if (arity.least > 0) refused(op, arity.least - 1, true);
    if (arity.most < 100) refused(op, arity.most + 1, true);
    if (arity.least > 0 && !has(optional, 0)) refused(op, arity.least, false);
  };
  ops::for_each_structural(
      [&]<class O>() { sweep(OpModel<O>(O{}), detail::arity_of<O>(), detail::optional_inputs<O>()); });
  for (const ElementwiseListing& entry : elementwise_listing()) {
    sweep(*entry.op, entry.arity, 0);
    if (entry.in_place) sweep(*entry.in_place, entry.arity, 0);
  }
  const Tensor lr = Tensor::scalar(0.1, {f64}), p = ones({2});
  for (std::size_t extra = 1; extra < 5; ++extra) {  // a list that ends in the middle of a parameter
    std::vector<Tensor> in(1 + extra, p);
    in[0] = lr;
    CHECK(one_line_about(message_of<ValueError>([&] { apply_many(ops::AdamStep{}, in); }), "adam_step_"));
  }
}

TEST_CASE("door: calls of lines are refused in their own name and in shapes of lines") {
  const Tensor x = ones({2, 3, 7}), weight = ones({4, 3, 3});
  const std::tuple<std::string, std::string, std::function<void()>> calls[] = {
      {"conv1d", "(2, 5, 7) and (4, 3, 3)", [&] { conv1d(ones({2, 5, 7}), weight); }},
      {"conv1d", "2 groups: (2, 3, 7)", [&] { conv1d(x, weight, {}, {.groups = 2}); }},
      {"conv1d", "0 groups", [&] { conv1d(x, weight, {}, {.groups = 0}); }},
      {"conv1d", "f32 and its weight f64", [&] { conv1d(x, ones({4, 3, 3}, {f64})); }},
      {"conv1d", "got i64", [&] { conv1d(ones({2, 3, 7}, {i64}), ones({4, 3, 3}, {i64})); }},
      {"conv1d", "bias of shape (3) for 4", [&] { conv1d(x, weight, ones({3})); }},
      {"conv1d", "f32 and its bias f64", [&] { conv1d(x, weight, ones({4}, {f64})); }},
      {"conv1d", "(2, 3, 2) padded by 0", [&] { conv1d(ones({2, 3, 2}), weight); }},
      {"conv1d", "spread by 4 does not fit input (2, 3, 7)", [&] { conv1d(x, weight, {}, {.dilation = 4}); }},
      {"conv1d", "(4, 3, 0)", [&] { conv1d(x, ones({4, 3, 0})); }},
      {"max_pool1d", "windows of 8 do not fit input (2, 3, 7) padded by 0", [&] { max_pool1d(x, 8); }},
      {"avg_pool1d", "windows of 9 do not fit input (2, 3, 7) padded by 0", [&] { avg_pool1d(x, 9); }},
      {"max_pool1d", "windows of 9 do not fit input (2, 3, 4) padded by 2",
       [&] { max_pool1d(ones({2, 3, 4}), 9, {.padding = 2}); }},
  };
  for (const auto& [name, part, call] : calls) {
    const std::string message = message_of<Error>(call);
    INFO(message);
    CHECK(message.starts_with(name + ": "));
    CHECK(message.find(part) != std::string::npos);
  }
  // What fits to the last pixel is none of that.
  CHECK(conv1d(x, ones({4, 3, 7})).shape() == Shape{2, 4, 1});
  CHECK(conv1d(x, weight, {}, {.dilation = 3}).shape() == Shape{2, 4, 1});
  CHECK(max_pool1d(x, 7).shape() == Shape{2, 3, 1});
}

TEST_CASE("door: functions made of ops refuse empty handles in their own name") {
  const Tensor none, x = ones({2, 3}), image = ones({1, 1, 4, 4}), index = zeros({2}, {i64}),
                     mask = ones({2, 3}, {boolean});
  const std::vector<std::pair<std::string, std::function<void()>>> calls = {
      {"index", [&] { Tensor part = none[0]; }},
      {"index", [&] { Tensor part = x[none]; }},
      {"index", [&] { Tensor part = x[{0, none}]; }},
      {"index", [&] { none[0] = ones({3}); }},
      {"index_put_", [&] { index_put_(x, {At(none)}, ones({3})); }},
      {"index_put_", [&] { x[0] = none; }},
      {"zeros_like", [&] { zeros_like(none); }},
      {"ones_like", [&] { ones_like(none); }},
      {"full_like", [&] { full_like(none, 1); }},
      {"bernoulli", [&] { bernoulli(none); }},
      {"selu", [&] { selu(none); }},
      {"masked_fill", [&] { masked_fill(none, mask, 1); }},
      {"masked_fill", [&] { masked_fill(x, none, 1); }},
      {"masked_fill_", [&] { masked_fill_(none, mask, 1); }},
      {"masked_select", [&] { masked_select(none, mask); }},
      {"masked_select", [&] { masked_select(x, none); }},
      {"nonzero", [&] { nonzero(none); }},
      {"to", [&] { to(none, f64); }},
      {"contiguous", [&] { contiguous(none); }},
      {"reshape", [&] { reshape(none, {2}); }},
      {"view", [&] { view(none, {2}); }},
      {"flatten", [&] { flatten(none); }},
      {"permute", [&] { permute(none, {0}); }},
      {"transpose", [&] { transpose(none, 0, 1); }},
      {"squeeze", [&] { squeeze(none); }},
      {"squeeze", [&] { squeeze(none, 0); }},
      {"unsqueeze", [&] { unsqueeze(none, 0); }},
      {"expand", [&] { expand(none, {2}); }},
      {"slice", [&] { slice(none, 0, 0, 1); }},
      {"narrow", [&] { narrow(none, 0, 0, 1); }},
      {"select", [&] { select(none, 0, 0); }},
      {"split", [&] { split(none, 1); }},
      {"chunk", [&] { chunk(none, 1); }},
      {"unbind", [&] { unbind(none); }},
      {"cat", [&] { cat({x, none}); }},
      {"stack", [&] { stack({x, none}); }},
      {"einsum", [&] { einsum("ij,jk->ik", {x, none}); }},
      {"repeat", [&] { repeat(none, {2}); }},
      {"flip", [&] { flip(none, {0}); }},
      {"roll", [&] { roll(none, 1, 0); }},
      {"pad", [&] { pad(none, {1, 1}); }},
      {"outer", [&] { outer(none, index); }},
      {"tril", [&] { tril(none); }},
      {"triu", [&] { triu(none); }},
      {"diag", [&] { diag(none); }},
      {"diagonal", [&] { diagonal(none); }},
      {"embedding", [&] { embedding(none, index); }},
      {"embedding", [&] { embedding(x, none); }},
      {"index_select", [&] { index_select(none, 0, index); }},
      {"gather", [&] { gather(none, index); }},
      {"gather", [&] { gather(x, 0, none); }},
      {"scatter", [&] { scatter(x, 0, none, x); }},
      {"scatter_add", [&] { scatter_add(none, 0, index, x); }},
      {"topk", [&] { topk(none, 1); }},
      {"sort", [&] { sort(none); }},
      {"argsort", [&] { argsort(none); }},
      {"one_hot", [&] { one_hot(none, 2); }},
      {"multinomial", [&] { multinomial(none); }},
      {"multinomial", [&] { multinomial(none, 2); }},
      {"sum", [&] { sum(none); }},
      {"mean", [&] { mean(none); }},
      {"amax", [&] { amax(none); }},
      {"amin", [&] { amin(none); }},
      {"argmax", [&] { argmax(none, 0); }},
      {"argmin", [&] { argmin(none, 0); }},
      {"max", [&] { max(none, 0); }},
      {"min", [&] { min(none, 0); }},
      {"any", [&] { any(none); }},
      {"all", [&] { all(none); }},
      {"allclose", [&] { allclose(x, none); }},
      {"prod", [&] { prod(none); }},
      {"var", [&] { var(none); }},
      {"stddev", [&] { stddev(none); }},
      {"norm", [&] { norm(none); }},
      {"logsumexp", [&] { logsumexp(none); }},
      {"logcumsumexp", [&] { logcumsumexp(none, 0); }},
      {"cumsum", [&] { cumsum(none, 0); }},
      {"cumprod", [&] { cumprod(none, 0); }},
      {"matmul", [&] { matmul(x, none); }},
      {"linear", [&] { linear(none, x); }},
      {"linear_gelu", [&] { linear_gelu(x, none); }},
      {"linear_cross_entropy", [&] { linear_cross_entropy(x, none, x); }},
      {"conv2d", [&] { conv2d(none, image); }},
      {"conv1d", [&] { conv1d(none, ones({1, 1, 2})); }},
      {"conv_transpose2d", [&] { conv_transpose2d(image, none); }},
      {"conv_transpose1d", [&] { conv_transpose1d(none, ones({1, 1, 2})); }},
      {"max_pool2d", [&] { max_pool2d(none, 2); }},
      {"avg_pool2d", [&] { avg_pool2d(none, 2); }},
      {"max_pool1d", [&] { max_pool1d(none, 2); }},
      {"avg_pool1d", [&] { avg_pool1d(none, 2); }},
      {"adaptive_avg_pool2d", [&] { adaptive_avg_pool2d(none, 1); }},
      {"adaptive_max_pool2d", [&] { adaptive_max_pool2d(none, 1); }},
      {"interpolate", [&] { interpolate(none, {.scale = 2}); }},
      {"softmax", [&] { softmax(none); }},
      {"log_softmax", [&] { log_softmax(none); }},
      {"layer_norm", [&] { layer_norm(none, {}, {}); }},
      {"rms_norm", [&] { rms_norm(none); }},
      {"group_norm", [&] { group_norm(none, 1); }},
      {"batch_norm", [&] { batch_norm(none, {}, {}, {}, {}, {.training = true}); }},
      {"dropout", [&] { dropout(none, 0.5); }},
      {"attention", [&] { attention(image, none, image); }},
      {"self_attention", [&] { self_attention(none, 1); }},
      {"rotary", [&] { rotary(none); }},
      {"cross_entropy", [&] { cross_entropy(none, index); }},
      {"nll_loss", [&] { nll_loss(x, none); }},
      {"mse_loss", [&] { mse_loss(none, x); }},
      {"l1_loss", [&] { l1_loss(x, none); }},
      {"huber_loss", [&] { huber_loss(none, x); }},
      {"smooth_l1_loss", [&] { smooth_l1_loss(none, x); }},
      {"bce_with_logits", [&] { bce_with_logits(none, x); }},
      {"bce_loss", [&] { bce_loss(none, x); }},
      {"kl_div", [&] { kl_div(none, x); }},
  };
  for (const auto& [name, call] : calls) {
    const std::string text = message_of<ValueError>(call);
    INFO(name << " says " << text);
    CHECK(one_line_about(text, name + ":"));
  }
}

TEST_CASE("door: a number fits the dtype it meets, or is refused by one rule") {
  const auto add_to = [](const Tensor& x, Number n) { add(x, n); };
  const std::vector<std::pair<std::string, std::function<void(const Tensor&, Number)>>> calls = {
      {"add", add_to},
      {"add_", [](const Tensor& x, Number n) { add_(x, n); }},
      {"sub", [](const Tensor& x, Number n) { sub(n, x); }},
      {"mul", [](const Tensor& x, Number n) { mul(x, n); }},
      {"maximum", [](const Tensor& x, Number n) { maximum(x, n); }},
      {"less", [](const Tensor& x, Number n) { less(x, n); }},
      {"equal", [](const Tensor& x, Number n) { equal(x, n); }},
      {"clamp", [](const Tensor& x, Number n) { clamp(x, 0, n); }},
      {"clamp", [](const Tensor& x, Number n) { clamp(x, n, 1); }},
      {"full", [](const Tensor& x, Number n) { full({2}, n, {x.dtype()}); }},
      {"fill_", [](const Tensor& x, Number n) { fill_(x, n); }},
      {"scalar", [](const Tensor& x, Number n) { masked_fill(x, greater(x, 0), n); }},
      {"arange", [](const Tensor& x, Number n) { arange(n, 100, 1, {x.dtype()}); }}};
  const Number numbers_[] = {
      0, 1, 2, -1, 255, 256, 300, 0.5, 2.0, 1e10, -2147483649LL, most, std::nan(""), 1e300, true};
  for (const auto& [name, call] : calls)
    for (DType dtype : all_dtypes) {
      if (dtype == boolean && name != "equal" && name != "full" && name != "fill_" && name != "scalar")
        continue;
      for (Number n : numbers_) {
        if (name == "arange" && is_floating(dtype) && !(n.as<double>() >= -10 && n.as<double>() <= 300))
          continue;
        if (name == "arange" && n.as<double>() < -10) continue;  // as many elements as numbers
        if (name == "arange" && !(n.as<double>() == n.as<double>()))
          continue;  // has no end, which is said first
        INFO(name << " " << name_of(dtype) << " " << fmt::format("{}", n));
        const Tensor x = ones({2}, {dtype});
        if (fits(n, dtype)) {
          CHECK_NOTHROW(call(x, n));
          continue;
        }
        const std::string text = message_of<DTypeError>([&] { call(x, n); });
        INFO(text);
        CHECK(one_line_about(text, name));
        CHECK(text.find(name_of(dtype)) != std::string::npos);
      }
    }
  CHECK(message_of<DTypeError>([] { arange(0.5, 3, 1, {i64}); }).starts_with("arange"));
  CHECK(add(Tensor::from<std::int64_t>({0}, {1}), (std::int64_t{1} << 53) + 1).item<std::int64_t>() ==
        (std::int64_t{1} << 53) + 1);
  CHECK(arange((std::int64_t{1} << 53) + 1, (std::int64_t{1} << 53) + 3).to_vector<std::int64_t>()[0] ==
        (std::int64_t{1} << 53) + 1);
  CHECK_THROWS_AS(randint(std::numeric_limits<std::int64_t>::min(), most, {2}), ValueError);
  CHECK_THROWS_AS(randint(0, 1000, {2}, {u8}), DTypeError);
  CHECK_THROWS_AS(randint(-1, 2, {2}, {u8}), DTypeError);
  CHECK_NOTHROW(randint(0, 256, {2}, {u8}));
}

TEST_CASE("door: no view leaves its storage, whatever the numbers") {
  const Tensor x = zeros({4}), m = zeros({2, 3});
  CHECK_THROWS_AS(narrow(x, 0, 1, most), ShapeError);
  CHECK_THROWS_AS(narrow(x, 0, most, 1), ShapeError);
  CHECK_THROWS_AS(narrow(x, 0, most, most), ShapeError);
  CHECK_THROWS_AS(reshape(x, {2, 2, (std::int64_t{1} << 62) + 1}), ShapeError);
  CHECK_THROWS_AS(view(x, {std::int64_t{1} << 62, 4}), ShapeError);
  CHECK_THROWS_AS(expand(ones({1, 1}), {std::int64_t{1} << 32, std::int64_t{1} << 32}), ShapeError);
  CHECK_THROWS_AS(alias(x, {Shape{2}, Shape{most}, 1}), ValueError);
  CHECK_THROWS_AS(alias(x, {Shape{most, 2}, Shape{0, 0}, 0}), ShapeError);
  CHECK_THROWS_AS(apply(ops::Slice{0, 3, 2, 2}, x), ValueError);
  CHECK_THROWS_AS(apply(ops::Slice{5, 0, 1, 1}, x), ShapeError);
  CHECK_THROWS_AS(apply(ops::Slice{0, 4, 1, 1}, x), ValueError);
  CHECK_THROWS_AS(apply(ops::Permute{Shape{0, 0}}, m), ShapeError);
  CHECK_THROWS_AS(apply(ops::Permute{Shape{0, 7}}, m), ShapeError);
  CHECK_THROWS_AS(apply(ops::ViewAs{Shape{5}}, m), ShapeError);
  for (std::int64_t step :
       {std::int64_t{1}, std::int64_t{3}, std::int64_t{4}, std::int64_t{5}, most - 1, most}) {
    INFO("step " << step);
    const Tensor y = slice(arange(0, 10), 0, 1, 9, step);
    std::vector<std::int64_t> expected;
    for (std::int64_t i = 1; i < 9; i += std::min<std::int64_t>(step, 100)) expected.push_back(i);
    CHECK(y.to_vector<std::int64_t>() == expected);
  }
  CHECK(reshape(zeros({0, 3}), {0}).numel() == 0);
}

TEST_CASE("door: what is written shares no memory with what is read in another order") {
  const auto refused = [](std::string_view name, auto&& call) {
    const std::string text = message_of<StateError>(call);
    INFO(text);
    CHECK(one_line_about(text, name));
  };
  const Tensor m = numbers({4, 4}, f32), v = numbers({8}, f32, 2);
  const std::vector<float> before = m.to_vector<float>();
  refused("copy_", [&] { copy_(m, transpose(m, 0, 1)); });
  refused("add_", [&] { add_(m, transpose(m, 0, 1)); });
  refused("mul_", [&] { mul_(narrow(v, 0, 0, 6), narrow(v, 0, 2, 6)); });
  refused("copy_", [&] { copy_(narrow(v, 0, 1, 4), narrow(v, 0, 0, 4)); });
  refused("add_", [&] { add_(narrow(v, 0, 0, 4), expand(narrow(v, 0, 1, 1), {4})); });
  refused("fill_", [&] { fill_(expand(zeros({1}), {3}), 1); });
  refused("copy_", [&] { copy_(expand(zeros({1}), {3}), zeros({3})); });
  CHECK(m.to_vector<float>() == before);

  // Halves, columns of one matrix, and the very same elements do not meet in between.
  CHECK_NOTHROW(add_(narrow(v, 0, 0, 4), narrow(v, 0, 4, 4)));
  CHECK_NOTHROW(add_(select(m, 1, 0), select(m, 1, 1)));
  CHECK_NOTHROW(add_(slice(v, 0, 0, 8, 2), slice(v, 0, 1, 8, 2)));
  CHECK_NOTHROW(mul_(m, m));
  CHECK_NOTHROW(copy_(m, m));

  const Tensor lr = Tensor::scalar(0.1, {f64}), g = ones({2});
  const Tensor block = ones({6});
  const auto part = [&](std::int64_t at) { return narrow(block, 0, at, 2); };
  refused("sgd_step_", [&] { apply_many(ops::SgdStep{}, std::vector{lr, part(0), g, part(1), g}); });
  refused("sgd_step_", [&] { apply_many(ops::SgdStep{}, std::vector{lr, part(0), g, part(0), g}); });
  CHECK_NOTHROW(apply_many(ops::SgdStep{}, std::vector{lr, part(0), g, part(2), g, part(4), g}));
}

TEST_CASE("door: an op that wants dense inputs gets them, and only those") {
  add_kernel<probe>(DeviceType::cpu);
  const Tensor x = transpose(numbers({3, 4}, f32), 0, 1);
  CHECK(same_bits(apply(Probe{}, x, x), x));
  const std::string text = message_of<DeviceError>([&] { apply(Probe{}, x, to(x, Device::cpu(1))); });
  CHECK(one_line_about(text, "probe"));
}

TEST_CASE("door: a call that wants one output of an op that has none says so") {
  CHECK(one_line_about(message_of<ValueError>([] { apply(Silent{}, ones({2})); }), "silent"));
  const Tensor x = ones({2});
  CHECK(apply_many(Silent{}, std::span(&x, 1)).empty());
}

TEST_CASE("door: a reference of another shape than the op's is refused, not broadcast") {
  const Tensor x = ones({2, 3});
  CHECK(doubles(apply(Sums{}, x)) == std::vector<double>(6, 6));
  CHECK(one_line_about(message_of<InternalError>([&] { apply(Sums{Keep::drop}, x); }), "sums"));
}

TEST_CASE("door: what a gradient looks at without naming it is NaN") {
  cpu::add_elementwise<Forgetful>();
  const Tensor x = full({3}, 2).requires_grad_();
  for (const bool create_graph : {false, true})
    for (const double g :
         doubles(grad(sum(apply(Forgetful{}, x)), std::span(&x, 1), {}, {.create_graph = create_graph})[0]))
      CHECK(std::isnan(g));
}

TEST_CASE("door: messages name the call, not what it is made of") {
  const Tensor x = ones({2, 2}), i = Tensor::from<std::int64_t>({0, 9}, {2}), b = ones({2}, {u8});
  CHECK(message_of<ValueError>([&] { index_select(x, 1, i); }).starts_with("index_select:"));
  CHECK(message_of<DTypeError>([&] { index_select(x, 0, ones({2})); }).starts_with("index_select:"));
  CHECK(message_of<DTypeError>([&] { add_(b, 0.5); }).starts_with("add_:"));
  CHECK(message_of<DTypeError>([&] { sub(0.5, b); }).starts_with("sub:"));
  CHECK(message_of<ValueError>([&] { add(x, Tensor()); }).starts_with("add:"));
}

TEST_CASE("door: a number in a gradient has the dtype of what it was chosen for") {
  const Tensor x = Tensor::from({-1.0, 0.5, 2.0}, {3}).requires_grad_();
  for (const auto& f :
       {std::function<Tensor(const Tensor&)>([](const Tensor& t) { return abs(t); }),
        std::function<Tensor(const Tensor&)>([](const Tensor& t) { return relu(t); }),
        std::function<Tensor(const Tensor&)>([](const Tensor& t) { return clamp(t, 0, 1); })}) {
    const std::vector<Tensor> g = grad(sum(f(x)), std::vector{x}, {}, {.create_graph = true});
    CHECK(g[0].dtype() == f64);
  }
}

TEST_CASE("door: an in-place call on a temporary gives a tensor that lives") {
  const Tensor y = relu_(Tensor::from({-1.f, 2.f}, {2}));
  CHECK(y.to_vector<float>() == std::vector<float>{0, 2});
  CHECK(fill_(zeros({2}), 3).to_vector<float>() == std::vector<float>{3, 3});
}

TEST_CASE("door: integers wrap around at the ends of their range") {
  const Tensor high = full({20}, most, {i64}),
               low = full({20}, std::numeric_limits<std::int64_t>::min(), {i64});
  CHECK(same_bits(add(high, 1), low));
  CHECK(same_bits(sub(low, 1), high));
  CHECK(same_bits(mul(high, 2), full({20}, -2, {i64})));
  CHECK(same_bits(neg(low), low));
  CHECK(same_bits(abs(low), low));
  CHECK(same_bits(add(full({3}, 2147483647, {i32}), 1), full({3}, -2147483648LL, {i32})));
  CHECK(same_bits(square(full({3}, 65536, {i32})), zeros({3}, {i32})));
  CHECK(same_bits(add(full({3}, 255, {u8}), 1), zeros({3}, {u8})));
}

TEST_CASE("door: products of views are those of dense copies, whatever the strides and sizes of their axes") {
  unsigned seed = 1;
  for (const Shape& shape :
       {Shape{2, 1, 3, 2, 1}, Shape{2, 0, 3, 2, 2}, Shape{1, 2, 1, 2, 2}, Shape{3, 1, 1, 2, 2}})
    for (int variant = 0; variant < 5; ++variant) {
      const Tensor dense = numbers(shape, f32, ++seed);
      Tensor x = dense;
      if (variant == 1) x = transpose(x, 0, 2);
      if (variant == 2) x = transpose(x, 1, 2);
      if (variant == 3) x = expand(select(x, 0, 0), shape);
      if (variant == 4) x = transpose(expand(narrow(x, 4, 0, 1), shape), -1, -2);
      const Tensor y = numbers({x.shape()[4], 3}, f32, 7);
      const Tensor left = expand(numbers({1, 4, x.shape()[3]}, f32, 8), {x.shape()[2], 4, x.shape()[3]});
      INFO(to_string(x.shape()) << " variant " << variant);
      CHECK(same_bits(matmul(x, y), matmul(clone(x), y)));
      CHECK(same_bits(matmul(left, x), matmul(clone(left), clone(x))));
    }
}

TEST_CASE("door: an op that writes an input and wants it dense refuses one with holes") {
  add_kernel<&double_it>(DeviceType::cpu);
  const Tensor x = ones({2, 3});
  apply_many(DoubleIt{}, std::span(&x, 1));
  CHECK(x.to_vector<float>() == std::vector<float>(6, 2));
  const Tensor t = transpose(x, 0, 1);
  CHECK(
      one_line_about(message_of<StateError>([&] { apply_many(DoubleIt{}, std::span(&t, 1)); }), "double_it"));
  CHECK(x.to_vector<float>() == std::vector<float>(6, 2));
}

TEST_CASE("door: no count of elements is passed by, with whole or broken bounds") {
  for (const DType dtype : {u8, i32}) {
    CHECK_THROWS_AS(arange(0, 1e12, 1e10, {dtype}), DTypeError);
    CHECK(arange(0.0, 100.0, 50.0, {dtype}).numel() == 2);
  }
  CHECK(one_line_about(message_of<DTypeError>([] { arange(0.0, 300.0, 1.0, {u8}); }), "299"));
  for (const DType dtype : {u8, i32, i64}) {  // integers are counted in integers, one element too
    CHECK(one_line_about(message_of<DTypeError>([&] { arange(0, 0.4, 0.5, {dtype}); }), "step 0.5"));
    CHECK_THROWS_AS(arange(0, 1, 1e300, {dtype}), DTypeError);
  }
  CHECK(one_line_about(message_of<ValueError>([] { sum(ones({2, 3}), {0, -2}); }), "twice"));
  const Tensor image = ones({1, 1, 4, 4}), kernel = ones({1, 1, 2, 2});
  for (const std::int64_t padding : {most, most - 1, most / 2 + 1, std::int64_t{1} << 32})
    CHECK(
        one_line_about(message_of<ValueError>([&] { conv2d(image, kernel, {}, {1, padding}); }), "padding"));
  CHECK(one_line_about(message_of<ValueError>([] { multinomial(full({3}, 1e308, {f64})); }), "multinomial"));
}
