// Elements picked and written along one axis by their positions.
#include "runtime/ops/along.h"

#include <algorithm>

#include "runtime/cpu/element_bits.h"
#include "runtime/cpu/positions.h"
#include "runtime/cpu/rows.h"
#include "runtime/cpu/scratch.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"
#include "runtime/wrapping.h"

namespace sherd::cpu {
namespace {

constexpr std::int64_t task_elements = 1 << 14;  // elements of one task

/// How a dense index walks over a dense tensor `x`: by lines along the axis, and `width` of them side by side
/// where it is not the last one.
struct Lines {
  int others = 0;  // the other axes, outermost first
  std::int64_t size[max_rank], x_step[max_rank], step[max_rank];
  std::int64_t count = 1;                                   // of all others together
  std::int64_t picks = 1, x_axis = 1, axis = 1, width = 1;  // steps along the axis

  Lines(const Shape& x, const Shape& index, int along) {
    const int last = x.rank() - 1;
    std::int64_t in_x = 1, in_index = 1;
    for (int i = last; i >= 0; --i) {
      if (i == along) {
        picks = index[i], x_axis = in_x, axis = in_index;
      } else if (i == last) {
        width = index[i];
      } else if (index[i] != 1) {
        size[others] = index[i], x_step[others] = in_x, step[others] = in_index;
        ++others;
        count *= index[i];
      }
      in_x *= x[i], in_index *= index[i];
    }
  }
  struct Place {
    std::int64_t x = 0, index = 0;
  };
  Place place(std::int64_t line) const {
    Place p;
    for (int i = 0; i < others; ++i) {  // the innermost was noted first
      const std::int64_t at = i + 1 < others ? line % size[i] : line;
      p.x += at * x_step[i], p.index += at * step[i];
      line /= size[i];
    }
    return p;
  }
};

/// Calls `body(place, columns)` for pieces of all lines that may run at the same time, `columns` of them side
/// by side.
template <class F>
void for_lines(const Lines& l, std::int64_t side_by_side, const F& body) {
  const std::int64_t across = (l.width + side_by_side - 1) / side_by_side;
  const std::int64_t work = l.picks * std::min(l.width, side_by_side);
  const std::int64_t grain = std::max<std::int64_t>(1, task_elements / work);
  parallel_for(l.count * across, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      Lines::Place p = l.place(t / across);
      const std::int64_t c = t % across * side_by_side;
      p.x += c, p.index += c;
      body(p, std::min(side_by_side, l.width - c));
    }
  });
}

/// The picks of a line, one after another: `body(place of the element in x, in the index)`.
template <class F>
void walk(const Lines& l, Lines::Place p, std::int64_t columns, const std::int64_t* at, const F& body) {
  if (columns == 1) {
    for (std::int64_t j = 0, i = p.index; j < l.picks; ++j, i += l.axis) body(p.x + at[i] * l.x_axis, i);
    return;
  }
  for (std::int64_t j = 0; j < l.picks; ++j)
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t i = p.index + j * l.axis + c;
      body(p.x + at[i] * l.x_axis + c, i);
    }
}

/// All picks, those of one line in order: `body(place of the element in x, in the index)`.
template <class F>
void for_each_pick(const Lines& l, const std::int64_t* at, const F& body) {
  if (l.others == 1 && l.width == 1 && l.axis == 1)  // there may be many lines of a pick each
    return parallel_for(
        l.count, std::max<std::int64_t>(1, task_elements / l.picks),
        [&, picks = l.picks, step = l.x_step[0], along = l.x_axis](std::int64_t begin, std::int64_t end) {
          for (std::int64_t line = begin; line < end; ++line)
            for (std::int64_t i = line * picks; i < (line + 1) * picks; ++i)
              body(line * step + at[i] * along, i);
        });
  for_lines(l, 512, [&](Lines::Place p, std::int64_t columns) { walk(l, p, columns, at, body); });
}

void gather_along(const ops::GatherAlong& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor &x = in[0], &index = in[1];
  const std::int64_t* at = index.data<std::int64_t>();
  check_positions("gather", at, index.numel(), x.shape()[op.axis]);
  const Lines l(x.shape(), index.shape(), op.axis);
  with_bits(x.dtype(), [&]<class T>(T) {
    const T* from = reinterpret_cast<const T*>(x.raw());
    T* y = reinterpret_cast<T*>(out[0].raw());
    if (l.count == 1 && l.width == 1 && l.axis == 1)
      return parallel_for(l.picks, task_elements, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t j = begin; j < end; ++j) y[j] = from[at[j] * l.x_axis];
      });
    for_each_pick(l, at, [&](std::int64_t e, std::int64_t i) { y[i] = from[e]; });
  });
}

