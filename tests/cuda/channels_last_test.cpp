// Images whose channels are neighbours in memory: every op gives them what it gives images in row-major
// order, and those that may leave them in their order do.
#include <optional>
#include <set>

#include "autograd/capture/capture.h"
#include "autograd/recompute.h"
#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/cuda/conv_cudnn.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops/batch_norm.h"
#include "runtime/ops/conv2d.h"
#include "runtime/ops/listing.h"
#include "runtime/ops/pool2d.h"
#include "tests/cuda/agree.h"
#include "tests/runtime/norm_epilogue.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr DType floats[] = {f64, f32, bf16, f16};

/// Axes in the order N, ..., C.
Shape order_of(const Tensor& t) {
  Shape axes{0};
  for (int i = 2; i < t.rank(); ++i) axes.push_back(i);
  axes.push_back(1);
  return axes;
}
bool lies_last(const Tensor& t) {
  return t.rank() > 2 && !t.is_contiguous() && permute(t, order_of(t)).is_contiguous();
}
/// A copy in that order.
Tensor last(const Tensor& t) {
  const Shape axes = order_of(t);
  Shape back = axes;
  for (int i = 0; i < axes.rank(); ++i) back[static_cast<int>(axes[i])] = i;
  return permute(contiguous(permute(t, axes)), back);
}

/// Checks that `fn` has values and gradients for images in one order that it has in the other, and that they
/// repeat to the bit.
void check_orders(const std::vector<Tensor>& inputs, double tolerance, const Function& fn) {
  std::vector<Tensor> turned;
  for (const Tensor& t : inputs) turned.push_back(t.rank() > 2 ? last(t) : t);
  const std::vector<Tensor> wanted = values_and_gradients(inputs, fn),
                            first = values_and_gradients(turned, fn),
                            second = values_and_gradients(turned, fn);
  REQUIRE(first.size() == wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    INFO((i == 0 ? "value" : "gradient ") << (i == 0 ? "" : std::to_string(i - 1)));
    CHECK(relative_distance(first[i], wanted[i]) <= tolerance);
    CHECK(distance_in_ulps(second[i], first[i]) == 0);
  }
}

struct Sizes {
  Shape x, w;
  Conv2dOptions options;
  bool bias = false;
};

/// Kernels of one pixel and larger ones, with and without channels by eights, in groups and alone.
const Sizes convolutions[] = {
    {{2, 64, 28, 28}, {64, 64, 3, 3}, {.padding = 1}},
    {{2, 64, 28, 28}, {72, 64, 3, 3}, {.padding = 1}, true},
    {{3, 64, 27, 29}, {128, 64, 1, 1}, {}},
    {{3, 64, 28, 28}, {128, 64, 1, 1}, {}, true},
    {{1, 64, 28, 28}, {128, 64, 1, 1}, {}},
    {{3, 64, 33, 31}, {128, 64, 1, 1}, {.stride = 2}},
    {{2, 64, 28, 28}, {64, 16, 3, 3}, {.padding = 1, .groups = 4}},
    {{8, 64, 1, 256}, {64, 64, 1, 3}, {.padding = {0, 1}}},
    {{8, 64, 7, 7}, {64, 64, 7, 7}, {}},
    {{4, 3, 64, 64}, {32, 3, 7, 7}, {.stride = 2, .padding = 3}},
    {{2, 65, 28, 27}, {33, 65, 3, 3}, {.padding = 1}},
    {{2, 65, 28, 28}, {33, 65, 1, 1}, {}},
    {{3, 64, 30, 30}, {64, 1, 3, 3}, {.padding = 1, .groups = 64}},
    {{2, 8, 5, 5}, {8, 8, 3, 3}, {}},
};

bool by_eights(const Sizes& s) {
  const std::int64_t groups = s.options.groups;
  return s.w[1] % 8 == 0 && s.w[0] / groups % 8 == 0 && s.x[2] * s.x[3] * s.w.numel() >= 1 << 20;
}

}  // namespace

