#include "shard/data_parallel.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/capture/effects.h"
#include "autograd/node.h"
#include "nn/shared_gradients.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/anchor.h"
#include "shard/build.h"
#include "shard/engine.h"
#include "shard/group.h"
#include "shard/replicas.h"
#include "shard/share.h"
#include "shard/step_check.h"

namespace sherd::shard {
namespace {

std::vector<Tensor> buffers_of(const nn::Module& module) {
  std::vector<Tensor> buffers;
  for (const nn::NamedBuffer& buffer : module.named_buffers()) buffers.push_back(buffer.tensor);
  return buffers;
}

}  // namespace

class GradientBuckets;

/// Those of a rank. In a backward that reaches several each makes its calls before the next one, the one that
/// was made last first: all ranks make theirs in one order, whatever each one's graph brings first.
struct Replicas {
  std::uint64_t made = 0;
  std::vector<std::weak_ptr<const GradientBuckets>> all{};  ///< in the order in which they were made
  std::vector<GradientBuckets*> in_turn{};                  ///< that backwards under way reach
};

/// The gradients of all parameters, in the order in which a backward tends to bring them: last parameter
/// first. All ranks reduce all buckets in this order in every backward, whatever their graphs have.
class GradientBuckets final : public GradSink,
                              public nn::ModuleObserver,
                              public nn::SharedGradients,
                              public Replicated,
                              public std::enable_shared_from_this<GradientBuckets> {
 public:
  /// `buffers`: those to share.
  GradientBuckets(const nn::Module& module, std::vector<nn::NamedParameter> parameters,
                  std::vector<nn::NamedParameter> frozen, std::vector<Tensor> buffers, Group group,
                  const DataParallelOptions& options)
      : module_(module.whereabouts()),
        frozen_(std::move(frozen)),
        buffers_(std::move(buffers)),
        group_(std::move(group)),
        ranks_{.shard = {}, .replicas = group_, .block = {}},
        made_(++replicas().made),
        channel_(options.channel),
        static_graph_(options.static_graph) {
    std::ranges::reverse(parameters);
    for (auto& [name, p] : parameters) {
      if (buckets_.empty() || !takes(buckets_.back(), p, options.bucket_bytes)) buckets_.emplace_back();
      Bucket& bucket = buckets_.back();
      bucket.entries.push_back(entries_.size());
      known_.insert(p.id());
      entries_.push_back({.name = name,
                          .parameter = p,
                          .spec = p.local().spec(),
                          .bucket = buckets_.size() - 1,
                          .offset = bucket.numel,
                          .unsynced = p.grad().defined()});
      bucket.numel += p.numel();
    }
    name_buckets();
    identity_ = {.on_replicas = identity_of(group_.key(), model_)};
  }

  /// Makes `self`, which is this object, the sink of its parameters.
  void take(const std::shared_ptr<GradientBuckets>& self) {
    auto& all = replicas().all;
    std::erase_if(all, [](const auto& other) { return other.expired(); });
    all.push_back(self);
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const Tensor& local = entries_[i].parameter.local();
      set_sink(local, self);
      entry_of_[record_of(local)->leaf.get()] = i;
    }
  }
  /// Parameters that another object has taken over stay with that one.
  void let_go() const {
    for (const Entry& entry : entries_)
      if (has(entry)) set_sink(entry.parameter.local(), nullptr);
  }
  void check_in_charge(std::string_view call) const {
    for (const Entry& entry : entries_)
      check<StateError>(has(entry),
                        "data parallel: {} of an object from which another one, made later, took '{}'; "
                        "call {} of that one, or make this one anew",
                        call, entry.name, call);
  }
  void set_hook(CommHook hook) {
    check<StateError>(!hook_,
                      "register_comm_hook: this data parallel object has a communication hook already");
    hook_ = std::move(hook);
  }
  const Group& ranks() const override { return group_; }
  bool has(const nn::Parameter& p) const {
    if (known_.contains(p.id())) return sink_of(p.local()) == this;
    return std::ranges::any_of(frozen_, [&](const auto& frozen) { return frozen.parameter.id() == p.id(); });
  }
  /// Calls `visit` with those of the rank that are there, in the order in which they were made.
  template <class F>
  static void each(F&& visit) {
    for (const auto& one : replicas().all)
      if (const auto buckets = one.lock()) visit(*buckets);
  }
  nn::Module* module() const { return *module_; }
  void zeroed(const Tensor& leaf) override {
    if (const auto at = entry_of_.find(record_of(leaf)->leaf.get()); at != entry_of_.end())
      entries_[at->second].averages.clear();
  }
  bool set_synchronising(bool synchronising) { return std::exchange(synchronising_, synchronising); }

