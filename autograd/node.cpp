#include "autograd/node.h"

namespace sherd {

GradSink::~GradSink() = default;
void GradSink::begin(RunInfo, Leaf&) {}
void GradSink::finish(RunInfo) {}
void GradSink::abort(RunInfo) noexcept {}

Tensor HookList::run(Tensor gradient) const {
  // A hook may remove itself and add others: those run from the next backward on.
  const std::size_t count = hooks.size();
  for (std::size_t i = 0; i < count; ++i) {
    const GradHook hook = hooks[i];
    if (!hook) continue;
    if (Tensor other = hook(gradient); other.defined()) gradient = std::move(other);
  }
  return gradient;
}

AutogradRecord& ensure_record(const Tensor& t) {
  if (!t.impl()->extension) t.impl()->extension = make_ref<AutogradRecord>();
  return *record_of(t);
}

void Node::free() {
  freed = true;
  saved_inputs.clear();
  saved_outputs.clear();
  // A chain of a million nodes must not recurse a million destructors deep: what only this graph holds gives
  // up its edges before it goes.
  std::vector<Ref<Node>> alone;
  const auto drop_edges = [&alone](Node& node) {
    for (Edge& edge : node.edges)
      if (edge.node && edge.node->use_count() == 1) alone.push_back(std::move(edge.node));
    node.edges.clear();
  };
  drop_edges(*this);
  while (!alone.empty()) {
    const Ref<Node> node = std::move(alone.back());
    alone.pop_back();
    drop_edges(*node);
  }
}

Node::~Node() { free(); }

}  // namespace sherd
