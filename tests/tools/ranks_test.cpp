// `sherd train` on several ranks: the same run as on one, whatever is shared and however it is cut.
#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/sanitizer.h"
#include "tests/tools/command.h"
#include "tests/tools/programs.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using tools::TrainOptions;
using How = Stopper::How;

namespace {

/// How a run lies on its ranks.
struct Way {
  std::string strategy, layout, reshard = "true";
  std::string name() const { return strategy + " " + layout + " " + reshard; }
};

const Way data_parallel = {"data_parallel", "flat"};

std::vector<Way> ways(int ranks) {
  std::vector<Way> all = {data_parallel};
  for (const std::string layout : {"flat", "per-parameter"}) {
    for (const std::string strategy : {"full_shard", "shard_grad_op", "zero1", "no_shard"})
      all.push_back({strategy, layout});
    all.push_back({"full_shard", layout, "false"});
    if (ranks == 4) all.push_back({"full_shard", layout, "2"});
  }
  return all;
}

/// A model whose rows divide by no number of ranks.
TrainOptions options_of(const Runs& runs, const std::string& out, int ranks, const Way& way,
                        std::int64_t steps = 10) {
  TrainOptions options = runs.options(out);
  options.layers = 2;
  options.heads = 2;
  options.width = 14;
  options.context = 13;
  options.batch = 8;
  options.dropout = 0;
  options.steps = steps;
  options.eval_every = 4;
  options.lr = 1e-2;
  options.min_lr = 1e-3;
  options.ranks = ranks;
  options.strategy = way.strategy;
  options.layout = way.layout;
  options.reshard = way.reshard;
  return options;
}

/// What has to be equal to the bit; config.json and the parts of states say how the run was laid out.
std::map<std::string, std::string> results(const Runs& runs, const std::string& out) {
  auto files = whole_contents(runs.folder / out);
  std::erase_if(files, [](const auto& file) { return file.first.ends_with("config.json"); });
  return files;
}

void check_close(const Runs& runs, const std::string& out, const std::string& to, double tolerance) {
  const auto lines = metrics(runs, out), expected = metrics(runs, to);
  REQUIRE(lines.size() == expected.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    for (const char* key : {"loss", "val_loss", "final_val_loss", "grad_norm"}) {
      REQUIRE(lines[i].contains(key) == expected[i].contains(key));
      if (lines[i].contains(key))
        CHECK(lines[i][key].get<double>() == Approx(expected[i][key].get<double>()).epsilon(tolerance));
    }
  }
}

/// Of fifty steps; measured at 2 and 4 ranks: below 1e-6.
constexpr double rounding = 5e-6;

}  // namespace

TEST_CASE("many steps of every strategy and layout have the bits of data parallel, halted or not",
          "[threads meet]") {
  const Runs runs;
  constexpr std::int64_t steps = thread_sanitizer ? 16 : 50;
  const TrainOptions one = options_of(runs, "one", 1, data_parallel, steps);
  REQUIRE(nn::Gpt(tools::model_options(one)).parameter_count() < 50000);
  runs.run(one);
  for (const int ranks : thread_sanitizer ? std::vector{2} : std::vector{2, 4}) {
    const std::string expected = fmt::format("{} data parallel", ranks);
    runs.run(options_of(runs, expected, ranks, data_parallel, steps));
    check_close(runs, expected, "one", rounding);
    for (const Way& way : ways(ranks)) {
      const std::string out = std::to_string(ranks) + " " + way.name();
      INFO(out);
      const TrainOptions options = options_of(runs, out, ranks, way, steps);
      CHECK(runs.interrupted(options, steps / 2, How::stop).step == steps);
      CHECK(results(runs, out) == results(runs, expected));
    }
    const auto lines = metrics(runs, expected);
    CHECK(lines.back()["final_val_loss"].get<double>() <
          (steps < 50 ? 1 : 0.8) * lines[0]["loss"].get<double>());
  }
}

