// Adam, Sgd, Rmsprop, Lion and Adagrad: what they keep, and how lists of parameters go through their ops.
#include <algorithm>
#include <cmath>
#include <map>

#include "nn/optimizer.h"
#include "runtime/apply.h"
#include "runtime/ops.h"
#include "runtime/ops/optimizer_steps.h"

namespace sherd::nn {
namespace {

Option flag(std::string name, bool value) {
  return {std::move(name), value ? 1.0 : 0.0, OptionRange::yes_or_no};
}

/// Whether a parameter is stepped by an op on a whole list; else by itself.
bool is_listed(const Tensor& p, const Tensor& g, std::span<const Tensor> state) {
  const auto fits = [](const Tensor& t) { return is_floating(t.dtype()) && t.dtype() != DType::f64; };
  const auto is_as_p = [&](const Tensor& s) { return s.dtype() == p.dtype() || s.dtype() == DType::f64; };
  return g.device() == p.device() && p.is_contiguous() && fits(p) && fits(g) &&
         std::ranges::all_of(state, is_as_p);
}

/// The inputs of a step before its parameters: the rate, and if there are such, the flag to skip and the
/// factor.
struct FirstInputs {
  const Tensor &lr, &skip, &factor;

  std::vector<Tensor> on(Device device) const {
    std::vector<Tensor> list{to(lr, device)};
    if (skip.defined()) list.push_back(to(skip, device));
    if (factor.defined()) list.push_back(to(factor, device));
    return list;
  }
  ops::Skippable skippable() const { return skip.defined() ? ops::Skippable::yes : ops::Skippable::no; }
  ops::Clipped clipped() const { return factor.defined() ? ops::Clipped::yes : ops::Clipped::no; }
};

/// Steps one parameter by the op's formula, composed of other ops: in f64, or else in f32 and rounded once.
/// Counts of steps are f64 anyway.
template <class Op>
void step_alone(const Op& op, const FirstInputs& first, const Tensor& p, const Tensor& g,
                std::span<const Tensor> state) {
  const DType wide = p.dtype() == DType::f64 ? DType::f64 : DType::f32;
  std::vector<Tensor> in = first.on(p.device());
  in.push_back(to(p, wide));
  in.push_back(to(g, p.device()));
  for (const Tensor& s : state) in.push_back(s.dtype() == DType::f64 ? s : to(s, wide));
  const Tensors stepped = op.reference(in);
  copy_(p, stepped[0]);
  for (std::size_t k = 0; k < state.size(); ++k) copy_(state[k], stepped[k + 1]);
}

/// For each device the inputs of one list op.
class DeviceLists {
 public:
  explicit DeviceLists(const FirstInputs& first) : first_(first) {}
  std::vector<Tensor>& on(Device device) {
    for (std::vector<Tensor>& list : lists_)
      if (list[0].device() == device) return list;
    return lists_.emplace_back(first_.on(device));
  }
  /// Steps what stands in the lists, and empties them.
  template <class Op>
  void step(const Op& op) {
    for (std::vector<Tensor>& list : lists_) {
      if (list.size() > op.first()) apply_many(op, list);
      list.resize(op.first());
    }
  }

 private:
  FirstInputs first_;
  std::vector<std::vector<Tensor>> lists_;
};

/// The elements of dense tensors, in memory order, so that a list of parameters costs no more than its
/// sorting.
class Elements {
 public:
  /// Adds those of `t`, unless some of them are there: then false.
  bool add(const Tensor& t) {
    if (t.numel() == 0) return true;
    const Storage* const storage = &t.storage();
    const std::int64_t begin = t.layout().offset, end = begin + t.numel();
    const auto next = ends_.upper_bound({storage, begin});
    const auto on_it = [&](auto at) { return at->first.first == storage; };
    if (next != ends_.end() && on_it(next) && next->first.second < end) return false;
    if (next != ends_.begin() && on_it(std::prev(next)) && std::prev(next)->second > begin) return false;
    ends_.emplace_hint(next, std::pair(storage, begin), end);
    return true;
  }
  void clear() { ends_.clear(); }

 private:
  std::map<std::pair<const Storage*, std::int64_t>, std::int64_t> ends_;
};

/// Steps the parameters of a group by the op. `kept(i)` is what it takes of the state of the i-th.
template <class Op, class Kept>
void step_list(const Op& op, const FirstInputs& first, bool foreach, std::span<const Parameter> params,
               const Kept& kept) {
  DeviceLists lists(first);
  Elements listed;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Tensor p = params[i].local().detach(), g = params[i].grad();
    const std::vector<Tensor> state = kept(i);
    if (!is_listed(p, g, state)) {
      step_alone(op, first, p, g, state);
      continue;
    }
    if (!listed.add(p)) {  // one after the other, as without lists
      lists.step(op);
      listed.clear();
      listed.add(p);
    }
    std::vector<Tensor>& list = lists.on(p.device());
    list.insert(list.end(), {p, g});
    list.insert(list.end(), state.begin(), state.end());
    if (!foreach) lists.step(op);
  }
  lists.step(op);
}

}  // namespace

