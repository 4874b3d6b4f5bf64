// Elements and slices picked and put by their positions.
#include "runtime/ops/picking.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

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
constexpr std::int64_t wide_slice = 16;          // elements of slices that are summed one by one

/// Calls `f.operator()<T>()` for what adds up; bool was refused before.
template <class F>
void for_numbers(DType dtype, const F& f) {
  with_element(dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, bool>) f.template operator()<T>();
  });
}

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
        note(index[i], in_x, in_index);
        count *= index[i];
      }
      in_x *= x[i], in_index *= index[i];
    }
  }
  /// Axes that are one in both tensors become one.
  void note(std::int64_t n, std::int64_t in_x, std::int64_t in_index) {
    const int inner = others - 1;
    if (others > 0 && x_step[inner] * size[inner] == in_x && step[inner] * size[inner] == in_index) {
      size[inner] *= n;
      return;
    }
    size[others] = n, x_step[others] = in_x, step[others] = in_index;
    ++others;
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

void take_elements(const ops::Take& op, Inputs in, Outputs out) {
  const Tensor &x = in[0], &index = in[1];
  const std::int64_t* at = index.data<std::int64_t>();
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

/// Slices across an axis, and `picks` of them for each of `outer`.
struct Slices : ops::SliceSizes {
  std::int64_t picks;
  const std::int64_t* at;
  Slices(const ops::Picking& op, const Shape& shape, const Tensor& index)
      : SliceSizes(shape, op.axis, op.axes), picks(index.numel()), at(index.data<std::int64_t>()) {}
};

/// Calls `body(first pick, position, first slice of x, count)` for runs of picks that may run at the same
/// time.
template <class F>
void for_runs(const Slices& s, std::int64_t grain, const F& body) {
  parallel_for(s.outer * s.picks, grain, [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t o = begin / s.picks, j = begin - o * s.picks, n = std::min(end - begin, s.picks - j);
      body(begin, s.at + j, o * s.columns, n);
      begin += n;
    }
  });
}

void take_slices(const Slices& s, const Tensor& from, const Tensor& y) {
  const std::int64_t size = size_of(from.dtype()), bytes = s.inner * size;
  if (s.inner == 1)
    return with_bits(size, [&]<class T>(T) {
      const T* x = reinterpret_cast<const T*>(from.raw());
      T* to = reinterpret_cast<T*>(y.raw());
      for_runs(s, task_elements,
               [&](std::int64_t first, const std::int64_t* at, std::int64_t base, std::int64_t n) {
                 for (std::int64_t i = 0; i < n; ++i) to[first + i] = x[base + at[i]];
               });
    });
  // By value, since bytes that are written might be what a reference names.
  const auto move = [bytes, x = from.raw(), to = y.raw()](std::int64_t first, const std::int64_t* at,
                                                          std::int64_t base, std::int64_t n) {
    const std::byte* slices = x + base * bytes;
    std::byte* next = to + first * bytes;
    for (std::int64_t i = 0; i < n; ++i, next += bytes)
      std::memcpy(next, slices + at[i] * bytes, static_cast<std::size_t>(bytes));
  };
  for_runs(s, std::max<std::int64_t>(1, (1 << 16) / bytes), move);
}

void take_picks(const ops::Take& op, Inputs in, Outputs out) {
  if (op.last) return sherd::detail::adopt_reference(op.name, {op.last_in_ops(in)}, out);
  if (op.of == ops::Of::elements) {
    check_positions(op.call, in[1].data<std::int64_t>(), in[1].numel(), in[0].shape()[op.axis]);
    if (out[0].numel() > 0) take_elements(op, in, out);
    return;
  }
  const Slices s(op, in[0].shape(), in[1]);
  check_positions(op.call, s.at, s.picks, s.columns);
  if (out[0].numel() > 0) take_slices(s, in[0], out[0]);
}

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

void put_elements(const ops::PutAt& op, const Tensor& index, const Tensor& given, const Tensor& y) {
  const std::int64_t* at = index.data<std::int64_t>();
  const Lines l(op.shape, index.shape(), op.axis);
  const std::int64_t step = ops::is_one(given) ? 0 : 1;
  const Tensor values = step == 0 ? given : contiguous(given);
  if (op.put == Put::replace)
    return with_bits(y.dtype(), [&]<class T>(T) {
      const T* from = reinterpret_cast<const T*>(values.raw());
      T* to = reinterpret_cast<T*>(y.raw());
      for_each_pick(l, at, [&](std::int64_t e, std::int64_t i) { to[e] = from[i * step]; });
    });
  for_numbers(y.dtype(), [&]<class T>() {
    const T* from = reinterpret_cast<const T*>(values.raw());
    T* to = reinterpret_cast<T*>(y.raw());
    if constexpr (!std::is_same_v<T, compute_t<T>>) {
      if (l.picks > 1 && !op.distinct) return add_halves(l, op.shape[op.axis], at, from, step, to);
      for_each_pick(l, at, [&](std::int64_t e, std::int64_t i) {  // nothing is added twice
        to[e] = T(static_cast<float>(to[e]) + static_cast<float>(from[i * step]));
      });
    } else
      for_each_pick(l, at, [&](std::int64_t e, std::int64_t i) {
        to[e] = math::wrapping(std::plus<>{}, to[e], from[i * step]);
      });
  });
}

/// One after another, so that the last of equal positions stays; of wide slices all, a piece of each at a
/// time.
void replace_slices(const Slices& s, bool distinct, const Tensor& values, const Tensor& y) {
  const std::int64_t size = size_of(y.dtype()), bytes = s.inner * size;
  if (bytes == size && (distinct || s.outer > 1))
    return with_bits(size, [&]<class T>(T) {
      const T* from = reinterpret_cast<const T*>(values.raw());
      T* to = reinterpret_cast<T*>(y.raw());
      for_runs(s, distinct ? task_elements : (task_elements + s.picks - 1) / s.picks * s.picks,
               [&](std::int64_t first, const std::int64_t* at, std::int64_t base, std::int64_t n) {
                 for (std::int64_t i = 0; i < n; ++i) to[base + at[i]] = from[first + i];
               });
    });
  if (bytes == size)
    return with_bits(size, [&]<class T>(T) {
      const T* from = reinterpret_cast<const T*>(values.raw());
      T* to = reinterpret_cast<T*>(y.raw());
      for (std::int64_t i = 0; i < s.picks; ++i) to[s.at[i]] = from[i];
    });
  const std::int64_t piece = s.picks * bytes > 1 << 16 ? std::min<std::int64_t>(bytes, 1 << 10) : bytes,
                     across = (bytes + piece - 1) / piece;
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 16) / (s.picks * piece));
  parallel_for(s.outer * across, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t o = t / across, c = t % across * piece;
      const std::byte* from = values.raw() + o * s.picks * bytes + c;
      std::byte* to = y.raw() + o * s.columns * bytes + c;
      const auto count = static_cast<std::size_t>(std::min(piece, bytes - c));
      for (std::int64_t i = 0; i < s.picks; ++i) std::memcpy(to + s.at[i] * bytes, from + i * bytes, count);
    }
  });
}

