// The ops that `Group` and `Work` apply, so that listeners see every call among ranks as an op.
#pragma once

#include "collectives/group_end.h"
#include "runtime/lent_call.h"
#include "runtime/op.h"
#include "runtime/recorded_calls.h"

namespace sherd::ops {

/// Posts a call, and with `Completion::complete` waits for it. Inputs: the call's inputs, then its outputs,
/// which the op writes.
struct Post {
  static constexpr std::string_view name = "collective";
  static constexpr Arity arity = Arity::at_least(0);
  static constexpr Mask optional = all_of_them;  // `validate` refuses it, and names the call
  static constexpr bool differentiable = false;
  static constexpr bool crosses_devices = true;  // `validate` refuses it, and names the call
  static constexpr bool orders_overlap = true;   // `validate` allows in place and no other overlap
  static constexpr bool among_ranks = true;
  std::shared_ptr<GroupEnd> group;
  CollectiveKind kind;
  ReduceOp reduction;
  int peer, channel;
  std::string label;
  Completion completion;
  std::size_t inputs;  ///< how many of the op's inputs are inputs of the call

  bool writes(std::size_t i) const { return i >= inputs; }
  Specs infer(SpecSpan) const { return {}; }
  void run(Inputs in, Outputs) const { enqueue(in); }
  std::shared_ptr<LentCall> lent() const;
  const void* line() const;
  /// Where all are calls of this group on devices, whose tensors are small, and waited for in the step.
  std::shared_ptr<RecordedCalls> recorded_calls(std::span<const CapturedCall> all) const;
  /// The call with these tensors.
  Collective collective(Inputs in) const;
  void fields(auto&& on) const {
    on("kind", to_string(kind));
    on("group", group->name());
    on("reduction", to_string(reduction));
    on("peer", peer);
    on("channel", channel);
    on("label", label);
    on("completion", completion == Completion::complete ? "complete" : "posted");
  }
  bool operator==(const Post&) const = default;

 private:
  void enqueue(Inputs in) const;
};

/// What is waited for: that the call's outputs hold their values, or that peers have read its inputs.
enum class Until : std::uint8_t { outputs_are_there, inputs_are_free };

/// Waits for a call posted earlier. Inputs: the outputs of that call if they are waited for, which count as
/// written here.
struct Wait {
  static constexpr std::string_view name = "wait";
  static constexpr Arity arity = Arity::at_least(0);
  static constexpr bool differentiable = false;
  static constexpr bool orders_overlap = true;  // the call has checked its outputs
  static constexpr bool among_ranks = true;
  std::shared_ptr<GroupEnd> group;
  CollectiveKind kind;
  int peer, channel;
  Until until;
  std::uint64_t behind;  ///< calls posted on the same line after it; relative, so that a replay fits

  bool writes(std::size_t) const { return true; }
  Specs infer(SpecSpan) const { return {}; }
  void run(Inputs, Outputs) const { wait(); }
  std::shared_ptr<RecordedCalls> recorded_calls(std::span<const CapturedCall> all) const;
  void fields(auto&& on) const {
    on("kind", to_string(kind));
    on("group", group->name());
    on("peer", peer);
    on("channel", channel);
    on("until", until == Until::outputs_are_there ? "outputs are there" : "inputs are free");
    on("behind", behind);
  }
  bool operator==(const Wait&) const = default;

 private:
  void wait() const;
};

}  // namespace sherd::ops
