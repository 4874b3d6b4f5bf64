#include "runtime/indexing.h"

#include <algorithm>
#include <vector>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/index.h"
#include "runtime/ops/picking.h"
#include "runtime/ops/slice.h"

namespace sherd {
namespace {

/// An index taken apart. `box` is x after positions, slices and new axes, which are also kept as what
/// `WriteBox` takes; `picks` are the tensors, by the axis of `box` along which each picks. A mask is one for
/// each of its axes, which are found when they are needed.
struct Parts {
  struct Mask {
    std::size_t first;  // of its picks
    Shape shape;
    Tensor places;
  };
  Tensor box;
  ops::WriteBox write;
  std::vector<std::pair<int, Tensor>> picks;
  std::vector<Mask> masks;
};

/// How many axes of x an entry uses; none for an Ellipsis.
std::optional<int> axes_used(const At& at) {
  const At::What& what = at.what();
  if (std::holds_alternative<Ellipsis>(what)) return std::nullopt;
  if (std::holds_alternative<NewAxis>(what)) return 0;
  if (const auto* t = std::get_if<Tensor>(&what)) return t->dtype() == DType::boolean ? t->rank() : 1;
  return 1;
}

class Taking {
 public:
  Taking(std::string_view call, const Tensor& x, std::span<const At> at) : call_(call), x_(x) {
    parts_.box = x;
    int used = 0;
    bool open = false;
    for (const At& one : at) {
      const auto* picks = std::get_if<Tensor>(&one.what());
      check<ValueError>(!picks || picks->defined(),
                        "{}: entry {} of the index is an empty handle; assign it a tensor first", call_,
                        &one - at.data());
      const std::optional<int> axes = axes_used(one);
      check<ValueError>(axes || !open, "{}: more than one Ellipsis; which of them is meant is not known",
                        call_);
      open = open || !axes;
      used += axes.value_or(0);
    }
    check<ShapeError>(used <= x.rank(), "{}: entries for {} axes, but shape {} has {}", call_, used,
                      x.shape(), x.rank());
    for (const At& one : at) {
      if (axes_used(one)) {
        std::visit([&](const auto& what) { take(what); }, one.what());
        continue;
      }
      for (int i = used; i < x.rank(); ++i) take(Slice{});
    }
    while (from_ < x.rank()) take(Slice{});
  }
  Parts parts() && { return std::move(parts_); }

 private:
  void note(std::int64_t start, std::int64_t step, std::int64_t size) {
    parts_.write.start.push_back(start);
    parts_.write.step.push_back(step);
    parts_.write.size.push_back(size);
    ++from_;
  }
  void take(std::int64_t position) {
    const std::int64_t size = x_.shape()[from_];
    check<ValueError>(position >= -size && position < size,
                      "{}: position {} is outside axis {} of shape {}, which has {} to {}", call_, position,
                      from_, x_.shape(), -size, size - 1);
    parts_.box = select(parts_.box, to_, position);
    note(position < 0 ? position + size : position, 1, 1);
  }
  void take(const Slice& slice) {
    const std::int64_t size = x_.shape()[from_];
    check<ValueError>(slice.step > 0, "{}: step {} along axis {} must be positive; use flip", call_,
                      slice.step, from_);
    const auto inside = [size](std::int64_t i) {
      return std::clamp<std::int64_t>(i < 0 ? i + size : i, 0, size);
    };
    const std::int64_t start = inside(slice.start.value_or(0)), end = inside(slice.end.value_or(size));
    const std::int64_t count = end > start ? (end - start - 1) / slice.step + 1 : 0;
    if (count != size) parts_.box = sherd::slice(parts_.box, to_, start, std::max(start, end), slice.step);
    note(start, count > 1 ? slice.step : 1, count);  // no stride times a step that leads nowhere
    ++to_;
  }
  void take(Ellipsis) {}
  void take(NewAxis) { parts_.box = unsqueeze(parts_.box, to_++); }
  void take(const Tensor& index) {
    check<DeviceError>(index.device() == x_.device(), "{}: positions on {} for a tensor on {}", call_,
                       index.device(), x_.device());
    if (index.dtype() != DType::boolean) {
      parts_.picks.emplace_back(to_++, index);
      return note(0, 1, x_.shape()[from_]);
    }
    if (index.rank() == 0) {  // it takes or leaves an axis of its own
      parts_.box = unsqueeze(parts_.box, to_);
      return take_where(reshape(index, {1}));
    }
    Shape under;
    for (int i = 0; i < index.rank(); ++i) under.push_back(x_.shape()[from_ + i]);
    check<ShapeError>(index.shape() == under,
                      "{}: a mask of shape {} where the tensor has {}, from axis {} of its shape {}", call_,
                      index.shape(), under, from_, x_.shape());
    take_where(index);
    for (int i = 0; i < index.rank(); ++i) note(0, 1, x_.shape()[from_]);
  }
  /// The places of a mask, of as many axes of the box.
  void take_where(const Tensor& mask) {
    const Tensor places = detail::places_where(call_, mask);
    parts_.masks.push_back({parts_.picks.size(), mask.shape(), places});
    for (int i = 0; i < mask.rank(); ++i) parts_.picks.emplace_back(to_++, Tensor{});
  }

