// `sherd train --model`: the run of a folder's model, from its command line to the folder it leaves.
#include <algorithm>
#include <cmath>

#include "nn/lora.h"
#include "nn/pretrained.h"
#include "nn/tokenizer.h"
#include "runtime/ops.h"
#include "tests/message_of.h"
#include "tests/source_root.h"
#include "tests/tools/command.h"
#include "tests/tools/small_run.h"
#include "tools/tokens.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using tools::TrainOptions;

namespace {

const std::filesystem::path goldens = std::filesystem::path(source_root) / "tests/golden/tuning";

/// Settings that were given.
struct Given {
  TrainOptions options;
  template <class T, class V>
  Given& with(const char* name, T TrainOptions::* member, V value) {
    options.*member = value;
    options.given.emplace(name);
    return *this;
  }
};

/// A run of a few steps on text of this test.
Given tuning(const Runs& runs, const std::string& out, const char* model = "llama") {
  Given given;
  given.options.model = (goldens / model).string();
  given.options.data = {(goldens / "lines.jsonl").string()};
  given.options.out = (runs.folder / out).string();
  given.options.threads = 1;
  given.with("context", &TrainOptions::context, 24).with("steps", &TrainOptions::steps, 6);
  given.with("batch", &TrainOptions::batch, 4).with("eval-every", &TrainOptions::eval_every, 2);
  given.with("lr", &TrainOptions::lr, 1e-2).with("keep", &TrainOptions::keep, 1);
  return given;
}

std::vector<double> losses(const Runs& runs, const std::string& out) {
  std::vector<double> all;
  for (const json& line : metrics(runs, out))
    if (line.contains("loss")) all.push_back(line["loss"]);
  return all;
}

/// The files that two runs do not have alike.
std::vector<std::string> differing(const std::map<std::string, std::string>& a,
                                   const std::map<std::string, std::string>& b) {
  std::vector<std::string> names;
  for (const auto& [name, content] : a)
    if (!b.contains(name) || b.at(name) != content) names.push_back(name);
  for (const auto& [name, content] : b)
    if (!a.contains(name)) names.push_back(name);
  return names;
}

/// The dtype and values of a folder's tensors.
std::map<std::string, Tensor> tensors_in(const std::filesystem::path& folder) {
  std::map<std::string, Tensor> found;
  for (const TensorRecord& record : nn::pretrained_tensors(folder)) {
    const Tensor values = empty(Shape(std::span(record.shape)), {record.dtype, Device::cpu()});
    record.read({values.raw(), static_cast<std::size_t>(values.spec().bytes())});
    found.emplace(record.name, values);
  }
  return found;
}

}  // namespace

TEST_CASE("tuning: losses of every model, on 1 to 4 ranks, are those of PyTorch's plain loop",
          "[threads meet]") {
  const json expected = json::parse(posix_file_system().read(goldens / "expected.json"));
  const Runs runs;
  for (const char* model : {"llama", "gpt2"})
    for (const char* file : {"text.txt", "lines.jsonl"})
      for (const std::int64_t ranks : {1, 2, 3, 4}) {
        // All of the data a step, so that the order of rows says nothing; ranks divide the rows.
        const std::int64_t rows = std::string_view(file) == "text.txt" ? 27 : 40;
        if (rows % ranks != 0) continue;
        INFO(model << " on " << file << ", " << ranks << " ranks");
        const json& golden = expected[fmt::format("{} {}", model, file)];
        const std::string out = fmt::format("{}-{}-{}", model, file, ranks);
        Given given = tuning(runs, out, model);
        given.options.data = {(goldens / file).string()};
        given.with("batch", &TrainOptions::batch, rows).with("ranks", &TrainOptions::ranks, ranks);
        given.with("micro-batch", &TrainOptions::micro_batch, ranks == 1 ? 3 : 0);
        given.with("min-lr", &TrainOptions::min_lr, 1e-3).with("warmup", &TrainOptions::warmup, 2);
        const tools::TrainResult result = runs.run(given.options);
        const std::vector<double> found = losses(runs, out);
        REQUIRE(found.size() == golden["losses"].size());
        for (std::size_t i = 0; i < found.size(); ++i)
          CHECK(std::abs(found[i] - golden["losses"][i].get<double>()) < 1e-4);
        CHECK(std::abs(*result.val_loss - golden["validation"].get<double>()) < 1e-4);
      }
}

