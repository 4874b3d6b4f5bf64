// Checkpoints of sharded training: from any ranks, layout and strategy to any other; and what is wrong with a
// folder is told by the name of its file, while nothing changes.
#include "shard/checkpoint.h"

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "collectives/world.h"
#include "nn/layers.h"
#include "nn/state_file.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/data_parallel.h"
#include "shard/fsdp.h"
#include "shard/optimizer_state.h"
#include "shard/part_file.h"
#include "shard/saved_state.h"
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

/// Rows that no number of ranks divides, fewer of them than ranks, a tie across units, a buffer, a layer that
/// is never used and one that is frozen.
struct Net final : nn::Layer<Net> {
  nn::Linear first{5, 7};
  nn::Param scale{ones({1})};
  nn::ModuleList<nn::Linear> rest;
  nn::Linear unused{3, 2};
  nn::Buffer mean{zeros({3})};
  Net() {
    rest.emplace_back(7, 5);
    rest.emplace_back(5, 7);
    nn::tie(first.weight, rest[1].weight);
  }
  Tensor forward(const Tensor& x) const {
    return sum(square(mul(rest[1](gelu(rest[0](gelu(first(x))))), scale)));
  }
  void visit(auto&& on) {
    on("first", first);
    on("scale", scale);
    on("rest", rest);
    on("unused", unused);
    on("mean", mean);
  }
};

constexpr std::int64_t width = 64;
/// Memory beside which counts of steps are nothing.
struct Wide final : nn::Layer<Wide> {
  nn::ModuleList<nn::Linear> layers;
  Wide() {
    for (int i = 0; i < 8; ++i) layers.emplace_back(width, width);
  }
  Tensor forward(Tensor x) const {
    for (const nn::Linear& layer : layers) x = layer(x);
    return sum(x);
  }
  void visit(auto&& on) { on("layers", layers); }
};

/// How a net lies on its ranks.
enum class Way { plain, data_parallel, rows, flat, flat_parameters, zero1_rows, replicas, hybrid_flat };
constexpr Way ways[] = {Way::plain,           Way::data_parallel, Way::rows,     Way::flat,
                        Way::flat_parameters, Way::zero1_rows,    Way::replicas, Way::hybrid_flat};

/// A net of `seed` with its optimizer, on the ranks of a world.
struct Trainee {
  Net net;
  std::unique_ptr<shard::DataParallel> replicas;
  std::unique_ptr<nn::AdamW> optimizer;

  Trainee(const World& world, Way way, std::uint64_t seed = 3) : net(seeded(seed)) {
    shard::Options options{.mesh = world.mesh()};
    switch (way) {
      case Way::plain:
        break;
      case Way::data_parallel:
        replicas = std::make_unique<shard::DataParallel>(net, world.group());
        break;
      case Way::flat_parameters: {
        const shard::FullyShardedDataParallel handle(
            net, {.mesh = world.mesh(), .auto_wrap = shard::wrap_classes({"Linear"})});
        break;
      }
      case Way::hybrid_flat:
        if (world.size() == 4) options.mesh = world.mesh({2, 2}, {"replicas", "shards"});
        [[fallthrough]];
      case Way::flat:
        options.layout = shard::GroupLayout::flat;
        [[fallthrough]];
      default:
        if (way == Way::zero1_rows) options.strategy = shard::ShardingStrategy::zero1;
        if (way == Way::replicas) options.strategy = shard::ShardingStrategy::no_shard;
        shard::fully_shard(net.rest[0], options);
        shard::fully_shard(net.unused, options);  // as a whole: no gradient in either layout
        shard::fully_shard(net, options);
    }
    optimizer = std::make_unique<nn::AdamW>(net.parameters(), nn::AdamWOptions{.lr = 0.05});
  }

  /// The whole loss lies on rank 0, so that an average over a power of two rounds nothing.
  void step(const World& world, int number) {
    manual_seed(100 + static_cast<std::uint64_t>(number));
    const double weight = world.rank() == 0 ? world.size() : 0;
    mul(net(rand({4, 5})), replicas || shard::is_sharded(net) ? weight : 1.0).backward();
    optimizer->step();
    optimizer->zero_grad();
    const NoGrad guard;
    add_(net.mean.tensor(), 0.5);
  }

 private:
  static Net seeded(std::uint64_t seed) {
    manual_seed(seed);
    return {};
  }
};

using Values = std::map<std::string, std::vector<double>>;
void add_values(Values& all, const nn::StateDict& state) {
  for (const auto& [name, tensor] : state) all[name] = to(tensor, DType::f64).to_vector<double>();
}
/// Of model and optimizer, whole, on every rank; collective.
Values values(Trainee& t) {
  Values all;
  add_values(all, shard::full_state_dict(t.net));
  add_values(all, shard::full_optimizer_state(t.net, *t.optimizer));
  return all;
}

