// Memory for a while, in the order of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

namespace sherd::cuda {

/// On the current device, there for what is given to the stream before the end of this. Null where the
/// device has none left, and for no bytes.
class StreamMemory {
 public:
  StreamMemory(std::size_t bytes, cudaStream_t stream) : stream_(stream) {
    if (bytes == 0 || cudaMallocAsync(&data_, bytes, stream) == cudaSuccess) return;
    cudaGetLastError();
    data_ = nullptr;
  }
  ~StreamMemory() {
    if (data_ != nullptr) cudaFreeAsync(data_, stream_);
  }
  StreamMemory(StreamMemory&& other) noexcept
      : stream_(other.stream_), data_(std::exchange(other.data_, nullptr)) {}
  StreamMemory& operator=(StreamMemory&&) = delete;
  void* get() const { return data_; }

 private:
  cudaStream_t stream_;
  void* data_ = nullptr;
};

}  // namespace sherd::cuda
