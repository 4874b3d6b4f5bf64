#include "nn/layers.h"

#include <cmath>

#include "runtime/context.h"
#include "runtime/indexing.h"

namespace sherd::nn {

void detail::check_member(const Module& list, std::size_t i, std::size_t size) {
  check<ValueError>(i < size, "{}: there is no layer {}; it has {}", list.type_name(), i, size);
}

void detail::check_replaceable(Module& list, std::size_t i, std::size_t size) {
  check_member(list, i, size);
  struct Sharded final : MemberVisitor {
    bool found = false;
    void param(std::string_view, Param& member) override {
      found = found || (member.defined() && member.object().owner() != nullptr);
    }
  } sharded;
  list.visit_all_members(sharded);
  check<StateError>(!sharded.found,
                    "{}: layer {} is sharded, or its neighbours are; replace it before "
                    "fully_shard",
                    list.type_name(), i);
}

Linear::Linear(std::int64_t in, std::int64_t out, LinearOptions options) : products(options.products) {
  check<ValueError>(in > 0 && out > 0, "Linear: {} inputs and {} outputs", in, out);
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  weight = Parameter(rand({out, in}, options.tensor, -bound, bound));
  if (options.bias == Bias::yes) bias = Parameter(rand({out}, options.tensor, -bound, bound));
}

namespace {

void check_conv(std::string_view layer, std::int64_t in, std::int64_t out, PerAxis kernel,
                std::int64_t groups) {
  check<ValueError>(in > 0 && out > 0 && kernel.down > 0 && kernel.across > 0,
                    "{}: {} inputs, {} outputs and a kernel of {} x {}", layer, in, out, kernel.down,
                    kernel.across);
  check<ValueError>(groups > 0 && in % groups == 0 && out % groups == 0,
                    "{}: {} groups do not divide {} inputs and {} outputs", layer, groups, in, out);
}

/// What is not zeros is taken from the image, of which nothing is cut off.
void check_padding(std::string_view layer, Padding mode, PerAxis padding) {
  check<ValueError>(mode == Padding::constant || (padding.down >= 0 && padding.across >= 0),
                    "{}: padding {} x {} is below 0; take a slice of the input", layer, padding.down,
                    padding.across);
}

/// First values of a convolution. The fan-in is counted of all axes of the weight but the first, as PyTorch
/// does for transposed ones too.
void init_conv(auto& conv, const Shape& weight, std::int64_t out, const auto& o) {
  std::int64_t fan_in = 1;
  for (int i = 1; i < weight.rank(); ++i) fan_in *= weight[i];
  const double bound = 1 / std::sqrt(static_cast<double>(fan_in));
  conv.weight = Parameter(rand(weight, o.tensor, -bound, bound));
  if (o.bias == Bias::yes) conv.bias = Parameter(rand({out}, o.tensor, -bound, bound));
}

}  // namespace

Conv2d::Conv2d(std::int64_t in, std::int64_t out, PerAxis kernel, const Conv2dLayerOptions& o)
    : options{o.stride, o.padding, o.dilation, o.groups}, padding_mode(o.padding_mode) {
  check_conv("Conv2d", in, out, kernel, o.groups);
  check_padding("Conv2d", o.padding_mode, o.padding);
  init_conv(*this, {out, in / o.groups, kernel.down, kernel.across}, out, o);
}

Conv1d::Conv1d(std::int64_t in, std::int64_t out, std::int64_t kernel, const Conv1dLayerOptions& o)
    : options{o.stride, o.padding, o.dilation, o.groups}, padding_mode(o.padding_mode) {
  check_conv("Conv1d", in, out, {1, kernel}, o.groups);
  check_padding("Conv1d", o.padding_mode, {0, o.padding});
  init_conv(*this, {out, in / o.groups, kernel}, out, o);
}

Tensor Conv2d::forward(const Tensor& x) const {
  if (padding_mode == Padding::constant) return conv2d(x, weight, bias, options);
  const auto [down, across] = options.padding;
  Conv2dOptions unpadded = options;
  unpadded.padding = 0;
  return conv2d(pad(x, {across, across, down, down}, padding_mode), weight, bias, unpadded);
}

Tensor Conv1d::forward(const Tensor& x) const {
  if (padding_mode == Padding::constant) return conv1d(x, weight, bias, options);
  Conv1dOptions unpadded = options;
  unpadded.padding = 0;
  return conv1d(pad(x, {options.padding, options.padding}, padding_mode), weight, bias, unpadded);
}

ConvTranspose2d::ConvTranspose2d(std::int64_t in, std::int64_t out, PerAxis kernel,
                                 const ConvTranspose2dLayerOptions& o)
    : options{o.stride, o.padding, o.output_padding, o.dilation, o.groups} {
  check_conv("ConvTranspose2d", in, out, kernel, o.groups);
  init_conv(*this, {in, out / o.groups, kernel.down, kernel.across}, out, o);
}

ConvTranspose1d::ConvTranspose1d(std::int64_t in, std::int64_t out, std::int64_t kernel,
                                 const ConvTranspose1dLayerOptions& o)
    : options{o.stride, o.padding, o.output_padding, o.dilation, o.groups} {
  check_conv("ConvTranspose1d", in, out, {1, kernel}, o.groups);
  init_conv(*this, {in, out / o.groups, kernel}, out, o);
}

Embedding::Embedding(std::int64_t count, std::int64_t width, TensorOptions options)
    : weight(randn({count, width}, options)) {}

Embedding::Embedding(std::int64_t count, std::int64_t width, EmbeddingOptions options)
    : Embedding(count, width, options.tensor) {
  padding = options.padding;
  max_norm = options.max_norm;
  norm_type = options.norm_type;
  check<ValueError>(!max_norm || *max_norm > 0, "Embedding: max_norm {} must be above 0",
                    max_norm.value_or(0));
  check<ValueError>(norm_type > 0, "Embedding: norm_type {} must be above 0", norm_type);
  if (!padding) return;
  check<ValueError>(*padding >= 0 && *padding < count, "Embedding: padding {} is outside [0, {})", *padding,
                    count);
  const NoGrad guard;
  fill_(select(weight.data(), 0, *padding), 0);
}

namespace {

/// Scales the rows that `index` selects and whose norm is larger; each once, however often it is selected.
void renormalise(const Param& weight, const Tensor& index, double max_norm, double order) {
  check<StateError>(weight.object().owner() == nullptr,
                    "Embedding: max_norm scales rows of weight {} in place, and it is sharded, so that ranks "
                    "would scale other rows each; leave it out (ignored_parameters), or drop max_norm",
                    weight.shape());
  const NoGrad guard;
  const Tensor table = weight.local().detach(), positions = reshape(index, {-1});
  const Tensor rows = embedding(table, positions);
  const Tensor wide = to(rows, compute_dtype(rows.dtype()));
  const Tensor size = norm(wide, order, {1}, Keep::dims);
  const Tensor scaled = to(mul(wide, div(max_norm, add(size, 1e-7))), rows.dtype());
  index_put_(table, {positions}, where(greater(size, max_norm), scaled, rows));
}

}  // namespace

Tensor Embedding::forward(const Tensor& index) const {
  if (max_norm && index.numel() > 0) renormalise(weight, index, *max_norm, norm_type);
  const Tensor rows = embedding(weight, index);
  if (!padding) return rows;
  return where(unsqueeze(equal(index, *padding), -1), rows.detach(), rows);
}

GroupNorm::GroupNorm(std::int64_t groups, std::int64_t channels, double eps, TensorOptions options)
    : weight(ones({channels}, options)), bias(zeros({channels}, options)), groups(groups), eps(eps) {
  check<ValueError>(groups > 0 && channels % groups == 0, "GroupNorm: {} groups do not divide {} channels",
                    groups, channels);
}

LayerNorm::LayerNorm(std::int64_t width, double eps, TensorOptions options)
    : weight(ones({width}, options)), bias(zeros({width}, options)), eps(eps) {}

RmsNorm::RmsNorm(std::int64_t width, double eps, TensorOptions options, Gain gain)
    : weight(gain == Gain::weight ? ones({width}, options) : zeros({width}, options)), eps(eps), gain(gain) {}

Tensor RmsNorm::forward(const Tensor& x) const {
  if (gain == Gain::weight) return rms_norm(x, weight, eps);
  const DType wide = compute_dtype(x.dtype());
  return to(rms_norm(to(x, wide), add(to(weight, wide), 1), eps), x.dtype());
}

Tensor detail::loss_of_logits(const Tensor& logits, const ClassTargets& targets) {
  const LinearCrossEntropyOptions& o = targets.options;
  const Tensor loss = cross_entropy(reshape(logits, {-1, logits.size(-1)}), reshape(targets.classes, {-1}),
                                    {.reduction = o.reduction,
                                     .ignore_index = o.ignore_index,
                                     .precision = o.precision,
                                     .label_smoothing = o.label_smoothing});
  return o.reduction == Reduction::none ? reshape(loss, targets.classes.shape()) : loss;
}

Tensor Linear::forward(const Tensor& x, const ClassTargets& targets) const {
  sherd::detail::check_given("Linear", targets.classes);
  if (lora || products != Products::as_given) return detail::loss_of_logits(forward(x), targets);
  LinearCrossEntropyOptions options = targets.options;
  options.bias = bias;
  return linear_cross_entropy(x, weight, targets.classes, options);
}

Tensor detail::activated(const Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::relu:
      return relu(x);
    case Activation::gelu:
      return gelu(x);
    case Activation::none:
      break;
  }
  return x;
}

