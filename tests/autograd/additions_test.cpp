// The pass that gives ops the parts of a sum, on a device that reads them.
#include "autograd/capture/passes/additions.h"
#include "autograd/capture/program.h"
#include "autograd/compile.h"
#include "runtime/apply.h"
#include "runtime/in_parts.h"
#include "runtime/ops/batch_norm.h"
#include "tests/catch.h"
#include "tests/runtime/op_cases.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// As long as it is there the CPU reads a gradient of batch norm in parts.
class ReadsParts {
 public:
  ReadsParts() {
    ops::set_reads_parts(DeviceType::cpu, [](const AnyOp& op) {
      return op.name() == "batch_norm_grad" ? std::optional(ops::InParts{ops::BatchNormGrad::first_part,
                                                                         ops::BatchNormGrad::second_part})
                                            : std::nullopt;
    });
  }
  ~ReadsParts() { ops::set_reads_parts(DeviceType::cpu, nullptr); }
  ReadsParts(const ReadsParts&) = delete;
  ReadsParts& operator=(const ReadsParts&) = delete;
};

const Shape images{4, 6, 3, 5};

/// x, gy, a second part, mean and variance, and y.
std::vector<Tensor> inputs(DType dtype = f32) {
  const DType wide = dtype == f64 ? f64 : f32;
  return {numbers(images, dtype, 1), numbers(images, dtype, 2),     numbers(images, dtype, 3),
          numbers({6}, wide, 4),     square(numbers({6}, wide, 5)), numbers(images, dtype, 6)};
}
Tensors backward(const Tensor& gy, std::span<const Tensor> x, const Tensor& more = {}) {
  const Tensor in[] = {gy, x[0], {}, x[3], x[4], x[5], {}, more};
  return apply_many(ops::BatchNormGrad{.of_residual = true}, in);
}

/// The ops of the step's program after the pass, and whether it gives the step's bits.
std::string names_after(const Step& step, const std::vector<Tensor>& in) {
  const NoGrad guard;
  std::vector<Tensor> outputs;
  Program::Impl program(additions(record(step, in, outputs)), {});
  const std::vector<Tensor> got = program.replay(in), expected = step(in);
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(same_bits(got[i], expected[i]));
  std::string names;
  for (const Program::Impl::Step& one : program.steps) names += fmt::format("{} ", one.op->name());
  return names;
}

}  // namespace

TEST_CASE("additions: an op that reads parts takes those of a sum, with its bits") {
  const ReadsParts reads;
  for (const DType dtype : {f32, f64, bf16, f16}) {
    const auto in = inputs(dtype);
    const Step step = [](std::span<const Tensor> x) {
      return std::vector<Tensor>{backward(add(x[1], x[2]), x)[0]};
    };
    CHECK(names_after(step, in) == "batch_norm_grad ");
    const Step in_place = [](std::span<const Tensor> x) {
      const Tensor sum = mul(x[1], 2), product = mul(sum, 3);  // which is read before
      add_(sum, x[2]);
      return std::vector<Tensor>{backward(sum, x)[0], product};
    };
    CHECK(names_after(in_place, in) == "mul mul batch_norm_grad ");
  }
}

