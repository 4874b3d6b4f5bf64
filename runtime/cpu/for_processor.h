// Loops compiled for several levels of processors, an application's own too.
#pragma once

namespace sherd::detail {

/// A loop `F`, a function that is flattened into each of its forms. An application's own are compiled with
/// its flags: with g++ at -O1 and above the attributes make them what the library's are, without contraction
/// of products and sums, and `best` takes the one for this processor (flags for single instructions, such as
/// -maes, leave the plain one). Other compilers and sanitized code compile them as any code.
template <auto F>
struct ForProcessor;
template <class... A, void (*F)(A...)>
struct ForProcessor<F> {
  using Loop = void (*)(A...);
#if defined(__clang__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static Loop best() { return F; }
#else
#if !defined(__x86_64__) || defined(__AVX2__)
  static Loop best() { return run; }
#else
  static Loop best() {
    static const Loop loop = __builtin_cpu_supports("x86-64-v4")   ? run_v4
                             : __builtin_cpu_supports("x86-64-v3") ? run_v3
                                                                   : run;
    return loop;
  }
  [[gnu::target("arch=x86-64-v4"), gnu::flatten,
    gnu::optimize("O3,fp-contract=off,no-math-errno,no-trapping-math")]] static void
  run_v4(A... a) {
    F(a...);
  }
  [[gnu::target("arch=x86-64-v3"), gnu::flatten,
    gnu::optimize("O3,fp-contract=off,no-math-errno,no-trapping-math")]] static void
  run_v3(A... a) {
    F(a...);
  }
#endif
  [[gnu::flatten, gnu::optimize("O3,fp-contract=off,no-math-errno,no-trapping-math")]] static void run(
      A... a) {
    F(a...);
  }
#endif
};

}  // namespace sherd::detail
