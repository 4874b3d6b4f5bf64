#include "nn/module.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::nn {

MemberVisitor::~MemberVisitor() = default;
ModuleObserver::~ModuleObserver() = default;

std::vector<NamedParameter> ModuleExtension::own_parameters() const { return {}; }
bool ModuleExtension::hides(const Parameter&) const { return false; }

struct Module::State {
  bool training = true;
  std::shared_ptr<ModuleExtension> extension;
  std::vector<ModuleObserver*> observers;  // the extension first
};

Module::Module() : state_(std::make_shared<State>()) {}
Module::~Module() = default;
Module::Module(Module&&) noexcept = default;
Module& Module::operator=(Module&&) noexcept = default;
Module::Module(const Module& other) : Module() {
  state_->training = other.state_->training;
  if (const auto& extension = other.state_->extension)
    CloneScope::afterwards([extension, state = state_](const ClonedParameters& copy_of) {
      state->extension = extension->clone(copy_of);
      state->observers.insert(state->observers.begin(), state->extension.get());
    });
}

void Module::extend(std::shared_ptr<ModuleExtension> extension) {
  check<StateError>(!state_->extension, "{}: it is sharded already; a module is sharded once", type_name());
  state_->extension = std::move(extension);
  state_->observers.insert(state_->observers.begin(), state_->extension.get());
}
const std::shared_ptr<ModuleExtension>& Module::extension() const { return state_->extension; }

namespace {

/// Walks a module and all below, depth first, with full names.
class Walk final : public MemberVisitor {
 public:
  std::function<void(const std::string&, const Parameter&)> on_param;
  std::function<void(const std::string&, Buffer&)> on_buffer;
  std::function<void(const std::string&, Module&)> on_module;

  void run(const Module& root) {
    auto& module = const_cast<Module&>(root);  // a walk that only reads shares the members' one visit
    if (on_module) on_module(prefix_, module);
    const ModuleExtension* extension = module.extension().get();
    if (extension != nullptr) {
      extensions_.push_back(extension);
      for (const NamedParameter& own : extension->own_parameters()) report(path(own.name), own.parameter);
    }
    module.visit_members(*this);
    if (extension != nullptr) extensions_.pop_back();
  }
  void param(std::string_view name, Param& member) override {
    if (!member.defined()) return;
    for (const ModuleExtension* extension : extensions_)
      if (extension->hides(member.object())) return;
    report(path(name), member.object());
  }
  void buffer(std::string_view name, Buffer& member) override {
    if (on_buffer && member.tensor().defined()) on_buffer(path(name), member);
  }
  void child(std::string_view name, Module& member) override {
    const std::string outer = std::exchange(prefix_, path(name));
    run(member);
    prefix_ = outer;
  }

 private:
  std::string path(std::string_view name) const {
    return prefix_.empty() ? std::string(name) : fmt::format("{}.{}", prefix_, name);
  }
  void report(const std::string& name, const Parameter& parameter) const {
    if (on_param) on_param(name, parameter);
  }
  std::string prefix_;
  std::vector<const ModuleExtension*> extensions_;  // of the modules that the walk is in
};

/// Applies `change` to each parameter's values and gradient, and to each buffer.
void change_tensors(Module& module, const std::function<Tensor(const Tensor&)>& change) {
  const NoGrad guard;
  std::unordered_set<const void*> seen;
  Walk walk;
  walk.on_module = [&](const std::string&, Module& m) {
    if (m.extension()) m.extension()->change(change);
  };
  walk.on_param = [&](const std::string&, const Parameter& p) {
    if (p.host() != nullptr || !seen.insert(p.id()).second) return;
    Parameter object = p;
    const Tensor grad = object.grad();
    object.set_data(change(object.data()));
    if (grad.defined()) object.set_grad(change(grad));
  };
  walk.on_buffer = [&](const std::string&, Buffer& b) { b.set(change(b.tensor())); };
  walk.run(module);
}

}  // namespace

std::vector<NamedParameter> Module::named_parameters(Ties ties) const {
  std::vector<NamedParameter> list;
  std::unordered_set<const void*> seen;
  Walk walk;
  walk.on_param = [&](const std::string& name, const Parameter& p) {
    if (seen.insert(p.id()).second || ties == Ties::all) list.push_back({name, p});
  };
  walk.run(*this);
  return list;
}

std::vector<Parameter> Module::parameters() const {
  std::vector<Parameter> list;
  for (NamedParameter& p : named_parameters()) list.push_back(std::move(p.parameter));
  return list;
}

std::vector<NamedBuffer> Module::named_buffers() const {
  std::vector<NamedBuffer> list;
  Walk walk;
  walk.on_buffer = [&](const std::string& name, Buffer& b) { list.push_back({name, b.tensor()}); };
  walk.run(*this);
  return list;
}

