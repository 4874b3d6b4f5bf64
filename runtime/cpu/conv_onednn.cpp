// Convolutions by oneDNN's own code for them. A convolution is cut into tiles, each a convolution of its own
// whose images are brought into the library's layout, multiplied and brought back while they lie in the
// cache.
#if defined(SHERD_ONEDNN) && defined(SHERD_OPENMP)

#include <array>
#include <vector>

#include "runtime/cpu/conv_plan.h"
#include "runtime/cpu/gemm_tile.h"
#include "runtime/cpu/onednn_faults.h"
#include "runtime/error.h"
#include "runtime/half.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace conv {
namespace {

using dnnl::memory;
using std::int64_t;

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
void take_from_blocks(const Conv& c, const Tile& tile, const float* sums, float* out) {
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
          float* to = out + (group * c.outputs + first + o) * c.taps() + channel * pixels;
          for (int64_t i = 0; i < channels; ++i)
            for (int64_t p = 0; p < pixels; ++p) *to++ = from[(p * side + i) * side + o];
        }
      }
    }
  });
}

/// The kernels' gradient from sums that lie as the library wants them.
bool give_sums(const Run& run, float* sums) {
  const Conv& c = run.c;
  float* const out = reinterpret_cast<float*>(run.data.weight);
  const OneThread one_thread;
  dnnl::stream stream(processor_engine());
  for (int64_t width = 0; width < run.cuts.width; ++width) {
    const Tile tile = run.tile(0, width);
    const Plan& plan = run.first(width);
    const Lain kernels = kernels_of(c, tile);
    float* const from = sums + run.start(width) / sizeof(float);
    float* const to = out + kernels_at(c, tile);
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
    std::copy_n(reinterpret_cast<const float*>(room.get()), rows * row, to);
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
  return give_sums(run, sums);
}

/// Whether every window sees pixels, and no more pixels are left at the end than a step would reach.
bool is_tight(const ops::ConvRule::Axis& axis, int64_t taps, int64_t pixels, int64_t windows) {
  const int64_t seen = extent(axis, taps), end = (windows - 1) * axis.stride - axis.padding + seen;
  return axis.padding < seen && pixels - end < axis.stride;
}

/// Whether oneDNN may have code for it.
bool may_run(const Conv& c) {
  if (c.images == 0 || c.channels == 0 || c.outputs == 0 || c.rows == 0 || c.columns == 0) return false;
  return is_tight(c.rule.down, c.height, c.rows, c.down) &&
         is_tight(c.rule.across, c.width, c.columns, c.across);
}

/// What oneDNN is given: kernels of one pixel see what lies a stride apart, and no more.
Conv without_unseen(Conv c, Way way) {
  const bool one_pixel =
      c.height == 1 && c.width == 1 && c.rule.down.padding == 0 && c.rule.across.padding == 0;
  if (!one_pixel || way == Way::grad_input) return c;
  c.steps.row *= c.rule.down.stride, c.steps.pixel *= c.rule.across.stride;
  c.rows = c.down, c.columns = c.across;
  c.rule.down.stride = c.rule.across.stride = 1;
  return c;
}

bool run_as_it_is(const Conv& c, Way way, DType dtype, const ConvData& data) {
  const Conv seen = without_unseen(c, way);
  Run run(seen, way, dtype, data);
  return way == Way::grad_weight ? gather(run) : spread(run);
}

/// 16-bit floats as f32, some images at a time, with what is not of an image as f32 too.
template <class T>
class InF32 {
 public:
  explicit InF32(const Conv& c)
      : c(c),
        together(std::clamp<int64_t>(room / (of_x() + of_y()), 1, c.images)),
        memory_(memory_for(bytes())) {}

  const Conv& c;
  const int64_t together;  // images
  int64_t of_x() const { return c.rule.groups * c.input(); }
  int64_t of_y() const { return c.rule.groups * c.output(); }
  int64_t of_bias() const { return c.rule.groups * c.outputs; }
  int64_t of_weight() const { return of_bias() * c.taps(); }
  float* x() const { return reinterpret_cast<float*>(memory_.get()); }
  float* y() const { return x() + together * of_x(); }
  float* weight() const { return y() + together * of_y(); }
  float* bias() const { return weight() + of_weight(); }
  static T* given(std::byte* p) { return reinterpret_cast<T*>(p); }

  template <class From, class To>
  static void convert(const From* from, int64_t count, To* to) {
    parallel_for(count, 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
    });
  }
  /// Calls `body(some images, x and y of the first of them)`; stops and is false where it is.
  template <class F>
  bool for_images(const ConvData& data, const F& body) const {
    for (int64_t image = 0; image < c.images; image += together) {
      Conv part = c;
      part.images = std::min(together, c.images - image);
      if (!body(part, given(data.x) + image * of_x(), given(data.y) + image * of_y())) return false;
    }
    return true;
  }
  bool run(const Conv& part, Way way, bool has_bias) const {
    const auto wide = [](float* p) { return reinterpret_cast<std::byte*>(p); };
    return run_as_it_is(part, way, DType::f32,
                        {wide(x()), wide(weight()), has_bias ? wide(bias()) : nullptr, wide(y())});
  }

 private:
  static constexpr int64_t room = 1 << 20;  // elements
  std::size_t bytes() const {
    return static_cast<std::size_t>(together * (of_x() + of_y()) + of_weight() + of_bias()) * sizeof(float);
  }
  Scratch<std::byte> memory_;
};

