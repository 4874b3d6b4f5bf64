#include "shard/data_parallel.h"

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "autograd/autograd.h"
#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::shard {

/// The gradients of all parameters, in the order in which a backward tends to bring them: last parameter
/// first. All ranks reduce all buckets in this order in every backward, whatever their graphs have.
class GradientBuckets final : public nn::ModuleObserver {
 public:
  GradientBuckets(std::vector<nn::Parameter> parameters, std::vector<nn::Parameter> frozen, Group group,
                  DataParallelOptions options)
      : frozen_(std::move(frozen)), group_(std::move(group)), channel_(options.channel) {
    std::ranges::reverse(parameters);
    for (nn::Parameter& p : parameters) {
      if (buckets_.empty() || !takes(buckets_.back(), p, options.bucket_bytes)) buckets_.emplace_back();
      Bucket& bucket = buckets_.back();
      bucket.entries.push_back(entries_.size());
      known_.insert(p.id());
      entries_.push_back({p, p.local().spec(), buckets_.size() - 1, bucket.numel});
      bucket.numel += p.numel();
    }
    for (std::size_t b = 0; b < buckets_.size(); ++b) buckets_[b].label = fmt::format("gradients {}", b);
  }

  std::size_t size() const { return entries_.size(); }
  const nn::Parameter& parameter(std::size_t i) const { return entries_[i].parameter; }
  bool set_synchronising(bool synchronising) { return std::exchange(synchronising_, synchronising); }

  /// What is trained is what was when the object was made: everything else would not be averaged, unnoticed.
  void before_forward(nn::Module& module, std::span<Tensor* const>) override {
    module_ = &module;
    for (const Entry& entry : entries_)
      check<StateError>(entry.parameter.local().spec() == entry.spec,
                        "data parallel: a parameter of shape {} had another shape, dtype or device when this "
                        "object was made; make it anew",
                        entry.parameter.shape());
    for (const nn::Parameter& p : frozen_)
      check<StateError>(!p.requires_grad(),
                        "data parallel: a parameter of shape {} became trainable after this object was made, "
                        "and its gradient would not be averaged; make it anew",
                        p.shape());
    if (Context::current().grad_enabled() && std::exchange(awaited_, true)) look_for_others();
  }

  // ---- one backward ----

  void begin(std::uint64_t run, std::size_t i) {
    check<StateError>(
        run_ == run || run_ == 0,
        "backward: it reaches parameters of a data parallel model and was started within another "
        "backward that does (in a hook); start it after that one, or use grad()");
    if (run != run_) start(run);
    ++reached_;
    ++buckets_[entries_[i].bucket].due;
  }
  void accept(std::size_t i, Leaf& leaf, const Tensor& gradient) {
    const NoGrad guard;
    Entry& entry = entries_[i];
    arrived_.push_back(&leaf);
    if (!run_synchronises_) return keep(entry, gradient);
    place(entry, gradient);
    --buckets_[entry.bucket].due;
    reduce_what_is_complete();
  }
  /// Comes from every parameter's sink; the first does it for all.
  void finish(std::uint64_t run) {
    if (run != run_) return;
    if (reached_ < entries_.size()) look_for_others();
    if (run_synchronises_) {
      const NoGrad guard;
      for (Bucket& bucket : buckets_) bucket.due = 0;  // what did not come, this rank does not use
      reduce_what_is_complete();
      for (Bucket& bucket : buckets_) wait(bucket);
      for (Bucket& bucket : buckets_) hand_out(bucket);
    }
    run_ = 0;
    for (Leaf* leaf : std::exchange(arrived_, {}))
      leaf->after_accumulate.each([&](const std::function<void(Leaf&)>& hook) { hook(*leaf); });
  }
  /// `.grad` is what it was before a backward that communicates.
  void abort() noexcept {
    run_ = 0;
    arrived_.clear();
    for (Bucket& bucket : buckets_) {
      bucket.work = {};
      bucket.values = {};  // calls under way keep their memory
    }
  }

 private:
  struct Entry {
    nn::Parameter parameter;
    Spec spec;
    std::size_t bucket;
    std::int64_t offset;    ///< in the bucket, in elements
    bool placed = false;    ///< the bucket has something of it in this backward
    bool unsynced = false;  ///< `.grad` is this rank's own, from backwards without communication
  };
  struct Bucket {
    std::vector<std::size_t> entries;
    std::int64_t numel = 0;
    Tensor values;  ///< the gradients, then for each entry whether this rank has one
    Work work;
    std::string label;
    int due = 0;  ///< gradients that the backward under way will still bring
  };

