#include "tests/docs/header.h"

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <regex>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace sherd::test {

namespace {

using Kind = Declaration::Kind;

bool starts_with_any(const std::string& s, std::initializer_list<std::string_view> words) {
  return std::ranges::any_of(words, [&](std::string_view w) { return s.starts_with(w); });
}

void erase_all(std::string& s, std::string_view word) {
  for (std::size_t at; (at = s.find(word)) != std::string::npos;) s.erase(at, word.size());
}

/// Where one of `ends` stands outside all brackets, or the end. A colon is one that stands alone.
std::size_t outside(const std::string& s, std::string_view ends, std::size_t from = 0) {
  int depth = 0;
  for (std::size_t i = from; i < s.size(); ++i) {
    const char c = s[i];
    const bool twice = c == ':' && (s[i + 1] == ':' || (i > 0 && s[i - 1] == ':'));
    if (depth == 0 && !twice && ends.find(c) != std::string_view::npos) return i;
    const bool spaced = s[i + 1] == ' ' && i > 0 && s[i - 1] == ' ';  // a comparison
    if (c == '(' || c == '{' || c == '[' || (c == '<' && !spaced)) ++depth;
    if (c == ')' || c == '}' || c == ']' || (c == '>' && !spaced && i > 0 && s[i - 1] != '-')) --depth;
  }
  return s.size();
}

/// One more line of a comment: prose in one line a paragraph, code indented.
void add_comment(std::string& comment, const std::string& line) {
  static const std::string code = "    ";
  const std::size_t last = comment.rfind('\n') + 1;
  const bool after_code = comment.compare(last, code.size(), code) == 0;
  if (line.empty())
    comment += "\n\n";
  else if (line.starts_with("  "))
    comment += (comment.ends_with("\n") ? "" : after_code ? "\n" : "\n\n") + code + line.substr(2);
  else
    comment += (comment.empty() || comment.ends_with("\n") ? "" : " ") + line;
}

/// Takes the comment at the end of a line off it: what it says if it is one of documentation.
std::string take_end(std::string& line) {
  const std::size_t at = line.find(" //");
  if (at == std::string::npos) return {};
  const std::string end = line.substr(at + 1);
  line = trimmed(line.substr(0, at));
  return end.starts_with("///< ") ? end.substr(5) : "";
}

std::vector<Declaration> parse(std::span<const std::string> lines, bool is_public);

/// Without `template <..>` and `requires (..) && (..)` before it.
std::string without_template(std::string s) {
  if (!s.starts_with("template <")) return s;
  s = trimmed(s.substr(outside(s, " ", std::string("template ").size())));
  if (!s.starts_with("requires")) return s;
  s = trimmed(s.substr(std::string("requires").size()));
  for (bool more = true; more;) {
    s = trimmed(s.substr(outside(s, " ")));
    more = s.starts_with("&& ");
    if (more) s.erase(0, 3);
  }
  return s;
}

/// The declaration that these lines are.
Declaration declaration(std::span<const std::string> lines, const std::string& whole) {
  static const std::regex type(R"(^(struct|class) (?:SHERD_API )?(\w+)[^;()]*\{)");
  static const std::regex enumeration(R"(^enum (?:class )?(\w+))"), function(R"(([\w~]+|operator.+)$)");
  static const std::regex data(R"((\w+)$)");
  const std::string all = without_template(whole);
  Declaration d;
  d.text = all;
  std::smatch match;
  const std::string opening = all.substr(0, all.find('{') + 1);
  if (std::regex_search(opening, match, type)) {
    d.kind = Kind::type;
    d.name = match[2];
    d.text = trimmed(opening.substr(0, opening.size() - 1));
    const auto body = std::ranges::find_if(lines, [](const std::string& l) { return l.ends_with("{"); });
    if (body != lines.end()) d.members = parse({body + 1, lines.end() - 1}, match[1] == "struct");
  } else if (std::regex_search(all, match, enumeration)) {
    d.kind = Kind::enumeration;
    d.name = match[1];
    d.text.pop_back();
  } else if (!starts_with_any(all, {"using ", "friend ", "static_assert", "struct ", "class ", "concept "})) {
    const std::size_t bracket = outside(all, "("), given = outside(all, "={");
    const bool is_function = bracket < given || all.find(" operator") != std::string::npos;
    std::string head = trimmed(all.substr(0, std::min(bracket, std::min(given, all.size() - 1))));
    if (std::regex_search(head, match, is_function ? function : data)) d.name = match[1];
    d.kind = is_function ? Kind::function : Kind::data;
    d.text = trimmed(all.substr(
        0, is_function ? std::min(outside(all, "{:;"), all.find_last_not_of(';') + 1) : all.size() - 1));
  }
  return d;
}

std::vector<Declaration> parse(std::span<const std::string> lines, bool is_public) {
  std::vector<Declaration> found;
  std::string comment, text, end;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    std::string line = trimmed(lines[i]);
    if (line.starts_with("///< ")) {
      (text.empty() && !found.empty() ? found.back().comment : end) += " " + line.substr(5);
      continue;
    }
    if (text.empty()) {
      if (line.starts_with("// ---- "))
        found.push_back({Kind::section, line.substr(8), {}, {}, {}});
      else if (line.starts_with("///"))
        add_comment(comment, line.size() > 4 ? line.substr(4) : "");
      if (starts_with_any(line, {"//", "#"}) || line.empty()) {
        if (!line.starts_with("///")) comment.clear();
        continue;
      }
      if (line == "public:" || line == "protected:" || line == "private:") {
        is_public = line == "public:";
        continue;
      }
      if (line.starts_with("namespace ")) {
        if (line.find("detail") == std::string::npos) continue;
        while (i + 1 < lines.size() && !lines[i + 1].starts_with("}  // namespace detail")) ++i;
        continue;
      }
      if (line.starts_with("}")) continue;  // of a namespace
      begin = i;
    }
    const std::string more = take_end(line);
    if (line.starts_with("///")) continue;  // within a declaration
    end += more;
    text += (text.empty() ? "" : " ") + line;
    depth += static_cast<int>(std::ranges::count(line, '{') - std::ranges::count(line, '}'));
    if (depth != 0 || (!line.ends_with(";") && !line.ends_with("}"))) continue;
    Declaration d = declaration(lines.subspan(begin, i + 1 - begin), text);
    if (is_public) {
      if (d.kind == Kind::type) end.clear();  // that of its members
      d.comment = trimmed(comment + (comment.empty() || end.empty() ? "" : " ") + end);
      found.push_back(std::move(d));
    }
    comment.clear();
    text.clear();
    end.clear();
  }
  if (!text.empty()) throw std::runtime_error("no end of: " + text);
  return found;
}

bool has_constructor(const Declaration& type) {
  return std::ranges::any_of(type.members, [&](const Declaration& m) {
    return m.kind == Kind::function && (m.name == type.name || m.name == "~" + type.name);
  });
}

/// The names of a data member and what each begins as: {"stride", "1"}; "" for nothing.
std::vector<std::pair<std::string, std::string>> values_of(const std::string& text) {
  static const std::regex name(R"((\w+)$)");
  std::vector<std::pair<std::string, std::string>> values;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t comma = outside(text, ",", at);
    const std::string one = text.substr(at, comma - at);
    std::smatch match;
    const std::size_t given = outside(one, "={");
    const std::string head = trimmed(one.substr(0, given));
    if (std::regex_search(head, match, name)) {
      std::string value = trimmed(one.substr(given));
      if (value.starts_with("= ")) value.erase(0, 2);
      values.emplace_back(match[1], value);
    }
    at = comma + 1;
  }
  return values;
}

