// Layers: linear, convolution, pooling, embedding, normalisations, dropout, activations, and lists of layers.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "nn/activations.h"
#include "nn/low_rank.h"
#include "nn/module.h"
#include "runtime/losses.h"
#include "runtime/ops.h"

namespace sherd::nn {

namespace detail {
/// ValueError, in the name of `list`, unless `i` is below `size`.
SHERD_API void check_member(const Module& list, std::size_t i, std::size_t size);
/// The same, and StateError for a list that is sharded, or whose layers were sharded with a module above.
SHERD_API void check_replaceable(Module& list, std::size_t i, std::size_t size);
}  // namespace detail

/// Whether a layer adds a bias.
enum class Bias { yes, no };

/// Of which numbers a layer's products are taken: of those it is given, or of these rounded to 8 bits
/// (`linear_fp8`), which one number scales, or one a row.
enum class Products { as_given, fp8, fp8_rows };

/// For `Linear`; `tensor` is the dtype and device of its parameters, as in all options of layers.
struct LinearOptions {
  Bias bias = Bias::yes;
  TensorOptions tensor{};
  Products products = Products::as_given;
};
using sherd::Activation;

/// What a layer's results are to be told from as logits, for their cross entropy in the place of the results:
/// class numbers, and how, but for the bias, which is the layer's.
struct ClassTargets {
  Tensor classes;
  LinearCrossEntropyOptions options{};
};
/// Its tensors, for observers of modules.
template <class F>
void tensors_in(ClassTargets& targets, F&& visit) {
  for (Tensor* t : {&targets.classes, &targets.options.bias})
    if (t->defined()) visit(*t);
}
/// The rest, for compiled modules.
template <class F>
void values_in(const ClassTargets& targets, F&& visit) {
  const LinearCrossEntropyOptions& o = targets.options;
  visit(o.reduction);
  visit(o.ignore_index);
  visit(o.precision);
  visit(o.label_smoothing);
  visit(o.chunk);
}

namespace detail {

/// The cross entropy of logits (..., classes) that are all there.
SHERD_API Tensor loss_of_logits(const Tensor& logits, const ClassTargets& targets);
SHERD_API Tensor activated(const Tensor& x, Activation activation);

}  // namespace detail

/// y = x weight^T + bias for x (..., in), y (..., out). weight (out, in) and bias (out) start uniform in
/// +-1/sqrt(in), as in PyTorch. ValueError for sizes below 1. With an adapter (nn/lora.h) that is added to y.
struct SHERD_API Linear final : Layer<Linear> {
  Param weight, bias;
  Products products;
  std::optional<LoraAdapter> lora;
  Linear(std::int64_t in, std::int64_t out, LinearOptions options = {});
  Tensor forward(const Tensor& x) const {
    if (products == Products::as_given) return adapted(linear(x, weight, bias), x);
    return adapted(linear_fp8(x, weight, bias,
                              products == Products::fp8 ? EightScales::of_tensors : EightScales::of_rows),
                   x);
  }
  Tensor forward(const Tensor& x, Activation activation) const {
    const bool one_op = activation == Activation::gelu && products == Products::as_given && !lora;
    return one_op ? linear_gelu(x, weight, bias) : detail::activated(forward(x), activation);
  }
  /// The same plus `residual` (..., out), without an adapter in one kernel.
  Tensor forward(const Tensor& x, const Tensor& residual) const {
    if (products != Products::as_given) return add(residual, forward(x));
    return adapted(linear(x, weight, bias, residual), x);
  }
  /// The cross entropy of the results as logits, by `linear_cross_entropy`, which never holds all of them;
  /// with an adapter and in 8 bits they are held. x (..., in), a class for each of its vectors.
  Tensor forward(const Tensor& x, const ClassTargets& targets) const;
  void visit(auto&& on) {
    on("weight", weight);
    on("bias", bias);
    if (!lora) return;
    on("lora_A", lora->lora_A);
    on("lora_B", lora->lora_B);
  }

