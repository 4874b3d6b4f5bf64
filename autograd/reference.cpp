// The gradient of an op from its `reference`, which runs again with recording on and is differentiated.
#include <algorithm>

#include "autograd/pass.h"
#include "autograd/tape.h"
#include "runtime/ops.h"

namespace sherd::detail {

Tensors reference_gradient(const GradArgs& args, const std::function<Tensors(Inputs)>& reference) {
  const GradMode recording(true);
  Tensors inputs;
  std::vector<Tensor> wanted;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < args.inputs.size(); ++i) {
    const Tensor& kept = args.inputs[i];
    const bool given = kept.defined() || !args.specs[i].is_none(), need = args.need(i) && given;
    // On what was given and not kept no gradient that is wanted depends: any values stand for it.
    const Spec& spec = args.specs[i];
    const Tensor x = kept.defined() || !given ? kept : zeros(spec.shape, {spec.dtype, spec.device});
    // Under create_graph the inputs keep their history, to which the second derivative leads; otherwise
    // detached leaves keep this pass from walking the outer graph.
    const bool leaf = need && (!args.create_graph || !kept.defined());
    inputs.push_back(leaf ? x.detach().requires_grad_() : x);
    if (!need) continue;
    wanted.push_back(inputs.back());
    places.push_back(i);
  }
  // What the reference records is newer than everything that its inputs were computed from.
  std::uint64_t since = Context::current().slot<Tape>().next_sequence();
  for (const Tensor& x : inputs)
    if (const AutogradRecord* record = x.defined() ? record_of(x) : nullptr;
        record != nullptr && record->edge.node)
      since = std::max(since, record->edge.node->sequence + 1);
  PassState& state = pass_state();
  const Tensors outputs = [&] {
    const RuleScope differentiated(state, state.rule, true);
    return reference(inputs);
  }();
  BackwardPass pass("backward", {.create_graph = args.create_graph});
  for (std::size_t i = 0; i < outputs.size() && i < args.gy.size(); ++i)
    if (args.gy[i].defined() && outputs[i].requires_grad()) pass.seed(outputs[i], args.gy[i]);
  std::vector<Tensor> gradients = pass.partial(wanted, since);
  Tensors result(args.inputs.size());
  for (std::size_t k = 0; k < places.size(); ++k) result[places[k]] = std::move(gradients[k]);
  return result;
}

}  // namespace sherd::detail
