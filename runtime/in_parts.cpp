#include "runtime/in_parts.h"

#include <array>
#include <atomic>

#include "runtime/ops.h"

namespace sherd::ops {
namespace {

std::atomic<ReadsParts>& reads_of(DeviceType device) {
  static std::array<std::atomic<ReadsParts>, device_type_limit> all{};
  return all[static_cast<std::size_t>(device)];
}

}  // namespace

Tensor in_one(InParts parts, Inputs in) {
  return in[parts.second].defined() ? add(in[parts.first], in[parts.second]) : in[parts.first];
}

std::optional<InParts> in_parts(const AnyOp& op, DeviceType device) {
  const ReadsParts reads = reads_of(device).load(std::memory_order_acquire);
  return reads != nullptr ? reads(op) : std::nullopt;
}
void set_reads_parts(DeviceType device, ReadsParts reads) {
  reads_of(device).store(reads, std::memory_order_release);
}

}  // namespace sherd::ops
