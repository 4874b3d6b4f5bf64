// Convolutions: which kernel makes one, and the order of elements that it wants.
#include "runtime/cuda/channels_last.h"
#include "runtime/cuda/conv_cudnn.h"
#include "runtime/cuda/depthwise.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/tf32.h"
#include "runtime/ops.h"
#include "runtime/ops/conv2d.h"
#include "runtime/ops/matmul.h"

namespace sherd::cuda {
namespace {

// Multiplications. A plan of cuDNN takes tens of milliseconds, once for each new shape; below this many the
// op's own formula takes a fraction of one. By sizes alone, which all ranks share.
constexpr std::int64_t least_work = std::int64_t{1} << 18;
constexpr std::int64_t most_elements = std::int64_t{1} << 31;  // of a tensor that cuDNN is given
constexpr std::int64_t most_multiplier = 8;  // outputs of a channel, for the kernels of `depthwise.cu`

/// Three dense tensors, of which `makes` names the one to be made of the other two; the bias is added to it.
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

/// Whether it is a product of matrices as the tensors lie, one for each image: without a bias, which a
/// product adds to columns alone, and for the gradient of the kernels of one image, since it is a sum over
/// them. Rows are whole units of 16 bytes, without which the library has slow kernels only.
bool is_product(const Convolution& c) {
  constexpr ops::ConvRule plain{};
  return c.rule == plain && c.w.shape()[2] * c.w.shape()[3] == 1 && !c.bias.defined() &&
         (c.makes != ConvMakes::w || c.x.shape()[0] == 1) &&
         c.x.shape()[2] * c.x.shape()[3] * size_of(c.x.dtype()) % 16 == 0;
}

bool run_product(const Convolution& c) {
  if (!is_product(c)) return false;
  const std::int64_t n = c.x.shape()[0], in = c.inputs(), out = c.outputs(), pixels = c.x.numel() / n / in;
  const Tensor x = reshape(c.x, {n, in, pixels}), y = reshape(c.y, {n, out, pixels}),
               w = expand(reshape(c.w, {1, out, in}), {n, out, in});
  const ops::MatMul op{c.makes == ConvMakes::x, c.makes == ConvMakes::w};
  const Tensor given[] = {c.makes == ConvMakes::w ? y : w, c.makes == ConvMakes::x ? y : x};
  Tensor made = c.makes == ConvMakes::y ? y : c.makes == ConvMakes::x ? x : w;
  kernel_row<ops::MatMul>().on(DeviceType::cuda)(&op, Inputs(given, 2), Outputs(&made, 1));
  return true;
}

// ---- groups of one channel

bool run_depthwise(const Convolution& c) {
  if (c.inputs() != 1) return false;
  const auto& [stride, padding, dilation] = c.rule.down;
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
                     .x = c.x.raw(),
                     .y = c.y.raw(),
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
  Tensor tensor;  // in row-major order
  bool last;
  PaddedAxis images, channels;

  std::int64_t pixels() const {
    return tensor.numel() / (images.all() * channels.all());  // no operand is empty
  }
  std::array<std::int64_t, 4> sizes() const {
    const Shape& s = tensor.shape();
    const bool image = s.rank() == 4;
    return {images.all_places(), channels.all_places(), image ? s[2] : 1, image ? s[3] : 1};
  }
  /// The same memory in both orders.
  bool is_there() const {
    return !last || (pixels() == 1 && images.places == images.size && channels.places == channels.size);
  }
  bool is_aligned() const { return reinterpret_cast<std::uintptr_t>(tensor.raw()) % 16 == 0; }
  ChannelsCall moving() const {
    return {images, channels, pixels(), nullptr, nullptr, stream_of(tensor.device())};
  }
  Tensor room() const {
    return empty({images.all_places() * channels.all_places() * pixels()}, {tensor.dtype(), tensor.device()});
  }
  /// What cuDNN reads.
  Tensor given() const {
    if (is_there()) return is_aligned() ? tensor : clone(tensor);
    const Tensor made = room();
    ChannelsCall call = moving();
    call.from = tensor.raw();
    call.to = made.raw();
    launch_channels_last(call);
    return made;
  }
  /// Where cuDNN writes, and what brings it to the tensor.
  Tensor target() const { return is_there() && is_aligned() ? tensor : room(); }
  void take(const Tensor& written) const {
    if (written.is(tensor)) return;
    if (is_there()) return void(copy_(alias(tensor, tensor.layout()), reshape(written, tensor.shape())));
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
      : x{c.x, last, whole(c.x.shape()[0]), padded(c.rule.groups, c.inputs(), last)},
        w{c.w, last, padded(c.rule.groups, c.outputs(), last), padded(1, c.inputs(), last)},
        y{c.y, last, whole(c.y.shape()[0]), padded(c.rule.groups, c.outputs(), last)},
        bias{c.bias, last, whole(1), y.channels} {}
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
  if (run_product(c)) return true;
  if (c.x.dtype() == DType::f64) return false;
  if (c.outputs() <= most_multiplier && run_depthwise(c)) return true;
  return run_cudnn(c) || run_depthwise(c);
}

void conv2d(const ops::Conv2d& op, Inputs in, Outputs out) {
  if (!run({op.name, op.rule, ConvMakes::y, in[0], in[1], out[0], in[2]}))
    sherd::detail::adopt_reference(op.name, op.reference(in), out);
}

void conv2d_grad_input(const ops::Conv2dGradInput& op, Inputs in, Outputs out) {
  if (!run({op.name, op.rule, ConvMakes::x, out[0], in[1], in[0], in[2]}))
    sherd::detail::adopt_reference(op.name, op.reference(in), out);
}

void conv2d_grad_weight(const ops::Conv2dGradWeight& op, Inputs in, Outputs out) {
  if (!run({op.name, op.rule, ConvMakes::w, in[1], out[0], in[0]}))
    sherd::detail::adopt_reference(op.name, op.reference(in), out);
}

}  // namespace

void add_conv() {
  add_kernel<conv2d>(DeviceType::cuda);
  add_kernel<conv2d_grad_input>(DeviceType::cuda);
  add_kernel<conv2d_grad_weight>(DeviceType::cuda);
}

}  // namespace sherd::cuda
