// Gradients through calls among ranks, against the formula that one process would differentiate.
#include "collectives/differentiable.h"

#include <cmath>
#include <functional>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/recompute.h"
#include "collectives/observe.h"
#include "collectives/world.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;
using sherd::test::expect;
using sherd::test::message_of;

namespace {

constexpr TensorOptions wide{f64};

Tensor values(std::int64_t rows, std::int64_t columns, int seed) {
  std::vector<double> v;
  for (std::int64_t i = 0; i < rows * columns; ++i)
    v.push_back(std::sin(1.3 * static_cast<double>(i) + 0.7 * seed) + 0.2);
  return Tensor::from(v, {rows, columns});
}

double difference(const Tensor& a, const Tensor& b) {
  expect(a.defined() && b.defined() && a.shape() == b.shape(), "shapes differ");
  return a.numel() == 0 ? 0 : amax(abs(sub(a.detach(), b.detach()))).item();
}

void expect_close(const Tensor& a, const Tensor& b, const char* what, double tolerance = 1e-12) {
  const double d = difference(a, b);
  expect(d <= tolerance, "{}: differ by {}", what, d);
}

Tensor rows(const Tensor& x, int rank, std::int64_t count) {
  return slice(x, 0, rank * count, (rank + 1) * count);
}

/// Some function of its tensor, other on every rank.
Tensor loss_of(const Tensor& x, int rank) { return sum(mul(square(x), values(x.size(0), x.size(1), rank))); }

const std::vector<int> worlds = {1, 2, 3, 4};

}  // namespace

TEST_CASE("gather_params: every rank's data give the shard's gradient") {
  for (int size : worlds)
    for (std::int64_t n : {0, 1, 3})
      CHECK_NOTHROW(run_ranks(size, [&](World& world) {
        Tensor whole = values(n * size, 2, 100).requires_grad_();
        Tensor total = Tensor::scalar(0, wide);
        for (int rank = 0; rank < size; ++rank) total = add(total, loss_of(whole, rank));
        total.backward();

        Tensor shard = contiguous(rows(whole.detach(), world.rank(), n)).requires_grad_();
        const Tensor gathered = gather_params(world.group(), shard);
        expect_close(gathered, whole, "value", 0);
        loss_of(gathered, world.rank()).backward();
        expect_close(shard.grad(), rows(whole.grad(), world.rank(), n), "gradient");
      }));
}

TEST_CASE("gather_values: the one loss that all compute alike counts once") {
  for (int size : worlds)
    CHECK_NOTHROW(run_ranks(size, [&](World& world) {
      Tensor whole = values(2 * size, 3, 100).requires_grad_();
      loss_of(whole, 0).backward();

      Tensor shard = contiguous(rows(whole.detach(), world.rank(), 2)).requires_grad_();
      const Tensor gathered = gather_values(world.group(), shard);
      expect_close(gathered, whole, "value", 0);
      loss_of(gathered, 0).backward();
      expect_close(shard.grad(), rows(whole.grad(), world.rank(), 2), "gradient", 0);
    }));
}

TEST_CASE("sum_partials: the sum's gradient is every summand's") {
  for (int size : worlds)
    CHECK_NOTHROW(run_ranks(size, [&](World& world) {
      std::vector<Tensor> summands;
      Tensor total;
      for (int rank = 0; rank < size; ++rank) {
        summands.push_back(values(2, 3, rank).requires_grad_());
        total = rank == 0 ? summands[0] : add(total, summands.back());
      }
      loss_of(total, 0).backward();

      Tensor mine = values(2, 3, world.rank()).requires_grad_();
      const Tensor summed = sum_partials(world.group(), mine);
      expect_close(summed, total, "value");
      loss_of(summed, 0).backward();
      expect_close(mine.grad(), summands[static_cast<std::size_t>(world.rank())].grad(), "gradient");
    }));
}

