#include "nn/module.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include "nn/copy_record.h"
#include "nn/on_meta.h"
#include "nn/state_names.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/reach.h"
#include "runtime/shown.h"

namespace sherd::nn {

MemberVisitor::~MemberVisitor() = default;
ModuleObserver::~ModuleObserver() = default;
CompiledForward::~CompiledForward() = default;

std::vector<NamedParameter> ModuleExtension::own_parameters() const { return {}; }
bool ModuleExtension::hides(const Parameter&) const { return false; }

struct Module::State {
  bool training = true;
  std::atomic<bool> complete = false;  // the check of `visit` against a copy has passed
  std::shared_ptr<ModuleExtension> extension;
  std::shared_ptr<CompiledForward> compiled;
  Subscribers<ModuleObserver*> observers;
  std::shared_ptr<Module*> self = std::make_shared<Module*>(nullptr);  // of its own: does not hold the rest

  /// Calls `tell` with the extension, then with each observer.
  template <class F>
  void tell(F&& tell) const {
    if (const auto kept = extension) tell(kept.get());
    observers.each(tell);
  }
};

Module::Module() : state_(std::make_shared<State>()) { *state_->self = this; }
Module::~Module() {
  if (state_) *state_->self = nullptr;
}
Module::Module(Module&& other) noexcept : state_(std::move(other.state_)) {
  if (state_) *state_->self = this;
}
Module& Module::operator=(Module&& other) noexcept {
  if (this == &other) return *this;
  if (state_) *state_->self = nullptr;
  state_ = std::move(other.state_);
  if (state_) *state_->self = this;
  return *this;
}
Module::Module(const Module& other) : Module() {
  const State& from = other.state();
  state_->training = from.training;
  if (CopyRecord* record = CopyRecord::current()) {
    record->add(&other, std::string(other.type_name()));
    return;
  }
  if (const auto& extension = from.extension)
    CloneScope::afterwards([extension, state = state_](const ClonedParameters& cloned) {
      state->extension = extension->clone(cloned);
    });
}

Module::State& Module::state() const {
  if (state_ == nullptr)
    fail<StateError>("{}: this module was moved from; use the one that it was moved into", type_name());
  return *state_;
}

void Module::extend(std::shared_ptr<ModuleExtension> extension) {
  State& s = state();
  check<StateError>(!s.extension, "{}: it is sharded already; a module is sharded once", type_name());
  s.extension = std::move(extension);
}
const std::shared_ptr<ModuleExtension>& Module::extension() const { return state().extension; }

void Module::set_compiled(std::shared_ptr<CompiledForward> compiled) {
  state().compiled = std::move(compiled);
}
const std::shared_ptr<CompiledForward>& Module::compiled() const { return state().compiled; }
bool Module::watched() const { return !state().observers.empty(); }

namespace {

/// ValueError for names that could not be told apart in a path.
class NameCheck final : public MemberVisitor {
 public:
  explicit NameCheck(const Module& module) : module_(module) {}
  void param(std::string_view name, Param&) override { add(name); }
  void buffer(std::string_view name, Buffer&) override { add(name); }
  void child(std::string_view name, Module&) override { add(name); }

