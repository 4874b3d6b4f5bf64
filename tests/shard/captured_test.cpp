// Captured steps of sharded modules: the calls among ranks are ops of the program, and a replay gives the
// step's bits.
#include <algorithm>
#include <optional>
#include <thread>

#include "collectives/observe.h"
#include "shard/fsdp.h"
#include "tests/catch.h"
#include "tests/late_device.h"
#include "tests/message_of.h"
#include "tests/rank_device.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"
#include "tests/shard/parity_table.h"
#include "tests/shard/whole.h"

using namespace sherd;
using namespace sherd::test;

namespace {

enum class Steps { eager, captured };
constexpr int steps = 7, captured_at = 2;

/// What a step takes and gives: inputs and targets; the loss and the norm of the gradient.
std::vector<Tensor> inputs_of(World& world, int step, std::int64_t width, Device device = Device::cpu()) {
  const Batch batch = batch_of(world.rank(), step, width);
  return {to(batch.x, device), to(batch.target, device)};
}

/// Runs `step` on each step's inputs, but for the first and the last ones as a program if it is captured.
template <class Inputs>
std::vector<std::vector<Tensor>> run(const Step& step, const Inputs& inputs, Steps how) {
  std::vector<std::vector<Tensor>> outputs;
  std::optional<Program> program;
  for (int i = 0; i < steps; ++i) {
    const std::vector<Tensor> in = inputs(i);
    if (how == Steps::eager || i < captured_at || i == steps - 1)
      outputs.push_back(step(in));
    else if (i == captured_at)
      outputs.push_back((program = capture(step, in))->outputs());
    else
      outputs.push_back(program->replay(in));
  }
  const bool on_device =
      std::ranges::any_of(outputs.back(), [](const Tensor& t) { return !t.device().is_cpu(); });
  if (program && on_device) expect(program->is_device_graph(), "the device did not record the step");
  return outputs;
}

Record train(Trainee& trainee, World& world, Steps how) {
  nn::Adam adam(trainee.net.parameters(), {.lr = 1e-2});
  const Step step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    const Tensor loss = loss_of(trainee.net, {in[0], in[1]});
    trainee.backward(loss);
    const Tensor norm = trainee.clip(0.25);
    adam.step();
    adam.zero_grad();
    return {loss.detach(), norm.detach()};
  };
  Record record;
  for (const auto& out : run(step, [&](int i) { return inputs_of(world, i, trainee.net.width); }, how)) {
    record.losses.push_back(out[0].item<float>());
    record.norms.push_back(out[1].item());
  }
  for (const auto& [name, tensor] : trainee.whole())
    record.values.emplace_back(name, to(tensor, DType::f32).to_vector<float>());
  return record;
}

/// What a net of each layout on `device` and its ranks gives in mixed precision.
std::vector<float> narrow_run(World& world, const shard::Options& options, Device device, Steps how) {
  Net net;
  net.to(device);
  shard_blocks_and_rest(net, options);
  nn::AdamW optimizer(net.parameters(), {.lr = 1e-2});
  const Step step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    Tensor loss;
    for (int part = 0; part < 2; ++part) {
      shard::set_requires_gradient_sync(net, part == 1);
      loss = mean(square(sub(to(net(in[0]), f32), in[1])));
      loss.backward();
    }
    const Tensor norm = shard::clip_grad_norm_(net.parameters(), 0.25);
    optimizer.step();
    optimizer.zero_grad();
    return {loss.detach(), norm.detach()};
  };
  std::vector<float> seen;
  for (const auto& out : run(step, [&](int i) { return inputs_of(world, i, net.width, device); }, how))
    for (const Tensor& t : out) seen.push_back(static_cast<float>(t.item()));
  for (const auto& [name, tensor] : shard::full_state_dict(net))
    for (const float value : to(to(tensor, Device::cpu()), f32).to_vector<float>()) seen.push_back(value);
  return seen;
}

}  // namespace

