// Largest values, picks and draws, and the order-free norm: equal to the CPU's to the bit.
#include <limits>

#include "autograd/capture/capture.h"
#include "nn/optimizer.h"
#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/exact_squares.h"
#include "runtime/indexing.h"
#include "runtime/ops/order_free_norm.h"
#include "tests/cuda/agree.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr DType floats[] = {f64, f32, f16, bf16};

/// `fn` gives the same bits on both devices.
void equal_bits(const Tensor& x, const std::function<Tensor(const Tensor&)>& fn) {
  CHECK(distance_in_ulps(fn(on_gpu(x)), fn(x)) == 0);
}

/// `fn` gives the same bits on both devices, and once more on the GPU.
void equal_values(const std::vector<Tensor>& in, const Function& fn) {
  std::vector<Tensor> moved;
  for (const Tensor& t : in) moved.push_back(on_gpu(t));
  const Tensor host = fn(in), once = fn(moved);
  CHECK(distance_in_ulps(once, host) == 0);
  CHECK(distance_in_ulps(fn(moved), once) == 0);
}

/// Positions below `below` along an axis.
struct PickCase {
  int axis;
  Shape shape, index;
  std::int64_t below;
};

/// Each way in which sums are made: lines in one part and in several, of one tile and of more; runs, short
/// and over all picks; one pick a line; and lines whose last picks a block finds. Axes first, in the middle
/// and last; indices shorter than x elsewhere.
std::vector<PickCase> elements_along() {
  return {{1, {7, 33}, {7, 50}, 33},
          {0, {33, 7}, {50, 7}, 33},
          {1, {5, 40, 6}, {5, 90, 6}, 40},
          {1, {9, 40, 6}, {4, 70, 3}, 40},
          {2, {4, 3, 9}, {2, 3, 300}, 9},
          {0, {9, 4, 5}, {1, 4, 5}, 9},
          {1, {9, 40, 6}, {9, 1, 2}, 40},
          {0, {10}, {100003}, 10},
          {0, {20001}, {50000}, 20001},
          {0, {300000}, {100001}, 300000},
          {0, {300000}, {100001}, 1},
          {1, {3, 70000}, {3, 501}, 70000},
          {1, {3, 70000}, {2, 5000}, 3},
          {0, {70000, 3}, {9000, 2}, 70000},
          {0, {50, 300}, {5000, 300}, 50},
          {1, {4, 5}, {4, 0}, 5},
          {1, {70, 2000}, {70, 3000}, 9},
          {1, {66, 14336}, {65, 500}, 14336},
          {2, {9, 9, 200}, {9, 8, 300}, 200},
          {1, {150, 20000}, {140, 900}, 20000},
          {0, {0, 5}, {0, 5}, 1}};
}

/// Rows that words of every width move, slices with others around them, narrow ones of short and long axes.
std::vector<PickCase> slices_across() {
  return {{0, {40, 64}, {301}, 40},
          {0, {40, 63}, {10, 30}, 7},
          {1, {40, 64}, {200}, 64},
          {1, {6, 50, 33}, {400}, 50},
          {1, {6, 50, 64}, {400}, 50},
          {1, {5, 50, 3}, {100}, 50},
          {1, {2, 40000, 3}, {600}, 900},
          {0, {300000}, {5000}, 300000},
          {0, {300}, {50000}, 300},
          {0, {50, 16}, {9000}, 1},
          {2, {3, 4, 30}, {2, 50}, 30},
          {0, {6, 2}, {0}, 6},
          {0, {9, 3}, {1}, 9},
          {1, {4, 90000}, {2000}, 90000},
          {0, {5, 0}, {4}, 5}};
}

/// `x` with its first axis innermost in memory.
Tensor laid_as_columns(const Tensor& x) {
  return x.rank() < 2 ? clone(x) : transpose(contiguous(transpose(x, 0, -1)), 0, -1);
}

}  // namespace

