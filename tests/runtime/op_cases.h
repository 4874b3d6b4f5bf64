// The one table of cases for ops that are not elementwise, and what a harness needs to run them: on the CPU,
// on a back end that has the primitives alone, and on CUDA.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/runtime/harness.h"

namespace sherd::test {

using Call = std::function<std::vector<Tensor>(std::span<const Tensor>)>;

enum class Kind { number, index, mask };

struct Input {
  Shape shape, large;
  Kind kind = Kind::number;
  std::int64_t bound = 0;  ///< of indices
  double low = -2, high = 2;
};

/// How far results may be apart where bits may differ (products: the library picks another path for another
/// layout).
enum class Bits { exact, rounded };

/// What holds for an op beside the call.
struct Rules {
  DTypeSet dtypes = any_dtype;
  DTypeSet on_cpu{};  ///< further ones, which the CPU alone takes: they have tests of their own
  bool gradients = true;
  bool second_derivative = true;
  Bits layouts = Bits::exact;            ///< the layout of inputs changes no bit
  bool f64_by_reference = false;         ///< so in f64 its layouts are a product's
  Bits sixteen = Bits::exact;            ///< a 16-bit result is the f32 result rounded once
  Call reference;                        ///< the same in other ops
  std::vector<std::vector<Shape>> more;  ///< further shapes: size 1, empty, 0-d
};

struct Case : Rules {
  std::string name;
  std::vector<Input> inputs;
  Call call;
};

/// Inputs of a case, by the seed alone.
std::vector<Tensor> draw(const Case& c, DType dtype, const std::vector<Shape>& shapes, unsigned seed = 1);
std::vector<Shape> small_shapes(const Case& c);
std::vector<Shape> large_shapes(const Case& c);
/// The case's call, after the rank's generator is seeded.
std::vector<Tensor> run(const Case& c, std::span<const Tensor> in);
bool agree(const Tensor& a, const Tensor& b, Bits bits);
void check_agree(std::span<const Tensor> got, std::span<const Tensor> expected, Bits bits);
/// Gradients of the first output with respect to all floating inputs, for a fixed upstream in the given
/// layout.
std::vector<Tensor> gradients(const Case& c, std::span<const Tensor> in, Lay upstream);
/// Floating tensors in another dtype, the others as they are.
std::vector<Tensor> as(std::span<const Tensor> in, DType dtype);

/// Those of indexing and of functions made of other ops; part of `cases`.
std::vector<Case> made_cases();
/// All cases. The table is complete when every op of the list was heard while it ran.
const std::vector<Case>& cases();

template <class F>
void for_each_case(F&& body) {
  for (const Case& c : cases()) {
    INFO(c.name);
    try {
      body(c);
    } catch (const std::exception& error) {  // the other cases are still looked at
      FAIL_CHECK(error.what());
    }
  }
}

template <class F>
void for_each_case_and_dtype(F&& body) {
  for_each_case([&](const Case& c) {
    for (DType dtype : all_dtypes) {
      if (!c.dtypes.contains(dtype)) continue;
      INFO(name_of(dtype));
      body(c, dtype);
    }
  });
}

/// Every case in every dtype and shape, on `device` against the CPU: values, and gradients to second order.
void check_device(Device device);

}  // namespace sherd::test
