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

namespace sherd {

/// Random generator, modes, listeners, memory pool, and slots that upper floors fill. Each thread has its
/// own; ranks are threads, so nothing here is shared and nothing is locked. It ends with its thread; objects
/// that end later still (thread_local ones made earlier, globals after `main`) find a fresh one.
class SHERD_API Context {
 public:
  /// The calling thread's context, made on first use.
  static Context& current() { return current_ ? *current_ : create(); }
  /// The same, or null where there is none.
  static Context* current_or_null() { return current_; }

  /// The main thread draws from the stream of the last seed that it gave to `manual_seed`, any other thread
  /// from a stream derived from that seed and the order in which such threads first draw. Threads that draw
  /// at the same time have no order: seed each yourself. Ranks of `run_ranks` take over their parent's state.
  Generator& generator() {
    if (!generator_) [[unlikely]]
      begin_stream();
    return *generator_;
  }
  void set_generator(Generator generator) { generator_ = generator; }
  CpuPool& cpu_pool() { return cpu_pool_; }

  bool grad_enabled() const { return grad_enabled_; }
  void set_grad_enabled(bool enabled) { grad_enabled_ = enabled; }

  /// Threads an op of this rank may use, at least 1; the machine's cores by default.
  int threads() const { return threads_; }
  void set_threads(int threads);

  const std::vector<Listener*>& listeners() const { return listeners_; }
  /// Listeners are told in the order they were added, as often as they were added; each must be removed as
  /// often before it dies (see `Listening`).
  void add_listener(Listener& listener) { listeners_.push_back(&listener); }
  void remove_listener(Listener& listener);
  /// Whether an op's kernel is running: ops that it applies are its own business, and no listener hears them.
  bool inside_op() const { return inside_op_; }
  void set_inside_op(bool inside) { inside_op_ = inside; }

  /// Whether ops under way only bring memory of a storage's owner here or away: no part of the program that
  /// asked for it, which a second run would do again by asking.
  bool housekeeping() const { return housekeeping_; }
  void set_housekeeping(bool housekeeping) { housekeeping_ = housekeeping; }

  /// The slot of type `T` that an upper floor keeps here, made on first use.
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

  // Read several times an op: a fixed offset from the thread pointer instead of a call.
  [[gnu::tls_model("initial-exec")]] static constinit thread_local Context* current_;
  CpuPool cpu_pool_;  // first: outlives what the slots hold
  std::optional<Generator> generator_;  // once it is seeded or needed
  bool grad_enabled_ = true;
  bool inside_op_ = false;
  bool housekeeping_ = false;
  int threads_ = 1;
  std::vector<Listener*> listeners_;
  std::unordered_map<std::type_index, std::shared_ptr<void>> slots_;
};

/// A scope in which `listener` hears the calling thread's ops.
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

/// A scope of a storage's owner at work: nothing is recorded, and it is no part of the program.
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

/// A scope without recording: `NoGrad guard;`.
struct NoGrad : GradMode {
  NoGrad() : GradMode(false) {}
};

/// Seeds the calling thread's generator, for every device. On the main thread it also gives the seed that
/// streams of threads which have not drawn yet are derived from.
SHERD_API void manual_seed(std::uint64_t seed);

}  // namespace sherd