TEST_CASE("cuda: amax, amin and argmax equal the CPU's over any axes") {
  if (no_gpu()) return;
  for (DType dtype : all_dtypes) {
    const Tensor x = Values(1)({5, 33, 4, 6}, dtype, is_floating(dtype) ? -9 : 0, 9);
    for (unsigned axes = 0; axes < 16; ++axes) {
      Shape list;
      for (int i = 0; i < 4; ++i)
        if ((axes >> i) & 1) list.push_back(i);
      INFO(name_of(dtype) << " axes " << axes);
      equal_bits(x, [&](const Tensor& t) { return amax(t, list); });
      equal_bits(x, [&](const Tensor& t) { return amin(transpose(t, 1, 3), list, Keep::dims); });
    }
    for (int axis = 0; axis < 4; ++axis) {
      INFO(name_of(dtype) << " axis " << axis);
      equal_bits(x, [&](const Tensor& t) { return argmax(t, axis); });
      equal_bits(x, [&](const Tensor& t) { return argmax(transpose(t, 0, 2), axis, Keep::dims); });
    }
    equal_bits(Values(2)({}, dtype), [](const Tensor& t) { return argmax(t, 0); });
  }
  for (std::int64_t n : {1, 3, 31, 32, 33, 1000, 4097, 300001}) {
    INFO(n);
    const Tensor x = Values(3)({n}, f32), twice = to(floor(x * 3.0), i32);
    equal_bits(x, [](const Tensor& t) { return amax(t); });
    equal_bits(x, [](const Tensor& t) { return argmax(t, 0); });
    equal_bits(twice, [](const Tensor& t) { return argmax(t, 0); });  // the first of many
    equal_bits(transpose(expand(unsqueeze(x, 0), {3, n}), 0, 1),
               [](const Tensor& t) { return amin(t, {0}); });
  }
  for (DType dtype : floats) {
    Tensor x = Values(4)({7, 5000}, dtype);
    fill_(select(select(x, 0, 2), 0, 4321), std::nan(""));
    fill_(select(select(x, 0, 2), 0, 4500), std::nan(""));
    fill_(select(select(x, 0, 3), 0, 17), std::numeric_limits<double>::infinity());
    INFO(name_of(dtype));
    equal_bits(x, [](const Tensor& t) { return amax(t, {1}); });
    equal_bits(x, [](const Tensor& t) { return amin(t, {1}); });
    equal_bits(x, [](const Tensor& t) { return argmax(t, 1); });
    for (std::int64_t n : {1, 5, 31, 33, 1025, 9000}) {  // the first zero's sign
      Tensor signs = zeros({2, n}, {dtype});
      fill_(slice(signs, 1, 0, n, 2), -0.0);
      fill_(slice(signs, 1, 0, std::min<std::int64_t>(n, 3)), 0.0);
      fill_(slice(select(signs, 0, 1), 0, 0, 1), -0.0);
      for (const Tensor& t : {signs, contiguous(transpose(signs, 0, 1))}) {
        const int axis = t.is(signs) ? 1 : 0;
        equal_bits(t, [&](const Tensor& v) { return reciprocal(amax(v, {axis})); });
        equal_bits(t, [&](const Tensor& v) { return reciprocal(amin(v, {axis})); });
      }
    }
    agree({Values(5)({6, 40}, dtype)}, row_tolerance(dtype),
          [](std::span<const Tensor> t) { return amax(t[0], {1}); });
  }
}

