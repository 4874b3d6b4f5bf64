// The program `sherd`: reads the command line and hands over.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>

#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/processor.h"
#include "runtime/shown.h"
#include "tools/bench.h"
#include "tools/inspect.h"
#include "tools/interrupt.h"
#include "tools/launch.h"
#include "tools/number.h"
#include "tools/progress.h"
#include "tools/report.h"
#include "tools/sample.h"
#include "tools/train.h"

namespace {

using namespace sherd;
using namespace sherd::tools;

std::string help(std::string_view name, std::string_view what, std::string_view standard,
                 std::string_view example) {
  return fmt::format("{} [default {}; e.g. --{} {}]", what, standard, name, example);
}

/// A flag with one value. Numbers are read here, since CLI11 takes "" for 0 and wraps around what is too
/// large.
template <class T>
CLI::Option* add_value(CLI::App& app, const std::string& flag, T& value, const std::string& what) {
  if constexpr (std::is_arithmetic_v<T>) {
    const auto read = [&value, flag](const std::string& text) { value = number_from<T>(flag, text); };
    return app.add_option_function<std::string>(flag, read, what)->type_name(CLI::detail::type_name<T>());
  } else {
    return app.add_option(flag, value, what);
  }
}

/// A flag whose default is what `value` holds.
template <class T>
void add_setting(CLI::App& app, std::string_view name, T& value, std::string_view what,
                 std::string_view example) {
  add_value(app, fmt::format("--{}", name), value, help(name, what, fmt::format("{}", value), example));
}

void add_trace_flag(CLI::App& app, std::string& trace) {
  app.add_option("--trace", trace,
                 help("trace", "file for a trace in Chrome's format (ui.perfetto.dev), which is replaced",
                      "none", "trace.json"));
}

void add_train_flags(CLI::App& app, TrainOptions& options) {
  app.add_option("--data", options.data,
                 help("data", "text files or folders; the last tenth of every file is for validation",
                      "the sources and docs of this project", "book.txt notes/"));
  app.add_option("--out", options.out,
                 help("out", "folder of the run: metrics.jsonl and checkpoints",
                      "the next free of runs/1, runs/2, ...", "runs/book"));
  visit_settings(options,
                 [&](const Setting& s, auto& value) { add_setting(app, s.name, value, s.what, s.example); });
  app.add_flag("--resume", options.resume,
               "go on with the run in --out from its newest checkpoint, with its settings "
               "[default off: a new run; e.g. --out runs/book --resume]");
  add_setting(app, "threads", options.threads,
              "threads, which the ranks of a process share; the results do not depend on them; 0 takes every "
              "core",
              "2");
  add_trace_flag(app, options.trace);
}

void add_bench_flags(CLI::App& app, BenchOptions& options) {
  visit_settings(options.sizes, [&](const Setting& s, auto& value) {
    if (s.name == "param-dtype")
      add_value(app, "--dtype,--param-dtype", value,
                help("dtype", s.what, fmt::format("{}", value), s.example));
    else if (is_benched(s))
      add_setting(app, s.name, value, s.what, s.example);
  });
  add_setting(app, "vocab", options.vocab, "tokens there are, whose numbers are drawn at random", "50257");
  add_setting(app, "steps", options.steps, "steps that are timed", "100");
  add_setting(app, "warmup", options.warmup, "steps before those", "10");
  add_setting(app, "threads", options.sizes.threads,
              "threads, which the ranks of a process share; 0 takes every core", "2");
  add_setting(
      app, "peak-tflops", options.peak_tflops,
      "peak of all devices together, of which MFU is a part; 0 takes a known GPU's, or measures a cpu",
      "989.4");
  app.add_option("--out", options.out,
                 help("out", "file for the report as JSON, which is replaced", "none", "report.json"));
  app.add_option("--against", options.against,
                 help("against", "report of an earlier run to compare with", "none", "report.json"));
  add_trace_flag(app, options.trace);
}

void add_inspect_flags(CLI::App& app, InspectOptions& options) {
  add_setting(app, "model", options.model, "model to look at: gpt", "gpt");
  visit_settings(options.sizes, [&](const Setting& s, auto& value) {
    if (is_inspected(s))
      add_setting(app, s.name, value, s.name == "ranks" ? "ranks that the model would lie on" : s.what,
                  s.example);
  });
  app.add_option("--svg", options.svg,
                 help("svg", "file for a drawing, which is replaced", "none: only the table", "shards.svg"));
}

void add_sample_flags(CLI::App& app, SampleOptions& options) {
  GenerateOptions& g = options.generate;
  app.add_option("--checkpoint", options.checkpoint,
                 help("checkpoint", "folder of a checkpoint, or of a run: then its best checkpoint",
                      "none: it must be given", "runs/book/step-2000"))
      ->required();
  add_setting(app, "device", options.device,
              "where it is computed: cpu, or cuda for this machine's first GPU", "cuda");
  app.add_option("--prompt", options.prompt, help("prompt", "text to continue", "empty", "\"Once upon\""));
  add_setting(app, "tokens", g.tokens, "bytes to generate", "500");
  add_setting(app, "temperature", g.temperature,
              "divides the logits: below 1 bolder, 0 always the likeliest byte", "0.5");
  add_setting(app, "top-k", g.top_k, "bytes to draw from, the likeliest; 0 takes all 256", "20");
  add_setting(app, "seed", g.seed, "seed of the draws, a whole number from 0", "42");
}

void add_report_flags(CLI::App& app, ReportOptions& options) {
  app.add_option("RUN", options.runs,
                 "folders of runs, whose curves lie over each other [e.g. runs/1 runs/2]")
      ->required();
  app.add_option(
      "--out", options.out,
      help("out", "file for the page, which is replaced", "report.html in the first folder", "report.html"));
}

void add_launch_flags(CLI::App& app, LaunchOptions& options) {
  add_value(app, "-n", options.ranks, "processes, one a rank [it must be given; e.g. -n 4]")->required();
  app.add_option("--hosts", options.hosts,
                 help("hosts", "machines, and how many ranks on each", "this one", "node1:4,node2:4"));
  app.add_option(
         "--mpirun-arg", options.mpirun_args,
         "a further argument for mpirun, as often as needed [default none; e.g. --mpirun-arg=--tag-output]")
      ->allow_extra_args(false);
  add_setting(
      app, "connect-within", options.connect_within,
      "seconds that mpirun has to connect ranks of one machine once all of them wait for it; then the "
      "job is ended",
      "600");
  app.add_option(
      "--events", options.events,
      help("events", "file for what happens to the ranks, a line each with the seconds since the start",
           "none", "events.txt"));
  app.prefix_command();  // the program's flags are its own
}

/// Where `sherd launch FLAGS -- PROGRAM` has its two dashes, else `argc`. What follows is not for CLI11,
/// which knows them only before words of its own.
int launch_dashes(int argc, char** argv) {
  int at = 2;
  if (argc < 2 || std::string_view(argv[1]) != "launch") return argc;
  for (std::string_view word; at < argc && (word = argv[at]).starts_with('-') && word != "--"; ++at)
    if (word == "-n" || (word.starts_with("--") && word.find('=') == word.npos)) ++at;  // its value
  return at < argc && std::string_view(argv[at]) == "--" ? at : argc;
}

/// The settings that stand on the command line.
void note_given(const CLI::App& app, TrainOptions& options) {
  visit_settings(options, [&](const Setting& setting, auto&) {
    if (app.count(fmt::format("--{}", setting.name)) > 0) options.given.emplace(setting.name);
  });
}

/// A standard stream that is closed would be the number of the next file that is opened, and what is printed
/// would go into that: /dev/null takes its place.
void reserve_standard_streams() {
  int opened = ::open("/dev/null", O_RDWR);
  while (opened >= 0 && opened <= STDERR_FILENO) opened = ::open("/dev/null", O_RDWR);
  if (opened >= 0) ::close(opened);
}

/// Says why the program ends, if anyone can hear it: stderr may be a full disk.
void complain(std::string_view text) {
  const std::string line =
      fmt::format("{}{}\n", text.starts_with("sherd: ") ? "" : "sherd: ", one_line(text));
  std::fwrite(line.data(), 1, line.size(), stderr);
}

/// What stdio could not write, a full disk for one, is an error too.
void flush_output() {
  check<FileError>(std::fflush(stdout) == 0 && std::ferror(stdout) == 0, "output: it cannot be written");
}

void run_train(const TrainOptions& options) {
  catch_interrupts();
  Progress progress(stdout);
  try {
    train(options, posix_file_system(), progress);
  } catch (...) {
    progress.end_line();
    throw;
  }
  flush_output();
}

void run_inspect(const InspectOptions& options) {
  const std::string text = inspect(options, posix_file_system());
  std::fwrite(text.data(), 1, text.size(), stdout);
  flush_output();
}

void run_report(const ReportOptions& options) {
  const std::string text = report(options, posix_file_system());
  std::fwrite(text.data(), 1, text.size(), stdout);
  flush_output();
}

void run_bench(const BenchOptions& options) {
  const std::string text = bench(options, posix_file_system());
  std::fwrite(text.data(), 1, text.size(), stdout);
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
  if (argc > 3 && std::string_view(argv[1]) == keeper_command)
    return keep_rank(argv[2], std::span(argv + 3, static_cast<std::size_t>(argc - 2)));
  CLI::App app("Trains a byte-level GPT and writes text with it.", "sherd");
  app.require_subcommand(1);
  TrainOptions train_options;
  SampleOptions sample_options;
  CLI::App& train_command = *app.add_subcommand("train", "Train a GPT on text; resumable to the bit.");
  CLI::App& sample_command = *app.add_subcommand("sample", "Continue a text with a trained model.");
  InspectOptions inspect_options;
  CLI::App& inspect_command = *app.add_subcommand(
      "inspect", "Show which rank owns which span of which parameter, as a table and a drawing.");
  BenchOptions bench_options;
  CLI::App& bench_command = *app.add_subcommand(
      "bench", "Time training steps of a GPT: tokens/s, MFU and memory, also against an earlier report.");
  ReportOptions report_options;
  CLI::App& report_command = *app.add_subcommand(
      "report", "Draw a run, or several, as a page: loss, rate, speed, memory, and who owns what.");
  LaunchOptions launch_options;
  CLI::App& launch_command = *app.add_subcommand(
      "launch", "Run a program as several processes: sherd launch -n N PROGRAM [ARGS...].");
  add_launch_flags(launch_command, launch_options);
  add_train_flags(train_command, train_options);
  add_sample_flags(sample_command, sample_options);
  add_inspect_flags(inspect_command, inspect_options);
  add_bench_flags(bench_command, bench_options);
  add_report_flags(report_command, report_options);
  const int dashes = launch_dashes(argc, argv);
  try {
    app.parse(dashes, argv);
  } catch (const CLI::Success& help) {
    const int code = app.exit(help);
    std::cout.flush();
    check<FileError>(std::cout.good(), "output: it cannot be written");
    flush_output();
    return code;
  } catch (const CLI::ParseError& error) {
    const std::string text = error.what();
    fail<ValueError>(
        "{} (sherd --help, and --help after train, sample, inspect, bench, report or launch, list the flags)",
        text.substr(0, text.find('\n')));
  }
  if (launch_command.parsed()) {
    launch_options.command = launch_command.remaining();
    if (dashes < argc) launch_options.command.assign(argv + dashes + 1, argv + argc);
    return launch(launch_options);
  }
  note_given(train_command, train_options);
  if (train_command.parsed()) run_train(train_options);
  if (sample_command.parsed()) run_sample(sample_options);
  if (inspect_command.parsed()) run_inspect(inspect_options);
  if (bench_command.count("--dtype") > 0) bench_options.sizes.given.emplace("param-dtype");
  if (report_command.parsed()) run_report(report_options);
  if (bench_command.count("--ranks") > 0) bench_options.sizes.given.emplace("ranks");
  if (bench_command.parsed()) run_bench(bench_options);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  reserve_standard_streams();
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    complain("out of memory");
  } catch (const std::exception& error) {
    complain(error.what());
  }
  return 1;
}
