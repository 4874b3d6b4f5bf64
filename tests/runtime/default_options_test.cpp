// Default options: who follows them, who does not, and where they end.
#include <functional>
#include <thread>

#include "runtime/context.h"
#include "tests/runtime/op_cases.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Creation calls that take options, made with these.
std::vector<Tensor> made_with(TensorOptions floats, TensorOptions integers) {
  return {empty({2}, floats),        zeros({2}, floats),           ones({2}, floats),
          full({2}, 3, floats),      linspace(0, 1, 3, floats),    eye(2, 2, floats),
          rand({2}, floats),         randn({2}, floats),           Tensor::scalar(1, floats),
          arange(0, 3, 1, integers), randint(0, 3, {2}, integers), randperm(3, integers)};
}

/// The same calls without options.
std::vector<Tensor> made() {
  return {empty({2}), zeros({2}), ones({2}),         full({2}, 3), linspace(0, 1, 3),  eye(2),
          rand({2}),  randn({2}), Tensor::scalar(1), arange(0, 3), randint(0, 3, {2}), randperm(3)};
}

void check_like(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO(i);
    CHECK(a[i].spec() == b[i].spec());
  }
}

bool are(TensorOptions options) {
  const TensorOptions now;
  return now.dtype == options.dtype && now.device == options.device;
}

const TensorOptions plain{f32, Device::cpu()};

}  // namespace

TEST_CASE("default options: creation calls follow them, integers keep their dtype", "[one thread]") {
  for (DType dtype : {f32, f64, f16, bf16})
    for (Device device : {Device::cpu(), Device::cpu(1), Device::meta()}) {
      INFO(name_of(dtype) << " " << to_string(device));
      const DefaultOptions scope({dtype, device});
      check_like(made(), made_with({dtype, device}, {i64, device}));
      check_like(made_with({.dtype = f16}, {.dtype = i32}), made_with({f16, device}, {i32, device}));
      check_like(made_with({.device = Device::cpu()}, {i64, Device::cpu()}),
                 made_with({dtype, Device::cpu()}, {i64, Device::cpu()}));
      check_like(made_with(plain, plain), made_with({f32, Device::cpu()}, {f32, Device::cpu()}));
      CHECK(Tensor::from({1.0}, {1}).spec() == Spec{{1}, f64, device});  // the value has a dtype
      CHECK(Tensor::from(std::vector<bool>{true}, {1}).device() == device);
      const Tensor there = zeros({2}, {f64, Device::cpu(1)});
      CHECK(zeros_like(there).spec() == there.spec());
      CHECK((there + 1).spec() == there.spec());
    }
  CHECK(are(plain));
}

TEST_CASE("default options: scopes nest, and end by exceptions too", "[one thread]") {
  const DefaultOptions outer({.dtype = f64});
  CHECK(are({f64, Device::cpu()}));
  {
    const DefaultOptions inner({.device = Device::meta()});
    CHECK(are({f64, Device::meta()}));
    CHECK_THROWS_AS(([] {
                      const DefaultOptions innermost({.dtype = bf16});
                      CHECK(are({bf16, Device::meta()}));
                      fail<StateError>("out of it");
                    }()),
                    StateError);
    CHECK(are({f64, Device::meta()}));
  }
  CHECK(are({f64, Device::cpu()}));
}

TEST_CASE("default options: another thread has its own") {
  const DefaultOptions scope({.dtype = f64, .device = Device::meta()});
  bool untouched = false;
  std::thread([&] {
    untouched = are(plain);
    const DefaultOptions theirs({.dtype = f16});
  }).join();
  CHECK(untouched);
  CHECK(are({f64, Device::meta()}));
}

TEST_CASE("default options: those of constants are f32 on the CPU", "[one thread]") {
  const DefaultOptions scope({.dtype = f64, .device = Device::meta()});
  constexpr TensorOptions constant;
  static_assert(constant.dtype == f32 && constant.device == Device::cpu());
  const TensorOptions local;  // no constant
  const DType dtype = default_dtype();
  CHECK(local.dtype == f64);
  CHECK(local.device == Device::meta());
  CHECK(dtype == f64);
  CHECK(default_device() == Device::meta());
}

TEST_CASE("default options: only a floating dtype", "[one thread]") {
  for (DType dtype : all_dtypes) {
    if (is_floating(dtype)) continue;
    INFO(name_of(dtype));
    CHECK(
        message_of<DTypeError>([&] { const DefaultOptions scope({.dtype = dtype}); }) ==
        fmt::format("default options: the dtype must be floating, got {}; give others to the call that makes "
                    "such a tensor",
                    name_of(dtype)));
    CHECK(are(plain));
  }
}

TEST_CASE("default options: no op, and no gradient of one, makes anything by them", "[one thread]") {
  for_each_case_and_dtype([](const Case& c, DType dtype) {
    const std::vector<Tensor> in = draw(c, dtype, small_shapes(c));
    const bool derived = c.gradients && is_floating(dtype);
    const std::vector<Tensor> y = run(c, in),
                              g = derived ? gradients(c, in, Lay::dense) : std::vector<Tensor>{};
    const DefaultOptions scope({.dtype = dtype == f16 ? bf16 : f16, .device = Device::meta()});
    check_agree(run(c, in), y, Bits::exact);
    if (derived) check_agree(gradients(c, in, Lay::dense), g, Bits::exact);
  });
}
