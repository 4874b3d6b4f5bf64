// The program `sherd`: reads the command line and hands over.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/processor.h"
#include "tools/interrupt.h"
#include "tools/progress.h"
#include "tools/sample.h"
#include "tools/train.h"

namespace {

using namespace sherd;
using namespace sherd::tools;

std::string help(std::string_view name, std::string_view what, std::string_view standard,
                 std::string_view example) {
  return fmt::format("{} [default {}; e.g. --{} {}]", what, standard, name, example);
}

void add_train_flags(CLI::App& app, TrainOptions& options) {
  app.add_option("--data", options.data,
                 help("data", "text files or folders; the last tenth of every file is for validation",
                      "the sources and docs of this project", "book.txt notes/"));
  app.add_option("--out", options.out,
                 help("out", "folder of the run: metrics.jsonl and checkpoints",
                      "the next free of runs/1, runs/2, ...", "runs/book"));
  visit_settings(options, [&](const Setting& setting, auto& value) {
    app.add_option(fmt::format("--{}", setting.name), value,
                   help(setting.name, setting.what, fmt::format("{}", value), setting.example));
  });
  app.add_flag("--resume", options.resume,
               "go on with the run in --out from its newest checkpoint, with its settings [default off: a "
               "new run; e.g. --out runs/book "
               "--resume]");
  app.add_option("--threads", options.threads,
                 help("threads", "threads; the results do not depend on them; 0 takes every core", "0", "2"));
}

void add_sample_flags(CLI::App& app, SampleOptions& options) {
  GenerateOptions& g = options.generate;
  app.add_option("--checkpoint", options.checkpoint,
                 help("checkpoint", "folder of a checkpoint, or of a run: then its best checkpoint",
                      "none: it must be given", "runs/book/step-2000"))
      ->required();
  app.add_option("--prompt", options.prompt, help("prompt", "text to continue", "empty", "\"Once upon\""));
  app.add_option("--tokens", g.tokens,
                 help("tokens", "bytes to generate", fmt::format("{}", g.tokens), "500"));
  app.add_option("--temperature", g.temperature,
                 help("temperature", "divides the logits: below 1 bolder, 0 always the likeliest byte",
                      fmt::format("{}", g.temperature), "0.5"));
  app.add_option(
      "--top-k", g.top_k,
      help("top-k", "bytes to draw from, the likeliest; 0 takes all 256", fmt::format("{}", g.top_k), "20"));
  app.add_option("--seed", g.seed,
                 help("seed", "seed of the draws, a whole number from 0", fmt::format("{}", g.seed), "42"));
}

/// The settings that stand on the command line.
void note_given(const CLI::App& app, TrainOptions& options) {
  visit_settings(options, [&](const Setting& setting, auto&) {
    if (app.count(fmt::format("--{}", setting.name)) > 0) options.given.emplace(setting.name);
  });
}

/// What stdio could not write, a full disk for one, is an error too.
void flush_output() {
  check<FileError>(std::fflush(stdout) == 0 && std::ferror(stdout) == 0, "output: it cannot be written");
}

void run_train(const TrainOptions& options) {
  catch_interrupts();
  Progress progress(stdout);
  try {
    const TrainResult result = train(options, posix_file_system(), progress);
    progress.end_line();
    print_result(stdout, result);
  } catch (...) {
    progress.end_line();
    throw;
  }
  flush_output();
}

void run_sample(const SampleOptions& options) {
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  const auto show = [&](std::string text) {
    const std::string shown = terminal ? without_controls(std::move(text)) : std::move(text);
    std::fwrite(shown.data(), 1, shown.size(), stdout);
    std::fflush(stdout);
  };
  bool first = true;
  sample(options, posix_file_system(), [&](char byte) {
    if (std::exchange(first, false)) show(options.prompt);
    show(std::string(1, byte));
  });
  std::fputc('\n', stdout);
  flush_output();
}

int run(int argc, char** argv) {
  check_processor();
  CLI::App app("Trains a byte-level GPT and writes text with it.", "sherd");
  app.require_subcommand(1);
  TrainOptions train_options;
  SampleOptions sample_options;
  CLI::App& train_command = *app.add_subcommand("train", "Train a GPT on text; resumable to the bit.");
  CLI::App& sample_command = *app.add_subcommand("sample", "Continue a text with a trained model.");
  add_train_flags(train_command, train_options);
  add_sample_flags(sample_command, sample_options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    const std::string text = error.what();
    fail<ValueError>("{} (sherd --help, sherd train --help and sherd sample --help list the flags)",
                     text.substr(0, text.find('\n')));
  }
  note_given(train_command, train_options);
  train_command.parsed() ? run_train(train_options) : run_sample(sample_options);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "sherd: out of memory\n");
  } catch (const std::exception& error) {
    const std::string_view text = error.what();
    fmt::print(stderr, "{}{}\n", text.starts_with("sherd: ") ? "" : "sherd: ", text);
  }
  return 1;
}
