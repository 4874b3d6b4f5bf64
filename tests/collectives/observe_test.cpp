// Seeing a rank's calls: interception, the order log, the count, and listeners.
#include "collectives/observe.h"

#include <map>
#include <set>

#include "autograd/autograd.h"
#include "collectives/differentiable.h"
#include "collectives/world.h"
#include "runtime/apply.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;
using sherd::test::expect;
using sherd::test::message_of;
using Kind = CollectiveKind;

namespace {

/// One blocking call of each kind, on two ranks or more; ranks 0 and 1 exchange a message.
void call_every_kind(const Group& g) {
  const int size = g.size();
  const Tensor one = full({2}, g.rank() + 1.0), all = empty({2 * size}), other = empty({2 * size});
  g.all_gather(all, one, {.label = "gathered"});
  g.reduce_scatter(one, all, ReduceOp::sum(), {.label = "scattered"});
  g.all_reduce(one, ReduceOp::max(), {.channel = 3});
  g.broadcast(one, 1);
  g.all_to_all(other, all);
  if (g.rank() == 0) g.send(one, 1);
  if (g.rank() == 1) g.recv(one, 0);
  g.barrier();
}

std::vector<Kind> kinds_of(int rank) {
  std::vector<Kind> kinds = {Kind::all_gather, Kind::reduce_scatter, Kind::all_reduce, Kind::broadcast,
                             Kind::all_to_all};
  if (rank == 0) kinds.push_back(Kind::send);
  if (rank == 1) kinds.push_back(Kind::recv);
  kinds.push_back(Kind::barrier);
  return kinds;
}

/// Remembers every op it is told of.
struct Ear final : Listener {
  struct Heard {
    std::string name, text;
    std::size_t inputs, outputs, written;
  };
  std::vector<Heard> heard;
  int writes = 0;

  void before_write(const AnyOp&, Inputs) override { ++writes; }
  void after(const AnyOp& op, Inputs in, Outputs out) override {
    std::size_t written = 0;
    for (std::size_t i = 0; i < in.size(); ++i) written += op.writes(i);
    heard.push_back({std::string(op.name()), op.text(), in.size(), out.size(), written});
  }
  std::size_t count(std::string_view name) const {
    std::size_t n = 0;
    for (const Heard& h : heard) n += h.name == name;
    return n;
  }
};

}  // namespace

TEST_CASE("a listener hears every call of every kind, with what it reads and writes") {
  for (int size : {2, 3})
    CHECK_NOTHROW(run_ranks(size, [&](World& world) {
      Ear ear;
      {
        const Listening listening(ear);
        call_every_kind(world.group());
      }
      call_every_kind(world.group());  // not heard any more
      std::vector<Ear::Heard> calls;
      for (const Ear::Heard& h : ear.heard)
        if (h.name == "collective") calls.push_back(h);
      const std::vector<Kind> kinds = kinds_of(world.rank());
      expect(calls.size() == kinds.size(), "{} calls, {} heard", kinds.size(), calls.size());
      for (std::size_t i = 0; i < kinds.size(); ++i) {
        const std::string kind = fmt::format("kind={}", to_string(kinds[i]));
        expect(calls[i].text.find(kind) != std::string::npos, "'{}' lacks {}", calls[i].text, kind);
        expect(calls[i].text.find("group=world") != std::string::npos, "'{}' lacks the group", calls[i].text);
        const std::size_t writes = kinds[i] == Kind::send || kinds[i] == Kind::barrier ? 0 : 1;
        expect(calls[i].written == writes && calls[i].outputs == writes, "{}: what it writes", calls[i].text);
      }
      expect(calls[0].text.find("label=gathered") != std::string::npos, "'{}' lacks the label",
             calls[0].text);
      expect(calls[2].text.find("channel=3") != std::string::npos, "'{}' lacks the channel", calls[2].text);
    }));
}