std::vector<NamedModule> Module::named_modules() {
  std::vector<NamedModule> list;
  Walk walk;
  walk.on_module = [&](const std::string& name, Module& m) { list.push_back({name, &m}); };
  walk.run(*this);
  return list;
}

std::int64_t Module::parameter_count() const {
  std::int64_t count = 0;
  for (const NamedParameter& p : named_parameters()) count += p.parameter.numel();
  return count;
}

bool Module::training() const { return state_->training; }

void Module::train(bool training) {
  for (const NamedModule& m : named_modules()) m.module->state_->training = training;
}

void Module::to(Device device) {
  change_tensors(*this, [device](const Tensor& t) {
    return t.device().type == DeviceType::meta && device != t.device() ? empty({t.shape(), t.dtype(), device})
                                                                       : sherd::to(t, device);
  });
}

void Module::to(DType dtype) {
  change_tensors(*this,
                 [dtype](const Tensor& t) { return is_floating(t.dtype()) ? sherd::to(t, dtype) : t; });
}

void Module::set_requires_grad(bool requires_grad) {
  for (Parameter& p : parameters()) p.set_requires_grad(requires_grad);
}

void Module::zero_grad() {
  for (Parameter& p : parameters()) p.set_grad({});
}

StateDict Module::state_dict() const {
  StateDict state;
  std::unordered_set<const void*> seen;
  Walk walk;
  walk.on_param = [&](const std::string& name, const Parameter& p) {
    if (seen.insert(p.id()).second) state.emplace_back(name, p.data());
  };
  walk.on_buffer = [&](const std::string& name, Buffer& b) {
    if (b.persistence() == Persistence::saved) state.emplace_back(name, b.tensor());
  };
  walk.run(*this);
  return state;
}

void Module::load_state_dict(const StateDict& state, Strict strict) {
  std::unordered_map<std::string, Tensor> given(state.begin(), state.end());
  std::vector<std::pair<Tensor, Tensor>> copies;  // into, from: all are checked before the first is made
  std::unordered_map<const void*, std::string> missing;
  std::unordered_set<const void*> taken;
  const auto take = [&](const std::string& name, const void* id, const Tensor& into) {
    const auto found = given.find(name);
    if (found == given.end()) {
      if (!taken.contains(id)) missing.emplace(id, name);
      return;
    }
    check<ShapeError>(found->second.shape() == into.shape(),
                      "load_state_dict: '{}' has shape {} in the module and {} in the state", name,
                      into.shape(), found->second.shape());
    check<DeviceError>(
        found->second.device().type != DeviceType::meta || into.device().type == DeviceType::meta,
        "load_state_dict: '{}' is on meta in the state and has no values", name);
    missing.erase(id);
    taken.insert(id);
    copies.emplace_back(into, found->second);
    given.erase(found);
  };
  Walk walk;
  std::vector<ParameterHost*> hosts;
  walk.on_param = [&](const std::string& name, const Parameter& p) {
    take(name, p.id(), p.data());
    if (p.host() != nullptr) hosts.push_back(p.host());
  };
  walk.on_buffer = [&](const std::string& name, Buffer& b) {
    if (b.persistence() == Persistence::saved) take(name, &b, b.tensor());
  };
  walk.run(*this);
  if (strict == Strict::yes) {
    check<ValueError>(
        missing.empty(),
        "load_state_dict: the state lacks '{}' ({} missing in all); pass Strict::no to keep the module's",
        missing.empty() ? "" : missing.begin()->second, missing.size());
    check<ValueError>(
        given.empty(),
        "load_state_dict: the module has no '{}' ({} unknown in all); pass Strict::no to ignore them",
        given.empty() ? "" : given.begin()->first, given.size());
  }
  const NoGrad guard;
  for (ParameterHost* host : hosts) host->before_write();
  for (const auto& [into, from] : copies) copy_(into, from);
}

Subscription Module::observe(ModuleObserver& observer) {
  state_->observers.push_back(&observer);
  return Subscription([weak = std::weak_ptr(state_), &observer] {
    if (const auto state = weak.lock()) std::erase(state->observers, &observer);
  });
}

bool Module::observed() const { return !state_->observers.empty(); }

void Module::fire_before(std::span<Tensor* const> inputs) {
  for (ModuleObserver* observer : std::vector(state_->observers)) observer->before_forward(*this, inputs);
}

void Module::fire_after(std::span<Tensor* const> outputs) {
  for (ModuleObserver* observer : std::vector(state_->observers)) observer->after_forward(*this, outputs);
}

void Module::fire_failed() noexcept {
  for (ModuleObserver* observer : std::vector(state_->observers)) observer->forward_failed(*this);
}

}  // namespace sherd::nn
