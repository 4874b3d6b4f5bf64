// A GPU's time by op, in one run of a step.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "runtime/apply.h"
#include "runtime/cuda/rank.h"
#include "runtime/listener.h"

namespace sherd::bench {

/// An event behind each op, so that the device does not wait for the host in between.
class Profile final : public Listener {
 public:
  Profile() { mark(); }
  ~Profile() override {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  void after(const AnyOp& op, Inputs in, Outputs out) override {
    if (op.is_view()) return;
    std::string what = op.text() + " of";
    for (const Tensor& t : in.first(std::min<std::size_t>(in.size(), 2)))
      what += t.defined() ? " " + to_string(t.shape()) : " none";
    if (in.empty()) what += " " + to_string(out[0].shape());
    names_.push_back(std::move(what));
    mark();
  }
  /// All that takes a part of a thousand, the longest first.
  void print() const {
    cudaEventSynchronize(events_.back());
    struct Sum {
      int calls = 0;
      float milliseconds = 0;
    };
    std::map<std::string, Sum> sums;
    float total = 0;
    for (std::size_t i = 0; i < names_.size(); ++i) {
      float taken = 0;
      cudaEventElapsedTime(&taken, events_[i], events_[i + 1]);
      Sum& sum = sums[names_[i]];
      ++sum.calls;
      sum.milliseconds += taken;
      total += taken;
    }
    std::vector<std::pair<std::string, Sum>> sorted(sums.begin(), sums.end());
    std::ranges::sort(sorted, std::greater(), [](const auto& its) { return its.second.milliseconds; });
    for (const auto& [name, sum] : sorted)
      if (sum.milliseconds > total / 1000)
        std::printf("  %8.3f ms %4d x %s\n", sum.milliseconds, sum.calls, name.c_str());
    std::printf("  %8.3f ms in all\n", total);
  }

 private:
  void mark() {
    cudaEventCreate(&events_.emplace_back());
    cudaEventRecord(events_.back(), cuda::stream_of(Device::cuda(0)));
  }
  std::vector<cudaEvent_t> events_;
  std::vector<std::string> names_;  // of what lies between two of them
};

/// Prints the times of the third run.
inline void profile(const std::function<void()>& step) {
  for (int i = 0; i < 2; ++i) step();
  Profile profile;
  {
    const Listening listening(profile);
    step();
  }
  profile.print();
}

}  // namespace sherd::bench
