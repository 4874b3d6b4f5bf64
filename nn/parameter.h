// What PyTorch calls a parameter is three things here: the member of a module (`Param`); the slot behind the
// member, which keeps its address when the module moves; and the object in the slot (`Parameter`), which
// optimizers hold and tied members share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/group.h"
#include "runtime/tensor.h"

namespace sherd::nn {

class Parameter;

/// Where something whole meets a parameter of which its owner keeps a part.
enum class WholeOf { values, optimizer_state, gradient, clone };

/// What optimizers did to a parameter, by which the ranks that share it find out that some of them lost a
/// step (`shard/lost_steps.h`). Alike on all of them.
struct StepCount {
  std::int64_t steps = 0;    ///< that were to step it: also without a gradient, and left out (`step_unless`)
  std::int64_t written = 0;  ///< of these, those that had a gradient, since its values were loaded
  std::int64_t state = 0;    ///< the same, since the optimizer's state was made or loaded
  bool broken_off = false;   ///< one of them threw while it wrote
  std::shared_ptr<const std::string> checkpoint{};  ///< the last that was saved of it or loaded; for messages

  /// Other values came, of which that many steps were taken.
  void load(std::int64_t taken) { steps = taken, written = 0, broken_off = false; }
};

/// The interface of what keeps the values of parameters in a form of its own: a sharded module keeps one
/// shard for many parameters.
class SHERD_API ParameterOwner {
 public:
  virtual ~ParameterOwner();
  /// The value of `Parameter::data()`: this rank's part, or the whole parameter while it is gathered.
  virtual Tensor data(const Parameter& parameter) const = 0;
  /// Takes over the values of `data`, this rank's part or the whole, of which it keeps its part; ShapeError
  /// for another shape.
  virtual void set_data(const Parameter& parameter, const Tensor& data) = 0;
  /// What a module's own state has: this rank's part, or the whole in a scope of the program's that shows it.
  virtual Tensor state(const Parameter& parameter) const = 0;
  /// Keeps this rank's part of `whole`, which has the whole parameter's shape (ShapeError).
  virtual void set_whole(const Parameter& parameter, const Tensor& whole) = 0;
  /// Called before `local()` of its parameters is written on all ranks: an optimizer steps, a state is
  /// loaded.
  virtual void before_write() = 0;
  /// The groups whose ranks hold parts or replicas of the parameter, alike on all of them; none where this
  /// rank has it alone.
  virtual std::vector<Group> ranks(const Parameter& parameter) const = 0;
  /// The program sets its gradient to zeros, on all ranks alike: also what `.grad` does not show just now.
  virtual void zeroed(const Parameter& parameter) = 0;
  /// StateError for a parameter that an optimizer cannot step, because another stands for it, or its gradient
  /// is this rank's own.
  virtual void check_steppable(const Parameter& parameter) const = 0;
  /// StateError for a parameter that is given a gradient which nobody would read, because another stands for
  /// it.
  virtual void check_gradient_taken(const Parameter& parameter) const = 0;
  /// For messages: why the whole does not fit `parameter`, and the way out.
  virtual std::string explain(const Parameter& parameter, WholeOf whole) const = 0;
  /// Called after `set_requires_grad` of `parameter`.
  virtual void requires_grad_changed(const Parameter& parameter) = 0;
  /// Called when a module is moved over another one: the member that held `parameter` in slot `from` holds it
  /// in slot `to` now.
  virtual void member_moved(const Parameter& parameter, const Parameter* from,
                            const std::shared_ptr<const Parameter>& to) noexcept = 0;
  /// What optimizers step in the place of `parameter`: itself, or a flat one that it is in.
  virtual Parameter stepped_as(const Parameter& parameter) const;
};

/// A handle on a parameter object. Copies name the same object, which is what `==` compares. A handle made
/// without values is empty: everything but `defined`, `==` and `id` throws StateError.
class SHERD_API Parameter {
 public:
  Parameter() = default;
  /// A parameter with the memory of `data`. StateError for an empty handle, DTypeError for a dtype that is
  /// not floating unless `requires_grad` is false.
  explicit Parameter(Tensor data, bool requires_grad = true);

  /// A parameter whose `tensor()` is `values` itself, with what that was computed from: for a call, see
  /// nn/functional_call.h. StateError for an empty handle.
  static Parameter standing_in(Tensor values);

  bool defined() const { return static_cast<bool>(state_); }
  friend bool operator==(const Parameter& a, const Parameter& b) { return a.state_ == b.state_; }
  /// Identifies the object (not its values) in maps.
  const void* id() const { return state_.get(); }

