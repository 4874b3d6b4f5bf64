#include "tools/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "runtime/error.h"
#include "runtime/memory.h"
#include "runtime/shown.h"
#include "tools/chart.h"
#include "tools/checkpoint.h"
#include "tools/drawing.h"
#include "tools/inspect.h"
#include "tools/metrics.h"
#include "tools/output.h"
#include "tools/svg.h"

namespace sherd::tools {
namespace {

using nlohmann::json;
using Path = FileSystem::Path;

constexpr std::size_t most_runs = 16;
/// Of a model's placement; more would be a picture of very many megabytes.
constexpr std::int64_t most_drawn_ranks = 64;

/// Told apart on light and on dark ground.
constexpr std::string_view colours[] = {"#3b82c4", "#e08a1e", "#2f9e68", "#d2504f",
                                        "#8a63c9", "#b08d00", "#1f9ba3", "#a5673f"};
std::string colour_of(std::size_t i) {
  return i < std::size(colours) ? std::string(colours[i]) : fmt::format("hsl({}, 55%, 52%)", i * 137 % 360);
}

/// What the files of a run say.
struct Record {
  std::string name;  ///< fit to be shown
  std::vector<Point> loss, validation, rate, norm, speed, memory;
  std::optional<double> final_loss, bigram;
  std::optional<RunConfig> config;
  std::vector<std::string> notes;  ///< what the page says of it beside
};

/// A number that can be drawn; NaN for what is none.
double value_of(const json& entry, const char* name) {
  const auto found = entry.find(name);
  const double value = found != entry.end() && found->is_number() ? found->get<double>()
                                                                  : std::numeric_limits<double>::quiet_NaN();
  return std::abs(value) < 1e100 ? value : std::numeric_limits<double>::quiet_NaN();
}

/// Sorted by step; of several of one step the last that was written.
void settle(std::vector<Point>& points) {
  std::ranges::stable_sort(points, {}, &Point::x);
  const auto later =
      std::unique(points.rbegin(), points.rend(), [](const Point& a, const Point& b) { return a.x == b.x; });
  points.erase(points.begin(), later.base());
}

std::size_t gaps(const std::vector<Point>& points) {
  return static_cast<std::size_t>(
      std::ranges::count_if(points, [](const Point& p) { return std::isnan(p.y); }));
}

class Reader {
 public:
  Reader(const std::string& folder, FileSystem& files) : path_(folder), files_(files) {
    record_.name = shown(folder, 60);
  }

  Record read() {
    const std::string named = shown(path_.string(), 300);
    check<ValueError>(files_.exists(path_), "report: there is no folder '{}'", named);
    check<ValueError>(files_.exists(path_ / metrics_name),
                      "report: '{}' holds no {}; name the folder of a run, for example runs/1", named,
                      metrics_name);
    read_lines(metrics_name, [&](const json& entry, double step) { return add_metrics(entry, step); });
    for (auto* points : {&record_.loss, &record_.validation, &record_.rate, &record_.norm}) settle(*points);
    check<ValueError>(!record_.loss.empty(), "report: '{}' has no step yet in {}", named, metrics_name);
    if (const std::size_t n = gaps(record_.loss)) note("losses that are not finite and are left out: {}", n);
    if (skipped_ > 0) note("steps that were skipped, whose scaled gradient overflowed in f16: {}", skipped_);
    if (files_.exists(path_ / speed_name))
      read_lines(speed_name, [&](const json& entry, double step) { return add_speed(entry, step); });
    settle(record_.speed);
    settle(record_.memory);
    try {
      read_settings();
    } catch (const Error& error) {
      note("settings are left out: {}", one_line(error.what()));
    }
    return std::move(record_);
  }

 private:
  template <class... Args>
  void note(fmt::format_string<Args...> text, Args&&... args) {
    record_.notes.push_back(fmt::format(text, std::forward<Args>(args)...));
  }

