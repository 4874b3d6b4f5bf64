// What picks, writes and arranges elements does what a plain model says, or refuses what the model refuses,
// in one line of the Error family and before anything is written. The bytes choose a small tensor, a call and
// its arguments. To fuzz on: as ops_fuzz.cpp says, or with a build that has a sanitizer
//   indexing_replay --random CASES SEED
#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <string_view>
#include <vector>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/fuzz/script.h"

namespace {

using namespace sherd;
using namespace sherd::test;

using Values = std::vector<std::int64_t>;

/// A tensor as a list: of values, or of places in another one.
struct Plain {
  Shape shape;
  Values values;
};

Values strides_of(const Shape& shape) {
  const Shape strides = contiguous_strides(shape);
  return {strides.begin(), strides.end()};
}

/// `at(position)` for each position of `shape`, in row-major order.
template <class F>
void each_position(const Shape& shape, F&& at) {
  Values position(static_cast<std::size_t>(shape.rank()));
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    std::int64_t rest = i;
    for (int axis = shape.rank() - 1; axis >= 0; --axis) {
      position[static_cast<std::size_t>(axis)] = rest % shape[axis];
      rest /= shape[axis];
    }
    at(position);
  }
}

Plain made_of(const Shape& shape, const std::function<std::int64_t(const Values&)>& value) {
  Plain plain{shape, {}};
  each_position(shape, [&](const Values& position) { plain.values.push_back(value(position)); });
  return plain;
}

/// What a call should come to. `strict`: it must; else it may be refused too.
struct Expected {
  std::optional<Plain> plain;  ///< none: it is refused
  bool strict = true;
};
const Expected refused{};

// ---- the models; all give places in x ----

std::optional<std::int64_t> inside(std::int64_t position, std::int64_t size) {
  if (position < -size || position >= size) return {};
  return position < 0 ? position + size : position;
}

/// Those of a slice, by Python's rule.
std::optional<Values> places_of(const Slice& slice, std::int64_t size) {
  if (slice.step <= 0) return {};
  const auto clamped = [size](std::int64_t i) {
    return std::clamp<std::int64_t>(i < 0 ? i + size : i, 0, size);
  };
  Values places;
  const std::int64_t end = clamped(slice.end.value_or(size));
  for (std::int64_t i = clamped(slice.start.value_or(0)); i < end; i += slice.step) {
    places.push_back(i);
    if (slice.step > size) break;
  }
  return places;
}

/// An axis of the result before picks are joined: places along an axis of x, or those of a pick, or a new
/// one.
struct Axis {
  int of_x = -1;
  Values places{0};
  std::optional<Shape> pick{};  ///< the shape of its positions
};

std::int64_t broadcast_at(const Shape& shape, const Values& values, const Values& position) {
  std::int64_t place = 0;
  const auto skip = static_cast<int>(position.size()) - shape.rank();
  for (int axis = 0; axis < shape.rank(); ++axis)
    place = place * shape[axis] + (shape[axis] == 1 ? 0 : position[static_cast<std::size_t>(axis + skip)]);
  return values[static_cast<std::size_t>(place)];
}

