#include "tools/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tools/svg.h"

namespace sherd::tools {
namespace {

constexpr double above = 8, below = 34;  // the curves
constexpr double values_width = 62;      // of the column of values beside them
constexpr double full_width = 1000;      // the width that lines are drawn in, to be stretched
constexpr int most_steps = 5, letter_size = 11;
constexpr std::size_t buckets = 800;
constexpr std::string_view faint = "var(--faint)", rule = "var(--rule)";

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();

  void add(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  /// One that has a middle and an extent, whatever was added.
  Range widened(double least) const {
    if (low > high) return {0, 1};
    const double missing = least - (high - low);
    return missing > 0 ? Range{low - missing / 2, high + missing / 2} : *this;
  }
};

class Picture {
 public:
  explicit Picture(const Chart& chart) : chart_(chart) {
    for (const Curve& curve : chart.curves) {
      shown_.push_back(thinned(curve.points, buckets));
      for (const Point& p : curve.points) x_.add(p.x), y_.add(p.y);
    }
    x_ = x_.widened(1);
    if (chart.from_zero) y_.add(0);
    const double size = std::max(std::abs(y_.low), std::abs(y_.high));
    y_ = y_.widened(std::isfinite(size) && size > 0 ? 1e-4 * size : 1);
    const double space = 0.04 * (y_.high - y_.low);
    y_.high += space;
    if (!chart.from_zero || y_.low < 0) y_.low -= space;
  }

  std::string draw() {
    grid();
    for (const double mark : chart_.marks)
      lines_.line({{x(mark), above}, {x(mark), bottom()}}, faint, 1, "2 3");
    for (std::size_t i = 0; i < shown_.size(); ++i) curve(chart_.curves[i], shown_[i]);
    return fmt::format(
        "<figure>\n<figcaption>{0}</figcaption>\n{1}<div class=\"plot\">\n"
        "<svg class=\"values\" width=\"{2}\" height=\"{3}\">\n{4}</svg>\n"
        "<svg class=\"curves\" height=\"{3}\">\n{5}{6}{7}</svg>\n</div>\n</figure>\n",
        escaped(chart_.title), legend(), svg_number(values_width), svg_number(chart_.height), values_, steps_,
        lines_.stretched(full_width, chart_.height), dots_);
  }

 private:
  double bottom() const { return chart_.height - below; }
  double x(double step) const { return (step - x_.low) / (x_.high - x_.low) * full_width; }
  double y(double value) const {
    return bottom() - (value - y_.low) / (y_.high - y_.low) * (bottom() - above);
  }
  /// A place across, as a part of a width that the page decides.
  static std::string across(double x) { return svg_number(100 * x / full_width) + "%"; }

  static std::string dot(const std::string& x, double y, double radius, std::string_view colour,
                         const std::string& tip = {}) {
    return fmt::format("<circle cx=\"{}\" cy=\"{}\" r=\"{}\" fill=\"{}\">{}</circle>\n", x, svg_number(y),
                       svg_number(radius), colour,
                       tip.empty() ? "" : fmt::format("<title>{}</title>", escaped(tip)));
  }

  static std::string text(const std::string& x, double y, std::string_view anchor, std::string_view text) {
    return fmt::format("<text x=\"{}\" y=\"{}\" fill=\"{}\" text-anchor=\"{}\">{}</text>\n", x,
                       svg_number(y + 0.36 * letter_size), faint, anchor, escaped(text));
  }

  std::string legend() const {
    std::string names;
    for (const Curve& curve : chart_.curves) {
      if (curve.name.empty()) continue;
      Svg line;
      line.line({{0, 5}, {22, 5}}, curve.colour, curve.width + 0.75);
      if (curve.dots) line.dot(11, 5, 3, curve.colour);
      names += fmt::format("<span><svg width=\"22\" height=\"10\">\n{}</svg>{}</span>\n", line.body(),
                           escaped(curve.name));
    }
    return names.empty() ? "" : fmt::format("<div class=\"legend\">\n{}</div>\n", names);
  }

