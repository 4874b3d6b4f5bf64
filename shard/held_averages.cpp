#include "shard/held_averages.h"

#include <algorithm>

#include "autograd/node.h"

namespace sherd::shard {

void HeldAverages::put(const Tensor& leaf, bool added) {
  if (!added || count_ == 0)
    *this = HeldAverages(leaf.grad().storage().id(), record_of(leaf)->leaf->scalings);
  ++count_;
  take_version(leaf.grad());
}

void HeldAverages::look(const Tensor& leaf, const Tensor& grad) {
  if (!grad.defined() || !written(leaf, grad)) return;
  ++writes_;
  storage_ = grad.storage().id();
  take_version(grad);
}

bool HeldAverages::written(const Tensor& leaf, const Tensor& grad) const {
  if (count_ == 0) return false;
  const Leaf& its = *record_of(leaf)->leaf;
  const std::int64_t known = its.scalings > scalings_ ? std::max(version_, its.scaled_at) : version_;
  return grad.storage().id() != storage_ || std::int64_t{grad.storage().version()} != known;
}

std::int64_t HeldAverages::number(const Tensor& leaf, const Tensor& grad) const {
  if (count_ == 0 || !grad.defined()) return 0;
  const std::int64_t scalings = record_of(leaf)->leaf->scalings - scalings_;
  const std::int64_t writes = writes_ + (written(leaf, grad) ? 1 : 0);
  return (count_ * base + std::min(scalings, base - 1)) * base + std::min(writes, base - 1);
}

}  // namespace sherd::shard