Expected index_model(const Shape& x, const std::vector<At>& entries) {
  std::vector<Axis> axes;
  int used = 0, ellipses = 0, created = 0;
  for (const At& at : entries) {
    const Tensor* tensor = std::get_if<Tensor>(&at.what());
    if (std::holds_alternative<Ellipsis>(at.what()))
      ++ellipses;
    else if (std::holds_alternative<NewAxis>(at.what()))
      ++created;
    else
      used += tensor && tensor->dtype() == DType::boolean ? tensor->rank() : 1;
  }
  if (ellipses > 1 || used > x.rank()) return refused;
  int from = 0;
  bool outside = false;
  std::int64_t dropped = 0;
  const Values strides = strides_of(x);
  const auto whole = [&] {
    axes.push_back({from, Values(static_cast<std::size_t>(x[from]))});
    std::iota(axes.back().places.begin(), axes.back().places.end(), 0);
    ++from;
  };
  for (const At& at : entries) {
    if (const auto* position = std::get_if<std::int64_t>(&at.what())) {
      const auto place = inside(*position, x[from]);
      if (!place) return refused;
      dropped += *place * strides[static_cast<std::size_t>(from++)];
    } else if (const auto* slice = std::get_if<Slice>(&at.what())) {
      const auto places = places_of(*slice, x[from]);
      if (!places) return refused;
      axes.push_back({from++, *places});
    } else if (std::holds_alternative<Ellipsis>(at.what())) {
      for (int i = used; i < x.rank(); ++i) whole();
    } else if (std::holds_alternative<NewAxis>(at.what())) {
      axes.push_back({});
    } else {
      const auto& tensor = std::get<Tensor>(at.what());
      if (tensor.dtype() == DType::boolean) {
        if (tensor.rank() == 0) {  // it takes or leaves an axis of its own
          const std::int64_t count = to(tensor, i64).item<std::int64_t>();
          axes.push_back({-1, Values(static_cast<std::size_t>(count)), Shape{count}});
          ++created;
          continue;
        }
        for (int i = 0; i < tensor.rank(); ++i)
          if (tensor.shape()[i] != x[from + i]) return refused;
        const Values holds = to(tensor, i64).to_vector<std::int64_t>();
        std::vector<Values> found(static_cast<std::size_t>(tensor.rank()));
        std::size_t next = 0;
        each_position(tensor.shape(), [&](const Values& position) {
          for (std::size_t i = 0; holds[next] != 0 && i < found.size(); ++i) found[i].push_back(position[i]);
          ++next;
        });
        for (Values& places : found) {
          const Shape shape{static_cast<std::int64_t>(places.size())};
          axes.push_back({from++, std::move(places), shape});
        }
      } else {
        if (!is_integral(tensor.dtype())) return refused;
        Values places = to(tensor, i64).to_vector<std::int64_t>();
        for (std::int64_t& place : places) {
          const auto in = inside(place, x[from]);
          outside = outside || !in;
          place = in.value_or(0);
        }
        axes.push_back({from++, std::move(places), tensor.shape()});
      }
    }
  }
  while (from < x.rank()) whole();

  // Picks together are one group of axes of the result.
  std::optional<Shape> picked;
  std::size_t first = 0;
  bool neighbours = true;
  for (std::size_t i = 0, last = 0; i < axes.size(); ++i) {
    if (!axes[i].pick) continue;
    if (!picked)
      first = i;
    else
      neighbours = neighbours && last + 1 == i;
    last = i;
    try {
      picked = broadcast_shapes("model", picked.value_or(Shape{}), *axes[i].pick);
    } catch (const Error&) {
      return refused;
    }
  }
  if (!neighbours) first = 0;
  std::size_t before = 0;  // axes of the result in front of the picks
  Values shape;
  for (std::size_t i = 0; i < axes.size(); ++i)
    if (!axes[i].pick) {
      before += picked && i < first;
      shape.push_back(static_cast<std::int64_t>(axes[i].places.size()));
    }
  const std::size_t joined = picked ? static_cast<std::size_t>(picked->rank()) : 0;
  if (picked)
    shape.insert(shape.begin() + static_cast<std::ptrdiff_t>(before), picked->begin(), picked->end());
  if (shape.size() > max_rank) return refused;
  const Plain plain = made_of(Shape(shape), [&](const Values& position) {
    const auto begin = position.begin() + static_cast<std::ptrdiff_t>(before);
    const Values of_picks(begin, begin + static_cast<std::ptrdiff_t>(joined));
    std::int64_t place = dropped;
    std::size_t next = 0;
    for (const Axis& axis : axes) {
      std::int64_t here = 0;
      if (axis.pick) {
        here = broadcast_at(*axis.pick, axis.places, of_picks);
      } else {
        const std::size_t at = next < before ? next : next + joined;
        ++next;
        here = axis.places[static_cast<std::size_t>(position[at])];
      }
      if (axis.of_x >= 0) place += here * strides[static_cast<std::size_t>(axis.of_x)];
    }
    return place;
  });
  if (outside) return {plain.values.empty() ? std::optional(plain) : std::nullopt, !plain.values.empty()};
  return {plain, x.rank() + created + static_cast<int>(joined) <= max_rank};
}

