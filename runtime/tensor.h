// Tensors: handles on strided arrays. Copying a handle shares the array; ops are free functions
// (runtime/ops.h).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <limits>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/backend.h"
#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/inline_vec.h"
#include "runtime/number.h"
#include "runtime/ref.h"
#include "runtime/shape.h"
#include "runtime/storage.h"
#include "runtime/tensor_options.h"

namespace sherd {

/// What is known of a tensor without its values.
struct Spec {
  Shape shape;
  DType dtype = DType::f32;
  Device device{};
  friend bool operator==(const Spec&, const Spec&) = default;
  /// Stands for an input that was not given (an empty handle).
  static Spec none() { return {Shape::none(), DType::f32, {}}; }
  bool is_none() const { return shape.is_none(); }
  /// Bytes of a dense tensor; INT64_MAX where there are more.
  std::int64_t bytes() const {
    std::int64_t bytes = 0;
    return __builtin_mul_overflow(shape.numel(), size_of(dtype), &bytes) ? INT64_MAX : bytes;
  }
};

/// Where a view's elements lie in its storage; strides and offset in elements.
struct Layout {
  Shape shape, strides;
  std::int64_t offset = 0;
};

/// What autograd/ attaches to a tensor (the tape's record). The runtime only keeps it alive as long as the
/// tensor.
class SHERD_API TensorExtension : public RefCounted {};

/// What tensor handles point to: one view of a storage.
class SHERD_API TensorImpl final : public RefCounted {
 public:
  TensorImpl(Ref<Storage> storage, Layout layout, DType dtype)
      : storage(std::move(storage)), layout(std::move(layout)), dtype(dtype) {}

  Ref<Storage> storage;
  Layout layout;
  DType dtype;
  bool view = false;               // made by a view op: the tape records that op
  bool alias = false;              // made by `detach` or `alias`, or a view of such: shares no history
  std::uint32_t view_version = 0;  // the storage's version when the view was taken or its write recorded
  Ref<TensorExtension> extension;
};

class At;
class Indexed;

/// A strided array of one dtype on one device. A handle of one pointer; an empty one (`!defined()`) means
/// "none", and what asks it for a shape, a dtype, a device or values throws ValueError.
class SHERD_API Tensor {
 public:
  Tensor() = default;
  explicit Tensor(Ref<TensorImpl> impl) : impl_(std::move(impl)) {}

  /// A number as a 0-d tensor; throws DTypeError when it does not fit the dtype.
  static Tensor scalar(Number value, TensorOptions options = {});
  /// A dense copy of host values; their count must be the shape's numel (ShapeError). Other integers than
  /// elements become i32, or i64 where they have eight bytes (ValueError beyond its range), `long double`
  /// f64.
  template <class T>
  static Tensor from(std::span<const T> values, Shape shape, Device device = default_device());
  template <class T>
  static Tensor from(const std::vector<T>& values, Shape shape, Device device = default_device()) {
    return from(std::span<const T>(values), std::move(shape), device);
  }
  template <class T>
  static Tensor from(std::initializer_list<T> values, Shape shape, Device device = default_device()) {
    return from(std::span<const T>(values.begin(), values.size()), std::move(shape), device);
  }
  static Tensor from(const std::vector<bool>& values, Shape shape, Device device = default_device());
  template <std::ranges::contiguous_range R>
  static Tensor from(const R& values, Shape shape, Device device = default_device()) {
    return from(std::span<const std::ranges::range_value_t<R>>(values), std::move(shape), device);
  }
  /// The values as one row of numbers, or as rows of the same length (ShapeError), on the default device.
  template <class T>
  static Tensor from(std::initializer_list<T> values) {
    return from(values, Shape(values.size()));
  }
  template <std::ranges::contiguous_range R>
  static Tensor from(const R& values) {
    return from(values, Shape(std::ranges::size(values)));
  }
  static Tensor from(const std::vector<bool>& values) { return from(values, Shape(values.size())); }
  template <class T>
  static Tensor from(std::initializer_list<std::initializer_list<T>> rows) {
    return from_rows<T>(rows);
  }
  template <class T>
  static Tensor from(const std::vector<std::vector<T>>& rows) {
    return from_rows<T>(rows);
  }