TEST_CASE("thousands of steps of every strategy and layout have the bits of data parallel", "[.soak]") {
  const Runs runs;
  constexpr std::int64_t steps = 2000;
  for (const int ranks : {2, 3, 4}) {
    const auto options_on = [&](const std::string& out, const Way& way) {
      TrainOptions options = options_of(runs, out, ranks, way, steps);
      options.dropout = 0.1;
      options.eval_every = 250;
      options.batch = 12;
      return options;
    };
    const std::string expected = fmt::format("{} data parallel", ranks);
    runs.run(options_on(expected, data_parallel));
    for (const Way& way : ways(ranks)) {
      const std::string out = std::to_string(ranks) + " " + way.name();
      INFO(out);
      CHECK(runs.interrupted(options_on(out, way), steps / 3, How::kill).step == steps);
      CHECK(results(runs, out) == results(runs, expected));
    }
  }
}

TEST_CASE("a run on ranks that drops features is the same when it is not halted, stopped or killed",
          "[threads meet]") {
  const Runs runs;
  for (const Way& way : ways(2)) {
    TrainOptions options = options_of(runs, way.name(), 2, way);
    options.dropout = 0.1;
    runs.run(options);
    for (const How how : {How::stop, How::kill}) {
      const std::string out = way.name() + (how == How::stop ? " stopped" : " killed");
      INFO(out);
      options.out = (runs.folder / out).string();
      runs.interrupted(options, 5, how);
      CHECK(runs.left(out) == runs.left(way.name()));
    }
  }
}

TEST_CASE("processes that know of each other by torchrun's variables train to the bits of threads") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments sizes = {"train", "--data",    "text", "--layers",     "1",   "--heads",   "1", "--width",
                           "10",    "--context", "8",    "--dropout",    "0.1", "--threads", "1", "--batch",
                           "12",    "--steps",   "8",    "--eval-every", "4"};
  for (const int ranks : {2, 4})
    for (const std::string layout : {"flat", "per-parameter"}) {
      const std::string name = std::to_string(ranks) + layout;
      INFO(name);
      const auto train = [&](const std::string& out, const std::string& number, const Arguments& starter) {
        Command command(folder, with(sizes, {"--layout", layout, "--ranks", number, "--out", out}), {},
                        starter);
        const int code = command.wait();
        INFO(command.out() << command.err());
        REQUIRE(code == 0);
      };
      train(name + "threads", std::to_string(ranks), {});
      train(name + "processes", "0", {built::starter, "-n", std::to_string(ranks)});
      CHECK(contents(folder / (name + "processes")) == contents(folder / (name + "threads")));
    }
}

TEST_CASE("one fault of one process is at most a line a process, which names its rank and what it met") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments train = {"train", "--data",    "text", "--layers",  "1", "--heads",
                           "1",     "--width",   "32",   "--context", "8", "--batch",
                           "3",     "--threads", "1",    "--steps",   "2", "--out"};
  const auto said = [&](const std::string& deed, const Arguments& arguments) {
    const std::string script = deed + "; exec \"$0\" \"$@\" $MORE";
    Command run(folder, arguments, {}, {built::starter, "-n", "3", "sh", "-c", script});
    CHECK(run.wait() == 1);
    INFO(run.err());
    std::istringstream err(run.err());
    std::vector<std::string> lines;
    for (std::string line; std::getline(err, line);) lines.push_back(line);
    CHECK(lines.size() == 3);
    return lines;
  };
  for (const int culprit : {0, 1, 2}) {
    const std::string is_culprit = fmt::format("[ $RANK = {} ] && ", culprit);
    const std::string out = fmt::format("full-{}", culprit);
    for (const std::string& line : said(is_culprit + "{ trap '' XFSZ; ulimit -f 8; }", with(train, {out}))) {
      CHECK_THAT(line, ContainsSubstring(fmt::format("sherd: rank {}: write: '{}/step-0", culprit, out)));
      CHECK_THAT(line, ContainsSubstring("File too large"));
    }
    // One that goes on among those that begin, and the other way round.
    for (const std::string& flag : {is_culprit + "MORE=--resume", "MORE=--resume; " + is_culprit + "MORE="})
      for (const std::string& line : said(flag, with(train, {"mixed"}))) {
        CHECK_THAT(line, ContainsSubstring(fmt::format("--resume: rank ")));
        CHECK_THAT(line, ContainsSubstring(fmt::format("rank {} with", culprit)) ||
                             ContainsSubstring(fmt::format("rank {} was started with it", culprit)));
      }
  }
  CHECK_FALSE(std::filesystem::exists(folder / "mixed"));
}

