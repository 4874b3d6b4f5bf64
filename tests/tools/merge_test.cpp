// `sherd merge`: one file of what any ranks saved.
#include "tools/merge.h"

#include "nn/state_file.h"
#include "tests/catch.h"
#include "tests/tools/command.h"
#include "tests/tools/small_run.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

const Arguments trains = {"train", "--data",  "text", "--layers",  "1", "--heads",
                          "1",     "--width", "10",   "--context", "8", "--batch",
                          "6",     "--steps", "2",    "--threads", "1", "--out"};

int run(const TempDirectory& folder, const Arguments& arguments) { return Command(folder, arguments).wait(); }

}  // namespace

TEST_CASE("a run of any ranks becomes the file that one rank saves") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  REQUIRE(run(folder, with(trains, {"one"})) == 0);
  REQUIRE(run(folder, with(trains, {"two", "--ranks", "2"})) == 0);
  for (const std::string part : {"model", "optimizer"}) {
    const std::string file = part + ".safetensors";
    Command merges(folder, {"merge", "two", "--part", part});
    CHECK(merges.wait() == 0);
    CHECK_THAT(merges.out(), ContainsSubstring(part + " of two/step-2 in " + file + ": "));
    const nn::StateDict merged = nn::load_state(folder / file),
                        whole = nn::load_state(folder / "one/step-2" / (part + ".safetensors"));
    REQUIRE(merged.size() == whole.size());
    for (const auto& [name, tensor] : whole) CHECK(merged.at(name).shape() == tensor.shape());
    CHECK(run(folder, {"merge", "two/step-2", "--part", part, "--out", "again"}) == 0);
    CHECK(posix_file_system().read(folder / "again") == posix_file_system().read(folder / file));
  }
}

TEST_CASE("what cannot be merged is one line, and nothing is written") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  REQUIRE(run(folder, with(trains, {"two", "--ranks", "2"})) == 0);
  std::filesystem::create_directory(folder / "empty");
  const std::string before = posix_file_system().read(folder / "two/step-2/model.rank-0.safetensors");
  const std::pair<Arguments, std::string> refusals[] = {
      {{"nowhere"}, "nowhere"},
      {{"empty"}, "model.safetensors"},
      {{"two", "--part", "ema"}, "ema"},
      {{"two", "--part", "../x"}, "../x"},
      {{"two", "--out", "two/step-2/model.rank-0.safetensors"}, "--out"},
      {{"two", "--out", "two/step-2/new.safetensors"}, "--out"},
      {{"two", "--out", "empty"}, "--out"},
      {{"two", "--out", "missing/file"}, "--out"}};
  for (const auto& [words, named] : refusals) {
    Command refused(folder, with({"merge"}, words));
    CHECK(refused.wait() == 1);
    INFO(refused.err());
    CHECK(std::ranges::count(refused.err(), '\n') == 1);
    CHECK_THAT(refused.err(), ContainsSubstring(named));
  }
  CHECK(posix_file_system().read(folder / "two/step-2/model.rank-0.safetensors") == before);
  CHECK_FALSE(std::filesystem::exists(folder / "model.safetensors"));
}
