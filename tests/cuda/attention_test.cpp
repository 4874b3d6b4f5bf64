// Attention, CPU against CUDA: tensor cores for halves of the common head sizes, plain cores for the rest.
#include "runtime/context.h"
#include "tests/cuda/agree.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr DType floats[] = {f64, f32, f16, bf16};

/// Weights and gradients of scores are rounded to halves on the way through tensor cores.
double tolerance(DType dtype) { return (size_of(dtype) == 2 ? 2 : 16) * rounding(dtype); }

}  // namespace

TEST_CASE("cuda: attention agrees with the CPU's at every head size, gradients included") {
  if (no_gpu()) return;
  struct Lengths {
    std::int64_t queries, keys;
  };
  for (DType dtype : floats) {
    for (std::int64_t width : {1, 20, 32, 33, 64, 96, 128, 160, 256, 257, 300}) {
      // Most widths take few lengths, for time.
      const bool all = width == 33 || width == 64;
      for (const Lengths& n :
           {Lengths{1, 3}, {31, 31}, {33, 33}, {64, 64}, {130, 130}, {5, 200}, {200, 150}}) {
        if (!all && n.queries != 130 && n.queries != 5) continue;
        for (bool causal : {false, true}) {
          for (double dropout : {0.0, 0.3}) {
            if (dropout > 0 && n.queries < 64) continue;
            INFO(name_of(dtype) << " width " << width << " " << n.queries << " x " << n.keys
                                << (causal ? " causal" : "") << " dropout " << dropout);
            Values values(1);
            const Shape q{2, 3, n.queries, width}, k{2, 3, n.keys, width};
            agree({values(q, dtype), values(k, dtype), values(k, dtype)}, tolerance(dtype),
                  [&](std::span<const Tensor> t) {
                    manual_seed(9);
                    return attention(t[0], t[1], t[2], {.causal = causal, .dropout = dropout});
                  });
          }
        }
      }
    }
  }
}

TEST_CASE("cuda: attention takes any strides, any scale and empty sides") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    for (std::int64_t width : {24, 64}) {
      INFO(name_of(dtype) << " width " << width);
      Values values(2);
      const auto plain = [](std::span<const Tensor> t) { return attention(t[0], t[1], t[2]); };
      const auto heads_last = [&] { return transpose(values({2, 40, 3, width}, dtype), 1, 2); };
      agree({heads_last(), heads_last(), heads_last()}, tolerance(dtype), plain);
      const auto width_first = [&] { return transpose(values({2, 3, width, 40}, dtype), 2, 3); };
      agree({width_first(), width_first(), width_first()}, tolerance(dtype), plain);
      const auto unaligned = [&] { return slice(values({2, 3, 40, width + 1}, dtype), 3, 1, width + 1); };
      agree({unaligned(), unaligned(), unaligned()}, tolerance(dtype), plain);
      for (double scale : {0.7, 0.0, -0.2}) {
        INFO("scale " << scale);
        const auto make = [&] { return values({1, 2, 70, width}, dtype); };
        const std::vector<Tensor> in{make(), make(), make()};
        const auto fn = [&](std::span<const Tensor> t) {
          return attention(t[0], t[1], t[2], {.causal = true, .scale = scale});
        };
        if (scale == 0) {
          // Gradients of queries and keys are zero: values only.
          CHECK(relative_distance(fn(std::vector{on_gpu(in[0]), on_gpu(in[1]), on_gpu(in[2])}), fn(in)) <=
                tolerance(dtype));
        } else {
          agree(in, tolerance(dtype), fn);
        }
      }
      agree(
          {values({0, 3, 4, width}, dtype), values({0, 3, 4, width}, dtype), values({0, 3, 4, width}, dtype)},
          0, plain);
      if (dtype != f64)
        agree({values({1, 2, 3, width}, dtype), values({1, 2, 0, width}, dtype),
               values({1, 2, 0, width}, dtype)},
              0, plain);
    }
  }
}

TEST_CASE("cuda: attention of so many pairs that cuDNN is asked agrees with the CPU's") {
  if (no_gpu()) return;
  for (DType dtype : {f16, bf16}) {
    for (bool causal : {false, true}) {
      INFO(name_of(dtype) << (causal ? " causal" : ""));
      Values values(4);
      const Shape shape{1, 4, 2100, 64};  // more than 2^24 pairs of a query and a key
      agree({values(shape, dtype), values(shape, dtype), values(shape, dtype)}, tolerance(dtype),
            [&](std::span<const Tensor> t) { return attention(t[0], t[1], t[2], {.causal = causal}); });
    }
  }
}

TEST_CASE("cuda: self_attention agrees with the CPU's, masks included") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    for (std::int64_t width : {20, 32, 64, 96, 128, 260}) {
      for (std::int64_t length : {2, 31, 65, 257}) {
        for (double dropout : {0.0, 0.2}) {
          INFO(name_of(dtype) << " width " << width << " length " << length << " dropout " << dropout);
          agree({Values(3)({2, length, 3 * 2 * width}, dtype)}, tolerance(dtype),
                [&](std::span<const Tensor> t) {
                  manual_seed(10);
                  return self_attention(t[0], 2, {.causal = true, .dropout = dropout});
                });
        }
      }
    }
  }
}
