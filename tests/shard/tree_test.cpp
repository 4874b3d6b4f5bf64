// Random trees of modules, cut into random groups, used at random: gradients and weights are those of one
// unsharded model with gradients averaged by hand.
#include <random>

#include "autograd/autograd.h"
#include "collectives/differentiable.h"
#include "shard/build.h"
#include "shard/fully_shard.h"
#include "shard/group.h"
#include "shard/step_in_backward.h"
#include "shard/summon.h"
#include "tests/catch.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"
#include "tests/seeds.h"
#include "tests/shard/averaging.h"
#include "tests/shard/random_tree.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

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
  bool zeroes_one;        ///< one optimizer leaves zeros, the other no gradients
  Unaveraged unaveraged;  ///< what the unsynchronised ones leave
  int unshards;           ///< modules, at each of several moments
  bool in_backward;       ///< optimizers step there
  enum class Change { none, cast, clone, load, move } change;  ///< before it, to what it was
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
          .zeroes_one = once_in(random, 3),
          .unaveraged = once_in(random, 2) ? Unaveraged::over_shards : Unaveraged::own,
          .unshards = below(random, 4),
          .in_backward = once_in(random, 3),
          .change = once_in(random, 3) ? static_cast<Step::Change>(below(random, 5)) : Step::Change::none};
}

/// What is the same for all groups of a tree.
struct Common {
  shard::GroupLayout layout;
  std::optional<Device> compute_device{};
  std::vector<DeviceMesh> meshes{};  ///< to draw from
  bool mixes_layouts = false;        ///< a flat tree has groups in the other one too
  std::vector<nn::Parameter> ignored_parameters{};
  std::vector<const nn::Module*> ignored_modules{};
  std::set<std::string> ignored{};  ///< the names of all that is ignored
};

/// Every other parameter, at random, and what is ignored, which nobody averages; the root's own stay trained.
void freeze(TreeNode& tree, const Step& step, const std::set<std::string>& ignored) {
  Random random(step.seed);
  tree.set_requires_grad(true);
  for (nn::NamedParameter& p : tree.named_parameters()) {
    const bool odd =
        p.name.ends_with("odd");  // without elements it would be trained, and nobody could see it
    const bool frozen = step.freezes && once_in(random, 2) && !p.name.starts_with("own") && !odd;
    if (frozen || ignored.contains(p.name)) p.parameter.set_requires_grad(false);
  }
  for (TreeNode* node : nodes_of(tree))
    if (!node->scale.object().requires_grad()) nn::Parameter(node->odd.object()).set_requires_grad(false);
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
bool fail(TreeNode& tree, const nn::Linear& other, const Step& step, World& world,
          const std::vector<DeviceMesh>& meshes) {
  const bool culprit = world.rank() == world.size() - 1;
  TreeEvent event{.at = step.at, .act = [&](const Tensor& y) {
                    if (step.trouble == Step::Trouble::one_rank && !culprit) return y;
                    if (step.trouble == Step::Trouble::one_rank && step.frees) throw Boom();
                    register_hook(y, [&](const Tensor&) -> Tensor {
                      if (step.trouble != Step::Trouble::nested) throw Boom();
                      const GradMode on(true);
                      sum(other(ones({1, tree_width}))).backward();
                      return {};
                    }).keep();
                    return y;
                  }};
  tree.event = &event;
  const auto renew = [&] {
    for (const DeviceMesh& mesh : meshes) mesh.renew();
    world.group().renew();
  };
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
    if (thrown) renew();  // of other graphs each rank had posted another part of the plan
    return !thrown;
  }
  try {
    attempt();
    if (culprit) world.group().barrier({.label = "not theirs"});
    for (;;) attempt();
  } catch (const CollectiveError&) {
  }
  tree.event = nullptr;
  renew();
  return true;
}

