// The first rank's values for all ranks, when a module is sharded.
#include "collectives/observe.h"
#include "runtime/memory.h"
#include "shard/fsdp.h"
#include "tests/sanitizer.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// A net, buffers with it.
struct WithBuffers final : nn::Layer<WithBuffers> {
  Net net{{.uneven = true}};
  nn::BatchNorm1d norm{5}, left{5};
  Tensor forward(const Tensor& x) { return left(norm(net(x))); }
  void visit(auto&& on) {
    on("net", net);
    on("norm", norm);
    on("left", left);
  }
};

/// With or without `sync_module_states`.
using Shard = std::function<void(WithBuffers&, bool sync)>;

/// Other values on every rank.
void disturb(nn::Module& module, int rank) {
  const NoGrad guard;
  for (const nn::Parameter& p : module.parameters()) mul_(p.local(), 1 + rank);
  for (const nn::NamedBuffer& b : module.named_buffers()) add_(b.tensor, rank);
}

/// Every layout, both forms of the handle, and on 4 ranks replicas of shards.
template <class F>
void on_all_ways(F&& body) {
  for (const int ranks : worlds())
    for (const int way : {0, 1, 2, 3})
      for (const bool hybrid : {false, true}) {
        if (hybrid && ranks < 4) continue;
        INFO(ranks << " ranks, way " << way << ", hybrid " << hybrid);
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          const DeviceMesh mesh = hybrid ? world.mesh({2, 2}, {"replica", "shard"}) : world.mesh();
          body(world, [&](WithBuffers& m, bool sync) {
            if (way > 1) {
              const shard::FullyShardedDataParallel handle(m, {.mesh = mesh,
                                                               .auto_wrap = shard::wrap_classes({"Block"}),
                                                               .use_orig_params = way == 2,
                                                               .sync_module_states = sync,
                                                               .ignored_modules = {&m.left}});
              return;
            }
            const shard::Options options{
                .mesh = mesh,
                .layout = way == 0 ? shard::GroupLayout::per_parameter : shard::GroupLayout::flat,
                .sync_module_states = sync,
                .ignored_modules = {&m.left}};
            for (Block& block : m.net.blocks) shard::fully_shard(block, options);
            shard::fully_shard(m, options);
          });
        }));
      }
}

}  // namespace

TEST_CASE("with sync_module_states all ranks have the first one's parameters and buffers, else their own") {
  on_all_ways([](World& world, const Shard& shard) {
    for (const bool on_meta : {false, true})
      for (const bool sync : {true, false}) {
        if (on_meta && !sync) continue;
        WithBuffers m, first, own;
        disturb(m, world.rank());
        disturb(own, world.rank());
        m.left = nn::BatchNorm1d(5);
        first.left = nn::BatchNorm1d(5);
        add_(m.left.running_mean.tensor(), world.rank());
        if (on_meta && world.rank() > 0) {
          m.net.to(Device::meta());
          m.norm.to(Device::meta());
        }
        shard(m, sync);
        expect(m.left.running_mean.tensor().to_vector<float>()[0] == float(world.rank()),
               "what is ignored stays");
        if (!sync) {
          expect(m.norm.running_var.tensor().to_vector<float>() ==
                     own.norm.running_var.tensor().to_vector<float>(),
                 "a rank's own buffers");
          continue;
        }
        const NoGrad guard;
        fill_(m.left.running_mean.tensor(), 0);
        const nn::StateDict expected = first.state_dict(), whole = shard::full_state_dict(m);
        expect(whole.size() == expected.size(), "{} entries", whole.size());
        for (const auto& [name, values] : whole) {
          const auto same = std::ranges::find_if(expected, [&](const auto& e) { return e.first == name; });
          expect(to(values, f64).to_vector<double>() == to(same->second, f64).to_vector<double>(),
                 "'{}' is not the first rank's", name);
        }
        m(batch_of(world.rank(), 0, 5).x);
      }
  });
}

TEST_CASE("on meta a rank has memory for one unit's whole values at a time") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    CHECK_NOTHROW(run_ranks(4, [layout](World& world) {
      const auto held = [] {
        return Context::current().memory().held(DeviceType::cpu)[MemoryUse::parameters];
      };
      const std::int64_t before = held();
      nn::Sequential m;
      for (int i = 0; i < 8; ++i) m.append(nn::Linear(64, 64));
      const std::int64_t whole = held() - before;
      if (world.rank() > 0) m.to(Device::meta());
      std::int64_t most = 0;
      const Interception calls([&](const ObservedCall& call, const Interception::Proceed& proceed) {
        most = std::max(most, held() - before);
        proceed(call.collective);
      });
      for (std::size_t i = 0; i < m.size(); ++i)
        shard::fully_shard(m[i], {.layout = layout, .sync_module_states = true});
      shard::fully_shard(m, {.layout = layout, .sync_module_states = true});
      if (world.rank() > 0) expect(most > 0 && most < whole / 2, "{} of {} bytes at once", most, whole);
    }));
}

TEST_CASE("the first rank of a mesh needs values for sync_module_states") {
  for (const int ranks : {1, 2}) {
    const std::string message = message_of<DeviceError>([&] {
      run_ranks(ranks, [](World&) {
        nn::Linear m(4, 4);
        m.to(Device::meta());
        shard::fully_shard(m, {.sync_module_states = true});
      });
    });
    INFO(message);
    CHECK(message.find("'weight', which is on meta") != std::string::npos);
  }
}

TEST_CASE("a tensor that several buffers are is sent once, and is one tensor on ranks that were on meta") {
  CHECK_NOTHROW(run_ranks(3, [](World& world) {
    WithBuffers m;
    if (world.rank() > 0) m.to(Device::meta());
    const auto share = [&](const Tensor& t) {
      m.norm.running_mean.set(t);
      m.left.running_mean.set(t);
    };
    share(world.rank() > 0 ? to(zeros({5}), Device::meta()) : full({5}, 3.0));
    shard::fully_shard(m, {.sync_module_states = true});
    expect(m.left.running_mean.tensor().to_vector<float>() == std::vector<float>(5, 3.0F), "the values");
    expect(&m.norm.running_mean.tensor().storage() == &m.left.running_mean.tensor().storage(), "one");
  }));
}
