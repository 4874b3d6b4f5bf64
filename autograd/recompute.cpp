#include "autograd/recompute.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "autograd/capture/effects.h"
#include "autograd/node.h"
#include "autograd/region.h"
#include "autograd/tape.h"
#include "autograd/trace.h"
#include "runtime/apply.h"

namespace sherd {
namespace {

/// Announces one more read of each of `storages` to their owners, and reports it as done at the latest in the
/// destructor, so that what an owner brings for this read alone is released after it, also when it fails.
class OneMoreRead {
 public:
  explicit OneMoreRead(std::vector<Ref<Storage>> storages) : storages_(std::move(storages)) {}
  ~OneMoreRead() {
    try {
      done();
    } catch (const std::exception&) {  // an error is under way already and explains more
    }
  }
  OneMoreRead(const OneMoreRead&) = delete;
  OneMoreRead& operator=(const OneMoreRead&) = delete;
  void expect() {
    for (; expected_ < storages_.size(); ++expected_)
      storages_[expected_]->owner()->expect_reads(*storages_[expected_], 1);
  }
  void done() {
    while (done_ < expected_) {
      const Ref<Storage>& storage = storages_[done_++];
      storage->owner()->read_done(*storage);
    }
  }

 private:
  std::vector<Ref<Storage>> storages_;
  std::size_t expected_ = 0, done_ = 0;
};

/// A recorded region. It owns the storages that it released, and runs its ops again when one is needed.
class RunAgain final : public StorageOwner {
 public:
  explicit RunAgain(Trace trace) : trace_(std::move(trace)) {}

  /// `storage`, number `index` of the trace, is owned by this region from now on.
  void hold(Storage& storage, std::uint32_t index) {
    held_[&storage] = {index, 0};
    by_index_[index] = &storage;
  }
  const Trace& trace() const { return trace_; }
  std::uint32_t index_of(const Storage& storage) const { return held_.at(&storage).index; }
  /// Forgets ops that no held storage depends on, and the tensors from outside that only those read.
  void trim();

  void need(Storage& storage) override;
  void expect_reads(Storage& storage, int reads) override;
  void read_done(Storage& storage) override;
  void forget_reads(Storage& storage) noexcept override;
  void storage_gone(Storage& storage) noexcept override;

 private:
  struct FreedStorage {
    std::uint32_t index = TracedTensor::none;
    int reads = 0;  // that the backward under way has announced and not done
  };
  /// Which ops to run to fill some storages, and how long each buffer in between is needed.
  struct Rerun {
    std::vector<std::uint32_t> ops;  // in order
    std::vector<std::uint32_t>
        last_use;  // by storage: the op after which its buffer is free; none if unused or wanted
  };

  Rerun rerun_for(const std::vector<bool>& wanted) const;
  void announce_run();
  void run_over();
  bool usable(std::uint32_t index) const;
  void check_outside(const TracedOp& traced) const;
  std::vector<Ref<Storage>> owned_outside(const Rerun& rerun) const;