  bool takes(const Bucket& bucket, const nn::Parameter& p, std::int64_t limit_bytes) const {
    const Tensor& first = entries_[bucket.entries[0]].parameter.local();
    return first.dtype() == p.local().dtype() && first.device() == p.local().device() &&
           (bucket.numel + p.numel()) * size_of(first.dtype()) <= limit_bytes;
  }

  /// A parameter that no backward reaches may have been replaced.
  void look_for_others() const {
    if (module_ == nullptr) return;
    for (const nn::Parameter& p : module_->parameters())
      check<StateError>(known_.contains(p.id()) || !p.requires_grad(),
                        "data parallel: a parameter of shape {} took another's place after this object was "
                        "made, and its gradient would not be averaged; make it anew",
                        p.shape());
  }

  void start(std::uint64_t run) {
    run_ = run;
    reached_ = 0;
    awaited_ = false;
    run_synchronises_ = synchronising_;
    next_ = 0;
    for (Bucket& bucket : buckets_) bucket.due = 0;
    if (!run_synchronises_) return;
    const NoGrad guard;
    for (Bucket& bucket : buckets_) clear(bucket);
  }
  /// Zeros, and what earlier backwards left without communication.
  void clear(Bucket& bucket) {
    const Tensor& first = entries_[bucket.entries[0]].parameter.local();
    const std::int64_t numel = bucket.numel + static_cast<std::int64_t>(bucket.entries.size());
    if (!bucket.values.defined()) bucket.values = empty({numel}, {first.dtype(), first.device()});
    zero_(bucket.values);
    for (std::size_t i : bucket.entries) {
      Entry& entry = entries_[i];
      entry.placed = false;
      if (const Tensor held = entry.parameter.grad(); entry.unsynced && held.defined()) place(entry, held);
    }
  }
  static void keep(Entry& entry, const Tensor& gradient) {
    const Tensor held = entry.parameter.grad();
    // The first one after an average starts the sum that the next average is of; the average itself stays in
    // it.
    entry.parameter.set_grad(held.defined() ? add(held, gradient) : clone(gradient));
    entry.unsynced = true;
  }
  void place(Entry& entry, const Tensor& gradient) {
    const Bucket& bucket = buckets_[entry.bucket];
    const Shape& shape = gradient.shape();
    const Tensor slice = alias(bucket.values, {shape, contiguous_strides(shape), entry.offset});
    if (std::exchange(entry.placed, true))
      add_(slice, gradient);
    else
      copy_(slice, gradient);
    const std::int64_t flag = bucket.numel + (&entry - &entries_[bucket.entries[0]]);
    fill_(alias(bucket.values, {{1}, {1}, flag}), 1);
  }

  /// In order, so that every rank's calls are in one order.
  void reduce_what_is_complete() {
    for (; next_ < buckets_.size() && buckets_[next_].due == 0; ++next_) {
      Bucket& bucket = buckets_[next_];
      bucket.work = group_.enqueue({.kind = CollectiveKind::all_reduce,
                                    .inputs = {bucket.values},
                                    .outputs = {bucket.values},
                                    .reduction = ReduceOp::average(),
                                    .channel = channel_,
                                    .label = bucket.label});
    }
  }
  static void wait(Bucket& bucket) {
    bucket.work.wait();
    bucket.work.wait_inputs();
    bucket.work = {};
  }
  void hand_out(Bucket& bucket) {
    const auto flags = static_cast<std::int64_t>(bucket.entries.size());
    const auto used = to(alias(bucket.values, {{flags}, {1}, bucket.numel}), f32).to_vector<float>();
    for (std::size_t k = 0; k < used.size(); ++k) {
      Entry& entry = entries_[bucket.entries[k]];
      if (std::exchange(entry.unsynced, false)) entry.parameter.set_grad({});  // the average has it
      if (used[k] == 0) continue;                                              // by no rank
      const Shape& shape = entry.parameter.shape();
      const Tensor average = alias(bucket.values, {shape, contiguous_strides(shape), entry.offset});
      const Tensor held = entry.parameter.grad();
      if (held.defined())
        add_(held, average);
      else
        entry.parameter.set_grad(clone(average));
    }
  }

