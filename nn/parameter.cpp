#include "nn/parameter.h"

#include <exception>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/autograd.h"
#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

struct Cloning {
  bool active = false;
  std::unordered_map<const void*, Parameter> copies;
  std::vector<std::function<void(const ClonedParameters&)>> afterwards;
};
Cloning& cloning() { return Context::current().slot<Cloning>(); }

void check_cloning() {
  check<StateError>(
      cloning().active,
      "nn: modules are move-only, because a silent copy would untie and unshard them; use clone()");
}

Tensor copy_of(const Tensor& t) {
  const NoGrad guard;
  return t.defined() ? clone(t.detach()) : Tensor{};
}

}  // namespace

CloneScope::CloneScope() : outermost_(!cloning().active), exceptions_(std::uncaught_exceptions()) {
  cloning().active = true;
}
CloneScope::~CloneScope() noexcept(false) {
  if (!outermost_) return;
  const Cloning done = std::exchange(cloning(), {});
  if (std::uncaught_exceptions() > exceptions_) return;
  for (const auto& act : done.afterwards) act([&](const Parameter& p) { return done.copies.at(p.id()); });
}
void CloneScope::afterwards(std::function<void(const ClonedParameters&)> act) {
  check_cloning();
  cloning().afterwards.push_back(std::move(act));
}

Parameter::Parameter(Tensor data, bool requires_grad) : state_(make_ref<State>()) {
  check<DTypeError>(!requires_grad || is_floating(data.dtype()),
                    "parameter: only floating parameters are trained, got {}; pass "
                    "requires_grad = false",
                    name_of(data.dtype()));
  state_->requires_grad = requires_grad;
  set_data(std::move(data));
}

ParameterHost::~ParameterHost() = default;

Tensor Parameter::data() const {
  return state_->host != nullptr ? state_->host->data(*this) : state_->used.detach();
}

void Parameter::host(Hosted hosted) {
  if (state_->local.defined()) continue_leaf(state_->local, hosted.local);
  hosted.local.requires_grad_(state_->requires_grad);
  hosted.used.requires_grad_(state_->requires_grad);
  state_->host = hosted.host;
  state_->local = std::move(hosted.local);
  state_->used = std::move(hosted.used);
  state_->shape = std::move(hosted.shape);
}

void Parameter::set_data(Tensor data) {
  if (state_->host != nullptr) return state_->host->set_data(*this, data);
  Tensor fresh = data.detach();
  continue_leaf(state_->local, fresh);
  fresh.requires_grad_(state_->requires_grad);
  state_->shape = fresh.shape();
  state_->local = state_->used = fresh;
}

void Parameter::set_requires_grad(bool requires_grad) {
  state_->requires_grad = requires_grad;
  state_->local.requires_grad_(requires_grad);
  if (state_->host != nullptr) state_->used.requires_grad_(requires_grad);
}

Param::Param(const Param& other) : Param() {
  check_cloning();
  if (!other.defined()) return;
  Parameter& copy = cloning().copies[other.object().id()];
  // A hosted one gets its host from the module's extension, when all is copied.
  if (!copy.defined()) copy = Parameter(copy_of(other.object().local()), other.object().requires_grad());
  *slot_ = copy;
}

Param& Param::operator=(Param&& other) noexcept {
  // The object moves, the slot stays: whoever watches this member keeps watching it.
  if (slot_ && other.slot_)
    *slot_ = std::move(*other.slot_);
  else
    slot_ = std::move(other.slot_);
  return *this;
}

const Tensor& Param::tensor() const {
  static const Tensor none;
  return defined() ? slot_->tensor() : none;
}

Buffer::Buffer(const Buffer& other) : persistence_(other.persistence_) {
  check_cloning();
  data_ = copy_of(other.data_);
}

void tie(Param& a, Param& b) {
  check<ShapeError>(a.shape() == b.shape(), "tie: parameters of shape {} and {}", a.shape(), b.shape());
  b.set(a.object());
}

}  // namespace sherd::nn
