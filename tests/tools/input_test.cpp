#include <functional>

#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/temp_directory.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"
#include "tools/sample.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using tools::TrainOptions;

namespace {

struct Silent final : tools::Reporter {};

/// The one line that `train` ends with.
std::string complaint(const TrainOptions& options) {
  Silent reporter;
  const std::string message =
      message_of<Error>([&] { tools::train(options, posix_file_system(), reporter); });
  CHECK(message.find('\n') == std::string::npos);
  return message;
}

struct BadOptions {
  std::string part_of_message;
  std::function<void(TrainOptions&)> spoil;
};

const BadOptions bad_options[] = {
    {"--steps 0", [](TrainOptions& o) { o.steps = 0; }},
    {"--batch 0", [](TrainOptions& o) { o.batch = 0; }},
    {"--micro-batch -1", [](TrainOptions& o) { o.micro_batch = -1; }},
    {"--micro-batch 5", [](TrainOptions& o) { o.micro_batch = 5; }},
    {"--layers -3", [](TrainOptions& o) { o.layers = -3; }},
    {"--heads 3", [](TrainOptions& o) { o.heads = 3; }},
    {"--heads 0", [](TrainOptions& o) { o.heads = 0; }},
    {"--width 0", [](TrainOptions& o) { o.width = 0; }},
    {"--context 0", [](TrainOptions& o) { o.context = 0; }},
    {"--context 200", [](TrainOptions& o) { o.context = 200; }},
    {"--context 1073741824", [](TrainOptions& o) { o.context = 1 << 30; }},
    {"--dropout 1", [](TrainOptions& o) { o.dropout = 1; }},
    {"--dropout -0.5", [](TrainOptions& o) { o.dropout = -0.5; }},
    {"--lr 0", [](TrainOptions& o) { o.lr = o.min_lr = 0; }},
    {"--lr nan", [](TrainOptions& o) { o.lr = std::nan(""); }},
    {"--lr inf", [](TrainOptions& o) { o.lr = INFINITY; }},
    {"--min-lr 1", [](TrainOptions& o) { o.min_lr = 1; }},
    {"--warmup -1", [](TrainOptions& o) { o.warmup = -1; }},
    {"--beta2 1", [](TrainOptions& o) { o.beta2 = 1; }},
    {"--weight-decay -1", [](TrainOptions& o) { o.weight_decay = -1; }},
    {"--clip -1", [](TrainOptions& o) { o.clip = -1; }},
    {"--eval-every 0", [](TrainOptions& o) { o.eval_every = 0; }},
    {"--keep 0", [](TrainOptions& o) { o.keep = 0; }},
    {"--threads -1", [](TrainOptions& o) { o.threads = -1; }},
    {"--ranks -1", [](TrainOptions& o) { o.ranks = -1; }},
    {"--ranks 5000", [](TrainOptions& o) { o.ranks = 5000; }},
    {"--ranks 3: does not divide --batch 4", [](TrainOptions& o) { o.ranks = 3; }},
    {"--ranks 8: does not divide --batch 4", [](TrainOptions& o) { o.ranks = 8; }},
    {"--strategy fast: takes full_shard|shard_grad_op|zero1|no_shard|data_parallel",
     [](TrainOptions& o) { o.strategy = "fast"; }},
    {"--strategy : takes", [](TrainOptions& o) { o.strategy = ""; }},
    {"--layout rows: takes flat|per-parameter", [](TrainOptions& o) { o.layout = "rows"; }},
    {"--param-dtype f64", [](TrainOptions& o) { o.param_dtype = "f64"; }},
    {"--reduce-dtype i8", [](TrainOptions& o) { o.reduce_dtype = "i8"; }},
    {"--reshard maybe: takes true, false or a number", [](TrainOptions& o) { o.reshard = "maybe"; }},
    {"--reshard 0", [](TrainOptions& o) { o.reshard = "0"; }},
    {"--reshard 2x", [](TrainOptions& o) { o.reshard = "2x"; }},
    {"--reshard 2: does not divide --ranks 1", [](TrainOptions& o) { o.reshard = "2"; }},
    {"--reshard 3: does not divide --ranks 2",
     [](TrainOptions& o) {
       o.ranks = 2;
       o.reshard = "3";
     }},
    {"--reshard false: is of --strategy full_shard",
     [](TrainOptions& o) {
       o.strategy = "zero1";
       o.reshard = "false";
     }},
    {"--reshard true: is of --strategy full_shard; zero1 has its own rule, leave --reshard out",
     [](TrainOptions& o) {
       o.strategy = "zero1";
       o.given = {"strategy", "reshard"};
     }},
    {"--strategy data_parallel: computes and averages in f32",
     [](TrainOptions& o) {
       o.strategy = "data_parallel";
       o.reduce_dtype = "bf16";
     }},
    {"--device gpu: takes cpu|cuda", [](TrainOptions& o) { o.device = "gpu"; }},
    {"no-such-file", [](TrainOptions& o) { o.data = {"no-such-file"}; }},
    {"is empty", [](TrainOptions& o) { write_file(o.data[0], ""); }},
    {"--context 8", [](TrainOptions& o) { write_file(o.data[0], "some bytes"); }},
    {"holds no text",
     [](TrainOptions& o) {
       std::filesystem::create_directory(o.out);
       o.data = {o.out};
     }},
    {"Not a directory", [](TrainOptions& o) { o.out = o.data[0]; }},
    {"Not a directory", [](TrainOptions& o) { o.out = o.data[0] + "/run"; }},
};

/// A finished run to spoil.
struct Finished {
  TempDirectory folder;
  TrainOptions options;
  std::filesystem::path checkpoint;