/// Whether a page shows a function of a class: not what only the language or the library calls.
bool is_shown(const Declaration& m) {
  return m.kind == Kind::function && m.name != "visit" && !m.name.starts_with("~") &&
         !m.name.starts_with("operator=") && !m.text.ends_with("= delete") &&
         !m.text.ends_with("= default") && m.comment.find("For `clone()` alone") == std::string::npos;
}

}  // namespace

std::string shown(std::string text) {
  for (const std::string_view word : {"SHERD_API ", "[[nodiscard]] ", "explicit ", "virtual ", "constexpr "})
    erase_all(text, word);
  return text;
}

std::string row(const Declaration& d) {
  const std::string comment = std::regex_replace(cell(d.comment), std::regex("\n+"), "<br>");
  return "| " + code(shown(d.text)) + " | " + comment + " |\n";
}

namespace {

std::string rows(const std::vector<const Declaration*>& members, const std::string& title, bool needed) {
  std::string out = "\n| " + title + " | |\n|---|---|\n", line;
  for (const Declaration* m : members) {
    out += row(*m);
    line += (line.empty() ? "\n" : ", ") + code(shown(m->text));
    needed |= !m->comment.empty();
  }
  return members.empty() ? "" : needed ? out : line + "\n";
}

}  // namespace

