#include "shard/flat_param_handle.h"

#include <unordered_map>
#include <unordered_set>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::shard {
namespace {

constexpr std::int64_t alignment_bytes = 16;

Partition partition_of(std::span<const nn::Parameter> parameters, const FlatParamOptions& options) {
  std::vector<Shape> shapes;
  for (const nn::Parameter& p : parameters) shapes.push_back(p.shape());
  if (!options.use_orig_params) return Partition::flat(shapes, options.ranks, FlatPadding::end);
  const DType compute = options.param_dtype.value_or(parameters[0].local().dtype());
  return Partition::flat(shapes, options.ranks, FlatPadding::aligned, alignment_bytes / size_of(compute));
}

/// `length` elements of a flat tensor.
Tensor part_of(const Tensor& flat, std::int64_t offset, std::int64_t length) {
  return alias(flat, {{length}, {1}, offset});
}

}  // namespace

FlatParamHandle::FlatParamHandle(std::span<const nn::Parameter> parameters, const nn::Module& module,
                                 FlatParamOptions options)
    : FlatParamHandle(collect(parameters, module), options) {}

FlatParamHandle::FlatParamHandle(Members members, const FlatParamOptions& options)
    : members_(std::move(members)),
      partition_(partition_of(members_.parameters, options)),
      numel_(partition_.gathered_numel()) {
  check_alike(members_, options.use_orig_params);
  if (options.use_orig_params) return;
  for (const Padding& pad : partition_.padding()) numel_ -= pad.numel;
}

FlatParamHandle::Members FlatParamHandle::collect(std::span<const nn::Parameter> parameters,
                                                  const nn::Module& module) {
  check<ValueError>(!parameters.empty(), "Cannot construct a FlatParamHandle with an empty parameter list");
  std::unordered_set<const void*> wanted;
  for (const nn::Parameter& p : parameters) wanted.insert(p.id());
  Members members;
  std::unordered_map<const void*, std::string> owners;
  for (nn::NamedParameter& p : module.named_parameters(nn::Ties::all)) {
    if (!wanted.contains(p.parameter.id())) continue;
    const auto [owner, first] = owners.emplace(p.parameter.id(), p.name);
    if (!first) {
      members.ties.push_back({std::move(p.name), owner->second});
      continue;
    }
    members.names.push_back(std::move(p.name));
    members.parameters.push_back(std::move(p.parameter));
  }
  check<ValueError>(members.parameters.size() == wanted.size(),
                    "FlatParamHandle: {} parameters were given, {} of them in the {}; pass the module that "
                    "has all of them",
                    wanted.size(), members.parameters.size(), module.type_name());
  return members;
}

void FlatParamHandle::check_alike(const Members& members, bool use_orig_params) {
  const nn::Parameter& first = members.parameters[0];
  const std::string& its_name = members.names[0];
  for (std::size_t i = 0; i < members.parameters.size(); ++i) {
    const nn::Parameter& p = members.parameters[i];
    const DType dtype = p.local().dtype(), its_dtype = first.local().dtype();
    const Device device = p.local().device(), its_device = first.local().device();
    const std::string& name = members.names[i];
    check<DTypeError>(is_floating(dtype),
                      "FlatParamHandle: takes floating parameters, '{}' is {}; leave it out", name,
                      name_of(dtype));
    check<DTypeError>(
        dtype == its_dtype,
        "FlatParamHandle: parameters have one dtype, '{}' is {} and '{}' is {}; cast the module", its_name,
        name_of(its_dtype), name, name_of(dtype));
    check<DeviceError>(
        device == its_device,
        "FlatParamHandle: parameters are on one device, '{}' is on {} and '{}' on {}; move the "
        "module",
        its_name, its_device, name, device);
    check<ValueError>(use_orig_params || p.requires_grad() == first.requires_grad(),
                      "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: '{}' "
                      "has {} and '{}' {}",
                      its_name, first.requires_grad(), name, p.requires_grad());
  }
}

Tensor FlatParamHandle::flat() const {
  const NoGrad guard;
  const Tensor flat = empty({numel_}, {dtype(), members_.parameters[0].local().device()});
  for (int i = 0; i < partition_.parameters(); ++i) {
    const ParameterSpan& span = partition_.span(i);
    const Tensor& from = members_.parameters[static_cast<std::size_t>(i)].local();
    copy_(part_of(flat, span.offset, span.numel), reshape(from.detach(), {span.numel}));
  }
  for (const Padding& pad : partition_.padding())
    if (pad.offset < numel_) fill_(part_of(flat, pad.offset, pad.numel), pad.value);
  return flat;
}

std::vector<FlatShardEntry> FlatParamHandle::shard_metadata(std::int64_t start, std::int64_t end) const {
  std::vector<FlatShardEntry> entries;
  for (int i = 0; i < partition_.parameters(); ++i) {
    const OwnedPart part = partition_.part_between(i, start, end + 1);
    if (part.numel == 0) continue;
    const auto at = static_cast<std::size_t>(i);
    entries.push_back({names()[at], parameters()[at].shape(), parameters()[at].numel(), part.in_parameter,
                       part.in_parameter + part.numel - 1, part.in_shard});
  }
  return entries;
}

}  // namespace sherd::shard
