#include "autograd/capture/passes/common.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_map>

#include "autograd/capture/passes/rewrite.h"

namespace sherd {
namespace {

/// Which op wrote each storage last, plus one; 0 where none did.
class LastWrites {
 public:
  explicit LastWrites(const Trace& trace) : of_(trace.storages.size()) {}
  void add(const TracedOp& traced, std::uint32_t place) {
    for (std::size_t k = 0; k < traced.in.size(); ++k)
      if (traced.op->writes(k) && traced.in[k].storage != TracedTensor::none)
        of_[traced.in[k].storage] = place + 1;
  }
  bool after(const TracedTensor& t, std::uint32_t place) const {
    return t.storage != TracedTensor::none && of_[t.storage] > place;
  }

 private:
  std::vector<std::uint32_t> of_;
};

/// What writes is not asked: it writes its inputs after the first of its kind did, so they never are the
/// same.
bool may_be_shared(const AnyOp& op) { return op.call_among_ranks() == nullptr && op.random_key() == nullptr; }

/// Equal for equal ops on equal inputs; text tells apart numbers that are equal and not the same.
std::string key_of(const TracedOp& traced) {
  std::string key = traced.op->text() + std::to_string(static_cast<int>(traced.precision));
  for (const TracedTensor& t : traced.in)
    key += t.storage == TracedTensor::none ? " none"
                                           : fmt::format(" {}:{}+{}{}{}", t.storage, name_of(t.dtype),
                                                         t.layout.offset, t.layout.shape, t.layout.strides);
  return key;
}

class Eliminating {
 public:
  explicit Eliminating(Recorded program)
      : program_(std::move(program)),
        so_far_(program_.trace),
        ever_(program_.trace),
        stands_for_(program_.trace.storages.size()),
        returned_(stands_for_.size()),
        kept_(stands_for_.size()) {
    std::iota(stands_for_.begin(), stands_for_.end(), 0);
    for (std::uint32_t i = 0; i < ops().size(); ++i) ever_.add(ops()[i], i);
    for (const TracedTensor& t : program_.outputs) returned_[t.storage] = true;
    if (program_.cut)
      for (const auto& [storage, number] : program_.cut->made) kept_[storage] = true;
  }

  Recorded run() {
    std::vector<bool> stays(ops().size(), true);
    for (std::uint32_t i = 0; i < ops().size(); ++i) {
      each_tensor_of(ops()[i], [&](TracedTensor& t) { t.storage = stands_for_[t.storage]; });
      stays[i] = !merged(i);
      so_far_.add(ops()[i], i);
    }
    for (TracedTensor& t : program_.outputs) t.storage = stands_for_[t.storage];
    if (program_.cut)
      for (auto& [storage, number] : program_.cut->made) storage = stands_for_[storage];
    keep_ops(program_, stays);
    return std::move(program_);
  }

 private:
  std::vector<TracedOp>& ops() { return program_.trace.ops; }

  /// Whether an earlier op serves for op `i`.
  bool merged(std::uint32_t i) {
    const TracedOp& traced = ops()[i];
    if (!may_be_shared(*traced.op) || traced.out.empty() || asks_owner(traced, program_.trace)) return false;
    const auto [known, is_new] = known_.try_emplace(key_of(traced), i);
    if (is_new) return false;
    const std::uint32_t first = std::exchange(known->second, i);
    if (!serves(first, i)) return false;
    known->second = first;
    for (std::size_t k = 0; k < traced.out.size(); ++k) {
      const std::uint32_t from = traced.out[k].storage, to = ops()[first].out[k].storage;
      stands_for_[from] = to;
      returned_[to] = returned_[to] || returned_[from];
      kept_[to] = kept_[to] || kept_[from];
    }
    return true;
  }
  bool serves(std::uint32_t first, std::uint32_t second) {
    const TracedOp &a = ops()[first], &b = ops()[second];
    if (!a.op->equals(*b.op) || a.out.size() != b.out.size()) return false;
    if (std::ranges::any_of(b.in, [&](const TracedTensor& t) { return so_far_.after(t, first); }))
      return false;
    for (std::size_t k = 0; k < a.out.size(); ++k) {
      const TracedTensor &x = a.out[k], &y = b.out[k];
      if (!same_value(x, {x.storage, y.dtype, y.layout})) return false;
      if (ever_.after(x, first) || ever_.after(y, second)) return false;
      if (x.storage != y.storage && may_be_written(x.storage, y.storage)) return false;
    }
    return true;
  }
  /// Whether somebody outside, to whom one of them is, would find it written by who has the other.
  bool may_be_written(std::uint32_t a, std::uint32_t b) const {
    return (returned_[a] && (returned_[b] || kept_[b])) || (returned_[b] && kept_[a]);
  }

  Recorded program_;
  LastWrites so_far_, ever_;
  std::vector<std::uint32_t> stands_for_;  // by storage
  std::vector<bool> returned_, kept_;      // by storage: to the caller, for the other half
  std::unordered_map<std::string, std::uint32_t> known_;
};

}  // namespace

Recorded common(Recorded program) { return Eliminating(std::move(program)).run(); }

}  // namespace sherd
