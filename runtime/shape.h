// Sizes and strides of a tensor: up to eight dimensions, held in place.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <iosfwd>
#include <limits>
#include <ranges>
#include <span>
#include <string>
#include <utility>

#include "runtime/error.h"

namespace sherd {

/// The most dimensions a tensor can have.
inline constexpr int max_rank = 8;

/// An integer that can be a size or an axis; a character or a bool is none.
template <class T>
concept SizeLike = std::integral<T> && sizeof(T) >= sizeof(short) && !std::same_as<T, wchar_t> &&
                   !std::same_as<T, char16_t> && !std::same_as<T, char32_t>;

/// A list of at most eight integers: sizes (`Shape`), strides or axes, in elements; one integer is a list of
/// one. Indices are not checked; more entries, and one beyond 64 bits with a sign, are a ShapeError.
class Shape {
 public:
  constexpr Shape() = default;
  /// Of any types, each by itself: {words.size(), 3}.
  template <SizeLike... T>
  requires(sizeof...(T) > 0) Shape(T... items) { (push_back(checked(items)), ...); }
  template <std::ranges::contiguous_range R>
  requires(!std::same_as<R, Shape> && SizeLike<std::ranges::range_value_t<R>>) Shape(const R& items) {
    for (const auto n : items) push_back(checked(n));
  }

  int rank() const { return rank_; }
  std::size_t size() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  std::int64_t operator[](int i) const { return items_[static_cast<std::size_t>(i)]; }
  std::int64_t& operator[](int i) { return items_[static_cast<std::size_t>(i)]; }
  const std::int64_t* begin() const { return items_.data(); }
  const std::int64_t* end() const { return items_.data() + rank_; }
  std::int64_t* begin() { return items_.data(); }
  std::int64_t* end() { return items_.data() + rank_; }
  std::int64_t back() const { return items_[static_cast<std::size_t>(rank_ - 1)]; }
  operator std::span<const std::int64_t>() const { return {begin(), end()}; }

  void push_back(std::int64_t n) {
    if (rank_ == max_rank) [[unlikely]]
      fail<ShapeError>("shape: at most {} dimensions are supported", max_rank);
    items_[rank_++] = n;
  }
  /// Puts `n` before entry `at`.
  SHERD_API void insert(int at, std::int64_t n);
  SHERD_API void erase(int at);

  /// Product of the entries; 1 for none. INT64_MAX where the product is larger; no tensor has that many.
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (std::int64_t d : *this)
      if (__builtin_mul_overflow(n, d, &n)) [[unlikely]]
        n = std::numeric_limits<std::int64_t>::max();
    return n;
  }
  /// The shape that stands for an input that was not given (an empty handle): prints as "(none)". It holds
  /// one entry, -1, that means nothing.
  static Shape none() {
    Shape shape{-1};
    shape.none_ = true;
    return shape;
  }
  bool is_none() const { return none_; }
  /// Writes `to_string(shape)`.
  SHERD_API friend std::ostream& operator<<(std::ostream& out, const Shape& shape);
  friend bool operator==(const Shape& a, const Shape& b) {
    if (a.rank_ != b.rank_) return false;
    for (int i = 0; i < a.rank_; ++i)
      if (a[i] != b[i]) return false;
    return true;
  }

 private:
  template <class T>
  static std::int64_t checked(T n) {
    if (!std::in_range<std::int64_t>(n)) [[unlikely]]
      fail<ShapeError>("shape: {} is no size; an unsigned number below 0 has wrapped", n);
    return static_cast<std::int64_t>(n);
  }
  std::array<std::int64_t, max_rank> items_;  // only the first rank_ are meaningful
  std::uint8_t rank_ = 0;
  bool none_ = false;
};

/// "(2, 3)", "(5)", "()"; "(none)" for `Shape::none()`.
SHERD_API std::string to_string(const Shape& shape);

/// `axis` as an index from 0: negative ones count from the end. ShapeError, which opens with `op`, outside
/// [-rank, rank); a 0-d tensor takes -1 and 0.
SHERD_API int normalize_axis(std::string_view op, std::int64_t axis, int rank);

/// Row-major strides of a dense tensor of this shape.
inline Shape contiguous_strides(const Shape& shape) {
  Shape strides = shape;
  std::int64_t step = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[i] = step;
    // Overflows only for a shape that no tensor has.
    (void)__builtin_mul_overflow(step, shape[i] > 0 ? shape[i] : 1, &step);
  }
  return strides;
}

/// The shape that `a` and `b` broadcast to: aligned at the last axis, sizes are equal or one of them is 1.
/// Throws ShapeError, or ValueError for `Shape::none()`; the messages open with `op`.
SHERD_API Shape broadcast_shapes(std::string_view op, const Shape& a, const Shape& b);

}  // namespace sherd

template <>
struct fmt::formatter<sherd::Shape> : fmt::formatter<std::string> {
  auto format(const sherd::Shape& s, fmt::format_context& ctx) const {
    return fmt::formatter<std::string>::format(sherd::to_string(s), ctx);
  }
};