TEST_CASE("a listener hears when an asynchronous call's outputs are there") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    Ear ear;
    const Listening listening(ear);
    const Tensor a = full({3}, 1), b = full({3}, 2);
    Work first = world.group().enqueue({.kind = Kind::all_reduce, .inputs = {a}, .outputs = {a}});
    Work second = world.group().enqueue({.kind = Kind::all_reduce, .inputs = {b}, .outputs = {b}});
    const std::size_t posted = ear.count("collective");
    expect(posted == 2 && ear.count("wait") == 0, "posts first");
    second.wait();
    first.wait();
    expect(ear.count("wait") == 2, "then waits");
  }));
}

TEST_CASE("waiting counts as the write that makes values new") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const Tensor a = full({3}, 1);
    Work work = world.group().enqueue({.kind = Kind::all_reduce, .inputs = {a}, .outputs = {a}});
    const std::uint32_t posted = a.storage().version();
    work.wait();
    expect(a.storage().version() > posted, "what kept the value before must notice");
  }));
}

TEST_CASE("what a kernel calls inside is the kernel's: one op is heard, the call is counted") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const Tensor x = full({2}, world.rank());
    Ear ear;
    const Listening listening(ear);
    const OrderLog log;
    const std::uint64_t before = collective_calls();
    gather_params(world.group(), x);
    expect(ear.heard.size() == 1 && ear.heard[0].name == "gather_params", "one op");
    expect(collective_calls() == before + 1 && log.lines().size() == 1, "one call");
  }));
}

TEST_CASE("a tensor with history is not overwritten by a call") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const Tensor leaf = full({2}, 1).requires_grad_();
    const Tensor x = mul(leaf, 2);
    bool refused = false;
    try {
      world.group().all_reduce(x);
    } catch (const StateError&) {
      refused = true;
    }
    expect(refused, "its gradient would be wrong");
    const NoGrad guard;
    world.group().all_reduce(x);
    expect(x.to_vector<float>()[0] == 4, "without recording it is");
  }));
}

TEST_CASE("the order log has a line for every call, in order, while it lives") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const Group& g = world.group();
    const Tensor one = full({2}, 1), all = empty({4});
    g.barrier();  // before the log
    const OrderLog outer;
    g.all_gather(all, one, {.label = "layers.3", .channel = 1});
    {
      const OrderLog inner;
      g.all_reduce(one, ReduceOp::average());
      expect(
          inner.lines() == std::vector<std::string>{"world channel 0: all_reduce(f32, 2 elements, average)"},
          "inner log");
    }
    g.broadcast(one, 1);
    expect(outer.lines() ==
               std::vector<std::string>{"world channel 1: all_gather(f32, 2 elements) of 'layers.3'",
                                        "world channel 0: all_reduce(f32, 2 elements, average)",
                                        "world channel 0: broadcast(f32, 2 elements, root 1)"},
           "outer log");
  }));
}

TEST_CASE("the order log is the same on every rank of a group, messages aside") {
  std::vector<std::vector<std::string>> logs(3);
  run_ranks(3, [&](World& world) {
    const OrderLog log;
    for (int i = 0; i < 20; ++i) {
      const Tensor x = full({i}, 1);
      world.group().all_reduce(x, {}, {.label = fmt::format("step {}", i), .channel = i % 4});
    }
    logs[static_cast<std::size_t>(world.rank())] = log.lines();
  });
  CHECK(logs[0].size() == 20);
  CHECK(logs[1] == logs[0]);
  CHECK(logs[2] == logs[0]);
}

TEST_CASE("calls are counted a rank, over all its groups; refused ones are not") {
  CHECK_NOTHROW(run_ranks(3, [](World& world) {
    const Group pair = world.group().subgroup({0, 1});
    const std::uint64_t before = collective_calls();
    world.group().barrier();
    if (pair.defined()) pair.barrier();
    bool refused = false;
    try {
      world.group().all_reduce(full({2}, 1), {}, {.channel = max_channels});
    } catch (const ValueError&) {
      refused = true;
    }
    expect(refused, "there is no such channel");
    expect(collective_calls() == before + (pair.defined() ? 2u : 1u), "counted");
  }));
}

