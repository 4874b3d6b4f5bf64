// What the runtime asks of an op that is a call among ranks; it knows none itself.
#pragma once

#include <memory>
#include <span>

#include "runtime/export.h"

namespace sherd {

struct CapturedCall;
class LentCall;
class RecordedCalls;

/// An op's face as a call among ranks, or as what waits for one. Lives as long as the op.
class SHERD_API CallAmongRanks {
 public:
  virtual ~CallAmongRanks();
  /// When it has just run: what it was lent. Null if peers no longer read or write its inputs.
  virtual std::shared_ptr<LentCall> lent() const = 0;
  /// If it may return before peers have read its inputs: names what it waits in line for, behind earlier
  /// calls of the same line. Else null.
  virtual const void* line() const = 0;
  /// Asked of the first of all the calls of a captured step: what lets a device make them by itself; null
  /// where the hosts make all of them. Every rank of a group finds the same of its calls.
  virtual std::shared_ptr<RecordedCalls> recorded_calls(std::span<const CapturedCall> all) const = 0;
};

namespace detail {

/// That of an op value `O`, which says it with `among_ranks = true` and has those of the members above that
/// give something.
template <class O>
class CallAmongRanksOf final : public CallAmongRanks {
 public:
  explicit CallAmongRanksOf(const O& op) : op_(op) {}
  std::shared_ptr<LentCall> lent() const override {
    if constexpr (requires(const O& op) { op.lent(); })
      return op_.lent();
    else
      return nullptr;
  }
  const void* line() const override {
    if constexpr (requires(const O& op) { op.line(); })
      return op_.line();
    else
      return nullptr;
  }
  std::shared_ptr<RecordedCalls> recorded_calls(std::span<const CapturedCall> all) const override {
    if constexpr (requires(const O& op) { op.recorded_calls(all); })
      return op_.recorded_calls(all);
    else
      return nullptr;
  }

 private:
  const O& op_;
};

/// Of ops that are no calls.
template <class O>
struct NoCallAmongRanks {
  explicit NoCallAmongRanks(const O&) {}
};

}  // namespace detail
}  // namespace sherd
