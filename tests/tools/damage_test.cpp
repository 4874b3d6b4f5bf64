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