TEST_CASE("cuda: convolutions of images with channels last are those of images in rows") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const Sizes& s : convolutions) {
      INFO(name_of(dtype) << " x " << s.x << " w " << s.w << (s.bias ? " bias" : ""));
      Values values(31);
      std::vector<Tensor> in{on_gpu(values(s.x, dtype)), on_gpu(values(s.w, dtype))};
      if (s.bias) in.push_back(on_gpu(values({s.w[0]}, dtype)));
      // Weights have four axes too, and may lie in either order.
      check_orders(in, 2 * row_tolerance(dtype), [&](std::span<const Tensor> t) {
        return conv2d(t[0], t[1], s.bias ? t[2] : Tensor{}, s.options);
      });
    }
}

TEST_CASE("cuda: convolutions leave 16-bit images by eights with channels last, and weights in rows") {
  if (no_gpu()) return;
  if (skip_if(!cuda::state_of(gpu).cudnn_conv().is_there(), "no cuDNN here")) return;
  for (DType dtype : {f32, bf16, f16})
    for (const Sizes& s : convolutions) {
      INFO(name_of(dtype) << " x " << s.x << " w " << s.w << (s.bias ? " bias" : ""));
      Values values(32);
      const Tensor x = last(on_gpu(values(s.x, dtype))), w = on_gpu(values(s.w, dtype)),
                   bias = s.bias ? on_gpu(values({s.w[0]}, dtype)) : Tensor{};
      const Tensor y = conv2d(x, w, bias, s.options), gy = y.shape()[2] > 1 ? last(y) : y;
      const ops::ConvRule rule{{s.options.stride.down, s.options.padding.down, s.options.dilation.down},
                               {s.options.stride.across, s.options.padding.across, s.options.dilation.across},
                               s.options.groups};
      const Tensor gx = apply(ops::Conv2dGradInput{rule, s.x[2], s.x[3]}, gy, w, Tensor{}),
                   gw = apply(ops::Conv2dGradWeight{rule, s.w[2], s.w[3]}, gy, x);
      CHECK(gw.is_contiguous());
      const bool turns = size_of(dtype) == 2 && by_eights(s);
      if (size_of(dtype) != 2) CHECK((y.is_contiguous() && gx.is_contiguous()));
      if (!turns) continue;
      CHECK(lies_last(y) == (y.shape()[2] * y.shape()[3] > 1));
      CHECK(lies_last(gx));
    }
}

TEST_CASE("cuda: images that are joined, and parts of them, stay with channels last, gradients too") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    INFO(name_of(dtype));
    Values values(34);
    const Tensor a = on_gpu(values({2, 16, 9, 7}, dtype)), b = on_gpu(values({2, 24, 9, 7}, dtype)),
                 w = on_gpu(values({16, 16, 3, 3}, dtype));
    const auto joined = [](std::span<const Tensor> t) { return cat({t[0], t[1]}, 1); };
    check_orders({a, b}, 0, joined);
    check_orders({a, b}, 0, [&](std::span<const Tensor> t) {
      const Tensor y = joined(t);
      return relu(add(add(narrow(y, 1, 8, 16), narrow(y, 1, 24, 16)), t[0]));
    });
    check_orders({a, b, w}, 2 * row_tolerance(dtype), [&](std::span<const Tensor> t) {
      return conv2d(narrow(joined(t), 1, 8, 16), t[2], {}, {.padding = 1});
    });
    check_orders({a, a}, 0, [](std::span<const Tensor> t) { return cat({t[0], t[1]}, 2); });
    if (size_of(dtype) != 2) continue;
    const std::vector<Tensor> parts{last(a), last(b)};
    const Tensor y = joined(parts);
    CHECK(lies_last(y));
    CHECK(lies_last(relu(narrow(y, 1, 8, 16))));
    CHECK(lies_last(add(narrow(y, 1, 8, 16), parts[0])));
  }
}

