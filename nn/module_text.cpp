// Modules as text.
#include <ostream>

#include "nn/module.h"

namespace sherd::nn {
namespace {

std::string indented(const std::string& text) {
  std::string out = "  ";
  for (const char c : text) {
    out += c;
    if (c == '\n') out += "  ";
  }
  return out;
}

/// The direct members of a module, as text.
class Members final : public MemberVisitor {
 public:
  void param(std::string_view name, Param& member) override {
    if (member.defined()) parameters_.push_back(fmt::format("{} {}", name, member.shape()));
  }
  void child(std::string_view name, Module& member) override;

  std::string text(std::string_view type) const {
    if (children_.empty()) return fmt::format("{}({})", type, fmt::join(parameters_, ", "));
    std::string out(type);
    out += "(\n";
    for (const std::string& p : parameters_) out += "  " + p + "\n";
    for (const Child& c : children_) {
      const std::string name = c.count == 1 ? c.first : c.first + "-" + c.last;
      out += indented(
                 fmt::format("({}): {}{}", name, c.count == 1 ? "" : fmt::format("{} x ", c.count), c.text)) +
             "\n";
    }
    return out + ")";
  }

 private:
  /// Members; of a list those one after the other that are alike.
  struct Child {
    std::string first, last, text;
    int count;
  };
  std::vector<std::string> parameters_;
  std::vector<Child> children_;
};

std::string tree(Module& module) {
  Members members;
  module.visit_members(members);
  const std::string_view name = module.type_name();
  return members.text(name.substr(0, name.find('<')));  // of ModuleList<Linear> the first word
}

void Members::child(std::string_view name, Module& member) {
  std::string text = tree(member);
  const bool numbered = !name.empty() && name[0] >= '0' && name[0] <= '9';  // of a list
  if (numbered && !children_.empty() && children_.back().text == text) {
    children_.back().last = name;
    ++children_.back().count;
  } else {
    children_.push_back({std::string(name), {}, std::move(text), 1});
  }
}

}  // namespace

std::string to_string(const Module& module) {
  const std::int64_t count = module.parameter_count();
  // `visit` is not const; what only reads uses it too.
  return fmt::format("{}\n{} parameter{}", tree(const_cast<Module&>(module)), count, count == 1 ? "" : "s");
}

std::ostream& operator<<(std::ostream& out, const Module& module) { return out << to_string(module); }

}  // namespace sherd::nn
