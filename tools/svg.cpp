#include "tools/svg.h"

#include <fmt/format.h>

namespace sherd::tools {
std::string svg_number(double value) {
  std::string text = fmt::format("{:.2f}", value);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '&')
      result += "&amp;";
    else if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '"')
      result += "&quot;";
    else
      result += c;
  }
  return result;
}

void Svg::rect(const Box& box, std::string_view fill, std::string_view tip, double radius) {
  body_ += fmt::format(R"(<rect x="{}" y="{}" width="{}" height="{}" fill="{}")", svg_number(box.x),
                       svg_number(box.y), svg_number(box.width), svg_number(box.height), fill);
  if (radius > 0) body_ += fmt::format(R"( rx="{}")", svg_number(radius));
  body_ += tip.empty() ? "/>\n" : fmt::format("><title>{}</title></rect>\n", escaped(tip));
}

void Svg::text(double x, double y, std::string_view text, const TextStyle& style) {
  constexpr std::string_view anchors[] = {"start", "middle", "end"};
  const double baseline = y + 0.36 * style.size;  // not every program knows dominant-baseline
  body_ += fmt::format(R"(<text x="{}" y="{}" font-size="{}" fill="{}")", svg_number(x), svg_number(baseline),
                       svg_number(style.size), style.colour);
  if (style.anchor != Anchor::start)
    body_ += fmt::format(R"( text-anchor="{}")", anchors[static_cast<int>(style.anchor)]);
  if (style.bold) body_ += R"( font-weight="600")";
  if (style.halo) body_ += R"( class="halo")";
  body_ += fmt::format(">{}</text>\n", escaped(text));
}

void Svg::line(const std::vector<std::pair<double, double>>& points, std::string_view colour, double width,
               std::string_view dashes) {
  body_ += R"(<polyline points=")";
  for (const auto& [x, y] : points) body_ += fmt::format("{},{} ", svg_number(x), svg_number(y));
  body_ += fmt::format(R"(" fill="none" stroke="{}" stroke-width="{}")", colour, svg_number(width));
  if (!dashes.empty()) body_ += fmt::format(R"( stroke-dasharray="{}")", dashes);
  body_ += "/>\n";
}

void Svg::define_hatch(std::string_view name, std::string_view colour) {
  definitions_ += fmt::format(
      R"x(<pattern id="{}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">)x"
      R"x(<rect width="6" height="6" fill="#ffffff"/><rect width="2.5" height="6" fill="{}"/></pattern>)x",
      name, colour);
  definitions_ += "\n";
}

std::string Svg::document(double width, double height, std::string_view ground) const {
  return fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}" )"
      R"(font-family="'DejaVu Sans Mono', Menlo, Consolas, monospace">)"
      "\n<style>.halo {{ paint-order: stroke; stroke: #ffffff; stroke-width: 2.5px; stroke-opacity: 0.75; "
      "}}</style>\n"
      "<defs>\n{2}</defs>\n<rect width=\"{0}\" height=\"{1}\" fill=\"{4}\"/>\n{3}</svg>\n",
      svg_number(width), svg_number(height), definitions_, body_, ground);
}

std::string Svg::stretched(double width, double height) const {
  return fmt::format(
      R"(<svg width="100%" height="{1}" viewBox="0 0 {0} {1}" preserveAspectRatio="none" overflow="visible">)"
      "\n{2}</svg>\n",
      svg_number(width), svg_number(height), body_);
}

}  // namespace sherd::tools
