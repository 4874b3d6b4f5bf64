#include "autograd/compile.h"

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>

#include "autograd/capture/frame.h"
#include "autograd/capture/passes/additions.h"
#include "autograd/capture/passes/common.h"
#include "autograd/capture/passes/dead_code.h"
#include "autograd/capture/passes/epilogues.h"
#include "autograd/capture/passes/fuse.h"
#include "autograd/capture/passes/late.h"
#include "autograd/capture/words.h"
#include "runtime/context.h"
#include "runtime/log.h"

namespace sherd {
namespace {

/// What of the rank a program depends on.
void describe_rank(Words& words) {
  const Context& context = Context::current();
  const TensorOptions& defaults = context.default_options();
  words.push_back(context.grad_enabled() ? 1 : 0);
  words.push_back(static_cast<std::uint64_t>(float32_matmul_precision()));
  words.push_back(static_cast<std::uint64_t>(defaults.dtype));
  words.push_back(static_cast<std::uint64_t>(defaults.device.type));
  words.push_back(static_cast<std::uint64_t>(defaults.device.index));
}

std::span<const Pass> passes_of(const CompileOptions& options) {
  static constexpr Pass passes[] = {{"common", common}, {"dead_code", dead_code}, {"additions", additions},
                                    {"late", late},     {"fuse", fuse},           {"epilogues", epilogues}};
  const bool makes_again = options.executor != Executor::replay || options.memory.limited();
  const std::size_t count = options.executor == Executor::fused ? 6 : makes_again ? 4 : 3;
  return std::span(passes, count)
      .subspan(options.common_subexpressions == CommonSubexpressions::each ? 1 : 0);
}

}  // namespace

MemoryBudget MemoryBudget::bytes(std::int64_t most) {
  check<ValueError>(most > 0, "MemoryBudget: {} bytes; give it some", most);
  MemoryBudget budget;
  budget.bytes_ = most;
  return budget;
}

MemoryBudget MemoryBudget::part(double of_eager) {
  check<ValueError>(of_eager > 0 && of_eager <= 1,
                    "MemoryBudget: a part of {}; give it more than 0 and at most 1", of_eager);
  MemoryBudget budget;
  budget.part_ = of_eager;
  return budget;
}

MemoryBudget MemoryBudget::least() {
  MemoryBudget budget;
  budget.least_ = true;
  return budget;
}

std::int64_t MemoryBudget::limit(std::int64_t eager_peak, std::int64_t least) const {
  if (least_) return least;
  return bytes_ > 0 ? bytes_ : static_cast<std::int64_t>(part_ * static_cast<double>(eager_peak));
}

namespace {

/// What one thread calls by: workspaces are its own, and so is the order of its work on a device.
/// What calls count, beside what programs know of themselves.
void add_counts(CompileStats& to, const CompileStats& of) {
  to.frames += of.frames;
  to.hits += of.hits;
  to.misses += of.misses;
  to.eager += of.eager;
  to.sharding_hooks += of.sharding_hooks;
}

struct OfThread {
  const void* thread;                          // its CompiledHere
  bool over = false;                           // which is gone, and another may be where it was
  std::list<std::shared_ptr<Frame>> frames{};  // the last used first
  CompileStats counts{};
  std::string unfit{};   // why the last call that asked for no program ran eagerly
  std::size_t gone = 0;  // programs, for others

  /// The frame for such a call, moved to the front; null where there is none.
  std::shared_ptr<Frame> find(const Words& key) {
    const auto its = std::ranges::find_if(
        frames, [&](const std::shared_ptr<Frame>& frame) { return frame->key == key && frame->holds(); });
    if (its == frames.end()) return nullptr;
    frames.splice(frames.begin(), frames, its);
    return frames.front();
  }
};

/// What was compiled on this thread, and what it called by programs of its own, as far as they are there.
struct CompiledHere {
  CompiledHere() = default;
  ~CompiledHere();
  CompiledHere(const CompiledHere&) = delete;
  CompiledHere& operator=(const CompiledHere&) = delete;
  std::vector<std::weak_ptr<CompiledPrograms::Impl>> programs{}, called{};
};
CompiledHere& compiled_here() { return Context::current().slot<CompiledHere>(); }

}  // namespace

struct CompiledPrograms::Impl : std::enable_shared_from_this<Impl> {
  explicit Impl(CompileOptions given) : options(given) {}