TEST_CASE("enter_parallel: the replica's gradient is the sum of what the ranks made of it") {
  for (int size : worlds)
    CHECK_NOTHROW(run_ranks(size, [&](World& world) {
      Tensor x = values(2, 3, 100).requires_grad_();
      Tensor total = Tensor::scalar(0, wide);
      for (int rank = 0; rank < size; ++rank) total = add(total, loss_of(x, rank));
      total.backward();

      Tensor replica = values(2, 3, 100).requires_grad_();
      const std::uint64_t calls = collective_calls();
      const Tensor entered = enter_parallel(world.group(), replica);
      expect(collective_calls() == calls, "entering moves nothing");
      expect_close(entered, replica, "value", 0);
      loss_of(entered, world.rank()).backward();
      expect_close(replica.grad(), x.grad(), "gradient");
    }));
}

TEST_CASE("scatter_sums and take_slice: slices of a sum and of a replica") {
  for (int size : worlds)
    CHECK_NOTHROW(run_ranks(size, [&](World& world) {
      // Rank r's loss sees slice r of the sum.
      std::vector<Tensor> summands;
      Tensor sum_of_all;
      for (int rank = 0; rank < size; ++rank) {
        summands.push_back(values(2 * size, 3, rank).requires_grad_());
        sum_of_all = rank == 0 ? summands[0] : add(sum_of_all, summands.back());
      }
      Tensor total = Tensor::scalar(0, wide);
      for (int rank = 0; rank < size; ++rank) total = add(total, loss_of(rows(sum_of_all, rank, 2), rank));
      total.backward();

      Tensor mine = values(2 * size, 3, world.rank()).requires_grad_();
      const Tensor slice = scatter_sums(world.group(), mine);
      expect_close(slice, rows(sum_of_all, world.rank(), 2), "scatter_sums");
      loss_of(slice, world.rank()).backward();
      expect_close(mine.grad(), summands[static_cast<std::size_t>(world.rank())].grad(), "its gradient");

      Tensor replica = values(2 * size, 3, 7).requires_grad_();
      const Tensor taken = take_slice(world.group(), replica);
      expect_close(taken, rows(replica, world.rank(), 2), "take_slice", 0);
      loss_of(taken, world.rank()).backward();
      Tensor same = values(2 * size, 3, 7).requires_grad_();
      total = Tensor::scalar(0, wide);
      for (int rank = 0; rank < size; ++rank) total = add(total, loss_of(rows(same, rank, 2), rank));
      total.backward();
      expect_close(replica.grad(), same.grad(), "its gradient");
    }));
}

namespace {

/// A two-layer perceptron cut over the ranks: columns of the first matrix, rows of the second.
Tensor parallel_loss(const Group& group, const Tensor& x, const Tensor& first, const Tensor& second) {
  const Tensor hidden = tanh(matmul(enter_parallel(group, x), first));
  return sum(square(sum_partials(group, matmul(hidden, second))));
}

}  // namespace

TEST_CASE("a perceptron cut over the ranks has the gradients of the whole one") {
  for (int size : worlds)
    CHECK_NOTHROW(run_ranks(size, [&](World& world) {
      Tensor x = values(3, 2, 1).requires_grad_(), first = values(2, 2 * size, 2).requires_grad_(),
             second = values(2 * size, 3, 3).requires_grad_();
      sum(square(matmul(tanh(matmul(x, first)), second))).backward();

      const int r = world.rank();
      Tensor x2 = values(3, 2, 1).requires_grad_();
      Tensor first2 = contiguous(slice(first.detach(), 1, 2 * r, 2 * r + 2)).requires_grad_();
      Tensor second2 = contiguous(rows(second.detach(), r, 2)).requires_grad_();
      parallel_loss(world.group(), x2, first2, second2).backward();
      expect_close(x2.grad(), x.grad(), "input", 1e-10);
      expect_close(first2.grad(), slice(first.grad(), 1, 2 * r, 2 * r + 2), "first", 1e-10);
      expect_close(second2.grad(), rows(second.grad(), r, 2), "second", 1e-10);
    }));
}