 private:
  void add(std::string_view name) {
    check<ValueError>(!name.empty() && name.find('.') == std::string_view::npos,
                      "{}: visit names a member '{}'; a name is not empty and has no dot",
                      module_.type_name(), name);
    check<ValueError>(names_.emplace(name).second,
                      "{}: visit names two members '{}'; give each a name of its own", module_.type_name(),
                      name);
  }
  const Module& module_;
  std::unordered_set<std::string> names_;
};

/// The addresses of all members of a module and of those below.
class Addresses final : public MemberVisitor {
 public:
  std::unordered_set<const void*> all;
  void param(std::string_view, Param& member) override { all.insert(&member); }
  void buffer(std::string_view, Buffer& member) override { all.insert(&member); }
  void child(std::string_view, Module& member) override {
    all.insert(&member);
    member.visit_members(*this);
  }
};

}  // namespace

void Module::visit_members(MemberVisitor& visitor) {
  const State& s = state();
  NameCheck names(*this);
  each_member(names);
  if (!s.complete && can_be_cloned()) check_nothing_forgotten();
  each_member(visitor);
}

void Module::visit_all_members(MemberVisitor& visitor) {
  struct Below final : MemberVisitor {
    MemberVisitor& visitor;
    explicit Below(MemberVisitor& visitor) : visitor(visitor) {}
    void param(std::string_view name, Param& member) override { visitor.param(name, member); }
    void buffer(std::string_view name, Buffer& member) override { visitor.buffer(name, member); }
    void child(std::string_view, Module& member) override {
      member.check_alive();
      member.each_member(*this);
    }
  };
  Below below(visitor);
  below.child("", *this);
}

void Module::visit_all_modules(const std::function<void(Module&)>& visit) {
  struct Below final : MemberVisitor {
    const std::function<void(Module&)>& visit;
    explicit Below(const std::function<void(Module&)>& visit) : visit(visit) {}
    void child(std::string_view, Module& member) override {
      member.check_alive();
      visit(member);
      member.each_member(*this);
    }
  };
  Below below(visit);
  below.child("", *this);
}

/// StateError for a member that a copy of the object copies, also in lists, and that `visit` does not name.
/// Members are checked before the module that holds them, so the message names the right module. A copy
/// constructor of a program's own that throws without values tells nothing.
void Module::check_nothing_forgotten() {
  if (CopyRecord::current() != nullptr) return;  // called by a copy constructor under such a check
  Addresses named;
  named.all.insert(this);
  each_member(named);
  const CopyRecord copied;
  state().complete = true;
  try {
    clone_module();
  } catch (const std::exception&) {
    return;
  }
  for (const CopyRecord::Member& member : copied.members())
    if (!named.all.contains(member.address)) {
      state().complete = false;
      fail<StateError>(
          "{}: visit does not name a member that the object holds: {}; add it, or it is neither saved, "
          "moved nor trained (what should not be is held by a std::shared_ptr)",
          type_name(), member.what);
    }
}

namespace {

/// Whether a traversal leaves out parameters that an extension hides, and reports the extension's own, or
/// shows those of the members.
enum class Hidden { skip, show };

/// Goes through a module and all below, depth first, with full names.
class Traversal final : public MemberVisitor {
 public:
  explicit Traversal(Hidden hidden = Hidden::skip) : hidden_(hidden) {}
  std::function<void(const std::string&, const Parameter&)> on_param;
  std::function<void(const std::string&, Buffer&)> on_buffer;
  std::function<void(const std::string&, Module&)> on_module;

  void run(const Module& root) {
    auto& module = const_cast<Module&>(root);  // `visit` is not const; what only reads uses it too
    if (hidden_ == Hidden::skip && on_param) find_extensions(module);
    go(module);
  }
  void param(std::string_view name, Param& member) override {
    if (!on_param || !member.defined()) return;
    const auto* keeper = dynamic_cast<const ModuleExtension*>(member.object().owner());
    if (extensions_.contains(keeper) && keeper->hides(member.object())) return;
    on_param(path(name), member.object());
  }
  void buffer(std::string_view name, Buffer& member) override {
    if (on_buffer && member.tensor().defined()) on_buffer(path(name), member);
  }
  void child(std::string_view name, Module& member) override {
    const std::string outer = std::exchange(prefix_, path(name));
    go(member);
    prefix_ = outer;
  }

