#include "tools/inspect.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <unordered_set>

#include "runtime/error.h"
#include "tools/drawing.h"
#include "tools/output.h"

namespace sherd::tools {
namespace {

using shard::Partition;

/// Elements in which a flat group's parameters are aligned: 16 bytes of what is computed with.
std::int64_t alignment(const TrainOptions& o) { return 16 / size_of(dtype_named(o.param_dtype)); }

Partition layout_of(const std::vector<Shape>& shapes, const TrainOptions& o) {
  const auto ranks = static_cast<int>(o.ranks);
  return o.layout == "flat" ? Partition::flat(shapes, ranks, shard::FlatPadding::aligned, alignment(o))
                            : Partition::per_parameter(shapes, ranks);
}

std::vector<Piece> pieces_of(const Partition& layout) {
  std::vector<Piece> pieces;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    for (int p = 0; p < layout.parameters(); ++p) {
      const shard::OwnedPart part = layout.part(p, rank);
      const std::int64_t begin = layout.span(p).offset + part.in_parameter;
      if (part.numel > 0)
        pieces.push_back({layout.span(p).segment, rank, p, begin, begin + part.numel, part.in_parameter});
    }
    for (const shard::Padding& padding : layout.padding()) {
      const std::int64_t slice = layout.shard_numel(padding.segment);
      const std::int64_t begin = std::max(padding.offset, slice * rank);
      const std::int64_t end = std::min(padding.offset + padding.numel, slice * (rank + 1));
      if (begin < end) pieces.push_back({padding.segment, rank, -1, begin, end});
    }
  }
  std::ranges::sort(pieces, {}, [](const Piece& p) { return std::pair(p.segment, p.begin); });
  return pieces;
}

/// The parameters of `module` that nobody has taken yet, as a group.
PlacedGroup taken(const nn::Module& module, const std::string& name, std::int64_t modules,
                  const TrainOptions& o, std::unordered_set<const void*>& gone) {
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (const nn::NamedParameter& p : module.named_parameters()) {
    if (!gone.insert(p.parameter.id()).second) continue;
    names.push_back(p.name);
    shapes.push_back(p.parameter.shape());
  }
  const Partition layout = layout_of(shapes, o);
  return {name, modules, std::move(names), std::move(shapes), layout, pieces_of(layout)};
}

std::string described(const PlacedGroup& group, const Piece& piece) {
  if (piece.parameter < 0) return "padding";
  const auto p = static_cast<std::size_t>(piece.parameter);
  const std::int64_t all = group.shapes[p].numel();
  const std::string part = piece.numel() == all ? std::string("whole")
                                                : fmt::format("[{}, {}) of {}", piece.in_parameter,
                                                              piece.in_parameter + piece.numel(), all);
  return fmt::format("{} {} {}", group.parameters[p], to_string(group.shapes[p]), part);
}

std::int64_t padding_of(const PlacedGroup& group) {
  std::int64_t padding = 0;
  for (const shard::Padding& p : group.layout.padding()) padding += p.numel;
  return padding;
}

std::string group_lines(const PlacedGroup& group, std::int64_t size) {
  std::string lines = fmt::format("\n{}: {} bytes{}, {} a rank, padding {}\n", group.name,
                                  group.layout.segments_numel() * group.layout.ranks() * size,
                                  group.modules > 1 ? " each" : "", group.layout.segments_numel() * size,
                                  padding_of(group) * size);
  for (const Piece& piece : group.pieces)
    lines += fmt::format("  rank {:<4} {:<24} {:>12} bytes  {}\n", piece.rank,
                         fmt::format("[{}, {})", piece.begin, piece.end), piece.numel() * size,
                         described(group, piece));
  return lines;
}

}  // namespace

bool is_inspected(const Setting& setting) {
  constexpr std::array<std::string_view, 7> names = {"layers", "heads",  "width",      "context",
                                                     "ranks",  "layout", "param-dtype"};
  return std::ranges::find(names, setting.name) != names.end();
}

std::int64_t Placement::group_count() const {
  std::int64_t count = 0;
  for (const PlacedGroup& group : groups) count += group.modules;
  return count;
}

std::int64_t Placement::values() const {
  std::int64_t sum = 0;
  for (const Owned& owned : by_rank()) sum += owned.values;
  return sum;
}

std::vector<Owned> Placement::by_rank() const {
  std::vector<Owned> owned(static_cast<std::size_t>(ranks));
  for (const PlacedGroup& group : groups)
    for (const Piece& piece : group.pieces) {
      Owned& mine = owned[static_cast<std::size_t>(piece.rank)];
      (piece.parameter < 0 ? mine.padding : mine.values) += piece.numel() * group.modules;
    }
  return owned;
}

Placement place(const InspectOptions& options) {
  const TrainOptions& o = options.sizes;
  check<ValueError>(options.model == "gpt", "--model {}: takes gpt", options.model);
  check_ranges(o);
  check<ValueError>(o.ranks > 0, "--ranks {}: takes a number from 1; for example --ranks 4", o.ranks);
  nn::GptOptions sizes = model_options(o);
  sizes.tensor.device = Device::meta();
  sizes.layers = 1;  // stands for all, which are placed alike
  nn::Gpt model(sizes);
  Placement placement{.model = options.model, .flat = o.layout == "flat", .ranks = static_cast<int>(o.ranks)};
  std::unordered_set<const void*> gone;
  const std::string blocks = o.layers == 1 ? "blocks.0" : fmt::format("blocks.{{0..{}}}", o.layers - 1);
  placement.groups.push_back(taken(model.blocks[0], blocks, o.layers, o, gone));
  placement.groups.insert(placement.groups.begin(), taken(model, options.model, 1, o, gone));
  return placement;
}

std::string table(const Placement& placement) {
  const std::int64_t size = size_of(placement.dtype);
  std::string text =
      fmt::format("{}: {} parameters, {}, {} layout, {} groups, {} ranks\n", placement.model,
                  placement.values(), name_of(placement.dtype), placement.flat ? "flat" : "per-parameter",
                  placement.group_count(), placement.ranks);
  for (const PlacedGroup& group : placement.groups) text += group_lines(group, size);
  text += "\n";
  const std::vector<Owned> by_rank = placement.by_rank();
  for (std::size_t r = 0; r < by_rank.size(); ++r)
    text += fmt::format("rank {:<4} {:>14} bytes of parameters {:>10} bytes of padding\n", r,
                        by_rank[r].values * size, by_rank[r].padding * size);
  return text;
}

std::string inspect(const InspectOptions& options, FileSystem& files) {
  const Output svg{"--svg", options.svg};
  if (!options.svg.empty()) check_output(svg, files);
  const Placement placement = place(options);
  std::string text = table(placement);
  if (options.svg.empty()) return text;
  write_output(svg, drawing(placement), files);
  return text + fmt::format("\ndrawn in {}\n", options.svg);
}

}  // namespace sherd::tools
