// Kernels of images, scans, order and normalised planes, CPU against CUDA, over sizes that end inside a
// block, a load of 16 bytes, a chunk or a piece.
#include <limits>

#include "tests/cuda/agree.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr DType floats[] = {f64, f32, f16, bf16};

/// Equal to the bit, here and there.
void same(const Tensor& host, const Tensor& moved) { CHECK(distance_in_ulps(moved, host) == 0); }

}  // namespace

TEST_CASE("cuda: pooling agrees with the CPU's over windows, strides and paddings", "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const Shape& shape : {Shape{2, 3, 7, 9}, Shape{1, 2, 33, 40}, Shape{3, 1, 5, 5}, Shape{0, 2, 8, 8}})
      for (const auto& [kernel, stride, padding] :
           {std::tuple{2, 2, 0}, {3, 2, 1}, {3, 1, 1}, {5, 3, 2}, {2, 4, 1}}) {
        INFO(name_of(dtype) << " kernel " << kernel << " stride " << stride << " padding " << padding);
        Values values(1);
        const Tensor x = values(shape, dtype);
        const Pool2dOptions options{.stride = stride, .padding = padding};
        agree({x}, row_tolerance(dtype),
              [&](std::span<const Tensor> t) { return max_pool2d(t[0], kernel, options); });
        agree({x}, row_tolerance(dtype),
              [&](std::span<const Tensor> t) { return avg_pool2d(t[0], kernel, {stride, padding}); });
        const Pool2dOptions up{.stride = stride, .padding = padding, .ceil_mode = true};
        agree({x}, row_tolerance(dtype),
              [&](std::span<const Tensor> t) { return max_pool2d(t[0], kernel, up); });
        for (const bool include : {false, true})
          agree({x}, row_tolerance(dtype), [&](std::span<const Tensor> t) {
            return avg_pool2d(t[0], kernel, {stride, padding, true, include});
          });
        const Tensor special = values.with_specials(shape, dtype);
        same(max_pool2d(special, kernel, options), max_pool2d(on_gpu(special), kernel, options));
      }
  Values values(2);
  for (const auto& [down, across] : {std::pair{1, 1}, {2, 3}, {4, 6}, {3, 5}})
    agree({values({2, 3, 8, 12}, f32)}, row_tolerance(f32),
          [&](std::span<const Tensor> t) { return adaptive_avg_pool2d(t[0], down, across); });
}

TEST_CASE("cuda: running sums and products agree with the CPU's over lengths of rows", "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : {f64, f32, f16, bf16})
    for (std::int64_t columns : {1, 7, 8, 255, 256, 1025, 4097, 40000})
      for (std::int64_t rows : {1, 3, 70}) {
        if (columns > 4097 && rows > 3) continue;  // the host takes long, and the device does nothing else
        INFO(name_of(dtype) << " " << rows << " x " << columns);
        Values values(1);
        agree({values({rows, columns}, dtype)}, 4 * row_tolerance(dtype),
              [](std::span<const Tensor> t) { return cumsum(t[0], 1); });
        agree({values({rows, columns}, dtype, 0.9, 1.1)}, 16 * row_tolerance(dtype),
              [](std::span<const Tensor> t) { return cumprod(t[0], 1); });
      }
  Values values(2);
  // Products that leave the numbers, and zeros before, after and among them.
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<Tensor> edges{arange(1, 401, 1, {f32}), full({3000}, 100, {f32}),
                            cat({zeros({1}), full({3000}, 99, {f32})})};
  edges.push_back(cat({full({100}, 0.1, {f32}), full({100}, 10, {f32})}));
  edges.push_back(cat({ones({9}), full({1}, infinity, {f32}), ones({20})}));
  edges.push_back(cat({full({1}, infinity, {f32}), full({1}, 2, {f32}), zeros({1})}));
  for (const Tensor& x : edges)
    for (DType dtype : {f32, bf16, f16}) {
      INFO(to_string(x.shape()) << " " << name_of(dtype));
      CHECK(distance_in_ulps(cumprod(on_gpu(to(x, dtype)), 0), cumprod(to(x, dtype), 0)) <= 1);
    }
  for (DType dtype : {i64, i32, u8}) {
    const Tensor x = values({5, 3000}, dtype, -9, 9);
    for (int axis : {0, 1}) same(cumsum(x, axis), cumsum(on_gpu(x), axis));
    same(cumprod(x, 1), cumprod(on_gpu(x), 1));
  }
}

