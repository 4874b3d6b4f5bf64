// `sherd merge` and `sherd split`: what any ranks saved in other forms, and back.
#include "tools/merge.h"

#include "collectives/world.h"
#include "nn/layers.h"
#include "nn/optimizer.h"
#include "nn/pretrained.h"
#include "nn/state_file.h"
#include "runtime/context.h"
#include "shard/checkpoint.h"
#include "shard/fully_shard.h"
#include "shard/saved_state.h"
#include "tests/catch.h"
#include "tests/ranks.h"
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
      {{"two/step-2/model.rank-0.safetensors", "--part", "optimizer"}, "leave --part out"},
      {{"two", "--max-shard-size", "1000"}, "without --pretrained all tensors go into one file"},
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

TEST_CASE("a run becomes a folder of Hugging Face's, and that the checkpoint of any ranks") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  REQUIRE(run(folder, with(trains, {"two", "--ranks", "2"})) == 0);
  Command merges(folder, {"merge", "two", "--pretrained", "--out", "mine"});
  CHECK(merges.wait() == 0);
  CHECK_THAT(merges.out(), ContainsSubstring("model of two/step-2 in mine: "));
  REQUIRE(run(folder, {"merge", "two"}) == 0);
  const nn::StateDict whole = nn::load_state(folder / "model.safetensors");
  const nn::Gpt model = nn::load_gpt(folder / "mine");
  for (const auto& [name, tensor] : model.state_dict())
    CHECK(tensor.to_vector<float>() == whole.at(name).to_vector<float>());
  // Several files, and config.json from a folder.
  CHECK(run(folder, {"merge", "two", "--pretrained", "--out", "again", "--config-from", "mine",
                     "--max-shard-size", "1000"}) == 0);
  CHECK(std::filesystem::exists(folder / "again/model.safetensors.index.json"));
  for (const std::string from : {"mine", "again", "model.safetensors", "two"})
    for (const int ranks : {1, 3}) {
      const std::string out = fmt::format("{} {}", from, ranks);
      Command splits(folder, {"split", from, "--ranks", std::to_string(ranks), "--out", out});
      CHECK(splits.wait() == 0);
      INFO(splits.err());
      CHECK_THAT(splits.out(), ContainsSubstring("model of ") && ContainsSubstring("in " + out + ": "));
      CHECK((splits.out().find("optimizer of ") != std::string::npos) == (from == "two"));
      const shard::SavedState saved(folder / out, "model");
      for (const auto& [name, tensor] : whole)
        CHECK(saved.read(*saved.find(name), 0, tensor.numel()).to_vector<float>() ==
              tensor.to_vector<float>());
    }
}

TEST_CASE("what links name is merged and split as what they lead to") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  REQUIRE(run(folder, with(trains, {"two", "--ranks", "2"})) == 0);
  REQUIRE(run(folder, {"merge", "two"}) == 0);
  std::filesystem::create_symlink("two", folder / "latest");
  std::filesystem::create_symlink("two/step-2", folder / "newest");
  std::filesystem::create_symlink("model.safetensors", folder / "file");
  const std::string whole = posix_file_system().read(folder / "model.safetensors");
  for (const std::string from : {"latest", "newest", "file"}) {
    INFO(from);
    CHECK(run(folder, {"merge", from, "--out", from + ".safetensors"}) == 0);
    CHECK(posix_file_system().read(folder / (from + ".safetensors")) == whole);
    CHECK(run(folder, {"split", from, "--ranks", "3", "--out", from + " split"}) == 0);
    CHECK(run(folder, {"merge", from + " split", "--out", "again"}) == 0);
    CHECK(posix_file_system().read(folder / "again") == whole);
  }
}

