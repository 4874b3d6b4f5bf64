#include "tools/progress.h"

#include <fmt/format.h>

#include <cmath>

#include "runtime/shown.h"
#include "tools/generate.h"
#include "tools/interrupt.h"
#include "tools/terminal.h"

namespace sherd::tools {
namespace {

/// What cannot be written is noticed at the end, by `ferror`: a full disk under the log ends no run.
template <class... Args>
void print(std::FILE* out, fmt::format_string<Args...> text, Args&&... args) {
  const std::string line = fmt::format(text, std::forward<Args>(args)...);
  std::fwrite(line.data(), 1, line.size(), out);
}

std::string clock_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::ceil(seconds));
  return whole < 3600 ? fmt::format("{}:{:02}", whole / 60, whole % 60)
                      : fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace

Progress::Progress(std::FILE* out)
    : out_(out),
      terminal_(is_terminal(::fileno(out))),
      pause_(terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(5)) {}

void Progress::started(const RunFacts& f) {
  bigram_ = f.bigram;
  const std::string out = shown(f.out.string(), 300);
  if (f.bigram)
    print(out_,
          "run {}: {} parameters, {} files, {} bytes to train on, {} to validate with; bigram model: "
          "{:.4f} nats/byte\n",
          out, f.parameters, f.files, f.train_bytes, f.validation_bytes, *f.bigram);
  else
    print(out_, "run {}: {} of {} parameters, {} files, {} tokens to train on, {} to validate with\n", out,
          f.trained.value_or(f.parameters), f.parameters, f.files, f.train_bytes, f.validation_bytes);
  if (f.step > 0) print(out_, "going on from step {} of {}\n", f.step, f.steps);
  std::fflush(out_);
}

void Progress::stepped(const StepFacts& f) {
  if (f.step == f.steps || Clock::now() >= next_) show(f);
}

void Progress::show(const StepFacts& f) {
  next_ = Clock::now() + pause_;
  const std::string line = fmt::format("step {}/{}  loss {:.4f}  {:.0f} tokens/s  {} left", f.step, f.steps,
                                       f.loss, f.tokens_per_s, clock_text(f.seconds_left));
  print(out_, "{}{}{}", terminal_ ? "\r" : "", line, terminal_ ? "\x1b[K" : "\n");
  line_open_ = terminal_;
  std::fflush(out_);
}

void Progress::end_line() {
  if (line_open_) print(out_, "\n");
  line_open_ = false;
  std::fflush(out_);
}

void Progress::validated(std::int64_t step, double loss) {
  print(out_, "{}step {}  val_loss {:.4f}", line_open_ ? "\r\x1b[K" : "", step, loss);
  if (bigram_) print(out_, "  ({:+.4f} to the bigram model)", loss - *bigram_);
  print(out_, "\n");
  line_open_ = false;
  std::fflush(out_);
}

void Progress::met() { catch_interrupts(); }

bool Progress::stop_wanted() { return interrupted(); }

void Progress::finished(const TrainResult& r) {
  end_line();
  if (!r.val_loss) {
    print(out_, "stopped after step {}; to go on: sherd train --resume --out {}\n", r.step,
          shown(r.out.string(), 300));
    return;
  }
  if (!r.tuned.empty()) {
    print(out_, "final: step={} loss={:.4f} val_loss={:.4f} tokens_per_s={:.0f}\ntuned: {}\n", r.step, r.loss,
          *r.val_loss, r.tokens_per_s, shown(r.tuned.string(), 300));
    return;
  }
  print(out_, "sample:\n{}\n", printable(r.sample));
  print(out_, "final: step={} loss={:.4f} val_loss={:.4f} bigram={:.4f} tokens_per_s={:.0f}\n", r.step,
        r.loss, *r.val_loss, r.bigram, r.tokens_per_s);
}

}  // namespace sherd::tools
