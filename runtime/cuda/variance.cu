#include "runtime/cuda/fold.cuh"
#include "runtime/ops/power.h"

namespace sherd::cuda {
namespace {

/// Floats that f64 has digits to spare for.
constexpr DTypeSet narrow_floats{
    static_cast<std::uint16_t>(floating_dtypes.mask & ~(1u << static_cast<int>(DType::f64)))};

/// How far elements lie from the first one of their fold, and the squares of that, in f64. What its rounding
/// takes of a variance is less than that of f32 elements: no fold's first lies further from its mean than the
/// root of the fold's length times its deviation.
struct Moments {
  double sum = 0, squares = 0;
  __device__ Moments& operator+=(const Moments& other) {
    sum += other.sum;
    squares += other.squares;
    return *this;
  }
};

/// What deviations of a fold are from: its first element, unless all were NaN then.
template <class C>
__device__ double origin_of(C first) {
  return isfinite(first) ? static_cast<double>(first) : 0;
}

/// Of elements, or of pieces of them.
template <class T, class X = T>
struct Deviations {
  static constexpr bool reads_first = std::is_same_v<T, X>;
  using Element = X;
  using Run = Moments;
  using Total = Moments;
  VarianceCall c;

  __device__ Moments term(compute_t<X> x, compute_t<X> first) const {
    if constexpr (reads_first) {
      const double apart = static_cast<double>(x) - origin_of(first);
      return {apart, ops::Square{}(apart)};
    } else {
      return x;
    }
  }
  __device__ void store(std::int64_t i, const Moments& total) const {
    const T* first = static_cast<const T*>(c.x) + i / c.inner * c.reduce * c.inner + i % c.inner;
    const auto n = static_cast<double>(c.reduce);
    const double mean = total.sum / n, squares = total.squares - total.sum * mean;
    const double variance = (squares < 0 ? 0 : squares) / c.left,
                 spread = c.root ? math::sqrt(variance) : variance;
    c.mean[i] = origin_of(widen(*first)) + mean;
    c.variance[i] = spread;
    if (c.out != nullptr) static_cast<T*>(c.out)[i] = narrow<T>(spread);
  }
};

template <class T>
struct PieceOfDeviations : Deviations<T> {
  __device__ void store(std::int64_t i, const Moments& total) const {
    static_cast<Moments*>(this->c.partial)[i] = total;
  }
};

/// A pack is of one fold or of neighbouring ones.
template <int V, class T>
__global__ void __launch_bounds__(threads_per_block)
    variance_grad(const VarianceCall c, const double* gy, T* gx) {
  using C = compute_t<T>;
  wait_for_earlier();
  const std::int64_t n = c.outer * c.reduce * c.inner,
                     step = static_cast<std::int64_t>(gridDim.x) * threads_per_block * V;
  const bool small = n <= 0x7fffffff;  // division in 64 bits is slow
  const auto quotient = [small](std::int64_t a, std::int64_t b) {
    return small ? static_cast<std::int64_t>(static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b))
                 : a / b;
  };
  for (std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x) * V; i < n;
       i += step) {
    const std::int64_t result =
        quotient(i, c.reduce * c.inner) * c.inner + i - quotient(i, c.inner) * c.inner;
    const Packed<V, T> x = load_pack<V>(static_cast<const T*>(c.x) + i);
    Packed<V, T> g;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const std::int64_t r = c.inner == 1 ? result : result + j;
      // In f64, whose range holds what is left of a small deviation.
      g.at[j] =
          narrow<T>(static_cast<C>((static_cast<double>(widen(x.at[j])) - c.mean[r]) * (gy[r] * 2 / c.left)));
    }
    store_pack(gx + i, g);
  }
}

}  // namespace

void launch_variance(const VarianceCall& c) {
  with_element<narrow_floats>(c.dtype, [&]<class T>() {
    fold(c, Deviations<T>{c}, PieceOfDeviations<T>{c}, Deviations<T, Moments>{c});
  });
}

void launch_variance_grad(const VarianceCall& c, const double* gy, void* out) {
  with_element<narrow_floats>(c.dtype, [&]<class T>() {
    T* const gx = static_cast<T*>(out);
    const std::int64_t side = c.inner == 1 ? c.reduce : c.inner, n = c.outer * c.reduce * c.inner;
    const auto launch = [&]<int V>() {
      launch_early(variance_grad<V, T>, blocks_for(n / V), threads_per_block, c.stream, c, gy, gx);
    };
    if (wide_rows<T>(side, static_cast<const T*>(c.x), gx))
      launch.template operator()<wide_count<T>>();
    else
      launch.template operator()<1>();
  });
}

}  // namespace sherd::cuda