TEST_CASE(
    "of a mesh's checkpoint one group's tensors are merged and split, an optimizer's that all share too") {
  const TempDirectory folder;
  run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = world.mesh({2, 2}, {"model", "shards"});
    manual_seed(static_cast<std::uint64_t>(mesh.coordinate("model")));
    nn::Linear slice(4, 3);
    shard::fully_shard(slice, {.mesh = mesh["shards"]});
    nn::Sgd sgd(slice.parameters(), {.lr = 0.1});
    shard::save_checkpoint(slice, sgd, folder / "saved", world.group());
  });
  Command unnamed(folder, {"split", "saved", "--ranks", "2", "--out", "new"});
  CHECK(unnamed.wait() == 1);
  CHECK_THAT(unnamed.err(), ContainsSubstring("name one group of 0 to 1"));
  for (const int group : {0, 1}) {
    const std::string number = std::to_string(group);
    REQUIRE(run(folder, {"merge", "saved", "--group", number, "--out", "merged"}) == 0);
    REQUIRE(run(folder, {"split", "saved", "--group", number, "--ranks", "3", "--out", "split" + number}) ==
            0);
    REQUIRE(run(folder, {"merge", "split" + number, "--out", "again"}) == 0);
    manual_seed(static_cast<std::uint64_t>(group));
    const nn::Linear expected(4, 3);
    for (const std::string file : {"merged", "again"})
      CHECK(nn::load_state(folder / file).at("weight").to_vector<float>() ==
            expected.weight.local().to_vector<float>());
  }
}

TEST_CASE("what becomes no folder and no checkpoint is one line, and nothing is written") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  REQUIRE(run(folder, with(trains, {"two", "--ranks", "2"})) == 0);
  REQUIRE(run(folder, {"merge", "two"}) == 0);
  REQUIRE(run(folder, {"split", "model.safetensors", "--ranks", "2", "--out", "alone"}) == 0);
  const auto before = contents(folder / "two"), before_alone = contents(folder / "alone");
  const std::pair<Arguments, std::string> refusals[] = {
      {{"merge", "two", "--pretrained", "--out", "two"}, "--out"},
      {{"merge", "two", "--pretrained", "--out", "two/step-2/new"}, "--out"},
      {{"merge", "two", "--pretrained", "--out", "missing/new"}, "--out"},
      {{"merge", "alone", "--pretrained", "--out", "new"}, "--config-from"},
      {{"merge", "two", "--pretrained", "--out", "new", "--config-from", "two/step-2"}, "config.json"},
      {{"merge", "two", "--pretrained", "--out", "new", "--part", "optimizer"}, "lack 'tok.weight'"},
      {{"merge", "two", "--pretrained", "--out", "new", "--max-shard-size", "0"}, "max_shard_size is 0"},
      {{"merge", "two", "--group", "x"}, "--group"},
      {{"merge", "two", "--group", "0"}, "--group 0: all ranks saved"},
      {{"merge", "two", "--pretrained", "--out", "new", "--group", "1"}, "--group 1: all ranks saved"},
      {{"merge", "two", "--config-from", "two"}, "--pretrained"},
      {{"split", "two", "--ranks", "2", "--out", "new", "--group", "0"}, "--group 0: all ranks saved"},
      {{"split", "two", "--ranks", "2", "--out", "alone"}, "--out"},
      {{"split", "two", "--ranks", "2", "--out", "two/step-2/new"}, "--out"},
      {{"split", "two", "--ranks", "0", "--out", "new"}, "--ranks"},
      {{"split", "two", "--ranks", "-1", "--out", "new"}, "--ranks"},
      {{"split", "text", "--ranks", "2", "--out", "new"}, "text"},
      {{"split", "nowhere", "--ranks", "2", "--out", "new"}, "nowhere"}};
  for (const auto& [words, named] : refusals) {
    Command refused(folder, words);
    CHECK(refused.wait() == 1);
    INFO(refused.err());
    CHECK(std::ranges::count(refused.err(), '\n') == 1);
    CHECK_THAT(refused.err(), ContainsSubstring(named));
  }
  CHECK((contents(folder / "two") == before));
  CHECK((contents(folder / "alone") == before_alone));
  CHECK_FALSE(std::filesystem::exists(folder / "new"));
}