  Finished() {
    write_file(folder / "text", small_text());
    options = small_options(folder / "text", folder / "run");
    Silent reporter;
    tools::train(options, posix_file_system(), reporter);
    options.resume = true;
    checkpoint = folder / "run" / "step-6";
  }
  std::string sample_complaint(const std::filesystem::path& path) const {
    const auto sample = [&] {
      tools::sample({.checkpoint = path.string()}, posix_file_system(), [](char) {});
    };
    const std::string message = message_of<Error>(sample);
    CHECK(message.find('\n') == std::string::npos);
    return message;
  }
};

}  // namespace

TEST_CASE("bad options and data are refused in one line, before anything is written") {
  for (const BadOptions& bad : bad_options) {
    const TempDirectory folder;
    write_file(folder / "text", small_text(1000));
    TrainOptions options = small_options(folder / "text", folder / "run");
    bad.spoil(options);
    INFO(bad.part_of_message);
    CHECK_THAT(complaint(options), ContainsSubstring(bad.part_of_message));
    CHECK_FALSE(std::filesystem::exists(folder / "run" / "metrics.jsonl"));
  }
}

TEST_CASE("a new run leaves an older one alone") {
  Finished run;
  const auto before = contents(run.options.out);
  run.options.resume = false;
  CHECK_THAT(complaint(run.options), ContainsSubstring("--resume"));
  CHECK(contents(run.options.out) == before);
}

TEST_CASE("there must be something to resume") {
  Finished run;
  run.options.out = (run.folder / "nowhere").string();
  CHECK_THAT(complaint(run.options), ContainsSubstring("there is no folder"));
  std::filesystem::create_directory(run.options.out);
  CHECK_THAT(complaint(run.options), ContainsSubstring("holds no checkpoint"));
}

TEST_CASE("a checkpoint that was cut short is refused by the name of its file, and nothing is lost") {
  for (const std::string name : {"model.safetensors", "optimizer.safetensors", "config.json"}) {
    for (const double part : {0.0, 0.01, 0.5, 0.99}) {
      const Finished run;
      const auto path = run.checkpoint / name;
      std::filesystem::resize_file(
          path, static_cast<std::uintmax_t>(static_cast<double>(std::filesystem::file_size(path)) * part));
      const auto before = contents(run.options.out);
      INFO(name << " cut to " << part);
      CHECK_THAT(complaint(run.options), ContainsSubstring(name));
      if (name != "optimizer.safetensors")
        CHECK_THAT(run.sample_complaint(run.checkpoint), ContainsSubstring(name));
      CHECK(contents(run.options.out) == before);
    }
    const Finished run;
    std::filesystem::remove(run.checkpoint / name);
    CHECK_THAT(complaint(run.options), ContainsSubstring(name));
  }
}

TEST_CASE("a checkpoint of another shape is refused") {
  const Finished run;
  TrainOptions wide = small_options(run.folder / "text", run.folder / "wide");
  wide.width = 16;
  Silent reporter;
  tools::train(wide, posix_file_system(), reporter);
  for (const std::string name : {"model.safetensors", "optimizer.safetensors"}) {
    const auto theirs = run.folder / "wide" / "step-6" / name;
    const std::string ours = posix_file_system().read(run.checkpoint / name);
    std::filesystem::copy_file(theirs, run.checkpoint / name,
                               std::filesystem::copy_options::overwrite_existing);
    CHECK_THAT(complaint(run.options), ContainsSubstring(name));
    write_file(run.checkpoint / name, ours);
  }
  CHECK(complaint(run.options) == "(nothing was thrown)");
}

