// Layers with PyTorch's parameters against PyTorch's values and gradients, and how fresh parameters are
// spread.
#include "nn/layers.h"

#include <cmath>
#include <set>

#include "nn/llama.h"
#include "nn/module.h"
#include "nn/multihead_attention.h"
#include "nn/recurrent.h"
#include "runtime/context.h"
#include "tests/catch.h"
#include "tests/golden/golden.h"

namespace sherd::test {
namespace {

using nlohmann::json;
using nn::Module;
using Build = std::unique_ptr<Module> (*)(const json& options);

std::unique_ptr<Module> build_linear(const json& o) {
  const nn::LinearOptions options{o.at("bias").get<bool>() ? nn::Bias::yes : nn::Bias::no, {}};
  return std::make_unique<nn::Linear>(o.at("in").get<int>(), o.at("out").get<int>(), options);
}
std::unique_ptr<Module> build_embedding(const json& o) {
  return std::make_unique<nn::Embedding>(o.at("count").get<int>(), o.at("width").get<int>());
}
std::unique_ptr<Module> build_layer_norm(const json& o) {
  return std::make_unique<nn::LayerNorm>(o.at("width").get<int>(), o.at("eps").get<double>());
}
std::unique_ptr<Module> build_gelu(const json&) { return std::make_unique<nn::Gelu>(); }
std::unique_ptr<Module> build_dropout(const json& o) {
  auto dropout = std::make_unique<nn::Dropout>(o.at("p").get<double>());
  dropout->train(o.at("train").get<bool>());
  return dropout;
}
std::unique_ptr<Module> build_sequential(const json& o) {
  const auto sizes = o.at("sizes").get<std::vector<int>>();
  return std::make_unique<nn::Sequential>(nn::Linear(sizes[0], sizes[1]), nn::Gelu(), nn::LayerNorm(sizes[1]),
                                          nn::Linear(sizes[1], sizes[2]));
}
std::unique_ptr<Module> build_conv2d(const json& o) {
  return std::make_unique<nn::Conv2d>(
      o.at("in").get<int>(), o.at("out").get<int>(), o.at("kernel").get<int>(),
      nn::Conv2dLayerOptions{o.at("stride").get<int>(), o.at("padding").get<int>()});
}
std::unique_ptr<Module> build_attention(const json& o) {
  return std::make_unique<nn::MultiheadAttention>(o.at("width").get<int>(), o.at("heads").get<int>());
}
template <class M>
std::unique_ptr<Module> build_batch_norm(const json& o) {
  const nn::BatchNormLayerOptions options{o.at("eps").get<double>(), o.at("momentum").get<double>(), {}};
  auto norm = std::make_unique<M>(o.at("channels").get<int>(), options);
  norm->train(o.at("train").get<bool>());
  return norm;
}

std::unique_ptr<Module> build_conv1d(const json& o) {
  return std::make_unique<nn::Conv1d>(o.at("in").get<int>(), o.at("out").get<int>(),
                                      o.at("kernel").get<int>(),
                                      nn::Conv1dLayerOptions{.stride = o.at("stride").get<int>(),
                                                             .padding = o.at("padding").get<int>(),
                                                             .dilation = o.at("dilation").get<int>(),
                                                             .groups = o.at("groups").get<int>()});
}
template <class C, class Options>
std::unique_ptr<Module> build_transposed(const json& o) {
  return std::make_unique<C>(o.at("in").get<int>(), o.at("out").get<int>(), o.at("kernel").get<int>(),
                             Options{.stride = o.at("stride").get<int>(),
                                     .padding = o.at("padding").get<int>(),
                                     .output_padding = o.at("output_padding").get<int>(),
                                     .dilation = o.at("dilation").get<int>(),
                                     .groups = o.at("groups").get<int>()});
}
std::unique_ptr<Module> build_up_net(const json&) {
  return std::make_unique<nn::Sequential>(
      nn::ConvTranspose2d(2, 3, {2, 3}, {.stride = {2, 1}, .padding = {0, 1}}),
      nn::MaxPool2d({1, 2}, {.stride = 1}),
      nn::Upsample({.scale = {1.5, 2}, .mode = Interpolation::bilinear}),
      nn::AvgPool2d({3, 2}, {.stride = 2, .padding = {1, 0}}), nn::Upsample({.size = {4, 9}}));
}
std::unique_ptr<Module> build_line_net(const json&) {
  return std::make_unique<nn::Sequential>(nn::ConvTranspose1d(2, 3, 4, {.stride = 2, .bias = nn::Bias::no}),
                                          nn::MaxPool1d(3, {.stride = 2, .padding = 1}), nn::AvgPool1d(2));
}
std::unique_ptr<Module> build_group_norm(const json& o) {
  return std::make_unique<nn::GroupNorm>(o.at("groups").get<int>(), o.at("channels").get<int>());
}
std::unique_ptr<Module> build_padded_embedding(const json& o) {
  return std::make_unique<nn::Embedding>(o.at("count").get<int>(), o.at("width").get<int>(),
                                         nn::EmbeddingOptions{.padding = o.at("padding").get<int>()});
}
std::unique_ptr<Module> build_conv_net(const json&) {
  return std::make_unique<nn::Sequential>(
      nn::Conv2d(1, 4, 3), nn::Silu(), nn::MaxPool2d(2), nn::Conv2d(4, 4, 2, {.groups = 2}), nn::Tanh(),
      nn::AdaptiveAvgPool2d(1), nn::Flatten(), nn::Linear(4, 3),
      [](const Tensor& x) { return leaky_relu(x, 0.1); }, nn::Sigmoid(), nn::Softmax());
}

/// A recurrent layer that gives its outputs alone.
template <class R>
struct Outputs final : nn::Layer<Outputs<R>> {
  R inner;
  Outputs(std::int64_t in, std::int64_t hidden, nn::RecurrentOptions options) : inner(in, hidden, options) {}
  Tensor forward(const Tensor& x) const { return inner(x).y; }
  void visit(auto&& on) { on("inner", inner); }
};
template <class R>
std::unique_ptr<Module> build_recurrent(const json& o) {
  return std::make_unique<Outputs<R>>(o.at("in").get<int>(), o.at("hidden").get<int>(),
                                      nn::RecurrentOptions{.layers = o.at("layers").get<int>(),
                                                           .batch_first = o.at("batch_first").get<bool>(),
                                                           .bidirectional = o.value("bidirectional", false)});
}
std::unique_ptr<Module> build_swiglu(const json& o) {
  return std::make_unique<nn::GatedMlp>(o.at("width").get<int>(), o.at("hidden").get<int>());
}
std::unique_ptr<Module> build_llama(const json& o) {
  const json& s = o.at("scaling");
  return std::make_unique<nn::Llama>(
      nn::LlamaOptions{.vocab_size = o.at("vocab"),
                       .hidden_size = o.at("width"),
                       .intermediate_size = o.at("hidden"),
                       .num_hidden_layers = o.at("layers"),
                       .num_attention_heads = o.at("heads"),
                       .num_key_value_heads = o.at("shared").get<int>(),
                       .rms_norm_eps = o.at("eps"),
                       .rope_theta = o.at("base"),
                       .rope_scaling = {s.at("factor"), s.at("low"), s.at("high"), s.at("original")}});
}

/// Layers of one tensor.
const std::map<std::string, Build> builders{
    {"nn.Linear", build_linear},
    {"nn.Embedding", build_embedding},
    {"nn.LayerNorm", build_layer_norm},
    {"nn.GELU", build_gelu},
    {"nn.Dropout", build_dropout},
    {"nn.Sequential", build_sequential},
    {"nn.Conv2d", build_conv2d},
    {"nn.Conv1d", build_conv1d},
    {"nn.ConvTranspose2d", build_transposed<nn::ConvTranspose2d, nn::ConvTranspose2dLayerOptions>},
    {"nn.ConvTranspose1d", build_transposed<nn::ConvTranspose1d, nn::ConvTranspose1dLayerOptions>},
    {"UpNet", build_up_net},
    {"LineNet", build_line_net},
    {"nn.GroupNorm", build_group_norm},
    {"nn.Embedding.padding", build_padded_embedding},
    {"ConvNet", build_conv_net},
    {"SwiGlu", build_swiglu},
    {"Llama", build_llama},
    {"nn.RNN", build_recurrent<nn::Rnn>},
    {"nn.LSTM", build_recurrent<nn::Lstm>},
    {"nn.GRU", build_recurrent<nn::Gru>},
    {"nn.BatchNorm1d", build_batch_norm<nn::BatchNorm1d>},
    {"nn.BatchNorm2d", build_batch_norm<nn::BatchNorm2d>}};

/// The layer of a case, in its dtype and with its parameters.
std::unique_ptr<Module> load_layer(const GoldenCase& golden, Device device) {
  const auto layer = builders.at(golden.op)(golden.args.at("options"));
  layer->to(golden.find("out0").dtype());
  nn::StateDict state;
  for (const json& name : golden.args.at("params"))
    state.emplace_back(name, golden.find("in" + std::to_string(state.size() + 1)));
  for (const auto& [name, buffer] : layer->named_buffers()) state.emplace_back(name, buffer);
  layer->load_state_dict(state);
  layer->to(device);
  return layer->clone_module();  // the copy must be as good as the layer
}

void check_layer(const GoldenCase& golden, Device device) {
  const auto layer = load_layer(golden, device);
  Tensor x = to(golden.find("in0"), device);
  if (golden.has("gin0")) x.requires_grad_();
  const Tensor y = layer->call(x);
  CHECK(difference(y.detach(), golden.find("out0"), golden.tolerance) == "");
  y.backward(to(golden.find("gy0"), device));
  const auto buffers = layer->named_buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    INFO(buffers[i].name);
    const Tensor expected = golden.find("out" + std::to_string(i + 1));
    CHECK(difference(buffers[i].tensor, expected, golden.tolerance) == "");
  }
  const Scale scale = size_of(y.dtype()) == 2 ? Scale::largest : Scale::element;
  if (golden.has("gin0")) CHECK(difference(x.grad(), golden.find("gin0"), golden.tolerance, scale) == "");
  const auto params = layer->named_parameters();
  REQUIRE(params.size() == golden.args.at("params").size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    INFO(params[i].name);
    CHECK(params[i].name == golden.args.at("params")[i].get<std::string>());
    const Tensor expected = golden.find("gin" + std::to_string(i + 1));
    CHECK(difference(params[i].parameter.grad(), expected, golden.tolerance, scale) == "");
  }
}

void check_layers(Device device) {
  std::set<std::string> layers;
  for (const char* area : {"nn", "layers", "networks", "images"})
    for (const GoldenCase& golden : load_goldens(area)) {
      if (!golden.args.contains("params") || golden.args.contains("roles")) continue;
      INFO(golden.name);
      REQUIRE(builders.contains(golden.op));
      check_layer(golden, device);
      layers.insert(golden.op);
    }
  CHECK(layers.size() == builders.size());
}

struct Moments {
  double mean = 0, deviation = 0, min = HUGE_VAL, max = -HUGE_VAL;
};

Moments moments_of(const Tensor& tensor) {
  Moments m;
  double squares = 0;
  const auto values = tensor.to_vector<float>();
  const auto count = static_cast<double>(values.size());
  for (const double value : values) {
    m.mean += value / count;
    squares += value * value / count;
    m.min = std::min(m.min, value);
    m.max = std::max(m.max, value);
  }
  m.deviation = std::sqrt(std::max(0.0, squares - m.mean * m.mean));
  return m;
}

/// Six standard errors apart at most; where the spread has an edge (all within two deviations), the edges are
/// as near.
void check_moments(const Tensor& tensor, const json& expected) {
  const Moments ours = moments_of(tensor);
  const double deviation = expected.at("std"), max = expected.at("max"), min = expected.at("min");
  const double allowed = 6 * deviation / std::sqrt(static_cast<double>(tensor.numel())) + 1e-6;
  CHECK(std::abs(ours.mean - expected.at("mean").get<double>()) <= 2 * allowed);
  CHECK(std::abs(ours.deviation - deviation) <= allowed);
  if (max < 2 * deviation || deviation == 0) {
    CHECK(std::abs(ours.max - max) <= allowed);
    CHECK(std::abs(ours.min - min) <= allowed);
  }
}

void check_initialisation(const json& args) {
  const std::string kind = args.at("layer");
  const auto layer =
      (kind == "nn.MultiheadAttention" ? build_attention : builders.at(kind))(args.at("options"));
  const json& moments = args.at("moments");
  const auto params = layer->named_parameters();
  REQUIRE(params.size() == moments.size());
  for (const auto& [name, parameter] : params) {
    INFO(name);
    REQUIRE(moments.contains(name));
    CHECK(parameter.shape() == Shape(moments.at(name).at("shape").get<std::vector<std::int64_t>>()));
    check_moments(parameter.data(), moments.at(name));
  }
}

}  // namespace

TEST_CASE("layers with PyTorch's parameters agree with PyTorch") { check_layers(Device::cpu()); }
TEST_CASE("cuda: layers with PyTorch's parameters agree with PyTorch") {
  if (skip_if(!has_gpu(), "no GPU here")) return;
  check_layers(Device::cuda(0));
}

TEST_CASE("fresh parameters are spread as PyTorch's") {
  manual_seed(5);
  for (const char* area : {"nn", "layers", "networks", "images"})
    for (const GoldenCase& golden : load_goldens(area)) {
      if (golden.op != "initialisation") continue;
      INFO(golden.name);
      check_initialisation(golden.args);
    }
}

}  // namespace sherd::test
