// Calls of the areas "indexing", "statistics" and "losses".
#include "tests/golden/runs.h"

namespace sherd::test {
namespace {

/// A bound of a slice, which may be missing.
std::optional<std::int64_t> bound(const json& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<std::int64_t>());
}

std::vector<At> entries_of(const json& args, const TensorList& in) {
  std::vector<At> entries;
  for (const json& entry : args.at("at")) {
    if (entry.is_number()) {
      entries.emplace_back(entry.get<std::int64_t>());
    } else if (entry.is_null()) {
      entries.emplace_back(NewAxis{});
    } else if (entry.is_string()) {
      entries.emplace_back(Ellipsis{});
    } else if (entry.contains("slice")) {
      const json& slice = entry.at("slice");
      entries.emplace_back(Slice{bound(slice[0]), bound(slice[1]), bound(slice[2]).value_or(1)});
    } else if (entry.contains("input")) {
      entries.emplace_back(in.at(entry.at("input").get<std::size_t>()));
    } else {
      const auto positions = entry.at("positions").get<std::vector<std::int64_t>>();
      entries.emplace_back(Tensor::from(positions, shape_of(entry, "shape"), place));
    }
  }
  return entries;
}

Tensors run_index_put(const json& args, const TensorList& in) {
  const Tensor x = clone(in.at(0));
  const auto values = static_cast<std::size_t>(args.value("values", 1));
  return {index_put_(x, entries_of(args, in), in.at(values),
                     args.at("add").get<bool>() ? Put::add : Put::replace)};
}

Tensors run_scatter(const json& args, const TensorList& in) {
  const std::int64_t axis = integer(args, "dim");
  if (args.contains("value")) return {scatter(in.at(0), axis, in.at(1), number(args, "value"))};
  return {scatter(in.at(0), axis, in.at(1), in.at(2))};
}

Tensors run_pad(const json& args, const TensorList& in) {
  const std::string mode = args.at("mode");
  const Padding padding = mode == "reflect"     ? Padding::reflect
                          : mode == "replicate" ? Padding::replicate
                          : mode == "circular"  ? Padding::circular
                                                : Padding::constant;
  return {
      pad(in.at(0), shape_of(args, "counts"), padding, args.contains("value") ? number(args, "value") : 0.0)};
}

RotaryScaling scaling_of(const json& args) {
  if (!args.contains("scaling")) return {};
  const json& s = args.at("scaling");
  return {s.at("factor"), s.at("low"), s.at("high"), s.at("original")};
}

Tensors run_where_number(const json& args, const TensorList& in) {
  const double value = number(args, "value");
  return {args.at("reverse").get<bool>() ? where(in.at(0), value, in.at(1))
                                         : where(in.at(0), in.at(1), value)};
}

Run with_offset(Tensor (*op)(const Tensor&, std::int64_t)) {
  return
      [op](const json& args, const TensorList& in) { return Tensors{op(in.at(0), integer(args, "offset"))}; };
}

using Along = Tensor (*)(const Tensor&, std::int64_t);
Run along(Along op) {
  return [op](const json& args, const TensorList& in) { return Tensors{op(in.at(0), integer(args, "dim"))}; };
}

using OverAxes = Tensor (*)(const Tensor&, Shape, Keep);
Run over_axes(OverAxes op) {
  return [op](const json& args, const TensorList& in) {
    return Tensors{op(in.at(0), shape_of(args, "dims"), keep(args))};
  };
}

using Deviation = Tensor (*)(const Tensor&, Shape, Keep, double);
Run deviation(Deviation op) {
  return [op](const json& args, const TensorList& in) {
    return Tensors{op(in.at(0), shape_of(args, "dims"), keep(args), args.value("correction", 1.0))};
  };
}

using Picking = Picked (*)(const Tensor&, std::int64_t, Keep);
Run picking(Picking op) {
  return [op](const json& args, const TensorList& in) {
    const Picked found = op(in.at(0), integer(args, "dim"), keep(args));
    return Tensors{found.values, found.indices};
  };
}

using Loss = Tensor (*)(const Tensor&, const Tensor&, Reduction);
Run loss(Loss op) {
  return [op](const json& args, const TensorList& in) {
    return Tensors{op(in.at(0), in.at(1), reduction_of(args))};
  };
}

Tensors run_kl_div(const json& args, const TensorList& in) {
  const auto target = [&] {
    if (!args.contains("target")) return in.at(1);
    const auto values = args.at("target").get<std::vector<double>>();
    return to(to(Tensor::from(values, in.at(0).shape()), in.at(0).dtype()), place);
  };
  return {kl_div(in.at(0), target(), reduction_of(args),
                 args.value("log_target", false) ? KlTarget::logarithms : KlTarget::probabilities)};
}

}  // namespace