  std::string_view call_;
  const Tensor& x_;
  Parts parts_;
  int from_ = 0, to_ = 0;  // the next axis of x, and of the box
};

/// The picks of an index as one, of slices across neighbouring axes. Those of axes that are apart come to the
/// front, which is what `order` says.
struct PickedSlices {
  Shape order, picked;
  Tensor positions;
  bool together = true, distinct = false;
  int axis = 0;

  /// The shape of what is picked, out of an `order`ed box.
  Shape shape(const Shape& box) const {
    Shape all;
    for (int i = 0; i < axis; ++i) all.push_back(box[i]);
    for (std::int64_t n : positions.shape()) all.push_back(n);
    for (int i = axis + picked.rank(); i < box.rank(); ++i) all.push_back(box[static_cast<int>(order[i])]);
    return all;
  }
};

PickedSlices slices_of(std::string_view call, const Parts& parts) {
  const Shape& shape = parts.box.shape();
  PickedSlices r;
  for (std::size_t i = 0; i < parts.picks.size(); ++i) {
    const int axis = parts.picks[i].first;
    r.together = r.together && axis == parts.picks[0].first + static_cast<int>(i);
    r.order.push_back(axis);
    r.picked.push_back(shape[axis]);
  }
  for (int i = 0; i < shape.rank(); ++i)
    if (std::find(r.order.begin(), r.order.end(), i) == r.order.end()) r.order.push_back(i);
  if (r.together) {
    r.axis = parts.picks[0].first;
    std::sort(r.order.begin(), r.order.end());
  }
  if (parts.masks.size() == 1 && parts.masks[0].shape == r.picked) {
    r.positions = parts.masks[0].places;
    r.distinct = true;
    return r;
  }
  std::vector<std::pair<int, Tensor>> picks = parts.picks;
  for (const Parts::Mask& mask : parts.masks) {
    std::int64_t below = mask.shape.numel();
    for (int i = 0; i < mask.shape.rank(); ++i) {
      const std::int64_t size = mask.shape[i];
      below /= std::max<std::int64_t>(size, 1);
      picks[mask.first + static_cast<std::size_t>(i)].second =
          remainder(floor_divide(mask.places, below), size);
    }
  }
  Shape together_shape;
  Tensors positions;
  for (const auto& [axis, index] : picks) {
    check<DTypeError>(is_integral(index.dtype()), "{}: positions must be integers, got {}", call,
                      name_of(index.dtype()));
    positions.push_back(to(index, DType::i64));
    together_shape = broadcast_shapes(call, together_shape, index.shape());
  }
  for (Tensor& at : positions) at = expand(at, together_shape);
  r.positions =
      apply_many(ops::ElementNumbers{r.picked, call}, Inputs(positions.begin(), positions.size()))[0];
  return r;
}

/// `permute`, but x itself where the order is its own.
Tensor ordered(const Tensor& x, const Shape& axes) {
  for (int i = 0; i < axes.rank(); ++i)
    if (axes[i] != i) return permute(x, axes);
  return x;
}

Shape inverse(const Shape& axes) {
  Shape back = axes;
  for (int i = 0; i < axes.rank(); ++i) back[static_cast<int>(axes[i])] = i;
  return back;
}

bool fits_into(const Shape& values, const Shape& place) {
  const int extra = place.rank() - values.rank();
  bool fits = extra >= 0;
  for (int i = 0; fits && i < values.rank(); ++i) fits = values[i] == 1 || values[i] == place[i + extra];
  return fits;
}

/// Writes the box of `x`; `values` have its shape, new axes and dropped ones aside.
void write_box(const Tensor& x, const ops::WriteBox& box, const Tensor& values) {
  apply(box, x, reshape(values, box.size));
}

}  // namespace

Tensor index(const Tensor& x, std::span<const At> at) {
  detail::check_given("index", x);
  const Parts parts = Taking("index", x, at).parts();
  if (parts.picks.empty()) return parts.box;
  const PickedSlices r = slices_of("index", parts);
  const ops::Take op{{ops::Of::slices, r.axis, r.picked.rank(), r.distinct, "index"}};
  return apply(op, ordered(parts.box, r.order), r.positions);
}

namespace {

/// The mask of an index that is one mask and nothing else, if one value for all its places is to replace
/// them: that is written without looking where they are.
const Tensor* mask_to_fill(const Tensor& x, std::span<const At> at, const Tensor& values, Put put) {
  const auto* mask = at.size() == 1 ? std::get_if<Tensor>(&at[0].what()) : nullptr;
  if (!mask || !mask->defined() || mask->dtype() != DType::boolean || mask->device() != x.device())
    return nullptr;
  const int rank = mask->rank();
  bool fits = put == Put::replace && rank <= x.rank() && values.device() == x.device() &&
              values.numel() == 1 && values.rank() <= x.rank() - rank + 1;
  for (int i = 0; fits && i < rank; ++i) fits = mask->shape()[i] == x.shape()[i];
  return fits ? mask : nullptr;
}

}  // namespace

Tensor index_put_(const Tensor& x, std::span<const At> at, const Tensor& values, Put put) {
  detail::check_given("index_put_", x, values);
  constexpr std::string_view call = "index_put_";
  check<DTypeError>(put == Put::replace || x.dtype() != DType::boolean,
                    "{}: adding takes numbers, got bool; cast them", call);
  if (const Tensor* mask = mask_to_fill(x, at, values, put)) {
    Shape shape = mask->shape();
    while (shape.rank() < x.rank()) shape.push_back(1);
    const Tensor value = reshape(to(values, x.dtype()), {});
    const Tensor holds =
        mask->storage().id() == x.storage().id() ? clone(*mask) : *mask;  // as it is before the write
    apply(ops::FillWhere{}, x, reshape(holds, shape),
          value.storage().id() == x.storage().id() ? clone(value) : value);
    return x;
  }
  // What is looked at here is written through `x` itself, so no history is made of it, and no view stays.
  Parts parts = Taking(call, x.detach(), at).parts();
  const Shape box = parts.box.shape();
  PickedSlices r;
  if (!parts.picks.empty()) r = slices_of(call, parts);
  parts.box = {};
  Tensor given = to(values, x.dtype());
  if (&given.storage() == &x.storage()) given = clone(given);
  const auto fit = [&](const Shape& shape) {
    check<ShapeError>(fits_into(given.shape(), shape), "{}: values of shape {} do not fit into {}", call,
                      values.shape(), shape);
    return expand(given, shape);
  };
  const auto old = [&] { return reshape(parts.write.box_in(x), box); };
  if (parts.picks.empty()) {
    const Tensor fitted = fit(box);
    write_box(x, parts.write, put == Put::replace ? fitted : add(old(), fitted));
    return x;
  }
  const Tensor fitted = fit(r.shape(box));
  Shape shape = box;
  for (int i = 0; i < box.rank(); ++i) shape[i] = box[static_cast<int>(r.order[i])];
  const ops::PutAt op{{ops::Of::slices, r.axis, r.picked.rank(), r.distinct, call}, put, shape};
  if (r.together && parts.write.size == x.shape() && box == x.shape()) {
    const bool shared = r.positions.storage().id() == x.storage().id();  // as they are before the write
    apply(ops::PutAtInPlace{op}, x, shared ? clone(r.positions) : r.positions, fitted);
    return x;
  }
  const Tensor after = apply(op, ordered(old(), r.order), r.positions, fitted);
  write_box(x, parts.write, ordered(after, inverse(r.order)));
  return x;
}

Indexed::Indexed(const Tensor& x, std::span<const At> at) : Tensor(index(x, at)), x_(x), at_(at) {}
void Indexed::write(const Tensor& values) {
  static_cast<Tensor&>(*this) = {};  // a view less that shares the memory
  index_put_(x_, at_, values);
}
namespace {

/// The gradient of `values` keeps the part as it is now, which is about to be written over.
Tensor part_for(const Tensor& part, const Tensor& values) {
  return values.requires_grad() ? clone(part) : part;
}

}  // namespace
void Indexed::operator=(const Tensor& values) && { write(values); }
void Indexed::operator=(Number value) && { write(Tensor::scalar(value, {x_.dtype(), x_.device()})); }
void Indexed::operator+=(const Tensor& values) && { write(add(*this, values)); }
void Indexed::operator-=(const Tensor& values) && { write(sub(*this, values)); }
void Indexed::operator*=(const Tensor& values) && { write(mul(part_for(*this, values), values)); }
void Indexed::operator/=(const Tensor& values) && { write(div(part_for(*this, values), values)); }
void Indexed::operator+=(Number value) && { write(add(*this, value)); }
void Indexed::operator-=(Number value) && { write(sub(*this, value)); }
void Indexed::operator*=(Number value) && { write(mul(*this, value)); }
void Indexed::operator/=(Number value) && { write(div(*this, value)); }

Indexed Tensor::operator[](const At& at) const { return Indexed(*this, std::span(&at, 1)); }
Indexed Tensor::operator[](std::initializer_list<At> at) const {
  return Indexed(*this, std::span(at.begin(), at.size()));
}

}  // namespace sherd
