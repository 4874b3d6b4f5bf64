// What the files that call oneDNN share. It is included by them alone, where the library is there.
#pragma once

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include <map>
#include <memory>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <shared_mutex>

namespace sherd::cpu {

/// oneDNN starts threads of its own (and then changes bits) unless this thread's OpenMP setting forbids it.
class OneThread {
 public:
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = omp_get_max_threads();
};

/// The processor. Never destroyed, since plans that are kept refer to it.
inline const dnnl::engine& processor_engine() {
  static const auto& engine = *std::make_unique<dnnl::engine>(dnnl::engine::kind::cpu, 0).release();
  return engine;
}

/// Memory of the caller as oneDNN sees it; it has no word for memory that is only read.
inline dnnl::memory argument(const dnnl::memory::desc& desc, const void* data) {
  return dnnl::memory(desc, processor_engine(), const_cast<void*>(data));
}

/// Plans of calls by what decides them, made once for all threads, since making one takes as long as a small
/// call. Too many are all forgotten; who uses one keeps it alive.
template <class Key, class Plan>
class Plans {
 public:
  template <class Make>
  std::shared_ptr<const Plan> find(const Key& key, const Make& make) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto at = made_.find(key); at != made_.end()) return at->second;
    }
    auto plan = std::make_shared<const Plan>(make());
    const std::unique_lock lock(mutex_);
    if (made_.size() >= most) made_.clear();
    return made_.emplace(key, std::move(plan)).first->second;
  }

 private:
  static constexpr std::size_t most = 1024;
  std::shared_mutex mutex_;
  std::map<Key, std::shared_ptr<const Plan>> made_;
};

}  // namespace sherd::cpu