TEST_CASE("cuda: topk, gather and scatter equal the CPU's, gradients included") {
  if (no_gpu()) return;
  for (DType dtype : all_dtypes) {
    for (std::int64_t columns : {1, 3, 31, 32, 33, 1000}) {
      INFO(name_of(dtype) << " " << columns);
      const Tensor x = Values(6)({7, columns}, dtype, 0, 20);
      for (std::int64_t k : {std::int64_t{0}, std::int64_t{1}, (columns + 1) / 2, columns}) {
        equal_bits(x, [&](const Tensor& t) { return topk(t, k).values; });
        equal_bits(x, [&](const Tensor& t) { return topk(t, k).indices; });
      }
      const Tensor index = Values(7)({7, 70}, i64, 0, static_cast<double>(columns) - 0.1);
      agree({x, index}, 0, [](std::span<const Tensor> t) { return gather(t[0], t[1]); });
    }
    if (!is_floating(dtype)) continue;
    INFO(name_of(dtype));
    agree({Values(8)({3, 4, 50}, dtype)}, 0, [](std::span<const Tensor> t) { return topk(t[0], 5).values; });
    equal_bits(Values(9).with_specials({6, 100}, dtype), [](const Tensor& t) { return topk(t, 20).indices; });
    agree({transpose(Values(10)({30, 8}, dtype), 0, 1), Values(11)({8, 9}, i64, 0, 29)}, 0,
          [](std::span<const Tensor> t) { return gather(t[0], t[1]); });
  }
}

TEST_CASE("cuda: rows are sorted as the CPU sorts them, whatever their length") {
  if (no_gpu()) return;
  for (DType dtype : all_dtypes)
    for (std::int64_t columns : {33, 2047, 2048, 2049, 5000, 70001}) {
      INFO(name_of(dtype) << " " << columns);
      Tensor x = Values(13)({3, columns}, dtype, is_floating(dtype) ? -50 : 0, 50);
      if (is_floating(dtype)) {
        fill_(slice(x, 1, 5, columns, 7), -0.0);
        fill_(slice(x, 1, 6, columns, 11), std::nan(""));
        fill_(slice(x, 1, 8, columns, 13), -std::numeric_limits<double>::infinity());
      }
      for (const Order order : {Order::ascending, Order::descending}) {
        equal_bits(x, [&](const Tensor& t) { return sort(t, -1, order).indices; });
        equal_bits(x, [&](const Tensor& t) { return sort(t, -1, order).values; });
      }
      if (columns < 3000) equal_bits(x, [](const Tensor& t) { return argsort(transpose(t, 0, 1), 0); });
    }
  manual_seed(3);
  const Tensor places = sort(to(randperm(100000), gpu)).values;
  CHECK(distance_in_ulps(places, arange(0, 100000, 1, {i64})) == 0);
}

TEST_CASE("cuda: rows are written as the CPU writes them, and a captured step may do so") {
  if (no_gpu()) return;
  for (DType dtype : all_dtypes)
    for (std::int64_t width : {1, 3, 4, 64}) {
      INFO(name_of(dtype) << " " << width);
      const Tensor table = Values(14)({50, width}, dtype, 0, 9), rows = Values(15)({200}, i64, 0, 49.9),
                   values = Values(16)({200, width}, dtype, 0, 9);
      const auto written = [](const Tensor& t, const Tensor& at, const Tensor& v) {
        Tensor copy = clone(t);
        copy[at] = v;
        return copy;
      };
      CHECK(distance_in_ulps(written(on_gpu(table), on_gpu(rows), on_gpu(values)),
                             written(table, rows, values)) == 0);
      const Tensor turned = transpose(table, 0, 1);  // not dense
      const Tensor few = Values(17)({2}, i64, 0, static_cast<double>(width) - 0.1),
                   columns = Values(18)({2, 50}, dtype, 0, 9);
      CHECK(distance_in_ulps(written(on_gpu(turned), on_gpu(few), on_gpu(columns)),
                             written(turned, few, columns)) == 0);
    }
  Program program = capture(
      [](std::span<const Tensor> in) -> std::vector<Tensor> {
        Tensor copy = clone(in[0]);
        copy[in[1]] = in[2];
        return {copy};
      },
      {zeros({9, 2}, {f32, gpu}), zeros({3}, {i64, gpu}), ones({3, 2}, {f32, gpu})});
  const Tensor at = Tensor::from({7, 2, 7}, {3}, gpu);
  const Tensor out = program.replay({zeros({9, 2}, {f32, gpu}), to(at, i64), ones({3, 2}, {f32, gpu})})[0];
  CHECK(sum(out).item() == 4);
  CHECK(program.is_device_graph());
}