TEST_CASE("a configuration with a field missing, mistyped or out of range is refused") {
  const Finished run;
  const auto path = run.checkpoint / "config.json";
  const std::string whole = posix_file_system().read(path);
  const std::pair<std::string, std::string> edits[] = {
      {"\"step\": 6", "\"step\": \"six\""}, {"\"width\": 8", "\"width\": 0"},
      {"\"heads\": 2", "\"hats\": 2"},      {"\"version\": 1", "\"version\": 99"},
      {"\"format\"", "\"form\""},           {"\"offset\"", "\"upset\""},
      {"\"width\": 8", "\"width\": 1e99"},  {"\"changes\": []", "\"changes\": [1]"},
  };
  for (const auto& [from, to] : edits) {
    INFO(from << " becomes " << to);
    std::string edited = whole;
    REQUIRE(edited.find(from) != std::string::npos);
    edited.replace(edited.rfind(from), from.size(), to);
    write_file(path, edited);
    CHECK_THAT(complaint(run.options), ContainsSubstring("config.json"));
  }
}

TEST_CASE("sampling finds the best checkpoint of a run, and says where there is none") {
  const Finished run;
  const auto best = tools::read_config(run.checkpoint, posix_file_system()).best;
  CHECK(tools::find_checkpoint(run.options.out, posix_file_system()) ==
        tools::checkpoint_path(run.options.out, best->step));
  CHECK(tools::find_checkpoint(run.checkpoint, posix_file_system()) == run.checkpoint);
  CHECK_THAT(run.sample_complaint(run.folder / "nowhere"), ContainsSubstring("no such folder"));
  CHECK_THAT(run.sample_complaint(run.folder.path()), ContainsSubstring("holds no checkpoint"));
}

TEST_CASE("a run that goes on by another strategy leaves behind what only the first one asks for") {
  for (const std::string strategy : {"zero1", "shard_grad_op", "no_shard", "data_parallel", "full_shard"})
    for (const std::string reshard : {"true", "false", "2"}) {
      INFO(strategy << " after --reshard " << reshard);
      TrainOptions saved, asked;
      saved.ranks = asked.ranks = 2;
      saved.reshard = reshard;
      asked.strategy = strategy;
      asked.given = {"ranks", "strategy"};
      std::vector<tools::Change> changes;
      const TrainOptions result = tools::resumed(asked, saved, 4, changes);
      CHECK(result.reshard == (strategy == "full_shard" ? reshard : "true"));
      const std::ptrdiff_t noted = std::ranges::count(changes, "reshard", &tools::Change::name);
      CHECK(noted == (result.reshard != reshard));
      CHECK_NOTHROW(tools::validate(result));
    }
}

TEST_CASE("ranks come from whatever launched the process, and --ranks may only repeat their number") {
  using Environment = std::vector<std::pair<const char*, const char*>>;
  const Environment launchers[] = {
      {{"OMPI_COMM_WORLD_RANK", "1"},
       {"OMPI_COMM_WORLD_SIZE", "4"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}},
      {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}},
      {{"SLURM_PROCID", "1"},
       {"SLURM_STEP_NUM_TASKS", "4"},
       {"SLURM_LOCALID", "1"},
       {"SLURM_STEP_TASKS_PER_NODE", "4"}}};
  const auto asking = [](std::optional<std::int64_t> ranks) {
    TrainOptions options;
    if (ranks) options.ranks = *ranks, options.given.insert("ranks");
    return options;
  };
  CHECK(tools::ranks_to_run(asking({})) == 1);
  CHECK(tools::ranks_to_run(asking(3)) == 3);
  for (const Environment& launcher : launchers) {
    INFO(launcher[0].first);
    for (const auto& [name, value] : launcher) REQUIRE(::setenv(name, value, 1) == 0);
    for (const auto& ranks : {std::optional<std::int64_t>(), std::optional<std::int64_t>(0), {4}})
      CHECK(tools::ranks_to_run(asking(ranks)) == 0);
    for (const std::int64_t ranks : {1, 3, 8})
      CHECK_THAT(message_of<ValueError>([&] { tools::ranks_to_run(asking(ranks)); }),
                 ContainsSubstring(fmt::format("--ranks {}: the launcher started 4 processes", ranks)));
    for (const auto& [name, value] : launcher) ::unsetenv(name);
  }
}
