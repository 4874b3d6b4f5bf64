#include "autograd/op_costs.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <vector>

#include "autograd/capture/costs.h"
#include "runtime/context.h"
#include "runtime/io/durable.h"

namespace sherd {
namespace {

constexpr std::string_view header = "sherd op costs 1";
constexpr std::uint64_t most_bytes = std::uint64_t{1} << 26;

using Clock = std::chrono::steady_clock;

/// Takes the time from one op's end to the next one's.
class Stopwatch final : public Listener {
 public:
  std::map<std::string, std::vector<std::int64_t>, std::less<>> times{};  // nanoseconds

  void after(const AnyOp& op, Inputs in, Outputs out) override {
    for (const Tensor& t : out)
      if (t.defined()) backend(t.device().type).synchronize(t.device());
    const Clock::duration time = Clock::now() - last_;
    const auto specs_of = [](Inputs tensors) {
      Specs specs;
      for (const Tensor& t : tensors) specs.push_back(t.defined() ? t.spec() : Spec::none());
      return specs;
    };
    if (!op.is_view())
      times[cost_key(op, specs_of(in), specs_of(Inputs(out.begin(), out.size())))].push_back(
          std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
    last_ = Clock::now();
  }

 private:
  Clock::time_point last_ = Clock::now();
};

}  // namespace

OpCosts OpCosts::measure(const std::function<void()>& step, int rounds) {
  check<ValueError>(rounds > 0, "OpCosts: {} rounds; give it one or more", rounds);
  step();
  Stopwatch watch;
  {
    const Listening listening(watch);
    for (int round = 0; round < rounds; ++round) step();
  }
  const auto medians = std::make_shared<Times>();
  for (auto& [op, times] : watch.times) {
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::ranges::nth_element(times, middle);
    medians->emplace(op, *middle);
  }
  OpCosts costs;
  costs.times_ = medians;
  return costs;
}

OpCosts OpCosts::read(const std::filesystem::path& path) {
  const std::string text = posix_file_system().read(path, most_bytes);
  const auto times = std::make_shared<Times>();
  std::size_t number = 0;
  for (std::string_view rest = text; !rest.empty(); ++number) {
    const std::size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
    std::int64_t time = 0;
    const auto [behind, error] = std::from_chars(line.data(), line.data() + line.size(), time);
    const std::size_t digits = static_cast<std::size_t>(behind - line.data());
    const bool is_entry =
        error == std::errc() && time >= 0 && digits + 1 < line.size() && line[digits] == ' ';
    const bool good =
        end != rest.npos &&
        (number == 0 ? line == header : is_entry && times->emplace(line.substr(digits + 1), time).second);
    check<ValueError>(good, "OpCosts: line {} of {} is not of a file that OpCosts::write made; measure anew",
                      number + 1, path.string());
  }
  check<ValueError>(number > 0, "OpCosts: {} is empty; measure anew", path.string());
  OpCosts costs;
  costs.times_ = times;
  return costs;
}

void OpCosts::write(const std::filesystem::path& path) const {
  std::string text = fmt::format("{}\n", header);
  if (times_)
    for (const auto& [op, time] : *times_) text += fmt::format("{} {}\n", time, op);
  write_durably(path, [&](OutputFile& file) { file.write(std::as_bytes(std::span(text))); });
}

std::optional<std::int64_t> OpCosts::nanoseconds(std::string_view op) const {
  if (!times_) return {};
  const auto known = times_->find(op);
  return known == times_->end() ? std::nullopt : std::optional(known->second);
}

}  // namespace sherd