/// The numbers of the picks of each position, in order; those of position r begin at first[r].
struct ByPosition {
  std::vector<std::int64_t> first, order;
  explicit ByPosition(const Slices& s)
      : first(static_cast<std::size_t>(s.columns) + 1), order(static_cast<std::size_t>(s.picks)) {
    for (std::int64_t i = 0; i < s.picks; ++i) ++first[static_cast<std::size_t>(s.at[i]) + 1];
    std::partial_sum(first.begin(), first.end(), first.begin());
    for (std::int64_t i = 0; i < s.picks; ++i) {
      auto& next = first[static_cast<std::size_t>(s.at[i])];
      order[static_cast<std::size_t>(next++)] = i;
    }
    for (std::size_t r = static_cast<std::size_t>(s.columns); r > 0; --r)
      first[r] = first[r - 1];  // moved up by the loop
    first[0] = 0;
  }
  std::span<const std::int64_t> of(std::int64_t r) const {
    const auto i = static_cast<std::size_t>(r);
    return std::span(order).subspan(static_cast<std::size_t>(first[i]),
                                    static_cast<std::size_t>(first[i + 1] - first[i]));
  }
};

/// Slice by slice of `y`: each of them is read and written once. Sums are added to it if `add`.
template <class T>
void add_wide_slices(const Slices& s, const T* values, bool add, T* y) {
  using C = compute_t<T>;
  const ByPosition by_position(s);
  constexpr std::int64_t piece = 256;  // columns of one task: positions that are named often are shared too
  const std::int64_t across = (s.inner + piece - 1) / piece;
  const std::int64_t work = (s.columns + s.picks) / s.columns * std::min(s.inner, piece);
  parallel_for(s.outer * s.columns * across, std::max<std::int64_t>(1, (1 << 14) / work),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t t = begin; t < end; ++t) {
                   const std::int64_t r = t / across, c = t % across * piece,
                                      w = std::min(piece, s.inner - c);
                   const std::int64_t o = s.outer == 1 ? 0 : r / s.columns;
                   T* to = y + r * s.inner + c;
                   const auto picks = by_position.of(r - o * s.columns);
                   if (picks.empty()) {
                     if (!add) std::fill_n(to, w, T(C(0)));
                     continue;
                   }
                   // Halves would lose every small addition, so the sums are floats until the end.
                   C sums[piece] = {};
                   for (const std::int64_t i : picks) {
                     const T* from = values + (o * s.picks + i) * s.inner + c;
                     for (std::int64_t j = 0; j < w; ++j)
                       sums[j] = math::wrapping(std::plus<>{}, sums[j], C(from[j]));
                   }
                   for (std::int64_t j = 0; j < w; ++j)
                     to[j] = T(add ? math::wrapping(std::plus<>{}, C(to[j]), sums[j]) : sums[j]);
                 }
               });
}

