// Convolutions by oneDNN's own code for them. A convolution is cut into tiles, each a convolution of its own
// whose images are brought into the library's layout, multiplied and brought back while they lie in the
// cache.
#if defined(SHERD_ONEDNN) && defined(SHERD_OPENMP)

#include <array>
#include <string_view>
#include <vector>

#include "runtime/cpu/conv.h"
#include "runtime/cpu/gemm_tile.h"
#include "runtime/cpu/onednn.h"
#include "runtime/cpu/scratch.h"
#include "runtime/error.h"
#include "runtime/half.h"
#include "runtime/parallel.h"
#include "runtime/tensor.h"

namespace sherd::cpu {
namespace {

using dnnl::memory;
using std::int64_t;

enum class Way : int64_t { forward, grad_input, grad_weight };

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t extent(const ops::ConvRule::Axis& axis, int64_t taps) { return (taps - 1) * axis.dilation + 1; }

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

/// One of `parts` parts of [0, n), cut at multiples of `unit`.
Range part_of(int64_t n, int64_t unit, int64_t parts, int64_t index) {
  const int64_t blocks = ceil_div(n, unit);
  return {blocks * index / parts * unit, std::min(n, blocks * (index + 1) / parts * unit)};
}

// ---- How a convolution is cut. It depends on the shape alone.

/// What one call computes. `rows` are the images', `down` the outputs', `top` and `bottom` its own padding.
struct Tile {
  Range images, groups, channels, outputs, rows, down;
  int64_t top, bottom;
};

/// How many parts there are of the batch, of the rows, and of the outputs, channels or groups.
struct Cuts {
  int64_t images, rows, width;
  int64_t units() const { return images * rows; }
};

/// What `width` cuts: groups if there are several, else what the way computes.
int64_t width_of(const Conv& c, Way way) {
  return c.rule.groups > 1 ? c.rule.groups : way == Way::grad_input ? c.channels : c.outputs;
}
/// Vectors of the library hold 16 channels of a group, or 16 groups of one.
int64_t unit_of(const Conv& c) { return c.rule.groups > 1 && !(c.channels == 1 && c.outputs == 1) ? 1 : 16; }

Cuts cuts_of(const Conv& c, Way way) {
  constexpr int64_t enough = 1 << 21, room = 1 << 18, wanted = 16, fewest_rows = 4, fewest_pixels = 1024;
  const int64_t work = std::max<int64_t>(1, c.rule.groups * c.output() * c.taps()),
                elements = c.rule.groups * (c.input() + c.output()), pixels = c.down * c.across;
  int64_t together = std::min(enough / work, room / elements);
  // A gradient of kernels is added to a sum as large as itself, which few pixels do not pay for.
  if (way == Way::grad_weight) together = std::max(together, ceil_div(fewest_pixels, pixels));
  const int64_t images = ceil_div(c.images, std::clamp<int64_t>(together, 1, c.images));
  const int64_t more = std::clamp<int64_t>(work / enough, 1, ceil_div(wanted, images));
  const auto [stride, padding, dilation] = c.rule.down;
  int64_t most_rows = way == Way::grad_input ? c.rows / (fewest_rows * stride) : c.down / fewest_rows;
  if (way == Way::grad_weight) most_rows = std::min(most_rows, pixels / fewest_pixels);
  if (stride > extent(c.rule.down, c.height)) most_rows = 1;
  most_rows = std::max<int64_t>(most_rows, 1);
  const int64_t most_width = std::max<int64_t>(width_of(c, way) / (2 * unit_of(c)), 1);
  const int64_t parts = std::max(more, elements / room);
  if (c.rule.groups > 1) {  // which share no pixels, where blocks of rows do
    const int64_t width = std::clamp<int64_t>(parts, 1, most_width);
    return {images, std::clamp<int64_t>(parts / width, 1, most_rows), width};
  }
  const int64_t rows = std::clamp<int64_t>(parts, 1, most_rows);
  return {images, rows, std::clamp<int64_t>(ceil_div(more, rows), 1, most_width)};
}

/// Sets the rows that a tile reads and writes.
void cut_rows(const Conv& c, Way way, Range part, Tile& tile) {
  const int64_t stride = c.rule.down.stride, padding = c.rule.down.padding,
                seen = extent(c.rule.down, c.height);
  if (way == Way::grad_input) {
    const int64_t first = part.begin + padding - seen + 1;  // of what may see the part, in the padded image
    tile.rows = part;
    tile.down = {first > 0 ? ceil_div(first, stride) : 0,
                 std::min(c.down, (part.end - 1 + padding) / stride + 1)};
    tile.top = padding + part.begin - tile.down.begin * stride;
  } else {
    const int64_t first = part.begin * stride - padding, last = (part.end - 1) * stride - padding + seen;
    tile.down = part;
    tile.rows = {std::max<int64_t>(first, 0), std::min(last, c.rows)};
    tile.top = tile.rows.begin - first;
  }
  tile.bottom = (tile.down.size() - 1) * stride + seen - tile.top - tile.rows.size();
}

Tile tile_of(const Conv& c, Way way, const Cuts& cuts, int64_t unit, int64_t width) {
  Tile tile{.images = part_of(c.images, 1, cuts.images, unit / cuts.rows),
            .groups = {0, c.rule.groups},
            .channels = {0, c.channels},
            .outputs = {0, c.outputs}};
  (c.rule.groups > 1        ? tile.groups
   : way == Way::grad_input ? tile.channels
                            : tile.outputs) = part_of(width_of(c, way), unit_of(c), cuts.width, width);
  cut_rows(c, way, part_of(way == Way::grad_input ? c.rows : c.down, 1, cuts.rows, unit % cuts.rows), tile);
  return tile;
}

// ---- Where a tile lies in the caller's tensors.

int64_t images_at(const Conv& c, const Tile& t) {
  return t.images.begin * c.steps.image + (t.groups.begin * c.channels + t.channels.begin) * c.steps.channel +
         t.rows.begin * c.steps.row;
}
int64_t outputs_at(const Conv& c, const Tile& t) {
  return (t.images.begin * c.rule.groups + t.groups.begin) * c.output() +
         (t.outputs.begin * c.down + t.down.begin) * c.across;
}
int64_t kernels_at(const Conv& c, const Tile& t) {
  return (t.groups.begin * c.outputs + t.outputs.begin) * c.taps() + t.channels.begin * c.height * c.width;
}
int64_t biases_at(const Conv& c, const Tile& t) { return t.groups.begin * c.outputs + t.outputs.begin; }

/// A tensor's dims, and its strides in the caller's memory.
struct Lain {
  memory::dims dims, strides;
  memory::desc plain(memory::data_type type) const { return {dims, type, strides}; }
  memory::desc dense(memory::data_type type) const {
    memory::dims steps(dims.size(), 1);
    for (std::size_t i = dims.size() - 1; i > 0; --i) steps[i - 1] = steps[i] * dims[i];
    return {dims, type, steps};
  }
  memory::desc any(memory::data_type type) const { return {dims, type, memory::format_tag::any}; }
};

Lain images_of(const Conv& c, const Tile& t) {
  return {{t.images.size(), t.groups.size() * t.channels.size(), t.rows.size(), c.columns},
          {c.steps.image, c.steps.channel, c.steps.row, c.steps.pixel}};
}
Lain outputs_of(const Conv& c, const Tile& t) {
  return {{t.images.size(), t.groups.size() * t.outputs.size(), t.down.size(), c.across},
          {c.rule.groups * c.output(), c.down * c.across, c.across, 1}};
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
Lain biases_of(const Tile& t) { return {{t.groups.size() * t.outputs.size()}, {1}}; }

// ---- Calls of the library.

struct Call {
  dnnl::primitive run;
  memory::desc room;  // what it works in
  explicit operator bool() const { return bool(run); }
};

using Arguments = std::unordered_map<int, memory>;

Scratch<std::byte> memory_for(std::size_t bytes) {
  Scratch<std::byte> room = scratch<std::byte>(static_cast<int64_t>(bytes));
  check<OutOfMemoryError>(room != nullptr, "conv2d: no memory for {} bytes of working space", bytes);
  return room;
}

/// The same on the rank's own thread, of its pool, which keeps what is large.
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

dnnl::primitive_attr attributes() {
  dnnl::primitive_attr a;
  a.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return a;
}

/// One of a call's tensors: as it lies in the caller's memory, as the call wants it, and the copy from one to
/// the other, empty where they are the same.
struct Side {
  memory::desc plain, wanted;
  Call copy;

  Side() = default;
  Side(memory::desc lies, memory::desc wants, bool is_result)
      : plain(std::move(lies)), wanted(std::move(wants)) {
    if (plain == wanted) return;
    const dnnl::engine& engine = processor_engine();
    const dnnl::reorder::primitive_desc made(engine, is_result ? wanted : plain, engine,
                                             is_result ? plain : wanted, attributes());
    copy = {dnnl::reorder(made), made.scratchpad_desc()};
  }
  std::size_t room() const { return copy ? (wanted.get_size() + 63) / 64 * 64 : 0; }
  /// What the call is given: the caller's memory or `room`, filled by `fill` if the call reads it.
  memory here(const std::byte* lies, std::byte* room) const { return argument(wanted, copy ? room : lies); }
  memory filled(const std::byte* lies, std::byte* room, dnnl::stream& stream) const {
    memory given = here(lies, room);
    if (copy) execute(copy, stream, {{DNNL_ARG_FROM, argument(plain, lies)}, {DNNL_ARG_TO, given}});
    return given;
  }
  void give_back(const memory& result, std::byte* lies, dnnl::stream& stream) const {
    if (copy) execute(copy, stream, {{DNNL_ARG_FROM, result}, {DNNL_ARG_TO, argument(plain, lies)}});
  }
};

struct Plan {
  bool fast = false;  // else nothing of it is set
  Side x, weight, y;
  memory::desc bias;
  Call call;
};

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

/// `lie_as` says how the kernels lie, for tiles that share them; null leaves it to the library.
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

// ---- Plans are kept.

using Key = std::array<int64_t, 38>;

Key key_of(const Conv& c, Way way, DType dtype, const Tile& t, const Tile& first, bool has_bias) {
  const auto& [down, across, groups] = c.rule;
  return {static_cast<int64_t>(way), static_cast<int64_t>(dtype), has_bias,
          // the whole, whose strides a tile has
          down.stride, down.dilation, across.stride, across.padding, across.dilation, groups, c.channels,
          c.rows, c.columns, c.outputs, c.height, c.width, c.down, c.across, c.steps.image, c.steps.channel,
          c.steps.row, c.steps.pixel,
          // the tile
          t.images.size(), t.groups.size(), t.channels.size(), t.outputs.size(), t.rows.size(), t.down.size(),
          t.top, t.bottom,
          // the one that chose how the kernels lie
          first.images.size(), first.rows.size(), first.down.size(), first.top, first.bottom};
}

/// A convolution that is run tile by tile.
class Run {
 public:
  Run(const Conv& c, Way way, DType dtype, const ConvData& data)
      : c(c), way(way), dtype(dtype), data(data), cuts(cuts_of(c, way)) {}

  const Conv& c;
  const Way way;
  const DType dtype;
  const ConvData& data;
  const Cuts cuts;

  /// Looks for the plans that choose how the kernels lie; false if oneDNN is not good at this convolution.
  bool prepare() {
    const OneThread one_thread;
    for (int64_t width = 0; width < cuts.width; ++width) {
      firsts_.push_back(find(tile(0, width), tile(0, width), nullptr));
      if (!firsts_.back()->fast) return false;
      starts_.push_back(starts_.back() + (first(width).weight.wanted.get_size() + 63) / 64 * 64);
    }
    return true;
  }
  Tile tile(int64_t unit, int64_t width) const { return tile_of(c, way, cuts, unit, width); }
  const Plan& first(int64_t width) const { return *firsts_[static_cast<std::size_t>(width)]; }
  /// Where the kernels of a part begin among those of all parts, in bytes.
  std::size_t start(int64_t width) const { return starts_[static_cast<std::size_t>(width)]; }
  std::shared_ptr<const Plan> plan(const Tile& t, int64_t width) const {
    return find(t, tile(0, width), &first(width).weight.wanted);
  }
  std::byte* images(const Tile& t) const { return data.x + images_at(c, t) * size(); }
  std::byte* outputs(const Tile& t) const { return data.y + outputs_at(c, t) * size(); }
  std::byte* kernels(const Tile& t) const { return data.weight + kernels_at(c, t) * size(); }
  std::byte* biases(const Tile& t) const { return data.bias + biases_at(c, t) * size(); }

 private:
  int64_t size() const { return static_cast<int64_t>(size_of(dtype)); }
  std::shared_ptr<const Plan> find(const Tile& t, const Tile& first, const memory::desc* lie_as) const {
    static auto& plans = *std::make_unique<Plans<Key, Plan>>().release();  // outlives every thread
    const bool has_bias = data.bias != nullptr;
    const auto type = dtype == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
    return plans.find(key_of(c, way, dtype, t, first, has_bias), [&] {
      try {
        return plan_of(c, way, type, t, has_bias, lie_as);
      } catch (const dnnl::error& error) {
        if (error.status != dnnl_unimplemented && error.status != dnnl_invalid_arguments) throw;
        return Plan();
      }
    });
  }

  std::vector<std::shared_ptr<const Plan>> firsts_;
  std::vector<std::size_t> starts_{0};
};

/// Outputs from images, or the gradient of images from that of outputs.
bool spread(Run& run) {
  if (!run.prepare()) return false;
  const Cuts& cuts = run.cuts;
  const Tensor room_for_weights = room_of(run.start(cuts.width));
  std::byte* const weights = room_for_weights.raw();
  parallel_for(cuts.width, 1, [&](int64_t begin, int64_t end) {
    const OneThread one_thread;
    dnnl::stream stream(processor_engine());
    for (int64_t width = begin; width < end; ++width)
      run.first(width).weight.filled(run.kernels(run.tile(0, width)), weights + run.start(width), stream);
  });
  parallel_for(cuts.units() * cuts.width, 1, [&](int64_t begin, int64_t end) {
    const OneThread one_thread;
    dnnl::stream stream(processor_engine());
    for (int64_t i = begin; i < end; ++i) {
      const int64_t width = i % cuts.width;
      const Tile tile = run.tile(i / cuts.width, width);
      const std::shared_ptr<const Plan> plan = run.plan(tile, width);
      const Scratch<std::byte> room = memory_for(plan->x.room() + plan->y.room());
      std::byte *for_x = room.get(), *for_y = room.get() + plan->x.room();
      const memory weight = run.first(width).weight.here(run.kernels(tile), weights + run.start(width));
      if (run.way == Way::forward) {
        const memory x = plan->x.filled(run.images(tile), for_x, stream),
                     y = plan->y.here(run.outputs(tile), for_y);
        Arguments given{{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, weight}, {DNNL_ARG_DST, y}};
        if (run.data.bias) given.emplace(DNNL_ARG_BIAS, argument(plan->bias, run.biases(tile)));
        execute(plan->call, stream, std::move(given));
        plan->y.give_back(y, run.outputs(tile), stream);
      } else {
        const memory y = plan->y.filled(run.outputs(tile), for_y, stream),
                     x = plan->x.here(run.images(tile), for_x);
        execute(plan->call, stream,
                {{DNNL_ARG_DIFF_DST, y}, {DNNL_ARG_WEIGHTS, weight}, {DNNL_ARG_DIFF_SRC, x}});
        plan->x.give_back(x, run.images(tile), stream);
      }
    }
  });
  return true;
}

/// The sum over some units of the gradients of some kernels, laid as the library wants it.
void sum_units(const Run& run, Range units, int64_t width, float* sum) {
  const OneThread one_thread;
  dnnl::stream stream(processor_engine());
  const std::size_t bytes = run.first(width).weight.wanted.get_size();
  const Scratch<std::byte> next = memory_for(units.size() > 1 ? bytes : 0);
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const Tile tile = run.tile(unit, width);
    const std::shared_ptr<const Plan> plan = run.plan(tile, width);
    const Scratch<std::byte> room = memory_for(plan->x.room() + plan->y.room());
    const memory x = plan->x.filled(run.images(tile), room.get(), stream),
                 y = plan->y.filled(run.outputs(tile), room.get() + plan->x.room(), stream);
    float* to = unit == units.begin ? sum : reinterpret_cast<float*>(next.get());
    execute(plan->call, stream,
            {{DNNL_ARG_SRC, x},
             {DNNL_ARG_DIFF_DST, y},
             {DNNL_ARG_DIFF_WEIGHTS, argument(plan->weight.wanted, to)}});
    if (to != sum)
      for (std::size_t i = 0; i < bytes / sizeof(float); ++i) sum[i] += to[i];
  }
}

/// Whether kernels lie as blocks of 16 channels by 16 outputs, as most do.
bool lie_in_blocks(const Plan& plan, const Lain& kernels) {
  using Tag = memory::format_tag;
  return plan.weight.wanted == memory::desc(kernels.dims, memory::data_type::f32,
                                            kernels.dims.size() == 5 ? Tag::gOIhw16i16o : Tag::OIhw16i16o);
}

/// Rounded sums of the kernels of a part from such blocks: the library's own copy takes four times as long.
template <class T>
void take_from_blocks(const Conv& c, const Tile& tile, const float* sums, T* out) {
  constexpr int64_t side = 16;
  const int64_t pixels = c.height * c.width, across = ceil_div(tile.channels.size(), side),
                down = ceil_div(tile.outputs.size(), side);
  parallel_for(tile.groups.size() * down, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t group = at / down, first = at % down * side,
                    outputs = std::min(side, tile.outputs.size() - first);
      for (int64_t block = 0; block < across; ++block) {
        const int64_t channel = block * side, channels = std::min(side, tile.channels.size() - channel);
        const float* const from = sums + (at * across + block) * pixels * side * side;
        for (int64_t o = 0; o < outputs; ++o) {
          T* to = out + (group * c.outputs + first + o) * c.taps() + channel * pixels;
          for (int64_t i = 0; i < channels; ++i)
            for (int64_t p = 0; p < pixels; ++p) *to++ = T(from[(p * side + i) * side + o]);
        }
      }
    }
  });
}

