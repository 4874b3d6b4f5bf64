// Optimizers: whole parameter lists in one op, parameter groups, step counts and rates as tensors.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "nn/module.h"

namespace sherd::nn {

/// Parameters with options of their own; what is not given comes from the optimizer's options. May be empty.
/// ValueError for an option that the optimizer does not have and for a value out of its range (a rate or
/// decay that is negative or not finite), here and wherever one is set.
struct ParamGroup {
  std::vector<Parameter> params;
  std::optional<double> lr{}, weight_decay{};
  std::map<std::string, double> options{};  ///< others by name: {"momentum", 0.5}
};

/// Which values an option takes.
enum class OptionRange { at_least_0, below_1, yes_or_no, at_most_0 };
/// What each group of an optimizer has a number of: its name, what groups have that give none, and which
/// values it takes; finite ones from 0 on, those of them below 1, 0 and 1, or finite ones up to 0.
struct Option {
  std::string name;
  double value = 0;
  OptionRange range = OptionRange::at_least_0;
};

/// How a tensor of an optimizer's state lies: its shape on this rank, its dtype, and what it is a number of.
struct StateForm {
  Shape shape;
  DType dtype;
  /// Of so many elements of the whole parameter each, in row-major order; 1 is a tensor of the parameter's
  /// shape. 0: of the parameter as a whole, and the same on all ranks that share it.
  std::int64_t per = 1;
};

/// What `zero_grad` leaves: no gradient, or zeros in place.
enum class ZeroGrad { to_none, to_zero };

/// Steps parameters by their gradients. A parameter without a gradient is left alone: no decay, no state, no
/// step count. Within one optimizer a parameter is in one group (ValueError); two optimizers may share one,
/// each with state of its own. ValueError for an empty parameter, and for a group that is not there.
class SHERD_API Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates all parameters that have a gradient. Before anything is updated: ShapeError for a gradient that
  /// does not have the shape of `Parameter::local()`, DeviceError for one on `meta`, StateError for state of
  /// another dtype or device and for a parameter whose elements share memory.
  void step();
  /// The same for `params` alone, which are this optimizer's (ValueError): each has state and a count of
  /// steps of its own, so steps of all parameters, in parts, come to the bits of one of them together.
  void step(std::span<const Parameter> params);
  /// The same as for all, unless `skip` (one element, else ShapeError) holds anything but 0: then no
  /// parameter, state or count of steps changes, though state that was not there is made. With sharded
  /// parameters it is the same on all ranks. The optimizers here look at it on the device, so it can be
  /// captured; for others (`skips_on_device`) the host reads it.
  void step_unless(const Tensor& skip);
  /// The bits of clipping the gradients by their `norm` (one element; `grad_norm` or `shard::grad_norm` makes
  /// it) to `max_norm` and then `step()`, but in one pass over them where the optimizer can
  /// (`clips_on_device`; the optimizers here can, other ones have their gradients scaled). Whether gradients
  /// are clipped or as they were afterwards is left open. ShapeError for another norm, ValueError for a limit
  /// below 0.
  void step_clipped(const Tensor& norm, double max_norm);
  void zero_grad(ZeroGrad mode = ZeroGrad::to_none);
  /// Expires with the optimizer, and is owned by no other one (`std::owner_less`): for those that remember it
  /// after its address may be another's.
  std::weak_ptr<const void> lifetime() const { return alive_; }
  /// Sets the learning rate of every group, or of one. It is kept as a tensor, so a captured step uses the
  /// new value.
  void set_lr(double lr);
  void set_lr(std::size_t group, double lr);
  double lr(std::size_t group = 0) const;
  /// The options that each group has, "lr" among them, and the number of one; those that are yes or no are 1
  /// or 0. ValueError for one that is not there.
  std::vector<std::string> option_names() const;
  double option(std::string_view name, std::size_t group = 0) const;
  /// Sets an option of every group, or of one. A captured step uses the new rate, and the other options as
  /// they were when it was captured. State that an option calls for (a momentum) begins anew; what none calls
  /// for any more is freed.
  void set_option(std::string_view name, double value);
  void set_option(std::size_t group, std::string_view name, double value);
  /// One more group; the state of the others stays. The errors of the constructor, and nothing is changed
  /// then.
  void add_param_group(ParamGroup group);
  std::size_t group_count() const { return groups_.size(); }
  /// The parameters of one group. The numbers in `state_dict` count through all groups in this order.
  const std::vector<Parameter>& parameters(std::size_t group) const { return group_at(group).params; }

