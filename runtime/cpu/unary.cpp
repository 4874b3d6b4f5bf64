// Loops of the unary ops, and what they give of 16-bit floats as tables.
#include <array>
#include <cstring>
#include <iterator>
#include <memory>
#include <numeric>
#include <vector>

#include "runtime/cpu/elementwise_loop.h"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cpu {
namespace {

using sherd::detail::LoopOf;
using sherd::detail::Operands;
using sherd::detail::RunsRows;

/// `results` has one for each input's bits. Four elements are one load and one store.
void look_up(const void* results, std::int64_t n, std::byte* const* at, const std::int64_t*) {
  const auto* of = static_cast<const std::uint16_t*>(results);
  using Four = std::array<std::uint16_t, 4>;
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    Four x;
    std::memcpy(&x, at[1] + i * 2, sizeof x);
    for (std::uint16_t& bits : x) bits = of[bits];
    std::memcpy(at[0] + i * 2, &x, sizeof x);
  }
  for (; i < n; ++i)
    reinterpret_cast<std::uint16_t*>(at[0])[i] = of[reinterpret_cast<const std::uint16_t*>(at[1])[i]];
}

/// What a loop of one input gives of each 16-bit float there is, by the bits of the input: of many elements
/// that is looked up sooner than computed, and is the same.
class ResultsOfHalves {
 public:
  /// Elements of a call from which on looking up is worth making the table.
  static constexpr std::int64_t worth = 1 << 14;

  /// Of `op`, whose loops `give` gives.
  ResultsOfHalves(const void* op, LoopOf give, DType dtype) {
    std::vector<std::uint16_t> all(std::size(of_));
    std::iota(all.begin(), all.end(), std::uint16_t{0});
    Operands w{.count = 2, .rank = 1};
    w.sizes[0] = std::ssize(all);
    w.strides[0][0] = w.strides[1][0] = 1;
    w.data[0] = reinterpret_cast<std::byte*>(of_), w.data[1] = reinterpret_cast<std::byte*>(all.data());
    w.dtypes[0] = w.dtypes[1] = dtype;
    give(op, dtype, RunsRows(w));
  }
  void run(const Operands& w) const { run_rows(w, {.row = look_up, .numbers = 0, .in_f32 = false}, of_); }

 private:
  std::uint16_t of_[1 << 16];
};

/// Made when they are first wanted. They stay, since calls may come after `main`.
template <class O, DType dtype>
const ResultsOfHalves& results_of(const O& op) {
  static const auto& all =
      *std::make_unique<ResultsOfHalves>(&op, &sherd::detail::give_loop<O>, dtype).release();
  return all;
}

/// Of ops that have nothing to go by but their input, and take longer than looking their result up. An
/// application's functor may read what nobody knows of, so its results are computed.
template <class O>
constexpr bool looks_up() {
  return std::is_empty_v<O> && !sherd::detail::is_light<O>() && !sherd::detail::gives_bool<O>() &&
         O::dtypes.contains(DType::f16) && O::dtypes.contains(DType::bf16);
}

template <class O>
void run_looking_up(const O& op, Inputs in, Outputs out) {
  const DType dtype = in[0].dtype();
  if (out[0].numel() < ResultsOfHalves::worth || (dtype != DType::f16 && dtype != DType::bf16))
    return sherd::detail::run_elementwise(op, in, out);
  const Operands w = sherd::detail::operands_of(in, out[0]);
  (dtype == DType::f16 ? results_of<O, DType::f16>(op) : results_of<O, DType::bf16>(op)).run(w);
}

}  // namespace

void add_unary() {
  ops::UnaryOps::for_each([]<class O>() {
    add_elementwise<O>();
    if constexpr (looks_up<O>()) {
      add_kernel<&run_looking_up<O>>(DeviceType::cpu);
      sherd::detail::add_loop(kernel_row<O>(), &sherd::detail::give_loop<O>, false);  // beside this kernel
    }
  });
}

}  // namespace sherd::cpu
