// The pages hold: their C++ compiles and runs, all of it.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "tests/docs/header.h"
#include "tests/docs/nn_page.h"
#include "tests/docs/ops_page.h"
#include "tests/docs/pages.h"
#include "tests/docs/weave.h"
#include "tests/source_root.h"
#include "tests/temp_directory.h"

namespace sherd::test {

namespace {

namespace fs = std::filesystem;

const fs::path root = sherd::source_root;

std::mutex mutex;  // ranks are threads
std::set<int> lines_ran, lines_compiled;

/// Lines of a page in which a fence with C++ opens, whatever a writer may call that.
std::set<int> fences_of(const fs::path& page) {
  static const std::regex fence(R"(^[\s>*-]*(```+|~~~+)\s*\{?\.?(c\+\+|(cpp|cc|cxx|hpp|h)\b).*)",
                                std::regex::icase);
  std::set<int> lines;
  std::ifstream in(page);
  int number = 0;
  for (std::string line; std::getline(in, line);)
    if (++number; std::regex_match(line, fence)) lines.insert(number);
  return lines;
}

std::string woven(const std::string& page) {
  std::istringstream in(page);
  return weave({parse_page("page.md", in)});
}

}  // namespace

void ran(int line) {
  const std::scoped_lock lock(mutex);
  lines_ran.insert(line);
}
void compiled(int line) {
  const std::scoped_lock lock(mutex);
  lines_compiled.insert(line);
}

void check_page(const std::string& page, void (*run)()) {
  lines_ran.clear();
  lines_compiled.clear();
  const TempDirectory folder;
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  try {
    run();
  } catch (...) {
    fs::current_path(before);
    throw;
  }
  fs::current_path(before);
  std::set<int> told = lines_ran;
  told.insert(lines_compiled.begin(), lines_compiled.end());
  CHECK(told == fences_of(root / page));
}

}  // namespace sherd::test

using namespace sherd::test;

TEST_CASE("every page with C++ is compiled") {
  const std::string compiled = SHERD_PAGES;
  int seen = 0;
  for (const fs::path& folder : {root, root / "docs"})
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() != ".md") continue;
      const std::string name = fs::relative(entry.path(), root).string();
      INFO(name);
      CHECK(fences_of(entry.path()).empty() == (compiled.find(" " + name + " ") == std::string::npos));
      ++seen;
    }
  CHECK(seen > 8);
}

TEST_CASE("the figures of both layouts are what the program draws") {
  const std::string tool = SHERD_TOOL;
  if (skip_if(tool.empty(), "the program sherd is not built")) return;
  const TempDirectory folder;
  for (const std::string layout : {"per-parameter", "flat"}) {
    const fs::path made = folder / (layout + ".svg");
    std::string name = "docs/shards_" + layout + ".svg";
    std::ranges::replace(name, '-', '_');
    const std::string command =
        tool + " inspect --model gpt --layers 1 --heads 1 --width 16 --context 16 --ranks 3 --layout " +
        layout + " --svg " + made.string();
    INFO("make it anew: " << command << " > /dev/null; its --svg is " << name);
    REQUIRE(std::system((command + " > /dev/null").c_str()) == 0);
    CHECK((text_of(made) == text_of(root / name)));
  }
}

TEST_CASE("what a page shows is there") {
  static const std::regex link(R"(\]\(([\w./-]+)\)|`(docs/[a-z_]+\.md|[a-z_]+\.md)`)");
  int seen = 0;
  for (const auto& entry : fs::directory_iterator(root / "docs")) {
    if (entry.path().extension() != ".md") continue;
    const std::string page = text_of(entry.path());
    for (std::sregex_iterator at(page.begin(), page.end(), link), end; at != end; ++at) {
      const std::string name = (*at)[1].matched ? (*at)[1] : (*at)[2];
      INFO(entry.path().string() << ": " << name);
      CHECK(fs::exists((name.starts_with("docs/") ? root : root / "docs") / name));
      ++seen;
    }
  }
  CHECK(seen > 10);
}

TEST_CASE("blocks of a page become declarations, programs and statements") {
  const std::string source = woven(
      "text\n```cpp\n#include <map>\nstruct A {};\n```\n<!-- cpp\nA hidden;\n-->\n```cpp\nA b = "
      "hidden;\n```\n"
      "```sh\nls\n```\n```cpp\nint main() { A c; }\n```\n```cpp compiled: needs a GPU\nA d;\n```\n");
  const auto at = [&](const char* text) {
    INFO(text);
    const std::size_t found = source.find(text);
    CHECK(found != std::string::npos);
    return found;
  };
  CHECK(at("#include <map>\n") < at("#line 3 \"page.md\"\n\nstruct A {};"));
  CHECK(at("struct A {};") < at("inline void program() { A c; }"));
  CHECK(at("inline void program() { A c; }") < at("void run() {\n::sherd::test::ran(2);"));
  CHECK(at("A hidden;\n#line 10 \"page.md\"\nA b = hidden;\n::sherd::test::ran(9);") < at("::program();\n"));
  at("(void)[&] {\n#line 19 \"page.md\"\nA d;\n};\n::sherd::test::compiled(18);");
  CHECK(source.find("ls") == std::string::npos);
}

