// A trace of where a run's time goes, for chrome://tracing and ui.perfetto.dev.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/group.h"
#include "nn/module.h"
#include "runtime/backend.h"
#include "runtime/io/file_system.h"
#include "runtime/memory.h"
#include "runtime/timeline.h"

namespace sherd::tools {

/// While this exists, what its rank does goes into a file in Chrome's JSON array format: each rank is a
/// process in it, with a row of slices of the rank's thread (forwards of the watched modules, backwards,
/// optimizer steps, calls among ranks and waits for them) and, where the rank computes on another device, a
/// row of the same slices as the device's stream worked on them; and a chart of the bytes that its tensors
/// hold there, by what they are for, as they were where slices begin and end. Times are those of the
/// machine's steady clock, in microseconds. It holds a bounded number of slices in memory, whatever the run's
/// length, and never waits for the device between its beginning and `finish`: device slices that find too
/// many under way are left out and counted.
class Trace final : public Timeline {
 public:
  /// Every rank of `ranks` calls; rank 0 replaces the file, which ranks on other machines have each for
  /// themselves. FileError.
  Trace(FileSystem::Path path, FileSystem& files, Group ranks, Device device);
  ~Trace() override;
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// Slices for the forwards of this module and those below, under their names, until this ends.
  void watch(nn::Module& module);
  /// Writes what is there and ends the file. Every rank calls it, once. A file that was never finished can be
  /// read too.
  void finish();

  void begin(std::string_view kind, std::string_view name) override;
  void end() noexcept override;

 private:
  class ModuleWatch;
  struct Open {
    std::string kind, name;
    double start;                      ///< microseconds
    std::unique_ptr<DeviceMark> mark;  ///< null on the host
  };
  /// A slice of the device whose end it may not have reached.
  struct Under {
    std::string kind, name;
    std::unique_ptr<DeviceMark> start, end;
  };

  bool on_device() const { return !device_.is_cpu(); }
  std::unique_ptr<DeviceMark> mark() const;
  void write_names();
  void chart_memory(double at);
  void slice(int row, std::string_view kind, std::string_view name, double start, double duration);
  void collect();
  void flush();

  FileSystem::Path path_;
  Group ranks_;
  Device device_;
  std::unique_ptr<OutputFile> file_;
  std::string text_;  // complete lines that are not in the file yet
  std::vector<Open> open_;
  std::deque<Under> under_way_;
  std::uint64_t left_out_ = 0;
  HeldMemory charted_;
  std::unique_ptr<DeviceMark> first_mark_;
  double first_time_ = 0;
  std::vector<std::unique_ptr<ModuleWatch>> modules_;
};

}  // namespace sherd::tools