/// What an unsharded run has after `steps` steps.
Values plain_values(int steps, std::uint64_t seed = 3) {
  Values found;
  run_ranks(1, [&](World& world) {
    Trainee plain(world, Way::plain, seed);
    for (int i = 0; i < steps; ++i) plain.step(world, i);
    found = values(plain);
  });
  return found;
}

/// Gives it what an unsharded run has after `steps` steps.
void go_to(Trainee& t, int steps, std::uint64_t seed = 3) {
  nn::StateDict model, moments;
  run_ranks(1, [&](World& world) {
    Trainee plain(world, Way::plain, seed);
    for (int i = 0; i < steps; ++i) plain.step(world, i);
    model = shard::full_state_dict(plain.net);
    moments = shard::full_optimizer_state(*plain.optimizer);
  });
  shard::load_full_state_dict(t.net, model);
  shard::load_full_optimizer_state(*t.optimizer, moments);
}

/// A net that took `steps` steps, saved from `ranks` ranks.
void save(const Path& folder, int ranks, Way way, int steps = 2, std::uint64_t seed = 3,
          FileSystem& files = posix_file_system()) {
  run_ranks(ranks, [&](World& world) {
    Trainee t(world, way);
    go_to(t, steps, seed);
    shard::save_checkpoint(t.net, *t.optimizer, folder, world.group(), {.files = files});
  });
}

/// The folder does not load, on any rank; all messages name `file`, and nothing changes.
void check_refused(const Path& folder, int ranks, Way way, const std::string& file) {
  run_ranks(ranks, [&](World& world) {
    Trainee t(world, way, 7);
    t.step(world, 5);
    const Values before = values(t);
    const std::string message =
        message_on_all(world, [&] { shard::load_checkpoint(t.net, *t.optimizer, folder, world.group()); });
    expect(message.find(file) != std::string::npos, "'{}' is not named in '{}'", file, message);
    expect(values(t) == before, "something changed");
  });
}

std::string content(const Path& file) { return posix_file_system().read(file); }
void write(const Path& file, const std::string& content) { std::ofstream(file, std::ios::binary) << content; }

std::set<std::string> names_in(const Path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.insert(entry.path().filename().string());
  return names;
}

/// Reads that fail from the `n`th on.
class FailingReads final : public CountingFileSystem {
 public:
  explicit FailingReads(int n) : left_(n) {}
  bool failed() const { return left_ < 0; }
  std::unique_ptr<InputFile> open(const Path& path) override {
    return std::make_unique<File>(*this, posix_file_system().open(path));
  }

 private:
  struct File final : InputFile {
    File(FailingReads& owner, std::unique_ptr<InputFile> file) : owner(owner), file(std::move(file)) {}
    std::uint64_t size() const override { return file->size(); }
    void read(std::uint64_t offset, std::span<std::byte> into) override {
      check<FileError>(--owner.left_ >= 0, "read: on purpose");
      file->read(offset, into);
    }
    FailingReads& owner;
    std::unique_ptr<InputFile> file;
  };
  std::atomic<int> left_;
};

}  // namespace

TEST_CASE("a checkpoint of any ranks, layout and strategy loads on any other, and training goes on") {
  const Values saved = plain_values(2), next = plain_values(3);
  const TempDirectory folder;
  for (const int from_ranks : {1, 2, 4})
    for (const Way from : ways) {
      if (from_ranks == 1 && from != Way::plain && from != Way::flat_parameters)
        continue;  // lie as a plain one
      const Path checkpoint = folder / fmt::format("{} {}", from_ranks, static_cast<int>(from));
      INFO("from " << from_ranks << " ranks, way " << static_cast<int>(from));
      CHECK_NOTHROW(save(checkpoint, from_ranks, from));
      for (const int ranks : {1, 2, 3, 4})
        for (const Way way : ways) {
          INFO("to " << ranks << " ranks, way " << static_cast<int>(way));
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
            Trainee t(world, way, 7);
            if (ranks % 2 == 0) t.step(world, 9);  // what is there already is replaced, moments too
            shard::load_checkpoint(t.net, *t.optimizer, checkpoint, world.group());
            expect(values(t) == saved, "other values");
            if (ranks == 3) return;  // whose average rounds
            t.step(world, 2);
            expect(values(t) == next, "other values a step later");
          }));
        }
    }
}

