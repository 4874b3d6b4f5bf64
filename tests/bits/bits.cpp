#include "tests/bits/bits.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/io/checksum.h"
#include "runtime/ops/copy.h"
#include "runtime/ops/index.h"
#include "runtime/ops/listing.h"
#include "runtime/ops/optimizer_steps.h"
#include "runtime/ops/order_free_norm.h"
#include "tests/runtime/op_cases.h"

namespace sherd::test {
namespace {

/// The bytes of tensors, of which each NaN counts as the same: which one arithmetic makes is the processor's
/// choice.
class Digest {
 public:
  void add(const Tensor& x) {
    const NoGrad guard;
    if (!x.defined()) return add_word(~std::uint64_t{0});
    for (const std::int64_t size : x.shape()) add_word(static_cast<std::uint64_t>(size));
    Tensor dense = contiguous(x.detach());
    if (is_floating(x.dtype()))
      dense = where(isnan(dense), full(x.shape(), std::nan(""), {x.dtype()}), dense);
    const auto* first = reinterpret_cast<const std::byte*>(dense.raw());
    bytes_.insert(bytes_.end(), first, first + x.numel() * size_of(x.dtype()));
  }
  void add(std::span<const Tensor> list) {
    for (const Tensor& x : list) add(x);
  }
  std::string text() const { return checksum_of(bytes_).substr(0, 8); }

