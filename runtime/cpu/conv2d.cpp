// Convolutions: by oneDNN where it has code of its own for one, else as products of matrices, image by image:
// what a block of an output's rows sees is unfolded into (taps, pixels), which lies in the cache and is gone
// when the block is done.
#include <algorithm>
#include <atomic>

#include "runtime/cpu/conv.h"
#include "runtime/cpu/gemm.h"
#include "runtime/cpu/gemm_tile.h"
#include "runtime/cpu/rows.h"
#include "runtime/cpu/scratch.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// Whether an image is what would be unfolded from it.
bool is_product(const Conv& c) {
  return c.height == 1 && c.width == 1 && c.rule.down.stride == 1 && c.rule.across.stride == 1 &&
         c.rule.down.padding == 0 && c.rule.across.padding == 0 && c.down == c.rows && c.across == c.columns;
}
/// Rows of the output that are made at a time.
std::int64_t block_of(const Conv& c) {
  constexpr std::int64_t room = 1 << 18;  // elements unfolded
  return std::clamp<std::int64_t>(room / std::max<std::int64_t>(c.taps() * c.across, 1), 1, c.down);
}

/// The windows along one axis that see a pixel at their place `tap`, not padding: [begin, end).
struct WindowsOfTap {
  std::int64_t begin, end;
  WindowsOfTap(const ops::ConvRule::Axis& axis, std::int64_t tap, std::int64_t windows, std::int64_t pixels) {
    const std::int64_t first = tap * axis.dilation - axis.padding;  // pixel of window 0
    begin = first >= 0 ? 0 : std::min(windows, (-first + axis.stride - 1) / axis.stride);
    end = first >= pixels ? begin : std::clamp((pixels - first - 1) / axis.stride + 1, begin, windows);
  }
};

/// Calls `body(line, row, seen, first)` for each line of what rows [top, bottom) of the output see: `line` of
/// (taps, bottom - top), the image's row from its channel's, or -1 in the padding, the windows across that
/// see pixels, and the pixel that the first of them sees.
template <class F>
void for_lines(const Conv& c, std::int64_t top, std::int64_t bottom, const F& body) {
  std::int64_t line = 0;
  for (std::int64_t channel = 0; channel < c.channels; ++channel)
    for (std::int64_t i = 0; i < c.height; ++i)
      for (std::int64_t j = 0; j < c.width; ++j) {
        const WindowsOfTap across(c.rule.across, j, c.across, c.columns);
        const std::int64_t first =
            across.begin * c.rule.across.stride + j * c.rule.across.dilation - c.rule.across.padding;
        for (std::int64_t y = top; y < bottom; ++y, ++line) {
          const std::int64_t row = y * c.rule.down.stride + i * c.rule.down.dilation - c.rule.down.padding;
          const bool inside = row >= 0 && row < c.rows && across.begin < across.end;
          body(line, inside ? channel * c.rows + row : -1, across, first);
        }
      }
}

template <class T, class To>
void unfold(const Conv& c, const T* image, std::int64_t top, std::int64_t bottom, To* out) {
  const std::int64_t stride = c.rule.across.stride;
  for_lines(c, top, bottom, [&](std::int64_t line, std::int64_t row, WindowsOfTap seen, std::int64_t first) {
    To* to = out + line * c.across;
    if (row < 0) return void(std::fill_n(to, c.across, To(0.0F)));
    std::fill_n(to, seen.begin, To(0.0F));
    const T* from = image + row * c.columns + first;
    const std::int64_t n = seen.end - seen.begin;
    if (stride == 1)
      for (std::int64_t i = 0; i < n; ++i) to[seen.begin + i] = To(from[i]);
    else
      for (std::int64_t i = 0; i < n; ++i) to[seen.begin + i] = To(from[i * stride]);
    std::fill_n(to + seen.end, c.across - seen.end, To(0.0F));
  });
}

/// Adds what was unfolded to the pixels that it came from.
template <class T, class To>
void fold(const Conv& c, const T* unfolded, std::int64_t top, std::int64_t bottom, To* image) {
  const std::int64_t stride = c.rule.across.stride;
  for_lines(c, top, bottom, [&](std::int64_t line, std::int64_t row, WindowsOfTap seen, std::int64_t first) {
    if (row < 0) return;
    const T* from = unfolded + line * c.across + seen.begin;
    To* to = image + row * c.columns + first;
    const std::int64_t n = seen.end - seen.begin;
    if (stride == 1)
      for (std::int64_t i = 0; i < n; ++i) to[i] += To(from[i]);
    else
      for (std::int64_t i = 0; i < n; ++i) to[i * stride] += To(from[i]);
  });
}

