#include "nn/layers.h"

#include <cmath>

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

Conv2d::Conv2d(std::int64_t in, std::int64_t out, std::int64_t kernel, Conv2dLayerOptions options)
    : stride(options.stride), padding(options.padding) {
  check<ValueError>(in > 0 && out > 0 && kernel > 0, "Conv2d: {} inputs, {} outputs and a kernel of {}", in,
                    out, kernel);
  const double bound = 1 / std::sqrt(static_cast<double>(in * kernel * kernel));
  weight = Parameter(rand({out, in, kernel, kernel}, options.tensor, -bound, bound));
  if (options.bias == Bias::yes) bias = Parameter(rand({out}, options.tensor, -bound, bound));
}

Embedding::Embedding(std::int64_t count, std::int64_t width, TensorOptions options)
    : weight(randn({count, width}, options)) {}

LayerNorm::LayerNorm(std::int64_t width, double eps, TensorOptions options)
    : weight(ones({width}, options)), bias(zeros({width}, options)), eps(eps) {}

RmsNorm::RmsNorm(std::int64_t width, double eps, TensorOptions options)
    : weight(ones({width}, options)), eps(eps) {}

Dropout::Dropout(double p) : p(p) {
  check<ValueError>(p >= 0 && p <= 1, "Dropout: probability {} is outside [0, 1]", p);
}

Sequential::Sequential(const Sequential& other) : Layer<Sequential>(other) {
  for (const auto& module : other.modules_) modules_.push_back(module->clone_module());
}

}  // namespace sherd::nn