std::string text_of(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) throw std::runtime_error(file.string() + ": cannot be read");
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string> lines_of(const std::filesystem::path& file) {
  std::istringstream in(text_of(file));
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string trimmed(const std::string& s) {
  const std::size_t begin = s.find_first_not_of(' ');
  return begin == std::string::npos ? "" : s.substr(begin, s.find_last_not_of(' ') - begin + 1);
}

std::string cell(const std::string& text) { return std::regex_replace(text, std::regex(R"(\|)"), "\\|"); }
std::string code(const std::string& text) { return "`" + cell(text) + "`"; }

std::vector<Declaration> declarations_of(const std::filesystem::path& header) try {
  return parse(lines_of(header), true);
} catch (const std::exception& e) {
  throw std::runtime_error(header.string() + ": " + e.what());
}

std::string head_of(const std::filesystem::path& header) {
  std::string head;
  for (const std::string& line : lines_of(header)) {
    if (!line.starts_with("// ")) break;
    head += (head.empty() ? "" : " ") + line.substr(3);
  }
  return head;
}

bool is_aggregate(const Declaration& type) {
  return type.kind == Kind::type && !has_constructor(type) && outside(type.text, ":") == type.text.size() &&
         std::ranges::any_of(type.members, [](const Declaration& m) { return m.kind == Kind::data; });
}

std::string designated(const Declaration& type) {
  std::string all;
  for (const Declaration& m : type.members) {
    if (m.kind != Kind::data || m.text.starts_with("static ")) continue;
    for (const auto& [name, value] : values_of(m.text)) {
      if (value.empty()) return {};
      all += (all.empty() ? "{." : ", .") + name + " = " + value;
    }
  }
  return all.empty() ? all : all + "}";
}

std::string entry(const Declaration& type, const std::string& heading) {
  if (type.kind == Kind::enumeration)
    return "\n" + code(type.text) + (type.comment.empty() ? "" : ": " + type.comment) + "\n";
  std::string out = "\n" + heading + " " + code(type.name) + "\n";
  if (!type.comment.empty()) out += "\n" + type.comment + "\n";
  static const std::regex base(R"( : (?:public )?(\w+))");
  if (std::smatch match; std::regex_search(type.text, match, base) && match[1] != "Layer")
    out += "\nIt has what `" + match[1].str() + "` has.\n";
  std::vector<const Declaration*> data, functions;
  for (const Declaration& m : type.members) {
    if (m.kind == Kind::data && !m.text.starts_with("static ") && !has_constructor(type)) data.push_back(&m);
    if (is_shown(m)) functions.push_back(&m);
  }
  if (const std::string all = is_aggregate(type) ? designated(type) : ""; !all.empty())
    out += "\n" + code(all) + "\n";
  return out + rows(data, "member", true) + rows(functions, "function", false);
}

}  // namespace sherd::test
