// Convolutions, CPU against CUDA: whichever of cuDNN's kernels, ours and the op's formula takes them.
#include <optional>

#include "autograd/capture/capture.h"
#include "runtime/cuda/conv_cudnn.h"
#include "runtime/cuda/rank.h"
#include "tests/cuda/agree.h"

using namespace sherd;
using namespace sherd::test;
using cuda::ConvForm;
using cuda::ConvMakes;

namespace {

constexpr DType floats[] = {f64, f32, bf16, f16};
constexpr DType short_floats[] = {f32, bf16, f16};

struct Sizes {
  Shape x, w;
  Conv2dOptions options;
  bool bias = true;

  std::int64_t count(int axis) const {
    const bool down = axis == 2;
    const std::int64_t padding = down ? options.padding.down : options.padding.across,
                       dilation = down ? options.dilation.down : options.dilation.across,
                       stride = down ? options.stride.down : options.stride.across;
    const std::int64_t room = x[axis] + 2 * padding - (w[axis] - 1) * dilation - 1;
    return room < 0 ? 0 : room / stride + 1;
  }
  /// Multiplications.
  std::int64_t work() const { return x[0] * count(2) * count(3) * w.numel(); }
};

std::string name_of(const Sizes& s) {
  const Conv2dOptions& o = s.options;
  return fmt::format("x {} w {} stride {} {} padding {} {} dilation {} {} groups {}{}", s.x, s.w,
                     o.stride.down, o.stride.across, o.padding.down, o.padding.across, o.dilation.down,
                     o.dilation.across, o.groups, s.bias ? " bias" : "");
}

/// Any that fit and do not take the host long.
class AnySizes {
 public:
  explicit AnySizes(unsigned seed) : engine_(seed) {}
  Sizes next() {
    for (;;) {
      const std::int64_t channels = one_of({1, 3, 8, 16, 24, 64, 65});
      std::vector<std::int64_t> groups{1, 1, channels};
      for (std::int64_t g : {2, 4, 5, 8})
        if (channels % g == 0) groups.push_back(g);
      Sizes s;
      s.options.groups = groups[engine_() % groups.size()];
      const bool line = engine_() % 4 == 0;
      s.x = {one_of({0, 1, 1, 2, 5}), channels, line ? 1 : upto(36), upto(36)};
      s.w = {s.options.groups * one_of({1, 1, 2, 3, 8, 16}), channels / s.options.groups, line ? 1 : upto(7),
             upto(7)};
      s.options.stride = {line ? 1 : upto(3), upto(3)};
      s.options.padding = {line ? 0 : upto(4) - 1, upto(4) - 1};
      s.options.dilation = {line ? 1 : upto(3), upto(3)};
      s.bias = engine_() % 2 == 0;
      if (s.count(2) > 0 && s.count(3) > 0 && s.work() < (std::int64_t{1} << 26)) return s;
    }
  }