TEST_CASE("tuning: a run that is killed or stopped anywhere and resumed ends at the same bits",
          "[threads meet]") {
  const Runs runs;
  for (const std::int64_t lora : {0, 3})
    for (const std::int64_t ranks : {1, 2})
      for (const char* layout : {"per-parameter", "flat"}) {
        if (ranks == 1 && std::string_view(layout) == "flat") continue;
        INFO(lora << ", " << ranks << " ranks, " << layout);
        const auto options = [&](const std::string& out) {
          Given given = tuning(runs, out);
          given.with("lora", &TrainOptions::lora, lora).with("ranks", &TrainOptions::ranks, ranks);
          given.with("layout", &TrainOptions::layout, layout);
          if (lora > 0) {
            given.with("lora-dropout", &TrainOptions::lora_dropout, 0.3);
            if (std::string_view(layout) == "flat")
              given.with("base-dtype", &TrainOptions::base_dtype, "f32");
          }
          return given.options;
        };
        const std::string name = fmt::format("{}-{}-{}", lora, ranks, layout);
        runs.run(options("whole-" + name));
        const auto whole = runs.left("whole-" + name);
        CHECK(whole.contains(lora > 0 ? "adapter/adapter_model.safetensors" : "tuned/model.safetensors"));
        for (const Stopper::How how : {Stopper::How::kill, Stopper::How::stop})
          for (const std::int64_t step : {1, 3, 5}) {
            INFO("at step " << step);
            const std::string out = "again";
            runs.interrupted(options(out), step, how);
            const auto left = runs.left(out);
            CHECK(differing(left, whole) == std::vector<std::string>{});
            std::filesystem::remove_all(runs.folder / out);
          }
      }
}

TEST_CASE("tuning: ranks, strategies and layouts train alike and leave the same folder", "[threads meet]") {
  const Runs runs;
  runs.run(tuning(runs, "one").options);
  const auto one = tensors_in(runs.folder / "one/tuned");
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "no_shard", "data_parallel"})
    for (const char* layout : {"per-parameter", "flat"}) {
      INFO(strategy << ", " << layout);
      const std::string out = fmt::format("{}-{}", strategy, layout);
      Given given = tuning(runs, out);
      given.with("ranks", &TrainOptions::ranks, 2).with("strategy", &TrainOptions::strategy, strategy);
      runs.run(given.with("layout", &TrainOptions::layout, layout).options);
      const std::vector<double> expected = losses(runs, "one"), found = losses(runs, out);
      REQUIRE(found.size() == expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) CHECK(std::abs(found[i] - expected[i]) < 1e-5);
      for (const auto& [name, values] : tensors_in(runs.folder / out / "tuned"))
        CHECK(amax(abs(sub(to(values, f32), to(one.at(name), f32)))).item() < 2e-3);
    }
}

TEST_CASE("tuning: what it leaves is a folder as the model's own, in its dtype, of the best checkpoint") {
  const Runs runs;
  // A model in bf16: masters are f32 all the same, or steps of 2e-5 would be lost.
  nn::Llama model = nn::load_llama(goldens / "llama", bf16);
  const std::filesystem::path base = runs.folder / "base";
  nn::save_pretrained(model, base, {.config_from = goldens / "llama"});
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"})
    std::filesystem::copy_file(goldens / "llama" / name, base / name);
  Given given = tuning(runs, "run");
  given.options.model = base.string();
  given.with("lr", &TrainOptions::lr, 1e-4);
  const tools::TrainResult result = runs.run(given.options);
  CHECK(result.tuned == runs.folder / "run/tuned");
  const auto left = contents(result.tuned);
  CHECK(left.at("tokenizer.json") == posix_file_system().read(base / "tokenizer.json"));
  CHECK(left.at("tokenizer_config.json") == posix_file_system().read(base / "tokenizer_config.json"));
  for (const auto& [name, values] : tensors_in(result.tuned)) CHECK(values.dtype() == bf16);
  const auto best =
      tools::read_config(tools::checkpoint_path(runs.folder / "run", 6), posix_file_system()).best;
  REQUIRE(best);
  const shard::SavedState state(tools::checkpoint_path(runs.folder / "run", best->step), "model");
  for (const shard::SavedTensor& tensor : state.tensors())
    CHECK(state.read(tensor, 0, Shape(tensor.shape).numel()).dtype() == f32);
  CHECK(nn::Tokenizer::read(result.tuned).encode("a").size() == 1);
  // A run that has ended says and leaves the same again.
  given.options.resume = true, given.options.given.clear();
  const auto before = runs.left("run");
  CHECK(runs.run(given.options).val_loss == result.val_loss);
  CHECK(runs.left("run") == before);
}

