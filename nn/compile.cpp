#include "nn/compile.h"

namespace sherd::nn {
namespace {

/// One below that is sharded; null where none is.
const Module* sharded_below(Module& module) {
  const Module* found = nullptr;
  module.visit_all_modules([&](Module& m) {
    if (&m != &module && m.extension() != nullptr) found = &m;
  });
  return found;
}

/// What a module's program depends on beside its arguments.
class Guards final : public MemberVisitor {
 public:
  Guards(std::vector<std::uint64_t>& words, ManagedParameters managed) : words_(words), managed_(managed) {}

  void look(Module& root) {
    root.visit_all_members(*this);
    root.visit_all_modules([&](Module& m) {
      words_.push_back(m.training() ? 1 : 0);
      if (&m != &root && m.watched()) unfit = fmt::format("a {} below is observed", m.type_name());
      if (&m != &root && m.extension() != nullptr)
        unfit = fmt::format("a {} below is sharded", m.type_name());
      if (&m != &root && m.compiled() != nullptr) words_.push_back(2);
    });
  }
  void param(std::string_view, Param& member) override {
    words_.push_back(member.defined() ? 1 : 0);
    if (!member.defined()) return;
    const Tensor& used = member.object().tensor();
    if (managed_ == ManagedParameters::trusted && member.object().owner() != nullptr)
      words_.push_back(static_cast<std::uint64_t>(used.dtype()));  // of two precisions
    else
      add(used);
  }
  void buffer(std::string_view, Buffer& member) override {
    words_.push_back(member.tensor().defined() ? 1 : 0);
    if (member.tensor().defined()) add(member.tensor());
  }

  std::string unfit;

 private:
  /// Which tensor it is, whose memory another may get.
  void add(const Tensor& t) {
    words_.push_back(t.storage().id());
    words_.push_back(static_cast<std::uint64_t>(t.layout().offset));
    words_.push_back(static_cast<std::uint64_t>(t.dtype()));
    for (int d = 0; d < t.rank(); ++d) {
      words_.push_back(static_cast<std::uint64_t>(t.shape()[d]));
      words_.push_back(static_cast<std::uint64_t>(t.strides()[d]));
    }
  }
  std::vector<std::uint64_t>& words_;
  ManagedParameters managed_;
};

class CompiledModule : public CompiledForward {
 public:
  explicit CompiledModule(CompileOptions options) : programs(options), managed_(options.managed_parameters) {}
  Result call(Module& module, const Arguments& arguments, const std::function<std::vector<Tensor>()>& forward,
              const std::function<std::shared_ptr<const void>()>& keep_form) override {
    std::vector<std::uint64_t> words{reinterpret_cast<std::uintptr_t>(arguments.signature)};
    words.push_back(arguments.values.size());
    words.insert(words.end(), arguments.values.begin(), arguments.values.end());
    Guards guards(words, managed_);
    guards.look(module);
    const std::string& unfit = guards.unfit.empty() ? arguments.unfit : guards.unfit;
    CompiledPrograms::Result made =
        programs.call(arguments.tensors, std::move(words), forward, unfit, keep_form);
    return {std::move(made.outputs), std::move(made.form)};
  }

  CompiledPrograms programs;

 private:
  ManagedParameters managed_;
};

/// A module whose forward runs eagerly, and what it calls by programs of their own.
class SplitModule final : public CompiledModule {
 public:
  /// Compiles what has no sharded module below and is not compiled yet, nested ones too, of which the
  /// outermost that is called counts.
  SplitModule(Module& module, CompileOptions options) : CompiledModule(options) {
    module.visit_all_modules([&](Module& m) {
      if (&m == &module) return;
      if (m.compiled() == nullptr && sharded_below(m) == nullptr)
        m.set_compiled(std::make_shared<CompiledModule>(options));
      if (const auto* part = dynamic_cast<CompiledModule*>(m.compiled().get()))
        programs.add_part(part->programs);
    });
  }
  Result call(Module&, const Arguments&, const std::function<std::vector<Tensor>()>& forward,
              const std::function<std::shared_ptr<const void>()>&) override {
    forward();
    return {};
  }
};

}  // namespace

void compile(Module& module, CompileOptions options) {
  const Module* sharded = sharded_below(module);
  check<StateError>(
      sharded == nullptr || options.full_graph == FullGraph::no,
      "compile: {} has a {} below that is sharded, whose gathers cannot be in a program yet, so it is no "
      "full graph; without FullGraph::yes it is compiled in parts",
      module.type_name(), sharded != nullptr ? sharded->type_name() : "");
  check<StateError>(module.compiled() == nullptr, "compile: {} is compiled already", module.type_name());
  if (sharded == nullptr)
    module.set_compiled(std::make_shared<CompiledModule>(options));
  else
    module.set_compiled(std::make_shared<SplitModule>(module, options));
}

CompiledPrograms& compiled_programs(const Module& module) {
  auto* compiled = dynamic_cast<CompiledModule*>(module.compiled().get());
  check<StateError>(compiled != nullptr, "compiled_programs: {} is not compiled", module.type_name());
  return compiled->programs;
}

}  // namespace sherd::nn