  void before_forward(nn::Module&, std::span<Tensor* const>) override {
    check_parameters();
    if (Context::current().grad_enabled() && std::exchange(awaited_, true)) look_for_others();
  }
  /// So that a backward through outputs that come of no parameter on this rank communicates too.
  void after_forward(nn::Module&, std::span<Tensor* const> outputs) override {
    if (entries_.empty() || !Context::current().grad_enabled()) return;
    if (!mark_) mark_ = std::make_shared<Mark>(weak_from_this());
    anchor(outputs, mark_);
  }

  // ---- one backward ----

  void begin(PassInfo pass, Leaf& leaf) override {
    begin_run(pass);
    ++reached_;
    entry(leaf).reached = true;
    ++buckets_[entry(leaf).bucket].due;
  }
  void begin_run(PassInfo pass) {
    check<StateError>(
        run_ == pass.number || run_ == 0,
        "backward: it reaches parameters of a data parallel model and was started within another "
        "backward that does (in a hook); start it after that one, or use grad()");
    if (std::exchange(run_, pass.number) == pass.number) return;
    auto& all = replicas().in_turn;
    all.insert(std::ranges::lower_bound(all, made_, std::greater{}, &GradientBuckets::made_), this);
  }
  void begun(PassInfo pass) override {
    if (run_ != pass.number || begun_) return;
    Engine::current().begun(pass.number);  // makes calls too: see finish
    for (GradientBuckets* buckets : in_turn(pass)) buckets->begin_walk();
  }
  void begin_walk() {
    begun_ = true;
    name_buckets();
    awaited_ = false;
    check_parameters();
    check_gradients();
    if (reached_ < entries_.size()) look_for_others();
    run_synchronises_ = synchronising_;
    next_ = 0;
    if (!run_synchronises_) return;
    const NoGrad guard;
    check_before_average();
    if (graph_known_) check_graph();
    if (join_) meet(true);
    for (Bucket& bucket : buckets_) fill(bucket);
  }
  void accept(PassInfo pass, Leaf& leaf, Tensor gradient) override {
    const NoGrad guard;
    Entry& to = entry(leaf);
    arrived_.push_back(&leaf);
    if (!run_synchronises_) return keep(to, gradient);
    place(to, gradient);
    --buckets_[to.bucket].due;
    reduce_in_turn(pass);
  }
  bool accumulates_later() const override { return true; }
  void finish(PassInfo pass) override {
    if (run_ != pass.number) return;
    // Its end waits for peers too, and in which order sinks are told follows from this rank's graph.
    Engine::current().finish(pass.number);
    const std::vector<GradientBuckets*> all = in_turn(pass);
    for (GradientBuckets* buckets : all)
      for (Bucket& bucket : buckets->buckets_) bucket.due = 0;  // what did not come, this rank does not use
    reduce_in_turn(pass);
    std::vector<Leaf*> arrived;  // of all before the first hook, which may throw
    for (GradientBuckets* buckets : all) std::ranges::copy(buckets->end(), std::back_inserter(arrived));
    for (Leaf* leaf : arrived)
      leaf->after_accumulate.each([&](const std::function<void(Leaf&)>& hook) { hook(*leaf); });
  }
  /// Returns the leaves that gradients came for.
  std::vector<Leaf*> end() {
    if (run_synchronises_) {
      const NoGrad guard;
      for (Bucket& bucket : buckets_) wait(bucket);
      for (const Bucket& bucket : buckets_) run_hook(bucket, bucket.values);
      share_buffers();
      if (!graph_known_)
        for (Entry& entry : entries_) entry.uses = entry.reached || entry.placed;
      for (Bucket& bucket : buckets_) hand_out(bucket);
      graph_known_ = static_graph_;
    }
    return end_run();
  }
  /// `.grad` is what it was before a backward that communicates. One that was refused within another has not
  /// begun, and leaves that alone.
  void abort(PassInfo pass) noexcept override {
    if (pass.number == run_) end_run();
  }