 private:
  void add_word(std::uint64_t word) {
    for (int i = 0; i < 8; ++i) bytes_.push_back(static_cast<std::byte>(word >> (8 * i)));
  }
  std::vector<std::byte> bytes_;
};

std::set<std::string>& heard_ops() {
  static std::set<std::string> names;
  return names;
}

/// Adds a line of what `compute(digest, dtype)` adds in each dtype in which it runs no product.
template <class F>
void put(std::vector<BitsLine>& lines, const std::string& name, DTypeSet dtypes, const F& compute) {
  std::string text;
  for (const DType dtype : all_dtypes) {
    if (!dtypes.contains(dtype)) continue;
    Heard heard;
    Digest digest;
    {
      const Listening scope(heard);
      compute(digest, dtype);
    }
    heard_ops().insert(heard.names.begin(), heard.names.end());
    if (std::ranges::none_of(heard.names, [](const std::string& op) { return products().contains(op); }))
      text += fmt::format(" {} {}", name_of(dtype), digest.text());
  }
  if (!text.empty()) lines.push_back({name, text});
}

DTypeSet only(DType dtype) { return {static_cast<std::uint16_t>(1u << static_cast<int>(dtype))}; }

/// Numbers of every size and sign.
Tensor of_all_sizes(const Shape& shape, DType dtype, unsigned seed) {
  const double most = dtype == f64 ? 1000 : dtype == f32 || dtype == bf16 ? 120 : 14;
  std::mt19937 engine(seed);
  std::vector<double> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    const double part = 1 + static_cast<double>(engine()) / 4294967296.0;
    const double exponent = std::floor(most * (static_cast<double>(engine()) / 2147483648.0 - 1));
    values.push_back(std::ldexp(engine() % 2 != 0 ? part : -part, static_cast<int>(exponent)));
  }
  return to(Tensor::from(values, shape), dtype);
}

Tensor result_of(const AnyOp& op, std::span<const Tensor> in) { return apply(op, in)[0]; }

DTypeSet floats_of(DTypeSet dtypes) {
  return {static_cast<std::uint16_t>(dtypes.mask & floating_dtypes.mask)};
}

void put_elementwise(std::vector<BitsLine>& lines) {
  for (const ElementwiseListing& entry : elementwise_listing()) {
    const auto inputs = [&](DType dtype, int kind) {
      std::vector<Tensor> in;
      for (int i = 0; i < entry.arity; ++i) {
        const unsigned seed = 1 + static_cast<unsigned>(2 * i);
        in.push_back(kind == 0   ? numbers({1000}, dtype, seed, entry.low, entry.high)
                     : kind == 1 ? with_specials({101}, dtype, seed)
                                 : of_all_sizes({1000}, dtype, seed));
      }
      return in;
    };
    put(lines, std::string(entry.op->name()), entry.dtypes, [&](Digest& digest, DType dtype) {
      for (int kind = 0; kind < (is_floating(dtype) ? 3 : 1); ++kind)
        digest.add(result_of(*entry.op, inputs(dtype, kind)));
    });
    if (!entry.op->differentiable()) continue;
    put(lines, fmt::format("{}, gradients", entry.op->name()), floats_of(entry.dtypes),
        [&](Digest& digest, DType dtype) {
          for (int kind = 0; kind < 3; ++kind) {
            std::vector<Tensor> leaves;
            for (const Tensor& x : inputs(dtype, kind)) leaves.push_back(x.detach().requires_grad_());
            const Tensor y = result_of(*entry.op, leaves);
            digest.add(grad(y, leaves, numbers(y.shape(), dtype, 9)));
          }
        });
  }
}

void put_cases(std::vector<BitsLine>& lines) {
  for (const Case& c : cases()) {
    const std::vector<Shape> all_shapes[] = {small_shapes(c), large_shapes(c)};
    put(lines, c.name, c.dtypes, [&](Digest& digest, DType dtype) {
      for (const std::vector<Shape>& shapes : all_shapes) digest.add(run(c, draw(c, dtype, shapes)));
    });
    if (!c.gradients) continue;
    put(lines, c.name + ", gradients", floats_of(c.dtypes), [&](Digest& digest, DType dtype) {
      for (const std::vector<Shape>& shapes : all_shapes)
        digest.add(gradients(c, draw(c, dtype, shapes), Lay::dense));
    });
  }
}

void put_the_rest(std::vector<BitsLine>& lines) {
  put(lines, "casts to all dtypes", any_dtype, [](Digest& digest, DType dtype) {
    for (const DType target : all_dtypes)
      for (const Tensor& x : {with_specials({101}, dtype), of_all_sizes({1000}, dtype, 3)})
        digest.add(to(x, target));
  });
  put(lines, "copies of a list", any_dtype, [](Digest& digest, DType dtype) {
    const std::vector<Tensor> to{empty({101}, {dtype}), empty({7}, {dtype})};
    copy_each_(to, std::vector{with_specials({101}, dtype), numbers({7}, dtype)});
    digest.add(to);
  });
  put(lines, "places of a mask", only(DType::boolean), [](Digest& digest, DType dtype) {
    const Tensor mask = numbers({1001}, dtype, 4);
    digest.add(sherd::apply(ops::Places{sum(mask).item<std::int64_t>()}, mask));
  });
  put(lines, "random numbers", floating_dtypes, [](Digest& digest, DType dtype) {
    manual_seed(5);
    digest.add(rand({3001}, {dtype}));
    digest.add(randn({3001}, {dtype}));
  });
  put(lines, "random integers and orders", integral_dtypes, [](Digest& digest, DType dtype) {
    manual_seed(5);
    digest.add(randint(0, 100, {3001}, {dtype}));
    digest.add(randperm(100, {dtype}));
  });
  put(lines, "steps of optimizers", only(f32), [](Digest& digest, DType dtype) {
    const Shape shape{3001};
    const Tensor lr = Tensor::scalar(0.1, {f64}), scale = Tensor::scalar(0.7, {f64});
    const auto fresh = [&](unsigned seed) { return numbers(shape, dtype, seed, 0, 1); };
    const auto step = [&](const auto& op, std::vector<Tensor> all) {
      apply_many(op, all);
      digest.add(all);
    };
    step(ops::SgdStep{}, {lr, fresh(1), fresh(2)});
    step(ops::AdamStep{}, {lr, fresh(1), fresh(2), fresh(3), fresh(4), Tensor::scalar(3, {f64})});
    step(ops::RmspropStep{}, {lr, fresh(1), fresh(2), fresh(3)});
    step(ops::ClipScale{}, {scale, fresh(1)});
  });
  put(lines, "steps of Lion and Adagrad", only(f32), [](Digest& digest, DType dtype) {
    const Tensor lr = Tensor::scalar(0.1, {f64});
    const auto step = [&](const auto& op, std::vector<Tensor> counts) {
      std::vector<Tensor> all{lr};
      for (unsigned seed = 1; seed <= 3; ++seed) all.push_back(numbers({3001}, dtype, seed, 0, 1));
      all.insert(all.end(), counts.begin(), counts.end());
      apply_many(op, all);
      digest.add(all);
    };
    step(ops::LionStep{.weight_decay = 0.1}, {});
    step(ops::AdagradStep{.lr_decay = 0.1}, {Tensor::scalar(3, {f64})});
  });
}

}  // namespace

const std::set<std::string>& products() {
  static const std::set<std::string> names{"matmul",
                                           "linear",
                                           "linear_gelu",
                                           "linear_cross_entropy",
                                           "linear_cross_entropy_grad",
                                           "linear_fp8",
                                           "linear_fp8_grad",
                                           "conv2d",
                                           "conv2d_grad_input",
                                           "conv2d_grad_weight"};
  return names;
}

const std::set<std::string>& ops_in_bits() { return heard_ops(); }

std::vector<BitsLine> all_bits() {
  std::vector<BitsLine> lines;
  put_elementwise(lines);
  put_cases(lines);
  put_the_rest(lines);
  return lines;
}

}  // namespace sherd::test
