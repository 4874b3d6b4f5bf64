// Rows of a table by index.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Inputs: table (rows, ...), index i64 of any shape. Output: index shape + the rest of the table's.
struct Embedding {
  static constexpr std::string_view name = "embedding";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b10};
  std::string_view call = "embedding";  ///< what messages name

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  bool operator==(const Embedding&) const = default;
};

/// Inputs: gradient (index shape + rest), index. Output: a table of `rows` rows, zero where not indexed;
/// repeated ones add up in order.
struct EmbeddingGrad {
  static constexpr std::string_view name = "embedding_grad";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b10};
  std::int64_t rows = 0;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { on("rows", rows); }
  bool operator==(const EmbeddingGrad&) const = default;
};

}  // namespace sherd::ops
