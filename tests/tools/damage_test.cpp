// Files of a run in which a byte changed, a line broke, or that were made by somebody else.
#include <functional>

#include "nn/state_file.h"
#include "runtime/error.h"
#include "shard/fully_shard.h"
#include "tests/catch.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"
#include "tools/metrics.h"
#include "tools/sample.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// A finished run.
struct Trained : Runs {
  tools::TrainOptions settings = options("run");
  std::filesystem::path checkpoint = folder / "run" / "step-6";
  Trained() { run(settings); }
};

/// All that going on from a checkpoint takes from its files, as text.
std::string taken(const std::filesystem::path& checkpoint) {
  FileSystem& files = posix_file_system();
  tools::RunConfig config = tools::read_config(checkpoint, files);
  tools::check_states(checkpoint, config.options, files);
  std::string all = tools::config_text(config);
  for (const char* name : {"model.safetensors", "optimizer.safetensors"})
    for (const auto& [key, tensor] : nn::load_state(checkpoint / name)) {
      all += fmt::format("{} {} {}", key, to_string(tensor.shape()), name_of(tensor.dtype()));
      all.append(reinterpret_cast<const char*>(tensor.raw()),
                 static_cast<std::size_t>(tensor.spec().bytes()));
    }
  return all;
}

/// Every byte of what has structure, and of numbers one in 37, which hits every place in them.
std::size_t next(const std::string& name, std::size_t at) {
  return name == "config.json" || at < 3000 ? at + 1 : at + 37;
}

}  // namespace

TEST_CASE(
    "whatever byte of a checkpoint changes, it is refused by the file's name or nothing that is taken "
    "differs") {
  const Trained run;
  const std::string whole = taken(run.checkpoint);
  for (const std::string name : {"model.safetensors", "optimizer.safetensors", "config.json"}) {
    const auto path = run.checkpoint / name;
    const std::string content = posix_file_system().read(path);
    int refused = 0, harmless = 0;
    for (std::size_t at = 0; at < content.size(); at = next(name, at)) {
      std::string broken = content;
      broken[at] = static_cast<char>(broken[at] ^ (1 << at % 8));
      write_file(path, broken);
      try {
        const bool same = taken(run.checkpoint) == whole;
        if (!same) FAIL(name << ": byte " << at << " changed what is loaded");
        ++harmless;
      } catch (const Error& error) {
        const std::string message = error.what();
        ++refused;
        if (message.find(path.string()) == std::string::npos || message.find('\n') != std::string::npos)
          FAIL("byte " << at << ": " << message);
      }
    }
    write_file(path, content);
    INFO(name << ": " << refused << " refused, " << harmless << " harmless");
    CHECK(harmless == 0);
    CHECK(refused > 500);
  }
  CHECK(taken(run.checkpoint) == whole);
}

TEST_CASE("a run does not go on, and nothing is sampled, from a damaged checkpoint") {
  const Trained run;
  tools::TrainOptions resume = run.settings;
  resume.resume = true;
  for (const std::string name : {"model.safetensors", "optimizer.safetensors", "config.json"}) {
    const auto path = run.checkpoint / name;
    const std::string content = posix_file_system().read(path);
    std::string broken = content;
    broken[broken.size() - 9] ^= 4;
    write_file(path, broken);
    const auto before = run.left("run");
    CHECK_THAT(message_of<Error>([&] { run.run(resume); }), ContainsSubstring(path.string()));
    CHECK(run.left("run") == before);
    const auto sample = [&] {
      tools::sample({.checkpoint = run.checkpoint.string()}, posix_file_system(), [](char) {});
    };
    if (name != "optimizer.safetensors")
      CHECK_THAT(message_of<Error>(sample), ContainsSubstring(path.string()));
    write_file(path, content);
  }
  CHECK(message_of<Error>([&] { run.run(resume); }) == "(nothing was thrown)");
}

TEST_CASE("a checkpoint without checksums loads, and one where some files have them names the others") {
  const Trained run;
  const std::string whole = taken(run.checkpoint);
  const std::string names[] = {"model.safetensors", "optimizer.safetensors", "config.json"};
  const auto before = contents(run.checkpoint);
  const auto sample = [&] {
    tools::sample({.checkpoint = run.checkpoint.string()}, posix_file_system(), [](char) {});
  };
  for (int bare = 0; bare < 8; ++bare) {
    for (int i = 0; i < 3; ++i) {
      write_file(run.checkpoint / names[i], before.at(names[i]));
      if ((bare >> i & 1) != 0) unseal(run.checkpoint / names[i]);
    }
    INFO(bare);
    const bool mixed = bare != 0 && bare != 7, mixed_for_sample = (bare & 1) != (bare >> 2 & 1);
    std::string read;
    const std::string message = message_of<ValueError>([&] { read = taken(run.checkpoint); });
    if (!mixed) CHECK(read == whole);
    CHECK((message == "(nothing was thrown)") == !mixed);
    CHECK((message_of<ValueError>(sample) == "(nothing was thrown)") == !mixed_for_sample);
    if (!mixed) continue;
    CHECK_THAT(message, ContainsSubstring("has no checksum, ") && ContainsSubstring(run.checkpoint.string()));
    const std::size_t end = message.find("has no checksum");
    bool named = false;
    for (int i = 0; i < 3; ++i)
      if ((bare >> i & 1) != 0) named |= message.substr(0, end).find(names[i]) != std::string::npos;
    CHECK(named);
  }
}

