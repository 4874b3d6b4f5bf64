#include "runtime/ops/index.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/indexing.h"
#include "runtime/ops.h"
#include "runtime/ops/embedding.h"
#include "runtime/ops/slice.h"
#include "runtime/ops/topk.h"
#include "runtime/parallel.h"

namespace sherd {
namespace {

/// The box as recorded slices.
Tensor slices_of(const ops::WriteBox& box, Tensor x) {
  for (int i = 0; i < box.size.rank(); ++i)
    if (box.size[i] != x.shape()[i]) x = apply(ops::Slice{i, box.start[i], box.step[i], box.size[i]}, x);
  return x;
}

}  // namespace

namespace {

/// Where `given` holds, on the host, which reads it.
Tensor places_on_host(const Tensor& given) {
  const Tensor mask = contiguous(to(given, Device::cpu()));
  const auto* holds = reinterpret_cast<const std::uint8_t*>(mask.data<bool>());  // of bools none is a vector
  constexpr std::int64_t block = 1 << 14, piece = 512;
  const std::int64_t n = mask.numel(), blocks = (n + block - 1) / block;
  std::vector<std::int64_t> first(static_cast<std::size_t>(blocks) + 1);
  parallel_for(n, block, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t count = 0;
    for (std::int64_t i = begin; i < end; ++i) count += holds[i];
    first[static_cast<std::size_t>(begin / block) + 1] = count;
  });
  std::partial_sum(first.begin(), first.end(), first.begin());
  const Tensor found = empty({{first.back()}, DType::i64, Device::cpu()});
  parallel_for(n, block, [&](std::int64_t begin, std::int64_t end) {
    auto* to = reinterpret_cast<std::int64_t*>(found.raw()) + first[static_cast<std::size_t>(begin / block)];
    for (std::int64_t i = begin; i < end; i += piece) {
      std::int64_t some[piece], count = 0;  // each place is written, and counts where the mask holds
      for (std::int64_t j = i; j < std::min(i + piece, end); ++j) {
        some[count] = j;
        count += holds[j];
      }
      to = std::copy_n(some, count, to);
    }
  });
  return found;
}

}  // namespace

