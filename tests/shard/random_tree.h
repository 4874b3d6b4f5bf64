// Random trees of modules that are used at random, and shapes that are easily forgotten in them.
#pragma once

#include <sherd.h>

#include "autograd/autograd.h"
#include "tests/shard/random.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace sherd::test {

constexpr std::int64_t tree_width = 5;

/// What happens at one node of a forward, on all ranks at the same one: nodes run on all or on none.
struct TreeEvent {
  int at = 0;
  std::function<Tensor(const Tensor&)> act;
  int left = 0;
  Tensor pass(const Tensor& y);
};

/// Adds tanh(own(x)) to x, hands that to its children, in an order and as often as the plan says, and adds it
/// once more.
struct TreeNode final : nn::Layer<TreeNode> {
  nn::Linear own;
  nn::Param scale;  // of two rows
  nn::Param odd;    // of any shape, also without elements or dimensions
  nn::ModuleList<TreeNode> children;
  // The plan of the next forward.
  bool uses_own = true, again = false;
  bool blind = false;  // one child's runs record nothing
  bool alike = false;  // used on all ranks or on none
  bool sees = false;   // nothing is blind: a gradient comes to every node on all ranks
  std::vector<std::size_t> order;
  TreeEvent* event = nullptr;

  TreeNode(nn::Bias bias, const Shape& odd_shape)
      : own(tree_width, tree_width, {bias}),
        scale(rand({2}, {}, 0.5, 1.5)),
        odd(rand(odd_shape, {}, 0, 0.1)) {}
  Tensor forward(const Tensor& x);
  void visit(auto&& on) {
    on("own", own);
    on("scale", scale);
    on("odd", odd);
    on("children", children);
  }
};

/// Whether parameters without dimensions may be in a tree: the per-parameter layout cuts along one.
enum class Scalars : std::uint8_t { no, yes };

TreeNode random_tree(Random& random, Scalars scalars);
/// The root, and all nodes below.
std::vector<TreeNode*> nodes_of(TreeNode& root);
/// Ties the weights of nodes to those of nodes anywhere else.
void tie_some(TreeNode& root, Random& random);

/// A forward of a rank as `seed` plans it.
Tensor output_of(TreeNode& tree, std::uint64_t seed, int rank);
Tensor loss_of(TreeNode& tree, std::uint64_t seed, int rank, int forwards);

}  // namespace sherd::test
