// Random trees of modules, cut into random groups, used at random: gradients and weights are those of one
// unsharded model with gradients averaged by hand.
#include <random>

#include "autograd/autograd.h"
#include "collectives/differentiable.h"
#include "shard/build.h"
#include "shard/fully_shard.h"
#include "shard/group.h"
#include "shard/summon.h"
#include "tests/catch.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"
#include "tests/shard/random.h"
#include "tests/shard/whole.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr std::int64_t width = 5;

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

/// What happens at one node of a forward, on all ranks at the same one: nodes run on all or on none.
struct Event {
  int at = 0;
  std::function<Tensor(const Tensor&)> act;
  int left = 0;
  Tensor pass(const Tensor& y) {
    if (!Context::current().grad_enabled() || left-- != 0) return y;
    // A rank that used no parameter so far goes on with a history all the same.
    return act(y.requires_grad() ? y : add(y, zeros({width}, {f32, y.device()}).requires_grad_()));
  }
};

/// Adds tanh(own(x)) to x, hands that to its children, in an order and as often as the plan says, and adds it
/// once more.
struct Node final : nn::Layer<Node> {
  nn::Linear own;
  nn::Param scale;  // of two rows
  nn::ModuleList<Node> children;
  // The plan of the next forward.
  bool uses_own = true, again = false;
  bool blind = false;  // one child's runs record nothing
  bool alike = false;  // used on all ranks or on none
  bool sees = false;   // nothing is blind: a gradient comes to every node on all ranks
  std::vector<std::size_t> order;
  Event* event = nullptr;

  explicit Node(nn::Bias bias) : own(width, width, {bias}), scale(rand({2}, {}, 0.5, 1.5)) {}
  Tensor forward(const Tensor& x) {
    const Tensor mine = uses_own ? mul(tanh(own(x)), sum(scale)) : Tensor{};
    Tensor y = mine.defined() ? add(x, mine) : x;
    if (event != nullptr) y = event->pass(y);
    for (const std::size_t child : order) {
      const GradMode mode(!(blind && child == order[0]) && Context::current().grad_enabled());
      const auto region = [&] { return children[child](y); };
      y = again ? recompute(region) : region();
    }
    return mine.defined() ? add(y, mine) : y;
  }
  void visit(auto&& on) {
    on("own", own);
    on("scale", scale);
    on("children", children);
  }
};

void grow(Node& node, Random& random, int depth) {
  const int children = depth == 0 ? 0 : 1 + below(random, 3);
  for (int i = 0; i < children; ++i)
    grow(node.children.emplace_back(once_in(random, 3) ? nn::Bias::no : nn::Bias::yes), random,
         below(random, depth));
}

/// Ties the weights of nodes to those of nodes anywhere else.
void tie_some(Node& root, Random& random) {
  std::vector<Node*> nodes;
  for (const nn::NamedModule& m : root.named_modules())
    if (auto* node = dynamic_cast<Node*>(m.module)) nodes.push_back(node);
  const auto any = [&]() -> Node& { return *nodes[random() % nodes.size()]; };
  for (int i = 0; i < 2; ++i) nn::tie(any().own.weight, any().own.weight);
  root.alike = true;
}

/// Which modules a forward of `rank` uses, and how. Children run on all ranks or on none; a node's own
/// parameters may be used on some, unless others share them: their group may be another one, whose module
/// does not run.
void plan(Node& node, Random& random, int rank, bool outermost = true) {
  std::uint64_t users = once_in(random, 3) ? random() : ~std::uint64_t{0};
  if (node.alike) users = (users & 1) != 0 ? ~std::uint64_t{0} : 0;
  node.uses_own = outermost || (users >> rank & 1) != 0;
  node.again = once_in(random, 4);
  node.blind = once_in(random, 8) && !node.sees;
  node.order.clear();
  const int runs = node.children.size() == 0 ? 0 : below(random, static_cast<int>(node.children.size()) + 2);
  for (int i = 0; i < runs; ++i)
    node.order.push_back(static_cast<std::size_t>(below(random, static_cast<int>(node.children.size()))));
  for (Node& child : node.children) {
    child.alike = node.alike;
    child.sees = node.sees;
    child.event = node.event;
    plan(child, random, rank, false);
  }
}

