// A program as data, which passes change (`passes/`) and `Program::Impl` runs.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/capture/capture.h"
#include "autograd/trace.h"

namespace sherd {

/// Whether an effect is one of two that belong together.
enum class Bracket : std::uint8_t { none, begins, ends };

/// What a step did beside its ops.
struct Effect {
  std::size_t before;  ///< index of the op that came next, or the number of ops
  std::function<void()> again;
  std::string name{};  ///< in the text; empty for what no reader of it need know
  Bracket bracket = Bracket::none;
  std::function<void()> undo{};  ///< of one that begins, whose end a replay did not come to
};

/// What crosses between two programs that are one cut in two, as storages of the trace by their number in
/// the cut: the first makes it, for each run anew, and the second is handed it.
struct Cut {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> made{}, kept{};  // storage, number
};

/// What was heard of a stretch of a program, what it was given and what it gave.
struct Recorded {
  Trace trace;
  std::vector<Effect> effects;
  std::vector<TracedTensor> inputs, outputs;
  RandomKey random_begin, random_end;  ///< where its random numbers begin and end
  std::optional<Cut> cut{};            ///< of a half
};

/// Runs `step(inputs)` once and gives what was heard of it, and in `outputs` what it returned, without
/// history. Errors as `capture`.
Recorded record(const Step& step, const std::vector<Tensor>& inputs, std::vector<Tensor>& outputs);

}  // namespace sherd