  /// What the optimizer keeps for a parameter, by name; "step" is a number (0-d f64), the others are tensors
  /// as `state_form` says. Empty when it keeps nothing.
  virtual std::vector<std::string> state_names() const = 0;
  /// The dtype of state for a parameter of `dtype`.
  virtual DType state_dtype(DType dtype) const { return dtype; }
  /// How what it keeps by that name for a parameter lies: as `Parameter::local()`, in `state_dtype`, unless
  /// an optimizer says otherwise. What one parameter has and another has not is of shape {0}.
  virtual StateForm state_form(std::string_view name, const Parameter& p) const;
  /// State tensors, named "state.<index of the parameter>.<what>", and the groups' options,
  /// "group.<index>.<name>" (0-d f64). They share memory with the optimizer, so the next step changes them.
  StateDict state_dict() const;
  /// Replaces state and options; dtypes are cast. ValueError for names that do not fit these parameters, a
  /// name that comes twice and options that no group may have, ShapeError for other shapes, DeviceError where
  /// one side is on `meta` and the other is not. Nothing is changed when it throws. A parameter that `state`
  /// has nothing for begins anew; an option but the rate that it does not have stays. State that is there
  /// already keeps its memory, so a captured step goes on from what was loaded. Tensors that are given away
  /// with `state` (moved, and held by nobody else) become the state of parameters that have none, without a
  /// copy.
  void load_state_dict(StateDict state) { stage_state_dict(std::move(state))(); }
  /// The same in two steps: throws what is refused, and gives what takes the state over. No step may come in
  /// between.
  std::function<void()> stage_state_dict(StateDict state);
  /// `state_names()` as it is with the groups' options that `number` gives by the names in a state dict.
  std::vector<std::string> state_names_with(
      const std::function<std::optional<double>(const std::string& name)>& number) const;

 protected:
  struct Group {
    std::vector<Parameter> params;
    Tensor lr;          // 0-d f64 on cpu
    StateDict options;  // as many such tensors, by name, the same "lr" among them

    /// The number of an option; a captured step keeps it, but for the rate, which it may not read on the
    /// host.
    double option(std::string_view name) const;
  };
  /// Whether an option is not 0 in any group.
  bool any(std::string_view option) const;
  /// State of one parameter, in the order of `state_names`.
  using Slots = std::vector<Tensor>;

  /// `options`, "lr" among them, are what each group has a number of, and what groups have that give none.
  Optimizer(std::vector<ParamGroup> groups, std::vector<Option> options);
  /// Whether `step_group` changes nothing where `skip()` is not 0.
  virtual bool skips_on_device() const { return false; }
  /// During a `step_unless` of an optimizer that skips on the device: 0-d f32; else an empty handle.
  const Tensor& skip() const { return skip_; }
  /// Whether `step_group` takes gradients as multiplied by `factor()` and rounded to their dtype.
  virtual bool clips_on_device() const { return false; }
  /// During a `step_clipped` of an optimizer that clips on the device: 0-d f64; else an empty handle.
  const Tensor& factor() const { return factor_; }
  /// First state for a parameter whose `local()` is `p`; none at all: zeros, as `state_form` has them.
  virtual Slots fresh(const Tensor&) const { return {}; }
  /// Updates `params`, those of `group` that have a gradient; `slots` is their state.
  virtual void step_group(const Group& group, std::span<const Parameter> params,
                          std::span<Slots* const> slots) = 0;

 private:
  std::shared_ptr<const void> alive_ = std::make_shared<char>();
  void check_fits(const Parameter& p, const Slots& state, std::span<const std::string> names) const;
  Slots first_state(const Parameter& p) const;
  using States = std::unordered_map<const void*, Slots>;

  const Group& group_at(std::size_t group) const;
  /// The rule of an option; ValueError for one that no group has.
  const Option& rule(std::string_view name) const;
  /// The state with a slot for each name of `to`: those that `from` has too, and new ones.
  States arranged(std::span<const std::string> from, std::span<const std::string> to) const;
  template <class Change>
  void change_options(const Change& change);
  void step_all();
  void step_those(std::span<const std::vector<Parameter>> of_groups);
  void tell_of_lost_steps(DType dtype);
  std::vector<Group> groups_;
  std::unordered_map<const void*, std::size_t> group_of_;
  States state_;
  std::vector<Option> options_;
  bool told_ = false;  ///< of steps that are lost
  /// A step of all with `value` in `input`, which is one of the next two.
  void step_with(Tensor& input, Tensor value);
  Tensor skip_, factor_;
};