 private:
  std::int64_t one_of(std::initializer_list<std::int64_t> all) { return all.begin()[engine_() % all.size()]; }
  std::int64_t upto(unsigned most) { return 1 + engine_() % most; }
  std::mt19937 engine_;
};

/// Of each kind of kernel one, with work enough for it.
const Sizes usual[] = {
    {{2, 64, 28, 28}, {64, 64, 3, 3}, {.padding = 1}},
    {{2, 64, 28, 28}, {128, 64, 1, 1}, {}},
    {{3, 64, 28, 28}, {128, 64, 1, 1}, {}, false},
    {{1, 64, 28, 28}, {128, 64, 1, 1}, {}, false},
    {{2, 64, 27, 27}, {24, 64, 1, 1}, {}, false},
    {{3, 64, 33, 31}, {72, 64, 3, 3}, {.stride = 2, .padding = 1}},
    {{2, 64, 28, 28}, {64, 64, 3, 3}, {.padding = 2, .dilation = 2}},
    {{2, 64, 28, 28}, {64, 16, 3, 3}, {.padding = 1, .groups = 4}},
    {{2, 65, 28, 27}, {33, 65, 3, 3}, {.padding = 1}, false},
    {{4, 3, 64, 64}, {32, 3, 7, 7}, {.stride = 2, .padding = 3}},
    {{4, 1, 64, 64}, {16, 1, 3, 3}, {.padding = 1}},
    {{8, 64, 1, 256}, {64, 64, 1, 3}, {.padding = {0, 1}}},
    {{3, 64, 30, 30}, {64, 1, 3, 3}, {.padding = 1, .groups = 64}},
    {{3, 32, 30, 29}, {64, 1, 5, 5}, {.stride = 2, .padding = 2, .groups = 32}},
    {{3, 32, 30, 29}, {32, 1, 7, 7}, {.padding = 3, .groups = 32}, false},
    {{3, 32, 30, 29}, {32, 1, 3, 3}, {.padding = 2, .dilation = 2, .groups = 32}},
    {{3, 32, 30, 29}, {32, 1, 4, 6}, {.stride = {2, 1}, .padding = 2, .groups = 32}},
    {{70, 32, 24, 24}, {32, 1, 5, 5}, {.padding = 9, .groups = 32}},
    {{6, 30, 14, 14}, {30, 3, 3, 3}, {.padding = 1, .groups = 10}},
};

void check(const Sizes& s, DType dtype) {
  INFO(sherd::name_of(dtype) << " " << name_of(s));
  Values values(15);
  std::vector<Tensor> in{values(s.x, dtype), values(s.w, dtype)};
  if (s.bias) in.push_back(values({s.w[0]}, dtype));
  agree(in, 2 * row_tolerance(dtype),
        [&](std::span<const Tensor> t) { return conv2d(t[0], t[1], s.bias ? t[2] : Tensor{}, s.options); });
}

ConvForm form_of(const Sizes& s, DType dtype, ConvMakes makes, bool channels_last) {
  const Conv2dOptions& o = s.options;
  return {makes,
          dtype,
          false,
          false,
          channels_last,
          {s.x[0], s.x[1], s.x[2], s.x[3]},
          {s.w[0], s.w[1], s.w[2], s.w[3]},
          {s.x[0], s.w[0], s.count(2), s.count(3)},
          {o.stride.down, o.stride.across},
          {o.padding.down, o.padding.across},
          {o.dilation.down, o.dilation.across}};
}

}  // namespace

TEST_CASE("cuda: convolutions agree with the CPU's and repeat to the bit, gradients too") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const Sizes& s : usual) check(s, dtype);
  AnySizes any(3);
  for (int i = 0; i < 60; ++i) {
    const Sizes s = any.next();
    for (DType dtype : short_floats) check(s, dtype);
  }
}

TEST_CASE("cuda: convolutions of tensors at odd addresses agree with the CPU's") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (std::int64_t groups : {1, 64}) {
      INFO(name_of(dtype) << " groups " << groups);
      Values values(16);
      const auto odd = [&](const Shape& shape) {
        return view(slice(values({shape.numel() + 1}, dtype), 0, 1, shape.numel() + 1), shape);
      };
      agree({odd({2, 64, 20, 20}), odd({64, 64 / groups, 3, 3}), odd({64})}, 2 * row_tolerance(dtype),
            [&](std::span<const Tensor> t) {
              return conv2d(t[0], t[1], t[2], {.padding = 1, .groups = groups});
            });
    }
}

TEST_CASE("cuda: convolutions whose windows tile the images agree with the CPU's, however images lie") {
  if (no_gpu()) return;
  struct Tiles {
    Shape x;
    std::int64_t outputs, side;
  };
  for (DType dtype : short_floats)
    for (const Tiles& t :
         {Tiles{{2, 3, 32, 48}, 16, 16}, Tiles{{3, 8, 8, 12}, 24, 4}, Tiles{{1, 8, 14, 21}, 8, 7},
          Tiles{{2, 3, 33, 48}, 16, 16}, Tiles{{2, 5, 20, 10}, 7, 5}, Tiles{{0, 3, 16, 16}, 8, 8}})
      for (const bool last : {false, true})
        for (const bool bias : {false, true}) {
          INFO(name_of(dtype) << " x " << t.x << " side " << t.side << (last ? " last" : "")
                              << (bias ? " bias" : ""));
          Values values(23);
          agree({values(t.x, dtype), values({t.outputs, t.x[1], t.side, t.side}, dtype),
                 values({t.outputs}, dtype)},
                2 * row_tolerance(dtype), [&](std::span<const Tensor> in) {
                  const Tensor x =
                      last ? permute(contiguous(permute(in[0], {0, 2, 3, 1})), {0, 3, 1, 2}) : in[0];
                  return conv2d(x, in[1], bias ? in[2] : Tensor{}, {.stride = t.side});
                });
        }
}