  std::vector<nn::Parameter> frozen_;
  Group group_;
  int channel_;
  std::vector<Entry> entries_;
  std::vector<Bucket> buckets_;
  std::unordered_set<const void*> known_;  ///< the entries' parameters
  nn::Module* module_ = nullptr;           ///< that ran last
  bool awaited_ = false;                   ///< a backward, of a forward that was recorded
  std::size_t reached_ = 0;                ///< entries that the backward under way reaches
  bool synchronising_ = true;
  std::vector<Leaf*> arrived_;  // in the backward under way, which holds them

  std::uint64_t run_ = 0;  ///< the backward under way; 0: none
  bool run_synchronises_ = true;
  std::size_t next_ = 0;  ///< bucket to reduce next
};

namespace {

/// One parameter's way into the buckets.
class BucketSink final : public GradSink {
 public:
  BucketSink(std::shared_ptr<GradientBuckets> buckets, std::size_t index)
      : buckets_(std::move(buckets)), index_(index) {}
  void begin(PassInfo pass, Leaf&) override { buckets_->begin(pass.number, index_); }
  void accept(PassInfo, Leaf& leaf, Tensor gradient) override { buckets_->accept(index_, leaf, gradient); }
  bool accumulates_later() const override { return true; }
  void finish(PassInfo pass) override { buckets_->finish(pass.number); }
  void abort(PassInfo) noexcept override { buckets_->abort(); }

 private:
  std::shared_ptr<GradientBuckets> buckets_;
  std::size_t index_;
};

/// Rank 0's values to all: one call for each dtype and device, in the order of their first tensor.
void share(std::vector<Tensor> tensors, const Group& group, int channel) {
  const NoGrad guard;
  while (!tensors.empty()) {
    const Tensor first = tensors[0];
    const auto alike = [&](const Tensor& t) {
      return t.dtype() == first.dtype() && t.device() == first.device();
    };
    Collective call{.kind = CollectiveKind::broadcast, .peer = 0, .channel = channel, .label = "replicas"};
    for (const Tensor& t : tensors) {
      if (!alike(t)) continue;
      if (group.rank() == 0) call.inputs.push_back(t);
      call.outputs.push_back(t);
    }
    group.call(std::move(call));
    std::erase_if(tensors, alike);
  }
}

}  // namespace

DataParallel::DataParallel(nn::Module& module, const Group& group, DataParallelOptions options)
    : module_(&module) {
  check<ValueError>(options.bucket_bytes > 0, "data parallel: buckets of {} bytes; a bucket has at least one",
                    options.bucket_bytes);
  std::vector<Tensor> all;
  std::vector<nn::Parameter> trainable, frozen;
  for (const auto& [name, p] : module.named_parameters()) {
    check<DeviceError>(p.local().device().type != DeviceType::meta,
                       "data parallel: '{}' is on meta and has no values to share; call materialize() of the "
                       "module first",
                       name);
    all.push_back(p.data());
    (p.requires_grad() ? trainable : frozen).push_back(p);
  }
  for (const nn::NamedBuffer& buffer : module.named_buffers()) all.push_back(buffer.tensor);
  share(std::move(all), group, options.channel);
  buckets_ = std::make_shared<GradientBuckets>(std::move(trainable), std::move(frozen), group, options);
  for (std::size_t i = 0; i < buckets_->size(); ++i)
    set_sink(buckets_->parameter(i).tensor(), std::make_shared<BucketSink>(buckets_, i));
  watching_ = module.observe(*buckets_);
}

DataParallel::~DataParallel() {
  if (!buckets_) return;
  for (std::size_t i = 0; i < buckets_->size(); ++i)
    if (buckets_->parameter(i).requires_grad()) set_sink(buckets_->parameter(i).tensor(), nullptr);
}
DataParallel::DataParallel(DataParallel&&) noexcept = default;

GradientBuckets& DataParallel::buckets() const {
  check<StateError>(buckets_ != nullptr,
                    "data parallel: this object was moved from; use the one that it was moved into");
  return *buckets_;
}

nn::Module& DataParallel::module() const {
  buckets();
  return *module_;
}

DataParallel::NoSync::NoSync(DataParallel& model)
    : buckets_(model.buckets_), outer_(model.buckets().set_synchronising(false)) {}
DataParallel::NoSync::~NoSync() { buckets_->set_synchronising(outer_); }

}  // namespace sherd::shard
