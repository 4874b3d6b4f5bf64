// The mean or sum of a loss over all elements, and its gradients, in one pass over input and target: what
// surrounds the loops of all losses, and the library's own losses.
#include "runtime/ops/loss_total.h"

#include <vector>

#include "runtime/cpu/loss_loop.h"
#include "runtime/cpu/rows.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/parallel.h"

namespace sherd::detail {
namespace {

using cpu::put;
using cpu::take;
using cpu::widened;

constexpr std::int64_t chunk = 1 << 14;  // as `sum` cuts it, so that the sum has the bits of sum(loss)
constexpr std::int64_t block = 512;      // elements in the nearest cache

/// Calls a loop on `n` elements; a null input is one that it does not take.
template <class C, class... In>
void run_loop(const DenseLoop& loop, std::int64_t n, C* out, const In*... in) {
  static constexpr std::int64_t steps[] = {1, 1, 1, 1, 1};
  std::byte* at[1 + sizeof...(In)] = {reinterpret_cast<std::byte*>(out)};
  std::size_t count = 1;
  ((in != nullptr ? void(at[count++] = reinterpret_cast<std::byte*>(const_cast<In*>(in))) : void()), ...);
  loop.row(loop.functor, n, at, steps);
}

template <class T, class C = compute_t<T>>
C sum_of_chunk(const DenseLoop& loop, const T* x, const T* t, std::int64_t n) {
  constexpr std::int64_t most = std::is_same_v<T, C> ? chunk : block;
  alignas(64) C loss[chunk];
  alignas(64) C held[2][block];
  for (std::int64_t i = 0; i < n; i += most) {
    const std::int64_t count = std::min(most, n - i);
    run_loop(loop, count, loss + i, widened(x + i, count, held[0]), widened(t + i, count, held[1]));
  }
  return cpu::sum_vectors<C>(n, [&](std::int64_t j, auto count) { return take<C>(loss + j, count); });
}

template <class T, class C = compute_t<T>>
C total(const DenseLoop& loop, const T* x, const T* t, std::int64_t n) {
  const std::int64_t chunks = (n + chunk - 1) / chunk;
  std::vector<C> sums(static_cast<std::size_t>(chunks));
  parallel_for(n, chunk, [&](std::int64_t begin, std::int64_t end) {
    sums[static_cast<std::size_t>(begin / chunk)] = sum_of_chunk(loop, x + begin, t + begin, end - begin);
  });
  cpu::add_rows_in_pairs(sums.data(), chunks, 1);
  return n == 0 ? C(0) : sums[0];
}

/// What the gradients of a block are made of; `y` is there where one of them reads it.
template <class C>
struct Block {
  std::int64_t n;
  const C *x, *t, *y;
};

/// One of the gradients, element by element.
template <class T, class C = compute_t<T>>
void gradient_of_block(const LossLoops& loops, std::size_t i, C gy, const Block<C>& b, T* gx) {
  if (loops.gradient[i].row == nullptr) return void(std::fill_n(gx, b.n, T(gy)));
  const Reads& reads = loops.reads[i];
  const auto run = [&](C* to) {
    run_loop(loops.gradient[i], b.n, to, &gy, has(reads.inputs, 0) ? b.x : nullptr,
             has(reads.inputs, 1) ? b.t : nullptr, has(reads.outputs, 0) ? b.y : nullptr);
  };
  if constexpr (std::is_same_v<T, C>) {
    run(gx);
  } else {
    alignas(64) C wide[block];
    run(wide);
    cpu::for_vectors<C>(b.n,
                        [&](std::int64_t j, auto count) { put<C>(gx + j, take<C>(wide + j, count), count); });
  }
}

}  // namespace

void run_loss_total(std::string_view op, bool mean, const LossLoops& loops, Inputs in, Outputs out) {
  const std::int64_t n = in[0].numel();
  with_floating(op, in[0].dtype(), [&]<class T>() {
    using C = compute_t<T>;
    const C sum = total(loops.loss, in[0].data<T>(), in[1].data<T>(), n);
    *reinterpret_cast<T*>(out[0].raw()) = T(mean ? sum / static_cast<C>(n) : sum);
  });
}

void run_loss_total_grad(std::string_view op, bool mean, Mask needs, const LossLoops& loops, Inputs in,
                         Outputs out) {
  const std::int64_t n = in[1].numel();
  with_floating(op, in[0].dtype(), [&]<class T>() {
    using C = compute_t<T>;
    const C g = C(*in[0].data<T>()), gy = mean ? g / static_cast<C>(n) : g;
    const T *x = in[1].data<T>(), *t = in[2].data<T>();
    T* to[2] = {};
    bool reads_loss = false;
    for (std::size_t i = 0, next = 0; i < 2; ++i) {
      if (!has(needs, i)) continue;
      to[i] = reinterpret_cast<T*>(out[next++].raw());
      reads_loss |= has(loops.reads[i].outputs, 0);
    }
    // What is read once and needs no room is not cut further.
    const bool whole = std::is_same_v<T, C> && needs != 0b11 && !reads_loss;
    const std::int64_t most = whole ? chunk : block;
    parallel_for(n, chunk, [&](std::int64_t begin, std::int64_t end) {
      alignas(64) C held[3][block];
      for (std::int64_t i = begin; i < end; i += most) {
        const std::int64_t count = std::min(most, end - i);
        const Block<C> b{count, widened(x + i, count, held[0]), widened(t + i, count, held[1]), held[2]};
        if (reads_loss) run_loop(loops.loss, count, held[2], b.x, b.t);
        for (const std::size_t k : {0, 1})
          if (to[k] != nullptr) gradient_of_block(loops, k, gy, b, to[k] + i);
      }
    });
  });
}

}  // namespace sherd::detail

namespace sherd::cpu {

void add_loss_total() {
  ops::SummedLosses::for_each([&]<class Loss>() { detail::add_loss_total<Loss>(); });
}

}  // namespace sherd::cpu