/// `columns` columns of every slice, summed into `sums`, whose slices are `row` elements apart.
template <class T, class C>
void add_columns(const Slices& s, const T* values, std::int64_t columns, C* sums, std::int64_t row) {
  for (std::int64_t i = 0; i < s.picks; ++i) {
    const T* from = values + i * s.inner;
    C* to = sums + s.at[i] * row;
    for (std::int64_t j = 0; j < columns; ++j) to[j] = math::wrapping(std::plus<>{}, to[j], C(from[j]));
  }
}

/// A task owns columns: all its sums run over the picks in order.
template <class T>
void add_narrow_slices(const Slices& s, bool distinct, const T* values, bool add, T* y) {
  using C = compute_t<T>;
  if (distinct && s.inner == 1)
    return for_runs(s, task_elements,
                    [&](std::int64_t first, const std::int64_t* at, std::int64_t base, std::int64_t n) {
                      for (std::int64_t i = 0; i < n; ++i) {
                        T& place = y[base + at[i]];
                        const C sum = math::wrapping(std::plus<>{}, C(0), C(values[first + i]));
                        place = T(math::wrapping(std::plus<>{}, C(place), sum));
                      }
                    });
  const std::int64_t once = s.picks * s.inner;
  const std::int64_t grain = once > 1 << 14 ? 8 : s.inner * std::max<std::int64_t>(1, (1 << 14) / once);
  parallel_for(s.outer * s.inner, grain, [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t o = begin / s.inner, c = begin - o * s.inner, w = std::min(s.inner - c, end - begin);
      const T* from = values + o * once + c;
      T* to = y + o * s.columns * s.inner + c;
      begin += w;
      if constexpr (std::is_same_v<T, C>)
        if (!add) {
          add_columns(s, from, w, to, s.inner);
          continue;
        }
      // Halves would lose every small addition, so the sums are floats until the end.
      std::vector<C> sums(static_cast<std::size_t>(s.columns * w));
      add_columns(s, from, w, sums.data(), w);
      for (std::int64_t r = 0; r < s.columns; ++r)
        for (std::int64_t j = 0; j < w; ++j) {
          T& place = to[r * s.inner + j];
          place = T(math::wrapping(std::plus<>{}, C(place), sums[static_cast<std::size_t>(r * w + j)]));
        }
    }
  });
}

void put_slices(const ops::PutAt& op, bool based, const Tensor& index, const Tensor& given, const Tensor& y) {
  const Slices s(op, op.shape, index);
  const Tensor values = contiguous(given);
  if (op.put == Put::replace) return replace_slices(s, op.distinct, values, y);
  for_numbers(y.dtype(), [&]<class T>() {
    T* to = reinterpret_cast<T*>(y.raw());
    const T* from = reinterpret_cast<const T*>(values.raw());
    s.inner >= wide_slice ? add_wide_slices(s, from, based, to)
                          : add_narrow_slices(s, op.distinct, from, based, to);
  });
}

/// Puts into `y`, which is dense and, if `based`, has what was there before.
void put_into(const ops::PutAt& op, bool based, const Tensor& index, const Tensor& values, const Tensor& y) {
  const bool of_elements = op.of == ops::Of::elements;
  const ops::SliceSizes sizes(op.shape, op.axis, of_elements ? 1 : op.axes);
  if (!op.checked) check_positions(op.call, index.data<std::int64_t>(), index.numel(), sizes.columns);
  const bool nothing = values.numel() == 0,
             all = !of_elements && op.put == Put::add && sizes.inner >= wide_slice;
  if (!based && (nothing || !all)) zero_(alias(y, y.layout()));
  if (nothing) return;
  of_elements ? put_elements(op, index, values, y) : put_slices(op, based, index, values, y);
}

void put_picks(const ops::PutAt& op, Inputs in, Outputs out) {
  if (in[0].defined()) copy_(alias(out[0], out[0].layout()), in[0]);
  put_into(op, in[0].defined(), in[1], in[2], out[0]);
}

void put_picks_in_place(const ops::PutAtInPlace& op, Inputs in, Outputs out) {
  const Tensor y = out[0].is_contiguous() ? out[0] : clone(out[0]);
  put_into(op, true, in[1], in[2], y);
  if (!y.is(out[0])) copy_(alias(out[0], out[0].layout()), y);
}

}  // namespace

void add_picking() {
  add_kernel<take_picks>(DeviceType::cpu);
  add_kernel<put_picks>(DeviceType::cpu);
  add_kernel<put_picks_in_place>(DeviceType::cpu);
}

}  // namespace sherd::cpu
