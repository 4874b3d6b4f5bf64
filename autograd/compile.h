// Compiling functions: a call's ops are recorded at a first meeting and replayed after, forward and backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "autograd/capture/capture.h"
#include "autograd/op_costs.h"

namespace sherd {

/// Whether what cannot be captured is a StateError that names it, or runs eagerly.
enum class FullGraph : std::uint8_t { no, yes };
/// Whether ops that compute the same in one program run each, as written, or once. `once` takes fewer ops,
/// and keeps values from the first use to the last: those too that a `recompute` in another was to let go of.
enum class CommonSubexpressions : std::uint8_t { each, once };

/// Whether a program of a module asks at each call if the parameters that an owner keeps (sharding) are the
/// same tensors, or trusts that nobody put others in their place, and asks of their dtype alone.
enum class ManagedParameters : std::uint8_t { guarded, trusted };

/// Whether what sharding does before and after a forward (gathers, casts, frees) is done around programs,
/// which end at each sharded module, or has its places inside one.
enum class ShardingHooks : std::uint8_t { around, inside };

/// How many bytes a call and its backward may take at a time: values between their ops, what crosses from the
/// one to the other, results and gradients; not what they are given, what the caller has of results by the
/// backward or of gradients that are its own, nor what a kernel takes for itself while it runs. Where there is a budget a program's first call keeps what eager code would. When its first
/// backward is known the cheapest choice of what is kept is sought that fits, packed, in both; the rest,
/// products too, the backward makes again where it needs it. The first backward throws ValueError with the
/// least that is found where nothing fits.
/// The budget is for backwards of the first one's kind: one that needs other gradients makes the same again,
/// and takes what that takes.
class SHERD_API MemoryBudget {
 public:
  MemoryBudget() = default;  ///< none
  /// ValueError unless positive.
  static MemoryBudget bytes(std::int64_t most);
  /// Of what the program takes that keeps all that eager code does. ValueError unless above 0 and at most 1.
  static MemoryBudget part(double of_eager);

  /// As little as a choice is found for, whatever that costs.
  static MemoryBudget least();

  bool limited() const { return bytes_ > 0 || part_ > 0 || least_; }
  /// Whether it is a part of what eager code takes.
  bool is_part() const { return part_ > 0; }
  /// In bytes, of a program that takes `eager_peak` with all that eager code keeps and `least` at least.
  std::int64_t limit(std::int64_t eager_peak, std::int64_t least) const;

 private:
  std::int64_t bytes_ = 0;
  double part_ = 0;
  bool least_ = false;
};

struct CompileOptions {
  Executor executor = Executor::replay;
  FullGraph full_graph = FullGraph::no;
  CommonSubexpressions common_subexpressions = CommonSubexpressions::each;
  ManagedParameters managed_parameters = ManagedParameters::guarded;
  ShardingHooks sharding_hooks = ShardingHooks::around;
  MemoryBudget memory{};
  OpCosts costs{};           ///< by which a choice of what is made again goes; without, by estimates
  std::size_t programs = 8;  ///< kept of one function; beyond, the one that was used longest ago goes
};

/// What compiled calls did since they were made or reset.
struct CompileStats {
  std::size_t frames = 0;          ///< calls whose tracing began
  std::size_t programs = 0;        ///< that are kept now, each with its backwards
  std::size_t graphs = 0;          ///< in these: forwards and backwards
  std::vector<std::size_t> ops{};  ///< of each graph, views among them
  std::size_t hits = 0;            ///< calls by a program
  std::size_t misses = 0;          ///< calls that no program was for
  std::size_t eager = 0;           ///< calls that ran eagerly, because they cannot be captured
  /// Of sharding, before or after a forward and where a backward comes back to one, that ran while a program
  /// was traced: none with `ShardingHooks::around`.
  std::size_t sharding_hooks = 0;
  // Of the programs that are kept.
  std::size_t launches = 0;        ///< ops that compute, a fused region as one
  std::size_t regions = 0;         ///< fused ones
  std::size_t ops_in_regions = 0;  ///< that were recorded
  std::int64_t bytes_saved = 0;    ///< of results that regions do not store
  std::int64_t peak_bytes = 0;  ///< that a call and its backward take, as `MemoryBudget` counts; the largest
  std::int64_t eager_peak_bytes = 0;  ///< the same with all that eager code keeps, of those with a budget
};

/// The programs of a compiled function or module. Each thread that calls has its own, which it traces itself;
/// what these say, count and forget is said, counted and forgotten of all, while none of them calls.
class SHERD_API CompiledPrograms {
 public:
  /// ValueError for no programs.
  explicit CompiledPrograms(CompileOptions options);
  ~CompiledPrograms();
  CompiledPrograms(const CompiledPrograms&) = delete;
  CompiledPrograms& operator=(const CompiledPrograms&) = delete;