TEST_CASE("states of ranks go into any layout and strategy of as many, without files") {
  const Values saved = plain_values(2);
  for (const int ranks : {1, 2, 4})
    for (const Way from : ways)
      for (const Way way : ways) {
        INFO(ranks << " ranks, from way " << static_cast<int>(from) << " to " << static_cast<int>(way));
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          Trainee source(world, from), t(world, way, 7);
          for (int i = 0; i < 2; ++i) source.step(world, i);
          if (from == way) {  // as it lies
            t.net.load_state_dict(source.net.state_dict());
            t.optimizer->load_state_dict(source.optimizer->state_dict());
            expect(values(t) == saved, "other values of local states");
            t.step(world, 9);
          }
          shard::load_sharded_state_dict(t.net, shard::sharded_state_dict(source.net), world.group());
          shard::load_sharded_optimizer_state(*t.optimizer, shard::sharded_optimizer_state(*source.optimizer),
                                              world.group());
          expect(values(t) == saved, "other values");
        }));
      }
}

TEST_CASE("states of ranks that do not make up the wholes are refused, and nothing changes") {
  CHECK_NOTHROW(run_ranks(4, [&](World& world) {
    Trainee source(world, Way::rows), t(world, Way::flat, 7);
    const shard::ShardedStateDict whole = shard::sharded_state_dict(source.net);
    const Values before = values(t);
    const auto refused = [&](const std::function<void(shard::ShardedTensor&)>& spoil, const char* words) {
      shard::ShardedStateDict state = whole;
      spoil(state[0]);
      const std::string message =
          message_on_all(world, [&] { shard::load_sharded_state_dict(t.net, state, world.group()); });
      expect(message.find(words) != std::string::npos && message.find("first.weight") != std::string::npos,
             "'{}' in '{}'", words, message);
      expect(values(t) == before, "something changed");
    };
    // first.weight has 7 rows of 5: two of them on each rank but the last.
    refused([](shard::ShardedTensor& x) { x.begin = 0; }, "after the first 10 begin at 0");
    refused(
        [&](shard::ShardedTensor& x) {
          if (world.rank() == 1) x.values = narrow(x.values, 0, 0, 4);
        },
        "after the first 14 begin at 20");
    refused(
        [&](shard::ShardedTensor& x) {
          if (world.rank() == 3) x.values = narrow(x.values, 0, 0, 4);
        },
        "34 of the 35 elements");
    refused([](shard::ShardedTensor& x) { x.name = "another"; }, "lacks 'first.weight'");
    refused([](shard::ShardedTensor& x) { x.shape = {5, 7}; }, "'first.weight' has shape (7, 5)");
    shard::load_sharded_state_dict(t.net, whole, world.group());
    expect(values(t) != before, "nothing was loaded");
  }));
}

TEST_CASE("states of ranks are views: nothing is copied, and every element of a whole has an owner") {
  for (const int ranks : {1, 3, 4})
    for (const Way way : ways)
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Trainee t(world, way);
        t.step(world, 0);
        const Values whole = values(t);
        MemoryLedger& memory = Context::current().memory();
        const std::int64_t before = memory.held(DeviceType::cpu).total();
        const shard::ShardedStateDict model = shard::sharded_state_dict(t.net),
                                      moments = shard::sharded_optimizer_state(t.net, *t.optimizer);
        expect(memory.held(DeviceType::cpu).total() - before < 2000, "{} bytes were made",
               memory.held(DeviceType::cpu).total() - before);  // counts of steps and rates
        for (const auto* state : {&model, &moments})
          for (const shard::ShardedTensor& tensor : *state) {
            const std::vector<double>& all = whole.at(tensor.name);
            const auto mine = to(tensor.values, f64).to_vector<double>();
            expect(tensor.shape.numel() == static_cast<std::int64_t>(all.size()), "shape of {}", tensor.name);
            expect(std::equal(mine.begin(), mine.end(), all.begin() + tensor.begin), "run of {}",
                   tensor.name);
          }
      }));
}

