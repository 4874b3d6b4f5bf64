#include "nn/hooks.h"

#include <utility>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

/// One forward of a hooked module, as its backward sees it.
struct HookedForward {
  FullBackwardHook hook;
  std::vector<std::size_t> inputs, outputs;  ///< places of those that require grad among all
  std::size_t all_inputs = 0, all_outputs = 0;
  std::vector<Tensor> grad_output{};

  static std::vector<Tensor> spread(std::size_t all, const std::vector<std::size_t>& places, Inputs given) {
    std::vector<Tensor> list(all);
    for (std::size_t i = 0; i < places.size(); ++i) list[places[i]] = given[i];
    return list;
  }
  Tensors run(Inputs gradients) {
    std::vector<Tensor> grad_input = spread(all_inputs, inputs, gradients);
    std::vector<Tensor> other = hook(grad_input, std::exchange(grad_output, {}));
    if (other.empty()) other = std::move(grad_input);
    check<ValueError>(other.size() == all_inputs,
                      "full backward hook: it returns {} gradients of a module with {} inputs", other.size(),
                      all_inputs);
    Tensors result;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Tensor& mine = other[inputs[i]];
      check<ShapeError>(!mine.defined() || !gradients[i].defined() || mine.shape() == gradients[i].shape(),
                        "full backward hook: it returns a gradient of shape {} for one of shape {}",
                        mine.defined() ? mine.shape() : Shape{},
                        gradients[i].defined() ? gradients[i].shape() : Shape{});
      result.push_back(mine);
    }
    return result;
  }
};

/// Copies of all inputs, in one node, so that their gradients come together.
struct Copies {
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr Reads reads{};
  std::shared_ptr<HookedForward> of;
  Specs infer(SpecSpan in) const {
    Specs specs;
    for (const Spec& spec : in) specs.push_back(spec);
    return specs;
  }
  void run(Inputs in, Outputs out) const {
    for (std::size_t i = 0; i < in.size(); ++i) copy_(out[i], in[i]);
  }
  bool operator==(const Copies&) const = default;
};

struct ModuleInputs : Copies {
  static constexpr std::string_view name = "module_inputs";
  Tensors grad(const GradArgs& args) const { return of->run(args.gy); }
  bool operator==(const ModuleInputs&) const = default;
};

struct ModuleOutputs : Copies {
  static constexpr std::string_view name = "module_outputs";
  Tensors grad(const GradArgs& args) const {
    of->grad_output = HookedForward::spread(of->all_outputs, of->outputs, args.gy);
    if (of->inputs.empty()) of->run({});
    Tensors same;
    for (const Tensor& g : args.gy) same.push_back(g);
    return same;
  }
  bool operator==(const ModuleOutputs&) const = default;
};

/// Replaces those that require grad by copies, and says which.
template <class O>
void hooked(const O& op, std::span<Tensor* const> tensors, std::vector<std::size_t>& places) {
  std::vector<Tensor> found;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i]->defined() && tensors[i]->requires_grad()) {
      places.push_back(i);
      found.push_back(*tensors[i]);
    }
  if (found.empty()) return;
  const Tensors copies = apply_many(op, found);
  for (std::size_t i = 0; i < places.size(); ++i) *tensors[places[i]] = copies[i];
}

class BackwardHooks final : public ModuleObserver {
 public:
  explicit BackwardHooks(FullBackwardHook hook) : hook_(std::move(hook)) {}
  void before_forward(Module&, std::span<Tensor* const> inputs) override {
    running_.push_back(nullptr);
    if (!Context::current().grad_enabled()) return;
    auto forward = std::make_shared<HookedForward>();
    forward->hook = hook_;
    forward->all_inputs = inputs.size();
    hooked(ModuleInputs{{forward}}, inputs, forward->inputs);
    running_.back() = std::move(forward);
  }
  void after_forward(Module&, std::span<Tensor* const> outputs) override {
    if (running_.empty()) return;  // registered within this forward
    const auto forward = std::move(running_.back());
    running_.pop_back();
    if (!forward) return;
    forward->all_outputs = outputs.size();
    hooked(ModuleOutputs{{forward}}, outputs, forward->outputs);
  }
  void forward_failed(Module&) noexcept override {
    if (!running_.empty()) running_.pop_back();
  }

 private:
  FullBackwardHook hook_;
  std::vector<std::shared_ptr<HookedForward>> running_;  ///< a module may run within itself
};

}  // namespace

ModuleHook::ModuleHook(std::shared_ptr<ModuleObserver> observer, Module& module)
    : observer_(std::move(observer)), watching_(module.observe(*observer_)) {}

void ModuleHook::reset() {
  watching_.reset();
  observer_ = nullptr;
}

ModuleHook register_full_backward_hook(Module& module, FullBackwardHook hook) {
  return {std::make_shared<BackwardHooks>(std::move(hook)), module};
}

}  // namespace sherd::nn
