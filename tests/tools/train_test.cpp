#include "tools/train.h"

#include <functional>

#include "runtime/context.h"
#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/counting_file_system.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"
#include "tools/sample.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using tools::TrainOptions;
using How = Stopper::How;

TEST_CASE("a run that is killed or stopped anywhere and resumed ends at the same bits") {
  const Runs runs;
  const tools::TrainResult whole = runs.run(runs.options("whole"));
  const auto expected = runs.left("whole");
  REQUIRE(expected.contains("step-6/model.safetensors"));
  for (const How how : {How::kill, How::stop}) {
    for (std::int64_t step = 1; step < 6; ++step) {
      const std::string out = (how == How::kill ? "killed-" : "stopped-") + std::to_string(step);
      INFO(out);
      const tools::TrainResult result = runs.interrupted(runs.options(out), step, how);
      CHECK(result.loss == whole.loss);
      CHECK(result.val_loss == whole.val_loss);
      CHECK(result.sample == whole.sample);
      CHECK(runs.left(out) == expected);
    }
  }
}

TEST_CASE(
    "a run in f16 scales its losses, skips what overflows, learns as one in f32 and is resumed to the bit") {
  const Runs runs;
  const auto options = [&](const std::string& out, const std::string& dtype) {
    TrainOptions o = runs.options(out);
    o.steps = 30;
    o.eval_every = 10;
    o.dropout = 0;
    o.param_dtype = dtype;
    return o;
  };
  const tools::TrainResult exact = runs.run(options("f32", "f32")), narrow = runs.run(options("f16", "f16"));
  CHECK(std::abs(*narrow.val_loss - *exact.val_loss) < 0.05);
  for (const auto& line : metrics(runs, "f16")) CHECK_FALSE(line.contains("skipped"));
  const auto config = nlohmann::json::parse(runs.left("f16").at("step-30/config.json"));
  CHECK(config.at("loss_scale") == nlohmann::json{{"scale", 65536.0}, {"steps", 30}});
  CHECK_FALSE(nlohmann::json::parse(runs.left("f32").at("step-30/config.json")).contains("loss_scale"));
  CHECK(runs.interrupted(options("stopped", "f16"), 17, How::stop).val_loss == narrow.val_loss);
  CHECK(runs.left("stopped") == runs.left("f16"));
}

TEST_CASE("a run whose number another takes at the last moment gets the next") {
  struct Rival final : CountingFileSystem {
    int left = 3;
    void create_directory(const Path& path) override {
      if (path.parent_path() == "runs" && left-- > 0) posix_file_system().create_directory(path);
      CountingFileSystem::create_directory(path);
    }
  };
  const Runs runs;
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(runs.folder.path());
  TrainOptions options = runs.options("");
  options.out.clear();
  Rival files;
  Stopper silent;
  CHECK(tools::train(options, files, silent).out == "runs/4");
  std::filesystem::current_path(here);
  CHECK(runs.left("runs").contains("4/step-6/model.safetensors"));
}

TEST_CASE(
    "what looks newer than the newest checkpoint and is none is named, and what is older is left alone") {
  const Runs runs;
  const TrainOptions options = runs.options("run");
  runs.run(options);
  const std::filesystem::path out = options.out, aside = runs.folder / "aside";
  TrainOptions resume = options;
  resume.resume = true;
  const auto link = [&](const std::filesystem::path& path) {
    std::filesystem::create_directory_symlink(out / "step-6", path);
  };
  const auto folder = [](const std::filesystem::path& path) { std::filesystem::create_directory(path); };
  const auto file = [](const std::filesystem::path& path) { write_file(path, "7"); };
  struct Oddity {
    std::string name, words;
    std::function<void(const std::filesystem::path&)> make;
  };
  const Oddity oddities[] = {{"step-7", "a symbolic link", link},
                             {"step-7", "no config.json", folder},
                             {"step-7", "a regular file", file},
                             {"step-007", "leading zeros", folder},
                             {"step-0000000000000000000009", "leading zeros", link},
                             {"step-99999999999999999999", "named", folder}};
  for (const Oddity& odd : oddities) {
    INFO(odd.name << ": " << odd.words);
    odd.make(out / odd.name);
    for (const std::string& message :
         {message_of<ValueError>([&] { runs.run(resume); }),
          message_of<ValueError>([&] { tools::find_checkpoint(out, posix_file_system()); })}) {
      CHECK_THAT(message,
                 ContainsSubstring((out / odd.name).string() + "' ") && ContainsSubstring(odd.words));
      CHECK(message.find('\n') == std::string::npos);
    }
    std::filesystem::remove(out / odd.name);
  }
  for (const Oddity& odd :
       {Oddity{"step-5", "", link}, Oddity{"step-4", "", folder}, Oddity{"step-006", "", folder},
        Oddity{"step-best", "", file}, Oddity{"step-", "", folder}, Oddity{"step-9-backup", "", link}}) {
    INFO(odd.name);
    odd.make(out / odd.name);
    CHECK(runs.run(resume).step == 6);
    CHECK(tools::find_checkpoint(out, posix_file_system()).filename() == "step-6");
    std::filesystem::remove_all(out / odd.name);
  }
  // All of it a link: then nothing else can be meant.
  std::filesystem::rename(out / "step-6", aside);
  std::filesystem::create_directory_symlink(aside, out / "step-6");
  CHECK_THAT(message_of<ValueError>([&] { runs.run(options); }), ContainsSubstring("holds a run already"));
  CHECK(tools::find_checkpoint(out / "step-6", posix_file_system()) == out / "step-6");
}

