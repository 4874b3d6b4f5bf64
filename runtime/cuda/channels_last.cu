#include "runtime/cuda/channels_last.h"

#include "runtime/cuda/block.cuh"

namespace sherd::cuda {
namespace {

constexpr int block = 256, pack = 8;
using Bits = std::uint16_t;

/// What a block takes from one order to the other: `Channels` of so many pixels of an image. Rows have an odd
/// length, so that neither order has neighbours in one bank of memory.
template <int Channels>
struct Tile {
  static constexpr int pixels = 4096 / Channels, packs = Channels * pixels / pack;
  Bits at[Channels][pixels + 1];
};

/// Where the tile of a block lies.
template <int Channels>
struct Place {
  static constexpr int pixels = Tile<Channels>::pixels;
  std::int64_t image, channel, pixel;

  __device__ explicit Place(const ChannelsCall& c) {
    const std::int64_t across = blocks_of(c.channels.all_places(), Channels),
                       down = blocks_of(c.pixels, pixels), at = blockIdx.x;
    channel = at % across * Channels;
    pixel = at / across % down * pixels;
    image = at / across / down;
  }
  /// Calls `body(channel, pixel, step)` for packs of eight pixels of a channel, `step` apart: neighbours
  /// where they are moved at once, else so that neighbouring threads have neighbouring pixels.
  template <class F>
  __device__ static void for_rows(bool wide, const F& body) {
    constexpr int row = pixels / pack;
    for (int i = static_cast<int>(threadIdx.x); i < Tile<Channels>::packs; i += block)
      body(i / row, i % row * (wide ? pack : 1), wide ? 1 : row);
  }
  /// Calls `body(channel, pixel)` for packs of eight channels of a pixel.
  template <class F>
  __device__ static void for_columns(const F& body) {
    constexpr int column = Channels / pack;
    for (int i = static_cast<int>(threadIdx.x); i < Tile<Channels>::packs; i += block)
      body(i % column * pack, i / column);
  }
};

template <int Channels>
__global__ void __launch_bounds__(block) to_last(const ChannelsCall c, bool wide) {
  __shared__ Tile<Channels> tile;
  const Place<Channels> place(c);
  const std::int64_t image = c.images.in(place.image);
  Place<Channels>::for_rows(wide, [&](int channel, int pixel, int step) {
    const std::int64_t row = c.channels.in(place.channel + channel);
    Packed<pack, Bits> values{};
    if (image >= 0 && row >= 0) {
      const Bits* from = static_cast<const Bits*>(c.from) + (image * c.channels.all() + row) * c.pixels;
      if (wide) {
        if (place.pixel + pixel < c.pixels) values = load_pack<pack>(from + place.pixel + pixel);
      } else {
#pragma unroll
        for (int j = 0; j < pack; ++j) {
          const std::int64_t at = place.pixel + pixel + j * step;
          if (at < c.pixels) values.at[j] = from[at];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < pack; ++j) tile.at[channel][pixel + j * step] = values.at[j];
  });
  __syncthreads();
  Place<Channels>::for_columns([&](int channel, int pixel) {
    if (place.channel + channel >= c.channels.all_places() || place.pixel + pixel >= c.pixels) return;
    Packed<pack, Bits> values;
#pragma unroll
    for (int j = 0; j < pack; ++j) values.at[j] = tile.at[channel + j][pixel];
    Bits* to = static_cast<Bits*>(c.to) +
               (place.image * c.pixels + place.pixel + pixel) * c.channels.all_places() + place.channel;
    store_pack(to + channel, values);
  });
}

template <int Channels>
__global__ void __launch_bounds__(block) to_first(const ChannelsCall c, bool wide) {
  __shared__ Tile<Channels> tile;
  const Place<Channels> place(c);
  const std::int64_t image = c.images.in(place.image);
  if (image < 0) return;
  Place<Channels>::for_columns([&](int channel, int pixel) {
    if (place.channel + channel >= c.channels.all_places() || place.pixel + pixel >= c.pixels) return;
    const Bits* from = static_cast<const Bits*>(c.from) +
                       (place.image * c.pixels + place.pixel + pixel) * c.channels.all_places() +
                       place.channel;
    const auto values = load_pack<pack>(from + channel);
#pragma unroll
    for (int j = 0; j < pack; ++j) tile.at[channel + j][pixel] = values.at[j];
  });
  __syncthreads();
  Place<Channels>::for_rows(wide, [&](int channel, int pixel, int step) {
    const std::int64_t row = c.channels.in(place.channel + channel);
    if (row < 0) return;
    Bits* to = static_cast<Bits*>(c.to) + (image * c.channels.all() + row) * c.pixels;
    Packed<pack, Bits> values;
#pragma unroll
    for (int j = 0; j < pack; ++j) values.at[j] = tile.at[channel][pixel + j * step];
    if (wide) {
      if (place.pixel + pixel < c.pixels) store_pack(to + place.pixel + pixel, values);
    } else {
#pragma unroll
      for (int j = 0; j < pack; ++j) {
        const std::int64_t at = place.pixel + pixel + j * step;
        if (at < c.pixels) to[at] = values.at[j];
      }
    }
  });
}

template <int Channels>
unsigned tiles(const ChannelsCall& c) {
  return grid_of(c.images.all_places() * blocks_of(c.pixels, Tile<Channels>::pixels) *
                 blocks_of(c.channels.all_places(), Channels));
}

/// Few channels and many pixels, or as many of both.
bool narrow_tiles(const ChannelsCall& c) { return c.channels.all_places() <= 16; }

}  // namespace

void launch_channels_last(const ChannelsCall& c) {
  const bool wide = wide_rows<Bits>(c.pixels, c.from);
  if (narrow_tiles(c))
    to_last<8><<<tiles<8>(c), block, 0, c.stream>>>(c, wide);
  else
    to_last<64><<<tiles<64>(c), block, 0, c.stream>>>(c, wide);
}

void launch_channels_first(const ChannelsCall& c) {
  const bool wide = wide_rows<Bits>(c.pixels, c.to);
  if (narrow_tiles(c))
    to_first<8><<<tiles<8>(c), block, 0, c.stream>>>(c, wide);
  else
    to_first<64><<<tiles<64>(c), block, 0, c.stream>>>(c, wide);
}

}  // namespace sherd::cuda