TEST_CASE("an interception sees every kind of call before it is posted") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    std::vector<Kind> seen;
    std::vector<std::uint64_t> counts;
    {
      const Interception watch([&](const ObservedCall& call, const Interception::Proceed& proceed) {
        expect(call.group == world.group(), "on which group");
        seen.push_back(call.collective.kind);
        const std::uint64_t before = collective_calls();
        proceed(call.collective);
        counts.push_back(collective_calls() - before);
      });
      call_every_kind(world.group());
    }
    world.group().barrier();  // no longer intercepted
    expect(seen == kinds_of(world.rank()), "every kind, in order");
    expect(counts == std::vector<std::uint64_t>(seen.size(), 1), "each posts once");
  }));
}

TEST_CASE("an interception may change what is passed on") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const Tensor x = full({2}, world.rank() + 1);
    const Interception maximum([&](const ObservedCall& call, const Interception::Proceed& proceed) {
      Collective changed = call.collective;
      changed.reduction = ReduceOp::max();
      proceed(changed);
    });
    world.group().all_reduce(x);
    expect(x.to_vector<float>() == std::vector<float>{2, 2}, "a maximum instead of a sum");
  }));
}

TEST_CASE("interceptions nest, newest first, and each may go on more than once") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    std::string order;
    const Interception outer([&](const ObservedCall& call, const Interception::Proceed& proceed) {
      order += "o";
      proceed(call.collective);
      order += "O";
    });
    const Interception inner([&](const ObservedCall& call, const Interception::Proceed& proceed) {
      order += "i";
      proceed(call.collective);
      proceed(call.collective);
      order += "I";
    });
    const std::uint64_t before = collective_calls();
    world.group().barrier();
    expect(order == "ioOoOI", "{}", order);
    expect(collective_calls() == before + 2, "posted twice");
  }));
}

TEST_CASE("an interception that throws stops the call and nothing else") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const Tensor x = full({1}, 1);
    {
      const Interception refuse([](const ObservedCall&, const Interception::Proceed&) {
        throw ValueError("interception: not today");
      });
      bool thrown = false;
      try {
        world.group().all_reduce(x);
      } catch (const ValueError&) {
        thrown = true;
      }
      expect(thrown && x.item<int>() == 1, "nothing was posted");
    }
    world.group().all_reduce(x);
    expect(x.item<int>() == 2, "the group goes on");
  }));
}

TEST_CASE("an interception that keeps a call to itself leaves no work to wait for") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const Tensor x = full({1}, 1);
    {
      const Interception swallow([](const ObservedCall&, const Interception::Proceed&) {});
      world.group().all_reduce(x);
      Work work = world.group().enqueue({.kind = Kind::all_reduce, .inputs = {x}, .outputs = {x}});
      expect(work.done(), "nothing is under way");
      work.wait();
      work.wait_inputs();
    }
    expect(x.item<int>() == 1, "nothing moved");
    world.group().all_reduce(x);
    expect(x.item<int>() == 2, "the group goes on");
  }));
}

TEST_CASE("a call moved to another channel is waited for there") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const Interception move([](const ObservedCall& call, const Interception::Proceed& proceed) {
      Collective moved = call.collective;
      moved.channel = 5;
      proceed(moved);
    });
    const Tensor x = full({1}, 1);
    Work work = world.group().enqueue({.kind = Kind::all_reduce, .inputs = {x}, .outputs = {x}});
    work.wait();
    expect(x.item<int>() == 2, "arrived");
  }));
}

TEST_CASE("a rank that lies in a call is found out") {
  const std::string text = message_of<CollectiveError>([] {
    run_ranks(3, [](World& world) {
      const Interception lie([&](const ObservedCall& call, const Interception::Proceed& proceed) {
        Collective changed = call.collective;
        if (world.rank() == 2) changed.label = "layers.4";
        proceed(changed);
      });
      world.group().all_reduce(full({2}, 1), {}, {.label = "layers.3"});
    });
  });
  CHECK_THAT(text, ContainsSubstring("'layers.3'"));
  CHECK_THAT(text, ContainsSubstring("'layers.4'"));
  CHECK_THAT(text, ContainsSubstring("rank 2"));
}