/// Memory of tiles, which run on several threads and must not throw for want of it.
class Rooms {
 public:
  template <class T>
  Scratch<T> take(std::int64_t count) {
    Scratch<T> room = scratch<T>(count);
    if (!room) enough_.store(false, std::memory_order_relaxed);
    return room;
  }
  void check_enough(std::string_view op) const {
    check<OutOfMemoryError>(enough_, "{}: no memory for the windows of a block of rows", op);
  }

 private:
  std::atomic<bool> enough_{true};
};

/// Calls `body(image, group)` for each of the batch: side by side if there are several, else one after
/// another, so that the products within may use all threads.
template <class F>
void for_images(const Conv& c, const F& body) {
  const std::int64_t n = c.images * c.rule.groups;
  if (n < 4) {
    for (std::int64_t i = 0; i < n; ++i) body(i / c.rule.groups, i % c.rule.groups);
    return;
  }
  parallel_for(n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(i / c.rule.groups, i % c.rule.groups);
  });
}

template <class T>
void forward(const Conv& c, const T* x, const T* weight, const T* bias, T* y, Rooms& rooms) {
  const std::int64_t block = block_of(c), pixels = c.down * c.across;
  for_images(c, [&](std::int64_t image, std::int64_t group) {
    const std::int64_t at = image * c.rule.groups + group;
    T* out = y + at * c.output();
    // The bias stands there first, so that 16-bit floats are rounded once.
    if (bias)
      for (std::int64_t o = 0; o < c.outputs; ++o)
        std::fill_n(out + o * pixels, pixels, bias[group * c.outputs + o]);
    const Scratch<T> room = is_product(c) ? nullptr : rooms.take<T>(c.taps() * block * c.across);
    if (!room && !is_product(c)) return;
    for (std::int64_t top = 0; top < c.down; top += block) {
      const std::int64_t bottom = std::min(top + block, c.down), n = (bottom - top) * c.across;
      const T* seen = x + at * c.input() + top * c.across;
      if (room) unfold(c, x + at * c.input(), top, bottom, room.get());
      gemm(Gemm<T>{.m = c.outputs,
                   .n = n,
                   .k = c.taps(),
                   .a = weight + group * c.outputs * c.taps(),
                   .lda = c.taps(),
                   .b = room ? room.get() : seen,
                   .ldb = room ? n : pixels,
                   .c = out + top * c.across,
                   .ldc = pixels,
                   .accumulate = bias != nullptr});
    }
  });
}

/// Sums over outputs and windows in f32 at least.
template <class T>
void grad_input(const Conv& c, const T* gy, const T* weight, T* gx, Rooms& rooms) {
  using C = compute_t<T>;
  constexpr bool narrow = !std::is_same_v<T, C>;
  const std::int64_t block = block_of(c), pixels = c.down * c.across, kernel = c.outputs * c.taps();
  if (is_product(c))
    return for_images(c, [&](std::int64_t image, std::int64_t group) {
      const std::int64_t at = image * c.rule.groups + group;
      gemm(Gemm<T>{.m = c.taps(),
                   .n = pixels,
                   .k = c.outputs,
                   .a = weight + group * kernel,
                   .lda = c.taps(),
                   .transpose_a = true,
                   .b = gy + at * c.output(),
                   .ldb = pixels,
                   .c = gx + at * c.input(),
                   .ldc = pixels});
    });
  const Scratch<C> kernels = rooms.take<C>(narrow ? c.rule.groups * kernel : 0);
  if (!kernels) return;
  const C* const wide = widened(weight, c.rule.groups * kernel, kernels.get());
  for_images(c, [&](std::int64_t image, std::int64_t group) {
    const std::int64_t at = image * c.rule.groups + group;
    const Scratch<C> room = rooms.take<C>(c.taps() * block * c.across), sums = rooms.take<C>(c.input()),
                     upstream = rooms.take<C>(narrow ? c.output() : 0);
    if (!room || !sums || !upstream) return;
    const C* const g = widened(gy + at * c.output(), c.output(), upstream.get());
    std::fill_n(sums.get(), c.input(), C(0));
    for (std::int64_t top = 0; top < c.down; top += block) {
      const std::int64_t bottom = std::min(top + block, c.down), n = (bottom - top) * c.across;
      gemm(Gemm<C>{.m = c.taps(),
                   .n = n,
                   .k = c.outputs,
                   .a = wide + group * kernel,
                   .lda = c.taps(),
                   .transpose_a = true,
                   .b = g + top * c.across,
                   .ldb = pixels,
                   .c = room.get(),
                   .ldc = n});
      fold(c, room.get(), top, bottom, sums.get());
    }
    std::transform(sums.get(), sums.get() + c.input(), gx + at * c.input(), [](C sum) { return T(sum); });
  });
}

