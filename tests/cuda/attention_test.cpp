// Attention, CPU against CUDA: tensor cores for halves of the common head sizes, plain cores for the rest.
#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/context.h"
#include "tests/cuda/agree.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr DType floats[] = {f64, f32, f16, bf16};

/// Weights and gradients of scores are rounded to halves on the way through tensor cores.
double tolerance(DType dtype) { return (size_of(dtype) == 2 ? 2 : 16) * rounding(dtype); }

struct Lengths {
  std::int64_t queries, keys;
};

/// A mask for scores (2, 4, queries, keys) of a dtype, on the host.
struct MaskForm {
  const char* name;
  std::function<Tensor(Values&, Lengths, DType)> make;
};

/// Bool, true for about `share` of all.
Tensor some(Values& values, Shape shape, double share = 0.5) { return less(values(shape, f32, 0, 1), share); }
/// True where a query and a key are at most `reach` apart.
Tensor window(Lengths n, std::int64_t reach) {
  const Tensor i = unsqueeze(arange(0, n.queries, 1, {i64}), 1), j = arange(0, n.keys, 1, {i64});
  return less_equal(abs(sub(i, j)), reach);
}
/// 0 where `seen`, else `hidden`.
Tensor added(const Tensor& seen, double hidden, DType dtype) {
  return where(seen, zeros({}, {dtype}), full({}, hidden, {dtype}));
}

constexpr double infinity = std::numeric_limits<double>::infinity();

const MaskForm mask_forms[] = {
    {"keys of each batch", [](Values& v, Lengths n, DType) { return some(v, {2, 1, 1, n.keys}); }},
    {"keys of all", [](Values& v, Lengths n, DType) { return some(v, {n.keys}); }},
    {"pairs", [](Values& v, Lengths n, DType) { return some(v, {n.queries, n.keys}); }},
    {"few pairs", [](Values& v, Lengths n, DType) { return some(v, {2, 1, n.queries, n.keys}, 0.02); }},
    {"pairs of each head", [](Values& v, Lengths n, DType) { return some(v, {4, n.queries, n.keys}); }},
    {"heads", [](Values& v, Lengths, DType) { return some(v, {2, 4, 1, 1}); }},
    {"queries", [](Values& v, Lengths n, DType) { return some(v, {2, 1, n.queries, 1}); }},
    {"pairs, keys first",
     [](Values& v, Lengths n, DType) { return transpose(some(v, {n.keys, n.queries}), 0, 1); }},
    {"a part of a wider one",
     [](Values& v, Lengths n, DType) { return narrow(some(v, {n.queries, n.keys + 3}), 1, 3, n.keys); }},
    {"a window", [](Values&, Lengths n, DType) { return window(n, 9); }},
    {"nothing", [](Values&, Lengths, DType) { return zeros({1}, {boolean}); }},
    {"all, without an axis", [](Values&, Lengths, DType) { return ones({}, {boolean}); }},
    {"added to pairs", [](Values& v, Lengths n, DType d) { return v({n.queries, n.keys}, d); }},
    {"added to pairs of each head",
     [](Values& v, Lengths n, DType d) { return v({2, 4, n.queries, n.keys}, d); }},
    {"added to keys", [](Values& v, Lengths n, DType d) { return v({2, 1, 1, n.keys}, d); }},
    {"added to queries", [](Values& v, Lengths n, DType d) { return v({4, n.queries, 1}, d); }},
    {"added, without an axis", [](Values&, Lengths, DType d) { return full({}, 3, {d}); }},
    {"-inf added to half the pairs, and to all of some queries",
     [](Values& v, Lengths n, DType d) {
       return added(logical_and(some(v, {n.queries, n.keys}), some(v, {n.queries, 1}, 0.8)), -infinity, d);
     }},
    {"-inf added to all", [](Values&, Lengths n, DType d) { return full({n.keys}, -infinity, {d}); }},
    {"a huge negative number added to half the pairs, and to all of some queries",
     [](Values& v, Lengths n, DType d) {
       const Tensor seen = logical_and(some(v, {n.queries, n.keys}), some(v, {n.queries, 1}, 0.8));
       return added(seen, d == f16 ? -1000.0 : d == bf16 ? -3.38e38 : -3.4e38, d);
     }},
};

/// Like `agree`, but distances are of the norm, or of ones where that is less: gradients that are zero but
/// for rounding, of queries that see one key, are of no relative size.
void agree_near_zero(const std::vector<Tensor>& inputs, double tolerance, const Function& fn) {
  std::vector<Tensor> moved;
  for (const Tensor& t : inputs) moved.push_back(on_gpu(t));
  const std::vector<Tensor> host = values_and_gradients(inputs, fn), first = values_and_gradients(moved, fn),
                            second = values_and_gradients(moved, fn);
  REQUIRE(host.size() == first.size());
  const auto norm = [](const Tensor& x) { return std::sqrt(sum(square(to(x, f64))).item()); };
  for (std::size_t i = 0; i < host.size(); ++i) {
    INFO((i == 0 ? "value" : "gradient ") << (i == 0 ? "" : std::to_string(i - 1)));
    const Tensor& want = host[i];
    const double unit = std::max(norm(want), std::sqrt(static_cast<double>(want.numel())));
    const double apart = norm(sub(to(to(first[i], Device::cpu()), f64), to(want, f64)));
    CHECK(apart <= tolerance * unit);  // not so for NaN
    CHECK(distance_in_ulps(second[i], first[i]) == 0);
  }
}

