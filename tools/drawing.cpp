#include "tools/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tools/svg.h"

namespace sherd::tools {
namespace {

/// Told apart by most eyes; from the ninth rank on, evenly turned hues.
std::string colour_of(int rank) {
  constexpr std::array<std::string_view, 8> first = {"#7aa6d8", "#f2b266", "#7fc29b", "#e58a8a",
                                                     "#b39ddb", "#e3d26f", "#6fc3c8", "#c9a58b"};
  const auto index = static_cast<std::size_t>(rank);
  if (index < first.size()) return std::string(first[index]);
  return fmt::format("hsl({}, 52%, {}%)", rank * 137 % 360, rank % 2 == 0 ? 70 : 60);
}
std::string hatch_of(int rank) { return fmt::format("hatch{}", rank); }

std::string bytes_text(std::int64_t bytes) {
  constexpr std::array<std::string_view, 4> units = {"KB", "MB", "GB", "TB"};
  if (bytes < 1000) return fmt::format("{} B", bytes);
  auto value = static_cast<double>(bytes) / 1000;
  std::size_t unit = 0;
  for (; value >= 999.95 && unit + 1 < units.size(); ++unit) value /= 1000;
  return fmt::format("{:.1f} {}", value, units[unit]);
}

/// 1234567 as 1,234,567.
std::string grouped(std::int64_t value) {
  std::string text = std::to_string(value);
  for (auto at = static_cast<std::int64_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

/// Draws from top to bottom.
class PlacementPicture {
 public:
  explicit PlacementPicture(const Placement& placement) : p_(placement), size_(size_of(placement.dtype)) {}

  std::string draw() {
    for (int rank = 0; rank < p_.ranks; ++rank) svg_.define_hatch(hatch_of(rank), colour_of(rank));
    title();
    legend();
    for (const PlacedGroup& group : p_.groups) p_.flat ? flat_group(group) : cut_group(group);
    return svg_.document(page_width, y_ + margin);
  }

 private:
  static constexpr double margin = 28, left = 230, bar_width = 800, right = 220;
  static constexpr double page_width = left + bar_width + right;
  static constexpr std::string_view ink = "#24292f", faint = "#6e7781", ground = "#f6f8fa", seam = "#ffffff";

  void title() {
    y_ = margin + 8;
    svg_.text(margin, y_, fmt::format("{} on {} {}", p_.model, p_.ranks, p_.ranks == 1 ? "rank" : "ranks"),
              {.size = 20, .bold = true});
    y_ += 24;
    svg_.text(margin, y_,
              fmt::format("{} parameters in {}, {} layout, {} groups", grouped(p_.values()),
                          name_of(p_.dtype), p_.flat ? "flat" : "per-parameter", p_.group_count()),
              {.size = 12, .colour = faint});
    y_ += 26;
  }

  void legend() {
    const std::vector<Owned> owned = p_.by_rank();
    constexpr double column = 290;
    const int columns = std::max(1, static_cast<int>((page_width - 2 * margin) / column));
    for (int rank = 0; rank < p_.ranks; ++rank) {
      const double x = margin + column * (rank % columns);
      const Owned& mine = owned[static_cast<std::size_t>(rank)];
      svg_.rect({x, y_ - 7, 14, 14}, colour_of(rank), {}, 3);
      svg_.text(x + 22, y_, fmt::format("rank {}: {}", rank, bytes_text(mine.values * size_)));
      if (mine.padding > 0) {
        svg_.rect({x + 150, y_ - 7, 14, 14}, fmt::format("url(#{})", hatch_of(rank)), {}, 3);
        svg_.text(x + 170, y_, fmt::format("padding {}", bytes_text(mine.padding * size_)),
                  {.colour = faint});
      }
      if ((rank + 1) % columns == 0 || rank + 1 == p_.ranks) y_ += 22;
    }
    y_ += 8;
  }

  // ---- one bar a group: parameters side by side, cut where the ranks' slices end ----

  void flat_group(const PlacedGroup& group) {
    constexpr double height = 44;
    const double scale =
        bar_width / static_cast<double>(std::max<std::int64_t>(group.layout.gathered_numel(), 1));
    svg_.line({{margin, y_}, {page_width - margin, y_}}, "#d0d7de");
    y_ += 30;
    side_texts(group, y_ + height / 2);
    rank_marks(group, y_ - 10);
    for (const Piece& piece : group.pieces) draw_piece(group, piece, scale, height);
    const std::vector<std::size_t> small = label_inside(group, scale, height);
    y_ += height;
    label_below(group, small, scale);
    y_ += 20;
  }

  void side_texts(const PlacedGroup& group, double middle) {
    std::int64_t padding = 0;
    for (const shard::Padding& p : group.layout.padding()) padding += p.numel;
    svg_.text(margin, middle - 16, group.name, {.size = 13, .bold = true});
    svg_.text(margin, middle + 2, fmt::format("{} parameters", group.parameters.size()), {.colour = faint});
    svg_.text(margin, middle + 17,
              fmt::format("{} a rank", bytes_text(group.layout.segments_numel() * size_)), {.colour = faint});
    const double x = left + bar_width + 14;
    svg_.text(x, middle - 8, bytes_text(group.layout.segments_numel() * group.layout.ranks() * size_));
    svg_.text(x, middle + 8, fmt::format("padding {}", bytes_text(padding * size_)), {.colour = faint});
  }

  void rank_marks(const PlacedGroup& group, double y) {
    const double slice = bar_width / group.layout.ranks();
    if (slice < 24) return;
    for (int rank = 0; rank < group.layout.ranks(); ++rank)
      svg_.text(left + slice * (rank + 0.5), y,
                slice < 60 ? fmt::format("{}", rank) : fmt::format("rank {}", rank),
                {.size = 10, .colour = faint, .anchor = Anchor::middle});
  }

  void draw_piece(const PlacedGroup& group, const Piece& piece, double scale, double height) {
    const double x = left + static_cast<double>(piece.begin) * scale;
    const double width = static_cast<double>(piece.numel()) * scale;
    const bool padding = piece.parameter < 0;
    const std::string what =
        padding ? "padding"
                : fmt::format("{} [{}, {})", group.parameters[static_cast<std::size_t>(piece.parameter)],
                              piece.in_parameter, piece.in_parameter + piece.numel());
    const std::string tip = fmt::format("rank {}: {}, {} bytes", piece.rank, what, piece.numel() * size_);
    svg_.rect({x, y_, width, height},
              padding ? fmt::format("url(#{})", hatch_of(piece.rank)) : colour_of(piece.rank), tip);
    // A seam where a parameter begins, and a wider one where another rank does.
    if (piece.begin > 0 && piece.in_parameter == 0) svg_.line({{x, y_}, {x, y_ + height}}, seam, 0.75);
    if (piece.begin > 0 && piece.begin % group.layout.shard_numel(piece.segment) == 0)
      svg_.line({{x, y_ - 3}, {x, y_ + height + 3}}, ink, 1);
  }

  /// Names and sizes where they fit; the parameters whose do not.
  std::vector<std::size_t> label_inside(const PlacedGroup& group, double scale, double height) {
    std::vector<std::size_t> small;
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const shard::ParameterSpan& span = group.layout.span(static_cast<int>(i));
      const std::string bytes = bytes_text(span.numel * size_);
      const double width = static_cast<double>(span.numel) * scale;
      if (Svg::width_of(group.parameters[i], 11) + 8 > width || Svg::width_of(bytes, 10) + 8 > width) {
        small.push_back(i);
        continue;
      }
      const double middle =
          left + (static_cast<double>(span.offset) + static_cast<double>(span.numel) / 2) * scale;
      svg_.text(middle, y_ + height / 2 - 8, group.parameters[i], {.anchor = Anchor::middle, .halo = true});
      svg_.text(middle, y_ + height / 2 + 8, bytes, {.size = 10, .anchor = Anchor::middle, .halo = true});
    }
    return small;
  }

  /// The others under the bar, each at the end of a line from its place, in as many rows as they need.
  void label_below(const PlacedGroup& group, const std::vector<std::size_t>& small, double scale) {
    constexpr double row_height = 17, gap = 14;
    struct Label {
      std::string text;
      double from, x;
      std::size_t row;
    };
    std::vector<Label> labels;
    std::vector<double> ends;  // of the rows
    for (const std::size_t i : small) {
      const shard::ParameterSpan& span = group.layout.span(static_cast<int>(i));
      const std::string text = fmt::format("{} {}", group.parameters[i], bytes_text(span.numel * size_));
      const double width = Svg::width_of(text, 10);
      const double from =
          left + (static_cast<double>(span.offset) + static_cast<double>(span.numel) / 2) * scale;
      const double wanted = std::min(from + 4, page_width - margin - width);
      std::size_t row = 0;
      while (row < ends.size() && ends[row] + gap > wanted) ++row;
      if (row == ends.size()) ends.push_back(0);
      ends[row] = wanted + width;
      labels.push_back({text, from, wanted, row});
    }
    const double top = y_;
    for (const Label& label : labels) {
      const double y = top + 12 + row_height * static_cast<double>(label.row);
      svg_.line({{label.from, top}, {label.from, y}, {label.x - 2, y}}, "#afb8c1", 0.75);
    }
    for (const Label& label : labels)
      svg_.text(label.x, top + 12 + row_height * static_cast<double>(label.row), label.text,
                {.size = 10, .colour = faint, .halo = true});
    y_ += row_height * static_cast<double>(ends.size()) + 6;
  }

  // ---- a bar a parameter: rows of it, in equal slices ----

  void cut_group(const PlacedGroup& group) {
    constexpr double height = 16, pitch = 22;
    svg_.line({{margin, y_}, {page_width - margin, y_}}, "#d0d7de");
    y_ += 22;
    svg_.text(margin, y_, group.name, {.size = 13, .bold = true});
    svg_.text(left + bar_width + 14, y_,
              fmt::format("{} a rank", bytes_text(group.layout.segments_numel() * size_)), {.colour = faint});
    rank_marks(group, y_);
    y_ += 12;
    for (int segment = 0; segment < group.layout.segments(); ++segment) {
      const double scale =
          bar_width / static_cast<double>(std::max<std::int64_t>(group.layout.gathered_numel(segment), 1));
      for (const Piece& piece : group.pieces)
        if (piece.segment == segment) draw_piece(group, piece, scale, height);
      const auto i = static_cast<std::size_t>(segment);
      const std::int64_t values = group.shapes[i].numel();
      const std::int64_t padding = group.layout.gathered_numel(segment) - values;
      svg_.text(margin + 12, y_ + height / 2,
                fmt::format("{} {}", group.parameters[i], to_string(group.shapes[i])));
      svg_.text(left + bar_width + 14, y_ + height / 2,
                padding > 0
                    ? fmt::format("{} + {} padding", bytes_text(values * size_), bytes_text(padding * size_))
                    : bytes_text(values * size_));
      y_ += pitch;
    }
    y_ += 14;
  }

  const Placement& p_;
  std::int64_t size_;
  Svg svg_;
  double y_ = 0;
};

}  // namespace

std::string drawing(const Placement& placement) { return PlacementPicture(placement).draw(); }

}  // namespace sherd::tools