TEST_CASE("saving copies nothing, and loading holds the new shards and one whole parameter") {
  constexpr std::int64_t whole = width * width * 4, slack = 20'000;
  const TempDirectory folder;
  for (const int from_ranks : {1, 4}) {
    for (const auto layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter}) {
      for (const int ranks : {from_ranks, 2}) {
        const bool saves = ranks == from_ranks;
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          manual_seed(1);
          MemoryLedger& memory = Context::current().memory();
          const auto held = [&] { return memory.held(DeviceType::cpu).total(); };
          const std::int64_t empty_handed = held();
          Wide net;
          for (nn::Linear& layer : net.layers) shard::fully_shard(layer, {.layout = layout});
          shard::fully_shard(net, {.layout = layout});
          nn::AdamW optimizer(net.parameters());
          const std::int64_t shards = held() - empty_handed;
          std::int64_t before = 0;
          const auto most = [&] { return memory.peak(DeviceType::cpu) - before; };
          if (saves) {
            net(ones({1, width})).backward();
            optimizer.step();
            optimizer.zero_grad();
            shard::reshard(net);
            before = held();
            memory.reset_peak(DeviceType::cpu);
            shard::save_checkpoint(net, optimizer, folder / "checkpoint", world.group());
            expect(most() < slack, "saving took {} bytes more", most());
            return;
          }
          before = held();
          memory.reset_peak(DeviceType::cpu);
          shard::load_checkpoint(net, optimizer, folder / "checkpoint", world.group());
          // The weights once more, until all ranks have read, and the moments, which are new.
          expect(held() - before < 2 * shards + slack, "loading left {} bytes more", held() - before);
          expect(most() < 3 * shards + whole + slack, "loading took {} bytes more, shards have {}", most(),
                 shards);
        }));
      }
    }
  }
}

TEST_CASE("one rank saves whole tensors that other programs read, several a part each and an index") {
  const TempDirectory folder;
  save(folder / "one", 1, Way::rows);
  CHECK(names_in(folder / "one") == std::set<std::string>{"model.safetensors", "optimizer.safetensors"});
  Values found;
  for (const char* file : {"model.safetensors", "optimizer.safetensors"})
    add_values(found, nn::load_state(folder / "one" / file));
  CHECK(found == plain_values(2));

  save(folder / "three", 3, Way::rows);
  CHECK(names_in(folder / "three") ==
        std::set<std::string>{"index.json", "model.rank-0.safetensors", "model.rank-1.safetensors",
                              "model.rank-2.safetensors", "optimizer.rank-0.safetensors",
                              "optimizer.rank-1.safetensors", "optimizer.rank-2.safetensors"});
  // No element is saved twice.
  for (const Way way : ways) {
    save(folder / "four", 4, way);
    std::map<std::string, std::int64_t> numels;
    for (int rank = 0; rank < 4; ++rank) {
      const SafetensorsFile part(folder / "four" / shard::part_name("model", rank, 4));
      for (const TensorEntry& entry : part.entries()) numels[entry.name] += Shape(entry.shape).numel();
    }
    for (const auto& [name, tensor] : Net().state_dict()) CHECK(numels.at(name) == tensor.numel());
  }
}

TEST_CASE("an optimizer's state by number, as earlier checkpoints have it, loads as ever") {
  const TempDirectory folder;
  std::filesystem::create_directory(folder / "earlier");
  run_ranks(1, [&](World& world) {
    Trainee plain(world, Way::plain);
    for (int i = 0; i < 2; ++i) plain.step(world, i);
    nn::save_state(folder / "earlier" / "model.safetensors", shard::full_state_dict(plain.net));
    nn::save_state(folder / "earlier" / "optimizer.safetensors",
                   shard::full_optimizer_state(*plain.optimizer));
  });
  const Values saved = plain_values(2);
  for (const int ranks : {1, 3})
    for (const Way way : ways)
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Trainee t(world, way, 7);
        shard::load_checkpoint(t.net, *t.optimizer, folder / "earlier", world.group());
        expect(values(t) == saved, "other values");
      }));
}

TEST_CASE("a file of whole tensors that was made elsewhere loads into a sharded model, and dtypes are cast") {
  const TempDirectory folder;
  std::filesystem::create_directory(folder / "made");
  Net net;
  net.to(f64);
  nn::save_state(folder / "made" / "model.safetensors", net.state_dict());
  net.to(f32);
  Values expected;
  add_values(expected, net.state_dict());
  for (const int ranks : {1, 3})
    for (const Way way : ways)
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Trainee t(world, way, 7);
        shard::load_checkpoint(t.net, folder / "made", world.group());
        Values found;
        add_values(found, shard::full_state_dict(t.net));
        expect(found == expected, "other values");
      }));
}

TEST_CASE("what ranks have each for themselves is saved from the first") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(3, [&](World& world) {
    Trainee t(world, Way::rows);
    {
      const NoGrad guard;
      fill_(t.net.mean.tensor(), world.rank() + 1);
    }
    shard::save_checkpoint(t.net, folder / "checkpoint", world.group());
    shard::load_checkpoint(t.net, folder / "checkpoint", world.group());
    expect(t.net.mean.tensor().to_vector<float>() == std::vector<float>{1, 1, 1}, "other values");
  }));
}