namespace {

using Placed = Tensor (*)(const Group&, const Tensor&, CallOptions);

/// One op and the loss it is meant for: with `alike` all ranks compute one loss, else each its own and the
/// total is their sum; a replica moves on all ranks at once.
struct Case {
  const char* name;
  Placed op;
  bool alike, replica;
};
const std::vector<Case> cases = {
    {"gather_params", gather_params, false, false}, {"gather_values", gather_values, true, false},
    {"sum_partials", sum_partials, true, false},    {"enter_parallel", enter_parallel, false, true},
    {"scatter_sums", scatter_sums, false, false},   {"take_slice", take_slice, false, true},
    {"all_to_all", all_to_all, false, false},
};

Tensor start_of(const Case& c, int rank, int size) {
  return mul(values(size, 2, c.replica ? 50 : rank), 0.5);
}
Tensor loss_of(const Case& c, const Group& group, const Tensor& x) {
  const Tensor y = c.op(group, x, {.label = c.name});
  return sum(mul(mul(square(y), y), values(y.size(0), y.size(1), c.alike ? 0 : group.rank())));
}
/// The number that is differentiated.
double total(const Case& c, const Group& group, const Tensor& loss) {
  const Tensor all = loss.detach();
  const Tensor copy = clone(all);
  if (!c.alike) group.all_reduce(copy);
  return copy.item();
}
/// `x` with `step` added to one element, on one rank or, of a replica, on all.
Tensor moved(const Case& c, const Tensor& x, int rank, int owner, std::size_t i, double step) {
  std::vector<double> v = x.detach().to_vector<double>();
  if (c.replica || rank == owner) v[i] += step;
  return Tensor::from(v, x.shape());
}

/// Central differences of `f`, of which this rank keeps its own elements.
std::vector<double> differences(const Case& c, const Group& group, const Tensor& x,
                                const std::function<double(const Tensor&)>& f) {
  constexpr double step = 1e-5;
  std::vector<double> mine(static_cast<std::size_t>(x.numel()));
  for (int owner = 0; owner < (c.replica ? 1 : group.size()); ++owner)
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const double up = f(moved(c, x, group.rank(), owner, i, step));
      const double down = f(moved(c, x, group.rank(), owner, i, -step));
      if (c.replica || owner == group.rank()) mine[i] = (up - down) / (2 * step);
    }
  return mine;
}

void expect_near(const Tensor& gradient, const std::vector<double>& numeric, const Case& c,
                 const char* what) {
  const std::vector<double> analytic = gradient.detach().to_vector<double>();
  for (std::size_t i = 0; i < numeric.size(); ++i)
    expect(std::abs(analytic[i] - numeric[i]) < 1e-7 * std::max(1.0, std::abs(numeric[i])),
           "{}: {} [{}]: {} against {}", c.name, what, i, analytic[i], numeric[i]);
}

}  // namespace

TEST_CASE("first and second gradients equal finite differences of the total loss") {
  for (const Case& c : cases)
    for (int size : worlds) {
      INFO(c.name << " on " << size);
      CHECK_NOTHROW(run_ranks(size, [&](World& world) {
        const Group& group = world.group();
        Tensor x = start_of(c, world.rank(), size).requires_grad_();
        const auto first = [&](const Tensor& at, bool create_graph) {
          return grad(loss_of(c, group, at), std::span(&at, 1), {}, {.create_graph = create_graph})[0];
        };
        expect_near(first(x, false),
                    differences(c, group, x,
                                [&](const Tensor& at) { return total(c, group, loss_of(c, group, at)); }),
                    c, "gradient");

        // The weighted gradients of all ranks as the next loss: a replica's gradient is a replica too.
        const Tensor weights = values(size, 2, c.replica ? 9 : 9 + world.rank());
        const auto weighted = [&](const Tensor& at, bool create_graph) {
          Tensor leaf = at.is_leaf() && at.requires_grad() ? at : clone(at.detach()).requires_grad_();
          return sum(mul(first(leaf, create_graph), weights));
        };
        const auto summed = [&](const Tensor& at) {
          const Tensor value = clone(weighted(at, false).detach());
          if (!c.replica) group.all_reduce(value);
          return value.item();
        };
        const Tensor second = grad(weighted(x, true), std::span(&x, 1))[0];
        expect_near(second, differences(c, group, x, summed), c, "second gradient");
      }));
    }
}

