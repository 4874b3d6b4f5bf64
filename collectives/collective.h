// One call among ranks, as a value: what to move, how to combine it, and what every rank must agree on.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "runtime/reduce_op.h"
#include "runtime/tensor.h"

namespace sherd {

enum class CollectiveKind : std::uint8_t {
  all_gather,      ///< every rank's input, side by side in rank order, on every rank
  reduce_scatter,  ///< slice r of the combined inputs on rank r
  all_reduce,      ///< the combined inputs on every rank
  broadcast,       ///< the root's input on every rank
  all_to_all,      ///< slice r of rank p's input becomes slice p of rank r's output
  send,            ///< the input to rank `peer`
  recv,            ///< the output from rank `peer`
  barrier,         ///< moves nothing; completes when every rank has posted it
};
/// "all_gather", "reduce_scatter", ...
SHERD_API std::string_view to_string(CollectiveKind kind);

/// "sum", "average", ... as messages print it.
SHERD_API std::string to_string(const ReduceOp& reduction);

/// Number of channels of a group, counted from 0. Each has an order and sequence numbers of its own.
inline constexpr int max_channels = 16;

/// What becomes of a call for which its channel has no room yet.
enum class WhenFull : std::uint8_t { wait, queue };

/// One call of one rank. A segment is an input and an output at the same place of the two lists; all segments
/// have one dtype and one device, are dense, and travel in one call. Elements of a segment, with W ranks:
/// all_gather n to W*n; reduce_scatter W*n to n; all_reduce and broadcast n to n; all_to_all W*n to W*n. send
/// has inputs only; recv, and broadcast on every rank but the root, outputs only; barrier neither. In place:
/// the output is the input; for all_gather and reduce_scatter the smaller one may be this rank's slice of the
/// larger one; all_to_all is never in place.
struct Collective {
  CollectiveKind kind = CollectiveKind::barrier;
  Tensors inputs, outputs;
  ReduceOp reduction{};
  int peer = -1;  ///< root of a broadcast, destination of a send, source of a recv: a rank of the group
  int channel = 0;
  std::string label{};  ///< for messages and logs; compared, so the same on every rank
};

/// What must be equal on every rank of a call. Travels with the call, and the receiving ranks compare it with
/// their own.
struct Signature {
  static constexpr std::size_t label_bytes = 64;

  std::uint64_t digest = 0;  ///< of everything below and of the whole label; equal digests mean an equal call
  CollectiveKind kind = CollectiveKind::barrier;
  DType dtype = DType::u8;
  ReduceOp::Kind op = ReduceOp::Kind::sum;
  std::uint8_t label_length = 0;
  DeviceType device = DeviceType::cpu;  ///< of the tensors, whatever its index
  std::int32_t root = -1;               ///< of a broadcast
  float scale = 1;
  std::uint32_t segments = 0;
  std::int64_t first = 0, total = 0;  ///< elements of segment 0 and of all, see `counted`
  char label[label_bytes] = {};       ///< the first bytes of the label

  /// The call as errors and logs print it: "all_gather(f32, 2 segments beginning with 8, 24 elements) of
  /// 'layers.3'".
  SHERD_API std::string text() const;
};

/// The tensors of a call whose elements a `Signature` counts: what this rank brings; for a reduce_scatter,
/// and where a rank brings nothing, what it gets.
inline const Tensors& counted(const Collective& c) {
  return c.kind == CollectiveKind::reduce_scatter || c.inputs.empty() ? c.outputs : c.inputs;
}

/// The signature of a call that `validate` accepted.
SHERD_API Signature signature_of(const Collective& collective);

/// Checks everything that needs no peer: sizes, dtypes, devices, density, overlap, ranks. Throws ShapeError,
/// DTypeError, DeviceError or ValueError. `rank` of `size` is the caller's.
SHERD_API void validate(const Collective& collective, int rank, int size);

}  // namespace sherd
