// `sherd inspect`: what it says must be what the layouts do.
#include "tools/inspect.h"

#include <algorithm>
#include <regex>
#include <set>
#include <sstream>

#include "collectives/world.h"
#include "runtime/error.h"
#include "shard/fully_shard.h"
#include "tests/catch.h"
#include "tests/counting_file_system.h"
#include "tests/ranks.h"
#include "tests/tools/small_run.h"
#include "tools/drawing.h"
#include "tools/sharding.h"

using namespace sherd;
using namespace sherd::test;
using namespace sherd::tools;
using Catch::Matchers::ContainsSubstring;

namespace {

/// A model whose sizes no number of ranks divides.
InspectOptions options_of(int ranks, const std::string& layout, const std::string& dtype = "f32") {
  InspectOptions options;
  options.sizes.layers = 2;
  options.sizes.heads = 1;
  options.sizes.width = 7;
  options.sizes.context = 5;
  options.sizes.ranks = ranks;
  options.sizes.layout = layout;
  options.sizes.param_dtype = dtype;
  return options;
}

/// `check(placement)` for a good many of them.
void each_placement(const std::function<void(const Placement&)>& check) {
  for (const int ranks : {1, 2, 3, 4, 5, 7, 8, 16})
    for (const std::string layout : {"flat", "per-parameter"})
      for (const std::string dtype : {"f32", "bf16"}) {
        INFO(ranks << " ranks, " << layout << ", " << dtype);
        check(place(options_of(ranks, layout, dtype)));
      }
}

/// On a rank: what the engine says of its groups is what `inspect` says, which has all blocks as one.
void expect_same(const shard::GroupReport& report, const Placement& placement, std::size_t g) {
  const PlacedGroup& group = placement.groups[std::min<std::size_t>(g, 1)];
  expect(report.label == (g == 0 ? "" : fmt::format("blocks.{}", g - 1)), "group {} is '{}'", g,
         report.label);
  expect(report.dtype == placement.dtype, "group {}: dtype", g);
  expect(report.shard_numel == group.layout.shard_numel(), "group {}: shard", g);
  expect(report.gathered_numel == group.layout.gathered_numel(), "group {}: whole", g);
  expect(report.parameters.size() == group.parameters.size(), "group {}: parameters", g);
  for (std::size_t i = 0; i < report.parameters.size(); ++i) {
    const shard::ParameterReport& parameter = report.parameters[i];
    expect(parameter.name == group.parameters[i] && parameter.shape == group.shapes[i], "group {}: {} is {}",
           g, parameter.name, group.parameters[i]);
    std::vector<std::int64_t> owned(static_cast<std::size_t>(placement.ranks));
    for (const Piece& piece : group.pieces)
      if (piece.parameter == static_cast<int>(i))
        owned[static_cast<std::size_t>(piece.rank)] += piece.numel();
    expect(parameter.owned_numels == owned, "group {}: owners of {}", g, parameter.name);
  }
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::vector<std::smatch> matches(const std::string& text, const std::string& pattern) {
  const std::regex expression(pattern);
  return {std::sregex_iterator(text.begin(), text.end(), expression), std::sregex_iterator()};
}

std::int64_t number(const std::ssub_match& text) { return std::stoll(text.str()); }

}  // namespace

TEST_CASE("the pieces of a placement cover every segment and every parameter exactly once") {
  each_placement([](const Placement& placement) {
    for (const PlacedGroup& group : placement.groups) {
      std::vector<std::int64_t> ends(static_cast<std::size_t>(group.layout.segments()));
      std::vector<std::int64_t> seen(group.parameters.size());
      for (const Piece& piece : group.pieces) {
        std::int64_t& end = ends[static_cast<std::size_t>(piece.segment)];
        CHECK(piece.begin == end);
        CHECK(piece.end > piece.begin);
        end = piece.end;
        const std::int64_t slice = group.layout.shard_numel(piece.segment);
        CHECK(piece.begin >= slice * piece.rank);
        CHECK(piece.end <= slice * (piece.rank + 1));
        if (piece.parameter < 0) continue;
        std::int64_t& next = seen[static_cast<std::size_t>(piece.parameter)];
        CHECK(piece.in_parameter == next);
        next += piece.numel();
      }
      for (int s = 0; s < group.layout.segments(); ++s)
        CHECK(ends[static_cast<std::size_t>(s)] == group.layout.gathered_numel(s));
      for (std::size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == group.shapes[i].numel());
    }
  });
}

TEST_CASE("a placement is the model's: every parameter in one group, and equal shares for all ranks") {
  const InspectOptions any = options_of(1, "flat");
  const nn::Gpt model(model_options(any.sizes));
  std::set<std::string> expected;
  for (const nn::NamedParameter& p : model.named_parameters()) expected.insert(p.name);
  each_placement([&](const Placement& placement) {
    std::set<std::string> names;
    std::int64_t shard = 0;
    for (const PlacedGroup& group : placement.groups) {
      shard += group.layout.segments_numel() * group.modules;
      for (std::int64_t i = 0; i < group.modules; ++i)
        for (const std::string& name : group.parameters)
          CHECK(names.insert(group.name == placement.model ? name : fmt::format("blocks.{}.{}", i, name))
                    .second);
    }
    CHECK(placement.groups[1].name == "blocks.{0..1}");
    CHECK(names == expected);
    CHECK(placement.values() == model.parameter_count());
    for (const Owned& owned : placement.by_rank()) CHECK(owned.values + owned.padding == shard);
  });
}

TEST_CASE("inspect says what a sharded model's groups report") {
  for (const int ranks : {2, 3, 4})
    for (const std::string layout : {"flat", "per-parameter"})
      for (const std::string dtype : {"f32", "bf16"}) {
        INFO(ranks << " ranks, " << layout << ", " << dtype);
        const InspectOptions options = options_of(ranks, layout, dtype);
        const Placement placement = place(options);
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          nn::Gpt model(model_options(options.sizes));
          shard_model(model, options.sizes, world);
          const std::vector<shard::GroupReport> reports = shard::groups_of(model);
          expect(static_cast<std::int64_t>(reports.size()) == placement.group_count(), "{} groups",
                 reports.size());
          for (std::size_t g = 0; g < reports.size(); ++g) expect_same(reports[g], placement, g);
        }));
      }
}