TEST_CASE("cuda: gradients of products are those in f64, rounded, over lengths of rows, zeros among them",
          "[sanitized]") {
  if (no_gpu()) return;
  const auto gradient = [](const Tensor& given, const Shape& axes) {
    const Tensor x = clone(given).requires_grad_();
    return grad(sum(prod(x, axes)), std::span(&x, 1))[0];
  };
  for (const std::int64_t columns : {1, 2, 255, 257, 4096, 4097, 12289, 70001})
    for (const std::int64_t zeros : {0, 1, 2}) {
      const Tensor near = Values(34)({3, columns}, f64, 0.999, 1.001);
      for (std::int64_t i = 0; i < std::min(zeros, columns); ++i)
        fill_(slice(slice(near, 0, 1, 2), 1, i * (columns - 1), i * (columns - 1) + 1), 0);
      for (DType dtype : floats)
        for (const Shape& axes : {Shape{1}, Shape{0, 1}}) {
          INFO(name_of(dtype) << " " << columns << " with " << zeros << " zeros, over " << axes.rank());
          const Tensor x = to(near, dtype), g = gradient(on_gpu(x), axes);
          // Of f64 each factor is a rounding.
          const double roundings = dtype == f64 ? static_cast<double>(3 * columns) : 1;
          CHECK(relative_distance(to(g, f64), gradient(to(x, f64), axes)) <= roundings * rounding(dtype));
          same(g, gradient(on_gpu(x), axes));
        }
    }
}

TEST_CASE("cuda: sorting and topk give the CPU's elements and places over lengths, dtypes and k") {
  if (no_gpu()) return;
  for (DType dtype : {f64, f32, f16, bf16, i64, i32, u8})
    for (std::int64_t columns : {1, 2, 511, 513, 4096, 4097, 20000})
      for (std::int64_t rows : {1, 5, 67}) {
        if (columns * rows > 200000) continue;  // the host takes long
        INFO(name_of(dtype) << " " << rows << " x " << columns);
        Values values(1);
        const Tensor x = is_floating(dtype) ? values.with_specials({rows, columns}, dtype)
                                            : values({rows, columns}, dtype, -100, 100);
        const Tensor moved = on_gpu(x);
        for (std::int64_t k :
             {std::int64_t{1}, std::int64_t{8}, std::int64_t{33}, std::int64_t{600}, columns}) {
          if (k > columns) continue;
          INFO("k " << k);
          const TopK host = topk(x, k), there = topk(moved, k);
          same(host.values, there.values);
          same(host.indices, there.indices);
        }
        const Picked host = sort(x), there = sort(moved);
        same(host.values, there.values);
        same(host.indices, there.indices);
      }
}

TEST_CASE("cuda: extremes and their places agree with the CPU's along any axis", "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : {f64, f32, f16, bf16, i64, i32, u8, boolean})
    for (const Shape& shape : {Shape{1, 1}, Shape{3, 1030}, Shape{1030, 3}, Shape{2, 70000}, Shape{9000, 2},
                               Shape{70000, 3}, Shape{5, 129, 33}}) {
      Values values(1);
      const Tensor x = is_floating(dtype) ? values.with_specials(shape, dtype) : values(shape, dtype, -9, 9);
      const Tensor moved = on_gpu(x), plain = values(shape, dtype, -9, 9), there = on_gpu(plain);
      for (int axis = 0; axis < x.rank(); ++axis) {
        INFO(name_of(dtype) << " " << shape[0] << " x " << shape[1] << " axis " << axis);
        same(max(x, axis).values, max(moved, axis).values);
        same(max(x, axis).indices, max(moved, axis).indices);
        same(min(x, axis).values, min(moved, axis).values);
        same(amax(plain, {axis}), amax(there, {axis}));
        same(amin(x, {axis}), amin(moved, {axis}));
        same(argmin(plain, axis), argmin(there, axis));
      }
      same(amax(plain), amax(there));
      same(amax(x), amax(moved));
    }
}