/// Whether an optimizer keeps f32 masters of its parameters of 16 bits: each step reads 16-bit gradients,
/// moves the masters in f32 and writes them back rounded. Parameters in f32 beside those (of normalisations)
/// have masters too, and step as without. Masters start as the parameters are at the first step, and are part
/// of the state ("master"): what is written into such a parameter otherwise is lost at the next step.
enum class Masters { none, in_f32 };

/// For `Adam`. ValueError unless the betas lie in [0, 1) and eps is at least 0.
struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  /// Steps the parameters of a device as one list; without it one after another, to the same bits.
  bool foreach = true;
  Masters masters = Masters::none;
  bool amsgrad = false;   ///< divides by the root of the largest v so far (Reddi, Kale and Kumar, 2018)
  bool maximize = false;  ///< climbs: takes gradients with the other sign
};

/// Adam (Kingma and Ba, 2015): m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, and p moves by
/// -lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps). Weight decay is added to the gradient. Options
/// of groups: "lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize". State has the parameter's
/// dtype, as PyTorch's: in f16 squares of gradients below 1e-3 vanish from v, and in bf16 v no longer falls
/// (beta2 0.999), so keep such parameters, or masters of them, in f32. DTypeError, with masters, for a
/// parameter in f64.
class SHERD_API Adam : public Optimizer {
 public:
  Adam(std::vector<ParamGroup> groups, AdamOptions options = {}) : Adam(std::move(groups), options, false) {}
  Adam(std::vector<Parameter> params, AdamOptions options = {})
      : Adam(std::vector<ParamGroup>{{std::move(params)}}, options) {}

 protected:
  Adam(std::vector<ParamGroup> groups, AdamOptions options, bool decoupled);
  std::vector<std::string> state_names() const override;
  bool skips_on_device() const override { return true; }
  bool clips_on_device() const override { return true; }
  DType state_dtype(DType dtype) const override;
  Slots fresh(const Tensor& p) const override;
  void step_group(const Group& group, std::span<const Parameter> params,
                  std::span<Slots* const> slots) override;

 private:
  bool foreach_;
  Masters masters_;
  bool decoupled_;
};

/// For `AdamW`, with another default of weight_decay.
struct AdamWOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  bool foreach = true;
  Masters masters = Masters::none;
  bool amsgrad = false, maximize = false;  ///< as in AdamOptions
};

/// AdamW (Loshchilov and Hutter, 2019): Adam, but weight decay multiplies the parameter by 1 - lr
/// weight_decay before the step and leaves the gradient alone.
class SHERD_API AdamW final : public Adam {
 public:
  AdamW(std::vector<ParamGroup> groups, AdamWOptions o = {})
      : Adam(std::move(groups),
             {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.foreach, o.masters, o.amsgrad, o.maximize},
             true) {}
  AdamW(std::vector<Parameter> params, AdamWOptions o = {})
      : AdamW(std::vector<ParamGroup>{{std::move(params)}}, o) {}
};

/// For `Sgd`. ValueError for a momentum that is negative or not finite.
struct SgdOptions {
  double lr = 1e-3, momentum = 0, weight_decay = 0;
  bool foreach = true;   ///< as in AdamOptions
  double dampening = 0;  ///< what gradients lose on their way into the momentum
  bool nesterov = false;
  bool maximize = false;  ///< as in AdamOptions
};

/// p -= lr v with v = momentum v + (1 - dampening) g, where g is the gradient plus weight_decay p, and v
/// starts as g; without momentum v is g. Nesterov's form moves by g + momentum v. Options of groups: "lr",
/// "momentum", "weight_decay", "dampening", "nesterov", "maximize".
class SHERD_API Sgd final : public Optimizer {
 public:
  Sgd(std::vector<ParamGroup> groups, SgdOptions options = {});
  Sgd(std::vector<Parameter> params, SgdOptions options = {})
      : Sgd(std::vector<ParamGroup>{{std::move(params)}}, options) {}

 protected:
  std::vector<std::string> state_names() const override;
  bool skips_on_device() const override { return true; }
  bool clips_on_device() const override { return true; }
  void step_group(const Group& group, std::span<const Parameter> params,
                  std::span<Slots* const> slots) override;

 private:
  bool foreach_;
};

/// For `Rmsprop`.
struct RmspropOptions {
  double lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false;
  bool foreach = true;    ///< as in AdamOptions
  bool maximize = false;  ///< as in AdamOptions
};

