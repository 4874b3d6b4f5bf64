// What `capture` hears while the step runs, and what it refuses.
#pragma once

#include <unordered_set>
#include <vector>

#include "autograd/trace.h"

namespace sherd {

class CaptureTracer final : public Tracer {
 public:
  /// ValueError for an empty handle, StateError for inputs that share memory.
  explicit CaptureTracer(const std::vector<Tensor>& inputs);

  void after(const AnyOp& op, Inputs in, Outputs out) override;
  void made(const Tensor& tensor) override { born_.insert(tensor.storage().id()); }
  void host_read(const Tensor& tensor) override;
  void storage_gone(std::uint64_t id) noexcept override;

  // ---- after the step: StateError for what a replay could not repeat ----
  /// A tensor made by the step that is still alive and not among `outputs`.
  void check_alive(const std::vector<Tensor>& outputs) const;
  /// A tensor that the step writes and that a replay would find as the last one left it: one that the step
  /// made by no op, or that nothing outside holds any longer.
  void check_held(const std::vector<Tensor>& outputs) const;
  /// Memory that the host wrote.
  void check_untouched(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) const;
  /// Random numbers that no op drew.
  void check_drawn();

  const std::vector<std::uint32_t>& inputs() const { return inputs_; }  ///< storages
  std::uint32_t index_of(const Storage& storage) const { return find(storage); }
  /// Where the step's random numbers begin and end.
  RandomKey random_begin() const { return begin_; }
  RandomKey random_end() const { return seen_; }
  Trace take() { return std::move(trace_); }

 private:
  void look_at_generator();

  std::vector<std::uint32_t> inputs_;
  RandomKey begin_, seen_;
  std::vector<RandomKey> unclaimed_;         // where draws began whose op was not heard yet
  std::unordered_set<std::uint64_t> alive_;  // ids that ops of the trace made
  std::unordered_set<std::uint64_t> born_;   // ids that no op made, but the step did
};

}  // namespace sherd
