// Taking and putting by positions, against one pick after another.
#include "runtime/ops/picking.h"

#include "runtime/apply.h"
#include "runtime/ops.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

using ops::Of;
using Doubles = std::vector<double>;

struct Case {
  Of of;
  int axis, axes;
  Shape shape, index;
};

/// Axes first, in the middle and last, several at once, indices shorter than x and longer, one pick, none,
/// wide and narrow slices.
std::vector<Case> cases() {
  std::vector<Case> list;
  for (const Shape& shape : {Shape{7}, Shape{5, 3}, Shape{4, 6, 20}, Shape{3, 1, 4, 2}})
    for (int axis = 0; axis < shape.rank(); ++axis) {
      for (const Shape& index : {Shape{9}, Shape{2, 3}, Shape{1}, Shape{0}, Shape{}})
        for (int axes = 1; axis + axes <= shape.rank(); ++axes)
          list.push_back({Of::slices, axis, axes, shape, index});
      for (const std::int64_t picks : {1, 4, 30})
        for (const bool shorter : {false, true}) {
          Shape index = shape;
          for (int i = 0; i < index.rank(); ++i)
            index[i] = i == axis ? picks : shorter ? (index[i] + 1) / 2 : index[i];
          list.push_back({Of::elements, axis, 1, shape, index});
        }
    }
  list.push_back({Of::slices, 0, 1, {40, 600}, {300}});
  list.push_back({Of::slices, 1, 1, {3, 50, 70}, {900}});
  list.push_back({Of::slices, 0, 1, {1000}, {50000}});
  list.push_back({Of::slices, 1, 1, {30, 90}, {2000}});
  list.push_back({Of::elements, 0, 1, {3000}, {40000}});
  list.push_back({Of::elements, 0, 1, {90, 300}, {60, 200}});
  return list;
}

/// The place in x of each pick, in order.
std::vector<std::int64_t> places(const Case& c, const std::vector<std::int64_t>& at) {
  std::vector<std::int64_t> list;
  if (c.of == Of::slices) {
    const ops::SliceSizes s(c.shape, c.axis, c.axes);
    for (std::int64_t o = 0; o < s.outer; ++o)
      for (const std::int64_t position : at)
        for (std::int64_t i = 0; i < s.inner; ++i) list.push_back((o * s.columns + position) * s.inner + i);
    return list;
  }
  for (std::int64_t i = 0; i < c.index.numel(); ++i) {
    std::int64_t place = 0, step = 1, rest = i;
    for (int a = c.shape.rank() - 1; a >= 0; --a) {
      place += step * (a == c.axis ? at[static_cast<std::size_t>(i)] : rest % c.index[a]);
      rest /= c.index[a];
      step *= c.shape[a];
    }
    list.push_back(place);
  }
  return list;
}

/// `fn` under one thread and under several, which give the same.
Doubles by_threads(const std::function<Tensor()>& fn) {
  Doubles one;
  {
    const Threads alone(1);
    one = doubles(fn());
  }
  const Threads several(3);
  CHECK(doubles(fn()) == one);
  return one;
}

/// Whole numbers, whose sums no dtype rounds.
Tensor whole(const Shape& shape, DType dtype, unsigned seed) {
  const bool any_sign = is_floating(dtype) || dtype == i64 || dtype == i32;
  return to(numbers(shape, i64, seed, any_sign ? -2 : 0, dtype == boolean ? 1 : 2), dtype);
}

std::string text(const Case& c, DType dtype) {
  return fmt::format("{} along {} ({}) of {} at {}, {}", c.of == Of::slices ? "slices" : "elements", c.axis,
                     c.axes, c.shape, c.index, name_of(dtype));
}

}  // namespace

TEST_CASE("picking: what is taken and put is what one pick after another gives", "[one thread]") {
  unsigned seed = 5;
  for (const Case& c : cases())
    for (const DType dtype : all_dtypes) {
      INFO(text(c, dtype));
      const std::int64_t columns =
          c.of == Of::slices ? ops::SliceSizes(c.shape, c.axis, c.axes).columns : c.shape[c.axis];
      const Tensor x = whole(c.shape, dtype, ++seed);
      const Tensor index = numbers(c.index, i64, ++seed, 0, static_cast<double>(columns - 1));
      const std::vector<std::int64_t> place = places(c, index.to_vector<std::int64_t>());
      const Doubles base = doubles(x);
      const ops::Take take{{.of = c.of, .axis = c.axis, .axes = c.axes}};
      const Doubles taken = by_threads([&] { return apply(take, x, index); });
      Doubles want;
      for (const std::int64_t p : place) want.push_back(base[static_cast<std::size_t>(p)]);
      CHECK(taken == want);
      const Shape shape = apply(take, x, index).shape();
      const Tensor given = whole(shape, dtype, ++seed);
      const Doubles what = doubles(given);
      for (const Put put : {Put::replace, Put::add}) {
        if (put == Put::add && dtype == boolean) continue;
        const ops::PutAt op{{c.of, c.axis, c.axes}, put, c.shape};
        for (const bool based : {false, true}) {
          INFO((put == Put::add ? "add" : "replace") << (based ? " to x" : ""));
          want = based ? base : Doubles(base.size());
          for (std::size_t i = 0; i < place.size(); ++i) {
            double& to = want[static_cast<std::size_t>(place[i])];
            to = put == Put::add ? to + what[i] : what[i];
          }
          CHECK(by_threads([&] { return apply(op, based ? x : Tensor(), index, given); }) == want);
          if (!based) continue;
          CHECK(by_threads([&] { return apply(ops::PutAtInPlace{op}, clone(x), index, given); }) == want);
          const Tensor turned = x.rank() < 2 ? clone(x) : transpose(contiguous(transpose(x, 0, -1)), 0, -1);
          apply(ops::PutAtInPlace{op}, turned, index, given);  // not dense
          CHECK(doubles(turned) == want);
        }
      }
    }
}

