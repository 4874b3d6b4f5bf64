// The models that the scenarios share.
#pragma once

#include <map>
#include <memory>
#include <utility>

#include "nn/transformer.h"
#include "runtime/context.h"
#include "tests/scenarios/scenario.h"

namespace sherd::scenarios {

/// What modules saw as inputs of their forwards.
using ForwardInputs = std::map<const nn::Module*, Tensor>;

/// A linear layer that keeps its input, as it came, and may then cast it to what its weight is now.
struct SaveForwardInputsModule final : nn::Layer<SaveForwardInputsModule> {
  nn::Linear l{100, 100};
  std::shared_ptr<ForwardInputs> inputs;
  bool cast_forward_inputs;

  SaveForwardInputsModule(std::shared_ptr<ForwardInputs> inputs, bool cast_forward_inputs)
      : inputs(std::move(inputs)), cast_forward_inputs(cast_forward_inputs) {}
  Tensor forward(const Tensor& x) const {
    (*inputs)[this] = x;
    return l(cast_forward_inputs ? sherd::to(x, l.weight.tensor().dtype()) : x);
  }
  void visit(auto&& on) { on("l", l); }
};

struct SaveForwardInputsModel final : nn::Layer<SaveForwardInputsModel> {
  std::shared_ptr<ForwardInputs> inputs = std::make_shared<ForwardInputs>();
  SaveForwardInputsModule c1, c2;

  explicit SaveForwardInputsModel(bool cast_forward_inputs)
      : c1(inputs, cast_forward_inputs), c2(inputs, cast_forward_inputs) {}
  Tensor forward(const Tensor& x) const {
    (*inputs)[this] = x;
    return c2(c1(x));
  }
  void visit(auto&& on) {
    on("c1", c1);
    on("c2", c2);
  }
};

/// Two linear layers, each with a ReLU behind it.
struct Mlp final : nn::Layer<Mlp> {
  nn::Linear in_proj, out_proj;

  explicit Mlp(std::int64_t dim) : in_proj(dim, 4 * dim), out_proj(4 * dim, dim) {}
  Tensor forward(const Tensor& x) const { return relu(out_proj(relu(in_proj(x)))); }
  void visit(auto&& on) {
    on("in_proj", in_proj);
    on("out_proj", out_proj);
  }
};

/// A small Transformer with a buffer beside what it is made of, and its input.
struct Seq2Seq final : nn::Layer<Seq2Seq> {
  nn::TransformerEncoder encoder;
  nn::TransformerDecoder decoder;
  nn::Buffer dummy_buffer{Tensor::scalar(1)};

  explicit Seq2Seq(
      nn::Transformer whole = nn::Transformer(
          {.width = 32, .encoder_layers = 2, .decoder_layers = 2, .feedforward = 128, .dropout = 0.1}))
      : encoder(std::move(whole.encoder)), decoder(std::move(whole.decoder)) {}
  Tensor forward(const Tensor& src, const Tensor& tgt) const { return decoder(tgt, encoder(src)); }
  void visit(auto&& on) {
    on("encoder", encoder);
    on("decoder", decoder);
    on("dummy_buffer", dummy_buffer);
  }

  std::pair<Tensor, Tensor> get_input(Device device, DType dtype) const {
    manual_seed(1);
    const Tensor src = rand({20, 8, 32}), tgt = rand({10, 8, 32});
    return {sherd::to(sherd::to(src, device), dtype), sherd::to(sherd::to(tgt, device), dtype)};
  }
  /// Of its own input, as its parameters are.
  Tensor output() const {
    const Tensor like = parameters()[0].local();
    const auto [src, tgt] = get_input(like.device(), like.dtype());
    return (*this)(src, tgt);
  }
};

}  // namespace sherd::scenarios