TEST_CASE("tuning: adapters leave the base as it is, and load onto it") {
  const Runs runs;
  for (const char* dtype : {"f32", "bf16"}) {
    Given given = tuning(runs, dtype);
    given.with("lora", &TrainOptions::lora, 2).with("base-dtype", &TrainOptions::base_dtype, dtype);
    given.with("lora-layers", &TrainOptions::lora_layers, "q_proj,down_proj");
    given.with("batch", &TrainOptions::batch, 40);
    const tools::TrainResult result = runs.run(given.options);
    CHECK(result.tuned == runs.folder / dtype / "adapter");
    CHECK(losses(runs, dtype).back() < losses(runs, dtype).front());
    const json config = json::parse(posix_file_system().read(result.tuned / "adapter_config.json"));
    CHECK(config["r"] == 2);
    CHECK(config["lora_alpha"] == 4);  // twice the rank
    CHECK(config["target_modules"] == json({"down_proj", "q_proj"}));
    nn::Llama model = nn::load_llama(goldens / "llama", tools::dtype_named(dtype));
    nn::load_lora(model, result.tuned);
    const auto saved = tools::checkpoint_path(runs.folder / dtype, 6);
    const shard::SavedState state(saved, "model"), moments(saved, "optimizer");
    CHECK(state.tensors().size() == nn::lora_parameters(model).size());
    for (const shard::SavedTensor& tensor : state.tensors()) {
      CHECK(tensor.name.find("lora_") != std::string_view::npos);
      CHECK(state.read(tensor, 0, Shape(tensor.shape).numel()).dtype() == f32);
    }
    for (const shard::SavedTensor& tensor : moments.tensors()) CHECK(Shape(tensor.shape).numel() < 300);
  }
}

TEST_CASE("tuning: checkpoints of adapters leave the base out, and go on from any ranks, on that base alone",
          "[threads meet]") {
  const Runs runs;
  const std::filesystem::path base = runs.folder / "base";
  std::filesystem::copy(goldens / "llama", base);
  const auto options = [&](const std::string& out, std::int64_t ranks, const char* layout) {
    Given given = tuning(runs, out);
    given.options.model = base.string();
    given.with("lora", &TrainOptions::lora, 2).with("ranks", &TrainOptions::ranks, ranks);
    given.with("layout", &TrainOptions::layout, layout);
    return given.with("base-dtype", &TrainOptions::base_dtype, "f32").options;
  };
  const auto adapters = [&](const std::string& out) {
    return contents(runs.folder / out / "adapter").at("adapter_model.safetensors");
  };
  for (const char* layout : {"per-parameter", "flat"})
    for (const auto& [before, after] : {std::pair{1, 2}, {2, 1}, {2, 4}, {4, 2}}) {
      INFO(layout << ", " << before << " then " << after << " ranks");
      runs.run(options("run", before, layout), Stopper(3, Stopper::How::stop));
      const shard::SavedState state(tools::checkpoint_path(runs.folder / "run", 3), "model");
      for (const shard::SavedTensor& tensor : state.tensors())
        CHECK(tensor.name.find("lora_") != std::string_view::npos);
      // Twice from there, to the same bits: on this base, and on one that was taken away and came back.
      std::filesystem::copy(runs.folder / "run", runs.folder / "again",
                            std::filesystem::copy_options::recursive);
      for (const std::string out : {"run", "again"}) {
        TrainOptions resumed = options(out, after, layout);
        resumed.resume = true;
        runs.run(resumed);
      }
      CHECK(adapters("run") == adapters("again"));
      std::filesystem::remove_all(runs.folder / "run"), std::filesystem::remove_all(runs.folder / "again");
    }
  runs.run(options("run", 2, "per-parameter"), Stopper(3, Stopper::How::stop));
  TrainOptions resume;
  resume.out = (runs.folder / "run").string(), resume.resume = true, resume.threads = 1;
  const auto refused = [&](const std::filesystem::path& file, const std::string& other) {
    INFO(file);
    const std::string whole = posix_file_system().read(file);
    write_file(file, other);
    const std::string message = message_of<ValueError>([&] { runs.run(resume); });
    CHECK_THAT(message, ContainsSubstring("is not the model that the adapters are trained on"));
    CHECK(message.find('\n') == std::string::npos);
    write_file(file, whole);
  };
  // Another model of the same shapes, and other words of the same model.
  std::string weights = posix_file_system().read(base / "model.safetensors");
  weights[weights.size() - 1] ^= 1;
  refused(base / "model.safetensors", weights);
  refused(base / "config.json", posix_file_system().read(base / "config.json") + "\n");
  CHECK(runs.run(resume).step == 6);
}

