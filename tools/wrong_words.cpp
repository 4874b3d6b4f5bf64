#include "tools/wrong_words.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/shown.h"

namespace sherd::tools {
namespace {

/// Nobody means anything by a longer word, and comparing takes time.
constexpr std::size_t longest_word = 40;

std::string_view without_dashes(std::string_view word) {
  return word.substr(std::min(word.find_first_not_of('-'), word.size()));
}

std::string_view without_value(std::string_view word) { return word.substr(0, word.find('=')); }

bool is_flag(std::string_view word) { return word.size() > 1 && word[0] == '-'; }

/// Letters to change, add or leave out, or neighbours to exchange, for `a` to become `b`.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), 0);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = std::exchange(above, row);
  }
  return above.back();
}

/// "train, sample and launch".
std::string listed(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i)
    text += (i == 0 ? "" : i + 1 < words.size() ? ", " : " and ") + words[i];
  return text;
}

std::vector<std::string> names_of(std::span<const CommandWords> commands) {
  std::vector<std::string> names;
  for (const CommandWords& command : commands) names.push_back(command.name);
  return names;
}

std::vector<std::string> commands_with(std::string_view flag, std::span<const CommandWords> commands) {
  std::vector<std::string> names;
  for (const CommandWords& command : commands)
    if (std::ranges::find(command.flags, without_value(flag)) != command.flags.end())
      names.push_back(command.name);
  return names;
}

/// Between what is wrong and what is right.
std::string question(const std::string& meant) {
  return meant.empty() ? ";" : fmt::format("; did you mean {}?", meant);
}

}  // namespace

std::string meant_by(std::string_view word, std::span<const std::string> known) {
  const std::string_view written = without_dashes(without_value(word));
  if (written.size() < 2 || written.size() > longest_word) return {};
  std::string best;
  std::size_t least = std::max<std::size_t>(written.size() / 3, 1) + 1;
  for (const std::string& one : known)
    if (const std::size_t far = distance(written, without_dashes(one)); far < least) least = far, best = one;
  if (!best.empty()) return best;
  const auto begins = std::ranges::find_if(
      known, [&](const std::string& one) { return without_dashes(one).starts_with(written); });
  return begins != known.end() ? *begins : "";
}

std::string unknown_command(std::string_view word, std::span<const CommandWords> commands) {
  std::vector<std::string> known = names_of(commands);
  const std::string rule =
      fmt::format("the first word is one of {}, for example {} (sherd --help says what each does)",
                  listed(known), commands[0].example);
  if (word.empty()) return "no command was written; " + rule;
  const std::string written = shown(word);
  if (const std::vector<std::string> owners = commands_with(word, commands); !owners.empty())
    return fmt::format("'{}' is a flag of {} and stands behind that word; {}", written, listed(owners), rule);
  known.insert(known.end(), {"--help", "--version"});
  return fmt::format("'{}' is no {}{} {}", written, is_flag(word) ? "flag of sherd" : "command",
                     question(meant_by(word, known)), rule);
}

std::string unknown_word(std::string_view word, const CommandWords& command,
                         std::span<const CommandWords> commands) {
  const std::string written = shown(word);
  const std::string way_out =
      fmt::format("for example {} (sherd {} --help lists its flags)", command.example, command.name);
  if (!is_flag(word)) {
    const auto bare = std::ranges::find(command.flags, word, without_dashes);
    if (bare != command.flags.end())
      return fmt::format("{}: '{}' is no value{} {}", command.name, written, question(*bare), way_out);
    return fmt::format("{}: '{}' follows no flag that takes it; write the flag before it, {}", command.name,
                       written, way_out);
  }
  if (std::ranges::find(command.flags, without_value(word)) != command.flags.end())
    return fmt::format("{}: '{}' stands behind '--', where no flags are read; leave '--' out, {}",
                       command.name, written, way_out);
  if (const std::string meant = meant_by(word, command.flags); !meant.empty())
    return fmt::format("{0}: '{1}' is no flag of {0}{2} {3}", command.name, written, question(meant),
                       way_out);
  const std::vector<std::string> owners = commands_with(word, commands);
  const std::string others = owners.empty() ? "" : fmt::format(", but of {}", listed(owners));
  return fmt::format("{0}: '{1}' is no flag of {0}{2}; leave it out, {3}", command.name, written, others,
                     way_out);
}

}  // namespace sherd::tools