TEST_CASE("a part that is missing, cut, damaged or of another save is named on every rank") {
  const TempDirectory folder;
  for (const Way way : {Way::rows, Way::flat_parameters}) {
    const Path checkpoint = folder / "checkpoint", other = folder / "other";
    save(checkpoint, 3, way);
    save(other, 3, way, 2, 4);
    for (const std::string& name : names_in(checkpoint)) {
      const Path file = checkpoint / name;
      const std::string whole = content(file);
      INFO(name);
      for (const double part : {0.0, 0.01, 0.5, 0.99}) {
        std::filesystem::resize_file(file,
                                     static_cast<std::uintmax_t>(part * static_cast<double>(whole.size())));
        CHECK_NOTHROW(check_refused(checkpoint, 2, way, name));
      }
      for (std::size_t at = 0; at < whole.size(); at += 131) {
        std::string damaged = whole;
        damaged[at] = static_cast<char>(damaged[at] ^ 4);
        write(file, damaged);
        CHECK_NOTHROW(check_refused(checkpoint, 2, Way::flat, name));
      }
      write(file, content(other / name));
      // An index of another save makes all parts those of another.
      CHECK_NOTHROW(check_refused(checkpoint, 3, way, name == "index.json" ? "model.rank-0" : name));
      std::filesystem::remove(file);
      CHECK_NOTHROW(check_refused(checkpoint, 3, way, name == "index.json" ? "model.safetensors" : name));
      write(file, whole);
    }
    // Two parts that changed places.
    const Path a = checkpoint / "model.rank-1.safetensors", b = checkpoint / "model.rank-2.safetensors";
    std::filesystem::rename(a, folder / "aside");
    std::filesystem::rename(b, a);
    std::filesystem::rename(folder / "aside", b);
    CHECK_NOTHROW(check_refused(checkpoint, 2, way, "model.rank-1.safetensors': is a part of another save"));
  }
}

TEST_CASE("a folder without what is to be loaded says what is amiss") {
  const TempDirectory folder;
  CHECK_NOTHROW(check_refused(folder / "nowhere", 2, Way::rows, "nowhere' is not there"));
  for (const int ranks : {1, 3}) {
    const Path alone = folder / fmt::format("alone {}", ranks),
               parts = folder / fmt::format("parts {}", ranks);
    run_ranks(ranks, [&](World& world) {
      Trainee t(world, Way::rows);
      shard::save_checkpoint(t.net, alone, world.group());
    });
    CHECK_NOTHROW(check_refused(alone, 2, Way::flat, "it was saved without"));
    save(parts, ranks, Way::rows);
    const bool lost = std::filesystem::remove(parts / "index.json");
    if (lost) CHECK_NOTHROW(check_refused(parts, 2, Way::flat, "the index is lost"));
    CHECK(lost == (ranks > 1));
  }
}

TEST_CASE("a call that one rank makes alone is named on all, as the program wrote it") {
  const TempDirectory folder;
  save(folder / "saved", 2, Way::rows);
  using Call = std::function<void(Trainee&, const Group&)>;
  const std::pair<std::string, Call> calls[] = {
      {"'save_checkpoint'",
       [&](Trainee& t, const Group& ranks) { shard::save_checkpoint(t.net, folder / "new", ranks); }},
      {"'load_checkpoint'",
       [&](Trainee& t, const Group& ranks) { shard::load_checkpoint(t.net, folder / "saved", ranks); }},
      {"'load_sharded_state_dict'",
       [&](Trainee& t, const Group& ranks) {
         shard::load_sharded_state_dict(t.net, shard::sharded_state_dict(t.net), ranks);
       }},
      {"'whole values of ", [&](Trainee& t, const Group&) { shard::full_state_dict(t.net); }},
  };
  for (const Way way : {Way::rows, Way::flat})
    for (const auto& [name, call] : calls) {
      INFO(name);
      std::array<std::string, 2> heard;
      CHECK_NOTHROW(run_ranks(2, [&](World& world) {
        Trainee t(world, way);
        t.step(world, 0);
        heard[static_cast<std::size_t>(world.rank())] = message_of<CollectiveError>([&] {
          if (world.rank() == 0)
            call(t, world.group());
          else
            t.step(world, 1);
        });
      }));
      for (const std::string& message : heard) CHECK_THAT(message, ContainsSubstring(name));
    }
}