TEST_CASE("placed tensors of every dtype: values, and gradients in the same dtype") {
  for (const DType dtype : {f16, bf16, f32, f64})
    for (const Case& c : cases)
      CHECK_NOTHROW(run_ranks(2, [&](World& world) {
        Tensor x = full({4, 2}, 1 + world.rank(), {dtype}).requires_grad_();
        const Tensor y = c.op(world.group(), x, {});
        expect(y.dtype() == dtype, "{}: dtype of the value", c.name);
        sum(y).backward();
        expect(x.grad().dtype() == dtype && x.grad().shape() == x.shape(), "{}: the gradient's spec", c.name);
        // Powers of two and small integers: exact in all of them.
        const std::string name = c.name;
        const bool doubled = name == "gather_params" || name == "enter_parallel";
        const std::vector<double> all = to(x.grad(), f64).to_vector<double>();
        for (double g : all) expect(g == (doubled ? 2 : 1), "{}: gradient {}", c.name, g);
      }));
  for (const DType dtype : {i64, i32, u8})
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      const Tensor x = full({2}, 1 + world.rank(), {dtype});
      expect(to(sum_partials(world.group(), x), f64).to_vector<double>() == std::vector<double>{3, 3}, "sum");
      expect(to(gather_values(world.group(), x), f64).to_vector<double>() == std::vector<double>{1, 1, 2, 2},
             "gather");
    }));
}

TEST_CASE("views and expanded gradients are made dense on the way") {
  for (const Case& c : cases)
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      Tensor dense = values(4, 6, world.rank()), strided = values(6, 4, world.rank()).requires_grad_();
      const Tensor view = permute(strided, {1, 0});
      expect(!view.is_contiguous(), "the case is about views");
      Tensor leaf = contiguous(view.detach()).requires_grad_();
      const Tensor a = c.op(world.group(), view, {}), b = c.op(world.group(), leaf, {});
      expect_close(a, b, c.name, 0);
      sum(a).backward();  // an expanded scalar flows back
      sum(b).backward();
      expect_close(permute(strided.grad(), {1, 0}), leaf.grad(), c.name, 0);
    }));
}

TEST_CASE("what flows back is counted and labelled like what flowed") {
  for (const Case& c : cases)
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      const OrderLog log;
      Tensor x = values(4, 2, 0).requires_grad_();
      sum(c.op(world.group(), x, {.label = "layers.3", .channel = 2})).backward();
      expect(!log.lines().empty(), "{}: no call", c.name);
      for (const std::string& line : log.lines()) {
        expect(line.starts_with("world channel 2: "), "{}", line);
        expect(line.ends_with("of 'layers.3'"), "{}", line);
      }
    }));
}

TEST_CASE("a captured step repeats its calls among ranks") {
  for (int size : {1, 2, 3})
    CHECK_NOTHROW(run_ranks(size, [&](World& world) {
      const Group& group = world.group();
      const auto step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
        Tensor shard = in[0];
        const Tensor whole = gather_params(group, shard);
        const Tensor loss = sum_partials(group, sum(square(whole)));
        return {loss, whole};
      };
      const std::vector<Tensor> first = {values(2, 3, world.rank())},
                                other = {values(2, 3, world.rank() + 10)};
      Program program = capture(step, first);
      const std::uint64_t before = collective_calls();
      const std::vector<Tensor> replayed = program.replay(other);
      expect(collective_calls() == before + 2, "a replay makes the calls");
      const std::vector<Tensor> direct = step(other);
      expect_close(replayed[0], direct[0], "loss", 0);
      expect_close(replayed[1], direct[1], "whole", 0);
    }));
}

