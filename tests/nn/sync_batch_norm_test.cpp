// Batch normalisation over ranks against that of one batch of all ranks' rows.
#include "nn/sync_batch_norm.h"

#include "autograd/autograd.h"
#include "collectives/world.h"
#include "shard/data_parallel.h"
#include "shard/fsdp.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

/// Ranks with batches of other sizes, the last one's the largest.
std::int64_t first_row(int rank) { return rank * (rank + 3) / 2; }

void expect_close(const Tensor& a, const Tensor& b, const char* what, double tolerance) {
  expect(a.shape() == b.shape() && distance(a, b) <= tolerance, "{} is {} off", what,
         a.shape() == b.shape() ? distance(a, b) : -1.0);
}

struct Net final : Layer<Net> {
  Linear first{3, 5, {.tensor = {f64}}};
  std::unique_ptr<Module> norm;
  Linear last{5, 1, {.tensor = {f64}}};
  explicit Net(bool sync) {
    if (sync)
      norm = std::make_unique<SyncBatchNorm>(5, BatchNormLayerOptions{.tensor = {f64}});
    else
      norm = std::make_unique<BatchNorm1d>(5, BatchNormLayerOptions{.tensor = {f64}});
  }
  Tensor forward(const Tensor& x) const { return last(relu(norm->call(first(x)))); }
  void visit(auto&& on) {
    on("first", first);
    on("norm", *norm);
    on("last", last);
  }
};

}  // namespace

TEST_CASE("sync batch norm: values, gradients to second order and statistics of one large batch") {
  for (const int ranks : {1, 2, 3, 4})
    for (const DType dtype : {f64, f32, bf16})
      for (const Shape& image : {Shape{}, Shape{3}, Shape{2, 3}}) {
        Shape shape{first_row(ranks), 4};
        for (std::int64_t size : image) shape.push_back(size);
        INFO(ranks << " ranks, " << name_of(dtype) << ", " << shape.rank() << " axes");
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          const std::int64_t begin = first_row(world.rank()), end = first_row(world.rank() + 1);
          const Tensor all = numbers(shape, dtype, 3), weights = numbers(shape, dtype, 4);
          const double tolerance = dtype == f64 ? 1e-10 : dtype == f32 ? 2e-4 : 0.1;
          BatchNormLayerOptions options{.momentum = 0.3, .tensor = {dtype}};
          SyncBatchNorm layer(4, options);
          Tensor x = clone(slice(all, 0, begin, end)).requires_grad_();
          Tensor mean = zeros({4}, {dtype}), var = ones({4}, {dtype}), w = ones({4}, {dtype}),
                 b = zeros({4}, {dtype}), whole = clone(all).requires_grad_();
          w.requires_grad_(), b.requires_grad_();
          const Tensor y = layer(x), expected = batch_norm(whole, mean, var, w, b, {true, 0.3, 1e-5});
          expect_close(y.detach(), slice(expected.detach(), 0, begin, end), "y", tolerance);
          expect_close(layer.running_mean, mean, "mean", tolerance);
          expect_close(layer.running_var, var, "variance", tolerance);
          // What weighs the outputs is other on every rank, so sums that are not summed show.
          const auto penalised = [](const Tensor& out, const Tensor& given, const Tensor& weight) {
            const Tensor g =
                grad(sum(mul(square(out), weight)), std::span(&given, 1), {}, {.create_graph = true})[0];
            return sum(square(g));
          };
          penalised(y, x, slice(weights, 0, begin, end)).backward();
          penalised(expected, whole, weights).backward();
          expect_close(x.grad(), slice(whole.grad(), 0, begin, end), "gradient",
                       tolerance * std::max(1.0, amax(abs(whole.grad())).item()));
          layer.eval();
          expect_close(layer(x).detach(),
                       slice(batch_norm(all, mean, var, w, b, {false, 0.3, 1e-5}).detach(), 0, begin, end),
                       "in eval mode", tolerance);
        }));
      }
}

TEST_CASE("sync batch norm: a residual and an activation follow it on every rank") {
  for (const int ranks : {1, 2})
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        const auto seed = static_cast<unsigned>(world.rank());
        const Tensor x = numbers({5, 4, 3}, f32, 1 + seed), r = numbers({5, 4, 3}, f32, 9 + seed);
        SyncBatchNorm layer(4, {.activation = activation}), plain(4);
        for (const bool training : {true, false}) {
          layer.train(training), plain.train(training);
          const Tensor y = add(plain(x), r), given = layer(x, r);
          expect(same_bits(given, activation == Activation::none   ? y
                                  : activation == Activation::relu ? relu(y)
                                                                   : gelu(y)),
                 "the epilogue is another");
        }
        layer.train();
        const std::string text = message_of<ShapeError>([&] { layer(x, zeros({4, 1})); });
        expect(text.find("residual of shape (4, 1)") != std::string::npos, "{}", text);
      }));
}

