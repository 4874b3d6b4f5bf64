// Modules: structs that name their members once, in `visit`; lists of parameters, saving, moving and sharding
// come from that.
//
//   struct Linear final : Layer<Linear> {
//     Param weight, bias;
//     Tensor forward(const Tensor& x) const { return linear(x, weight, bias); }
//     void visit(auto&& on) { on("weight", weight); on("bias", bias); }
//   };
#pragma once

#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nn/arguments.h"
#include "nn/parameter.h"
#include "nn/tensors_in.h"
#include "runtime/subscription.h"

namespace sherd::nn {

class Module;

/// Called with each direct member of a module, in the order of `visit`.
class SHERD_API MemberVisitor {
 public:
  virtual ~MemberVisitor();
  virtual void param(std::string_view, Param&) {}
  virtual void buffer(std::string_view, Buffer&) {}
  virtual void child(std::string_view, Module&) {}
};

/// Called before and after a module's forward. Inputs and outputs are the tensors found in the arguments and
/// the result (see tensors_in.h); an observer may assign others to them.
class SHERD_API ModuleObserver {
 public:
  virtual ~ModuleObserver();
  virtual void before_forward(Module&, std::span<Tensor* const> /*inputs*/) {}
  virtual void after_forward(Module&, std::span<Tensor* const> /*outputs*/) {}
  /// Called before that, where the result is of a class, named `type`, in which no tensors can be found.
  virtual void result_unknown(Module&, std::string_view /*type*/) {}
  /// Called in place of `after_forward` when forward, or an observer of it, threw.
  virtual void forward_failed(Module&) noexcept {}
};

struct NamedParameter;

/// Attached to a module by code that changes how its parameters are kept (sharding). It moves with the
/// module, hears its forwards before all observers, and is asked when parameters are listed, moved or cloned.
/// A forward is `enter`, `before_forward`, `after_forward` and `leave`; a program of the module's may have
/// the inner two in it, and repeats them then.
class SHERD_API ModuleExtension : public ModuleObserver {
 public:
  virtual void enter(Module&, std::span<Tensor* const> /*inputs*/) {}
  virtual void leave(Module&, std::span<Tensor* const> /*outputs*/) {}
  /// Parameters that lists name for this module, before those of its members: a flat one in place of many.
  virtual std::vector<NamedParameter> own_parameters() const;
  /// Whether lists leave out this parameter, whose owner it is too, because one of `own_parameters` stands
  /// for it.
  virtual bool hides(const Parameter& parameter) const;
  /// Whether a program around the module's forward repeats what the extension does before and after it.
  virtual bool repeats_in_programs() const { return false; }
  /// Appends what such a program is for besides the module's tensors: all that these repeat as ops.
  virtual void add_guards(std::vector<std::uint64_t>& /*words*/) const {}
  /// StateError if values may not be replaced now. Asked of a module and all below before `change` of any.
  virtual void check_changeable() const {}
  /// Replaces all values that the extension keeps, gradients included, by what `change` returns for them.
  /// `Module::to` changes the others itself.
  virtual void change(const std::function<Tensor(const Tensor&)>& change) = 0;
  /// The extension for the module's clone. Called when all parameters are copied; `cloned` gives the clone's
  /// parameter for one of this module.
  virtual std::shared_ptr<ModuleExtension> clone(const ClonedParameters& cloned) const = 0;
};

/// What a compiled module's forward goes through (nn/compile.h): what `forward` would be given, and what it
/// would return.
class SHERD_API CompiledForward {
 public:
  virtual ~CompiledForward();
  /// A call's arguments as the program's inputs, and as words that a program is for.
  struct Arguments {
    const void* signature;                ///< of the function that `forward` is
    std::vector<Tensor> tensors{};        ///< all that are defined
    std::vector<std::uint64_t> values{};  ///< everything else about the arguments
    std::string unfit{};                  ///< a type that cannot be in a program; empty: there is none
  };
  struct Result {
    std::vector<Tensor> outputs;
    std::shared_ptr<const void> form;  ///< what `keep_form` gave when the program was made; null: forward ran
  };
  virtual Result call(Module& module, const Arguments& arguments,
                      const std::function<std::vector<Tensor>()>& forward,
                      const std::function<std::shared_ptr<const void>()>& keep_form) = 0;
  /// Whether `forward` is to have in it what the module's extension does before and after.
  virtual bool extension_inside() const { return false; }
};

/// Whether a list has a tied parameter under its first name only, or under all of its names.
enum class Ties { once, all };

struct NamedParameter {
  std::string name;  ///< below the module that lists it, as "blocks.0.weight"
  Parameter parameter;
};
/// A buffer and its name, as of a parameter.
struct NamedBuffer {
  std::string name;
  Tensor tensor;
};
/// A module and its name, as of a parameter; the listing module itself has the empty name.
struct NamedModule {
  std::string name;
  Module* module;
};
/// Names and tensors, in the order of members. Tensors are detached but share memory with the module.
class SHERD_API StateDict : public std::vector<std::pair<std::string, Tensor>> {
 public:
  using std::vector<std::pair<std::string, Tensor>>::vector;
  /// The tensor of that name; ValueError if there is none.
  const Tensor& at(std::string_view name) const;
  bool contains(std::string_view name) const;

