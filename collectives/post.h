// The ops by which calls among ranks go through the door.
#pragma once

#include "collectives/group_end.h"
#include "runtime/op.h"

namespace sherd::ops {

/// Posts a call; complete ones also wait. Inputs: the call's inputs, then its outputs, which are written.
struct Post {
  static constexpr std::string_view name = "collective";
  static constexpr Arity arity = Arity::at_least(0);
  static constexpr Mask optional = all_of_them;  // its own check says what is empty, and of which call
  static constexpr bool differentiable = false;
  static constexpr bool crosses_devices = true;  // its own check says which call it was
  static constexpr bool orders_overlap = true;   // an input may be its own place in an output
  std::shared_ptr<GroupEnd> group;
  CollectiveKind kind;
  ReduceOp reduction;
  int peer, channel;
  std::string label;
  Completion completion;
  std::size_t inputs;  ///< how many of the op's inputs are the call's

  bool writes(std::size_t i) const { return i >= inputs; }
  Specs infer(SpecSpan) const { return {}; }
  void run(Inputs in, Outputs) const { enqueue(in); }
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

/// Waits for a call posted earlier. Inputs: its outputs, which hold their values from here on.
struct Wait {
  static constexpr std::string_view name = "wait";
  static constexpr Arity arity = Arity::at_least(0);
  static constexpr bool differentiable = false;
  static constexpr bool orders_overlap = true;  // the call has checked its outputs
  std::shared_ptr<GroupEnd> group;
  CollectiveKind kind;
  int peer, channel;
  std::uint64_t behind;  ///< calls posted in the same order since

  bool writes(std::size_t) const { return true; }
  Specs infer(SpecSpan) const { return {}; }
  void run(Inputs, Outputs) const { wait(); }
  void fields(auto&& on) const {
    on("kind", to_string(kind));
    on("group", group->name());
    on("peer", peer);
    on("channel", channel);
    on("behind", behind);
  }
  bool operator==(const Wait&) const = default;

 private:
  void wait() const;
};

}  // namespace sherd::ops
