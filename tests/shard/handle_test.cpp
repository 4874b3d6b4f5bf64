// FullyShardedDataParallel: what its units list, and what holds for one flat parameter as for many.
#include "shard/fsdp.h"

#include <numeric>

#include "tests/sanitizer.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;
using shard::FullyShardedDataParallel;

namespace {

/// An uneven net by hand, and one whose blocks and rest are units.
struct Wrapped {
  Net by_hand, net;
  FullyShardedDataParallel handle;
  explicit Wrapped(bool originals, shard::ShardingStrategy strategy = shard::ShardingStrategy::full_shard,
                   Frozen frozen = Frozen::no)
      : by_hand({.uneven = true, .frozen = frozen}),
        net({.uneven = true, .frozen = frozen}),
        handle(net, {.strategy = strategy,
                     .auto_wrap = shard::wrap_classes({"Block"}),
                     .use_orig_params = originals}) {}
};

template <class F>
void on_ranks_of_handles(F&& body) {
  for (const int ranks : {2, 3})
    for (const bool originals : {true, false}) {
      INFO(ranks << " ranks, " << (originals ? "original parameters" : "one flat parameter"));
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, originals); }));
    }
}

std::vector<std::string> labels_of(nn::Module& module) {
  std::vector<std::string> labels;
  for (const shard::GroupReport& report : shard::groups_of(module)) labels.push_back(report.label);
  return labels;
}

/// All elements of a list of gradients, one after another.
std::vector<float> joined(const Gradients& gradients) {
  std::vector<float> all;
  for (const std::vector<float>& g : gradients) all.insert(all.end(), g.begin(), g.end());
  return all;
}

}  // namespace

TEST_CASE("rules say which modules become units") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    const auto labels = [](shard::AutoWrap rule) {
      Net net;
      const FullyShardedDataParallel handle(net, {.auto_wrap = std::move(rule)});
      return labels_of(net);
    };
    using Labels = std::vector<std::string>;
    expect(labels({}) == Labels{""}, "no rule: one unit");
    expect(labels(shard::wrap_classes({"Block"})) == Labels{"", "blocks.0", "blocks.1", "blocks.2"},
           "classes");
    expect(labels(shard::wrap_classes({"LayerNorm", "Nothing"})) ==
               Labels{"", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm"},
           "classes within");
    expect(labels(shard::wrap_by_size(600)) == Labels{"", "blocks.0", "blocks.1", "blocks.2"}, "size");
    expect(labels(shard::wrap_by_size(1 << 20)) == Labels{""}, "too large a size");
    expect(labels(shard::wrap_by_size(1500)) == Labels{""},
           "a list of blocks is large enough, but no module");
    expect(labels(shard::wrap_classes({"ModuleList"})) == Labels{"", "blocks"}, "a template by its name");
    const Labels every = labels(shard::wrap_always());
    expect(std::ranges::count(every, "blocks.1.in") == 1 && std::ranges::count(every, "head") == 1,
           "every module");
    nn::Sequential attention{nn::Linear(8, 8), nn::MultiheadAttention(8, 2)};
    const FullyShardedDataParallel handle(attention, {.auto_wrap = shard::wrap_by_size(72)});
    expect(labels_of(attention) == Labels{"0", "1"}, "attention uses what is in it without running it");
  }));
}

TEST_CASE("a unit lists one flat parameter, or the original ones") {
  on_ranks_of_handles([](World&, bool originals) {
    Wrapped w(originals);
    std::vector<std::string> names;
    for (const nn::NamedParameter& p : w.net.named_parameters()) names.push_back(p.name);
    expect(w.handle.flat_param().defined() != originals, "the handle's flat parameter");
    if (originals) {
      std::vector<std::string> plain;
      for (const nn::NamedParameter& p : w.by_hand.named_parameters()) plain.push_back(p.name);
      expect(names == plain, "names do not change");
    } else {
      expect(names.size() == 4, "{} parameters", names.size());
      for (const std::string& name : names) expect(name.ends_with("_flat_param"), "'{}'", name);
      expect(w.net.parameters()[0] == w.handle.flat_param(), "the root's flat parameter");
    }
  });
}

TEST_CASE("a flat parameter is trained as a whole or not at all") {
  run_ranks(2, [](World&) {
    Net net({.frozen = Frozen::biases});
    const std::string message = message_of<ValueError>([&] { const FullyShardedDataParallel handle(net); });
    expect(
        message.find("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`") == 0,
        "{}", message);
    Net other({.frozen = Frozen::biases});
    const FullyShardedDataParallel handle(other, {.use_orig_params = true});
  });
  on_ranks_of_handles([](World& world, bool originals) {
    for (const Frozen frozen : {Frozen::no, Frozen::whole_group}) {
      Wrapped w(originals, shard::ShardingStrategy::full_shard, frozen);
      nn::Adam adam(w.net.parameters()), reference(w.by_hand.parameters());
      for (const int step : {0, 1, 2, 3}) {
        if (step > 0)
          for (Net* net : {&w.net, &w.by_hand}) net->blocks[1].set_requires_grad(step != 2);
        adam.zero_grad();
        loss_at(w.net, world.rank(), step).backward();
        set_gradients(w.by_hand, plain(w.by_hand, world, step));
        adam.step();
        reference.step();
        expect_values(w.net, w.by_hand, "a frozen unit");
      }
    }
  });
}