  /// Tensors that a file has and that could not be read, by name, and why.
  std::map<std::string, std::string, std::less<>> unread;
  /// A tensor that is one rank's part, and of what; empty where all are whole.
  std::string part;

 private:
  const_iterator find(std::string_view name) const;
};

/// Whether `load_state_dict` insists that both sides have the same names.
enum class Strict { yes, no };
/// What a state and a module do not have in common.
struct Mismatch {
  std::vector<std::string> missing;  ///< names of the module that the state lacks, sorted
  std::vector<std::string> unknown;  ///< names of the state that the module lacks, in the state's order
};

/// Fills a tensor with a parameter's or buffer's first values; `name` is its full name in the module.
using Initialise = std::function<void(const std::string& name, const Tensor& whole)>;

/// Base of all layers. Move-only; `clone()` copies. A module that was moved from throws StateError from every
/// function, until another is moved into it. One thread at a time trains a module; several may run forwards
/// without gradients at once.
class SHERD_API Module {
 public:
  Module();
  virtual ~Module();
  Module(Module&&) noexcept;
  Module& operator=(Module&&) noexcept;

  /// The class's name, e.g. "Linear".
  virtual std::string_view type_name() const = 0;
  /// Calls `visitor` for each direct member. Before that, ValueError for a name that two members have, that
  /// is empty or has a dot, and the first time StateError when the object holds a Param, Buffer or Module
  /// that `visit` does not name, as far as a copy of the object shows it.
  void visit_members(MemberVisitor& visitor);
  /// Calls `visitor.param` and `visitor.buffer` for each member of this module and of those below, depth
  /// first, by its name in its own module. Without the checks of `visit_members`: for every forward.
  void visit_all_members(MemberVisitor& visitor);
  /// Calls `visit` for this module and those below, depth first, without checks.
  void visit_all_modules(const std::function<void(Module&)>& visit);
  /// `forward` of one tensor, for containers of layers of different classes; StateError if the layer does not
  /// map one tensor to one.
  virtual Tensor call(const Tensor& x) = 0;
  /// `clone()` for code that does not know the class.
  virtual std::unique_ptr<Module> clone_module() const = 0;
  /// Whether the class has a copy constructor; without one `clone_module` throws StateError.
  virtual bool can_be_cloned() const = 0;

  /// Parameters of this module and below, depth first, named "child.weight"; a tied one once.
  std::vector<NamedParameter> named_parameters(Ties ties = Ties::once) const;
  /// The parameters of `named_parameters()`, without names.
  std::vector<Parameter> parameters() const;
  /// Buffers of this module and below, saved and transient.
  std::vector<NamedBuffer> named_buffers() const;
  /// This module (with the empty name) and those below, depth first.
  std::vector<NamedModule> named_modules();
  /// Elements of all parameters, tied ones counted once.
  std::int64_t parameter_count() const;

