// What turns a rule over lists of tensors (runtime/list_rule.h) into an op that `apply` takes: its checks and
// its reference, written once for all of them.
#pragma once

#include <functional>

#include "runtime/apply.h"
#include "runtime/expr.h"
#include "runtime/list_rule.h"

namespace sherd {
namespace detail {

/// Throws where the inputs of a step are not as `lists` says.
SHERD_API void check_lists(const StepLists& lists, SpecSpan in);
/// What a step writes, by `step`: of the rate, the number of the step or an empty handle, a value, its
/// gradient and its state, with empty handles for what is not kept, the new value and the new state.
SHERD_API Tensors step_in_ops(const StepLists& lists, Inputs in, const std::function<Tensors(Inputs)>& step);

/// What an op that works on lists in place writes and reads; StateError unless it is dense.
SHERD_API std::byte* dense_data(std::string_view op, const Tensor& t);

/// A number as it is, a tensor in `dtype`.
SHERD_API Expr rounded_to(const Expr& x, DType dtype);

/// One parameter, as `step_in_ops` gives it.
template <class Rule>
Tensors stepped_in_ops(const Rule& rule, Inputs in) {
  constexpr std::size_t states = std::size(Rule::states);
  const Tensor& p = in[2];
  const auto rounded = [&](const Expr& x) { return rounded_to(x, p.dtype()); };
  const auto factors = rule.factors(Expr(in[0]), in[1].defined() ? Expr(in[1]) : Expr(1.0), rounded);
  Expr state[states];
  for (std::size_t k = 0; k < states; ++k)
    if (in[4 + k].defined()) state[k] = Expr(in[4 + k]);
  Tensors out;
  with_form(rule, [&]<int form>() {
    const Stepped<Expr, states> after = stepped<form>(rule, factors, Expr(p), Expr(in[3]), state);
    out.push_back(after.value.materialize(p.spec()));
    for (const Expr& s : after.state) out.push_back(s.materialize(p.spec()));
  });
  return out;
}

}  // namespace detail

template <class Rule>
Specs ListStep<Rule>::infer(SpecSpan in) const {
  static_assert(std::size(Rule::states) <= StepLists::most_states, "kernels have no room for more state");
  detail::check_lists(lists(), in);
  return {};
}

template <class Rule>
Tensors ListStep<Rule>::reference(Inputs in) const {
  return detail::step_in_ops(lists(), in, [this](Inputs one) { return detail::stepped_in_ops(self(), one); });
}

}  // namespace sherd
