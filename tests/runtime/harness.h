// What the tests of ops share: values, the same values in other layouts, and comparisons to the bit.
#pragma once

#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "runtime/context.h"
#include "runtime/op.h"
#include "runtime/ops.h"
#include "tests/catch.h"

namespace sherd::test {

/// Values of any dtype in [low, high] that depend on the seed alone; integers are whole, u8 starts at 0.
Tensor numbers(const Shape& shape, DType dtype, unsigned seed = 1, double low = -2, double high = 2);
/// The same with infinities, NaN, zeros of both signs and very large and small numbers among them (floats).
Tensor with_specials(const Shape& shape, DType dtype, unsigned seed = 1);

/// Ways in which the same values may lie in memory.
enum class Lay { dense, offset, holes, permuted };
inline constexpr Lay all_lays[] = {Lay::dense, Lay::offset, Lay::holes, Lay::permuted};
std::string to_string(Lay lay);
/// `x`'s values, laid out otherwise.
Tensor laid(const Tensor& x, Lay lay);
std::vector<Tensor> laid(std::span<const Tensor> list, Lay lay);

/// Shape, dtype and every bit are equal; any NaN equals any other.
bool same_bits(const Tensor& a, const Tensor& b);
/// Largest |a - b| / max(1, |b|) in f64; infinity where shapes differ or one has a NaN that the other has
/// not.
double distance(const Tensor& a, const Tensor& b);

/// All values as doubles, in row-major order.
std::vector<double> doubles(const Tensor& x);

/// The scope of a number of threads.
class Threads {
 public:
  explicit Threads(int n) : before_(Context::current().threads()) { Context::current().set_threads(n); }
  ~Threads() { Context::current().set_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

/// Hears which ops ran.
class Heard final : public Listener {
 public:
  void after(const AnyOp& op, Inputs, Outputs) override { names.emplace(op.name()); }
  std::set<std::string> names;
};

/// A message for a person: one line, and it names the op.
bool one_line_about(const std::string& message, std::string_view op);

/// Gradients of sum(w fn(inputs)) for fixed weights, and of that the second time: worst error against finite
/// differences. Inputs that are not f64 are constants.
double gradient_error(const std::function<Tensor(std::span<const Tensor>)>& fn,
                      std::span<const Tensor> inputs);
double second_gradient_error(const std::function<Tensor(std::span<const Tensor>)>& fn,
                             std::span<const Tensor> inputs);

}  // namespace sherd::test
