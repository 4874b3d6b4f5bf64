// `sherd bench`: what it reports, against what, and what it refuses.
#include "tools/bench.h"

#include <nlohmann/json.hpp>

#include "nn/gpt.h"
#include "runtime/context.h"
#include "runtime/op.h"
#include "runtime/ops.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/linear_gelu.h"
#include "tests/catch.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using tools::BenchOptions;
using tools::BenchReport;

namespace {

BenchOptions tiny() {
  BenchOptions options;
  options.sizes.batch = 4;
  options.sizes.layers = 2;
  options.sizes.heads = 2;
  options.sizes.width = 16;
  options.sizes.context = 8;
  options.sizes.threads = 1;
  options.vocab = 32;
  options.steps = 5;
  options.warmup = 2;
  return options;
}

std::string run(const BenchOptions& options) { return tools::bench(options, posix_file_system()); }

/// Counts the FLOP of the linear layers' products.
class Products final : public Listener {
 public:
  void after(const AnyOp& op, Inputs in, Outputs out) override {
    if (op.name() == ops::Linear::name || op.name() == ops::LinearGelu::name)
      flop += 2.0 * static_cast<double>(out[0].numel()) * static_cast<double>(in[0].size(-1));
  }
  double flop = 0;
};

}  // namespace

TEST_CASE("bench reports a consistent set of figures, for every way to lie on ranks and every dtype") {
  for (const std::int64_t ranks : {1, 2})
    for (const std::string dtype : {"f32", "bf16", "f16"})
      for (const std::string strategy : {"full_shard", "no_shard"}) {
        BenchOptions options = tiny();
        options.sizes.ranks = ranks;
        options.sizes.param_dtype = dtype;
        options.sizes.strategy = strategy;
        options.sizes.micro_batch = ranks;  // two micro-batches a rank, or one
        INFO(ranks << " ranks, " << dtype << ", " << strategy);
        const std::optional<BenchReport> r = tools::run_bench(options, posix_file_system());
        REQUIRE(r);
        CHECK(r->fastest_ms <= r->step_ms);
        CHECK(r->step_ms <= r->slowest_ms);
        CHECK(r->fastest_ms > 0);
        const double tokens = 4 * 8;
        CHECK(r->tokens_per_s <= 1e3 * tokens / r->fastest_ms * 1.01);
        CHECK(
            r->model_tflops ==
            Approx(1e-12 * r->tokens_per_s *
                   tools::flop_per_token({.layers = 2, .heads = 2, .width = 16, .context = 8, .vocab = 32})));
        REQUIRE(r->peak_tflops);
        CHECK(*r->mfu() == Approx(r->model_tflops / *r->peak_tflops));
        CHECK_THAT(r->peak_source, ContainsSubstring("measured") && ContainsSubstring(dtype));
        // Parameters, gradients and two moments in f32; shared out, a rank has its part.
        const double share = strategy == "no_shard" ? 1.0 : 1.0 / static_cast<double>(ranks);
        CHECK(r->peak_memory > 16 * share * static_cast<double>(r->parameters));
        CHECK_THAT(r->held_between_steps,
                   ContainsSubstring("parameters ") && ContainsSubstring("optimizer "));
        CHECK_THAT(tools::text_of(*r), ContainsSubstring("tokens/s") && ContainsSubstring("mfu") &&
                                           ContainsSubstring("memory") && ContainsSubstring(dtype));
      }
}

TEST_CASE("bench counts six FLOP for each weight that stands in a product, as a forward shows") {
  for (const std::int64_t layers : {1, 3})
    for (const std::int64_t vocab : {10, 100}) {
      const nn::GptOptions sizes{.layers = layers, .heads = 2, .width = 8, .context = 6, .vocab = vocab};
      const nn::Gpt model(sizes);
      Products products;
      {
        const Listening scope(products);
        model(zeros({5, 6}, {i64}));
      }
      const double attention = 12.0 * static_cast<double>(layers) * 8 * 6;
      CHECK(3 * products.flop / (5 * 6) == tools::flop_per_token(sizes) - attention);
    }
}

