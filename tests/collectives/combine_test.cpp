// The rule for sums, averages and maxima, beside its plain form.
#include "collectives/combine.h"

#include "runtime/context.h"
#include "tests/catch.h"
#include "tests/collectives/suite.h"
#include "tests/sanitizer.h"

using namespace sherd;
using test::Bytes;

namespace {

std::vector<ReduceOp> reductions(DType dtype) {
  if (!is_floating(dtype)) return {ReduceOp::sum(), ReduceOp::max()};
  return {ReduceOp::sum(), ReduceOp::average(), ReduceOp::max(), ReduceOp::prescaled_sum(0.3f),
          ReduceOp::prescaled_sum(-7)};
}

std::vector<Bytes> inputs_of(DType dtype, std::int64_t count, std::size_t ranks) {
  std::vector<Bytes> inputs;
  for (std::size_t r = 0; r < ranks; ++r)
    inputs.push_back(test::values_of(dtype, count, r * 1'000'003, false));
  return inputs;
}

std::vector<const std::byte*> addresses(const std::vector<Bytes>& inputs, std::int64_t offset = 0) {
  std::vector<const std::byte*> at;
  for (const Bytes& in : inputs) at.push_back(in.data() + offset);
  return at;
}

struct Threads {
  explicit Threads(int count) : before(Context::current().threads()) {
    Context::current().set_threads(count);
  }
  ~Threads() { Context::current().set_threads(before); }
  int before;
};

}  // namespace

TEST_CASE("combining is the stated rule, whatever the number of threads") {
  const auto worlds =
      test::sanitized ? std::vector<std::size_t>{1, 3} : std::vector<std::size_t>{1, 2, 3, 5, 8};
  for (int threads : {1, 3}) {
    const Threads scope(threads);
    for (DType dtype : {f32, f64, f16, bf16, i32, i64, u8})
      for (std::size_t ranks : worlds)
        for (std::int64_t count : {0, 1, 7, 1023, 1024, 1025, 70001}) {
          const std::vector<Bytes> inputs = inputs_of(dtype, count, ranks);
          for (const ReduceOp& reduction : reductions(dtype)) {
            Bytes out(inputs[0].size());
            combine(dtype, reduction, addresses(inputs), out.data(), count);
            INFO(to_string(reduction) << " of " << name_of(dtype) << ", " << ranks << " ranks, " << count);
            CHECK(test::same_values(dtype, out, test::reference_combine(dtype, reduction, inputs), true));
          }
        }
  }
}

TEST_CASE("the output may be any of the sources") {
  const std::int64_t count = 3000;
  for (DType dtype : {f32, bf16, i64})
    for (std::size_t ranks : {1, 2, 3, 5})
      for (std::size_t target = 0; target < ranks; ++target)
        for (const ReduceOp& reduction : reductions(dtype)) {
          std::vector<Bytes> inputs = inputs_of(dtype, count, ranks);
          const Bytes expected = test::reference_combine(dtype, reduction, inputs);
          combine(dtype, reduction, addresses(inputs), inputs[target].data(), count);
          INFO(to_string(reduction) << " of " << name_of(dtype) << " into source " << target);
          CHECK(test::same_values(dtype, inputs[target], expected, true));
        }
}

TEST_CASE("an element's bits do not depend on its place") {
  const std::int64_t count = 2500;
  for (DType dtype : {f32, f16, u8}) {
    const std::vector<Bytes> inputs = inputs_of(dtype, count, 3);
    Bytes whole(inputs[0].size()), apart(inputs[0].size());
    combine(dtype, {}, addresses(inputs), whole.data(), count);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t at = i * size_of(dtype);
      combine(dtype, {}, addresses(inputs, at), apart.data() + at, 1);
    }
    CHECK(whole == apart);
  }
}