TEST_CASE("files of two saves in one folder are refused on every rank, whichever are mixed") {
  const TempDirectory folder;
  for (const int ranks : {1, 2}) {
    const Path mixed = folder / "mixed", one = folder / "one";
    save(one, ranks, Way::rows);
    const std::set<std::string> set = names_in(one);
    const std::vector<std::string> names(set.begin(), set.end());
    for (const auto& [steps, seed] : {std::pair(3, 3U), std::pair(2, 4U)}) {
      const Path other = folder / "other";
      save(other, ranks, Way::rows, steps, seed);
      for (unsigned from_other = 0; from_other < 1U << names.size(); ++from_other) {
        INFO(ranks << " ranks, step " << steps << " of seed " << seed << ", files " << from_other);
        std::filesystem::remove_all(mixed);
        std::filesystem::create_directory(mixed);
        for (std::size_t i = 0; i < names.size(); ++i)
          std::filesystem::copy((from_other >> i & 1U) == 0 ? one / names[i] : other / names[i], mixed);
        if (from_other == 0 || from_other + 1 == 1U << names.size())
          CHECK_NOTHROW(run_ranks(1, [&](World& world) {
            Trainee t(world, Way::plain, 7);
            shard::load_checkpoint(t.net, *t.optimizer, mixed, world.group());
            expect(values(t) == (from_other == 0 ? plain_values(2) : plain_values(steps, seed)), "values");
          }));
        else
          CHECK_NOTHROW(check_refused(mixed, 2, Way::flat, "another save"));
      }
    }
  }
}

TEST_CASE("ranks that find different saves in their folders are refused, and nothing changes") {
  const TempDirectory folder;
  for (const int saved_by : {1, 2}) {
    save(folder / "0", saved_by, Way::rows);
    save(folder / "1", saved_by, Way::rows, 3);
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      Trainee t(world, Way::rows, 7);
      const Values before = values(t);
      const auto load = [&](int number) {
        shard::load_checkpoint(t.net, *t.optimizer, folder / std::to_string(number), world.group());
      };
      const std::string message = message_on_all(world, [&] { load(world.rank()); });
      expect(message.find("rank 1 finds another save there than rank 0") != std::string::npos, "'{}'",
             message);
      expect(values(t) == before, "something changed");
      load(1);
      expect(values(t) == plain_values(3), "other values");
    }));
  }
}

TEST_CASE("whichever read fails, and on whichever rank, nothing is changed, and the ranks go on") {
  const TempDirectory folder;
  save(folder / "checkpoint", 3, Way::flat);
  const Values saved = plain_values(2);
  bool failed = true;
  int n = 0;
  for (; failed; n += 3) {
    FailingReads files(n);
    INFO("read " << n);
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      Trainee t(world, Way::rows, 7);
      t.step(world, 5);
      const Values before = values(t);
      std::string message;
      try {
        shard::load_checkpoint(t.net, *t.optimizer, folder / "checkpoint", world.group(), files);
      } catch (const FileError& error) {
        message = error.what();
      }
      world.group().barrier();
      expect(message.empty() == !files.failed(), "'{}'", message);
      expect(values(t) == (files.failed() ? before : saved), "other values");
      shard::load_checkpoint(t.net, *t.optimizer, folder / "checkpoint", world.group());
      expect(values(t) == saved, "other values when it was tried again");
    }));
    failed = files.failed();
  }
  CHECK(n > 60);
}

TEST_CASE("whatever change of a save fails, the folder is the old one or the new one") {
  const TempDirectory folder;
  const Values old = plain_values(1), fresh = plain_values(2);
  const Path checkpoint = folder / "checkpoint";
  const auto loaded = [&] {
    Values found;
    run_ranks(1, [&](World& world) {
      Trainee t(world, Way::plain, 7);
      shard::load_checkpoint(t.net, *t.optimizer, checkpoint, world.group());
      found = values(t);
    });
    return found;
  };
  CountingFileSystem counting;
  save(folder / "old", 2, Way::rows, 1);
  std::filesystem::copy(folder / "old", checkpoint);
  save(checkpoint, 2, Way::rows, 2, 3, counting);
  REQUIRE(counting.log().size() > 30);
  for (const Fault fault : all_faults)
    for (int n = 0; n < static_cast<int>(counting.log().size()); ++n) {
      INFO(name_of(fault) << " at change " << n);
      std::filesystem::remove_all(checkpoint);
      std::filesystem::copy(folder / "old", checkpoint);
      CountingFileSystem files(n, fault);
      std::atomic<bool> threw = false;
      CHECK_NOTHROW(run_ranks(2, [&](World& world) {
        Trainee t(world, Way::rows);
        go_to(t, 2);
        bool mine = false;
        try {
          shard::save_checkpoint(t.net, *t.optimizer, checkpoint, world.group(), {.files = files});
        } catch (const FileError&) {
          mine = threw = true;
        }
        world.group().barrier();
        expect(mine == threw, "some ranks threw and some did not");
      }));
      files.crash();
      const Values found = loaded();
      CHECK((found == old || found == fresh));
      if (!threw) CHECK(found == fresh);
      // What was left is no hindrance.
      CHECK_NOTHROW(save(checkpoint, 1, Way::plain, 1));
      CHECK(loaded() == old);
      CHECK(names_in(folder.path()) == std::set<std::string>{"checkpoint", "old"});
    }
}

