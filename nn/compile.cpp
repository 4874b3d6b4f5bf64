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
  Guards(std::vector<std::uint64_t>& words, const CompileOptions& options)
      : words_(words), options_(options) {}

  void look(Module& root) {
    root.visit_all_members(*this);
    root.visit_all_modules([&](Module& m) {
      words_.push_back(m.training() ? 1 : 0);
      if (&m != &root && m.watched()) unfit = fmt::format("a {} below is observed", m.type_name());
      if (&m != &root && m.extension() != nullptr) {
        if (options_.sharding_hooks == ShardingHooks::around)
          unfit = fmt::format("a {} below is sharded", m.type_name());
        else if (!m.extension()->repeats_in_programs())
          unfit = fmt::format("a {} below begins a sharded model inside; compile that model", m.type_name());
      }
      if (options_.sharding_hooks == ShardingHooks::inside) {
        words_.push_back(reinterpret_cast<std::uintptr_t>(m.extension().get()));
        if (m.extension() != nullptr) m.extension()->add_guards(words_);
      }
      if (&m != &root && m.compiled() != nullptr) words_.push_back(2);
    });
  }
  void param(std::string_view, Param& member) override {
    words_.push_back(member.defined() ? 1 : 0);
    if (!member.defined()) return;
    const Tensor& used = member.object().tensor();
    if (options_.managed_parameters == ManagedParameters::trusted && member.object().owner() != nullptr)
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
  const CompileOptions& options_;
};

class CompiledModule : public CompiledForward {
 public:
  explicit CompiledModule(CompileOptions options) : programs(options), options_(options) {}
  Result call(Module& module, const Arguments& arguments, const std::function<std::vector<Tensor>()>& forward,
              const std::function<std::shared_ptr<const void>()>& keep_form) override {
    std::vector<std::uint64_t> words{reinterpret_cast<std::uintptr_t>(arguments.signature)};
    words.push_back(arguments.values.size());
    words.insert(words.end(), arguments.values.begin(), arguments.values.end());
    Guards guards(words, options_);
    guards.look(module);
    const std::string& unfit = guards.unfit.empty() ? arguments.unfit : guards.unfit;
    CompiledPrograms::Result made =
        programs.call(arguments.tensors, std::move(words), forward, unfit, keep_form);
    return {std::move(made.outputs), std::move(made.form)};
  }

  bool extension_inside() const override { return options_.sharding_hooks == ShardingHooks::inside; }

  /// Compiles what has no sharded module below and is not compiled yet, nested ones too, of which the
  /// outermost that is called counts.
  void add_parts(Module& module) {
    module.visit_all_modules([&](Module& m) {
      if (&m == &module) return;
      if (m.compiled() == nullptr && sharded_below(m) == nullptr)
        m.set_compiled(std::make_shared<CompiledModule>(options_));
      if (const auto* part = dynamic_cast<CompiledModule*>(m.compiled().get()))
        programs.add_part(part->programs);
    });
  }

  CompiledPrograms programs;

 private:
  CompileOptions options_;
};

/// A module whose forward runs eagerly, and what it calls by programs of their own.
class SplitModule final : public CompiledModule {
 public:
  using CompiledModule::CompiledModule;
  Result call(Module&, const Arguments&, const std::function<std::vector<Tensor>()>& forward,
              const std::function<std::shared_ptr<const void>()>&) override {
    forward();
    return {};
  }
};

}  // namespace

void compile(Module& module, CompileOptions options) {
  const Module* sharded = sharded_below(module);
  const bool in_parts = sharded != nullptr && options.sharding_hooks == ShardingHooks::around;
  check<StateError>(!in_parts || options.full_graph == FullGraph::no,
                    "compile: {} has a {} below that is sharded, and is compiled in parts, so it is no full "
                    "graph; give ShardingHooks::inside",
                    module.type_name(), in_parts ? sharded->type_name() : "");
  check<StateError>(module.compiled() == nullptr, "compile: {} is compiled already; nn::uncompile it first",
                    module.type_name());
  const std::shared_ptr<CompiledModule> compiled =
      in_parts ? std::make_shared<SplitModule>(options) : std::make_shared<CompiledModule>(options);
  // Of a call that is no program its parts are.
  if (sharded != nullptr && options.full_graph == FullGraph::no) compiled->add_parts(module);
  module.set_compiled(compiled);
}

void uncompile(Module& module) {
  module.visit_all_modules([](Module& m) { m.set_compiled(nullptr); });
}

CompiledPrograms& compiled_programs(const Module& module) {
  auto* compiled = dynamic_cast<CompiledModule*>(module.compiled().get());
  check<StateError>(compiled != nullptr, "compiled_programs: {} is not compiled", module.type_name());
  return compiled->programs;
}

}  // namespace sherd::nn
