// Dry runs: worlds of any size in one thread, stated as strings.
#include "collectives/dry_run.h"

#include "autograd/autograd.h"
#include "collectives/differentiable.h"
#include "runtime/apply.h"
#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;
using sherd::test::message_of;
using Kind = CollectiveKind;

namespace {

Tensor meta(std::int64_t n, DType dtype = f32) { return empty({n}, {dtype, Device::meta()}); }

}  // namespace

TEST_CASE("a dry run writes down posts and waits in the rank's order") {
  DryRun dry({.rank = 3, .size = 1024});
  const Group& g = dry.world().group();
  CHECK(g.rank() == 3);
  CHECK(g.size() == 1024);
  Work first = g.enqueue(
      {.kind = Kind::all_gather, .inputs = {meta(8)}, .outputs = {meta(8192)}, .label = "layers.0"});
  Work second = g.enqueue({.kind = Kind::all_gather,
                           .inputs = {meta(8, bf16)},
                           .outputs = {meta(8192, bf16)},
                           .label = "layers.1"});
  first.wait();
  Work reduced = g.enqueue({.kind = Kind::reduce_scatter,
                            .inputs = {meta(8192)},
                            .outputs = {meta(8)},
                            .channel = 1,
                            .label = "layers.0"});
  second.wait();
  reduced.wait();
  reduced.wait_inputs();
  CHECK(dry.log() ==
        "0:all_gather(f32, 8 elements) of 'layers.0'\n"
        "0:all_gather(bf16, 8 elements) of 'layers.1'\n"
        "0:wait all_gather of 'layers.0'\n"
        "1:reduce_scatter(f32, 8 elements, sum) of 'layers.0'\n"
        "0:wait all_gather of 'layers.1'\n"
        "1:wait reduce_scatter of 'layers.0'\n"
        "1:wait_inputs reduce_scatter of 'layers.0'");
  CHECK(dry.brief() ==
        "all_gather(layers.0), all_gather(layers.1), wait all_gather(layers.0), reduce_scatter(layers.0), "
        "wait all_gather(layers.1), wait reduce_scatter(layers.0), wait_inputs reduce_scatter(layers.0)");
}

TEST_CASE("calls without a label go by their number, messages name the other rank") {
  DryRun dry({.rank = 0, .size = 4});
  const Group& g = dry.world().group();
  g.barrier();
  dry.clear();
  g.barrier();
  g.send(meta(2), 3);
  g.recv(meta(2), 1);
  CHECK(dry.log() ==
        "0:barrier\n0:wait barrier #1\n0:wait_inputs barrier #1\n"
        "0:send(f32, 2 elements) to rank 3\n0:wait send #0\n0:wait_inputs send #0\n"
        "0:recv(f32, 2 elements) from rank 1\n0:wait recv #0\n0:wait_inputs recv #0");
}

TEST_CASE("every kind runs on meta and on cpu tensors, in worlds of many sizes, and moves nothing") {
  for (int size : {1, 2, 3, 8, 1024})
    for (int rank : {0, size / 2, size - 1})
      for (const Device device : {Device::cpu(), Device::meta()}) {
        DryRun dry({.rank = rank, .size = size});
        const Group& g = dry.world().group();
        const Tensor one = full({3}, 7.0, {f32, device}), all = full({3 * size}, 5.0, {f32, device});
        const Tensor other = full({3 * size}, 6.0, {f32, device});
        g.all_gather(all, one);
        g.reduce_scatter(one, all);
        g.all_reduce(one, ReduceOp::average());
        g.broadcast(one, size - 1);
        g.all_to_all(other, all);
        g.barrier();
        if (size > 1) g.send(one, (rank + 1) % size);
        if (size > 1) g.recv(one, (rank + 1) % size);
        CHECK(dry.steps().size() == 3u * (size > 1 ? 8 : 6));
        if (!device.is_cpu()) continue;
        CHECK(one.to_vector<float>() == std::vector<float>(3, 7));
        CHECK(all.to_vector<float>() == std::vector<float>(static_cast<std::size_t>(3 * size), 5));
        CHECK(other.to_vector<float>() == std::vector<float>(static_cast<std::size_t>(3 * size), 6));
      }
}

TEST_CASE("a dry run refuses what any transport refuses") {
  DryRun dry({.rank = 0, .size = 4});
  CHECK_THROWS_AS(dry.world().group().all_gather(meta(5), meta(2)), ShapeError);
  CHECK(dry.steps().empty());
}

