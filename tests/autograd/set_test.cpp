#include "autograd/autograd.h"
#include "autograd/compile.h"
#include "autograd/recompute.h"
#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;

namespace {

std::vector<float> values(const Tensor& t) { return t.to_vector<float>(); }
std::vector<Tensor> call(const Step& step, std::initializer_list<Tensor> in) {
  return step(std::span(in.begin(), in.size()));
}

}  // namespace

TEST_CASE("set_: every handle of a tensor shows other memory, views of it what they showed") {
  const Tensor x = ones({2}), handle = x, part = view(x, {2, 1});
  const Tensor data = arange(0, 6, 1, {f32});
  const Tensor corner = transpose(view(data, {2, 3}), 0, 1)[{Slice{1, 3}}];
  CHECK(set_(x, corner).is(x));
  CHECK(handle.shape() == Shape{2, 2});
  CHECK(handle.strides() == corner.strides());
  CHECK(values(handle) == std::vector<float>{1, 4, 2, 5});
  CHECK(values(part) == std::vector<float>{1, 1});
  fill_(x, 7);
  CHECK(values(data) == std::vector<float>{0, 7, 7, 3, 7, 7});
  Tensor trained = x;
  trained.requires_grad_();
  sum(square(trained)).backward();
  CHECK(values(trained.grad()) == std::vector<float>(4, 14));
}

TEST_CASE("set_: what cannot show other memory, or be shown, is refused, and nothing changes") {
  const Tensor x = ones({2}), before = x.detach();
  Tensor trained = ones({2});
  trained.requires_grad_();
  CHECK_THROWS_WITH(set_(Tensor(), x), ContainsSubstring("set_"));
  CHECK_THROWS_WITH(set_(x, Tensor()), ContainsSubstring("set_"));
  CHECK_THROWS_AS(set_(x, ones({2}, {f64})), DTypeError);
  CHECK_THROWS_AS(set_(x, empty({2}, {f32, Device::meta()})), DeviceError);
  CHECK_THROWS_WITH(set_(x, trained), ContainsSubstring("requires grad"));
  CHECK_THROWS_WITH(set_(x, trained * 2), ContainsSubstring("has a history"));
  CHECK_THROWS_WITH(set_(trained, x), ContainsSubstring("requires grad"));
  const Step step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    set_(in[0], in[0] + 1);
    return {};
  };
  CHECK_THROWS_WITH(capture(step, {x}), ContainsSubstring("set_ gives a tensor of shape (2) other memory"));
  CHECK_THROWS_WITH(recompute([&] { return set_(x, x + 1); }), ContainsSubstring("set_ gives a tensor"));
  CHECK(x.storage().id() == before.storage().id());
  CHECK(values(x) == std::vector<float>{1, 1});
}

TEST_CASE("set_: a compiled call gives its inputs what the eager one does, in new memory each time") {
  struct Case {
    const char* name;
    Step step;
  };
  const std::vector<Case> cases = {
      {"made inside", [](auto in) { return set_(in[0], in[0] * 2 + in[1]), std::vector<Tensor>{}; }},
      {"and returned", [](auto in) { return std::vector<Tensor>{set_(in[0], in[0] + in[1]), in[0] * 3}; }},
      {"the memory is returned",
       [](auto in) {
         const Tensor y = in[0] - in[1];
         set_(in[0], y);
         return std::vector<Tensor>{y};
       }},
      {"a part of it",
       [](auto in) { return set_(in[0], stack({in[1], in[0]})[{1}]), std::vector<Tensor>{}; }},
      {"twice",
       [](auto in) {
         set_(in[0], in[0] + 1);
         set_(in[0], in[0] * in[1]);
         return std::vector<Tensor>{};
       }},
      {"written after",
       [](auto in) {
         set_(in[0], in[0] + 1);
         add_(in[0], 2);
         return std::vector<Tensor>{in[0] + in[1]};
       }},
      {"the other's memory",
       [](auto in) { return set_(in[0], view(in[1], {3})), std::vector<Tensor>{in[0] + 1}; }},
      {"both",
       [](auto in) {
         const Tensor y = in[0] + in[1];
         set_(in[1], in[0] - in[1]);
         set_(in[0], y);
         return std::vector<Tensor>{};
       }},
      {"a value from inside",
       [](auto in) {
         const Tensor t = in[0] + 1;
         set_(t, in[1] * 2);
         return std::vector<Tensor>{t + in[0]};
       }},
  };
  for (const Case& c : cases) {
    INFO(c.name);
    const Compiled compiled = compile(c.step, {.full_graph = FullGraph::yes});
    Tensor a = Tensor::from<float>({1, 2, 3}, {3}), b = Tensor::from<float>({4, 5, 6}, {3});
    const Tensor x = clone(a), y = clone(b);
    for (int i = 0; i < 4; ++i) {
      const Tensor before = x.detach(), was = clone(x);
      const std::vector<Tensor> expected = call(c.step, {a, b}), got = compiled({x, y});
      REQUIRE(got.size() == expected.size());
      for (std::size_t k = 0; k < got.size(); ++k) CHECK(values(got[k]) == values(expected[k]));
      CHECK(values(x) == values(a));
      CHECK(values(y) == values(b));
      // Whether two tensors show one memory is as it is eagerly too.
      CHECK((x.storage().id() == y.storage().id()) == (a.storage().id() == b.storage().id()));
      for (std::size_t k = 0; k < got.size(); ++k)
        CHECK((got[k].storage().id() == x.storage().id()) ==
              (expected[k].storage().id() == a.storage().id()));
      CHECK(values(before) == values(was));
      if (c.name == std::string("the other's memory")) set_(a, clone(a)), set_(x, clone(x));
    }
    CHECK(compiled.stats().hits >= 2);
    CHECK(compiled.stats().eager == 0);
  }
}