TEST_CASE("bench against an earlier report gives ratios and names what was another") {
  const TempDirectory folder;
  BenchOptions options = tiny();
  options.out = (folder / "first.json").string();
  run(options);
  json first = json::parse(posix_file_system().read(options.out));
  CHECK(first["figures"]["tokens_per_s"].get<double>() > 0);
  CHECK(first["mfu"].get<double>() > 0);

  std::optional<BenchReport> report = tools::run_bench(tiny(), posix_file_system());
  const std::string text = tools::comparison(*report, tools::json_text(*report));
  CHECK_THAT(text, ContainsSubstring("tokens_per_s  1.000") && ContainsSubstring("peak_memory   1.000"));
  CHECK_THAT(text, !ContainsSubstring("another"));
  BenchReport faster = *report;
  faster.tokens_per_s *= 2;
  faster.options.sizes.width = 32;
  const std::string other = tools::comparison(faster, tools::json_text(*report));
  CHECK_THAT(other,
             ContainsSubstring("tokens_per_s  2.000") && ContainsSubstring("another width: 32 now, 16 then"));

  options.against = options.out;
  CHECK_THAT(message_of<FileError>([&] { run(options); }), ContainsSubstring("--out"));
  options.out.clear();
  CHECK_THAT(run(options), ContainsSubstring("against tokens_per_s"));

  for (const std::string bad : {"", "{}", "[1, 2]", "no JSON", R"({"settings":{},"figures":{"step_ms":1}})",
                                R"({"settings":{},"figures":{"tokens_per_s":"fast"}})"}) {
    CHECK_THAT(message_of<ValueError>([&] { tools::comparison(*report, bad); }),
               ContainsSubstring("--against"));
  }
  options.against = (folder / "nothing.json").string();
  CHECK_THAT(message_of<FileError>([&] { run(options); }), ContainsSubstring("nothing.json"));
}

TEST_CASE("bench takes a peak that is given, knows some GPUs, and says why it has none") {
  BenchOptions options = tiny();
  options.peak_tflops = 0.5;
  const std::optional<BenchReport> report = tools::run_bench(options, posix_file_system());
  CHECK(*report->peak_tflops == 0.5);
  CHECK(report->peak_source == "given");

  CHECK(tools::listed_tflops("NVIDIA H200", bf16) == 989.4);
  CHECK(tools::listed_tflops("NVIDIA H100 80GB HBM3", f16) == 989.4);
  CHECK(tools::listed_tflops("NVIDIA H100 PCIe", bf16) == 756.4);
  CHECK(tools::listed_tflops("NVIDIA H100 80GB HBM3", f32) == 66.9);
  CHECK_FALSE(tools::listed_tflops("Some Other 5000", bf16));
  BenchReport none = *report;
  none.peak_tflops.reset();
  none.peak_source = "no peak is listed";
  CHECK_FALSE(none.mfu());
  CHECK_THAT(tools::text_of(none), ContainsSubstring("mfu     none: no peak is listed"));
  CHECK_FALSE(json::parse(tools::json_text(none)).contains("mfu"));
}

TEST_CASE("bench writes a trace of the timed steps alone", "[threads meet]") {
  const TempDirectory folder;
  BenchOptions options = tiny();
  options.trace = (folder / "trace.json").string();
  run(options);
  const json trace = json::parse(posix_file_system().read(options.trace));
  std::int64_t steps = 0, blocks = 0;
  for (const json& event : trace) {
    steps += event["name"] == "step" && event["cat"] == "step";
    blocks += event["name"] == "blocks.1";
  }
  CHECK(steps == options.steps);
  CHECK(blocks == options.steps);
}

TEST_CASE("bench refuses what is out of range, by the flag's name") {
  const auto refused = [](auto&& change) {
    BenchOptions options = tiny();
    change(options);
    return message_of<ValueError>([&] { run(options); });
  };
  CHECK_THAT(refused([](BenchOptions& o) { o.steps = 0; }), ContainsSubstring("--steps 0"));
  CHECK_THAT(refused([](BenchOptions& o) { o.warmup = -1; }), ContainsSubstring("--warmup -1"));
  CHECK_THAT(refused([](BenchOptions& o) { o.vocab = 0; }), ContainsSubstring("--vocab 0"));
  CHECK_THAT(refused([](BenchOptions& o) { o.peak_tflops = -1; }), ContainsSubstring("--peak-tflops -1"));
  CHECK_THAT(refused([](BenchOptions& o) { o.sizes.heads = 3; }), ContainsSubstring("--heads 3"));
  CHECK_THAT(refused([](BenchOptions& o) { o.sizes.ranks = 3; }), ContainsSubstring("--ranks 3"));
}