Tensor output_of(Node& tree, std::uint64_t seed, int rank) {
  Random random(seed);
  plan(tree, random, rank);
  if (tree.event != nullptr) tree.event->left = tree.event->at;
  manual_seed(seed + static_cast<std::uint64_t>(rank));
  return tree(randn({3, width}));
}

Tensor loss_of(Node& tree, std::uint64_t seed, int rank, int forwards) {
  Tensor loss = mean(square(output_of(tree, seed, rank)));
  for (int i = 1; i < forwards; ++i) loss = add(loss, mean(square(output_of(tree, seed + 1000, rank))));
  return loss;
}

/// What happens between two optimizer steps; the same on every rank.
struct Step {
  std::uint64_t seed;
  bool sums = true;  ///< averages that are not cleared add up
  bool keeps_gradients, looks_first, abandons, optimizes, freezes;
  int unsynchronised, forwards;
  bool keeps_gathered;  ///< after backward
  bool frees;           ///< before it begins
  int writers;          ///< ranks from 0 on that write their parts; -1: the last alone
  /// What goes wrong before it: nothing, a hook throws, a hook starts a backward, one rank throws.
  enum class Trouble { none, hook, nested, one_rank } trouble;
  enum class Call { none, enter, sum, some_ranks } call;               ///< in the graph
  int at;                                                              ///< node at which that happens
  int slow;                                                            ///< rank
  enum class Replaced { nothing, object, values, gradient } replaced;  ///< one parameter's, before it
  enum class Summons { never, to_look, to_write } summons;
  bool zeroes_one;  ///< one optimizer leaves zeros, the other no gradients
};

Step draw(Random& random) {
  return {.seed = random(),
          .keeps_gradients = once_in(random, 4),
          .looks_first = once_in(random, 4),
          .abandons = once_in(random, 4),
          .optimizes = !once_in(random, 4),
          .freezes = once_in(random, 3),
          .unsynchronised = once_in(random, 3) ? 1 + below(random, 2) : 0,
          .forwards = 1 + below(random, 2),
          .keeps_gathered = once_in(random, 3),
          .frees = once_in(random, 4),
          .writers = once_in(random, 3) ? below(random, 4) - 1 : 0,
          .trouble = once_in(random, 2) ? static_cast<Step::Trouble>(below(random, 4)) : Step::Trouble::none,
          .call = once_in(random, 2) ? static_cast<Step::Call>(below(random, 4)) : Step::Call::none,
          .at = below(random, 5),
          .slow = once_in(random, 4) ? below(random, 4) : -1,
          .replaced =
              once_in(random, 2) ? static_cast<Step::Replaced>(below(random, 4)) : Step::Replaced::nothing,
          .summons = once_in(random, 3) ? static_cast<Step::Summons>(below(random, 3)) : Step::Summons::never,
          .zeroes_one = once_in(random, 3)};
}

/// Every other parameter, at random; the root's own stay trained.
void freeze(Node& tree, const Step& step) {
  Random random(step.seed);
  tree.set_requires_grad(true);
  if (!step.freezes) return;
  for (nn::NamedParameter& p : tree.named_parameters())
    if (once_in(random, 2) && !p.name.starts_with("own")) p.parameter.set_requires_grad(false);
}

/// Its summand is zeros, so the numbers are those of a model that makes no call.
Tensor with_call(const Tensor& y, const Step& step, const World& world, const Group& some) {
  const auto called = [&] {
    if (step.call == Step::Call::enter) return tanh(enter_parallel(world.group(), y));
    if (step.call == Step::Call::sum) return tanh(sum_partials(world.group(), y));
    return some.defined() ? sum_partials(some, enter_parallel(some, y)) : y;
  };
  if (world.rank() == step.slow)
    for (int i = 0; i < 300; ++i) sum(y.detach());
  return step.call == Step::Call::none ? y : add(y, mul(called(), 0.0));
}