TEST_CASE("ranks that do not hold the whole model cannot save it") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(4, [&](World& world) {
    Trainee t(world, Way::rows);
    const Group half = world.group().blocks(2);
    if (world.rank() > 1) return;
    std::string message;
    try {
      shard::save_checkpoint(t.net, folder / "checkpoint", half);
    } catch (const ValueError& error) {
      message = error.what();
    }
    expect(message.find("elements of '") != std::string::npos, "it said '{}'", message);
  }));
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE("a module that one rank cannot save is refused on all, and the ranks go on") {
  const TempDirectory temp;
  for (const bool with_optimizer : {true, false})
    CHECK_NOTHROW(run_ranks(3, [&](World& world) {
      nn::Linear net(5, 7);
      shard::fully_shard(net);
      const nn::Sgd optimizer(net.parameters(), {});
      const auto save = [&] {
        if (with_optimizer)
          shard::save_checkpoint(net, optimizer, temp.path() / "step", world.group());
        else
          shard::save_checkpoint(net, temp.path() / "step", world.group());
      };
      const nn::Parameter own = net.weight.object();
      if (world.rank() == 1) net.weight = nn::Parameter(zeros({11}));
      const std::string message = message_on_all(world, save);
      expect(message.find("Cannot writeback") != std::string::npos, "{}", message);
      net.weight = own;
      save();
    }));
}

TEST_CASE("whatever a rank throws while it saves, all throw, and the ranks go on") {
  const TempDirectory temp;
  for (const bool of_library : {true, false})
    CHECK_NOTHROW(run_ranks(3, [&](World& world) {
      nn::Linear net(5, 7);
      shard::fully_shard(net);
      const auto write = [&](DirectoryWriter&) {
        if (of_library) throw std::runtime_error("by the test");
        throw 42;
      };
      std::string told;
      try {
        shard::save_checkpoint(net, temp.path() / "step", world.group(), {.also = write});
      } catch (const std::exception& error) {
        told = error.what();
      } catch (int thrown) {
        told = fmt::format("{}", thrown);
      }
      const std::string own = of_library ? "by the test" : "42",
                        others =
                            of_library ? "rank 0: by the test" : "rank 0: it threw what is no std::exception";
      expect(told == (world.rank() == 0 ? own : others), "{}", told);
      world.group().barrier();
    }));
}

TEST_CASE("a checkpoint of another model or optimizer is refused by name, and nothing changes") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    nn::Sequential other{nn::Linear(5, 8)};
    shard::fully_shard(other);
    nn::AdamW optimizer(other.parameters());
    shard::save_checkpoint(other, optimizer, folder / "other", world.group());
    Trainee t(world, Way::flat), sgd(world, Way::flat);
    t.step(world, 0);
    shard::save_checkpoint(t.net, *t.optimizer, folder / "adam", world.group());
    shard::save_checkpoint(t.net, folder / "weights", world.group());
    nn::Sgd plain_sgd(sgd.net.parameters());
    shard::save_checkpoint(sgd.net, plain_sgd, folder / "sgd", world.group());
    const Values before = values(t);
    const auto refused = [&](const char* name, const std::string& words) {
      const std::string message = message_on_all(
          world, [&] { shard::load_checkpoint(t.net, *t.optimizer, folder / name, world.group()); });
      expect(message.find((folder / name / "index.json").string()) != std::string::npos, "no name in '{}'",
             message);
      expect(message.find(words) != std::string::npos, "'{}' in '{}'", words, message);
      expect(values(t) == before, "something changed");
    };
    refused("other", "lacks 'first.weight'");
    refused("weights", "optimizer");
    const Values of_sgd = values(sgd);
    const std::string message = message_on_all(
        world, [&] { shard::load_checkpoint(sgd.net, plain_sgd, folder / "adam", world.group()); });
    expect(message.find("belong to no parameter") != std::string::npos, "it said '{}'", message);
    expect(values(sgd) == of_sgd, "something changed");
  }));
}

// ---- parts that no save writes ----