TEST_CASE("a captured step is the step, in every way of sharding", "[threads meet]") {
  for (const ParityRow& row : parity_table)
    for (const std::string_view name : row.ways) {
      const auto way = std::ranges::find(ways(), name, &Way::name);
      if (name == "average by hand" || name == "data parallel")
        continue;  // the program makes calls of its own
      for (const int ranks : row.worlds) {
        INFO(name << ", world of " << ranks);
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          const Record eager = train(*way->begin(world), world, Steps::eager);
          const Record captured = train(*way->begin(world), world, Steps::captured);
          const std::string differs = difference(captured, eager);
          expect(differs.empty(), "{}", differs);
        }));
      }
    }
}

TEST_CASE("a captured step accumulates and casts as the step does, on a device that works later too",
          "[threads meet]") {
  using enum shard::ShardingStrategy;
  std::size_t combination = 0;
  for (const int ranks : worlds())
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, no_shard})
        for (const bool narrow : {false, true})
          for (const std::string_view where : {"cpu", "late:0", "late:each"}) {
            if (left_to_plain_build(combination++)) continue;
            INFO(ranks << " ranks, layout " << int(layout) << ", strategy " << int(strategy)
                       << (narrow ? ", bf16, " : ", ") << where);
            shard::Options options{.layout = layout, .strategy = strategy};
            if (narrow) options.mixed_precision = {.param_dtype = bf16, .reduce_dtype = f32};
            late_device();
            CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
              const Device device = rank_device(where);
              const std::vector<float> eager = narrow_run(world, options, device, Steps::eager);
              expect(narrow_run(world, options, device, Steps::captured) == eager, "not the same bits");
            }));
          }
}

TEST_CASE("a replay makes the calls of the step, in its order") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      Net net;
      shard_blocks_and_rest(net, {.layout = layout});
      nn::Sgd optimizer(net.parameters(), {.lr = 0.1, .momentum = 0.9});
      const Step step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
        const Tensor loss = loss_of(net, {in[0], in[1]});
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        return {loss.detach()};
      };
      std::vector<std::string> eager;
      const std::vector<Tensor> in = inputs_of(world, 0, net.width);
      for (int i = 0; i < 2; ++i) {
        const OrderLog log;
        step(in);
        eager = log.lines();
      }
      Program program = capture(step, in);
      const OrderLog log;
      program.replay(in);
      expect(log.lines() == eager, "{} calls, the step made {}", log.lines().size(), eager.size());
    }));
}

namespace {

constexpr shard::GroupLayout layouts[] = {shard::GroupLayout::per_parameter, shard::GroupLayout::flat};

/// A step of training without clipping.
Step training(Net& net, nn::Optimizer& optimizer) {
  return [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    const Tensor loss = loss_of(net, {in[0], in[1]});
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return {loss.detach()};
  };
}

/// What the program does between two steps.
enum class Between { evaluates, evaluates_and_reads, unshards };

void look(Net& net, const Tensor& x, Between what, std::vector<float>& seen) {
  const NoGrad no_grad;
  if (what == Between::unshards) return shard::unshard(net);
  if (what == Between::evaluates_and_reads)  // what the last evaluation gathered and the step wrote
    for (const nn::Param* p : {&net.scale, &net.blocks[0].in.weight})
      seen.push_back(sum(square(p->tensor())).item<float>());
  seen.push_back(sum(net(x)).item<float>());
}

std::vector<float> run_with_looks(World& world, const shard::Options& options, Between what, Steps how) {
  Net net;
  shard_blocks_and_rest(net, options);
  nn::Sgd optimizer(net.parameters(), {.lr = 0.1, .momentum = 0.9});
  const Step step = training(net, optimizer);
  std::vector<float> seen;
  const auto inputs = [&](int i) {
    const std::vector<Tensor> in = inputs_of(world, i, net.width);
    if (i >= captured_at) look(net, in[0], what, seen);
    return in;
  };
  for (const auto& out : run(step, inputs, how)) seen.push_back(out[0].item<float>());
  for (const auto& [name, tensor] : shard::full_state_dict(net))
    for (const float value : tensor.to_vector<float>()) seen.push_back(value);
  return seen;
}

}  // namespace

