// `sherd report`: what a page shows is what the files of a run say.
#include "tools/report.h"

#include <algorithm>
#include <cmath>
#include <regex>

#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/counting_file_system.h"
#include "tests/tools/small_run.h"
#include "tools/chart.h"

using namespace sherd;
using namespace sherd::test;
using namespace sherd::tools;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Every element of that name, from its tag to what closes it; the outer of two.
std::vector<std::string> elements(const std::string& html, const std::string& name) {
  std::vector<std::string> all;
  for (std::size_t at = 0; (at = html.find("<" + name + " ", at)) != std::string::npos;) {
    std::size_t end = at;
    int depth = 0;
    do {
      const std::size_t opens = html.find("<" + name + " ", end), closes = html.find("</" + name + ">", end);
      if (closes == std::string::npos) return all;
      depth += opens < closes ? 1 : -1;
      end = std::min(opens, closes) + 1;
    } while (depth > 0);
    all.push_back(html.substr(at, end - at));
    at = end;
  }
  return all;
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// Every tag is closed, in order; nothing between them needs escaping. Empty, or what is wrong.
std::string flaw_of(const std::string& html) {
  std::vector<std::string> open;
  const std::regex name("</?([A-Za-z1-6]+)(\\s+[A-Za-z:-]+=\"[^\"<]*\")*\\s*/?>"),
      entity("&(amp|lt|gt|quot|#39);.*");
  std::size_t at = html.find('\n') + 1;  // past the document type
  while (at < html.size()) {
    if (html[at] == '<') {
      const std::size_t end = std::min(html.find('>', at), html.size() - 1);
      const std::string tag = html.substr(at, end + 1 - at);
      std::smatch match;
      if (!std::regex_match(tag, match, name)) return "no tag: " + tag;
      if (tag[1] == '/') {
        if (open.empty() || open.back() != match[1]) return "closes what is not open: " + tag;
        open.pop_back();
      } else if (tag[tag.size() - 2] != '/') {
        open.push_back(match[1]);
      }
      at = end + 1;
    } else {
      if (html[at] == '>' || (html[at] == '&' && !std::regex_match(html.substr(at, 8), entity)))
        return "not escaped: " + html.substr(at, 20);
      ++at;
    }
  }
  return open.empty() ? "" : "not closed: " + open.back();
}

using Places = std::vector<std::pair<double, double>>;

/// The longest line of a colour.
Places line_of(const std::string& html, const std::string& colour) {
  const std::regex line("<polyline points=\"([^\"]*)\" fill=\"none\" stroke=\"" + colour + "\"");
  Places longest;
  for (std::sregex_iterator it(html.begin(), html.end(), line), end; it != end; ++it) {
    Places places;
    std::istringstream in((*it)[1]);
    char comma = 0;
    for (double x = 0, y = 0; in >> x >> comma >> y;) places.emplace_back(x, y);
    if (places.size() > longest.size()) longest = places;
  }
  return longest;
}

struct Folder {
  TempDirectory folder;
  explicit Folder(const std::string& metrics) { write_file(folder / "metrics.jsonl", metrics); }
  std::string page() const { return tools::page({folder.path().string()}, posix_file_system()); }
};

std::string line_of_step(std::int64_t step, double loss) {
  return fmt::format("{{\"step\":{},\"loss\":{},\"lr\":0.001,\"grad_norm\":1.5}}\n", step, loss);
}

}  // namespace

TEST_CASE("every step of a short run is a point, and a higher one where the value is higher") {
  const std::vector<double> losses = {5.5, 4.25, 4.5, 3.0, 2.75, 2.8, 2.5};
  std::string metrics;
  for (std::size_t i = 0; i < losses.size(); ++i)
    metrics += line_of_step(static_cast<std::int64_t>(i) + 1, losses[i]);
  const std::string html = Folder(metrics).page();
  CHECK(flaw_of(html) == "");
  const Places line = line_of(html.substr(0, html.find("Learning rate")), "#3b82c4");
  REQUIRE(line.size() == losses.size());
  for (std::size_t i = 0; i + 1 < line.size(); ++i) {
    CHECK(std::abs(line[i + 1].first - line[i].first - (line[1].first - line[0].first)) < 0.02);  // pixels
    const double slope = (line[1].second - line[0].second) / (losses[1] - losses[0]);
    CHECK(std::abs(line[i].second - line[0].second - slope * (losses[i] - losses[0])) < 0.05);
    CHECK(slope < 0);  // y goes down
  }
}