TEST_CASE("a page that cannot be woven says where") {
  CHECK_THROWS_WITH(woven("\n```cpp\nint a;\n"), "page.md:2: the block has no end");
  CHECK_THROWS_WITH(woven("```cpp norun\n```\n"),
                    "page.md:1: 'cpp norun': only ' compiled: REASON' may follow");
  CHECK_THROWS_WITH(woven("```cpp compiled: \n```\n"),
                    "page.md:1: 'cpp compiled: ': only ' compiled: REASON' may follow");
}

TEST_CASE("fences are found however they are written") {
  const TempDirectory folder;
  std::ofstream(folder / "page.md")
      << "```cpp\n```\n  ```c++ x\n~~~ CPP\n```sh\n- ```cc\n```{.cpp}\n```html\n";
  CHECK(fences_of(folder / "page.md") == std::set<int>{1, 3, 4, 6, 7});
}

namespace {

/// That the page is what `print_ops` makes.
void check_made(const std::string& name, const std::string& made, const std::string& word) {
  const std::string page = text_of(root / name);
  INFO("make it anew: ninja -C BUILD tests/docs/print_ops && BUILD/tests/docs/print_ops . " << word << "> "
                                                                                            << name);
  const auto [was, is] = std::ranges::mismatch(page, made);
  INFO("it differs from: " << std::string(is, made.end()).substr(0, 200));
  CHECK((page == made));
}

}  // namespace

TEST_CASE("the page of ops is what the lists and headers say") {
  CHECK(kernels_in_sources(root, "cpu") == kernels_in_table());
  check_made("docs/ops.md", ops_page(root), "");
}

TEST_CASE("the page of layers is what the headers say, and has all of them") {
  const std::string made = nn_page(root);
  check_made("docs/nn.md", made, "nn ");
  static const std::regex shown(
      R"(\n(?:struct|class) (?:SHERD_API )?(\w+(?: final : (?:public )?(?:Layer|Optimizer)|Schedule \{)))");
  int seen = 0;
  for (const auto& entry : fs::directory_iterator(root / "nn")) {
    if (entry.path().extension() != ".h") continue;
    const std::string header = text_of(entry.path());
    for (std::sregex_iterator at(header.begin(), header.end(), shown), end; at != end; ++at, ++seen) {
      const std::string name = (*at)[1].str().substr(0, (*at)[1].str().find(' '));
      INFO(name);
      CHECK(made.find("### `" + name + "`\n") != std::string::npos);
    }
  }
  CHECK(seen > 40);
}

TEST_CASE("what a header declares is read") {
  const TempDirectory folder;
  std::ofstream(folder / "x.h") << R"(// A header.
#pragma once
namespace sherd {
namespace detail {
struct Hidden {};
}  // namespace detail
/// How.
enum class How { one, other };
/// For `f`,
/// and more:
///
///   f({.a = 1});
struct FOptions {
  int a = 1, b = 2;          ///< both
  std::map<int, int> c{{1, 2}};
  /// Before it.
  double d = f(1, 2);
};

class SHERD_API G final : public Base<G> {
 public:
  template <class T>
    requires(A<T> && (sizeof(T) > 1)) && B<T>
  explicit G(T t) : t_(t) {
    run();
  }
  G(const G&) = delete;
  int of(int x = 1,
         int y = 2) const { return x; }

 private:
  int t_ = 1;
};
// ---- some more
SHERD_API Tensor f(const FOptions& options = {});
}  // namespace sherd
)";
  CHECK(head_of(folder / "x.h") == "A header.");
  const std::vector<Declaration> all = declarations_of(folder / "x.h");
  REQUIRE(all.size() == 5);
  CHECK(entry(all[0], "#") == "\n`enum class How { one, other }`: How.\n");
  CHECK(entry(all[1], "#") ==
        "\n# `FOptions`\n\nFor `f`, and more:\n\n    f({.a = 1});\n\n"
        "`{.a = 1, .b = 2, .c = {{1, 2}}, .d = f(1, 2)}`\n\n| member | |\n|---|---|\n"
        "| `int a = 1, b = 2` | both |\n| `std::map<int, int> c{{1, 2}}` |  |\n"
        "| `double d = f(1, 2)` | Before it. |\n");
  CHECK(entry(all[2], "##") ==
        "\n## `G`\n\nIt has what `Base` has.\n\n`G(T t)`, `int of(int x = 1, int y = 2) const`\n");
  CHECK(all[3].kind == Declaration::Kind::section);
  CHECK(all[3].name == "some more");
  CHECK(row(all[4]) == "| `Tensor f(const FOptions& options = {})` |  |\n");
}
