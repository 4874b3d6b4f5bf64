// A training run of a blink, and what it leaves.
#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/io/file_system.h"
#include "shard/saved_state.h"
#include "tests/temp_directory.h"
#include "tools/checkpoint.h"
#include "tools/metrics.h"
#include "tools/train.h"

namespace sherd::test {

/// Bytes that a model can learn something from.
inline std::string small_text(std::size_t size = 2000) {
  std::string text;
  for (int i = 0; text.size() < size; ++i) {
    text += "line " + std::to_string(i * i % 97) + (i % 3 == 0 ? " of many\n" : ";\n");
  }
  text.resize(size);
  return text;
}

inline void write_file(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

inline tools::TrainOptions small_options(const std::filesystem::path& data,
                                         const std::filesystem::path& out) {
  tools::TrainOptions options;
  options.data = {data.string()};
  options.out = out.string();
  options.steps = 6;
  options.batch = 4;
  options.layers = 1;
  options.heads = 2;
  options.width = 8;
  options.context = 8;
  options.dropout = 0.1;
  options.warmup = 2;
  options.eval_every = 2;
  options.keep = 1;
  options.sample = 20;
  options.threads = 1;
  return options;
}

/// The bytes of every file below `folder`, by relative path, but for speed.jsonl, which no two runs have alike.
inline std::map<std::string, std::string> contents(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file() || entry.path().filename() == tools::speed_name) continue;
    files[std::filesystem::relative(entry.path(), folder).string()] = posix_file_system().read(entry.path());
  }
  return files;
}

/// The same with states by their tensors, however ranks cut them: "step-6/model/tok.weight" holds dtype,
/// shape and elements.
inline std::map<std::string, std::string> whole_contents(const std::filesystem::path& folder) {
  auto files = contents(folder);
  std::erase_if(files, [](const auto& file) {
    return file.first.ends_with(".safetensors") || file.first.ends_with(shard::index_name);
  });
  for (const std::int64_t step : tools::saved_steps(folder, posix_file_system())) {
    const auto checkpoint = tools::checkpoint_path(folder, step);
    for (const std::string what : {"model", "optimizer"}) {
      const shard::SavedState state(checkpoint, what);
      for (const shard::SavedTensor& tensor : state.tensors()) {
        const Tensor whole = state.read(tensor, 0, Shape(tensor.shape).numel());
        std::string& text = files[fmt::format("step-{}/{}/{}", step, what, tensor.name)];
        text = fmt::format("{} {} ", name_of(whole.dtype()), to_string(Shape(tensor.shape)));
        text.append(reinterpret_cast<const char*>(whole.raw()),
                    static_cast<std::size_t>(whole.spec().bytes()));
      }
    }
  }
  return files;
}

/// Takes the checksum from one file of a checkpoint, as somebody does who means to change it.
inline void unseal(const std::filesystem::path& file) {
  std::string content = posix_file_system().read(file);
  const std::string_view key = file.extension() == ".json" ? "\"checksum\"" : "\"sherd.xxh3\"";
  const std::size_t at = content.find(key);
  if (at == std::string::npos) throw std::logic_error("no checksum in " + file.string());
  content[at + 1] = 'z';
  write_file(file, content);
}
/// And from all of them.
inline void unseal_all(const std::filesystem::path& checkpoint) {
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint)) unseal(entry.path());
}

/// Ends the run after a step, as a kill would or as Ctrl-C does.
class Stopper final : public tools::Reporter {
 public:
  enum class How { never, kill, stop };
  struct Killed {};

  explicit Stopper(std::int64_t step = 0, How how = How::never) : step_(step), how_(how) {}
  void started(const tools::RunFacts& facts) override { done_ = facts.step; }
  void stepped(const tools::StepFacts& facts) override {
    if (how_ == How::kill && facts.step == step_) throw Killed();
  }
  bool stop_wanted() override { return ++done_ == step_ && how_ == How::stop; }

 private:
  std::int64_t step_, done_ = 0;  // asked after each step
  How how_;
};

/// Runs over one text, side by side in one folder.
struct Runs {
  TempDirectory folder;
  Runs() { write_file(folder / "text", small_text()); }

  tools::TrainOptions options(const std::string& out) const {
    return small_options(folder / "text", folder / out);
  }
  tools::TrainResult run(const tools::TrainOptions& options, Stopper reporter = Stopper()) const {
    return tools::train(options, posix_file_system(), reporter);
  }
  /// A run that dies at `step` and is resumed.
  tools::TrainResult interrupted(tools::TrainOptions options, std::int64_t step, Stopper::How how) const {
    try {
      run(options, Stopper(step, how));
    } catch (const Stopper::Killed&) {
    }
    options.resume = true;
    return run(options);
  }
  /// What lies in the run's folder; paths in config.json aside, runs of equal options are equal.
  std::map<std::string, std::string> left(const std::string& out) const { return contents(folder / out); }
};

inline std::vector<nlohmann::json> metrics(const Runs& runs, const std::string& out) {
  std::vector<nlohmann::json> lines;
  std::istringstream in(runs.left(out).at("metrics.jsonl"));
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

}  // namespace sherd::test