/// Every position along `axis` replaced by one of `places`.
Plain along(const Shape& x, int axis, const Values& places) {
  Shape shape = x;
  shape[axis] = static_cast<std::int64_t>(places.size());
  const Values strides = strides_of(x);
  return made_of(shape, [&](const Values& position) {
    std::int64_t place = 0;
    for (std::size_t i = 0; i < position.size(); ++i)
      place += strides[i] *
               (static_cast<int>(i) == axis ? places[static_cast<std::size_t>(position[i])] : position[i]);
    return place;
  });
}

Values range(std::int64_t begin, std::int64_t end) {
  Values places;
  for (std::int64_t i = begin; i < end; ++i) places.push_back(i);
  return places;
}

/// Places in x of what `gather` reads and `scatter` writes.
Expected gather_model(const Shape& of_x, std::int64_t axis, const Tensor& index) {
  const auto with_axis = [](const Shape& shape) { return shape.empty() ? Shape{1} : shape; };
  const Shape x = with_axis(of_x), of_index = with_axis(index.shape());
  const auto at = inside(axis, x.rank());
  if (!at || !is_integral(index.dtype()) || of_index.rank() != x.rank()) return refused;
  bool outside = false, negative = false;
  for (int i = 0; i < x.rank(); ++i)
    if (i != *at && of_index[i] > x[i]) return refused;
  const Values positions = to(index, i64).to_vector<std::int64_t>(), strides = strides_of(x);
  std::size_t next = 0;
  Plain plain = made_of(of_index, [&](const Values& position) {
    const auto in = inside(positions[next], x[static_cast<int>(*at)]);
    negative = negative || positions[next] < 0;
    outside = outside || !in;
    ++next;
    std::int64_t place = 0;
    for (std::size_t i = 0; i < position.size(); ++i)
      place += strides[i] * (static_cast<std::int64_t>(i) == *at ? in.value_or(0) : position[i]);
    return place;
  });
  plain.shape = index.shape();
  return outside ? refused : Expected{plain, !negative};
}

// ---- the comparison ----

/// Small, of few axes; some of size 0 or 1.
Shape small_shape(Script& in, int least = 0) {
  Shape shape;
  for (int rank = std::max(least, in.byte() % 5); rank > 0; --rank) shape.push_back(in.byte() % 5);
  return shape;
}

/// Positions of any dtype, near an axis's ends; or a mask, mostly of the right shape.
Tensor positions(Script& in, const Shape& x) {
  const std::uint8_t kind = in.byte();
  Shape shape;
  if (kind % 4 == 0)
    for (int i = 0, rank = in.byte() % 3; i < rank && i < x.rank(); ++i) shape.push_back(x[i]);
  else
    for (int rank = in.byte() % 3; rank > 0; --rank) shape.push_back(in.byte() % 4);
  const std::int64_t size = x.rank() > 0 ? x[in.byte() % x.rank()] : 1;
  Values values;
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    const std::uint8_t b = in.byte();
    values.push_back(b < 250 && size > 0 ? b % (kind % 2 ? 2 * size : size) - (kind % 2 ? size : 0)
                                         : in.integer());
  }
  const Tensor plain = Tensor::from(values, shape);
  return kind % 4 == 0 ? plain > 1 : to(plain, kind % 8 == 3 ? in.dtype() : i64);
}

bool holds(const Tensor& tensor, const Plain& plain) {
  return tensor.shape() == plain.shape && to(tensor, i64).to_vector<std::int64_t>() == plain.values;
}

/// `call()` gives what is expected of it, where `x` has its own places as values.
void compare(const Expected& expected, const std::function<Tensor()>& call) {
  try {
    const Tensor y = call();
    require(expected.plain && holds(y, *expected.plain));
  } catch (const Error& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    require(!expected.plain || !expected.strict);
  }
}