TEST_CASE("picking: positions that differ give the same whether the op knows it or not") {
  for (const DType dtype : {f64, f32, f16, bf16, i64, u8}) {
    INFO(name_of(dtype));
    const Tensor x = numbers({6, 8, 5}, dtype, 1, 0, 9), given = numbers({6, 4, 5}, dtype, 2, 0, 9);
    const Tensor index = narrow(argsort(numbers({6, 8, 5}, f32, 3), 1), 1, 0, 4);
    for (const Put put : {Put::replace, Put::add}) {
      ops::PutAt op{{Of::elements, 1, 1}, put, x.shape()};
      const Tensor plain = apply(op, x, index, given);
      op.distinct = true;
      CHECK(doubles(apply(op, x, index, given)) == doubles(plain));
      ops::PutAt rows{{Of::slices, 1, 1}, put, x.shape()};
      const Tensor order = narrow(argsort(numbers({8}, f32, 4), 0), 0, 0, 4);
      const Tensor sums = apply(rows, x, order, given);
      rows.distinct = true;
      CHECK(doubles(apply(rows, x, order, given)) == doubles(sums));
      ops::PutAt columns{{Of::slices, 2, 1}, put, x.shape()};
      const Tensor some = Tensor::from(std::vector<std::int64_t>{4, 0, 2, 1}, {4});
      const Tensor narrow_given = numbers({6, 8, 4}, dtype, 5, 0, 9);
      const Tensor by_columns = apply(columns, x, some, narrow_given);
      columns.distinct = true;
      CHECK(doubles(apply(columns, x, some, narrow_given)) == doubles(by_columns));
    }
  }
}

TEST_CASE("picking: a position outside is named, with the call and the first place that has it") {
  const Tensor x = ones({3, 4});
  for (const std::int64_t bad : {-1, 4}) {
    const Tensor at = Tensor::from(std::vector<std::int64_t>{0, bad, -9}, {3});
    const auto says = [&](std::string_view call) {
      return fmt::format("{}: index {} at position 1 is outside [0, 4)", call, bad);
    };
    const auto refused = [&](std::string_view call, const std::function<Tensor()>& fn) {
      CHECK(one_line_about(message_of<ValueError>([&] { (void)fn(); }), says(call)));
    };
    refused("index_select", [&] { return index_select(x, 1, at); });
    refused("embedding", [&] { return embedding(ones({4, 0}), at); });
    refused("gather", [&] { return gather(x, 1, reshape(at, {3, 1})); });
    refused("scatter", [&] { return scatter(x, 1, reshape(at, {3, 1}), 1); });
    refused("scatter_add", [&] { return scatter_add(x, 1, reshape(at, {3, 1}), ones({3, 1})); });
  }
}

TEST_CASE("picking: masked_fill_ writes in place, by masks that broadcast and by the tensor itself") {
  for (const DType dtype : all_dtypes) {
    INFO(name_of(dtype));
    const Tensor x = whole({4, 3}, dtype, 7);
    for (const Shape& shape : {Shape{4, 3}, Shape{3}, Shape{4, 1}, Shape{}}) {
      const Tensor mask = whole(shape, boolean, 8), copy = clone(x);
      CHECK(masked_fill_(copy, mask, 1).is(copy));
      CHECK(same_bits(copy, where(mask, 1, x)));
    }
  }
  const Tensor mask = whole({4, 3}, boolean, 9);
  const Tensor itself = clone(mask);
  masked_fill_(itself, itself, false);
  CHECK(doubles(itself) == Doubles(12));
  CHECK(one_line_about(message_of<ShapeError>([&] { masked_fill_(ones({3}), mask, 1); }), "masked_fill_"));
  Tensor leaf = ones({4, 3});
  leaf.requires_grad_();
  const Tensor y = leaf * 3;
  masked_fill_(y, mask, 0);
  sum(y).backward();
  CHECK(same_bits(leaf.grad(), where(mask, 0, full({4, 3}, 3))));
}