TEST_CASE("a checkpoint goes on on any other ranks, in any other layout") {
  const Runs runs;
  const Way flat = {"full_shard", "flat"}, rows = {"zero1", "per-parameter"};
  const std::pair<int, Way> places[] = {{1, data_parallel}, {2, flat}, {2, rows},
                                        {4, flat},          {4, rows}, {2, data_parallel}};
  runs.run(options_of(runs, "one", 1, data_parallel));
  runs.run(options_of(runs, "two", 2, flat));
  for (const auto& [from_ranks, from] : places) {
    for (const auto& [ranks, way] : places) {
      const std::string out = fmt::format("{} {} to {} {}", from_ranks, from.name(), ranks, way.name());
      INFO(out);
      Stopper stop(5, How::stop);
      CHECK(tools::train(options_of(runs, out, from_ranks, from), posix_file_system(), stop).step == 5);
      TrainOptions options = options_of(runs, out, ranks, way);
      options.resume = true;
      options.given = {"ranks", "strategy", "layout"};
      CHECK(runs.run(options).step == 10);
      check_close(runs, out, "one", rounding);
      if (from_ranks == 2 && ranks == 2) CHECK(results(runs, out) == results(runs, "two"));
      const auto config = tools::read_config(tools::checkpoint_path(options.out, 10), posix_file_system());
      CHECK(config.options.ranks == ranks);
      CHECK(std::ranges::count(config.changes, "ranks", &tools::Change::name) == (from_ranks != ranks));
    }
  }
}

TEST_CASE("a part that is missing, cut or of another step is named, and nothing goes on from it") {
  const Runs runs;
  TrainOptions options = options_of(runs, "run", 3, {"full_shard", "flat"});
  options.batch = 9;
  options.keep = 2;
  runs.run(options);
  options.resume = true;
  const std::filesystem::path checkpoint = tools::checkpoint_path(options.out, 10),
                              other = tools::checkpoint_path(options.out, 8);
  const auto before = runs.left("run");
  const auto refused = [&](const std::string& name) {
    const std::string message = message_of<Error>([&] { runs.run(options); });
    INFO(message);
    CHECK_THAT(message, ContainsSubstring((checkpoint / name).string()));
    CHECK(message.find('\n') == std::string::npos);
    if (name.starts_with("optimizer")) return;
    nn::Gpt model(tools::model_options(options));
    CHECK_THAT(message_of<Error>([&] { tools::load_model(checkpoint, model, posix_file_system()); }),
               ContainsSubstring((checkpoint / name).string()));
  };
  for (const std::string what : {"model", "optimizer"})
    for (int rank = 0; rank < 3; ++rank) {
      const std::string name = shard::part_name(what, rank, 3);
      const std::string whole = before.at("step-10/" + name);
      write_file(checkpoint / name, whole.substr(0, whole.size() - 1));
      refused(name);
      write_file(checkpoint / name, before.at("step-8/" + name));
      refused(name);
      std::filesystem::remove(checkpoint / name);
      refused(name);
      write_file(checkpoint / name, whole);
    }
  CHECK(runs.left("run") == before);
  // Whoever changes one on purpose takes the checksums from all.
  unseal(checkpoint / shard::part_name("model", 1, 3));
  refused(shard::part_name("model", 1, 3));
  write_file(checkpoint / shard::part_name("model", 1, 3), before.at("step-10/model.rank-1.safetensors"));
  unseal_all(checkpoint);
  CHECK(runs.run(options).step == 10);
}

TEST_CASE("a resumed run keeps its ranks unless others are asked for") {
  const Runs runs;
  TrainOptions options = options_of(runs, "run", 2, {"full_shard", "flat"});
  Stopper stop(3, How::stop);
  tools::train(options, posix_file_system(), stop);
  TrainOptions again = runs.options("run");
  again.resume = true;
  CHECK(again.ranks == 1);
  CHECK(runs.run(again).step == 10);
  const auto config = tools::read_config(tools::checkpoint_path(again.out, 10), posix_file_system());
  CHECK(config.options.ranks == 2);
  CHECK(config.options.layout == "flat");
  CHECK(config.changes.empty());
}

