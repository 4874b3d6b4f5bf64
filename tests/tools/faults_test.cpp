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

/// What a crash left: the files' bytes and the folders, by relative path.
std::map<std::string, std::string> everything(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder)) return {};
  auto all = contents(folder);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_directory()) all[std::filesystem::relative(entry.path(), folder).string() + "/"];
  all["/"];
  return all;
}

/// One run, broken at one change after the other.
class Breaker {
 public:
  explicit Breaker(tools::TrainOptions options) : options_(std::move(options)) {
    CountingFileSystem counting;
    run(options_, counting);
    expected_ = contents(options_.out);
    log_ = counting.log();
    options_.out += "-broken";
  }
  int changes() const { return static_cast<int>(log_.size()); }
  const std::string& name_of(int change) const { return log_[static_cast<std::size_t>(change)]; }

  /// The run whose change `n` meets `fault` says so in one line, and what it leaves is as it should be.
  void break_at(int n, Fault fault) {
    CountingFileSystem files(n, fault);
    // Cleaning up may fail quietly: then the run ends well.
    std::string message;
    try {
      run(options_, files);
    } catch (const FileError& error) {
      message = error.what();
    }
    files.crash();
    REQUIRE(files.broke());
    CHECK(message.find('\n') == std::string::npos);
    // How a run goes on depends on what it finds alone: many crashes leave the same.
    if (left_.insert(everything(options_.out)).second) go_on();
    std::filesystem::remove_all(options_.out);
  }

 private:
  /// The checkpoints load, and the run goes on to the same bits.
  void go_on() const {
    check_checkpoints(options_);
    CountingFileSystem healthy;
    tools::TrainOptions options = options_;
    options.resume = !tools::saved_steps(options.out, healthy).empty();
    run(options, healthy);
    CHECK(contents(options.out) == expected_);
  }

  tools::TrainOptions options_;
  std::map<std::string, std::string> expected_;
  std::vector<std::string> log_;
  std::set<std::map<std::string, std::string>> left_;
};

/// As many files, tensors and lines as any other run has, with as little in them as can be.
tools::TrainOptions least_options(const TempDirectory& folder) {
  write_file(folder / "text", small_text(100));
  auto options = small_options(folder / "text", folder / "run");
  options.steps = 3;
  options.batch = 2;
  options.heads = 1;
  options.width = 2;
  options.context = 4;
  options.sample = 2;
  return options;
}

}  // namespace

TEST_CASE(
    "whatever change of a run fails, the newest checkpoint loads and the run goes on to the same bits") {
  const TempDirectory folder;
  Breaker run(least_options(folder));
  REQUIRE(run.changes() > 50);
  for (const Fault fault : all_faults) {
    for (int n = 0; n < run.changes(); ++n) {
      INFO(name_of(fault) << " at change " << n << ": " << run.name_of(n));
      run.break_at(n, fault);
    }
  }
}

TEST_CASE(
    "on ranks a change that fails ends them all with its reason, and the run goes on to the same bits") {
  const TempDirectory folder;
  auto options = least_options(folder);
  options.ranks = 2;
  options.layout = "flat";
  options.steps = 2;
  Breaker run(options);
  for (int n = 0; n < run.changes(); ++n) {
    INFO("change " << n << ": " << run.name_of(n));
    run.break_at(n, Fault::killed);
  }
}
