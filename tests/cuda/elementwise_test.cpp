// Every elementwise op of the list, CPU against CUDA. Functors are one source and nothing is contracted, so
// results are equal to the bit; only what the two C libraries compute (sin, cos, pow, and in double what
// runtime/elementary.h leaves to them) may differ by a few units in the last place.
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/ops/listing.h"
#include "tests/cuda/compare.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Units in the last place that an op's values may be apart.
double allowed_ulps(std::string_view name) {
  static const std::set<std::string_view> library{"sin",   "cos",   "pow",  "tan",  "asin",  "acos",
                                                  "atan",  "atan2", "sinh", "cosh", "asinh", "acosh",
                                                  "atanh", "exp2",  "log2", "log10"};
  return library.contains(name) ? 16 : 0;
}

/// Inputs of one call in different layouts. `make(shape)` gives dense values.
struct Case {
  std::string name;
  std::vector<Tensor> inputs;
};

std::vector<Case> cases(int arity, const std::function<Tensor(Shape)>& make) {
  const auto all = [&](std::string name, const std::function<Tensor(int)>& one) {
    Case c{std::move(name), {}};
    for (int i = 0; i < arity; ++i) c.inputs.push_back(one(i));
    return c;
  };
  std::vector<Case> list;
  for (std::int64_t n : {0, 1, 3, 4, 1023, 70000})
    list.push_back(all("dense " + std::to_string(n), [&](int) { return make({n}); }));
  list.push_back(all("0-d", [&](int) { return make({}); }));
  list.push_back(all("no rows", [&](int) { return make({0, 4}); }));
  list.push_back(all("offset", [&](int) { return slice(make({37}), 0, 1, 36); }));
  list.push_back(all("transposed", [&](int) { return transpose(make({33, 5, 18}), 0, 2); }));
  list.push_back(all("every second", [&](int) { return slice(make({9, 26}), 1, 0, 26, 2); }));
  list.push_back(all("different layouts",
                     [&](int i) { return i == 0 ? transpose(make({12, 70}), 0, 1) : make({70, 12}); }));
  if (arity > 1) {
    list.push_back(all("rows", [&](int i) { return i == 0 ? make({40, 30}) : make({30}); }));
    list.push_back(all("dense rows", [&](int i) { return i == 0 ? make({5, 3, 32}) : make({3, 32}); }));
    list.push_back(all("dense rows apart", [&](int) { return slice(make({9, 64}), 1, 16, 48); }));
    list.push_back(all("columns", [&](int i) { return i == 0 ? make({40, 1}) : make({40, 30}); }));
    list.push_back(all("both", [&](int i) { return i == 0 ? make({5, 1, 7}) : make({6, 1}); }));
    list.push_back(all("with 0-d", [&](int i) { return i == 0 ? make({50, 3}) : make({}); }));
    list.push_back(all("packs with 0-d", [&](int i) { return i == 0 ? make({10, 16}) : make({}); }));
    list.push_back(all("0-d with packs", [&](int i) { return i == 1 ? make({160}) : make({}); }));
  }
  list.push_back(all("expanded", [&](int) { return expand(make({6, 1, 4}), {6, 5, 4}); }));
  list.push_back(
      all("many dims", [&](int) { return permute(make({2, 3, 2, 3, 2, 3, 2}), {6, 0, 5, 1, 4, 2, 3}); }));
  return list;
}

std::vector<Tensor> on_gpu(const std::vector<Tensor>& host) {
  std::vector<Tensor> moved;
  for (const Tensor& t : host) moved.push_back(sherd::test::on_gpu(t));
  return moved;
}

bool broadcasts(const Case& c, const Tensor& out) {
  for (const Tensor& t : c.inputs)
    if (t.shape() != out.shape()) return true;
  return false;
}

/// Gradients of `fn` at `inputs`, for an upstream gradient that both devices share.
std::vector<Tensor> gradients(const std::function<Tensor(std::span<const Tensor>)>& fn,
                              std::vector<Tensor> inputs, const Tensor& upstream) {
  for (Tensor& t : inputs) (t = t.detach()).requires_grad_();
  return grad(fn(inputs), inputs, upstream);
}