  bool defined() const { return static_cast<bool>(impl_); }
  /// Whether the one element is not zero, as in `if (loss < 0.1)`; waits for the device. ShapeError for other
  /// than one element (see `any` and `all`), ValueError for an empty handle (see `defined`), else as `item`.
  explicit operator bool() const;
  const Shape& shape() const { return get().layout.shape; }
  const Shape& strides() const { return get().layout.strides; }
  const Layout& layout() const { return get().layout; }
  int rank() const { return shape().rank(); }
  /// Size along `axis`, which may be negative; ShapeError outside [-rank, rank) and for a 0-d tensor.
  std::int64_t size(std::int64_t axis) const {
    check<ShapeError>(rank() > 0, "size: a 0-d tensor has no axis {}", axis);
    return shape()[normalize_axis("size", axis, rank())];
  }
  std::int64_t numel() const { return shape().numel(); }
  DType dtype() const { return get().dtype; }
  Device device() const { return get().storage->device(); }
  Spec spec() const { return {shape(), dtype(), device()}; }
  /// Elements lie in row-major order without holes.
  bool is_contiguous() const;
  Storage& storage() const { return *get().storage; }
  const Ref<Storage>& storage_ref() const { return get().storage; }
  TensorImpl* impl() const { return impl_.get(); }
  bool is_view() const { return get().view; }
  /// A part of the tensor, to read or to write: see runtime/indexing.h.
  Indexed operator[](const At& at) const;
  Indexed operator[](std::initializer_list<At> at) const;
  /// Both handles name one tensor (not merely equal values).
  bool is(const Tensor& other) const { return impl_ == other.impl_; }

  /// First element, on this tensor's own device; further ones lie by `strides()`. Throws StateError while the
  /// storage is released (it is not brought back), DeviceError on `meta` and DTypeError when `T` is not the
  /// element type.
  template <class T>
  const T* data() const {
    return static_cast<const T*>(read_address(dtype_of<T>));
  }
  /// The same for writing; counts as a write of the storage, which the tape does not record.
  template <class T>
  T* mutable_data() const {
    T* data = static_cast<T*>(address(dtype_of<T>));
    storage().bump_version();
    return data;
  }
  /// Address of the first element whatever the dtype; for kernels. StateError while released, DeviceError on
  /// `meta`.
  std::byte* raw() const {
    return static_cast<std::byte*>(storage().data()) + impl_->layout.offset * size_of(impl_->dtype);
  }
  /// The value of a one-element tensor (ShapeError for others), converted to `T`; waits for the device. An
  /// integer `T` cuts fractions off; ValueError where it is too small. Throws StateError while the storage is
  /// released (it is not brought back) and DeviceError on `meta`.
  template <class T = double>
  T item() const {
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      const std::int64_t value = item_as_integer();
      check<ValueError>(std::in_range<T>(value), "item: {} does not fit in {} bytes{}; ask for another type",
                        value, sizeof(T), std::is_signed_v<T> ? "" : " without a sign");
      return static_cast<T>(value);
    } else {
      return static_cast<T>(item_as_double());
    }
  }
  /// All values in row-major order, on the host. DTypeError when `T` is not the element type; StateError and
  /// DeviceError as `item`.
  template <class T>
  std::vector<T> to_vector() const;

  // ---- autograd (declared here and defined in autograd/, as are the functions of runtime/upper_floor.h; see
  // autograd/autograd.h) ----
  bool requires_grad() const;
  /// Marks a leaf whose gradient is wanted, or unmarks it: then also backwards of graphs recorded before drop
  /// its gradient. StateError for a tensor that was computed from others, DTypeError for one that is not
  /// floating.
  Tensor& requires_grad_(bool requires_grad = true);
  /// The accumulated gradient of a leaf; an empty handle where there is none. `set_grad` takes any shape,
  /// dtype and device (StateError for a tensor that is no leaf).
  Tensor grad() const;
  void set_grad(Tensor grad) const;
  /// Whether no recorded op computed this tensor.
  bool is_leaf() const;
  /// Adds the gradient of this tensor to `.grad` of every leaf that it was computed from (or gives it to the
  /// leaf's sink). A tensor with more than one element needs `upstream` of its own shape (ShapeError).
  /// StateError when nothing requires grad, or the graph was freed by an earlier backward without
  /// `retain_graph`.
  void backward(const Tensor& upstream = {}, bool retain_graph = false, bool create_graph = false) const;
  /// The same memory without history.
  Tensor detach() const;

 private:
  template <class T, class Rows>
  static Tensor from_rows(const Rows& rows);
  /// ValueError for an empty handle.
  const TensorImpl& get() const {
    if (!impl_) [[unlikely]]
      refuse_empty();
    return *impl_;
  }
  [[noreturn]] static void refuse_empty();
  void* address(DType dtype) const;
  const void* read_address(DType dtype) const;  // and calls the listeners' `host_read`
  double item_as_double() const;
  std::int64_t item_as_integer() const;  // because a double does not hold every i64