TEST_CASE("what is gathered before a capture or between replays changes nothing") {
  using enum shard::ShardingStrategy;
  for (const int ranks : worlds())
    for (const shard::GroupLayout layout : layouts)
      for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
        for (const Between what : {Between::evaluates, Between::evaluates_and_reads, Between::unshards}) {
          INFO(ranks << " ranks, layout " << int(layout) << ", strategy " << int(strategy) << ", "
                     << int(what));
          const shard::Options options{.layout = layout, .strategy = strategy};
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
            const std::vector<float> eager = run_with_looks(world, options, what, Steps::eager);
            expect(run_with_looks(world, options, what, Steps::captured) == eager, "not the same bits");
          }));
        }
}

TEST_CASE("a step that adds to gradients from before it is not captured") {
  enum class Left { by_no_sync, over_shards, by_data_parallel };
  for (const Left left : {Left::by_no_sync, Left::over_shards, Left::by_data_parallel})
    for (const shard::GroupLayout layout : layouts) {
      INFO(int(left) << ", layout " << int(layout));
      CHECK_NOTHROW(run_ranks(left == Left::over_shards ? 4 : 2, [&](World& world) {
        Net net;
        std::optional<shard::DataParallel> parallel;
        shard::Options options{.layout = layout};
        if (left == Left::over_shards) options.mesh = world.mesh({2, 2}, {"replica", "shard"});
        if (left == Left::by_data_parallel)
          parallel.emplace(net, world.group(), shard::DataParallelOptions{.static_graph = true});
        else
          shard_blocks_and_rest(net, options);
        nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
        const Step step = training(net, optimizer);
        const std::vector<Tensor> in = inputs_of(world, 0, net.width);
        const auto leave = [&] {
          std::optional<shard::NoSync> own;
          std::optional<shard::DataParallel::NoSync> own_average;
          if (left == Left::by_no_sync) own.emplace(net);
          if (left == Left::by_data_parallel) own_average.emplace(*parallel);
          if (left == Left::over_shards) shard::set_requires_all_reduce(net, false);
          loss_of(net, {in[0], in[1]}).backward();
          if (left == Left::over_shards) shard::set_requires_all_reduce(net, true);
        };
        step(in);
        step(in);
        leave();
        const std::string said = message_of<StateError>([&] { capture(step, in); });
        expect(said.find("from before it") != std::string::npos, "'{}'", said);
        Program program = capture(step, in);  // which nothing was left to
        program.replay(in);
      }));
    }
}

namespace {

struct Halves final : nn::Layer<Halves> {
  nn::Linear used{4, 4}, spare{4, 4};
  Tensor forward(const Tensor& x) const { return used(x); }
  void visit(auto&& on) {
    on("used", used);
    on("spare", spare);
  }
};

}  // namespace

TEST_CASE("a step of replicas that leaves a parameter out is captured where the graph is said to be static") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    for (const bool said_static : {false, true}) {
      Halves net;
      const shard::DataParallel replicas(net, world.group(), {.static_graph = said_static});
      nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
      const Step step = [&](std::span<const Tensor> in) {
        const Tensor loss = mean(square(net(in[0])));
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        return std::vector<Tensor>{loss.detach()};
      };
      const std::vector<Tensor> in{ones({2, 4})};
      step(in);
      if (said_static) {
        Program program = capture(step, in);
        program.replay(in);
        continue;
      }
      const std::string said = message_of<StateError>([&] { capture(step, in); });
      expect(said.find("'spare.bias' has no gradient") != said.npos && said.find("static_graph") != said.npos,
             "'{}'", said);
    }
  }));
}

TEST_CASE("what a call's peers read is not taken again before the next call of its line") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    constexpr std::size_t bytes = 4096;
    constexpr std::int64_t n = bytes / 4;
    const auto buffers = [&](int calls) {  // that a step with so many calls keeps
      const Step step = [&](std::span<const Tensor> in) {
        std::vector<Tensor> sums;
        std::vector<Work> works;
        for (int i = 0; i < calls; ++i) {
          sums.push_back(empty({n / 2}));
          works.push_back(world.group().enqueue({.kind = CollectiveKind::reduce_scatter,
                                                 .inputs = {mul(in[0], i + 1)},
                                                 .outputs = {sums.back()}}));
        }
        for (Work& work : works) work.wait();
        return sums;
      };
      const std::vector<Tensor> in{ones({n})};
      const std::vector<Tensor> wanted = step(in);
      Program program = capture(step, in);
      for (int run = 0; run < 3; ++run) {
        const std::vector<Tensor> got = program.replay(in);
        for (std::size_t i = 0; i < wanted.size(); ++i)
          expect(got[i].to_vector<float>() == wanted[i].to_vector<float>(), "sum {} differs", i);
      }
      return program.workspace_bytes() / bytes;
    };
    const std::vector<std::size_t> kept{buffers(1), buffers(2), buffers(3), buffers(7)},
        wanted{1, 2, 2, 2};  // two take turns
    expect(kept == wanted, "{} buffers and not {}", fmt::join(kept, ", "), fmt::join(wanted, ", "));
  }));
}

