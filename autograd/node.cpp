#include "autograd/node.h"

#include <atomic>

namespace sherd {

GradSink::~GradSink() = default;
void GradSink::begin(PassInfo, Leaf&) {}
void GradSink::begun(PassInfo) {}
void GradSink::finish(PassInfo) {}
bool GradSink::accumulates_later() const { return false; }
void GradSink::abort(PassInfo) noexcept {}

AutogradRecord::~AutogradRecord() {
  if (counted_in_ != nullptr) counted_in_->drop_history();
}

void AutogradRecord::set_history(Ref<Node> node, std::uint32_t index, Storage* computed_in) {
  if (counted_in_ == nullptr && computed_in != nullptr) {
    computed_in->add_history();
    counted_in_ = computed_in;
  }
  requires_grad = true;
  leaf = {};
  edge = {std::move(node), index, {}};
}

AutogradRecord& ensure_record(const Tensor& t) {
  if (!t.impl()->extension) t.impl()->extension = make_ref<AutogradRecord>();
  return *record_of(t);
}

void Node::free() {
  freed = true;
  saved_inputs.clear();
  saved_outputs.clear();
  edges.clear();
}

Folded::~Folded() = default;

void Folded::unfold(Node& node) {
  ends_ = make();
  // What was registered here, or will be, is called there.
  node.hooks.resize(node.outputs.size());
  for (std::size_t i = 0; i < node.hooks.size(); ++i) {
    auto& there = ends_[i].node->hooks;
    if (there.size() <= ends_[i].index) there.resize(ends_[i].index + 1);
    there[ends_[i].index].share(node.hooks[i]);
  }
  node.free();
}

Edge where_whole(const Edge& edge) {
  const Edge at = followed(edge);
  Node* const node = at.node.get();
  if (node == nullptr || !node->folded || node->freed || !node->folded->depends(at.index)) return at;
  if (std::atomic_ref(node->pass).load() != nullptr) return at;  // a backward goes through it now
  node->folded->unfold(*node);
  return followed(at);
}

namespace {
/// While this thread deletes a node: the list of further nodes to delete. Not in the Context, because tensors
/// may be destroyed after it.
constinit thread_local const Node** dead_nodes = nullptr;
}  // namespace

void Node::drop() const noexcept {
  if (!give_up()) return;
  if (dead_nodes != nullptr) {
    next_dead_ = std::exchange(*dead_nodes, this);
    return;
  }
  const Node* dead = this;
  dead_nodes = &dead;
  while (dead != nullptr) {
    const Node* node = std::exchange(dead, dead->next_dead_);
    delete node;
  }
  dead_nodes = nullptr;
}

}  // namespace sherd