/// q with 4 heads, k and v with `shared`; the mask, of the host, is no leaf.
void check_mask(DType dtype, std::int64_t width, Lengths n, std::int64_t shared, const Tensor& mask,
                AttentionOptions options) {
  Values values(5);
  const Shape q{2, 4, n.queries, width}, k{2, shared, n.keys, width};
  const Tensor there = on_gpu(mask);
  agree_near_zero({values(q, dtype), values(k, dtype), values(k, dtype)}, tolerance(dtype),
                  [&](std::span<const Tensor> t) {
                    manual_seed(9);
                    AttentionOptions o = options;
                    o.mask = t[0].device() == gpu ? there : mask;
                    return attention(t[0], t[1], t[2], o);
                  });
}

}  // namespace

TEST_CASE("cuda: attention with masks and shared heads agrees with the CPU's, gradients included") {
  if (no_gpu()) return;
  std::size_t turn = 0;
  for (DType dtype : {f32, bf16, f16}) {
    for (std::int64_t width : {16, 32, 64, 80, 96, 128, 256}) {
      // Most widths take few lengths, for time.
      const bool all = width == 64 || width == 80;
      for (const Lengths& n :
           {Lengths{1, 1}, {7, 7}, {64, 128}, {65, 65}, {130, 130}, {5, 200}, {200, 150}}) {
        if (!all && n.queries != 130 && n.queries != 5) continue;
        for (const MaskForm& form : mask_forms) {
          for (bool causal : {false, true}) {
            constexpr std::int64_t shared_by[] = {4, 2, 1};
            const std::int64_t shared = shared_by[turn++ % 3];
            INFO(name_of(dtype) << " width " << width << " " << n.queries << " x " << n.keys << ", "
                                << form.name << (causal ? ", causal, " : ", ") << shared << " heads of k");
            Values values(6);
            check_mask(dtype, width, n, shared, form.make(values, n, dtype), {.causal = causal});
          }
        }
      }
    }
  }
}

TEST_CASE("cuda: attention of shared heads agrees with the CPU's, with cuDNN's part and without") {
  if (no_gpu()) return;
  for (DType dtype : {f32, bf16, f16}) {
    for (std::int64_t shared : {4, 2, 1}) {
      for (bool causal : {false, true}) {
        for (std::int64_t width : {64, 72}) {
          for (const Lengths& n : {Lengths{1, 70}, {70, 70}, {90, 70}, {2100, 2100}}) {
            if (n.queries > 1000 && (dtype == f32 || width != 64)) continue;
            INFO(name_of(dtype) << " width " << width << " " << n.queries << " x " << n.keys << ", " << shared
                                << (causal ? " heads, causal" : " heads"));
            Values values(7);
            const Shape q{1, 4, n.queries, width}, k{1, shared, n.keys, width};
            agree({values(q, dtype), values(k, dtype), values(k, dtype)}, tolerance(dtype),
                  [&](std::span<const Tensor> t) { return attention(t[0], t[1], t[2], {.causal = causal}); });
          }
        }
      }
    }
  }
}

TEST_CASE("cuda: attention with a mask drops the weights that the CPU's drops, at any scale") {
  if (no_gpu()) return;
  for (DType dtype : {f32, bf16}) {
    for (std::int64_t width : {24, 64, 128}) {
      for (const Lengths& n : {Lengths{70, 128}, {70, 75}}) {
        for (double scale : {0.3, -0.2}) {
          for (bool adds : {false, true}) {
            INFO(name_of(dtype) << " width " << width << " " << n.queries << " x " << n.keys << " scale "
                                << scale << (adds ? ", added" : ""));
            Values values(8);
            const Tensor mask =
                adds ? values({4, n.queries, n.keys}, dtype) : some(values, {2, 1, n.queries, n.keys});
            check_mask(dtype, width, n, 2, mask, {.causal = true, .dropout = 0.3, .scale = scale});
          }
        }
      }
    }
  }
}

TEST_CASE("cuda: attention gives the gradient of a mask that is added") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    INFO(name_of(dtype));
    Values values(9);
    agree({values({2, 2, 33, 32}, dtype), values({2, 1, 40, 32}, dtype), values({2, 1, 40, 32}, dtype),
           values({2, 33, 40}, dtype)},
          2 * tolerance(dtype),
          [&](std::span<const Tensor> t) { return attention(t[0], t[1], t[2], {.mask = t[3]}); });
  }
}

TEST_CASE("cuda: attention with a mask stores no scores") {
  if (no_gpu()) return;
  constexpr std::int64_t n = 4096;
  for (DType dtype : {f32, bf16, f16}) {
    for (std::int64_t width : {16, 64}) {
      INFO(name_of(dtype) << " width " << width);
      const auto make = [&] { return randn({1, 4, n, width}, {dtype, gpu}).requires_grad_(); };
      const std::vector<Tensor> in{make(), make(), make()};
      const Tensor mask = greater(rand({n}, {f32, gpu}), 0.5);
      MemoryLedger& use = Context::current().memory();
      use.reset_peak(DeviceType::cuda);
      const std::int64_t before = use.peak(DeviceType::cuda);
      grad(sum(attention(in[0], in[1], in[2], {.mask = mask})), in);
      CHECK(use.peak(DeviceType::cuda) - before < 4 * n * n);  // a byte a score would be as much
    }
  }
}

TEST_CASE("cuda: attention agrees with the CPU's at every head size, gradients included") {
  if (no_gpu()) return;
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
