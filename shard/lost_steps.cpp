#include "shard/lost_steps.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <unordered_set>

#include "autograd/node.h"
#include "nn/shared_gradients.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/agree.h"
#include "shard/share.h"
#include "shard/state_source.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

using Numbers = std::vector<std::int64_t>;

/// Parameters of an optimizer that the same ranks share.
struct Sharers {
  std::string_view call;
  Ranks ranks;
  int channel;
  std::vector<std::size_t> index{};  ///< in the optimizer's list
  std::vector<nn::Parameter> parameters{};
};

std::vector<nn::Parameter> all_of(const nn::Optimizer& optimizer) {
  std::vector<nn::Parameter> all;
  for (std::size_t g = 0; g < optimizer.group_count(); ++g)
    all.insert(all.end(), optimizer.parameters(g).begin(), optimizer.parameters(g).end());
  return all;
}

/// Those of the model, in the order of the optimizer. What is neither sharded nor a replica is left out.
std::deque<Sharers> sharers(nn::Module& model, const nn::Optimizer& optimizer) {
  std::unordered_set<const void*> of_model;
  for (const nn::NamedParameter& p : model.named_parameters()) of_model.insert(p.parameter.id());
  std::deque<Sharers> all;
  const auto add = [&](std::string_view call, const Ranks& ranks, int channel, std::size_t i,
                       const nn::Parameter& p) {
    auto of = std::ranges::find_if(all, [&](const Sharers& s) {
      return s.ranks.shard == ranks.shard && s.ranks.replicas == ranks.replicas;
    });
    if (of == all.end()) {
      all.push_back({call, ranks, channel});
      of = all.end() - 1;
    }
    of->index.push_back(i);
    of->parameters.push_back(p);
  };
  const std::vector<nn::Parameter> parameters = all_of(optimizer);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const nn::Parameter& p = parameters[i];
    if (!of_model.contains(p.id())) continue;
    if (const ParameterGroup* group = group_of(p))
      add("fully_shard", group->spec().ranks, gather_channel, i, p);
    else if (const auto* shared = dynamic_cast<const nn::SharedGradients*>(sink_of(p.local())))
      add("data parallel", {.shard = {}, .replicas = shared->ranks(), .block = {}}, 0, i, p);
  }
  return all;
}

/// The replica that all are to be alike: the first of those that have taken most steps, all its ranks the
/// same and none a part of one.
int foremost(const Sharers& s) {
  const std::vector<Range> ranges = over_ranks(
      numbers_of(s.parameters), {.shard = s.ranks.shard, .replicas = {}, .block = {}}, s.channel, "bring up");
  std::int64_t score = 0;
  bool whole = true;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    whole = whole && ranges[i].alike();
    if (i % 3 != 0) continue;
    whole = whole && ranges[i].most % 2 == 0;
    score += ranges[i].most;
  }
  Numbers scores{whole ? score : -1};
  if (s.ranks.replicas.defined()) {
    const Tensor all = empty({s.ranks.replicas.size()}, {DType::i64, Device::cpu()});
    s.ranks.replicas.all_gather(all, Tensor::from(scores, {1}, Device::cpu()),
                                {.label = "bring up", .channel = s.channel});
    scores = all.to_vector<std::int64_t>();
  }
  const auto best = std::ranges::max_element(scores);
  check<StateError>(*best >= 0, "bring_up: {}, so there is nothing whole to copy; {}",
                    s.ranks.replicas.defined()
                        ? "no replica has taken the same steps on all of its ranks"
                        : "ranks have taken unlike steps, and their shards have no replicas",
                    load_a_checkpoint());
  return static_cast<int>(best - scores.begin());
}

/// What the optimizer keeps for these parameters, options and counts too, as on rank `source` of the
/// replicas.
class StateFrom {
 public:
  StateFrom(const Sharers& s, const nn::Optimizer& optimizer, int source)
      : s_(s), optimizer_(optimizer), source_(source), names_(optimizer.state_names()) {}

