// Modules: structs that name their members once. Names, saving, moving, copying and sharding derive from that
// one visit.
//
//   struct Linear final : Layer<Linear> {
//     Param weight, bias;
//     Tensor forward(const Tensor& x) const { return linear(x, weight, bias); }
//     void visit(auto&& on) { on("weight", weight); on("bias", bias); }
//   };
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nn/parameter.h"
#include "nn/tensors_in.h"

namespace sherd::nn {

class Module;

/// A member walk in the order of `visit`.
class SHERD_API MemberVisitor {
 public:
  virtual ~MemberVisitor();
  virtual void param(std::string_view, Param&) {}
  virtual void buffer(std::string_view, Buffer&) {}
  virtual void child(std::string_view, Module&) {}
};

/// Told around a module's forward. Inputs and outputs are the tensors found in the arguments and the result;
/// they may be replaced.
class SHERD_API ModuleObserver {
 public:
  virtual ~ModuleObserver();
  virtual void before_forward(Module&, std::span<Tensor* const> /*inputs*/) {}
  virtual void after_forward(Module&, std::span<Tensor* const> /*outputs*/) {}
  /// In place of `after_forward` when forward, or an observer of it, threw.
  virtual void forward_failed(Module&) noexcept {}
};

struct NamedParameter;

/// What an upper floor hangs on a module: goes with it, hears its forwards before all observers, and is asked
/// first when parameters are listed, moved or cloned.
class SHERD_API ModuleExtension : public ModuleObserver {
 public:
  /// Parameters to list for this module before its members.
  virtual std::vector<NamedParameter> own_parameters() const;
  /// Whether a parameter of this module or below is listed under no name.
  virtual bool hides(const Parameter& parameter) const;
  /// Replaces every value it hosts, gradients included; `Module::to` leaves those to it.
  virtual void change(const std::function<Tensor(const Tensor&)>& change) = 0;
  /// The same for a clone, whose members are copied by now.
  virtual std::shared_ptr<ModuleExtension> clone(const ClonedParameters& copy_of) const = 0;
};

/// Ends an observer's life on a module when it dies.
class SHERD_API Subscription {
 public:
  Subscription() = default;
  explicit Subscription(std::function<void()> end) : end_(std::move(end)) {}
  Subscription(Subscription&& other) noexcept : end_(std::exchange(other.end_, nullptr)) {}
  Subscription& operator=(Subscription&& other) noexcept {
    reset();
    end_ = std::exchange(other.end_, nullptr);
    return *this;
  }
  ~Subscription() { reset(); }
  void reset() {
    if (end_) std::exchange(end_, nullptr)();
  }

 private:
  std::function<void()> end_;
};

/// Whether a walk lists a tied parameter under its first name only, or under all.
enum class Ties { once, all };

struct NamedParameter {
  std::string name;
  Parameter parameter;
};
struct NamedBuffer {
  std::string name;
  Tensor tensor;
};
struct NamedModule {
  std::string name;
  Module* module;
};
/// Names and tensors in walk order. Tensors are detached but share memory with the module.
using StateDict = std::vector<std::pair<std::string, Tensor>>;

/// Whether `load_state_dict` insists that both sides have the same names.
enum class Strict { yes, no };

/// Base of all layers. Move-only; `clone()` copies. One thread trains a module; several may run forwards
/// without gradients at once.
class SHERD_API Module {
 public:
  Module();
  virtual ~Module();
  Module(Module&&) noexcept;
  Module& operator=(Module&&) noexcept;

  /// The class's name, e.g. "Linear".
  virtual std::string_view type_name() const = 0;
  /// Calls `visitor` for each direct member.
  virtual void visit_members(MemberVisitor& visitor) = 0;
  /// `forward` of one tensor, for containers of different layers; StateError if the layer takes something
  /// else.
  virtual Tensor call(const Tensor& x) = 0;
  virtual std::unique_ptr<Module> clone_module() const = 0;

  /// Parameters of this module and below, depth first, named "child.weight"; a tied one once.
  std::vector<NamedParameter> named_parameters(Ties ties = Ties::once) const;
  std::vector<Parameter> parameters() const;
  std::vector<NamedBuffer> named_buffers() const;
  /// This module (with the empty name) and those below, depth first.
  std::vector<NamedModule> named_modules();
  /// Elements of all parameters, tied ones counted once.
  std::int64_t parameter_count() const;

  bool training() const;
  /// Sets the mode of this module and those below.
  void train(bool training = true);
  void eval() { train(false); }
  /// Moves parameters, gradients and buffers; parameter objects stay the same.
  void to(Device device);
  /// Casts floating parameters, gradients and buffers.
  void to(DType dtype);
  /// For all parameters below.
  void set_requires_grad(bool requires_grad);
  void zero_grad();