TEST_CASE("cuda: extremes of few long columns") {
  if (no_gpu()) return;
  for (std::int64_t columns : {2, 3, 4, 5}) {
    const Tensor x = reshape(arange(0, 4200000 * columns, 1, {i32, gpu}), {4200000, columns});
    same(amax(x, {0}), to(narrow(reshape(x, {-1}), 0, x.numel() - columns, columns), Device::cpu()));
    same(argmax(x, 0), full({columns}, 4199999, {i64}));
  }
}

TEST_CASE("cuda: axes turned round are the CPU's") {
  if (no_gpu()) return;
  Values values(1);
  for (DType dtype : {f64, f32, bf16, u8}) {
    const Tensor x = values({4, 5, 1, 33}, dtype), view = transpose(x, 1, 3);
    for (const Shape& axes : {Shape{0}, Shape{3}, Shape{1, 3}, Shape{0, 1, 2, 3}, Shape{2}}) {
      same(flip(x, axes), flip(on_gpu(x), axes));
      same(flip(view, axes), flip(transpose(on_gpu(x), 1, 3), axes));
    }
    // Rows of whole packs, and not quite.
    for (const std::int64_t columns : {16, 64, 65, 4096}) {
      const Tensor rows = Values(9)({7, 3, columns}, dtype, 0, 9), line = Values(10)({columns}, dtype, 0, 9);
      for (const Shape& axes : {Shape{2}, Shape{0, 2}, Shape{0}, Shape{1, 2}})
        same(flip(rows, axes), flip(on_gpu(rows), axes));
      same(flip(line, {0}), flip(on_gpu(line), {0}));
      same(flip(slice(rows, 2, 1, columns), {2}), flip(slice(on_gpu(rows), 2, 1, columns), {2}));
    }
  }
}

TEST_CASE("cuda: batch and group norm agree with the CPU's over planes of all sizes", "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const Shape& shape : {Shape{4, 6, 1}, Shape{3, 6, 2}, Shape{5, 4, 33}, Shape{2, 4, 32, 32},
                               Shape{2, 2, 20000}, Shape{40, 2, 3, 5}}) {
      INFO(name_of(dtype) << " " << shape[0] << " x " << shape[1] << " x " << shape[2]);
      Values values(1);
      const Tensor x = values(shape, dtype, 1, 3), weight = values({shape[1]}, dtype),
                   bias = values({shape[1]}, dtype);
      const double tolerance = 4 * row_tolerance(dtype);
      if (shape.rank() > 3 || shape[2] > 1) {
        agree({x, weight, bias}, tolerance,
              [](std::span<const Tensor> t) { return group_norm(t[0], 2, t[1], t[2]); });
        agree({x}, tolerance, [](std::span<const Tensor> t) { return group_norm(t[0], 1); });
      }
      const auto batch = [&](bool training) {
        return [&, training](std::span<const Tensor> t) {
          const TensorOptions like{dtype, t[0].device()};
          const Shape channels{shape[1]};
          return batch_norm(t[0], full(channels, 2, like), full(channels, 0.5, like),
                            t.size() > 1 ? t[1] : Tensor(), t.size() > 1 ? t[2] : Tensor(),
                            {.training = training});
        };
      };
      agree({x, weight, bias}, tolerance, batch(true));
      agree({x}, tolerance, batch(true));
      agree({x, weight, bias}, tolerance, batch(false));
    }
}

TEST_CASE("cuda: places of masks, and what is read and written by them, are the CPU's", "[sanitized]") {
  if (no_gpu()) return;
  for (std::int64_t n : {0, 1, 15, 4096, 4097, 70001}) {
    INFO(n);
    Values values(1);
    const Tensor x = values({n}, f32), mask = greater(x, 0.5);
    same(nonzero(mask), nonzero(on_gpu(mask)));
    same(masked_select(x, mask), masked_select(on_gpu(x), on_gpu(mask)));
    for (DType dtype : {f64, f32, bf16, u8}) {
      const Tensor y = to(x, dtype), there = on_gpu(y);
      y[mask] = 3;
      there[on_gpu(mask)] = 3;
      same(y, there);
    }
  }
  Values values(2);
  const Tensor x = values({5, 7, 33}, f32), holds = greater(x, 0), there = on_gpu(x);
  same(nonzero(holds), nonzero(on_gpu(holds)));
  const Tensor lines = greater(values({5, 7}, f32), 0);
  x[lines] = 1;
  there[on_gpu(lines)] = 1;
  same(x, there);
  same(nonzero(Tensor::scalar(1)), nonzero(Tensor::scalar(1, {f32, gpu})));
}

