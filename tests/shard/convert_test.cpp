// Checkpoints as one file, as folders of Hugging Face's, and back: the same bytes as a whole model gives,
// from and for any ranks, with one tensor in memory at a time.
#include "shard/convert.h"

#include <filesystem>
#include <map>

#include "collectives/world.h"
#include "nn/pretrained.h"
#include "nn/state_file.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "shard/optimizer_state.h"
#include "shard/saved_state.h"
#include "tests/allocated.h"
#include "tests/catch.h"
#include "tests/counting_file_system.h"
#include "tests/message_of.h"
#include "tests/ranks.h"
#include "tests/shard/message_on_all.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using Path = std::filesystem::path;

namespace {

nn::GptOptions gpt_options(DType dtype, bool tied) {
  return {.layers = 2,
          .heads = 2,
          .width = 6,
          .context = 5,
          .vocab = 7,
          .tensor = {dtype, Device::cpu()},
          .tie_word_embeddings = tied};
}
nn::LlamaOptions llama_options(DType dtype, bool tied) {
  return {.vocab_size = 7,
          .hidden_size = 6,
          .intermediate_size = 10,
          .num_hidden_layers = 2,
          .num_attention_heads = 3,
          .max_position_embeddings = 16,
          .tie_word_embeddings = tied,
          .tensor = {dtype, Device::cpu()}};
}

nn::LlamaOptions family_options(nn::LlamaFamily family) {
  nn::LlamaOptions o = nn::llama_options(family);
  o.vocab_size = 7, o.hidden_size = 8, o.intermediate_size = 10, o.num_hidden_layers = 2;
  o.num_attention_heads = 2, o.num_key_value_heads = 1, o.head_dim = 4, o.max_position_embeddings = 16;
  o.tensor = {bf16, Device::cpu()};
  if (!o.layer_types.empty()) o.layer_types.resize(2);
  return o;
}

template <class Model>
Model made(const auto& options, std::uint64_t seed) {
  manual_seed(seed);
  return Model(options);
}

/// The bytes of every file of a folder, by name.
std::map<std::string, std::string> contents(const Path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    files[entry.path().filename().string()] = posix_file_system().read(entry.path());
  return files;
}

using Values = std::map<std::string, std::vector<double>>;
Values values(nn::Module& model) {
  Values all;
  for (const auto& [name, tensor] : shard::full_state_dict(model))
    all[name] = to(tensor, f64).to_vector<double>();
  return all;
}

/// Calls `body` with options of both kinds of models, in several dtypes, tied and not, and of all families.
void each_model(auto&& body) {
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const bool tied : {true, false}) {
      INFO(name_of(dtype) << ", tied " << tied);
      body(std::type_identity<nn::Gpt>(), gpt_options(dtype, tied));
      body(std::type_identity<nn::Llama>(), llama_options(dtype, tied));
    }
  using enum nn::LlamaFamily;
  for (const nn::LlamaFamily family : {mistral, qwen2, qwen3, gemma2, gemma3, phi3}) {
    INFO("family " << static_cast<int>(family));
    body(std::type_identity<nn::Llama>(), family_options(family));
  }
}

enum class Way { rows, flat };

template <class Model>
void save(const Path& folder, const auto& options, int ranks, Way way) {
  run_ranks(ranks, [&](World& world) {
    Model model = made<Model>(options, 3);
    shard::fully_shard(
        model, {.mesh = world.mesh(),
                .layout = way == Way::flat ? shard::GroupLayout::flat : shard::GroupLayout::per_parameter});
    shard::save_checkpoint(model, folder, world.group());
  });
}

/// Loads on `ranks` ranks what a model of the seed 3 has.
template <class Model>
void check_loads(const Path& folder, const auto& options, int ranks) {
  CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
    Model model = made<Model>(options, 7), expected = made<Model>(options, 3);
    shard::fully_shard(model);
    shard::load_checkpoint(model, folder, world.group());
    expect(values(model) == values(expected), "other values");
  }));
}