TEST_CASE("bytes follow from what each rank needs") {
  constexpr std::int64_t n = 6;
  for (int size : {1, 2, 3, 4, 64})
    for (int rank : {0, size - 1}) {
      DryRun dry({.rank = rank, .size = size});
      const Group& g = dry.world().group();
      const std::int64_t peers = size - 1, bytes = n * 4;
      g.all_gather(meta(n * size), meta(n));
      g.reduce_scatter(meta(n), meta(n * size));
      g.all_reduce(meta(n * size));
      g.all_to_all(meta(n * size), meta(n * size));
      g.broadcast(meta(n), 0);
      using Traffic = DryRun::Traffic;
      CHECK(dry.traffic(Kind::all_gather) == Traffic{1, bytes * peers, bytes * peers});
      CHECK(dry.traffic(Kind::reduce_scatter) == Traffic{1, bytes * peers, bytes * peers});
      CHECK(dry.traffic(Kind::all_reduce) == Traffic{1, 2 * bytes * peers, 2 * bytes * peers});
      CHECK(dry.traffic(Kind::all_to_all) == Traffic{1, bytes * peers, bytes * peers});
      CHECK(dry.traffic(Kind::broadcast) == Traffic{1, rank == 0 ? bytes * peers : 0, rank == 0 ? 0 : bytes});
      CHECK(dry.traffic(Kind::send) == Traffic{});
      if (size == 1) continue;
      g.send(meta(n), (rank + 1) % size);
      g.recv(meta(n), (rank + 1) % size);
      g.recv(meta(n), (rank + 1) % size);
      CHECK(dry.traffic(Kind::send) == Traffic{1, bytes, 0});
      CHECK(dry.traffic(Kind::recv) == Traffic{2, 0, 2 * bytes});
    }
}

TEST_CASE("what all ranks send is what all ranks receive, uneven slices included") {
  for (int size : {2, 3, 5, 7})
    for (std::int64_t n : {0, 1, 4, 11}) {
      std::int64_t sent = 0, received = 0;
      for (int rank = 0; rank < size; ++rank) {
        DryRun dry({.rank = rank, .size = size});
        dry.world().group().all_reduce(meta(n));
        sent += dry.traffic(Kind::all_reduce).sent;
        received += dry.traffic(Kind::all_reduce).received;
      }
      CHECK(sent == received);
      CHECK(sent == 2 * (size - 1) * n * 4);
    }
}

TEST_CASE("groups and meshes of a dry run need no peers and leave no steps") {
  DryRun dry({.rank = 700, .size = 1024, .local_size = 8});
  CHECK(dry.world().local_rank() == 700 % 8);
  CHECK(dry.world().local_size() == 8);
  const DeviceMesh mesh = dry.world().mesh({16, 8, 8}, {"replica", "shard", "tensor"});
  CHECK(mesh.coordinates() == std::vector<int>{700 / 64, 700 / 8 % 8, 700 % 8});
  const DeviceMesh two = mesh.slice({"replica", "shard"});
  CHECK(two.all().size() == 128);
  CHECK(two.all().world_ranks()[static_cast<std::size_t>(two.all().rank())] == 700);
  CHECK_FALSE(dry.world().group().subgroup({1, 2}).defined());
  CHECK(dry.world().group().subgroup({1, 700}).rank() == 1);
  CHECK(dry.steps().empty());

  mesh.group("shard").all_reduce(meta(8), {}, {.label = "w"});
  CHECK(dry.log() ==
        "world.shard 0:all_reduce(f32, 8 elements, sum) of 'w'\n"
        "world.shard 0:wait all_reduce of 'w'\n"
        "world.shard 0:wait_inputs all_reduce of 'w'");
  CHECK(dry.traffic(Kind::all_reduce).sent == 2 * 7 * 4);  // seven slices of one element, twice
}

TEST_CASE("a work is done when it was waited for, or always, as the dry run is told") {
  using Done = DryRunOptions::Done;
  for (const Done done : {Done::when_waited, Done::always}) {
    DryRun dry({.rank = 1, .size = 2, .done = done});
    Work work = dry.world().group().enqueue({});
    CHECK(work.done() == (done == Done::always));
    work.wait();
    CHECK(work.done());
    CHECK(dry.brief() == "barrier(#0), wait barrier(#0)");  // asking leaves no step
  }
}

TEST_CASE("forward and backward of placed tensors can be planned on meta") {
  DryRun dry({.rank = 5, .size = 256});
  const Group& g = dry.world().group();
  Tensor shard = empty({2, 3}, {f32, Device::meta()}).requires_grad_();
  const Tensor whole = gather_params(g, shard, {.label = "w"});
  CHECK(whole.shape() == Shape{512, 3});
  sum(whole).backward();
  CHECK(shard.grad().shape() == shard.shape());
  CHECK(dry.brief() ==
        "all_gather(w), wait all_gather(w), wait_inputs all_gather(w), reduce_scatter(w), wait "
        "reduce_scatter(w), wait_inputs reduce_scatter(w)");
}

TEST_CASE("a renewed dry group begins anew") {
  DryRun dry({.rank = 0, .size = 2});
  const Group& g = dry.world().group();
  g.barrier();
  g.renew();
  CHECK_FALSE(g.failed());
  Work work = g.enqueue({});
  CHECK(work.sequence() == 0);
}

TEST_CASE("a dry run outlives nobody: groups stay usable after it") {
  Group g;
  {
    DryRun dry({.rank = 0, .size = 3});
    g = dry.world().group();
  }
  CHECK_NOTHROW(g.barrier());
}

TEST_CASE("a dry run says what is wrong with its world") {
  CHECK(message_of<ValueError>([] { DryRun dry({.rank = 4, .size = 4}); }) ==
        "dry run: rank 4 of a world of 4; a rank is in 0..size-1, and a world has at least one");
  CHECK_THROWS_AS(DryRun({.rank = -1, .size = 4}), ValueError);
  CHECK_THROWS_AS(DryRun({.rank = 0, .size = 0}), ValueError);
  CHECK_THROWS_AS(DryRun({.rank = 0, .size = 6, .local_size = 4}), ValueError);
}
