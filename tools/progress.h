// What `sherd train` shows while it runs.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

#include "tools/train.h"

namespace sherd::tools {

/// One line that lives on a terminal (`is_terminal`); elsewhere plain lines, one every few seconds and one a
/// validation.
class Progress final : public Reporter {
 public:
  explicit Progress(std::FILE* out);

  /// Signals ask it to stop from then on; before, they end the program, which waits for others.
  void met() override;
  void started(const RunFacts& facts) override;
  void stepped(const StepFacts& facts) override;
  void validated(std::int64_t step, double loss) override;
  /// The last lines: the sample and `final: ...`, or how to go on with a run that was stopped.
  void finished(const TrainResult& result) override;
  bool stop_wanted() override;

  /// Ends the live line. Call it before anything else is printed.
  void end_line();

 private:
  using Clock = std::chrono::steady_clock;
  void show(const StepFacts& facts);

  std::FILE* out_;
  bool terminal_;
  bool line_open_ = false;
  std::optional<double> bigram_;
  Clock::duration pause_;  // between lines
  Clock::time_point next_{};
};

}  // namespace sherd::tools