TEST_CASE("cuda: elements picked and put along any axis are the CPU's, gradients included") {
  if (no_gpu()) return;
  for (const PickCase& c : elements_along()) {
    for (DType dtype : all_dtypes) {
      INFO(name_of(dtype) << " axis " << c.axis << " of " << to_string(c.shape) << " at "
                          << to_string(c.index) << " below " << c.below);
      const Tensor x = Values(21)(c.shape, dtype, 0, 9), given = Values(22)(c.index, dtype, 0, 9);
      const Tensor at = Values(23)(c.index, i64, 0, static_cast<double>(c.below) - 0.1);
      const auto taken = [&](std::span<const Tensor> t) { return gather(t[0], c.axis, t[1]); };
      const auto put = [&](std::span<const Tensor> t) { return scatter(t[0], c.axis, t[1], t[2]); };
      const auto added = [&](std::span<const Tensor> t) { return scatter_add(t[0], c.axis, t[1], t[2]); };
      const auto filled = [&](std::span<const Tensor> t) {
        return scatter(t[0], c.axis, t[1], dtype == boolean ? 1 : 7);
      };
      equal_values({x, at}, taken);
      equal_values({x, at}, filled);
      agree({x, at, given}, 0, put);
      if (!is_floating(dtype)) {
        if (dtype != boolean) equal_values({x, at, given}, added);
        continue;
      }
      // Sums of whole numbers are exact, in whatever order.
      const Tensor whole = round(given);
      equal_values({round(x), at, whole}, added);
      equal_values({x, at, whole}, [&](std::span<const Tensor> t) {
        const Tensor leaf = clone(t[0]).requires_grad_();
        return grad(gather(leaf, c.axis, t[1]), std::span(&leaf, 1), t[2])[0];
      });
    }
  }
}

TEST_CASE(
    "cuda: sums of elements of a long line lose nothing to larger ones elsewhere, infinities and NaN too") {
  if (no_gpu()) return;
  constexpr std::int64_t places = 40000, picks = 100003;
  for (DType dtype : {f32, f16, bf16}) {
    INFO(name_of(dtype));
    const Tensor at = Values(24)({picks}, i64, 0, places - 0.1),
                 given = Values(25).with_specials({picks}, dtype);
    // Sizes from the smallest to the largest, of one size at each place.
    const double most = dtype == f16 ? 6 : 60;
    const Tensor size = exp(Values(26)({places}, f64, -most, most));
    const Tensor sizes = mul(Values(27)({picks}, f64, 1, 2), gather(size, 0, at));
    for (const Tensor& base : {zeros({places}, {dtype}), to(size, dtype)}) {
      const Tensor x = to(sizes, dtype),
                   there = to(scatter_add(on_gpu(base), 0, on_gpu(at), on_gpu(x)), Device::cpu());
      const Tensor exact = scatter_add(to(base, f64), 0, at, to(x, f64));
      const Tensor apart = div(abs(sub(to(there, f64), exact)), maximum(exact, 1e-300));
      CHECK(amax(where(isfinite(exact), apart, 0)).item() <= rounding(dtype));
      const auto summed = [&] { return scatter_add(on_gpu(base), 0, on_gpu(at), on_gpu(given)); };
      // Of infinities and NaN alone: sums of others may become infinite by the order of the CPU.
      const Tensor special = where(isfinite(given), 0, given);
      CHECK(distance_in_ulps(scatter_add(on_gpu(base), 0, on_gpu(at), on_gpu(special)),
                             scatter_add(base, 0, at, special)) == 0);
      CHECK(distance_in_ulps(summed(), summed()) == 0);
    }
    const Tensor one = zeros({picks}, {i64}), ones_there = on_gpu(full({picks}, 0.25, {dtype}));
    CHECK(distance_in_ulps(scatter_add(on_gpu(zeros({places}, {f32})), 0, on_gpu(one), to(ones_there, f32)),
                           scatter_add(zeros({places}, {f32}), 0, one, full({picks}, 0.25, {f32}))) == 0);
  }
}