TEST_CASE("tuning: merge makes the folder that a run leaves, without being told of what model") {
  const Runs runs;
  for (const std::int64_t lora : {0, 2}) {
    INFO(lora);
    const std::string out = lora > 0 ? "adapters" : "whole", left = lora > 0 ? "adapter" : "tuned";
    Given given = tuning(runs, out);
    runs.run(given.with("lora", &TrainOptions::lora, lora).options);
    const auto config = tools::read_config(tools::checkpoint_path(runs.folder / out, 6), posix_file_system());
    REQUIRE(config.best);
    const std::string best = tools::checkpoint_path(out, config.best->step).string();
    Command merges(runs.folder, {"merge", best, "--pretrained", "--out", out + "-merged"});
    CHECK(merges.wait() == 0);
    INFO(merges.err());
    CHECK(contents(runs.folder / (out + "-merged")) == contents(runs.folder / out / left));
  }
  Command refused(runs.folder,
                  {"merge", "adapters", "--pretrained", "--out", "new", "--max-shard-size", "9"});
  CHECK(refused.wait() == 1);
  CHECK_THAT(refused.err(), ContainsSubstring("--max-shard-size 9: adapters lie in one file"));
}

TEST_CASE("tuning: tokens are made once, and again where they were lost; other data is refused") {
  const Runs runs;
  TrainOptions options = tuning(runs, "run").options;
  std::filesystem::copy_file(goldens / "lines.jsonl", runs.folder / "lines.jsonl");
  options.data = {(runs.folder / "lines.jsonl").string()};
  runs.run(options, Stopper(3, Stopper::How::stop));
  const std::filesystem::path tokens = runs.folder / "run" / tools::tokens_name;
  const std::string whole = posix_file_system().read(tokens);
  TrainOptions resume;
  resume.out = options.out, resume.resume = true, resume.threads = 1;
  write_file(tokens, whole.substr(0, whole.size() / 2));
  runs.run(resume, Stopper(4, Stopper::How::stop));
  CHECK(posix_file_system().read(tokens) == whole);
  std::filesystem::remove(tokens);
  runs.run(resume, Stopper(5, Stopper::How::stop));
  CHECK(posix_file_system().read(tokens) == whole);
  write_file(runs.folder / "lines.jsonl",
             posix_file_system().read(goldens / "lines.jsonl") + "{\"text\": \"x\"}\n");
  CHECK_THAT(message_of<ValueError>([&] { runs.run(resume); }),
             ContainsSubstring("the data is not what the run"));
}

