// Products, and their gradients.
#include <algorithm>
#include <vector>

#include "runtime/cpu/reduce.h"
#include "runtime/cpu/rows.h"
#include "runtime/cpu/scratch.h"
#include "runtime/kernel.h"
#include "runtime/ops.h"
#include "runtime/ops/prod.h"

namespace sherd::cpu {
namespace {

constexpr std::int64_t product_task = 1 << 14;  // elements that one task multiplies

/// The product of `n` rows of `columns` contiguous elements, by halves: the second half is multiplied into
/// the first one, in `half` of (n + 1) / 2 rows, until one row is left.
template <class T, class C>
void multiply_rows(const T* x, std::int64_t n, std::int64_t stride, std::int64_t columns, C* half) {
  const bool dense = stride == columns;  // then both halves are one row each
  const std::int64_t rows = dense ? 1 : n / 2, width = dense ? n / 2 * columns : columns;
  std::int64_t left = (n + 1) / 2;
  for (std::int64_t i = 0; i < rows; ++i) {
    const T *a = x + i * stride, *b = a + left * stride;
    for (std::int64_t j = 0; j < width; ++j) half[i * width + j] = C(a[j]) * C(b[j]);
  }
  for (std::int64_t j = 0; n % 2 != 0 && j < columns; ++j)
    half[n / 2 * columns + j] = C(x[n / 2 * stride + j]);
  for (; left > 1; left = (left + 1) / 2) {
    const std::int64_t pairs = left / 2 * columns;
    const C* second = half + (left + 1) / 2 * columns;
    for (std::int64_t j = 0; j < pairs; ++j) half[j] *= second[j];
  }
}

/// Along contiguous elements: four chains of vectors, then their lanes by halves.
template <class T, class C>
C multiply_row(const T* x, std::int64_t n) {
  constexpr std::int64_t step = lanes<C>;
  const Vec<C> ones = splat(C(1));
  Vec<C> chain[4] = {ones, ones, ones, ones};
  std::int64_t j = 0;
  for (; j + 4 * step <= n; j += 4 * step) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) chain[c] = chain[c] * load_as<C>(x + j + c * step);
  }
  for_vectors<C>(n - j,
                 [&](std::int64_t i, auto count) { chain[0] = chain[0] * take<C>(x + j + i, count, C(1)); });
  C lane[step];
  store(lane, (chain[0] * chain[1]) * (chain[2] * chain[3]));
  for (std::int64_t half = step / 2; half > 0; half /= 2)
    for (std::int64_t l = 0; l < half; ++l) lane[l] *= lane[l + half];
  return lane[0];
}

/// Of contiguous tensors. Integers wrap.
template <class T, class To>
void product(const StridedReduction& r, const T* x, To* out) {
  using C = std::conditional_t<std::is_integral_v<T>, std::uint64_t, compute_t<T>>;
  const std::int64_t chunk = product_task / std::min(r.inner, piece_width);
  if (r.reduce <= chunk) {
    for_pieces(r, [&](const StridedReduction& part, std::int64_t from, std::int64_t to) {
      if (part.inner == 1 && part.reduce_stride == 1) {
        out[to] = To(multiply_row<T, C>(x + from, part.reduce));
        return;
      }
      C half[product_task / 2 + piece_width];
      multiply_rows(x + from, part.reduce, part.reduce_stride, part.inner, half);
      for (std::int64_t j = 0; j < part.inner; ++j) out[to + j] = To(half[j]);
    });
    return;
  }
  const std::int64_t chunks = r.reduce / chunk, rest = r.reduce % chunk, rows = chunks + (rest > 0);
  std::vector<C> partial(static_cast<std::size_t>(rows * r.inner));
  for (std::int64_t o = 0; o < r.outer; ++o, x += r.outer_stride, out += r.inner) {
    product(StridedReduction::contiguous(chunks, chunk, r.inner), x, partial.data());
    if (rest > 0)
      product(StridedReduction::contiguous(1, rest, r.inner), x + chunks * chunk * r.inner,
              partial.data() + chunks * r.inner);
    product(StridedReduction::contiguous(1, rows, r.inner), static_cast<const C*>(partial.data()), out);
  }
}

