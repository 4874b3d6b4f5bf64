#include "runtime/cuda/cudnn_graph.h"

#include <algorithm>
#include <utility>

#include "runtime/cuda/shared_library.h"

namespace sherd::cuda {
namespace {

constexpr std::size_t oldest_version = 90600;  // before it, gradients of attention needed cleared memory

std::optional<Cudnn> load_all() {
  const SharedLibrary library(fmt::format("libcudnn.so.{}", CUDNN_MAJOR));
  if (!library.found()) return std::nullopt;
  Cudnn all{};
  library.load("cudnnCreate", all.create);
  library.load("cudnnDestroy", all.destroy);
  library.load("cudnnSetStream", all.set_stream);
  library.load("cudnnGetVersion", all.version);
  library.load("cudnnBackendCreateDescriptor", all.descriptor_create);
  library.load("cudnnBackendDestroyDescriptor", all.descriptor_destroy);
  library.load("cudnnBackendSetAttribute", all.set);
  library.load("cudnnBackendGetAttribute", all.get);
  library.load("cudnnBackendFinalize", all.finalize);
  library.load("cudnnBackendExecute", all.execute);
  if (all.version() < oldest_version) return std::nullopt;
  return all;
}

CudnnDescriptor make_descriptor(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t made = nullptr;
  if (cudnn()->descriptor_create(type, &made) != CUDNN_STATUS_SUCCESS) made = nullptr;
  return CudnnDescriptor(made);
}

CudnnGraph::Sizes row_major(CudnnGraph::Sizes sizes) {
  return {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
}

/// What a descriptor holds `name` of, up to `most` descriptors of `type`.
std::vector<CudnnDescriptor> held(void* of, cudnnBackendAttributeName_t name,
                                  cudnnBackendDescriptorType_t type, int most) {
  std::int64_t there = 0;
  if (cudnn()->get(of, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &there, nullptr) == CUDNN_STATUS_SUCCESS)
    most = static_cast<int>(std::min<std::int64_t>(most, there));
  std::vector<CudnnDescriptor> made;
  std::vector<void*> raw;
  for (int i = 0; i < most; ++i) raw.push_back(made.emplace_back(make_descriptor(type)).get());
  std::int64_t count = 0;
  if (cudnn()->get(of, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, most, &count, raw.data()) != CUDNN_STATUS_SUCCESS)
    count = 0;
  made.resize(static_cast<std::size_t>(std::min<std::int64_t>(count, most)));
  return made;
}

/// What an engine says of its numbers; false for one that says nothing.
class Notes {
 public:
  bool read(void* config) {
    const auto engines = held(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR, 1);
    return !engines.empty() &&
           cudnn()->get(engines[0].get(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                        CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count_, notes_) == CUDNN_STATUS_SUCCESS;
  }
  bool has(cudnnBackendNumericalNote_t note) const {
    return std::find(notes_, notes_ + count_, note) != notes_ + count_;
  }
  bool suit(const CudnnChoice& choice) const {
    if (has(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC)) return false;
    if (!choice.plain_sums) return true;
    if (has(CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS) ||
        has(CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION) || has(CUDNN_NUMERICAL_NOTE_FFT) ||
        has(CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6) || has(CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13))
      return false;
    const bool cores = has(CUDNN_NUMERICAL_NOTE_TENSOR_CORE), winograd = has(CUDNN_NUMERICAL_NOTE_WINOGRAD);
    if (!choice.f32) return !winograd;
    return !cores || (choice.tf32 && !winograd);
  }

 private:
  cudnnBackendNumericalNote_t notes_[CUDNN_NUMERICAL_NOTE_TYPE_COUNT] = {};
  std::int64_t count_ = 0;
};

}  // namespace

const Cudnn* cudnn() {
  static const std::optional<Cudnn> functions = load_all();
  return functions ? &*functions : nullptr;
}

CudnnDescriptor CudnnGraph::make(cudnnBackendDescriptorType_t type) {
  CudnnDescriptor made = make_descriptor(type);
  good_ = good_ && made;
  return made;
}

void CudnnGraph::set(const CudnnDescriptor& to, cudnnBackendAttributeName_t name,
                     cudnnBackendAttributeType_t type, std::int64_t count, const void* values) {
  good_ = good_ && cudnn()->set(to.get(), name, type, count, values) == CUDNN_STATUS_SUCCESS;
}

void CudnnGraph::set_descriptor(const CudnnDescriptor& to, cudnnBackendAttributeName_t name, void* value) {
  set(to, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

void CudnnGraph::finalize(const CudnnDescriptor& descriptor) {
  good_ = good_ && cudnn()->finalize(descriptor.get()) == CUDNN_STATUS_SUCCESS;
}

int CudnnGraph::tensor(cudnnDataType_t type, Sizes sizes, Sizes strides, bool is_virtual, bool by_value) {
  const auto id = static_cast<std::int64_t>(tensors_.size()) + 1, alignment = std::int64_t{16};
  CudnnDescriptor made = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  set(made, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
  set(made, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
  set(made, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, sizes.data());
  set(made, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides.data());
  set(made, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
  set(made, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
  set(made, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
  finalize(made);
  tensors_.push_back(std::move(made));
  return static_cast<int>(id) - 1;
}

int CudnnGraph::memory(cudnnDataType_t type, Sizes sizes, Sizes strides) {
  const int made = tensor(type, sizes, strides, false, false);
  memory_ids_.push_back(made + 1);
  return made;
}
int CudnnGraph::between(cudnnDataType_t type, Sizes sizes) { return between(type, sizes, row_major(sizes)); }
int CudnnGraph::between(cudnnDataType_t type, Sizes sizes, Sizes strides) {
  return tensor(type, sizes, strides, true, false);
}
int CudnnGraph::number(float value) {
  const int made = tensor(CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, false, true);
  number_ids_.push_back(made + 1);
  numbers_->push_back(value);
  return made;
}

CudnnDescriptor CudnnGraph::rule(cudnnBackendDescriptorType_t type,
                                 cudnnBackendAttributeName_t precision_name, cudnnDataType_t precision) {
  CudnnDescriptor made = make(type);
  set(made, precision_name, CUDNN_TYPE_DATA_TYPE, 1, &precision);
  return made;
}

void CudnnGraph::operation(cudnnBackendDescriptorType_t type, std::initializer_list<Port> ports,
                           cudnnBackendAttributeName_t rule_name, CudnnDescriptor rule) {
  CudnnDescriptor made = make(type);
  if (rule) {
    finalize(rule);
    set_descriptor(made, rule_name, rule.get());
    rules_.push_back(std::move(rule));
  }
  for (const auto& [name, tensor] : ports)
    if (tensor >= 0) set_descriptor(made, name, tensors_[tensor].get());
  finalize(made);
  operations_.push_back(std::move(made));
}

void CudnnGraph::matmul(int a, int b, int c) {
  operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
            {{CUDNN_ATTR_OPERATION_MATMUL_ADESC, a},
             {CUDNN_ATTR_OPERATION_MATMUL_BDESC, b},
             {CUDNN_ATTR_OPERATION_MATMUL_CDESC, c}},
            CUDNN_ATTR_OPERATION_MATMUL_DESC,
            rule(CUDNN_BACKEND_MATMUL_DESCRIPTOR, CUDNN_ATTR_MATMUL_COMP_TYPE));
}

void CudnnGraph::pointwise(cudnnPointwiseMode_t mode, Inputs in, int y, cudnnDataType_t precision) {
  CudnnDescriptor how = rule(CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MATH_PREC, precision);
  set(how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  if (mode == CUDNN_POINTWISE_GEN_INDEX) set(how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &in.axis);
  operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
            {{CUDNN_ATTR_OPERATION_POINTWISE_XDESC, in.x},
             {CUDNN_ATTR_OPERATION_POINTWISE_BDESC, in.b},
             {CUDNN_ATTR_OPERATION_POINTWISE_TDESC, in.condition},
             {CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y}},
            CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, std::move(how));
}

void CudnnGraph::reduce(cudnnReduceTensorOp_t op, int x, int y) {
  CudnnDescriptor how = rule(CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_ATTR_REDUCTION_COMP_TYPE);
  set(how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &op);
  operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
            {{CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x}, {CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y}},
            CUDNN_ATTR_OPERATION_REDUCTION_DESC, std::move(how));
}

void CudnnGraph::reshape(int x, int y) {
  operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
            {{CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x}, {CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y}});
}

void CudnnGraph::convolution(Makes makes, const Windows& windows, int x, int w, int y) {
  struct Names {
    cudnnBackendDescriptorType_t type;
    cudnnBackendAttributeName_t rule, x, w, y, alpha, beta;
  };
  static constexpr Names names[] = {
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA}};
  const Names& name = names[static_cast<int>(makes)];
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  const std::int64_t axes = 2;
  const float one = 1, zero = 0;
  CudnnDescriptor how = rule(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, CUDNN_ATTR_CONVOLUTION_COMP_TYPE);
  set(how, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  set(how, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &axes);
  set(how, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, axes, windows.padding.data());
  set(how, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, axes, windows.padding.data());
  set(how, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, axes, windows.dilation.data());
  set(how, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, axes, windows.stride.data());
  finalize(how);
  CudnnDescriptor made = make(name.type);
  set_descriptor(made, name.rule, how.get());
  rules_.push_back(std::move(how));
  set_descriptor(made, name.x, tensors_[x].get());
  set_descriptor(made, name.w, tensors_[w].get());
  set_descriptor(made, name.y, tensors_[y].get());
  set(made, name.alpha, CUDNN_TYPE_FLOAT, 1, &one);
  set(made, name.beta, CUDNN_TYPE_FLOAT, 1, &zero);
  finalize(made);
  operations_.push_back(std::move(made));
}

std::vector<CudnnDescriptor> CudnnGraph::choices(const CudnnDescriptor& graph, cudnnBackendHeurMode_t mode,
                                                 int most) {
  const CudnnDescriptor choice = make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  set_descriptor(choice, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.get());
  set(choice, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  finalize(choice);
  if (!std::exchange(good_, true)) return {};  // a mode may have nothing for this graph
  return held(choice.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, most);
}

std::optional<CudnnPlan> CudnnGraph::plan_of(void* config, cudnnHandle_t handle) const {
  CudnnPlan made;
  made.plan_ = make_descriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  if (cudnn()->set(made.plan_.get(), CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle) !=
          CUDNN_STATUS_SUCCESS ||
      cudnn()->set(made.plan_.get(), CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                   1, &config) != CUDNN_STATUS_SUCCESS ||
      cudnn()->finalize(made.plan_.get()) != CUDNN_STATUS_SUCCESS)
    return std::nullopt;
  std::int64_t count = 0;
  cudnn()->get(made.plan_.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
               &made.workspace_bytes_);
  made.ids_ = memory_ids_;
  made.ids_.insert(made.ids_.end(), number_ids_.begin(), number_ids_.end());
  made.numbers_ = numbers_;
  return made;
}

std::optional<CudnnPlan> CudnnGraph::plan(cudnnHandle_t handle, const CudnnChoice& choice) {
  std::vector<void*> raw;
  for (const CudnnDescriptor& o : operations_) raw.push_back(o.get());
  const CudnnDescriptor graph = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  set(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
      static_cast<std::int64_t>(raw.size()), raw.data());
  set(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
  finalize(graph);
  if (!good_) return std::nullopt;
  for (cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    if (mode == CUDNN_HEUR_MODE_FALLBACK && !choice.fallback) break;
    for (const CudnnDescriptor& config : choices(graph, mode, choice.most)) {
      Notes notes;
      if (!notes.read(config.get()) || !notes.suit(choice)) continue;
      std::optional<CudnnPlan> made = plan_of(config.get(), handle);
      if (made && made->workspace_bytes() <= choice.most_workspace_bytes) return made;
    }
  }
  return std::nullopt;
}

bool CudnnPlan::run(cudnnHandle_t handle, std::span<void* const> memory, void* workspace) const {
  std::vector<void*> data(memory.begin(), memory.end());
  for (const float& number : *numbers_) data.push_back(const_cast<float*>(&number));
  const CudnnDescriptor pack = make_descriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  const auto count = static_cast<std::int64_t>(ids_.size());
  const auto set = [&](cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t n,
                       const void* values) {
    return cudnn()->set(pack.get(), name, type, n, values) == CUDNN_STATUS_SUCCESS;
  };
  return set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, data.data()) &&
         set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids_.data()) &&
         set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace) &&
         cudnn()->finalize(pack.get()) == CUDNN_STATUS_SUCCESS &&
         cudnn()->execute(handle, plan_.get(), pack.get()) == CUDNN_STATUS_SUCCESS;
}

}  // namespace sherd::cuda
