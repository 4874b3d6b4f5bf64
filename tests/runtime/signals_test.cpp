// What computes leaves the stack pointer where the system may write a signal's frame.
#include <atomic>
#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sys/time.h>
#include <ucontext.h>

#include "autograd/autograd.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"
#include "tests/catch.h"
#include "tests/sanitizer.h"

using namespace sherd;

namespace {

#if defined(__x86_64__)
constexpr bool knows_pointer = true;
std::uintptr_t stack_pointer(const ucontext_t& at) {
  return static_cast<std::uintptr_t>(at.uc_mcontext.gregs[REG_RSP]);
}
#elif defined(__aarch64__)
constexpr bool knows_pointer = true;
std::uintptr_t stack_pointer(const ucontext_t& at) { return at.uc_mcontext.sp; }
#else
constexpr bool knows_pointer = false;
std::uintptr_t stack_pointer(const ucontext_t&) { return 0; }
#endif

volatile std::sig_atomic_t caught, elsewhere;
std::uintptr_t frame_of_test;

void look(int, siginfo_t*, void* context) {
  constexpr std::uintptr_t below = std::uintptr_t{8} << 20, above = std::uintptr_t{1} << 20;
  const std::uintptr_t pointer = stack_pointer(*static_cast<const ucontext_t*>(context));
  caught = caught + 1;
  if (pointer + below < frame_of_test || pointer > frame_of_test + above) elsewhere = elsewhere + 1;
}

/// While it lives this thread is interrupted every 20 us, on a stack beside its own.
class Interrupted {
 public:
  Interrupted() {
    stack_t own{};
    own.ss_sp = beside_.get();
    own.ss_size = bytes;
    ::sigaltstack(&own, &stack_before_);
    struct sigaction action{};
    action.sa_sigaction = look;
    action.sa_flags = SA_ONSTACK | SA_SIGINFO | static_cast<int>(SA_RESTART);
    ::sigaction(SIGALRM, &action, &before_);
    set_timer(20);
  }
  ~Interrupted() {
    set_timer(0);
    ::sigaction(SIGALRM, &before_, nullptr);
    ::sigaltstack(&stack_before_, nullptr);
  }

 private:
  static constexpr std::size_t bytes = 1 << 18;
  static void set_timer(int us) {
    const itimerval timer{{0, us}, {0, us}};
    ::setitimer(ITIMER_REAL, &timer, nullptr);
  }
  std::unique_ptr<std::byte[]> beside_ = std::make_unique<std::byte[]>(bytes);
  stack_t stack_before_{};
  struct sigaction before_{};
};

Tensor variable(const Shape& shape, DType dtype) { return to(randn(shape), dtype).requires_grad_(); }

/// What libraries compute for us: products and convolutions, forward and backward.
std::vector<std::pair<std::string, std::function<Tensor()>>> computations(DType dtype) {
  std::vector<std::pair<std::string, std::function<Tensor()>>> all;
  for (const std::int64_t m : {4, 100, 300})
    for (const std::int64_t n : {4, 100, 300})
      for (const std::int64_t k : {16, 128, 500}) {
        const Tensor a = variable({m, k}, dtype), b = variable({k, n}, dtype), w = variable({n, k}, dtype);
        all.emplace_back(fmt::format("{} x {} x {}", m, k, n), [=] { return matmul(a, b); });
        all.emplace_back(fmt::format("linear {} x {} x {}", m, k, n), [=] { return linear(a, w, {}); });
      }
  const Tensor many = variable({8, 70, 70}, dtype);
  all.emplace_back("batched", [=] { return matmul(many, many); });
  for (const std::int64_t channels : {3, 32}) {
    const Tensor x = variable({2, channels, 20, 20}, dtype), w = variable({16, channels, 3, 3}, dtype);
    all.emplace_back(fmt::format("conv2d of {} channels", channels), [=] { return conv2d(x, w, {}, {}); });
  }
  return all;
}

}  // namespace

TEST_CASE("signals: whatever is computed may be interrupted, on the caller's thread and its helpers") {
  if (test::skip_if(!knows_pointer, "of this processor the test knows no stack pointer")) return;
  if (test::skip_if(test::thread_sanitizer, "the thread sanitizer hands signals on later")) return;
  frame_of_test = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
  caught = 0;
  const int threads_before = Context::current().threads();
  for (const int threads : {1, 3}) {
    Context::current().set_threads(threads);
    for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
      for (const auto& [name, compute] : computations(dtype)) {
        INFO(name_of(dtype) << ", " << name << ", " << threads << " threads");
        sum(compute()).backward();  // plans are made
        elsewhere = 0;
        const int before = caught;
        {
          const Interrupted interrupted;
          for (int i = 0; i < 200 && caught < before + 20; ++i) sum(compute()).backward();
        }
        CHECK(elsewhere == 0);
      }
  }
  CHECK(caught > 100);
  Context::current().set_threads(threads_before);
}

TEST_CASE("signals: those of the process are for the program's own threads, not for helpers") {
  const auto holds = [] {
    sigset_t mask;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    return ::sigismember(&mask, SIGTERM) == 1 && ::sigismember(&mask, SIGPROF) == 1 &&
           ::sigismember(&mask, SIGSEGV) == 0;
  };
  const int threads_before = Context::current().threads();
  Context::current().set_threads(3);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> helped = 0, held = 0;
  for (int round = 0; round < 10'000 && helped == 0; ++round)
    parallel_for(64, 1, [&](std::int64_t, std::int64_t) {
      if (std::this_thread::get_id() == caller) {
        std::this_thread::yield();
        return;
      }
      ++helped;
      if (holds()) ++held;
    });
  Context::current().set_threads(threads_before);
  CHECK(helped > 0);
  CHECK(held == helped);
  CHECK_FALSE(holds());
}
