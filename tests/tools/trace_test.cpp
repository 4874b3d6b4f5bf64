// Traces: what is in them, that they change nothing, and that they are bounded.
#include "tools/trace.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "collectives/world.h"
#include "nn/layers.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/ranks.h"
#include "tests/tools/small_run.h"

using namespace sherd;
using namespace sherd::test;
using nlohmann::json;

namespace {

json read_trace(const std::filesystem::path& path) { return json::parse(posix_file_system().read(path)); }

struct Span {
  std::string name, kind;
  double start, end;
};

/// The slices of one row, by their start; outer ones first.
std::vector<Span> row(const json& trace, int rank, int row) {
  std::vector<Span> spans;
  for (const json& event : trace)
    if (event["ph"] == "X" && event["pid"] == rank && event["tid"] == row)
      spans.push_back(
          {event["name"], event["cat"], event["ts"], event["ts"].get<double>() + event["dur"].get<double>()});
  std::ranges::sort(spans, [](const Span& a, const Span& b) {
    return a.start != b.start ? a.start < b.start : a.end > b.end;
  });
  return spans;
}

/// Times have three digits behind the point, so ends may be a little off.
constexpr double rounding = 0.01;

bool nested(const std::vector<Span>& spans) {
  std::vector<const Span*> open;
  for (const Span& span : spans) {
    while (!open.empty() && open.back()->end <= span.start + rounding) open.pop_back();
    if (!open.empty() && span.end > open.back()->end + rounding) return false;
    open.push_back(&span);
  }
  return true;
}

std::int64_t count(const std::vector<Span>& spans, std::string_view name) {
  return std::ranges::count(spans, name, &Span::name);
}

bool within(const std::vector<Span>& spans, std::string_view inner, std::string_view outer) {
  return std::ranges::all_of(spans, [&](const Span& a) {
    return a.name != inner || std::ranges::any_of(spans, [&](const Span& b) {
             return b.name == outer && b.start <= a.start + rounding && a.end <= b.end + rounding;
           });
  });
}

/// What each chart of a rank's memory says, in the order of the file.
std::vector<std::map<std::string, std::int64_t>> memory_of(const json& trace, int rank) {
  std::vector<std::map<std::string, std::int64_t>> charts;
  for (const json& event : trace)
    if (event["ph"] == "C" && event["pid"] == rank) charts.push_back(event["args"]);
  return charts;
}

/// A module that throws when it is told to.
struct Fragile final : nn::Layer<Fragile> {
  nn::Linear inner{3, 3};
  bool throws = false;
  Tensor forward(const Tensor& x) {
    const Tensor y = inner(x);
    if (throws) throw std::runtime_error("no");
    return y;
  }
  void visit(auto&& on) { on("inner", inner); }
};

/// A device whose work takes a second a mark, and is done when the test says so.
class SlowBackend final : public Backend {
 public:
  class Mark final : public DeviceMark {
   public:
    Mark(SlowBackend& on, int at) : on_(on), at_(at) {}
    bool reached() override { return at_ <= on_.done; }
    void wait() override { on_.done = std::max(on_.done, at_); }
    double seconds_since(const DeviceMark& earlier) const override {
      const Mark& from = dynamic_cast<const Mark&>(earlier);
      if (!(at_ <= on_.done && from.at_ <= on_.done)) throw std::logic_error("a mark was asked too early");
      return at_ - from.at_;
    }
    void read(void*, const void*, std::size_t) override {}

   private:
    SlowBackend& on_;
    int at_;
  };
  void* allocate(Device, std::size_t bytes) override { return std::aligned_alloc(64, (bytes / 64 + 1) * 64); }
  void deallocate(Device, void* data, std::size_t) noexcept override { std::free(data); }
  void copy(void* to, Device, const void* from, Device, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void synchronize(Device) override { ++synchronised; }
  std::unique_ptr<DeviceMark> mark(Device) override { return std::make_unique<Mark>(*this, ++given); }
  int given = 0, done = 0, synchronised = 0;
};

Device slow_device(SlowBackend*& backend) {
  static SlowBackend instance;
  static const Device device{register_backend("slow", instance), 0};
  backend = &instance;
  return device;
}

}  // namespace

TEST_CASE("a trace has each rank as a process, its modules nested under their names, and changes no bit",
          "[threads meet]") {
  for (const std::int64_t ranks : {1, 2}) {
    const Runs runs;
    tools::TrainOptions options = runs.options("plain");
    options.ranks = ranks;
    options.layers = 2;
    runs.run(options);
    options.out = (runs.folder / "traced").string();
    options.trace = (runs.folder / "trace.json").string();
    for (int times = 0; times < 2; ++times) {  // the second replaces the first
      std::filesystem::remove_all(options.out);
      runs.run(options);
      auto plain = runs.left("plain");
      CHECK(runs.left("traced") == plain);
      const json trace = read_trace(options.trace);
      std::set<int> processes;
      for (const json& event : trace) processes.insert(event["pid"].get<int>());
      CHECK(processes.size() == static_cast<std::size_t>(ranks));
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<Span> host = row(trace, rank, 0);
        CHECK(nested(host));
        CHECK(count(host, "backward") == 6);
        CHECK(std::ranges::count(host, "optimizer", &Span::kind) == 6);
        CHECK(count(host, "blocks.1.qkv") >= 6);  // validations run it too
        CHECK(count(host, "blocks.0.ln1") == count(host, "blocks.1.qkv"));
        CHECK(count(host, "Gpt") == count(host, "blocks.1.qkv"));
        std::vector<Span> modules;  // calls among ranks have names of modules too
        std::ranges::copy_if(host, std::back_inserter(modules),
                             [](const Span& s) { return s.kind.starts_with("Gpt") || s.kind == "Linear"; });
        CHECK(within(modules, "blocks.1.qkv", "blocks.1"));
        std::map<std::string, std::int64_t> most;
        for (const auto& chart : memory_of(trace, rank)) {
          CHECK(chart.size() == memory_uses);
          for (const auto& [use, bytes] : chart) most[use] = std::max(most[use], bytes);
        }
        for (const char* use : {"activations", "gradients", "optimizer", "parameters"}) CHECK(most[use] > 0);
        CHECK((most["gathered"] > 0) == (ranks > 1));
        if (ranks > 1) CHECK(memory_of(trace, rank).back()["gathered"] < most["gathered"]);
        CHECK(within(modules, "blocks.1", "Gpt"));
        CHECK(within(host, "backward", "step"));
        CHECK((std::ranges::count(host, "reduce_scatter", &Span::kind) > 0) == (ranks > 1));
        CHECK(row(trace, rank, 1).empty());
      }
    }
  }
  CHECK(Context::current().timeline() == nullptr);
}

