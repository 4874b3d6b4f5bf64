// Curves over the steps of runs, as a picture.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::tools {

/// Of a curve; where `y` is NaN it has a gap.
struct Point {
  double x = 0, y = 0;
};

struct Curve {
  std::string name;  ///< in the legend, unless it is empty
  std::string colour;
  std::vector<Point> points;  ///< by rising x; magnitudes below 1e100
  double width = 1.25;
  bool dots = false;  ///< one on each point, with its numbers under the pointer
};

struct Chart {
  std::string title;
  std::vector<Curve> curves;
  std::vector<double> marks;  ///< steps of which something is to be seen: a line down
  bool from_zero = false;     ///< the vertical axis begins at 0
  double height = 300;        ///< in pixels, without title and legend; the width is the page's
};

/// Multiples of 1, 2 or 5 times a power of ten within [low, high], low < high, as many as `most` allows.
std::vector<double> ticks(double low, double high, int most);

/// "1.5", "20k", "3.25M".
std::string compact(double value);

/// At most five points for each of `buckets`: the first and the last in it, the lowest and the highest, and a
/// gap if it has one. Fewer points than `buckets` stay as they are.
std::vector<Point> thinned(const std::vector<Point>& points, std::size_t buckets);

/// A figure in HTML as wide as its place, whose texts keep their size: lengths across are parts of the width,
/// and only lines are stretched. `chart_style` is for the page, with colours --ink, --faint and --rule.
std::string drawing(const Chart& chart);

/// The CSS that figures of charts need.
inline constexpr std::string_view chart_style = R"(
figure { margin: 0; height: 100%; display: flex; flex-direction: column; } figcaption { font-weight: 600; font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; margin: 4px 0; }
.legend span { display: flex; align-items: center; gap: 8px; overflow-wrap: anywhere; min-width: 0; } .legend svg { flex: none; }
.plot { display: flex; padding: 6px 24px 0 0; margin-top: auto; font: 11px 'DejaVu Sans Mono', Menlo, Consolas, monospace; }
.plot .values { flex: none; } .plot .curves { flex: 1 1 0; width: 100%; min-width: 0; overflow: visible; }
.curves polyline { vector-effect: non-scaling-stroke; }
)";

}  // namespace sherd::tools
