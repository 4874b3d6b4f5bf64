// Rows that ranks send each other, against one process that has the rows of all.
#include "collectives/rows.h"

#include <random>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "collectives/observe.h"
#include "collectives/world.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;
using sherd::test::expect;
using sherd::test::message_of;

namespace {

using Counts = std::vector<std::vector<std::int64_t>>;  // rows of rank p for rank r

/// Random ones, among them none at all, of some ranks, and equal ones.
Counts counts_of(int size, unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) {
    return static_cast<std::int64_t>(std::uniform_int_distribution<int>(0, n - 1)(random));
  };
  Counts counts(static_cast<std::size_t>(size), std::vector<std::int64_t>(static_cast<std::size_t>(size)));
  for (auto& list : counts)
    for (std::int64_t& n : list) n = seed == 0 ? 0 : seed == 1 ? 2 : below(3) == 0 ? 0 : below(5);
  return counts;
}

/// Numbers that say whose they are, for whom, and which.
double number(std::size_t from, std::size_t to, std::int64_t i) {
  return 1000.0 * static_cast<double>(from + 1) + 100.0 * static_cast<double>(to) + static_cast<double>(i);
}
/// The rows of `from` for `to`, two numbers each.
void add_rows(std::vector<double>& values, const Counts& counts, std::size_t from, std::size_t to) {
  for (std::int64_t i = 0; i < counts[from][to]; ++i)
    values.insert(values.end(), {number(from, to, i), -number(from, to, i)});
}
Tensor as_rows(const std::vector<double>& values) {
  return Tensor::from(values, {std::ssize(values) / 2, 2}, Device::cpu());
}

struct Expected {
  Tensor sent, received;
  Expected(const Counts& counts, std::size_t rank) {
    std::vector<double> out, in;
    for (std::size_t other = 0; other < counts.size(); ++other) {
      add_rows(out, counts, rank, other);
      add_rows(in, counts, other, rank);
    }
    sent = as_rows(out), received = as_rows(in);
  }
};

bool same(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && to(a, f64).to_vector<double>() == to(b, f64).to_vector<double>();
}

}  // namespace

TEST_CASE("rows: every rank gets what all have for it, in their order, and the way back undoes it") {
  for (int size = 1; size <= 4; ++size)
    for (unsigned seed = 0; seed < 12; ++seed)
      CHECK_NOTHROW(run_ranks(size, [&](World& world) {
        const Counts counts = counts_of(size, seed);
        const auto rank = static_cast<std::size_t>(world.rank());
        const Expected expected(counts, rank);
        const RowRoute route = route_rows(world.group(), counts[rank]);
        expect(route.rows_received() == expected.received.size(0), "{} rows", route.rows_received());
        for (const DType dtype : {f64, f32, i64, i32}) {
          const Tensor there = exchange_rows(route, to(expected.sent, dtype));
          expect(there.dtype() == dtype && same(there, expected.received), "other rows with seed {}", seed);
          expect(same(exchange_rows(route.back(), there), expected.sent), "other rows back");
        }
        // In any number of dimensions.
        const Tensor deep = reshape(expected.sent, {expected.sent.size(0), 1, 2, 1});
        expect(same(reshape(exchange_rows(route, deep), expected.received.shape()), expected.received),
               "deep rows");
        const Tensor line = select(expected.sent, 1, 0);
        expect(same(exchange_rows(route, line), select(expected.received, 1, 0)), "numbers");
      }));
}

TEST_CASE("rows: gradients go the way back, second ones too") {
  for (int size = 1; size <= 4; ++size)
    for (unsigned seed = 0; seed < 8; ++seed)
      CHECK_NOTHROW(run_ranks(size, [&](World& world) {
        const Counts counts = counts_of(size, seed);
        const auto rank = static_cast<std::size_t>(world.rank());
        const Expected expected(counts, rank);
        const RowRoute route = route_rows(world.group(), counts[rank]);
        // Every rank weighs what it gets by its own number: a row's gradient says who had it.
        Tensor rows = mul(expected.sent, 1e-3).detach().requires_grad_();
        const Tensor there = exchange_rows(route, rows);
        const double weight = 1 + world.rank();
        const Tensor loss = sum(mul(mul(square(there), there), weight));
        const Tensor first = grad(loss, std::span(&rows, 1), {}, {.create_graph = true})[0];
        const Tensor second = grad(sum(first), std::span(&rows, 1))[0];
        std::vector<double> weights;
        for (std::size_t other = 0; other < counts.size(); ++other)
          for (std::int64_t i = 0; i < 2 * counts[rank][other]; ++i)
            weights.push_back(1.0 + static_cast<double>(other));
        const Tensor w = as_rows(weights), x = rows.detach();
        expect(allclose(first.detach(), mul(mul(square(x), 3), w), 1e-12), "gradient");
        expect(allclose(second, mul(mul(x, 6), w), 1e-12), "second gradient");
      }));
}

TEST_CASE("rows: one call of as many rows as the most between two ranks, replayed by a captured step") {
  CHECK_NOTHROW(run_ranks(3, [](World& world) {
    const Counts counts = counts_of(3, 5);
    const auto rank = static_cast<std::size_t>(world.rank());
    const Expected expected(counts, rank);
    const RowRoute route = route_rows(world.group(), counts[rank]);
    const std::uint64_t before = collective_calls();
    exchange_rows(route, expected.sent);
    expect(collective_calls() == before + 1, "{} calls", collective_calls() - before);
    const auto step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
      return {exchange_rows(route, mul(in[0], 2))};
    };
    Program program = capture(step, {expected.sent});
    for (const double factor : {1.0, 3.0}) {
      const Tensor out = program.replay({mul(expected.sent, factor)})[0];
      expect(same(out, mul(expected.received, 2 * factor)), "a replay with {}", factor);
    }
  }));
}

TEST_CASE("rows: what does not fit is refused on the rank that has it, and nothing is posted") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const auto refused = [](const std::string& text, const char* part) {
      expect(text.find(part) != std::string::npos, "'{}'", text);
    };
    const std::int64_t few[] = {1}, negative[] = {1, -1}, fine[] = {1, 2};
    refused(message_of<ValueError>([&] { route_rows(world.group(), few); }),
            "route_rows: 1 numbers of rows (1) for 2 ranks");
    refused(message_of<ValueError>([&] { route_rows(world.group(), negative); }), "(1, -1) for 2 ranks");
    refused(message_of<StateError>([&] { route_rows({}, fine); }), "not in the group");
    const RowRoute route = route_rows(world.group(), fine);
    refused(message_of<ShapeError>([&] { exchange_rows(route, zeros({2, 4})); }),
            "shape (2, 4) for 3 rows that are sent (1, 2)");
    refused(message_of<ShapeError>([&] { exchange_rows(route, Tensor::scalar(1)); }),
            "exchange_rows: shape ()");
    refused(message_of<ValueError>([&] { exchange_rows(route, {}); }), "empty handle");
    refused(message_of<StateError>([&] { exchange_rows({}, zeros({0, 4})); }), "make it by route_rows");
    world.group().barrier();
  }));
}