/// Backwards that fail, and leave all as it was but, after a rank's fault, gradients. Says whether gradients
/// are to be dropped.
bool fail(Node& tree, const nn::Linear& other, const Step& step, World& world) {
  const bool culprit = world.rank() == world.size() - 1;
  Event event{.at = step.at, .act = [&](const Tensor& y) {
                if (step.trouble == Step::Trouble::one_rank && !culprit) return y;
                if (step.trouble == Step::Trouble::one_rank && step.frees) throw Boom();
                register_hook(y, [&](const Tensor&) -> Tensor {
                  if (step.trouble != Step::Trouble::nested) throw Boom();
                  const GradMode on(true);
                  sum(other(ones({1, width}))).backward();
                  return {};
                }).keep();
                return y;
              }};
  tree.event = &event;
  bool thrown = false;
  const auto attempt = [&] {
    if (!step.sums) tree.zero_grad();
    try {
      loss_of(tree, step.seed + 20, world.rank(), 1).backward();
    } catch (const Boom&) {
      thrown = true;
    } catch (const StateError& error) {
      thrown = std::string_view(error.what()).find("within another backward") != std::string_view::npos;
      if (!thrown) throw;
    }
  };
  if (step.trouble != Step::Trouble::one_rank) {
    try {
      attempt();
      world.group().barrier();          // a renewal voids calls that others still wait for
    } catch (const CollectiveError&) {  // one that threw before this one came to it is there, or renews
      thrown = true;
    }
    tree.event = nullptr;
    if (thrown) world.group().renew();  // of other graphs each rank had posted another part of the plan
    return !thrown;
  }
  try {
    attempt();
    if (culprit) world.group().barrier({.label = "not theirs"});
    for (;;) attempt();
  } catch (const CollectiveError&) {
  }
  tree.event = nullptr;
  world.group().renew();
  return true;
}

/// Parts of some ranks; the model by hand takes over what comes out.
void write_parts(Node& tree, Node& by_hand, const Step& step, const World& world) {
  const NoGrad guard;
  const bool writes = step.writers < 0 ? world.rank() == world.size() - 1 : world.rank() < step.writers;
  for (const nn::Parameter& p : tree.parameters())
    if (writes || shard::shard_group_of(p) == nullptr) mul_(p.local(), 0.75);  // replicas stay alike
  by_hand.load_state_dict(shard::full_state_dict(tree));
}

/// The parameters of a tree, every other one with an optimizer of its own.
struct Optimizers {
  std::unique_ptr<nn::Adam> first, second;
  explicit Optimizers(const nn::Module& tree) {
    std::vector<nn::Parameter> lists[2];
    for (const nn::Parameter& p : tree.parameters())
      lists[(lists[0].size() + lists[1].size()) % 2].push_back(p);
    const nn::AdamOptions options{.lr = 0.02, .weight_decay = 0.1};
    first = std::make_unique<nn::Adam>(std::move(lists[0]), options);
    second = std::make_unique<nn::Adam>(std::move(lists[1]), options);
  }
  void step() const {
    first->step();
    second->step();
  }
  void zero_grad(bool zeroes_one) const {
    first->zero_grad();
    second->zero_grad(zeroes_one ? nn::ZeroGrad::to_zero : nn::ZeroGrad::to_none);
  }
};

/// Puts something else in the place of one parameter or its gradient, in both trees. Returns whether it is
/// another object.
bool replace_one(Node& tree, Node& by_hand, const Step& step) {
  const auto members = shard::find_members(tree).parameters, others = shard::find_members(by_hand).parameters;
  Random random(step.seed + 7);
  const std::size_t i = random() % members.size();
  nn::Param &member = *members[i].member, &other = *others[i].member;
  shard::reshard(tree);  // a forward without a backward kept wholes for one, which are not replaced
  manual_seed(step.seed);
  const Tensor whole = randn(other.shape());
  const Tensor part = shard::part_of(member.object(), whole);
  switch (step.replaced) {
    case Step::Replaced::nothing:
      return false;
    case Step::Replaced::values:
      member.set_data(part);
      other.set_data(whole);
      return false;
    case Step::Replaced::gradient: {
      const bool none = once_in(random, 2);
      member.set_grad(none ? Tensor{} : part);
      other.set_grad(none ? Tensor{} : whole);
      return false;
    }
    case Step::Replaced::object:
      break;
  }
  if (members[i].slots.size() > 1) return false;  // tied: all of them or none
  member = nn::Parameter(part);
  other = nn::Parameter(whole);
  return true;
}