/// The kernels' gradient from sums that lie as the library wants them.
template <class T>
bool give_sums(const Run& run, float* sums) {
  const Conv& c = run.c;
  T* const out = reinterpret_cast<T*>(run.data.weight);
  const OneThread one_thread;
  dnnl::stream stream(processor_engine());
  for (int64_t width = 0; width < run.cuts.width; ++width) {
    const Tile tile = run.tile(0, width);
    const Plan& plan = run.first(width);
    const Lain kernels = kernels_of(c, tile);
    float* const from = sums + run.start(width) / sizeof(float);
    T* const to = out + kernels_at(c, tile);
    if (lie_in_blocks(plan, kernels)) {
      take_from_blocks(c, tile, from, to);
      continue;
    }
    memory::desc dense = kernels.dense(memory::data_type::f32);
    const int64_t row = tile.channels.size() * c.height * c.width,
                  rows = tile.groups.size() * tile.outputs.size();
    const Scratch<std::byte> room = memory_for(dense.get_size());
    memory lies = argument(plan.weight.wanted, from), lie = argument(dense, room.get());
    dnnl::reorder(lies, lie).execute(stream, lies, lie);
    stream.wait();
    // A part has all channels of its outputs, and all outputs of its groups.
    const float* const plain = reinterpret_cast<const float*>(room.get());
    for (int64_t i = 0; i < rows * row; ++i) to[i] = T(plain[i]);
  }
  return true;
}

