// The ops that a stretch of a program applied, in order, on numbered storages: recomputation runs them again,
// and a captured program consists of them.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/context.h"
#include "runtime/float32_precision.h"
#include "runtime/op.h"

namespace sherd {

/// A tensor of a trace: a layout over one of the trace's storages.
struct TracedTensor {
  static constexpr std::uint32_t none = ~std::uint32_t{0};
  std::uint32_t storage = none;  ///< index in `Trace::storages`; none for an input that was not given
  DType dtype = DType::f32;
  Layout layout;
};

/// A storage that an op of the trace read, wrote or made.
struct TracedStorage {
  std::uint64_t id = 0;
  Device device;
  std::size_t bytes = 0;
  Ref<Storage> outside;       ///< held if it was made before the trace; null if an op of the trace made it
  std::uint32_t version = 0;  ///< when the trace first met it, or after the last traced write
  /// Index of the op that made it, or first met it without values; none if outside.
  std::uint32_t maker = TracedTensor::none;
  bool rewritten = false;  ///< an op of the trace wrote it in place
};

struct TracedOp {
  Ref<const AnyOp> op;
  std::vector<TracedTensor> in, out;
  bool once = false;                                                   ///< it must not run again
  Float32MatmulPrecision precision = Float32MatmulPrecision::highest;  ///< that it ran with
  bool recorded = false;                                               ///< gradients were, while it ran
  std::uint64_t place = 0;  ///< in the order of recording: its node's, or that of the next one
};

struct Trace {
  std::vector<TracedStorage> storages;
  std::vector<TracedOp> ops;
};

/// Records every op of the rank while it is among the listeners. Storages that the ops make are known by id
/// alone, so that tracing keeps no memory alive and changes no use count. Throws StateError when an input was
/// written through a host pointer since the trace met it, because running the ops again would not repeat that
/// write.
class Tracer : public Listener {
 public:
  /// `call`, the user's call ("recompute", "capture"), opens the messages.
  explicit Tracer(std::string call);
  ~Tracer() override;
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;
  /// StateError, which opens with `call`, while a tracer exists on this rank. For calls that run ops past the
  /// listeners (`replay`), which no tracer could record.
  static void check_inactive(std::string_view call);
  /// Whether a tracer exists on this rank.
  static bool active();
  /// `tensor` is about to show other memory (`set_`): the tracers of this rank may refuse.
  static void announce_set(const Tensor& tensor);
  void before_write(const AnyOp& op, Inputs in) override;
  void after(const AnyOp& op, Inputs in, Outputs out) override;

 protected:
  /// Index of a storage in the trace; `TracedTensor::none` if it is not there.
  std::uint32_t find(const Storage& storage) const;
  /// The storage that a tensor's bytes count as.
  virtual Ref<Storage> memory_of(const Tensor& tensor) { return tensor.storage_ref(); }
  /// Whether memory that the trace has not met, and no op of it made, has no values.
  virtual bool blank(const Storage&) const { return false; }
  /// Appends a storage and returns its index.
  std::uint32_t add(const Storage& storage);
  /// Called before `op` writes `tensor`, which no op of the trace made; may throw to refuse.
  virtual void before_outside_write(const AnyOp& op, const Tensor& tensor);
  /// `call` is about to run ops that this tracer does not hear; may throw to refuse.
  virtual void unheard(std::string_view call);
  /// `tensor` is about to show other memory, which running the ops again would not repeat: StateError.
  virtual void before_set(const Tensor& tensor);

  std::string call_;
  Trace trace_;

 private:
  void check_version(const AnyOp& op, const Tensor& tensor);
  TracedTensor describe(const Tensor& tensor);

  std::unordered_map<std::uint64_t, std::uint32_t> index_;  // by storage id
};

}  // namespace sherd