TEST_CASE("cuda: transposed convolutions agree with the CPU's") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (std::int64_t groups : {1, 4, 32})
      for (std::int64_t stride : {1, 2, 3})
        for (bool bias : {false, true}) {
          INFO(name_of(dtype) << " groups " << groups << " stride " << stride << (bias ? " bias" : ""));
          Values values(17);
          agree({values({2, 32, 13, 15}, dtype), values({32, 32 / groups, 3, 3}, dtype), values({32}, dtype)},
                2 * row_tolerance(dtype), [&](std::span<const Tensor> t) {
                  return conv_transpose2d(
                      t[0], t[1], bias ? t[2] : Tensor{},
                      {.stride = stride, .padding = 1, .output_padding = stride - 1, .groups = groups});
                });
        }
}

TEST_CASE("cuda: second derivatives of convolutions agree with the CPU's") {
  if (no_gpu()) return;
  for (std::int64_t groups : {1, 32})
    for (std::int64_t stride : {1, 2}) {
      INFO("groups " << groups << " stride " << stride);
      const auto second = [&](Device device) {
        Values values(18);
        const Tensor x = to(values({2, 32, 18, 17}, f32), device).requires_grad_(),
                     w = to(values({32, 32 / groups, 3, 3}, f32), device).requires_grad_();
        const Tensor y = conv2d(x, w, {}, {.stride = stride, .padding = 1, .groups = groups}), in[] = {x, w};
        Tensor total;
        for (const Tensor& g : grad(sum(square(y)), in, {}, {.create_graph = true}))
          total = total.defined() ? add(total, sum(square(g))) : sum(square(g));
        return grad(total, in);
      };
      const std::vector<Tensor> host = second(Device::cpu()), moved = second(gpu);
      for (std::size_t i = 0; i < host.size(); ++i)
        CHECK(relative_distance(moved[i], host[i]) <= 4 * row_tolerance(f32));
    }
}

TEST_CASE("cuda: a captured step of convolutions is one graph and has the step's bits") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    INFO(name_of(dtype));
    Values values(19);
    const Tensor image = on_gpu(values({2, 16, 20, 20}, dtype));
    std::vector<Tensor> weights;
    for (const Shape& s : {Shape{64, 16, 3, 3}, Shape{64, 1, 3, 3}, Shape{64, 64, 1, 1}})
      weights.push_back(on_gpu(values(s, dtype, -0.1, 0.1)).requires_grad_());
    const Step step = [&](std::span<const Tensor> in) {
      Tensor y = relu(conv2d(in[0], weights[0], {}, {.padding = 1}));
      y = relu(conv2d(y, weights[1], {}, {.stride = 2, .padding = 1, .groups = 64}));
      y = conv2d(y, weights[2]);
      std::vector<Tensor> all = grad(sum(square(y)), weights);
      all.push_back(y.detach());
      return all;
    };
    const std::vector<Tensor> eager = step(std::span(&image, 1));
    Program program = capture(step, {image});
    const std::vector<Tensor> replayed = program.replay({image});
    CHECK(program.is_device_graph());
    REQUIRE(eager.size() == replayed.size());
    for (std::size_t i = 0; i < eager.size(); ++i) CHECK(distance_in_ulps(replayed[i], eager[i]) == 0);
  }
}

TEST_CASE("cuda: cuDNN has kernels for usual convolutions that repeat to the bit, where it is installed") {
  if (no_gpu()) return;
  cuda::DeviceState& state = cuda::state_of(gpu);
  cuda::CudnnConv& cudnn = state.cudnn_conv();
  if (skip_if(!cudnn.is_there(), "no cuDNN here")) return;
  const auto runs = [&](const ConvForm& form) {
    const auto room = [&](const std::array<std::int64_t, 4>& s) {
      return zeros({s[0], s[1], s[2], s[3]}, {form.dtype, gpu});
    };
    const Tensor x = room(form.x), w = room(form.w), y = room(form.y), bias = room({1, form.y[1], 1, 1});
    return cudnn.has(form) && cudnn.run(form, {x.raw(), w.raw(), y.raw(), bias.raw()}, state.stream());
  };
  for (DType dtype : short_floats)
    for (ConvMakes makes : {ConvMakes::y, ConvMakes::x, ConvMakes::w})
      for (int i = 0; i < 8; ++i) {
        INFO(sherd::name_of(dtype) << " makes " << static_cast<int>(makes) << " " << name_of(usual[i]));
        ConvForm form = form_of(usual[i], dtype, makes, dtype != f32);
        CHECK(runs(form));
        form.bias = true;
        if (dtype != f32 && makes == ConvMakes::y && usual[i].options.groups == 1) CHECK(runs(form));
      }
}
