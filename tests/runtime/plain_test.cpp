// A back end of an application's own that has kernels of the primitive ops alone: every other op of the list,
// gradients of fused ones and optimizer steps included, runs there by its form in other ops, and agrees.
#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/ops/list.h"
#include "runtime/ops/listing.h"
#include "tests/runtime/op_cases.h"
#include "tests/runtime/plain_device.h"

using namespace sherd;
using namespace sherd::test;

namespace {

template <class O, class List>
struct IsIn;
template <class O, class... T>
struct IsIn<O, OpList<T...>> : std::disjunction<std::is_same<O, T>...> {};

}  // namespace

TEST_CASE("plain: every op is a primitive or has a form in other ops") {
  ops::for_each_structural([]<class O>() {
    static_assert(IsIn<O, ops::Primitives>::value || ViewOp<O> || RunsItself<O> || HasReference<O>);
  });
  SUCCEED();
}

TEST_CASE("plain: every op runs by its reference and agrees", "[one thread]") { check_device(plain()); }

TEST_CASE("plain: gradients of elementwise ops, their forms with a number and in place") {
  for (const ElementwiseListing& entry : elementwise_listing()) {
    INFO(entry.op->name());
    for (DType dtype : {f32, f64}) {
      if (!entry.dtypes.contains(dtype)) continue;
      std::vector<Tensor> here, there;
      for (int i = 0; i < entry.arity; ++i) {
        here.push_back(numbers({3, 4}, dtype, 1 + static_cast<unsigned>(i), entry.low, entry.high));
        there.push_back(to(here.back(), plain()));
      }
      const auto gradients = [&](std::vector<Tensor> in) {
        for (Tensor& x : in) x = x.detach().requires_grad_();
        const Tensor y = sherd::apply(*entry.op, in)[0];
        return grad(y, in, ones(y.shape(), {y.dtype(), y.device()}));
      };
      CHECK(distance(sherd::apply(*entry.op, there)[0], sherd::apply(*entry.op, here)[0]) == 0);
      if (entry.op->differentiable()) {
        const std::vector<Tensor> got = gradients(there), expected = gradients(here);
        for (std::size_t i = 0; i < got.size(); ++i) CHECK(distance(got[i], expected[i]) < 1e-6);
      }
      if (!entry.in_place) continue;
      here[0] = clone(here[0]);
      there[0] = clone(there[0]);
      CHECK(distance(sherd::apply(*entry.in_place, there)[0], sherd::apply(*entry.in_place, here)[0]) == 0);
    }
  }
  const Tensor x = numbers({5}, f32), p = to(x, plain());
  CHECK(distance(add(p, 2), add(x, 2)) == 0);
  CHECK(distance(sub(1, p), sub(1, x)) == 0);
  CHECK(distance(less(p, 0.5), less(x, 0.5)) == 0);
  CHECK(distance(mul_(clone(p), 3), mul_(clone(x), 3)) == 0);
}