  void read_lines(std::string_view name, const std::function<bool(const json&, double)>& add) {
    std::size_t damaged = 0;
    each_line(path_ / name, files_, [&](std::string_view line) {
      const json entry = json::parse(line, nullptr, false);
      const bool has_step = entry.is_object() && entry.contains("step") && entry["step"].is_number_integer();
      const double step = has_step ? entry["step"].get<double>() : -1;
      if (step < 0 || step > 0x1p53 || !add(entry, step)) ++damaged;
    });
    if (damaged > 0) note("damaged lines of {} that are left out: {}", name, damaged);
  }

  bool add_metrics(const json& entry, double step) {
    if (entry.contains("final_val_loss")) {
      const double loss = value_of(entry, "final_val_loss"), bigram = value_of(entry, "bigram");
      if (!std::isnan(loss)) record_.final_loss = loss;
      if (!std::isnan(bigram)) record_.bigram = bigram;
      return true;
    }
    if (!entry.contains("loss")) return false;
    record_.loss.push_back({step, value_of(entry, "loss")});
    record_.rate.push_back({step, value_of(entry, "lr")});
    record_.norm.push_back({step, value_of(entry, "grad_norm")});
    if (entry.contains("val_loss")) record_.validation.push_back({step, value_of(entry, "val_loss")});
    if (entry.contains("skipped")) ++skipped_;
    return true;
  }

  bool add_speed(const json& entry, double step) {
    if (!entry.contains("tokens_per_s")) return false;
    record_.speed.push_back({step, value_of(entry, "tokens_per_s")});
    record_.memory.push_back({step, value_of(entry, "memory")});
    return true;
  }

  void read_settings() {
    const std::optional<std::int64_t> newest = newest_checkpoint(path_, files_);
    check<ValueError>(newest.has_value(), "there is no checkpoint");
    record_.config = read_config(checkpoint_path(path_, *newest), files_);
    for (const Change& c : record_.config->changes)
      note("from step {} on --{} is {}, before {}", c.step, shown(c.name), shown(c.to), shown(c.from));
  }

