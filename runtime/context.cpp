#include "runtime/context.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "runtime/error.h"
#include "runtime/parallel.h"
#include "runtime/processor.h"
#include "runtime/upper_floor.h"

namespace sherd {

Listener::~Listener() = default;
void Listener::before_write(const AnyOp&, Inputs) {}
void Listener::host_read(const Tensor&) {}
void Listener::storage_gone(std::uint64_t) noexcept {}

constinit thread_local Context* Context::current_ = nullptr;

namespace {
/// Cores this process may run on (affinity, not the machine's count).
int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(CPU_COUNT(&set), 1) : 1;
}
}  // namespace

Context::Context() : threads_(usable_cores()) { install_listeners(*this); }
Context::~Context() = default;

/// Owns the thread's context and clears the pointer first, so that late frees find no pool instead of a dead
/// one.
struct ContextHolder {
  std::unique_ptr<Context, void (*)(Context*)> context{new Context, [](Context* c) { delete c; }};
  ContextHolder() { Context::current_ = context.get(); }
  ~ContextHolder() {
    context->listeners_.clear();  // some live in slots
    // What one slot holds may need another while it goes (a tensor its stream), which is then made anew.
    while (!context->slots_.empty()) std::exchange(context->slots_, {});
    Context::current_ = nullptr;
  }
};

Context& Context::create() {
  check_processor();         // before the first kernel could meet an instruction that is not there
  backend(DeviceType::cpu);  // which fills its part of the table of kernels
  thread_local ContextHolder holder;
  check<StateError>(current_ != nullptr, "context: this thread is ending and has no rank state any more");
  return *current_;
}

void Context::set_threads(int threads) {
  check<ValueError>(threads >= 1, "threads: {} asked for, at least 1 is needed", threads);
  threads_ = threads;
}

void Context::remove_listener(Listener& listener) { std::erase(listeners_, &listener); }

void manual_seed(std::uint64_t seed) { Context::current().generator().seed(seed); }

int intra_op_threads() noexcept {
  const Context* context = Context::current_or_null();
  return context ? context->threads() : 1;
}

}  // namespace sherd
