// The ops that differentiable.h applies; the gradient of each is another one of them.
#pragma once

#include <string>

#include "collectives/group.h"
#include "runtime/op.h"

namespace sherd::ops {

/// The fields of all of them: the ranks, and the label and channel of the call.
struct AmongRanks {
  static constexpr Reads reads{};
  Group group;
  std::string label;
  int channel = 0;

  CallOptions options() const { return {label, channel}; }
  void fields(auto&& on) const {
    on("group", group.name());
    on("label", label);
    on("channel", channel);
  }
  bool operator==(const AmongRanks&) const = default;
};

/// An all_gather along dimension 0.
struct AllGather : AmongRanks {
  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  bool operator==(const AllGather&) const = default;
};

struct GatherParams : AllGather {
  static constexpr std::string_view name = "gather_params";
  Tensors grad(const GradArgs& args) const;
  bool operator==(const GatherParams&) const = default;
};

struct GatherValues : AllGather {
  static constexpr std::string_view name = "gather_values";
  Tensors grad(const GradArgs& args) const;
  bool operator==(const GatherValues&) const = default;
};

struct ScatterSums : AmongRanks {
  static constexpr std::string_view name = "scatter_sums";
  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  Tensors grad(const GradArgs& args) const;
  bool operator==(const ScatterSums&) const = default;
};

/// A copy, because a view would keep the whole tensor's memory as long as the slice.
struct TakeSlice : AmongRanks {
  static constexpr std::string_view name = "take_slice";
  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  Tensors grad(const GradArgs& args) const;
  bool operator==(const TakeSlice&) const = default;
};

struct AllToAll : AmongRanks {
  static constexpr std::string_view name = "all_to_all";
  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  Tensors grad(const GradArgs& args) const;
  bool operator==(const AllToAll&) const = default;
};

struct SumPartials : AmongRanks {
  static constexpr std::string_view name = "sum_partials";
  Specs infer(SpecSpan in) const { return {in[0]}; }
  void run(Inputs in, Outputs out) const;
  Tensors grad(const GradArgs& args) const;
  bool operator==(const SumPartials&) const = default;
};

struct EnterParallel : AmongRanks {
  static constexpr std::string_view name = "enter_parallel";
  Layout view(const Tensor& x) const { return x.layout(); }
  Tensors grad(const GradArgs& args) const;
  bool operator==(const EnterParallel&) const = default;
};

}  // namespace sherd::ops
