// Tensors of given, counted and random numbers.
#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/cpu/random.h"
#include "runtime/ops.h"
#include "runtime/ops/arange.h"
#include "runtime/ops/full.h"
#include "runtime/ops/random.h"
#include "runtime/parallel.h"
#include "runtime/replay.h"

namespace sherd::cpu {
namespace {

template <class T>
T element_of(Number value) {
  return value.element<T>();
}

/// Random kernels make f32; other dtypes round from it, so every dtype sees the same numbers (uniform ones of
/// f64 have further digits).
template <class F>
void fill_f32_then_cast(const Tensor& out, F&& fill) {
  if (out.dtype() == DType::f32) return fill(reinterpret_cast<float*>(out.raw()));
  const Tensor wide = empty(out.shape(), {DType::f32, Device::cpu()});
  fill(static_cast<float*>(wide.storage().data()));
  copy_(alias(out, out.layout()), wide);
}

constexpr std::int64_t elements_per_tile = 1 << 16;

/// Calls `body(y, begin, end)` for the elements of `out`, of tiles that threads share.
template <class F>
void for_tiles(const Tensor& out, const F& body) {
  with_element(out.dtype(), [&]<class T>() {
    auto* const y = reinterpret_cast<T*>(out.raw());
    parallel_for(out.numel(), elements_per_tile,
                 [&](std::int64_t begin, std::int64_t end) { body(y, begin, end); });
  });
}

void fill_all(const Tensor& out, Number value) {
  for_tiles(out, [&]<class T>(T* y, std::int64_t begin, std::int64_t end) {
    std::fill(y + begin, y + end, element_of<T>(value));
  });
}

void full(const ops::Full& op, Inputs, Outputs out) { fill_all(out[0], op.value); }

void fill(const ops::Fill& op, Inputs in, Outputs) {
  if (in[0].is_contiguous()) return fill_all(in[0], op.value);
  copy_(alias(in[0], in[0].layout()), Tensor::scalar(op.value, {in[0].dtype(), in[0].device()}));
}

void arange(const ops::Arange& op, Inputs, Outputs out) {
  for_tiles(out[0], [&]<class T>(T* y, std::int64_t begin, std::int64_t end) {
    if constexpr (std::is_integral_v<T>) {  // exact beyond 2^53
      const auto start = op.start.as<std::int64_t>(), step = op.step.as<std::int64_t>();
      for (std::int64_t i = begin; i < end; ++i) y[i] = static_cast<T>(start + i * step);
    } else {
      const auto start = op.start.as<double>(), step = op.step.as<double>();
      for (std::int64_t i = begin; i < end; ++i) y[i] = static_cast<T>(start + static_cast<double>(i) * step);
    }
  });
}

void uniform(const ops::Uniform& op, Inputs, Outputs out) {
  if (op.spec.dtype == DType::f64)
    return fill_uniform(key_to_draw(op.key), uniform_range_f64(op.low, op.high),
                        reinterpret_cast<double*>(out[0].raw()), out[0].numel());
  const UniformRange range = uniform_range(op.spec.dtype, op.low, op.high);
  fill_f32_then_cast(out[0], [&](float* y) { fill_uniform(key_to_draw(op.key), range, y, out[0].numel()); });
}

void normal(const ops::Normal& op, Inputs, Outputs out) {
  fill_f32_then_cast(
      out[0], [&](float* y) { fill_normal(key_to_draw(op.key), op.mean, op.stddev, y, out[0].numel()); });
}

void integers(const ops::RandomInteger& op, Inputs, Outputs out) {
  const Tensor wide =
      out[0].dtype() == DType::i64 ? out[0] : empty(out[0].shape(), {DType::i64, Device::cpu()});
  fill_integers(key_to_draw(op.key), op.low, op.high, reinterpret_cast<std::int64_t*>(wide.raw()),
                wide.numel());
  if (!wide.is(out[0])) copy_(alias(out[0], out[0].layout()), wide);
}

/// The upper half of a product, which is below `n` and, of 64 random bits, as good as any number below it.
std::uint64_t high_product(std::uint64_t bits, std::uint64_t n) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>((static_cast<Wide>(bits) * n) >> 64);
}

/// Each place, from the last one on, exchanges its number with one at or before it (R. Durstenfeld).
void random_order(const ops::RandomOrder& op, Inputs, Outputs out) {
  const std::int64_t n = out[0].numel(), counters = (n + 1) / 2;  // of four words, two for each place
  const Tensor bits = empty({2 * counters}, {DType::i64, Device::cpu()});
  auto* word = reinterpret_cast<std::uint64_t*>(bits.raw());
  philox_words(key_to_draw(op.key), counters, reinterpret_cast<std::uint32_t*>(bits.raw()));
  auto* number = reinterpret_cast<std::int64_t*>(out[0].raw());
  std::iota(number, number + n, std::int64_t{0});
  for (std::int64_t i = n - 1; i > 0; --i)
    std::swap(number[i], number[high_product(word[i], static_cast<std::uint64_t>(i) + 1)]);
}

}  // namespace

void add_creation() {
  add_kernel<full>(DeviceType::cpu);
  add_kernel<fill>(DeviceType::cpu);
  add_kernel<arange>(DeviceType::cpu);
  add_kernel<uniform>(DeviceType::cpu);
  add_kernel<normal>(DeviceType::cpu);
  add_kernel<integers>(DeviceType::cpu);
  add_kernel<random_order>(DeviceType::cpu);
}

}  // namespace sherd::cpu