TEST_CASE("cuda: many draws by weight are the CPU's", "[sanitized]") {
  if (no_gpu()) return;
  Values values(1);
  for (std::int64_t columns : {1, 5, 300, 5000})
    for (std::int64_t count : {1, 7, 1000}) {
      INFO(columns << " weights, " << count << " draws");
      const Tensor weights = relu(values({3, columns}, f32, -1, 2));
      const Tensor usable = add(weights, columns == 1 ? 1 : 0);
      manual_seed(3);
      const Tensor host = multinomial(usable, count);
      manual_seed(3);
      // A share that falls on the last bit of a sum may go either way.
      const Tensor differ = not_equal(to(multinomial(on_gpu(usable), count), Device::cpu()), host);
      CHECK(sum(differ).item<std::int64_t>() <= host.numel() / 500);
    }
}

TEST_CASE("cuda: copies of turned and cut axes are the CPU's", "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : {f64, f32, bf16, u8}) {
    Values values(1);
    const Tensor x = values({3, 40, 65, 32}, dtype), there = on_gpu(x);
    for (const Shape& axes :
         {Shape{0, 2, 1, 3}, Shape{3, 2, 1, 0}, Shape{0, 1, 3, 2}, Shape{2, 3, 0, 1}, Shape{1, 3, 0, 2}}) {
      same(contiguous(permute(x, axes)), contiguous(permute(there, axes)));
      same(to(permute(x, axes), f32), to(permute(there, axes), f32));
    }
    same(contiguous(narrow(x, 2, 1, 64)), contiguous(narrow(there, 2, 1, 64)));
    same(contiguous(narrow(x, 3, 16, 16)), contiguous(narrow(there, 3, 16, 16)));
    same(contiguous(expand(narrow(x, 3, 0, 1), x.shape())),
         contiguous(expand(narrow(there, 3, 0, 1), x.shape())));
    same(cat({x, x}, 3), cat({there, there}, 3));
    if (is_floating(dtype)) {
      same(add(x, narrow(x, 3, 5, 1)), add(there, narrow(there, 3, 5, 1)));
      same(mul(narrow(x, 3, 5, 1), x), mul(narrow(there, 3, 5, 1), there));
    }
    for (std::int64_t offset : {-3, 0, 2, 100}) {
      same(tril(x, offset), tril(there, offset));
      same(triu(narrow(x, 3, 1, 31), offset), triu(narrow(there, 3, 1, 31), offset));
    }
  }
}

TEST_CASE("cuda: rows that a block sorts or selects from give the CPU's elements, wherever the first lie",
          "[sanitized]") {
  if (no_gpu()) return;
  const auto equal = [](const Tensor& x, std::int64_t k) {
    const TopK host = topk(x, k), there = topk(on_gpu(x), k);
    same(host.values, there.values);
    same(host.indices, there.indices);
  };
  for (DType dtype : {f32, bf16, i32, u8, boolean})
    for (std::int64_t columns : {1023, 1024, 1500, 8192, 16384, 16385}) {
      INFO(name_of(dtype) << " " << columns);
      const std::int64_t rows = columns > 8192 ? 65 : 3;
      const Tensor x = Values(36)({rows, columns}, dtype, 0, 99), all_equal = ones({rows, columns}, {dtype});
      for (std::int64_t k : {1, 8, 256, 257}) {
        equal(x, k);
        equal(all_equal, k);
      }
      equal(narrow(x, 0, 0, 2), columns);
    }
  // One thread has nearly all of the first: every 512th of a row.
  const Tensor place = arange(0, 65536, 1, {f32}),
               crowded = where(sherd::equal(remainder(place, 512), 0), place, neg(place));
  equal(expand(crowded, {64, 65536}), 8);
  const Tensor few = where(less(remainder(place, 512), 20), place, neg(place));
  equal(expand(few, {64, 65536}), 21);
}

