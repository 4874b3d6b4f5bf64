// Activation checkpointing: trade a second run of a region's ops for the memory of what its gradients read.
#pragma once

#include <memory>
#include <ranges>
#include <tuple>
#include <utility>

#include "runtime/tensor.h"

namespace sherd {
namespace detail {

/// Records a region between construction and `finish`. Does nothing without grad mode or inside another
/// region, whose record then covers this one.
class SHERD_API Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  void add_output(const Tensor& tensor);
  /// Releases what only the graph holds and makes the region its owner.
  void finish();

 private:
  class Recorder;
  std::unique_ptr<Recorder> recorder_;
};

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

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

/// Whether this rank is inside a region that is being recorded: what is read there, a backward may read
/// again.
SHERD_API bool recording_region();

/// Calls `region()` and returns its result: a Tensor, or a tuple, pair, array or vector of them. What the
/// region's ops made and only the graph behind the result still holds is released; when a backward needs it,
/// the recorded ops (not `region` itself) run again, with the same random numbers, so gradients are equal to
/// the bit. Tensors that the region reads from outside are kept and must not be written until the graph is
/// gone (StateError at the backward); a region that writes one is refused (StateError), as is a write to a
/// tensor of the region through a host pointer. A region inside a region is part of the outer one. Without
/// grad mode this is a plain call.
template <class F>
auto recompute(F&& region) {
  detail::Recording recording;
  auto result = std::forward<F>(region)();
  detail::add_outputs(recording, result);
  recording.finish();
  return result;
}

}  // namespace sherd
