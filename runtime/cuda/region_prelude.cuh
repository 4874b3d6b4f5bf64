// What the headers of functors use of the standard library, for NVRTC, which has none of it, and what the
// kernels of fused regions are written in. No translation unit includes it: it opens the text that
// `region_headers` gives.
#pragma once

namespace std {

using size_t = decltype(sizeof 0);
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;

class ostream;

template <class T>
struct type_identity {
  using type = T;
};
template <class T>
using type_identity_t = typename type_identity<T>::type;
template <bool Value>
struct bool_constant {
  static constexpr bool value = Value;
};
template <bool Condition, class A, class B>
struct conditional : type_identity<A> {};
template <class A, class B>
struct conditional<false, A, B> : type_identity<B> {};
template <bool Condition, class A, class B>
using conditional_t = typename conditional<Condition, A, B>::type;

template <class A, class B>
inline constexpr bool is_same_v = false;
template <class T>
inline constexpr bool is_same_v<T, T> = true;
template <class T, class... Any>
inline constexpr bool is_one_of_v = (is_same_v<T, Any> || ...);
template <class T>
inline constexpr bool is_floating_point_v = is_one_of_v<T, float, double>;
template <class T>
inline constexpr bool is_integral_v =
    is_one_of_v<T, bool, char, signed char, unsigned char, short, unsigned short, int, unsigned, long,
                unsigned long, long long, unsigned long long>;
template <class T>
inline constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
inline constexpr bool is_signed_v = T(-1) < T(0);
template <class T>
inline constexpr bool is_empty_v = __is_empty(T);
template <class T>
struct make_unsigned
    : conditional<
          sizeof(T) == 1, uint8_t,
          conditional_t<sizeof(T) == 2, uint16_t, conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>> {};
template <class T>
using make_unsigned_t = typename make_unsigned<T>::type;

template <class A, class B>
concept same_as = is_same_v<A, B>;
template <class T>
concept integral = is_integral_v<T>;
template <class T>
concept floating_point = is_floating_point_v<T>;
template <class T>
concept copyable = true;
template <class T>
concept equality_comparable = requires(const T& a) { a == a; };
template <class D, class B>
concept derived_from = __is_base_of(B, D);
template <class From, class To>
concept convertible_to = __is_convertible_to(From, To);

template <class To, class From>
constexpr To bit_cast(const From& from) {
  return __builtin_bit_cast(To, from);
}
template <class T, T... I>
struct integer_sequence {};
template <class T = void>
struct plus {
  constexpr auto operator()(auto a, auto b) const { return a + b; }
};
template <class T = void>
struct minus {
  constexpr auto operator()(auto a, auto b) const { return a - b; }
};
template <class T = void>
struct multiplies {
  constexpr auto operator()(auto a, auto b) const { return a * b; }
};

template <class T, size_t N>
struct array {
  T at[N == 0 ? 1 : N];
  constexpr T* data() { return at; }
  constexpr const T* data() const { return at; }
  constexpr size_t size() const { return N; }
};
template <class In, class Out>
constexpr void copy_n(In from, size_t n, Out to) {
  for (size_t i = 0; i < n; ++i) to[i] = from[i];
}
class string_view {
 public:
  constexpr string_view() = default;
  constexpr string_view(const char* text, size_t size) : text_(text), size_(size) {}
  constexpr string_view(const char* text) : text_(text) {
    while (text[size_] != 0) ++size_;
  }
  constexpr size_t size() const { return size_; }
  constexpr size_t copy(char* to, size_t n) const {
    copy_n(text_, n < size_ ? n : size_, to);
    return size_;
  }

 private:
  const char* text_ = nullptr;
  size_t size_ = 0;
};

template <class T>
struct numeric_limits {
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr T max() {
    return is_signed ? static_cast<T>((1ull << (sizeof(T) * 8 - 1)) - 1) : static_cast<T>(~0ull);
  }
  static constexpr T min() { return is_signed ? static_cast<T>(-max() - 1) : T(0); }
};
template <>
struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
};
template <>
struct numeric_limits<float> {
  static constexpr float max() { return 0x1.fffffep127f; }
  static constexpr float min() { return 0x1p-126f; }
  static constexpr float lowest() { return -max(); }
  static constexpr float infinity() { return __builtin_bit_cast(float, 0x7f800000u); }
  static constexpr float quiet_NaN() { return __builtin_bit_cast(float, 0x7fc00000u); }
};
template <>
struct numeric_limits<double> {
  static constexpr double max() { return 0x1.fffffffffffffp1023; }
  static constexpr double min() { return 0x1p-1022; }
  static constexpr double lowest() { return -max(); }
  static constexpr double infinity() { return __builtin_bit_cast(double, 0x7ff0000000000000ull); }
  static constexpr double quiet_NaN() { return __builtin_bit_cast(double, 0x7ff8000000000000ull); }
};

using ::ceil;
using ::copysign;
using ::fabs;
using ::floor;
using ::fma;
using ::fmod;
using ::rint;
using ::signbit;
using ::sqrt;
using ::trunc;

}  // namespace std