  CompileOptions options;
  std::vector<std::weak_ptr<Impl>> parts{};
  std::mutex mutex;  // of the list
  std::vector<std::shared_ptr<OfThread>> threads{};
  CompileStats of_others{};  // threads that are over and went

  /// This thread's. Those of threads that are over go.
  std::shared_ptr<OfThread> here() {
    CompiledHere& thread = compiled_here();
    const std::scoped_lock lock(mutex);
    std::erase_if(threads, [this](const auto& of) {
      if (of->over) add_counts(of_others, of->counts);
      return of->over;
    });
    for (const auto& of : threads)
      if (of->thread == &thread) return of;
    std::erase_if(thread.called, [this](const auto& of) { return of.expired() || of.lock().get() == this; });
    thread.called.push_back(weak_from_this());
    threads.push_back(std::make_shared<OfThread>(OfThread{&thread}));
    return threads.back();
  }
  /// Behind all that the thread did.
  void end(const CompiledHere& thread) {
    const std::scoped_lock lock(mutex);
    for (const auto& of : threads) of->over = of->over || of->thread == &thread;
  }
  std::vector<std::shared_ptr<OfThread>> all() {
    const std::scoped_lock lock(mutex);
    return threads;
  }
  CompileStats counts_of_others() {
    const std::scoped_lock lock(mutex);
    return of_others;
  }
  void reset() {
    const std::scoped_lock lock(mutex);
    threads.clear();
    of_others = {};
  }
  /// The parts of `whole` and theirs, as far as they are there, each once, and itself last.
  static std::vector<std::shared_ptr<Impl>> with_parts(std::shared_ptr<Impl> whole) {
    std::vector<std::shared_ptr<Impl>> list, open{std::move(whole)};
    while (!open.empty()) {
      const std::shared_ptr<Impl> next = std::move(open.back());
      open.pop_back();
      if (std::ranges::find(list, next) != list.end()) continue;
      list.push_back(next);
      for (auto part = next->parts.rbegin(); part != next->parts.rend(); ++part)
        if (std::shared_ptr<Impl> alive = part->lock()) open.push_back(std::move(alive));
    }
    std::ranges::rotate(list, list.begin() + 1);
    return list;
  }
};

namespace {

CompiledHere::~CompiledHere() {
  for (const auto& programs : called)
    if (const auto alive = programs.lock()) alive->end(*this);
}

}  // namespace

CompiledPrograms::CompiledPrograms(CompileOptions options) : impl_(std::make_shared<Impl>(options)) {
  check<ValueError>(options.programs > 0, "compile: room for {} programs; give it room for one at least",
                    options.programs);
  std::erase_if(compiled_here().programs, [](const auto& programs) { return programs.expired(); });
  compiled_here().programs.push_back(impl_);
}

CompiledPrograms::~CompiledPrograms() = default;

CompileStats CompiledPrograms::stats() const {
  CompileStats stats;
  for (const auto& programs : Impl::with_parts(impl_)) {
    add_counts(stats, programs->counts_of_others());
    for (const auto& of : programs->all()) {
      add_counts(stats, of->counts);
      for (const std::shared_ptr<Frame>& frame : of->frames) frame->count(stats);
    }
  }
  return stats;
}

std::string CompiledPrograms::text() const {
  std::string text;
  for (const auto& programs : Impl::with_parts(impl_))
    for (const auto& of : programs->all()) {
      if (!of->unfit.empty()) text += "runs eagerly: " + of->unfit + "\n";
      for (const std::shared_ptr<Frame>& frame : of->frames) text += frame->text();
    }
  return text;
}

std::vector<std::string> CompiledPrograms::drawings() const {
  std::vector<std::string> drawings;
  for (const auto& programs : Impl::with_parts(impl_))
    for (const auto& of : programs->all())
      for (const std::shared_ptr<Frame>& frame : of->frames) frame->draw(drawings);
  return drawings;
}

void CompiledPrograms::reset() {
  for (const auto& programs : Impl::with_parts(impl_)) programs->reset();
}
void CompiledPrograms::add_part(const CompiledPrograms& part) { impl_->parts.push_back(part.impl_); }

CompiledPrograms::Result CompiledPrograms::call(
    std::span<const Tensor> inputs, std::vector<std::uint64_t> values,
    const std::function<std::vector<Tensor>()>& body, const std::string& unfit,
    const std::function<std::shared_ptr<const void>()>& keep_form) {
  if (Tracer::active()) return {body(), nullptr};
  const CompileOptions& options = impl_->options;
  const std::shared_ptr<OfThread> here = impl_->here();
  const bool strict = options.full_graph == FullGraph::yes;
  const auto undefined = [](const Tensor& t) { return !t.defined(); };
  std::string reason = unfit;
  if (reason.empty() && std::ranges::any_of(inputs, undefined)) reason = "an input is an empty handle";
  if (!reason.empty()) {
    check<StateError>(!strict, "compile: this call cannot be captured: {}", reason);
    ++here->counts.eager;
    here->unfit = std::move(reason);
    return {body(), nullptr};
  }
  const std::vector<Tensor> given(inputs.begin(), inputs.end());
  describe_rank(values);
  describe(given, Gradients::wanted, values);
  if (const std::shared_ptr<Frame> frame = here->find(values)) {
    if (!frame->unfit().empty() || !frame->can_write(given)) {
      ++here->counts.eager;
      return {body(), nullptr};
    }
    ++here->counts.hits;
    return {frame->replay(given), frame->form};
  }
  ++here->counts.misses;
  ++here->counts.frames;
  const auto frame = std::make_shared<Frame>(
      passes_of(options), Keeping{options.executor == Executor::replay ? Keeps::as_eager : Keeps::cheapest,
                                  options.memory, options.costs});
  frame->key = std::move(values);
  std::vector<Tensor> outputs = frame->trace(given, body, strict);
  if (!unfit.empty()) frame->give_up(unfit);
  check<StateError>(unfit.empty() || !strict, "compile: this call cannot be captured: {}", unfit);
  if (frame->unfit().empty() && keep_form) frame->form = keep_form();
  here->frames.push_front(frame);
  if (here->frames.size() > options.programs) {
    here->frames.pop_back();
    if (++here->gone == options.programs)
      write_log(LogLevel::warning,
                "compile: of {} programs that are kept each went for another, so calls are traced anew, the "
                "last one {}now: give CompileOptions::programs more, or pad inputs to fewer shapes",
                options.programs, shapes_of(given, [](const Tensor& t) { return t.shape(); }));
  }
  return {std::move(outputs), nullptr};
}

Compiled::Compiled(Step step, CompileOptions options)
    : step_(std::move(step)), programs_(std::make_shared<CompiledPrograms>(options)) {
  check<ValueError>(step_ != nullptr, "compile: an empty function");
}

std::vector<Tensor> Compiled::operator()(std::span<const Tensor> inputs) const {
  return programs_->call(inputs, {}, [&] { return step_(inputs); }).outputs;
}

Compiled compile(Step step, CompileOptions options) { return {std::move(step), options}; }

void compile_reset() {
  for (const auto& programs : compiled_here().programs)
    if (const auto alive = programs.lock()) alive->reset();
  free_halves_workspace();
}

}  // namespace sherd
