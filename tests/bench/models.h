// The models whose steps models_bench and torch_models.py time, in the sizes that people train.
#pragma once

#include "nn/layers.h"
#include "nn/recurrent.h"
#include "runtime/ops.h"

namespace sherd::bench {

/// A batch norm that ReLU follows.
inline const nn::BatchNormLayerOptions relued{.activation = Activation::relu};

// ---- ResNet-50 (He et al., 2016) ----

struct Bottleneck final : nn::Layer<Bottleneck> {
  nn::Conv2d conv1, conv2, conv3;
  nn::BatchNorm2d norm1, norm2, norm3;
  nn::ModuleList<nn::Conv2d> down;  // none where the input is added as it is
  nn::ModuleList<nn::BatchNorm2d> down_norm;

  Bottleneck(std::int64_t in, std::int64_t middle, std::int64_t stride)
      : conv1(in, middle, 1, {.bias = nn::Bias::no}),
        conv2(middle, middle, 3, {.stride = stride, .padding = 1, .bias = nn::Bias::no}),
        conv3(middle, 4 * middle, 1, {.bias = nn::Bias::no}),
        norm1(middle, relued),
        norm2(middle, relued),
        norm3(4 * middle, relued) {
    if (stride == 1 && in == 4 * middle) return;
    down.emplace_back(in, 4 * middle, 1, nn::Conv2dLayerOptions{.stride = stride, .bias = nn::Bias::no});
    down_norm.emplace_back(4 * middle);
  }
  Tensor forward(const Tensor& x) const {
    const Tensor y = conv3(norm2(conv2(norm1(conv1(x)))));
    return norm3(y, down.size() > 0 ? down_norm[0](down[0](x)) : x);
  }
  void visit(auto&& on) {
    on("conv1", conv1);
    on("norm1", norm1);
    on("conv2", conv2);
    on("norm2", norm2);
    on("conv3", conv3);
    on("norm3", norm3);
    on("down", down);
    on("down_norm", down_norm);
  }
};

struct ResNet50 final : nn::Layer<ResNet50> {
  nn::Conv2d conv{3, 64, 7, {.stride = 2, .padding = 3, .bias = nn::Bias::no}};
  nn::BatchNorm2d norm{64, relued};
  nn::ModuleList<Bottleneck> blocks;
  nn::Linear head{2048, 1000};

  ResNet50() {
    std::int64_t in = 64, middle = 64;
    for (const int count : {3, 4, 6, 3}) {
      for (int i = 0; i < count; ++i, in = 4 * middle)
        blocks.emplace_back(in, middle, i == 0 && middle > 64 ? 2 : 1);
      middle *= 2;
    }
  }
  Tensor forward(const Tensor& x) const {
    Tensor y = max_pool2d(norm(conv(x)), 3, {.stride = 2, .padding = 1});
    for (const Bottleneck& block : blocks) y = block(y);
    return head(flatten(adaptive_avg_pool2d(y, 1, 1), 1));
  }
  void visit(auto&& on) {
    on("conv", conv);
    on("norm", norm);
    on("blocks", blocks);
    on("head", head);
  }
};

// ---- U-Net (Ronneberger et al., 2015), padded and with batch norm ----

struct TwoConvs final : nn::Layer<TwoConvs> {
  nn::Conv2d conv1, conv2;
  nn::BatchNorm2d norm1, norm2;
  TwoConvs(std::int64_t in, std::int64_t out)
      : conv1(in, out, 3, {.padding = 1, .bias = nn::Bias::no}),
        conv2(out, out, 3, {.padding = 1, .bias = nn::Bias::no}),
        norm1(out, relued),
        norm2(out, relued) {}
  Tensor forward(const Tensor& x) const { return norm2(conv2(norm1(conv1(x)))); }
  void visit(auto&& on) {
    on("conv1", conv1);
    on("norm1", norm1);
    on("conv2", conv2);
    on("norm2", norm2);
  }
};

struct UNet final : nn::Layer<UNet> {
  nn::ModuleList<TwoConvs> down, up;
  nn::ModuleList<nn::ConvTranspose2d> widen;
  nn::Conv2d head{64, 2, 1};

  UNet() {
    std::int64_t in = 3;
    for (const std::int64_t out : {64, 128, 256, 512, 1024}) down.emplace_back(in, out), in = out;
    for (const std::int64_t out : {512, 256, 128, 64}) {
      widen.emplace_back(2 * out, out, 2, nn::ConvTranspose2dLayerOptions{.stride = 2});
      up.emplace_back(2 * out, out);
    }
  }
  Tensor forward(const Tensor& x) const {
    std::vector<Tensor> levels;
    Tensor y = x;
    for (const TwoConvs& convs : down) {
      y = convs(levels.empty() ? y : max_pool2d(y, 2));
      levels.push_back(y);
    }
    levels.pop_back();
    for (std::size_t i = 0; i < up.size(); ++i) {
      y = up[i](cat({levels.back(), widen[i](y)}, 1));
      levels.pop_back();
    }
    return head(y);
  }
  void visit(auto&& on) {
    on("down", down);
    on("widen", widen);
    on("up", up);
    on("head", head);
  }
};

// ---- ViT-B/16 (Dosovitskiy et al., 2021) ----

struct VitBlock final : nn::Layer<VitBlock> {
  static constexpr std::int64_t width = 768, heads = 12;
  nn::LayerNorm norm1{width}, norm2{width};
  nn::Linear qkv{width, 3 * width}, proj{width, width}, up{width, 4 * width}, down{4 * width, width};
  Tensor forward(const Tensor& x) const {
    const Tensor y = add(x, proj(self_attention(qkv(norm1(x)), heads)));
    return add(y, down(gelu(up(norm2(y)))));
  }
  void visit(auto&& on) {
    on("norm1", norm1);
    on("qkv", qkv);
    on("proj", proj);
    on("norm2", norm2);
    on("up", up);
    on("down", down);
  }
};

struct VitB final : nn::Layer<VitB> {
  static constexpr std::int64_t width = VitBlock::width;
  nn::Conv2d patches{3, width, 16, {.stride = 16}};
  nn::Param first{randn({1, 1, width}, {}, 0, 0.02)}, positions{randn({1, 197, width}, {}, 0, 0.02)};
  nn::ModuleList<VitBlock> blocks;
  nn::LayerNorm norm{width};
  nn::Linear head{width, 1000};

  VitB() {
    for (int i = 0; i < 12; ++i) blocks.emplace_back();
  }
  Tensor forward(const Tensor& x) const {
    const Tensor tokens = transpose(flatten(patches(x), 2), 1, 2);
    Tensor y = add(cat({expand(first, {x.size(0), 1, width}), tokens}, 1), positions);
    for (const VitBlock& block : blocks) y = block(y);
    return head(select(norm(y), 1, 0));
  }
  void visit(auto&& on) {
    on("patches", patches);
    on("first", first);
    on("positions", positions);
    on("blocks", blocks);
    on("norm", norm);
    on("head", head);
  }
};

// ---- a language model of two LSTM layers ----

struct LstmModel final : nn::Layer<LstmModel> {
  nn::Embedding table{10000, 1024};
  nn::Lstm lstm{1024, 1024, {.layers = 2}};
  nn::Linear head{1024, 10000};
  Tensor forward(const Tensor& tokens) const { return head(lstm(table(tokens)).y); }
  void visit(auto&& on) {
    on("table", table);
    on("lstm", lstm);
    on("head", head);
  }
};

}  // namespace sherd::bench
