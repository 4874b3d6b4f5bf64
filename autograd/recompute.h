// Activation checkpointing: the ops of a region run a second time in the backward, and the values that their
// gradients read need no memory in between.
#pragma once

#include <cstdint>
#include <memory>
#include <ranges>
#include <tuple>
#include <utility>

#include "runtime/tensor.h"

namespace sherd {
namespace detail {

/// Records a region from construction to `finish`. Does nothing without grad mode, or inside another region,
/// which records these ops as its own.
class SHERD_API Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  /// Names a tensor that the region returns; the graph behind it is what `finish` looks through.
  void add_output(const Tensor& tensor);
  /// Releases the storages that only the graph holds, and makes the region their owner, which brings them
  /// back.
  void finish();

 private:
  class Recorder;
  std::unique_ptr<Recorder> recorder_;
};

template <class T>
concept TupleLike = requires { std::tuple_size<T>::value; };

template <class T>
void add_outputs(Recording& recording, const T& result) {
  if constexpr (std::is_same_v<T, Tensor>) {
    recording.add_output(result);
  } else if constexpr (TupleLike<T>) {
    std::apply([&](const auto&... part) { (add_outputs(recording, part), ...); }, result);
  } else {
    static_assert(std::ranges::range<T>,
                  "a region returns a Tensor, or a tuple, pair, array or vector of them");
    for (const auto& part : result) add_outputs(recording, part);
  }
}

}  // namespace detail

/// A region, while it is recorded and after.
struct RecordedRegion {
  /// Its last place in the rank's order of recording, once it is over. What it read may be read again by a
  /// backward that has come to this place.
  std::uint64_t end = 0;
};
/// The region that this rank is recording, or null.
SHERD_API std::shared_ptr<const RecordedRegion> recording_region();
/// Called by the op under way, or for it: it makes a call among ranks, which other ranks need not repeat when
/// this one does. The region that is being recorded, if any, keeps the op's results and never runs it again.
SHERD_API void keep_results_in_region();

/// Calls `region()` and returns its result: a Tensor, or a tuple, pair, array or vector of them. What the
/// region's ops made and only the graph behind the result still holds is released; when a backward needs it,
/// the recorded ops (not `region` itself) run again, with the same random numbers, so gradients are equal to
/// the bit. Tensors that the region reads from outside are kept and must not be written until the graph is
/// gone (StateError in the backward). StateError in the forward for an op that writes a tensor from outside,
/// and for an op that uses a tensor of the region after a write through a host pointer. A region inside a
/// region is part of the outer one. Without grad mode this is a plain call.
template <class F>
auto recompute(F&& region) {
  detail::Recording recording;
  auto result = std::forward<F>(region)();
  detail::add_outputs(recording, result);
  recording.finish();
  return result;
}

}  // namespace sherd