TEST_CASE("cuda: elementwise results lie as their operands where channels are last, with the same bits") {
  if (no_gpu()) return;
  for (const ElementwiseListing& entry : elementwise_listing())
    for (DType dtype : {f64, f32, bf16, i64}) {
      if (!entry.dtypes.contains(dtype)) continue;
      for (const Shape& shape : {Shape{2, 16, 5, 7}, Shape{3, 5, 9}, Shape{2, 24, 3, 2, 4}}) {
        INFO(entry.op->name() << " " << name_of(dtype) << " " << shape);
        Values values(33);
        const double low = is_floating(dtype) ? entry.low : -9, high = is_floating(dtype) ? entry.high : 9;
        std::vector<Tensor> rows, turned;
        for (int i = 0; i < entry.arity; ++i) {
          rows.push_back(on_gpu(values(shape, dtype, low, high)));
          turned.push_back(last(rows.back()));
        }
        const auto value = [&](const std::vector<Tensor>& in) { return apply(*entry.op, Inputs(in))[0]; };
        const Tensor wanted = value(rows);
        CHECK(wanted.is_contiguous());
        CHECK(lies_last(value(turned)));
        CHECK(distance_in_ulps(value(turned), wanted) == 0);
        for (std::size_t i = 0; i + 1 < rows.size(); ++i) {
          std::vector<Tensor> mixed = rows;
          mixed[i] = turned[i];
          CHECK(distance_in_ulps(value(mixed), wanted) == 0);
          CHECK(lies_last(value(mixed)) == (size_of(dtype) == 2 && shape[1] % 8 == 0));
          // Of the other operand one image, row, or number for all.
          for (int axis = 0; axis < shape.rank(); ++axis) {
            std::vector<Tensor> spread = rows;
            for (std::size_t k = 0; k < rows.size(); ++k)
              if (k != i) spread[k] = narrow(rows[k], axis, 0, 1);
            const Tensor there = value(spread);
            spread[i] = turned[i];
            CHECK(lies_last(value(spread)));
            CHECK(distance_in_ulps(value(spread), there) == 0);
            for (std::size_t k = 0; k < rows.size(); ++k)
              if (k != i) spread[k] = expand(spread[k], shape);
            CHECK(lies_last(value(spread)));
            CHECK(distance_in_ulps(value(spread), there) == 0);
          }
        }
        if (!entry.in_place) continue;
        for (const bool other : {false, true}) {
          std::vector<Tensor> written{last(rows[0])};
          for (int i = 1; i < entry.arity; ++i) written.push_back(other ? rows[i] : turned[i]);
          apply(*entry.in_place, Inputs(written));
          CHECK(lies_last(written[0]));
          CHECK(distance_in_ulps(written[0], wanted) == 0);
        }
      }
    }
}

TEST_CASE("cuda: casts keep channels last, and copies bring images from one order into the other",
          "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : all_dtypes)
    for (const Shape& shape : {Shape{2, 16, 5, 7}, Shape{1, 64, 33, 31}, Shape{3, 5, 9}, Shape{2, 7, 4, 6},
                               Shape{4, 24, 1, 1}, Shape{2, 1, 5, 5}}) {
      INFO(name_of(dtype) << " " << shape);
      const Tensor rows = on_gpu(Values(34)(shape, dtype)), turned = last(rows);
      const bool differ = !turned.is_contiguous();
      for (DType other : all_dtypes) {
        const Tensor cast = to(turned, other);
        CHECK(lies_last(cast) == differ);
        CHECK(distance_in_ulps(cast, to(rows, other)) == 0);
      }
      CHECK(distance_in_ulps(turned, rows) == 0);
      CHECK(contiguous(turned).is_contiguous());
      CHECK(clone(turned).is_contiguous());
      CHECK(distance_in_ulps(clone(turned), rows) == 0);
      const Tensor written = last(zeros(shape, {dtype, gpu}));
      copy_(written, rows);
      CHECK(lies_last(written) == differ);
      CHECK(distance_in_ulps(written, rows) == 0);
      CHECK(distance_in_ulps(reshape(turned, {-1}), reshape(rows, {-1})) == 0);
    }
}

