// Steps over lists of parameters: what surrounds the loops of all rules.
#include "runtime/cpu/list_step_loop.h"

#include <algorithm>
#include <vector>

#include "runtime/cpu/list_tiles.h"
#include "runtime/cpu/order_free_norm.h"
#include "runtime/ops.h"
#include "runtime/ops/copy.h"

namespace sherd::detail {
namespace {

/// One parameter: its value, its gradient and all state, null where it is not kept.
struct StepSlot {
  float* at[2 + StepLists::most_states];
  std::int64_t n;
  double step;
  std::int64_t size() const { return n; }
};

/// Tensors of 16 bits that are stepped as f32 copies, and what is written back of them.
class Widened {
 public:
  static constexpr std::int64_t most_numel = 1 << 24;

  float* data(std::string_view op, const Tensor& t) {
    std::byte* const data = dense_data(op, t);
    if (t.dtype() == DType::f32) return reinterpret_cast<float*>(data);
    narrow_.push_back(alias(t, t.layout()));
    numel_ += t.numel();
    return reinterpret_cast<float*>(wide_.emplace_back(to(t, DType::f32)).raw());
  }
  bool is_full() const { return numel_ >= most_numel; }
  void write_back() {
    copy_each_(narrow_, wide_);
    narrow_.clear(), wide_.clear();
    numel_ = 0;
  }

 private:
  std::vector<Tensor> narrow_, wide_;
  std::int64_t numel_ = 0;
};

/// A gradient as the step takes it: f32, dense, and clipped in its own dtype.
Tensor dense_gradient(std::string_view op, const Tensor& given, double factor) {
  Tensor g = contiguous(given);
  if (factor != 1.0) {
    g = clone(g);
    with_floating(op, g.dtype(), [&]<class T>() {
      const std::span values(reinterpret_cast<T*>(g.raw()), static_cast<std::size_t>(g.numel()));
      cpu::scale<T>(std::span(&values, 1), factor);
    });
  }
  return to(g, DType::f32);
}

}  // namespace

void run_step(const StepLists& lists, Inputs in, const void* rule, StepLoop loop) {
  if (lists.skippable && *in[1].data<float>() != 0) return;
  const double lr = *in[0].data<double>(), factor = lists.clipped ? *in[lists.factor()].data<double>() : 1.0;
  for (std::size_t i = lists.first(); i < in.size(); ++i)  // before anything is written
    if ((i - lists.first()) % lists.stride() != 1) dense_data(lists.name, in[i]);
  std::vector<StepSlot> slots;
  std::vector<Tensor> gradients;  // views become dense, and 16 bits f32
  Widened widened;
  const auto step = [&] {
    cpu::for_elements(std::span<const StepSlot>(slots),
                      [&](const StepSlot& s, std::int64_t begin, std::int64_t end, std::int64_t) {
                        float* at[std::size(s.at)];
                        std::ranges::transform(s.at, at, [&](float* p) { return p ? p + begin : p; });
                        loop(rule, lr, s.step, end - begin, at);
                      });
    widened.write_back();
    slots.clear(), gradients.clear();
  };
  for (std::size_t i = lists.first(); i < in.size(); i += lists.stride()) {
    const Inputs one = in.subspan(i, lists.stride());
    StepSlot slot{{}, one[0].numel(), 1};
    slot.at[0] = widened.data(lists.name, one[0]);
    slot.at[1] =
        reinterpret_cast<float*>(gradients.emplace_back(dense_gradient(lists.name, one[1], factor)).raw());
    for (std::size_t k = 0, from = 2; k < lists.states.size(); ++k)
      if (has(lists.kept, k)) slot.at[2 + k] = widened.data(lists.name, one[from++]);
    if (lists.counts) slot.step = *reinterpret_cast<double*>(one[lists.count()].raw()) += 1;
    slots.push_back(slot);
    if (widened.is_full()) step();
  }
  step();
  if (lists.twins)
    for (std::size_t i = lists.first(); i < in.size(); i += lists.stride()) {
      const Tensor& twin = in[i + lists.twin()];
      copy_(alias(twin, twin.layout()), in[i]);
    }
}

}  // namespace sherd::detail
