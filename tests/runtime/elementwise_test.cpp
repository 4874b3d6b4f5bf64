// Every elementwise op of the list: layouts, dtypes, threads, places, gradients, refusals.
#include <array>
#include <cmath>
#include <numeric>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/ops/listing.h"
#include "runtime/ops/sum.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

const std::vector<ElementwiseListing>& listing() {
  static const std::vector<ElementwiseListing> list = elementwise_listing();
  return list;
}

template <class F>
void for_each_op(F&& body) {
  for (const ElementwiseListing& entry : listing()) {
    INFO(entry.op->name());
    try {
      body(entry);
    } catch (const std::exception& error) {  // the other ops are still looked at
      FAIL_CHECK(error.what());
    }
  }
}

template <class F>
void for_each_op_and_dtype(F&& body) {
  for_each_op([&](const ElementwiseListing& entry) {
    for (DType dtype : all_dtypes) {
      if (!entry.dtypes.contains(dtype)) continue;
      INFO(name_of(dtype));
      body(entry, dtype);
    }
  });
}

Tensor call(const AnyOp& op, std::span<const Tensor> in) { return apply(op, in)[0]; }

std::vector<Tensor> inputs_of(const ElementwiseListing& entry, const Shape& shape, DType dtype,
                              unsigned seed = 1) {
  std::vector<Tensor> in;
  for (int i = 0; i < entry.arity; ++i)
    in.push_back(numbers(shape, dtype, seed + static_cast<unsigned>(i), entry.low, entry.high));
  return in;
}

std::vector<Tensor> specials_of(const ElementwiseListing& entry, const Shape& shape, DType dtype) {
  std::vector<Tensor> in;
  for (int i = 0; i < entry.arity; ++i)
    in.push_back(with_specials(shape, dtype, 3 + 2 * static_cast<unsigned>(i)));
  return in;
}

bool differentiable(const ElementwiseListing& entry) { return entry.op->differentiable(); }

/// Results and gradients (of floats) of each element computed alone.
std::vector<Tensor> alone(const ElementwiseListing& entry, std::span<const Tensor> in) {
  std::vector<Tensor> pieces;
  for (std::int64_t i = 0; i < in[0].numel(); ++i) {
    std::vector<Tensor> one;
    for (const Tensor& x : in) one.push_back(clone(select(flatten(x), 0, i)));
    pieces.push_back(call(*entry.op, one));
  }
  return {reshape(stack(pieces), in[0].shape())};
}

/// First gradients for an upstream of ones.
std::vector<Tensor> gradients(const ElementwiseListing& entry, std::span<const Tensor> in) {
  std::vector<Tensor> leaves;
  for (const Tensor& x : in) leaves.push_back(x.detach().requires_grad_());
  const Tensor y = call(*entry.op, leaves);
  return grad(y, leaves, ones(y.shape(), {y.dtype()}));
}

}  // namespace

TEST_CASE("elementwise: of every 16-bit float a long call gives what short ones give, however it lies") {
  const auto in_pieces = [](const AnyOp& op, const Tensor& x) {
    std::vector<Tensor> pieces;
    for (std::int64_t i = 0; i < x.numel(); i += 4096)
      pieces.push_back(call(op, std::vector{narrow(x, 0, i, 4096)}));
    return cat(pieces, 0);
  };
  for_each_op_and_dtype([&](const ElementwiseListing& entry, DType dtype) {
    if (entry.arity != 1 || (dtype != f16 && dtype != bf16)) return;
    const Tensor all = empty({1 << 16}, {dtype});
    std::iota(reinterpret_cast<std::uint16_t*>(all.raw()),
              reinterpret_cast<std::uint16_t*>(all.raw()) + all.numel(), std::uint16_t{0});
    const Tensor expected = in_pieces(*entry.op, all);
    CHECK(same_bits(call(*entry.op, std::vector{all}), expected));
    const Tensor turned = transpose(reshape(all, {256, 256}), 0, 1);
    CHECK(same_bits(call(*entry.op, std::vector{turned}), transpose(reshape(expected, {256, 256}), 0, 1)));
    if (!entry.in_place) return;
    call(*entry.in_place, std::vector{all});
    CHECK(same_bits(all, expected));
  });
}