TEST_CASE("texts of charts keep their size in windows of any width, and only lines are stretched") {
  std::string metrics, speed;
  for (int step = 1; step <= 4000; step += 7) {
    metrics += fmt::format("{{\"step\":{},\"loss\":{},\"lr\":0.001,\"grad_norm\":1.5,\"val_loss\":{}}}\n",
                           step, 5.0 / step, 6.0 / step);
    speed +=
        fmt::format("{{\"step\":{},\"tokens_per_s\":{},\"memory\":{}}}\n", step, 30000 + step, 123456 * step);
  }
  const Folder folder(metrics);
  write_file(folder.folder / "speed.jsonl", speed);
  const std::string html = folder.page();
  CHECK(flaw_of(html) == "");
  const std::vector<std::string> pictures = elements(html, "svg");
  std::size_t charts = 0;
  for (const std::string& picture : pictures) {
    INFO(picture.substr(0, 300));
    const std::string tag = picture.substr(0, picture.find('>'));
    // A viewBox scales what is in it, texts too; the one within has lines alone.
    CHECK(tag.find("viewBox") == std::string::npos);
    CHECK(tag.find("height=") != std::string::npos);
    if (tag.find("\"curves\"") == std::string::npos) continue;
    ++charts;
    CHECK(tag.find(" width=") == std::string::npos);  // the page's
    const std::vector<std::string> stretched = elements(picture.substr(1), "svg");
    REQUIRE(stretched.size() == 1);
    CHECK_THAT(stretched[0],
               ContainsSubstring("width=\"100%\"") && ContainsSubstring("preserveAspectRatio=\"none\""));
    for (const std::string scaled : {"<text", "<circle", "<rect"})
      CHECK(stretched[0].find(scaled) == std::string::npos);
    CHECK(count_of(stretched[0], "<polyline") >= 3);
    // Marks of the steps fit beside one another in the narrowest window, wherever it puts them.
    CHECK(count_of(picture, "<text") <= 7);
    CHECK(count_of(picture, "<text x=\"") == count_of(picture, "%\" y=\""));
    for (const std::string& dot : elements(picture, "circle")) CHECK(dot.find("%\" cy=\"") < dot.find('>'));
  }
  CHECK(charts == 5);
  CHECK(pictures.size() == 2 * charts + 2);  // with the values beside, and the lines of the legend
  const std::string style = html.substr(0, html.find("</style>"));
  for (const std::string rule :
       {"vector-effect: non-scaling-stroke", "minmax(0, 1fr)", "@media (max-width: 760px)",
        ".placement svg { width: 100%; min-width: 1000px;"})
    CHECK_THAT(style, ContainsSubstring(rule));
}

TEST_CASE("of two validation losses of one step the page says which is which") {
  const std::string steps = line_of_step(1, 5) + "{\"step\":2,\"loss\":4,\"val_loss\":4.5}\n",
                    end = "{\"step\":2,\"final_val_loss\":4.4,\"bigram\":3}\n", note = "class=\"note\"";
  CHECK(Folder(steps).page().find(note) == std::string::npos);
  CHECK(Folder(line_of_step(2, 5) + end).page().find(note) == std::string::npos);
  const std::string html = Folder(steps + end).page();
  CHECK(flaw_of(html) == "");
  const std::size_t at = html.find(note);
  REQUIRE(at != std::string::npos);
  CHECK(html.rfind("<table", at) < html.rfind("</table>", at));  // under the figures, in no cell
  CHECK(html.find("the last step has two", at) < html.find("</p>", at));
}