TEST_CASE("cuda: slices picked and put across any axis are the CPU's, gradients included") {
  if (no_gpu()) return;
  for (const PickCase& c : slices_across()) {
    for (DType dtype : all_dtypes) {
      INFO(name_of(dtype) << " axis " << c.axis << " of " << to_string(c.shape) << " at "
                          << to_string(c.index) << " below " << c.below);
      const Tensor x = Values(24)(c.shape, dtype, 0, 9);
      const Tensor at = Values(25)(c.index, i64, 0, static_cast<double>(c.below) - 0.1);
      const auto places = [&](const Tensor& positions) {
        std::vector<At> list(static_cast<std::size_t>(c.axis), Slice{});
        list.emplace_back(positions);
        return list;
      };
      const auto taken = [&](std::span<const Tensor> t) { return index(t[0], places(t[1])); };
      const Tensor given = Values(26)(index(x, places(at)).shape(), dtype, 0, 9);
      const auto with = [&](Put put) {
        return
            [&, put](std::span<const Tensor> t) { return index_put_(clone(t[0]), places(t[1]), t[2], put); };
      };
      equal_values({x, at}, taken);
      agree({x, at, given}, 0, with(Put::replace));
      const Tensor turned = laid_as_columns(x);
      equal_values({turned, at, given}, with(Put::replace));
      if (!is_floating(dtype)) {
        if (dtype != boolean) equal_values({x, at, given}, with(Put::add));
        continue;
      }
      agree({x, at}, row_tolerance(dtype), taken);
      agree({turned, at}, row_tolerance(dtype), taken);
      agree({x, at, given}, row_tolerance(dtype), with(Put::add));
    }
  }
}

TEST_CASE("cuda: what masks and several positions pick and put is the CPU's, gradients included") {
  if (no_gpu()) return;
  for (DType dtype : all_dtypes)
    for (const Shape& shape : {Shape{1}, Shape{5000}, Shape{70, 33}, Shape{6, 5, 7}, Shape{0, 4}}) {
      INFO(name_of(dtype) << " " << to_string(shape));
      const Tensor x = Values(27)(shape, dtype, 0, 9), mask = greater(Values(28)(shape, f32), 0);
      const Tensor listed = Values(29)(masked_select(x, mask).shape(), dtype, 0, 9);
      const auto with = [](Put put) {
        return [put](std::span<const Tensor> t) { return index_put_(clone(t[0]), {t[1]}, t[2], put); };
      };
      agree({x, mask}, 0, [](std::span<const Tensor> t) { return index(t[0], {t[1]}); });
      agree({x, mask, listed}, 0, with(Put::replace));
      agree({x, mask, ones({}, {dtype})}, is_floating(dtype) ? row_tolerance(dtype) : 0, with(Put::replace));
      if (dtype != boolean) agree({x, mask, listed}, 0, with(Put::add));
      if (shape.rank() < 2 || shape[0] == 0) continue;
      const Tensor first = Values(30)({40}, i64, 0, static_cast<double>(shape[0]) - 0.1),
                   last = Values(31)({40}, i64, 0, static_cast<double>(shape.back()) - 0.1);
      const auto both = [&](std::span<const Tensor> t) { return index(t[0], {t[1], Ellipsis{}, t[2]}); };
      equal_values({x, first, last}, both);
      if (is_floating(dtype)) agree({x, first, last}, row_tolerance(dtype), both);
    }
}

