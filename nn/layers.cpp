#include "nn/layers.h"

#include <cmath>

#include "runtime/context.h"

namespace sherd::nn {

void detail::check_member(const Module& list, std::size_t i, std::size_t size) {
  check<ValueError>(i < size, "{}: there is no layer {}; it has {}", list.type_name(), i, size);
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
    : options{o.stride, o.padding, o.dilation, o.groups} {
  check_conv("Conv2d", in, out, kernel, o.groups);
  init_conv(*this, {out, in / o.groups, kernel.down, kernel.across}, out, o);
}

Conv1d::Conv1d(std::int64_t in, std::int64_t out, std::int64_t kernel, const Conv1dLayerOptions& o)
    : options{o.stride, o.padding, o.dilation, o.groups} {
  check_conv("Conv1d", in, out, {1, kernel}, o.groups);
  init_conv(*this, {out, in / o.groups, kernel}, out, o);
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
  if (!padding) return;
  check<ValueError>(*padding >= 0 && *padding < count, "Embedding: padding {} is outside [0, {})", *padding,
                    count);
  const NoGrad guard;
  fill_(select(weight.data(), 0, *padding), 0);
}

Tensor Embedding::forward(const Tensor& index) const {
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

RmsNorm::RmsNorm(std::int64_t width, double eps, TensorOptions options)
    : weight(ones({width}, options)), eps(eps) {}

bool is_batch_norm(const Module& module) {
  return module.type_name().starts_with("BatchNorm") || module.type_name() == "SyncBatchNorm";
}

Dropout::Dropout(double p) : p(p) {
  check<ValueError>(p >= 0 && p <= 1, "Dropout: probability {} is outside [0, 1]", p);
}

Sequential::Sequential(const Sequential& other) : Layer<Sequential>(other) {
  for (const auto& module : other.modules_) modules_.push_back(module->clone_module());
}

}  // namespace sherd::nn