TEST_CASE("the table's pieces add up to the sums of its groups and ranks") {
  each_placement([](const Placement& placement) {
    std::vector<std::int64_t> values(static_cast<std::size_t>(placement.ranks)), padding = values;
    std::int64_t group_left = 0, group_padding = 0, modules = 1;
    int groups = 0, pieces = 0, sums = 0;
    for (const std::string& line : lines_of(table(placement))) {
      if (const auto found = matches(line, R"(^  rank (\d+) +\[(\d+), (\d+)\) +(\d+) bytes  (.*)$)");
          !found.empty()) {
        const std::smatch& m = found[0];
        const std::int64_t bytes = number(m[4]);
        CHECK(bytes == 4 * (number(m[3]) - number(m[2])));
        const bool is_padding = m[5].str() == "padding";
        (is_padding ? padding : values)[static_cast<std::size_t>(number(m[1]))] += bytes * modules;
        group_left -= bytes;
        if (is_padding) group_padding -= bytes;
        ++pieces;
      } else if (const auto head =
                     matches(line, R"(^\S+: (\d+) bytes( each)?, (\d+) a rank, padding (\d+)$)");
                 !head.empty()) {
        CHECK(group_left == 0);
        CHECK(group_padding == 0);
        group_left = number(head[0][1]);
        modules = head[0][2].matched ? 2 : 1;
        group_padding = number(head[0][4]);
        CHECK(number(head[0][3]) * placement.ranks == group_left);
        groups += static_cast<int>(modules);
      } else if (const auto sum =
                     matches(line, R"(^rank (\d+) +(\d+) bytes of parameters +(\d+) bytes of padding$)");
                 !sum.empty()) {
        const auto rank = static_cast<std::size_t>(number(sum[0][1]));
        CHECK(number(sum[0][2]) == values[rank]);
        CHECK(number(sum[0][3]) == padding[rank]);
        ++sums;
      }
    }
    CHECK(group_left == 0);
    CHECK(group_padding == 0);
    CHECK(groups == 3);
    CHECK(sums == placement.ranks);
    std::size_t expected = 0;
    for (const PlacedGroup& group : placement.groups) expected += group.pieces.size();
    CHECK(static_cast<std::size_t>(pieces) == expected);
  });
}