  CompileStats stats() const;
  /// The programs as text, the last used first: forward, then its backwards, in the form of a captured
  /// program; `keep` names what crosses from the one to the other, `kept` where it arrives.
  std::string text() const;
  /// The same programs as drawings, one each (`to_svg`).
  std::vector<std::string> drawings() const;
  /// Forgets all programs and begins to count anew. Backwards of calls before it work on.
  void reset();
  /// What these say, count and forget is said, counted and forgotten of `part` too, as long as that lives.
  void add_part(const CompiledPrograms& part);

  /// What a call gave, and of which result (`keep_form`) where a program ran.
  struct Result {
    std::vector<Tensor> outputs;
    std::shared_ptr<const void> form;
  };
  /// Calls `body` on `inputs`, or a program that did the same before. `values` is everything else that the
  /// call depends on. `unfit`, if not empty, also when `body` is over, says why it cannot be captured.
  /// `keep_form` may be null.
  Result call(std::span<const Tensor> inputs, std::vector<std::uint64_t> values,
              const std::function<std::vector<Tensor>()>& body, const std::string& unfit = {},
              const std::function<std::shared_ptr<const void>()>& keep_form = {});

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

/// A compiled function: called as the function. Handles share the programs.
class SHERD_API Compiled {
 public:
  Compiled(Step step, CompileOptions options);
  std::vector<Tensor> operator()(std::span<const Tensor> inputs) const;
  std::vector<Tensor> operator()(std::initializer_list<Tensor> inputs) const {
    return (*this)(std::span(inputs.begin(), inputs.size()));
  }
  CompileStats stats() const { return programs_->stats(); }
  std::string text() const { return programs_->text(); }
  std::vector<std::string> drawings() const { return programs_->drawings(); }
  void reset() const { programs_->reset(); }

 private:
  Step step_;
  std::shared_ptr<CompiledPrograms> programs_;
};

/// `step` as one program for its forward and one for each kind of backward, equal to the bit to calling it.
/// The first call traces while it computes, and its first backward too; later calls replay. A call is one
/// node of the tape, so that the code around it, hooks on its inputs and outputs, `grad`, `retain_graph` and
/// second derivatives (a backward that is recorded goes through the ops themselves) work as ever; all results
/// of a call share that node, so backwards of one after the other keep it (`retain_graph`). A program is for
/// inputs of its shapes, strides, dtypes, devices, sharing of memory and `requires_grad`, and for the grad
/// mode, default options and precision of products; what differs gets one of its own. Tensors that the step
/// finds elsewhere are read and written in place, and asked at each call whether they require grad; which
/// tensors it finds, and numbers on the host, are as at the first call: compile a module where those change
/// (`nn::compile`). Replays leave out ops of which nobody reads a result, and so do not say of these that an
/// index is out of range. What cannot be captured is what `capture` refuses, calls among ranks, hooks on
/// tensors inside, and an input with a history that is written. Inside `capture`, `recompute` and another
/// compiled call the step's ops are theirs.
SHERD_API Compiled compile(Step step, CompileOptions options = {});

/// Resets everything that was compiled on this thread, and gives back the memory that its programs share.
SHERD_API void compile_reset();

}  // namespace sherd
