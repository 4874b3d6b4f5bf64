// Three things that PyTorch calls a parameter, apart: the member of a module (`Param`), the slot behind it,
// which does not move when the module does, and the object in the slot (`Parameter`), which optimizers hold
// and tied members share.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "runtime/tensor.h"

namespace sherd::nn {

class Parameter;

/// Keeps the values of parameters in a form of its own: a sharded group.
class SHERD_API ParameterHost {
 public:
  virtual ~ParameterHost();
  /// What the user sees now.
  virtual Tensor data(const Parameter& parameter) const = 0;
  /// Other values for what the user sees; ShapeError for another shape.
  virtual void set_data(const Parameter& parameter, const Tensor& data) = 0;
  /// `local()` of its parameters is about to be written, on every rank alike: an optimizer steps, a state is
  /// loaded.
  virtual void before_write() = 0;
};

/// A parameter object. Copying shares it; two equal handles are one parameter.
class SHERD_API Parameter {
 public:
  Parameter() = default;
  /// Takes `data` as a leaf.
  explicit Parameter(Tensor data, bool requires_grad = true);

  bool defined() const { return static_cast<bool>(state_); }
  explicit operator bool() const { return defined(); }
  friend bool operator==(const Parameter& a, const Parameter& b) { return a.state_ == b.state_; }
  /// Identifies the object (not its values) in maps.
  const void* id() const { return state_.get(); }

  /// What forward uses.
  const Tensor& tensor() const { return state_->used; }
  /// What the optimizer updates: this rank's part, the whole without sharding.
  const Tensor& local() const { return state_->local; }
  /// What the user sees now, without history.
  Tensor data() const;
  /// Replaces the values by another tensor's memory; shape and dtype may change with it. The object stays.
  void set_data(Tensor data);
  /// The gradient: a free slot of any shape, dtype and device; empty is none.
  Tensor grad() const { return state_->local.grad(); }
  void set_grad(Tensor grad) { state_->local.set_grad(std::move(grad)); }
  bool requires_grad() const { return state_->requires_grad; }
  void set_requires_grad(bool requires_grad);
  /// Of the whole parameter.
  const Shape& shape() const { return state_->shape; }
  std::int64_t numel() const { return state_->shape.numel(); }

  /// The faces that a host gives it. `local` goes on as the leaf that the earlier one was.
  struct Hosted {
    ParameterHost* host;
    Tensor local, used;
    Shape shape;  ///< of the whole
  };
  void host(Hosted hosted);
  /// Its host, or null. The host ends this (with `leave_host`) before it dies.
  ParameterHost* host() const { return state_->host; }
  void leave_host() { state_->host = nullptr; }

 private:
  struct State : RefCounted {
    ParameterHost* host = nullptr;
    Tensor local, used;
    Shape shape;
    bool requires_grad = true;
  };
  Ref<State> state_;
};

/// A module's member. Its slot is stable when the module moves; `set` replaces the object in it. Converts to
/// the tensor that forward uses; one without an object is "none" (a layer without bias).
class SHERD_API Param {
 public:
  Param() : slot_(std::make_unique<Parameter>()) {}
  explicit Param(Tensor data, bool requires_grad = true)
      : slot_(std::make_unique<Parameter>(std::move(data), requires_grad)) {}
  /// Only `clone()` of a module copies (StateError otherwise): a new object with its own memory, ties kept.
  Param(const Param& other);
  Param(Param&&) noexcept = default;
  Param& operator=(Param&& other) noexcept;
  /// Puts another object into the slot.
  Param& operator=(Parameter object) {
    *slot_ = std::move(object);
    return *this;
  }

  bool defined() const { return slot_ && slot_->defined(); }
  explicit operator bool() const { return defined(); }
  operator const Tensor&() const { return tensor(); }
  const Tensor& tensor() const;
  /// The object in the slot.
  const Parameter& object() const { return *slot_; }
  void set(Parameter object) { *slot_ = std::move(object); }

  Tensor data() const { return slot_->data(); }
  void set_data(Tensor data) { slot_->set_data(std::move(data)); }
  const Tensor& local() const { return slot_->local(); }
  Tensor grad() const { return slot_->grad(); }
  void set_grad(Tensor grad) { slot_->set_grad(std::move(grad)); }
  const Shape& shape() const { return slot_->shape(); }

 private:
  std::unique_ptr<Parameter> slot_;
};

/// Whether a buffer is part of the state dict.
enum class Persistence { saved, transient };

/// A tensor of a module that no optimizer updates (running statistics). Moves and is saved with the module.
class SHERD_API Buffer {
 public:
  Buffer() = default;
  explicit Buffer(Tensor data, Persistence persistence = Persistence::saved)
      : data_(std::move(data)), persistence_(persistence) {}
  /// Only `clone()` of a module copies (StateError otherwise).
  Buffer(const Buffer& other);
  Buffer(Buffer&&) noexcept = default;
  Buffer& operator=(Buffer&&) noexcept = default;

  operator const Tensor&() const { return data_; }
  const Tensor& tensor() const { return data_; }
  void set(Tensor data) { data_ = std::move(data); }
  Persistence persistence() const { return persistence_; }

 private:
  Tensor data_;
  Persistence persistence_ = Persistence::saved;
};

/// Makes `b` the same parameter as `a` (shapes must be equal: ShapeError). They count, save and step as one.
SHERD_API void tie(Param& a, Param& b);

/// The copy of a parameter of the module that is being cloned.
using ClonedParameters = std::function<Parameter(const Parameter&)>;

/// The scope of one module's `clone()`: what was copied already, so that ties survive.
class SHERD_API CloneScope {
 public:
  CloneScope();
  ~CloneScope() noexcept(false);  // what waits for the end may fail
  /// Runs `act` when all members are copied.
  static void afterwards(std::function<void(const ClonedParameters&)> act);
  CloneScope(const CloneScope&) = delete;
  CloneScope& operator=(const CloneScope&) = delete;

 private:
  bool outermost_;
  int exceptions_;
};

}  // namespace sherd::nn