Runs indexing_runs() {
  return {
      {"index",
       [](const json& args, const TensorList& in) { return Tensors{index(in.at(0), entries_of(args, in))}; }},
      {"index_put", run_index_put},
      {"nonzero", [](const json&, const TensorList& in) { return Tensors{nonzero(in.at(0))}; }},
      {"masked_select",
       [](const json&, const TensorList& in) { return Tensors{masked_select(in.at(0), in.at(1))}; }},
      {"gather",
       [](const json& args, const TensorList& in) {
         return Tensors{gather(in.at(0), integer(args, "dim"), in.at(1))};
       }},
      {"scatter", run_scatter},
      {"scatter_add",
       [](const json& args, const TensorList& in) {
         return Tensors{scatter_add(in.at(0), integer(args, "dim"), in.at(1), in.at(2))};
       }},
      {"where_number", run_where_number},
      {"chunk",
       [](const json& args, const TensorList& in) {
         return outputs(chunk(in.at(0), integer(args, "count"), integer(args, "dim")));
       }},
      {"unbind", [](const json& args,
                    const TensorList& in) { return outputs(unbind(in.at(0), integer(args, "dim"))); }},
      {"repeat", [](const json& args,
                    const TensorList& in) { return Tensors{repeat(in.at(0), shape_of(args, "counts"))}; }},
      {"flip", [](const json& args,
                  const TensorList& in) { return Tensors{flip(in.at(0), shape_of(args, "dims"))}; }},
      {"roll",
       [](const json& args, const TensorList& in) {
         return Tensors{roll(in.at(0), integer(args, "shift"), integer(args, "dim"))};
       }},
      {"pad", run_pad},
      {"tril", with_offset(tril)},
      {"triu", with_offset(triu)},
      {"diag", with_offset(diag)},
      {"diagonal",
       [](const json& args, const TensorList& in) {
         return Tensors{
             diagonal(in.at(0), integer(args, "offset"), integer(args, "dim1"), integer(args, "dim2"))};
       }},
      {"eye",
       [](const json& args, const TensorList&) {
         return Tensors{eye(integer(args, "rows"), integer(args, "columns"), options_of(args))};
       }},
      {"linspace",
       [](const json& args, const TensorList&) {
         return Tensors{
             linspace(number(args, "start"), number(args, "end"), integer(args, "count"), options_of(args))};
       }},
      {"one_hot", [](const json& args, const TensorList& in) {
         return Tensors{one_hot(in.at(0), integer(args, "classes"))};
       }}};
}

Runs statistics_runs() {
  return {{"var", deviation(var)},
          {"stddev", deviation(stddev)},
          {"logsumexp", over_axes(logsumexp)},
          {"any", over_axes(any)},
          {"all", over_axes(all)},
          {"prod", over_axes(prod)},
          {"norm",
           [](const json& args, const TensorList& in) {
             return Tensors{norm(in.at(0), number(args, "p"), shape_of(args, "dims"), keep(args))};
           }},
          {"cumsum", along(cumsum)},
          {"cumprod", along(cumprod)},
          {"max", picking(max)},
          {"min", picking(min)},
          {"argmin",
           [](const json& args, const TensorList& in) {
             return Tensors{argmin(in.at(0), integer(args, "dim"), keep(args))};
           }},
          {"sort",
           [](const json& args, const TensorList& in) {
             const Picked found =
                 sort(in.at(0), integer(args, "dim"),
                      args.at("descending").get<bool>() ? Order::descending : Order::ascending);
             return Tensors{found.values, found.indices};
           }},
          {"outer", [](const json&, const TensorList& in) { return Tensors{outer(in.at(0), in.at(1))}; }},
          {"einsum", [](const json& args, const TensorList& in) {
             return Tensors{einsum(args.at("equation").get<std::string>(), in)};
           }}};
}

namespace {

/// One number, or one an axis.
PerAxis per_axis(const json& args, const char* key) {
  const json& value = args.at(key);
  if (!value.is_array()) return value.get<std::int64_t>();
  return {value[0].get<std::int64_t>(), value[1].get<std::int64_t>()};
}

template <class Options>
Run pooling(Tensor (*op)(const Tensor&, PerAxis, const Options&)) {
  return [op](const json& args, const TensorList& in) {
    return Tensors{
        op(in.at(0), per_axis(args, "kernel"), {per_axis(args, "stride"), per_axis(args, "padding")})};
  };
}

template <class Options>
Run pooling(Tensor (*op)(const Tensor&, std::int64_t, const Options&)) {
  return [op](const json& args, const TensorList& in) {
    return Tensors{
        op(in.at(0), integer(args, "kernel"), {integer(args, "stride"), integer(args, "padding")})};
  };
}

Tensors run_interpolate(const json& args, const TensorList& in) {
  InterpolateOptions o{
      .mode = args.at("mode") == "nearest" ? Interpolation::nearest : Interpolation::bilinear,
      .align_corners = args.at("align_corners").get<bool>()};
  if (args.contains("size")) o.size = per_axis(args, "size");
  if (args.contains("scale")) o.scale = {args["scale"][0].get<double>(), args["scale"][1].get<double>()};
  return {interpolate(in.at(0), o)};
}

}  // namespace