/// Notes how much more is allocated than at first whenever a file is read or written.
class Watching final : public CountingFileSystem {
 public:
  Watching() : before_(allocated_bytes()) {}
  std::int64_t peak() const { return peak_; }
  std::unique_ptr<InputFile> open(const Path& path) override {
    return std::make_unique<In>(*this, posix_file_system().open(path));
  }
  std::unique_ptr<OutputFile> create(const Path& path) override {
    return std::make_unique<Out>(*this, posix_file_system().create(path));
  }

 private:
  void note() { peak_ = std::max(peak_, allocated_bytes() - before_); }
  struct In final : InputFile {
    In(Watching& owner, std::unique_ptr<InputFile> file) : owner(owner), file(std::move(file)) {}
    std::uint64_t size() const override { return file->size(); }
    void read(std::uint64_t offset, std::span<std::byte> into) override {
      owner.note();
      file->read(offset, into);
    }
    Watching& owner;
    std::unique_ptr<InputFile> file;
  };
  struct Out final : OutputFile {
    Out(Watching& owner, std::unique_ptr<OutputFile> file) : owner(owner), file(std::move(file)) {}
    void write(std::span<const std::byte> bytes) override {
      owner.note();
      file->write(bytes);
    }
    using OutputFile::write;
    void sync() override { file->sync(); }
    void close() override { file->close(); }
    Watching& owner;
    std::unique_ptr<OutputFile> file;
  };
  std::int64_t before_, peak_ = 0;
};

}  // namespace