  /// What forward uses: the whole parameter.
  const Tensor& tensor() const { return state("tensor").used; }
  operator const Tensor&() const { return tensor(); }
  /// What the optimizer updates and what has the gradient: this rank's part; without sharding the whole.
  const Tensor& local() const { return state("local").local; }
  /// The values as a detached tensor: of a sharded parameter this rank's part, or the whole while it is
  /// gathered.
  Tensor data() const;
  /// Uses the memory of `data` as the values from now on; shape and dtype may change with it. Of a sharded
  /// parameter `local()` takes the values, or this rank's part of a whole (ShapeError for another shape).
  /// Gradient and hooks stay. StateError for an empty handle.
  void set_data(Tensor data);
  /// The gradient of `local()`; `set_grad` takes any shape, dtype and device, an empty handle is none.
  /// StateError of `set_grad` for a part of a flat parameter, which has the gradient.
  Tensor grad() const { return state("grad").local.grad(); }
  void set_grad(Tensor grad);
  bool requires_grad() const { return state("requires_grad").requires_grad; }
  void set_requires_grad(bool requires_grad);
  /// Shape and number of elements of the whole parameter.
  const Shape& shape() const { return state("shape").shape; }
  std::int64_t numel() const { return shape().numel(); }
  DType dtype() const { return local().dtype(); }
  Device device() const { return local().device(); }
  /// Of a parameter in a flat one, the flat one has it.
  StepCount& step_count() const { return state("step_count").steps; }
  /// Other values are there, of which optimizers took that many steps.
  void loaded(std::int64_t steps) const;
  /// A part of `tensor()`: see runtime/indexing.h.
  Indexed operator[](const At& at) const;
  Indexed operator[](std::initializer_list<At> at) const;

  /// The tensors that an owner gives to a parameter: `local` is stepped and has the gradient, `used` is what
  /// forward reads, `shape` is that of the whole.
  struct Owned {
    ParameterOwner* owner;
    Tensor local, used;
    Shape shape;
  };
  /// Hands the values to an owner. Gradient and hooks after accumulation go from `local()` to the new one,
  /// and from `tensor()` where that is another leaf. Hooks, registered with either at any time, see the
  /// gradients that come to `used`.
  void set_owner(Owned owned);
  /// Who keeps the values, or null. The owner calls `leave_owner` before it is destroyed.
  ParameterOwner* owner() const { return state("owner").owner; }
  void leave_owner() { state("leave_owner").owner = nullptr; }
  /// The name of the member for which the owner has another object now, and left this one; else empty.
  const std::string& replaced_as() const { return state("replaced_as").replaced_as; }
  void leave_owner_to_another(std::string name);

 private:
  struct State : RefCounted {
    ParameterOwner* owner = nullptr;
    std::string replaced_as;
    Tensor local, used;
    Shape shape;
    bool requires_grad = true;
    StepCount steps;
  };
  State& state(std::string_view call) const {
    if (!state_) refuse(call);
    return *state_;
  }
  [[noreturn]] static void refuse(std::string_view call);
  Ref<State> state_;
};

/// A module's member: a slot that holds a parameter object. The slot keeps its address when the module moves;
/// `set` replaces the object in it. Converts to the tensor that forward uses; one without an object is "none"
/// (a layer without bias), and reading its values, gradient or shape throws StateError. So does everything
/// but `defined`, `set` and assignment once its module was moved from.
class SHERD_API Param {
 public:
  Param() : slot_(std::make_shared<Parameter>()) {}
  explicit Param(Tensor data, bool requires_grad = true)
      : slot_(std::make_shared<Parameter>(std::move(data), requires_grad)) {}
  /// Only `clone()` of a module may copy (StateError otherwise). The copy has a new object with its own
  /// memory; members that shared an object share the new one.
  Param(const Param& other);
  Param(Param&&) noexcept = default;
  Param& operator=(Param&& other) noexcept;
  /// Puts another object into the slot.
  Param& operator=(Parameter object) {
    set(std::move(object));
    return *this;
  }

  bool defined() const { return slot_ && slot_->defined(); }
  operator const Tensor&() const { return tensor(); }
  /// The object, for optimizers and `init`: `init::normal_(layer.weight)`.
  operator const Parameter&() const { return object(); }
  /// What forward uses; an undefined tensor for "none".
  const Tensor& tensor() const;
  /// The object in the slot.
  const Parameter& object() const { return slot("object"); }
  void set(Parameter object);
  /// The slot itself, for who wants to know later which object is in it. It may outlive the member.
  std::shared_ptr<const Parameter> shared_slot() const { return slot_; }