  // ---- unlike numbers of inputs ----

  void begin_join(const JoinOptions& options) {
    check<StateError>(!join_, "data parallel: join within a join of the same model; one scope is enough");
    join_ = options;
    in_.clear();
  }
  void end_join() noexcept { join_.reset(); }
  /// Takes part in what the others make of their inputs, until nobody has any.
  void shadow() {
    if (alone()) return;
    const NoGrad guard;
    name_buckets();
    for (;;) {
      const std::vector<int> before = in_;
      check_before_average();
      meet(false);
      if (left() == 0) return take_last(before);
      std::vector<Tensor> nothing;
      for (const Bucket& bucket : buckets_) {
        nothing.push_back(zeros({bucket.numel + std::ssize(bucket.entries)}, like(bucket)));
        group_.call(average(bucket, nothing.back()));
      }
      for (std::size_t b = 0; b < buckets_.size(); ++b) run_hook(buckets_[b], nothing[b]);
      share_buffers();
    }
  }

 private:
  /// Hears of backwards through what forwards of the module gave, while the object is in charge of it.
  class Mark final : public GradSink {
   public:
    explicit Mark(std::weak_ptr<GradientBuckets> of) : of_(std::move(of)) {}
    void begin(PassInfo pass, Leaf&) override {
      if (const auto buckets = in_charge()) buckets->begin_run(pass);
    }
    void begun(PassInfo pass) override {
      if (const auto buckets = in_charge()) buckets->begun(pass);
    }
    void accept(PassInfo, Leaf&, Tensor) override {}
    void finish(PassInfo pass) override {
      if (const auto buckets = in_charge()) buckets->finish(pass);
    }
    void abort(PassInfo pass) noexcept override {
      if (const auto buckets = in_charge()) buckets->abort(pass);
    }

   private:
    std::shared_ptr<GradientBuckets> in_charge() const {
      auto buckets = of_.lock();
      if (buckets && std::ranges::none_of(buckets->entries_, [&](const Entry& e) { return buckets->has(e); }))
        return nullptr;
      return buckets;
    }
    std::weak_ptr<GradientBuckets> of_;
  };
  struct Entry {
    std::string name;
    nn::Parameter parameter;
    Spec spec;
    std::size_t bucket;
    std::int64_t offset;      ///< in the bucket, in elements
    bool reached = false;     ///< by the backward under way
    bool placed = false;      ///< the bucket has something of it in this backward
    bool unsynced = false;    ///< `.grad` is this rank's own, from backwards without communication
    bool uses = false;        ///< this rank did in its last average, where the graph is static always
    bool used = false;        ///< so by any rank
    HeldAverages averages{};  ///< in `.grad`
  };
  struct Bucket {
    std::vector<std::size_t> entries;
    std::int64_t numel = 0;
    Tensor values;  ///< the gradients, then for each entry whether this rank has one; none between backwards
    Work work;
    std::string label;
    int due = 0;  ///< gradients that the backward under way will still bring
  };

  /// Another object, made later, may have taken it over.
  bool has(const Entry& entry) const { return sink_of(entry.parameter.local()) == this; }
  Entry& entry(const Leaf& leaf) { return entries_[entry_of_.at(&leaf)]; }
  bool takes(const Bucket& bucket, const nn::Parameter& p, std::int64_t limit_bytes) const {
    const Tensor& first = entries_[bucket.entries[0]].parameter.local();
    return first.dtype() == p.local().dtype() && first.device() == p.local().device() &&
           (bucket.numel + p.numel()) * size_of(first.dtype()) <= limit_bytes;
  }