TEST_CASE("a checkpoint of any ranks becomes the very folder that the whole model writes") {
  const TempDirectory temp;
  each_model([&]<class Model>(std::type_identity<Model>, const auto& options) {
    for (const std::uint64_t most : {std::uint64_t{5'000'000'000}, std::uint64_t{300}}) {
      const nn::SavePretrainedOptions how{.max_shard_size = most};
      std::filesystem::remove_all(temp / "whole");
      nn::save_pretrained(made<Model>(options, 3), temp / "whole", how);
      const auto expected = contents(temp / "whole");
      for (const int ranks : {1, 2, 3, 4})
        for (const Way way : {Way::rows, Way::flat}) {
          INFO(ranks << " ranks, way " << static_cast<int>(way) << ", files of " << most);
          save<Model>(temp / "saved", options, ranks, way);
          const auto tensors = shard::checkpoint_tensors(temp / "saved").tensors;
          std::filesystem::remove_all(temp / "folder");
          nn::save_pretrained(options, tensors, temp / "folder", how);
          CHECK((contents(temp / "folder") == expected));
          nn::save_pretrained(tensors, temp / "folder",
                              {.max_shard_size = most, .config_from = temp / "whole"});
          CHECK((contents(temp / "folder") == expected));
        }
    }
  });
}

TEST_CASE("a folder, one or several files, becomes a checkpoint of any ranks that loads on any others") {
  const TempDirectory temp;
  each_model([&]<class Model>(std::type_identity<Model>, const auto& options) {
    for (const std::uint64_t most : {std::uint64_t{5'000'000'000}, std::uint64_t{300}}) {
      std::filesystem::remove_all(temp / "folder");
      nn::save_pretrained(made<Model>(options, 3), temp / "folder", {.max_shard_size = most});
      CHECK(nn::is_pretrained(temp / "folder"));
      for (const int ranks : {1, 2, 3, 4}) {
        INFO(ranks << " ranks, files of " << most);
        shard::split_checkpoint({{"model", {nn::pretrained_tensors(temp / "folder")}}}, temp / "saved",
                                ranks);
        CHECK_FALSE(nn::is_pretrained(temp / "saved"));
        for (const int others : {1, 3}) check_loads<Model>(temp / "saved", options, others);
        // And back, to the byte.
        nn::save_pretrained(shard::checkpoint_tensors(temp / "saved").tensors, temp / "again",
                            {.max_shard_size = most, .config_from = temp / "folder"});
        CHECK((contents(temp / "again") == contents(temp / "folder")));
        std::filesystem::remove_all(temp / "again");
      }
    }
  });
}

TEST_CASE("one rank's files become any ranks' and come back to the bit, model and optimizer") {
  const TempDirectory temp;
  run_ranks(1, [&](World& world) {
    nn::Sequential model{nn::Linear(5, 7), nn::LayerNorm(7), nn::Linear(7, 1)};
    nn::AdamW optimizer(model.parameters());
    sum(model(ones({2, 5}))).backward();
    optimizer.step();
    shard::save_checkpoint(model, optimizer, temp / "one", world.group());
  });
  for (const int ranks : {1, 2, 3, 4, 9}) {
    INFO(ranks << " ranks");
    std::vector<shard::NamedTensors> parts;
    for (const char* part : {"model", "optimizer"})
      parts.push_back({part, shard::checkpoint_tensors(temp / "one", {.part = part})});
    shard::split_checkpoint(parts, temp / "split", ranks);
    CHECK(std::filesystem::exists(temp / "split" / "index.json") == (ranks > 1));
    for (const char* part : {"model", "optimizer"}) {
      const shard::SavedState whole(temp / "one", part), cut(temp / "split", part);
      REQUIRE(whole.tensors().size() == cut.tensors().size());
      for (const shard::SavedTensor& t : whole.tensors()) {
        const std::int64_t numel = Shape(t.shape).numel();
        CHECK(to(whole.read(t, 0, numel), f64).to_vector<double>() ==
              to(cut.read(*cut.find(t.name), 0, numel), f64).to_vector<double>());
        CHECK(whole.steps(t.name) == cut.steps(t.name));
      }
    }
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      nn::Sequential model{nn::Linear(5, 7), nn::LayerNorm(7), nn::Linear(7, 1)};
      shard::fully_shard(model);
      nn::AdamW optimizer(model.parameters());
      shard::load_checkpoint(model, optimizer, temp / "split", world.group());
      expect(shard::full_optimizer_state(model, optimizer).contains("state.0.weight.exp_avg"), "no moments");
    }));
    // One file of another program's own name.
    shard::merge_checkpoint(temp / "split", temp / "any.name");
    shard::split_checkpoint({{"model", shard::checkpoint_tensors(temp / "any.name")}}, temp / "again", ranks);
    for (const auto& [name, content] : contents(temp / "again"))
      if (name.starts_with("model")) CHECK(content == contents(temp / "split").at(name));
  }
}

TEST_CASE("one tensor is in memory at a time, and a copy where it is turned or cut") {
  // What is known of the tensors, twice for a model of them on meta, beside one of them.
  constexpr std::int64_t wide = 320, largest = wide * wide * 4 * 4, slack = largest / 4;
  const TempDirectory temp;
  nn::GptOptions options{.layers = 6, .heads = 2, .width = wide, .context = 8, .vocab = 11};
  for (const int ranks : {1, 3}) save<nn::Gpt>(temp / std::to_string(ranks), options, ranks, Way::rows);
  std::int64_t all = 0;
  for (const TensorRecord& t : shard::checkpoint_tensors(temp / "3").tensors)
    all += Shape(std::span(t.shape)).numel() * 4;
  REQUIRE(all > 12 * largest);
  const auto peak_of = [&](auto&& act) {
    Watching files;
    act(files);
    return files.peak();
  };
  for (const char* from : {"1", "3"}) {
    INFO("from " << from);
    const std::int64_t merging = peak_of(
        [&](FileSystem& files) { shard::merge_checkpoint(temp / from, temp / "merged", {.files = files}); });
    CHECK(merging > largest);
    CHECK(merging < largest + slack);
    const std::int64_t turning = peak_of([&](FileSystem& files) {
      std::filesystem::remove_all(temp / "folder");
      nn::save_pretrained(options, shard::checkpoint_tensors(temp / from, {.files = files}).tensors,
                          temp / "folder", {.files = files});
    });
    CHECK(turning < 2 * largest + slack);
  }
  for (const int ranks : {1, 4}) {
    INFO("to " << ranks);
    const std::int64_t of_file = peak_of([&](FileSystem& files) {
      shard::split_checkpoint({{"model", shard::checkpoint_tensors(temp / "merged", {.files = files})}},
                              temp / "split", ranks, files);
    });
    CHECK(of_file < largest + (ranks > 1 ? largest / ranks : 0) + slack);
    const std::int64_t of_folder = peak_of([&](FileSystem& files) {
      shard::split_checkpoint({{"model", {nn::pretrained_tensors(temp / "folder", files)}}}, temp / "split",
                              ranks, files);
    });
    CHECK(of_folder < 2 * largest + (ranks > 1 ? largest / ranks : 0) + slack);
  }
}

TEST_CASE("what does not become a folder or a checkpoint is one line, and nothing is written") {
  const TempDirectory temp;
  const nn::GptOptions options = gpt_options(f32, true);
  save<nn::Gpt>(temp / "gpt", options, 2, Way::rows);
  const auto tensors = shard::checkpoint_tensors(temp / "gpt").tensors;
  nn::save_pretrained(made<nn::Llama>(llama_options(f32, true), 3), temp / "llama");
  const auto refused = [&](const std::function<void()>& act) {
    const std::string message = message_of<Error>(act);
    CHECK(message.find('\n') == std::string::npos);
    CHECK_FALSE(std::filesystem::exists(temp / "out"));
    return message;
  };
  const auto to_folder = [&](const std::vector<TensorRecord>& given, nn::SavePretrainedOptions how = {}) {
    return refused([&] {
      if (how.config_from)
        nn::save_pretrained(given, temp / "out", how);
      else
        nn::save_pretrained(options, given, temp / "out", how);
    });
  };
  std::vector<TensorRecord> fewer = tensors, more = tensors, twice = tensors, other = tensors;
  std::erase_if(fewer, [](const TensorRecord& t) { return t.name == "ln.weight"; });
  more.push_back({"extra", f32, {1}, {}, [](std::span<std::byte>) {}});
  twice.push_back(tensors[0]);
  for (TensorRecord& t : other)
    if (t.name == "ln.weight") t.shape = {3, 2};
  CHECK_THAT(to_folder(fewer), ContainsSubstring("lack 'ln.weight'"));
  CHECK_THAT(to_folder(more), ContainsSubstring("no 'extra' (1 unknown in all)"));
  CHECK_THAT(to_folder(twice), ContainsSubstring("is there twice"));
  CHECK_THAT(to_folder(other), ContainsSubstring("'ln.weight' has shape [3, 2], such a model takes (6)"));
  CHECK_THAT(to_folder(tensors, {.config_from = temp / "llama"}), ContainsSubstring("lack 'model."));
  CHECK_THAT(to_folder(tensors, {.config_from = temp / "gpt"}), ContainsSubstring("config.json"));
  CHECK_THAT(refused([&] { nn::save_pretrained(tensors, temp / "out", {}); }),
             ContainsSubstring("name a folder with its config.json as config_from"));
  CHECK_THAT(refused([&] { shard::split_checkpoint({{"model", {tensors}}}, temp / "out", 0); }),
             ContainsSubstring("for 0 ranks"));
  CHECK_THAT(refused([&] { shard::split_checkpoint({{"../x", {tensors}}}, temp / "out", 2); }),
             ContainsSubstring("no name of a part"));
  CHECK_THAT(refused([&] { shard::split_checkpoint({{"model", {twice}}}, temp / "out", 2); }),
             ContainsSubstring("taken twice"));
  CHECK_THAT(refused([&] { shard::merge_checkpoint(temp / "gpt", temp / "out", {.part = "ema"}); }),
             ContainsSubstring("has no ema"));
  // A part that is damaged is noticed when it is read.
  const Path part = temp / "gpt" / "model.rank-1.safetensors";
  std::string content = posix_file_system().read(part);
  content[content.size() - 3] ^= 4;
  std::filesystem::remove(part);
  posix_file_system().create(part)->write(content);
  CHECK_THAT(to_folder(tensors), ContainsSubstring("model.rank-1.safetensors"));
}

TEST_CASE("a merge into a file of its checkpoint, a part twice and what is not there are refused") {
  const TempDirectory temp;
  nn::Linear linear(4, 3);
  shard::save_checkpoint(linear, temp / "one", Group());
  shard::split_checkpoint({{"model", shard::checkpoint_tensors(temp / "one")}}, temp / "two", 2);
  for (const std::string file : {"one/model.safetensors", "two/model.rank-0.safetensors", "two/index.json"})
    CHECK_THAT(
        message_of<ValueError>([&] { shard::merge_checkpoint(temp / file.substr(0, 3), temp / file); }),
        ContainsSubstring(file + "' is a file of the checkpoint that is read; name another"));
  for (const std::string from : {"one", "two"})
    CHECK(shard::checkpoint_tensors(temp / from).tensors.size() == 2);
  const auto tensors = shard::checkpoint_tensors(temp / "one");
  CHECK_THAT(message_of<ValueError>(
                 [&] { shard::split_checkpoint({{"model", tensors}, {"model", tensors}}, temp / "new", 2); }),
             ContainsSubstring("two parts are named 'model'"));
  for (const std::string from : {"nowhere", "nowhere.safetensors"})
    CHECK_THAT(message_of<FileError>([&] { shard::load_checkpoint(linear, temp / from, Group()); }),
               ContainsSubstring(from + "' is not there; give the folder that save_checkpoint wrote"));
}

TEST_CASE("of what groups of a mesh saved each one group is named, by number") {
  const TempDirectory temp;
  run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = world.mesh({2, 2}, {"model", "shards"});
    manual_seed(static_cast<std::uint64_t>(mesh.coordinate("model")));
    nn::Linear slice(4, 3);
    shard::fully_shard(slice, {.mesh = mesh["shards"]});
    shard::save_checkpoint(slice, temp / "saved", world.group());
  });
  for (const std::optional<int> group : {std::optional<int>(), std::optional(2), std::optional(-1)})
    CHECK_THAT(
        message_of<ValueError>(
            [&] { shard::merge_checkpoint(temp / "saved", temp / "out", {.group = group}); }),
        ContainsSubstring("'bias' is 2 tensors, one of each group of ranks (the first of world.shards of "
                          "the ranks 0, 1)") &&
            ContainsSubstring("name one group of 0 to 1"));
  CHECK_FALSE(std::filesystem::exists(temp / "out"));
  for (const int group : {0, 1}) {
    shard::merge_checkpoint(temp / "saved", temp / "out", {.group = group});
    manual_seed(static_cast<std::uint64_t>(group));
    const nn::Linear expected(4, 3);
    CHECK(nn::load_state(temp / "out").at("weight").to_vector<float>() ==
          expected.weight.local().to_vector<float>());
  }
}