TEST_CASE("elementwise: an element's result depends on its inputs alone, in every layout", "[one thread]") {
  for_each_op_and_dtype([](const ElementwiseListing& entry, DType dtype) {
    for (const Shape& shape : {Shape{3, 41}, Shape{2, 3, 5}, Shape{1}, Shape{37}}) {
      const std::vector<Tensor> in = specials_of(entry, shape, dtype);
      const Tensor expected = alone(entry, in)[0];
      for (Lay lay : all_lays) {
        INFO(to_string(lay) << " " << to_string(shape));
        CHECK(same_bits(call(*entry.op, laid(in, lay)), expected));
      }
      if (entry.arity == 2) {
        const std::vector<Tensor> mixed = {laid(in[0], Lay::permuted), laid(in[1], Lay::holes)};
        CHECK(same_bits(call(*entry.op, mixed), expected));
      }
    }
  });
}

TEST_CASE("elementwise: 0-d and empty tensors keep their shape") {
  for_each_op_and_dtype([](const ElementwiseListing& entry, DType dtype) {
    for (const Shape& shape : {Shape{}, Shape{0}, Shape{0, 4}, Shape{3, 0, 2}}) {
      const Tensor y = call(*entry.op, inputs_of(entry, shape, dtype));
      CHECK(y.shape() == shape);
      CHECK(y.dtype() == (entry.gives_bool ? boolean : dtype));
    }
  });
}

TEST_CASE("elementwise: broadcasting equals expanding first") {
  for_each_op_and_dtype([](const ElementwiseListing& entry, DType dtype) {
    if (entry.arity != 2) return;
    const std::pair<Shape, Shape> pairs[] = {{{4, 5}, {5}}, {{4, 1}, {4, 5}}, {{3, 1, 5}, {4, 1}},
                                             {{}, {4, 5}},  {{1}, {0, 3}},    {{300, 3}, {3}}};
    for (const auto& [a, b] : pairs) {
      const Tensor in[] = {numbers(a, dtype, 1, entry.low, entry.high),
                           numbers(b, dtype, 2, entry.low, entry.high)};
      const Shape both = broadcast_shapes("test", a, b);
      const Tensor wide[] = {clone(expand(in[0], both)), clone(expand(in[1], both))};
      CHECK(same_bits(call(*entry.op, in), call(*entry.op, wide)));
      const Tensor turned[] = {in[1], in[0]}, wide_turned[] = {wide[1], wide[0]};
      CHECK(same_bits(call(*entry.op, turned), call(*entry.op, wide_turned)));
    }
  });
}

TEST_CASE("elementwise: 16-bit floats are computed in f32 and rounded once") {
  for_each_op_and_dtype([](const ElementwiseListing& entry, DType dtype) {
    if (dtype != f16 && dtype != bf16) return;
    for (const auto& in : {inputs_of(entry, {403}, dtype), specials_of(entry, {2, 1301}, dtype),
                           specials_of(entry, {3, 90, 7}, dtype)}) {
      std::vector<Tensor> wide;
      for (const Tensor& x : in) wide.push_back(to(x, f32));
      const Tensor y = call(*entry.op, wide), rounded = entry.gives_bool ? y : to(y, dtype);
      CHECK(same_bits(call(*entry.op, in), rounded));
      for (Lay lay : all_lays) CHECK(same_bits(call(*entry.op, laid(in, lay)), rounded));
    }
  });
}

