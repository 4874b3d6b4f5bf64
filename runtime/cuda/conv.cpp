// Convolutions: which kernel makes one, and the order of elements that it wants.
#include "runtime/cuda/channels_last.h"
#include "runtime/cuda/conv_cudnn.h"
#include "runtime/cuda/depthwise.h"
#include "runtime/cuda/image_order.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/tf32.h"
#include "runtime/ops.h"
#include "runtime/ops/conv2d.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/matmul.h"

namespace sherd::cuda {
namespace {

// Multiplications. A plan of cuDNN takes tens of milliseconds, once for each new shape; below this many the
// op's own formula takes a fraction of one. By sizes alone, which all ranks share.
constexpr std::int64_t least_work = std::int64_t{1} << 18;
constexpr std::int64_t most_elements = std::int64_t{1} << 31;  // of a tensor that cuDNN is given
constexpr std::int64_t most_multiplier = 8;  // outputs of a channel, for the kernels of `depthwise.cu`

/// Three dense tensors, images in either order of their elements, of which `makes` names the one to be made
/// of the other two; the bias is added to it.
struct Convolution {
  std::string_view op;
  const ops::ConvRule& rule;
  ConvMakes makes;
  Tensor x, w, y, bias = {};

  std::int64_t inputs() const { return w.shape()[1]; }  // of a group, as are the outputs
  std::int64_t outputs() const { return w.shape()[0] / rule.groups; }
  std::int64_t work() const { return y.numel() * inputs() * w.shape()[2] * w.shape()[3]; }
  cudaStream_t stream() const { return stream_of(x.device()); }
};

/// Whether y has all places of the kernel on x, as it has unless x has rows that no window sees.
bool is_whole(const ops::ConvRule::Axis& axis, std::int64_t size, std::int64_t kernel, std::int64_t count) {
  const std::int64_t seen = size + 2 * axis.padding - (kernel - 1) * axis.dilation - 1;
  return seen >= 0 && axis.stride < ops::ConvRule::most && seen / axis.stride + 1 == count;
}

bool has_kernels(const Convolution& c) {
  if (c.x.numel() == 0 || c.w.numel() == 0 || c.y.numel() == 0) return false;
  const Shape &x = c.x.shape(), &w = c.w.shape(), &y = c.y.shape();
  return is_whole(c.rule.down, x[2], w[2], y[2]) && is_whole(c.rule.across, x[3], w[3], y[3]);
}

// ---- kernels of one pixel

/// Without a bias, which a product adds to columns alone.
bool has_one_pixel(const Convolution& c) {
  constexpr ops::ConvRule plain{};
  return c.rule == plain && c.w.shape()[2] * c.w.shape()[3] == 1 && !c.bias.defined();
}

bool is_whole_units(const Convolution& c, std::int64_t row) { return row * size_of(c.x.dtype()) % 16 == 0; }

void multiply(const ops::MatMul& op, const Tensor& a, const Tensor& b, Tensor made) {
  const Tensor given[] = {a, b};
  kernel_row<ops::MatMul>().on(DeviceType::cuda)(&op, Inputs(given, 2), Outputs(&made, 1));
}

/// Whether it is a product of matrices as the tensors lie, one for each image; for the gradient of the
/// kernels of one image, since it is a sum over them. Rows are whole units of 16 bytes, without which the
/// library has slow kernels only.
bool run_product_of_planes(const Convolution& c) {
  const bool in_rows =
      (c.makes == ConvMakes::x || c.x.is_contiguous()) && (c.makes == ConvMakes::y || c.y.is_contiguous());
  const std::int64_t n = c.x.shape()[0], in = c.inputs(), out = c.outputs(), pixels = c.x.numel() / n / in;
  if (!in_rows || (c.makes == ConvMakes::w && n != 1) || !is_whole_units(c, pixels)) return false;
  const auto planes = [&](const Tensor& t, std::int64_t channels) {
    return alias(t, {{n, channels, pixels}, {channels * pixels, pixels, 1}, t.layout().offset});
  };
  const Tensor x = planes(c.x, in), y = planes(c.y, out),
               w = expand(reshape(c.w, {1, out, in}), {n, out, in});
  const ops::MatMul op{c.makes == ConvMakes::x, c.makes == ConvMakes::w};
  multiply(op, c.makes == ConvMakes::w ? y : w, c.makes == ConvMakes::x ? y : x,
           c.makes == ConvMakes::y   ? y
           : c.makes == ConvMakes::x ? x
                                     : w);
  return true;
}

/// The same of images whose channels come last: one product over all pixels, which makes such an image. The
/// gradient of kernels is a long sum with few results, which cuDNN cuts into parts.
bool run_product_of_pixels(const Convolution& c) {
  if (c.makes == ConvMakes::w || !is_channels_last(c.makes == ConvMakes::y ? c.x : c.y)) return false;
  const std::int64_t in = c.inputs(), out = c.outputs(), pixels = c.x.numel() / in;
  if (!is_whole_units(c, in) || !is_whole_units(c, out)) return false;
  const auto rows = [&](const Tensor& t, std::int64_t channels) {
    return alias(t, {{pixels, channels}, {channels, 1}, t.layout().offset});
  };
  const Tensor x = rows(c.x, in), y = rows(c.y, out), w = reshape(c.w, {out, in});
  if (c.makes == ConvMakes::y)
    multiply({false, true}, x, w, y);
  else
    multiply({false, false}, y, w, x);
  lay_channels_last(c.makes == ConvMakes::y ? c.y : c.x);
  return true;
}

bool run_product(const Convolution& c) {
  return has_one_pixel(c) && (run_product_of_pixels(c) || run_product_of_planes(c));
}

// ---- windows that tile the images, as a vision transformer's

/// Whether windows of some size neither overlap nor leave pixels out. A product adds its bias to columns,
/// which those of an image's gradient are not.
bool has_tiles(const Convolution& c) {
  if (c.makes == ConvMakes::x && c.bias.defined()) return false;
  constexpr std::int64_t least_side = 4;  // smaller ones take longer to be laid side by side
  const std::int64_t side = c.w.shape()[2];
  const ops::ConvRule::Axis whole{.stride = side};
  return c.rule.groups == 1 && c.rule.down == whole && c.rule.across == whole && c.w.shape()[3] == side &&
         side >= least_side && size_of(c.x.dtype()) == 2 && c.x.shape()[2] == c.y.shape()[2] * side &&
         c.x.shape()[3] == c.y.shape()[3] * side;
}

/// Images as (image, windows down, windows across, channel, down, across).
Tensor tiles_of(const Tensor& images, std::int64_t side) {
  const Shape &size = images.shape(), &strides = images.strides();
  return alias(images,
               {{size[0], size[2] / side, size[3] / side, size[1], side, side},
                {strides[0], strides[2] * side, strides[3] * side, strides[1], strides[2], strides[3]},
                images.layout().offset});
}

/// A product of matrices then, of the windows' elements as rows and of y's pixels with their channels last.
bool run_product_of_tiles(const Convolution& c) {
  if (!has_tiles(c)) return false;
  const std::int64_t side = c.w.shape()[2], out = c.outputs(), row = c.inputs() * side * side,
                     windows = c.y.numel() / out;
  if (!is_whole_units(c, row) || !is_whole_units(c, out)) return false;
  const Tensor w = reshape(c.w, {out, row});
  const auto pixels = [&](const Tensor& t) {
    return alias(t, {{windows, out}, {out, 1}, t.layout().offset});
  };
  if (c.makes == ConvMakes::x) {
    const Tensor rows = empty({windows, row}, {c.x.dtype(), c.x.device()}), tiles = tiles_of(c.x, side);
    multiply({false, false}, pixels(channels_last(c.y)), w, rows);
    copy_(tiles, reshape(rows, tiles.shape()));
    return true;
  }
  const Tensor rows = reshape(contiguous(tiles_of(c.x, side)), {windows, row});
  if (c.makes == ConvMakes::w) {
    multiply({true, false}, pixels(channels_last(c.y)), rows, w);
    return true;
  }
  const Tensor given[] = {rows, w, c.bias, {}};
  Tensor made = pixels(c.y);
  const ops::Linear linear;
  kernel_row<ops::Linear>().on(DeviceType::cuda)(&linear, Inputs(given, 4), Outputs(&made, 1));
  lay_channels_last(c.y);
  return true;
}

// ---- groups of one channel

bool run_depthwise(const Convolution& c) {
  if (c.inputs() != 1) return false;
  const auto& [stride, padding, dilation] = c.rule.down;
  const Tensor images = c.makes == ConvMakes::x ? c.x : contiguous(c.x),
               windows = c.makes == ConvMakes::y ? c.y : contiguous(c.y);
  const Shape &x = c.x.shape(), &w = c.w.shape(), &y = c.y.shape();
  DepthwiseCall call{.dtype = c.x.dtype(),
                     .batch = x[0],
                     .channels = x[1],
                     .multiplier = c.outputs(),
                     .size = {x[2], x[3]},
                     .count = {y[2], y[3]},
                     .kernel = {w[2], w[3]},
                     .stride = {stride, c.rule.across.stride},
                     .padding = {padding, c.rule.across.padding},
                     .dilation = {dilation, c.rule.across.dilation},
                     .x = images.raw(),
                     .y = windows.raw(),
                     .w = c.w.raw(),
                     .bias = raw_or_null(c.bias),
                     .stream = c.stream()};
  if (c.makes == ConvMakes::y) {
    call.out = c.y.raw();
    launch_depthwise(call);
  } else if (c.makes == ConvMakes::x) {
    call.out = c.x.raw();
    launch_depthwise_grad_input(call);
  } else {
    const Tensor sums = empty({call.pieces() * c.w.numel()}, {DType::f32, c.w.device()});
    call.out = c.w.raw();
    call.partial = reinterpret_cast<float*>(sums.raw());
    launch_depthwise_grad_weight(call);
  }
  check_launch(c.op);
  return true;
}

// ---- cuDNN

/// Whether cuDNN is given pixels whose channels are neighbours: its kernels on tensor cores want them so,
/// with channels by eights, and we bring them into that order faster than it does. Empty channels are added,
/// but not to every group.
bool wants_channels_last(const Convolution& c) {
  return size_of(c.x.dtype()) == 2 && (c.rule.groups == 1 || (c.inputs() % 8 == 0 && c.outputs() % 8 == 0));
}

/// A tensor of a call as cuDNN sees it.
struct Operand {
  Tensor tensor;  // in row-major order, or channels last
  bool last, is_image;
  PaddedAxis images, channels;

