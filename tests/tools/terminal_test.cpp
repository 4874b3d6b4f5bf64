// What stands in an output is for whoever reads it: a line that is written over is for terminals alone.
#include "tests/tools/command.h"
#include "tests/tools/on_terminal.h"
#include "tests/tools/programs.h"
#include "tests/tools/small_run.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

const Arguments train = {"train", "--data",    "text", "--layers",  "1", "--heads", "1", "--width",
                         "8",     "--context", "8",    "--threads", "1", "--steps", "4", "--out"};

}  // namespace

TEST_CASE("a run writes over its line on the session's terminal, and on none that nobody sits at") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments program = with({built::program}, train);
  CHECK_THAT(output_on(Terminal::own, folder, with(program, {"own"})), ContainsSubstring("\x1b[K"));
  const std::string text = output_on(Terminal::nobodys, folder, with(program, {"nobodys"}));
  CHECK_THAT(text, ContainsSubstring("final: step=4 "));
  CHECK(text.find('\x1b') == std::string::npos);
}

TEST_CASE("no command writes control characters into a file, whatever is asked of it") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const std::string hostile = "a\x1b[2K\rb\x7f";
  const Arguments lines[] = {
      with(train, {"run"}),
      {"report", "run"},
      {"inspect", "--layers", "1", "--ranks", "2"},
      {"bench", "--layers", "1", "--heads", "1", "--width", "8", "--context", "8", "--batch", "2", "--steps",
       "1", "--warmup", "1", "--threads", "1", "--peak-tflops", "1"},
      {"--version"},
      {"--help"},
      {"launch", "--help"},
      {hostile},
      {"--" + hostile},
      {"train", hostile},
      {"train", "--" + hostile},
      {"train", "--steps", hostile},
      {"train", "--data", hostile},
      {"train", "--out", hostile, "--resume"},
      {"sample", "--checkpoint", hostile},
      {"report", hostile},
      {"launch", hostile},
      {"launch", "-n", hostile},
      {"launch", "-n", "1", "--events", hostile + "/x", "true"}};
  for (const Arguments& words : lines) {
    Command command(folder, words);
    const int code = command.wait();
    INFO(words[0] << " ended with " << code);
    CHECK(!(command.out() + command.err()).empty());
    CHECK(control_in(command.out()) == -1);
    CHECK(control_in(command.err()) == -1);
  }
}