  /// What is trained is what was when the object was made: everything else would not be averaged, unnoticed.
  void check_parameters() const {
    for (const Entry& entry : entries_) {
      const nn::Parameter& p = entry.parameter;
      const Spec now = p.local().spec(), &then = entry.spec;
      check<StateError>(p.owner() == nullptr,
                        "data parallel: '{}' was sharded after this object was made, and both would average "
                        "its gradient; destroy this object before the module is sharded",
                        entry.name);
      check<StateError>(now == then,
                        "data parallel: '{}' was of shape {}, {} on {} when this object was made and is of "
                        "shape {}, {} on {}; make it anew",
                        entry.name, then.shape, name_of(then.dtype), then.device, now.shape,
                        name_of(now.dtype), now.device);
      check<StateError>(sink_of(p.local()) != nullptr,
                        "data parallel: the gradient of '{}' is averaged no longer, since another object "
                        "took the parameter over and was destroyed; make this one anew",
                        entry.name);
    }
    for (const auto& [name, p] : frozen_)
      check<StateError>(!p.requires_grad(),
                        "data parallel: '{}' became trainable after this object was made, and its gradient "
                        "would not be averaged; make it anew",
                        name);
  }
  /// Averages are added to what is in `.grad`, and what is there may be a part of the next one.
  void check_gradients() const {
    for (const Entry& entry : entries_) {
      if (!entry.parameter.grad().defined()) continue;
      const Spec held = entry.parameter.grad().spec(), &own = entry.spec;
      check<StateError>(held == own,
                        "backward: the .grad of '{}' is of shape {}, {} on {}, the parameter of shape {}, {} "
                        "on {}, and no average can be added; clear it",
                        entry.name, held.shape, name_of(held.dtype), held.device, own.shape,
                        name_of(own.dtype), own.device);
    }
  }
  /// A parameter that no backward reaches may have been replaced.
  void look_for_others() const {
    if (*module_ == nullptr) return;
    for (const auto& [name, p] : (*module_)->named_parameters())
      check<StateError>(known_.contains(p.id()) || !p.requires_grad(),
                        "data parallel: '{}' took another parameter's place after this object was made, and "
                        "its gradient would not be averaged; make it anew",
                        name);
  }

