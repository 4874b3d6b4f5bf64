// S4.3: what a compiled function writes through views, and an argument that it lets show that memory.
#include "autograd/autograd.h"
#include "autograd/compile.h"
#include "runtime/apply.h"
#include "runtime/ops.h"
#include "tests/scenarios/scenario.h"

namespace sherd::scenarios {
namespace {

/// Writes x + 1 into its second input.
struct AddOneOut {
  static constexpr std::string_view name = "add_one_out";
  static constexpr Arity arity = 2;
  static constexpr Mask mutates = 0b10;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const {
    sherd::check<ShapeError>(in[0].shape == in[1].shape, "add_one_out: shapes {} and {}", in[0].shape,
                             in[1].shape);
    return {};
  }
  Tensors reference(Inputs in) const { return {in[0] + 1}; }
  bool operator==(const AddOneOut&) const = default;
};

void trace_fsdp_set(Rank& rank) {
  /// With `copies` the values are copied, as newer versions of the original do.
  const auto step = [](bool copies) {
    return [copies](std::span<const Tensor> in) -> std::vector<Tensor> {
      const Tensor& x = in[0];
      const Tensor buf = zeros({2}, {f32, host});
      const Tensor v = view(buf, {-1});
      sherd::apply(AddOneOut{}, x, v);
      const Tensor v2 = view(buf, {-1});
      copies ? copy_(x, v2) : set_(x, v2);
      return {};
    };
  };
  for (const bool copies : {false, true}) {
    const Compiled compiled = sherd::compile(step(copies), {.full_graph = FullGraph::yes});
    const Tensor reference = zeros({2}, {f32, host}), x = clone(reference);
    // The first call traces, others replay.
    for (int i = 1; i <= 3; ++i) {
      const Tensor memory = x.detach(), values = clone(x);
      step(copies)(std::initializer_list<Tensor>{reference});
      compiled({x});
      rank.check.same(reference, full({2}, i, {f32, host}), "eager");
      rank.check.same(x, reference, "compiled");
      rank.check.eq(x.storage().id() == memory.storage().id(), copies, "the memory from before is shown");
      if (!copies) rank.check.same(memory, values, "the memory from before");
    }
    rank.check.eq(compiled.stats().hits, 2u, "calls by the program");
    rank.check.eq(compiled.stats().graphs, 1u, "graphs");
    rank.check.contains(compiled.text(), "add_one_out", "ops without results stay");
  }
}

}  // namespace

std::vector<Scenario> s4() {
  return {scenario("S4.3", "test_trace_fsdp_set_", Harness::processes, {2}, Grid<>(), trace_fsdp_set)};
}

}  // namespace sherd::scenarios