  StateDict state_dict() const;
  /// Copies values in. ValueError for missing or unknown names (unless not strict), ShapeError for other
  /// shapes; dtypes are cast. A tied parameter may come under any of its names. Nothing is changed when it
  /// throws.
  void load_state_dict(const StateDict& state, Strict strict = Strict::yes);

  /// Tells `observer` of each forward until the subscription ends; observers hear in the order they came, and
  /// see the module move.
  Subscription observe(ModuleObserver& observer);

  /// One a module at most (StateError).
  void extend(std::shared_ptr<ModuleExtension> extension);
  const std::shared_ptr<ModuleExtension>& extension() const;

 protected:
  Module(const Module& other);
  bool observed() const;
  void fire_before(std::span<Tensor* const> inputs);
  void fire_after(std::span<Tensor* const> outputs);
  void fire_failed() noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

namespace detail {

/// "sherd::nn::Linear" -> "Linear", from the compiler's own spelling.
template <class D>
constexpr std::string_view short_type_name() {
  std::string_view text = __PRETTY_FUNCTION__;
  const std::size_t begin = text.find("D = ") + 4;
  text = text.substr(begin, text.find_first_of(";]", begin) - begin);
  const std::size_t arguments = text.find('<');
  const std::size_t colon = text.substr(0, arguments).rfind(':');
  return colon == std::string_view::npos ? text : text.substr(colon + 1);
}

/// Sorts a member into what it is.
struct MemberSorter {
  MemberVisitor& visitor;
  void operator()(std::string_view name, Param& member) const { visitor.param(name, member); }
  void operator()(std::string_view name, Buffer& member) const { visitor.buffer(name, member); }
  void operator()(std::string_view name, Module& member) const { visitor.child(name, member); }
};

}  // namespace detail

/// What a layer derives from, with itself as `D`. `D` has `forward` (any arguments, any result) and `visit`.
template <class D>
class Layer : public Module {
 public:
  /// Runs `forward`, telling observers before and after.
  template <class... A>
  auto operator()(A&&... args) {
    return run(static_cast<D&>(*this), std::forward<A>(args)...);
  }
  template <class... A>
  auto operator()(A&&... args) const {
    return run(static_cast<const D&>(*this), std::forward<A>(args)...);
  }

  std::string_view type_name() const override { return detail::short_type_name<D>(); }
  void visit_members(MemberVisitor& visitor) override {
    static_cast<D&>(*this).visit(detail::MemberSorter{visitor});
  }
  Tensor call(const Tensor& x) override {
    if constexpr (requires(D& d) {
                    { d.forward(x) } -> std::same_as<Tensor>;
                  })
      return (*this)(x);
    else
      fail<StateError>("{}: does not map one tensor to one tensor, so it cannot stand in a Sequential",
                       type_name());
  }
  /// A copy with memory of its own: ties are kept, observers stay behind.
  D clone() const {
    const CloneScope scope;
    return D(static_cast<const D&>(*this));
  }
  std::unique_ptr<Module> clone_module() const override {
    const CloneScope scope;
    return std::make_unique<D>(static_cast<const D&>(*this));
  }

 private:
  /// Arguments with tensors are copied while somebody observes, since observers may replace these; others (a
  /// cache that `forward` fills) are the caller's own.
  template <class A>
  using Held = std::conditional_t<may_hold_tensors<A>(), std::decay_t<A>, A&&>;
  template <class A>
  using Passed = std::conditional_t<std::is_lvalue_reference_v<A>, std::remove_reference_t<Held<A>>&,
                                    std::remove_reference_t<Held<A>>&&>;
  template <class A, class Item>
  static void collect(Item& item, std::vector<Tensor*>& inputs) {
    if constexpr (may_hold_tensors<A>()) each_tensor(item, [&](Tensor& t) { inputs.push_back(&t); });
  }

  template <class Self, class... A>
  static auto run(Self& self, A&&... args) {
    if (!self.observed()) return self.forward(std::forward<A>(args)...);
    auto& module = const_cast<D&>(static_cast<const D&>(self));  // observers may change what they watch
    std::tuple<Held<A>...> held(std::forward<A>(args)...);
    std::vector<Tensor*> inputs;
    std::apply([&](auto&... items) { (collect<A>(items, inputs), ...); }, held);
    try {
      module.fire_before(inputs);
      auto result =
          std::apply([&](auto&... items) { return self.forward(static_cast<Passed<A>>(items)...); }, held);
      std::vector<Tensor*> outputs;
      each_tensor(result, [&](Tensor& t) { outputs.push_back(&t); });
      module.fire_after(outputs);
      return result;
    } catch (...) {
      module.fire_failed();
      throw;
    }
  }
};

}  // namespace sherd::nn