  /// Before the first average after a fault: of gradients too, to which others are added.
  void check_before_average() {
    if (capturing_calls()) {  // the first replay after one
      repeat_in_replays([self = weak_from_this()] {
        if (const auto buckets = self.lock()) buckets->check_before_average();
      });
      return;
    }
    if (alone() || !step_check_.due()) return;
    const Compared c = compared();
    check_steps(c);
    shard::check_gradients(c);
  }
  /// Before a save, which adds to no gradient: of steps alone.
  void check_ranks() override {
    if (!alone() && step_check_.due()) check_steps(compared());
  }
  Compared compared() {
    const std::string model(*module_ == nullptr ? "the module" : (*module_)->type_name());
    Compared c{"data parallel", model_.called(model), identity_, ranks_, channel_};
    for (const Entry& entry : entries_) {
      c.parameters.push_back(entry.parameter);
      c.gradients.push_back(averages_in(entry));
    }
    c.checks = {&step_check_};
    return c;
  }
  /// Zeros are none.
  static std::int64_t averages_in(const Entry& entry) {
    const Tensor held = entry.parameter.grad();
    return held.defined() && held.numel() > 0 && any(not_equal(held, 0)).item() != 0
               ? entry.averages.number(entry.parameter.local(), held)
               : 0;
  }
  void check_graph() const {
    for (const Entry& entry : entries_) {
      const bool uses = entry.reached || (entry.unsynced && entry.parameter.grad().defined());
      check<StateError>(uses == entry.uses,
                        "data parallel: '{}' {} used in this backward and {} in the first one, and the graph "
                        "was said to be static; leave static_graph out",
                        entry.name, uses ? "is" : "is not", entry.uses ? "was" : "was not");
    }
  }
  /// Tells all ranks which of them still have inputs.
  void meet(bool has_inputs) {
    if (alone()) return;
    in_.assign(static_cast<std::size_t>(group_.size()), 0);
    in_[static_cast<std::size_t>(group_.rank())] = has_inputs ? 1 : 0;
    const Tensor in = Tensor::from(in_, {std::ssize(in_)}, Device::cpu());
    group_.all_reduce(in, ReduceOp::sum(), {.label = model_.called("join"), .channel = channel_});
    in_ = in.to_vector<int>();
    const auto out = std::ranges::find(in_, 0);
    check<StateError>(
        !join_->throw_on_early_termination || left() == 0 || out == in_.end(),
        "Detected at least one rank that exhausted inputs. Throwing across all ranks. The first "
        "is rank {} of {}; give all ranks as many inputs, or leave throw_on_early_termination out",
        out - in_.begin(), in_.size());
  }
  /// How many have.
  int left() const { return std::accumulate(in_.begin(), in_.end(), 0); }
  /// Whose values are the model's: the first rank's of those that have inputs.
  static int first_of(const std::vector<int>& in) {
    return in.empty() ? 0 : static_cast<int>(std::ranges::find(in, 1) - in.begin());
  }
  /// The values and their counts of steps of a rank that was in the last average, `in` that one's; none: all
  /// are alike. What optimizers keep stays each rank's own (`bring_up`).
  void take_last(const std::vector<int>& in) const {
    if (in.empty()) return;
    std::vector<Tensor> all = shared_buffers();
    for (const Entry& entry : entries_) all.push_back(entry.parameter.data());
    for (const auto& [name, p] : frozen_) all.push_back(p.data());
    std::vector<std::int64_t> counts;
    for (const Entry& entry : entries_)
      for (const nn::StepCount& count = entry.parameter.step_count();
           const std::int64_t n : {count.steps, count.written})
        counts.push_back(n);
    const Tensor numbers = Tensor::from(counts, {std::ssize(counts)}, Device::cpu());
    all.push_back(numbers);
    share(std::move(all), group_, {.label = model_.called("replicas"), .channel = channel_}, first_of(in));
    counts = numbers.to_vector<std::int64_t>();
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      nn::StepCount& count = entries_[i].parameter.step_count();
      count.steps = counts[2 * i], count.written = counts[2 * i + 1];
    }
  }
  bool divides_by_left() const { return join_ && !join_->divide_by_initial_world_size && !alone() && !hook_; }
  /// What is divided here is not rounded before.
  TensorOptions like(const Bucket& bucket) const {
    const Tensor& first = entries_[bucket.entries[0]].parameter.local();
    return {divides_by_left() ? compute_dtype(first.dtype()) : first.dtype(), first.device()};
  }

  /// Zeros, and what earlier backwards left without communication.
  void fill(Bucket& bucket) {
    bucket.values = zeros({bucket.numel + std::ssize(bucket.entries)}, like(bucket));
    for (std::size_t i : bucket.entries) {
      Entry& entry = entries_[i];
      entry.placed = false;
      if (!has(entry)) continue;
      if (const Tensor held = entry.parameter.grad(); entry.unsynced && held.defined()) place(entry, held);
    }
  }
  static void keep(Entry& entry, const Tensor& gradient) {
    const Tensor held = entry.parameter.grad();
    if (!held.defined()) entry.averages.clear();  // the program cleared it
    // The first one after an average starts the sum that the next average is of; the average itself stays in
    // it.
    entry.parameter.set_grad(held.defined() ? add(held, gradient) : clone(gradient));
    entry.unsynced = true;
  }
  void place(Entry& entry, const Tensor& gradient) {
    const Bucket& bucket = buckets_[entry.bucket];
    const Shape& shape = gradient.shape();
    const Tensor slice = alias(bucket.values, {shape, contiguous_strides(shape), entry.offset});
    const bool more = std::exchange(entry.placed, true);
    if (more && slice.dtype() == gradient.dtype())
      add_(slice, gradient);
    else if (more)
      copy_(slice, add(to(slice, gradient.dtype()), gradient));  // rounded as this rank's sums are
    else
      copy_(slice, gradient);
    const std::int64_t flag = bucket.numel + (&entry - &entries_[bucket.entries[0]]);
    fill_(alias(bucket.values, {{1}, {1}, flag}), 1);
  }

  static Replicas& replicas() { return Context::current().slot<Replicas>(); }
  static std::vector<GradientBuckets*> in_turn(PassInfo pass) {
    std::vector<GradientBuckets*> in_turn = replicas().in_turn;
    std::erase_if(in_turn, [&](const GradientBuckets* buckets) { return buckets->run_ != pass.number; });
    return in_turn;
  }
  /// In order, so that every rank's calls are in one order.
  static void reduce_in_turn(PassInfo pass) {
    const NoGrad guard;
    for (GradientBuckets* buckets : replicas().in_turn) {
      if (buckets->run_ != pass.number || !buckets->run_synchronises_) continue;
      buckets->reduce_what_is_complete();
      if (buckets->next_ < buckets->buckets_.size()) return;
    }
  }
  /// Nothing waits for room before the backward's end: a peer may come to its buckets only after a call in
  /// the graph that this rank still has to make.
  void reduce_what_is_complete() {
    for (; next_ < buckets_.size() && buckets_[next_].due == 0; ++next_) {
      if (alone()) continue;  // its gradients are the average
      Bucket& bucket = buckets_[next_];
      bucket.work = group_.enqueue(average(bucket, bucket.values), WhenFull::queue);
    }
  }
  /// With a hook, of the flags alone.
  Collective average(const Bucket& bucket, const Tensor& values) const {
    const Tensor reduced = hook_ ? narrow(values, 0, bucket.numel, values.numel() - bucket.numel) : values;
    return {.kind = CollectiveKind::all_reduce,
            .inputs = {reduced},
            .outputs = {reduced},
            .reduction = divides_by_left() ? ReduceOp::sum() : ReduceOp::average(),
            .channel = channel_,
            .label = bucket.label};
  }
  void run_hook(const Bucket& bucket, const Tensor& values) const {
    if (!hook_ || alone()) return;
    const Tensor gradients = narrow(values, 0, 0, bucket.numel);
    hook_(gradients, gradients, group_);
  }
  bool alone() const { return group_.size() == 1; }
  /// After a renewal models are counted anew, by their first calls.
  void name_buckets() {
    const ModelNumber model = numbers_.among(group_);
    if (std::exchange(model_, model) == model) return;
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      buckets_[b].label = model.called(fmt::format("gradients {}", b));
  }
  static void wait(Bucket& bucket) {
    bucket.work.wait();
    bucket.work.wait_inputs();
    bucket.work = {};
  }
  std::vector<Tensor> shared_buffers() const {
    return buffers_.empty() || *module_ == nullptr ? buffers_ : buffers_of(**module_);
  }
  void share_buffers() const {
    if (buffers_.empty() || alone()) return;
    share(shared_buffers(), group_, {.label = model_.called("buffers"), .channel = channel_},
          join_ ? first_of(in_) : 0);
  }
  void hand_out(Bucket& bucket) {
    const std::vector<bool> used = used_by_any(bucket);
    for (std::size_t k = 0; k < used.size(); ++k) {
      Entry& entry = entries_[bucket.entries[k]];
      if (!has(entry)) continue;
      if (std::exchange(entry.unsynced, false)) entry.parameter.set_grad({});  // the average has it
      entry.used = used[k];
      if (!used[k]) continue;
      const Shape& shape = entry.parameter.shape();
      Tensor average = alias(bucket.values, {shape, contiguous_strides(shape), entry.offset});
      if (divides_by_left()) average = to(div(average, left()), entry.spec.dtype);
      const Tensor held = entry.parameter.grad();
      entry.averages.look(entry.parameter.local(), held);
      if (held.defined())
        add_(held, average);
      else
        entry.parameter.set_grad(clone(average));
      entry.averages.put(entry.parameter.local(), held.defined());
    }
  }
  /// For each entry, whether any rank has a gradient. Read from the bucket only where this rank has not got
  /// all and others might: a step in which the host reads nothing can be captured.
  std::vector<bool> used_by_any(const Bucket& bucket) const {
    std::vector<bool> used;
    if (graph_known_) {
      for (std::size_t i : bucket.entries) used.push_back(entries_[i].used);
      return used;
    }
    for (std::size_t i : bucket.entries) used.push_back(entries_[i].placed);
    const auto left_out = std::ranges::find(used, false);
    if (alone() || left_out == used.end()) return used;
    check<StateError>(!capturing_calls(),
                      "capture: '{}' has no gradient in this step of replicas, so the host reads whether "
                      "others have one; with static_graph the first backward alone reads it, run one before",
                      entries_[bucket.entries[static_cast<std::size_t>(left_out - used.begin())]].name);
    const auto flags = static_cast<std::int64_t>(used.size());
    const Tensor of_all = alias(bucket.values, {{flags}, {1}, bucket.numel});
    used.clear();
    for (float flag : to(of_all, f32).to_vector<float>()) used.push_back(flag != 0);
    return used;
  }
  /// Returns the leaves that gradients came for. Calls that are still under way keep their memory.
  std::vector<Leaf*> end_run() noexcept {
    std::erase(replicas().in_turn, this);
    run_ = 0;
    begun_ = false;
    reached_ = 0;
    for (Entry& entry : entries_) entry.reached = false;
    for (Bucket& bucket : buckets_) {
      bucket.work = {};
      bucket.values = {};
      bucket.due = 0;
    }
    return std::exchange(arrived_, {});
  }

  std::shared_ptr<nn::Module* const> module_;
  std::vector<nn::NamedParameter> frozen_;
  std::vector<Tensor> buffers_;  ///< to share, should the module be gone; none: nothing is shared
  Group group_;
  Ranks ranks_;
  Identity identity_;
  ModelNumbers numbers_;
  ModelNumber model_;  ///< among the ranks, by which calls are named
  std::uint64_t made_;
  int channel_;
  StepCheck step_check_;
  std::vector<Entry> entries_;
  std::vector<Bucket> buckets_;
  std::unordered_map<const Leaf*, std::size_t> entry_of_;
  std::unordered_set<const void*> known_;  ///< the entries' parameters
  bool awaited_ = false;                   ///< a backward, of a forward that was recorded
  std::size_t reached_ = 0;                ///< entries that the backward under way reaches
  bool synchronising_ = true;
  std::vector<Leaf*> arrived_;  // in the backward under way, which holds them

  std::uint64_t run_ = 0;  ///< the backward under way; 0: none
  bool begun_ = false;     ///< it
  std::shared_ptr<Mark> mark_;
  bool run_synchronises_ = true;
  std::size_t next_ = 0;  ///< bucket to reduce next

  CommHook hook_;
  bool static_graph_;
  bool graph_known_ = false;  ///< it is, and there was an average
  std::optional<JoinOptions> join_;
  std::vector<int>
      in_;  ///< for each rank 1 if it had inputs at the last average of the join; none: there was none
};