TEST_CASE("a finished run that is resumed says the same again") {
  const Runs runs;
  TrainOptions options = runs.options("run");
  const tools::TrainResult first = runs.run(options);
  const auto before = runs.left("run");
  options.resume = true;
  const tools::TrainResult again = runs.run(options);
  CHECK(again.step == 6);
  CHECK(again.loss == first.loss);
  CHECK(again.val_loss == first.val_loss);
  CHECK(runs.left("run") == before);
}

TEST_CASE("the number of threads changes no bit", "[threads meet]") {
  const Runs runs;
  const int before = Context::current().threads();
  for (const int threads : {1, 2, 3}) {
    TrainOptions options = runs.options(std::to_string(threads));
    options.threads = threads;
    // Wide enough for more than one tile.
    options.width = 64;
    options.context = 32;
    options.batch = 16;
    runs.run(options);
    CHECK(runs.left(std::to_string(threads)) == runs.left("1"));
  }
  Context::current().set_threads(before);
}

TEST_CASE("micro-batches add up to the batch") {
  const Runs runs;
  TrainOptions options = runs.options("whole");
  options.dropout = 0;  // its masks differ
  options.eval_every = 1;
  runs.run(options);
  const auto expected = metrics(runs, "whole");
  for (const std::int64_t micro : {1, 2, 3, 4}) {
    INFO("micro-batch " << micro);
    options.out = (runs.folder / std::to_string(micro)).string();
    options.micro_batch = micro;
    runs.run(options);
    const auto lines = metrics(runs, std::to_string(micro));
    REQUIRE(lines.size() == expected.size());
    for (std::size_t i = 0; i + 1 < lines.size(); ++i) {
      for (const char* key : {"loss", "grad_norm", "val_loss"}) {
        CHECK(lines[i][key].get<double>() == Approx(expected[i][key].get<double>()).epsilon(1e-4));
      }
    }
    if (micro == 4) CHECK(lines == expected);
  }
}

TEST_CASE("the newest checkpoints and the best stay") {
  const Runs runs;
  for (const std::int64_t keep : {1, 2, 10}) {
    TrainOptions options = runs.options("keep-" + std::to_string(keep));
    options.keep = keep;
    options.steps = 10;
    options.lr = 0.5;  // too much: the validation loss goes up and down
    options.min_lr = 0.5;
    runs.run(options);
    const auto steps = tools::saved_steps(options.out, posix_file_system());
    const auto config = tools::read_config(tools::checkpoint_path(options.out, 10), posix_file_system());
    REQUIRE(config.best);
    std::set<std::int64_t> expected = {config.best->step};
    for (std::int64_t i = 0; i < std::min<std::int64_t>(keep, 6); ++i) expected.insert(10 - 2 * i);
    CHECK(std::set(steps.begin(), steps.end()) == expected);
    for (const auto& line : metrics(runs, "keep-" + std::to_string(keep))) {
      if (line.contains("val_loss")) CHECK(line["val_loss"] >= config.best->loss);
    }
  }
}

