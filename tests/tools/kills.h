// Runs that are killed while their ranks save.
#pragma once

#include <random>

#include "runtime/io/durable.h"
#include "tests/tools/command.h"
#include "tests/tools/small_run.h"

namespace sherd::test {

/// `sherd train` of a few steps on two ranks, with a checkpoint after each.
inline Arguments saving_run(const std::string& out, const std::string& layout) {
  return {"train", "--data",       "text", "--layers",  "1",  "--heads", "1", "--width",  "32",   "--context",
          "8",     "--batch",      "4",    "--threads", "1",  "--ranks", "2", "--layout", layout, "--steps",
          "12",    "--eval-every", "1",    "--keep",    "20", "--out",   out};
}

/// A moment in a save: when so many files of the checkpoint after this step are there, or it is complete, and
/// the folder was looked at as often again.
struct Moment {
  std::int64_t step;
  std::size_t files;
  int looks;
};

inline Moment random_moment(std::mt19937& random) {
  const auto below = [&](unsigned n) { return static_cast<int>(random() % n); };
  return {below(10), static_cast<std::size_t>(below(8)), below(2) * below(40)};
}

/// Waits for that moment; false when the run has ended before.
inline bool reaches(const Moment& moment, const std::filesystem::path& out, const Command& command) {
  const Witness witness(command.process());
  const auto path = tools::checkpoint_path(out, moment.step + 1),
             partial = PendingDirectory::partial_of(path);
  const auto files = [&]() -> std::size_t {
    std::error_code gone;
    std::size_t count = 0;
    for (std::filesystem::directory_iterator at(partial, gone), end; !gone && at != end; at.increment(gone))
      ++count;
    return count;
  };
  const auto is_there = [&] {
    std::error_code ignored;
    return std::filesystem::exists(path, ignored) ||
           (std::filesystem::exists(partial, ignored) && files() >= moment.files);
  };
  while (!is_there())
    if (witness.ends(0)) return false;
  for (int look = 0; look < moment.looks; ++look) files();
  return true;
}

/// Whatever stands under a checkpoint's name is complete and loads; what was left incomplete has no such
/// name.
inline void check_checkpoints(const std::filesystem::path& run) {
  FileSystem& files = posix_file_system();
  for (const std::int64_t step : tools::saved_steps(run, files)) {
    const auto checkpoint = tools::checkpoint_path(run, step);
    INFO(checkpoint.string());
    const tools::RunConfig config = tools::read_config(checkpoint, files);
    CHECK(config.step == step);
    CHECK_NOTHROW(tools::check_states(checkpoint, config.options, files));
    for (const char* what : {"model", "optimizer"}) {
      const shard::SavedState state(checkpoint, what);
      for (const shard::SavedTensor& tensor : state.tensors())
        CHECK_NOTHROW(state.read(tensor, 0, Shape(tensor.shape).numel()));
    }
  }
}

/// Starts runs with `start(arguments)`, kills them at random moments with `kill(command, random)`, and goes
/// on with what is left, to the bits of a run that nobody killed.
template <class Start, class Kill>
void check_kills(int rounds, const Start& start, const Kill& kill) {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  int within_saves = 0;
  for (int round = 0; round < rounds; ++round) {
    const std::string layout = round % 2 == 0 ? "flat" : "per-parameter", whole = "whole-" + layout;
    if (!std::filesystem::exists(folder / whole)) {
      Command command(folder, saving_run(whole, layout));
      REQUIRE(command.wait() == 0);
    }
    std::mt19937 random(static_cast<unsigned>(round));
    const Moment moment = random_moment(random);
    INFO("round " << round << ": step " << moment.step << ", " << moment.files << " files, " << moment.looks
                  << " looks");
    const std::string out = "killed";
    {
      Command command(folder, start(saving_run(out, layout)));
      if (reaches(moment, folder / out, command)) kill(command, random);
      const auto saved = tools::checkpoint_path(folder / out, moment.step + 1);
      within_saves += std::filesystem::exists(PendingDirectory::partial_of(saved));
      command.wait();
    }
    check_checkpoints(folder / out);
    Command again(folder, {"train", "--resume", "--keep", "20", "--out", out});
    CHECK(again.wait() == 0);
    INFO(again.err());
    CHECK(contents(folder / out) == contents(folder / whole));
    std::filesystem::remove_all(folder / out);
  }
  CHECK(within_saves > 0);
}

}  // namespace sherd::test