TEST_CASE("elementwise: the number of threads and the place in a span change no bit") {
  for_each_op_and_dtype([](const ElementwiseListing& entry, DType dtype) {
    const std::vector<Tensor> in = specials_of(entry, {40003}, dtype);
    std::vector<Tensor> results, grads;
    for (int threads : {1, 2, 3}) {
      const Threads scope(threads);
      results.push_back(call(*entry.op, in));
      CHECK(same_bits(results.back(), results[0]));
      if (!is_floating(dtype) || !differentiable(entry)) continue;
      grads.push_back(gradients(entry, in)[0]);
      CHECK(same_bits(grads.back(), grads[0]));
    }
    for (std::int64_t begin : {0, 1, 5, 16383, 39990}) {
      std::vector<Tensor> part;
      for (const Tensor& x : in) part.push_back(narrow(x, 0, begin, 13));
      INFO("from " << begin);
      CHECK(same_bits(call(*entry.op, part), narrow(results[0], 0, begin, 13)));
      if (!grads.empty()) CHECK(same_bits(gradients(entry, part)[0], narrow(grads[0], 0, begin, 13)));
    }
  });
}

TEST_CASE("elementwise: gradients are those of finite differences, the second time too") {
  for_each_op([](const ElementwiseListing& entry) {
    if (!differentiable(entry)) return;
    const auto fn = [&](std::span<const Tensor> x) { return call(*entry.op, x); };
    for (Lay lay : all_lays) {
      INFO(to_string(lay));
      CHECK(gradient_error(fn, laid(inputs_of(entry, {3, 4}, f64), lay)) < 1e-7);
    }
    CHECK(gradient_error(fn, inputs_of(entry, {}, f64)) < 1e-7);
    CHECK(second_gradient_error(fn, inputs_of(entry, {2, 3}, f64)) < 1e-6);
    if (entry.arity != 2) return;
    const Tensor row[] = {numbers({3, 4}, f64, 1, entry.low, entry.high),
                          numbers({4}, f64, 2, entry.low, entry.high)};
    CHECK(gradient_error(fn, row) < 1e-7);
    CHECK(second_gradient_error(fn, row) < 1e-6);
    const Tensor both[] = {numbers({3, 1}, f64, 1, entry.low, entry.high),
                           numbers({1, 4}, f64, 2, entry.low, entry.high)};
    CHECK(gradient_error(fn, both) < 1e-7);
    const Tensor one = numbers({5}, f64, 1, entry.low, entry.high);
    CHECK(gradient_error(
              [&](std::span<const Tensor> x) {
                const Tensor same[] = {x[0], x[0]};
                return call(*entry.op, same);
              },
              std::span(&one, 1)) <
          (entry.op->name() == "maximum" || entry.op->name() == "minimum" ? 1e-6 : 1e-7));
  });
}

TEST_CASE("elementwise: a recorded gradient has the values of a plain one, at the edges too") {
  for_each_op([](const ElementwiseListing& entry) {
    if (!differentiable(entry)) return;
    std::vector<Tensor> leaves;
    for (const Tensor& x : specials_of(entry, {200}, f64)) leaves.push_back(x.detach().requires_grad_());
    const Tensor y = call(*entry.op, leaves), up = numbers({200}, f64, 9, 0.5, 1.5);
    const std::vector<Tensor> plain = grad(y, leaves, up, {.retain_graph = true});
    const std::vector<Tensor> recorded = grad(y, leaves, up, {.create_graph = true});
    for (std::size_t i = 0; i < leaves.size(); ++i) CHECK(distance(recorded[i], plain[i]) < 1e-12);
  });
}

TEST_CASE("elementwise: gradients come in the input's dtype") {
  for_each_op_and_dtype([](const ElementwiseListing& entry, DType dtype) {
    if (!differentiable(entry) || !is_floating(dtype)) return;
    const std::vector<Tensor> in = inputs_of(entry, {5, 7}, dtype);
    std::vector<Tensor> wide;
    for (const Tensor& x : in) wide.push_back(to(x, f64));
    const std::vector<Tensor> got = gradients(entry, in), exact = gradients(entry, wide);
    const double rounding = dtype == f64 ? 0 : dtype == f32 ? 1e-5 : dtype == f16 ? 4e-3 : 4e-2;
    for (std::size_t i = 0; i < got.size(); ++i) {
      CHECK(got[i].dtype() == dtype);
      // Where inputs were rounded onto a kink the two need not agree: ops with kinks have gradients of 0, 1/2
      // and 1 there in both.
      CHECK(distance(got[i], exact[i]) <= rounding);
    }
  });
}

