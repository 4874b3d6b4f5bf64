#include "shard/rows.h"

#include <string>
#include <vector>

#include "collectives/group.h"
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "shard/group.h"
#include "shard/unit.h"

namespace sherd::shard {

Rows::Rows(std::int64_t begin, std::int64_t n, std::int64_t wide)
    : first(begin / wide),
      count(n == 0 ? 0 : (begin + n + wide - 1) / wide - first),
      columns(wide),
      numel(n),
      lead(n == 0 ? 0 : begin - first * wide) {}

Tensor Rows::of(const Tensor& part) const {
  if (numel == count * columns) return reshape(part, {count, columns});
  const Tensor rows = zeros({count * columns}, {part.dtype(), part.device()});
  copy_(narrow(rows, 0, lead, numel), reshape(part, {numel}));
  return reshape(rows, {count, columns});
}

Tensor Rows::elements(const Tensor& rows) const {
  return narrow(reshape(rows, {count * columns}), 0, lead, numel);
}

void check_all_hear(std::string_view optimizer, const nn::Parameter& p) {
  const Unit* unit = unit_of(p);
  if (unit == nullptr) return;
  check<ValueError>(
      unit->flattened(p) == nullptr,
      "{}: a flat parameter of {} elements is many parameters, which it steps one by one; shard "
      "with use_orig_params",
      optimizer, p.numel());
  if (shard_group_of(p) == nullptr) return;
  const auto [members, index] = unit->place(p);
  const GroupSpec& spec = members->group->spec();
  if (spec.layout == GroupLayout::per_parameter) return;
  for (int rank = 0; rank < spec.partition.ranks(); ++rank)
    check<StateError>(
        spec.partition.part(static_cast<int>(index), rank).numel > 0,
        "{}: rank {} has no element of '{}' in the flat layout, and hears of no gradient of it; "
        "shard its module with GroupLayout::per_parameter",
        optimizer, rank, spec.names[index]);
}

void agree(std::span<const nn::Parameter> params, std::span<const Tensor> numbers, const ReduceOp& reduction,
           std::string_view label) {
  struct Call {
    const Group* group;
    Device device;
    std::vector<Tensor> numbers{};
  };
  std::vector<Call> calls;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Group* group = shard_group_of(params[i]);
    if (group == nullptr || numbers[i].numel() == 0) continue;
    const Device device = numbers[i].device();
    auto call = calls.begin();
    while (call != calls.end() && !(*call->group == *group && call->device == device)) ++call;
    if (call == calls.end()) call = calls.insert(call, {group, device});
    call->numbers.push_back(reshape(numbers[i], {numbers[i].numel()}));
  }
  for (const Call& call : calls) {
    const Tensor all = cat(call.numbers);
    call.group->all_reduce(all, reduction, {.label = std::string(label)});
    std::int64_t at = 0;
    for (const Tensor& own : call.numbers) {
      copy_(own, narrow(all, 0, at, own.numel()));
      at += own.numel();
    }
  }
}

}  // namespace sherd::shard
