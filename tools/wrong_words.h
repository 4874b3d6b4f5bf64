// What a command line has that nobody knows, said in one line: what was written, the rule and the way out.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::tools {

/// A command of the program as its command line knows it.
struct CommandWords {
  std::string name;                ///< "train"
  std::string example;             ///< "sherd train --data book.txt"
  std::vector<std::string> flags;  ///< "--data", "-n"
};

/// Of `known` what somebody who wrote `word` may have meant, or nothing: the one that differs by the fewest
/// letters, at most a third of them, or that begins like it. Dashes in front and what follows a '=' do not
/// count.
std::string meant_by(std::string_view word, std::span<const std::string> known);

/// For a first word that is no command; "" when there is none at all.
std::string unknown_command(std::string_view word, std::span<const CommandWords> commands);

/// For a word behind a command that is neither a flag of it nor a flag's value.
std::string unknown_word(std::string_view word, const CommandWords& command,
                         std::span<const CommandWords> commands);

}  // namespace sherd::tools
