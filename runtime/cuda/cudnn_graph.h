// Graphs of cuDNN: tensors of four dimensions and operations between them, which the library turns into one
// kernel where it has one that fits.
#pragma once

#include <cudnn_graph.h>

#include <array>
#include <deque>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace sherd::cuda {

/// The functions of the library that are used here.
struct Cudnn {
  decltype(&cudnnCreate) create;
  decltype(&cudnnDestroy) destroy;
  decltype(&cudnnSetStream) set_stream;
  decltype(&cudnnGetVersion) version;
  decltype(&cudnnBackendCreateDescriptor) descriptor_create;
  decltype(&cudnnBackendDestroyDescriptor) descriptor_destroy;
  decltype(&cudnnBackendSetAttribute) set;
  decltype(&cudnnBackendGetAttribute) get;
  decltype(&cudnnBackendFinalize) finalize;
  decltype(&cudnnBackendExecute) execute;
};

/// Loads the library once; null where it is not installed.
const Cudnn* cudnn();

/// A descriptor of the library, which the destructor gives back.
struct DestroyCudnnDescriptor {
  void operator()(void* descriptor) const { cudnn()->descriptor_destroy(descriptor); }
};
using CudnnDescriptor = std::unique_ptr<void, DestroyCudnnDescriptor>;

/// A kernel for a graph.
class CudnnPlan {
 public:
  std::int64_t workspace_bytes() const { return workspace_bytes_; }
  /// Queues it on the handle's stream; `memory` in the order of `CudnnGraph::memory`. False where the library
  /// refuses.
  bool run(cudnnHandle_t handle, std::span<void* const> memory, void* workspace) const;

 private:
  friend class CudnnGraph;
  CudnnDescriptor plan_;
  std::vector<std::int64_t> ids_;                     // of the memory, then of the numbers
  std::shared_ptr<const std::deque<float>> numbers_;  // read when it runs
  std::int64_t workspace_bytes_ = 0;
};

/// Which kernels for a graph are taken, beside that they repeat to the bit.
struct CudnnChoice {
  int most = 8;           ///< of those that the library thinks best
  bool fallback = false;  ///< those too that it names when it has no better ones
  /// Only kernels whose sums are what sums of the inputs' products in f32 are but for their order: no factor
  /// is rounded to fewer bits, no sum kept in them, and no transform loses some (FFT, large Winograd tiles).
  bool plain_sums = false;
  bool f32 = false;   ///< the inputs are, which tensor cores would round to TF32
  bool tf32 = false;  ///< and may
  std::int64_t most_workspace_bytes = std::numeric_limits<std::int64_t>::max();
};

/// A graph being made. Tensors are named by their place. What the library does not accept is found out by
/// `plan`, which then gives none.
class CudnnGraph {
 public:
  using Sizes = std::array<std::int64_t, 4>;

  /// A tensor in memory that `run` is given, aligned to 16 bytes.
  int memory(cudnnDataType_t type, Sizes sizes, Sizes strides);
  /// A tensor that only the kernel sees.
  int between(cudnnDataType_t type, Sizes sizes);
  int between(cudnnDataType_t type, Sizes sizes, Sizes strides);
  int number(float value);

  /// What a pointwise operation reads: one to three tensors, the third a condition; or, for the index of each
  /// element of x, the axis it is counted along.
  struct Inputs {
    int x, b = -1, condition = -1;
    std::int64_t axis = 0;
  };

  void matmul(int a, int b, int c);
  /// How kernels lie on an image, along its height and its width.
  struct Windows {
    std::array<std::int64_t, 2> stride, padding, dilation;
  };
  /// Images x, kernels w and what they give, y: whichever `makes` names is made of the other two. Groups are
  /// as many as the channels of x are of those of w.
  enum class Makes : std::uint8_t { y, x, w };
  void convolution(Makes makes, const Windows& windows, int x, int w, int y);
  void pointwise(cudnnPointwiseMode_t mode, Inputs in, int y, cudnnDataType_t precision = CUDNN_DATA_FLOAT);
  /// Over the dimensions where y has size 1.
  void reduce(cudnnReduceTensorOp_t op, int x, int y);
  /// The same elements with other strides.
  void reshape(int x, int y);

  /// The library's first choice that repeats to the bit; none where it has no kernel for this graph.
  std::optional<CudnnPlan> plan(cudnnHandle_t handle, const CudnnChoice& choice = {});

 private:
  struct Port {
    cudnnBackendAttributeName_t name;
    int tensor;  // below 0: none
  };

  CudnnDescriptor make(cudnnBackendDescriptorType_t type);
  void set(const CudnnDescriptor& to, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
           std::int64_t count, const void* values);
  void set_descriptor(const CudnnDescriptor& to, cudnnBackendAttributeName_t name, void* value);
  void finalize(const CudnnDescriptor& descriptor);
  int tensor(cudnnDataType_t type, Sizes sizes, Sizes strides, bool is_virtual, bool by_value);
  /// How an operation computes, beside what it reads and writes.
  CudnnDescriptor rule(cudnnBackendDescriptorType_t type, cudnnBackendAttributeName_t precision_name,
                       cudnnDataType_t precision = CUDNN_DATA_FLOAT);
  void operation(cudnnBackendDescriptorType_t type, std::initializer_list<Port> ports,
                 cudnnBackendAttributeName_t rule_name = {}, CudnnDescriptor rule = nullptr);
  /// What a mode of the library's heuristics takes for this graph.
  std::vector<CudnnDescriptor> choices(const CudnnDescriptor& graph, cudnnBackendHeurMode_t mode, int most);
  std::optional<CudnnPlan> plan_of(void* config, cudnnHandle_t handle) const;

  bool good_ = true;  // whether the library accepted everything so far
  std::vector<CudnnDescriptor> tensors_, rules_, operations_;
  std::vector<std::int64_t> memory_ids_, number_ids_;
  std::shared_ptr<std::deque<float>> numbers_ = std::make_shared<std::deque<float>>();
};

}  // namespace sherd::cuda