std::optional<Group> replicas_of(const nn::Parameter& p) {
  std::optional<Group> ranks;
  GradientBuckets::each([&](const GradientBuckets& one) {
    if (one.has(p)) ranks = one.ranks();
  });
  return ranks;
}

std::unordered_map<const nn::Buffer*, Group> replicated_buffers() {
  std::unordered_map<const nn::Buffer*, Group> ranks;
  GradientBuckets::each([&](const GradientBuckets& one) {
    if (one.module() == nullptr) return;
    for (const FoundBuffer& buffer : find_members(*one.module()).buffers) ranks[buffer.member] = one.ranks();
  });
  return ranks;
}

namespace {

/// What cannot be a replica: a parameter without values, a part of one, or one that something else takes the
/// gradient of.
void check_whole(const std::string& name, const nn::Parameter& p) {
  check<StateError>(p.owner() == nullptr,
                    "data parallel: '{}' is sharded: each rank has a part of its own, which rank 0's would "
                    "overwrite, and its gradients are averaged already; leave DataParallel out, and for "
                    "replicas of shards pass fully_shard a mesh of two dimensions",
                    name);
  check<DeviceError>(p.local().device().type != DeviceType::meta,
                     "data parallel: '{}' is on meta and has no values to share; call materialize() of the "
                     "module first",
                     name);
  const GradSink* sink = sink_of(p.local());
  check<StateError>(sink == nullptr || dynamic_cast<const GradientBuckets*>(sink) != nullptr,
                    "data parallel: '{}' gives its gradient to a sink already (set_sink), in whose place "
                    "averages would go; take that away first",
                    name);
}

}  // namespace

