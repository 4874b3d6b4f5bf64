// Rotary position embedding over whole tensors.
#include "runtime/ops/rotary.h"

#include <algorithm>

#include "runtime/element.h"
#include "runtime/parallel.h"
#include "runtime/rows_apart.h"

namespace sherd::cpu {
namespace {

constexpr std::int64_t chunk = 64;

/// At most a chunk of pairs `Step` apart, the second one of each `apart` behind the first. Loops of one thing
/// each are vectors, also of 16-bit floats; of both products at once g++ makes a complex one that rounds
/// once.
template <std::int64_t Step, class T>
void turn_chunk(const T* x, T* y, std::int64_t count, std::int64_t apart, const compute_t<T>* cosines,
                const compute_t<T>* sines, compute_t<T> sign) {
  compute_t<T> a[chunk], b[chunk], one[chunk], two[chunk];
  for (std::int64_t i = 0; i < count; ++i) a[i] = static_cast<compute_t<T>>(x[i * Step]);
  for (std::int64_t i = 0; i < count; ++i) b[i] = static_cast<compute_t<T>>(x[i * Step + apart]);
  for (std::int64_t i = 0; i < count; ++i) one[i] = a[i] * cosines[i] - b[i] * (sign * sines[i]);
  for (std::int64_t i = 0; i < count; ++i) two[i] = a[i] * (sign * sines[i]) + b[i] * cosines[i];
  for (std::int64_t i = 0; i < count; ++i) y[i * Step] = static_cast<T>(one[i]);
  for (std::int64_t i = 0; i < count; ++i) y[i * Step + apart] = static_cast<T>(two[i]);
}

template <std::int64_t Step, class T>
void turn_row(const T* x, T* y, std::int64_t half, std::int64_t apart, const compute_t<T>* cosines,
              const compute_t<T>* sines, compute_t<T> sign) {
  for (std::int64_t i = 0; i < half; i += chunk)
    turn_chunk<Step>(x + i * Step, y + i * Step, std::min(chunk, half - i), apart, cosines + i, sines + i,
                     sign);
}

void rotary(const ops::Rotary& op, Inputs in, Outputs out) {
  if (in[0].numel() == 0) return;
  const Tensor rows = sherd::detail::with_rows_apart(in[0]);
  const Shape &s = rows.shape(), &strides = rows.strides();
  const std::int64_t steps = s[1], between = s[2], half = s[3] / 2;
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 13) / s[3]);
  with_floating(op.name, rows.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    const T* const from = rows.data<T>();
    T* const to = reinterpret_cast<T*>(out[0].raw());
    const C *const cosines = in[1].data<C>(), *const sines = in[2].data<C>();
    parallel_for(rows.numel() / s[3], grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t line = row / between, step = line % steps;
        const T* const x = from + line / steps * strides[0] + step * strides[1] + row % between * strides[2];
        const C *const cos = cosines + step * half, *const sin = sines + step * half, sign(op.back ? -1 : 1);
        if (op.neighbours)
          turn_row<2>(x, to + row * s[3], half, 1, cos, sin, sign);
        else
          turn_row<1>(x, to + row * s[3], half, half, cos, sin, sign);
      }
    });
  });
}

}  // namespace

void add_rotary() { add_kernel<rotary>(DeviceType::cpu); }

}  // namespace sherd::cpu
