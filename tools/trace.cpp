#include "tools/trace.h"

#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/context.h"
#include "runtime/log.h"
#include "tools/output.h"

namespace sherd::tools {
namespace {

constexpr std::size_t text_limit = 1 << 16;    ///< bytes, after which lines go to the file
constexpr std::size_t under_way_limit = 4096;  ///< slices of the device
constexpr int host_row = 0, device_row = 1;

double now() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string json_text_of(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

}  // namespace

/// Tells the trace of one module's forwards.
class Trace::ModuleWatch final : public nn::ModuleObserver {
 public:
  ModuleWatch(Trace& trace, std::string name, nn::Module& module)
      : trace_(trace),
        kind_(module.type_name()),
        name_(name.empty() ? kind_ : std::move(name)),
        watching_(module.observe(*this)) {}
  void before_forward(nn::Module&, std::span<Tensor* const>) override {
    trace_.begin(kind_, name_);
    ++running_;
  }
  void after_forward(nn::Module&, std::span<Tensor* const>) override { end(); }
  void forward_failed(nn::Module&) noexcept override { end(); }

 private:
  /// A forward that failed is told of also where it did not begin here, or has ended.
  void end() noexcept {
    if (running_ == 0) return;
    --running_;
    trace_.end();
  }

  Trace& trace_;
  int running_ = 0;
  std::string kind_, name_;
  Subscription watching_;
};

Trace::Trace(FileSystem::Path path, FileSystem& files, Group ranks, Device device)
    : path_(std::move(path)), ranks_(std::move(ranks)), device_(device) {
  if (ranks_.rank() == 0) {
    begin_output({"--trace", path_}, files)->write(std::string_view("[\n"));
  }
  ranks_.barrier({.label = "trace"});
  file_ = files.append(path_);
  write_names();
  if (on_device()) {
    backend(device_.type).synchronize(device_);
    first_mark_ = mark();
    first_time_ = now();
  }
  Context::current().set_timeline(this);
}

Trace::~Trace() {
  if (Context::current().timeline() == this) Context::current().set_timeline(nullptr);
  try {
    if (file_) flush();
  } catch (const Error&) {  // the run ends for another reason, or did not care to finish
  }
}

std::unique_ptr<DeviceMark> Trace::mark() const {
  return on_device() ? backend(device_.type).mark(device_) : nullptr;
}

void Trace::watch(nn::Module& module) {
  for (const nn::NamedModule& m : module.named_modules())
    modules_.push_back(std::make_unique<ModuleWatch>(*this, m.name, *m.module));
}

void Trace::write_names() {
  const auto name = [&](std::string_view what, int row, const std::string& text) {
    text_ += fmt::format(R"({{"name":"{}","ph":"M","pid":{},"tid":{},"args":{{"name":{}}}}},)"
                         "\n",
                         what, ranks_.rank(), row, json_text_of(text));
  };
  name("process_name", host_row, fmt::format("rank {}", ranks_.rank()));
  name("thread_name", host_row, "host");
  if (on_device()) name("thread_name", device_row, to_string(device_) + " stream");
}

void Trace::slice(int row, std::string_view kind, std::string_view name, double start, double duration) {
  text_ += fmt::format(R"({{"name":{},"cat":{},"ph":"X","ts":{:.3f},"dur":{:.3f},"pid":{},"tid":{}}},)"
                       "\n",
                       json_text_of(name), json_text_of(kind), start, duration, ranks_.rank(), row);
}

/// Where it has changed.
void Trace::chart_memory(double at) {
  const HeldMemory held = Context::current().memory().held(device_.type);
  if (held.bytes == charted_.bytes) return;
  charted_ = held;
  text_ += fmt::format(R"({{"name":"bytes on {}","ph":"C","ts":{:.3f},"pid":{},"args":{{)",
                       to_string(device_), at, ranks_.rank());
  for (std::size_t use = 0; use < memory_uses; ++use)
    text_ += fmt::format(R"({}"{}":{})", use == 0 ? "" : ",", to_string(static_cast<MemoryUse>(use)),
                         held.bytes[use]);
  text_ += "}},\n";
}

void Trace::begin(std::string_view kind, std::string_view name) {
  // What is written to the file here is not in any slice's time.
  if (text_.size() >= text_limit) flush();
  std::string shown(name.empty() ? kind : name);
  chart_memory(now());
  open_.push_back({std::string(kind), std::move(shown), now(), mark()});
}

void Trace::end() noexcept {
  Open ended = std::move(open_.back());
  open_.pop_back();
  try {
    const double end = now();
    slice(host_row, ended.kind, ended.name, ended.start, end - ended.start);
    chart_memory(end);
    if (!ended.mark) return;
    collect();
    if (under_way_.size() < under_way_limit)
      under_way_.push_back({std::move(ended.kind), std::move(ended.name), std::move(ended.mark), mark()});
    else
      ++left_out_;
  } catch (const std::exception& error) {  // a device that failed says so in the run's own calls
    ++left_out_;
    write_log(LogLevel::warning, "trace: a slice is left out: {}", error.what());
  }
}

/// Slices that the device is through with.
void Trace::collect() {
  while (!under_way_.empty() && under_way_.front().end->reached()) {
    const Under& done = under_way_.front();
    slice(device_row, done.kind, done.name, first_time_ + 1e6 * done.start->seconds_since(*first_mark_),
          1e6 * done.end->seconds_since(*done.start));
    under_way_.pop_front();
  }
}

void Trace::flush() {
  if (text_.empty()) return;
  file_->write(std::string_view(text_));
  text_.clear();
}

void Trace::finish() {
  Context::current().set_timeline(nullptr);
  modules_.clear();
  if (!under_way_.empty()) under_way_.back().end->wait();
  collect();
  const std::string left_out = fmt::format(
      R"({{"name":"slices left out","ph":"M","pid":{},"args":{{"count":{}}}}})", ranks_.rank(), left_out_);
  const bool last = ranks_.rank() == 0;
  if (!last) text_ += left_out + ",\n";
  flush();
  ranks_.barrier({.label = "trace"});
  if (last) file_->write(left_out + "\n]\n");
  file_->close();
  file_.reset();
}

}  // namespace sherd::tools