  std::int64_t pixels() const {
    return tensor.numel() / (images.all() * channels.all());  // no operand is empty
  }
  std::array<std::int64_t, 4> sizes() const {
    const Shape& s = tensor.shape();
    const bool image = s.rank() == 4;
    return {images.all_places(), channels.all_places(), image ? s[2] : 1, image ? s[3] : 1};
  }
  bool is_padded() const { return images.places != images.size || channels.places != channels.size; }
  /// Whether it lies as cuDNN wants it.
  bool is_there() const {
    return last ? !is_padded() && (pixels() == 1 || is_channels_last(tensor)) : tensor.is_contiguous();
  }
  /// Whether it may stay as cuDNN gives it.
  bool stays() const { return is_image && last && !is_padded(); }
  bool is_aligned() const { return reinterpret_cast<std::uintptr_t>(tensor.raw()) % 16 == 0; }
  ChannelsCall moving() const {
    return {images, channels, pixels(), nullptr, nullptr, stream_of(tensor.device())};
  }
  Tensor room() const {
    return empty({images.all_places() * channels.all_places() * pixels()}, {tensor.dtype(), tensor.device()});
  }
  Tensor flat() const { return alias(tensor, {{tensor.numel()}, {1}, tensor.layout().offset}); }
  /// What cuDNN reads.
  Tensor given() const {
    if (is_there()) return is_aligned() ? tensor : clone(flat());
    const Tensor rows = contiguous(tensor);
    if (!last) return rows;
    const Tensor made = room();
    ChannelsCall call = moving();
    call.from = rows.raw();
    call.to = made.raw();
    launch_channels_last(call);
    return made;
  }
  /// Where cuDNN writes, and what brings it to the tensor.
  Tensor target() const { return (stays() || is_there()) && is_aligned() ? tensor : room(); }
  void take(const Tensor& written) const {
    if (stays()) lay_channels_last(tensor);
    if (written.is(tensor)) return;
    if (is_there()) return void(copy_(flat(), reshape(written, {-1})));
    if (!last) return void(copy_(alias(tensor, tensor.layout()), reshape(written, tensor.shape())));
    ChannelsCall call = moving();
    call.from = written.raw();
    call.to = tensor.raw();
    launch_channels_first(call);
  }
};

/// An axis by eights where channels come last.
PaddedAxis padded(std::int64_t groups, std::int64_t size, bool last) {
  return {groups, size, last ? (size + 7) / 8 * 8 : size};
}

struct Operands3 {
  Operand x, w, y, bias;
  Operands3(const Convolution& c, bool last)
      : x{c.x, last, true, whole(c.x.shape()[0]), padded(c.rule.groups, c.inputs(), last)},
        w{c.w, last, false, padded(c.rule.groups, c.outputs(), last), padded(1, c.inputs(), last)},
        y{c.y, last, true, whole(c.y.shape()[0]), padded(c.rule.groups, c.outputs(), last)},
        bias{c.bias, last, false, whole(1), y.channels} {}
  static PaddedAxis whole(std::int64_t size) { return {1, size, size}; }
};

ConvForm form_of(const Convolution& c, const Operands3& o, bool bias) {
  return {c.makes,
          c.x.dtype(),
          takes_tf32(c.x.dtype()),
          bias,
          o.x.last,
          o.x.sizes(),
          o.w.sizes(),
          o.y.sizes(),
          {c.rule.down.stride, c.rule.across.stride},
          {c.rule.down.padding, c.rule.across.padding},
          {c.rule.down.dilation, c.rule.across.dilation}};
}

/// With the bias in the same kernel or without one.
bool queue(const Convolution& c, CudnnConv& cudnn, bool last, bool bias) {
  const Operands3 o(c, last);
  const ConvForm form = form_of(c, o, bias);
  if (!cudnn.has(form)) return false;
  const auto at = [&](const Operand& operand, ConvMakes name) {
    return c.makes == name ? operand.target() : operand.given();
  };
  const Tensor x = at(o.x, ConvMakes::x), w = at(o.w, ConvMakes::w), y = at(o.y, ConvMakes::y),
               b = bias ? o.bias.given() : Tensor{};
  if (!cudnn.run(form, {x.raw(), w.raw(), y.raw(), bias ? b.raw() : nullptr}, c.stream())) return false;
  if (c.makes == ConvMakes::x) o.x.take(x);
  if (c.makes == ConvMakes::w) o.w.take(w);
  if (c.makes == ConvMakes::y) o.y.take(y);
  return true;
}

bool run_cudnn(const Convolution& c) {
  if (c.work() < least_work || c.x.numel() >= most_elements || c.w.numel() >= most_elements ||
      c.y.numel() >= most_elements)
    return false;
  CudnnConv& cudnn = state_of(c.x.device()).cudnn_conv();
  for (bool last : {true, false}) {
    if (last && !wants_channels_last(c)) continue;
    // For gradients of images it looks for such a kernel for a second and has none.
    if (c.bias.defined() && c.makes == ConvMakes::y && queue(c, cudnn, last, true)) break;
    if (!queue(c, cudnn, last, false)) {
      if (last) continue;
      return false;
    }
    // Where no kernel takes both, 16-bit results are rounded before the bias too.
    const Tensor& made = c.makes == ConvMakes::x ? c.x : c.y;
    if (c.bias.defined()) add_(alias(made, made.layout()), reshape(c.bias, {-1, 1, 1}));
    break;
  }
  check_launch(c.op);
  return true;
}

bool run(const Convolution& c) {
  if (!has_kernels(c)) return false;
  if (run_product(c) || run_product_of_tiles(c)) return true;
  if (c.x.dtype() == DType::f64) return false;
  if (c.outputs() <= most_multiplier && run_depthwise(c)) return true;
  return run_cudnn(c) || run_depthwise(c);
}

/// Images in an order that the kernels take.
Tensor in_order(const Tensor& t) {
  return size_of(t.dtype()) == 2 && runs_channels_last(t) ? channels_last(t) : contiguous(t);
}

void conv2d(const ops::Conv2d& op, Inputs in, Outputs out) {
  if (!run({op.name, op.rule, ConvMakes::y, in_order(in[0]), in[1], out[0], in[2]}))
    sherd::detail::adopt_reference(op.name, op.reference(in), out);
}

void conv2d_grad_input(const ops::Conv2dGradInput& op, Inputs in, Outputs out) {
  if (!run({op.name, op.rule, ConvMakes::x, out[0], in[1], in_order(in[0]), in[2]}))
    sherd::detail::adopt_reference(op.name, op.reference(in), out);
}

void conv2d_grad_weight(const ops::Conv2dGradWeight& op, Inputs in, Outputs out) {
  if (!run({op.name, op.rule, ConvMakes::w, in_order(in[1]), out[0], in_order(in[0])}))
    sherd::detail::adopt_reference(op.name, op.reference(in), out);
}

}  // namespace

void add_conv() {
  add_kernel<conv2d>(DeviceType::cuda);
  add_kernel<conv2d_grad_input>(DeviceType::cuda);
  add_kernel<conv2d_grad_weight>(DeviceType::cuda);
}

}  // namespace sherd::cuda