namespace {

/// A part of the tensor "x" with elements 0, 1, 2, ... and the note that comes with it.
struct Piece {
  std::vector<float> elements;
  std::string note;  ///< none: a whole tensor
  DType dtype = f32;
};

std::string complaint(const std::vector<Piece>& pieces) {
  const TempDirectory folder;
  const int ranks = static_cast<int>(pieces.size());
  for (int rank = 0; rank < ranks; ++rank) {
    const Piece& piece = pieces[static_cast<std::size_t>(rank)];
    const Tensor x =
        to(Tensor::from(piece.elements, {static_cast<std::int64_t>(piece.elements.size())}), piece.dtype);
    TensorMetadata notes;
    if (!piece.note.empty()) notes["sherd.run.x"] = piece.note;
    nn::save_state(folder / shard::part_name("model", rank, ranks), {{"x", x}}, notes);
  }
  const std::string_view what[] = {"model"};
  if (ranks > 1)
    write(folder / "index.json", shard::index_of(folder.path(), what, ranks, posix_file_system()));
  return message_of<Error>([&] {
    const shard::SavedState state(folder.path(), "model");
    const Tensor all = state.read(*state.find("x"), 0, 4);
    check<ValueError>(all.to_vector<float>() == std::vector<float>{0, 1, 2, 3}, "other values");
  });
}

}  // namespace

TEST_CASE("runs that do not make up a tensor are refused by the name of the part") {
  const std::string fits = "(nothing was thrown)";
  CHECK(complaint({{{0, 1, 2, 3}, ""}}) == fits);
  CHECK(complaint({{{0, 1}, "0 2 2"}, {{2, 3}, "2 2 2"}}) == fits);
  CHECK(complaint({{{2, 3}, "2 4"}, {{}, "2 4"}, {{0, 1}, "0 4"}}) == fits);
  const std::pair<std::vector<Piece>, std::string> wrong[] = {
      {{{{0, 1}, "0 4"}, {{3}, "3 4"}}, "rank-1.safetensors': does not fit"},           // a gap
      {{{{0, 1, 2}, "0 4"}, {{2, 3}, "2 4"}}, "rank-1.safetensors': does not fit"},     // an overlap
      {{{{0, 1}, "0 4"}, {{2}, "2 4"}}, "index.json': no part has"},                    // an end
      {{{{0, 1}, "0 4"}, {{2, 3}, "2 5"}}, "rank-1.safetensors': does not fit"},        // another shape
      {{{{0, 1}, "0 4"}, {{2, 3}, "2 4", f64}}, "rank-1.safetensors': does not fit"},   // another dtype
      {{{{0, 1, 2, 3}, ""}, {{0, 1, 2, 3}, ""}}, "rank-1.safetensors': does not fit"},  // twice
      {{{{0, 1}, "0 4"}, {{2, 3, 4}, "2 4"}}, "index.json': no part has"},              // beyond its end
      {{{{0, 1, 2, 3}, "0"}}, "model.safetensors': no part has"},                       // a number
      {{{{0, 1, 2, 3}, "0 9223372036854775807 4"}}, "model.safetensors': no part has"},
      {{{{0, 1, 2, 3}, "9223372036854775807 4"}}, "model.safetensors': does not fit"},
      {{{{0, 1, 2, 3}, "0 4 "}}, "the note '0 4 '"},
      {{{{0, 1, 2, 3}, "-1 4"}}, "the note '-1 4'"},
      {{{{0, 1, 2, 3}, "0 99999999999999999999"}}, "the note"},
      {{{{0, 1, 2, 3}, "0 1 1 1 1 1 1 1 1 1 4"}}, "the note"},
      {{{{0, 1, 2, 3}, "a 4"}}, "the note"},
  };
  for (const auto& [pieces, words] : wrong) {
    const std::string message = complaint(pieces);
    CHECK_THAT(message, ContainsSubstring(words));
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("an index that is none is refused by its name") {
  const TempDirectory folder;
  save(folder.path() / "checkpoint", 2, Way::rows);
  const Path index = folder.path() / "checkpoint" / "index.json";
  const std::string bad[] = {"",
                             "{}",
                             "[]",
                             "7",
                             "{\"format\":\"sherd-parts\",\"version\":2,\"parts\":{}}",
                             "{\"format\":\"sherd-parts\",\"version\":1}",
                             "{\"format\":\"sherd-parts\",\"version\":1,\"parts\":[]}",
                             "{\"format\":\"sherd-parts\",\"version\":1,\"parts\":{\"model\":[]}}",
                             "{\"format\":\"sherd-parts\",\"version\":1,\"parts\":{\"model\":[1,2]}}",
                             "{\"format\":7,\"version\":[]}",
                             std::string(100'000, '['),
                             std::string(3'000'000, ' ')};
  for (const std::string& text : bad) {
    write(index, text);
    CHECK_NOTHROW(check_refused(index.parent_path(), 2, Way::rows, "index.json"));
  }
  // Without checksums, but only where no file has any.
  write(index,
        "{\"format\":\"sherd-parts\",\"version\":1,\"parts\":{\"model\":[\"\",\"\"],\"optimizer\":[\"\",\"\"]"
        "}}");
  CHECK_NOTHROW(check_refused(index.parent_path(), 2, Way::rows, "index.json': has no checksum"));
}
