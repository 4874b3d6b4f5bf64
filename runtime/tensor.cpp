#include "runtime/tensor.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <ostream>

#include "runtime/context.h"
#include "runtime/instances.h"
#include "runtime/op.h"
#include "runtime/reach.h"

namespace sherd {

namespace {
/// Bytes of a dense tensor; ShapeError, in the name of `call`, for sizes that no tensor has.
std::size_t checked_bytes(std::string_view call, const Shape& shape, DType dtype) {
  std::int64_t bytes = size_of(dtype);
  bool fits = true, none = false;
  for (std::int64_t n : shape) {
    check<ShapeError>(n >= 0, "{}: size {} in shape {}", call, n, shape);
    none = none || n == 0;
    fits = !__builtin_mul_overflow(bytes, n == 0 ? 1 : n, &bytes) && fits;
  }
  check<ShapeError>(fits, "{}: shape {} has more elements than can be counted{}", call, shape,
                    none ? ", its sizes of 0 aside" : "");
  return none ? 0 : static_cast<std::size_t>(bytes);
}

void tell_made(const Tensor& t, Content content) {
  for (Listener* listener : Context::current().listeners()) listener->made(t, content);
}

}  // namespace

Tensor Tensor::from(const std::vector<bool>& values, Shape shape, Device device) {
  const auto flat = std::make_unique<bool[]>(values.size());
  std::copy(values.begin(), values.end(), flat.get());
  return from(std::span<const bool>(flat.get(), values.size()), std::move(shape), device);
}

Tensor empty(const Spec& spec) {
  check<ValueError>(!spec.is_none(),
                    "empty: made after an input whose handle is empty; assign a tensor first");
  const std::size_t bytes = checked_bytes("empty", spec.shape, spec.dtype);
  return Tensor(make_ref<TensorImpl>(Storage::allocate(spec.device, bytes),
                                     Layout{spec.shape, contiguous_strides(spec.shape), 0}, spec.dtype));
}

Tensor empty(Shape shape, TensorOptions options) {
  Tensor t = empty(Spec{std::move(shape), options.dtype, options.device});
  tell_made(t, Content::none);
  return t;
}

Tensor detail::from_host(const void* values, const Spec& spec) {
  Tensor t = empty(spec);
  if (const auto bytes = static_cast<std::size_t>(spec.bytes());
      bytes > 0 && spec.device.type != DeviceType::meta) {
    if (spec.device.is_cpu())
      std::memcpy(t.raw(), values, bytes);
    else
      backend(spec.device.type).copy(t.raw(), spec.device, values, Device::cpu(), bytes);
  }
  tell_made(t, Content::given);
  return t;
}

Tensor from_blob(void* data, Shape shape, DType dtype, std::function<void()> on_free) {
  const std::size_t bytes = checked_bytes("from_blob", shape, dtype);
  check<ValueError>(data != nullptr || bytes == 0, "from_blob: null memory for shape {}", shape);
  Shape strides = contiguous_strides(shape);
  Tensor t(make_ref<TensorImpl>(Storage::wrap(Device::cpu(), data, bytes, std::move(on_free)),
                                Layout{std::move(shape), std::move(strides), 0}, dtype));
  tell_made(t, Content::given);
  return t;
}

Layout checked_layout(std::string_view call, const Storage& storage, Layout layout, DType dtype) {
  const bool empty = checked_bytes(call, layout.shape, dtype) == 0;
  check<ShapeError>(layout.shape.rank() == layout.strides.rank(), "{}: {} sizes and {} strides", call,
                    layout.shape.rank(), layout.strides.rank());
  if (empty) return {layout.shape, contiguous_strides(layout.shape), 0};
  const std::optional<Reach> reach = Reach::of(layout);
  const std::int64_t capacity = static_cast<std::int64_t>(storage.bytes()) / size_of(dtype);
  if (!reach || reach->low < 0 || reach->high >= capacity) [[unlikely]]
    fail<ValueError>("{}: shape {} with strides {} from element {} leaves a storage of {} elements", call,
                     layout.shape, layout.strides, layout.offset, capacity);
  return layout;
}

Tensor alias(const Tensor& base, Layout layout) {
  layout = checked_layout("alias", base.storage(), std::move(layout), base.dtype());
  Tensor t(make_ref<TensorImpl>(base.storage_ref(), std::move(layout), base.dtype()));
  t.impl()->alias = true;
  return t;
}

bool Tensor::is_contiguous() const {
  std::int64_t step = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    const std::int64_t n = shape()[i];
    if (n != 1 && strides()[i] != step) return numel() == 0;
    if (__builtin_mul_overflow(step, n, &step)) return true;  // only where there are no elements
  }
  return true;
}

