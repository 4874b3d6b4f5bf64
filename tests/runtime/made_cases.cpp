// Cases of indexing, and of functions that are made of other ops.
#include <array>
#include <string>

#include "runtime/apply.h"
#include "runtime/ops/absolute_error.h"
#include "runtime/ops/bce.h"
#include "runtime/ops/bce_with_logits.h"
#include "runtime/ops/cat.h"
#include "runtime/ops/flip.h"
#include "runtime/ops/group_norm.h"
#include "runtime/ops/huber.h"
#include "runtime/ops/loss_total.h"
#include "runtime/ops/patches.h"
#include "runtime/ops/picking.h"
#include "runtime/ops/pool2d.h"
#include "runtime/ops/prod.h"
#include "runtime/ops/recurrence.h"
#include "runtime/ops/recurrent.h"
#include "runtime/ops/squared_error.h"
#include "runtime/ops/sum.h"
#include "runtime/ops/triangle.h"
#include "tests/runtime/op_cases.h"

namespace sherd::test {
namespace {

template <class F>
Call one(F f) {
  return [f](std::span<const Tensor> in) { return std::vector<Tensor>{f(in[0])}; };
}
template <class F>
Call two(F f) {
  return [f](std::span<const Tensor> in) { return std::vector<Tensor>{f(in[0], in[1])}; };
}
template <class F>
Call three(F f) {
  return [f](std::span<const Tensor> in) { return std::vector<Tensor>{f(in[0], in[1], in[2])}; };
}

/// The op written in other ops.
Call reference(auto op) {
  return [op](std::span<const Tensor> in) {
    const Tensors out = op.reference(in);
    return std::vector<Tensor>(out.begin(), out.end());
  };
}

using Add = std::function<void(std::string, std::vector<Input>, Call, Rules)>;
const Input block{{3, 4, 5}, {7, 300, 41}}, matrix{{6, 7}, {301, 57}}, line{{7}, {57}};

Input index_input(Shape s, Shape large, std::int64_t bound) { return {s, large, Kind::index, bound}; }

void indexing_cases(const Add& put) {
  put("index by positions and slices", {block},
      one([](const Tensor& x) { return x[{-1, Slice{1, {}, 2}, NewAxis{}}]; }),
      {.more = {{{1, 1, 1}}, {{2, 0, 3}}}});
  put("index from behind", {block}, one([](const Tensor& x) { return x[{Ellipsis{}, 0}]; }),
      {.more = {{{1, 1, 1}}, {{0, 4, 5}}}});
  put("index by rows", {matrix, index_input({2, 3}, {20, 30}, 6)},
      two([](const Tensor& x, const Tensor& i) { return x[i]; }),
      {.dtypes = floating_dtypes | integral_dtypes | bool_dtype,
       .more = {{{6, 1}, {1}}, {{6, 7}, {0}}, {{6}, {}}}});
  put("index by neighbours", {block, index_input({2, 1}, {30, 1}, 3), index_input({3}, {20}, 4)},
      three([](const Tensor& x, const Tensor& i, const Tensor& j) { return x[{i, sub(j, 4)}]; }), {});
  put("index by two that are apart", {block, index_input({6}, {30}, 3), index_input({6}, {30}, 5)},
      three([](const Tensor& x, const Tensor& i, const Tensor& j) { return x[{i, Slice{1, 3}, j}]; }), {});
  put("index_put_ into a box", {block, {{2, 1}, {2, 1}}}, two([](const Tensor& x, const Tensor& v) {
        return index_put_(clone(x), {1, Slice{0, 4, 2}, Slice{1}}, v);
      }),
      {});
  put("index_put_ that adds to a box", {block, {{5}, {41}}},
      two([](const Tensor& x, const Tensor& v) { return index_put_(clone(x), {Slice{1}, -1}, v, Put::add); }),
      {.dtypes = number_dtypes});
  put("index_put_ of rows", {matrix, index_input({9}, {400}, 6), {{9, 7}, {400, 57}}},
      three([](const Tensor& x, const Tensor& i, const Tensor& v) { return index_put_(clone(x), {i}, v); }),
      {});
  put("index_put_ of elements", {matrix, index_input({5}, {400}, 6), {{2, 5}, {2, 400}}},
      three([](const Tensor& x, const Tensor& i, const Tensor& v) {
        return index_put_(clone(x), {Slice{0, 2}, i}, v);
      }),
      {});
  put("index_put_ that adds rows", {matrix, index_input({2, 4}, {20, 30}, 6), line},
      three([](const Tensor& x, const Tensor& i, const Tensor& v) {
        return index_put_(clone(x), {i}, v, Put::add);
      }),
      {.dtypes = number_dtypes, .sixteen = Bits::rounded});
  const auto mask_input = [](Shape s, Shape large) { return Input{s, large, Kind::mask}; };
  put("index_put_ of one value by a mask", {block, mask_input({3, 4}, {7, 300}), {{1}, {1}}},
      three([](const Tensor& x, const Tensor& m, const Tensor& v) { return index_put_(clone(x), {m}, v); }),
      {.more = {{{2, 0, 3}, {2, 0}, {1}}, {{4}, {4}, {}}, {{1, 1, 1}, {1, 1}, {1, 1}}}});
  put("gather along the last axis of more rows", {block, index_input({2, 3, 9}, {6, 200, 70}, 5)},
      two([](const Tensor& x, const Tensor& i) { return gather(x, 2, i); }), {});
  put("gather of a line", {{{9}, {40003}}, index_input({5}, {50021}, 9)},
      two([](const Tensor& x, const Tensor& i) { return gather(x, 0, i); }), {});
  put("scatter of a number along the first axis", {block, index_input({2, 4, 5}, {3, 300, 41}, 3)},
      two([](const Tensor& x, const Tensor& i) { return scatter(x, 0, i, 1); }), {});
  put("scatter_add to a line", {line, index_input({9}, {4000}, 7), {{9}, {4000}}},
      three([](const Tensor& x, const Tensor& i, const Tensor& v) { return scatter_add(x, 0, i, v); }),
      {.dtypes = number_dtypes, .sixteen = Bits::rounded});
  put("gather along the first axis", {block, index_input({9, 2, 5}, {40, 200, 41}, 3)},
      two([](const Tensor& x, const Tensor& i) { return gather(x, 0, i); }), {});
  put("scatter", {block, index_input({3, 6, 4}, {7, 30, 40}, 4), {{3, 7, 4}, {7, 30, 41}}},
      three([](const Tensor& x, const Tensor& i, const Tensor& v) { return scatter(x, 1, i, v); }), {});
  put("scatter_add", {block, index_input({3, 6, 4}, {7, 30, 40}, 4), {{3, 6, 4}, {7, 30, 40}}},
      three([](const Tensor& x, const Tensor& i, const Tensor& v) { return scatter_add(x, 1, i, v); }),
      {.dtypes = number_dtypes, .sixteen = Bits::rounded});
  const auto put_gradients = [&](const std::string& name, int axis, Input x, Input at) {
    const ops::PutAtGrad op{{ops::Of::elements, axis}};
    put(name, {std::move(x), std::move(at)}, Call([=](std::span<const Tensor> in) {
          const Tensors found = apply_many(op, in);
          return std::vector<Tensor>(found.begin(), found.end());
        }),
        {.gradients = false});
  };
  put_gradients("gradients of elements put into a line", 0, {{9}, {40003}}, index_input({5}, {50021}, 9));
  put_gradients("gradients of elements put along the first axis", 0, block,
                index_input({9, 2, 5}, {40, 200, 41}, 3));
  put_gradients("gradients of elements put along the last axis", 2, block,
                index_input({3, 4, 9}, {7, 300, 41}, 5));
  put("one_hot", {index_input({2, 3}, {30, 40}, 6)}, one([](const Tensor& i) { return one_hot(i, 6); }),
      {.gradients = false});
}

void arranging_cases(const Add& put) {
  const auto all_of = [](const std::vector<Tensor>& parts) {
    std::vector<Tensor> flat;
    for (const Tensor& part : parts) flat.push_back(reshape(part, {-1}));
    return cat(flat);
  };
  put("chunk", {block}, one([all_of](const Tensor& x) { return all_of(chunk(x, 3, -1)); }), {});
  put("unbind", {block}, one([all_of](const Tensor& x) { return all_of(unbind(x, 1)); }), {});
  put("repeat", {block}, one([](const Tensor& x) { return repeat(x, {2, 1, 3, 2}); }),
      {.more = {{{1, 1, 1}}, {{0, 4, 5}}}});
  put("flip", {block}, one([](const Tensor& x) { return flip(x, {0, -1}); }),
      {.reference = reference(ops::Flip{0b101}), .more = {{{0, 4, 5}}, {{1, 4, 1}}}});
  put("roll in other ops", {block}, one([](const Tensor& x) { return roll(x, 1, 1); }),
      {.reference = reference(ops::Roll{1, 1})});
  put("roll", {block}, one([](const Tensor& x) { return roll(x, 3, -1); }),
      {.more = {{{3, 1, 1}}, {{0, 1, 0}}}});
  for (const Padding how : {Padding::constant, Padding::reflect, Padding::replicate, Padding::circular})
    put("pad " + std::to_string(static_cast<int>(how)), {block},
        one([how](const Tensor& x) { return pad(x, {1, 2, 0, -1}, how, 1); }), {});
  put("tril", {block}, one([](const Tensor& x) { return tril(x, 1); }),
      {.reference = reference(ops::Triangle{1}), .more = {{{0, 4, 5}}, {{2, 1, 1}}}});
  put("triu", {block}, one([](const Tensor& x) { return triu(x, -1); }),
      {.reference = reference(ops::Triangle{-1, false}), .more = {{{2, 0, 5}}}});
  put("diagonal", {block}, one([](const Tensor& x) { return diagonal(x, 1, 2, 0); }),
      {.more = {{{1, 1, 1}}}});
  put("diag", {line}, one([](const Tensor& x) { return diag(x, -1); }), {.more = {{{1}}, {{0}}}});
  put("outer", {line, {{4}, {30}}}, two([](const Tensor& a, const Tensor& b) { return outer(a, b); }),
      {.dtypes = number_dtypes});
}

void statistics_cases(const Add& put) {
  const auto over_axes = [&](const std::string& name, auto f, Rules rules) {
    rules.dtypes = floating_dtypes;
    put(name, {block}, one([f](const Tensor& x) { return f(x, Shape{}, Keep::drop); }), rules);
    put(name + " over an axis", {block}, one([f](const Tensor& x) { return f(x, Shape{1}, Keep::dims); }),
        rules);
  };
  over_axes("var", [](const Tensor& x, Shape a, Keep k) { return var(x, a, k); }, {});
  over_axes("stddev", [](const Tensor& x, Shape a, Keep k) { return stddev(x, a, k, 0); }, {});
  over_axes("norm", [](const Tensor& x, Shape a, Keep k) { return norm(x, 2, a, k); }, {});
  over_axes("norm 1", [](const Tensor& x, Shape a, Keep k) { return norm(x, 1, a, k); }, {});
  over_axes("norm 3", [](const Tensor& x, Shape a, Keep k) { return norm(x, 3, a, k); }, {});
  over_axes("norm inf", [](const Tensor& x, Shape a, Keep k) { return norm(x, HUGE_VAL, a, k); }, {});
  put("norm, its sum of squares in other ops", {block},
      one([](const Tensor& x) {  // f64 for its range; the digits are those of the compute dtype
        return to(apply(ops::PowerSum{{0b010}}, x), compute_dtype(x.dtype()));
      }),
      {.dtypes = floating_dtypes,
       .sixteen = Bits::rounded,
       .reference = one([](const Tensor& x) {
         return to(ops::PowerSum{{0b010}}.reference(std::array{x})[0], compute_dtype(x.dtype()));
       })});
  for (const int power : {1, 2}) {
    const ops::Norm op{{0b010}, power};
    put("norm of " + std::to_string(power) + " in other ops", {block},
        one([=](const Tensor& x) { return apply_many(op, std::array{x})[0]; }),
        {.dtypes = floating_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded,
         .reference = one([=](const Tensor& x) { return op.reference(std::array{x})[0]; })});
  }
  for (const bool root : {false, true}) {
    const ops::Spread op{{{0b101}, 1}, root};
    put(root ? "deviation in other ops" : "variance, rounded, in other ops", {block},
        one([=](const Tensor& x) { return apply_many(op, std::array{x})[0]; }),
        {.dtypes = floating_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded,
         .reference = one([=](const Tensor& x) { return op.reference(std::array{x})[0]; })});
  }
  for (const int output : {0, 1}) {
    const ops::Variance op{{0b010, true}, 0.5};
    const auto of = [output](Tensors all, const Tensor& x) {
      return to(all[output], compute_dtype(x.dtype()));
    };
    put(output == 0 ? "variance in other ops" : "variance's mean in other ops", {block},
        one([=](const Tensor& x) { return of(apply_many(op, std::array{x}), x); }),
        {.dtypes = floating_dtypes,
         .layouts = Bits::rounded,
         .sixteen = Bits::rounded,
         .reference = one([=](const Tensor& x) { return of(op.reference(std::array{x}), x); })});
  }
  put("logsumexp over outer axes", {block}, one([](const Tensor& x) { return logsumexp(x, {0, 2}); }),
      {.dtypes = floating_dtypes, .more = {{{1, 1, 1}}, {{2, 0, 3}}}});
  over_axes("logsumexp", [](const Tensor& x, Shape a, Keep k) { return logsumexp(x, a, k); }, {});
  put("any", {block}, one([](const Tensor& x) { return any(x, {0}); }), {.gradients = false});
  put("all", {block}, one([](const Tensor& x) { return all(x, {-1}, Keep::dims); }), {.gradients = false});
  const Input short_rows{{2, 5, 3}, {20, 9, 30}};
  put("prod", {short_rows}, one([](const Tensor& x) { return prod(x, {1}); }),
      {.layouts = Bits::rounded,
       .sixteen = Bits::rounded,
       .reference = reference(ops::Prod{{0b10}}),
       .more = {{{1, 1, 1}}, {{2, 0, 3}}}});
  put("prod over outer axes", {{{3, 4, 5}, {7, 300, 41}, Kind::number, 0, 0.9, 1.1}},
      one([](const Tensor& x) { return prod(x, {0, 2}, Keep::dims); }),
      {.layouts = Bits::rounded, .reference = reference(ops::Prod{{0b101, true}})});
  put("cumsum", {block}, one([](const Tensor& x) { return cumsum(x, 1); }),
      {.more = {{{1, 1, 1}}, {{2, 0, 3}}, {{3, 4, 1}}}});
  put("cumsum along the last axis", {block}, one([](const Tensor& x) { return cumsum(x, -1); }), {});
  put("cumprod", {short_rows}, one([](const Tensor& x) { return cumprod(x, 1); }),
      {.sixteen = Bits::rounded, .more = {{{1, 1, 1}}, {{2, 0, 3}}}});
  put("running product", {short_rows}, one([](const Tensor& x) { return apply(ops::RunningProduct{}, x); }),
      {.dtypes = number_dtypes,
       .sixteen = Bits::rounded,
       .reference = reference(ops::RunningProduct{}),
       .more = {{{1, 1, 1}}, {{2, 0, 3}}, {{2, 3, 0}}}});
  for (bool reverse : {false, true}) {
    const ops::Recurrence op{reverse};
    put(reverse ? "recurrence backwards" : "recurrence", {short_rows, short_rows},
        Call([op](std::span<const Tensor> in) { return std::vector<Tensor>{apply_many(op, in)[0]}; }),
        {.dtypes = number_dtypes,
         .sixteen = Bits::rounded,
         .reference =
             Call([op](std::span<const Tensor> in) { return std::vector<Tensor>{op.reference(in)[0]}; })});
  }
  for (const ops::RecurrentCell cell :
       {ops::RecurrentCell::tanh, ops::RecurrentCell::lstm, ops::RecurrentCell::gru})
    for (bool reverse : {false, true}) {
      const ops::Recurrent op{cell, reverse};
      const std::int64_t g = op.gates();
      const auto drawn = [](Shape shape, Shape large) {
        return Input{std::move(shape), std::move(large), Kind::number, 0, -0.6, 0.6};
      };
      std::vector<Input> inputs{drawn({3, 2, g * 4}, {5, 9, g * 24}), drawn({g * 4, 4}, {g * 24, 24}),
                                drawn({g * 4}, {g * 24}), drawn({2, 4}, {9, 24})};
      if (op.has_cell()) inputs.push_back(drawn({2, 4}, {9, 24}));
      const auto with = [op](auto run) {  // all that the layer gives as one tensor
        return [op, run](std::span<const Tensor> in) {
          std::vector<Tensor> all(in.begin(), in.end());
          all.resize(5);
          const auto out = run(all);
          return std::vector<Tensor>{op.has_cell() ? cat({out[0], out[1]}, -1) : out[0]};
        };
      };
      const auto shapes = [&](std::int64_t t, std::int64_t b, std::int64_t h) {
        std::vector<Shape> list{{t, b, g * h}, {g * h, h}, {g * h}, {b, h}};
        if (op.has_cell()) list.push_back({b, h});
        return list;
      };
      put(fmt::format("recurrent {}{}", static_cast<int>(cell), reverse ? ", backwards" : ""), inputs,
          with([op](const std::vector<Tensor>& in) { return apply_many(op, in); }),
          {.dtypes = floating_dtypes,
           .layouts = Bits::rounded,
           .sixteen = Bits::rounded,
           .reference = with([op](const std::vector<Tensor>& in) { return op.reference(in); }),
           .more = {shapes(1, 1, 1), shapes(2, 0, 3), shapes(4, 1, 17)}});
    }
  put("max", {block}, one([](const Tensor& x) { return max(x, 1).values; }), {});
  put("min, its positions", {block}, one([](const Tensor& x) { return min(x, -1, Keep::dims).indices; }),
      {.gradients = false});
  put("argmin", {block}, one([](const Tensor& x) { return argmin(x, 0); }), {.gradients = false});
  put("sort", {block}, one([](const Tensor& x) { return sort(x, 1).values; }),
      {.more = {{{1, 1, 1}}, {{2, 0, 3}}}});
  put("sort downwards", {block}, one([](const Tensor& x) { return sort(x, -1, Order::descending).values; }),
      {});
  put("argsort", {block}, one([](const Tensor& x) { return argsort(x, 0); }), {.gradients = false});
  put("einsum of two", {{{3, 4, 5}, {7, 30, 41}}, {{3, 5, 2}, {7, 41, 20}}},
      two([](const Tensor& a, const Tensor& b) { return einsum("bij,bjk->bki", {a, b}); }),
      {.dtypes = floating_dtypes,
       .on_cpu = integral_dtypes,
       .layouts = Bits::rounded,
       .sixteen = Bits::rounded});
  put("einsum of three", {{{3, 4}, {30, 40}}, {{4, 2}, {40, 20}}, {{3, 2}, {30, 20}}},
      three(
          [](const Tensor& a, const Tensor& b, const Tensor& c) { return einsum("ij,jk,ik->k", {a, b, c}); }),
      {.dtypes = floating_dtypes,
       .on_cpu = integral_dtypes,
       .layouts = Bits::rounded,
       .sixteen = Bits::rounded});
  put("einsum of a diagonal", {{{3, 3, 4}, {30, 30, 20}}},
      one([](const Tensor& a) { return einsum("iij->ji", {a}); }), {});
}

void loss_cases(const Add& put) {
  const Input probabilities{{3, 4, 5}, {7, 30, 41}, Kind::number, 0, 0.1, 0.9};
  const auto pair = [&](const std::string& name, auto f, Input input, Input target) {
    for (const Reduction r : {Reduction::mean, Reduction::none})
      put(name + " " + std::to_string(static_cast<int>(r)), {input, target},
          two([f, r](const Tensor& x, const Tensor& t) { return f(x, t, r); }), {.dtypes = floating_dtypes});
  };
  for (const Reduction r : {Reduction::mean, Reduction::sum}) {
    const bool mean = r == Reduction::mean;
    const auto fused = [&](const std::string& name, auto f, auto loss, const Input& input) {
      put(name + (mean ? ", its mean" : ", its sum") + " in other ops", {input, input},
          two([f, r](const Tensor& x, const Tensor& t) { return f(x, t, r); }),
          {.dtypes = floating_dtypes,
           .reference = reference(ops::LossTotal<decltype(loss)>{loss, mean}),
           .more = {{{}, {}}, {{0}, {0}}, {{1}, {1}}}});
    };
    fused("mse_loss", &mse_loss, ops::SquaredError{}, block);
    fused("l1_loss", &l1_loss, ops::AbsoluteError{}, block);
    fused(
        "huber_loss",
        [](const Tensor& x, const Tensor& t, Reduction how) { return huber_loss(x, t, 0.7, how); },
        ops::Huber{0.7}, block);
    fused(
        "bce_with_logits",
        [](const Tensor& x, const Tensor& t, Reduction how) { return bce_with_logits(x, t, {how}); },
        ops::BceWithLogits{}, block);
    fused(
        "bce_loss", [](const Tensor& x, const Tensor& t, Reduction how) { return bce_loss(x, t, {how}); },
        ops::Bce{}, probabilities);
  }
  pair(
      "mse_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return mse_loss(x, t, r); }, block,
      block);
  pair(
      "l1_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return l1_loss(x, t, r); }, block,
      block);
  pair(
      "huber_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return huber_loss(x, t, 0.7, r); },
      block, block);
  pair(
      "smooth_l1_loss",
      [](const Tensor& x, const Tensor& t, Reduction r) { return smooth_l1_loss(x, t, 0.7, r); }, block,
      block);
  pair(
      "bce_with_logits",
      [](const Tensor& x, const Tensor& t, Reduction r) { return bce_with_logits(x, t, {r}); },
      {{3, 4, 5}, {7, 30, 41}}, probabilities);
  pair(
      "bce_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return bce_loss(x, t, {r}); },
      probabilities, probabilities);
  pair(
      "kl_div", [](const Tensor& x, const Tensor& t, Reduction r) { return kl_div(x, t, r); },
      {{3, 4, 5}, {7, 30, 41}}, probabilities);
  const Input images{{2, 5, 3}, {7, 41, 30}}, targets{{2, 3}, {7, 30}, Kind::index, 5},
      weight{{5}, {41}, Kind::number, 0, 0.3, 2};
  for (const Reduction r : {Reduction::mean, Reduction::none}) {
    const std::string form = " " + std::to_string(static_cast<int>(r));
    put("cross_entropy of images" + form, {images, targets},
        two([r](const Tensor& x, const Tensor& t) { return cross_entropy(x, t, {r, 3}); }),
        {.dtypes = floating_dtypes});
    put("cross_entropy, smoothed" + form, {images, targets, weight},
        three([r](const Tensor& x, const Tensor& t, const Tensor& w) {
          return cross_entropy(x, t,
                               {.reduction = r, .ignore_index = 3, .label_smoothing = 0.1, .weight = w});
        }),
        {.dtypes = floating_dtypes});
    put("nll_loss, unweighted" + form, {images, targets},
        two([r](const Tensor& x, const Tensor& t) { return nll_loss(x, t, {r, 3}); }),
        {.dtypes = floating_dtypes});
    put("nll_loss" + form, {images, targets, weight},
        three([r](const Tensor& x, const Tensor& t, const Tensor& w) { return nll_loss(x, t, {r, 3, w}); }),
        {.dtypes = floating_dtypes});
  }
}

void network_cases(const Add& put) {
  const Input images{{2, 4, 5, 6}, {3, 6, 20, 17}};
  put("group_norm", {images, {{4}, {6}}, {{4}, {6}}},
      three([](const Tensor& x, const Tensor& w, const Tensor& b) { return group_norm(x, 2, w, b); }),
      {.dtypes = floating_dtypes,
       .sixteen = Bits::rounded,
       .reference = three([](const Tensor& x, const Tensor& w, const Tensor& b) {
         const DType wide = compute_dtype(x.dtype());
         const Tensor in[] = {x, to(w, wide), to(b, wide)};
         return ops::GroupNorm{2}.reference(in)[0];
       }),
       .more = {{{2, 4}, {4}, {4}}, {{0, 4, 3}, {4}, {4}}}});
  put("group_norm, plain", {images}, one([](const Tensor& x) { return group_norm(x, 1); }),
      {.dtypes = floating_dtypes, .sixteen = Bits::rounded});
  const ops::Patches windows{{2, 3, 2, 1}};
  put("patches", {images}, one([windows](const Tensor& x) { return apply(windows, x); }),
      {.dtypes = floating_dtypes, .reference = reference(windows)});
  put("max_pool2d", {images}, one([](const Tensor& x) { return max_pool2d(x, 3, {2, 1}); }),
      {.dtypes = floating_dtypes, .reference = reference(ops::MaxPool2d{{{3, 2, 1}, {3, 2, 1}}})});
  put("max_pool2d of windows that are apart", {images}, one([](const Tensor& x) { return max_pool2d(x, 2); }),
      {.dtypes = floating_dtypes,
       .reference = reference(ops::MaxPool2d{{{2, 2, 0}, {2, 2, 0}}}),
       .more = {{{1, 1, 2, 2}}, {{0, 2, 4, 4}}}});
  put("avg_pool2d", {images}, one([](const Tensor& x) { return avg_pool2d(x, 2, {1, 1}); }),
      {.dtypes = floating_dtypes, .reference = reference(ops::AvgPool2d{{{2, 1, 1}, {2, 1, 1}}})});
  put("avg_pool2d of windows that are apart", {images},
      one([](const Tensor& x) { return avg_pool2d(x, 2, {3}); }),
      {.dtypes = floating_dtypes,
       .reference = reference(ops::AvgPool2d{{{2, 3, 0}, {2, 3, 0}}}),
       .more = {{{1, 1, 2, 2}}, {{0, 2, 4, 4}}}});
  const Pool2dOptions uneven{.stride = {2, 3}, .padding = {0, 1}};
  put("max_pool2d of oblong windows", {images},
      one([uneven](const Tensor& x) { return max_pool2d(x, {3, 2}, uneven); }),
      {.dtypes = floating_dtypes, .reference = reference(ops::MaxPool2d{{{3, 2, 0}, {2, 3, 1}}})});
  const AvgPool2dOptions uneven_means{.stride = {2, 3}, .padding = {0, 1}};
  put("avg_pool2d of oblong windows", {images},
      one([uneven_means](const Tensor& x) { return avg_pool2d(x, {3, 2}, uneven_means); }),
      {.dtypes = floating_dtypes, .reference = reference(ops::AvgPool2d{{{3, 2, 0}, {2, 3, 1}}})});
  // Of 9 pixels windows of 2 leave one over; 2 beyond the padding of 7 stand for a window of one row.
  put("max_pool2d, ceil_mode", {{{2, 2, 7, 9}, {3, 3, 11, 17}}},
      one([](const Tensor& x) { return max_pool2d(x, {3, 2}, {.ceil_mode = true}); }),
      {.dtypes = floating_dtypes});
  put("max_pool2d of windows beyond the image", {{{2, 2, 7, 9}, {3, 3, 10, 17}}}, one([](const Tensor& x) {
        return apply_many(ops::MaxPool2d{{{3, 3, 0, 2}, {2, 2, 0, 1}}}, std::span(&x, 1))[0];
      }),
      {.dtypes = floating_dtypes, .reference = reference(ops::MaxPool2d{{{3, 3, 0, 2}, {2, 2, 0, 1}}})});
  put("avg_pool2d of windows beyond the image", {{{2, 2, 7, 8}, {3, 3, 10, 16}}},
      one([](const Tensor& x) { return apply(ops::AvgPool2d{{{3, 3, 0, 2}, {2, 2, 1, 1}}}, x); }),
      {.dtypes = floating_dtypes, .reference = reference(ops::AvgPool2d{{{3, 3, 0, 2}, {2, 2, 1, 1}}})});
  for (const bool include : {false, true})
    put(fmt::format("avg_pool2d, ceil_mode, padding counts: {}", include), {{{2, 2, 7, 9}, {3, 3, 11, 17}}},
        one([include](const Tensor& x) {
          return avg_pool2d(x, {3, 2}, {.padding = 1, .ceil_mode = true, .count_include_pad = include});
        }),
        {.dtypes = floating_dtypes, .sixteen = Bits::rounded});
  const Input lines{{2, 4, 9}, {3, 6, 50}};
  put("max_pool1d", {lines}, one([](const Tensor& x) { return max_pool1d(x, 3, {2, 1}); }),
      {.dtypes = floating_dtypes, .more = {{{0, 2, 4}}, {{1, 1, 3}}}});
  put("avg_pool1d", {lines}, one([](const Tensor& x) { return avg_pool1d(x, 3, {2, 1}); }),
      {.dtypes = floating_dtypes, .more = {{{0, 2, 4}}, {{1, 1, 3}}}});
  for (const InterpolateOptions& o : {InterpolateOptions{.size = {7, 3}}, InterpolateOptions{.scale = {2, 3}},
                                      InterpolateOptions{.scale = {0.7, 1.7}}})
    put(fmt::format("interpolate, nearest, size {}, scale {}", o.size.down, o.scale.down), {images},
        one([o](const Tensor& x) { return interpolate(x, o); }),
        {.sixteen = Bits::rounded, .more = {{{1, 1, 2, 2}}, {{0, 2, 4, 4}}}});
  for (const bool corners : {false, true})
    for (const InterpolateOptions& o : {InterpolateOptions{{7, 3}, 0, Interpolation::bilinear, corners},
                                        InterpolateOptions{0, {0.7, 2}, Interpolation::bilinear, corners}})
      put(fmt::format("interpolate, bilinear, size {}, corners {}", o.size.down, corners), {images},
          one([o](const Tensor& x) { return interpolate(x, o); }),
          {.dtypes = floating_dtypes, .sixteen = Bits::rounded, .more = {{{1, 1, 2, 2}}, {{0, 2, 4, 4}}}});
  put("adaptive_avg_pool2d", {images}, one([](const Tensor& x) { return adaptive_avg_pool2d(x, 2, 4); }),
      {.dtypes = floating_dtypes, .layouts = Bits::rounded, .sixteen = Bits::rounded});
  put("adaptive_max_pool2d", {images}, one([](const Tensor& x) { return adaptive_max_pool2d(x, 2, 4); }),
      {.dtypes = floating_dtypes});
  const auto conv = [](Conv2dOptions o) {
    return three([o](const Tensor& x, const Tensor& w, const Tensor& b) { return conv2d(x, w, b, o); });
  };
  const Rules product{.dtypes = floating_dtypes, .layouts = Bits::rounded, .sixteen = Bits::rounded};
  put("conv2d in groups", {images, {{6, 2, 3, 2}, {8, 3, 3, 2}}, {{6}, {8}}},
      conv({.padding = {1, 0}, .groups = 2}), product);
  put("conv2d, dilated", {images, {{3, 4, 2, 3}, {8, 6, 2, 3}}, {{3}, {8}}},
      conv({.stride = {1, 2}, .padding = 1, .dilation = {2, 1}}), product);
  put("conv1d", {{{2, 4, 9}, {3, 6, 50}}, {{3, 4, 3}, {8, 6, 3}}}, two([](const Tensor& x, const Tensor& w) {
        return conv1d(x, w, {}, {.stride = 2, .padding = 2, .dilation = 2});
      }),
      product);
  // Zeros between the pixels, and the kernel turned round: a convolution whose padding is what is left of it.
  const auto spread = [](const Tensor& x, const Tensor& w, const Tensor& b, const ConvTranspose2dOptions& o) {
    const std::int64_t n = x.size(0), c = x.size(1), h = x.size(2), v = x.size(3), groups = o.groups;
    const std::int64_t s = o.stride.down, t = o.stride.across;
    const Tensor apart = pad(reshape(x, {n, c, h, 1, v, 1}), {0, t - 1, 0, 0, 0, s - 1});
    const Tensor image =
        narrow(narrow(reshape(apart, {n, c, h * s, v * t}), 2, 0, (h - 1) * s + 1), 3, 0, (v - 1) * t + 1);
    const std::int64_t reach = o.dilation.down * (w.size(2) - 1),
                       across = o.dilation.across * (w.size(3) - 1);
    const Tensor padded =
        pad(image, {across - o.padding.across, across - o.padding.across + o.output_padding.across,
                    reach - o.padding.down, reach - o.padding.down + o.output_padding.down});
    const Tensor grouped = reshape(flip(w, {2, 3}), {groups, c / groups, w.size(1), w.size(2), w.size(3)});
    const Tensor kernel =
        reshape(transpose(grouped, 1, 2), {groups * w.size(1), c / groups, w.size(2), w.size(3)});
    return conv2d(padded, kernel, b, {.dilation = o.dilation, .groups = groups});
  };
  for (const ConvTranspose2dOptions& o :
       {ConvTranspose2dOptions{},
        ConvTranspose2dOptions{.stride = 2, .padding = 1, .output_padding = 1, .groups = 2},
        ConvTranspose2dOptions{
            .stride = {3, 1}, .padding = {0, 2}, .output_padding = {2, 1}, .dilation = {1, 2}}}) {
    Rules rules = product;
    rules.reference =
        three([o, spread](const Tensor& x, const Tensor& w, const Tensor& b) { return spread(x, w, b, o); });
    rules.more = {{{0, 4, 5, 6}, {4, 3, 3, 2}, {3 * o.groups}}, {{1, 2, 4, 4}, {2, 1, 3, 3}, {o.groups}}};
    put(fmt::format("conv_transpose2d, stride {}", o.stride.down),
        {images, {{4, 2, 3, 2}, {6, 3, 3, 4}}, {{2 * o.groups}, {3 * o.groups}}},
        three(
            [o](const Tensor& x, const Tensor& w, const Tensor& b) { return conv_transpose2d(x, w, b, o); }),
        rules);
  }
  put("conv_transpose1d", {lines, {{4, 3, 3}, {6, 8, 3}}}, two([](const Tensor& x, const Tensor& w) {
        return conv_transpose1d(x, w, {}, {.stride = 2, .padding = 2, .output_padding = 1, .dilation = 2});
      }),
      product);
  const Input q{{2, 4, 3, 4}, {2, 6, 40, 8}}, kv{{2, 2, 5, 4}, {2, 3, 50, 8}};
  put("attention of shared heads", {q, kv, kv}, three([](const Tensor& q, const Tensor& k, const Tensor& v) {
        return attention(q, k, v, {.causal = true});
      }),
      {.dtypes = floating_dtypes, .f64_by_reference = true, .sixteen = Bits::rounded});
  put("attention with a mask", {q, kv, {{3, 5}, {40, 50}, Kind::mask}},
      three(
          [](const Tensor& q, const Tensor& k, const Tensor& m) { return attention(q, k, k, {.mask = m}); }),
      product);
  put("attention with an added mask", {q, kv, {{4, 1, 5}, {6, 1, 50}}},
      three([](const Tensor& q, const Tensor& k, const Tensor& m) {
        return attention(q, k, k, {.causal = true, .scale = 0.4, .mask = m});
      }),
      product);
  for (const RotaryPairs pairs : {RotaryPairs::halves, RotaryPairs::neighbours})
    put("rotary " + std::to_string(static_cast<int>(pairs)), {{{2, 4, 5, 6}, {3, 6, 20, 18}}},
        one([pairs](const Tensor& x) { return rotary(x, {.first = 3, .pairs = pairs}); }),
        {.dtypes = floating_dtypes});
}

}  // namespace

std::vector<Case> made_cases() {
  std::vector<Case> all;
  const Add put = [&](std::string name, std::vector<Input> inputs, Call call, Rules rules) {
    all.push_back({std::move(rules), std::move(name), std::move(inputs), std::move(call)});
  };
  indexing_cases(put);
  arranging_cases(put);
  statistics_cases(put);
  loss_cases(put);
  network_cases(put);
  return all;
}

}  // namespace sherd::test
