// Calls among ranks beside a plain reference: written over `const Group&`, so that threads and processes run
// the same code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/group.h"
#include "runtime/inline_vec.h"

namespace sherd::test {

using Bytes = std::vector<std::byte>;

/// One call, the same value on every rank. Its inputs follow from the seed.
struct CallCase {
  CollectiveKind kind =
      CollectiveKind::all_reduce;  ///< `send` is a message: one rank sends, another receives
  DType dtype = f32;
  ReduceOp reduction{};
  /// A segment each: what an all_gather brings and a reduce_scatter gets, what goes from one rank to another
  /// in an all_to_all, else the whole tensor.
  std::vector<std::int64_t> sizes{1};
  bool in_place = false;
  int root = 0;         ///< of a broadcast; of a message the sender
  int destination = 0;  ///< of a message
  int channel = 0;
  std::string label{};
  std::uint64_t seed = 1;
  std::string text() const;
};

/// The rule for sums, averages and maxima, element by element. `inputs` in rank order.
Bytes reference_combine(DType dtype, ReduceOp reduction, std::span<const Bytes> inputs);
/// `count` values. `raw`: any bits at all, else numbers that a sum keeps apart, some of them infinite or NaN.
Bytes values_of(DType dtype, std::int64_t count, std::uint64_t seed, bool raw);
/// The same bits; with `numbers`, one NaN is as good as another.
bool same_values(DType dtype, const Bytes& a, const Bytes& b, bool numbers);

/// A scope in which this rank's cases lie on `device`.
class CasesOn {
 public:
  explicit CasesOn(Device device);
  ~CasesOn();
  CasesOn(const CasesOn&) = delete;
  CasesOn& operator=(const CasesOn&) = delete;
  static Device current();
};

/// One rank's part of a case: its tensors, the call, and what must come out.
class Part {
 public:
  Part(const Group& group, CallCase what);
  /// False for a rank that a message passes by.
  bool takes_part() const { return takes_part_; }
  const Collective& collective() const { return collective_; }

  void call() const;
  void post();
  void wait();
  void wait_inputs();
  /// Throws unless every output is the reference's, to the bit, and every input of an out-of-place call is as
  /// it was.
  void check() const;
  /// Of the outputs' bits.
  std::uint64_t digest() const;

 private:
  Bytes expected(std::size_t segment) const;
  Bytes input(int rank, std::size_t segment) const;
  Bytes input(int rank, std::size_t segment, std::int64_t first, std::int64_t count) const;

  Group group_;
  CallCase case_;
  Collective collective_;
  Work work_;
  bool takes_part_ = true;
};

/// Every kind, dtype, reduction and placement, with every size in `sizes_for`.
std::vector<CallCase> all_cases(int world);

/// 200 random calls on random sub-groups and channels: a program that is the same on every rank, except that
/// each waits for what is under way as it likes. Every result is checked.
void random_program(const Group& group, std::uint64_t seed);

/// A property of groups, checked by all ranks of one.
struct Section {
  std::string_view name;
  void (*run)(const Group&);
};
/// The first is `all_cases`.
std::span<const Section> sections();
/// Those that hold for tensors of any device, where `CasesOn` says they lie.
std::span<const Section> device_sections();

}  // namespace sherd::test
