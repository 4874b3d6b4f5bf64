// A program that ends in one of the ways in which programs end; 0 says that it ended well. lifetimes_test.cpp
// runs it, once a way.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "sherd.h"

#if defined(__SANITIZE_THREAD__)
// Else it forbids a child to work.
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
#elif defined(__SANITIZE_ADDRESS__)
// In a child it takes what the parent's other threads held for leaks.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }
#endif

namespace {

using namespace sherd;

/// What outlives `main`, and with it this thread's context.
struct Late {
  Tensor tensor, loss;
  std::optional<nn::Sequential> model;
  Subscription subscription;
  Subscription hook;
  std::unique_ptr<nn::Adam> adam;
  std::unique_ptr<nn::Sgd> sgd;
  std::optional<Program> program;
  std::optional<NoGrad> no_grad;
  std::function<void()> at_end;
  ~Late() {
    if (at_end) at_end();
  }
};

struct Counting final : nn::ModuleObserver {
  void before_forward(nn::Module&, std::span<Tensor* const>) override { ++calls; }
  int calls = 0;
};

Counting observer;
Late late;  // made before any context, so it goes after the last one
thread_local Late late_of_thread;

/// A step that uses helper threads too.
Tensor large_step() {
  const GradMode mode(true);
  Tensor x = full({1 << 18}, 0.5);
  x.requires_grad_();
  const Tensor loss = sum(mul(x, x));
  loss.backward();
  return loss;
}

void train(Late& into) {
  into.model.emplace(nn::Linear(4, 8), nn::Linear(8, 1));
  into.subscription = into.model->observe(observer);
  into.adam = std::make_unique<nn::Adam>(into.model->parameters());
  into.sgd = std::make_unique<nn::Sgd>(into.model->parameters(), nn::SgdOptions{.momentum = 0.9});
  into.tensor = randn({3, 4});
  into.tensor.requires_grad_();
  into.hook = register_hook(into.tensor, [](const Tensor& g) { return mul(g, 2); });
  into.loss = sum(recompute([&] { return tanh((*into.model)(into.tensor)); }));
  into.loss.backward({}, true);
  into.adam->step();
  into.sgd->step();
  into.program = capture([](std::span<const Tensor> in) { return std::vector<Tensor>{sum(exp(in[0]))}; },
                         std::vector<Tensor>{randn({8})});
  into.no_grad.emplace();
}

/// 0 when the child did.
int wait_for(pid_t child) {
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

int fork_and(const std::function<int()>& child) {
  const pid_t id = fork();
  if (id == 0) std::exit(child());
  return wait_for(id);
}

int same_as(double expected) { return large_step().item() == expected ? 0 : 1; }

const std::map<std::string, std::function<int()>> ways = {
    {"globals", [] { return train(late), 0; }},
    {"globals of a thread",
     [] {
       late_of_thread.tensor = {};  // made before the thread's context
       train(late_of_thread);
       std::thread([] {
         late_of_thread.tensor = {};
         train(late_of_thread);
       }).join();
       return 0;
     }},
    {"globals made by a thread that has ended",
     [] {
       std::thread([] { train(late); }).join();
       return 0;
     }},
    {"globals whose destructors compute",
     [] {
       late.tensor = randn({1 << 18});
       late.at_end = [] {
         late.tensor = mul(late.tensor, late.tensor);
         late.loss = large_step();
         manual_seed(1);
       };
       return 0;
     }},
    {"a child that does nothing", [] { return large_step(), fork_and([] { return 0; }); }},
    {"a child that computes",
     [] {
       const double expected = large_step().item();
       train(late);
       const int children = fork_and([&] { return same_as(expected); }) +
                            fork_and([&] { return fork_and([&] { return same_as(expected); }); });
       return children + same_as(expected);
     }},
    {"a child of a thread",
     [] {
       const double expected = large_step().item();
       int result = 1;
       std::thread([&] {
         large_step();
         result = fork_and([&] { return same_as(expected); });
       }).join();
       return result;
     }},
    {"a child that frees what other threads made",
     [] {
       std::vector<Tensor> made;
       std::thread([&] {
         for (int i = 0; i < 100; ++i) made.push_back(full({i * 1000}, 1));
         const int result = fork_and([&] { return made.clear(), 0; });
         if (result != 0) std::_Exit(result);
       }).join();
       return fork_and([&] { return made.clear(), 0; });
     }},
    {"pthread_exit in a thread",
     [] {
       std::thread([] {
         train(late_of_thread);
         const Tensor x = large_step();
         pthread_exit(nullptr);
       }).join();
       return 0;
     }},
    {"pthread_exit in a rank",
     [] {
       try {
         run_ranks(3, [](World& world) {
           const Tensor x = full({1000}, world.rank());
           world.group().all_reduce(x);
           if (world.rank() == 1) pthread_exit(nullptr);
           world.group().barrier();
         });
       } catch (const Error& error) {
         return std::strstr(error.what(), "rank 1") != nullptr ? 0 : 2;
       }
       return 1;
     }},
    {"pthread_exit in main",
     [] {
       train(late);
       pthread_exit(nullptr);
       return 1;
     }},
    {"exit in a thread",
     [] {
       train(late);
       std::thread([] {
         large_step();
         std::exit(0);
       }).join();
       return 1;
     }},
};

}  // namespace

/// Without an argument, lists the ways.
int main(int argc, char** argv) {
  if (argc < 2) {
    for (const auto& [name, way] : ways) std::puts(name.c_str());
    return 0;
  }
  if (std::strcmp(argv[1], "pthread_exit in main") != 0 && !ways.contains(argv[1])) return 99;
  if (std::strstr(argv[1], "child") != nullptr) Context::current().set_threads(4);
  return ways.at(argv[1])();
}
