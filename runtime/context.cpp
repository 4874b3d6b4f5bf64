#include "runtime/context.h"

#include <cxxabi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "runtime/error.h"
#include "runtime/float32_precision.h"
#include "runtime/parallel.h"
#include "runtime/processor.h"
#include "runtime/this_library.h"
#include "runtime/timeline.h"
#include "runtime/upper_floor.h"

namespace sherd {

Listener::~Listener() = default;
void Listener::before_write(const AnyOp&, Inputs) {}
void Listener::made(const Tensor&, Content) {}
void Listener::host_read(const Tensor&) {}
void Listener::storage_gone(std::uint64_t) noexcept {}

Timeline::~Timeline() = default;

constinit thread_local Context* Context::current_ = nullptr;

namespace {
/// Cores this process may run on (affinity, not the machine's count).
int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(CPU_COUNT(&set), 1) : 1;
}
std::uint64_t next_id() {
  static std::atomic<std::uint64_t> next{1};  // a counter that only makes ids unique; it decides nothing
  return next.fetch_add(1, std::memory_order_relaxed);
}
}  // namespace

Context::Context() : id_(next_id()), threads_(usable_cores()) { install_listeners(*this); }
Context::~Context() = default;

Context& Context::create() {
  check_processor();         // before a kernel can run an instruction that this processor lacks
  backend(DeviceType::cpu);  // adds the CPU's kernels to the table
  std::unique_ptr<Context> fresh(new Context);
  current_ = fresh.release();
  // Not a thread_local object: that is destroyed once, and what ends after this context may make another one.
  // One made after `main` is never destroyed.
  abi::__cxa_thread_atexit(&end, current_, this_library());
  return *current_;
}

void Context::end(void* context) noexcept {
  const std::unique_ptr<Context> ending(static_cast<Context*>(context));
  ending->listeners_.clear();  // some are objects in slots, destroyed below
  // The destructor of what a slot holds may ask for another slot, which then is made anew: repeat until none
  // is left.
  while (!ending->slots_.empty()) std::exchange(ending->slots_, {});
  current_ = nullptr;  // frees that come later must not find the destroyed pool
}

void Context::set_default_options(TensorOptions options) {
  check<DTypeError>(is_floating(options.dtype),
                    "default options: the dtype must be floating, got {}; give others to the call that makes "
                    "such a tensor",
                    name_of(options.dtype));
  default_options_ = options;
}

void Context::set_threads(int threads) {
  check<ValueError>(threads >= 1, "threads: {} asked for, at least 1 is needed", threads);
  threads_ = threads;
}

void Context::remove_listener(Listener& listener) {
  const auto newest = std::find(listeners_.rbegin(), listeners_.rend(), &listener);
  if (newest != listeners_.rend()) listeners_.erase(std::next(newest).base());
}

namespace {

/// The seed from which the streams of all other threads derive. Without a lock, which a child of `fork` could
/// find held for ever. Threads that first draw while the main thread seeds get a stream of the old or of the
/// new seed.
constinit struct {
  std::atomic<std::uint64_t> seed = Generator::default_seed;
  std::atomic<std::uint64_t> threads = 0;  // how many threads drew a stream from it
} root;

bool on_main_thread() { return gettid() == getpid(); }

}  // namespace

void Context::begin_stream() {
  generator_.emplace(derived_seed(root.seed, on_main_thread() ? 0 : ++root.threads));
}

void manual_seed(std::uint64_t seed) {
  Context::current().set_generator(Generator(seed));
  if (!on_main_thread()) return;
  root.seed = seed;
  root.threads = 0;
}

DType default_dtype() {
  const Context* context = Context::current_or_null();
  return context ? context->default_options().dtype : DType::f32;
}
Device default_device() {
  const Context* context = Context::current_or_null();
  return context ? context->default_options().device : Device::cpu();
}

DefaultOptions::DefaultOptions(TensorOptions options) : before_(Context::current().default_options()) {
  Context::current().set_default_options(options);
}
DefaultOptions::~DefaultOptions() { Context::current().set_default_options(before_); }

namespace {
struct F32Products {
  Float32MatmulPrecision precision = Float32MatmulPrecision::highest;
};
}  // namespace

Float32MatmulPrecision& detail::float32_matmul_precision_here() {
  return Context::current().slot<F32Products>().precision;
}
Float32MatmulPrecision float32_matmul_precision() { return detail::float32_matmul_precision_here(); }
void set_float32_matmul_precision(Float32MatmulPrecision precision) {
  detail::float32_matmul_precision_here() = precision;
}

int intra_op_threads() noexcept {
  const Context* context = Context::current_or_null();
  return context ? context->threads() : 1;
}

}  // namespace sherd