  bool training() const;
  /// Sets training or eval mode, of this module and those below.
  void train(bool training = true);
  void eval() { train(false); }
  /// Moves parameters, gradients and buffers; parameter objects stay the same. DeviceError where values are
  /// on `meta`, since there are none to move: see `materialize`. StateError, also from `to(DType)` and
  /// `materialize`, for a parameter that was sharded together with a module above this one, and within a
  /// forward, a backward or a scope of what is sharded; then nothing has moved.
  void to(Device device);
  /// Casts floating parameters, gradients and buffers.
  void to(DType dtype);
  /// The same but for modules that `leave_out` names and all below them, whose values stay as they are:
  /// `model.to(DType::bf16, nn::is_batch_norm)`. StateError for what is sharded, since shards are cast as a
  /// whole.
  void to(DType dtype, const std::function<bool(const Module&)>& leave_out);
  /// Moves the module to `device`, and gives what is on `meta` its memory there: `initialise` is called once
  /// for each such parameter and buffer, in the order of members, with a tensor of the whole shape that it
  /// must fill. A sharded module keeps this rank's part of that; equal calls on every rank draw the numbers
  /// that an unsharded module would. When `initialise` throws, all that was on `meta` is on `meta` again.
  /// DeviceError for the device `meta`.
  void materialize(Device device, const Initialise& initialise);
  /// Sets it for all parameters of this module and below.
  void set_requires_grad(bool requires_grad);
  /// Drops the gradients of all parameters.
  void zero_grad();

  /// Parameters and saved buffers by name, a tied parameter under its first; of sharded parameters this
  /// rank's parts, or in a scope that shows them whole the wholes. Tensors share memory with the module; a
  /// buffer that computes in another dtype than its own is a copy in its own.
  StateDict state_dict() const;
  /// Copies values in. ValueError for missing or unknown names (unless not strict) and for a name that comes
  /// twice, ShapeError for other shapes, DeviceError where one side is on `meta` and the other is not; dtypes
  /// are cast. A tied parameter may come under any of its names. Nothing is changed when it throws. What one
  /// side alone has is returned; nothing, if strict.
  Mismatch load_state_dict(const StateDict& state, Strict strict = Strict::yes);

  /// Calls `observer` around each forward until the subscription ends; several in the order in which they
  /// subscribed, and as often. `observer` must live as long. When the module is moved, the module that it was
  /// moved into is observed.
  Subscription observe(ModuleObserver& observer);
  /// Where this module is, for who asks later: the module that it was moved into, null once it is gone.
  std::shared_ptr<Module* const> whereabouts() const;

  /// Attaches an extension; a module has one at most (StateError).
  void extend(std::shared_ptr<ModuleExtension> extension);
  const std::shared_ptr<ModuleExtension>& extension() const;
  /// Forwards go through `compiled` from now on; null: they do not.
  void set_compiled(std::shared_ptr<CompiledForward> compiled);
  const std::shared_ptr<CompiledForward>& compiled() const;
  /// Whether a program's observer watches this module's forwards.
  bool watched() const;

 protected:
  Module(const Module& other);
  /// Calls `visitor` for each direct member, as `visit` names them.
  virtual void each_member(MemberVisitor& visitor) = 0;
  /// The ops of these names, which the functions above would hide from a `forward`.
  static Tensor to(const Tensor& x, DType dtype);
  static Tensor to(const Tensor& x, Device device);
  static Tensor clone(const Tensor& x);
  /// StateError when this module was moved from.
  void check_alive() const { state(); }
  bool observed() const;
  /// Whether its programs have in them what its extension does; not while observers, which come after that,
  /// watch the module.
  bool extension_inside() const;
  void fire_before(std::span<Tensor* const> inputs);
  void fire_after(std::span<Tensor* const> outputs);
  void fire_unknown(std::string_view type);
  void fire_failed() noexcept;
  /// Of an error that leaves this module's forward: if it is of a shape or dtype, says in it from which layer
  /// below it comes. Returns, or throws the error that says so in its place.
  void name_place(Error& error);

 private:
  struct State;
  State& state() const;
  void check_nothing_forgotten();
  std::shared_ptr<State> state_;
};

/// The module as a tree of names, classes and shapes of whole parameters, as `Linear(weight (4, 8), bias
/// (4))`; its last line is the number of their elements, each tied parameter counted once. Neighbours in a
/// list that are alike are one line.
SHERD_API std::string to_string(const Module& module);
SHERD_API std::ostream& operator<<(std::ostream& out, const Module& module);

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

template <class T>
concept NoMember =
    !std::derived_from<T, Param> && !std::derived_from<T, Buffer> && !std::derived_from<T, Module> &&
    !requires { requires std::derived_from<typename T::element_type, Module>; };

/// Calls the function of a MemberVisitor that fits the kind of member.
struct MemberSorter {
  MemberVisitor& visitor;
  void operator()(std::string_view name, Param& member) const { visitor.param(name, member); }
  void operator()(std::string_view name, Buffer& member) const { visitor.buffer(name, member); }
  void operator()(std::string_view name, Module& member) const { visitor.child(name, member); }
  template <std::derived_from<Module> M>
  void operator()(std::string_view name, const std::unique_ptr<M>& member) const {
    if (member) visitor.child(name, *member);
  }
  template <NoMember T>
  void operator()(std::string_view, T&) const {
    static_assert(
        sizeof(T) == 0,
        "visit: a member is a Param, a Buffer, a module or a unique_ptr to one; a list of layers is an "
        "nn::ModuleList, a list of parameters is visited one by one");
  }
};

}  // namespace detail