TEST_CASE("cuda: sums and means over any axes of images with channels last are those of rows") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const Shape& shape : {Shape{3, 16, 5, 7}, Shape{70, 20, 40}, Shape{2, 9, 3, 2, 4}}) {
      const Tensor rows = on_gpu(Values(35)(shape, dtype, 0, 2));
      for (unsigned mask = 1; mask < 1u << shape.rank(); ++mask) {
        Shape axes;
        for (int i = 0; i < shape.rank(); ++i)
          if ((mask >> i) & 1) axes.push_back(i);
        INFO(name_of(dtype) << " " << shape << " over " << axes);
        for (const bool squares : {false, true})
          check_orders({rows}, 4 * row_tolerance(dtype), [&](std::span<const Tensor> t) {
            return squares ? var(t[0], axes) : mean(t[0], axes);
          });
      }
    }
  for (DType dtype : {f32, bf16})
    check_orders({on_gpu(Values(36)({4, 64, 7, 7}, dtype))}, row_tolerance(dtype),
                 [](std::span<const Tensor> t) { return adaptive_avg_pool2d(t[0], 1, 1); });
}

TEST_CASE("cuda: batch norm of images with channels last is that of rows, gradients too") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const Shape& shape :
         {Shape{2, 8, 5, 7}, Shape{3, 20, 9}, Shape{16, 64, 28, 28}, Shape{40, 256, 7, 7}, Shape{2, 65, 7, 9},
          Shape{3, 520, 11, 3}, Shape{2, 24, 3, 2, 4}})
      for (bool training : {false, true})
        for (bool affine : {false, true}) {
          INFO(name_of(dtype) << " " << shape << (training ? " training" : "") << (affine ? " affine" : ""));
          Values values(37);
          const DType wide = dtype == f64 ? f64 : f32, kept = affine ? wide : dtype;
          const Shape channels{shape[1]};
          std::vector<Tensor> in{on_gpu(values(shape, dtype, -1, 3))};
          if (affine) in.insert(in.end(), {on_gpu(values(channels, wide)), on_gpu(values(channels, wide))});
          const Tensor mean = on_gpu(values(channels, kept)),
                       variance = on_gpu(values(channels, kept, 0.5, 2));
          Tensor followed[2];
          const auto norm = [&](std::span<const Tensor> t) {
            const Tensor m = clone(mean), v = clone(variance);
            const Tensor y = batch_norm(t[0], m, v, affine ? t[1] : Tensor{}, affine ? t[2] : Tensor{},
                                        {.training = training});
            CHECK(lies_last(y) == lies_last(t[0]));
            followed[lies_last(t[0])] = cat(std::vector{m, v});
            return y;
          };
          check_orders(in, 2 * row_tolerance(dtype), norm);
          CHECK(relative_distance(followed[1], followed[0]) <= row_tolerance(kept));
          const Tensor x = last(in[0]);
          for (const Tensor& gy : {in[0], x}) {
            const Tensor of_batch[] = {gy,       x,        Tensor{}, to(mean, wide), to(variance, wide),
                                       Tensor{}, Tensor{}, Tensor{}};
            CHECK(lies_last(apply_many(ops::BatchNormGrad{training}, of_batch)[0]));
          }
        }
}

TEST_CASE("cuda: batch_norm with a residual and ReLU has the bits of the three ops, gradients too") {
  if (no_gpu()) return;
  for (const Shape& shape :
       {Shape{33, 70}, Shape{300, 64}, Shape{3, 6, 2}, Shape{3, 17, 33}, Shape{2, 8, 5, 7},
        Shape{2, 65, 7, 9}, Shape{4, 16, 32, 32}, Shape{2, 2, 141, 143}}) {
    check_norm_epilogues(shape, gpu, [](const Tensor& t) { return t; });
    if (shape.rank() > 2) check_norm_epilogues(shape, gpu, last);
  }
  check_norm_epilogue({{0, 3, 2}, f32}, gpu, 0b1111, [](const Tensor& t) { return t; });
}

