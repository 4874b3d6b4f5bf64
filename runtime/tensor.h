// The handle everyone holds. Copying shares; ops are free functions (runtime/ops.h).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
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

namespace sherd {

/// What is known of a tensor without its values.
struct Spec {
  Shape shape;
  DType dtype = DType::f32;
  Device device{};
  friend bool operator==(const Spec&, const Spec&) = default;
  /// Of an input that was not given.
  static Spec none() { return {Shape::none(), DType::f32, {}}; }
  bool is_none() const { return shape.is_none(); }
  /// INT64_MAX where that is more than can be counted.
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

/// What an upper floor hangs on a tensor (the tape's record). The runtime only keeps it alive.
class SHERD_API TensorExtension : public RefCounted {};

class SHERD_API TensorImpl final : public RefCounted {
 public:
  TensorImpl(Ref<Storage> storage, Layout layout, DType dtype)
      : storage(std::move(storage)), layout(std::move(layout)), dtype(dtype) {}

  Ref<Storage> storage;
  Layout layout;
  DType dtype;
  bool view = false;               // made by a view op: its history is its base's
  bool alias = false;              // made by `detach` or `alias`: its base may have a history, it has none
  std::uint32_t view_version = 0;  // the storage's version when the view was taken
  Ref<TensorExtension> extension;
};

/// Default element type and device of a creation call.
struct TensorOptions {
  DType dtype = DType::f32;
  Device device{};
};

/// A strided array of one dtype on one device. A pointer-sized handle; an empty one (`!defined()`) means
/// "none".
class SHERD_API Tensor {
 public:
  Tensor() = default;
  explicit Tensor(Ref<TensorImpl> impl) : impl_(std::move(impl)) {}

  /// A number as a 0-d tensor; throws DTypeError when it does not fit the dtype.
  static Tensor scalar(Number value, TensorOptions options = {});
  /// A dense copy of host values; their count must be the shape's numel (ShapeError).
  template <class T>
  static Tensor from(std::span<const T> values, Shape shape, Device device = Device::cpu());
  template <class T>
  static Tensor from(const std::vector<T>& values, Shape shape, Device device = Device::cpu()) {
    return from(std::span<const T>(values), std::move(shape), device);
  }
  template <class T>
  static Tensor from(std::initializer_list<T> values, Shape shape, Device device = Device::cpu()) {
    return from(std::span<const T>(values.begin(), values.size()), std::move(shape), device);
  }

  bool defined() const { return static_cast<bool>(impl_); }
  explicit operator bool() const { return defined(); }
  const Shape& shape() const { return get().layout.shape; }
  const Shape& strides() const { return get().layout.strides; }
  const Layout& layout() const { return get().layout; }
  int rank() const { return shape().rank(); }
  /// Size along `axis`, which may be negative.
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
  /// Both handles name one tensor (not merely equal values).
  bool is(const Tensor& other) const { return impl_ == other.impl_; }

  /// First element on this tensor's own device. Throws StateError while the storage is released (never
  /// gathers) and DTypeError when `T` is not the element type.
  template <class T>
  const T* data() const {
    return static_cast<const T*>(read_address(dtype_of<T>));
  }
  /// The same for writing; counts as a write.
  template <class T>
  T* mutable_data() const {
    T* data = static_cast<T*>(address(dtype_of<T>));
    storage().bump_version();
    return data;
  }
  /// Address of the first element whatever the dtype; for kernels.
  std::byte* raw() const {
    return static_cast<std::byte*>(storage().data()) + impl_->layout.offset * size_of(impl_->dtype);
  }
  /// The value of a one-element tensor, converted to `T`; waits for the device. Never gathers.
  /// A ValueError where an integer `T` is too small; fractions are cut off.
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
  /// All values in row-major order, on the host.
  template <class T>
  std::vector<T> to_vector() const;

  // ---- autograd (defined on the floor above, as what runtime/upper_floor.h declares; see
  // autograd/autograd.h) ----
  bool requires_grad() const;
  /// Marks a leaf whose gradient is wanted, or unmarks it. Only floating leaves (StateError, DTypeError).
  Tensor& requires_grad_(bool requires_grad = true);
  /// The accumulated gradient: a free slot of any shape, dtype and device; an empty tensor is none.
  Tensor grad() const;
  void set_grad(Tensor grad) const;
  bool is_leaf() const;
  /// Adds the gradient of this tensor to every leaf that it was computed from. A tensor with more than one
  /// element needs `upstream` of its own shape.
  void backward(const Tensor& upstream = {}, bool retain_graph = false, bool create_graph = false) const;
  /// The same values without history.
  Tensor detach() const;

 private:
  /// An empty handle is refused, not followed.
  const TensorImpl& get() const {
    if (!impl_) [[unlikely]]
      refuse_empty();
    return *impl_;
  }
  [[noreturn]] static void refuse_empty();
  void* address(DType dtype) const;
  const void* read_address(DType dtype) const;  // tells listeners that the host reads
  double item_as_double() const;
  std::int64_t item_as_integer() const;  // a double does not hold every i64

  Ref<TensorImpl> impl_;
};

using Tensors = InlineVec<Tensor, 2>;

/// Uninitialised memory for a dense tensor. Kernels' outputs; everything else wants `zeros` or `full`.
SHERD_API Tensor empty(const Spec& spec);
SHERD_API Tensor empty(Shape shape, TensorOptions options = {});
/// A dense tensor over the caller's memory on `cpu`, which must outlive every view unless `on_free` ends its
/// life.
SHERD_API Tensor from_blob(void* data, Shape shape, DType dtype, std::function<void()> on_free = {});
/// Another view of `base`'s storage, without history. No bounds are left unchecked: ValueError when it would
/// leave the storage.
SHERD_API Tensor alias(const Tensor& base, Layout layout);
/// Throws ShapeError or ValueError named after `call` when a layout has more elements than can be counted or
/// leaves the storage.
SHERD_API void check_within(std::string_view call, const Storage& storage, const Layout& layout, DType dtype);

/// Values in brackets with shape, dtype and device; long tensors are shortened. Throws StateError while
/// released.
SHERD_API std::string to_string(const Tensor& tensor);

template <class T>
Tensor Tensor::from(std::span<const T> values, Shape shape, Device device) {
  check<ShapeError>(static_cast<std::int64_t>(values.size()) == shape.numel(), "from: {} values for shape {}",
                    values.size(), shape);
  Tensor out = empty(std::move(shape), {dtype_of<T>, device});
  if (device.is_cpu())
    std::copy(values.begin(), values.end(), static_cast<T*>(out.storage().data()));
  else if (device.type != DeviceType::meta)
    backend(device.type)
        .copy(out.storage().data(), device, values.data(), Device::cpu(), values.size_bytes());
  return out;
}

}  // namespace sherd