 private:
  Tensor adapted(Tensor y, const Tensor& x) const { return lora ? lora->added_to(y, x) : y; }
};

/// For `Conv2d` (`Conv2dLayerOptions`) and `Conv1d` (`Conv1dLayerOptions`); see `ConvOptions`.
template <class Axis>
struct ConvLayerOptions {
  Axis stride = 1, padding = 0;
  Bias bias = Bias::yes;
  TensorOptions tensor{};
  Axis dilation = 1;
  std::int64_t groups = 1;
  Padding padding_mode = Padding::constant;  ///< what the padding is: zeros, or as `pad` says
};
using Conv2dLayerOptions = ConvLayerOptions<PerAxis>;
using Conv1dLayerOptions = ConvLayerOptions<std::int64_t>;
/// Convolution of x (N, in, H, W) with `out` kernels: weight (out, in / groups, kernel) and bias (out) start
/// uniform in +-1/sqrt(in / groups times the kernel's pixels), as in PyTorch. ValueError for sizes below 1,
/// and for groups that divide not both sides.
struct SHERD_API Conv2d final : Layer<Conv2d> {
  Param weight, bias;
  Conv2dOptions options;
  Padding padding_mode;
  Conv2d(std::int64_t in, std::int64_t out, PerAxis kernel, const Conv2dLayerOptions& options = {});
  Tensor forward(const Tensor& x) const;
  void visit(auto&& on) {
    on("weight", weight);
    on("bias", bias);
  }
};

/// The same of x (N, in, L), with weight (out, in / groups, kernel).
struct SHERD_API Conv1d final : Layer<Conv1d> {
  Param weight, bias;
  Conv1dOptions options;
  Padding padding_mode;
  Conv1d(std::int64_t in, std::int64_t out, std::int64_t kernel, const Conv1dLayerOptions& options = {});
  Tensor forward(const Tensor& x) const;
  void visit(auto&& on) {
    on("weight", weight);
    on("bias", bias);
  }
};

/// For `ConvTranspose2d` (`ConvTranspose2dLayerOptions`) and `ConvTranspose1d`
/// (`ConvTranspose1dLayerOptions`); see `ConvTransposeOptions`.
template <class Axis>
struct ConvTransposeLayerOptions {
  Axis stride = 1, padding = 0, output_padding = 0;
  Bias bias = Bias::yes;
  TensorOptions tensor{};
  Axis dilation = 1;
  std::int64_t groups = 1;
};
using ConvTranspose2dLayerOptions = ConvTransposeLayerOptions<PerAxis>;
using ConvTranspose1dLayerOptions = ConvTransposeLayerOptions<std::int64_t>;
/// Transposed convolution of x (N, in, H, W): weight (in, out / groups, kernel) and bias (out) start uniform
/// in +-1/sqrt(out / groups times the kernel's pixels), as in PyTorch. ValueError for sizes below 1, and for
/// groups that divide not both sides.
struct SHERD_API ConvTranspose2d final : Layer<ConvTranspose2d> {
  Param weight, bias;
  ConvTranspose2dOptions options;
  ConvTranspose2d(std::int64_t in, std::int64_t out, PerAxis kernel,
                  const ConvTranspose2dLayerOptions& options = {});
  Tensor forward(const Tensor& x) const { return conv_transpose2d(x, weight, bias, options); }
  void visit(auto&& on) {
    on("weight", weight);
    on("bias", bias);
  }
};

/// The same of x (N, in, L), with weight (in, out / groups, kernel).
struct SHERD_API ConvTranspose1d final : Layer<ConvTranspose1d> {
  Param weight, bias;
  ConvTranspose1dOptions options;
  ConvTranspose1d(std::int64_t in, std::int64_t out, std::int64_t kernel,
                  const ConvTranspose1dLayerOptions& options = {});
  Tensor forward(const Tensor& x) const { return conv_transpose1d(x, weight, bias, options); }
  void visit(auto&& on) {
    on("weight", weight);
    on("bias", bias);
  }
};

/// Largest values, or means, of windows of an image (N, C, H, W).
struct SHERD_API MaxPool2d final : Layer<MaxPool2d> {
  PerAxis kernel;
  Pool2dOptions options;
  explicit MaxPool2d(PerAxis kernel, const Pool2dOptions& options = {}) : kernel(kernel), options(options) {}
  Tensor forward(const Tensor& x) const { return max_pool2d(x, kernel, options); }
  void visit(auto&&) {}
};
struct SHERD_API AvgPool2d final : Layer<AvgPool2d> {
  PerAxis kernel;
  AvgPool2dOptions options;
  explicit AvgPool2d(PerAxis kernel, const AvgPool2dOptions& options = {})
      : kernel(kernel), options(options) {}
  Tensor forward(const Tensor& x) const { return avg_pool2d(x, kernel, options); }
  void visit(auto&&) {}
};
/// The same of x (N, C, L).
struct SHERD_API MaxPool1d final : Layer<MaxPool1d> {
  std::int64_t kernel;
  Pool1dOptions options;
  explicit MaxPool1d(std::int64_t kernel, const Pool1dOptions& options = {})
      : kernel(kernel), options(options) {}
  Tensor forward(const Tensor& x) const { return max_pool1d(x, kernel, options); }
  void visit(auto&&) {}
};
struct SHERD_API AvgPool1d final : Layer<AvgPool1d> {
  std::int64_t kernel;
  AvgPool1dOptions options;
  explicit AvgPool1d(std::int64_t kernel, const AvgPool1dOptions& options = {})
      : kernel(kernel), options(options) {}
  Tensor forward(const Tensor& x) const { return avg_pool1d(x, kernel, options); }
  void visit(auto&&) {}
};
/// Means of down x across windows, whatever the image's size.
struct SHERD_API AdaptiveAvgPool2d final : Layer<AdaptiveAvgPool2d> {
  PerAxis size;
  explicit AdaptiveAvgPool2d(PerAxis size) : size(size) {}
  Tensor forward(const Tensor& x) const { return adaptive_avg_pool2d(x, size.down, size.across); }
  void visit(auto&&) {}
};

/// Their largest values.
struct SHERD_API AdaptiveMaxPool2d final : Layer<AdaptiveMaxPool2d> {
  PerAxis size;
  explicit AdaptiveMaxPool2d(PerAxis size) : size(size) {}
  Tensor forward(const Tensor& x) const { return adaptive_max_pool2d(x, size.down, size.across); }
  void visit(auto&&) {}
};

/// Images scaled to another size; see `interpolate`.
struct SHERD_API Upsample final : Layer<Upsample> {
  InterpolateOptions options;
  explicit Upsample(const InterpolateOptions& options) : options(options) {}
  Tensor forward(const Tensor& x) const { return interpolate(x, options); }
  void visit(auto&&) {}
};

/// For `Embedding`; the row `padding`, if given, starts at 0 and has no gradient.
struct EmbeddingOptions {
  std::optional<std::int64_t> padding{};
  TensorOptions tensor{};
  std::optional<double>
      max_norm{};        ///< rows that a forward selects are first scaled to it, in place, if larger
  double norm_type = 2;  ///< the order of these norms
};
/// Rows of weight (count, width), selected by an index (integers) of any shape (...), to (..., width). Starts
/// standard normal. ValueError for a padding outside [0, count) and a `max_norm` that is not above 0;
/// StateError from a forward with one of a sharded weight, of which each rank would scale other rows.
struct SHERD_API Embedding final : Layer<Embedding> {
  Param weight;
  std::optional<std::int64_t> padding;
  std::optional<double> max_norm;
  double norm_type = 2;
  Embedding(std::int64_t count, std::int64_t width, TensorOptions options = {});
  Embedding(std::int64_t count, std::int64_t width, EmbeddingOptions options);
  Tensor forward(const Tensor& index) const;
  void visit(auto&& on) { on("weight", weight); }
};

/// Layer normalisation of the last axis, of size width, with `eps` added to the variance; weight (width)
/// starts at 1, bias (width) at 0.
struct SHERD_API LayerNorm final : Layer<LayerNorm> {
  Param weight, bias;
  double eps;
  explicit LayerNorm(std::int64_t width, double eps = 1e-5, TensorOptions options = {});
  Tensor forward(const Tensor& x) const { return layer_norm(x, weight, bias, eps); }
  void visit(auto&& on) {
    on("weight", weight);
    on("bias", bias);
  }
};

/// Normalisation of each of `groups` groups of the channels of x (N, channels, ...), with `eps` added to the
/// variance; weight (channels) starts at 1, bias (channels) at 0. ValueError where groups do not divide
/// channels.
struct SHERD_API GroupNorm final : Layer<GroupNorm> {
  Param weight, bias;
  std::int64_t groups;
  double eps;
  GroupNorm(std::int64_t groups, std::int64_t channels, double eps = 1e-5, TensorOptions options = {});
  Tensor forward(const Tensor& x) const { return group_norm(x, groups, weight, bias, eps); }
  void visit(auto&& on) {
    on("weight", weight);
    on("bias", bias);
  }
};

/// What a normalisation multiplies by: its weight, which starts at 1, or one more than that, which starts at
/// 0 (Gemma); x of 16 bits is then rounded once, behind the product.
enum class Gain { weight, one_plus_weight };
/// Normalisation of the last axis, of size width, by the root of its mean square, to which `eps` is added;
/// weight (width).
struct SHERD_API RmsNorm final : Layer<RmsNorm> {
  Param weight;
  double eps;
  Gain gain;
  explicit RmsNorm(std::int64_t width, double eps = 1e-5, TensorOptions options = {},
                   Gain gain = Gain::weight);
  Tensor forward(const Tensor& x) const;
  void visit(auto&& on) { on("weight", weight); }
};

/// For the batch normalisations.
struct BatchNormLayerOptions {
  double eps = 1e-5;
  /// The share of the batch in the running statistics; without one they are the means of all batches so far.
  std::optional<double> momentum = 0.1;
  TensorOptions tensor{};
  /// Without running statistics, of which there are then no buffers, the batch's count in eval mode too.
  bool track_running_stats = true;
  Activation activation = Activation::none;  ///< ReLU is in the same op
};
namespace detail {

/// The running statistics of a batch normalisation, and of how many batches; all there or none.
struct RunningStatistics {
  const Tensor &mean, &var, &batches;
};
SHERD_API Tensor tracked_batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                    const RunningStatistics& running, std::optional<double> momentum,
                                    BatchNormOptions options);

}  // namespace detail