TEST_CASE(
    "cuda: batch_norm with a residual and ReLU leaves images as they lie, and takes a residual that lies "
    "otherwise",
    "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const bool x_last : {false, true})
      for (const bool r_last : {false, true}) {
        INFO(name_of(dtype) << " x last " << x_last << " residual last " << r_last);
        const Shape shape{2, 24, 9, 7};
        const Tensor x = on_gpu(numbers(shape, dtype, 1)), r = on_gpu(numbers(shape, dtype, 2));
        const Tensor in[] = {x_last ? last(x) : x, {}, {}, {}, {}, r_last ? last(r) : r};
        const Tensors out = apply_many(ops::BatchNorm{.relu = true}, in);
        CHECK(lies_last(out[0]) == x_last);
        const Tensor plain[] = {x, {}, {}, {}, {}, {}};
        if (!x_last) CHECK(same_bits(out[0], relu(add(apply_many(ops::BatchNorm{}, plain)[0], r))));
        const Tensor back[] = {r_last ? last(r) : r, in[0], {}, out[1], out[2], out[0], {}, {}};
        const Tensors grads = apply_many(ops::BatchNormGrad{.of_residual = true}, back);
        CHECK(lies_last(grads[0]) == x_last);
        CHECK(lies_last(grads[3]) == x_last);
        CHECK(same_bits(grads[3], where(greater(out[0], 0), r, zeros_like(r))));
      }
}

TEST_CASE("cuda: batch_norm's backward of a gradient in two parts has the bits of their sum's",
          "[sanitized]") {
  if (no_gpu()) return;
  // Packs and single elements, many pieces and one, rows, planes and images by channels.
  for (const DType dtype : floats)
    for (const Shape& shape : {Shape{33, 70}, Shape{300, 64}, Shape{3, 17, 33}, Shape{2, 64, 9, 7},
                               Shape{2, 65, 7, 9}, Shape{4, 16, 32, 32}, Shape{8, 136, 40, 40}})
      for (const bool images_last : {false, true}) {
        if (images_last && shape.rank() == 2) continue;
        INFO(name_of(dtype) << " " << shape << " last " << images_last);
        const auto made = [&](unsigned seed) {
          const Tensor t = on_gpu(numbers(shape, dtype, seed));
          return images_last ? last(t) : t;
        };
        const DType wide = dtype == f64 ? f64 : f32;
        const Shape channels{shape[1]};
        const Tensor weight = on_gpu(numbers(channels, wide, 5)), bias = on_gpu(numbers(channels, wide, 6));
        const Tensor apart = on_gpu(numbers({shape.numel() + 1}, dtype, 4));  // begins where no pack does
        const Tensor misplaced = reshape(narrow(apart, 0, 1, shape.numel()), shape);
        const Tensor x = made(1), gy = made(2), residual = made(3);
        for (const Tensor& more : {made(4), misplaced})
          for (const bool relu : {false, true})
            for (const bool adds_residual : {false, true}) {
              const Tensor in[] = {x, weight, bias, {}, {}, adds_residual ? residual : Tensor()};
              const Tensors out = apply_many(ops::BatchNorm{.relu = relu}, in);
              const ops::BatchNormGrad op{.of_residual = relu && adds_residual,
                                          .of_inputs = relu && !adds_residual};
              const Tensor y = relu ? out[0] : Tensor();
              const Tensor parts[] = {gy, x, weight, out[1], out[2], y, bias, more},
                           whole[] = {add(gy, more), x, weight, out[1], out[2], y, bias, {}};
              const Tensors got = apply_many(op, parts), expected = apply_many(op, whole);
              REQUIRE(got.size() == expected.size());
              for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
            }
      }
}

TEST_CASE("cuda: statistics of batch norm are right far from 0, for rows and for channels last") {
  if (no_gpu()) return;
  for (const Shape& shape : {Shape{4000, 16}, Shape{10, 16, 20, 20}}) {
    Values values(38);
    const Tensor x = add(values(shape, f32, -1, 1), 1000), moved = on_gpu(x);
    const auto statistics = [&](const Tensor& t) {
      const Tensor in[] = {t, {}, {}, {}, {}, {}};
      const Tensors out = apply_many(ops::BatchNorm{}, in);
      return std::vector<Tensor>{out[1], out[2]};
    };
    const std::vector<Tensor> wanted = statistics(x),
                              got = statistics(shape.rank() > 2 ? last(moved) : moved);
    CHECK(relative_distance(got[0], wanted[0]) <= 2 * rounding(f32));
    CHECK(relative_distance(got[1], wanted[1]) <= 1e-5);
  }
}

