// What is said of a word that nobody knows.
#include "tools/wrong_words.h"

#include <algorithm>

#include "tests/catch.h"

using namespace sherd::tools;
using Catch::Matchers::ContainsSubstring;

namespace {

const std::vector<CommandWords> commands = {
    {"train", "sherd train --data book.txt", {"--data", "--steps", "--warmup", "--ranks", "--out"}},
    {"sample", "sherd sample --checkpoint runs/1", {"--checkpoint", "--temperature", "--top-k"}},
    {"launch", "sherd launch -n 4 PROGRAM", {"-n", "--hosts"}}};

/// Every word that one slip of the fingers makes of `word`.
std::vector<std::string> slips(const std::string& word) {
  std::vector<std::string> all;
  for (std::size_t i = 0; i < word.size(); ++i) {
    if (word[i] == '-') continue;
    all.push_back(std::string(word).erase(i, 1));
    all.push_back(std::string(word).insert(i, "q"));
    all.push_back(std::string(word).replace(i, 1, "q"));
    if (i + 1 < word.size() && word[i] != word[i + 1]) {
      all.push_back(word);
      std::swap(all.back()[i], all.back()[i + 1]);
    }
  }
  return all;
}

}  // namespace

TEST_CASE("whoever slips once in a word is asked whether it was meant") {
  for (const CommandWords& command : commands)
    for (const std::string& flag : command.flags) {
      if (flag.size() < 5) continue;
      CHECK(meant_by(flag, command.flags) == flag);
      for (const std::string& word : slips(flag)) {
        INFO(word);
        CHECK(meant_by(word, command.flags) == flag);
        CHECK(meant_by(word + "=3", command.flags) == flag);
        const std::string text = unknown_word(word, command, commands);
        CHECK_THAT(text, ContainsSubstring("'" + word + "'"));
        CHECK_THAT(text, ContainsSubstring("did you mean " + flag + "?"));
      }
    }
  for (const CommandWords& command : commands)
    for (const std::string& word : slips(command.name))
      CHECK_THAT(unknown_command(word, commands), ContainsSubstring("did you mean " + command.name + "?"));
}

TEST_CASE("what is like nothing is taken for nothing") {
  for (const std::string word : {"", "-", "--", "q", "--q", "evaluate", "checkpoint-all", "--learning"}) {
    CHECK(meant_by(word, commands[0].flags) == "");
    CHECK(unknown_command(word, commands).find("did you mean") == std::string::npos);
  }
  CHECK(meant_by(std::string(1'000'000, 's'), commands[0].flags) == "");
  CHECK(meant_by("--warm", commands[0].flags) == "--warmup");
  CHECK(meant_by("help", std::vector<std::string>{"--help"}) == "--help");
}

TEST_CASE("a flag without its dashes is asked for with them") {
  for (const CommandWords& command : commands)
    for (const std::string& flag : command.flags)
      CHECK_THAT(unknown_word(flag.substr(flag.rfind("--") == 0 ? 2 : 1), command, commands),
                 ContainsSubstring("did you mean " + flag + "?"));
}

TEST_CASE("a flag of another command is told whose it is") {
  CHECK_THAT(unknown_word("--top-k=3", commands[0], commands), ContainsSubstring("but of sample"));
  CHECK_THAT(unknown_command("--steps", commands), ContainsSubstring("'--steps' is a flag of train"));
  for (const CommandWords& command : commands)
    for (const std::string word : {"book.txt", "--nothing", "two\nlines"}) {
      const std::string text = unknown_word(word, command, commands);
      CHECK(text.starts_with(command.name + ": '" + (word[0] == 't' ? "two?lines" : word) + "'"));
      CHECK_THAT(text, ContainsSubstring(command.example));
      CHECK(std::ranges::count(text, '\n') == 0);
    }
}