TEST_CASE("peers have read a shard when the replay that gathered it returns", "[threads meet]") {
  constexpr std::int64_t width = std::int64_t{1} << 20;  // time enough to write while a peer reads
  for (const int ranks : {2, 4})
    for (const shard::GroupLayout layout : layouts)
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        nn::Linear net(width, 1);
        shard::fully_shard(net, {.layout = layout});
        const auto set = [&](double value) {
          const NoGrad no_grad;
          for (const nn::Parameter& p : net.parameters()) fill_(p.local().detach(), value);
        };
        const Step step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
          const NoGrad no_grad;
          Tensor y = net(in[0]);
          shard::reshard(net);
          return {y};
        };
        const std::vector<Tensor> in{ones({1, width})};
        set(0);
        step(in);
        Program program = capture(step, in);
        for (int i = 1; i <= 12; ++i) {
          set(i);
          world.group().barrier();
          const Tensor y = program.replay(in)[0];
          set(-1);
          expect(y.item() == double(width + 1) * i, "{} and not {}", y.item(), double(width + 1) * i);
          world.group().barrier();
        }
      }));
}

namespace {

/// A step of rank 0 whose peer comes to what it posts only after what it does later.
std::vector<Tensor> step_ahead(const Group& group, const Tensor& x) {
  const std::int64_t n = x.numel();
  const Tensor first = empty({2 * n}, {f32, x.device()}), second = empty({2 * n}, {f32, x.device()});
  const auto gather = [&](double factor, const Tensor& to) {
    return group.enqueue({.kind = CollectiveKind::all_gather, .inputs = {mul(x, factor)}, .outputs = {to}});
  };
  const Tensor message = empty({n}, {f32, x.device()});
  if (group.rank() > 0) group.recv(message, 0);
  Work a = gather(2, first), b = gather(4, second);
  if (group.rank() == 0) group.send(mul(x, 3), 1);
  a.wait();
  b.wait();
  return {add(first, second)};
}

/// Sharded layers of which rank 1's loss has the first two alone, so that it owes the others' reductions
/// until it has come to the end.
struct UsedInPart final : nn::Layer<UsedInPart> {
  nn::ModuleList<nn::Linear> layers;
  bool half;
  UsedInPart(int count, bool half) : half(half) {
    for (int i = 0; i < count; ++i) layers.emplace_back(32, 32);
  }
  Tensor forward(const Tensor& x) const {
    Tensor h = x, side;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      h = tanh(layers[i](h));
      if (i == 1) side = h;
    }
    return half ? side + h.detach() : h;
  }
  void visit(auto&& on) { on("layers", layers); }
};

}  // namespace