  /// Takes the place of what `state` has for them.
  void put_into(nn::StateDict& state) {
    const std::vector<bool> kept = numbers(state);
    std::vector<Tensor> tensors;
    for (std::size_t k = 0; k < s_.index.size(); ++k)
      for (const std::string& name : names_) {
        const std::string entry = fmt::format("state.{}.{}", s_.index[k], name);
        const auto found = std::ranges::find(state, entry, &nn::StateDict::value_type::first);
        if (!kept[k]) {
          if (found != state.end()) state.erase(found);
          continue;
        }
        const bool here = found != state.end();
        const Tensor t = here ? found->second : fresh(s_.parameters[k], name);
        if (!here) state.emplace_back(entry, t);
        if (t.numel() > 0) tensors.push_back(t);
      }
    send(std::move(tensors));
  }
  void set_counts() const {
    for (std::size_t k = 0; k < s_.parameters.size(); ++k) s_.parameters[k].step_count() = counts_[k];
  }

 private:
  void send(std::vector<Tensor> tensors) const {
    if (s_.ranks.replicas.defined())
      share(std::move(tensors), s_.ranks.replicas, {.label = "bring up", .channel = s_.channel}, source_);
  }
  Tensor fresh(const nn::Parameter& p, const std::string& name) const {
    const Tensor& local = p.local();
    if (name == "step") return zeros({}, {DType::f64, local.device()});
    return zeros(local.shape(), {optimizer_.state_dtype(local.dtype()), local.device()});
  }
  /// Options and counts; says for which parameters there is state.
  std::vector<bool> numbers(const nn::StateDict& state) {
    std::vector<double> numbers;
    for (std::size_t k = 0; k < s_.index.size(); ++k) {
      const nn::StepCount& count = s_.parameters[k].step_count();
      const bool kept = !names_.empty() && state.contains(fmt::format("state.{}.{}", s_.index[k], names_[0]));
      for (const std::int64_t n : {count.steps, count.written, count.state, std::int64_t{kept ? 1 : 0}})
        numbers.push_back(static_cast<double>(n));
    }
    std::vector<Tensor> options;
    for (const auto& [name, tensor] : state)
      if (name.starts_with("group.")) options.push_back(tensor);
    const Tensor all = Tensor::from(numbers, {std::ssize(numbers)}, Device::cpu());
    options.push_back(all);
    send(std::move(options));
    const std::vector<double> sent = all.to_vector<double>();
    std::vector<bool> kept;
    for (std::size_t i = 0; i < sent.size(); i += 4) {
      counts_.push_back({.steps = static_cast<std::int64_t>(sent[i]),
                         .written = static_cast<std::int64_t>(sent[i + 1]),
                         .state = static_cast<std::int64_t>(sent[i + 2])});
      kept.push_back(sent[i + 3] != 0);
    }
    return kept;
  }

  const Sharers& s_;
  const nn::Optimizer& optimizer_;
  int source_;
  std::vector<std::string> names_;
  std::vector<nn::StepCount> counts_;
};

/// In place: who is interrupted has a part of a step.
void bring_up(const Sharers& s, nn::Module& model, nn::Optimizer& optimizer) {
  const int source = foremost(s);
  if (!s.ranks.replicas.defined()) return;
  for (const nn::Parameter& p : s.parameters) p.step_count().broken_off = true;
  std::vector<Tensor> values;
  for (const nn::Parameter& p : s.parameters) {
    if (p.owner() != nullptr) p.owner()->before_write();
    if (p.local().numel() > 0) values.push_back(p.local().detach());
  }
  if (!s.ranks.shard.defined() && s.call == "data parallel")
    for (const nn::NamedBuffer& b : model.named_buffers())
      if (b.tensor.numel() > 0) values.push_back(b.tensor);
  share(std::move(values), s.ranks.replicas, {.label = "bring up", .channel = s.channel}, source);
  StateFrom from(s, optimizer, source);
  nn::StateDict state = optimizer.state_dict();
  from.put_into(state);
  Numbers others;  // whose state stays
  const std::vector<nn::Parameter> all = all_of(optimizer);
  for (const nn::Parameter& p : all) others.push_back(p.step_count().state);
  optimizer.load_state_dict(std::move(state));
  for (std::size_t i = 0; i < all.size(); ++i) all[i].step_count().state = others[i];
  from.set_counts();
}

}  // namespace

std::int64_t steps_taken(const nn::Module& model) {
  std::int64_t most = 0;
  for (const nn::NamedParameter& p : model.named_parameters())
    most = std::max(most, p.parameter.step_count().steps);
  return most;
}

void bring_up(nn::Module& model, nn::Optimizer& optimizer) {
  const NoGrad guard;
  check_optimizer(optimizer);
  const Engine::OwnCalls own_calls;
  for (const Sharers& s : sharers(model, optimizer)) bring_up(s, model, optimizer);
}

}  // namespace sherd::shard
