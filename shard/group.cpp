#include "shard/group.h"

#include <algorithm>
#include <utility>

#include "autograd/autograd.h"
#include "autograd/node.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/engine.h"

namespace sherd::shard {
namespace {

/// Owns the shard's storage, which is always here, for the sake of its writes.
class ShardOwner final : public StorageOwner {
 public:
  explicit ShardOwner(std::weak_ptr<ParameterGroup> group) : group_(std::move(group)) {}
  void need(Storage&) override {}
  bool releases() const override { return false; }
  void before_write(Storage&) override {
    const auto group = group_.lock();
    if (!group) return;
    check<StateError>(
        !group->summoned,
        "fully_shard: the part of '{}' is written while summon_full_params shows the whole, whose "
        "values would undo it; write data(), or end that scope first",
        group->spec().names[0]);
    group->each_gathered([](Gathered& gathered) { gathered.shard_written_here(); });
  }

 private:
  std::weak_ptr<ParameterGroup> group_;
};

DType computes_in(const GroupSpec& spec, const Tensor& shard) {
  return is_floating(shard.dtype()) ? spec.param_dtype.value_or(shard.dtype()) : shard.dtype();
}

}  // namespace

Tensor flat_view(const Tensor& t, std::int64_t offset, std::int64_t numel) {
  return alias(t, {{numel}, {1}, t.layout().offset + offset});
}

ParameterGroup::ParameterGroup(GroupSpec spec, Tensor shard)
    : spec_(std::move(spec)),
      shard_(std::move(shard)),
      compute_dtype_(computes_in(spec_, shard_)),
      gathered_(*this, compute_dtype_),
      gradients_(*this) {
  if (compute_dtype_ != shard_.dtype()) in_full_.emplace(*this, shard_.dtype());
  for (std::size_t i = 0; i < spec_.shapes.size(); ++i) locals_.push_back(alias(shard_, local_layout(i)));
  if (spec_.one_flat_param) {
    flat_ = flat_view(shard_, 0, shard_.numel());
    gradients_.add_slot(flat_, 0, size());
  } else {
    for (std::size_t i = 0; i < size(); ++i) gradients_.add_slot(locals_[i], i, i + 1);
  }
}

Device ParameterGroup::compute_device() const {
  const Device stored = shard_.device();
  return stored.type == DeviceType::meta ? stored : spec_.compute_device.value_or(stored);
}

bool ParameterGroup::trainable() const {
  return std::ranges::any_of(locals_, [](const Tensor& local) { return local.requires_grad(); });
}

/// Where parameter `i`'s part lies in the shard: rows, or in the flat layout a run of elements.
sherd::Layout ParameterGroup::local_layout(std::size_t i) const {
  const int index = static_cast<int>(i);
  const OwnedPart part = spec_.partition.part(index, RankOfGroup(spec_.ranks.shard).rank);
  const std::int64_t offset =
      spec_.partition.shard_offset(spec_.partition.span(index).segment) + part.in_shard;
  Shape shape = spec_.shapes[i];
  if (spec_.partition.ranks() > 1) {
    if (spec_.layout == GroupLayout::flat)
      shape = {part.numel};
    else
      shape[0] = shape.numel() == 0 ? 0 : part.numel / (shape.numel() / shape[0]);
  }
  return {shape, contiguous_strides(shape), part.numel == 0 ? 0 : offset};
}

void ParameterGroup::renew_local(std::size_t i) {
  locals_[i] = alias(shard_, local_layout(i));
  gradients_.renew_slot(i, locals_[i]);
}

Tensor ParameterGroup::part_in(const Tensor& shard, std::size_t i) const {
  sherd::Layout layout = local_layout(i);
  layout.offset += shard.layout().offset;
  return alias(shard, std::move(layout));
}

Tensor ParameterGroup::part_of(std::size_t i, const Tensor& whole) const {
  check<ShapeError>(whole.shape() == spec_.shapes[i], "part_of: the tensor has shape {}, the parameter {}",
                    whole.shape(), spec_.shapes[i]);
  const OwnedPart part = spec_.partition.part(static_cast<int>(i), RankOfGroup(spec_.ranks.shard).rank);
  const Tensor elements = reshape(whole, {whole.numel()});
  return reshape(narrow(elements, 0, part.in_parameter, part.numel), locals_[i].shape());
}

Tensor ParameterGroup::gather(const Tensor& shard) const {
  const Engine::OwnCalls own_calls;
  const Partition& partition = spec_.partition;
  const Tensor all = empty({partition.gathered_numel()}, {shard.dtype(), compute_device()});
  Collective c = gather_call(all, shard, partition, RankOfGroup(spec_.ranks.shard).rank, InPlace::yes);
  c.label = name_->among_shard();
  if (!spec_.ranks.shard.defined()) return all;
  Work work = spec_.ranks.shard.enqueue(std::move(c));
  work.wait();
  work.wait_inputs();  // which are the caller's to write from now on
  return all;
}

sherd::Layout ParameterGroup::whole_layout(std::size_t i) const {
  const ParameterSpan& span = spec_.partition.span(static_cast<int>(i));
  const std::int64_t segment = spec_.partition.shard_offset(span.segment) * spec_.partition.ranks();
  return {spec_.shapes[i], contiguous_strides(spec_.shapes[i]), segment + span.offset};
}

/// Graphs hold storage and leaves, which hold the group by its parts.
std::vector<Tensor> ParameterGroup::make_used(Precision precision, std::span<const Tensor> others) {
  Gathered& whole = gathered(precision);
  if (precision == Precision::reduced)  // the first
    shard_.storage_ref()->set_owner(std::make_shared<ShardOwner>(weak_from_this()));
  const Ref<Storage> storage = whole.make_storage();
  std::vector<Tensor> used;
  for (std::size_t i = 0; i < size(); ++i) {
    sherd::Layout layout = whole_layout(i);
    if (whole.is_shard_itself()) layout.offset += shard_.layout().offset;
    Tensor t(make_ref<TensorImpl>(storage, std::move(layout), whole.dtype()));
    if (is_floating(whole.dtype())) {
      if (!others.empty()) continue_leaf(others[i], t);
      set_sink(t, std::shared_ptr<GradSink>(shared_from_this(), &gradients_));
      gradients_.listen(*record_of(t)->leaf, i);
    }
    used.push_back(std::move(t));
  }
  return used;
}

Gathered& ParameterGroup::in_use() { return gathered(root_->precision()); }

void ParameterGroup::set_root(std::shared_ptr<Root> root) {
  if (std::exchange(root_, std::move(root)) != root_) root_->add(shared_from_this());
}

void ParameterGroup::set_name(std::string module) {
  name_ = std::make_shared<const CallName>(CallName{.module = std::move(module)});
}

void ParameterGroup::set_name_in_model(std::string module) {
  name_ =
      std::make_shared<const CallName>(CallName{.module = std::move(module),
                                                .on_shard = root_->numbers().among(spec_.ranks.shard),
                                                .on_replicas = root_->numbers().among(spec_.ranks.replicas),
                                                .on_block = root_->numbers().among(spec_.ranks.block)});
}

void ParameterGroup::made_in_model() {
  set_name_in_model(label());
  const auto among = [](const Group& ranks, ModelNumber number) {
    return ranks.defined() ? identity_of(ranks.key(), number) : 0;
  };
  identity_ = {among(spec_.ranks.shard, name_->on_shard), among(spec_.ranks.replicas, name_->on_replicas)};
}

void ParameterGroup::take_over(ParameterGroup& old, const std::function<Tensor(const Tensor&)>& change) {
  name_ = old.name_;
  identity_ = old.identity_;
  switches = old.switches;
  step_check = old.step_check;
  gradients_.take_over(old.gradients_, change);
}

}  // namespace sherd::shard
