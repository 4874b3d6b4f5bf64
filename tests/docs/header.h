// What a header declares, with its comments. It reads what clang-format writes, not C++.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace sherd::test {

/// A declaration of a header, or a line `// ---- TITLE` of it.
struct Declaration {
  enum class Kind { section, type, enumeration, function, data, other };
  Kind kind = Kind::other;
  std::string name;
  std::string text;  ///< up to its body, without the semicolon: "double p = 0.5", "Tensor forward() const"
  std::string
      comment;  ///< of the lines `///` before it and of `///<` on its own; code in it is indented by 4
  std::vector<Declaration> members;  ///< of a type: the public ones
};

/// In order, those of all namespaces but `detail`. A comment that several declarations follow, without an
/// empty line between them, is that of the first.
std::vector<Declaration> declarations_of(const std::filesystem::path& header);

/// The comment at the head of the header.
std::string head_of(const std::filesystem::path& header);

/// Members of a struct without constructors and bases, as `{.a = 1, .b = {}}`; empty where one has no
/// default.
std::string designated(const Declaration& type);
/// Whether it is such a struct.
bool is_aggregate(const Declaration& type);

// Pages.

std::string text_of(const std::filesystem::path& file);
std::vector<std::string> lines_of(const std::filesystem::path& file);
std::string trimmed(const std::string& s);
/// Text, and code, in a cell of a table.
std::string cell(const std::string& text);
std::string code(const std::string& text);
/// A declaration without the words that no caller needs.
std::string shown(std::string text);
/// It and its comment as the row of a table.
std::string row(const Declaration& d);
/// What a page says of a type, under a heading of this depth: its comment, options, constructors, functions.
std::string entry(const Declaration& type, const std::string& heading);

}  // namespace sherd::test