/// `write(x)` writes values at these places of x, or throws and leaves x as it was.
void compare_write(const Shape& shape, const Expected& places, const Tensor& values, bool fits, Put put,
                   const std::function<Tensor(const Tensor&)>& write) {
  const Tensor x = reshape(arange(0, shape.numel()), shape);
  Values after = x.to_vector<std::int64_t>();
  const Values before = after, source = to(values, i64).to_vector<std::int64_t>();
  if (places.plain && fits) {
    std::size_t next = 0;
    each_position(places.plain->shape, [&](const Values& position) {
      std::int64_t& place = after[static_cast<std::size_t>(places.plain->values[next++])];
      const std::int64_t value = broadcast_at(values.shape(), source, position);
      place = put == Put::add ? place + value : value;
    });
  }
  try {
    require(holds(write(x), {shape, after}) && places.plain && fits);
  } catch (const Error& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    require(!places.plain || !places.strict || !fits);
    require(x.to_vector<std::int64_t>() == before);
  }
}

bool broadcasts(const Shape& from, const Shape& to) {
  for (int i = 1; i <= from.rank(); ++i)
    if (i > to.rank() || (from[from.rank() - i] != 1 && from[from.rank() - i] != to[to.rank() - i]))
      return false;
  return true;
}

std::vector<At> entries_of(Script& in, const Shape& x) {
  std::vector<At> list;
  const auto end = [&] { return in.byte() % 2 ? std::optional(in.integer()) : std::nullopt; };
  for (int n = in.byte() % 5; n > 0; --n) {
    const std::uint8_t kind = in.byte() % 7;
    if (kind < 1)
      list.emplace_back(in.integer());
    else if (kind < 3) {
      const auto from = end(), to = end();
      list.emplace_back(Slice{from, to, in.byte() % 4 ? 1 : in.integer()});
    } else if (kind < 5)
      list.emplace_back(positions(in, x));
    else if (kind == 5)
      list.emplace_back(Ellipsis{});
    else
      list.emplace_back(NewAxis{});
  }
  return list;
}

/// Pieces, one after another along the axis, as a list of places each.
void compare_pieces(const Shape& x, std::optional<std::int64_t> axis, std::int64_t size, bool drops,
                    const std::function<std::vector<Tensor>()>& call) {
  try {
    const std::vector<Tensor> pieces = call();
    require(axis && size > 0 && !x.empty());
    const auto at = static_cast<int>(*axis);
    const std::int64_t n = x[at], step = std::min(size, std::max<std::int64_t>(n, 1));
    std::size_t next = 0;
    for (std::int64_t begin = 0; begin < n; begin += step) {
      Plain plain = along(x, at, range(begin, std::min(begin + step, n)));
      if (drops) plain.shape.erase(at);
      require(next < pieces.size() && holds(pieces[next++], plain));
    }
    require(next == pieces.size() || (n == 0 && pieces.size() == 1 && pieces[0].shape() == x));
  } catch (const Error& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    require(!axis || size <= 0 || x.empty());
  }
}