TEST_CASE("plain: optimizer steps and clipping") {
  const auto step = [](Device device, const auto& op, std::size_t stride, double skip = 0) {
    std::vector<Tensor> in{to(Tensor::scalar(0.1, {f64}), device)};
    if (op.skippable == ops::Skippable::yes) in.push_back(to(Tensor::scalar(skip, {f32}), device));
    if (op.clipped == ops::Clipped::yes) in.push_back(to(Tensor::scalar(0.3, {f64}), device));
    bool twins = false;
    if constexpr (requires { op.twins; }) twins = op.twins == ops::Twins::yes;
    if (twins) --stride;
    for (unsigned i = 0; i < 3; ++i) {
      for (std::size_t k = 0; k + 1 < stride; ++k) {
        const Tensor values =
            numbers({static_cast<std::int64_t>(i), 4}, f32, 1 + 7 * i + static_cast<unsigned>(k));
        in.push_back(to(k == 3 ? square(values) : values, device));
      }
      in.push_back(to(op.counts(op.form()) ? full({}, static_cast<int>(i), {f64})
                                           : numbers({static_cast<std::int64_t>(i), 4}, f32, 50 + i),
                      device));
      if constexpr (requires { op.alpha; } || requires { op.lr_decay; }) {  // the first of its state is of
                                                                            // squares
        Tensor& squares = in[in.size() - stride + 2];
        squares = square(squares);
      }
      if (!twins) continue;
      const std::size_t g = in.size() - stride + 1;
      in[g] = to(in[g], bf16);
      in.push_back(to(in[g - 1], bf16));
    }
    apply_many(op, in);
    return in;
  };
  const auto agree = [&](const auto& op, std::size_t stride) {
    for (const double skip : {0.0, 1.0}) {
      if (skip != 0 && op.skippable == ops::Skippable::no) continue;
      const std::vector<Tensor> got = step(plain(), op, stride, skip),
                                expected = step(Device::cpu(), op, stride, skip);
      for (std::size_t i = 0; i < got.size(); ++i) {
        INFO("input " << i << ", skip " << skip);
        CHECK(distance(got[i], expected[i]) < (got[i].dtype() == bf16 ? 1e-2 : 1e-6));
      }
    }
  };
  for (double decay : {0.0, 0.1})
    for (bool decoupled : {false, true})
      agree(ops::AdamStep{.weight_decay = decay, .decoupled = decoupled}, 5);
  for (double decay : {0.0, 0.1}) {
    agree(ops::SgdStep{.weight_decay = decay}, 2);
    agree(ops::SgdStep{.momentum = 0.9, .weight_decay = decay}, 4);
    agree(ops::SgdStep{.momentum = 0.9, .weight_decay = decay, .skippable = ops::Skippable::yes}, 4);
    for (const bool nesterov : {false, true})
      agree(ops::SgdStep{.momentum = 0.9, .weight_decay = decay, .dampening = 0.3, .nesterov = nesterov}, 4);
    for (const bool centered : {false, true})
      for (const double momentum : {0.0, 0.9})
        for (const ops::Skippable skippable : {ops::Skippable::no, ops::Skippable::yes}) {
          ops::RmspropStep op{.weight_decay = decay, .momentum = momentum, .centered = centered};
          op.skippable = skippable;
          op.clipped = centered ? ops::Clipped::yes : ops::Clipped::no;
          agree(op, op.stride());
        }
    agree(ops::AdamStep{.weight_decay = decay, .skippable = ops::Skippable::yes}, 5);
    for (const bool maximize : {false, true}) {
      agree(ops::AdamStep{.weight_decay = decay, .amsgrad = true, .maximize = maximize}, 6);
      agree(
          ops::AdamStep{
              .weight_decay = decay, .amsgrad = true, .maximize = maximize, .twins = ops::Twins::yes},
          7);
      agree(ops::SgdStep{.momentum = 0.9, .weight_decay = decay, .maximize = maximize}, 4);
      agree(ops::RmspropStep{.weight_decay = decay, .centered = true, .maximize = maximize}, 4);
      for (const ops::Clipped clipped : {ops::Clipped::no, ops::Clipped::yes}) {
        agree(ops::LionStep{.weight_decay = decay, .maximize = maximize, .clipped = clipped}, 3);
        agree(
            ops::AdagradStep{
                .lr_decay = 0.5, .weight_decay = decay, .maximize = maximize, .clipped = clipped},
            4);
      }
    }
    agree(ops::AdamStep{.weight_decay = decay, .skippable = ops::Skippable::yes, .twins = ops::Twins::yes},
          6);
    agree(ops::SgdStep{.momentum = 0.9, .weight_decay = decay, .clipped = ops::Clipped::yes}, 4);
    agree(ops::AdamStep{.weight_decay = decay,
                        .skippable = ops::Skippable::yes,
                        .clipped = ops::Clipped::yes,
                        .twins = ops::Twins::yes},
          6);
  }
  const auto clipped = [](Device device) {
    std::vector<Tensor> in{Tensor(), to(numbers({3, 4}, f32), device), to(numbers({5}, bf16, 3), device)};
    in[0] = order_free_norm(std::span(in).subspan(1));
    apply_many(ops::ClipScale{0.5}, in);
    return in;
  };
  const std::vector<Tensor> got = clipped(plain()), expected = clipped(Device::cpu());
  CHECK(same_bits(got[0], expected[0]));
  for (std::size_t i = 1; i < got.size(); ++i) CHECK(distance(got[i], expected[i]) < 1e-6);
}

TEST_CASE("plain: an op with neither a kernel nor a form in other ops says so, and a back end has a name") {
  CHECK(to_string(plain()).starts_with("plain:0"));
  CHECK(Device::parse("plain:0") == plain());
  PlainBackend second;
  CHECK(one_line_about(message_of<ValueError>([&] { register_backend("plain", second); }), "plain"));
  CHECK(one_line_about(message_of<ValueError>([&] { register_backend("cuda", second); }), "cuda"));
}

TEST_CASE("plain: memory goes back with the size that it was asked for with") {
  for (const Shape& shape : {Shape{0}, Shape{1}, Shape{3, 0, 2}, Shape{7, 5}})
    for (const DType dtype : all_dtypes) {
      const Tensor x = ones(shape, {dtype, plain()});
      CHECK(clone(x).device() == plain());
    }
  CHECK(plain_backend().wrong_sizes == 0);
}
