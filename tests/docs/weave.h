// Makes C++ of the pages: what stands between ```cpp and ``` is compiled and run.
//
//   ```cpp                     statements, run after those before them on the page and with their names; or,
//                              where the first line opens a struct, class or template, declarations for all
//                              of the page; or, where there is an `int main()`, a program
//   ```cpp compiled: REASON    statements that are only compiled, because of REASON
//   <!-- cpp                   as the first one, up to -->, for what a reader need not see
#pragma once

#include <cctype>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::test {

/// One piece of code of a page.
struct Block {
  enum class Kind { statements, declarations, program, compiled };
  Kind kind = Kind::statements;
  bool shown = true;  ///< in a fence, not in a comment
  int line = 0;       ///< of the fence, from 1
  std::string text;   ///< without includes, which leave an empty line
};

/// The C++ of one page.
struct Page {
  std::string name;  ///< below the root: "docs/sharding.md"
  std::vector<std::string> includes;
  std::vector<Block> blocks;
};

/// Throws std::runtime_error, with page and line, for a block without an end and for words that mean nothing.
inline Page parse_page(const std::string& name, std::istream& in) {
  Page page{name, {}, {}};
  Block block;
  std::string end;  // of the block that is open
  int number = 0;
  const auto refuse = [&](int line, const std::string& why) {
    throw std::runtime_error(name + ":" + std::to_string(line) + ": " + why);
  };
  for (std::string line; std::getline(in, line);) {
    ++number;
    const std::size_t begin = line.find_first_not_of(' ');
    const std::string_view rest = begin == std::string::npos ? "" : std::string_view(line).substr(begin);
    if (end.empty()) {
      const bool shown = rest.starts_with("```cpp"), hidden = rest.starts_with("<!-- cpp");
      if (!shown && !hidden) continue;
      block = {Block::Kind::statements, shown, number, {}};
      const std::string_view words = rest.substr(shown ? 6 : 8);
      constexpr std::string_view compiled = " compiled: ";
      if (words.starts_with(compiled) && words.size() > compiled.size())
        block.kind = Block::Kind::compiled;
      else if (!words.empty())
        refuse(number, "'cpp" + std::string(words) + "': only ' compiled: REASON' may follow");
      end = shown ? "```" : "-->";
    } else if (rest == end) {
      std::istringstream lines(block.text);
      std::string first;
      while (std::getline(lines, first) && (first.empty() || first.starts_with("//"))) {
      }
      if (block.kind == Block::Kind::compiled)
        ;
      else if (const std::size_t main = block.text.find("int main()"); main != std::string::npos) {
        block.kind = Block::Kind::program;
        block.text.replace(main, std::string_view("int main()").size(), "inline void program()");
      } else if (first.starts_with("struct ") || first.starts_with("class ") || first.starts_with("template"))
        block.kind = Block::Kind::declarations;
      page.blocks.push_back(block);
      end.clear();
    } else if (rest.starts_with("#include")) {
      page.includes.emplace_back(rest);
      block.text += "\n";
    } else {
      block.text += line + "\n";
    }
  }
  if (!end.empty()) refuse(block.line, "the block has no end");
  return page;
}

/// One source of all pages: a test case each, which says `ran` or `compiled` for every block.
inline std::string weave(const std::vector<Page>& pages) {
  std::ostringstream out;
  out << "// Made of the pages' C++ by tests/docs/weave.cpp.\n#include <sherd.h>\n";
  for (const Page& page : pages)
    for (const std::string& include : page.includes) out << include << "\n";
  out << "#include \"tests/docs/pages.h\"\n";
  for (std::size_t number = 0; number < pages.size(); ++number) {
    const Page& page = pages[number];
    const auto place = [&](const Block& block) {
      return "#line " + std::to_string(block.line + 1) + " \"" + page.name + "\"\n";
    };
    const auto told = [&](const char* how, const Block& block) {
      return "::sherd::test::" + std::string(how) + "(" + std::to_string(block.line) + ");\n";
    };
    out << "\nnamespace page_" << number << " {\nusing namespace sherd;\n";
    for (const Block& block : page.blocks) {
      if (block.kind == Block::Kind::declarations) out << place(block) << block.text;
      if (block.kind == Block::Kind::program)
        out << "namespace program_" << block.line << " {\n" << place(block) << block.text << "}\n";
    }
    out << "void run() {\n";
    for (const Block& block : page.blocks) {
      switch (block.kind) {
        case Block::Kind::declarations:
          break;
        case Block::Kind::program:
          out << "program_" << block.line << "::program();\n";
          break;
        case Block::Kind::statements:
          out << place(block) << block.text;
          break;
        case Block::Kind::compiled:
          out << "(void)[&] {\n" << place(block) << block.text << "};\n";
          break;
      }
      if (block.shown) out << told(block.kind == Block::Kind::compiled ? "compiled" : "ran", block);
    }
    out << "}\n}\n"
        << "TEST_CASE(\"the code of " << page.name << " runs\") { ::sherd::test::check_page(\"" << page.name
        << "\", page_" << number << "::run); }\n";
  }
  return std::move(out).str();
}

}  // namespace sherd::test
