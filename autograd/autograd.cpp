#include "autograd/autograd.h"

#include "autograd/pass.h"
#include "autograd/tape.h"
#include "runtime/ops.h"

namespace sherd {
namespace {

Leaf& ensure_leaf(const Tensor& t) {
  AutogradRecord& record = ensure_record(t);
  if (!record.leaf) {
    record.leaf = make_ref<Leaf>(t.spec());
    record.leaf->place = Context::current().slot<Tape>().take_sequence();
  }
  return *record.leaf;
}

void check_leaves(std::string_view call, const Tensor& from, const Tensor& to) {
  for (const Tensor& t : {from, to})
    check<StateError>(t.is_leaf(), "{}: a tensor of shape {} was computed from others, and is no leaf", call,
                      t.shape());
}

void seed(BackwardPass& pass, std::string_view call, std::span<const Tensor> outputs,
          std::span<const Tensor> upstream) {
  check<ValueError>(upstream.empty() || upstream.size() == outputs.size(),
                    "{}: {} upstream gradients for {} outputs", call, upstream.size(), outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i)
    pass.seed(outputs[i], upstream.empty() ? Tensor{} : upstream[i]);
}

}  // namespace

bool Tensor::requires_grad() const { return wants_grad(*this); }

bool Tensor::is_leaf() const {
  const AutogradRecord* record = record_of(*this);
  return record == nullptr || !record->edge.node;
}

Tensor& Tensor::requires_grad_(bool requires_grad) {
  check<StateError>(
      is_leaf(),
      "requires_grad_: a tensor of shape {} was computed from others; only leaves can change, detach it "
      "first",
      shape());
  check<DTypeError>(!requires_grad || is_floating(dtype()),
                    "requires_grad_: only floating tensors have gradients, got {}", name_of(dtype()));
  if (!requires_grad && record_of(*this) == nullptr) return *this;
  Leaf& leaf = ensure_leaf(*this);
  AutogradRecord& record = *record_of(*this);
  record.requires_grad = requires_grad;
  leaf.frozen = !requires_grad;
  record.edge = requires_grad ? Edge{{}, 0, Ref<Leaf>(&leaf)} : Edge{};
  return *this;
}

Tensor Tensor::grad() const {
  const AutogradRecord* record = record_of(*this);
  return record != nullptr && record->leaf ? record->leaf->grad : Tensor{};
}

void Tensor::set_grad(Tensor grad) const {
  check<StateError>(is_leaf(),
                    "set_grad: a tensor of shape {} was computed from others; only leaves keep gradients",
                    shape());
  ensure_leaf(*this).grad = std::move(grad);
}

void Tensor::backward(const Tensor& upstream, bool retain_graph, bool create_graph) const {
  sherd::backward(std::span(this, 1), std::span(&upstream, 1), {retain_graph, create_graph});
}

Tensor Tensor::detach() const {
  Tensor t(make_ref<TensorImpl>(storage_ref(), layout(), dtype()));
  t.impl()->alias = true;
  return t;
}

void backward(std::span<const Tensor> outputs, std::span<const Tensor> upstream, BackwardOptions options) {
  BackwardPass pass("backward", options);
  seed(pass, "backward", outputs, upstream);
  pass.backward();
}

std::vector<Tensor> grad(std::span<const Tensor> outputs, std::span<const Tensor> inputs,
                         std::span<const Tensor> upstream, BackwardOptions options) {
  BackwardPass pass("grad", options);
  seed(pass, "grad", outputs, upstream);
  return pass.grad(inputs);
}

Subscription register_hook(const Tensor& tensor, GradHook hook) {
  check<StateError>(tensor.requires_grad(), "register_hook: a tensor of shape {} does not require grad",
                    tensor.shape());
  const AutogradRecord& record = *record_of(tensor);
  if (Leaf* leaf = record.edge.leaf.get()) {
    check<StateError>(leaf->no_hooks.empty(), "register_hook: {}", leaf->no_hooks);
    return leaf->hooks.add(std::move(hook));
  }
  const Edge at = where_whole(record.edge);
  auto& of_outputs = at.node->hooks;
  if (of_outputs.size() <= at.index) of_outputs.resize(at.index + 1);
  return of_outputs[at.index].add(std::move(hook));
}

Subscription register_post_accumulate_hook(const Tensor& leaf, std::function<void(Leaf&)> hook) {
  check<StateError>(leaf.is_leaf(), "register_post_accumulate_hook: a tensor of shape {} is no leaf",
                    leaf.shape());
  return ensure_leaf(leaf).after_accumulate.add(std::move(hook));
}

void queue_backward_callback(std::function<void()> callback) {
  check<StateError>(in_backward(), "queue_backward_callback: no backward is under way on this rank");
  pass_state().innermost->queue(std::move(callback));
}

bool in_backward() { return pass_state().innermost != nullptr; }

void set_sink(const Tensor& leaf, std::shared_ptr<GradSink> sink) {
  check<StateError>(leaf.is_leaf(),
                    "set_sink: a tensor of shape {} was computed from others; only leaves have sinks",
                    leaf.shape());
  ensure_leaf(leaf).sink = std::move(sink);
}
void note_scaled_gradients(std::span<const Tensor> leaves) {
  for (const Tensor& leaf : leaves) {
    const AutogradRecord* record = record_of(leaf);
    if (record == nullptr || !record->leaf || !record->leaf->grad.defined()) continue;
    ++record->leaf->scalings;
    record->leaf->scaled_at = std::int64_t{record->leaf->grad.storage().version()};
  }
}

void continue_leaf(const Tensor& from, const Tensor& to) {
  const AutogradRecord* record = record_of(from);
  if (record == nullptr || !record->leaf) return;
  record->leaf->spec = to.spec();
  ensure_record(to).leaf = record->leaf;
}
void share_hooks(const Tensor& from, const Tensor& to) {
  check_leaves("share_hooks", from, to);
  if (Leaf& a = ensure_leaf(from), &b = ensure_leaf(to); &a != &b) b.hooks.share(a.hooks);
}
void share_post_accumulate_hooks(const Tensor& from, const Tensor& to) {
  check_leaves("share_post_accumulate_hooks", from, to);
  if (Leaf& a = ensure_leaf(from), &b = ensure_leaf(to); &a != &b)
    b.after_accumulate.share(a.after_accumulate);
}
void refuse_hooks(const Tensor& leaf, std::string why) {
  check<StateError>(leaf.is_leaf(),
                    "refuse_hooks: a tensor of shape {} was computed from others, and is no leaf",
                    leaf.shape());
  ensure_leaf(leaf).no_hooks = std::move(why);
}
void set_leaf_name(const Tensor& leaf, std::string name) {
  check<StateError>(leaf.is_leaf(),
                    "set_leaf_name: a tensor of shape {} was computed from others, and is no leaf",
                    leaf.shape());
  ensure_leaf(leaf).name = std::move(name);
}

}  // namespace sherd
