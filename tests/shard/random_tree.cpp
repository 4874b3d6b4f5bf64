#include "tests/shard/random_tree.h"

namespace sherd::test {
namespace {

Shape odd_shape(Random& random, Scalars scalars) {
  const Shape shapes[] = {{0}, {1}, {0, 3}, {1, 7}, {3, 2}, {2, 0, 2}, {}};
  return shapes[below(random, scalars == Scalars::yes ? 7 : 6)];
}

void grow(TreeNode& node, Random& random, Scalars scalars, int depth) {
  const int children = depth == 0 ? 0 : 1 + below(random, 3);
  for (int i = 0; i < children; ++i)
    grow(node.children.emplace_back(once_in(random, 3) ? nn::Bias::no : nn::Bias::yes,
                                    odd_shape(random, scalars)),
         random, scalars, below(random, depth));
}

/// Which modules a forward of `rank` uses, and how. Children run on all ranks or on none; a node's own
/// parameters may be used on some, unless others share them: their group may be another one, whose module
/// does not run.
void plan(TreeNode& node, Random& random, int rank, bool outermost = true) {
  std::uint64_t users = once_in(random, 3) ? random() : ~std::uint64_t{0};
  if (node.alike) users = (users & 1) != 0 ? ~std::uint64_t{0} : 0;
  node.uses_own = outermost || (users >> rank & 1) != 0;
  node.again = once_in(random, 4);
  node.blind = once_in(random, 8) && !node.sees;
  node.order.clear();
  const int runs = node.children.size() == 0 ? 0 : below(random, static_cast<int>(node.children.size()) + 2);
  for (int i = 0; i < runs; ++i)
    node.order.push_back(static_cast<std::size_t>(below(random, static_cast<int>(node.children.size()))));
  for (TreeNode& child : node.children) {
    child.alike = node.alike;
    child.sees = node.sees;
    child.event = node.event;
    plan(child, random, rank, false);
  }
}

}  // namespace

Tensor TreeEvent::pass(const Tensor& y) {
  if (!Context::current().grad_enabled() || left-- != 0) return y;
  // A rank that used no parameter so far goes on with a history all the same.
  return act(y.requires_grad() ? y : add(y, zeros({tree_width}, {f32, y.device()}).requires_grad_()));
}

Tensor TreeNode::forward(const Tensor& x) {
  const Tensor mine = uses_own ? mul(mul(tanh(own(x)), sum(scale)), add(sum(odd), 1.0)) : Tensor{};
  Tensor y = mine.defined() ? add(x, mine) : x;
  if (event != nullptr) y = event->pass(y);
  for (const std::size_t child : order) {
    const GradMode mode(!(blind && child == order[0]) && Context::current().grad_enabled());
    const auto region = [&] { return children[child](y); };
    y = again ? recompute(region) : region();
  }
  return mine.defined() ? add(y, mine) : y;
}

TreeNode random_tree(Random& random, Scalars scalars) {
  TreeNode root(nn::Bias::yes, odd_shape(random, scalars));
  grow(root, random, scalars, 3);
  return root;
}

std::vector<TreeNode*> nodes_of(TreeNode& root) {
  std::vector<TreeNode*> nodes;
  for (const nn::NamedModule& m : root.named_modules())
    if (auto* node = dynamic_cast<TreeNode*>(m.module)) nodes.push_back(node);
  return nodes;
}

void tie_some(TreeNode& root, Random& random) {
  const std::vector<TreeNode*> nodes = nodes_of(root);
  const auto any = [&]() -> TreeNode& { return *nodes[random() % nodes.size()]; };
  for (int i = 0; i < 2; ++i) nn::tie(any().own.weight, any().own.weight);
  root.alike = true;
}

Tensor output_of(TreeNode& tree, std::uint64_t seed, int rank) {
  Random random(seed);
  plan(tree, random, rank);
  if (tree.event != nullptr) tree.event->left = tree.event->at;
  manual_seed(seed + static_cast<std::uint64_t>(rank));
  return tree(randn({3, tree_width}));
}

Tensor loss_of(TreeNode& tree, std::uint64_t seed, int rank, int forwards) {
  Tensor loss = mean(square(output_of(tree, seed, rank)));
  for (int i = 1; i < forwards; ++i) loss = add(loss, mean(square(output_of(tree, seed + 1000, rank))));
  return loss;
}

}  // namespace sherd::test