/// Outputs, or the gradient of images: each sum is rounded once.
template <class T>
bool spread_in_f32(const Conv& c, Way way, const ConvData& data) {
  const InF32<T> f(c);
  f.convert(f.given(data.weight), f.of_weight(), f.weight());
  if (data.bias) f.convert(f.given(data.bias), f.of_bias(), f.bias());
  return f.for_images(data, [&](const Conv& part, T* x, T* y) {
    const bool forward = way == Way::forward;
    forward ? f.convert(x, part.images * f.of_x(), f.x()) : f.convert(y, part.images * f.of_y(), f.y());
    if (!f.run(part, way, data.bias != nullptr)) return false;
    forward ? f.convert(f.y(), part.images * f.of_y(), y) : f.convert(f.x(), part.images * f.of_x(), x);
    return true;
  });
}

/// The gradient of kernels.
template <class T>
bool gather_in_f32(const Conv& c, const ConvData& data) {
  const InF32<T> f(c);
  std::vector<float> sums(static_cast<std::size_t>(f.of_weight()));
  const bool done = f.for_images(data, [&](const Conv& part, const T* x, const T* y) {
    f.convert(x, part.images * f.of_x(), f.x());
    f.convert(y, part.images * f.of_y(), f.y());
    if (!f.run(part, Way::grad_weight, false)) return false;
    parallel_for(f.of_weight(), 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sums[static_cast<std::size_t>(i)] += f.weight()[i];
    });
    return true;
  });
  if (done) f.convert(sums.data(), f.of_weight(), f.given(data.weight));
  return done;
}

template <class T>
bool run_in_f32(const Conv& c, Way way, const ConvData& data) {
  return way == Way::grad_weight ? gather_in_f32<T>(c, data) : spread_in_f32<T>(c, way, data);
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

/// Whether bf16 is given as it is.
bool runs_in_bf16(const Conv& c, Way way, DType dtype) {
  static const bool multiplies_bf16 = onednn_multiplies_bf16();
  static const faults::Library library = faults::library_here();
  const Conv given = without_unseen(c, way);
  return dtype == DType::bf16 && multiplies_bf16 && !faults::brings_unwritten(way, dtype) &&
         !faults::writes_beyond(given.rule, given.height, given.width, dtype, library);
}

bool run_onednn(const Conv& c, Way way, DType dtype, const ConvData& data) try {
  const bool in_bf16 = runs_in_bf16(c, way, dtype);
  if (dtype == DType::f64 || !may_run(c) || !is_worth(c, way, in_bf16)) return false;
  if ((in_bf16 || dtype == DType::f32) && run_as_it_is(c, way, dtype, data)) return true;
  if (dtype == DType::f32) return false;
  return dtype == DType::bf16 ? run_in_f32<BFloat16>(c, way, data) : run_in_f32<Half>(c, way, data);
} catch (const dnnl::error& error) {
  check<InternalError>(false, "conv2d: oneDNN failed ({}), most likely for lack of memory", error.what());
  return false;
}

}  // namespace
}  // namespace conv

bool conv_forward_onednn(const Conv& c, DType dtype, const ConvData& data) {
  return conv::run_onednn(c, conv::Way::forward, dtype, data);
}
bool conv_grad_input_onednn(const Conv& c, DType dtype, const ConvData& data) {
  return conv::run_onednn(c, conv::Way::grad_input, dtype, data);
}
bool conv_grad_weight_onednn(const Conv& c, DType dtype, const ConvData& data) {
  return conv::run_onednn(c, conv::Way::grad_weight, dtype, data);
}

}  // namespace sherd::cpu

#endif
