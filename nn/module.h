// Modules: structs that name their members once, in `visit`. Names, saving, moving and sharding derive from
// it.
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
#include "runtime/subscription.h"

namespace sherd::nn {

class Module;

/// Is shown a module's members in the order of `visit`.
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

/// What a module is given by code that changes how its parameters are kept (sharding). It moves with the
/// module, hears its forwards before all observers, and is asked when parameters are listed, moved or cloned.
class SHERD_API ModuleExtension : public ModuleObserver {
 public:
  /// Parameters that lists have for this module before its members: a flat one in place of many.
  virtual std::vector<NamedParameter> own_parameters() const;
  /// Whether lists leave out this parameter of the module or of one below, because one of `own_parameters`
  /// stands for it.
  virtual bool hides(const Parameter& parameter) const;
  /// Replaces all values that it keeps by what `change` makes of them, gradients included: `Module::to`
  /// changes only those that no extension keeps.
  virtual void change(const std::function<Tensor(const Tensor&)>& change) = 0;
  /// The extension of the module's clone. `copy_of` has the clone's parameters, which are all copied by now.
  virtual std::shared_ptr<ModuleExtension> clone(const ClonedParameters& copy_of) const = 0;
};

/// Whether a list has a tied parameter under its first name only, or under all of its names.
enum class Ties { once, all };

struct NamedParameter {
  std::string name;  ///< in the module that was asked, as "blocks.0.weight"; so below
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
/// Names and tensors, in the order of members. Tensors are detached but share memory with the module.
using StateDict = std::vector<std::pair<std::string, Tensor>>;

/// Whether `load_state_dict` insists that both sides have the same names.
enum class Strict { yes, no };

/// Fills a tensor with a parameter's or buffer's first values; `name` is its full name in the module.
using Initialise = std::function<void(const std::string& name, const Tensor& whole)>;

/// Base of all layers. Move-only; `clone()` copies. A module that was moved from throws StateError whatever
/// it is asked, until another is moved into it. One thread trains a module; several may run forwards without
/// gradients at once.
class SHERD_API Module {
 public:
  Module();
  virtual ~Module();
  Module(Module&&) noexcept;
  Module& operator=(Module&&) noexcept;

  /// The class's name, e.g. "Linear".
  virtual std::string_view type_name() const = 0;
  /// Calls `visitor` for each direct member. Before that, ValueError for a name that two members have, that
  /// is empty or has a dot. Where the library is built with assertions, StateError when the object holds a
  /// Param, Buffer or Module that `visit` does not name.
  void visit_members(MemberVisitor& visitor);
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
  /// Moves parameters, gradients and buffers; parameter objects stay the same. DeviceError from `meta`, where
  /// there are no values to move: see `materialize`.
  void to(Device device);
  /// Casts floating parameters, gradients and buffers.
  void to(DType dtype);
  /// Moves the module to `device` and gives what is on `meta` its memory there: `initialise` is called once
  /// for each such parameter and buffer, in the order of members, with a whole tensor that it must fill. A
  /// sharded module keeps this rank's part; the same calls on every rank draw the same numbers as an
  /// unsharded module's. When `initialise` throws, all that was on `meta` is there again. DeviceError for
  /// `meta`.
  void materialize(Device device, const Initialise& initialise);
  /// For all parameters below.
  void set_requires_grad(bool requires_grad);
  void zero_grad();

  /// Parameters and saved buffers by name. Tensors share memory with the module; a buffer that computes in
  /// another dtype than its own is a copy in its own.
  StateDict state_dict() const;
  /// Copies values in. ValueError for missing or unknown names (unless not strict) and for a name that comes
  /// twice, ShapeError for other shapes, DeviceError for values from or into `meta`; dtypes are cast. A tied
  /// parameter may come under any of its names. Nothing is changed when it throws.
  void load_state_dict(const StateDict& state, Strict strict = Strict::yes);

  /// Tells `observer` of each forward until the subscription ends, in the order in which observers came and as
  /// often as they subscribed. It goes on when the module is moved: the observer is then told of the module that
  /// it was moved into.
  Subscription observe(ModuleObserver& observer);

  /// Gives the module an extension; one a module at most (StateError).
  void extend(std::shared_ptr<ModuleExtension> extension);
  const std::shared_ptr<ModuleExtension>& extension() const;

 protected:
  Module(const Module& other);
  /// Calls `visitor` for each direct member, as `visit` names them.
  virtual void each_member(MemberVisitor& visitor) = 0;
  /// StateError after a move from this module.
  void check_alive() const { state(); }
  bool observed() const;
  void fire_before(std::span<Tensor* const> inputs);
  void fire_after(std::span<Tensor* const> outputs);
  void fire_failed() noexcept;

 private:
  struct State;
  State& state() const;
  void check_nothing_forgotten();
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
  Tensor call(const Tensor& x) override {
    if constexpr (requires(D& d) {
                    { d.forward(x) } -> std::same_as<Tensor>;
                  })
      return (*this)(x);
    else
      fail<StateError>("{}: does not map one tensor to one tensor, so it cannot stand in a Sequential",
                       type_name());
  }
  /// A copy with memory of its own: ties are kept, observers and gradients stay behind.
  D clone() const {
    const CloneScope scope;
    return D(static_cast<const D&>(*this));
  }
  std::unique_ptr<Module> clone_module() const override {
    const CloneScope scope;
    return std::make_unique<D>(static_cast<const D&>(*this));
  }

 protected:
  void each_member(MemberVisitor& visitor) override {
    static_cast<D&>(*this).visit(detail::MemberSorter{visitor});
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
