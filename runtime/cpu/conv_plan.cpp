#if defined(SHERD_ONEDNN) && defined(SHERD_OPENMP)

#include "runtime/cpu/conv_plan.h"

#include <string_view>

#include "runtime/error.h"

namespace sherd::cpu::conv {

using dnnl::memory;
using std::int64_t;

Scratch<std::byte> memory_for(std::size_t bytes) {
  Scratch<std::byte> room = scratch<std::byte>(static_cast<int64_t>(bytes));
  check<OutOfMemoryError>(room != nullptr, "conv2d: no memory for {} bytes of working space", bytes);
  return room;
}

Tensor room_of(std::size_t bytes) { return empty({static_cast<int64_t>(bytes)}, {DType::u8, Device::cpu()}); }

void execute(const Call& call, dnnl::stream& stream, Arguments arguments) {
  Scratch<std::byte> room;
  if (const std::size_t bytes = call.room.get_size(); bytes > 0) {
    room = memory_for(bytes);
    arguments.emplace(DNNL_ARG_SCRATCHPAD, argument(call.room, room.get()));
  }
  call.run.execute(stream, arguments);
  stream.wait();
}

Lain kernels_of(const Conv& c, const Tile& t) {
  Lain lain{{t.outputs.size(), t.channels.size(), c.height, c.width},
            {c.taps(), c.height * c.width, c.width, 1}};
  if (t.groups.size() > 1) {
    lain.dims.insert(lain.dims.begin(), t.groups.size());
    lain.strides.insert(lain.strides.begin(), c.outputs * c.taps());
  }
  return lain;
}

namespace {

Lain images_of(const Conv& c, const Tile& t) {
  return {{t.images.size(), t.groups.size() * t.channels.size(), t.rows.size(), c.columns},
          {c.steps.image, c.steps.channel, c.steps.row, c.steps.pixel}};
}
Lain outputs_of(const Conv& c, const Tile& t) {
  return {{t.images.size(), t.groups.size() * t.outputs.size(), t.down.size(), c.across},
          {c.rule.groups * c.output(), c.down * c.across, c.across, 1}};
}
Lain biases_of(const Tile& t) { return {{t.groups.size() * t.outputs.size()}, {1}}; }

dnnl::primitive_attr attributes() {
  dnnl::primitive_attr a;
  a.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return a;
}

}  // namespace

Side::Side(memory::desc lies, memory::desc wants, bool is_result)
    : plain(std::move(lies)), wanted(std::move(wants)) {
  if (plain == wanted) return;
  const dnnl::engine& engine = processor_engine();
  const dnnl::reorder::primitive_desc made(engine, is_result ? wanted : plain, engine,
                                           is_result ? plain : wanted, attributes());
  copy = {dnnl::reorder(made), made.scratchpad_desc()};
}

namespace {

/// The options of a tile, as oneDNN takes them.
struct Options {
  memory::dims strides, dilates, before, after;
  Options(const Conv& c, const Tile& t)
      : strides{c.rule.down.stride, c.rule.across.stride},
        dilates{c.rule.down.dilation - 1, c.rule.across.dilation - 1},
        before{t.top, c.rule.across.padding},
        after{t.bottom, (c.across - 1) * c.rule.across.stride + extent(c.rule.across, c.width) -
                            c.rule.across.padding - c.columns} {}
};

using Forward = dnnl::convolution_forward;
using GradInput = dnnl::convolution_backward_data;
using GradWeight = dnnl::convolution_backward_weights;
constexpr auto algorithm = dnnl::algorithm::convolution_direct;

#if DNNL_VERSION_MAJOR >= 3
Forward::primitive_desc forward_of(const Options& o, const memory::desc& x, const memory::desc& w,
                                   const memory::desc* bias, const memory::desc& y) {
  constexpr auto kind = dnnl::prop_kind::forward_training;
  const dnnl::engine& e = processor_engine();
  if (bias)
    return {e, kind, algorithm, x, w, *bias, y, o.strides, o.dilates, o.before, o.after, attributes()};
  return {e, kind, algorithm, x, w, y, o.strides, o.dilates, o.before, o.after, attributes()};
}
template <class Backward>
typename Backward::primitive_desc backward_of(const Options& o, const memory::desc& x, const memory::desc& w,
                                              const memory::desc& y, const Forward::primitive_desc& of) {
  return {processor_engine(), algorithm, x, w, y, o.strides, o.dilates, o.before, o.after, of, attributes()};
}
#else
Forward::primitive_desc forward_of(const Options& o, const memory::desc& x, const memory::desc& w,
                                   const memory::desc* bias, const memory::desc& y) {
  constexpr auto kind = dnnl::prop_kind::forward_training;
  using D = Forward::desc;
  return {bias ? D(kind, algorithm, x, w, *bias, y, o.strides, o.dilates, o.before, o.after)
               : D(kind, algorithm, x, w, y, o.strides, o.dilates, o.before, o.after),
          attributes(), processor_engine()};
}
template <class Backward>
typename Backward::primitive_desc backward_of(const Options& o, const memory::desc& x, const memory::desc& w,
                                              const memory::desc& y, const Forward::primitive_desc& of) {
  return {typename Backward::desc(algorithm, x, w, y, o.strides, o.dilates, o.before, o.after), attributes(),
          processor_engine(), of};
}
#endif

/// Whether it is code that oneDNN has made for this shape: its plain loops and products are slower than ours.
template <class Made>
bool is_fast(const Made& made) {
  const std::string_view name = made.impl_info_str();
  return name.starts_with("jit") || name.starts_with("brg");
}

}  // namespace

Plan plan_of(const Conv& c, Way way, memory::data_type type, const Tile& t, bool has_bias,
             const memory::desc* lie_as) {
  // The sums of several gradients of kernels are rounded when they are one.
  const auto kernel_type = way == Way::grad_weight ? memory::data_type::f32 : type;
  const Lain images = images_of(c, t), outputs = outputs_of(c, t), kernels = kernels_of(c, t);
  const memory::desc x = images.any(type), y = outputs.any(type), bias = biases_of(t).plain(type);
  const memory::desc w = lie_as ? *lie_as : kernels.any(kernel_type);
  const Options options(c, t);
  Plan plan;
  const auto fill = [&](const auto& made, const memory::desc& x, const memory::desc& w,
                        const memory::desc& y) {
    plan.fast = is_fast(made);
    if (!plan.fast) return;
    plan.x = Side(images.plain(type), x, way == Way::grad_input);
    plan.weight = Side(kernels.plain(kernel_type), w, way == Way::grad_weight);
    plan.y = Side(outputs.plain(type), y, way == Way::forward);
    plan.bias = bias;
    plan.call.room = made.scratchpad_desc();
  };
  if (way == Way::forward) {
    const auto made = forward_of(options, x, w, has_bias ? &bias : nullptr, y);
    fill(made, made.src_desc(), made.weights_desc(), made.dst_desc());
    plan.call.run = Forward(made);
    return plan;
  }
  const auto of = forward_of(options, x, kernels.any(type), nullptr, y);
  if (way == Way::grad_input) {
    const auto made = backward_of<GradInput>(options, x, w, y, of);
    fill(made, made.diff_src_desc(), made.weights_desc(), made.diff_dst_desc());
    plan.call.run = GradInput(made);
  } else {
    const auto made = backward_of<GradWeight>(options, x, w, y, of);
    fill(made, made.src_desc(), made.diff_weights_desc(), made.diff_dst_desc());
    plan.call.run = GradWeight(made);
  }
  return plan;
}

}  // namespace sherd::cpu::conv

#endif