  Ref<TensorImpl> impl_;
};

using Tensors = InlineVec<Tensor, 2>;

/// A dense tensor of uninitialised memory, for kernels' outputs; otherwise use `zeros` or `full`. ShapeError
/// for a negative size or more bytes than can be counted; OutOfMemoryError.
SHERD_API Tensor empty(const Spec& spec);
SHERD_API Tensor empty(Shape shape, TensorOptions options = {});
inline Tensor empty(std::initializer_list<std::int64_t> shape, TensorOptions options = {}) {
  return empty(Shape(shape), options);  // one size is not a Spec
}
/// A dense tensor over the caller's memory on `cpu`, which must stay valid until `on_free` runs: when the
/// last tensor that views it goes. ShapeError as `empty`; ValueError for null with elements.
SHERD_API Tensor from_blob(void* data, Shape shape, DType dtype, std::function<void()> on_free = {});
/// Another view of `base`'s storage, without history. Errors as `checked_layout`.
SHERD_API Tensor alias(const Tensor& base, Layout layout);
/// The layout of a view of `storage`; one without elements begins at 0 and is dense, so that no arithmetic on
/// its strides overflows. ValueError when it leaves the storage, and ShapeError when it has a negative size,
/// more elements than can be counted, or not as many strides as sizes. The message opens with `call`.
SHERD_API Layout checked_layout(std::string_view call, const Storage& storage, Layout layout, DType dtype);

/// Values in brackets, a row a line, with shape, dtype and device; of more than 1000 each axis shows its
/// first and last three. "tensor(none)" for an empty handle. Throws StateError while released.
SHERD_API std::string to_string(const Tensor& tensor);
/// Writes `to_string(tensor)`.
SHERD_API std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

/// A class that is a tensor, or has one to give: a parameter.
template <class T>
concept TensorLike = std::derived_from<T, Tensor> || requires(const T& x) { x.operator const Tensor&(); };

namespace detail {
/// The type of element that host values of type T become.
template <class T>
using element_for = std::conditional_t<
    dtype_number<T> >= 0, T,
    std::conditional_t<std::is_floating_point_v<T>, double,
                       std::conditional_t<(sizeof(T) < 8 && (std::is_signed_v<T> || sizeof(T) < 4)),
                                          std::int32_t, std::int64_t>>>;
/// A tensor of the host's values, of which there are as many as the shape has elements.
SHERD_API Tensor from_host(const void* values, const Spec& spec);
}  // namespace detail

template <class T>
Tensor Tensor::from(std::span<const T> values, Shape shape, Device device) {
  using E = detail::element_for<T>;
  if constexpr (!std::is_same_v<E, T>) {
    static_assert(std::is_arithmetic_v<T>, "a tensor's values are numbers");
    std::vector<E> converted;
    converted.reserve(values.size());
    for (const T value : values) {
      if constexpr (std::is_unsigned_v<T> && sizeof(T) == sizeof(E))
        check<ValueError>(value <= static_cast<T>(std::numeric_limits<E>::max()),
                          "from: {} is beyond the integers of {}", value, name_of(dtype_of<E>));
      converted.push_back(static_cast<E>(value));
    }
    return from(std::span<const E>(converted), std::move(shape), device);
  } else {
    check<ShapeError>(static_cast<std::int64_t>(values.size()) == shape.numel(),
                      "from: {} values for shape {}", values.size(), shape);
    return detail::from_host(values.data(), {std::move(shape), dtype_of<T>, device});
  }
}

template <class T, class Rows>
Tensor Tensor::from_rows(const Rows& rows) {
  const std::size_t columns = rows.size() > 0 ? rows.begin()->size() : 0;
  std::vector<std::conditional_t<std::is_same_v<T, bool>, unsigned char, T>> all;
  all.reserve(rows.size() * columns);
  for (const auto& row : rows) {
    check<ShapeError>(row.size() == columns, "from: a row of {} values beside one of {}", row.size(),
                      columns);
    all.insert(all.end(), row.begin(), row.end());
  }
  const Shape shape{rows.size(), columns};
  if constexpr (std::is_same_v<T, bool>)
    return from(std::vector<bool>(all.begin(), all.end()), shape);
  else
    return from(std::span<const T>(all), shape);
}

/// The addresses of an optional input, for kernels: null for an empty handle; else as `Tensor::data` and
/// `raw`.
template <class T>
const T* data_or_null(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}
inline std::byte* raw_or_null(const Tensor& t) { return t.defined() ? t.raw() : nullptr; }

}  // namespace sherd