/// Sums over all images in f32 at least: so many at a time, and those sums in order.
template <class T>
void grad_weight(const Conv& c, const T* gy, const T* x, T* gw, Rooms& rooms) {
  using C = compute_t<T>;
  const std::int64_t parts = std::min<std::int64_t>(c.images, 8), block = block_of(c),
                     pixels = c.down * c.across, kernel = c.outputs * c.taps(), all = c.rule.groups * kernel;
  const Scratch<C> sums = rooms.take<C>(parts * all);
  if (!sums) return;
  std::fill_n(sums.get(), parts * all, C(0));
  parallel_for(parts * c.rule.groups, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t part = i / c.rule.groups, group = i % c.rule.groups;
      const Scratch<C> room = rooms.take<C>(c.taps() * block * c.across);
      const Scratch<C> wide = rooms.take<C>(std::is_same_v<T, C> ? 0 : c.output());
      if (!room || !wide) return;
      for (std::int64_t image = part * c.images / parts; image < (part + 1) * c.images / parts; ++image) {
        const std::int64_t at = image * c.rule.groups + group;
        const C* const upstream = widened(gy + at * c.output(), c.output(), wide.get());
        for (std::int64_t top = 0; top < c.down; top += block) {
          const std::int64_t bottom = std::min(top + block, c.down), n = (bottom - top) * c.across;
          unfold(c, x + at * c.input(), top, bottom, room.get());
          gemm(Gemm<C>{.m = c.outputs,
                       .n = c.taps(),
                       .k = n,
                       .a = upstream + top * c.across,
                       .lda = pixels,
                       .b = room.get(),
                       .ldb = n,
                       .transpose_b = true,
                       .c = sums.get() + part * all + group * kernel,
                       .ldc = c.taps(),
                       .accumulate = true});
        }
      }
    }
  });
  for (std::int64_t i = 0; i < all; ++i) {
    C sum = sums[i];
    for (std::int64_t part = 1; part < parts; ++part) sum += sums[part * all + i];
    gw[i] = T(sum);
  }
}

void conv2d(const ops::Conv2d& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  const Conv c(op.rule, x.shape(), in[1].shape(), out[0].shape());
  if constexpr (has_onednn)
    if (conv_forward_onednn(c, out[0].dtype(), {x.raw(), in[1].raw(), raw_or_null(in[2]), out[0].raw()}))
      return;
  Rooms rooms;
  with_floating(op.name, out[0].dtype(), [&]<class T>() {
    forward(c, x.data<T>(), in[1].data<T>(), data_or_null<T>(in[2]), reinterpret_cast<T*>(out[0].raw()),
            rooms);
  });
  rooms.check_enough(op.name);
}

void conv2d_grad_input(const ops::Conv2dGradInput& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  if (in[2].defined()) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const Tensor gy = contiguous(in[0]);
  const Conv c(op.rule, out[0].shape(), in[1].shape(), gy.shape());
  if constexpr (has_onednn)
    if (conv_grad_input_onednn(c, out[0].dtype(), {out[0].raw(), in[1].raw(), nullptr, gy.raw()})) return;
  Rooms rooms;
  with_floating(op.name, out[0].dtype(), [&]<class T>() {
    grad_input(c, gy.data<T>(), in[1].data<T>(), reinterpret_cast<T*>(out[0].raw()), rooms);
  });
  rooms.check_enough(op.name);
}

void conv2d_grad_weight(const ops::Conv2dGradWeight& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor gy = contiguous(in[0]), x = contiguous(in[1]);
  const Conv c(op.rule, x.shape(), out[0].shape(), gy.shape());
  if constexpr (has_onednn)
    if (c.images > 0 &&
        conv_grad_weight_onednn(c, out[0].dtype(), {x.raw(), out[0].raw(), nullptr, gy.raw()}))
      return;
  Rooms rooms;
  with_floating(op.name, out[0].dtype(), [&]<class T>() {
    T* gw = reinterpret_cast<T*>(out[0].raw());
    if (c.images == 0) return void(std::fill_n(gw, out[0].numel(), T(0.0F)));
    grad_weight(c, gy.data<T>(), x.data<T>(), gw, rooms);
  });
  rooms.check_enough(op.name);
}

}  // namespace

void add_conv2d() {
  add_kernel<conv2d>(DeviceType::cpu);
  add_kernel<conv2d_grad_input>(DeviceType::cpu);
  add_kernel<conv2d_grad_weight>(DeviceType::cpu);
}

}  // namespace sherd::cpu