TEST_CASE("cuda: of repeated positions of slices the last is put, however many and far apart they are") {
  if (no_gpu()) return;
  for (std::int64_t columns : {2, 7, 4096, 5000, 40000}) {
    const std::int64_t few = std::min<std::int64_t>(columns, 50);
    for (std::int64_t count : {2, 700, 2048, 2049, 4096, 4097}) {
      const auto below = static_cast<double>(columns);
      const Tensor drawn = Values(32)({count}, i64, 0, below - 0.1);
      const std::pair<const char*, Tensor> positions[] = {{"drawn", drawn},
                                                          {"from the end", remainder(drawn, few) - few},
                                                          {"in steps", remainder(drawn * 4096, columns)},
                                                          {"one", zeros_like(drawn)},
                                                          {"each once", remainder(arange(count), columns)}};
      for (std::int64_t inner : {1, 3, 64}) {
        const Tensor x = zeros({columns, inner}), values = reshape(arange(count * inner) + 1, {count, inner});
        for (const auto& [name, at] : positions) {
          INFO(count << " positions, " << name << ", of " << columns << " rows of " << inner);
          const Tensor host = index_put_(clone(x), {at}, to(values, f32)),
                       moved = index_put_(on_gpu(x), {on_gpu(at)}, on_gpu(to(values, f32)));
          CHECK(distance_in_ulps(moved, host) == 0);
        }
      }
    }
  }
}

TEST_CASE("cuda: a bad index of one_hot, of scatter and of rows to write is reported") {
  if (no_gpu()) return;
  for (const std::int64_t bad : {-6, 5}) {
    const Tensor index = to(Tensor::from(std::vector<std::int64_t>{0, bad, 2}, {3}), gpu);
    CHECK_THROWS_AS(one_hot(index, 5).to_vector<std::int64_t>(), ValueError);
    Tensor table = zeros({5, 2}, {f32, gpu});
    CHECK_THROWS_AS(
        [&] {
          table[index] = ones({3, 2}, {f32, gpu});
          synchronize();
        }(),
        ValueError);
    const Tensor x = zeros({5, 3}, {f32, gpu}), along = reshape(index, {1, 3});
    const std::pair<std::string, std::function<Tensor()>> calls[] = {
        {"embedding", [&] { return embedding(x, index); }},
        {"index_select", [&] { return index_select(x, 0, index); }},
        {"gather", [&] { return gather(x, 0, along); }},
        {"scatter", [&] { return scatter(x, 0, along, ones({1, 3}, {f32, gpu})); }},
        {"scatter_add", [&] { return scatter_add(x, 0, along, ones({1, 3}, {f32, gpu})); }},
        {"index", [&] { return sherd::index(x, {index, abs(index) * 0}); }},
        {"index_put_", [&] { return index_put_(clone(x), {index, abs(index) * 0}, ones({}, {f32, gpu})); }}};
    for (const auto& [name, call] : calls) {
      INFO(name << " " << bad);
      const std::string start = name + ": index " + std::to_string(bad) + " at position 1 is outside [0, 5)";
      CHECK_THROWS_WITH((void(call()), synchronize()), Catch::Matchers::StartsWith(start));
    }
    CHECK_NOTHROW(
        one_hot(to(Tensor::from(std::vector<std::int32_t>{0, 4}, {2}), gpu), 5).to_vector<std::int64_t>());
  }
}

TEST_CASE("cuda: multinomial draws what the CPU draws") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    for (std::int64_t columns : {1, 3, 31, 32, 33, 255, 256, 257, 1000, 4097}) {
      Tensor weights = Values(12)({65, columns}, dtype, 0, 1);
      if (columns > 3) fill_(slice(weights, 1, 1, columns, 2), 0);
      manual_seed(5);
      const Tensor host = multinomial(weights);
      manual_seed(5);
      const Tensor moved = multinomial(on_gpu(weights));
      INFO(name_of(dtype) << " " << columns);
      CHECK(distance_in_ulps(moved, host) == 0);
    }
  }
}

