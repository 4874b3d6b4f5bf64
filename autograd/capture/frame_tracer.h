// What a frame hears while one of its programs is traced.
#pragma once

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "autograd/capture/frame.h"
#include "autograd/capture/tracer.h"

namespace sherd {

/// Unless it is strict, the first thing that cannot be captured ends the tracing, and the ops go on.
class Frame::Tracer final : public CaptureTracer {
 public:
  Tracer(const std::vector<Tensor>& inputs, bool strict)
      : CaptureTracer(inputs, Sharing::allowed), strict_(strict) {
    for (const Tensor& t : inputs) known_.insert(t.impl());
  }

  void before_write(const AnyOp& op, Inputs in) override {
    attempt([&] { CaptureTracer::before_write(op, in); });
  }
  void after(const AnyOp& op, Inputs in, Outputs out) override {
    attempt([&] {
      check<StateError>(op.call_among_ranks() == nullptr,
                        "compile: {} is a call among ranks, which a compiled function cannot have yet",
                        op.name());
      look(in);
      CaptureTracer::after(op, in, out);
      for (const Tensor& t : out) known_.insert(t.impl());
    });
  }
  void host_read(const Tensor& tensor) override {
    attempt([&] { CaptureTracer::host_read(tensor); });
  }
  void unheard(std::string_view call) override {
    attempt([&] { CaptureTracer::unheard(call); });
  }

  template <class F>
  void attempt(F&& f) {
    if (!reason.empty()) return;
    if (strict_) return f();
    try {
      f();
    } catch (const Error& error) {
      reason = error.what();
    }
  }

  std::string reason;                          ///< why this cannot be captured
  std::vector<std::pair<Tensor, bool>> found;  ///< outside, and whether they want gradients

 private:
  /// Notes tensors from outside. One that shares an input's memory without coming from it would be taken for
  /// that input.
  void look(Inputs in) {
    for (const Tensor& t : in) {
      if (!t.defined() || known_.contains(t.impl())) continue;
      const std::uint32_t storage = index_of(t.storage());
      const bool of_input = std::ranges::count(inputs(), storage) > 0;
      const AutogradRecord* record = record_of(t);
      const bool foreign = !t.impl()->alias || (record != nullptr && record->leaf);
      check<StateError>(
          !of_input || !foreign,
          "compile: a tensor of shape {} from outside shares memory with an input; pass a clone", t.shape());
      if (storage != TracedTensor::none && !trace().storages[storage].outside) continue;
      known_.insert(t.impl());
      found.emplace_back(t, wants_grad(t));
    }
  }

  bool strict_;
  std::unordered_set<const TensorImpl*> known_;
};

}  // namespace sherd