  Trace trace_;
  std::unordered_map<const Storage*, FreedStorage> held_;
  std::unordered_map<std::uint32_t, Storage*> by_index_;
  int due_ = 0;                          // reads announced and not done, over all held storages
  std::vector<Ref<Storage>> announced_;  // made outside; their owners expect the reads of the coming rerun
};

/// Whether a held storage can be read as it is: resident, and never written after it was made.
bool RunAgain::usable(std::uint32_t index) const {
  const auto at = by_index_.find(index);
  return at != by_index_.end() && at->second->resident() && !trace_.storages[index].rewritten;
}

RunAgain::Rerun RunAgain::rerun_for(const std::vector<bool>& wanted) const {
  Rerun rerun{{}, std::vector<std::uint32_t>(trace_.storages.size(), TracedTensor::none)};
  std::vector<bool> needed = wanted;
  const auto touch = [&](const TracedTensor& t, std::uint32_t op) {
    if (t.storage == TracedTensor::none || needed[t.storage] || trace_.storages[t.storage].outside ||
        usable(t.storage))
      return;
    needed[t.storage] = true;
    rerun.last_use[t.storage] = op;
  };
  for (auto i = static_cast<std::uint32_t>(trace_.ops.size()); i-- > 0;) {
    const TracedOp& traced = trace_.ops[i];
    if (traced.op->is_view() || std::none_of(traced.out.begin(), traced.out.end(),
                                             [&](const TracedTensor& t) { return needed[t.storage]; }))
      continue;
    rerun.ops.push_back(i);
    for (const TracedTensor& t : traced.out) touch(t, i);
    for (const TracedTensor& t : traced.in) touch(t, i);
  }
  std::reverse(rerun.ops.begin(), rerun.ops.end());
  return rerun;
}

void RunAgain::trim() {
  std::vector<bool> wanted(trace_.storages.size());
  for (const auto& [storage, held] : held_) wanted[held.index] = true;
  const Rerun kept = rerun_for(wanted);
  std::vector<TracedOp> ops;
  std::vector<bool> read(trace_.storages.size());
  for (const std::uint32_t i : kept.ops) {
    for (const TracedTensor& t : trace_.ops[i].in)
      if (t.storage != TracedTensor::none) read[t.storage] = true;
    ops.push_back(std::move(trace_.ops[i]));
  }
  const auto once = std::ranges::find_if(ops, &TracedOp::once);
  if (once != ops.end())
    fail<StateError>(
        "recompute: {} makes a call among ranks in place, which the region would have to repeat, and other "
        "ranks need not; use a form that returns its result (sum_partials), or call outside the region",
        once->op->name());
  trace_.ops = std::move(ops);
  for (std::size_t i = 0; i < read.size(); ++i)
    if (!read[i]) trace_.storages[i].outside = {};
}

void RunAgain::check_outside(const TracedOp& traced) const {
  for (const TracedTensor& t : traced.in) {
    if (t.storage == TracedTensor::none) continue;
    const TracedStorage& storage = trace_.storages[t.storage];
    check<StateError>(!storage.outside || storage.outside->version() == storage.version,
                      "recompute: an input of {} of shape {} was changed in place after the region ran "
                      "(version {}, now {}), so its "
                      "ops cannot run again; change a clone of it instead",
                      traced.op->name(), t.layout.shape, storage.version,
                      storage.outside ? storage.outside->version() : 0);
  }
}

/// Storages from outside that the ops of a rerun read and that another owner may have to bring.
std::vector<Ref<Storage>> RunAgain::owned_outside(const Rerun& rerun) const {
  std::vector<Ref<Storage>> found;
  std::vector<bool> seen(trace_.storages.size());
  for (const std::uint32_t i : rerun.ops) {
    for (const TracedTensor& t : trace_.ops[i].in) {
      if (t.storage == TracedTensor::none || seen[t.storage]) continue;
      seen[t.storage] = true;
      const Ref<Storage>& outside = trace_.storages[t.storage].outside;
      if (outside && outside->owned()) found.push_back(outside);
    }
  }
  return found;
}

void RunAgain::need(Storage& asked) {
  const MemoryScope held(MemoryUse::activations);
  std::vector<bool> wanted(trace_.storages.size());
  for (const auto& [storage, held] : held_)
    if (!storage->resident() && (storage == &asked || held.reads > 0 || storage->pins() > 0))
      wanted[held.index] = true;
  const Rerun rerun = rerun_for(wanted);
  for (const std::uint32_t i : rerun.ops) check_outside(trace_.ops[i]);

  OneMoreRead borrowed(owned_outside(rerun));
  borrowed.expect();

  const Float32MatmulPrecisionScope restored(float32_matmul_precision());
  Float32MatmulPrecision& precision = detail::float32_matmul_precision_here();
  // Computed in fresh memory first, so that an op that throws leaves every storage as it was.
  const NoGrad no_grad;
  std::vector<Ref<Storage>> memory(trace_.storages.size());
  const auto tensor = [&](const TracedTensor& t) {
    if (t.storage == TracedTensor::none) return Tensor{};
    const TracedStorage& storage = trace_.storages[t.storage];
    Ref<Storage>& own = memory[t.storage];
    if (!own && !storage.outside && !usable(t.storage))
      own = Storage::allocate(storage.device, storage.bytes);
    Ref<Storage> source = own               ? own
                          : storage.outside ? storage.outside
                                            : Ref<Storage>(by_index_.at(t.storage));
    return Tensor(make_ref<TensorImpl>(std::move(source), t.layout, t.dtype));
  };
  for (const std::uint32_t i : rerun.ops) {
    const TracedOp& traced = trace_.ops[i];
    Tensors in, out;
    for (const TracedTensor& t : traced.in) in.push_back(tensor(t));
    for (const TracedTensor& t : traced.out) out.push_back(tensor(t));
    precision = traced.precision;
    run_again(*traced.op, in, out);
    tell_captures(*traced.op, in, out);  // of memory that a storage then shows as its own
    in.clear();
    out.clear();
    for (const auto* list : {&traced.in, &traced.out})
      for (const TracedTensor& t : *list)
        if (t.storage != TracedTensor::none && rerun.last_use[t.storage] == i) memory[t.storage] = {};
  }
  for (std::uint32_t i = 0; i < wanted.size(); ++i)
    if (wanted[i]) by_index_.at(i)->provide(std::move(memory[i]));
  borrowed.done();
  run_over();
}

void RunAgain::expect_reads(Storage& storage, int reads) {
  held_.at(&storage).reads += reads;
  due_ += reads;
  if (!storage.resident() && announced_.empty()) announce_run();
}

/// Announces the reads of the coming rerun to the owners of what its ops read from outside, at the start of a
/// backward, so that what they bring stays until then.
void RunAgain::announce_run() {
  std::vector<bool> wanted(trace_.storages.size());
  for (const auto& [storage, held] : held_) wanted[held.index] = !storage->resident();
  announced_ = owned_outside(rerun_for(wanted));
  for (const Ref<Storage>& storage : announced_) storage->owner()->expect_reads(*storage, 1);
}

void RunAgain::run_over() {
  for (const Ref<Storage>& storage : std::exchange(announced_, {})) storage->owner()->read_done(*storage);
}

void RunAgain::read_done(Storage& storage) {
  FreedStorage& held = held_.at(&storage);
  if (held.reads == 0) return;
  if (--held.reads == 0 && storage.pins() == 0) storage.release();
  if (--due_ == 0) run_over();
}

void RunAgain::forget_reads(Storage& storage) noexcept {
  FreedStorage& held = held_.at(&storage);
  due_ -= std::exchange(held.reads, 0);
  if (storage.pins() == 0) storage.release();
  if (due_ > 0) return;
  for (const Ref<Storage>& outside : std::exchange(announced_, {})) outside->owner()->forget_reads(*outside);
}

void RunAgain::storage_gone(Storage& storage) noexcept {
  const auto at = held_.find(&storage);
  by_index_.erase(at->second.index);
  held_.erase(at);
}

/// What is being recorded on this rank.
struct RecordingState {
  std::shared_ptr<RecordedRegion> region;  ///< null: no region is
  bool keeps = false;                      ///< the results of the op under way
};
RecordingState& state() { return Context::current().slot<RecordingState>(); }

}  // namespace

const Trace* region_trace(const StorageOwner& owner) {
  const auto* region = dynamic_cast<const RunAgain*>(&owner);
  return region != nullptr ? &region->trace() : nullptr;
}

std::uint32_t region_index(const StorageOwner& owner, const Storage& storage) {
  return dynamic_cast<const RunAgain&>(owner).index_of(storage);
}

std::shared_ptr<StorageOwner> make_region(Trace trace) {
  return std::make_shared<RunAgain>(std::move(trace));
}

Ref<Storage> released_by(const std::shared_ptr<StorageOwner>& region, std::uint32_t index) {
  auto& holder = dynamic_cast<RunAgain&>(*region);
  const TracedStorage& traced = holder.trace().storages[index];
  Ref<Storage> storage = Storage::released(traced.device, traced.bytes, region);
  holder.hold(*storage, index);
  return storage;
}

std::shared_ptr<const RecordedRegion> recording_region() { return state().region; }
void keep_results_in_region() { state().keeps = state().region != nullptr; }

namespace detail {

class Recording::Recorder final : public Tracer {
 public:
  Recorder() : Tracer("recompute"), listening_(*this) {
    state() = {std::make_shared<RecordedRegion>(), false};
  }
  ~Recorder() override {
    state().region->end = Context::current().slot<Tape>().take_sequence();
    state() = {};
  }

