// 16-bit images between two orders of their elements. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// An axis of `groups` runs of `size`, each of which has `places` in the other order, the last ones empty.
struct PaddedAxis {
  std::int64_t groups = 1, size = 0, places = 0;
  constexpr std::int64_t all() const { return groups * size; }
  constexpr std::int64_t all_places() const { return groups * places; }
  /// What lies in a place; -1 for nothing.
  constexpr std::int64_t in(std::int64_t place) const {
    const std::int64_t group = groups == 1 ? 0 : place / places, at = place - group * places;
    return group < groups && at < size ? group * size + at : -1;
  }
};

/// Dense (images, channels, pixels), and (images, pixels, channels) with the places of both axes, those of
/// channels by eights.
struct ChannelsCall {
  PaddedAxis images, channels;
  std::int64_t pixels = 0;
  const void* from = nullptr;
  void* to = nullptr;
  cudaStream_t stream = nullptr;
};
/// From the first order to the second, zeros in empty places.
void launch_channels_last(const ChannelsCall& call);
/// Back, without what lies in empty places.
void launch_channels_first(const ChannelsCall& call);

}  // namespace sherd::cuda