Tensor detail::tracked_batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                  const RunningStatistics& running, std::optional<double> momentum,
                                  BatchNormOptions options) {
  const auto& [mean, var, batches] = running;
  const bool training = options.training;
  options.momentum = momentum.value_or(training ? 1 : 0);
  options.training = training || !mean.defined();
  if (!mean.defined()) return batch_norm(x, {}, {}, weight, bias, options);
  if (!training || momentum) {
    const Tensor y = batch_norm(x, mean, var, weight, bias, options);
    if (training) add_(batches, 1);
    return y;
  }
  // The batch's own statistics, then what they move the means by: the count is not read on the host.
  const Tensor batch_mean = zeros_like(mean), batch_var = zeros_like(var);
  const Tensor y = batch_norm(x, batch_mean, batch_var, weight, bias, options);
  const NoGrad guard;
  add_(batches, 1);
  if (x.numel() == 0) return y;
  const auto follow = [&](const Tensor& all, const Tensor& batch) {
    const DType wide = compute_dtype(all.dtype());
    const Tensor old = to(all, wide);
    copy_(all, add(old, div(sub(to(batch, wide), old), to(batches, wide))));
  };
  follow(mean, batch_mean);
  follow(var, batch_var);
  return y;
}

bool is_batch_norm(const Module& module) {
  return module.type_name().starts_with("BatchNorm") || module.type_name() == "SyncBatchNorm";
}