TEST_CASE("in lower precision every layout still trains alike, near f32, and resumes to the bit") {
  const Runs runs;
  runs.run(options_of(runs, "f32", 2, data_parallel));
  for (const auto& [param, reduce] :
       {std::pair("bf16", "f32"), std::pair("bf16", "bf16"), std::pair("f32", "bf16")}) {
    std::string expected;
    for (const Way& way : ways(2)) {
      if (way.strategy == "data_parallel") continue;  // it refuses: see the options' tests
      const std::string out = fmt::format("{} {} {}", param, reduce, way.name());
      INFO(out);
      TrainOptions options = options_of(runs, out, 2, way);
      options.param_dtype = param;
      options.reduce_dtype = reduce;
      runs.interrupted(options, 5, How::stop);
      if (expected.empty()) {
        expected = out + " whole";
        options.out = (runs.folder / expected).string();
        runs.run(options);
      }
      CHECK(results(runs, out) == results(runs, expected));
    }
    check_close(runs, expected, "f32", 0.2);
    CHECK(results(runs, expected) != results(runs, "f32"));
  }
}

TEST_CASE("one rank in lower precision trains too") {
  const Runs runs;
  TrainOptions options = options_of(runs, "run", 1, {"full_shard", "flat"});
  options.param_dtype = "bf16";
  const tools::TrainResult result = runs.run(options);
  CHECK(std::isfinite(result.loss));
  CHECK(result.loss < metrics(runs, "run")[0]["loss"].get<double>());
}

TEST_CASE("ranks drop different features of the same data", "[threads meet]") {
  const Runs runs;
  write_file(runs.folder / "text", std::string(2000, 'a'));  // every window is like every other
  for (const double dropout : {0.0, 0.3}) {
    TrainOptions options = runs.options("");
    options.dropout = dropout;
    options.steps = 1;
    double losses[2];
    for (const int ranks : {1, 2}) {
      options.out = (runs.folder / fmt::format("{} {}", dropout, ranks)).string();
      options.ranks = options.batch = ranks;  // a window a rank
      losses[ranks - 1] = runs.run(options).loss;
    }
    CHECK((losses[0] == losses[1]) == (dropout == 0));
  }
}

TEST_CASE("micro-batches on ranks add up to the batch", "[threads meet]") {
  const Runs runs;
  runs.run(options_of(runs, "whole", 2, data_parallel));
  for (const Way& way : ways(2)) {
    for (const std::int64_t micro : {1, 3, 8}) {
      const std::string out = fmt::format("{} {}", way.name(), micro);
      INFO(out);
      TrainOptions options = options_of(runs, out, 2, way);
      options.micro_batch = micro;
      runs.run(options);
      check_close(runs, out, "whole", 1e-4);
      if (micro >= 4) CHECK(results(runs, out) == results(runs, "whole"));
    }
  }
}

TEST_CASE("a loss that is not finite ends all ranks with the step's number", "[threads meet]") {
  const Runs runs;
  TrainOptions options = options_of(runs, "run", 2, {"full_shard", "flat"});
  options.lr = options.min_lr = 1e9;
  options.warmup = 0;
  options.clip = 0;
  options.steps = 1000;
  CHECK_THAT(message_of<StateError>([&] { runs.run(options); }), ContainsSubstring(" at step "));
}

TEST_CASE("a checkpoint of before there were ranks goes on") {
  const Runs runs;
  TrainOptions options = runs.options("run");
  Stopper stop(2, How::stop);
  tools::train(options, posix_file_system(), stop);
  const auto path = tools::checkpoint_path(options.out, 2) / "config.json";
  unseal_all(path.parent_path());
  auto config = nlohmann::json::parse(posix_file_system().read(path));
  tools::visit_rank_settings(options, [&](const tools::Setting& setting, auto&) {
    CHECK(config["settings"].erase(std::string(setting.name)) == 1);
  });
  write_file(path, config.dump());
  options.resume = true;
  CHECK(runs.run(options).step == 6);
}
