// The program `sherd`: reads the command line and hands over.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/processor.h"
#include "runtime/shown.h"
#include "tools/bench.h"
#include "tools/inspect.h"
#include "tools/interrupt.h"
#include "tools/last_words.h"
#include "tools/launch.h"
#include "tools/log_lines.h"
#include "tools/merge.h"
#include "tools/number.h"
#include "tools/predict.h"
#include "tools/progress.h"
#include "tools/report.h"
#include "tools/sample.h"
#include "tools/train.h"
#include "tools/write_text.h"
#include "tools/wrong_words.h"

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
  const std::string standard = fmt::format("{}", value);
  add_value(app, fmt::format("--{}", name), value,
            help(name, what, standard.empty() ? "none" : standard, example));
}

void add_trace_flag(CLI::App& app, std::string& trace) {
  app.add_option("--trace", trace,
                 help("trace", "file for a trace in Chrome's format (ui.perfetto.dev), which is replaced",
                      "none", "trace.json"));
}

void add_train_flags(CLI::App& app, TrainOptions& options) {
  app.add_option(
      "--data", options.data,
      help("data",
           "text files or folders, with --model of lines of JSON too; the last tenth of every file is "
           "for validation",
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

/// The folder of a model of Hugging Face's format, and how it is run.
void add_pretrained_flags(CLI::App& app, PretrainedChoice& model) {
  app.add_option("FOLDER", model.folder,
                 "folder in Hugging Face's format, with its tokenizer [e.g. TinyLlama-1.1B]")
      ->required();
  add_setting(app, "device", model.device, "where it is computed: cpu, or cuda for this machine's first GPU",
              "cuda");
  add_value(app, "--dtype", model.dtype,
            help("dtype", "dtype of its numbers: f32, bf16 or f16", "that of config.json", "bf16"));
}

void add_generate_flags(CLI::App& app, WriteOptions& o) {
  add_pretrained_flags(app, o.model);
  app.add_option(
         "--prompt", o.prompts,
         "text to continue; as often as there are texts, which are continued together [it must be given; "
         "e.g. --prompt \"Once upon\"]")
      ->required()
      ->allow_extra_args(false);
  add_setting(app, "tokens", o.tokens, "tokens to generate behind each, at most", "500");
  add_setting(app, "temperature", o.temperature,
              "divides the logits: below 1 bolder, 0 always the likeliest token", "0.7");
  add_setting(app, "top-k", o.top_k, "tokens to draw from, the likeliest; 0 takes all", "40");
  add_setting(app, "top-p", o.top_p, "draws from the fewest tokens that are together so likely", "0.9");
  add_setting(app, "seed", o.seed, "seed of the draws, a whole number from 0", "42");
  app.add_option(
         "--stop", o.stop,
         "a text before which a continuation ends, as often as needed [default none; e.g. --stop User:]")
      ->allow_extra_args(false);
  add_setting(app, "beams", o.beams, "sequences of a beam search, which draws nothing; 1 for none", "4");
}

void add_evaluate_flags(CLI::App& app, PredictOptions& o) {
  add_pretrained_flags(app, o.model);
  app.add_option("--data", o.data,
                 "text files, each a text of its own [it must be given; e.g. --data book.txt]")
      ->required();
  add_value(app, "--context", o.context,
            help("context", "tokens of a window", "the model's, up to 2048", "1024"));
  add_value(
      app, "--stride", o.stride,
      help("stride", "tokens from the beginning of a window to that of the next", "half the context", "256"));
}

void add_report_flags(CLI::App& app, ReportOptions& options) {
  app.add_option("RUN", options.runs,
                 "folders of runs, whose curves lie over each other [e.g. runs/1 runs/2]")
      ->required();
  app.add_option(
      "--out", options.out,
      help("out", "file for the page, which is replaced", "report.html in the first folder", "report.html"));
}

void add_group_flag(CLI::App& app, std::optional<int>& group) {
  app.add_option_function<std::string>(
      "--group", [&group](const std::string& text) { group = number_from<int>("--group", text); },
      help("group", "of what groups of ranks in a mesh saved each: the number of one, from 0", "none", "1"));
}

void add_merge_flags(CLI::App& app, MergeOptions& options) {
  app.add_option("CHECKPOINT", options.checkpoint,
                 "folder of a checkpoint, or of a run: then its newest checkpoint [e.g. runs/1]")
      ->required();
  app.add_option("--part", options.part,
                 help("part", "what of it: model, optimizer, or another part that it has files of", "model",
                      "optimizer"));
  app.add_option("--out", options.out,
                 help("out", "file for the tensors, which is replaced, or with --pretrained a new folder",
                      "PART.safetensors, pretrained", "tensors.safetensors"));
  app.add_flag("--pretrained", options.pretrained,
               "write a folder in Hugging Face's format, config.json and files of safetensors [default: one "
               "file with the model's own names; e.g. --pretrained --out mine]");
  add_value(app, "--config-from", options.config_from,
            help("config-from", "with --pretrained: folder with the config.json of such a model",
                 "what sherd train recorded", "TinyLlama-1.1B"));
  add_setting(app, "max-shard-size", options.max_shard_size,
              "with --pretrained: bytes of tensors in one file", "1000000000");
  add_group_flag(app, options.group);
}

void add_split_flags(CLI::App& app, SplitOptions& options) {
  app.add_option(
         "FROM", options.from,
         "folder in Hugging Face's format, file of whole tensors, or checkpoint [e.g. TinyLlama-1.1B]")
      ->required();
  add_value(app, "--ranks", options.ranks,
            "ranks that the checkpoint is to be of; any number loads it [it must be given; e.g. --ranks 4]")
      ->required();
  add_value(app, "--out", options.out,
            "folder for the checkpoint, which is not there yet [it must be given; e.g. --out step-0]")
      ->required();
  add_group_flag(app, options.group);
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

/// Where the program begins that `sherd launch` starts, or two dashes before it; else `argc`.
int program_begin(int argc, char** argv) {
  int at = 2;
  if (argc < 2 || std::string_view(argv[1]) != "launch") return argc;
  for (std::string_view word; at < argc && (word = argv[at]).starts_with('-') && word != "--"; ++at)
    if (word == "-n" || (word.starts_with("--") && word.find('=') == word.npos)) ++at;  // its value
  return std::min(at, argc);
}

/// Where `sherd launch FLAGS -- PROGRAM` has its two dashes, else `argc`. What follows is not for CLI11,
/// which knows them only before words of its own.
int launch_dashes(int argc, char** argv) {
  const int at = program_begin(argc, argv);
  return at < argc && std::string_view(argv[at]) == "--" ? at : argc;
}

/// The words behind the program's name, for CLI11: where nothing stands behind a flag's '=' it would take the
/// next word for the value, so that the nothing becomes a word.
std::vector<std::string> words_for_parser(int argc, char** argv) {
  const int own = program_begin(argc, argv), end = launch_dashes(argc, argv);
  std::vector<std::string> words;
  for (int i = 1; i < end; ++i) {
    words.emplace_back(argv[i]);
    if (i >= own || !words.back().starts_with("--") || !words.back().ends_with('=')) continue;
    words.back().pop_back();
    words.emplace_back();
  }
  return words;
}

/// The settings that stand on the command line.
void note_given(const CLI::App& app, TrainOptions& options) {
  visit_settings(options, [&](const Setting& setting, auto&) {
    const CLI::Option* option = app.get_option_no_throw(fmt::format("--{}", setting.name));
    if (option != nullptr && option->count() > 0) options.given.emplace(setting.name);
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

int print_whole(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  flush_output();
  return 0;
}

int run_train(const TrainOptions& options) {
  ignore_output_signals();
  Progress progress(stdout);
  try {
    train(options, posix_file_system(), progress);
  } catch (...) {
    progress.end_line();
    throw;
  }
  flush_output();
  return 0;
}

int run_sample(const SampleOptions& options) {
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
  return 0;
}

int run_generate(const WriteOptions& options) {
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  write_texts(options, posix_file_system(), [&](std::string_view text) {
    const std::string shown = terminal ? without_controls(std::string(text)) : std::string(text);
    std::fwrite(shown.data(), 1, shown.size(), stdout);
    std::fflush(stdout);
  });
  flush_output();
  return 0;
}

/// A command, what its line has to be like and what runs it.
struct Command {
  CLI::App* parser;
  std::string example;
  std::function<int()> run;
};

CommandWords words_of(const Command& command) {
  CommandWords words{command.parser->get_name(), command.example, {}};
  for (const CLI::Option* option : command.parser->get_options()) {
    for (const std::string& name : option->get_lnames()) words.flags.push_back("--" + name);
    for (const std::string& name : option->get_snames()) words.flags.push_back("-" + name);
  }
  return words;
}

std::vector<CommandWords> words_of(const std::vector<Command>& commands) {
  std::vector<CommandWords> words;
  for (const Command& command : commands) words.push_back(words_of(command));
  return words;
}

/// The first word that is neither a flag nor a value, or "". Behind `launch` a program stands, with what is
/// its own; `dashes` says that it stood behind two dashes.
std::string stray_word(const CLI::App& parser, bool dashes) {
  std::vector<std::string> words = parser.remaining();
  std::erase(words, "--");
  const bool program = parser.get_prefix_command() && !dashes;
  return words.empty() || (program && !words[0].starts_with('-')) ? "" : words[0];
}

/// CLI11 counts words and types.
std::string in_words(const std::string& text) {
  const std::string flag = text.substr(0, text.find(':'));
  if (text.ends_with(" missing")) return flag + " stands without its value";
  if (text.find("At Most 1 required") != std::string::npos) return flag + " stands there more than once";
  return text.substr(0, text.find('\n'));
}

[[noreturn]] void explain(const CLI::ParseError& error, const Command& command) {
  const std::string name = command.parser->get_name();
  const std::vector<std::string> program = command.parser->remaining();
  fail<ValueError>("{}: {}{}; for example {} (sherd {} --help lists its flags)", name, in_words(error.what()),
                   program.empty() ? "" : fmt::format(" before the program '{}'", shown(program[0])),
                   command.example, name);
}

/// A value that is empty is a variable of a shell that was not set, but for a text to continue.
void refuse_empty_values(const Command& command) {
  for (const CLI::Option* option : command.parser->get_options())
    check<ValueError>(
        option->check_lname("prompt") || std::ranges::find(option->results(), "") == option->results().end(),
        "{}: {} stands there with an empty value; leave it out or name something, for example {} "
        "(sherd {} --help lists its flags)",
        command.parser->get_name(), option->get_name(), command.example, command.parser->get_name());
}

/// The command line behind the program's name: `words`, without what follows `sherd launch`'s two dashes.
int run_command(const Command& command, const std::vector<Command>& all, std::vector<std::string> words,
                bool dashes) {
  const auto refuse_stray = [&] {
    const std::string stray = stray_word(*command.parser, dashes);
    check<ValueError>(stray.empty(), "{}", unknown_word(stray, words_of(command), words_of(all)));
  };
  try {
    // Alone, so that other commands' names are words like others; CLI11 takes them from the back.
    words.erase(words.begin());
    std::ranges::reverse(words);
    command.parser->parse(std::move(words));
  } catch (const CLI::Success&) {
    return print_whole(command.parser->help("sherd"));
  } catch (const CLI::ParseError& error) {
    refuse_stray();
    explain(error, command);
  }
  refuse_stray();
  refuse_empty_values(command);
  return command.run();
}

int run(int argc, char** argv) {
  check_processor();
  if (argc > 3 && std::string_view(argv[1]) == keeper_command)
    return keep_rank(argv[2], std::span(argv + 3, static_cast<std::size_t>(argc - 2)));
  show_log();
  CLI::App app("Trains a byte-level GPT and writes text with it, or with a model of Hugging Face's.",
               "sherd");
  app.require_subcommand(1);
  app.set_version_flag("--version", "sherd " SHERD_VERSION, "Print the version and exit");
  TrainOptions train_options;
  SampleOptions sample_options;
  WriteOptions generate_options;
  PredictOptions evaluate_options;
  InspectOptions inspect_options;
  BenchOptions bench_options;
  ReportOptions report_options;
  MergeOptions merge_options;
  SplitOptions split_options;
  LaunchOptions launch_options;
  CLI::App& train_command =
      *app.add_subcommand("train", "Train a GPT on text, or tune a model of the Hub; resumable to the bit.");
  CLI::App& sample_command = *app.add_subcommand("sample", "Continue a text with a trained model.");
  CLI::App& generate_command =
      *app.add_subcommand("generate", "Continue texts with a model of Hugging Face's format.");
  CLI::App& evaluate_command = *app.add_subcommand(
      "evaluate", "Say how well a model of Hugging Face's format predicts a text: its perplexity.");
  CLI::App& inspect_command = *app.add_subcommand(
      "inspect", "Show which rank owns which span of which parameter, as a table and a drawing.");
  CLI::App& bench_command = *app.add_subcommand(
      "bench", "Time training steps of a GPT: tokens/s, MFU and memory, also against an earlier report.");
  CLI::App& report_command = *app.add_subcommand(
      "report", "Draw a run, or several, as a page: loss, rate, speed, memory, and who owns what.");
  CLI::App& merge_command = *app.add_subcommand(
      "merge", "Write what the ranks of a checkpoint saved as one file, or in Hugging Face's format.");
  CLI::App& split_command = *app.add_subcommand(
      "split", "Write a file of whole tensors, or a folder of Hugging Face's, as a checkpoint of ranks.");
  CLI::App& launch_command = *app.add_subcommand(
      "launch", "Run a program as several processes: sherd launch -n N PROGRAM [ARGS...].");
  add_train_flags(train_command, train_options);
  add_sample_flags(sample_command, sample_options);
  add_generate_flags(generate_command, generate_options);
  add_evaluate_flags(evaluate_command, evaluate_options);
  add_inspect_flags(inspect_command, inspect_options);
  add_bench_flags(bench_command, bench_options);
  add_report_flags(report_command, report_options);
  add_merge_flags(merge_command, merge_options);
  add_split_flags(split_command, split_options);
  add_launch_flags(launch_command, launch_options);
  const int dashes = launch_dashes(argc, argv);
  const std::vector<Command> commands = {
      {&train_command, "sherd train --data book.txt",
       [&] {
         note_given(train_command, train_options);
         return run_train(train_options);
       }},
      {&sample_command, "sherd sample --checkpoint runs/1", [&] { return run_sample(sample_options); }},
      {&generate_command, "sherd generate TinyLlama-1.1B --prompt \"Once upon\"",
       [&] { return run_generate(generate_options); }},
      {&evaluate_command, "sherd evaluate TinyLlama-1.1B --data book.txt",
       [&] { return print_whole(predict(evaluate_options, posix_file_system())); }},
      {&inspect_command, "sherd inspect --ranks 4",
       [&] { return print_whole(inspect(inspect_options, posix_file_system())); }},
      {&bench_command, "sherd bench --steps 50",
       [&] {
         note_given(bench_command, bench_options.sizes);
         return print_whole(bench(bench_options, posix_file_system()));
       }},
      {&report_command, "sherd report runs/1",
       [&] { return print_whole(report(report_options, posix_file_system())); }},
      {&merge_command, "sherd merge runs/1",
       [&] { return print_whole(merge(merge_options, posix_file_system())); }},
      {&split_command, "sherd split model.safetensors --ranks 4 --out step-0",
       [&] { return print_whole(split(split_options, posix_file_system())); }},
      {&launch_command, "sherd launch -n 4 PROGRAM [ARGS...]", [&] {
         launch_options.command = launch_command.remaining();
         if (dashes < argc) launch_options.command.assign(argv + dashes + 1, argv + argc);
         return launch(launch_options);
       }}};
  const std::string first = argc > 1 ? argv[1] : "";
  for (const Command& command : commands)
    if (command.parser->get_name() == first)
      return run_command(command, commands, words_for_parser(argc, argv), dashes < argc);
  if (first == "-h" || first == "--help") return print_whole(app.help());
  if (first == "--version") return print_whole("sherd " SHERD_VERSION "\n");
  fail<ValueError>("{}", unknown_command(first, words_of(commands)));
}

}  // namespace

int main(int argc, char** argv) {
  reserve_standard_streams();
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    const LastWords words = last_words(error);
    if (!leave_to_launcher(words)) complain(own_line(words));
  }
  return 1;
}