void compare_pad(const Shape& x, const Tensor& tensor, Script& in) {
  const auto padding = static_cast<Padding>(in.byte() % 4);
  Shape counts;
  for (int n = in.byte() % 6; n > 0; --n) {
    const std::int64_t count = in.integer();  // small where memory decides whether it is refused
    counts.push_back(count == 1 << 30 || count == std::int64_t{1} << 32 ? 7 : count);
  }
  Expected expected{Plain{x, range(0, x.numel())}};
  if (counts.rank() % 2 != 0 || counts.rank() / 2 > x.rank()) expected = refused;
  for (int i = 0; expected.plain && i < counts.rank() / 2; ++i) {
    const int axis = x.rank() - 1 - i;
    const std::int64_t n = x[axis], before = counts[2 * i], after = counts[2 * i + 1];
    if (before == 0 && after == 0) continue;
    const std::int64_t most = padding == Padding::reflect    ? n - 1
                              : padding == Padding::circular ? n
                                                             : 1 << 20;
    const bool huge = std::max(before, after) > 1000 || std::min(before, after) < -1000;
    if (huge || std::min<std::int64_t>(before, 0) + std::min<std::int64_t>(after, 0) < -n ||
        (padding != Padding::constant && (n == 0 || before > most || after > most))) {
      expected = refused;
      break;
    }
    Values places;
    for (std::int64_t place = -before; place < n + after; ++place) {
      const bool is_inside = place >= 0 && place < n;
      if (is_inside || padding == Padding::replicate)
        places.push_back(std::clamp<std::int64_t>(place, 0, n - 1));
      else if (padding == Padding::constant)
        places.push_back(-1);
      else if (padding == Padding::circular)
        places.push_back((place + n) % n);
      else
        places.push_back(place < 0 ? -place : 2 * (n - 1) - place);
    }
    Plain& before_it = *expected.plain;
    Values padded;
    each_position(along(before_it.shape, axis, range(0, static_cast<std::int64_t>(places.size()))).shape,
                  [&](const Values& position) {
                    std::int64_t place = 0;
                    const std::int64_t here =
                        places[static_cast<std::size_t>(position[static_cast<std::size_t>(axis)])];
                    for (std::size_t k = 0; k < position.size(); ++k)
                      place = place * before_it.shape[static_cast<int>(k)] +
                              (static_cast<int>(k) == axis ? std::max<std::int64_t>(here, 0) : position[k]);
                    padded.push_back(here < 0 ? -7 : before_it.values[static_cast<std::size_t>(place)]);
                  });
    before_it.shape[axis] = static_cast<std::int64_t>(places.size());
    before_it.values = std::move(padded);
  }
  compare(expected, [&] { return pad(tensor, counts, padding, -7); });
}

