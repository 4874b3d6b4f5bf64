// Part of an axis, and its gradient: zeros around.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Elements start, start + step, ... (size of them) along `axis`; already checked and normalised.
struct Slice {
  static constexpr std::string_view name = "slice";
  static constexpr Reads reads{};
  int axis = 0;
  std::int64_t start = 0, step = 1, size = 0;

  Layout view(const Tensor& x) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("axis", axis);
    on("start", start);
    on("step", step);
    on("size", size);
  }
  bool operator==(const Slice&) const = default;
};

/// The input at a slice of a tensor of `full` elements along the axis, zeros elsewhere.
struct Unslice {
  static constexpr std::string_view name = "unslice";
  static constexpr Reads reads{};
  Slice slice;
  std::int64_t full = 0;

  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;  // zeros, and a copy into a part of them
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    slice.fields(on);
    on("full", full);
  }
  bool operator==(const Unslice&) const = default;
};

}  // namespace sherd::ops
