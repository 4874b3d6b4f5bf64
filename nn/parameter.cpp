#include "nn/parameter.h"

#include <exception>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/autograd.h"
#include "nn/copy_record.h"
#include "nn/shared_gradients.h"
#include "runtime/context.h"
#include "runtime/indexing.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

Tensor copy_of(const Tensor& t) {
  const NoGrad guard;
  return t.defined() ? clone(t.detach()) : Tensor{};
}

/// The `clone()` or `CopyRecord` that is under way on this rank.
struct Cloning {
  bool active = false;
  CopyRecord* record = nullptr;
  struct Copied {
    Parameter from, to;
  };
  std::unordered_map<const void*, Copied> copies;  // by id
  std::unordered_map<const Parameter*, std::shared_ptr<const Parameter>> slots;
  std::vector<std::function<void(const ClonedParameters&)>> afterwards;

  /// Of a parameter that an owner keeps, the owner's clone takes the copy over at the end.
  const Parameter& copy(const Parameter& p) {
    Copied& copied = copies[p.id()];
    if (copied.to.defined()) return copied.to;
    copied = {p, Parameter(copy_of(p.local()), p.requires_grad())};
    copied.to.step_count() = p.step_count();
    return copied.to;
  }
};
Cloning& cloning() { return Context::current().slot<Cloning>(); }

void check_cloning() {
  check<StateError>(
      cloning().active,
      "nn: modules are move-only, because a silent copy would untie and unshard them; use clone()");
}

}  // namespace

CloneScope::CloneScope() : outermost_(!cloning().active), exceptions_(std::uncaught_exceptions()) {
  cloning().active = true;
}
CloneScope::~CloneScope() noexcept(false) {
  if (!outermost_) return;
  Cloning done = std::exchange(cloning(), {});
  if (std::uncaught_exceptions() > exceptions_) return;
  const ClonedParameters cloned{[&](const Parameter& p) { return done.copy(p); },
                                [&](const Parameter* slot) {
                                  const auto found = done.slots.find(slot);
                                  return found != done.slots.end() ? found->second : nullptr;
                                }};
  for (const auto& act : done.afterwards) act(cloned);
  for (const auto& [id, copied] : done.copies) {
    const ParameterOwner* owner = copied.from.owner();
    check<StateError>(owner == nullptr || copied.to.owner() != nullptr, "clone: {}",
                      owner == nullptr ? "" : owner->explain(copied.from, WholeOf::clone));
  }
}
void CloneScope::afterwards(std::function<void(const ClonedParameters&)> act) {
  check_cloning();
  cloning().afterwards.push_back(std::move(act));
}

struct CopyRecord::Outer {
  Cloning cloning;
};

CopyRecord::CopyRecord() : outer_(std::make_unique<Outer>(std::exchange(cloning(), {}))) {
  cloning().active = true;
  cloning().record = this;
}
CopyRecord::~CopyRecord() { cloning() = std::move(outer_->cloning); }
CopyRecord* CopyRecord::current() { return cloning().record; }
void CopyRecord::add(const void* member, std::string what) { members_.push_back({member, std::move(what)}); }

Parameter::Parameter(Tensor data, bool requires_grad) : state_(make_ref<State>()) {
  check<StateError>(data.defined(), "parameter: the tensor is empty; give one with values, or on meta");
  check<DTypeError>(!requires_grad || is_floating(data.dtype()),
                    "parameter: only floating parameters are trained, got {}; pass "
                    "requires_grad = false",
                    name_of(data.dtype()));
  state_->requires_grad = requires_grad;
  set_data(std::move(data));
}

Parameter Parameter::standing_in(Tensor values) {
  check<StateError>(values.defined(), "parameter: the tensor is empty; give one with values, or on meta");
  Parameter made;
  made.state_ = make_ref<State>();
  made.state_->requires_grad = values.requires_grad();
  made.state_->shape = values.shape();
  made.state_->local = made.state_->used = std::move(values);
  return made;
}

ParameterOwner::~ParameterOwner() = default;
SharedGradients::~SharedGradients() = default;

void Parameter::refuse(std::string_view call) {
  fail<StateError>(
      "Parameter::{}: the parameter is empty, as that of a layer without bias; ask defined() first", call);
}

Tensor Parameter::data() const {
  const State& s = state("data");
  return s.owner != nullptr ? s.owner->data(*this) : s.used.detach();
}

Parameter ParameterOwner::stepped_as(const Parameter& parameter) const { return parameter; }

void Parameter::loaded(std::int64_t steps) const {
  const State& s = state("loaded");
  (s.owner == nullptr ? *this : s.owner->stepped_as(*this)).step_count().load(steps);
}

void Parameter::set_owner(Owned owned) {
  State& s = state("set_owner");
  const bool apart = s.local.impl() != s.used.impl();
  if (is_floating(s.used.dtype()) && owned.local.impl() != owned.used.impl()) {
    share_hooks(s.used, owned.used);
    if (apart) share_post_accumulate_hooks(s.used, owned.used);
  }
  continue_leaf(s.local, owned.local);
  owned.local.requires_grad_(s.requires_grad);
  owned.used.requires_grad_(s.requires_grad);
  s.owner = owned.owner;
  s.replaced_as.clear();
  s.local = std::move(owned.local);
  s.used = std::move(owned.used);
  s.local.storage().set_use(MemoryUse::parameters);
  s.shape = std::move(owned.shape);
}