  void grid() {
    for (const double value : ticks(y_.low, y_.high, static_cast<int>((bottom() - above) / 34))) {
      lines_.line({{0, y(value)}, {full_width, y(value)}}, rule);
      values_ += text(svg_number(values_width - 8), y(value), "end", compact(value));
    }
    lines_.line({{0, bottom()}, {full_width, bottom()}}, faint);
    for (const double step : ticks(x_.low, x_.high, most_steps)) {
      if (step != std::floor(step)) continue;
      lines_.line({{x(step), bottom()}, {x(step), bottom() + 4}}, faint);
      steps_ += text(across(x(step)), bottom() + 14, "middle", compact(step));
    }
    steps_ += text("100%", bottom() + 27, "end", "step");
  }

  void curve(const Curve& curve, const std::vector<Point>& points) {
    std::vector<std::pair<double, double>> line;
    const auto end_line = [&] {
      if (line.size() == 1 && !curve.dots)
        dots_ += dot(across(line[0].first), line[0].second, 2, curve.colour);
      if (line.size() > 1) lines_.line(line, curve.colour, curve.width);
      line.clear();
    };
    for (const Point& p : points) {
      if (std::isnan(p.y))
        end_line();
      else
        line.emplace_back(x(p.x), y(p.y));
    }
    end_line();
    for (const Point& p : points)
      if (curve.dots && !std::isnan(p.y))
        dots_ += dot(across(x(p.x)), y(p.y), 3, curve.colour,
                     fmt::format("{}: step {:.0f}, {:.6g}", curve.name, p.x, p.y));
  }

  const Chart& chart_;
  std::vector<std::vector<Point>> shown_;
  Range x_, y_;
  Svg lines_;                          // stretched
  std::string values_, steps_, dots_;  // not
};

}  // namespace

std::vector<double> ticks(double low, double high, int most) {
  const double least = (high - low) / std::max(most, 1);
  const double power = std::pow(10, std::floor(std::log10(least)));
  double step = 10 * power;
  for (const double factor : {5, 2, 1})
    if (factor * power >= least) step = factor * power;
  std::vector<double> all;
  for (double i = std::ceil(low / step); i * step <= high && all.size() < 1000; ++i)
    if (i * step >= low) all.push_back(i * step);
  return all;
}

std::string compact(double value) {
  const double size = std::abs(value);
  if (size >= 1e12 || size < 1e4) return fmt::format("{:.6g}", value);
  if (size >= 1e9) return fmt::format("{:.6g}G", value / 1e9);
  if (size >= 1e6) return fmt::format("{:.6g}M", value / 1e6);
  return fmt::format("{:.6g}k", value / 1e3);
}

std::vector<Point> thinned(const std::vector<Point>& points, std::size_t buckets) {
  if (points.size() <= buckets) return points;
  std::vector<Point> kept;
  for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
    const std::size_t begin = points.size() * bucket / buckets, end = points.size() * (bucket + 1) / buckets;
    std::vector<std::size_t> picks;
    const auto better = [&](std::size_t at, const auto& than) {
      return std::isfinite(points[at].y) &&
             (!std::isfinite(points[picks.back()].y) || than(at, picks.back()));
    };
    const auto pick = [&](const auto& than) {
      picks.push_back(begin);
      for (std::size_t at = begin; at < end; ++at)
        if (better(at, than)) picks.back() = at;
    };
    pick([](std::size_t, std::size_t) { return false; });  // the first
    pick([](std::size_t, std::size_t) { return true; });   // the last
    pick([&](std::size_t a, std::size_t b) { return points[a].y < points[b].y; });
    pick([&](std::size_t a, std::size_t b) { return points[a].y > points[b].y; });
    for (std::size_t at = begin; at < end; ++at)
      if (!std::isfinite(points[at].y)) {
        picks.push_back(at);
        break;
      }
    std::ranges::sort(picks);
    picks.erase(std::unique(picks.begin(), picks.end()), picks.end());
    for (const std::size_t at : picks) kept.push_back(points[at]);
  }
  return kept;
}

std::string drawing(const Chart& chart) { return Picture(chart).draw(); }

}  // namespace sherd::tools
