#include "tools/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tools/svg.h"

namespace sherd::tools {
namespace {

constexpr double left = 70, right = 24, below = 34;
constexpr double legend_row = 18;
constexpr std::size_t buckets = 800;
constexpr std::string_view ink = "var(--ink)", faint = "var(--faint)", rule = "var(--rule)";

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

/// Draws from top to bottom.
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
    svg_.text(left, 14, chart_.title, {.size = 13, .colour = ink, .bold = true});
    legend();
    axes();
    for (const double mark : chart_.marks) svg_.line({{x(mark), top_}, {x(mark), bottom()}}, faint, 1, "2 3");
    for (std::size_t i = 0; i < shown_.size(); ++i) curve(chart_.curves[i], shown_[i]);
    return svg_.document(chart_.width, chart_.height, "none");
  }

 private:
  double bottom() const { return chart_.height - below; }
  double x(double step) const {
    return left + (step - x_.low) / (x_.high - x_.low) * (chart_.width - left - right);
  }
  double y(double value) const {
    return bottom() - (value - y_.low) / (y_.high - y_.low) * (bottom() - top_);
  }

  void legend() {
    double x = left;
    top_ = 14 + legend_row;
    if (std::ranges::all_of(chart_.curves, [](const Curve& curve) { return curve.name.empty(); })) return;
    for (const Curve& curve : chart_.curves) {
      if (curve.name.empty()) continue;
      const double width = 30 + Svg::width_of(curve.name, 11) + 14;
      if (x > left && x + width > chart_.width - right) x = left, top_ += legend_row;
      svg_.line({{x, top_}, {x + 22, top_}}, curve.colour, curve.width + 0.75);
      if (curve.dots) svg_.dot(x + 11, top_, 3, curve.colour);
      svg_.text(x + 30, top_, curve.name, {.colour = ink});
      x += width;
    }
    top_ += legend_row;
  }

  void axes() {
    for (const double value : ticks(y_.low, y_.high, static_cast<int>((bottom() - top_) / 34))) {
      svg_.line({{left, y(value)}, {chart_.width - right, y(value)}}, rule);
      svg_.text(left - 8, y(value), compact(value), {.colour = faint, .anchor = Anchor::end});
    }
    for (const double step : ticks(x_.low, x_.high, static_cast<int>(chart_.width / 90))) {
      if (step != std::floor(step)) continue;
      svg_.line({{x(step), bottom()}, {x(step), bottom() + 4}}, faint);
      svg_.text(x(step), bottom() + 14, compact(step), {.colour = faint, .anchor = Anchor::middle});
    }
    svg_.line({{left, bottom()}, {chart_.width - right, bottom()}}, faint);
    svg_.text(chart_.width - right, bottom() + 27, "step", {.colour = faint, .anchor = Anchor::end});
  }

  void curve(const Curve& curve, const std::vector<Point>& points) {
    std::vector<std::pair<double, double>> line;
    const auto end_line = [&] {
      if (line.size() == 1 && !curve.dots) svg_.dot(line[0].first, line[0].second, 2, curve.colour);
      if (line.size() > 1) svg_.line(line, curve.colour, curve.width);
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
        svg_.dot(x(p.x), y(p.y), 3, curve.colour,
                 fmt::format("{}: step {:.0f}, {:.6g}", curve.name, p.x, p.y));
  }

  const Chart& chart_;
  std::vector<std::vector<Point>> shown_;
  Range x_, y_;
  double top_ = 0;
  Svg svg_;
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