TEST_CASE("whatever change of a split or a merge fails, what it replaces is the old one or the new one") {
  const TempDirectory temp;
  const Path folder = temp / "split", file = temp / "merged";
  const auto tensors_of = [](float value) {
    return std::vector<TensorRecord>{{"x", f32, {3, 2}, {}, [value](std::span<std::byte> into) {
                                        fill_(from_blob(into.data(), {3, 2}, f32), value);
                                      }}};
  };
  const auto write = [&](float value, FileSystem& files) {
    shard::split_checkpoint({{"model", {tensors_of(value)}}}, folder, 2, files);
    shard::merge_checkpoint(folder, file, {.files = files});
  };
  const auto found = [](const Path& from) {
    const shard::SavedState saved(committed_directory(from), "model");
    const std::vector<float> values = saved.read(saved.tensors()[0], 0, 6).to_vector<float>();
    CHECK((values == std::vector<float>(6, 1) || values == std::vector<float>(6, 2)));
    return values[0];
  };
  CountingFileSystem counting;
  write(1, counting);
  REQUIRE(counting.log().size() > 10);
  for (const Fault fault : all_faults)
    for (int n = 0; n < static_cast<int>(counting.log().size()) + 8; ++n) {
      INFO(name_of(fault) << " at change " << n);
      write(1, posix_file_system());
      CountingFileSystem files(n, fault);
      bool threw = false;
      try {
        write(2, files);
      } catch (const FileError&) {
        threw = true;
      }
      files.crash();
      const float split = found(folder), merged = found(file);
      CHECK(merged <= split);
      if (!threw) CHECK(merged == 2);
    }
}