/// Sums of so many units at a time, and those sums in order.
bool gather(Run& run) {
  if (!run.prepare()) return false;
  constexpr int64_t most_parts = 8, pixels_of_a_part = 1024;
  const Conv& c = run.c;
  const Cuts& cuts = run.cuts;
  const int64_t parts = std::clamp<int64_t>(c.images * c.down * c.across / pixels_of_a_part, 1,
                                            std::min(cuts.units(), most_parts)),
                all = static_cast<int64_t>(run.start(cuts.width) / sizeof(float));
  const Tensor room = room_of(static_cast<std::size_t>(parts * all) * sizeof(float));
  float* const sums = reinterpret_cast<float*>(room.raw());
  parallel_for(parts * cuts.width, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i / cuts.width, width = i % cuts.width;
      sum_units(run, part_of(cuts.units(), 1, parts, part), width,
                sums + part * all + static_cast<int64_t>(run.start(width) / sizeof(float)));
    }
  });
  parallel_for(parts > 1 ? all : 0, 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t i = begin; i < end; ++i) sums[i] += sums[part * all + i];
  });
  return run.dtype == DType::f32 ? give_sums<float>(run, sums) : give_sums<BFloat16>(run, sums);
}

/// Whether every window sees pixels, and no more pixels are left at the end than a step would reach.
bool is_tight(const ops::ConvRule::Axis& axis, int64_t taps, int64_t pixels, int64_t windows) {
  const int64_t seen = extent(axis, taps), end = (windows - 1) * axis.stride - axis.padding + seen;
  return axis.padding < seen && pixels - end < axis.stride;
}

