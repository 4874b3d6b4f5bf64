// Curves over the steps of runs, as a picture.
#pragma once

#include <cstddef>
#include <string>
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
  double width = 1000, height = 300;
};

/// Multiples of 1, 2 or 5 times a power of ten within [low, high], low < high, as many as `most` allows.
std::vector<double> ticks(double low, double high, int most);

/// "1.5", "20k", "3.25M".
std::string compact(double value);

/// At most five points for each of `buckets`: the first and the last in it, the lowest and the highest, and a
/// gap if it has one. Fewer points than `buckets` stay as they are.
std::vector<Point> thinned(const std::vector<Point>& points, std::size_t buckets);

/// An SVG document whose colours are the page's: var(--ink), var(--faint) and var(--rule).
std::string drawing(const Chart& chart);

}  // namespace sherd::tools