Adam::Adam(std::vector<ParamGroup> groups, AdamOptions o, bool decoupled)
    : Optimizer(std::move(groups), {{"lr", o.lr},
                                    {"beta1", o.beta1, OptionRange::below_1},
                                    {"beta2", o.beta2, OptionRange::below_1},
                                    {"eps", o.eps},
                                    {"weight_decay", o.weight_decay},
                                    flag("amsgrad", o.amsgrad),
                                    flag("maximize", o.maximize)}),
      foreach_(o.foreach),
      masters_(o.masters),
      decoupled_(decoupled) {}

std::vector<std::string> Adam::state_names() const {
  std::vector<std::string> names{"exp_avg", "exp_avg_sq"};
  if (any("amsgrad")) names.emplace_back("max_exp_avg_sq");
  if (masters_ == Masters::in_f32) names.emplace_back("master");
  names.emplace_back("step");
  return names;
}

DType Adam::state_dtype(DType dtype) const { return masters_ == Masters::in_f32 ? DType::f32 : dtype; }

Optimizer::Slots Adam::fresh(const Tensor& p) const {
  const TensorOptions like{state_dtype(p.dtype()), p.device()};
  Slots slots{zeros(p.shape(), like), zeros(p.shape(), like)};
  if (any("amsgrad")) slots.push_back(zeros(p.shape(), like));
  if (masters_ == Masters::in_f32) {
    check<DTypeError>(
        p.dtype() != DType::f64,
        "Adam: keeps f32 masters of parameters in 16 bits or f32, got one of shape {} in {}; cast the model, "
        "or step it without masters",
        p.shape(), name_of(p.dtype()));
    slots.push_back(copy_(empty(p.shape(), {DType::f32, p.device()}), p.detach()));
  }
  slots.push_back(zeros({}, {DType::f64, p.device()}));
  return slots;
}

void Adam::step_group(const Group& group, std::span<const Parameter> params, std::span<Slots* const> slots) {
  const FirstInputs first{group.lr, skip(), factor()};
  ops::AdamStep op{.beta1 = group.option("beta1"),
                   .beta2 = group.option("beta2"),
                   .eps = group.option("eps"),
                   .weight_decay = group.option("weight_decay"),
                   .decoupled = decoupled_,
                   .amsgrad = group.option("amsgrad") != 0,
                   .maximize = group.option("maximize") != 0,
                   .skippable = first.skippable(),
                   .clipped = first.clipped()};
  const auto moments = [&](std::size_t i) {  // another group may keep the largest
    const Slots& s = *slots[i];
    return Slots(s.begin(), s.begin() + (op.amsgrad ? 3 : 2));
  };
  if (masters_ != Masters::in_f32)
    return step_list(op, first, foreach_, params, [&](std::size_t i) {
      Slots kept = moments(i);
      kept.push_back(slots[i]->back());
      return kept;
    });
  ops::AdamStep with_twins = op;
  with_twins.twins = ops::Twins::yes;
  DeviceLists narrow(first), wide(first);
  std::vector<std::pair<Tensor, Tensor>> copies;  // f32 parameters and what their masters become
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Tensor p = params[i].local().detach();
    const Slots& s = *slots[i];
    const Slots kept = moments(i);
    const Tensor master = s[s.size() - 2], &step = s.back();
    const bool twin = size_of(p.dtype()) == 2;
    std::vector<Tensor>& list = (twin ? narrow : wide).on(p.device());
    list.insert(list.end(), {master, to(params[i].grad(), p.device())});
    list.insert(list.end(), kept.begin(), kept.end());
    list.push_back(step);
    if (twin)
      list.push_back(p);
    else
      copies.emplace_back(p, master);
    if (foreach_) continue;
    narrow.step(with_twins);
    wide.step(op);
  }
  narrow.step(with_twins);
  wide.step(op);
  for (const auto& [p, master] : copies) copy_(p, master);
}

Sgd::Sgd(std::vector<ParamGroup> groups, SgdOptions o)
    : Optimizer(std::move(groups), {{"lr", o.lr},
                                    {"momentum", o.momentum},
                                    {"weight_decay", o.weight_decay},
                                    {"dampening", o.dampening},
                                    flag("nesterov", o.nesterov),
                                    flag("maximize", o.maximize)}),
      foreach_(o.foreach) {}

std::vector<std::string> Sgd::state_names() const {
  return any("momentum") ? std::vector<std::string>{"momentum", "step"} : std::vector<std::string>{};
}

