// Copies: to another dtype, to another device, dense, and into memory that is there.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Dense, in another dtype. Floats to integers truncate; anything nonzero is true.
struct Cast {
  static constexpr std::string_view name = "cast";
  static constexpr Reads reads{};
  DType dtype = DType::f32;

  Specs infer(SpecSpan in) const { return {{in[0].shape, dtype, in[0].device}}; }
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { on("dtype", name_of(dtype)); }
  bool operator==(const Cast&) const = default;
};

/// Dense, in the same dtype.
struct Clone {
  static constexpr std::string_view name = "clone";
  static constexpr Reads reads{};

  Specs infer(SpecSpan in) const { return {in[0]}; }
  Tensors grad(const GradArgs& args) const;
  bool operator==(const Clone&) const = default;
};

/// Dense, on another device.
struct Transfer {
  static constexpr std::string_view name = "transfer";
  static constexpr bool crosses_devices = true;
  static constexpr Reads reads{};
  Device device;

  Specs infer(SpecSpan in) const { return {{in[0].shape, in[0].dtype, device}}; }
  void run(Inputs in, Outputs out) const;  // the back ends that hold the two devices move bytes
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { on("device", to_string(device)); }
  bool operator==(const Transfer&) const = default;
};

/// Writes input 1 into input 0: broadcast, cast.
struct CopyInto {
  static constexpr std::string_view name = "copy_";
  static constexpr Arity arity = 2;
  static constexpr Mask mutates = 1;
  static constexpr Reads reads{};

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  bool operator==(const CopyInto&) const = default;
};

/// The same of many tensors, each of the shape of the one that it is written into, on one device. Inputs:
/// into, from, into, from, ...
struct CopyEach {
  static constexpr std::string_view name = "copy_each_";
  static constexpr Arity arity = Arity::at_least(2);
  static constexpr bool differentiable = false;
  static constexpr Reads reads{};

  bool writes(std::size_t i) const { return i % 2 == 0; }
  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  bool operator==(const CopyEach&) const = default;
};

}  // namespace sherd::ops

namespace sherd {

/// `copy_` of each from[i] into into[i], which have one shape, without history: one kernel for many on a GPU.
/// All of `into` are on one device.
SHERD_API void copy_each_(std::span<const Tensor> into, std::span<const Tensor> from);

}  // namespace sherd