  void before_write(const AnyOp& op, Inputs in) override {
    if (!Context::current().housekeeping()) Tracer::before_write(op, in);
  }
  void after(const AnyOp& op, Inputs in, Outputs out) override {
    if (Context::current().housekeeping()) return;
    Tracer::after(op, in, out);
    if (std::exchange(state().keeps, false)) keep_results(op, out);
    for (const Tensor& t : out)
      if (const AutogradRecord* record = record_of(t); record != nullptr && record->edge.node)
        nodes_.insert(record->edge.node.get());
  }
  void finish();

  std::vector<Tensor> outputs;

 protected:
  void before_outside_write(const AnyOp& op, const Tensor& tensor) override {
    const std::uint32_t known = find(tensor.storage());
    check<StateError>(known == TracedTensor::none || trace_.storages[known].maker == TracedTensor::none,
                      "recompute: {} writes the result of a call among ranks, of shape {}, which the region "
                      "keeps so that it need not call again; write a clone of it",
                      op.name(), tensor.shape());
    fail<StateError>(
        "recompute: {} writes a tensor of shape {} that no op of the region made; running the region again "
        "would write it twice, so write it outside the region (layers with running statistics such as "
        "BatchNorm do so in training: leave them outside)",
        op.name(), tensor.shape());
  }