/// Whether all have the same bits, or both are NaN; asked on their device. Of zeros of both signs, 1 / x
/// differs.
bool alike(const Tensor& a, const Tensor& b) {
  const Tensor values = logical_or(equal(a, b), logical_and(isnan(a), isnan(b)));
  const Tensor signs = logical_or(not_equal(a, 0), equal(reciprocal(a), reciprocal(b)));
  return all(logical_and(values, signs)).item<bool>();
}

/// Every `step`-th float of the GPU of one sign and `count` exponents from 2^(first - 127) on, those below
/// 2^-126 as if of 0; infinity and NaN at the end.
Tensor floats(bool negative, int first, int count, std::int64_t step = 1) {
  const Tensor fractions = arange(0, 1 << 23, step, {f32, gpu}) * 0x1p-23;
  std::vector<Tensor> parts;
  for (int e = first; e < std::min(first + count, 255); ++e)
    parts.push_back((fractions + (e > 0 ? 1 : 0)) * std::ldexp(1, std::max(e, 1) - 127));
  parts.push_back(full({4}, std::numeric_limits<float>::infinity(), {f32, gpu}));
  parts.push_back(full({4}, std::numeric_limits<float>::quiet_NaN(), {f32, gpu}));
  const Tensor all = cat(parts);
  return negative ? -all : all;
}
/// The same values where no pack can be loaded, so that kernels take them one by one.
Tensor one_by_one(const Tensor& x) {
  return slice(cat({full({1}, 0, {x.dtype(), gpu}), x}), 0, 1, 1 + x.size(0));
}

void compare_gradients(const Case& c, double ulps, const std::function<Tensor(std::span<const Tensor>)>& fn) {
  const Tensor y = fn(c.inputs);
  const Tensor upstream = Values(7)(y.shape(), y.dtype());
  const std::vector<Tensor> host = gradients(fn, c.inputs, upstream),
                            moved = gradients(fn, on_gpu(c.inputs), to(upstream, gpu));
  REQUIRE(host.size() == moved.size());
  for (std::size_t i = 0; i < host.size(); ++i) {
    REQUIRE(host[i].defined() == moved[i].defined());
    if (!host[i].defined()) continue;
    // Broadcast gradients are sums, and those are taken in another order.
    if (broadcasts(c, y))
      CHECK(relative_distance(moved[i], host[i]) <= 4 * rounding(y.dtype()));
    else
      CHECK(distance_in_ulps(moved[i], host[i]) <= 2 * ulps);
  }
}

}  // namespace

TEST_CASE("cuda: elementwise values equal the CPU's for every op, dtype and layout") {
  if (no_gpu()) return;
  for (const ElementwiseListing& entry : elementwise_listing()) {
    for (DType dtype : all_dtypes) {
      if (!entry.dtypes.contains(dtype)) continue;
      Values values(1);
      const bool whole = !is_floating(dtype);
      for (const Case& c : cases(entry.arity, [&](Shape shape) {
             return values(shape, dtype, whole ? -9 : entry.low, whole ? 9 : entry.high);
           })) {
        INFO(entry.op->name() << " " << name_of(dtype) << " " << c.name);
        const Tensors host = apply(*entry.op, Inputs(c.inputs)),
                      moved = apply(*entry.op, Inputs(on_gpu(c.inputs)));
        CHECK(distance_in_ulps(moved[0], host[0]) <= allowed_ulps(entry.op->name()));
      }
    }
  }
}