TEST_CASE("cuda: pooling of images with channels last has the bits of rows", "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const Shape& shape :
         {Shape{2, 8, 7, 9}, Shape{1, 24, 33, 40}, Shape{3, 5, 5, 5}, Shape{2, 520, 6, 6}})
      for (const auto& [kernel, stride, padding] :
           {std::tuple{2, 2, 0}, {3, 2, 1}, {3, 1, 1}, {5, 3, 2}, {2, 4, 1}, {5, 5, 0}}) {
        INFO(name_of(dtype) << " " << shape << " kernel " << kernel << " stride " << stride << " padding "
                            << padding);
        Values values(39);
        for (const bool special : {false, true})
          for (const bool means : {false, true}) {
            const Tensor x = on_gpu(special ? values.with_specials(shape, dtype) : values(shape, dtype));
            const auto pool = [&](std::span<const Tensor> t) {
              const Tensor y = means ? avg_pool2d(t[0], kernel, {stride, padding})
                                     : max_pool2d(t[0], kernel, {stride, padding});
              const bool several = y.shape()[2] * y.shape()[3] > 1;
              CHECK(lies_last(y) == (several && lies_last(t[0])));
              return y;
            };
            if (special)
              CHECK(distance_in_ulps(pool(std::vector{last(x)}), pool(std::vector{x})) == 0);
            else
              check_orders({x}, 0, pool);
          }
        const ops::PoolRule::Axis axis{kernel, stride, padding};
        const ops::PoolRule rule{axis, axis};
        const Tensor x = last(on_gpu(values(shape, dtype)));
        const Tensors pooled = apply_many(ops::MaxPool2d{rule}, {x});
        if (pooled[0].is_contiguous()) continue;
        CHECK(lies_last(pooled[1]));
        for (const Tensor& gy : {pooled[0], contiguous(pooled[0])})
          CHECK(lies_last(apply(ops::MaxPool2dGrad{rule, shape[2], shape[3]}, gy, pooled[1])));
        CHECK(lies_last(apply(ops::AvgPool2dGrad{rule, shape[2], shape[3]}, pooled[0])));
      }
}

namespace {

/// Names of the ops that make or read an image of several pixels in rows, but those of `apart`.
class InRows final : public Listener {
 public:
  explicit InRows(std::int64_t images) : images_(images) {}
  void after(const AnyOp& op, Inputs in, Outputs out) override {
    for (const auto& list : {Inputs(in), Inputs(out.data(), out.size())})
      for (const Tensor& t : list)
        if (t.defined() && t.rank() == 4 && t.shape()[0] == images_ && t.shape()[2] > 1 && t.is_contiguous())
          names.insert(std::string(op.name()));
  }
  std::multiset<std::string> names;

 private:
  std::int64_t images_;
};

/// A residual network of two blocks, as residual networks of images begin and end.
class Network {
 public:
  explicit Network(DType dtype) {
    Values values(40);
    for (const Shape& s : {Shape{64, 3, 7, 7}, Shape{64, 64, 1, 1}, Shape{64, 64, 3, 3}, Shape{128, 64, 1, 1},
                           Shape{128, 64, 1, 1}, Shape{64, 128, 1, 1}, Shape{128, 64, 3, 3}}) {
      weights_.push_back(values(s, dtype, -0.1, 0.1));
      scales_.push_back(values({s[0]}, dtype, 0.5, 1.5));
    }
  }
  /// x, then weights, then scales of norms.
  std::vector<Tensor> inputs(const Tensor& x) const {
    std::vector<Tensor> all{x};
    all.insert(all.end(), weights_.begin(), weights_.end());
    all.insert(all.end(), scales_.begin(), scales_.end());
    return all;
  }
  static Tensor run(std::span<const Tensor> in) {
    constexpr std::size_t count = 7;
    const auto layer = [&](const Tensor& x, std::size_t i, const Conv2dOptions& options) {
      return batch_norm(conv2d(x, in[1 + i], {}, options), {}, {}, in[1 + count + i], {}, {.training = true});
    };
    Tensor x = relu(layer(in[0], 0, {.stride = 2, .padding = 3}));
    x = max_pool2d(x, 3, {.stride = 2, .padding = 1});
    const Tensor y = layer(relu(layer(relu(layer(x, 1, {})), 2, {.stride = 2, .padding = 1})), 3, {});
    x = relu(add(y, layer(x, 4, {.stride = 2})));
    x = relu(add(layer(relu(layer(x, 5, {})), 6, {.padding = 1}), x));
    return flatten(adaptive_avg_pool2d(x, 1, 1), 1);
  }