namespace ops {

Specs WriteBox::infer(SpecSpan in) const {
  const Shape& shape = in[0].shape;
  check<ShapeError>(start.rank() == shape.rank() && step.rank() == shape.rank() && in[1].shape == size,
                    "write_box_: values of shape {} for a box of {} in shape {}", in[1].shape, size, shape);
  check<DTypeError>(in[0].dtype == in[1].dtype, "write_box_: {} values for {}; cast them",
                    name_of(in[1].dtype), name_of(in[0].dtype));
  return {};
}

namespace {

Layout box_of(const WriteBox& op, const Tensor& x) {
  Layout layout = x.layout();
  for (int i = 0; i < layout.shape.rank(); ++i) {
    if (op.size[i] > 0) layout.offset += op.start[i] * layout.strides[i];
    layout.shape[i] = op.size[i];
    layout.strides[i] *= op.step[i];
  }
  return layout;
}

}  // namespace

void WriteBox::run(Inputs in, Outputs out) const {
  if (in[1].numel() > 0) copy_(alias(out[0], box_of(*this, out[0])), in[1]);
}

Tensors WriteBox::grad(const GradArgs& args) const {
  const Tensor& gy = args.gy[0];
  Tensors grads(2);
  if (args.need(0)) {
    const Tensor zero = expand(Tensor::scalar(0, {gy.dtype(), gy.device()}), size);
    grads[0] = apply(*this, clone(gy), zero);
  }
  if (args.need(1)) grads[1] = slices_of(*this, gy);
  return grads;
}

Specs WriteRows::infer(SpecSpan in) const {
  const Spec &x = in[0], &index = in[1], &values = in[2];
  check<DTypeError>(index.dtype == DType::i64, "{}: the index must be integers, got {}", call,
                    name_of(index.dtype));
  check<DTypeError>(x.dtype == values.dtype, "{}: {} values for {}; cast them", call, name_of(values.dtype),
                    name_of(x.dtype));
  Shape expected = index.shape;
  for (int i = 1; i < x.shape.rank(); ++i) expected.push_back(x.shape[i]);
  check<ShapeError>(x.shape.rank() >= 1 && values.shape == expected,
                    "{}: values of shape {} for rows {} of shape {}", call, values.shape, index.shape,
                    x.shape);
  return {};
}

Tensors WriteRows::reference(Inputs in) const {
  // Who writes a row last is found on the host; then every row is picked, from the values or from itself.
  const Tensor &x = in[0], &index = in[1];
  const std::int64_t rows = x.shape()[0];
  if (in[2].numel() == 0) return {x};
  const std::vector<std::int64_t> at = to(index, Device::cpu()).to_vector<std::int64_t>();
  std::vector<std::int64_t> source(static_cast<std::size_t>(rows));
  for (std::int64_t i = 0; i < rows; ++i) source[static_cast<std::size_t>(i)] = i;
  for (std::size_t i = 0; i < at.size(); ++i) {
    check<ValueError>(at[i] >= 0 && at[i] < rows, "{}: index {} at position {} is outside [0, {})", call,
                      at[i], i, rows);
    source[static_cast<std::size_t>(at[i])] = rows + static_cast<std::int64_t>(i);
  }
  Shape list = x.shape();
  list[0] = index.numel();
  const Tensor both[] = {x, reshape(in[2], list)};
  return {embedding(cat(both), to(Tensor::from(source, {rows}, Device::cpu()), x.device()))};
}

Tensors WriteRows::grad(const GradArgs& args) const {
  const Tensor &gy = args.gy[0], &index = args.inputs[1];
  Tensors grads(3);
  if (args.need(0)) {
    const Tensor zero = Tensor::scalar(0, {gy.dtype(), gy.device()});
    grads[0] = apply(*this, clone(gy), index, expand(zero, args.specs[2].shape));
  }
  if (args.need(2)) {
    // Of equal positions the last one's value is there, and it alone has a gradient.
    const TensorOptions counts{DType::i64, gy.device()};
    const Tensor order = reshape(arange(0, index.numel(), 1, counts), index.shape());
    const Tensor last = embedding(apply(WriteRows{}, zeros({gy.shape()[0]}, counts), index, order), index);
    Shape along = index.shape();
    for (int i = 1; i < gy.rank(); ++i) along.push_back(1);
    const Tensor zero = Tensor::scalar(0, {gy.dtype(), gy.device()});
    grads[2] = where(reshape(equal(last, order), along), embedding(gy, index), zero);
  }
  return grads;
}

Specs ElementNumbers::infer(SpecSpan in) const {
  check<ShapeError>(static_cast<std::size_t>(sizes.rank()) == in.size(), "{}: {} positions for {} axes", call,
                    in.size(), sizes.rank());
  for (const Spec& at : in)
    check<ShapeError>(at.shape == in[0].shape && at.dtype == DType::i64,
                      "{}: positions of shape {} in {}, and of shape {}; they are i64 of one shape", call,
                      at.shape, name_of(at.dtype), in[0].shape);
  return {in[0]};
}

Tensors ElementNumbers::reference(Inputs in) const {
  Tensor numbers;
  std::int64_t step = sizes.numel();
  for (int k = 0; k < sizes.rank(); ++k) {
    const Tensor& given = in[static_cast<std::size_t>(k)];
    const std::int64_t size = sizes[k];
    const TensorOptions like{DType::i64, given.device()};
    step /= std::max<std::int64_t>(size, 1);
    // Those outside stay as they are, for the error to name.
    const Tensor behind = logical_and(less(given, 0), greater_equal(given, -size));
    // Looked up, so that each is compared with its own axis.
    const Tensor at =
        apply(Embedding{call}, mul(arange(0, size, 1, like), step), where(behind, add(given, size), given));
    numbers = k == 0 ? at : add(numbers, at);
  }
  return {numbers};
}

Specs Places::infer(SpecSpan in) const {
  check<DTypeError>(in[0].dtype == DType::boolean, "places: takes bool, got {}", name_of(in[0].dtype));
  return {{{count}, DType::i64, in[0].device}};
}

Tensors Places::reference(Inputs in) const { return {to(places_on_host(in[0]), in[0].device())}; }

Specs FillWhere::infer(SpecSpan in) const {
  const Spec &x = in[0], &mask = in[1], &value = in[2];
  check<DTypeError>(mask.dtype == DType::boolean && value.dtype == x.dtype,
                    "fill_where_: a {} mask and a {} value for {}", name_of(mask.dtype), name_of(value.dtype),
                    name_of(x.dtype));
  check<ShapeError>(broadcast_shapes(name, x.shape, mask.shape) == x.shape && value.shape.rank() == 0,
                    "fill_where_: a mask of shape {} and a value of shape {} for shape {}", mask.shape,
                    value.shape, x.shape);
  return {};
}

Tensors FillWhere::reference(Inputs in) const { return {where(in[1], in[2], in[0])}; }

Tensors FillWhere::grad(const GradArgs& args) const {
  const Tensor &gy = args.gy[0], &mask = args.inputs[1];
  Tensors grads(3);
  if (args.need(0)) grads[0] = where(mask, 0, gy);
  if (args.need(2)) grads[2] = sum(where(mask, gy, 0));
  return grads;
}

}  // namespace ops

