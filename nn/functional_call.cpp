#include "nn/functional_call.h"

#include <map>

#include "runtime/shown.h"

namespace sherd::nn {
namespace {

void check_plain(Module& module) {
  module.visit_all_modules([](Module& m) {
    check<StateError>(!m.extension(),
                      "functional_call: a {} is sharded, and its ranks hold its parameters together; call "
                      "a module that is not",
                      m.type_name());
    check<StateError>(m.compiled() == nullptr,
                      "functional_call: a {} is compiled, for the tensors that it has; call uncompile first",
                      m.type_name());
  });
}

/// The members of a module that values are for.
class Places final : public MemberVisitor {
 public:
  explicit Places(const StateDict& values) {
    for (const auto& [name, tensor] : values) {
      check<ValueError>(left_.emplace(name, &tensor).second, "functional_call: '{}' is there twice",
                        shown(name));
      check<ValueError>(tensor.defined(), "functional_call: '{}' is an empty handle; give it a tensor",
                        shown(name));
    }
  }
  std::vector<Param*> members;
  std::vector<std::pair<Buffer*, Tensor>> buffers;

  void param(std::string_view name, Param& member) override {
    if (!member.defined()) return;
    members.push_back(&member);
    const Tensor* given = take(name, member.shape());
    if (given == nullptr) return;
    check<StateError>(member.object().owner() == nullptr,
                      "functional_call: '{}' is sharded, and the ranks hold it together; call a module that "
                      "is not",
                      prefix_ + std::string(name));
    const auto [place, is_new] = given_.emplace(member.object().id(), *given);
    check<ValueError>(is_new || place->second.impl() == given->impl(),
                      "functional_call: '{}' is tied to another name, which has another tensor; give one",
                      prefix_ + std::string(name));
  }
  void buffer(std::string_view name, Buffer& member) override {
    if (!member.tensor().defined()) return;
    if (const Tensor* given = take(name, member.tensor().shape())) buffers.emplace_back(&member, *given);
  }
  void child(std::string_view name, Module& member) override {
    const std::string outer = std::exchange(prefix_, prefix_ + std::string(name) + ".");
    member.visit_members(*this);
    prefix_ = outer;
  }
  /// What stands in for a parameter; null for one that stays.
  const Tensor* for_parameter(const void* id) const {
    const auto found = given_.find(id);
    return found == given_.end() ? nullptr : &found->second;
  }
  void check_all_taken(const Module& module) const {
    check<ValueError>(left_.empty(), "functional_call: the {} has no '{}' ({} unknown in all)",
                      module.type_name(), left_.empty() ? "" : shown(left_.begin()->first), left_.size());
  }

 private:
  const Tensor* take(std::string_view name, const Shape& shape) {
    const auto found = left_.find(prefix_ + std::string(name));
    if (found == left_.end()) return nullptr;
    const Tensor* given = found->second;
    check<ShapeError>(given->shape() == shape, "functional_call: '{}' has shape {}, the module takes {}",
                      found->first, given->shape(), shape);
    left_.erase(found);
    return given;
  }
  std::string prefix_;
  std::map<std::string, const Tensor*, std::less<>> left_;
  std::map<const void*, Tensor> given_;  // by the parameter's id
};

}  // namespace

Substitution::Substitution(Module& module, const StateDict& values) {
  check_plain(module);
  Places places(values);
  module.visit_members(places);
  places.check_all_taken(module);
  for (Param* member : places.members)
    if (places.for_parameter(member->object().id()) != nullptr)
      parameters_.emplace_back(member, member->object());
  buffers_.reserve(places.buffers.size());
  std::map<const void*, Parameter> made;
  for (auto& [member, own] : parameters_) {
    Parameter& stand_in = made[own.id()];
    if (!stand_in.defined()) stand_in = Parameter::standing_in(*places.for_parameter(own.id()));
    member->set(stand_in);
  }
  for (auto& [member, tensor] : places.buffers) {
    buffers_.emplace_back(member, std::move(*member));
    *member = Buffer(tensor, buffers_.back().second.persistence());
  }
}

Substitution::~Substitution() {
  for (auto& [member, own] : parameters_) member->set(std::move(own));
  for (auto& [member, own] : buffers_) *member = std::move(own);
}

}  // namespace sherd::nn