/// Looks at whole values, and may write them.
void summon(Node& tree, Node& by_hand, const Step& step) {
  const bool grads = (step.seed & 1) != 0;
  const auto scope = shard::summon_full_params(tree, {.with_grads = grads});
  const std::vector<nn::Parameter> seen = tree.parameters(), expected = by_hand.parameters();
  const NoGrad guard;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    expect(seen[i].data().to_vector<float>() == expected[i].data().to_vector<float>(), "summoned {}", i);
    expect(!grads || !seen[i].grad().defined() || seen[i].grad().shape() == seen[i].shape(), "gradient {}",
           i);
    if (step.summons != Step::Summons::to_write) continue;
    for (const nn::Parameter& p : {seen[i], expected[i]}) mul_(p.data(), 0.875);
  }
}

void run_sharded(Node& tree, const Step& step, const Optimizers& optimizers, int rank) {
  if (!step.keeps_gradients) optimizers.zero_grad(step.zeroes_one);
  if (step.looks_first) {
    const NoGrad guard;
    output_of(tree, step.seed + 1, rank);
  }
  if (step.abandons) output_of(tree, step.seed + 2, rank);
  const auto look = [&] {
    if (step.summons != Step::Summons::never) const auto scope = shard::summon_full_params(tree);
  };
  look();
  for (int i = 0; i < step.unsynchronised; ++i) {
    const auto guard = shard::no_sync(tree);
    loss_of(tree, step.seed + 10 + static_cast<std::uint64_t>(i), rank, 1).backward();
  }
  look();
  const Tensor loss = loss_of(tree, step.seed, rank, step.forwards);
  look();
  loss.backward();
}

void run_by_hand(Node& tree, Node& sharded, const Step& step, const Optimizers& optimizers, int ranks) {
  if (!step.keeps_gradients) optimizers.zero_grad(step.zeroes_one);
  const Gradients before = gradients(tree);
  const Gradients by_hand = average_by_hand(tree, ranks, [&](int rank) {
    for (int i = 0; i < step.unsynchronised; ++i)
      loss_of(tree, step.seed + 10 + static_cast<std::uint64_t>(i), rank, 1).backward();
    loss_of(tree, step.seed, rank, step.forwards).backward();
  });
  const Gradients averages = as_sharded(by_hand, sharded);
  set_gradients(tree, plus(before, averages));
}

/// What is the same for all groups of a tree.
struct Common {
  shard::GroupLayout layout;
  std::optional<Device> compute_device;
};

shard::Options draw_options(Random& random, const Common& common, int ranks) {
  constexpr shard::ShardingStrategy strategies[] = {
      shard::ShardingStrategy::full_shard, shard::ShardingStrategy::full_shard,
      shard::ShardingStrategy::shard_grad_op, shard::ShardingStrategy::zero1,
      shard::ShardingStrategy::no_shard};
  const shard::ReshardAfterForward reshard[] = {true, false, 2};
  return {.layout = common.layout,
          .strategy = strategies[below(random, 5)],
          .reshard_after_forward = reshard[below(random, ranks == 4 ? 3 : 2)],
          .compute_device = common.compute_device,
          .forward_prefetch = below(random, 4),
          .backward_prefetch = below(random, 4)};
}

void shard_below(Node& node, Random& random, const Common& common, int ranks) {
  for (Node& child : node.children) {
    shard_below(child, random, common, ranks);
    const shard::Options options = draw_options(random, common, ranks);
    if (once_in(random, 2)) shard::fully_shard(child, options);
  }
}