/// What the batch normalisations share. Each channel (axis 1) is normalised by the batch's statistics in
/// training, which also updates the running ones, and by the running ones in eval mode. running_mean starts
/// at 0, running_var at 1, weight at 1, bias at 0. In bf16 running statistics stop up to 4 % from what they
/// follow (PyTorch's: 7 %), so cast a model but for these, `model.to(DType::bf16, nn::is_batch_norm)`.
/// ShapeError for a number of axes that the class does not take.
template <class D>
struct BatchNorm : Layer<D> {
  Param weight, bias;
  Buffer running_mean, running_var, num_batches_tracked;
  double eps;
  std::optional<double> momentum;
  Activation activation;

  explicit BatchNorm(std::int64_t channels, BatchNormLayerOptions options = {})
      : weight(ones({channels}, options.tensor)),
        bias(zeros({channels}, options.tensor)),
        eps(options.eps),
        momentum(options.momentum),
        activation(options.activation) {
    if (!options.track_running_stats) return;
    running_mean = Buffer(zeros({channels}, options.tensor));
    running_var = Buffer(ones({channels}, options.tensor));
    num_batches_tracked = Buffer(zeros({}, {DType::i64, options.tensor.device}));
  }
  /// Plus `residual` (the shape of x) unless it is none, then the activation.
  Tensor forward(const Tensor& x, const Tensor& residual = {}) const {
    check<ValueError>(x.defined(), "{}: input 0 is an empty handle; assign it a tensor first",
                      this->type_name());
    check<ShapeError>(x.rank() >= D::min_rank && x.rank() <= D::max_rank, "{}: takes {}, got shape {}",
                      this->type_name(), D::takes, x.shape());
    return detail::tracked_batch_norm(
        x, weight, bias, {running_mean, running_var, num_batches_tracked}, momentum,
        {.training = this->training(), .eps = eps, .residual = residual, .activation = activation});
  }
  void visit(auto&& on) {
    on("weight", weight);
    on("bias", bias);
    if (!running_mean.tensor().defined()) return;
    on("running_mean", running_mean);
    on("running_var", running_var);
    on("num_batches_tracked", num_batches_tracked);
  }
};

