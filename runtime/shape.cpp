#include "runtime/shape.h"

#include <algorithm>
#include <ostream>

namespace sherd {

void Shape::insert(int at, std::int64_t n) {
  push_back(n);
  std::rotate(begin() + at, end() - 1, end());
}

void Shape::erase(int at) {
  std::rotate(begin() + at, begin() + at + 1, end());
  --rank_;
}

std::string to_string(const Shape& shape) {
  if (shape.is_none()) return "(none)";
  return fmt::format("({})", fmt::join(shape.begin(), shape.end(), ", "));
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << to_string(shape); }

int normalize_axis(std::string_view op, std::int64_t axis, int rank) {
  const std::int64_t low = rank == 0 ? -1 : -rank, high = rank == 0 ? 0 : rank - 1;
  check<ShapeError>(axis >= low && axis <= high,
                    "{}: axis {} is outside [{}, {}] of a tensor with {} dimensions", op, axis, low, high,
                    rank);
  return static_cast<int>(axis < 0 ? axis + std::max(rank, 1) : axis);
}

Shape broadcast_shapes(std::string_view op, const Shape& a, const Shape& b) {
  check<ValueError>(!a.is_none() && !b.is_none(),
                    "{}: an input is an empty handle (`defined()` is false); assign a tensor first", op);
  const int rank = std::max(a.rank(), b.rank());
  Shape out;
  for (int i = 0; i < rank; ++i) {
    const int ia = i - (rank - a.rank()), ib = i - (rank - b.rank());
    const std::int64_t na = ia < 0 ? 1 : a[ia], nb = ib < 0 ? 1 : b[ib];
    check<ShapeError>(na == nb || na == 1 || nb == 1,
                      "{}: shapes {} and {} do not broadcast (size {} against {} at axis {})", op, a, b, na,
                      nb, i);
    out.push_back(na == 1 ? nb : na);
  }
  return out;
}

}  // namespace sherd