TEST_CASE("elementwise: in-place forms equal the others and write where they are") {
  for_each_op_and_dtype([](const ElementwiseListing& entry, DType dtype) {
    if (!entry.in_place) return;
    for (Lay lay : all_lays) {
      INFO(to_string(lay));
      const std::vector<Tensor> in = specials_of(entry, {6, 9}, dtype);
      const Tensor expected = call(*entry.op, in);
      std::vector<Tensor> own = laid(in, lay);
      if (lay == Lay::dense) own[0] = clone(own[0]);
      const std::uint32_t version = own[0].storage().version();
      const Tensor y = call(*entry.in_place, own);
      CHECK(y.is(own[0]));
      CHECK(own[0].storage().version() > version);
      CHECK(same_bits(own[0], expected));
    }
    if (entry.arity == 1) return;
    Tensor x = clone(specials_of(entry, {8}, dtype)[0]);
    const Tensor same[] = {x, x};
    const Tensor expected = call(*entry.op, same);
    CHECK(same_bits(call(*entry.in_place, same), expected));
    const Tensor wrong[] = {x, numbers({3, 8}, dtype)};
    CHECK(one_line_about(message_of<ShapeError>([&] { call(*entry.in_place, wrong); }), entry.op->name()));
    const Tensor overlapping[] = {slice(x, 0, 0, 4), slice(x, 0, 1, 5)};
    CHECK(one_line_about(message_of<StateError>([&] { call(*entry.in_place, overlapping); }),
                         entry.op->name()));
  });
}

TEST_CASE("elementwise: two numbers are chosen from by a mask, and a number has powers") {
  const Tensor mask = Tensor::from({true, false, true});
  CHECK(same_bits(where(mask, 1, 0), Tensor::from<std::int64_t>({1, 0, 1})));
  CHECK(same_bits(where(mask, 0.5, -1), Tensor::from({0.5F, -1.0F, 0.5F})));
  {
    const DefaultOptions wide({.dtype = f64});
    CHECK(same_bits(where(mask, 0.5, -1), Tensor::from({0.5, -1.0, 0.5})));
  }
  CHECK_THROWS_AS(where(Tensor(), 1, 0), ValueError);
  CHECK_THROWS_AS(where(Tensor::from({1, 2}), 1, 0), DTypeError);
  for (const DType dtype : {f32, f64, f16, bf16}) {
    const Tensor x = to(Tensor::from({-1.0, 0.0, 3.0, 0.5}), dtype);
    CHECK(same_bits(pow(2, x), pow(full({4}, 2, {dtype}), x)));
  }
  CHECK_THROWS_AS(pow(3, Tensor::from({0, 1, 4})), DTypeError);
}

TEST_CASE("elementwise: an in-place form refuses memory where elements lie on each other") {
  for_each_op([](const ElementwiseListing& entry) {
    if (!entry.in_place) return;
    std::vector<Tensor> in = inputs_of(entry, {3, 4}, f32);
    in[0] = expand(numbers({4}, f32, 1, entry.low, entry.high), {3, 4});
    CHECK(one_line_about(message_of<StateError>([&] { call(*entry.in_place, in); }), entry.op->name()));
  });
}

