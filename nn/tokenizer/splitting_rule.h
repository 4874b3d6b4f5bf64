// Regular expressions by which a text is split into words, as `tokenizers` reads them.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace sherd::nn::tokens {

/// What one thread needs to search.
class MatchWorkspace {
 public:
  MatchWorkspace();
  MatchWorkspace(const MatchWorkspace&) = delete;
  MatchWorkspace& operator=(const MatchWorkspace&) = delete;
  ~MatchWorkspace();

  struct State;

 private:
  friend class SplittingRule;
  std::unique_ptr<State> state_;
};

struct Range {
  std::size_t begin, end;
};

/// An expression, compiled. A copy shares it.
class SplittingRule {
 public:
  /// ValueError where the expression is not sound, is long, may match nothing or has a part whose meaning
  /// differs from library to library; NotImplementedError in a build without libpcre2.
  explicit SplittingRule(std::string_view expression);

  /// The first match that begins at `from` or later. `text` is sound UTF-8. ValueError where the search takes
  /// too long.
  std::optional<Range> find(std::string_view text, std::size_t from, MatchWorkspace& workspace) const;

  struct Compiled;

 private:
  std::shared_ptr<const Compiled> compiled_;
};

}  // namespace sherd::nn::tokens
