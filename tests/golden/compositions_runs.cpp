// Calls of the area "compositions": functions made of other ops.
#include "runtime/distances.h"
#include "runtime/images.h"
#include "runtime/order.h"
#include "tests/golden/runs.h"

namespace sherd::test {
namespace {

/// One number an axis.
PerAxis per_axis(const json& args, const char* key, PerAxis otherwise = 1) {
  if (!args.contains(key)) return otherwise;
  return {args.at(key)[0].get<std::int64_t>(), args.at(key)[1].get<std::int64_t>()};
}
WindowOptions windows(const json& args) {
  return {per_axis(args, "stride"), per_axis(args, "padding", 0), per_axis(args, "dilation")};
}
GridCorners corners(const json& args) {
  return args.at("align_corners").get<bool>() ? GridCorners::centres : GridCorners::edges;
}

Tensors run_grid_sample(const json& args, const TensorList& in) {
  const std::string outside = args.at("padding_mode");
  return {grid_sample(in.at(0), in.at(1),
                      {args.at("mode") == "nearest" ? Interpolation::nearest : Interpolation::bilinear,
                       outside == "zeros"    ? GridPadding::zeros
                       : outside == "border" ? GridPadding::border
                                             : GridPadding::reflection,
                       corners(args)})};
}

Run factored(Tensor (*op)(const Tensor&, std::int64_t)) {
  return
      [op](const json& args, const TensorList& in) { return Tensors{op(in.at(0), integer(args, "factor"))}; };
}

Run counted(Unique (*op)(const Tensor&)) {
  return [op](const json&, const TensorList& in) {
    const Unique found = op(in.at(0));
    return Tensors{found.values, found.inverse, found.counts};
  };
}

Tensors run_quantile(const json& args, const TensorList& in) {
  const std::map<std::string, QuantileInterpolation> ways = {{"linear", QuantileInterpolation::linear},
                                                             {"lower", QuantileInterpolation::lower},
                                                             {"higher", QuantileInterpolation::higher},
                                                             {"midpoint", QuantileInterpolation::midpoint},
                                                             {"nearest", QuantileInterpolation::nearest}};
  const QuantileInterpolation interpolation = ways.at(args.at("interpolation"));
  const auto axis = args.contains("dim") ? std::optional(integer(args, "dim")) : std::nullopt;
  const auto q = args.at("q").get<std::vector<double>>();
  if (args.contains("several")) return {quantile(in.at(0), q, axis, keep(args), interpolation)};
  return {quantile(in.at(0), q.at(0), axis, keep(args), interpolation)};
}

}  // namespace

Runs compositions_runs() {
  return {{"unfold",
           [](const json& args, const TensorList& in) {
             return Tensors{unfold(in.at(0), per_axis(args, "kernel"), windows(args))};
           }},
          {"fold",
           [](const json& args, const TensorList& in) {
             return Tensors{fold(in.at(0), per_axis(args, "size"), per_axis(args, "kernel"), windows(args))};
           }},
          {"pixel_shuffle", factored(pixel_shuffle)},
          {"pixel_unshuffle", factored(pixel_unshuffle)},
          {"affine_grid",
           [](const json& args, const TensorList& in) {
             return Tensors{affine_grid(in.at(0), per_axis(args, "size"), corners(args))};
           }},
          {"grid_sample", run_grid_sample},
          {"meshgrid",
           [](const json& args, const TensorList& in) {
             return outputs(meshgrid(in, args.at("indexing") == "xy" ? MeshIndexing::xy : MeshIndexing::ij));
           }},
          {"instance_norm",
           [](const json&, const TensorList& in) {
             return Tensors{instance_norm(in.at(0), optional_input(in, 1), optional_input(in, 2))};
           }},
          {"unique", counted(unique)},
          {"unique_consecutive", counted(unique_consecutive)},
          {"bincount",
           [](const json& args, const TensorList& in) {
             return Tensors{bincount(in.at(0), optional_input(in, 1), integer(args, "minimum"))};
           }},
          {"searchsorted",
           [](const json& args, const TensorList& in) {
             return Tensors{searchsorted(
                 in.at(0), in.at(1), args.at("right").get<bool>() ? SearchSide::right : SearchSide::left)};
           }},
          {"median",
           [](const json& args, const TensorList& in) {
             const Picked found = median(in.at(0), integer(args, "dim"), keep(args));
             return Tensors{found.values, found.indices};
           }},
          {"quantile", run_quantile},
          {"cosine_similarity",
           [](const json& args, const TensorList& in) {
             return Tensors{cosine_similarity(in.at(0), in.at(1), integer(args, "dim"))};
           }},
          {"pairwise_distance",
           [](const json& args, const TensorList& in) {
             return Tensors{pairwise_distance(in.at(0), in.at(1), number(args, "p"), 1e-6, keep(args))};
           }},
          {"cdist", [](const json& args, const TensorList& in) {
             return Tensors{cdist(in.at(0), in.at(1), number(args, "p"))};
           }}};
}

}  // namespace sherd::test
