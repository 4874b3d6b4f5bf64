#include "tests/shard/twins.h"

namespace sherd::test {

Twins::Twins(const shard::Options& options, NetOptions net_options) : by_hand(net_options), net(net_options) {
  shard_blocks_and_rest(net, options);
}

Tensor loss_at(Net& net, int rank, int step) { return loss_of(net, batch_of(rank, step, net.width)); }

Gradients plain(Net& by_hand, World& world, int step) {
  return average_by_hand(by_hand, world.size(), [&](int rank) { loss_at(by_hand, rank, step).backward(); });
}

void expect_gradients(const nn::Module& module, World& world, const Gradients& expected, const char* when) {
  const std::string found = difference(whole_gradients(module, world.group()), expected);
  expect(found.empty(), "{}: {}", when, found);
}

void expect_values(nn::Module& net, const nn::Module& by_hand, const char* when) {
  const nn::StateDict whole = shard::full_state_dict(net), expected = by_hand.state_dict();
  expect(whole.size() == expected.size(), "{}: {} entries", when, whole.size());
  for (std::size_t p = 0; p < whole.size(); ++p) {
    const auto& [name, tensor] = whole[p];
    expect(name == expected[p].first, "{}: '{}' is not '{}'", when, name, expected[p].first);
    expect(tensor.dtype() == expected[p].second.dtype(), "{}: '{}' has another dtype", when, name);
    expect(to(tensor, f64).to_vector<double>() == to(expected[p].second, f64).to_vector<double>(),
           "{}: '{}' differs", when, name);
  }
}

void step_both(Twins& twins, nn::Optimizer& of_net, nn::Optimizer& of_by_hand, World& world, int step) {
  of_net.zero_grad();
  loss_at(twins.net, world.rank(), step).backward();
  set_gradients(twins.by_hand, plain(twins.by_hand, world, step));
  of_net.step();
  of_by_hand.step();
}

}  // namespace sherd::test