/// RMSprop (Tieleman and Hinton, 2012; centred: Graves, 2013): s = alpha s + (1 - alpha) g^2, and p moves by
/// -lr g / (sqrt(s) + eps), where g is the gradient plus weight_decay p. With `centered` the squared average
/// of gradients is taken off s before the root; with momentum p moves by -lr v, v = momentum v + g / (sqrt(s)
/// + eps). Options of groups: "lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize".
class SHERD_API Rmsprop final : public Optimizer {
 public:
  Rmsprop(std::vector<ParamGroup> groups, RmspropOptions options = {});
  Rmsprop(std::vector<Parameter> params, RmspropOptions options = {})
      : Rmsprop(std::vector<ParamGroup>{{std::move(params)}}, options) {}

 protected:
  std::vector<std::string> state_names() const override;
  bool skips_on_device() const override { return true; }
  bool clips_on_device() const override { return true; }
  void step_group(const Group& group, std::span<const Parameter> params,
                  std::span<Slots* const> slots) override;

 private:
  bool foreach_;
};

/// For `Lion`.
struct LionOptions {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
  bool foreach = true;    ///< as in AdamOptions
  bool maximize = false;  ///< as in AdamOptions
};

/// Lion (Chen et al., 2023): p is times 1 - lr weight_decay and moves by -lr sign(beta1 m + (1 - beta1) g),
/// then m = beta2 m + (1 - beta2) g. Its rates are a tenth to a third of AdamW's, its decay as much more.
/// Options of groups: "lr", "beta1", "beta2", "weight_decay", "maximize".
class SHERD_API Lion final : public Optimizer {
 public:
  Lion(std::vector<ParamGroup> groups, LionOptions options = {});
  Lion(std::vector<Parameter> params, LionOptions options = {})
      : Lion(std::vector<ParamGroup>{{std::move(params)}}, options) {}

 protected:
  std::vector<std::string> state_names() const override;
  bool skips_on_device() const override { return true; }
  bool clips_on_device() const override { return true; }
  void step_group(const Group& group, std::span<const Parameter> params,
                  std::span<Slots* const> slots) override;

 private:
  bool foreach_;
};

/// For `Adagrad`. ValueError for an initial_accumulator_value that is negative or not finite.
struct AdagradOptions {
  double lr = 1e-2, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10;
  bool foreach = true;    ///< as in AdamOptions
  bool maximize = false;  ///< as in AdamOptions
};

/// Adagrad (Duchi, Hazan and Singer, 2011): s = s + g^2, and p moves by -lr / (1 + (t - 1) lr_decay) g /
/// (sqrt(s) + eps) in its step t, where g is the gradient plus weight_decay p; s starts as the initial value.
/// Options of groups: "lr", "lr_decay", "weight_decay", "eps", "maximize".
class SHERD_API Adagrad final : public Optimizer {
 public:
  Adagrad(std::vector<ParamGroup> groups, AdagradOptions options = {});
  Adagrad(std::vector<Parameter> params, AdagradOptions options = {})
      : Adagrad(std::vector<ParamGroup>{{std::move(params)}}, options) {}

 protected:
  std::vector<std::string> state_names() const override;
  bool skips_on_device() const override { return true; }
  bool clips_on_device() const override { return true; }
  Slots fresh(const Tensor& p) const override;
  void step_group(const Group& group, std::span<const Parameter> params,
                  std::span<Slots* const> slots) override;

 private:
  bool foreach_;
  double initial_;
};

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)) and returns their norm of order `norm_type`, of
/// all elements as one vector, before that (0-d f64): the Euclidean and the largest magnitude (an order of
/// INFINITY) are the same to the bit for every order and cut of the parameters; 0 without gradients. A NaN
/// among the gradients makes all of them NaN; a `max_norm` of 0 makes finite ones 0. ValueError for a
/// negative or NaN `max_norm` and an order that is not above 0; StateError for sharded parameters, whose norm
/// needs all ranks: `shard::clip_grad_norm_`.
SHERD_API Tensor clip_grad_norm_(std::span<const Parameter> params, double max_norm, double norm_type = 2);
/// Its two halves. The norm alone; StateError for sharded parameters, which `shard::grad_norm` takes.
SHERD_API Tensor grad_norm(std::span<const Parameter> params, double norm_type = 2);
/// The scaling alone, by a norm of one element; of sharded parameters this rank's parts. ShapeError for
/// another.
SHERD_API void clip_grads_with_norm_(std::span<const Parameter> params, double max_norm, const Tensor& norm);

/// Clips the elements of all gradients to [-limit, limit]; of sharded parameters in this rank's parts.
/// ValueError for a negative or NaN `limit`.
SHERD_API void clip_grad_value_(std::span<const Parameter> params, double limit);

}  // namespace sherd::nn