 private:
  struct Kept {
    Storage* storage = nullptr;
    std::uint32_t handles = 0;
  };
  std::unordered_map<std::uint32_t, Kept> kept_by_graph() const;
  /// From here on they count as made outside the region.
  void keep_results(const AnyOp& op, Outputs out) {
    trace_.ops.back().once = true;
    if (op.mutating()) return;
    for (const Tensor& t : out) trace_.storages[find(t.storage())].outside = t.storage_ref();
  }

  std::unordered_set<const Node*> nodes_;  // recorded by the region; only compared, since some may be deleted
  Listening listening_;
};

/// Storages that the region made and the graph behind its outputs keeps, with the number of handles that this
/// graph has on each.
std::unordered_map<std::uint32_t, Recording::Recorder::Kept> Recording::Recorder::kept_by_graph() const {
  std::unordered_map<std::uint32_t, Kept> kept;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> stack;
  const auto meet = [&](const Node* node) {
    if (node != nullptr && nodes_.contains(node) && seen.insert(node).second) stack.push_back(node);
  };
  const auto count = [&](const SavedTensor& saved) {
    if (!saved.value.defined()) return;
    const std::uint32_t index = find(saved.value.storage());
    if (index == TracedTensor::none || trace_.storages[index].outside) return;
    Kept& entry = kept[index];
    entry.storage = &saved.value.storage();
    ++entry.handles;
  };
  for (const Tensor& t : outputs)
    if (const AutogradRecord* record = record_of(t)) meet(record->edge.node.get());
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    for (const SavedTensor& saved : node->saved_inputs) count(saved);
    for (const SavedTensor& saved : node->saved_outputs) count(saved);
    for (const Edge& edge : node->edges) meet(edge.node.get());
  }
  return kept;
}

void Recording::Recorder::finish() {
  auto kept = kept_by_graph();
  // A storage with handles outside the graph (an output, a tensor put aside) stays: releasing it would take
  // memory from under that handle, or free none.
  std::erase_if(kept, [&](const auto& entry) {
    const auto& [index, k] = entry;
    return k.storage->use_count() > k.handles || k.storage->owned() ||
           k.storage->version() != trace_.storages[index].version;
  });
  if (kept.empty()) return;
  const auto region = std::make_shared<RunAgain>(std::move(trace_));
  for (const auto& [index, k] : kept) region->hold(*k.storage, index);
  region->trim();
  for (const auto& [index, k] : kept) {
    k.storage->set_owner(region);
    k.storage->release();
  }
}

Recording::Recording() {
  if (Context::current().grad_enabled() && !state().region) recorder_ = std::make_unique<Recorder>();
}
Recording::~Recording() = default;

void Recording::add_output(const Tensor& tensor) {
  if (recorder_ && tensor.defined()) recorder_->outputs.push_back(tensor);
}

void Recording::finish() {
  if (recorder_) recorder_->finish();
  recorder_.reset();
}

}  // namespace detail
}  // namespace sherd