TEST_CASE("cuda: functions of one 16-bit float give every value its bits, however many elements there are") {
  if (no_gpu()) return;
  constexpr std::int64_t values = 1 << 16, times = 64, more = 13;  // 2^22 elements and a few
  std::vector<std::uint16_t> bits(values);
  std::iota(bits.begin(), bits.end(), std::uint16_t{0});
  for (DType dtype : {f16, bf16}) {
    const Tensor every = to(from_blob(bits.data(), {values}, dtype), gpu);
    const auto repeated = [&](const Tensor& once) {
      return slice(reshape(expand(unsqueeze(once, 0), {times + 1, values}), {-1}), 0, 0,
                   times * values + more);
    };
    const Tensor x = repeated(every);
    for (const ElementwiseListing& entry : elementwise_listing()) {
      if (entry.arity != 1 || entry.gives_bool || !entry.dtypes.contains(dtype)) continue;
      INFO(entry.op->name() << " " << name_of(dtype));
      const Tensor once = apply(*entry.op, Inputs(&every, 1))[0], all = apply(*entry.op, Inputs(&x, 1))[0];
      CHECK(alike(all, repeated(once)));
      if (!entry.in_place) continue;
      const Tensor written = clone(x);
      apply(*entry.in_place, Inputs(&written, 1));
      CHECK(alike(written, all));
    }
  }
}

// What is taken in packs may be computed by shorter formulas; what is taken one by one is as it is defined.
TEST_CASE("cuda: functions give every f32 the same bits in packs and one by one") {
  if (no_gpu()) return;
  constexpr int exponents = 8;
  for (bool negative : {false, true}) {
    for (int first = 0; first < 255; first += exponents) {
      const Tensor x = floats(negative, first, exponents), apart = one_by_one(x);
      INFO((negative ? "below 0, from exponent " : "from exponent ") << first);
      for (const ElementwiseListing& entry : elementwise_listing()) {
        if (entry.arity != 1 || entry.gives_bool || !entry.dtypes.contains(f32)) continue;
        INFO(entry.op->name());
        CHECK(alike(apply(*entry.op, Inputs(&x, 1))[0], apply(*entry.op, Inputs(&apart, 1))[0]));
      }
    }
  }
}

TEST_CASE("cuda: powers with a number, and gradients, give f32 the same bits in packs and one by one") {
  if (no_gpu()) return;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr std::int64_t step = 31;
  const auto gradient = [](const auto& fn, const Tensor& x) {
    Tensor leaf = x.detach();
    leaf.requires_grad_();
    const Tensor y = fn(leaf);
    return grad(y, std::vector{leaf}, full(y.shape(), 1.25, {f32, gpu}))[0];
  };
  for (bool negative : {false, true}) {
    const Tensor x = floats(negative, 0, 255, step), apart = one_by_one(x);
    for (double power : {2.5, -1.5, 0.1, 7.0, 1.0 / 3, 1e-4, 100.0, -40.0, -0.0, infinity, std::nan("")}) {
      const auto fn = [&](const Tensor& t) { return pow(t, power); };
      INFO("pow " << power << (negative ? " below 0" : ""));
      CHECK(alike(fn(x), fn(apart)));
      CHECK(alike(gradient(fn, x), gradient(fn, apart)));
    }
    for (const ElementwiseListing& entry : elementwise_listing()) {
      if (entry.arity != 1 || entry.gives_bool || !entry.dtypes.contains(f32)) continue;
      if (!entry.op->differentiable()) continue;
      INFO(entry.op->name() << (negative ? " below 0" : ""));
      const auto fn = [&](const Tensor& t) { return apply(*entry.op, Inputs(&t, 1))[0]; };
      CHECK(alike(gradient(fn, x), gradient(fn, apart)));
    }
  }
}