TEST_CASE("set_: a compiled call that gives a tensor from outside other memory runs eagerly") {
  const Tensor outside = ones({2});
  const Step step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    const Tensor sum = outside + in[0];
    set_(outside, sum);
    return {};
  };
  CHECK_THROWS_WITH(compile(step, {.full_graph = FullGraph::yes})({ones({2})}),
                    ContainsSubstring("from outside other memory"));
  CHECK(values(outside) == std::vector<float>{1, 1});
  const Compiled compiled = compile(step);
  for (int i = 0; i < 3; ++i) compiled({ones({2})});
  CHECK(values(outside) == std::vector<float>{4, 4});
  CHECK(compiled.stats().eager == 2);
}

TEST_CASE(
    "set_: a step that does so to an input and gives it a history runs eagerly, with what it computed") {
  Tensor w = full({2}, 3);
  w.requires_grad_();
  const Step step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    set_(in[0], zeros({2}) + 1);
    mul_(in[0], w);
    return {};
  };
  const Step trains = [](std::span<const Tensor> in) -> std::vector<Tensor> {
    Tensor(in[0]).requires_grad_();
    return {in[0] * 2};
  };
  for (const FullGraph full : {FullGraph::no, FullGraph::yes}) {
    const Compiled compiled = compile(step, {.full_graph = full}),
                   begins = compile(trains, {.full_graph = full});
    for (int i = 0; i < 2; ++i) {
      const Tensor x = ones({2}), y = ones({2});
      if (full == FullGraph::yes) {
        CHECK_THROWS_AS(compiled({x}), StateError);
        CHECK_THROWS_WITH(begins({y}), ContainsSubstring("wants gradients changes inside"));
      } else {
        compiled({x});
        CHECK(values(begins({y})[0].detach()) == std::vector<float>{2, 2});
      }
      CHECK(values(x.detach()) == std::vector<float>{3, 3});
      CHECK(x.requires_grad());
      CHECK(y.requires_grad());
    }
  }
}

TEST_CASE("compile: a tensor from outside that is set between calls is read and written where it lies") {
  const Tensor read = ones({2}), written = ones({2});
  const Compiled reads = compile([&](auto in) { return std::vector<Tensor>{in[0] + read}; });
  const Compiled writes = compile([&](auto in) { return add_(written, in[0]), std::vector<Tensor>{}; });
  const Tensor x = ones({2});
  for (const float value : {1, 5, 7}) {
    if (value != 1) set_(read, full({value == 5 ? 2 : 1}, value)), set_(written, full({2}, value));
    for (int i = 1; i <= 3; ++i) {
      CHECK(values(reads({x})[0]) == std::vector<float>{value + 1, value + 1});
      writes({x});
      CHECK(values(written) == std::vector<float>(2, value + static_cast<float>(i)));
    }
  }
}

TEST_CASE("compile: inputs are held by their handles alone, and memory that nothing wrote is not returned") {
  Tensor w = full({2}, 3);
  w.requires_grad_();
  const Compiled compiled = compile([&](auto in) { return std::vector<Tensor>{mul_(in[0], w)}; });
  for (int i = 0; i < 2; ++i) {
    const Tensor detached = ones({2}).detach(), viewed = view(ones({1, 2}), {2});
    CHECK(values(compiled({detached})[0].detach()) == std::vector<float>{3, 3});
    CHECK(values(compiled({viewed})[0].detach()) == std::vector<float>{3, 3});
  }
  const Compiled blank = compile([](auto in) { return set_(in[0], empty({2})), std::vector<Tensor>{}; });
  const Tensor x = ones({2});
  blank({x});
  const Tensor before = x.detach();
  fill_(x, 2);
  blank({x});
  fill_(x, 3);
  CHECK(values(before) == std::vector<float>{2, 2});
}
