// A mark in the graph behind a root module's outputs: every backward that reaches them hears of it before it
// walks, also on a rank whose outputs depend on no parameter.
#pragma once

#include "autograd/sink.h"
#include "runtime/op.h"

namespace sherd::shard {

/// Its first input, unchanged; the second, empty one is the leaf whose sink hears.
struct Anchor {
  static constexpr std::string_view name = "anchor";
  static constexpr Arity arity = 2;
  static constexpr Reads reads{};
  sherd::Layout view(const Tensor& x) const { return x.layout(); }
  Tensors grad(const GradArgs& args) const;
  bool operator==(const Anchor&) const = default;
};

/// `x` as an output of an anchor whose leaf's sink is `sink`.
Tensor anchored(const Tensor& x, std::shared_ptr<GradSink> sink);

}  // namespace sherd::shard
