// Elements and slices picked and put by their positions.
#include "runtime/ops/picking.h"

#include "runtime/cuda/check.h"
#include "runtime/cuda/picking.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/index.h"

namespace sherd::cuda {
namespace {

const std::int64_t* integers(const Tensor& t) { return reinterpret_cast<const std::int64_t*>(t.raw()); }

ReportingCall reporting(std::string_view name, const Tensor& index) {
  DeviceState& state = state_of(index.device());
  return {name.data(), state.faults(), state.stream()};
}
PositionsCall positions(const ops::Picking& op, const Tensor& index) {
  return {reporting(op.call, index), integers(index)};
}

/// Of dense tensors: all picks, and the lines along the axis of the positions.
struct Picks {
  PickWalk all, lines;
  std::int64_t of_line = 1, index_axis = 1, value_axis = 1, outer = 1, inner = 1;

  /// `unit` is how many elements of a slice are moved as one.
  Picks(const ops::Picking& op, const Shape& shape, const Shape& index, std::int64_t unit = 1) {
    if (op.of == ops::Of::slices) {
      const ops::SliceSizes s(shape, op.axis, op.axes);
      outer = s.outer, inner = s.inner / unit;
      across(inner, 1, 0, 1);
      along(index.numel(), s.columns, inner, 1, inner);
      across(outer, s.columns * inner, 0, of_line * inner);
      return;
    }
    std::int64_t in_x = 1, in_index = 1;
    for (int i = shape.rank() - 1; i >= 0; --i) {
      if (i == op.axis)
        along(index[i], shape[i], in_x, in_index, in_index);
      else
        across(index[i], in_x, in_index, in_index);
      in_x *= shape[i], in_index *= index[i];
    }
  }