void Tensor::refuse_empty() {
  fail<ValueError>(
      "tensor: this handle is empty (`defined()` is false) and has no shape, dtype or values; assign a "
      "tensor first");
}

void* Tensor::address(DType dtype) const {
  check<DTypeError>(dtype == get().dtype, "data: elements are {}, asked for as {}", name_of(get().dtype),
                    name_of(dtype));
  return raw();
}

namespace {

void announce_host_read(const Tensor& tensor) {
  const Context* context = Context::current_or_null();
  if (context == nullptr || context->inside_op()) return;
  for (Listener* listener : context->listeners()) listener->host_read(tensor);
}

template <class To>
To value_at(const std::byte* at, DType dtype) {
  return with_element(dtype, [&]<class T>() {
    return static_cast<To>(static_cast<compute_t<T>>(*reinterpret_cast<const T*>(at)));
  });
}

/// The elements of a tensor for the host: a copy of the span of storage that they lie in, or the memory
/// itself when it is on the host. `tensor` has elements.
class HostBytes {
 public:
  explicit HostBytes(const Tensor& tensor) : size_(size_of(tensor.dtype())) {
    announce_host_read(tensor);
    const Device device = tensor.device();
    const auto* all = static_cast<const std::byte*>(tensor.storage().data());
    if (device.is_cpu()) {
      bytes_ = all;
      return;
    }
    const Reach reach = *Reach::of(tensor.layout());
    first_ = reach.low;
    copy_.resize(static_cast<std::size_t>((reach.high - reach.low + 1) * size_));
    backend(device.type).copy(copy_.data(), Device::cpu(), all + first_ * size_, device, copy_.size());
    backend(device.type).synchronize(device);
    bytes_ = copy_.data();
  }
  /// The address of element `i` of the storage, which must be one of the tensor's.
  const std::byte* at(std::int64_t i) const { return bytes_ + (i - first_) * size_; }

 private:
  std::int64_t size_, first_ = 0;
  std::vector<std::byte> copy_;
  const std::byte* bytes_;
};

/// Calls `visit(address)` for every element in row-major order.
template <class F>
void for_each_element(const Tensor& tensor, const HostBytes& host, F&& visit) {
  const Layout& layout = tensor.layout();
  const std::int64_t n = layout.shape.numel();
  Shape index = layout.shape;
  std::fill(index.begin(), index.end(), 0);
  for (std::int64_t i = 0; i < n; ++i) {
    std::int64_t at = layout.offset;
    for (int d = 0; d < index.rank(); ++d) at += index[d] * layout.strides[d];
    visit(host.at(at));
    for (int d = index.rank() - 1; d >= 0 && ++index[d] == layout.shape[d]; --d) index[d] = 0;
  }
}

}  // namespace

namespace {
template <class T>
T only_value(const Tensor& x) {
  check<ShapeError>(x.numel() == 1, "item: needs a tensor with one element, got shape {}", x.shape());
  const HostBytes host(x);
  return value_at<T>(host.at(x.layout().offset), x.dtype());
}
}  // namespace

const void* Tensor::read_address(DType dtype) const {
  const void* first = address(dtype);
  announce_host_read(*this);
  return first;
}

Tensor::operator bool() const {
  check<ValueError>(defined(), "bool: an empty handle is neither true nor false; ask `defined()`");
  check<ShapeError>(numel() == 1, "bool: {} elements of shape {} have no one truth; ask `any(x)` or `all(x)`",
                    numel(), shape());
  return is_floating(dtype()) ? item_as_double() != 0 : item_as_integer() != 0;
}
double Tensor::item_as_double() const { return only_value<double>(*this); }
std::int64_t Tensor::item_as_integer() const {
  if (!is_floating(dtype())) return only_value<std::int64_t>(*this);
  const double value = item_as_double();
  check<ValueError>(value >= -9223372036854775808.0 && value < 9223372036854775808.0,
                    "item: {} is no 64-bit integer; ask for a double", value);
  return static_cast<std::int64_t>(value);
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  check<DTypeError>(dtype_of<T> == dtype(), "to_vector: elements are {}, asked for as {}", name_of(dtype()),
                    name_of(dtype_of<T>));
  std::vector<T> values;
  if (numel() == 0) return values;
  values.reserve(static_cast<std::size_t>(numel()));
  const HostBytes host(*this);
  for_each_element(*this, host,
                   [&](const std::byte* at) { values.push_back(*reinterpret_cast<const T*>(at)); });
  return values;
}