TEST_CASE("elementwise: wrong dtypes, shapes and devices are refused by name") {
  for_each_op([](const ElementwiseListing& entry) {
    const std::string_view name = entry.op->name();
    for (DType dtype : all_dtypes) {
      if (entry.dtypes.contains(dtype)) continue;
      const std::string text = message_of<DTypeError>([&] { call(*entry.op, inputs_of(entry, {3}, dtype)); });
      INFO(text);
      CHECK(one_line_about(text, name));
      CHECK(one_line_about(text, name_of(dtype)));
    }
    if (entry.arity != 2) return;
    const Tensor x = numbers({3, 4}, f32);
    const auto with = [&](const Tensor& other) {
      return [&entry, x, other] {
        const Tensor in[] = {x, other}, turned[] = {other, x};
        CHECK_THROWS_AS(call(*entry.op, turned), Error);
        call(*entry.op, in);
      };
    };
    CHECK(one_line_about(message_of<DTypeError>(with(numbers({3, 4}, f64))), name));
    CHECK(one_line_about(message_of<ShapeError>(with(numbers({3}, f32))), name));
    CHECK(one_line_about(message_of<DeviceError>(with(to(x, Device::cpu(1)))), "cpu:1"));
    CHECK(one_line_about(message_of<DeviceError>(with(to(x, Device::cpu(1)))), name));
    CHECK(one_line_about(message_of<DeviceError>(with(empty({3, 4}, {f32, Device::meta()}))), "meta"));
  });
}

TEST_CASE("elementwise: meta gives shapes only, and cpu:1 is a device of its own") {
  for_each_op([](const ElementwiseListing& entry) {
    std::vector<Tensor> host, second, shapes;
    for (const Tensor& x : inputs_of(entry, {4, 3}, f32)) {
      host.push_back(x);
      second.push_back(to(x, Device::cpu(1)));
      shapes.push_back(empty({x.shape(), x.dtype(), Device::meta()}));
    }
    const Tensor y = call(*entry.op, host), z = call(*entry.op, second), m = call(*entry.op, shapes);
    CHECK(z.device() == Device::cpu(1));
    CHECK(same_bits(y, z));
    CHECK(m.spec() == Spec{y.shape(), y.dtype(), Device::meta()});
    CHECK_THROWS_AS(m.to_vector<float>(), Error);
  });
}

TEST_CASE("a number stands for a tensor of it, in values and in gradients") {
  using Pair = std::pair<std::function<Tensor(const Tensor&, const Tensor&)>,
                         std::function<Tensor(const Tensor&, double)>>;
  const auto pair = [](auto f) { return Pair{f, f}; };
  const std::pair<const char*, Pair> forms[] = {
      {"add", pair([](const Tensor& a, const auto& b) { return add(a, b); })},
      {"sub", pair([](const Tensor& a, const auto& b) { return sub(a, b); })},
      {"mul", pair([](const Tensor& a, const auto& b) { return mul(a, b); })},
      {"div", pair([](const Tensor& a, const auto& b) { return div(a, b); })},
      {"pow", pair([](const Tensor& a, const auto& b) { return pow(a, b); })},
      {"maximum", pair([](const Tensor& a, const auto& b) { return maximum(a, b); })},
      {"minimum", pair([](const Tensor& a, const auto& b) { return minimum(a, b); })},
      {"remainder", pair([](const Tensor& a, const auto& b) { return remainder(a, b); })},
      {"sub reversed", pair([](const Tensor& a, const auto& b) { return sub(b, a); })},
      {"div reversed", pair([](const Tensor& a, const auto& b) { return div(b, a); })},
      {"equal", pair([](const Tensor& a, const auto& b) { return equal(a, b); })},
      {"not_equal", pair([](const Tensor& a, const auto& b) { return not_equal(a, b); })},
      {"less", pair([](const Tensor& a, const auto& b) { return less(a, b); })},
      {"less_equal", pair([](const Tensor& a, const auto& b) { return less_equal(a, b); })},
      {"greater", pair([](const Tensor& a, const auto& b) { return greater(a, b); })},
      {"greater_equal", pair([](const Tensor& a, const auto& b) { return greater_equal(a, b); })},
  };
  for (const auto& [name, form] : forms)
    for (double value : {2.0, -0.5, 0.0})
      for (DType dtype : {f64, f32, f16, bf16}) {
        INFO(name << " " << value << " " << name_of(dtype));
        const Tensor s = Tensor::scalar(value, {dtype});
        Tensor x = with_specials({61}, dtype);
        CHECK(same_bits(form.second(x, value), form.first(x, s)));
        x = numbers({61}, dtype, 4, 0.3, 3).requires_grad_();
        const Tensor y = form.second(x, value);
        if (!y.requires_grad()) continue;
        const Tensor up = numbers(y.shape(), dtype, 8);
        CHECK(same_bits(grad(y, std::span(&x, 1), up)[0], grad(form.first(x, s), std::span(&x, 1), up)[0]));
      }
  CHECK(one_line_about(message_of<DTypeError>([] { add(numbers({3}, i64), 0.5); }), "add"));
  CHECK(one_line_about(message_of<DTypeError>([] { add_(numbers({3}, i64), 0.5); }), "add_"));
  CHECK(same_bits(add(numbers({3}, i32), 2.0), add(numbers({3}, i32), numbers({3}, i32, 1, 2, 2))));
}