namespace {

/// Where `x` is not zero, in row-major order: 1-D, on its device. How many there are the host has to know.
Tensor places_where(std::string_view call, const Tensor& x) {
  check<DeviceError>(x.device().type != DeviceType::meta,
                     "{}: a tensor on meta has no values to look at; move it to a device", call);
  const Tensor mask = to(x.detach(), DType::boolean);
  if (mask.device().type == DeviceType::cpu) return places_on_host(mask);
  return apply(ops::Places{sum(mask).item<std::int64_t>()}, mask);
}

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
    const Tensor places = places_where("nonzero", mask);
    parts_.masks.push_back({parts_.picks.size(), mask.shape(), places});
    for (int i = 0; i < mask.rank(); ++i) parts_.picks.emplace_back(to_++, Tensor{});
  }

  std::string_view call_;
  const Tensor& x_;
  Parts parts_;
  int from_ = 0, to_ = 0;  // the next axis of x, and of the box
};

/// The picks of an index as one: `order` brings the axes that are picked along to the front, `rows` are
/// positions in the product of these.
struct PickedRows {
  Shape order, picked, rest;
  Tensor rows;
  int place = 0;  // of the positions' axes among those of the result
};

PickedRows rows_of(std::string_view call, const Parts& parts) {
  const Shape& shape = parts.box.shape();
  PickedRows r;
  bool together = true;
  for (std::size_t i = 0; i < parts.picks.size(); ++i) {
    const int axis = parts.picks[i].first;
    together = together && axis == parts.picks[0].first + static_cast<int>(i);
    r.order.push_back(axis);
    r.picked.push_back(shape[axis]);
  }
  for (int i = 0; i < shape.rank(); ++i)
    if (std::find(r.order.begin(), r.order.end(), i) == r.order.end()) r.rest.push_back(shape[i]);
  for (int i = 0; i < shape.rank(); ++i)
    if (std::find(r.order.begin(), r.order.begin() + r.picked.rank(), i) == r.order.begin() + r.picked.rank())
      r.order.push_back(i);
  r.place = together ? parts.picks[0].first : 0;
  if (parts.masks.size() == 1 && parts.masks[0].shape == r.picked) {
    r.rows = parts.masks[0].places;
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
  r.rows = apply_many(ops::ElementNumbers{r.picked, call}, Inputs(positions.begin(), positions.size()))[0];
  return r;
}

/// `permute`, but x itself where the order is its own.
Tensor ordered(const Tensor& x, const Shape& axes) {
  for (int i = 0; i < axes.rank(); ++i)
    if (axes[i] != i) return permute(x, axes);
  return x;
}

Shape joined(const Shape& a, const Shape& b) {
  Shape both = a;
  for (std::int64_t n : b) both.push_back(n);
  return both;
}

/// The box with the axes that are picked along as one in front.
Tensor table_of(const Tensor& box, const PickedRows& r) {
  return reshape(ordered(box, r.order), joined({r.picked.numel()}, r.rest));
}

/// Where axis i of (positions, rest) stands in the result.
Shape places_of(const PickedRows& r) {
  Shape axes;
  const int n = r.rows.rank();
  for (int i = 0; i < r.place; ++i) axes.push_back(n + i);
  for (int i = 0; i < n; ++i) axes.push_back(i);
  for (int i = r.place; i < r.rest.rank(); ++i) axes.push_back(n + i);
  return axes;
}

Shape inverse(const Shape& axes) {
  Shape back = axes;
  for (int i = 0; i < axes.rank(); ++i) back[static_cast<int>(axes[i])] = i;
  return back;
}

/// `table` with `values` at or added to its rows, as a new tensor.
Tensor with_rows(std::string_view call, const Tensor& table, const Tensor& rows, const Tensor& values,
                 Put put) {
  if (put == Put::replace) return apply(ops::WriteRows{call}, clone(table), rows, values);
  const DType dtype = table.dtype();
  if (is_floating(dtype)) {
    const Tensor wide = to(values, compute_dtype(dtype));
    return to(add(to(table, wide.dtype()), apply(ops::EmbeddingGrad{table.shape()[0]}, wide, rows)), dtype);
  }
  const std::int64_t n = rows.numel(), width = table.numel() / std::max<std::int64_t>(table.shape()[0], 1);
  const Tensor at = expand(reshape(rows, {1, n}), {width, n});
  const Tensor sums = apply(ops::Scatter{table.shape()[0]}, transpose(reshape(values, {n, width}), 0, 1), at);
  return add(table, reshape(transpose(sums, 0, 1), table.shape()));
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
  const Parts parts = Taking("index", x, at).parts();
  if (parts.picks.empty()) return parts.box;
  const PickedRows r = rows_of("index", parts);
  return ordered(apply(ops::Embedding{"index"}, table_of(parts.box, r), r.rows), places_of(r));
}

namespace {

/// The mask of an index that is one mask and nothing else, if one value for all its places is to replace
/// them: that is written without looking where they are.
const Tensor* mask_to_fill(const Tensor& x, std::span<const At> at, const Tensor& values, Put put) {
  const auto* mask = at.size() == 1 ? std::get_if<Tensor>(&at[0].what()) : nullptr;
  if (!mask || mask->dtype() != DType::boolean || mask->device() != x.device()) return nullptr;
  const int rank = mask->rank();
  bool fits = put == Put::replace && rank <= x.rank() && values.device() == x.device() &&
              values.numel() == 1 && values.rank() <= x.rank() - rank + 1;
  for (int i = 0; fits && i < rank; ++i) fits = mask->shape()[i] == x.shape()[i];
  return fits ? mask : nullptr;
}

}  // namespace

Tensor index_put_(const Tensor& x, std::span<const At> at, const Tensor& values, Put put) {
  constexpr std::string_view call = "index_put_";
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
  PickedRows r;
  if (!parts.picks.empty()) r = rows_of(call, parts);
  parts.box = {};
  Tensor given = to(values, x.dtype());
  if (&given.storage() == &x.storage()) given = clone(given);
  const auto fit = [&](const Shape& shape) {
    check<ShapeError>(fits_into(given.shape(), shape), "{}: values of shape {} do not fit into {}", call,
                      values.shape(), shape);
    return expand(given, shape);
  };
  const auto old = [&] { return reshape(slices_of(parts.write, x), box); };
  if (parts.picks.empty()) {
    const Tensor fitted = fit(box);
    write_box(x, parts.write, put == Put::replace ? fitted : add(old(), fitted));
    return x;
  }
  const Shape places = places_of(r), result = joined(r.rows.shape(), r.rest);
  Shape shape = result;
  for (int i = 0; i < places.rank(); ++i) shape[i] = result[static_cast<int>(places[i])];
  const Tensor fitted = ordered(fit(shape), inverse(places));
  const bool whole = parts.write.size == x.shape() && box == x.shape();
  if (put == Put::replace && whole && r.picked.rank() == 1 && r.order[0] == 0) {
    apply(ops::WriteRows{call}, x, r.rows, fitted);
    return x;
  }
  const Tensor after = with_rows(call, table_of(old(), r), r.rows, fitted, put);
  write_box(x, parts.write, ordered(reshape(after, joined(r.picked, r.rest)), inverse(r.order)));
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

namespace {

/// Places as positions along each axis, (places, axes).
Tensor positions_on_host(const Tensor& places, const Shape& shape) {
  const std::int64_t count = places.numel(), rank = shape.rank();
  const Tensor found = empty({{count, rank}, DType::i64, Device::cpu()});
  const std::int64_t* place = places.data<std::int64_t>();
  auto* at = reinterpret_cast<std::int64_t*>(found.raw());
  parallel_for(count, 1 << 12, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      for (std::int64_t rest = place[i], axis = rank - 1; axis >= 0; --axis) {
        const std::int64_t size = shape[static_cast<int>(axis)];
        at[i * rank + axis] = rest % size;
        rest /= size;
      }
  });
  return found;
}

/// The same by ops of the places' device.
Tensor positions_of(const Tensor& places, const Shape& shape) {
  std::vector<Tensor> along;
  std::int64_t below = std::max<std::int64_t>(shape.numel(), 1);
  for (const std::int64_t size : shape) {
    below /= std::max<std::int64_t>(size, 1);
    along.push_back(remainder(floor_divide(places, below), std::max<std::int64_t>(size, 1)));
  }
  return along.empty() ? zeros({places.numel(), 0}, {DType::i64, places.device()}) : stack(along, 1);
}

}  // namespace

Tensor nonzero(const Tensor& x) {
  const Tensor places = places_where("nonzero", x);
  if (x.rank() == 1) return unsqueeze(places, 1);
  return x.device().type == DeviceType::cpu ? positions_on_host(places, x.shape())
                                            : positions_of(places, x.shape());
}

Tensor masked_select(const Tensor& x, const Tensor& mask) {
  check<DTypeError>(mask.dtype() == DType::boolean, "masked_select: the mask must be bool, got {}",
                    name_of(mask.dtype()));
  const Shape shape = broadcast_shapes("masked_select", x.shape(), mask.shape());
  const Shape list{shape.numel()};
  return index(reshape(expand(x, shape), list), {At(reshape(expand(mask, shape), list))});
}

}  // namespace sherd