TEST_CASE("tuning: settings that a model has itself, or that are not of such a run, are refused by name") {
  const Runs runs;
  const auto refuses = [&](const TrainOptions& options, const std::string& why) {
    const std::string message = message_of<Error>([&] { runs.run(options); });
    CHECK_THAT(message, ContainsSubstring(why));
    CHECK(message.find('\n') == std::string::npos);
    CHECK_FALSE(std::filesystem::exists(options.out));  // before anything was made
  };
  const auto given = [&] { return tuning(runs, "run"); };
  refuses(given().with("layers", &TrainOptions::layers, 2).options, "--layers: the model in");
  refuses(given().with("dropout", &TrainOptions::dropout, 0.1).options, "--dropout: the model in");
  refuses(given().with("context", &TrainOptions::context, 25).options, "has 24 positions");
  refuses(given().with("context", &TrainOptions::context, 1).options, "--context 1: is at least 2 tokens");
  refuses(given().with("lora-alpha", &TrainOptions::lora_alpha, 2).options, "give their rank with --lora");
  refuses(given().with("batch", &TrainOptions::batch, 400).options, "the data makes 40 rows");
  refuses(given()
              .with("lora", &TrainOptions::lora, 2)
              .with("lora-layers", &TrainOptions::lora_layers, "q,v")
              .options,
          "--lora-layers q,v: add_lora: no Linear of the Llama is named 'q'");
  refuses(given()
              .with("lora-dropout", &TrainOptions::lora_dropout, 1)
              .with("lora", &TrainOptions::lora, 2)
              .options,
          "--lora-dropout 1");
  refuses(given().with("layout", &TrainOptions::layout, "flat").with("lora", &TrainOptions::lora, 2).options,
          "--layout flat: has one dtype");
  TrainOptions options = given().options;
  options.data.clear();
  refuses(options, "--data: name the files");
  options = given().options;
  options.model = (runs.folder / "nothing").string();
  refuses(options, "has no config.json; name the folder of a model");
  const std::filesystem::path other = runs.folder / "other";
  nn::save_pretrained(nn::Llama({.vocab_size = 260, .hidden_size = 16, .max_position_embeddings = 24}),
                      other);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"})
    std::filesystem::copy_file(goldens / "llama" / name, other / name);
  options = given().options;
  options.model = other.string();
  refuses(options, "the model has 260; the tokenizer is of another model");
  options = runs.options("run");
  options.lora = 2, options.given.insert("lora");
  refuses(options, "--lora: is of a run from a model's folder");
  options = given().options;
  write_file(runs.folder / "bad.jsonl", "{\"text\": \"a\"}\n{\"text\"}\n");
  options.data = {(runs.folder / "bad.jsonl").string()};
  refuses(options, "bad.jsonl': line 2: is no JSON");

  runs.run(given().options, Stopper(2, Stopper::How::stop));
  for (const auto& [name, value] : {std::pair("lr", 1e-3), std::pair("lora", 2.0)}) {
    TrainOptions resume;
    resume.out = given().options.out, resume.resume = true, resume.lr = value;
    resume.lora = static_cast<std::int64_t>(value);
    resume.given = {name};
    CHECK_THAT(message_of<ValueError>([&] { runs.run(resume); }),
               ContainsSubstring("the run was started with"));
  }
}

TEST_CASE("tuning: the program tunes by one command, with defaults of its own") {
  const TempDirectory folder;
  std::filesystem::copy(goldens / "llama", folder / "model");
  std::filesystem::copy_file(goldens / "text.txt", folder / "text.txt");
  Command run(folder, {"train", "--model", "model", "--data", "text.txt", "--epochs", "2", "--threads", "1"});
  CHECK(run.wait() == 0);
  INFO(run.err());
  CHECK_THAT(run.out(), ContainsSubstring("tuned: runs/1/tuned"));
  const auto options =
      tools::read_config(tools::checkpoint_path(folder / "runs/1", 6), posix_file_system()).options;
  CHECK(options.lr == 2e-5);
  CHECK(options.weight_decay == 0);
  CHECK(options.context == 24);
  CHECK(options.batch == 8);
  CHECK(options.steps == 2 * (28 / 8));
  Command sample(folder, {"sample", "--checkpoint", "runs/1"});
  CHECK(sample.wait() == 1);
  CHECK_THAT(sample.err(), ContainsSubstring("is of a run that tunes the model in"));
  CHECK(Command(folder, {"report", "runs/1"}).wait() == 0);
  CHECK(Command(folder, {"merge", "runs/1", "--pretrained", "--config-from", "model", "--out", "merged"})
            .wait() == 0);
  CHECK(nn::is_pretrained(folder / "merged"));
}