/// The base of a layer, with the layer itself as `D`, which has `forward` (any arguments, any result) and
/// `visit`.
template <class D>
class SHERD_API Layer : public Module {
 public:
  /// Runs `forward`, with observers called before and after it.
  template <class... A>
  auto operator()(A&&... args) {
    return run(static_cast<D&>(*this), std::forward<A>(args)...);
  }
  template <class... A>
  auto operator()(A&&... args) const {
    return run(static_cast<const D&>(*this), std::forward<A>(args)...);
  }

  std::string_view type_name() const override { return detail::short_type_name<D>(); }
  Tensor call(const Tensor& x) override;
  /// A copy with memory of its own: ties among its parameters are kept; observers, hooks and gradients are
  /// not copied. StateError for a parameter that was sharded with a module which is not cloned with it.
  D clone() const {
    const CloneScope scope;
    return D(static_cast<const D&>(*this));
  }
  std::unique_ptr<Module> clone_module() const override;
  bool can_be_cloned() const override { return std::is_copy_constructible_v<D>; }

 protected:
  using Module::clone;
  void each_member(MemberVisitor& visitor) override;

 private:
  /// While the module is observed, arguments that may hold tensors are copied, since observers may assign to
  /// these; others (a cache that `forward` fills) are passed as they are.
  template <class A>
  using Copied = std::conditional_t<may_hold_tensors<A>(), std::decay_t<A>, A&&>;
  template <class A>
  using Passed = std::conditional_t<std::is_lvalue_reference_v<A>, std::remove_reference_t<Copied<A>>&,
                                    std::remove_reference_t<Copied<A>>&&>;
  template <class A, class Item>
  static void collect(Item& item, std::vector<Tensor*>& inputs) {
    if constexpr (may_hold_tensors<A>()) each_tensor(item, [&](Tensor& t) { inputs.push_back(&t); });
  }

  template <class Self, class... A>
  static auto run(Self& self, A&&... args) {
    auto& module = const_cast<D&>(static_cast<const D&>(self));  // observers may change what they watch
    const auto forward = [&self](auto&&... items) -> decltype(auto) {
      return self.forward(std::forward<decltype(items)>(items)...);
    };
    try {
      if (!self.observed()) return run_forward(module, forward, std::forward<A>(args)...);
      if (module.extension_inside()) return run_inside(module, forward, std::forward<A>(args)...);
      return run_observed(
          module,
          [&](auto&&... items) {
            return run_forward(module, forward, std::forward<decltype(items)>(items)...);
          },
          std::forward<A>(args)...);
    } catch (Error& error) {
      module.name_place(error);
      throw;
    }
  }

  template <class Forward, class... A>
  static auto run_forward(D& module, const Forward& forward, A&&... args) {
    if (module.compiled() == nullptr) [[likely]]
      return forward(std::forward<A>(args)...);
    const std::shared_ptr<CompiledForward> compiled = module.compiled();  // the forward may end it
    using Result = decltype(forward(std::forward<A>(args)...));
    static constexpr char signature = 0;
    CompiledForward::Arguments arguments{&signature};
    (detail::describe(std::as_const(args), arguments.tensors, arguments.values, arguments.unfit), ...);
    if constexpr (!detail::can_be_made_again<Result>()) {
      arguments.unfit = "its result has no tensors, or cannot be copied";
      compiled->call(module, arguments, [] { return std::vector<Tensor>{}; }, {});
      return forward(std::forward<A>(args)...);
    } else {
      std::optional<Result> result;
      CompiledForward::Arguments lasting{&signature};
      (detail::describe_lasting<A>(args, lasting.tensors, lasting.values, lasting.unfit), ...);
      const CompiledForward::Result made = compiled->call(
          module, arguments,
          [&] {
            result.emplace(forward(std::forward<A>(args)...));
            CompiledForward::Arguments after{&signature};
            (detail::describe_lasting<A>(args, after.tensors, after.values, after.unfit), ...);
            if (after.values != lasting.values) arguments.unfit = "its forward writes an argument";
            return detail::tensors_of(*result);
          },
          [&] { return detail::form_of(*result); });
      if (result) return *std::move(result);
      return detail::made_again<Result>(made.form, made.outputs);
    }
  }