TEST_CASE("a captured backward repeats its calls too") {
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    const auto step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
      Tensor shard = in[0].detach().requires_grad_();
      return grad(loss_of(gather_params(world.group(), shard), world.rank()), std::span(&shard, 1));
    };
    Program program = capture(step, {values(2, 3, world.rank())});
    const std::vector<Tensor> other = {values(2, 3, world.rank() + 10)};
    expect_close(program.replay(other)[0], step(other)[0], "gradient", 0);
  }));
}

TEST_CASE("a replay writes nothing that a peer still reads") {
  const std::int64_t n = 1 << 16;  // beside the post, not within
  CHECK_NOTHROW(run_ranks(3, [&](World& world) {
    const auto step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
      const Tensor mine = mul(in[0], 2), all = empty({3 * n}, {f32});
      Work work = world.group().enqueue({.kind = CollectiveKind::all_gather,
                                         .inputs = {mine},
                                         .outputs = {all},
                                         .reduction = {},
                                         .label = {}});
      work.wait();
      return {amax(all), amin(all), add(mine, 1)};
    };
    Program program = capture(step, {full({n}, 0, {f32})});
    for (int i = 1; i < 200; ++i) {
      const std::vector<Tensor> out = program.replay({full({n}, i, {f32})});
      expect(out[0].item() == 2 * i && out[1].item() == 2 * i, "replay {} sees {} to {}", i, out[1].item(),
             out[0].item());
      if (i % 3 == world.rank()) sum(exp(full({n}, i % 7, {f32})));  // peers come later
    }
  }));
}

TEST_CASE("a recomputed region gathers again, alike on every rank") {
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    Tensor shard = values(2, 3, world.rank()).requires_grad_(),
           plain = values(2, 3, world.rank()).requires_grad_();
    const auto body = [&](const Tensor& x) { return tanh(square(gather_params(world.group(), x))); };
    loss_of(body(plain), world.rank()).backward();
    const std::uint64_t before = collective_calls();
    loss_of(recompute([&] { return body(shard); }), world.rank()).backward();
    expect(collective_calls() == before + 3, "gather, gather again, scatter: {}",
           collective_calls() - before);
    expect_close(shard.grad(), plain.grad(), "gradient", 0);
  }));
}

TEST_CASE("placed tensors that cannot be") {
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    const Group& group = world.group();
    const auto expect_text = [](const std::string& text, const char* part) {
      expect(text.find(part) != std::string::npos, "'{}' lacks '{}'", text, part);
    };
    const Tensor scalar = Tensor::scalar(1), odd = zeros({3, 2});
    for (Placed op : {gather_params, gather_values, scatter_sums, take_slice, all_to_all})
      expect_text(message_of<ShapeError>([&] { op(group, scalar, {}); }), "0-d tensor has no dimension 0");
    for (Placed op : {scatter_sums, take_slice, all_to_all})
      expect_text(message_of<ShapeError>([&] { op(group, odd, {}); }),
                  "dimension 0 of shape (3, 2) does not divide into 2 equal slices");
    expect_text(message_of<DTypeError>([&] { sum_partials(group, zeros({2}, {DType::boolean})); }), "bool");
    for (const Case& c : cases) {
      expect_text(message_of<ValueError>([&] { c.op(group, {}, {}); }), c.name);
      expect_text(message_of<StateError>([&] { c.op({}, odd, {}); }), c.name);
    }
    group.barrier();  // nothing of this was a fault
  }));
}

TEST_CASE("a rank whose loss leaves the others alone is named") {
  const std::string text = message_of<CollectiveError>([] {
    run_ranks(3, [&](World& world) {
      Tensor shard = values(1, 2, world.rank()).requires_grad_();
      const Tensor whole = gather_params(world.group(), shard, {.label = "w"});
      if (world.rank() != 1) sum(whole).backward();
    });
  });
  CHECK_THAT(text, ContainsSubstring("rank 1 left the body"));
  CHECK_THAT(text, ContainsSubstring("'w'"));
}
