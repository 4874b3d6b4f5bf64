#include "autograd/capture/drawing.h"

#include <algorithm>

namespace sherd {
namespace {

// Pixels. A column of rows, and right of it the edges, which are wider the further they reach.
constexpr int row_height = 30, box_height = 22, margin = 12, letter = 7;
constexpr int least_reach = 14, reach_of_row = 7, most_reach = 320;

constexpr std::string_view style =
    "text{font:12px monospace}rect{fill:#fff;stroke:#555}.write rect{fill:#fdd;stroke:#b00}"
    ".call rect{fill:#ddf;stroke:#00b;stroke-width:2}.view rect{stroke-dasharray:3 2}"
    ".end rect{fill:#eee}path{fill:none;stroke:#888}path:hover{stroke:#e60;stroke-width:2}";

std::string escaped(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    switch (c) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
  }
  return safe;
}

class Drawing {
 public:
  explicit Drawing(const Program::Impl& program) : program_(program), gives_(program.values.size(), none) {
    begin();
    for (const Program::Impl::Step& step : program_.steps) add(step);
    end();
  }
  std::string svg() const {
    std::size_t longest = 0;
    for (const Row& row : rows_) longest = std::max(longest, row.text.size());
    const int width = static_cast<int>(longest) * letter + 2 * margin, right = margin + width;
    int reach = least_reach;
    for (const Edge& edge : edges_) reach = std::max(reach, reach_of(edge));
    const int all = right + reach + margin, height = static_cast<int>(rows_.size()) * row_height + 2 * margin;
    std::string svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\">\n"
        "<style>{2}</style>\n",
        all, height, style);
    for (const Edge& edge : edges_) {
      const int from = middle(edge.from), to = middle(edge.to), x = right + reach_of(edge);
      svg += fmt::format("<path d=\"M{0} {1}C{2} {1} {2} {3} {0} {3}\"><title>{4}</title></path>\n", right,
                         from, x, to, escaped(edge.value));
    }
    for (std::size_t i = 0; i < rows_.size(); ++i)
      svg += fmt::format(
          "<g class=\"{}\"><rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"3\"/>"
          "<text x=\"{}\" y=\"{}\">{}</text></g>\n",
          rows_[i].kind, margin, middle(i) - box_height / 2, width, box_height, 2 * margin, middle(i) + 4,
          escaped(rows_[i].text));
    return svg + "</svg>\n";
  }

 private:
  static constexpr std::size_t none = ~std::size_t{0};
  struct Row {
    std::string kind, text;
  };
  struct Edge {
    std::size_t from, to;  // rows
    std::string value;
  };

  static int middle(std::size_t row) { return margin + static_cast<int>(row) * row_height + row_height / 2; }
  static int reach_of(const Edge& edge) {
    const auto rows = std::min<std::size_t>(edge.to - edge.from, most_reach / reach_of_row);
    return std::min(least_reach + reach_of_row * static_cast<int>(rows), most_reach);
  }

  /// What is there before the ops: inputs, what the step found, what the other half kept.
  void begin() {
    for (std::uint32_t v = 0; v < program_.values.size(); ++v) {
      const Program::Impl::Home home = program_.places[program_.values[v].storage].home;
      const bool first = program_.places[program_.values[v].storage].tensors.front() == v;
      const bool input = std::ranges::count(program_.inputs, v) > 0;
      if (!input && (home == Program::Impl::Home::input || !first)) continue;
      const char* kind = input                                  ? "input"
                         : home == Program::Impl::Home::kept    ? "kept"
                         : home == Program::Impl::Home::outside ? "outside"
                                                                : nullptr;
      if (kind == nullptr) continue;
      gives_[v] = rows_.size();
      rows_.push_back({"end", fmt::format("{} {}", kind, program_.declared(v))});
    }
  }
  void add(const Program::Impl::Step& step) {
    for (const std::uint32_t v : step.in) lead(v, rows_.size());
    const bool call = step.op->call_among_ranks() != nullptr;
    const char* kind = call                  ? "op call"
                       : step.op->mutating() ? "op write"
                       : step.op->is_view()  ? "op view"
                                             : "op";
    // What was known of memory that it writes comes from it now.
    for (std::size_t i = 0; i < step.in.size(); ++i)
      if (step.op->writes(i) && step.in[i] != Program::Impl::none)
        for (const std::uint32_t v : program_.places[program_.values[step.in[i]].storage].tensors)
          gives_[v] = rows_.size();
    for (const std::uint32_t v : step.out) gives_[v] = rows_.size();
    rows_.push_back({kind, program_.line_of(step)});
  }
  /// What leaves the program: results, what the other half keeps.
  void end() {
    for (const std::uint32_t v : program_.results) lead(v, rows_.size());
    rows_.push_back({"end", program_.returned()});
    if (!program_.cut) return;
    for (const auto& [storage, number] : program_.cut->made) {
      const std::uint32_t v = program_.places[storage].tensors.front();
      lead(v, rows_.size());
      rows_.push_back({"end", fmt::format("keep %k{} = {}", number, program_.values[v].name)});
    }
  }
  /// An edge to row `to` from what gives the value.
  void lead(std::uint32_t v, std::size_t to) {
    if (v == Program::Impl::none) return;
    std::size_t from = gives_[v];
    if (from == none) from = gives_[program_.places[program_.values[v].storage].tensors.front()];
    if (from != none) edges_.push_back({from, to, program_.declared(v)});
  }

  const Program::Impl& program_;
  std::vector<std::size_t> gives_;  // by value: the row that it comes from
  std::vector<Row> rows_;
  std::vector<Edge> edges_;
};

}  // namespace

std::string drawing(const Program::Impl& program) { return Drawing(program).svg(); }

}  // namespace sherd