TEST_CASE("marks of an axis are round, in order and within it") {
  for (const double low : {-7.3, 0.0, 1e-9, 2.0, 123456.0})
    for (const double extent : {1e-7, 0.3, 1.0, 17.0, 5e6, 1e99})
      for (const int most : {1, 3, 8}) {
        const double high = low + extent;
        const std::vector<double> all = ticks(low, high, most);
        INFO(low << " to " << high << ", " << most);
        CHECK(all.size() <= static_cast<std::size_t>(most) + 1);
        for (std::size_t i = 0; i < all.size(); ++i) {
          CHECK((all[i] >= low && all[i] <= high));
          if (i > 0) CHECK(all[i] > all[i - 1]);
        }
        if (most >= 3) CHECK(all.size() >= 1);
        if (most == 8) CHECK(all.size() >= 3);
      }
  CHECK(compact(0.0015) == "0.0015");
  CHECK(compact(20500) == "20.5k");
  CHECK(compact(-3e6) == "-3M");
}

TEST_CASE("a long curve is thinned to few points, with its ends, extremes and gaps") {
  std::vector<Point> points;
  for (int i = 0; i < 100'000; ++i) points.push_back({double(i), std::sin(0.001 * i)});
  points[777].y = 50;
  points[54'321].y = -50;
  points[60'000].y = std::nan("");
  const std::vector<Point> few = thinned(points, 500);
  CHECK(few.size() <= 5 * 500);
  CHECK(few.front().x == 0);
  CHECK(few.back().x == 99'999);
  for (const double x : {777.0, 54'321.0, 60'000.0}) CHECK(std::ranges::count(few, x, &Point::x) == 1);
  CHECK(std::ranges::is_sorted(few, {}, &Point::x));
  CHECK(thinned(few, few.size()).size() == few.size());
}

TEST_CASE("a run on ranks that went on with other settings is one page, written as a whole") {
  const Runs runs;
  TrainOptions options = runs.options("run");
  options.ranks = 2;
  options.layout = "flat";
  runs.run(options);
  options.resume = true;
  options.steps = 8;
  options.given = {"steps"};
  runs.run(options);
  const std::string folder = (runs.folder / "run").string();
  const std::string html = page({folder}, posix_file_system());
  CHECK(flaw_of(html) == "");
  for (const std::string text : {"8 of 8", "from step 6 on --steps is 8, before 6", "tokens/s, median",
                                 "most memory in tensors of rank 0", "best validation loss", "on 2 ranks",
                                 "blocks.0", "rank 1", "Speed, tokens/s", "<td>flat</td>"})
    CHECK_THAT(html, ContainsSubstring(text));
  CHECK(html.find("<script") == std::string::npos);
  CHECK(html.find("http", html.find("<body")) ==
        html.find("http://www.w3.org/2000/svg"));  // a name, not a link

  // Beside another one.
  TrainOptions other = runs.options("other");
  other.seed = 5;
  runs.run(other);
  const std::string both = page({folder, (runs.folder / "other").string()}, posix_file_system());
  CHECK(flaw_of(both) == "");
  for (const std::string colour : {"#3b82c4", "#e08a1e"}) CHECK(line_of(both, colour).size() >= 6);
  CHECK_THAT(both, ContainsSubstring("class=\"other\"><td>seed</td><td>1337</td><td>5</td>"));

  const std::filesystem::path out = runs.folder / "run" / "report.html";
  CHECK(report({{folder}, ""}, posix_file_system()) == fmt::format("report in {}\n", out.string()));
  CHECK(posix_file_system().read(out) == html);
  CountingFileSystem counting;
  report({{folder}, out.string()}, counting);
  REQUIRE(counting.log().size() >= 4);
  for (int n = 0; n < static_cast<int>(counting.log().size()); ++n)
    for (const Fault fault : all_faults) {
      write_file(out, "old");
      CountingFileSystem files(n, fault);
      try {
        report({{folder}, out.string()}, files);
      } catch (const FileError&) {
      }
      files.crash();
      const std::string left = posix_file_system().read(out);
      CHECK((left == "old" || left == html));
    }
}

TEST_CASE("damage, losses that are none and a single step give a page that says so") {
  const std::string good = line_of_step(1, 4) + line_of_step(2, 3),
                    nan = "{\"step\":3,\"loss\":null,\"lr\":1}\n";
  const std::pair<std::string, std::string> cases[] = {
      {line_of_step(1, 4), "4.0000 at step 1"},
      {good + "{\"step\":3,\"lo", "3.0000 at step 2"},  // being written
      {good + "garbage\n\n{\"step\":-1,\"loss\":1}\n[1]\n{\"step\":7}\n",
       "damaged lines of metrics.jsonl that are left out: 5"},
      {good + "{\"step\":3,\"loss\":NaN}\n", "damaged lines of metrics.jsonl that are left out: 1"},
      {good + std::string(3'000'000, '[') + "\n" + line_of_step(3, 2), "2.0000 at step 3"},
      {good + nan + line_of_step(4, 2), "not finite and are left out: 1"},
      {nan, "not finite and are left out: 1"},
      {good + "{\"step\":3,\"loss\":1e308}\n{\"step\":4,\"loss\":-1e308}\n",
       "not finite and are left out: 2"},
      {good + "{\"step\":9000000000000000000,\"loss\":1}\n{\"step\":18446744073709551615,\"loss\":1}\n",
       "damaged lines of metrics.jsonl that are left out: 2"},
      {line_of_step(5, 1) + good + line_of_step(1, 9), "1.0000 at step 5"},  // out of order, and a step again
      {line_of_step(1, 1e-300) + line_of_step(2, 0), "0.0000 at step 2"},
      {line_of_step(1, 7) + line_of_step(9007199254740992, 7), "7.0000 at step 9007199254740992"},
  };
  for (const auto& [metrics, text] : cases) {
    INFO(metrics.substr(0, 200));
    const std::string html = Folder(metrics).page();
    CHECK(flaw_of(html) == "");
    CHECK_THAT(html, ContainsSubstring(text));
    CHECK_THAT(html, ContainsSubstring("settings are left out: there is no checkpoint"));
    for (const std::string bad : {"nan", "inf"}) CHECK(html.find(bad + ",") == std::string::npos);
  }
  for (const std::string empty : {"", "\n\n", "half a line", "no json\n"})
    CHECK_THAT(message_of<ValueError>([&] { Folder(empty).page(); }),
               ContainsSubstring("has no step yet in metrics.jsonl"));
  const TempDirectory folder;
  CHECK_THAT(message_of<ValueError>([&] { page({(folder / "x").string()}, posix_file_system()); }),
             ContainsSubstring("there is no folder"));
  CHECK_THAT(message_of<ValueError>([&] { page(std::vector<std::string>(17, "x"), posix_file_system()); }),
             ContainsSubstring("takes 1 to 16 runs, not 17"));
}

TEST_CASE("names of files cannot become parts of the page") {
  const TempDirectory folder;
  const std::string name = "<script>alert(\"1\")&amp;'\n\x01";
  std::filesystem::create_directory(folder / name);
  write_file(folder / name / "metrics.jsonl", line_of_step(1, 4) + line_of_step(2, 3));
  std::filesystem::create_directory(folder / name / "step-3");
  write_file(folder / name / "step-3/config.json", "{\"</ul><script>\": 1}");
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  const std::string html = page({name}, posix_file_system());
  std::filesystem::current_path(here);
  CHECK(flaw_of(html) == "");
  CHECK(html.find("<script") == std::string::npos);
  CHECK_THAT(html, ContainsSubstring("&lt;script&gt;alert(&quot;1&quot;)&amp;amp;"));
  CHECK_THAT(html, ContainsSubstring("settings are left out: checkpoint: "));
}
