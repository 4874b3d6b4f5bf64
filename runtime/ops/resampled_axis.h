// Which pixels along an axis a scaled image is made of, as PyTorch has it. Safe to include in device code.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

namespace sherd::ops {

/// The pixels between which a result lies, and the share of the second: 0 where it is one pixel.
template <class C>
struct PixelPair {
  std::int64_t first, second;
  C share;
};

/// `from` pixels become `to`, by `scale` where that is what was given and not 0.
struct ResampledAxis {
  std::int64_t from = 1, to = 1;
  double scale = 0;
  bool lines = false;    ///< results lie between pixels; else each is the nearest one
  bool corners = false;  ///< of lines: the first and last pixels stay where they are

  constexpr bool stays() const { return from == to; }
  /// How far apart results are, in pixels before: in C, since rounding decides which pixel is nearest.
  template <class C>
  constexpr C step() const {
    if (corners) return to > 1 ? C(from - 1) / C(to - 1) : C(0);
    if (!lines && to == 2 * from) return C(0.5);  // halves whatever the scale is
    return scale > 0 ? C(1 / scale) : C(from) / C(to);
  }
  /// What result `i` is made of. Nearest ones are found in f32 for every dtype.
  template <class C>
  constexpr PixelPair<C> pair(std::int64_t i, C step) const {
    if (stays()) return {i, i, C(0)};  // whatever the scale is
    if (!lines) {
      const auto at = static_cast<std::int64_t>(std::floor(static_cast<C>(i) * step));
      return {at < from - 1 ? at : from - 1, from - 1, C(0)};
    }
    const C last = C(from - 1), plain = corners ? step * C(i) : step * (C(i) + C(0.5)) - C(0.5);
    const C at = plain < C(0) ? C(0) : last < plain ? last : plain;
    const auto first = static_cast<std::int64_t>(at);
    return {first, first + 1 < from ? first + 1 : from - 1, at - C(first)};
  }
  /// The first result whose first pixel is `pixel` or a later one, `to` where there is none: results are in
  /// the order of their pixels.
  template <class C>
  constexpr std::int64_t first_after(std::int64_t pixel, C step) const {
    const C half = lines && !corners ? C(0.5) : C(0), about = (static_cast<C>(pixel) + half) / step - half;
    std::int64_t i = step > C(0) && about > C(0) ? static_cast<std::int64_t>(about) : 0;
    if (i > to) i = to;
    while (i < to && pair(i, step).first < pixel) ++i;
    while (i > 0 && pair(i - 1, step).first >= pixel) --i;
    return i;
  }
  /// What share of the result that is made of `pair` a pixel has.
  template <class C>
  static constexpr C weight(const PixelPair<C>& pair, std::int64_t pixel) {
    return (pair.first == pixel ? C(1) - pair.share : C(0)) + (pair.second == pixel ? pair.share : C(0));
  }

  void fields(std::string_view name, auto&& on) const {
    on(name, from), on("to", to), on("scale", scale);
    on("lines", lines), on("corners", corners);
  }
  bool operator==(const ResampledAxis&) const = default;
};

}  // namespace sherd::ops