/// Turns `n` elements into the gradients of their product, whose own is `gy`, through the product of their
/// halves. Behind them there is room for twice as many.
template <class C>
void differentiate_product(C* x, std::int64_t n, C gy) {
  if (n == 1) {
    *x = gy;
    return;
  }
  const std::int64_t pairs = n / 2, half = n - pairs;
  C *second = x + half, *product = x + n;
  for (std::int64_t i = 0; i < pairs; ++i) product[i] = x[i] * second[i];
  if (half > pairs) product[pairs] = x[pairs];
  differentiate_product(product, half, gy);
  for (std::int64_t i = 0; i < pairs; ++i) {
    const C a = x[i];
    x[i] = product[i] * second[i];
    second[i] = product[i] * a;
  }
  if (half > pairs) x[pairs] = product[pairs];
}

void prod_op(const ops::Prod& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operand p = operand(in[0], op.axes);
  if (p.r.reduce == 0) {  // the product of nothing
    fill_(alias(out[0], out[0].layout()), 1);
    return;
  }
  with_element(in[0].dtype(), [&]<class T>() {
    product(p.r, reinterpret_cast<const T*>(p.x.raw()), reinterpret_cast<sum_t<T>*>(out[0].raw()));
  });
}

/// The gradients of the product of `n` elements, whose own is `gy`.
template <class T, class C>
void differentiate_row(const T* x, std::int64_t n, C gy, T* gx) {
  const Scratch<C> held = scratch<C>(3 * n);
  check<OutOfMemoryError>(held != nullptr, "prod: no memory for the gradients of {} elements", n);
  for (std::int64_t i = 0; i < n; ++i) held[i] = C(x[i]);
  differentiate_product(held.get(), n, gy);
  for (std::int64_t i = 0; i < n; ++i) gx[i] = T(held[i]);
}

/// Of a long row through the products of its chunks.
template <class T, class C>
void differentiate_long_row(const T* x, std::int64_t n, C gy, T* gx) {
  const std::int64_t chunks = ceil_div(n, product_task);
  std::vector<C> products(static_cast<std::size_t>(chunks)), slopes(products);
  const auto for_chunks = [&](const auto& body) {
    parallel_for(n, product_task, [&](std::int64_t begin, std::int64_t end) {
      body(begin, end - begin, static_cast<std::size_t>(begin / product_task));
    });
  };
  for_chunks([&](std::int64_t begin, std::int64_t count, std::size_t chunk) {
    products[chunk] = multiply_row<T, C>(x + begin, count);
  });
  differentiate_row(products.data(), chunks, gy, slopes.data());
  for_chunks([&](std::int64_t begin, std::int64_t count, std::size_t chunk) {
    differentiate_row(x + begin, count, slopes[chunk], gx + begin);
  });
}

void prod_grad_op(const ops::ProdGrad& op, Inputs in, Outputs out) {
  const Tensor& x = in[1];
  if (x.numel() == 0) return;
  const std::int64_t n = x.shape()[1], grain = std::max<std::int64_t>(1, product_task / n);
  with_floating(op.name, x.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    const T *gy = in[0].data<T>(), *from = x.data<T>();
    T* gx = reinterpret_cast<T*>(out[0].raw());
    if (n > product_task) {
      for (std::int64_t r = 0; r < x.shape()[0]; ++r)
        differentiate_long_row(from + r * n, n, C(gy[r]), gx + r * n);
      return;
    }
    parallel_for(x.shape()[0], grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) differentiate_row(from + r * n, n, C(gy[r]), gx + r * n);
    });
  });
}

}  // namespace

void add_prod() {
  add_kernel<prod_op>(DeviceType::cpu);
  add_kernel<prod_grad_op>(DeviceType::cpu);
}

}  // namespace sherd::cpu
