// The hook of traces: what takes time on a rank's thread says when it begins and ends.
#pragma once

#include <string_view>

#include "runtime/context.h"

namespace sherd {

/// Hears what the rank does, nested and in order, on the rank's thread: `begin`s and `end`s come in pairs.
/// What it throws from `begin` ends the call that is traced.
class SHERD_API Timeline {
 public:
  virtual ~Timeline();
  /// `kind` is one of few words ("backward", "optimizer", "collective"); neither text outlives the call.
  virtual void begin(std::string_view kind, std::string_view name) = 0;
  virtual void end() noexcept = 0;
};

/// A scope that the rank's timeline hears of; without a timeline it is one test of a pointer.
class TimelineSlice {
 public:
  TimelineSlice(std::string_view kind, std::string_view name) : timeline_(Context::current().timeline()) {
    if (timeline_ != nullptr) [[unlikely]]
      timeline_->begin(kind, name);
  }
  ~TimelineSlice() {
    if (timeline_ != nullptr) [[unlikely]]
      timeline_->end();
  }
  TimelineSlice(const TimelineSlice&) = delete;
  TimelineSlice& operator=(const TimelineSlice&) = delete;

 private:
  Timeline* timeline_;
};

}  // namespace sherd
