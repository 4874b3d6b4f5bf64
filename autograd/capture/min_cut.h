// The cheapest set of arcs that parts two nodes of a network.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace sherd {

/// A network of arcs with capacities, whole numbers from 0 on.
class MinCut {
 public:
  static constexpr std::int64_t never =
      std::numeric_limits<std::int64_t>::max() / 4;  ///< of an arc that is not cut

  explicit MinCut(std::size_t nodes) : first_(nodes, none) {}
  void add(std::size_t from, std::size_t to, std::int64_t capacity);
  /// By node, whether it is on `source`'s side of the cheapest cut, of several the one with the fewest there.
  /// Dinic's algorithm (Dinitz, Algorithm for solution of a problem of maximum flow in a network with power
  /// estimation, 1970). Once: it uses the capacities up.
  std::vector<bool> run(std::size_t source, std::size_t sink);

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0};
  struct Arc {
    std::uint32_t to, next;  // of the same node; the one back is its neighbour in the list
    std::int64_t left;
  };
  bool measure(std::size_t source, std::size_t sink);
  std::int64_t push(std::size_t source, std::size_t sink);

  std::vector<Arc> arcs_;
  std::vector<std::uint32_t> first_;  // by node
  std::vector<std::uint32_t> distance_, next_;
  std::vector<std::uint32_t> way_;  // arcs from the source to where a push is
};

}  // namespace sherd
