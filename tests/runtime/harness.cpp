#include "tests/runtime/harness.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "autograd/autograd.h"

namespace sherd::test {
namespace {

Tensor from_doubles(const std::vector<double>& values, const Shape& shape, DType dtype) {
  return with_element(dtype, [&]<class T>() {
    Tensor out = empty(shape, {dtype, Device::cpu()});
    auto* at = reinterpret_cast<T*>(out.raw());
    for (std::size_t i = 0; i < values.size(); ++i)
      at[i] = static_cast<T>(static_cast<compute_t<T>>(values[i]));
    return out;
  });
}

std::vector<double> draw(const Shape& shape, DType dtype, unsigned seed, double low, double high) {
  std::mt19937 engine(seed);
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  for (double& v : values) {
    v = low + (high - low) * (static_cast<double>(engine()) / 4294967295.0);
    if (!is_floating(dtype)) v = std::round(v);
    if (dtype == DType::u8) v = std::abs(v);
    if (dtype == DType::boolean) v = engine() % 2;
  }
  return values;
}

/// f64 inputs are variables; the others stay what they are.
std::vector<Tensor> variables_of(std::span<const Tensor> inputs) {
  std::vector<Tensor> list;
  for (const Tensor& x : inputs)
    if (x.defined() && x.dtype() == f64) list.push_back(x);
  return list;
}

std::vector<Tensor> with_variables(std::span<const Tensor> inputs, std::span<const Tensor> variables) {
  std::vector<Tensor> list;
  std::size_t next = 0;
  for (const Tensor& x : inputs) list.push_back(x.defined() && x.dtype() == f64 ? variables[next++] : x);
  return list;
}

}  // namespace

Tensor numbers(const Shape& shape, DType dtype, unsigned seed, double low, double high) {
  return from_doubles(draw(shape, dtype, seed, low, high), shape, dtype);
}

Tensor with_specials(const Shape& shape, DType dtype, unsigned seed) {
  std::vector<double> values = draw(shape, dtype, seed, -2, 2);
  constexpr double inf = std::numeric_limits<double>::infinity();
  const double specials[] = {0.0, -0.0, inf, -inf, std::nan(""), 60000, -1e-7, 1, -1, 0.5, 88, -88};
  if (is_floating(dtype))
    for (std::size_t i = 0; i < values.size(); i += 3)
      values[i] = specials[(i / 3 + seed) % std::size(specials)];
  return from_doubles(values, shape, dtype);
}

std::string to_string(Lay lay) {
  constexpr const char* names[] = {"dense", "offset", "holes", "permuted"};
  return names[static_cast<int>(lay)];
}

Tensor laid(const Tensor& x, Lay lay) {
  if (!x.defined() || lay == Lay::dense || x.rank() == 0) return x;
  const NoGrad guard;
  if (lay == Lay::permuted) {
    Shape reversed;
    for (int i = x.rank() - 1; i >= 0; --i) reversed.push_back(i);
    return permute(clone(permute(x, reversed)), reversed).detach();
  }
  Shape wide = x.shape();
  const int axis = lay == Lay::offset ? 0 : x.rank() - 1;
  wide[axis] = lay == Lay::offset ? wide[axis] + 1 : 2 * wide[axis] + 1;
  const Tensor room = full(wide, 1, {x.dtype(), x.device()});
  const Tensor place =
      lay == Lay::offset ? slice(room, axis, 1, wide[axis]) : slice(room, axis, 1, wide[axis], 2);
  copy_(place, x);
  return place.detach();
}

std::vector<Tensor> laid(std::span<const Tensor> list, Lay lay) {
  std::vector<Tensor> out;
  for (const Tensor& x : list) out.push_back(laid(x, lay));
  return out;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
  const NoGrad guard;
  const Tensor x = contiguous(to(a.detach(), Device::cpu())), y = contiguous(to(b.detach(), Device::cpu()));
  return with_element(x.dtype(), [&]<class T>() {
    const auto* p = reinterpret_cast<const T*>(x.raw());
    const auto* q = reinterpret_cast<const T*>(y.raw());
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      if (std::memcmp(p + i, q + i, sizeof(T)) == 0) continue;
      const auto u = static_cast<compute_t<T>>(p[i]), v = static_cast<compute_t<T>>(q[i]);
      if (u == u || v == v) return false;
    }
    return true;
  });
}

double distance(const Tensor& a, const Tensor& b) {
  constexpr double far = std::numeric_limits<double>::infinity();
  if (a.defined() != b.defined()) return far;
  if (!a.defined()) return 0;
  if (a.shape() != b.shape()) return far;
  const std::vector<double> x = doubles(a), y = doubles(b);
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) != std::isnan(y[i])) return far;
    if (std::isnan(x[i]) || x[i] == y[i]) continue;
    worst = std::max(worst, std::abs(x[i] - y[i]) / std::max(1.0, std::abs(y[i])));
  }
  return worst;
}

std::vector<double> doubles(const Tensor& x) {
  const NoGrad guard;
  return to(to(x.detach(), Device::cpu()), f64).to_vector<double>();
}

bool one_line_about(const std::string& message, std::string_view op) {
  return message.find('\n') == std::string::npos && message.find(op) != std::string::npos;
}

double gradient_error(const std::function<Tensor(std::span<const Tensor>)>& fn,
                      std::span<const Tensor> inputs) {
  const std::vector<Tensor> variables = variables_of(inputs);
  return gradcheck([&](std::span<const Tensor> x) { return fn(with_variables(inputs, x)); }, variables);
}

double second_gradient_error(const std::function<Tensor(std::span<const Tensor>)>& fn,
                             std::span<const Tensor> inputs) {
  std::vector<Tensor> variables = variables_of(inputs);
  const std::size_t count = variables.size();
  const Tensor upstream = numbers(fn(inputs).shape(), f64, 77, 0.5, 1.5);
  variables.push_back(upstream);
  return gradcheck(
      [&](std::span<const Tensor> x) {
        const GradMode recording(true);  // finite differences run without, and a gradient needs it
        std::vector<Tensor> leaves(x.begin(), x.end());
        for (Tensor& leaf : leaves)
          if (!leaf.requires_grad()) leaf.requires_grad_();
        const std::span variables(leaves.data(), count);
        const std::vector<Tensor> first =
            grad(fn(with_variables(inputs, variables)), variables, leaves[count], {.create_graph = true});
        Tensor total;
        for (std::size_t i = 0; i < first.size(); ++i) {
          if (!first[i].defined()) continue;
          const Tensor part =
              sum(mul(first[i], numbers(first[i].shape(), f64, 91 + static_cast<unsigned>(i), 0.5, 1.5)));
          total = total.defined() ? add(total, part) : part;
        }
        return total.defined() ? total : sum(mul(leaves[count], 0.0));
      },
      variables);
}

}  // namespace sherd::test