TEST_CASE("cuda: functions of two f32 give the same bits in packs and one by one") {
  if (no_gpu()) return;
  constexpr std::int64_t n = 1 << 20;
  Values values(9);
  const auto specials = [&] { return on_gpu(values.with_specials({n}, f32)); };
  const auto between = [&](double low, double high) { return on_gpu(values({n}, f32, low, high)); };
  const Tensor sweep = cat({floats(false, 0, 255, 2051), floats(true, 0, 255, 2051)});
  const Tensor shuffled = index_select(sweep, 0, randperm(sweep.size(0), {i64, gpu}));
  const std::pair<Tensor, Tensor> pairs[] = {
      {specials(), specials()},
      {sweep, shuffled},                                       // all sizes
      {exp(between(-80, 80)), between(-8, 8)},                 // powers that are floats
      {between(-10, 10), round(between(-40, 40))},             // of both signs
      {round(between(-40, 40)), round(between(-6, 6)) * 0.5},  // exact, and halfway
      {1.0 + between(-1, 1) * 1e-4, between(-1, 1) * 1e6},     // near 1
      {between(-1, 1), between(-1, 1)}};
  for (const ElementwiseListing& entry : elementwise_listing()) {
    if (entry.arity != 2 || entry.gives_bool || !entry.dtypes.contains(f32)) continue;
    for (std::size_t k = 0; k < std::size(pairs); ++k) {
      const auto& [a, b] = pairs[k];
      INFO(entry.op->name() << ", pair " << k);
      const std::vector<Tensor> packed{a, b}, apart{one_by_one(a), one_by_one(b)};
      const auto fn = [&](std::span<const Tensor> in) { return apply(*entry.op, in)[0]; };
      CHECK(alike(fn(packed), fn(apart)));
      if (!entry.op->differentiable()) continue;
      const Tensor upstream = full(a.shape(), 1.25, {f32, gpu});
      const std::vector<Tensor> one = gradients(fn, packed, upstream), other = gradients(fn, apart, upstream);
      for (std::size_t i = 0; i < one.size(); ++i) {
        REQUIRE(one[i].defined() == other[i].defined());
        if (one[i].defined()) CHECK(alike(one[i], other[i]));
      }
    }
  }
}

TEST_CASE("cuda: elementwise ops treat infinities, NaN and tiny numbers as the CPU does") {
  if (no_gpu()) return;
  for (const ElementwiseListing& entry : elementwise_listing()) {
    for (DType dtype : {f64, f32, f16, bf16}) {
      if (!entry.dtypes.contains(dtype)) continue;
      Values values(2);
      std::vector<Tensor> inputs;
      for (int i = 0; i < entry.arity; ++i) inputs.push_back(values.with_specials({997}, dtype));
      INFO(entry.op->name() << " " << name_of(dtype));
      const Tensors host = apply(*entry.op, Inputs(inputs)), moved = apply(*entry.op, Inputs(on_gpu(inputs)));
      CHECK(distance_in_ulps(moved[0], host[0]) <= allowed_ulps(entry.op->name()));
    }
  }
}

TEST_CASE("cuda: in-place forms write what the CPU's write, in any layout") {
  if (no_gpu()) return;
  for (const ElementwiseListing& entry : elementwise_listing()) {
    if (!entry.in_place) continue;
    for (DType dtype : {f32, bf16, i64}) {
      if (!entry.dtypes.contains(dtype)) continue;
      Values values(3);
      const double low = is_floating(dtype) ? entry.low : -9, high = is_floating(dtype) ? entry.high : 9;
      for (bool strided : {false, true}) {
        std::vector<Tensor> host;
        for (int i = 0; i < entry.arity; ++i) host.push_back(values({31, 22}, dtype, low, high));
        if (strided) host[0] = transpose(values({44, 31}, dtype, low, high), 0, 1);
        if (strided) host[0] = slice(host[0], 1, 0, 44, 2);
        const std::vector<Tensor> moved = on_gpu(host);
        INFO(entry.in_place->name() << " " << name_of(dtype) << (strided ? " strided" : " dense"));
        apply(*entry.in_place, Inputs(host));
        apply(*entry.in_place, Inputs(moved));
        // The whole memory: what lies between the elements stays as it was.
        const auto n = static_cast<std::int64_t>(host[0].storage().bytes()) / size_of(dtype);
        const Layout all{Shape{n}, Shape{1}, 0};
        CHECK(distance_in_ulps(alias(moved[0], all), alias(host[0], all)) <= allowed_ulps(entry.op->name()));
      }
    }
  }
}

TEST_CASE("cuda: gradients of elementwise ops equal the CPU's") {
  if (no_gpu()) return;
  for (const ElementwiseListing& entry : elementwise_listing()) {
    if (!entry.op->differentiable() || entry.gives_bool) continue;
    for (DType dtype : {f64, f32, f16, bf16}) {
      if (!entry.dtypes.contains(dtype)) continue;
      Values values(4);
      for (const Case& c :
           cases(entry.arity, [&](Shape shape) { return values(shape, dtype, entry.low, entry.high); })) {
        INFO(entry.op->name() << " " << name_of(dtype) << " " << c.name);
        compare_gradients(c, allowed_ulps(entry.op->name()),
                          [&](std::span<const Tensor> in) { return apply(*entry.op, in)[0]; });
      }
    }
  }
}

