// Parameters and modules that sharding leaves to the program.
#include "shard/fsdp.h"
#include "shard/sharded_state.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

using Shard = std::function<void(Net&, World&)>;

/// Three normalisations in a row.
struct Normed final : nn::Layer<Normed> {
  nn::BatchNorm1d a{4}, b{4}, c{4};
  Tensor forward(const Tensor& x) const { return c(b(a(x))); }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
    on("c", c);
  }
};

/// What every way ignores: a module of the outermost group, one within a block, and single parameters.
std::vector<const nn::Module*> modules_of(const Net& net) { return {&net.head, &net.blocks[1].norm}; }
std::vector<nn::Parameter> parameters_of(const Net& net) {
  return {net.scale.object(), net.blocks[0].in.bias.object()};
}
const std::vector<std::string> names = {
    "scale", "head.weight", "head.bias", "blocks.1.norm.weight", "blocks.1.norm.bias", "blocks.0.in.bias"};
bool is_ignored(const std::string& name) { return std::ranges::find(names, name) != names.end(); }

/// Every layout and strategy, whether the outer call says it too or the inner ones alone, and both forms of
/// the handle.
template <class F>
void on_all_ways(F&& body) {
  using enum shard::ShardingStrategy;
  for (const int ranks : {1, 2, 3})
    for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
      for (const int way : {0, 1, 2, 3}) {
        INFO(ranks << " ranks, strategy " << static_cast<int>(strategy) << ", way " << way);
        const Shard shard = [=](Net& net, World&) {
          if (way < 2) {
            shard::Options options{
                .layout = way == 0 ? shard::GroupLayout::per_parameter : shard::GroupLayout::flat,
                .strategy = strategy,
                .ignored_parameters = parameters_of(net),
                .ignored_modules = modules_of(net)};
            for (Block& block : net.blocks) shard::fully_shard(block, options);
            options.ignored_parameters.pop_back();  // the inner call's word holds
            options.ignored_modules.pop_back();
            shard::fully_shard(net, options);
            return;
          }
          const shard::FullyShardedDataParallel handle(net, {.strategy = strategy,
                                                             .auto_wrap = shard::wrap_classes({"Block"}),
                                                             .use_orig_params = way == 2,
                                                             .ignored_parameters = parameters_of(net),
                                                             .ignored_modules = modules_of(net)});
        };
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, shard, way); }));
      }
}

/// The parameters as they are in the module, flat ones aside.
std::vector<std::pair<std::string, nn::Parameter>> members_of(Net& net) {
  std::vector<std::pair<std::string, nn::Parameter>> all;
  struct Members final : nn::MemberVisitor {
    std::vector<std::pair<std::string, nn::Parameter>>& all;
    std::string prefix{};
    explicit Members(std::vector<std::pair<std::string, nn::Parameter>>& all) : all(all) {}
    void param(std::string_view name, nn::Param& p) override {
      all.emplace_back(prefix + std::string(name), p.object());
    }
    void child(std::string_view name, nn::Module& m) override {
      const std::string outer = std::exchange(prefix, prefix + std::string(name) + ".");
      m.visit_members(*this);
      prefix = outer;
    }
  };
  Members members(all);
  net.visit_members(members);
  return all;
}

}  // namespace