void play(World& world, std::uint64_t seed) {
  Random random(seed);
  manual_seed(seed);
  Node by_hand(nn::Bias::yes);
  grow(by_hand, random, 3);
  if (once_in(random, 3)) tie_some(by_hand, random);
  Node tree = by_hand.clone();
  const auto layout = once_in(random, 2) ? shard::GroupLayout::flat : shard::GroupLayout::per_parameter;
  Common common{.layout = layout, .compute_device = {}};
  if (once_in(random, 4)) common.compute_device = Device::cpu(1);
  shard_below(tree, random, common, world.size());
  shard::fully_shard(tree, draw_options(random, common, world.size()));
  nn::Linear other(width, width);
  shard::fully_shard(other, draw_options(random, common, world.size()));
  std::vector<int> ends{0};
  if (world.size() > 1) ends.push_back(world.size() - 1);
  const Group some = world.group().subgroup(ends);
  Optimizers optimizers(tree), reference(by_hand);

  for (int i = 0; i < 6; ++i) {
    Step step = draw(random);
    step.sums = layout == shard::GroupLayout::per_parameter || !common.compute_device;
    if (!step.sums) step.keeps_gradients = step.zeroes_one = false;
    if (step.replaced != Step::Replaced::nothing && replace_one(tree, by_hand, step))
      optimizers = Optimizers(tree), reference = Optimizers(by_hand);
    if (step.summons != Step::Summons::never) summon(tree, by_hand, step);
    for (Node* node : {&tree, &by_hand}) freeze(*node, step);
    shard::set_reshard_after_backward(tree, !step.keeps_gathered);
    if (step.frees) shard::reshard(tree);
    if (step.writers != 0) write_parts(tree, by_hand, step, world);
    tree.sees = by_hand.sees = step.trouble != Step::Trouble::none || step.call != Step::Call::none;
    if (step.trouble != Step::Trouble::none && fail(tree, other, step, world))
      for (Node* node : {&tree, &by_hand}) node->zero_grad();
    Event call{.at = step.at, .act = [&](const Tensor& y) { return with_call(y, step, world, some); }};
    tree.event = &call;
    run_sharded(tree, step, optimizers, world.rank());
    tree.event = nullptr;
    run_by_hand(by_hand, tree, step, reference, world.size());
    const std::string found = difference(whole_gradients(tree, world.group()), gradients(by_hand));
    expect(found.empty(), "seed {}, {} ranks, step {}: {}", seed, world.size(), i, found);
    if (!step.optimizes) continue;
    optimizers.step();
    reference.step();
  }
  const nn::StateDict whole = shard::full_state_dict(tree), expected = by_hand.state_dict();
  expect(whole.size() == expected.size(), "seed {}: {} entries", seed, whole.size());
  for (std::size_t p = 0; p < whole.size(); ++p) {
    expect(whole[p].first == expected[p].first, "seed {}: '{}'", seed, whole[p].first);
    expect(whole[p].second.to_vector<float>() == expected[p].second.to_vector<float>(),
           "seed {}, {} ranks: '{}' differs", seed, world.size(), whole[p].first);
  }
}

void play_seeds(std::uint64_t first, std::uint64_t last) {
  for (std::uint64_t seed = first; seed <= last; ++seed)
    for (const int ranks : {2, 3, 4}) {
      if (ranks == 4 && seed % 3 != 0) continue;  // for slices among two
      INFO("seed " << seed << ", " << ranks << " ranks");
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { play(world, seed); }));
    }
}

}  // namespace

// The thread sanitizer takes thirty times as long, and asks only how threads meet.
constexpr std::uint64_t last_seed = test::thread_sanitizer ? 12 : 40;
TEST_CASE("random trees, grouped and used at random, train like one model by hand") {
  play_seeds(1, last_seed);
}
TEST_CASE("many random trees, grouped and used at random, train like one model by hand", "[.soak]") {
  play_seeds(41, 5000);
}