TEST_CASE("what a flat parameter requires holds for the parameters in it at once, and for a clone") {
  for (const int ranks : worlds())
    CHECK_NOTHROW(run_ranks(ranks, [](World& world) {
      Net net;
      const std::vector<nn::Parameter> within = net.parameters();
      const FullyShardedDataParallel handle(net, {});
      for (const bool trained : {false, true, false}) {
        handle.flat_param().set_requires_grad(trained);
        Net copy = net.clone();
        for (Net* n : {&net, &copy}) {
          expect(n->parameters()[0].requires_grad() == trained, "the flat parameter");
          expect(n->scale.object().requires_grad() == trained, "one in it");
          const Tensor loss = loss_at(*n, world.rank(), 0);
          expect(loss.requires_grad() == trained, "the loss");
          if (trained) loss.backward();
          expect(n->parameters()[0].grad().defined() == trained, "its gradient");
          n->zero_grad();
        }
        for (const nn::Parameter& p : within) expect(p.requires_grad() == trained, "all in it");
      }
    }));
}

TEST_CASE("without synchronisation a handle's units keep whole gradients of their own") {
  on_ranks_of_handles([](World& world, bool originals) {
    using enum shard::ShardingStrategy;
    for (const auto strategy : {full_shard, shard_grad_op, no_shard}) {
      Wrapped w(originals, strategy);
      {
        const auto guard = w.handle.no_sync();
        for (const int step : {0, 1}) {
          loss_at(w.net, world.rank(), step).backward();
          loss_at(w.by_hand, world.rank(), step).backward();
        }
      }
      if (originals) {
        expect(difference(gradients(w.net), gradients(w.by_hand)).empty(), "this rank's own");
      } else {
        const std::vector<float> flat = w.net.blocks[1].parameters()[0].grad().to_vector<float>();
        expect(flat == joined(gradients(w.by_hand.blocks[1])), "this rank's own, end to end");
      }
      loss_at(w.net, world.rank(), 2).backward();
      const Gradients expected = average_by_hand(w.by_hand, world.size(), [&](int rank) {
        for (const int step : {0, 1, 2}) loss_at(w.by_hand, rank, step).backward();
      });
      set_gradients(w.by_hand, expected);
      nn::Sgd sgd(w.net.parameters(), {.lr = 0.1}), reference(w.by_hand.parameters(), {.lr = 0.1});
      sgd.step();
      reference.step();
      expect_values(w.net, w.by_hand, "the average of the sums");
    }
  });
}

TEST_CASE("a handle clips by the norm of all ranks' gradients") {
  on_ranks_of_handles([](World& world, bool originals) {
    Wrapped w(originals);
    loss_at(w.net, world.rank(), 0).backward();
    set_gradients(w.by_hand, plain(w.by_hand, world, 0));
    const double norm = w.handle.clip_grad_norm_(0.1).item();
    expect(norm == nn::clip_grad_norm_(w.by_hand.parameters(), 0.1).item(), "norm {}", norm);
    expect(norm > 0.1, "nothing was clipped");
  });
}

TEST_CASE("clones, other dtypes and whole states of units with flat parameters") {
  on_ranks_of_handles([](World& world, bool originals) {
    Wrapped w(originals);
    Net copy = w.net.clone(), copy_by_hand = w.by_hand.clone();
    expect(copy.parameters().size() == w.net.parameters().size(), "a clone lists as many");
    for (Net* net : {&copy, &copy_by_hand}) net->to(f64);
    nn::Adam adam(copy.parameters()), reference(copy_by_hand.parameters());
    const auto loss = [](Net& net, int rank, int step) {
      Batch batch = batch_of(rank, step, net.width);
      batch.x = to(batch.x, f64);
      return loss_of(net, batch);
    };
    for (const int step : {0, 1}) {
      adam.zero_grad();
      reference.zero_grad();
      loss(copy, world.rank(), step).backward();
      loss(copy_by_hand, world.rank(), step).backward();
      for (nn::Parameter& p : copy_by_hand.parameters()) {
        p.set_grad(clone(p.grad()));
        world.group().all_reduce(p.grad(), ReduceOp::average());
      }
      adam.step();
      reference.step();
    }
    expect_values(copy, copy_by_hand, "a clone in f64");
    expect_values(w.net, w.by_hand, "the original");
    shard::load_full_state_dict(w.net, copy_by_hand.state_dict());
    copy_by_hand.to(f32);
    expect_values(w.net, copy_by_hand, "the clone's values");
  });
}
