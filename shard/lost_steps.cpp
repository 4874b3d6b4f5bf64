#include "shard/lost_steps.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/agree.h"
#include "shard/holders.h"
#include "shard/share.h"
#include "shard/state_source.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

using Numbers = std::vector<std::int64_t>;

/// Parameters of an optimizer that the same ranks share.
struct Sharers {
  bool sharded;  ///< by `fully_shard`; else `DataParallel` has them
  Ranks ranks;
  std::vector<std::size_t> index{};  ///< in the optimizer's list
  std::vector<nn::Parameter> parameters{};

  CallOptions call() const {
    return {.label = called_of(parameters.front(), "bring up"), .channel = sharded ? gather_channel : 0};
  }
};

/// Those of the model, in the order of the optimizer.
std::vector<Sharers> sharers(const nn::Module& model, const nn::Optimizer& optimizer) {
  std::unordered_set<const void*> of_model;
  for (const nn::NamedParameter& p : model.named_parameters()) of_model.insert(p.parameter.id());
  std::vector<Sharers> all;
  const std::vector<nn::Parameter> parameters = all_parameters(optimizer);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const nn::Parameter& p = parameters[i];
    const std::optional<Ranks> ranks = of_model.contains(p.id()) ? sharers_of(p) : std::nullopt;
    if (!ranks) continue;
    const bool sharded = group_of(p) != nullptr;
    auto of = std::ranges::find_if(all, [&](const Sharers& s) {
      return s.sharded == sharded && s.ranks.shard == ranks->shard && s.ranks.replicas == ranks->replicas;
    });
    if (of == all.end()) of = all.insert(of, Sharers{sharded, *ranks});
    of->index.push_back(i);
    of->parameters.push_back(p);
  }
  return all;
}

/// The replica that all are to be alike: the first of those that have taken most steps, and have most of them
/// in the optimizer's state, all its ranks the same and none a part of one.
int foremost(const Sharers& s) {
  const std::vector<Range> ranges =
      over_ranks(numbers_of(s.parameters), {.shard = s.ranks.shard, .replicas = {}, .block = {}}, s.call());
  std::int64_t steps = 0, in_state = 0;
  for (std::size_t i = 0; i < ranges.size() && steps >= 0; ++i)
    if (!whole(ranges, i))
      steps = -1;
    else if (i % numbers_a_parameter == 0)
      steps += ranges[i].most;
    else if (i % numbers_a_parameter == numbers_a_parameter - 1 && ranges[i].most != no_number)
      in_state += ranges[i].most;
  const Numbers all = of_all_ranks(s.ranks.replicas, Numbers{steps, in_state}, s.call());
  std::vector<std::pair<std::int64_t, std::int64_t>> scores;
  for (std::size_t i = 0; i < all.size(); i += 2) scores.emplace_back(all[i], all[i + 1]);
  const auto best = std::ranges::max_element(scores);
  check<StateError>(best->first >= 0, "bring_up: {}, so there is nothing whole to copy; {}",
                    s.ranks.replicas.defined()
                        ? "no replica has taken the same steps on all of its ranks"
                        : "ranks have taken unlike steps, and their shards have no replicas",
                    load_a_checkpoint(s.parameters));
  return static_cast<int>(best - scores.begin());
}

/// What the optimizer keeps for these parameters, options and counts too, as on rank `source` of the
/// replicas.
class StateFrom {
 public:
  StateFrom(const Sharers& s, const nn::Optimizer& optimizer, int source)
      : s_(s), optimizer_(optimizer), source_(source) {}

  /// Takes the place of what `state` has for them.
  void put_into(nn::StateDict& state) {
    const std::vector<bool> kept = numbers(state);
    const std::vector<std::string> names = state_names_with(optimizer_, state);
    std::erase_if(state, [&](const auto& entry) {  // of no use with the source's options
      return entry.first.starts_with("state.") &&
             std::ranges::find(names, entry.first.substr(entry.first.find('.', 6) + 1)) == names.end();
    });
    std::vector<Tensor> tensors;
    for (std::size_t k = 0; k < s_.index.size(); ++k)
      for (const std::string& name : names) {
        const std::string entry = state_entry(s_.index[k], name);
        const auto found = std::ranges::find(state, entry, &nn::StateDict::value_type::first);
        if (!kept[k]) {
          if (found != state.end()) state.erase(found);
          continue;
        }
        const bool here = found != state.end();
        const Tensor t = here ? found->second : no_state(optimizer_, s_.parameters[k], name);
        if (!here) state.emplace_back(entry, t);
        if (t.numel() > 0) tensors.push_back(t);
      }
    send(std::move(tensors));
  }
  void set_counts() const {
    for (std::size_t k = 0; k < s_.parameters.size(); ++k) {
      nn::StepCount& count = s_.parameters[k].step_count();
      auto checkpoint = std::move(count.checkpoint);
      count = counts_[k];
      count.checkpoint = std::move(checkpoint);
    }
  }

 private:
  void send(std::vector<Tensor> tensors) const {
    share(std::move(tensors), s_.ranks.replicas, s_.call(), source_);
  }
  /// Options, which the optimizer takes with its state, and counts; says for which parameters there is state.
  std::vector<bool> numbers(nn::StateDict& state) {
    const std::vector<std::string> names = optimizer_.state_names();
    std::vector<double> numbers;
    for (std::size_t k = 0; k < s_.index.size(); ++k) {
      const nn::StepCount& count = s_.parameters[k].step_count();
      const bool kept = !names.empty() && state.contains(state_entry(s_.index[k], names[0]));
      for (const std::int64_t n : {count.steps, count.written, count.state, std::int64_t{kept ? 1 : 0}})
        numbers.push_back(static_cast<double>(n));
    }
    std::vector<Tensor> options;
    for (auto& [name, tensor] : state)
      if (name.starts_with("group.")) options.push_back(tensor = clone(tensor));
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
  if (!s.sharded)
    for (const nn::NamedBuffer& b : model.named_buffers())
      if (b.tensor.numel() > 0) values.push_back(b.tensor);
  share(std::move(values), s.ranks.replicas, s.call(), source);
  StateFrom from(s, optimizer, source);
  nn::StateDict state = optimizer.state_dict();
  from.put_into(state);
  Numbers others;  // whose state stays
  const std::vector<nn::Parameter> all = all_parameters(optimizer);
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