 private:
  /// Collects the extensions of the root and all below before anything is reported, because a tied parameter
  /// may be hidden by a module that comes later.
  void find_extensions(Module& root) {
    struct Finder final : MemberVisitor {
      std::unordered_set<const ModuleExtension*>& found;
      explicit Finder(std::unordered_set<const ModuleExtension*>& found) : found(found) {}
      void look(Module& module) {
        if (module.extension()) found.insert(module.extension().get());
        module.visit_members(*this);
      }
      void child(std::string_view, Module& member) override { look(member); }
    };
    Finder(extensions_).look(root);
  }
  void go(Module& module) {
    if (on_module) on_module(prefix_, module);
    if (hidden_ == Hidden::skip && on_param && module.extension())
      for (const NamedParameter& own : module.extension()->own_parameters())
        on_param(path(own.name), own.parameter);
    module.visit_members(*this);
  }
  std::string path(std::string_view name) const {
    return prefix_.empty() ? std::string(name) : fmt::format("{}.{}", prefix_, name);
  }
  Hidden hidden_;
  std::string prefix_;
  std::unordered_set<const ModuleExtension*> extensions_;  // that may hide parameters
};

/// StateError for a parameter that was sharded together with a module above: its values cannot change apart
/// from the others. And where those of any module below may not change now: some would, the others not.
void check_changeable(const Module& module) {
  std::unordered_set<const ParameterOwner*> below;
  Traversal modules(Hidden::show), all(Hidden::show);
  modules.on_module = [&](const std::string&, Module& m) {
    if (m.extension()) m.extension()->check_changeable();
    if (const auto* owner = dynamic_cast<const ParameterOwner*>(m.extension().get())) below.insert(owner);
  };
  modules.run(module);  // a tied parameter's keeper may come after its first name
  all.on_param = [&](const std::string& name, const Parameter& p) {
    check<StateError>(
        p.owner() == nullptr || below.contains(p.owner()),
        "{}: '{}' was sharded with a module that holds this one; move, cast or materialize that "
        "module",
        module.type_name(), name);
  };
  all.run(module);
}

/// Applies `change` to each parameter's values and gradient, and to each buffer; not to the parameters (by
/// id) and buffers that are left out.
void change_tensors(Module& module, const std::function<Tensor(const Tensor&)>& change,
                    const std::unordered_set<const void*>& left_out = {}) {
  check_changeable(module);
  const NoGrad guard;
  std::unordered_set<const void*> seen = left_out;
  Traversal all;
  all.on_module = [&](const std::string&, Module& m) {
    if (m.extension()) m.extension()->change(change);
  };
  all.on_param = [&](const std::string&, const Parameter& p) {
    if (p.owner() != nullptr || !seen.insert(p.id()).second) return;
    Parameter object = p;
    const Tensor grad = object.grad();
    object.set_data(change(object.data()));
    if (grad.defined()) object.set_grad(change(grad));
  };
  all.on_buffer = [&](const std::string&, Buffer& b) {
    if (!left_out.contains(&b)) b.change(change);
  };
  all.run(module);
}

/// Parameters and buffers on `meta`, by name; a tied parameter once.
struct Unfilled {
  std::vector<NamedParameter> parameters;
  std::vector<std::pair<std::string, Buffer*>> buffers;
};
Unfilled unfilled_in(const Module& module) {
  Unfilled found;
  std::unordered_set<const void*> seen;
  Traversal all(Hidden::show);
  all.on_param = [&](const std::string& name, const Parameter& p) {
    if (on_meta(p.local()) && seen.insert(p.id()).second) found.parameters.push_back({name, p});
  };
  all.on_buffer = [&](const std::string& name, Buffer& b) {
    if (on_meta(b.tensor())) found.buffers.emplace_back(name, &b);
  };
  all.run(module);
  return found;
}

void fill(const Unfilled& unfilled, const Initialise& initialise) {
  for (const auto& [name, p] : unfilled.parameters) {
    const Tensor local = p.local().detach();
    if (p.owner() == nullptr) {
      initialise(name, local);
      continue;
    }
    const Tensor whole = empty({p.shape(), local.dtype(), local.device()});
    initialise(name, whole);
    p.owner()->set_whole(p, whole);
  }
  for (const auto& [name, buffer] : unfilled.buffers) {
    const Tensor values = buffer->values();
    initialise(name, values);
    if (values.dtype() != buffer->tensor().dtype()) buffer->load(values);
  }
}

/// Puts everything back on `meta` after `initialise` threw, so that uninitialised memory is not taken for
/// values.
void return_to_meta(Module& module, const Unfilled& unfilled) {
  const auto empty_again = [](const Tensor& t) { return sherd::to(t, Device::meta()); };
  std::unordered_set<const ParameterOwner*> owners;
  for (const auto& [name, p] : unfilled.parameters) {
    Parameter object = p;
    if (p.owner() != nullptr)
      owners.insert(p.owner());
    else
      object.set_data(empty_again(p.data()));
  }
  for (const auto& [name, buffer] : unfilled.buffers) buffer->change(empty_again);
  Traversal all(Hidden::show);
  all.on_module = [&](const std::string&, Module& m) {
    const auto* owner = dynamic_cast<const ParameterOwner*>(m.extension().get());
    if (owner != nullptr && owners.contains(owner)) m.extension()->change(empty_again);
  };
  all.run(module);
}

}  // namespace

std::vector<NamedParameter> Module::named_parameters(Ties ties) const {
  std::vector<NamedParameter> list;
  std::unordered_set<const void*> seen;
  Traversal all;
  all.on_param = [&](const std::string& name, const Parameter& p) {
    if (seen.insert(p.id()).second || ties == Ties::all) list.push_back({name, p});
  };
  all.run(*this);
  return list;
}

std::vector<Parameter> Module::parameters() const {
  std::vector<Parameter> list;
  for (NamedParameter& p : named_parameters()) list.push_back(std::move(p.parameter));
  return list;
}

std::vector<NamedBuffer> Module::named_buffers() const {
  std::vector<NamedBuffer> list;
  Traversal all;
  all.on_buffer = [&](const std::string& name, Buffer& b) { list.push_back({name, b.tensor()}); };
  all.run(*this);
  return list;
}

std::vector<NamedModule> Module::named_modules() {
  std::vector<NamedModule> list;
  Traversal all;
  all.on_module = [&](const std::string& name, Module& m) { list.push_back({name, &m}); };
  all.run(*this);
  return list;
}

std::int64_t Module::parameter_count() const {
  std::int64_t count = 0;
  for (const NamedParameter& p : named_parameters()) count += p.parameter.numel();
  return count;
}

bool Module::training() const { return state().training; }

void Module::train(bool training) {
  for (const NamedModule& m : named_modules()) m.module->state().training = training;
}

void Module::to(Device device) {
  if (device.type != DeviceType::meta) {
    const Unfilled none = unfilled_in(*this);
    check<DeviceError>(
        none.parameters.empty() && none.buffers.empty(),
        "{}: '{}' is on meta and has no values to move to {}; give the module memory and values "
        "with materialize()",
        type_name(),
        !none.parameters.empty() ? none.parameters[0].name
        : !none.buffers.empty()  ? none.buffers[0].first
                                 : "",
        device);
  }
  change_tensors(*this, [device](const Tensor& t) { return sherd::to(t, device); });
}

void Module::materialize(Device device, const Initialise& initialise) {
  check<DeviceError>(device.type != DeviceType::meta,
                     "{}: materialize() on meta gives no values; name a device that holds some", type_name());
  const NoGrad guard;
  const Unfilled unfilled = unfilled_in(*this);
  change_tensors(*this, [device](const Tensor& t) {
    return on_meta(t) ? empty({t.shape(), t.dtype(), device}) : sherd::to(t, device);
  });
  try {
    fill(unfilled, initialise);
  } catch (...) {
    return_to_meta(*this, unfilled);
    throw;
  }
}

void Module::to(DType dtype) {
  to(dtype, [](const Module&) { return false; });
}

void Module::to(DType dtype, const std::function<bool(const Module&)>& leave_out) {
  std::unordered_set<const void*> left_out;
  Traversal below;
  below.on_param = [&](const std::string&, const Parameter& p) { left_out.insert(p.id()); };
  below.on_buffer = [&](const std::string&, Buffer& b) { left_out.insert(&b); };
  bool sharded = false;
  for (const NamedModule& m : named_modules()) {
    sharded = sharded || m.module->extension();
    if (leave_out(*m.module)) below.run(*m.module);
  }
  check<StateError>(left_out.empty() || !sharded,
                    "{}: to(dtype, leave_out) of a sharded module, whose shards are cast as a whole; call it "
                    "before sharding",
                    type_name());
  change_tensors(
      *this, [dtype](const Tensor& t) { return is_floating(t.dtype()) ? sherd::to(t, dtype) : t; }, left_out);
}

Tensor Module::to(const Tensor& x, DType dtype) { return sherd::to(x, dtype); }
Tensor Module::to(const Tensor& x, Device device) { return sherd::to(x, device); }
Tensor Module::clone(const Tensor& x) { return sherd::clone(x); }

void Module::set_requires_grad(bool requires_grad) {
  for (Parameter& p : parameters()) p.set_requires_grad(requires_grad);
}

void Module::zero_grad() {
  for (Parameter& p : parameters()) p.set_grad({});
}

StateDict Module::state_dict() const {
  StateDict state;
  std::unordered_set<const void*> seen;
  Traversal all;
  all.on_param = [&](const std::string& name, const Parameter& p) {
    if (!seen.insert(p.id()).second) return;
    state.emplace_back(name, p.owner() != nullptr ? p.owner()->state(p) : p.local().detach());
    if (state.part.empty() && state.back().second.shape() != p.shape())
      state.part =
          fmt::format("'{}', of whose shape {} it has {}", name, p.shape(), state.back().second.shape());
  };
  all.on_buffer = [&](const std::string& name, Buffer& b) {
    if (b.persistence() != Persistence::saved) return;
    const bool own = b.tensor().dtype() == b.own_dtype();
    state.emplace_back(name, own ? b.tensor() : clone(b.values()));
  };
  all.run(*this);
  return state;
}

StateDict::const_iterator StateDict::find(std::string_view name) const {
  return std::ranges::find_if(*this, [&](const auto& entry) { return entry.first == name; });
}
const Tensor& StateDict::at(std::string_view name) const {
  const auto found = find(name);
  if (const auto why = unread.find(name); found == end() && why != unread.end())
    fail<ValueError>("state: '{}' was not read: {}", shown(name, 200), why->second);
  check<ValueError>(found != end(), "state: has no '{}' among its {} names{}", shown(name, 200), size(),
                    names_beside(*this, name));
  return found->second;
}
bool StateDict::contains(std::string_view name) const { return find(name) != end(); }

Mismatch Module::load_state_dict(const StateDict& state, Strict strict) {
  std::unordered_map<std::string, Tensor> given;
  for (const auto& [name, tensor] : state)
    check<ValueError>(given.emplace(name, tensor).second, "load_state_dict: the state has '{}' twice", name);
  std::vector<std::pair<Tensor, Tensor>> copies;  // into, from; all are checked before the first is copied
  std::vector<std::pair<Buffer*, Tensor>> loads;
  std::unordered_map<const void*, std::string> missing;
  std::unordered_map<const void*, std::pair<std::string, Tensor>> taken;
  std::unordered_set<std::string> asked;
  std::vector<ParameterOwner*> owners;
  std::vector<Parameter> loaded;
  std::string of_owners;  // the end of messages about names
  const auto take = [&](const std::string& name, const void* id, const Tensor& into,
                        const std::string& of_owner = "") -> std::optional<Tensor> {
    const auto found = given.find(name);
    asked.insert(name);
    if (found == given.end()) {
      if (!taken.contains(id)) missing.emplace(id, name);
      return {};
    }
    check<ShapeError>(found->second.shape() == into.shape(),
                      "load_state_dict: '{}' has shape {} in the module and {} in the state{}", name,
                      into.shape(), found->second.shape(), of_owner);
    check<StateError>(
        !shows_twice(into.layout()),
        "load_state_dict: elements of the module's '{}' of shape {} and strides {} share memory; "
        "make it of a clone",
        name, into.shape(), into.strides());
    check<DeviceError>(!on_meta(found->second) || on_meta(into),
                       "load_state_dict: '{}' is on meta in the state and has no values", name);
    check<DeviceError>(!on_meta(into) || on_meta(found->second),
                       "load_state_dict: '{}' is on meta in the module and holds no values; give the module "
                       "memory with materialize()",
                       name);
    missing.erase(id);
    const Tensor from = found->second;
    given.erase(found);
    const auto [first, is_first] = taken.emplace(id, std::pair(name, from));
    if (!is_first) check_tied("load_state_dict", first->second, {name, from});
    return is_first ? std::optional(from) : std::nullopt;
  };
  Traversal all;
  all.on_param = [&](const std::string& name, const Parameter& p) {
    std::string of_owner;
    const Tensor into = p.owner() != nullptr ? p.owner()->state(p) : p.local().detach();
    if (p.owner() != nullptr &&
        &into.storage() == &p.local().storage()) {  // not the whole that a scope shows
      owners.push_back(p.owner());
      of_owners = of_owner = "; " + p.owner()->explain(p, WholeOf::values);
    }
    if (const auto from = take(name, p.id(), into, of_owner)) {
      copies.emplace_back(into, *from);
      loaded.push_back(p);
    }
  };
  all.on_buffer = [&](const std::string& name, Buffer& b) {
    if (b.persistence() != Persistence::saved) return;
    if (const auto from = take(name, &b, b.tensor())) loads.emplace_back(&b, *from);
  };
  all.run(*this);
  std::vector<std::string> unknown;
  for (const auto& [name, tensor] : state)
    if (given.contains(name)) unknown.push_back(name);
  for (const auto& [name, why] : state.unread)
    if (!asked.contains(name)) unknown.push_back(name);
  if (strict == Strict::yes) {
    if (!missing.empty()) {
      const std::string& name = missing.begin()->second;
      fail<ValueError>(
          "load_state_dict: the state lacks '{}' ({} missing in all); pass Strict::no to keep the "
          "module's{}{}",
          name, missing.size(), names_beside(state, name), of_owners);
    }
    check<ValueError>(
        unknown.empty(),
        "load_state_dict: the module has no '{}' ({} unknown in all); pass Strict::no to ignore them{}",
        unknown.empty() ? "" : unknown.front(), unknown.size(), of_owners);
  }
  const NoGrad guard;
  for (ParameterOwner* owner : owners) owner->before_write();
  for (const auto& [into, from] : copies) copy_(into, from);
  for (const Parameter& p : loaded) p.loaded(0);
  for (const auto& [buffer, from] : loads) buffer->load(from);
  Mismatch left;
  for (auto& [id, name] : missing) left.missing.push_back(std::move(name));
  std::ranges::sort(left.missing);
  left.unknown = std::move(unknown);
  return left;
}

Subscription Module::observe(ModuleObserver& observer) { return state().observers.add(&observer); }

std::shared_ptr<Module* const> Module::whereabouts() const { return state().self; }

bool Module::observed() const { return state().extension != nullptr || !state().observers.empty(); }

bool Module::extension_inside() const {
  const State& s = state();
  return s.compiled != nullptr && s.extension != nullptr && s.observers.empty() &&
         s.compiled->extension_inside();
}

void Module::fire_before(std::span<Tensor* const> inputs) {
  if (const auto kept = state().extension) kept->enter(*this, inputs);
  state().tell([&](ModuleObserver* observer) { observer->before_forward(*this, inputs); });
}

void Module::fire_after(std::span<Tensor* const> outputs) {
  if (const auto kept = state().extension) {
    kept->after_forward(*this, outputs);
    kept->leave(*this, outputs);
  }
  state().observers.each([&](ModuleObserver* observer) { observer->after_forward(*this, outputs); });
}

void Module::fire_unknown(std::string_view type) {
  state().tell([&](ModuleObserver* observer) { observer->result_unknown(*this, type); });
}

namespace {

/// Where an error comes from: what stands behind the message, and of which module it left the forward last.
struct ErrorPlace {
  const Module* left;
  std::size_t path_at = 0;  ///< where the path begins in the message; 0 for none
};
template <class E>
struct Placed final : E, ErrorPlace {
  Placed(const E& error, const Module* module) : E(error), ErrorPlace{module} {}
};

/// Throws the error as one that knows its place, if it is of what a layer was given.
void throw_placed(const Error& error, const Module* module) {
  if (typeid(error) == typeid(ShapeError))
    throw Placed<ShapeError>(static_cast<const ShapeError&>(error), module);
  if (typeid(error) == typeid(DTypeError))
    throw Placed<DTypeError>(static_cast<const DTypeError&>(error), module);
}

/// Puts `name` before the path at the end of the message, "(in layers.3.attention)".
void add_name(Error& error, ErrorPlace& place, const std::string& name) {
  std::string message = error.what();
  if (place.path_at == 0) {
    message += " (in ";
    place.path_at = message.size();
    message += name + ")";
  } else {
    message.insert(place.path_at, name + ".");
  }
  static_cast<std::runtime_error&>(error) = std::runtime_error(message);
}

/// The name under which a module is found below another; empty for one that is not there.
class NameBelow final : public MemberVisitor {
 public:
  NameBelow(const void* wanted, void (*into)(Module&, MemberVisitor&)) : wanted_(wanted), into_(into) {}
  void child(std::string_view name, Module& member) override {
    if (!found.empty()) return;
    const std::string outer = std::exchange(prefix_, prefix_ + std::string(name));
    if (&member == wanted_) {
      found = prefix_;
    } else {
      prefix_ += ".";
      into_(member, *this);
    }
    prefix_ = outer;
  }
  std::string found;

 private:
  const void* wanted_;
  void (*into_)(Module&, MemberVisitor&);
  std::string prefix_;
};

}  // namespace

void Module::name_place(Error& error) {
  std::optional<std::string> name;
  auto* place = dynamic_cast<ErrorPlace*>(&error);
  try {
    if (place != nullptr && place->left != this && state_) {
      NameBelow below(place->left, [](Module& m, MemberVisitor& visitor) {
        if (m.state_) m.each_member(visitor);
      });
      each_member(below);
      name = std::move(below.found);
    }
  } catch (const std::exception&) {  // the error as it is says more than one about names
    return;
  }
  if (place == nullptr) return throw_placed(error, this);
  place->left = this;
  if (name && !name->empty()) add_name(error, *place, *name);
}

void Module::fire_failed() noexcept {
  if (!state_) return;  // forward moved this module away
  state_->tell([&](ModuleObserver* observer) { observer->forward_failed(*this); });
}

}  // namespace sherd::nn