TEST_CASE("additions: a sum stays that others read, that broadcasts, or whose parts are written between") {
  const ReadsParts reads;
  const auto check = [](std::string_view names, const Step& step) {
    CHECK(names_after(step, inputs()) == names);
  };
  check("add batch_norm_grad ", [](std::span<const Tensor> x) {
    const Tensor sum = add(x[1], x[2]);
    return std::vector<Tensor>{backward(sum, x)[0], sum};
  });
  check("add batch_norm_grad mul ", [](std::span<const Tensor> x) {
    const Tensor sum = add(x[1], x[2]);
    return std::vector<Tensor>{backward(sum, x)[0], mul(sum, x[1])};
  });
  check("slice add batch_norm_grad ", [](std::span<const Tensor> x) {
    return std::vector<Tensor>{backward(add(x[1], narrow(x[2], 3, 0, 1)), x)[0]};
  });
  check("add batch_norm_grad ", [](std::span<const Tensor> x) {  // it has two parts already
    return std::vector<Tensor>{backward(add(x[1], x[2]), x, x[5])[0]};
  });
  check("clone add add_ batch_norm_grad ", [](std::span<const Tensor> x) {
    const Tensor part = clone(x[1]), sum = add(part, x[2]);
    add_(part, 1);
    return std::vector<Tensor>{backward(sum, x)[0], part};
  });
  check("clone add_ batch_norm_grad ", [](std::span<const Tensor> x) {  // the caller gets it
    const Tensor sum = clone(x[1]);
    add_(sum, x[2]);
    return std::vector<Tensor>{backward(sum, x)[0], sum};
  });
  check("clone clone add_ add_ batch_norm_grad ", [](std::span<const Tensor> x) {
    const Tensor sum = clone(x[1]), part = clone(x[2]);
    add_(sum, part);
    add_(part, 1);
    return std::vector<Tensor>{backward(sum, x)[0], part};
  });
  check("clone add_ mul batch_norm_grad ", [](std::span<const Tensor> x) {
    const Tensor sum = clone(x[1]);
    add_(sum, x[2]);
    const Tensor other = mul(sum, 2);
    return std::vector<Tensor>{backward(sum, x)[0], other};
  });
  check("clone add_ batch_norm_grad ", [](std::span<const Tensor> x) {  // and as another input too
    const Tensor sum = clone(x[1]);
    add_(sum, x[2]);
    const Tensor in[] = {sum, sum, {}, x[3], x[4], x[5], {}, {}};
    return std::vector<Tensor>{apply_many(ops::BatchNormGrad{.of_residual = true}, in)[0]};
  });
  check("clone batch_norm_grad add_ mul ", [](std::span<const Tensor> x) {  // it is read before
    const Tensor sum = clone(x[1]), y = backward(sum, x)[0];
    add_(sum, x[2]);
    return std::vector<Tensor>{y, mul(sum, 2)};
  });
  check("clone add_ batch_norm_grad ", [](std::span<const Tensor> x) {  // twice itself
    const Tensor sum = clone(x[1]);
    add_(sum, sum);
    return std::vector<Tensor>{backward(sum, x)[0]};
  });
  // A sum of sums gives the outer one's parts.
  check("add batch_norm_grad ", [](std::span<const Tensor> x) {
    return std::vector<Tensor>{backward(add(add(x[1], x[2]), x[5]), x)[0]};
  });
}

TEST_CASE("additions: no sum is taken where the device has no kernel for parts") {
  const Step step = [](std::span<const Tensor> x) {
    return std::vector<Tensor>{backward(add(x[1], x[2]), x)[0]};
  };
  CHECK(names_after(step, inputs()) == "add batch_norm_grad ");
}

TEST_CASE("additions: compiled functions whose gradients meet have eager's bits with one op less") {
  const auto weight = [] { return numbers({6}, f32, 7); };
  const Step f = [](std::span<const Tensor> in) {
    const Tensor y = batch_norm(in[0], {}, {}, in[1], {}, {.training = true, .activation = Activation::relu});
    return std::vector<Tensor>{add(mul(y, 2), square(y))};
  };
  const auto gradients = [&](const auto& of) {
    const Tensor in[] = {numbers(images, f32, 1).requires_grad_(), weight().requires_grad_()};
    of(in)[0].backward(numbers(images, f32, 3));
    return std::vector<Tensor>{in[0].grad(), in[1].grad()};
  };
  const auto count_adds = [&](const auto& compiled) {
    const std::string text = compiled.text();
    std::size_t count = 0;
    for (std::size_t at = text.find(" add"); at != std::string::npos; at = text.find(" add", at + 1)) ++count;
    return count;
  };
  const std::vector<Tensor> expected = gradients(f);
  std::size_t adds[2];
  for (const bool reads : {false, true}) {
    std::optional<ReadsParts> scope;
    if (reads) scope.emplace();
    const auto compiled = compile(f);
    for (int times = 0; times < 3; ++times) {
      const std::vector<Tensor> got = gradients(compiled);
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
    }
    adds[reads] = count_adds(compiled);
  }
  CHECK(adds[1] + 1 == adds[0]);
}