TEST_CASE("a replay waits for no peer for which the step does not wait", "[threads meet]") {
  late_device();
  for (const std::string_view where : {"cpu", "late:0", "late:each"}) {
    INFO(where);
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      const NoGrad guard;
      const Tensor x = full({5000}, world.rank() + 1, {f32, rank_device(where)});
      const Step step = [&](std::span<const Tensor> in) { return step_ahead(world.group(), in[0]); };
      const std::vector<float> wanted = step(std::vector{x})[0].to_vector<float>();
      Program program = capture(step, {x});
      for (int i = 0; i < 4; ++i)
        expect(program.replay({x})[0].to_vector<float>() == wanted, "replay {} differs", i);
    }));
  }
  for (const int layers : {4, 6, 9}) {
    INFO(layers << " layers");
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      const auto train = [&](bool captured) {
        manual_seed(0);
        UsedInPart net(layers, world.rank() == 1);
        for (nn::Linear& layer : net.layers) shard::fully_shard(layer);
        shard::fully_shard(net);
        nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
        const Step step = [&](std::span<const Tensor> in) {
          const Tensor loss = mean(net(in[0]));
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
          return std::vector{loss.detach()};
        };
        const std::vector<Tensor> in{full({4, 32}, 0.5)};
        std::vector<double> losses;
        for (int i = 0; i < 2; ++i) losses.push_back(step(in)[0].item());
        if (!captured)
          for (int i = 0; i < 4; ++i) losses.push_back(step(in)[0].item());
        if (!captured) return losses;
        Program program = capture(step, in);
        losses.push_back(program.outputs()[0].item());
        for (int i = 0; i < 3; ++i) losses.push_back(program.replay(in)[0].item());
        return losses;
      };
      expect(train(true) == train(false), "not the step's losses");
    }));
  }
}

TEST_CASE("replays run ahead of a peer as steps do") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const NoGrad guard;
    const Group& group = world.group();
    const Step step = [&](std::span<const Tensor> in) {
      if (world.rank() == 0) {
        (void)group.enqueue({.kind = CollectiveKind::send, .inputs = {mul(in[0], 2)}, .peer = 1});
        return std::vector{add(in[0], 1)};
      }
      const Tensor got = empty({5000});
      group.recv(got, 0);
      return std::vector{got};
    };
    const auto x = [](double value) { return full({5000}, value); };
    step(std::vector{x(1)});
    Program program = capture(step, {x(1)});
    const Tensor token = zeros({1});
    if (world.rank() > 0) group.recv(token, 0, {.channel = 5});
    for (int i = 0; i < 5; ++i) {
      const Tensor result = program.replay({x(i)})[0];
      expect(result.to_vector<float>().back() == static_cast<float>(world.rank() == 0 ? i + 1 : 2 * i),
             "replay {} brings {}", i, result.to_vector<float>().back());
    }
    if (world.rank() == 0) group.send(token, 1, {.channel = 5});
  }));
}

TEST_CASE("a program that waits for a call from before it goes on after a renewal, or says what to do") {
  for (const bool outputs : {false, true})
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      const NoGrad guard;
      const Group group = world.group().blocks(2);
      const Tensor x = full({5000}, 1.0), y = zeros({10000});
      Work before = group.enqueue({.kind = CollectiveKind::all_gather, .inputs = {x}, .outputs = {y}});
      Program program = capture(
          [&](std::span<const Tensor>) {
            outputs ? before.wait() : before.wait_inputs();
            return std::vector{add(x, 1)};
          },
          {});
      program.replay({});
      (void)message_of<CollectiveError>(
          [&] { world.rank() == 0 ? group.barrier() : group.all_reduce(zeros({4})); });
      group.renew();
      if (!outputs) {
        expect(program.replay({})[0].to_vector<float>()[0] == 2, "not the step's value");
      } else {
        const std::string message = message_of<CollectiveError>([&] { program.replay({}); });
        expect(message.find("capture it again") != std::string::npos, "{}", message);
      }
    }));
}

TEST_CASE("a program with calls is refused where its rank is gone, or another thread's") {
  std::optional<Program> kept;
  const std::vector<Tensor> in{ones({5000})};
  const auto refused = [&](Program& program) {
    const std::string message = message_of<StateError>([&] { program.replay(in); });
    expect(message.find("another thread's rank") != std::string::npos, "{}", message);
  };
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    const NoGrad guard;
    Program program = capture(
        [&](std::span<const Tensor> given) {
          const Tensor y = empty({10000});
          Work work = world.group().enqueue(
              {.kind = CollectiveKind::all_gather, .inputs = {mul(given[0], 2)}, .outputs = {y}});
          work.wait();
          return std::vector{add(y, 1)};
        },
        in);
    program.replay(in);
    synchronize();
    if (world.rank() == 0) std::thread([&] { refused(program); }).join();
    world.group().barrier();
    program.replay(in);
    if (world.rank() == 0) kept.emplace(std::move(program));
  }));
  refused(*kept);
}