  Path path_;
  FileSystem& files_;
  Record record_;
  std::size_t skipped_ = 0;
};

// ---- the page ----

constexpr std::string_view style = R"(
:root { color-scheme: light dark; --ink: #24292f; --faint: #6e7781; --rule: #e3e7eb; --page: #ffffff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --faint: #8d96a0; --rule: #2b313a; --page: #0d1117; --card: #161b22; }
}
body { background: var(--page); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; max-width: 1080px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 22px; } h2 { font-size: 16px; margin: 28px 0 8px; }
svg { display: block; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.card { background: var(--card); border-radius: 8px; padding: 10px; }
.wide, .card:last-child:nth-child(even) { grid-column: 1 / -1; }
@media (max-width: 760px) { .charts { grid-template-columns: minmax(0, 1fr); } }
.note { color: var(--faint); max-width: 60em; }
.placement svg { width: 100%; min-width: 1000px; height: auto; }
.placement { background: #ffffff; border-radius: 8px; padding: 8px; margin-bottom: 16px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; } td, th { padding: 3px 14px 3px 0; text-align: left; font-variant-numeric: tabular-nums; }
th { font-weight: 600; } td:first-child { color: var(--faint); } tr { border-bottom: 1px solid var(--rule); }
.other { font-weight: 600; }
)";

std::optional<Point> last_of(const std::vector<Point>& points) {
  for (std::size_t i = points.size(); i-- > 0;)
    if (!std::isnan(points[i].y)) return points[i];
  return {};
}

std::optional<Point> best_of(const std::vector<Point>& points) {
  std::optional<Point> best;
  for (const Point& p : points)
    if (!std::isnan(p.y) && (!best || p.y < best->y)) best = p;
  return best;
}

std::vector<double> values_of(const std::vector<Point>& points) {
  std::vector<double> values;
  for (const Point& p : points)
    if (!std::isnan(p.y)) values.push_back(p.y);
  std::ranges::sort(values);
  return values;
}

std::string at_step(const std::optional<Point>& point) {
  return point ? fmt::format("{:.4f} at step {:.0f}", point->y, point->x) : "";
}

/// A row of a table: what it is, and its text for each run.
struct Row {
  std::string name;
  std::vector<std::string> texts;
};

/// Rows that say nothing of any run are left out.
std::string table(const std::vector<Record>& runs, const std::vector<Row>& rows, bool mark_others) {
  std::string html = "<div class=\"scroll\"><table>\n";
  if (runs.size() > 1) {
    html += "<tr><th></th>";
    for (const Record& run : runs) html += fmt::format("<th>{}</th>", escaped(run.name));
    html += "</tr>\n";
  }
  for (const Row& row : rows) {
    if (std::ranges::all_of(row.texts, [](const std::string& text) { return text.empty(); })) continue;
    const bool others =
        std::ranges::any_of(row.texts, [&](const auto& text) { return text != row.texts[0]; });
    html +=
        fmt::format("<tr{}><td>{}</td>", mark_others && others ? " class=\"other\"" : "", escaped(row.name));
    for (const std::string& text : row.texts) html += fmt::format("<td>{}</td>", escaped(text));
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

std::string figures(const std::vector<Record>& runs) {
  std::vector<Row> rows;
  const auto add = [&](std::string name, const auto& text_of) {
    Row& row = rows.emplace_back(Row{std::move(name), {}});
    for (const Record& run : runs) row.texts.push_back(text_of(run));
  };
  const auto number = [](const std::optional<double>& value) {
    return value ? fmt::format("{:.4f}", *value) : std::string();
  };
  add("steps", [](const Record& r) {
    const std::string done = fmt::format("{:.0f}", r.loss.back().x);
    return r.config ? fmt::format("{} of {}", done, r.config->options.steps) : done;
  });
  add("last loss", [](const Record& r) { return at_step(last_of(r.loss)); });
  add("last validation loss", [](const Record& r) { return at_step(last_of(r.validation)); });
  add("best validation loss", [](const Record& r) { return at_step(best_of(r.validation)); });
  add("validation loss at the end, over all of that part",
      [&](const Record& r) { return number(r.final_loss); });
  add("bigram model", [&](const Record& r) { return number(r.bigram); });
  add("tokens/s, median", [](const Record& r) {
    const std::vector<double> speeds = values_of(r.speed);
    return speeds.empty() ? std::string() : fmt::format("{:.0f}", speeds[speeds.size() / 2]);
  });
  add("most memory in tensors of rank 0", [](const Record& r) {
    const std::vector<double> sizes = values_of(r.memory);
    return sizes.empty() || sizes.back() > 0x1p62 ? std::string()
                                                  : bytes_text(static_cast<std::int64_t>(sizes.back()));
  });
  return table(runs, rows, false);
}

/// Where a step has two validation losses the page says why, as a line of its own.
std::string two_losses(const std::vector<Record>& runs) {
  const bool two = std::ranges::any_of(
      runs, [](const Record& run) { return run.final_loss.has_value() && last_of(run.validation); });
  return two ? "<p class=\"note\">Validation losses on the way, those of the curve, the last and the best, "
               "are "
               "over windows spread over the validation part; the one at the end is over all of that part. "
               "So the last step has two, which may differ.</p>\n"
             : "";
}

std::string settings(const std::vector<Record>& runs) {
  std::vector<Row> rows;
  const TrainOptions every;
  visit_settings(every, [&](const Setting& s, const auto&) { rows.push_back({std::string(s.name), {}}); });
  for (const Record& run : runs) {
    const json values = run.config ? to_json(run.config->options) : json::object();
    for (Row& row : rows) {
      const json value = values.value(row.name, json());
      row.texts.push_back(value.is_null()     ? ""
                          : value.is_string() ? shown(value.get<std::string>())
                                              : value.dump());
    }
  }
  return table(runs, rows, true);
}

/// A curve a run of what `points` are.
std::string chart(const std::vector<Record>& runs, std::string title, std::vector<Point> Record::* points) {
  Chart chart{.title = std::move(title), .from_zero = true, .height = 200};
  for (std::size_t i = 0; i < runs.size(); ++i)
    if (last_of(runs[i].*points))
      chart.curves.push_back({runs.size() > 1 ? runs[i].name : "", colour_of(i), runs[i].*points});
  return chart.curves.empty() ? "" : fmt::format("<div class=\"card\">{}</div>\n", drawing(chart));
}

std::string charts(const std::vector<Record>& runs) {
  Chart losses{.title = "Loss, nats a byte", .height = 330};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Record& run = runs[i];
    const std::string prefix = runs.size() > 1 ? run.name + ", " : "";
    losses.curves.push_back({prefix + "training", colour_of(i), run.loss, 1});
    if (run.validation.empty()) continue;
    losses.curves.push_back(
        {prefix + "validation", colour_of(runs.size() == 1 ? 1 : i), run.validation, 2, true});
  }
  for (const Record& run : runs)
    for (const Change& change : run.config ? run.config->changes : std::vector<Change>())
      losses.marks.push_back(static_cast<double>(change.step));
  std::erase_if(losses.marks, [&](double step) {
    return std::ranges::none_of(
        runs, [&](const Record& r) { return r.loss.front().x <= step && step <= r.loss.back().x; });
  });
  std::string html = fmt::format("<div class=\"card wide\">{}</div>\n", drawing(losses));
  html += chart(runs, "Learning rate", &Record::rate);
  html += chart(runs, "Norm of the gradient, before clipping", &Record::norm);
  html += chart(runs, "Speed, tokens/s", &Record::speed);
  html += chart(runs, "Memory in tensors of rank 0, most in a step, bytes", &Record::memory);
  return fmt::format("<div class=\"charts\">\n{}</div>\n", html);
}

/// Who owns what of a run on several ranks.
std::string placement(const Record& run) {
  if (!run.config || run.config->options.ranks < 2 || !run.config->options.model.empty()) return {};
  const TrainOptions& options = run.config->options;
  std::string html = fmt::format("<h2>{} on {} ranks</h2>\n", escaped(run.name), options.ranks);
  if (options.strategy == "no_shard" || options.strategy == "data_parallel")
    return html + fmt::format("<p>{}: every rank has everything.</p>\n", escaped(options.strategy));
  if (options.ranks > most_drawn_ranks)
    return html + "<p>More ranks than are drawn here; sherd inspect --svg draws them.</p>\n";
  return html + fmt::format("<div class=\"placement scroll\">{}</div>\n", drawing(place({.sizes = options})));
}

}  // namespace

std::string page(const std::vector<std::string>& folders, FileSystem& files) {
  check<ValueError>(!folders.empty() && folders.size() <= most_runs, "report: takes 1 to {} runs, not {}",
                    most_runs, folders.size());
  std::vector<Record> runs;
  for (const std::string& folder : folders) runs.push_back(Reader(folder, files).read());
  std::string names, notes;
  for (const Record& run : runs) {
    names += (names.empty() ? "" : ", ") + escaped(run.name);
    for (const std::string& note : run.notes)
      notes += fmt::format("<li>{}{}</li>\n", runs.size() > 1 ? escaped(run.name) + ": " : "", escaped(note));
  }
  std::string body = fmt::format("<h1>{}</h1>\n", names) + figures(runs) + two_losses(runs);
  if (!notes.empty()) body += fmt::format("<ul>\n{}</ul>\n", notes);
  body += charts(runs);
  for (const Record& run : runs) body += placement(run);
  body += "<h2>Settings</h2>\n" + settings(runs);
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
      "<title>{}</title>\n<style>{}{}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
      names, style, chart_style, body);
}

std::string report(const ReportOptions& options, FileSystem& files) {
  Output out{"--out", options.out};
  if (options.out.empty() && !options.runs.empty()) {
    out.path = Path(options.runs[0]) / "report.html";
    out.made = {options.runs[0]};  // a run that is not there is complained of when it is read
  }
  for (const Path run : options.runs)
    for (const std::string_view name : {metrics_name, speed_name}) out.taken.push_back((run / name).string());
  check_output(out, files);
  write_output(out, page(options.runs, files), files);
  return fmt::format("report in {}\n", shown(out.path.string(), 300));
}

}  // namespace sherd::tools