TEST_CASE("cuda: lines of any length and address, copied, joined, padded and rolled, are the CPU's",
          "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : {f64, f32, bf16, u8})
    for (const std::int64_t columns : {1, 31, 127, 128, 1023, 1024, 1027, 5000}) {
      INFO(name_of(dtype) << " " << columns);
      const Tensor x = Values(35)({3, 5, columns}, dtype, 0, 9), there = on_gpu(x);
      const auto both = [&](const auto& fn) { same(fn(x), fn(there)); };
      for (const std::int64_t cut : {1, 2, 16})
        if (cut < columns)
          both([&](const Tensor& t) { return contiguous(narrow(t, 2, cut, columns - cut)); });
      both([](const Tensor& t) { return clone(slice(reshape(t, {t.numel()}), 0, 1, t.numel())); });
      both([](const Tensor& t) { return cat({t, narrow(t, 0, 1, 0), narrow(t, 0, 1, 2)}, 0); });
      both([](const Tensor& t) { return stack({t, t, t}, 0); });
      for (int axis : {1, 2}) {
        both([=](const Tensor& t) { return cat({t, t, t}, axis); });
        both([=](const Tensor& t) { return cat(std::vector<Tensor>(40, t), axis); });
        both([=](const Tensor& t) { return cat({narrow(t, 1, 1, 3), narrow(t, 1, 2, 3)}, axis); });
        both([=](const Tensor& t) { return cat({narrow(t, axis, 0, 0), t, narrow(t, axis, 0, 1)}, axis); });
        both([=](const Tensor& t) { return cat({expand(narrow(t, 0, 1, 1), t.shape()), t}, axis); });
        both([=](const Tensor& t) { return cat({expand(narrow(t, 2, 0, 1), t.shape()), t}, axis); });
        both([=](const Tensor& t) { return cat({transpose(t, 0, 1), transpose(t, 0, 1)}, axis); });
      }
      both([](const Tensor& t) { return pad(t, {1, 2}); });
      both([](const Tensor& t) { return pad(t, {0, 3, 2, 0}); });
      for (const std::int64_t by : {0, 1, 3, 16, -1})
        for (int axis : {0, 1, 2}) {
          both([&](const Tensor& t) { return roll(t, by, axis); });
          both([&](const Tensor& t) { return roll(transpose(t, 0, 2), by, axis); });
        }
    }
  same(roll(zeros({0, 3}), 1, 1), roll(zeros({0, 3}, {.device = gpu}), 1, 1));
  same(roll(ones({}), 1, 0), roll(ones({}, {.device = gpu}), 1, 0));
}

TEST_CASE("cuda: losses summed over all elements and norms agree with the CPU's", "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (std::int64_t n : {1, 7, 16384, 16385, 100003}) {
      INFO(name_of(dtype) << " " << n);
      Values values(1);
      const std::vector<Tensor> in{values({n}, dtype), values({n}, dtype, 0, 1)};
      const double tolerance = 4 * row_tolerance(dtype);
      agree(in, tolerance, [](std::span<const Tensor> t) { return mse_loss(t[0], t[1]); });
      agree(in, tolerance, [](std::span<const Tensor> t) { return l1_loss(t[0], t[1], Reduction::sum); });
      agree(in, tolerance, [](std::span<const Tensor> t) { return huber_loss(t[0], t[1], 0.5); });
      agree(in, tolerance, [](std::span<const Tensor> t) { return bce_with_logits(t[0], t[1]); });
      agree({in[0]}, tolerance, [](std::span<const Tensor> t) { return norm(t[0]); });
      agree({in[0]}, tolerance, [](std::span<const Tensor> t) { return norm(t[0], 1); });
      agree({in[0]}, tolerance, [](std::span<const Tensor> t) { return stddev(t[0], {}, Keep::drop, 0); });
      const Tensor none = zeros({3, 0}, {dtype});
      for (const double power : {1, 2}) same(norm(none, power, {1}), norm(on_gpu(none), power, {1}));
    }
  Values values(2);
  for (const Shape& axes : {Shape{0}, Shape{1}, Shape{0, 2}})
    agree({values({9, 130, 33}, f32)}, 4 * row_tolerance(f32),
          [&](std::span<const Tensor> t) { return norm(t[0], 2, axes); });
}
