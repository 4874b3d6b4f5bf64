// `sherd bench`: how fast a model trains here, and against an earlier report.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <set>
#include <string>

#include "runtime/io/file_system.h"
#include "tools/train_options.h"

namespace sherd::tools {

struct BenchOptions {
  TrainOptions sizes;  ///< of the model, and how it lies on ranks; see `is_benched`
  std::int64_t vocab = 256;
  std::int64_t steps = 20, warmup = 5;
  double peak_tflops = 0;  ///< of all ranks' devices; 0: of a known GPU, or measured on cpu
  std::string out;         ///< file for the report as JSON; none: no file
  std::string against;     ///< an earlier such file
  std::string trace;       ///< file for a trace of the timed steps
};

/// Whether a setting of `train` is one of `bench` too.
bool is_benched(const Setting& setting);

/// What one run measured. Rates are of all ranks together.
struct BenchReport {
  nlohmann::json settings() const;

  BenchOptions options;
  std::string product;  ///< the device's; empty on cpu
  std::int64_t parameters = 0;
  double step_ms = 0, fastest_ms = 0, slowest_ms = 0;  ///< median and ends, by the device's clock
  double tokens_per_s = 0;                             ///< over all timed steps, by the host's clock
  double model_tflops = 0;                             ///< of the products that the model's size asks for
  std::optional<double> peak_tflops{};
  std::string peak_source;         ///< where that comes from, or why there is none
  double peak_memory = 0;          ///< most bytes that a rank's tensors held at once
  std::string held_between_steps;  ///< by rank 0's tensors, by what for

  std::optional<double> mfu() const;
};

/// FLOP a token of training a Gpt: six a weight that stands in a product (the tied embedding once, as
/// logits), and 12 x layers x width x context for attention, which counts what causality leaves out.
double flop_per_token(const nn::GptOptions& options);
/// Dense TFLOP/s of one GPU by its maker, for products in `dtype`; none for a product that is not listed.
std::optional<double> listed_tflops(std::string_view product, DType dtype);

/// Trains on random tokens: warm-up steps, then timed ones, which wait for the device at their end only. The
/// result of a process that rank 0 is not in is empty. ValueError for options out of their range, FileError.
std::optional<BenchReport> run_bench(const BenchOptions& options, FileSystem& files);

/// What is printed.
std::string text_of(const BenchReport& report);
/// One line a figure: ours over the earlier one's, and a line for each setting that was another. ValueError
/// for what is no report.
std::string comparison(const BenchReport& report, const std::string& earlier);
std::string json_text(const BenchReport& report);

/// All of `sherd bench`: runs, writes `out`, and gives what is to be printed. The file of `against` is read
/// before anything is run.
std::string bench(const BenchOptions& options, FileSystem& files);

}  // namespace sherd::tools