TEST_CASE("cuda: a row that multinomial cannot draw from is reported and gives place 0") {
  if (no_gpu()) return;
  for (const std::vector<double>& row : {std::vector<double>{0, 1, 1, -1, 1},
                                         {0, 1, NAN, 1},
                                         {0, 1e308, 1e308},
                                         {0, 1, std::numeric_limits<double>::infinity()}}) {
    const Tensor weights = Tensor::from(row, {static_cast<std::int64_t>(row.size())});
    CHECK_THROWS_AS(multinomial(weights), ValueError);
    const Tensor drawn = multinomial(on_gpu(weights));
    CHECK_THROWS_AS(drawn.item(), ValueError);
    CHECK(drawn.item() == 0);  // reported once
  }
}

TEST_CASE("cuda: the order-free norm and its clipping have the CPU's bits") {
  if (no_gpu()) return;
  std::vector<Tensor> host;
  Values values(13);
  for (DType dtype : floats)
    for (std::int64_t n : {0, 1, 3, 31, 32, 33, 1000, 4097, 70001})
      host.push_back(values({n}, dtype, -1e3, 1e-3));
  host.push_back(slice(values({77, 9}, f32), 1, 1, 9, 2));
  for (int i = 0; i < 200; ++i) host.push_back(values({7}, f32));  // more than one launch takes
  std::vector<Tensor> moved;
  for (const Tensor& t : host) moved.push_back(on_gpu(t));
  CHECK(distance_in_ulps(order_free_norm(moved), order_free_norm(host)) == 0);
  for (DType dtype : floats)
    for (double exponents : {1., 8., 14., 30., 100.}) {  // magnitudes of 2^-exponents to 1
      const Tensor x = to(values({5000}, f64) * exp(values({5000}, f64, -0.7 * exponents, 0.)), dtype);
      INFO(name_of(dtype) << " " << exponents);
      const auto sums = [](const Tensor& t) {
        return apply_many(ops::SquareSums{}, std::span(&t, 1))[0].to_vector<std::int64_t>();
      };
      CHECK(SquareDigits(sums(on_gpu(x)).data()) == SquareDigits(sums(x).data()));
    }
  for (double scale : {1e-300, 1e-30, 1e30, 1e300}) {
    const Tensor x = values({5000}, f64) * scale;
    INFO(scale);
    equal_bits(x, [](const Tensor& t) { return order_free_norm(std::span(&t, 1)); });
  }
  for (double special : {0.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const Tensor x = full({33}, special);
    INFO(special);
    equal_bits(x, [](const Tensor& t) { return order_free_norm(std::span(&t, 1)); });
  }
  for (double limit : {1.0, 1e9}) {
    nn::Parameter p(zeros({3}, {f32, gpu}));
    p.set_grad(Tensor::from<float>({1, std::nanf(""), 2}, {3}, gpu));
    nn::clip_grad_norm_(std::span(&p, 1), limit);
    for (float g : p.grad().to_vector<float>()) CHECK(std::isnan(g));
    for (DType dtype : floats) {
      std::vector<nn::Parameter> params[2];
      for (std::int64_t n : {1, 33, 4097}) {
        const Tensor g = Values(14)({n}, dtype, -3, 3);
        params[0].emplace_back(zeros({n}, {dtype}));
        params[0].back().set_grad(g);
        params[1].emplace_back(zeros({n}, {dtype, gpu}));
        params[1].back().set_grad(on_gpu(g));
      }
      const Tensor norm = nn::clip_grad_norm_(params[0], limit), same = nn::clip_grad_norm_(params[1], limit);
      INFO(name_of(dtype) << " limit " << limit);
      CHECK(distance_in_ulps(same, norm) == 0);
      for (std::size_t i = 0; i < 3; ++i)
        CHECK(distance_in_ulps(params[1][i].grad(), params[0][i].grad()) == 0);
    }
  }
}