/// For x (N, C) or (N, C, L).
struct SHERD_API BatchNorm1d final : BatchNorm<BatchNorm1d> {
  static constexpr int min_rank = 2, max_rank = 3;
  static constexpr std::string_view takes = "(N, C) or (N, C, L)";
  using BatchNorm::BatchNorm;
};

/// For x (N, C, H, W).
struct SHERD_API BatchNorm2d final : BatchNorm<BatchNorm2d> {
  static constexpr int min_rank = 4, max_rank = 4;
  static constexpr std::string_view takes = "(N, C, H, W)";
  using BatchNorm::BatchNorm;
};

/// Whether the module is one of these or a SyncBatchNorm, which computes in f32 beside 16-bit inputs.
SHERD_API bool is_batch_norm(const Module& module);

/// While training zeroes elements with probability p and scales the others by 1 / (1 - p); the identity in
/// eval mode. ValueError for p outside [0, 1].
struct SHERD_API Dropout final : Layer<Dropout> {
  double p;
  explicit Dropout(double p = 0.5);
  Tensor forward(const Tensor& x) const { return training() ? dropout(x, p) : x; }
  void visit(auto&&) {}
};

/// A layer that is passed by value or moved: write `std::move(layer)`, or `layer.clone()` to keep it. An
/// lvalue does not satisfy it, because `M` is a reference then.
template <class M>
concept MovedOrCloned = std::derived_from<M, Module> && !std::is_const_v<M>;

