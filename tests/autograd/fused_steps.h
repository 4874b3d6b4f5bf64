// Steps whose ops regions have, on any device, and whether a program with regions has their bits.
#pragma once

#include <array>
#include <random>
#include <span>
#include <vector>

#include "autograd/capture/passes/fuse.h"
#include "autograd/capture/program.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/runtime/harness.h"

namespace sherd::test {

inline Recorded heard(const Step& step, const std::vector<Tensor>& in) {
  std::vector<Tensor> outputs;
  return record(step, in, outputs);
}
inline Program::Impl fused(const Step& step, const std::vector<Tensor>& in) {
  const NoGrad guard;
  return {fuse(heard(step, in)), {}};
}

inline std::vector<Tensor> copies(std::span<const Tensor> of) {
  std::vector<Tensor> all;
  for (const Tensor& t : of) {
    const Tensor copy(
        make_ref<TensorImpl>(Storage::allocate(t.device(), t.storage().bytes()), t.layout(), t.dtype()));
    copy_(copy, t);
    all.push_back(copy);
  }
  return all;
}

/// The step's program with regions gives the step's bits, and writes what it writes.
inline void check_bits(const Step& step, const std::vector<Tensor>& in, Program::Impl& program) {
  const NoGrad guard;
  const std::vector<Tensor> eager_in = copies(in), fused_in = copies(in);
  std::vector<Tensor> expected = step(eager_in), got = program.replay(fused_in);
  expected.insert(expected.end(), eager_in.begin(), eager_in.end());
  got.insert(got.end(), fused_in.begin(), fused_in.end());
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("result " << i);
    CHECK(same_bits(got[i], expected[i]));
  }
}
inline void check_bits(const Step& step, const std::vector<Tensor>& in) {
  Program::Impl program = fused(step, in);
  INFO(program.text());
  check_bits(step, in, program);
}

/// Steps that read parts of what members make, and what lies in one memory in several ways.
struct NamedStep {
  const char* name;
  Step step;
  std::vector<Tensor> in;
};
inline std::vector<NamedStep> steps_of_parts() {
  const auto one = [](const Tensor& t) { return std::vector<Tensor>{t}; };
  return {{"an element of the only row, beside it",
           [=](std::span<const Tensor> in) {
             const Tensor y = mul(in[0], 2.0);
             return one(add(y, tanh(narrow(y, 1, 3, 1))));
           },
           {numbers({1, 8}, f32, 1)}},
          {"an element as a number",
           [=](std::span<const Tensor> in) {
             const Tensor y = mul(in[0], 2.0);
             return one(add(y, tanh(select(y, 0, 3))));
           },
           {numbers({8}, f32, 1)}},
          {"rows of one length and of several shapes beside one input",
           [=](std::span<const Tensor> in) {
             const Tensor s = mul(in[0], 2.0), h = tanh(narrow(s, 1, 0, 5)), a = transpose(in[1], 2, 3);
             return std::vector<Tensor>{s, add(reshape(h, {1, 2, 2, 6, 5}), a),
                                        add(reshape(h, {2, 2, 1, 6, 5}), a)};
           },
           {numbers({24, 8}, f32, 1), numbers({2, 1, 5, 6}, f32, 2)}},
          {"neighbours of neighbours",
           [=](std::span<const Tensor> in) {
             Tensor y = mul(in[0], 0.5);
             for (int i = 0; i < 14; ++i) {
               const std::int64_t columns = y.shape().back() - 1;
               y = add(narrow(y, -1, 0, columns), narrow(y, -1, 1, columns));
             }
             return one(y);
           },
           {numbers({3, 40}, f32, 1)}},
          {"turns of turns",
           [=](std::span<const Tensor> in) {
             Tensor y = mul(in[0], 2.0);
             for (int i = 0; i < 12; ++i)
               y = add(mul(y, in[1]), cat({neg(narrow(y, -1, 4, 4)), narrow(y, -1, 0, 4)}, -1));
             return one(y);
           },
           {numbers({3, 8}, f32, 1), numbers({8}, f32, 2, -0.5, 0.5)}}};
}

