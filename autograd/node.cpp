#include "autograd/node.h"

#include "runtime/context.h"

namespace sherd {

GradSink::~GradSink() = default;
void GradSink::begin(RunInfo, Leaf&) {}
void GradSink::finish(RunInfo) {}
void GradSink::abort(RunInfo) noexcept {}

Tensor HookList::run(Tensor gradient) const {
  for (const GradHook& hook : hooks)
    if (hook)
      if (Tensor other = hook(gradient); other.defined()) gradient = std::move(other);
  return gradient;
}

AutogradRecord& ensure_record(const Tensor& t) {
  if (!t.impl()->extension) t.impl()->extension = make_ref<AutogradRecord>();
  return *record_of(t);
}

namespace {
/// Nodes waiting to die on this thread. A chain of a million nodes must not recurse a million destructors deep.
struct Graveyard {
  std::vector<Ref<Node>> waiting;
  bool digging = false;
};
}  // namespace

void Node::free() {
  freed = true;
  saved_inputs.clear();
  saved_outputs.clear();
  if (edges.empty()) return;
  Context* context = Context::current_or_null();
  if (context == nullptr) return edges.clear();
  Graveyard& graveyard = context->slot<Graveyard>();
  for (Edge& edge : edges)
    if (edge.node) graveyard.waiting.push_back(std::move(edge.node));
  edges.clear();
  if (graveyard.digging) return;
  graveyard.digging = true;
  while (!graveyard.waiting.empty()) {
    const Ref<Node> node = std::move(graveyard.waiting.back());
    graveyard.waiting.pop_back();  // the last handle goes at the end of this turn, and adds its own edges to the list
  }
  graveyard.digging = false;
}

Node::~Node() { free(); }

}  // namespace sherd
