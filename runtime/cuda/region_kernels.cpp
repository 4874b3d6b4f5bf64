#include "runtime/cuda/region_kernels.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/cuda/check.h"
#include "runtime/cuda/kernel_cache.h"
#include "runtime/cuda/nvrtc.h"
#include "runtime/cuda/region_source.h"
#include "runtime/log.h"

namespace sherd::cuda {
namespace {

std::string architecture_of(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return fmt::format("sm_{}{}{}", major, minor, major >= 9 ? "a" : "");
}

}  // namespace

/// All of the process, and the threads that compile them.
class RegionKernels {
 public:
  /// Never destroyed: a process that was forked off has no threads to wait for.
  static RegionKernels& of_process() {
    static RegionKernels& all = *std::make_unique<RegionKernels>().release();
    return all;
  }
  RegionKernels() {
    std::atexit([] { of_process().end(); });
  }
  /// Before the process ends what is being made is waited for, and nothing else begun.
  void end() {
    if (::getpid() != process_) return;
    std::vector<std::thread> threads;
    {
      const std::scoped_lock lock(mutex_);
      ending_ = true;
      threads = std::move(threads_);
    }
    changed_.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  std::shared_ptr<const RegionKernel> get(const std::string& text, int device) {
    const std::string architecture = architecture_of(device);
    const std::scoped_lock lock(mutex_);
    std::shared_ptr<RegionKernel>& kernel = known_[architecture + "\n" + text];
    if (kernel) return kernel;
    kernel = std::make_shared<RegionKernel>();
    waiting_.push_back({kernel, text, architecture, device});
    if (idle_ < waiting_.size() && threads_.size() < most_threads_) begin_thread();
    changed_.notify_one();
    return kernel;
  }
  RegionKernelCounts finish() {
    std::vector<std::shared_ptr<RegionKernel>> all;
    {
      const std::scoped_lock lock(mutex_);
      for (const auto& [text, kernel] : known_) all.push_back(kernel);
    }
    for (const auto& kernel : all) kernel->wait();
    const std::scoped_lock lock(mutex_);
    return {all.size(), compiled_, failed_};
  }

 private:
  struct Task {
    std::shared_ptr<RegionKernel> kernel;
    std::string text, architecture;
    int device;
  };

  /// Where the system gives none, those that are there do the work; without any it is not done.
  void begin_thread() {
    try {
      threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      if (!threads_.empty()) return;
      for (const Task& task : std::exchange(waiting_, {})) {
        ++failed_;
        task.kernel->over_ = true;
        task.kernel->over_.notify_all();
      }
      write_log(LogLevel::warning, "fused regions run op by op: no thread to compile them: {}", error.what());
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait(lock, [&] { return ending_ || !waiting_.empty(); });
      --idle_;
      if (ending_) return;
      const Task task = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      bool compiled = false, failed = false;
      std::string why;
      try {
        make(task, compiled);
      } catch (const std::exception& error) {
        failed = true;
        why = error.what();
      }
      lock.lock();
      if (failed && !ending_) write_log(LogLevel::warning, "a fused region runs op by op: {}", why);
      compiled_ += compiled ? 1 : 0;
      failed_ += failed ? 1 : 0;
      task.kernel->over_ = true;
      task.kernel->over_.notify_all();
    }
  }

  static void make(const Task& task, bool& compiled) {
    const std::string source = region_headers() + task.text;
    const std::string identity = nvrtc_identity(task.architecture) + "\n" + source;
    const KernelCache cache(KernelCache::usual_folder());
    check_cuda(cudaSetDevice(task.device), "fused");
    if (const std::optional<std::string> known = cache.load(identity); known && load(*known, *task.kernel))
      return;
    const std::string code = compile_source(source, task.architecture);
    compiled = true;
    check<DeviceError>(load(code, *task.kernel), "the device does not load its code");
    cache.keep(identity, code);
  }

  /// The code stays for the life of the process, as the library's own.
  static bool load(const std::string& code, RegionKernel& into) {
    cudaLibrary_t library = nullptr;
    cudaKernel_t kernel = nullptr;
    if (cudaLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0) != cudaSuccess ||
        cudaLibraryGetKernel(&kernel, library, "region") != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    cudaFuncAttributes loaded{};  // now, and not when it first runs, which may be in a recording
    if (cudaFuncGetAttributes(&loaded, reinterpret_cast<const void*>(kernel)) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    into.kernel_.store(kernel, std::memory_order_release);
    return true;
  }

  const std::size_t most_threads_ = std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, std::shared_ptr<RegionKernel>> known_;
  std::deque<Task> waiting_;
  std::size_t idle_ = 0, compiled_ = 0, failed_ = 0;
  bool ending_ = false;
  std::vector<std::thread> threads_;
  const pid_t process_ = ::getpid();
};

std::shared_ptr<const RegionKernel> region_kernel(const std::string& text, int device) {
  return RegionKernels::of_process().get(text, device);
}

RegionKernelCounts finish_region_kernels() { return RegionKernels::of_process().finish(); }

}  // namespace sherd::cuda
