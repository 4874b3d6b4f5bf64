// A drawing in SVG, as text that is the same on every machine. Lengths in pixels, y downwards.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sherd::tools {

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};

/// `text` as HTML and SVG take it, between tags and in attributes.
std::string escaped(std::string_view text);

/// A length, with two decimals at most.
std::string svg_number(double value);

enum class Anchor { start, middle, end };

struct TextStyle {
  double size = 11;
  std::string_view colour = "#24292f";
  Anchor anchor = Anchor::start;
  bool bold = false;
  bool halo = false;  ///< a light rim, for text on colours
};

class Svg {
 public:
  /// Width of a text in the one font that is used.
  static double width_of(std::string_view text, double size) {
    return 0.61 * size * static_cast<double>(text.size());
  }

  /// `tip` is shown under the pointer.
  void rect(const Box& box, std::string_view fill, std::string_view tip = {}, double radius = 0);
  /// `x`, `y`: the middle of the line of text, or its start or end.
  void text(double x, double y, std::string_view text, const TextStyle& style = {});
  /// `dashes`: lengths of lines and gaps ("4 3"); none: one line.
  void line(const std::vector<std::pair<double, double>>& points, std::string_view colour, double width = 1,
            std::string_view dashes = {});
  void dot(double x, double y, double radius, std::string_view colour, std::string_view tip = {}) {
    rect({x - radius, y - radius, 2 * radius, 2 * radius}, colour, tip, radius);
  }
  /// A fill of slanted lines over `colour`, to be used as "url(#name)".
  void define_hatch(std::string_view name, std::string_view colour);

  /// What was drawn, for a document of the caller's.
  const std::string& body() const { return body_; }
  /// The whole document, on `ground`.
  std::string document(double width, double height, std::string_view ground = "#ffffff") const;
  /// A part of another document, stretched to all of its width and keeping its height: for lines alone.
  std::string stretched(double width, double height) const;

 private:
  std::string definitions_, body_;
};

}  // namespace sherd::tools