/// Values one after another, or one for all places.
struct Values {
  Tensor dense;
  std::int64_t step = 1;
  explicit Values(const Tensor& values) : dense(values) {
    bool same = true;
    for (int i = 0; i < values.rank(); ++i)
      same = same && (values.shape()[i] == 1 || values.strides()[i] == 0);
    step = same ? 0 : 1;
    if (!same) dense = contiguous(values);
  }
};

/// 16-bit floats are added in f32, all elements of a few lines at a time.
template <class T>
void add_halves(const Lines& l, std::int64_t length, const std::int64_t* at, const T* values,
                std::int64_t step, T* y) {
  for_lines(l, 64, [&](Lines::Place p, std::int64_t columns) {
    const Scratch<float> sums = scratch<float>(length * columns);
    check<OutOfMemoryError>(sums != nullptr, "scatter_add: no memory for the sums of {} elements",
                            length * columns);
    T* to = y + p.x;
    // What lies side by side is one row of vectors.
    const bool whole = l.x_axis == columns;
    const std::int64_t rows = whole ? 1 : length, width = whole ? length * columns : columns;
    for (std::int64_t j = 0; j < rows; ++j)
      for_vectors<float>(width, [&](std::int64_t c, auto count) {
        put<float>(&sums[j * width + c], take<float>(to + j * l.x_axis + c, count), count);
      });
    if (columns == 1)
      for (std::int64_t j = 0, i = p.index; j < l.picks; ++j, i += l.axis)
        sums[at[i]] += static_cast<float>(values[i * step]);
    else
      for (std::int64_t j = 0; j < l.picks; ++j)
        for (std::int64_t c = 0, i = p.index + j * l.axis; c < columns; ++c, ++i)
          sums[at[i] * columns + c] += static_cast<float>(values[i * step]);
    for (std::int64_t j = 0; j < rows; ++j)
      for_vectors<float>(width, [&](std::int64_t c, auto count) {
        put<float>(to + j * l.x_axis + c, take<float>(&sums[j * width + c], count), count);
      });
  });
}

void scatter_along(const ops::ScatterAlong& op, Inputs in, Outputs out) {
  const Tensor y = alias(out[0], out[0].layout());
  if (in[0].defined())
    copy_(y, in[0]);
  else
    zero_(y);
  const Tensor& index = in[1];
  if (index.numel() == 0) return;
  const std::int64_t* at = index.data<std::int64_t>();
  const std::int64_t length = op.shape[op.axis];
  check_positions(op.call(), at, index.numel(), length);
  const Lines l(op.shape, index.shape(), op.axis);
  const Values values(in[2]);
  const std::int64_t step = values.step;
  if (op.put == Put::replace)
    return with_bits(y.dtype(), [&]<class T>(T) {
      const T* from = reinterpret_cast<const T*>(values.dense.raw());
      T* to = reinterpret_cast<T*>(y.raw());
      for_each_pick(l, at, [&](std::int64_t e, std::int64_t i) { to[e] = from[i * step]; });
    });
  with_element(y.dtype(), [&]<class T>() {
    const T* from = reinterpret_cast<const T*>(values.dense.raw());
    T* to = reinterpret_cast<T*>(y.raw());
    if constexpr (std::is_same_v<T, bool>)
      fail<InternalError>("scatter_add: reached its kernel with bool");
    else if constexpr (!std::is_same_v<T, compute_t<T>>) {
      if (l.picks > 1) return add_halves(l, length, at, from, step, to);
      for_each_pick(l, at, [&](std::int64_t e, std::int64_t i) {  // nothing is added twice
        to[e] = T(static_cast<float>(to[e]) + static_cast<float>(from[i * step]));
      });
    } else
      for_each_pick(l, at, [&](std::int64_t e, std::int64_t i) {
        to[e] = math::wrapping(std::plus<>{}, to[e], from[i * step]);
      });
  });
}

}  // namespace

void add_along() {
  add_kernel<gather_along>(DeviceType::cpu);
  add_kernel<scatter_along>(DeviceType::cpu);
}

}  // namespace sherd::cpu
