// Reads the includes of the tree: the walls of the house, as docs/design.md draws them.
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/source_root.h"

namespace {

namespace fs = std::filesystem;

const fs::path root = sherd::source_root;
const std::map<std::string, int> floors = {{"runtime", 1}, {"autograd", 2}, {"collectives", 2},
                                           {"nn", 3},      {"shard", 4},    {"tools", 5}};

struct Include {
  std::string name;
  bool quoted;
};

std::optional<Include> parse(const std::string& line) {
  const std::size_t hash = line.find_first_not_of(" \t");
  if (hash == std::string::npos || line[hash] != '#') return {};
  const std::size_t word = line.find_first_not_of(" \t", hash + 1);
  if (word == std::string::npos || line.compare(word, 7, "include") != 0) return {};
  const std::size_t open = line.find_first_of("<\"", word + 7);
  if (open == std::string::npos) return {};
  const std::size_t close = line.find_first_of(">\"", open + 1);
  return Include{line.substr(open + 1, close - open - 1), line[open] == '"'};
}

std::vector<Include> includes_of(const fs::path& file) {
  std::vector<Include> found;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (auto include = parse(line)) found.push_back(*include);
  }
  return found;
}

bool is_source(const fs::path& file) {
  static const std::set<std::string> endings = {".h", ".cpp", ".cu", ".cuh"};
  return endings.contains(file.extension().string());
}

std::string room_of(const std::string& path) { return path.substr(0, path.find('/')); }

bool may_include(const std::string& from, const std::string& to) {
  return from == to || !floors.contains(to) || floors.at(to) < floors.at(from);
}

}  // namespace

TEST_CASE("an include line is read whatever its spaces") {
  CHECK(parse("#include \"runtime/tensor.h\"")->quoted);
  CHECK(parse("  #  include <vector>  // why")->name == "vector");
  CHECK_FALSE(parse("// #include <vector>").has_value());
  CHECK_FALSE(parse("#define include").has_value());
}

TEST_CASE("includes point down the floors") {
  int seen = 0;
  for (const auto& [room, floor] : floors) {
    if (!fs::exists(root / room)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / room)) {
      if (!is_source(entry.path())) continue;
      for (const Include& include : includes_of(entry.path())) {
        ++seen;
        INFO(entry.path().string() << " includes " << include.name);
        CHECK(may_include(room, room_of(include.name)));
      }
    }
  }
  CHECK(seen > 0);
}

TEST_CASE("sherd.h names public headers that are there, each once") {
  std::set<std::string> seen;
  for (const Include& include : includes_of(root / "sherd.h")) {
    INFO(include.name);
    CHECK(include.quoted);
    CHECK(fs::exists(root / include.name));
    CHECK(floors.contains(room_of(include.name)));
    CHECK(room_of(include.name) != "tools");
    CHECK(seen.insert(include.name).second);
  }
  CHECK(seen.size() > 20);
}

TEST_CASE("only runtime/upper_floor.h declares what the floor above defines") {
  // Free functions that a source of autograd/ defines, by their names at the start of a definition.
  const auto definitions = [](const std::string& room) {
    static const std::regex head(R"re(^[A-Za-z_:<>&* ]*[ &*]([a-z_]+)\([^;]*\{.*$)re");
    std::set<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(root / room)) {
      if (entry.path().extension() != ".cpp") continue;
      std::ifstream in(entry.path());
      for (std::string line; std::getline(in, line);) {
        std::smatch match;
        if (std::regex_match(line, match, head)) names.insert(match[1]);
      }
    }
    return names;
  };
  const auto text_of = [](const fs::path& file) {
    std::ifstream in(file);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const std::set<std::string> above = definitions("autograd"), here = definitions("runtime");
  const std::string named = text_of(root / "runtime/upper_floor.h");
  int found = 0;
  for (const std::string& name : {std::string("install_listeners"), std::string("reference_gradient")}) {
    INFO(name);
    CHECK(above.contains(name));
    CHECK_FALSE(here.contains(name));
    CHECK(named.find(name) != std::string::npos);
  }
  // Any other declaration of a runtime header that only autograd/ defines is a second such place.
  for (const auto& entry : fs::directory_iterator(root / "runtime")) {
    if (entry.path().extension() != ".h" || entry.path().filename() == "upper_floor.h") continue;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      static const std::regex declared(R"re(^(?:SHERD_API )?[A-Za-z_:<>&*]+[ &*]+([a-z_]+)\(.*;.*$)re");
      std::smatch match;
      if (!std::regex_match(line, match, declared)) continue;
      ++found;
      INFO(entry.path().filename().string() << ": " << match[1].str());
      CHECK_FALSE((above.contains(match[1]) && !here.contains(match[1])));
    }
  }
  CHECK(found > 50);
}

namespace {

/// The headers that are reached from `sherd.h`, with itself.
std::set<std::string> reached() {
  std::vector<std::string> todo = {"sherd.h"};
  std::set<std::string> seen;
  while (!todo.empty()) {
    const std::string header = todo.back();
    todo.pop_back();
    if (!seen.insert(header).second) continue;
    for (const Include& include : includes_of(root / header))
      if (include.quoted) todo.push_back(include.name);
  }
  return seen;
}

/// The headers that a folder's `meson.build` lists to be installed.
std::set<std::string> installed(const std::string& folder) {
  static const std::regex lists(R"re((?:_headers = files|install_headers)\(([^)]*)\))re"),
      names(R"re('([^']+\.h)')re");
  std::ifstream in(root / folder / "meson.build");
  const std::string text(std::istreambuf_iterator<char>(in), {});
  std::set<std::string> found;
  for (std::sregex_iterator list(text.begin(), text.end(), lists), end; list != end; ++list) {
    const std::string inner = (*list)[1];
    for (std::sregex_iterator name(inner.begin(), inner.end(), names); name != end; ++name)
      found.insert(folder + "/" + (*name)[1].str());
  }
  return found;
}

}  // namespace

TEST_CASE("every header that is installed comes with sherd.h, but for those that few need") {
  const std::set<std::string> apart = {// for kernels, ops and back ends of one's own (docs/extending.md)
                                       "runtime/elementary.h", "runtime/parallel.h", "runtime/replay.h",
                                       "runtime/waiting.h", "runtime/wrapping.h",
                                       // for programs that show or check what others wrote
                                       "runtime/io/checksum.h", "runtime/shown.h"};
  const std::set<std::string> with_sherd = reached();
  std::set<std::string> without;
  int seen = 0;
  for (const std::string folder : {"runtime", "runtime/io", "autograd", "collectives", "nn", "shard"})
    for (const std::string& header : installed(folder)) {
      ++seen;
      if (!with_sherd.contains(header)) without.insert(header);
    }
  CHECK(seen > 80);
  CHECK(without == apart);
}

TEST_CASE("no header that a user reaches from sherd.h names a back end") {
  const std::vector<std::string> back_ends = {"cuda",   "cublas", "nvrtc", "nccl",   "mpi",     "dnnl",
                                              "oneapi", "Eigen",  "omp.h", "spdlog", "nlohmann"};
  const std::set<std::string> headers = reached();
  for (const std::string& header : headers) {
    INFO(header);
    REQUIRE(fs::exists(root / header));
    for (const Include& include : includes_of(root / header))
      for (const std::string& prefix : back_ends) {
        INFO("includes " << include.name);
        CHECK_FALSE((!include.quoted && include.name.starts_with(prefix)));
      }
  }
  CHECK(headers.size() > 1);
}