Dropout::Dropout(double p) : p(p) {
  check<ValueError>(p >= 0 && p <= 1, "Dropout: probability {} is outside [0, 1]", p);
}

Sequential::Sequential(const Sequential& other) : Layer<Sequential>(other) {
  for (const auto& module : other.modules_) modules_.push_back(module->clone_module());
}

template class Layer<Gelu>;
template class Layer<Relu>;
template class Layer<LeakyRelu>;
template class Layer<Elu>;
template class Layer<Selu>;
template class Layer<Softplus>;
template class Layer<Silu>;
template class Layer<Sigmoid>;
template class Layer<Tanh>;
template class Layer<Softmax>;
template class Layer<Identity>;
template class Layer<Flatten>;
template class Layer<Function>;

template class Layer<Linear>;
template class Layer<Conv2d>;
template class Layer<Conv1d>;
template class Layer<ConvTranspose2d>;
template class Layer<ConvTranspose1d>;
template class Layer<MaxPool2d>;
template class Layer<AvgPool2d>;
template class Layer<MaxPool1d>;
template class Layer<AvgPool1d>;
template class Layer<AdaptiveAvgPool2d>;
template class Layer<AdaptiveMaxPool2d>;
template class Layer<Upsample>;
template class Layer<Embedding>;
template class Layer<LayerNorm>;
template class Layer<GroupNorm>;
template class Layer<RmsNorm>;
template class Layer<BatchNorm1d>;
template class Layer<BatchNorm2d>;
template class Layer<Dropout>;
template class Layer<Sequential>;

}  // namespace sherd::nn