void Parameter::set_data(Tensor data) {
  State& s = state("set_data");
  check<StateError>(data.defined(), "Parameter::set_data: the tensor is empty; give one with values");
  if (s.owner != nullptr) return s.owner->set_data(*this, data);
  Tensor fresh = data.detach();
  continue_leaf(s.local, fresh);
  fresh.requires_grad_(s.requires_grad);
  s.shape = fresh.shape();
  s.local = s.used = fresh;
  fresh.storage().set_use(MemoryUse::parameters);
}

void Parameter::set_grad(Tensor grad) {
  State& s = state("set_grad");
  if (s.owner != nullptr && grad.defined()) s.owner->check_gradient_taken(*this);
  s.local.set_grad(std::move(grad));
}

void Parameter::leave_owner_to_another(std::string name) {
  leave_owner();
  state_->replaced_as = std::move(name);
}

void Parameter::set_requires_grad(bool requires_grad) {
  State& s = state("set_requires_grad");
  s.local.requires_grad_(requires_grad);
  if (s.used.impl() != s.local.impl()) s.used.requires_grad_(requires_grad);
  s.requires_grad = requires_grad;
  if (s.owner != nullptr) s.owner->requires_grad_changed(*this);
}

Param::Param(const Param& other) : Param() {
  check_cloning();
  if (CopyRecord* record = CopyRecord::current()) {
    if (other.defined()) record->add(&other, fmt::format("Param of shape {}", other.shape()));
    return;
  }
  cloning().slots[other.slot_.get()] = slot_;
  if (other.defined()) *slot_ = cloning().copy(other.object());
}

Param& Param::operator=(Param&& other) noexcept {
  // The object moves into this slot; code that keeps this member's address goes on with the new object.
  if (!slot_ || !other.slot_) {
    slot_ = std::move(other.slot_);
    return *this;
  }
  *slot_ = std::move(*other.slot_);
  if (slot_->defined() && slot_->owner() != nullptr)
    slot_->owner()->member_moved(*slot_, other.slot_.get(), slot_);
  return *this;
}

void Param::set(Parameter object) {
  if (!slot_) slot_ = std::make_shared<Parameter>();
  *slot_ = std::move(object);
}

void Param::refuse(std::string_view call) {
  fail<StateError>("Param::{}: its module was moved from; use the one that it was moved into", call);
}

const Tensor& Param::tensor() const {
  static const Tensor none;
  const Parameter& object = slot("tensor");
  return object.defined() ? object.tensor() : none;
}

Indexed Parameter::operator[](const At& at) const { return tensor()[at]; }
Indexed Parameter::operator[](std::initializer_list<At> at) const { return tensor()[at]; }
Indexed Param::operator[](const At& at) const { return tensor()[at]; }
Indexed Param::operator[](std::initializer_list<At> at) const { return tensor()[at]; }

Indexed Buffer::operator[](const At& at) const { return tensor()[at]; }
Indexed Buffer::operator[](std::initializer_list<At> at) const { return tensor()[at]; }

Buffer::Buffer(const Buffer& other) : persistence_(other.persistence_) {
  check_cloning();
  if (CopyRecord* record = CopyRecord::current()) {
    if (other.data_.defined()) record->add(&other, "Buffer");
  } else if (other.data_.defined()) {
    const Tensor values = copy_of(other.values());
    keep(values, other.own_dtype_ ? copy_of(other.data_) : values);
  }
}

void Buffer::set(Tensor data) {
  if (!data.defined() || !data_.defined() || data.dtype() != data_.dtype()) own_dtype_.reset();
  values_ = {};
  data_ = std::move(data);
  if (data_.defined()) data_.storage().set_use(MemoryUse::parameters);
}

Tensor Buffer::values() const {
  const NoGrad guard;
  const bool kept = values_.defined() && data_.storage().version() == version_;
  return kept ? values_ : data_.defined() ? to(data_, own_dtype()) : data_;
}

/// Two tensors where the dtypes differ, one where they do not.
void Buffer::keep(Tensor values, Tensor used) {
  const bool apart = values.dtype() != used.dtype();
  set(apart ? std::move(used) : values);
  own_dtype_ = apart ? std::optional(values.dtype()) : std::nullopt;
  if (!apart) return;
  version_ = data_.storage().version();
  values_ = std::move(values);
  values_.storage().set_use(MemoryUse::parameters);
}

void Buffer::compute_in(DType dtype) {
  const NoGrad guard;
  if (dtype == data_.dtype()) return;
  const Tensor own = values();
  keep(own, to(own, dtype));
}

void Buffer::load(const Tensor& values) {
  const NoGrad guard;
  if (!own_dtype_) {
    copy_(data_, values);
    return;
  }
  values_ = copy_(empty({data_.shape(), *own_dtype_, data_.device()}), values);
  copy_(data_, values_);
  version_ = data_.storage().version();
}

void Buffer::change(const std::function<Tensor(const Tensor&)>& change) {
  const NoGrad guard;
  const Tensor own = change(values());
  keep(own, own_dtype_ ? change(data_) : own);
}

void tie(Param& a, Param& b) {
  check<ShapeError>(a.shape() == b.shape(), "tie: parameters of shape {} and {}", a.shape(), b.shape());
  b.set(a.object());
}

}  // namespace sherd::nn
