// All state of a rank: one object a thread.
#pragma once

#include <memory>
#include <optional>
#include <typeindex>
#include <unordered_map>
#include <vector>

#include "runtime/cpu/pool.h"
#include "runtime/export.h"
#include "runtime/generator.h"
#include "runtime/listener.h"
#include "runtime/tensor_options.h"

namespace sherd {

class Timeline;

/// What a rank has: random generator, modes, listeners, memory pool, and slots for the folders above
/// runtime/. Each thread has its own, ranks are threads, so nothing here is shared or locked. Ends with its
/// thread; what ends later still (thread_local objects made earlier, globals after `main`) gets a new one.
class SHERD_API Context {
 public:
  /// The calling thread's context, made on first use.
  static Context& current() { return current_ ? *current_ : create(); }
  /// The same, or null where there is none.
  static Context* current_or_null() { return current_; }

  /// Unique in the process and never used again, also when the address is.
  std::uint64_t id() const { return id_; }

  /// The random generator. The main thread draws from the stream of the last seed that it gave to
  /// `manual_seed`, any other thread from a stream derived from that seed and from its place in the order in
  /// which such threads first draw. That order is undefined for threads that start at the same time: seed
  /// each. Ranks of `run_ranks` start with the state of the thread that called it.
  Generator& generator() {
    if (!generator_) [[unlikely]]
      begin_stream();
    return *generator_;
  }
  void set_generator(Generator generator) { generator_ = generator; }
  CpuPool& cpu_pool() { return cpu_pool_; }

  bool grad_enabled() const { return grad_enabled_; }
  void set_grad_enabled(bool enabled) { grad_enabled_ = enabled; }

  /// What creation calls take where they are not told (see `DefaultOptions`). DTypeError for a dtype that is
  /// not floating.
  const TensorOptions& default_options() const { return default_options_; }
  void set_default_options(TensorOptions options);

  /// Threads an op of this rank may use, at least 1 (ValueError). By default the cores that this process may
  /// run on.
  int threads() const { return threads_; }
  void set_threads(int threads);

  const std::vector<Listener*>& listeners() const { return listeners_; }
  /// Listeners are called in the order they were added, as often as they were added; each must be removed as
  /// often before it is destroyed (`Listening` does both).
  void add_listener(Listener& listener) { listeners_.push_back(&listener); }
  void remove_listener(Listener& listener);
  /// Whether an op's kernel is running: no listener is told of the ops that it applies inside.
  bool inside_op() const { return inside_op_; }
  void set_inside_op(bool inside) { inside_op_ = inside; }

  /// Whether a StorageOwner is at work: the ops under way bring memory or release it (a gather). `recompute`
  /// leaves them out of its record, because running the region again makes the owner do the same again.
  bool housekeeping() const { return housekeeping_; }
  void set_housekeeping(bool housekeeping) { housekeeping_ = housekeeping; }

  /// What memory that is taken now is for.
  MemoryUse memory_use() const { return memory_use_; }
  void set_memory_use(MemoryUse use) { memory_use_ = use; }
  /// What this rank's tensors hold.
  MemoryLedger& memory() { return cpu_pool_.ledger(); }

  /// Who hears what this rank spends its time on, or null. It must outlive its being set.
  Timeline* timeline() const { return timeline_; }
  void set_timeline(Timeline* timeline) { timeline_ = timeline; }

  /// The object of type `T` that code above runtime/ keeps in this context; made on first use, destroyed with
  /// it.
  template <class T>
  T& slot() {
    std::shared_ptr<void>& slot = slots_[typeid(T)];
    if (!slot) slot = std::make_shared<T>();
    return *static_cast<T*>(slot.get());
  }

  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 private:
  friend struct std::default_delete<Context>;
  Context();
  ~Context();
  static Context& create();
  static void end(void* context) noexcept;
  void begin_stream();

  // With the default model, so that the library can be loaded by `dlopen`: at a fixed offset it would take a
  // part of the little that the system keeps for that.
  static constinit thread_local Context* current_;
  CpuPool cpu_pool_;  // first, so destroyed last: what slots hold is freed into it
  std::uint64_t id_;
  std::optional<Generator> generator_;  // empty until it is seeded or first used
  bool grad_enabled_ = true;
  TensorOptions default_options_{DType::f32, Device::cpu()};
  bool inside_op_ = false;
  bool housekeeping_ = false;
  MemoryUse memory_use_ = MemoryUse::activations;
  Timeline* timeline_ = nullptr;
  int threads_ = 1;
  std::vector<Listener*> listeners_;
  std::unordered_map<std::type_index, std::shared_ptr<void>> slots_;
};

/// A scope in which `listener` is told of the calling thread's ops. Must end on that thread.
class SHERD_API Listening {
 public:
  explicit Listening(Listener& listener) : listener_(listener) { Context::current().add_listener(listener); }
  ~Listening() { Context::current().remove_listener(listener_); }
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;

 private:
  Listener& listener_;
};

/// A scope in which grad mode has the given value.
class SHERD_API GradMode {
 public:
  explicit GradMode(bool enabled) : before_(Context::current().grad_enabled()) {
    Context::current().set_grad_enabled(enabled);
  }
  ~GradMode() { Context::current().set_grad_enabled(before_); }
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;

 private:
  bool before_;
};

/// A scope in which a StorageOwner works: `housekeeping()` is true and gradients are not recorded.
class SHERD_API Housekeeping {
 public:
  Housekeeping() : before_(Context::current().housekeeping()) { Context::current().set_housekeeping(true); }
  ~Housekeeping() { Context::current().set_housekeeping(before_); }
  Housekeeping(const Housekeeping&) = delete;
  Housekeeping& operator=(const Housekeeping&) = delete;

 private:
  bool before_;
  GradMode no_grad_{false};
};

/// A scope in which the memory that is taken is for `use`.
class SHERD_API MemoryScope {
 public:
  explicit MemoryScope(MemoryUse use) : before_(Context::current().memory_use()) {
    Context::current().set_memory_use(use);
  }
  ~MemoryScope() { Context::current().set_memory_use(before_); }
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  MemoryUse before_;
};

/// A scope without recording: `NoGrad guard;`.
struct NoGrad : GradMode {
  NoGrad() : GradMode(false) {}
};

/// Seeds the calling thread's generator, for every device. On the main thread it also sets the seed that
/// other threads derive their streams from when they draw for the first time.
SHERD_API void manual_seed(std::uint64_t seed);

}  // namespace sherd
