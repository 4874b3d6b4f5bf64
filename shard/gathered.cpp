#include "shard/gathered.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/ops/copy.h"
#include "shard/early_steps.h"
#include "shard/engine.h"
#include "shard/group.h"
#include "shard/record.h"

namespace sherd::shard {

Collective gather_call(const Tensor& all, const Tensor& shard, const Partition& partition, int rank,
                       InPlace in_place) {
  Collective c{.kind = CollectiveKind::all_gather,
               .inputs = {},
               .outputs = {},
               .channel = gather_channel,
               .label = {}};
  const int ranks = partition.ranks();
  Tensors own_parts, parts;
  for (int s = 0; s < partition.segments(); ++s) {
    const std::int64_t numel = partition.shard_numel(s), begin = partition.shard_offset(s) * ranks;
    Tensor input = flat_view(shard, partition.shard_offset(s), numel);
    if (in_place == InPlace::yes) {
      Tensor own = flat_view(all, begin + rank * numel, numel);
      own_parts.push_back(own);
      parts.push_back(std::exchange(input, std::move(own)));
    }
    c.inputs.push_back(std::move(input));
    c.outputs.push_back(flat_view(all, begin, numel * ranks));
  }
  copy_each_(own_parts, parts);
  return c;
}

Gathered::Gathered(ParameterGroup& group, DType dtype)
    : group_(group),
      dtype_(dtype),
      is_shard_itself_(!group.spec().ranks.shard.defined() && dtype == group.shard().dtype() &&
                       group.compute_device() == group.shard().device()) {
  const GroupSpec& spec = group.spec();
  if (spec.ranks.block.defined()) block_partition_ = spec.partition.over(spec.ranks.block.size());
  if (is_shard_itself_) residency_ = Full{epoch()};
}

std::shared_ptr<Gathered> Gathered::shared() { return {group_.shared_from_this(), this}; }

Ref<Storage> Gathered::make_storage() {
  if (is_shard_itself_) return group_.shard().storage_ref();
  const std::int64_t bytes = group_.spec().partition.gathered_numel() * size_of(dtype_);
  Ref<Storage> storage =
      Storage::released(group_.compute_device(), static_cast<std::size_t>(bytes), shared());
  storage_ = storage.get();
  return storage;
}

// ---- leases ----

bool Gathered::leased() const {
  return std::ranges::any_of(leases_, [](int count) { return count > 0; });
}

bool Gathered::leased_elsewhere() const {
  return std::any_of(leases_.begin() + 1, leases_.end(), [](int count) { return count > 0; });
}

void Gathered::lease(Lease owner) {
  int& count = leases_[static_cast<std::size_t>(owner)];
  count = owner == Lease::module ? count + 1 : 1;
}

void Gathered::end(Lease owner) noexcept {
  int& count = leases_[static_cast<std::size_t>(owner)];
  if (count > 0 && --count == 0 && !leased()) free();
}

void Gathered::end_all() noexcept {
  leases_ = {};
  free();
}

/// What an op is reading at this moment stays until the next lease ends.
void Gathered::free() noexcept {
  if (is_shard_itself_) return;
  shown_ = false;
  if (here() && storage_ != nullptr && storage_->device().type != DeviceType::meta) {
    if (pinned()) return;
    storage_->release();
  }
  try {
    if (on_its_way()) follow_copies();
  } catch (const std::exception&) {  // the device has failed
  }
  residency_ = Sharded{};
  if (const auto& root = group_.root()) root->freed(*this);
}

// ---- gathers ----

std::uint64_t Gathered::epoch() const { return epoch_ + group_.shard().storage().version(); }

void Gathered::start() {
  if (here() || on_its_way()) return;
  const Housekeeping guard;
  const MemoryScope held(MemoryUse::gathered);
  const Engine::OwnCalls own_calls;
  const GroupSpec& spec = group_.spec();
  const Sliced* sliced = std::get_if<Sliced>(&residency_);
  const std::uint64_t made_of = sliced != nullptr ? sliced->epoch : epoch();
  const Tensor source = sliced != nullptr ? sliced->slice : group_.shard();
  const Group& group = sliced != nullptr ? spec.ranks.block : spec.ranks.shard;
  const Partition& partition = sliced != nullptr ? *block_partition_ : spec.partition;
  const Device device = group_.compute_device();
  // What is copied up for the next module overlaps with what this one computes.
  const bool comes_up = source.device() != device && device.type != DeviceType::meta;
  const std::unique_ptr<DeviceAside> aside = comes_up ? backend(device.type).aside(device) : nullptr;
  const bool in_place = source.dtype() != dtype_ || source.device() != device || !group.defined();
  const Tensor all = empty({partition.gathered_numel()}, {dtype_, device});
  Collective c =
      gather_call(all, source, partition, RankOfGroup(group).rank, in_place ? InPlace::yes : InPlace::no);
  c.label = sliced != nullptr ? group_.name()->among_block() : group_.name()->among_shard();
  if (aside) mark_copies();
  Work work;
  if (group.defined()) {
    work = group.enqueue(std::move(c));
    if (!in_place && sliced == nullptr) reading_ = work.without_outputs();
  }
  residency_ = Gathering{std::move(work), all.storage_ref(), made_of};
  since_ = Record::next_place();
}

void Gathered::finish() {
  if (!on_its_way()) return;
  Gathering gathering = std::move(std::get<Gathering>(residency_));
  residency_ = Sharded{};
  if (gathering.work.posted()) {
    const Housekeeping guard;
    gathering.work.wait();
  }
  follow_copies();
  if (storage_ != nullptr && storage_->device().type != DeviceType::meta)
    storage_->provide(std::move(gathering.memory));
  residency_ = Full{gathering.epoch};
}

void Gathered::mark_copies() {
  PeerQueue& queue = *backend(group_.compute_device().type).peer_queue(group_.compute_device());
  if (!copied_) copied_ = queue.make_event();
  queue.mark_work(*copied_);
}

void Gathered::follow_copies() const {
  if (!copied_) return;
  const Device device = group_.compute_device();
  backend(device.type).peer_queue(device)->work_follows(*copied_);
}

void Gathered::slice() {
  const Housekeeping guard;
  const MemoryScope held(MemoryUse::gathered);
  const Partition& partition = *block_partition_;
  const int rank = group_.spec().ranks.block.rank();
  const Tensor slice = empty({partition.shard_numel()}, {dtype_, group_.compute_device()});
  const Tensor all(make_ref<TensorImpl>(Ref<Storage>(storage_),
                                        sherd::Layout{{partition.gathered_numel()}, {1}, 0}, dtype_));
  Tensors parts, own;
  for (int s = 0; s < partition.segments(); ++s) {
    const std::int64_t numel = partition.shard_numel(s);
    parts.push_back(flat_view(slice, partition.shard_offset(s), numel));
    own.push_back(flat_view(all, partition.shard_offset(s) * partition.ranks() + rank * numel, numel));
  }
  copy_each_(parts, own);
  const std::uint64_t made_of = std::get<Full>(residency_).epoch;
  free();
  residency_ = Sliced{slice, made_of};
  lease(Lease::policy);
}

void Gathered::shard_written() {
  shard_written_here();
  for (const Lease owner : {Lease::forward, Lease::policy, Lease::list}) end(owner);
}

void Gathered::shard_written_here() {
  try {
    reading_.wait_inputs();
  } catch (const std::exception&) {  // after a fault nobody reads any more
  }
  reading_ = {};
  ++epoch_;
  if (storage_ != nullptr) storage_->bump_version();
  // What is gathered is old from now on, also to a module that only shares one of the parameters. A slice
  // stays for the call to which the block's other ranks bring theirs, and what is kept while a backward steps
  // stays to its end, when peers have come to the step.
  if (EarlySteps::current().in_walk() == &group_) return;
  if (leased(Lease::module) || leased(Lease::backward) || !(here() || on_its_way())) return;
  free();
  if (leased() && !here()) residency_ = Written{};
}

bool Gathered::stale() const {
  const std::uint64_t now = epoch();
  if (const auto* full = std::get_if<Full>(&residency_)) return full->epoch != now;
  if (const auto* gathering = std::get_if<Gathering>(&residency_)) return gathering->epoch != now;
  if (const auto* sliced = std::get_if<Sliced>(&residency_)) return sliced->epoch != now;
  return true;
}

void Gathered::tell_replaced(const std::string& name) {
  if (auto* written = std::get_if<Written>(&residency_)) written->replaced = name;
}

std::string Gathered::take_replaced() {
  auto* const written = std::get_if<Written>(&residency_);
  return written != nullptr ? std::exchange(written->replaced, {}) : std::string();
}

void Gathered::check_unwritten() const {
  check<StateError>(
      !std::holds_alternative<Written>(residency_),
      "fully_shard: parameters of '{}' ({}) are read where no forward runs, and this rank wrote its part "
      "since "
      "they were gathered: ranks that did not have them still and would gather nothing; reshard() the module "
      "on every rank after the write",
      group_.label(), fmt::join(group_.spec().names, ", "));
}

// ---- StorageOwner ----

void Gathered::need(Storage&) { Engine::current().demand(*this); }

std::string Gathered::explain_released() const {
  const std::vector<std::string>& names = group_.spec().names;
  const std::span few = std::span(names).first(std::min<std::size_t>(names.size(), 4));
  return fmt::format(
      "it shows gathered values of '{}' ({}{}), which are released outside forward, and a host read does not "
      "gather; read local() for this rank's part, or the whole in a scope of summon_full_params, in "
      "full_state_dict, or through an op on every rank",
      group_.label(), fmt::join(few, ", "), names.size() > few.size() ? ", ..." : "");
}

void Gathered::expect_reads(Storage&, int reads) {
  if (reads_ == 0) Engine::current().check_unstepped(group_);
  reads_ += reads;
}

void Gathered::read_done(Storage&) {
  if (reads_ > 0) --reads_;
}

void Gathered::before_write(Storage&) {
  fail<StateError>(
      "fully_shard: gathered parameters of '{}' ({}) are written, and the next gather would undo it; write "
      "local(), or take whole values with load_full_state_dict or nn::init, on every rank",
      group_.label(), fmt::join(group_.spec().names, ", "));
}

}  // namespace sherd::shard