DataParallel::DataParallel(nn::Module& module, const Group& group, DataParallelOptions options)
    : module_(module.whereabouts()) {
  check<ValueError>(options.bucket_bytes > 0, "data parallel: buckets of {} bytes; a bucket has at least one",
                    options.bucket_bytes);
  std::vector<Tensor> all;
  std::vector<std::int64_t> steps;  // that the values have taken
  std::vector<nn::NamedParameter> trainable, frozen;
  for (const nn::NamedParameter& named : module.named_parameters()) {
    const auto& [name, p] = named;
    check_whole(name, p);
    all.push_back(p.data());
    steps.push_back(p.step_count().steps);
    (p.requires_grad() ? trainable : frozen).push_back(named);
  }
  std::vector<Tensor> buffers = buffers_of(module);
  all.insert(all.end(), buffers.begin(), buffers.end());
  const Tensor taken = Tensor::from(steps, {std::ssize(steps)}, Device::cpu());
  all.push_back(taken);
  share(std::move(all), group, {.label = "replicas", .channel = options.channel});
  steps = taken.to_vector<std::int64_t>();
  for (std::size_t i = 0; const nn::NamedParameter& named : module.named_parameters())
    named.parameter.loaded(steps[i++]);
  if (options.broadcast_buffers == BroadcastBuffers::no) buffers.clear();
  buckets_ = std::make_shared<GradientBuckets>(module, std::move(trainable), std::move(frozen),
                                               std::move(buffers), group, options);
  buckets_->take(buckets_);
  watching_ = module.observe(*buckets_);
}