/// Whether oneDNN may have code for it.
bool may_run(const Conv& c) {
  if (c.images == 0 || c.channels == 0 || c.outputs == 0) return false;
  return is_tight(c.rule.down, c.height, c.rows, c.down) &&
         is_tight(c.rule.across, c.width, c.columns, c.across);
}

/// Kernels of one pixel see what lies a stride apart, and no more.
Conv without_unseen(Conv c) {
  c.steps.row *= c.rule.down.stride, c.steps.pixel *= c.rule.across.stride;
  c.rows = c.down, c.columns = c.across;
  c.rule.down.stride = c.rule.across.stride = 1;
  return c;
}

bool run_as_it_is(const Conv& c, Way way, DType dtype, const ConvData& data) {
  const bool one_pixel =
      c.height == 1 && c.width == 1 && c.rule.down.padding == 0 && c.rule.across.padding == 0;
  const Conv seen = one_pixel && way != Way::grad_input ? without_unseen(c) : c;
  Run run(seen, way, dtype, data);
  return way == Way::grad_weight ? gather(run) : spread(run);
}

/// 16-bit floats for which oneDNN has no code where it has some for f32: as those, some images at a time,
/// each sum rounded once. Only what is not summed over images.
template <class T>
bool run_as_f32(const Conv& c, Way way, const ConvData& data) {
  constexpr int64_t room = 1 << 20, grain = 1 << 14;
  const int64_t of_x = c.rule.groups * c.input(), of_y = c.rule.groups * c.output(),
                of_w = c.rule.groups * c.outputs * c.taps(), of_bias = c.rule.groups * c.outputs,
                together = std::clamp<int64_t>(room / (of_x + of_y), 1, c.images);
  const Scratch<std::byte> memory =
      memory_for(static_cast<std::size_t>(together * (of_x + of_y) + of_w + of_bias) * sizeof(float));
  auto* const x = reinterpret_cast<float*>(memory.get());
  float *const y = x + together * of_x, *const w = y + together * of_y, *const bias = w + of_w;
  const auto convert = [&]<class From, class To>(const From* from, int64_t count, To* to) {
    parallel_for(count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
    });
  };
  const auto given = [](std::byte* p) { return reinterpret_cast<T*>(p); };
  const auto wide = [](float* p) { return reinterpret_cast<std::byte*>(p); };
  convert(given(data.weight), of_w, w);
  if (data.bias) convert(given(data.bias), of_bias, bias);
  const bool forward = way == Way::forward;
  for (int64_t image = 0; image < c.images; image += together) {
    Conv part = c;
    part.images = std::min(together, c.images - image);
    T *const narrow_x = given(data.x) + image * of_x, *const narrow_y = given(data.y) + image * of_y;
    if (forward)
      convert(narrow_x, part.images * of_x, x);
    else
      convert(narrow_y, part.images * of_y, y);
    if (!run_as_it_is(part, way, DType::f32, {wide(x), wide(w), data.bias ? wide(bias) : nullptr, wide(y)}))
      return false;
    if (forward)
      convert(y, part.images * of_y, narrow_y);
    else
      convert(x, part.images * of_x, narrow_x);
  }
  return true;
}

