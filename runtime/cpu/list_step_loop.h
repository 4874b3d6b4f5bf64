// The loop of a rule over lists of tensors on the CPU. Included where rules are instantiated: in the library
// for its own, in an application for its own.
#pragma once

#include "runtime/cpu/for_processor.h"
#include "runtime/list_step.h"

namespace sherd::detail {

/// Steps `n` elements of one parameter, which lie at `at`: value, gradient, then all state, null where it is
/// not kept.
using StepLoop = void (*)(const void* rule, double lr, double step, std::int64_t n, float* const* at);

/// Calls `loop` for all parameters of a step, cut into fixed tiles that threads share; all around it is done
/// here.
SHERD_API void run_step(const StepLists& lists, Inputs in, const void* rule, StepLoop loop);

/// Flattened by itself, before the attributes of `ForProcessor` keep calls from being inlined.
template <class Rule, int form>
struct StepOfRule {
  [[gnu::flatten]] static void run(const void* rule, double lr, double step, std::int64_t n,
                                   float* const* at) {
    const Rule& r = *static_cast<const Rule*>(rule);
    go(r, r.factors(lr, step, [](double x) { return static_cast<float>(x); }), n, at,
       std::make_index_sequence<std::size(Rule::states)>{});
  }

 private:
  /// Rule and factors are copies, so that no store can change them and they stay in registers.
  template <class Factors, std::size_t... k>
  static void go(Rule rule, Factors factors, std::int64_t n, float* const* at, std::index_sequence<k...>) {
    constexpr Mask kept = Rule::keeps(form);
    float* const p = at[0];
    const float* const g = at[1];
    float* const state[] = {at[2 + k]...};
#ifdef __clang__
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (std::int64_t i = 0; i < n; ++i) {
      const float before[] = {(has(kept, k) ? state[k][i] : 0.f)...};
      const auto after = stepped<form>(rule, factors, p[i], g[i], before);
      p[i] = after.value;
      ((has(kept, k) ? void(state[k][i] = after.state[k]) : void()), ...);
    }
  }
};

template <class Rule>
void list_step(const Rule& rule, Inputs in, Outputs) {
  with_form(rule, [&]<int form>() {
    // Of a function whose address is known g++ makes no copy without what it does not use, which it would not
    // inline into the loop for this processor.
    [[gnu::used]] static const StepLoop whole = StepOfRule<Rule, form>::run;
    run_step(rule.lists(), in, &rule, ForProcessor<StepOfRule<Rule, form>::run>::best());
  });
}

}  // namespace sherd::detail

namespace sherd::cpu {

/// Adds the loop above as the CPU's kernel of a rule over lists. An application calls it once for a rule of
/// its own, before using it: `cpu::add_list_step<Lion>();`
template <class Rule>
void add_list_step() {
  add_kernel<&detail::list_step<Rule>>(DeviceType::cpu);
}

}  // namespace sherd::cpu