TEST_CASE("elu: both derivatives are finite where e^x is not") {
  for (const DType dtype : {f32, f64, f16, bf16}) {
    const Tensor x = to(Tensor::from<float>({-3, -0.5, 0, 2, 100, 1000}, {6}), dtype).requires_grad_();
    const Tensor slope = grad(elu(x), std::span(&x, 1), ones({6}, {dtype}), {.create_graph = true})[0];
    const Tensor bend = grad(slope, std::span(&x, 1), ones({6}, {dtype}))[0];
    const Tensor below = exp(minimum(x.detach(), 0));
    CHECK(distance(slope.detach(), below) < 1e-2);
    CHECK(distance(bend, where(less_equal(x.detach(), 0), below, 0)) < 1e-2);
  }
}

TEST_CASE("remainder: an integer's of 0 is 0, and a quotient's gradient is the whole number") {
  for (const DType dtype : {i64, i32, u8})
    CHECK(same_bits(remainder(full({3}, 7, {dtype}), 0), zeros({3}, {dtype})));
  const Tensor a = Tensor::from<double>({7, -7, 7, -7, -1e-30}, {5}),
               b = Tensor::from<double>({3, 3, -3, -3, 1}, {5}).requires_grad_();
  const Tensor quotients = grad(remainder(a, b), std::span(&b, 1), full({5}, -1, {f64}))[0];
  CHECK(quotients.to_vector<double>() == std::vector<double>{2, -3, -3, 2, -1});
}

TEST_CASE("floor_divide: so many b and the remainder are a; by 0 it is 0") {
  for (DType dtype : {i32, i64, u8}) {
    const Tensor a = with_specials({7, 1}, dtype), b = with_specials({9}, dtype, 5), q = floor_divide(a, b);
    INFO(name_of(dtype));
    CHECK(
        same_bits(add(mul(q, b), remainder(a, b)), where(equal(b, 0), zeros_like(q), add(a, zeros_like(q)))));
    for (int value : {-3, -1, 0, 2}) {
      if (dtype == u8 && value < 0) continue;
      CHECK(same_bits(floor_divide(a, value), floor_divide(a, full({}, value, {dtype}))));
    }
  }
  CHECK(floor_divide(Tensor::from<int>({7, -7, 7, -7}, {4}), Tensor::from<int>({2, 2, -2, -2}, {4}))
            .to_vector<std::int32_t>() == std::vector<std::int32_t>{3, -4, -4, 3});
}

TEST_CASE("a number is compared as what it is in the tensor's dtype") {
  for (const DType dtype : {f16, bf16, f32, f64})
    for (const double value : {0.1, 1.0 / 3, 2049.0, -0.7}) {
      INFO(name_of(dtype) << " " << value);
      const Tensor x = full({3}, value, {dtype});
      for (const Tensor& yes : {equal(x, value), less_equal(x, value), greater_equal(x, value)})
        CHECK(yes.to_vector<bool>() == std::vector<bool>(3, true));
      for (const Tensor& no : {not_equal(x, value), less(x, value), greater(x, value)})
        CHECK(no.to_vector<bool>() == std::vector<bool>(3, false));
    }
}