enum class Rows { few, many };
/// Steps over one space, with values for each row, each column and all, that are cast, summed, written and
/// seen through views.
class RandomRows {
 public:
  explicit RandomRows(unsigned seed, Device device = Device::cpu(), Rows rows = Rows::few)
      : device_(device),
        random_(seed),
        rows_(rows == Rows::many ? pick({1000, 5001}) : pick({1, 2, 3, 5, 8, 33})),
        columns_(rows == Rows::many ? pick({2, 31, 72, 300, 400})
                                    : pick({1, 2, 3, 8, 31, 64, 65, 200, 1100})) {
    for (std::size_t i = 0, size = 3 + random_() % 20; i < size; ++i)
      code_.push_back({number(), number(), number(), number()});
  }
  std::vector<Tensor> inputs(unsigned call) const {
    std::vector<Tensor> in;
    const Shape shapes[] = {{rows_, columns_}, {rows_, columns_}, {rows_, 1}, {columns_}, {}};
    for (std::size_t i = 0; i < std::size(shapes); ++i)
      in.push_back(
          to(numbers(shapes[i], i == 1 ? bf16 : f32, 10 * call + static_cast<unsigned>(i)), device_));
    return in;
  }
  std::vector<Tensor> operator()(std::span<const Tensor> in) const {
    std::vector<Tensor> values(in.begin(), in.end());
    for (const auto& [kind, a, b, number] : code_) {
      const Tensor &x = values[a % values.size()], &y = values[b % values.size()];
      try {
        values.push_back(result(kind, x, y, number));
      } catch (const ShapeError&) {
        values.push_back(x);
      }
    }
    std::vector<Tensor> results;
    for (std::size_t i = in.size(); i < values.size(); ++i)
      if (i + 1 == values.size() || code_[i - in.size()][3] % 5 == 0) {
        results.push_back(clone(values[i]));
        if (rows_ >= 1000 && values[i].rank() == 2) results.push_back(sum(mul(values[i], 0.5), {0}));
      }
    return results;
  }

 private:
  unsigned number() { return static_cast<unsigned>(random_()); }
  std::int64_t pick(std::initializer_list<std::int64_t> of) { return *(of.begin() + random_() % of.size()); }

  static Tensor result(unsigned kind, const Tensor& a, const Tensor& b, unsigned number) {
    const double scalar = 0.25 * (number % 7) - 0.5;
    switch (kind % 20) {
      case 0:
        return add(a, to(b, a.dtype()));
      case 1:
        return mul(a, to(b, a.dtype()));
      case 2:
        return mul(a, scalar);
      case 3:
        return tanh(a);
      case 4:
        return sub(scalar, a);
      case 5:
        return to(a, number % 2 ? bf16 : number % 3 ? f32 : f16);
      case 6:
        return a.rank() > 0 ? mean(a, {-1}, Keep::dims) : square(a);
      case 7:
        return a.rank() > 0 ? sum(a, {-1}, number % 2 ? Keep::dims : Keep::drop) : neg(a);
      case 8:
        return where(greater(a, scalar), a, full({}, scalar, {a.dtype(), a.device()}));
      case 9:
        return a.rank() == 2 ? reshape(mul(reshape(a, {a.numel()}), 1.5), a.shape()) : exp(mul(a, 0.125));
      case 10:
        return a.rank() == 2 ? add(narrow(a, 0, 0, 1), a) : a;
      case 11: {
        const Tensor made = mul(a, 0.5);
        if (made.shape() == b.shape()) add_(made, to(b, made.dtype()));
        return made;
      }
      case 12:
        mul_(a, 0.75);
        return a;
      case 13:
        return a.rank() > 0 && a.shape().back() > 2
                   ? tanh(narrow(a, -1, number % 2, a.shape().back() - 1 - number % 2))
                   : a;
      case 14:
        return a.rank() > 0 && b.rank() == a.rank() ? cat({a, to(b, a.dtype())}, -1) : a;
      case 15:
        return a.rank() > 0 && a.shape().back() > 3 ? add(slice(a, -1, number % 2, a.shape().back(), 2), 0.5)
                                                    : a;
      case 16:
        if (a.rank() > 0 && a.shape().back() > 2) {
          const Tensor made = exp(mul(a, 0.25));
          mul_(narrow(made, -1, 0, 2), 0.5);
          return made;
        }
        return a;
      case 17:
        return a.rank() == 2 ? sum(mul(a, 0.5), {0}, number % 2 ? Keep::dims : Keep::drop) : neg(a);
      case 18:
        return a.rank() == 2 ? mean(mul(a, a), {0}, number % 2 ? Keep::dims : Keep::drop) : a;
      default:
        return a.rank() == 2 && a.shape()[0] == a.shape()[1] ? add(a, transpose(a, 0, 1)) : clone(a);
    }
  }

  Device device_;
  std::mt19937 random_;
  std::int64_t rows_, columns_;
  std::vector<std::array<unsigned, 4>> code_;
};

}  // namespace sherd::test
