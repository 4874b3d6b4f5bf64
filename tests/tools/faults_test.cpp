#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/counting_file_system.h"
#include "tests/temp_directory.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Silent final : tools::Reporter {};

tools::TrainResult run(const tools::TrainOptions& options, FileSystem& files) {
  Silent reporter;
  return tools::train(options, files, reporter);
}

/// Every checkpoint that stands under its own name loads.
void check_checkpoints(const tools::TrainOptions& options) {
  for (const std::int64_t step : tools::saved_steps(options.out, posix_file_system())) {
    const auto path = tools::checkpoint_path(options.out, step);
    nn::Gpt model(tools::model_options(options));
    CHECK_NOTHROW(tools::load_model(path, model, posix_file_system()));
    CHECK(tools::read_config(path, posix_file_system()).step == step);
  }
}

/// A run whose change `n` meets `fault` says so in one line, leaves checkpoints that load, and goes on to
/// `expected`.
void break_and_go_on(tools::TrainOptions options, int n, Fault fault,
                     const std::map<std::string, std::string>& expected) {
  options.resume = false;
  CountingFileSystem files(n, fault);
  // Cleaning up may fail quietly: then the run ends well.
  std::string message;
  try {
    run(options, files);
  } catch (const FileError& error) {
    message = error.what();
  }
  files.crash();
  REQUIRE(files.broke());
  CHECK(message.find('\n') == std::string::npos);
  check_checkpoints(options);

  CountingFileSystem healthy;
  options.resume = !tools::saved_steps(options.out, healthy).empty();
  run(options, healthy);
  CHECK(contents(options.out) == expected);
  std::filesystem::remove_all(options.out);
}

}  // namespace

TEST_CASE(
    "whatever change of a run fails, the newest checkpoint loads and the run goes on to the same bits", "[one thread]") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  auto options = small_options(folder / "text", folder / "whole");
  options.steps = 3;
  CountingFileSystem counting;
  run(options, counting);
  const auto expected = contents(options.out);
  const int changes = static_cast<int>(counting.log().size());
  REQUIRE(changes > 50);

  for (const Fault fault : all_faults) {
    for (int n = 0; n < changes; ++n) {
      INFO(name_of(fault) << " at change " << n << ": " << counting.log()[static_cast<std::size_t>(n)]);
      options.out = (folder / "broken").string();
      break_and_go_on(options, n, fault, expected);
    }
  }
}

TEST_CASE(
    "on ranks a change that fails ends them all with its reason, and the run goes on to the same bits") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  auto options = small_options(folder / "text", folder / "whole");
  options.ranks = 2;
  options.layout = "flat";
  options.steps = 2;
  CountingFileSystem counting;
  run(options, counting);
  const auto expected = contents(options.out);
  for (int n = 0; n < static_cast<int>(counting.log().size()); ++n) {
    INFO("change " << n << ": " << counting.log()[static_cast<std::size_t>(n)]);
    options.out = (folder / "broken").string();
    break_and_go_on(options, n, Fault::killed, expected);
  }
}