 private:
  void across(std::int64_t n, std::int64_t in_x, std::int64_t in_index, std::int64_t in_values) {
    all.add(n, in_x, in_index, in_values);
    lines.add(n, in_x, in_index, in_values);
  }
  void along(std::int64_t n, std::int64_t columns, std::int64_t in_x, std::int64_t in_index,
             std::int64_t in_values) {
    all.add(n, 0, in_index, in_values);
    of_line = n, index_axis = in_index, value_axis = in_values;
    all.columns = lines.columns = columns;
    all.x_axis = lines.x_axis = in_x;
  }
};

/// Elements that are moved as one: of slices as many as make up to 16 bytes.
std::int64_t unit_of(const ops::Picking& op, const Shape& shape, std::int64_t size, const void* a,
                     const void* b) {
  if (op.of == ops::Of::elements) return 1;
  const auto bits = static_cast<std::uintptr_t>(ops::SliceSizes(shape, op.axis, op.axes).inner * size) |
                    reinterpret_cast<std::uintptr_t>(a) | reinterpret_cast<std::uintptr_t>(b);
  std::int64_t bytes = size;
  while (bytes < 16 && bits % static_cast<std::uintptr_t>(2 * bytes) == 0) bytes *= 2;
  return bytes / size;
}

void check_count(const ops::Picking& op, std::int64_t picks, std::int64_t places) {
  check<ValueError>(picks < std::int64_t{1} << 31 && places < std::int64_t{1} << 31,
                    "{}: {} positions for {} places are more than 2^31; take them in parts", op.call, picks,
                    places);
}

/// Whether the last picks are found line by line: each is dense, and fits a block's memory.
bool last_by_lines(const ops::Picking& op, const Picks& picks) {
  return op.of == ops::Of::elements && picks.index_axis == 1 && picks.all.columns <= most_line_columns &&
         (picks.lines.count >= 64 || picks.of_line <= 4096);
}

/// The last pick of each element of x, or of slices of each position: -1 where there is none.
Tensor last_picks(const ops::Picking& op, const Picks& picks, std::int64_t numel, const Tensor& index) {
  FindLastCall find{positions(op, index), picks.all};
  std::int64_t places = numel;
  if (op.of == ops::Of::slices) {
    find.picks = {};
    find.picks.add(picks.of_line, 0, 1, 1);
    find.picks.columns = places = picks.all.columns;
  }
  check_count(op, find.picks.count, places);
  const Tensor last = empty(Shape{places}, {DType::i32, index.device()});
  check_cuda(cudaMemsetAsync(last.raw(), 0xff, static_cast<std::size_t>(places) * sizeof(int), find.stream),
             op.call);
  find.last = reinterpret_cast<int*>(last.raw());
  launch_find_last(find);
  return last;
}

void take_picks(const ops::Take& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor &x = in[0], &index = in[1];
  const std::int64_t size = size_of(x.dtype()), unit = unit_of(op, x.shape(), size, x.raw(), out[0].raw());
  const Picks picks(op, x.shape(), index.shape(), unit);
  const TakeCall call{positions(op, index), picks.all, size * unit, x.raw(), out[0].raw()};
  if (!op.last) {
    launch_take(call);
  } else if (last_by_lines(op, picks)) {
    check_count(op, picks.of_line, picks.all.columns);
    launch_take_last({call, false, nullptr, picks.lines, picks.of_line});
  } else {
    const Tensor last = last_picks(op, picks, x.numel(), index);
    launch_take_last({call, op.of == ops::Of::slices, reinterpret_cast<const int*>(last.raw()), {}, 0});
  }
  check_launch(op.name);
}

/// What `y` is made of before something is put there: `base`, which may be itself, or zeros.
void begin_with(const Tensor& base, const Tensor& y) {
  if (!base.defined())
    zero_(y);
  else if (!base.is(y))
    copy_(y, base);
}

void replace(const ops::PutAt& op, const Tensor& base, const Tensor& index, const Tensor& given,
             const Tensor& y) {
  const bool slices = op.of == ops::Of::slices, one = ops::is_one(given);
  const Tensor values = one ? given : contiguous(given);
  const std::int64_t size = size_of(y.dtype());
  const std::int64_t unit = one ? 1 : unit_of(op, y.shape(), size, values.raw(), y.raw());
  const Picks picks(op, y.shape(), index.shape(), unit);
  ReplaceCall call{positions(op, index), picks.all, size * unit, slices, one, values.raw(), y.raw()};
  const bool repeats = !op.distinct && !one && picks.of_line > 1,
             by_lines = repeats && last_by_lines(op, picks);
  if (repeats && !by_lines && !slices && size <= 4 && picks.all.count >= y.numel() / 4) {
    check_count(op, picks.all.count, y.numel());
    const Tensor below = base.defined() ? contiguous(base) : Tensor(),
                 packed = empty(Shape{y.numel()}, {DType::i64, y.device()});
    check_cuda(cudaMemsetAsync(packed.raw(), 0, static_cast<std::size_t>(packed.spec().bytes()), call.stream),
               op.call);
    return launch_replace_packed(
        {call, y.numel(), raw_or_null(below), reinterpret_cast<unsigned long long*>(packed.raw())});
  }
  begin_with(base, y);
  constexpr std::int64_t short_call = 1 << 18;  // picks; of more, other launches are a small part
  if (repeats && slices && picks.all.count <= short_call && picks.all.columns < std::int64_t{1} << 31)
    call.few = FewPositions::of(picks.of_line, picks.all.columns);
  if (call.few.count > 0) return launch_replace(call);
  Tensor last;
  if (by_lines) {
    check_count(op, picks.of_line, picks.all.columns);
    call.lines = picks.lines;
    call.line_picks = picks.of_line;
  } else if (repeats) {
    last = last_picks(op, picks, y.numel(), index);
    call.last = reinterpret_cast<const int*>(last.raw());
  }
  launch_replace(call);
}

AddCall add_call(const ops::PutAt& op, const Tensor& index, const Tensor& values, const Tensor& y,
                 const Tensor& base) {
  const Picks picks(op, y.shape(), index.shape());
  AddCall call{positions(op, index)};
  call.dtype = y.dtype();
  call.picks = picks.all;
  call.lines = picks.lines;
  call.line_picks = picks.of_line;
  call.index_axis = picks.index_axis;
  call.value_axis = picks.value_axis;
  call.outer = picks.outer;
  call.inner = picks.inner;
  call.numel = y.numel();
  call.slices = op.of == ops::Of::slices;
  call.distinct = op.distinct;
  call.based = base.defined();
  call.values = values.raw();
  call.y = y.raw();
  call.base = raw_or_null(base);
  return call;
}

void add(const ops::PutAt& op, const Tensor& given_base, const Tensor& index, const Tensor& given,
         const Tensor& y) {
  const Tensor values = contiguous(given), base = given_base.defined() ? contiguous(given_base) : Tensor();
  AddCall call = add_call(op, index, values, y, base);
  const AddCall::Way way = call.way();
  if (way == AddCall::Way::runs || way == AddCall::Way::wide_runs)
    check_count(op, call.sorted(), call.destinations());
  if (!call.based && !call.covers()) zero_(y);
  if (call.based && call.base != call.y && !call.reads_base()) copy_(y, base);
  const Tensor scratch =
      empty(Shape{static_cast<std::int64_t>(call.scratch_bytes())}, {DType::u8, y.device()});
  call.scratch = scratch.raw();
  launch_add(call);
}

/// Puts into `y`, which is dense, beside what `base` has, or zeros; that may be y itself.
void put_into(const ops::PutAt& op, const Tensor& base, const Tensor& index, const Tensor& values,
              const Tensor& y) {
  if (values.numel() == 0)
    begin_with(base, y);
  else
    op.put == Put::add ? add(op, base, index, values, y) : replace(op, base, index, values, y);
  check_launch(op.name);
}

void put_picks(const ops::PutAt& op, Inputs in, Outputs out) {
  const Tensor y = alias(out[0], out[0].layout());
  put_into(op, in[0], in[1], in[2], y);
}

void put_grad(const ops::PutAtGrad& op, Inputs in, Outputs out) {
  const Tensor &gy = in[0], &index = in[1];
  const Picks picks(op, gy.shape(), index.shape());
  const bool at_once = op.of == ops::Of::elements && !op.distinct && picks.of_line > 1 &&
                       out[1].numel() > 0 && !last_by_lines(op, picks);
  if (!at_once) {
    const Tensor zero = Tensor::scalar(0, {gy.dtype(), gy.device()});
    put_into({op, Put::replace, gy.shape()}, gy, index, expand(zero, out[1].shape()),
             alias(out[0], out[0].layout()));
    return take_picks({op, !op.distinct}, in, out.subspan(1));
  }
  const Tensor last = last_picks(op, picks, gy.numel(), index);
  zero_(alias(out[1], out[1].layout()));
  launch_split_last({gy.numel(), size_of(gy.dtype()), reinterpret_cast<const int*>(last.raw()), gy.raw(),
                     out[0].raw(), out[1].raw(), stream_of(gy.device())});
  check_launch(op.name);
}

void put_picks_in_place(const ops::PutAtInPlace& op, Inputs in, Outputs out) {
  const Tensor x = alias(out[0], out[0].layout()), y = x.is_contiguous() ? x : clone(x);
  put_into(op, y, in[1], in[2], y);
  if (!y.is(x)) copy_(x, y);
}

void element_numbers(const ops::ElementNumbers& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  if (in.size() > NumbersCall::most_axes)
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  NumbersCall call{reporting(op.call, in[0])};
  for (const Tensor& at : in) {
    call.size[call.axes] = op.sizes[call.axes];
    call.at[call.axes++] = integers(at);
  }
  call.count = out[0].numel();
  call.numbers = reinterpret_cast<std::int64_t*>(out[0].raw());
  launch_numbers(call);
  check_launch(op.name);
}

}  // namespace

void add_picking() {
  add_kernel<element_numbers>(DeviceType::cuda);
  add_kernel<take_picks>(DeviceType::cuda);
  add_kernel<put_picks>(DeviceType::cuda);
  add_kernel<put_grad>(DeviceType::cuda);
  add_kernel<put_picks_in_place>(DeviceType::cuda);
}

}  // namespace sherd::cuda