[[gnu::used]] const auto instances =
    instances_for<any_dtype>([]<class T>() { return std::tuple(&Tensor::to_vector<T>); });

Tensor Tensor::scalar(Number value, TensorOptions options) {
  detail::check_fits("scalar", "value", value, options.dtype);
  return with_element(options.dtype, [&]<class T>() {
    const T host = value.element<T>();
    return from(std::span<const T>(&host, 1), Shape{}, options.device);
  });
}

namespace {

/// The values of a tensor as text: rows on lines of their own, their numbers under each other.
class Printing {
 public:
  Printing(const Tensor& tensor, const HostBytes& host)
      : host_(host), layout_(tensor.layout()), dtype_(tensor.dtype()), shorten_(tensor.numel() > most) {
    if (layout_.shape.rank() < 2) return;
    for_each(0, layout_.offset, [&](std::int64_t at) { width_ = std::max(width_, element(at).size()); });
  }
  std::string text() {
    print(0, layout_.offset);
    return std::move(text_);
  }

 private:
  static constexpr std::int64_t most = 1000, edge = 3;
  static constexpr std::size_t line = 96, indent = 7;  // of "tensor("

  /// The element after number `i` of an axis of `n` that is shown, and whether some are left out between.
  std::pair<std::int64_t, bool> next(std::int64_t i, std::int64_t n) const {
    const bool gap = shorten_ && n > 2 * edge && i + 1 == edge;
    return {gap ? n - edge : i + 1, gap};
  }
  template <class F>
  void for_each(int axis, std::int64_t at, const F& body) const {
    if (axis == layout_.shape.rank()) return body(at);
    const std::int64_t n = layout_.shape[axis];
    for (std::int64_t i = 0; i < n; i = next(i, n).first)
      for_each(axis + 1, at + i * layout_.strides[axis], body);
  }
  std::string element(std::int64_t at) const {
    if (is_floating(dtype_)) {
      const double value = value_at<double>(host_.at(at), dtype_);
      return std::isnan(value) ? "nan" : fmt::format("{:.6g}", value);  // of either sign
    }
    const auto value = value_at<std::int64_t>(host_.at(at), dtype_);
    return dtype_ != DType::boolean ? fmt::format("{}", value) : value != 0 ? "true" : "false";
  }
  void add(const std::string& piece, int depth) {
    if (text_.size() - line_ + piece.size() > line) new_line(1, depth);
    text_ += piece;
  }
  void new_line(int count, int depth) {
    while (!text_.empty() && text_.back() == ' ') text_.pop_back();
    text_.append(static_cast<std::size_t>(count), '\n');
    line_ = text_.size();
    text_.append(indent + static_cast<std::size_t>(depth), ' ');
  }
  void print(int axis, std::int64_t at) {
    const int rank = layout_.shape.rank();
    if (axis == rank) return add(fmt::format("{:>{}}", element(at), width_), axis);
    text_ += '[';
    const std::int64_t n = layout_.shape[axis];
    for (std::int64_t i = 0; i < n;) {
      print(axis + 1, at + i * layout_.strides[axis]);
      const auto [after, gap] = next(i, n);
      i = after;
      if (i >= n) break;
      for (const char* piece : {",", gap ? "...," : ""}) {
        if (*piece == '\0') continue;
        text_ += piece;
        axis + 1 == rank ? void(text_ += ' ')
                         : new_line(*piece == '.' ? 1 : std::max(1, rank - axis - 1), axis + 1);
      }
    }
    text_ += ']';
  }

  const HostBytes& host_;
  const Layout& layout_;
  DType dtype_;
  bool shorten_;
  std::size_t width_ = 0, line_ = 0;  // of the widest number; where the last line begins
  std::string text_;
};

}  // namespace

std::string to_string(const Tensor& tensor) {
  if (!tensor.defined()) return "tensor(none)";
  const std::string tail = fmt::format("shape={}, dtype={}, device={}", tensor.shape(),
                                       name_of(tensor.dtype()), to_string(tensor.device()));
  if (tensor.device().type == DeviceType::meta) return fmt::format("tensor(..., {})", tail);
  if (tensor.numel() == 0) return fmt::format("tensor([], {})", tail);
  const HostBytes host(tensor);
  return fmt::format("tensor({}, {})", Printing(tensor, host).text(), tail);
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) { return out << to_string(tensor); }

}  // namespace sherd
