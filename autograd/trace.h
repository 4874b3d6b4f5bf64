// A straight line of ops on storages: what recomputation runs again and what a captured program is made of.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/context.h"
#include "runtime/op.h"

namespace sherd {

/// A tensor of a trace: a layout over one of the trace's storages.
struct TracedTensor {
  static constexpr std::uint32_t none = ~std::uint32_t{0};
  std::uint32_t storage = none;  ///< index in `Trace::storages`; none for an input that was not given
  DType dtype = DType::f32;
  Layout layout;
};

struct TracedStorage {
  std::uint64_t id = 0;
  Device device;
  std::size_t bytes = 0;
  Ref<Storage> outside;       ///< made before the trace, so held; null for what the trace's ops made
  std::uint32_t version = 0;  ///< after the last op that touched it
  std::uint32_t maker = TracedTensor::none;  ///< the op that made it
  bool rewritten = false;                    ///< written after it was made
};

struct TracedOp {
  Ref<const AnyOp> op;
  std::vector<TracedTensor> in, out;
};

struct Trace {
  std::vector<TracedStorage> storages;
  std::vector<TracedOp> ops;
};

/// Records every op of the rank while it listens. What the ops make is known by id alone, so that watching
/// changes no counts. A write that went past the ops is refused, since running the trace again would not
/// repeat it.
class Tracer : public Listener {
 public:
  /// `call` opens the messages.
  explicit Tracer(std::string call);
  ~Tracer() override;
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;
  /// Throws StateError, in the name of `call`, while the rank is being traced: for what runs ops that nobody
  /// hears.
  static void check_inactive(std::string_view call);
  void before_write(const AnyOp& op, Inputs in) override;
  void after(const AnyOp& op, Inputs in, Outputs out) override;

 protected:
  /// Index of a storage that the trace knows, or none.
  std::uint32_t find(const Storage& storage) const;
  std::uint32_t add(const Storage& storage);
  /// `op` is about to write `tensor`, which no op of the trace made.
  virtual void before_outside_write(const AnyOp& op, const Tensor& tensor);

  std::string call_;
  Trace trace_;

 private:
  void check_version(const AnyOp& op, const Tensor& tensor) const;
  TracedTensor describe(const Tensor& tensor);

  std::unordered_map<std::uint64_t, std::uint32_t> index_;  // by storage id
};

}  // namespace sherd