DataParallel::~DataParallel() {
  if (buckets_) buckets_->let_go();
}
DataParallel::DataParallel(DataParallel&&) noexcept = default;

GradientBuckets& DataParallel::buckets() const {
  check<StateError>(buckets_ != nullptr,
                    "data parallel: this object was moved from; use the one that it was moved into");
  return *buckets_;
}

nn::Module& DataParallel::module() const {
  buckets();
  check<StateError>(*module_ != nullptr,
                    "data parallel: the module of this object is gone; make one of a module "
                    "that lives as long");
  return **module_;
}

void DataParallel::register_comm_hook(CommHook hook) {
  buckets().check_in_charge("register_comm_hook");
  buckets_->set_hook(std::move(hook));
}

DataParallel::NoSync::NoSync(DataParallel& model) : buckets_(model.buckets_), outer_(false) {
  model.buckets().check_in_charge("no_sync");
  outer_ = buckets_->set_synchronising(false);
}
DataParallel::NoSync::~NoSync() { buckets_->set_synchronising(outer_); }

DataParallel::Join::Join(DataParallel& model, JoinOptions options)
    : buckets_(model.buckets_), exceptions_(std::uncaught_exceptions()) {
  model.buckets().check_in_charge("join");
  buckets_->begin_join(options);
}
DataParallel::Join::~Join() noexcept(false) {
  struct End {
    GradientBuckets& buckets;
    ~End() { buckets.end_join(); }
  } end{*buckets_};
  if (std::uncaught_exceptions() == exceptions_) buckets_->shadow();
}

}  // namespace sherd::shard