void one_case(Script& in) {
  const std::uint8_t which = in.byte();
  const Shape shape = small_shape(in);
  Tensor x = reshape(arange(0, shape.numel()), shape);
  if (in.byte() % 3 == 0 && shape.rank() > 1) x = transpose(contiguous(transpose(x, 0, -1)), 0, -1);
  const std::int64_t axis = in.integer();
  const auto at = inside(axis, shape.rank());
  switch (which % 14) {
    case 0:
    case 1: {
      const std::vector<At> entries = entries_of(in, shape);
      return compare(index_model(shape, entries), [&] { return index(x, entries); });
    }
    case 2:
    case 3: {
      const std::vector<At> entries = entries_of(in, shape);
      const Put put = in.byte() % 2 ? Put::add : Put::replace;
      const Expected places = index_model(shape, entries);
      Shape of_values;
      if (places.plain && in.byte() % 4)
        for (int i = in.byte() % (places.plain->shape.rank() + 1); i < places.plain->shape.rank(); ++i)
          of_values.push_back(in.byte() % 3 ? places.plain->shape[i] : 1);
      else
        of_values = small_shape(in);
      const Tensor values =
          to(reshape(arange(100, 100 + of_values.numel()), of_values), in.byte() % 2 ? i64 : f32);
      const bool fits = places.plain && broadcasts(of_values, places.plain->shape);
      return compare_write(shape, places, values, fits, put,
                           [&](const Tensor& t) { return index_put_(t, entries, values, put); });
    }
    case 4: {
      const Tensor index = positions(in, shape);
      return compare(gather_model(shape, axis, index), [&] { return gather(x, axis, index); });
    }
    case 5:
    case 6: {
      const Put put = which % 14 == 5 ? Put::add : Put::replace;
      const Tensor index = positions(in, shape);
      const Tensor values = reshape(arange(50, 50 + index.numel()), index.shape());
      return compare_write(shape, gather_model(shape, axis, index), values, true, put, [&](const Tensor& t) {
        return put == Put::add ? scatter_add(t, axis, index, values) : scatter(t, axis, index, values);
      });
    }
    case 7: {
      const std::int64_t count = in.integer(), n = at ? shape[static_cast<int>(*at)] : 0;
      const std::int64_t size = count <= 0 ? 0 : std::max<std::int64_t>(1, n / count + (n % count != 0));
      return compare_pieces(shape, at, size, false, [&] { return chunk(x, count, axis); });
    }
    case 8:
      if (in.byte() % 2) return compare_pieces(shape, at, 1, true, [&] { return unbind(x, axis); });
      {
        const std::int64_t size = in.integer();
        return compare_pieces(shape, at, size, false, [&] { return split(x, size, axis); });
      }
    case 9: {
      Shape counts;
      std::int64_t copies = 1;
      bool absurd = false;
      for (int n = in.byte() % 6; n > 0; --n) {
        const std::int64_t count = in.integer();
        absurd = absurd || count < 0 || count > 16;
        if (!absurd) copies *= count;
        counts.push_back(count);
      }
      if (absurd &&
          std::ranges::none_of(counts, [](std::int64_t n) { return n < 0 || n > std::int64_t{1} << 50; }))
        return;
      if (absurd && shape.numel() == 0) return;
      if (absurd && std::ranges::count(counts, 0) > 0) return;  // nothing of very many
      if (absurd || counts.rank() < shape.rank()) return compare(refused, [&] { return repeat(x, counts); });
      if (copies * shape.numel() > 1 << 16) return;
      const int extra = counts.rank() - shape.rank();
      Shape repeated = counts;
      for (int i = 0; i < shape.rank(); ++i) repeated[extra + i] *= shape[i];
      const Values strides = strides_of(shape);
      return compare({made_of(repeated,
                              [&](const Values& position) {
                                std::int64_t place = 0;
                                for (int i = 0; i < shape.rank(); ++i)
                                  place += position[static_cast<std::size_t>(extra + i)] % shape[i] *
                                           strides[static_cast<std::size_t>(i)];
                                return place;
                              })},
                     [&] { return repeat(x, counts); });
    }
    case 10: {
      if (shape.empty()) return;
      Values places = at ? range(0, shape[static_cast<int>(*at)]) : Values{};
      std::ranges::reverse(places);
      const Expected expected = at ? Expected{along(shape, static_cast<int>(*at), places)} : refused;
      return compare(expected, [&] { return flip(x, {axis}); });
    }
    case 11: {
      if (shape.empty()) return;
      const std::int64_t shift = in.integer();
      if (!at) return compare(refused, [&] { return roll(x, shift, axis); });
      const std::int64_t n = shape[static_cast<int>(*at)];
      Values places = range(0, n);
      if (n > 0) std::ranges::rotate(places, places.begin() + (n - (shift % n + n) % n) % n);
      return compare({along(shape, static_cast<int>(*at), places)}, [&] { return roll(x, shift, axis); });
    }
    case 12:
      return compare_pad(shape, x, in);
    default: {
      if (shape.empty()) return;
      const std::int64_t a = in.integer(), b = in.integer(), step = in.integer();
      const std::uint8_t kind = in.byte() % 3;
      if (!at) return compare(refused, [&] { return slice(x, axis, a, b, step); });
      const auto ax = static_cast<int>(*at);
      const std::int64_t n = shape[ax];
      if (kind == 0) {
        const auto places = places_of({a, b, step}, n);
        return compare(places ? Expected{along(shape, ax, *places)} : refused,
                       [&] { return slice(x, axis, a, b, step); });
      }
      if (kind == 1) {
        const bool fits = b >= 0 && b <= n && a >= 0 && a <= n - b;
        return compare(fits ? Expected{along(shape, ax, range(a, a + b))} : refused,
                       [&] { return narrow(x, axis, a, b); });
      }
      const auto place = inside(a, n);
      Expected expected = place ? Expected{along(shape, ax, {*place})} : refused;
      if (place) expected.plain->shape.erase(ax);
      return compare(expected, [&] { return select(x, axis, a); });
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Context::current().set_threads(1);
  Script script(data, size);
  while (!script.done()) one_case(script);
  return 0;
}
