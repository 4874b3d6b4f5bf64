#include "autograd/capture/costs.h"

#include <algorithm>
#include <cmath>

#include "autograd/capture/passes/rewrite.h"
#include "runtime/fused_region.h"

namespace sherd {
namespace {

constexpr std::int64_t light_part = 16, heavy_times = 4;
constexpr double operations_of_a_byte = 32;

std::int64_t bytes_of(const TracedTensor& t) { return t.layout.shape.numel() * size_of(t.dtype); }

/// Of a product of such sizes: twice the result's elements times the length that is summed over, the root of
/// left times right by result. Of no product an estimate from above.
double operations(const TracedOp& traced) {
  if (traced.in.size() < 2 || traced.in[1].storage == TracedTensor::none || traced.out.empty()) return 0;
  const auto numel = [](const TracedTensor& t) { return static_cast<double>(t.layout.shape.numel()); };
  const double result = std::max(1.0, numel(traced.out[0]));
  return 2 * result * std::sqrt(numel(traced.in[0]) * numel(traced.in[1]) / result);
}

bool is_heavy(const TracedOp& traced) { return ops::effort_of(*traced.op) == ops::Effort::heavy; }

std::int64_t estimate(const Trace& trace, const TracedOp& traced) {
  const auto stored = [&](const TracedTensor& t) {
    return t.storage == TracedTensor::none ? 0 : static_cast<std::int64_t>(trace.storages[t.storage].bytes);
  };
  if (is_light(traced)) {
    std::int64_t most = 0;
    for (const TracedTensor& t : traced.in) most = std::max(most, stored(t));
    return is_heavy(traced) ? heavy_times * stored(traced.out[0]) : most / light_part + 1;
  }
  std::int64_t moved = 1;
  each_tensor_of(traced, [&](const TracedTensor& t) { moved += bytes_of(t); });
  return moved + static_cast<std::int64_t>(operations(traced) / operations_of_a_byte);
}

std::string key_of(const Trace& trace, const TracedOp& traced) {
  const auto specs_of = [&](const auto& tensors) {
    Specs specs;
    for (const TracedTensor& t : tensors)
      specs.push_back(t.storage == TracedTensor::none
                          ? Spec::none()
                          : Spec{t.layout.shape, t.dtype, trace.storages[t.storage].device});
    return specs;
  };
  return cost_key(*traced.op, specs_of(traced.in), specs_of(traced.out));
}

}  // namespace

bool is_light(const TracedOp& traced) {
  if (traced.in.empty() || traced.in[0].storage == TracedTensor::none) return false;
  const TracedTensor& in = traced.in[0];
  return ops::effort_of(*traced.op) || ops::row_sum(*traced.op, in.layout.shape, in.dtype);
}

std::string cost_key(const AnyOp& op, SpecSpan inputs, SpecSpan outputs) {
  std::string list;
  DeviceType device = DeviceType::cpu;
  for (const Spec& spec : inputs.empty() ? outputs : inputs) {
    if (!spec.is_none() && spec.device.type != DeviceType::cpu) device = spec.device.type;
    list += list.empty() ? "" : ", ";
    list += spec.is_none() ? "none" : fmt::format("{} {}", spec.dtype, spec.shape);
  }
  const std::string text = op.random_key() != nullptr ? op.keep_drawing({})->text() : op.text();
  return fmt::format("{} {}{}", device == DeviceType::cuda ? "cuda" : "cpu", text,
                     inputs.empty() ? "() : " + list : "(" + list + ")");
}

std::vector<std::int64_t> costs_of(const Trace& trace, const OpCosts& measured) {
  const std::size_t n = trace.ops.size();
  std::vector<std::int64_t> costs(n);
  std::vector<std::optional<std::int64_t>> times(n);
  double estimated = 0, taken = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const TracedOp& traced = trace.ops[i];
    costs[i] = estimate(trace, traced);
    if (measured.size() == 0 || (is_light(traced) && !is_heavy(traced))) continue;
    times[i] = measured.nanoseconds(key_of(trace, traced));
    if (!times[i]) continue;
    estimated += static_cast<double>(costs[i]);
    taken += static_cast<double>(*times[i]);
  }
  for (std::size_t i = 0; i < n && taken > 0; ++i)
    if (times[i])
      costs[i] = std::max<std::int64_t>(1, std::llround(static_cast<double>(*times[i]) * estimated / taken));
  return costs;
}

}  // namespace sherd