/// Parts of some ranks; the model by hand takes over what comes out.
void write_parts(TreeNode& tree, TreeNode& by_hand, const Step& step) {
  const NoGrad guard;
  for (const nn::Parameter& p : tree.parameters()) {
    const Group* ranks = shard::shard_group_of(p);  // replicas stay alike
    const bool writes = ranks == nullptr || (step.writers < 0 ? ranks->rank() == ranks->size() - 1
                                                              : ranks->rank() < step.writers);
    if (writes) mul_(p.local(), 0.75);
  }
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
bool replace_one(TreeNode& tree, TreeNode& by_hand, const Step& step) {
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
void summon(TreeNode& tree, TreeNode& by_hand, const Step& step) {
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

/// Gathers and frees some modules, as `salt` says.
void unshard_some(TreeNode& tree, const Step& step, std::uint64_t salt) {
  Random random(step.seed + salt);
  std::vector<TreeNode*> nodes = nodes_of(tree);
  std::erase_if(nodes, [](const TreeNode* node) { return !shard::is_sharded(*node); });
  for (int i = 0; i < step.unshards; ++i) {
    TreeNode& node = *nodes[random() % nodes.size()];
    switch (below(random, 4)) {
      case 0:
        shard::unshard(node);
        break;
      case 1:
        shard::unshard_async(node);
        break;
      case 2:
        shard::reshard(node);
        break;
      default:
        break;
    }
  }
}

void run_sharded(TreeNode& tree, const Step& step, const Optimizers& optimizers, int rank) {
  if (!step.keeps_gradients) optimizers.zero_grad(step.zeroes_one);
  unshard_some(tree, step, 31);
  if (step.looks_first) {
    const NoGrad guard;
    output_of(tree, step.seed + 1, rank);
  }
  if (step.abandons) output_of(tree, step.seed + 2, rank);
  const auto look = [&] {
    if (step.summons != Step::Summons::never) const auto scope = shard::summon_full_params(tree);
  };
  look();
  unshard_some(tree, step, 32);
  for (int i = 0; i < step.unsynchronised; ++i) {
    const bool own = step.unaveraged == Unaveraged::own;
    std::optional<shard::NoSync> guard;
    if (own) guard.emplace(tree);
    shard::set_requires_all_reduce(tree, own);
    loss_of(tree, step.seed + 10 + static_cast<std::uint64_t>(i), rank, 1).backward();
    shard::set_requires_all_reduce(tree, true);
    unshard_some(tree, step, 33 + static_cast<std::uint64_t>(i));
  }
  look();
  const Tensor loss = loss_of(tree, step.seed, rank, step.forwards);
  look();
  unshard_some(tree, step, 40);
  std::vector<std::unique_ptr<shard::StepInBackward>> scopes;
  if (step.in_backward)
    for (nn::Optimizer* o : {optimizers.first.get(), optimizers.second.get()})
      scopes.push_back(std::make_unique<shard::StepInBackward>(*o));
  loss.backward();
  unshard_some(tree, step, 41);
}

void run_by_hand(TreeNode& tree, TreeNode& sharded, const Step& step, const Optimizers& optimizers,
                 int ranks) {
  if (!step.keeps_gradients) optimizers.zero_grad(step.zeroes_one);
  const Gradients before = gradients(tree);
  std::vector<std::vector<Gradients>> brought(static_cast<std::size_t>(step.unsynchronised) + 1);
  for (std::size_t b = 0; b < brought.size(); ++b)
    for (int rank = 0; rank < ranks; ++rank) {
      tree.zero_grad();
      const bool last = b + 1 == brought.size();
      loss_of(tree, last ? step.seed : step.seed + 10 + b, rank, last ? step.forwards : 1).backward();
      brought[b].push_back(gradients(tree));
    }
  set_gradients(tree, with_averages(before, brought, step.unaveraged, sharded));
}

/// To something else and back; what is lost with it, in both trees.
void change(TreeNode& tree, TreeNode& by_hand, const Step& step, Optimizers& optimizers,
            Optimizers& reference) {
  switch (step.change) {
    case Step::Change::none:
      break;
    case Step::Change::cast:
      tree.to(f64);
      tree.to(f32);
      break;
    case Step::Change::clone: {
      TreeNode copy = tree.clone();
      tree = std::move(copy);
      by_hand.zero_grad();
      optimizers = Optimizers(tree), reference = Optimizers(by_hand);
      break;
    }
    case Step::Change::load: {
      const nn::StateDict model = shard::full_state_dict(tree),
                          first = shard::full_optimizer_state(tree, *optimizers.first),
                          second = shard::full_optimizer_state(tree, *optimizers.second);
      optimizers = Optimizers(tree);
      const NoGrad guard;
      for (const nn::Parameter& p : tree.parameters()) mul_(p.local(), 0.5);
      shard::load_full_state_dict(tree, model);
      shard::load_full_optimizer_state(tree, *optimizers.first, first);
      shard::load_full_optimizer_state(tree, *optimizers.second, second);
      break;
    }
    case Step::Change::move:
      tree.to(Device::cpu(1));
      tree.to(Device::cpu(0));
      break;
  }
}

shard::Options draw_options(Random& random, const Common& common) {
  constexpr shard::ShardingStrategy strategies[] = {
      shard::ShardingStrategy::full_shard, shard::ShardingStrategy::full_shard,
      shard::ShardingStrategy::shard_grad_op, shard::ShardingStrategy::zero1,
      shard::ShardingStrategy::no_shard};
  const shard::ReshardAfterForward reshard[] = {true, false, 2};
  const DeviceMesh& mesh = common.meshes[random() % common.meshes.size()];
  const bool other_layout = common.mixes_layouts && once_in(random, 2);
  return {.mesh = mesh,
          .layout = other_layout ? shard::GroupLayout::per_parameter : common.layout,
          .strategy = strategies[below(random, 5)],
          .reshard_after_forward = reshard[below(random, mesh.sizes().back() % 2 == 0 ? 3 : 2)],
          .compute_device = common.compute_device,
          .forward_prefetch = below(random, 4),
          .backward_prefetch = once_in(random, 3) ? shard::BackwardPrefetch::post(below(random, 4))
                                                  : shard::BackwardPrefetch::pre(below(random, 4)),
          .ignored_parameters = common.ignored_parameters,
          .ignored_modules = common.ignored_modules};
}

void shard_below(TreeNode& node, Random& random, const Common& common) {
  for (TreeNode& child : node.children) {
    if (std::ranges::find(common.ignored_modules, &child) != common.ignored_modules.end()) continue;
    shard_below(child, random, common);
    const shard::Options options = draw_options(random, common);
    if (once_in(random, 2)) shard::fully_shard(child, options);
  }
}

/// The world as shards alone, as shards with replicas, or both beside each other.
std::vector<DeviceMesh> draw_meshes(Random& random, World& world) {
  std::vector<DeviceMesh> meshes;
  if (!once_in(random, 3)) meshes.push_back(world.mesh());
  if (!meshes.empty() && once_in(random, 2)) return meshes;
  for (int replicas = 1; replicas <= world.size(); ++replicas)
    if (world.size() % replicas == 0 && once_in(random, 2))
      meshes.push_back(world.mesh({replicas, world.size() / replicas}, {"replicas", "shards"}));
  if (meshes.empty()) meshes.push_back(world.mesh());
  return meshes;
}

void ignore_some(TreeNode& tree, Random& random, Common& common) {
  for (TreeNode* node : nodes_of(tree)) {
    if (once_in(random, 4)) common.ignored_parameters.push_back(node->odd.object());
    if (once_in(random, 6)) common.ignored_parameters.push_back(node->own.weight.object());
    if (node != &tree && once_in(random, 6)) common.ignored_modules.push_back(node);
  }
}

/// What a program may say of sharded modules before they train.
void draw_switches(TreeNode& tree, Random& random) {
  std::vector<TreeNode*> nodes = nodes_of(tree);
  std::erase_if(nodes, [](const TreeNode* node) { return !shard::is_sharded(*node); });
  const auto some = [&] {
    std::vector<nn::Module*> list;
    for (int i = below(random, 4); i > 0; --i) list.push_back(nodes[random() % nodes.size()]);
    return list;
  };
  for (TreeNode* node : nodes) {
    const double factors[] = {1, 2, 3, 0.5, 7};
    if (once_in(random, 3)) shard::set_gradient_divide_factor(*node, factors[below(random, 5)]);
    if (once_in(random, 4)) shard::set_modules_to_forward_prefetch(*node, some());
    if (once_in(random, 4)) shard::set_modules_to_backward_prefetch(*node, some());
  }
}

/// What does not go together with what was drawn is left out.
Step draw(Random& random, const Common& common) {
  Step step = draw(random);
  const bool offloaded = common.compute_device.has_value();
  step.sums = common.layout == shard::GroupLayout::per_parameter || !offloaded;
  if (!step.sums) {
    step.keeps_gradients = step.zeroes_one = false;
    step.unaveraged = Unaveraged::own;
  }
  if (offloaded && step.change == Step::Change::move) step.change = Step::Change::none;
  // Steps within a backward are those of what it averages, and all gradients must be of this one.
  step.in_backward = step.in_backward && step.optimizes && !step.keeps_gradients && !step.zeroes_one &&
                     common.ignored.empty() &&
                     (step.unsynchronised == 0 || step.unaveraged == Unaveraged::own);
  return step;
}

void play(World& world, std::uint64_t seed) {
  Random random(seed);
  manual_seed(seed);
  const auto layout = once_in(random, 2) ? shard::GroupLayout::flat : shard::GroupLayout::per_parameter;
  const bool flat = layout == shard::GroupLayout::flat;
  const Scalars scalars = flat && once_in(random, 2) ? Scalars::yes : Scalars::no;
  TreeNode by_hand = random_tree(random, scalars);
  if (once_in(random, 3)) tie_some(by_hand, random);
  TreeNode tree = by_hand.clone();
  Common common{.layout = layout};
  if (once_in(random, 4)) common.compute_device = Device::cpu(1);
  common.meshes = draw_meshes(random, world);
  common.mixes_layouts = flat && scalars == Scalars::no && once_in(random, 3);
  if (once_in(random, 3) && !common.compute_device) ignore_some(tree, random, common);
  shard_below(tree, random, common);
  shard::fully_shard(tree, draw_options(random, common));
  for (const nn::NamedParameter& p : tree.named_parameters())
    if (p.parameter.owner() == nullptr) common.ignored.insert(p.name);
  draw_switches(tree, random);
  nn::Linear other(tree_width, tree_width);
  shard::fully_shard(other, draw_options(random, common));
  std::vector<int> ends{0};
  if (world.size() > 1) ends.push_back(world.size() - 1);
  const Group some = world.group().subgroup(ends);
  Optimizers optimizers(tree), reference(by_hand);

  for (int i = 0; i < 6; ++i) {
    const Step step = draw(random, common);
    unshard_some(tree, step, 30);
    change(tree, by_hand, step, optimizers, reference);
    if (step.replaced != Step::Replaced::nothing && replace_one(tree, by_hand, step))
      optimizers = Optimizers(tree), reference = Optimizers(by_hand);
    if (step.summons != Step::Summons::never) summon(tree, by_hand, step);
    for (TreeNode* node : {&tree, &by_hand}) freeze(*node, step, common.ignored);
    shard::set_reshard_after_backward(tree, !step.keeps_gathered);
    if (step.frees) shard::reshard(tree);
    if (step.writers != 0) write_parts(tree, by_hand, step);
    tree.sees = by_hand.sees = step.trouble != Step::Trouble::none || step.call != Step::Call::none;
    if (step.trouble != Step::Trouble::none && fail(tree, other, step, world, common.meshes))
      for (TreeNode* node : {&tree, &by_hand}) node->zero_grad();
    TreeEvent call{.at = step.at, .act = [&](const Tensor& y) { return with_call(y, step, world, some); }};
    tree.event = &call;
    run_sharded(tree, step, optimizers, world.rank());
    tree.event = nullptr;
    run_by_hand(by_hand, tree, step, reference, world.size());
    const std::string found = difference(whole_gradients(tree, world.group()), gradients(by_hand));
    expect(found.empty(), "seed {}, {} ranks, step {}: {}", seed, world.size(), i, found);
    if (!step.optimizes) continue;
    if (!step.in_backward) optimizers.step();
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
constexpr std::uint64_t last_seed = test::sanitized ? 12 : 40;
TEST_CASE("random trees, grouped and used at random, train like one model by hand", "[threads meet]") {
  play_seeds(1, last_seed);
}
TEST_CASE("many random trees, grouped and used at random, train like one model by hand", "[.soak]") {
  const auto [first, last] = test::soak_seeds({41, 5000});
  play_seeds(first, last);
}