  Tensor data() const { return slot("data").data(); }
  void set_data(Tensor data) { slot("set_data").set_data(std::move(data)); }
  const Tensor& local() const { return slot("local").local(); }
  Tensor grad() const { return slot("grad").grad(); }
  void set_grad(Tensor grad) { slot("set_grad").set_grad(std::move(grad)); }
  const Shape& shape() const { return slot("shape").shape(); }
  std::int64_t numel() const { return shape().numel(); }
  DType dtype() const { return slot("dtype").dtype(); }
  Device device() const { return slot("device").device(); }
  Indexed operator[](const At& at) const;
  Indexed operator[](std::initializer_list<At> at) const;
  bool requires_grad() const { return slot("requires_grad").requires_grad(); }
  void set_requires_grad(bool requires_grad) { slot("set_requires_grad").set_requires_grad(requires_grad); }

 private:
  Parameter& slot(std::string_view call) const {
    if (!slot_) refuse(call);
    return *slot_;
  }
  [[noreturn]] static void refuse(std::string_view call);
  std::shared_ptr<Parameter> slot_;
};

/// Whether a buffer is part of the state dict.
enum class Persistence { saved, transient };

/// A tensor of a module that no optimizer updates (running statistics). Moves, and is saved, with the module.
class SHERD_API Buffer {
 public:
  Buffer() = default;
  explicit Buffer(Tensor data, Persistence persistence = Persistence::saved) : persistence_(persistence) {
    set(std::move(data));
  }
  /// Only `clone()` of a module may copy (StateError otherwise).
  Buffer(const Buffer& other);
  Buffer(Buffer&&) noexcept = default;
  Buffer& operator=(Buffer&&) noexcept = default;

  operator const Tensor&() const { return data_; }
  const Tensor& tensor() const { return data_; }
  /// A part of it: see runtime/indexing.h.
  Indexed operator[](const At& at) const;
  Indexed operator[](std::initializer_list<At> at) const;
  /// Replaces the tensor. If its dtype is another, that becomes the buffer's own.
  void set(Tensor data);
  Persistence persistence() const { return persistence_; }

  /// Casts the tensor that forward reads. The dtype before stays the buffer's own, in which state dicts hold
  /// it.
  void compute_in(DType dtype);
  DType own_dtype() const { return own_dtype_.value_or(data_.dtype()); }
  /// The values in the buffer's own dtype: as they were before `compute_in`, until something writes or
  /// replaces the tensor that forward reads; then these, cast.
  Tensor values() const;
  /// Copies `values` in (ShapeError), in the buffer's own dtype and in the one that forward reads.
  void load(const Tensor& values);
  /// Replaces the values, and the tensor that forward reads, by what `change` returns for them.
  void change(const std::function<Tensor(const Tensor&)>& change);

 private:
  void keep(Tensor values, Tensor used);

  Tensor data_;
  Persistence persistence_ = Persistence::saved;
  std::optional<DType> own_dtype_{};  // where it is not the tensor's
  Tensor values_{};                   // in it, while the tensor's storage has `version_`; may be empty
  std::uint32_t version_ = 0;
};

/// Puts the parameter object of `a` into `b` (ShapeError unless the shapes are equal). The two count, save
/// and step as one. StateError for empty ones.
SHERD_API void tie(Param& a, Param& b);

/// What `clone()` of a module made.
struct ClonedParameters {
  /// Of a parameter that the module has, or had before another was tied in its place, the copy.
  std::function<Parameter(const Parameter&)> object;
  /// Of a member's slot that of the clone's member; null where the module has no such member any more.
  std::function<std::shared_ptr<const Parameter>(const Parameter* slot)> slot;
};

/// A scope in which a module's `clone()` runs, and copying members is allowed. Remembers which parameters
/// were copied, so that members that share one share its copy too.
class SHERD_API CloneScope {
 public:
  CloneScope();
  /// What `afterwards` was given runs here, and may throw. StateError for a parameter whose owner was not
  /// cloned with it: its copy would be a part.
  ~CloneScope() noexcept(false);
  /// Runs `act` at the end of the outermost scope, when all members are copied; not when the clone threw.
  /// StateError outside a scope.
  static void afterwards(std::function<void(const ClonedParameters&)> act);
  CloneScope(const CloneScope&) = delete;
  CloneScope& operator=(const CloneScope&) = delete;

 private:
  bool outermost_;
  int exceptions_;
};

}  // namespace sherd::nn