TEST_CASE("cuda: forms with a number, where and masked_fill equal the CPU's, gradients included") {
  if (no_gpu()) return;
  using One = std::function<Tensor(const Tensor&)>;
  const std::pair<const char*, One> floats[] = {
      {"add", [](const Tensor& x) { return x + 1.25; }},
      {"sub", [](const Tensor& x) { return x - 1.25; }},
      {"from", [](const Tensor& x) { return 1.25 - x; }},
      {"mul", [](const Tensor& x) { return x * 1.25; }},
      {"div", [](const Tensor& x) { return x / 3.0; }},
      {"over", [](const Tensor& x) { return 3.0 / x; }},
      {"pow", [](const Tensor& x) { return pow(x, 3); }},
      {"maximum", [](const Tensor& x) { return maximum(x, 1.25); }},
      {"minimum", [](const Tensor& x) { return minimum(x, 1.25); }},
      {"masked_fill", [](const Tensor& x) { return masked_fill(x, greater(x.detach(), 1), 0.5); }},
      {"where", [](const Tensor& x) { return where(less(x.detach(), 1.5), x * 2.0, x - 1.0); }},
      {"to f64 and back", [](const Tensor& x) { return to(to(x, f64) * 1.5, x.dtype()); }}};
  for (DType dtype : {f64, f32, f16, bf16}) {
    for (const auto& [name, fn] : floats) {
      Values values(5);
      for (const Case& c : cases(1, [&](Shape shape) { return values(shape, dtype, 0.5, 2); })) {
        INFO(name << " " << name_of(dtype) << " " << c.name);
        const double ulps = allowed_ulps(name);
        CHECK(distance_in_ulps(fn(sherd::test::on_gpu(c.inputs[0])), fn(c.inputs[0])) <= ulps);
        compare_gradients(c, ulps, [&, &f = fn](std::span<const Tensor> in) { return f(in[0]); });
      }
    }
  }
  const std::pair<const char*, One> all[] = {
      {"equal", [](const Tensor& x) { return equal(x, x.dtype() == boolean ? 1 : 2); }},
      {"not_equal", [](const Tensor& x) { return not_equal(x, x.dtype() == boolean ? 1 : 2); }},
      {"less", [](const Tensor& x) { return less(x, x.dtype() == boolean ? 1 : 2); }},
      {"less_equal", [](const Tensor& x) { return less_equal(x, x.dtype() == boolean ? 1 : 2); }},
      {"greater", [](const Tensor& x) { return greater(x, x.dtype() == boolean ? 1 : 2); }},
      {"greater_equal", [](const Tensor& x) { return greater_equal(x, x.dtype() == boolean ? 1 : 2); }},
      {"where", [](const Tensor& x) {
         return where(equal(x, 1), x, slice(cat(std::vector{x, x}), 0, x.size(0), 2 * x.size(0)));
       }}};
  for (DType dtype : all_dtypes) {
    for (const auto& [name, fn] : all) {
      const Tensor x = Values(6)({51, 3}, dtype, -4, 4);
      INFO(name << " " << name_of(dtype));
      const Tensor y = fn(sherd::test::on_gpu(x));
      CHECK(distance_in_ulps(y, fn(x)) == 0);
      CHECK(y.dtype() == (std::string_view(name) == "where" ? dtype : boolean));
    }
  }
}

TEST_CASE("cuda: gradients of gradients equal the CPU's") {
  if (no_gpu()) return;
  const auto second = [](Tensor x) {
    x.requires_grad_();
    const Tensor y = gelu(x) * tanh(x) + sigmoid(x) / (x * x + 1.0);
    const Tensor first = grad(sum(y), std::vector{x}, {}, {.create_graph = true})[0];
    return grad(sum(first * first), std::vector{x})[0];
  };
  const Tensor x = Values(8)({301}, f64);
  CHECK(relative_distance(second(on_gpu(std::vector{x})[0]), second(x)) <= 1e-14);
}