Runs networks_runs() {
  return {
      {"group_norm",
       [](const json& args, const TensorList& in) {
         return Tensors{
             group_norm(in.at(0), integer(args, "groups"), optional_input(in, 1), optional_input(in, 2))};
       }},
      {"max_pool2d", pooling(max_pool2d)},
      {"avg_pool2d", pooling(avg_pool2d)},
      {"adaptive_max_pool2d",
       [](const json& args, const TensorList& in) {
         const PerAxis size = per_axis(args, "size");
         return Tensors{adaptive_max_pool2d(in.at(0), size.down, size.across)};
       }},
      {"adaptive_avg_pool2d",
       [](const json& args, const TensorList& in) {
         const PerAxis size = per_axis(args, "size");
         return Tensors{adaptive_avg_pool2d(in.at(0), size.down, size.across)};
       }},
      {"conv2d_options",
       [](const json& args, const TensorList& in) {
         return Tensors{conv2d(in.at(0), in.at(1), in.at(2),
                               {per_axis(args, "stride"), per_axis(args, "padding"),
                                per_axis(args, "dilation"), integer(args, "groups")})};
       }},
      {"conv1d",
       [](const json& args, const TensorList& in) {
         return Tensors{conv1d(in.at(0), in.at(1), in.at(2),
                               {integer(args, "stride"), integer(args, "padding"), integer(args, "dilation"),
                                integer(args, "groups")})};
       }},
      {"attention",
       [](const json& args, const TensorList& in) {
         return Tensors{attention(in.at(0), in.at(1), in.at(2),
                                  {.causal = args.at("causal").get<bool>(), .mask = optional_input(in, 3)})};
       }},
      {"rotary", [](const json& args, const TensorList& in) {
         return Tensors{rotary(
             in.at(0), {integer(args, "first"), number(args, "base"),
                        args.at("neighbours").get<bool>() ? RotaryPairs::neighbours : RotaryPairs::halves,
                        scaling_of(args)})};
       }}};
}

Runs images_runs() {
  return {{"max_pool2d", pooling(max_pool2d)},
          {"avg_pool2d", pooling(avg_pool2d)},
          {"max_pool1d", pooling(max_pool1d)},
          {"avg_pool1d", pooling(avg_pool1d)},
          {"interpolate", run_interpolate},
          {"conv_transpose2d",
           [](const json& args, const TensorList& in) {
             return Tensors{conv_transpose2d(
                 in.at(0), in.at(1), in.at(2),
                 {per_axis(args, "stride"), per_axis(args, "padding"), per_axis(args, "output_padding"),
                  per_axis(args, "dilation"), integer(args, "groups")})};
           }},
          {"conv_transpose1d", [](const json& args, const TensorList& in) {
             return Tensors{conv_transpose1d(
                 in.at(0), in.at(1), {},
                 {integer(args, "stride"), integer(args, "padding"), integer(args, "output_padding"),
                  integer(args, "dilation"), integer(args, "groups")})};
           }}};
}

Runs losses_runs() {
  return {
      {"mse_loss", loss(mse_loss)},
      {"l1_loss", loss(l1_loss)},
      {"huber_loss",
       [](const json& args, const TensorList& in) {
         return Tensors{huber_loss(in.at(0), in.at(1), number(args, "delta"), reduction_of(args))};
       }},
      {"smooth_l1_loss",
       [](const json& args, const TensorList& in) {
         return Tensors{smooth_l1_loss(in.at(0), in.at(1), number(args, "beta"), reduction_of(args))};
       }},
      {"kl_div", run_kl_div},
      {"bce_loss",
       [](const json& args, const TensorList& in) {
         return Tensors{bce_loss(in.at(0), in.at(1), {.reduction = reduction_of(args)})};
       }},
      {"bce_with_logits",
       [](const json& args, const TensorList& in) {
         return Tensors{bce_with_logits(in.at(0), in.at(1),
                                        {reduction_of(args), optional_input(in, 2), optional_input(in, 3)})};
       }},
      {"nll_loss",
       [](const json& args, const TensorList& in) {
         return Tensors{nll_loss(in.at(0), in.at(1),
                                 {reduction_of(args), integer(args, "ignore_index"), optional_input(in, 2)})};
       }},
      {"cross_entropy", [](const json& args, const TensorList& in) {
         return Tensors{cross_entropy(in.at(0), in.at(1),
                                      {.reduction = reduction_of(args),
                                       .ignore_index = integer(args, "ignore_index"),
                                       .label_smoothing = args.value("label_smoothing", 0.0),
                                       .weight = optional_input(in, 2)})};
       }}};
}

}  // namespace sherd::test