TEST_CASE("steps have no slope, whatever gradient comes") {
  const double infinite = std::numeric_limits<double>::infinity();
  for (const auto f : {&sherd::floor, &sherd::ceil, &sherd::round, &sherd::trunc, &sign}) {
    const Tensor x = Tensor::from<float>({-1.5, 0, 0.5, 3}, {4}).requires_grad_();
    CHECK(same_bits(grad(f(x), std::span(&x, 1), full({4}, infinite))[0], zeros({4})));
  }
}

TEST_CASE("gradients of atan2 keep pairs of any size, and are 0 at the origin") {
  for (const double size : {1e-30, 1e-20, 1.0, 1e20, 1e30}) {
    const std::vector<Tensor> in = {full({1}, 3 * size).requires_grad_(),
                                    full({1}, 4 * size).requires_grad_()};
    const auto g = grad(atan2(in[0], in[1]), in);
    CHECK(std::fabs(g[0].item() * size / 0.16 - 1) < 1e-6);
    CHECK(std::fabs(g[1].item() * size / -0.12 - 1) < 1e-6);
  }
  const std::vector<Tensor> origin = {zeros({1}).requires_grad_(), zeros({1}).requires_grad_()};
  for (const Tensor& g : grad(atan2(origin[0], origin[1]), origin)) CHECK(g.item() == 0);
}

TEST_CASE("the public functions call the ops of their names") {
  Heard heard;
  {
    const Listening scope(heard);
    const Tensor x = numbers({3}, f32, 1, 0.3, 0.9), m = greater(x, 0.5);
    for (auto f :
         {&neg,          &sherd::abs,   &sherd::exp,   &sherd::log,   &sherd::log1p, &sherd::sqrt,
          &rsqrt,        &sherd::sin,   &sherd::cos,   &sherd::tanh,  &sigmoid,      &sherd::erf,
          &relu,         &silu,         &square,       &reciprocal,   &sherd::floor, &sherd::isfinite,
          &logical_not,  &sherd::tan,   &sherd::asin,  &sherd::acos,  &sherd::atan,  &sherd::sinh,
          &sherd::cosh,  &sherd::asinh, &sherd::acosh, &sherd::atanh, &sherd::exp2,  &sherd::expm1,
          &sherd::log2,  &sherd::log10, &sign,         &sherd::round, &sherd::trunc, &sherd::ceil,
          &sherd::isnan, &sherd::isinf, &softplus,     &selu})
      f(x);
    gelu(x), gelu(x, GeluForm::tanh), leaky_relu(x), clamp(x, 0, 1), where(m, x, x), masked_fill(x, m, 1);
    const Reduction none = Reduction::none;
    mse_loss(x, x, none), l1_loss(x, x, none), huber_loss(x, x, 1, none);
    bce_loss(x, x, {none}), bce_with_logits(x, x, {none});
    ops::Norm{{1}}.reference(std::array{x});  // has the root, which no function is
    using Binary = Tensor (*)(const Tensor&, const Tensor&);
    for (Binary f :
         {Binary(&add), Binary(&sub), Binary(&mul), Binary(&div), Binary(&sherd::pow), Binary(&maximum),
          Binary(&minimum), Binary(&sherd::atan2), Binary(&sherd::remainder), Binary(&floor_divide),
          Binary(&swiglu), Binary(&equal), Binary(&not_equal), Binary(&less), Binary(&less_equal),
          Binary(&greater), Binary(&greater_equal), Binary(&logical_and), Binary(&logical_or)})
      f(x, x);
  }
  for_each_op(
      [&](const ElementwiseListing& entry) { CHECK(heard.names.contains(std::string(entry.op->name()))); });
  CHECK(heard.names.contains("where"));
}