TEST_CASE("the drawing has every piece in its rank's colour, as wide as it is large") {
  each_placement([](const Placement& placement) {
    const std::string svg = drawing(placement);
    const auto boxes =
        matches(svg, R"re(<rect x="([0-9.]+)" y="([0-9.]+)" width="([0-9.]+)" height="[0-9.]+" )re"
                     R"re(fill="([^"]+)"><title>rank (\d+): (.*), (\d+) bytes</title>)re");
    std::map<std::string, double> ends, widths;  // of the bars, by their place
    std::map<std::string, std::int64_t> bytes;
    std::map<std::int64_t, std::set<std::string>> colours;
    std::size_t expected = 0;
    for (const PlacedGroup& group : placement.groups) expected += group.pieces.size();
    CHECK(boxes.size() == expected);
    for (const std::smatch& m : boxes) {
      const std::string bar = m[2];
      const double x = std::stod(m[1]), width = std::stod(m[3]);
      if (ends.contains(bar)) CHECK(x == Approx(ends[bar]).margin(0.02));
      ends[bar] = x + width;
      widths[bar] += width;
      bytes[bar] += number(m[7]);
      const bool hatched = m[4].str().starts_with("url(#hatch");
      CHECK(hatched == (m[6].str() == "padding"));
      if (hatched)
        CHECK(m[4].str() == "url(#hatch" + m[5].str() + ")");
      else
        colours[number(m[5])].insert(m[4]);
    }
    for (const auto& [bar, width] : widths) CHECK(width == Approx(widths.begin()->second).margin(0.5));
    for (const std::smatch& m : boxes)
      CHECK(std::stod(m[3]) ==
            Approx(widths[m[2]] * static_cast<double>(number(m[7])) / static_cast<double>(bytes[m[2]]))
                .margin(0.1));
    std::set<std::string> distinct;
    for (const auto& [rank, own] : colours) {
      CHECK(own.size() == 1);
      CHECK(distinct.insert(*own.begin()).second);
    }
    const std::size_t bars = placement.flat ? placement.groups.size() : [&] {
      std::size_t count = 0;
      for (const PlacedGroup& group : placement.groups) count += group.parameters.size();
      return count;
    }();
    CHECK(ends.size() == bars);
  });
}

TEST_CASE("the drawing names every group, parameter and rank, and is the same text each time") {
  each_placement([](const Placement& placement) {
    const std::string svg = drawing(placement);
    CHECK(svg == drawing(placement));
    std::multiset<std::string> texts;
    for (const std::smatch& m : matches(svg, "<text [^>]*>([^<]*)</text>")) texts.insert(m[1]);
    const auto named = [&](const std::string& name) {
      return std::ranges::count_if(
          texts, [&](const std::string& t) { return t == name || t.starts_with(name + " "); });
    };
    std::map<std::string, std::int64_t> names;
    for (const PlacedGroup& group : placement.groups) {
      CHECK(texts.contains(group.name));
      for (const std::string& name : group.parameters) ++names[name];
    }
    for (const auto& [name, count] : names) CHECK(named(name) == count);
    for (int rank = 0; rank < placement.ranks; ++rank) CHECK(named(fmt::format("rank {}:", rank)) == 1);
    // Tags that open are closed, and nothing is left to escape.
    CHECK(matches(svg, "<(text|title|svg|defs|pattern|style)[ >]").size() ==
          matches(svg, "</(text|title|svg|defs|pattern|style)>").size());
    CHECK(matches(svg, "&(?!amp;|lt;|gt;|quot;)").empty());
  });
}

TEST_CASE("inspect refuses what it cannot place, in one line that names the flag") {
  const std::pair<std::string, std::function<void(InspectOptions&)>> wrong[] = {
      {"--model tree", [](InspectOptions& o) { o.model = "tree"; }},
      {"--ranks 0", [](InspectOptions& o) { o.sizes.ranks = 0; }},
      {"--ranks -2", [](InspectOptions& o) { o.sizes.ranks = -2; }},
      {"--ranks 99999", [](InspectOptions& o) { o.sizes.ranks = 99999; }},
      {"--layout round", [](InspectOptions& o) { o.sizes.layout = "round"; }},
      {"--layers 0", [](InspectOptions& o) { o.sizes.layers = 0; }},
      {"--param-dtype i32", [](InspectOptions& o) { o.sizes.param_dtype = "i32"; }},
      {"3 heads", [](InspectOptions& o) { o.sizes.heads = 3; }},
  };
  for (const auto& [part, spoil] : wrong) {
    InspectOptions options = options_of(2, "flat");
    spoil(options);
    const std::string message = message_of<Error>([&] { inspect(options, posix_file_system()); });
    CHECK_THAT(message, ContainsSubstring(part));
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("a drawing that cannot be written leaves the one before") {
  const TempDirectory folder;
  InspectOptions options = options_of(3, "flat");
  options.svg = (folder / "shards.svg").string();
  CountingFileSystem counting;
  CHECK_THAT(inspect(options, counting), ContainsSubstring("drawn in " + options.svg));
  const std::string old = posix_file_system().read(options.svg);
  CHECK(old == drawing(place(options)));
  options.sizes.ranks = 4;
  const std::string fresh = drawing(place(options));
  const int changes = static_cast<int>(counting.log().size());
  REQUIRE(changes >= 4);
  for (const Fault fault : all_faults) {
    for (int n = 0; n < changes; ++n) {
      INFO(name_of(fault) << " at change " << n);
      CountingFileSystem files(n, fault);
      const std::string message = message_of<FileError>([&] { inspect(options, files); });
      files.crash();
      REQUIRE(files.broke());
      CHECK(message.find('\n') == std::string::npos);
      const std::string left = posix_file_system().read(options.svg);
      CHECK((left == old || left == fresh));
      std::filesystem::remove_all(folder.path());
      std::filesystem::create_directory(folder.path());
      write_file(options.svg, old);
    }
  }
}