TEST_CASE("what is ignored stays whole, keeps this rank's own gradient, and is in every state") {
  on_all_ways([](World& world, const Shard& shard, int way) {
    Net net({.uneven = true}), by_hand({.uneven = true}), own({.uneven = true});
    shard(net, world);
    const Gradients average = plain(by_hand, world, 0);
    loss_at(own, world.rank(), 0).backward();
    Net copy = net.clone();
    for (Net* sharded : {&net, &copy}) {
      loss_at(*sharded, world.rank(), 0).backward();
      const auto found = members_of(*sharded), expected = members_of(own);
      for (std::size_t i = 0; i < found.size(); ++i) {
        const auto& [name, p] = found[i];
        const bool ignored = is_ignored(name);
        expect((p.owner() == nullptr) == ignored, "'{}' is ignored or sharded", name);
        if (!ignored) {
          if (way < 3 && p.grad().defined())
            expect(p.grad().shape() == p.local().shape(), "'{}' has an average", name);
          continue;
        }
        expect(p.local().shape() == p.shape(), "'{}' is whole", name);
        expect(p.grad().to_vector<float>() == expected[i].second.grad().to_vector<float>(),
               "'{}' has this rank's own gradient", name);
      }
      if (way == 3) continue;  // parts of flat parameters have no gradient
      Gradients whole = whole_gradients(*sharded, world.group());
      const std::vector<nn::NamedParameter> list = sharded->named_parameters();
      for (std::size_t i = 0; i < list.size(); ++i)
        if (is_ignored(list[i].name)) whole[i] = average[i];
      const std::string difference = test::difference(whole, average);
      expect(difference.empty(), "what is not ignored: {}", difference);
    }
    for (const std::string& name : names) {
      const auto named = [&](const auto& entry) { return entry.first == name; };
      const nn::StateDict full = shard::full_state_dict(net), plain = by_hand.state_dict(),
                          local = net.state_dict();
      const auto in_full = std::ranges::find_if(full, named), in_plain = std::ranges::find_if(plain, named);
      expect(in_full != full.end() &&
                 in_full->second.to_vector<float>() == in_plain->second.to_vector<float>() &&
                 std::ranges::find_if(local, named) != local.end(),
             "'{}' is in the states", name);
      const shard::ShardedStateDict sharded = shard::sharded_state_dict(net);
      const auto part = std::ranges::find(sharded, name, &shard::ShardedTensor::name);
      expect(part != sharded.end() && part->values.numel() == in_plain->second.numel(), "'{}', whole", name);
    }
    net.head = nn::Linear(net.width, net.width);  // the program's own
    loss_at(net, world.rank(), 1).backward();
  });
}

TEST_CASE("a tied parameter that is ignored under one of its names is the program's under all") {
  using shard::GroupLayout;
  // The head's bias is that of a block's second layer too, which comes before it and is sharded before it.
  const auto shard = [](Net& net, int way) {
    const bool by_module = way % 2 == 0;
    const std::vector<const nn::Module*> modules(by_module ? 1 : 0, &net.head);
    const std::vector<nn::Parameter> parameters(by_module ? 0 : 1, net.head.bias.object());
    if (way < 4)
      shard_blocks_and_rest(net, {.layout = way < 2 ? GroupLayout::per_parameter : GroupLayout::flat,
                                  .ignored_parameters = parameters,
                                  .ignored_modules = modules});
    else
      shard::FullyShardedDataParallel(net, {.auto_wrap = shard::wrap_classes({"Block"}),
                                            .use_orig_params = way < 6,
                                            .ignored_parameters = parameters,
                                            .ignored_modules = modules});
  };
  for (const int ranks : {1, 2, 3})
    for (const int way : {0, 1, 2, 3, 4, 5, 6, 7}) {
      INFO(ranks << " ranks, way " << way);
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        const NetOptions options{.tied = Tied::across_groups, .uneven = true};
        Net net(options), by_hand(options), own(options);
        shard(net, way);
        Net copy = net.clone();
        loss_at(own, world.rank(), 0).backward();
        const Gradients average = plain(by_hand, world, 0);
        for (Net* sharded : {&net, &copy}) {
          const nn::Parameter bias = sharded->head.bias.object();
          expect(bias == sharded->blocks[1].out.bias.object(), "the tie is gone");
          expect(bias.owner() == nullptr && bias.local().shape() == bias.shape(), "it is sharded");
          expect((sharded->head.weight.object().owner() == nullptr) == (way % 2 == 0), "the head's weight");
          loss_at(*sharded, world.rank(), 0).backward();
          expect(bias.grad().to_vector<float>() == own.head.bias.object().grad().to_vector<float>(),
                 "it has not this rank's own gradient");
          if (way < 6) {
            const Gradients whole = whole_gradients(*sharded, world.group());
            const auto list = by_hand.parameters();
            for (std::size_t i = 0; i < list.size(); ++i)
              if (list[i] == by_hand.blocks[1].in.weight.object())
                expect(whole[i] == average[i], "another parameter's average");
          }
          bias.local().detach().mutable_data<float>()[0] += 1;  // the program's step
          expect(sharded->blocks[1].out.bias.tensor().to_vector<float>() == bias.local().to_vector<float>(),
                 "a step of it is not seen under the other name");
        }
        const nn::StateDict full = shard::full_state_dict(net);
        const auto saved =
            std::ranges::find_if(full, [](const auto& e) { return e.first == "blocks.1.out.bias"; });
        expect(saved != full.end() &&
                   saved->second.to_vector<float>() == net.head.bias.object().local().to_vector<float>(),
               "it is not in the state");
      }));
    }
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Net net({.tied = Tied::across_groups});
    for (Block& block : net.blocks) shard::fully_shard(block, {});
    const std::string message =
        message_of<ValueError>([&] { shard::fully_shard(net, {.ignored_modules = {&net.head}}); });
    expect(message.find("'blocks.1.out.bias' is sharded already") != std::string::npos, "{}", message);
  }));
}