TEST_CASE("files of two saves are no checkpoint, whichever are mixed: of other steps, seeds and rates") {
  const Runs runs;
  FileSystem& files = posix_file_system();
  for (const std::int64_t ranks : {1, 2}) {
    const auto checkpoint = [&](const std::string& out, std::uint64_t seed, double lr, std::int64_t step) {
      tools::TrainOptions options = runs.options(fmt::format("{} of {}", out, ranks));
      options.ranks = ranks;
      options.seed = seed;
      options.lr = lr;
      options.keep = 9;
      if (!std::filesystem::exists(options.out)) runs.run(options);
      return tools::checkpoint_path(options.out, step);
    };
    const auto one = checkpoint("one", 1, 0.01, 6), begin = checkpoint("one", 1, 0.01, 0);
    const std::pair<std::filesystem::path, std::filesystem::path> pairs[] = {
        {one, checkpoint("one", 1, 0.01, 4)},
        {one, checkpoint("another", 2, 0.01, 6)},
        {begin, checkpoint("faster", 1, 0.02, 0)},  // the same weights
    };
    for (const auto& [first, second] : pairs) {
      const auto ours = contents(first), others = contents(second);
      for (unsigned from_other = 0; from_other < 1U << ours.size(); ++from_other) {
        const auto mixed = runs.folder / "mixed";
        std::filesystem::remove_all(mixed);
        std::filesystem::create_directory(mixed);
        bool mixes = false;
        unsigned at = 0;
        for (const auto& [name, content] : ours) {
          const bool other = (from_other >> at++ & 1U) != 0;
          write_file(mixed / name, other ? others.at(name) : content);
          // Equal files are of both saves.
          mixes |= content != others.at(name);
        }
        std::set<std::map<std::string, std::string>> whole = {ours, others};
        const std::string message = message_of<ValueError>(
            [&] { tools::check_states(mixed, tools::read_config(mixed, files).options, files); });
        INFO(ranks << " ranks, " << second << ", files " << from_other << ": " << message);
        CHECK(mixes);
        if (whole.contains(contents(mixed))) {
          CHECK(message == "(nothing was thrown)");
        } else {
          CHECK_THAT(message, ContainsSubstring("another save") && ContainsSubstring(mixed.string()) &&
                                  ContainsSubstring("take all files from one save"));
          CHECK(message.find('\n') == std::string::npos);
        }
      }
    }
  }
}

TEST_CASE("nothing is sampled from weights and settings of two saves, and older checkpoints load") {
  const Trained run;
  const auto sample = [&] {
    tools::sample({.checkpoint = run.checkpoint.string()}, posix_file_system(), [](char) {});
  };
  tools::TrainOptions other = run.options("other");
  other.seed += 1;
  run.run(other);
  const auto ours = contents(run.checkpoint), theirs = contents(run.folder / "other/step-6");
  for (const std::string name : {"config.json", "model.safetensors", "optimizer.safetensors"}) {
    write_file(run.checkpoint / name, theirs.at(name));
    const std::string message = message_of<ValueError>(sample);
    if (name == "optimizer.safetensors")
      CHECK(message == "(nothing was thrown)");  // which sampling does without
    else
      CHECK_THAT(message, ContainsSubstring("another save than config.json"));
    write_file(run.checkpoint / name, ours.at(name));
  }
  // As before saves had an identity.
  tools::RunConfig config = tools::read_config(run.checkpoint, posix_file_system());
  CHECK(config.saved_beside.size() == 2);
  config.saved_beside.clear();
  write_file(run.checkpoint / "config.json", tools::config_text(config));
  nn::save_state(run.checkpoint / "optimizer.safetensors",
                 nn::load_state(run.checkpoint / "optimizer.safetensors"));
  CHECK(message_of<Error>(sample) == "(nothing was thrown)");
  tools::TrainOptions resume = run.settings;
  resume.resume = true;
  CHECK(message_of<Error>([&] { run.run(resume); }) == "(nothing was thrown)");
}

TEST_CASE("damaged lines of the metrics go, and all good ones stay") {
  const Trained run;
  const auto path = run.folder / "run" / "metrics.jsonl";
  const std::string content = posix_file_system().read(path);
  std::vector<std::string> lines;
  for (std::size_t begin = 0, end; (end = content.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines.push_back(content.substr(begin, end + 1 - begin));
  REQUIRE(lines.size() == 7);
  const std::string damages[] = {"\n",
                                 "{\n",
                                 "{\"step\":3}\n",
                                 "[3]\n",
                                 std::string("\0\0\n", 3),
                                 "\xff\xfe\n",
                                 "{\"step\":\"3\",\"loss\":1}\n",
                                 std::string(100'000, '[') + "\n"};
  for (std::size_t broken = 0; broken < 6; ++broken) {
    for (const std::string& damage : damages) {
      std::string spoiled, expected;
      for (std::size_t i = 0; i < lines.size(); ++i) {
        spoiled += i == broken ? damage : lines[i];
        if (i != broken && i < 5) expected += lines[i];
      }
      write_file(path, spoiled + "{\"step\":1,\"loss\"");
      tools::cut_metrics(path, 5, posix_file_system());
      CHECK(posix_file_system().read(path) == expected);
    }
  }
}
