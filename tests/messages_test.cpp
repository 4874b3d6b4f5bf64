// Reads the messages in the tree: what they tell the user to call, pass or use must exist.
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/source_root.h"

namespace {

namespace fs = std::filesystem;

const fs::path root = sherd::source_root;

/// Of C++ text without its comments: the names in its code, and its string literals.
struct Source {
  std::set<std::string> names;
  std::vector<std::string> literals;
};

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// Where the text in quotes that begins at `open` ends.
std::size_t closing(const std::string& text, std::size_t open) {
  std::size_t at = open + 1;
  while (at < text.size() && text[at] != text[open]) at += text[at] == '\\' ? 2 : 1;
  return at;
}

Source read(const std::string& text) {
  Source source;
  const auto behind = [&](const std::string& end, std::size_t from) {
    const std::size_t found = text.find(end, from);
    return found == std::string::npos ? text.size() : found + end.size();
  };
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = at;
    if (text.compare(at, 2, "//") == 0) {
      at = behind("\n", at);
    } else if (text.compare(at, 2, "/*") == 0) {
      at = behind("*/", at);
    } else if (text.compare(at, 2, "R\"") == 0) {
      const std::size_t open = text.find('(', at);
      const std::string end = ")" + text.substr(at + 2, open - at - 2) + "\"";
      at = behind(end, open);
      source.literals.push_back(text.substr(open + 1, at - end.size() - open - 1));
    } else if (text[at] == '"' || text[at] == '\'') {
      at = closing(text, at) + 1;
      if (text[begin] == '"') source.literals.push_back(text.substr(begin + 1, at - begin - 2));
    } else if (is_word(text[at])) {
      const bool number = std::isdigit(static_cast<unsigned char>(text[at])) != 0;
      while (at < text.size() && (is_word(text[at]) || (number && text[at] == '\''))) ++at;
      if (!number) source.names.insert(text.substr(begin, at - begin));
    } else {
      ++at;
    }
  }
  return source;
}

/// The parts of a sentence that only code spells so: with an underline inside, after `::`, or before `()`.
/// Capitals are variables of the environment.
std::vector<std::string> names_in(const std::string& sentence) {
  static const std::regex word(R"(([A-Za-z_]\w*(?:::[A-Za-z_]\w*)*)(\(\))?)");
  std::vector<std::string> names;
  for (std::sregex_iterator at(sentence.begin(), sentence.end(), word), end; at != end; ++at) {
    const std::string name = (*at)[1].str();
    const bool scoped = name.find("::") != std::string::npos;
    const std::size_t inside = name.find('_', 1);
    const bool underlined = inside != std::string::npos && inside + 1 < name.size();
    const bool capitals =
        std::none_of(name.begin(), name.end(), [](unsigned char c) { return std::islower(c); });
    if (capitals || (!scoped && !underlined && !(*at)[2].matched)) continue;
    static const std::regex separator("::");
    std::copy(std::sregex_token_iterator(name.begin(), name.end(), separator, -1), {},
              std::back_inserter(names));
  }
  return names;
}

std::string text_of(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

TEST_CASE("names are told from words, and code from what it says") {
  using Names = std::vector<std::string>;
  CHECK(names_in("clip: use shard::clip_grad_norm_ or clone() of it, not this") ==
        Names{"shard", "clip_grad_norm_", "clone"});
  CHECK(names_in("set LD_LIBRARY_PATH (a folder), see the docs, {} and param_dtype={}") ==
        Names{"param_dtype"});
  const Source source =
      read("int a_b = 1'000; // c_d \"e f\"\nfail(\"one \\\"two\\\"\", 'x', '\"', R\"(three \")\"); /* g */");
  CHECK(source.names == std::set<std::string>{"int", "a_b", "fail"});
  CHECK(source.literals == Names{"one \\\"two\\\"", "three \""});
}

TEST_CASE("every name in a message is declared somewhere") {
  std::set<std::string> known{"pthread_exit"};                 // the system's
  std::vector<std::pair<std::string, std::string>> sentences;  // with their files
  for (const char* room : {"runtime", "autograd", "collectives", "nn", "shard", "tools"})
    for (const auto& entry : fs::recursive_directory_iterator(root / room)) {
      static const std::set<std::string> endings = {".h", ".cpp", ".cu", ".cuh"};
      if (!endings.contains(entry.path().extension().string())) continue;
      Source source = read(text_of(entry.path()));
      known.merge(source.names);
      for (const std::string& literal : source.literals)
        if (literal.find("%0") != std::string::npos || literal.find("__device__") != std::string::npos)
          continue;  // assembly, or source that is compiled when the program runs
        else if (literal.find(' ') != std::string::npos)
          sentences.emplace_back(entry.path().string(), literal);
        else
          known.insert(literal);  // the name of an op, an option or a value of one
    }
  static const std::regex option_name(R"('(\w+)')");
  const std::string meson = text_of(root / "meson_options.txt");
  for (std::sregex_iterator at(meson.begin(), meson.end(), option_name), end; at != end; ++at)
    for (const char* prefix : {"", "D"}) known.insert(prefix + (*at)[1].str());  // -Doption=value

  std::size_t seen = 0;
  for (const auto& [file, sentence] : sentences)
    for (const std::string& name : names_in(sentence)) {
      ++seen;
      if (known.contains(name)) continue;
      INFO(file << ": " << sentence);
      CHECK(name == "a name that is declared");
    }
  CHECK(seen > 100);
}
