// What a frame hears while one of its programs is traced.
#pragma once

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "autograd/capture/frame.h"
#include "autograd/capture/tracer.h"
#include "autograd/tape.h"

namespace sherd {

/// Unless it is strict, the first thing that cannot be captured ends the tracing, and the ops go on.
class Frame::Tracer final : public CaptureTracer {
 public:
  /// `since`: the place in the order of recording where the call began.
  Tracer(const std::vector<Tensor>& inputs, bool strict, std::uint64_t since)
      : CaptureTracer("compile", inputs, Sharing::allowed), given_(inputs), strict_(strict), since_(since) {
    for (const Tensor& t : inputs) known_.insert(t.impl());
  }

  // What owners of memory do stays theirs (`repeat_in_frames`).
  void before_write(const AnyOp& op, Inputs in) override {
    if (!hears()) return;
    attempt([&] { CaptureTracer::before_write(op, in); });
  }
  void after(const AnyOp& op, Inputs in, Outputs out) override {
    if (!hears()) return;
    attempt([&] {
      check<StateError>(op.call_among_ranks() == nullptr,
                        "compile: {} is a call among ranks, which a compiled function cannot have yet",
                        op.name());
      look(in);
      CaptureTracer::after(op, in, out);
      for (const Tensor& t : out) known_.insert(t.impl());
    });
  }
  void made(const Tensor& tensor, Content content) override {
    if (hears()) CaptureTracer::made(tensor, content);
  }
  void host_read(const Tensor& tensor) override {
    if (!hears()) return;
    attempt([&] { CaptureTracer::host_read(tensor); });
  }
  /// What an input shows in the end, a replay gives it too; what the step made is its own.
  void before_set(const Tensor& tensor) override {
    if (deaf) return;
    attempt([&] {
      check<StateError>(
          known_.contains(tensor.impl()) && !is_outside(tensor),
          "compile: set_ gives a tensor of shape {} from outside other memory; pass it as an input",
          tensor.shape());
      const auto at = std::ranges::find_if(given_, [&](const Tensor& t) { return t.is(tensor); });
      if (at == given_.end() || std::ranges::any_of(set, [&](const Set& s) { return s.tensor.is(tensor); }))
        return;
      set.push_back({tensor, static_cast<std::uint32_t>(at - given_.begin()), Shown(*tensor.impl())});
    });
  }
  bool keeps_calls() const override { return false; }
  void repeat(Effect effect) override {
    if (deaf) return;
    if (!effect.name.empty()) marks.push_back(Context::current().slot<Tape>().take_sequence());
    CaptureTracer::repeat(std::move(effect));
  }
  void refuse(const std::string& why) override {
    if (!deaf && reason.empty()) reason = why;
  }
  std::uint64_t since() const override { return since_; }
  void unheard(std::string_view call) override {
    if (deaf) return;
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

  /// What a tensor shows.
  struct Shown {
    Ref<Storage> storage;
    Layout layout;
    bool view, alias;
    std::uint32_t view_version;

    explicit Shown(const TensorImpl& t)
        : storage(t.storage), layout(t.layout), view(t.view), alias(t.alias), view_version(t.view_version) {}
    void exchange(TensorImpl& t) noexcept {
      std::swap(storage, t.storage);
      std::swap(layout, t.layout);
      std::swap(view, t.view);
      std::swap(alias, t.alias);
      std::swap(view_version, t.view_version);
    }
  };
  struct Set {
    Tensor tensor;
    std::uint32_t input;
    Shown before;
  };
  /// While it lives, inputs that were set show what they were given, of which the program is; what they
  /// showed is held once, as the values of a program are.
  class AsGiven {
   public:
    explicit AsGiven(std::vector<Set>& set) : set_(set) {
      for (Set& s : set_) {
        TensorImpl& impl = *s.tensor.impl();
        shown.emplace_back(make_ref<TensorImpl>(impl.storage, impl.layout, impl.dtype)).impl()->alias = true;
      }
      for (Set& s : set_) {
        s.before.exchange(*s.tensor.impl());
        s.before.storage = {};
      }
    }
    ~AsGiven() {
      for (std::size_t k = 0; k < shown.size(); ++k) {
        set_[k].before.storage = shown[k].storage_ref();
        set_[k].before.exchange(*set_[k].tensor.impl());
      }
    }
    AsGiven(const AsGiven&) = delete;
    AsGiven& operator=(const AsGiven&) = delete;
    std::vector<Tensor> shown;

   private:
    std::vector<Set>& set_;
  };

  std::string reason;                ///< why this cannot be captured
  std::vector<std::uint64_t> marks;  ///< places of effects with names
  std::vector<TracedTensor> handed;  ///< of a backward: what left at marks
  bool deaf = false;                 ///< to what is not the program's
  std::vector<Found> found;          ///< outside
  std::vector<Set> set;              ///< inputs that show other memory, and what they showed

 private:
  bool hears() const { return !deaf && !Context::current().housekeeping(); }
  bool is_outside(const Tensor& t) const {
    return std::ranges::any_of(found, [&](const Found& of) { return of.tensor.is(t); });
  }
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
      found.push_back({t, wants_grad(t), t.storage().id(), t.layout()});
    }
  }

  const std::vector<Tensor>& given_;
  bool strict_;
  std::uint64_t since_;
  std::unordered_set<const TensorImpl*> known_;
};

}  // namespace sherd