TEST_CASE("ignored modules become no units, and do not count for their size") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    const auto labels = [](shard::AutoWrap rule, auto ignored) {
      Net net;
      const shard::FullyShardedDataParallel handle(
          net, {.auto_wrap = std::move(rule), .ignored_modules = ignored(net)});
      std::string all;
      for (const shard::GroupReport& report : shard::groups_of(net)) all += report.label + "|";
      return all;
    };
    using Modules = std::vector<const nn::Module*>;
    const auto block = [](Net& net) { return Modules{&net.blocks[1]}; };
    const auto within = [](Net& net) { return Modules{&net.blocks[1].in}; };
    expect(labels(shard::wrap_classes({"Block"}), block) == "|blocks.0|blocks.2|", "a block");
    expect(labels(shard::wrap_classes({"Linear"}), block) ==
               "|embed|blocks.0.in|blocks.0.out|blocks.2.in|blocks.2.out|head|",
           "within a block");
    expect(labels(shard::wrap_by_size(600), within) == "|blocks.0|blocks.2|", "by size");
  }));
}

TEST_CASE("buffers of ignored modules are not cast, those of others as their unit says") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    CHECK_NOTHROW(run_ranks(2, [layout](World& world) {
      Normed m;
      shard::fully_shard(m.b, {.layout = layout});
      shard::fully_shard(
          m, {.layout = layout, .mixed_precision = {.buffer_dtype = bf16}, .ignored_modules = {&m.c}});
      m(batch_of(world.rank(), 0, 4).x);
      expect(m.a.running_mean.tensor().dtype() == bf16, "the root's");
      expect(m.b.running_mean.tensor().dtype() == f32, "an inner unit's");
      expect(m.c.running_mean.tensor().dtype() == f32, "an ignored one's");
      expect(m.c.weight.object().owner() == nullptr, "ignored");
    }));
}

TEST_CASE("what is sharded cannot be ignored, nor the module itself") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Net net;
    shard::fully_shard(net.blocks[0], {});
    const std::vector<std::pair<shard::Options, std::string>> wrong = {
        {{.ignored_modules = {&net}}, "the one that is sharded"},
        {{.ignored_modules = {&net.blocks[0]}}, "'blocks.0' (Block) is sharded already"},
        {{.ignored_parameters = {net.blocks[0].in.weight.object()}},
         "'blocks.0.in.weight' is sharded already"}};
    for (const auto& [options, text] : wrong) {
      const std::string message = message_of<ValueError>([&] { shard::fully_shard(net, options); });
      expect(message.find(text) != std::string::npos, "{}", message);
    }
    shard::fully_shard(net, {});
  }));
}