/// A function of one tensor that is no layer: a lambda.
template <class F>
concept TensorFunction = !std::derived_from<std::remove_cvref_t<F>, Module> &&
                         std::is_invocable_r_v<Tensor, std::remove_cvref_t<F>&, const Tensor&>;

/// Layers one after the other, named "0", "1", ...; among them functions of a tensor, as `Function`. Braces,
/// `Sequential{Linear(..), Linear(..)}`, make layers in this order, so that first values depend on the seed
/// alone; in parentheses the compiler chooses.
class SHERD_API Sequential final : public Layer<Sequential> {
 public:
  Sequential() = default;
  /// Moves the layers in, in order; an lvalue does not compile (see `MovedOrCloned`).
  template <class... M>
    requires((MovedOrCloned<M> || TensorFunction<M>) && ...) &&
            (sizeof...(M) > 0 &&
             !(sizeof...(M) == 1 && (std::same_as<std::remove_cvref_t<M>, Sequential> && ...)))
  explicit Sequential(M&&... modules) {
    (append(std::forward<M>(modules)), ...);
  }
  /// For `clone()` alone (StateError).
  Sequential(const Sequential& other);
  Sequential(Sequential&&) noexcept = default;
  Sequential& operator=(Sequential&&) noexcept = default;

  /// Moves the layer to the end; returns a reference to it there, which stays valid.
  template <MovedOrCloned M>
  M& append(M&& module) {
    check_alive();
    auto owned = std::make_unique<M>(std::move(module));
    M& ref = *owned;
    modules_.push_back(std::move(owned));
    return ref;
  }
  template <TensorFunction F>
  Function& append(F&& function) {
    return append(Function(std::forward<F>(function)));
  }
  /// Moves another layer into the place of layer `i`, which is destroyed; returns a reference to
  /// it there. Ties to the old layer's parameters are none to the new one's. ValueError beyond the last,
  /// StateError for a list that is sharded, alone or with a module above.
  template <MovedOrCloned M>
  M& replace(std::size_t i, M&& module) {
    detail::check_replaceable(*this, i, size());
    auto owned = std::make_unique<M>(std::move(module));
    M& there = *owned;
    modules_[i] = std::move(owned);
    return there;
  }
  std::size_t size() const {
    check_alive();
    return modules_.size();
  }
  /// ValueError beyond the last.
  Module& operator[](std::size_t i) {
    detail::check_member(*this, i, size());
    return *modules_[i];
  }

  Tensor forward(Tensor x) const {
    check_alive();
    for (const auto& module : modules_) x = module->call(x);
    return x;
  }
  void visit(auto&& on) {
    for (std::size_t i = 0; i < modules_.size(); ++i) on(std::to_string(i), *modules_[i]);
  }

 private:
  std::vector<std::unique_ptr<Module>> modules_;
};