/// Whether its code is the faster one. It fills channels and outputs up to vectors of 16, in vain; images of
/// up to 3 channels it reads as they are. Ours unfolds what kernels see, which many taps do not pay for.
bool is_worth(const Conv& c, Way way, bool in_bf16) {
  constexpr double most_filling = 1.3, most_in_bf16 = 1.7;
  constexpr int64_t many_taps = 64;
  if (c.rule.groups > 1) return true;
  if (way != Way::grad_input && c.channels <= 3) return c.taps() >= many_taps;
  const auto filling = [](int64_t n) {
    return static_cast<double>(ceil_div(n, 16) * 16) / static_cast<double>(n);
  };
  // Of bf16 it multiplies twice as fast as we do, but for the gradient of few channels.
  if (in_bf16) return way != Way::grad_input || filling(c.channels) <= most_in_bf16;
  return filling(c.channels) * filling(c.outputs) <= most_filling;
}

bool run_onednn(const Conv& c, Way way, DType dtype, const ConvData& data) try {
  static const bool multiplies_bf16 = onednn_multiplies_bf16();
  const bool in_bf16 = dtype == DType::bf16 && multiplies_bf16, direct = in_bf16 || dtype == DType::f32;
  if (dtype == DType::f64 || !may_run(c) || !is_worth(c, way, in_bf16)) return false;
  if (direct && run_as_it_is(c, way, dtype, data)) return true;
  if (dtype == DType::f32 || way == Way::grad_weight) return false;
  return dtype == DType::bf16 ? run_as_f32<BFloat16>(c, way, data) : run_as_f32<Half>(c, way, data);
} catch (const dnnl::error& error) {
  check<InternalError>(false, "conv2d: oneDNN failed ({}), most likely for lack of memory", error.what());
  return false;
}

}  // namespace

bool conv_forward_onednn(const Conv& c, DType dtype, const ConvData& data) {
  return run_onednn(c, Way::forward, dtype, data);
}
bool conv_grad_input_onednn(const Conv& c, DType dtype, const ConvData& data) {
  return run_onednn(c, Way::grad_input, dtype, data);
}
bool conv_grad_weight_onednn(const Conv& c, DType dtype, const ConvData& data) {
  return run_onednn(c, Way::grad_weight, dtype, data);
}

}  // namespace sherd::cpu

#endif