TEST_CASE("a trace of a forward that throws ends its slices, and what follows nests") {
  const TempDirectory folder;
  run_ranks(1, [&](World& world) {
    Fragile net;
    tools::Trace trace(folder / "trace", posix_file_system(), world.group(), Device::cpu());
    trace.watch(net);
    for (const bool throws : {false, true, false}) {
      net.throws = throws;
      try {
        net(ones({2, 3}));
      } catch (const std::runtime_error&) {
      }
    }
    trace.finish();
    net(ones({2, 3}));  // nobody hears it
  });
  const std::vector<Span> spans = row(read_trace(folder / "trace"), 0, 0);
  CHECK(spans.size() == 6);
  CHECK(nested(spans));
  CHECK(within(spans, "inner", "Fragile"));
}

TEST_CASE("a trace's names may be any text") {
  const TempDirectory folder;
  const std::string names[] = {"a \"quoted\" one", "line\nbreak\\", "\xff\xfe no UTF-8", "über"};
  run_ranks(1, [&](World& world) {
    tools::Trace trace(folder / "trace", posix_file_system(), world.group(), Device::cpu());
    for (const std::string& name : names) const TimelineSlice slice("kind", name);
    trace.finish();
  });
  const std::vector<Span> spans = row(read_trace(folder / "trace"), 0, 0);
  REQUIRE(spans.size() == 4);
  CHECK(spans[0].name == names[0]);
  CHECK(spans[1].name == names[1]);
  CHECK(spans[3].name == names[3]);
}

TEST_CASE("a trace holds little in memory, and one that was not finished can be read") {
  const TempDirectory folder;
  run_ranks(1, [&](World& world) {
    tools::Trace trace(folder / "trace", posix_file_system(), world.group(), Device::cpu());
    for (int i = 0; i < 10000; ++i) {
      const TimelineSlice slice("kind", "a slice");
      if (i % 1000 != 999) continue;
      // Under a hundred bytes a line and 64 KiB in memory: most is in the file.
      expect(std::filesystem::file_size(folder / "trace") + (1 << 17) > static_cast<std::size_t>(i) * 70,
             "after {} slices the file has {} bytes", i, std::filesystem::file_size(folder / "trace"));
    }
  });
  std::string text = posix_file_system().read(folder / "trace");
  REQUIRE(text.ends_with(",\n"));
  text.resize(text.size() - 2);
  CHECK(row(json::parse(text + "]"), 0, 0).size() == 10000);
}

TEST_CASE("a trace shows when a device's stream worked, and never waits for it before its end") {
  SlowBackend* slow = nullptr;
  const Device device = slow_device(slow);
  const TempDirectory folder;
  run_ranks(1, [&](World& world) {
    tools::Trace trace(folder / "trace", posix_file_system(), world.group(), device);
    slow->done = slow->given;
    const int synchronised = slow->synchronised;
    for (int i = 0; i < 3; ++i) {
      const TimelineSlice outer("step", "outer");
      const TimelineSlice inner("step", "inner");
    }
    expect(slow->done < slow->given, "the trace waited for the device");
    expect(slow->synchronised == synchronised, "the trace synchronised with the device");
    for (int i = 0; i < 5000; ++i) const TimelineSlice more("step", "more");  // none of them is reached
    expect(slow->done < slow->given, "the trace waited for the device");
    trace.finish();
  });
  const json trace = read_trace(folder / "trace");
  const std::vector<Span> host = row(trace, 0, 0), stream = row(trace, 0, 1);
  CHECK(host.size() == 5006);
  CHECK(nested(stream));
  CHECK(count(stream, "outer") == 3);
  CHECK(within(stream, "inner", "outer"));
  for (const Span& span : stream) CHECK(span.end - span.start == Approx(span.name == "outer" ? 3e6 : 1e6));
  // What found too many under way is counted.
  std::size_t left_out = 0;
  for (const json& event : trace)
    if (event["name"] == "slices left out") left_out = event["args"]["count"];
  CHECK(left_out > 0);
  CHECK(stream.size() + left_out == host.size());
}

TEST_CASE("a trace that cannot be written is an error before the first step") {
  const Runs runs;
  tools::TrainOptions options = runs.options("run");
  options.trace = (runs.folder / "nowhere" / "trace.json").string();
  CHECK_THAT(message_of<FileError>([&] { runs.run(options); }),
             Catch::Matchers::ContainsSubstring("nowhere"));
}
