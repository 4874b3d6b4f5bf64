#include "shard/group.h"

#include <utility>

#include "autograd/autograd.h"
#include "autograd/node.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/backward.h"
#include "shard/schedule.h"

namespace sherd::shard {
namespace {

/// Owns the shard's storage, which is always here, for the sake of its writes.
class ShardOwner final : public StorageOwner {
 public:
  explicit ShardOwner(std::weak_ptr<ParameterGroup> group) : group_(std::move(group)) {}
  void need(Storage&) override {}
  void before_write(Storage&) override {
    if (const auto group = group_.lock()) group->before_write();
  }

 private:
  std::weak_ptr<ParameterGroup> group_;
};

bool on_meta(const Tensor& t) { return t.device().type == DeviceType::meta; }

}  // namespace

ParameterGroup::ParameterGroup(GroupSpec spec, Tensor shard)
    : spec_(std::move(spec)), shard_(std::move(shard)), compute_dtype_(shard_.dtype()) {
  if (is_floating(shard_.dtype())) compute_dtype_ = spec_.param_dtype.value_or(shard_.dtype());
  whole_ = !spec_.ranks.shard.defined() && compute_dtype_ == shard_.dtype();
  if (spec_.ranks.block.defined()) block_partition_ = spec_.partition.over(spec_.ranks.block.size());
  for (std::size_t i = 0; i < spec_.shapes.size(); ++i)
    members_.push_back({alias(shard_, local_layout(i)), {}});
  if (spec_.one_flat_param) {
    flat_ = flat_view(shard_, 0, shard_.numel());
    slots_.push_back({flat_});
  } else {
    for (const Member& m : members_) slots_.push_back({m.local});
  }
}

/// A run of elements of a dense tensor.
Tensor ParameterGroup::flat_view(const Tensor& t, std::int64_t offset, std::int64_t numel) {
  return alias(t, {{numel}, {1}, t.layout().offset + offset});
}

/// Where parameter `i`'s part lies in the shard: rows, or in the flat layout a run of elements.
sherd::Layout ParameterGroup::local_layout(std::size_t i) const {
  const int index = static_cast<int>(i);
  const OwnedPart part = spec_.partition.part(index, spec_.ranks.shard_rank());
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

Tensor ParameterGroup::part_in(const Tensor& shard, std::size_t i) const {
  sherd::Layout layout = local_layout(i);
  layout.offset += shard.layout().offset;
  return alias(shard, std::move(layout));
}

Tensor ParameterGroup::part_of(std::size_t i, const Tensor& whole) const {
  check<ShapeError>(whole.shape() == spec_.shapes[i], "part_of: the tensor has shape {}, the parameter {}",
                    whole.shape(), spec_.shapes[i]);
  const OwnedPart part = spec_.partition.part(static_cast<int>(i), spec_.ranks.shard_rank());
  const Tensor elements = reshape(whole, {whole.numel()});
  return reshape(narrow(elements, 0, part.in_parameter, part.numel), members_[i].local.shape());
}

/// Where parameter `i` lies once gathered.
sherd::Layout ParameterGroup::whole_layout(std::size_t i) const {
  const ParameterSpan& span = spec_.partition.span(static_cast<int>(i));
  const std::int64_t segment = spec_.partition.shard_offset(span.segment) * spec_.partition.ranks();
  return {spec_.shapes[i], contiguous_strides(spec_.shapes[i]), segment + span.offset};
}

std::vector<Tensor> ParameterGroup::make_used() {
  Ref<Storage> storage = shard_.storage_ref();
  storage->set_owner(std::make_shared<ShardOwner>(weak_from_this()));
  if (!whole_) {
    const std::int64_t bytes = spec_.partition.gathered_numel() * size_of(compute_dtype_);
    storage = Storage::released(shard_.device(), static_cast<std::size_t>(bytes), shared_from_this());
    gathered_storage_ = storage.get();
  }
  std::vector<Tensor> used;
  index_.clear();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    sherd::Layout layout = whole_layout(i);
    if (whole_) layout.offset += shard_.layout().offset;
    Tensor t(make_ref<TensorImpl>(storage, std::move(layout), compute_dtype_));
    if (is_floating(compute_dtype_)) {
      set_sink(t, shared_from_this());
      index_.emplace(record_of(t)->leaf.get(), i);
    }
    used.push_back(std::move(t));
  }
  return used;
}

// ---- residency ----

Tensor ParameterGroup::gathered_view(const Ref<Storage>& memory, std::int64_t offset,
                                     std::int64_t numel) const {
  return Tensor(make_ref<TensorImpl>(memory, sherd::Layout{{numel}, {1}, offset}, compute_dtype_));
}

void ParameterGroup::start_gather() {
  const Housekeeping guard;
  const Sliced* sliced = std::get_if<Sliced>(&residency_);
  const Tensor source = sliced != nullptr ? sliced->slice : shard_;
  const Group& group = sliced != nullptr ? spec_.ranks.block : spec_.ranks.shard;
  const Partition& partition = sliced != nullptr ? *block_partition_ : spec_.partition;
  const int ranks = partition.ranks(), rank = group.defined() ? group.rank() : 0;
  const bool in_place = source.dtype() != compute_dtype_ || !group.defined();

  const std::int64_t bytes = partition.gathered_numel() * size_of(compute_dtype_);
  Ref<Storage> memory = Storage::allocate(shard_.device(), static_cast<std::size_t>(bytes));
  Collective c{.kind = CollectiveKind::all_gather,
               .inputs = {},
               .outputs = {},
               .channel = gather_channel,
               .label = label};
  for (int s = 0; s < partition.segments(); ++s) {
    const std::int64_t numel = partition.shard_numel(s), begin = partition.shard_offset(s) * ranks;
    Tensor input = flat_view(source, partition.shard_offset(s), numel);
    if (in_place) {
      const Tensor own = gathered_view(memory, begin + rank * numel, numel);
      copy_(own, input);
      input = own;
    }
    c.inputs.push_back(std::move(input));
    c.outputs.push_back(gathered_view(memory, begin, numel * ranks));
  }
  Work work;
  if (group.defined()) {
    work = group.enqueue(std::move(c));
    if (!in_place) {
      // Peers may be a gather behind; nobody is two.
      if (reading_.size() > 1) reading_.erase(reading_.begin());
      reading_.push_back(work.without_outputs());
    }
  }
  if (sliced == nullptr) epoch_gathered_ = epoch();
  residency_ = Gathering{std::move(work), std::move(memory), source, in_place};
}

void ParameterGroup::finish_gather() {
  Gathering gathering = std::move(std::get<Gathering>(residency_));
  residency_ = Sharded{};
  if (spec_.ranks.shard.defined()) {
    const Housekeeping guard;
    gathering.work.wait();
  }
  if (gathered_storage_ != nullptr && !on_meta(shard_))
    gathered_storage_->provide(std::move(gathering.memory));
  residency_ = Full{gathering.in_place && spec_.ranks.shard.defined() ? gathering.work : Work{}};
}

/// After a fault nobody reads any more.
void ParameterGroup::wait_for_readers(Work& work) noexcept {
  try {
    work.wait_inputs();
  } catch (const std::exception&) {
  }
}

void ParameterGroup::release() {
  if (Full* full = std::get_if<Full>(&residency_); full != nullptr && full->gather.posted())
    wait_for_readers(full->gather);
  if (std::holds_alternative<Full>(residency_) && gathered_storage_ != nullptr && !on_meta(shard_)) {
    if (pinned()) return;
    gathered_storage_->release();
  }
  residency_ = Sharded{};
  held = false;
}

void ParameterGroup::slice() {
  const Housekeeping guard;
  const Partition& partition = *block_partition_;
  const int rank = spec_.ranks.block.rank();
  const Tensor slice = empty({partition.shard_numel()}, {compute_dtype_, shard_.device()});
  const Ref<Storage> memory(gathered_storage_);
  for (int s = 0; s < partition.segments(); ++s) {
    const std::int64_t numel = partition.shard_numel(s);
    const std::int64_t begin = partition.shard_offset(s) * partition.ranks() + rank * numel;
    copy_(flat_view(slice, partition.shard_offset(s), numel), gathered_view(memory, begin, numel));
  }
  release();
  residency_ = Sliced{slice};
}

void ParameterGroup::before_write() {
  for (Work& work : reading_) wait_for_readers(work);
  reading_.clear();
  ++epoch_;
  if (gathered_storage_ != nullptr) gathered_storage_->bump_version();
  // What is gathered is old from now on, also to a module that only shares one of the parameters.
  if (!whole_ && forwards == 0 && reads_ == 0) release();
}

void ParameterGroup::need(Storage&) { schedule->demand(*this); }

void ParameterGroup::read_done(Storage&) {
  if (reads_ > 0 && --reads_ == 0) schedule->read_over(*this);
}

}  // namespace sherd::shard