/// Layers of one class, or of several below one that cannot stand alone (`ModuleList<Module>`), whose
/// addresses do not change, named "0", "1", ...; has no `forward`.
template <class M>
class ModuleList final : public Layer<ModuleList<M>> {
 public:
  ModuleList() = default;
  /// For `clone()` alone (StateError).
  ModuleList(const ModuleList& other) : Layer<ModuleList>(other) {
    for (const auto& module : other.modules_)
      if constexpr (std::is_abstract_v<M>)
        modules_.emplace_back(&dynamic_cast<M&>(*module->clone_module().release()));
      else
        modules_.push_back(std::make_unique<M>(*module));
  }
  ModuleList(ModuleList&&) noexcept = default;
  ModuleList& operator=(ModuleList&&) noexcept = default;

  /// Makes a layer from `args`, or moves one in.
  template <class... A>
    requires(!(std::same_as<A, M&> || ...) && !(std::same_as<A, const M&> || ...))
  M& emplace_back(A&&... args) {
    this->check_alive();
    return *modules_.emplace_back(std::make_unique<M>(std::forward<A>(args)...));
  }
  /// Moves a layer to the end, of a class below M too; returns a reference to it there, which stays valid.
  template <MovedOrCloned L>
    requires std::derived_from<L, M>
  L& append(L&& layer) {
    this->check_alive();
    auto owned = std::make_unique<L>(std::move(layer));
    L& there = *owned;
    modules_.push_back(std::move(owned));
    return there;
  }
  /// Moves another layer, of a class below M too, into the place of layer `i`, which is destroyed; returns a
  /// reference to it there. Ties to the old layer's parameters are none to the new one's. ValueError beyond
  /// the last, StateError for a list that is sharded, alone or with a module above.
  template <MovedOrCloned L>
    requires std::derived_from<L, M>
  L& replace(std::size_t i, L&& layer) {
    detail::check_replaceable(*this, i, size());
    auto owned = std::make_unique<L>(std::move(layer));
    L& there = *owned;
    modules_[i] = std::move(owned);
    return there;
  }
  std::size_t size() const {
    this->check_alive();
    return modules_.size();
  }
  /// ValueError beyond the last.
  M& operator[](std::size_t i) {
    detail::check_member(*this, i, size());
    return *modules_[i];
  }
  const M& operator[](std::size_t i) const {
    detail::check_member(*this, i, size());
    return *modules_[i];
  }

  template <bool constant>
  class Iterator {
   public:
    using Inner = typename std::vector<std::unique_ptr<M>>::const_iterator;
    using difference_type = std::ptrdiff_t;
    using value_type = M;
    explicit Iterator(Inner at) : at_(at) {}
    std::conditional_t<constant, const M&, M&> operator*() const { return **at_; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    friend bool operator==(const Iterator&, const Iterator&) = default;

   private:
    Inner at_;
  };
  auto begin() { return Iterator<false>(modules().begin()); }
  auto end() { return Iterator<false>(modules().end()); }
  auto begin() const { return Iterator<true>(modules().begin()); }
  auto end() const { return Iterator<true>(modules().end()); }

  void visit(auto&& on) {
    for (std::size_t i = 0; i < modules_.size(); ++i) on(std::to_string(i), *modules_[i]);
  }

 private:
  const std::vector<std::unique_ptr<M>>& modules() const {
    this->check_alive();
    return modules_;
  }
  std::vector<std::unique_ptr<M>> modules_;
};

// Compiled once, in the library.
extern template class Layer<Linear>;
extern template class Layer<Conv2d>;
extern template class Layer<Conv1d>;
extern template class Layer<ConvTranspose2d>;
extern template class Layer<ConvTranspose1d>;
extern template class Layer<MaxPool2d>;
extern template class Layer<AvgPool2d>;
extern template class Layer<MaxPool1d>;
extern template class Layer<AvgPool1d>;
extern template class Layer<AdaptiveAvgPool2d>;
extern template class Layer<AdaptiveMaxPool2d>;
extern template class Layer<Upsample>;
extern template class Layer<Embedding>;
extern template class Layer<LayerNorm>;
extern template class Layer<GroupNorm>;
extern template class Layer<RmsNorm>;
extern template class Layer<BatchNorm1d>;
extern template class Layer<BatchNorm2d>;
extern template class Layer<Dropout>;
extern template class Layer<Sequential>;

}  // namespace sherd::nn