TEST_CASE(
    "sync batch norm: a batch without a sample on any rank leaves the statistics, as the plain layer does") {
  for (const int ranks : {1, 2, 3})
    for (const DType dtype : {f64, f32, f16, bf16})
      for (const Shape& image : {Shape{}, Shape{3}, Shape{0}, Shape{2, 3}, Shape{2, 0}}) {
        Shape some{5, 4}, none{0, 4};
        for (const std::int64_t size : image)
          some.push_back(std::max<std::int64_t>(size, 1)), none.push_back(size);
        INFO(ranks << " ranks, " << name_of(dtype) << ", " << fmt::format("{}", none));
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          const BatchNormLayerOptions options{.tensor = {dtype}};
          SyncBatchNorm layer(4, options);
          layer(numbers(some, dtype, 1 + static_cast<unsigned>(world.rank())));
          const Tensor mean = clone(layer.running_mean), var = clone(layer.running_var);
          Tensor x = zeros(none, {dtype}).requires_grad_();
          const Tensor y = layer(x);
          sum(y).backward();
          expect(y.shape() == none && x.grad().shape() == none, "the result has another shape");
          expect(same_bits(layer.running_mean, mean) && same_bits(layer.running_var, var),
                 "statistics moved");
          // One rank's sample is enough for all.
          layer(world.rank() == 0 ? numbers(some, dtype, 9) : zeros(none, {dtype}));
          expect(!same_bits(layer.running_mean, mean) && all(isfinite(layer.running_var)).item<bool>(),
                 "statistics stayed");
          const Tensor counted = layer.num_batches_tracked;
          expect(counted.item<std::int64_t>() == 3, "{} batches", counted.item<std::int64_t>());
        }));
      }
}

TEST_CASE("sync batch norm: data parallel over ranks trains as one process with the whole batch") {
  const Tensor all = numbers({8, 3}, f64, 1);
  for (const int ranks : {2, 4})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      manual_seed(2);
      Net net(true);
      manual_seed(2);
      Net alone(false);
      const shard::DataParallel replicas(net, world.group());
      const std::int64_t each = 8 / world.size();
      mean(square(net(narrow(all, 0, world.rank() * each, each)))).backward();
      mean(square(alone(all))).backward();
      const auto a = net.named_parameters(), b = alone.named_parameters();
      for (std::size_t i = 0; i < a.size(); ++i)
        expect_close(a[i].parameter.grad(), b[i].parameter.grad(), a[i].name.c_str(), 1e-10);
      const auto running = net.named_buffers(), running_alone = alone.named_buffers();
      for (std::size_t i = 0; i < running.size(); ++i)
        expect_close(to(running[i].tensor, f64), to(running_alone[i].tensor, f64), "statistics", 1e-12);
    }));
}

TEST_CASE(
    "sync batch norm: under wrapping by a rule with mixed precision its parameters stay as they are stored") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const auto make = [] {
      SyncBatchNorm norm(4);
      fill_(norm.weight.data(), 1.003);  // 1 in bf16
      return Sequential(std::move(norm));
    };
    Sequential net = make(), by_hand = make();
    const shard::FullyShardedDataParallel sharded(
        net, {.auto_wrap = shard::wrap_by_size(1 << 20), .mixed_precision = {.param_dtype = bf16}});
    const Tensor x = numbers({16, 4}, f32, 3 + static_cast<unsigned>(world.rank()));
    expect(same_bits(to(net(x).detach(), f32), to(by_hand(to(x, bf16)).detach(), f32)), "outputs differ");
  }));
}

TEST_CASE("sync batch norm: means over all batches, and no running statistics, as of one large batch") {
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    SyncBatchNorm mean_of_all(4, {.momentum = std::nullopt, .tensor = {f64}}),
        untracked(4, {.tensor = {f64}, .track_running_stats = false});
    BatchNorm2d whole(4, {.momentum = std::nullopt, .tensor = {f64}});
    for (unsigned step = 1; step <= 3; ++step) {
      const Tensor all = numbers({6, 4, 2, 2}, f64, step), part = narrow(all, 0, 3 * world.rank(), 3);
      const Tensor expected = narrow(whole(all), 0, 3 * world.rank(), 3);
      expect_close(mean_of_all(part), expected, "y", 1e-10);
      expect_close(mean_of_all.running_mean, whole.running_mean, "mean", 1e-12);
      expect_close(mean_of_all.running_var, whole.running_var, "variance", 1e-12);
      untracked.train();
      expect_close(untracked(part), expected, "y without statistics", 1e-10);
      untracked.eval();  // by this rank's batch, as in PyTorch
      expect_close(untracked(part), batch_norm(part, {}, {}, {}, {}, {.training = true}), "in eval mode",
                   1e-10);
    }
    expect(untracked.named_buffers().empty(), "there are buffers");
  }));
}

TEST_CASE("sync batch norm: without ranks it is the plain one, and other channels are refused") {
  SyncBatchNorm layer(4);
  BatchNorm2d plain(4);
  const Tensor x = numbers({3, 4, 2, 2}, f32, 1);
  CHECK(same_bits(layer(x), plain(x)));
  CHECK(layer.clone().state_dict().contains("num_batches_tracked"));
  CHECK_THROWS_AS(layer(numbers({4}, f32)), ShapeError);
  CHECK_THROWS_AS(run_ranks(2, [](World&) { SyncBatchNorm(4)(ones({2, 3})); }), ShapeError);
}