 private:
  std::vector<Tensor> weights_, scales_;
};

}  // namespace

TEST_CASE(
    "cuda: images of a residual network lie with channels last from the first convolution on and back") {
  if (no_gpu()) return;
  if (skip_if(!cuda::state_of(gpu).cudnn_conv().is_there(), "no cuDNN here")) return;
  for (DType dtype : {bf16, f16}) {
    INFO(name_of(dtype));
    const Network network(dtype);
    const std::vector<Tensor> host = network.inputs(Values(41)({4, 3, 64, 64}, dtype));
    agree(host, dtype == bf16 ? 0.2 : 0.05, Network::run);
    std::vector<Tensor> leaves;
    for (const Tensor& t : host) leaves.push_back(on_gpu(t).requires_grad_());
    InRows in_rows(4);
    {
      const Listening listening(in_rows);
      sum(square(Network::run(leaves))).backward();
    }
    // The image that comes in and the gradient to it alone.
    for (const std::string& name : in_rows.names)
      CHECK((name == "conv2d" || name == "conv2d_grad_weight" || name == "conv2d_grad_input"));
    CHECK(in_rows.names.size() == 3);
    for (const Tensor& t : leaves) CHECK(t.grad().is_contiguous());
  }
}

TEST_CASE("cuda: a captured and a recomputed step of images with channels last have the step's bits") {
  if (no_gpu()) return;
  const Network network(bf16);
  std::vector<Tensor> in;
  for (const Tensor& t : network.inputs(Values(42)({4, 3, 64, 64}, bf16))) in.push_back(on_gpu(t));
  const std::vector<Tensor> wanted = values_and_gradients(in, Network::run);
  const auto check = [&](const std::vector<Tensor>& got) {
    REQUIRE(got.size() == wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(distance_in_ulps(got[i], wanted[i]) == 0);
  };
  check(values_and_gradients(
      in, [](std::span<const Tensor> t) { return recompute([&] { return Network::run(t); }); }));
  const std::vector<Tensor> leaves(in.begin() + 1, in.end());
  for (Tensor t : leaves) t.requires_grad_();
  const Tensor upstream = to(Values(77)(wanted[0].shape(), bf16), gpu);
  const Step step = [&](std::span<const Tensor> x) {
    std::vector<Tensor> all{x[0]};
    all.insert(all.end(), leaves.begin(), leaves.end());
    const Tensor y = Network::run(all);
    std::vector<Tensor> results = grad(y, leaves, upstream);
    results.insert(results.begin(), y.detach());
    return results;
  };
  const std::vector<Tensor> eager = step(std::span(in.data(), 1));
  Program program = capture(step, {in[0]});
  for (int replay = 0; replay < 2; ++replay) {
    const std::vector<Tensor> replayed = program.replay({in[0]});
    REQUIRE((eager.size() == replayed.size() && eager.size() + 1 == wanted.size()));
    CHECK(distance_in_ulps(replayed[0], wanted[0]) == 0);
    for (std::size_t i = 1; i < replayed.size(); ++i) {
      CHECK(distance_in_ulps(replayed[i], eager[i]) == 0);
      CHECK(distance_in_ulps(replayed[i], wanted[i + 1]) == 0);
    }
  }
  CHECK(program.is_device_graph());
}