  /// Calls `before` with the tensors in the arguments, `forward`, and `after` with those in its result.
  template <class Before, class Forward, class After, class... A>
  static auto between(const Before& before, const Forward& forward, const After& after, A&&... args) {
    std::tuple<Copied<A>...> held(std::forward<A>(args)...);
    std::vector<Tensor*> inputs;
    std::apply([&](auto&... items) { (collect<A>(items, inputs), ...); }, held);
    before(inputs);
    auto result = std::apply([&](auto&... items) { return forward(static_cast<Passed<A>>(items)...); }, held);
    std::vector<Tensor*> outputs;
    each_tensor(result, [&](Tensor& t) { outputs.push_back(&t); });
    after(outputs);
    return result;
  }

  template <class Result>
  static void tell_of_unknown(D& module) {
    if constexpr (detail::holds<Result>() == detail::Holds::unknown)
      module.fire_unknown(detail::short_type_name<Result>());
  }

  template <class Forward, class... A>
  static auto run_observed(D& module, const Forward& forward, A&&... args) {
    using Result = std::decay_t<decltype(forward(std::forward<A>(args)...))>;
    try {
      return between([&](std::span<Tensor* const> inputs) { module.fire_before(inputs); }, forward,
                     [&](std::span<Tensor* const> outputs) {
                       tell_of_unknown<Result>(module);
                       module.fire_after(outputs);
                     },
                     std::forward<A>(args)...);
    } catch (...) {
      module.fire_failed();
      throw;
    }
  }

  /// The extension's hooks are a part of what is compiled, and it enters and leaves around that.
  template <class Forward, class... A>
  static auto run_inside(D& module, const Forward& forward, A&&... args) {
    using Result = std::decay_t<decltype(forward(std::forward<A>(args)...))>;
    const std::shared_ptr<ModuleExtension> extension = module.extension();
    const auto with_hooks = [&](auto&&... items) {
      return between([&](std::span<Tensor* const> inputs) { extension->before_forward(module, inputs); },
                     forward,
                     [&](std::span<Tensor* const> outputs) {
                       tell_of_unknown<Result>(module);
                       extension->after_forward(module, outputs);
                     },
                     std::forward<decltype(items)>(items)...);
    };
    try {
      return between([&](std::span<Tensor* const> inputs) { extension->enter(module, inputs); },
                     [&](auto&&... items) {
                       return run_forward(module, with_hooks, std::forward<decltype(items)>(items)...);
                     },
                     [&](std::span<Tensor* const> outputs) { extension->leave(module, outputs); },
                     std::forward<A>(args)...);
    } catch (...) {
      module.fire_failed();
      throw;
    }
  }
};

// Outside the class and not inline, so that a layer whose instance is declared `extern` is compiled once.

template <class D>
Tensor Layer<D>::call(const Tensor& x) {
  if constexpr (requires(D& d) {
                  { d.forward(x) } -> std::convertible_to<Tensor>;
                })
    return (*this)(x);
  else
    fail<StateError>("{}: does not map one tensor to one tensor, so it cannot stand in a Sequential",
                     type_name());
}

template <class D>
std::unique_ptr<Module> Layer<D>::clone_module() const {
  if constexpr (std::is_copy_constructible_v<D>) {
    const CloneScope scope;
    return std::make_unique<D>(static_cast<const D&>(*this));
  } else {
    fail<StateError>(
        "{}: has a member that cannot be copied (a unique_ptr), so it cannot be cloned; give it a copy "
        "constructor that clones what the member points to",
        type_name());
  }
}

template <class D>
void Layer<D>::each_member(MemberVisitor& visitor) {
  static_cast<D&>(*this).visit(detail::MemberSorter{visitor});
}

}  // namespace sherd::nn