TEST_CASE("metrics have one line a step, and one at the end") {
  const Runs runs;
  const tools::TrainResult result = runs.run(runs.options("run"));
  const auto lines = metrics(runs, "run");
  REQUIRE(lines.size() == 7);
  for (std::size_t i = 0; i < 6; ++i) {
    CHECK(lines[i]["step"] == i + 1);
    CHECK(lines[i].contains("val_loss") == (i % 2 == 1));
  }
  CHECK(lines[5]["loss"] == result.loss);
  CHECK(lines[6]["final_val_loss"] == *result.val_loss);
  CHECK(lines[6]["bigram"] == result.bigram);
}

TEST_CASE("a resumed run may get longer, and says so") {
  const Runs runs;
  TrainOptions options = runs.options("run");
  runs.run(options);
  options.resume = true;
  options.steps = 9;
  options.given = {"steps"};
  CHECK(runs.run(options).step == 9);
  const auto config = tools::read_config(tools::checkpoint_path(options.out, 9), posix_file_system());
  REQUIRE(config.changes.size() == 1);
  CHECK(config.changes[0].name == "steps");
  CHECK(config.changes[0].step == 6);
  CHECK(config.changes[0].from == "6");
  CHECK(config.changes[0].to == "9");
  CHECK(metrics(runs, "run").size() == 10);
  options.steps = 8;
  CHECK_THAT(message_of<ValueError>([&] { runs.run(options); }),
             Catch::Matchers::ContainsSubstring("--steps 8"));
}

TEST_CASE("a resumed run refuses every setting that would make it another run, by its name") {
  const Runs runs;
  TrainOptions options = runs.options("run");
  runs.run(options);
  const auto before = runs.left("run");
  tools::visit_settings(options, [&](const tools::Setting& setting, auto& value) {
    if (setting.on_resume != tools::OnResume::refused) return;
    TrainOptions changed = options;
    changed.resume = true;
    changed.given = {std::string(setting.name)};
    tools::visit_settings(changed, [&](const tools::Setting& other, auto& v) {
      if constexpr (!std::is_same_v<std::decay_t<decltype(v)>, std::string>)
        if (other.name == setting.name)
          v = static_cast<std::decay_t<decltype(v)>>(static_cast<double>(v) * 0.5);
    });
    if (setting.name == "heads") changed.heads = 4;
    if (setting.name == "layers") changed.layers = 2;
    if (setting.name == "lr") changed.min_lr = changed.lr;
    if (setting.name == "model") changed.model = "elsewhere";
    if (setting.name == "lora") changed.lora = 2;
    if (setting.name == "lora-alpha") changed.lora_alpha = 2;
    if (setting.name == "lora-dropout") changed.lora_dropout = 0.5;
    if (setting.name == "lora-layers") changed.lora_layers = "qkv";
    if (setting.name == "base-dtype") changed.base_dtype = "f32";
    INFO(setting.name << " was " << value);
    CHECK_THAT(message_of<ValueError>([&] { runs.run(changed); }),
               Catch::Matchers::ContainsSubstring("--" + std::string(setting.name) + " "));
  });
  CHECK(runs.left("run") == before);
}

TEST_CASE("a resumed run refuses other data") {
  const Runs runs;
  TrainOptions options = runs.options("run");
  runs.run(options);
  options.resume = true;
  write_file(runs.folder / "text", small_text(2001));
  CHECK_THAT(message_of<ValueError>([&] { runs.run(options); }),
             Catch::Matchers::ContainsSubstring("the data is not"));
}

TEST_CASE("a loss that is not finite stops the run with the step's number") {
  const Runs runs;
  TrainOptions options = runs.options("run");
  options.lr = options.min_lr = 1e9;
  options.warmup = 0;
  options.clip = 0;
  options.steps = 1000;
  const std::string message = message_of<StateError>([&] { runs.run(options); });
  CHECK_THAT(message, Catch::Matchers::ContainsSubstring(" at step "));
  const auto newest = tools::saved_steps(options.out, posix_file_system()).back();
  CHECK(tools::read_config(tools::checkpoint_path(options.out, newest), posix_file_system()).step == newest);
}

TEST_CASE("training learns: the loss falls under the bigram model's") {
  const Runs runs;
  TrainOptions options = runs.options("run");
  write_file(runs.folder / "text", small_text(20000));
  options.dropout = 0;
  options.layers = 2;
  options.width = 32;
  options.context = 32;
  options.batch = 8;
  options.lr = 1e-2;
  options.min_lr = 1e-3;
  options.steps = options.eval_every = 200;
  const tools::TrainResult result = runs.run(options);
  CHECK(*result.val_loss < result.bigram);
}
