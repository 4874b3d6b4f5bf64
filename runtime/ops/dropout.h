// Random zeros; the mask is made again in backward from the counter, never stored.
#pragma once

#include "runtime/generator.h"
#include "runtime/op.h"

namespace sherd::ops {

struct Dropout {
  static constexpr std::string_view name = "dropout";
  static constexpr Mask dense = 1;
  static constexpr Reads reads{};
  double p = 0.5;
  RandomKey key;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("p", p);
    on("seed", key.seed);
    on("offset", key.offset);
  }
  bool operator==(const Dropout&) const = default;
};

}  // namespace sherd::ops