void Sgd::step_group(const Group& group, std::span<const Parameter> params, std::span<Slots* const> slots) {
  const FirstInputs first{group.lr, skip(), factor()};
  const ops::SgdStep op{.momentum = group.option("momentum"),
                        .weight_decay = group.option("weight_decay"),
                        .dampening = group.option("dampening"),
                        .nesterov = group.option("nesterov") != 0,
                        .maximize = group.option("maximize") != 0,
                        .skippable = first.skippable(),
                        .clipped = first.clipped()};
  step_list(op, first, foreach_, params,
            [&](std::size_t i) { return op.momentum != 0 ? *slots[i] : Slots(); });
}

Rmsprop::Rmsprop(std::vector<ParamGroup> groups, RmspropOptions o)
    : Optimizer(std::move(groups), {{"lr", o.lr},
                                    {"alpha", o.alpha, OptionRange::below_1},
                                    {"eps", o.eps},
                                    {"weight_decay", o.weight_decay},
                                    {"momentum", o.momentum},
                                    flag("centered", o.centered),
                                    flag("maximize", o.maximize)}),
      foreach_(o.foreach) {}

std::vector<std::string> Rmsprop::state_names() const {
  std::vector<std::string> names{"square_avg"};
  if (any("centered")) names.emplace_back("grad_avg");
  if (any("momentum")) names.emplace_back("momentum");
  return names;
}

void Rmsprop::step_group(const Group& group, std::span<const Parameter> params,
                         std::span<Slots* const> slots) {
  const FirstInputs first{group.lr, skip(), factor()};
  const ops::RmspropStep op{.alpha = group.option("alpha"),
                            .eps = group.option("eps"),
                            .weight_decay = group.option("weight_decay"),
                            .momentum = group.option("momentum"),
                            .centered = group.option("centered") != 0,
                            .maximize = group.option("maximize") != 0,
                            .skippable = first.skippable(),
                            .clipped = first.clipped()};
  step_list(op, first, foreach_, params, [&](std::size_t i) {
    const Slots& s = *slots[i];
    Slots kept{s.front()};
    if (op.centered) kept.push_back(s[1]);
    if (op.momentum != 0) kept.push_back(s.back());
    return kept;
  });
}

Lion::Lion(std::vector<ParamGroup> groups, LionOptions o)
    : Optimizer(std::move(groups), {{"lr", o.lr},
                                    {"beta1", o.beta1, OptionRange::below_1},
                                    {"beta2", o.beta2, OptionRange::below_1},
                                    {"weight_decay", o.weight_decay},
                                    flag("maximize", o.maximize)}),
      foreach_(o.foreach) {}

std::vector<std::string> Lion::state_names() const { return {"exp_avg"}; }

void Lion::step_group(const Group& group, std::span<const Parameter> params, std::span<Slots* const> slots) {
  const FirstInputs first{group.lr, skip(), factor()};
  const ops::LionStep op{.beta1 = group.option("beta1"),
                         .beta2 = group.option("beta2"),
                         .weight_decay = group.option("weight_decay"),
                         .maximize = group.option("maximize") != 0,
                         .skippable = first.skippable(),
                         .clipped = first.clipped()};
  step_list(op, first, foreach_, params, [&](std::size_t i) { return *slots[i]; });
}

Adagrad::Adagrad(std::vector<ParamGroup> groups, AdagradOptions o)
    : Optimizer(std::move(groups), {{"lr", o.lr},
                                    {"lr_decay", o.lr_decay},
                                    {"weight_decay", o.weight_decay},
                                    {"eps", o.eps},
                                    flag("maximize", o.maximize)}),
      foreach_(o.foreach),
      initial_(o.initial_accumulator_value) {
  check<ValueError>(
      initial_ >= 0 && std::isfinite(initial_),
      "Adagrad: initial_accumulator_value {}; sums of squares start at a finite value from 0 on", initial_);
}

std::vector<std::string> Adagrad::state_names() const { return {"sum", "step"}; }

Optimizer::Slots Adagrad::fresh(const Tensor& p) const {
  return {full(p.shape(), initial_, {p.dtype(), p.device()}), zeros({}, {DType::f64, p.device()})};
}

void Adagrad::step_group(const Group& group, std::span<const Parameter> params,
                         std::span<Slots* const> slots) {
  const FirstInputs first{group.lr, skip(), factor()};
  const ops::AdagradStep op{.lr_decay = group.option("lr_decay"),
                            .eps = group.option("eps"),
                            .weight_decay = group.option("weight_decay"),
                            .maximize = group.option("maximize") != 0,
                            .skippable = first.skippable(),
                            .clipped = first.clipped()};
  step_list(op, first, foreach_, params, [&](std::size_t i) { return *slots[i]; });
}

}  // namespace sherd::nn
