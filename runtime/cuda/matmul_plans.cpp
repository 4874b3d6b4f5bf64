#include "runtime/cuda/matmul_plans.h"

#include <algorithm>
#include <limits>

#include "runtime/cuda/beside_recording.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/cublaslt.h"
#include "runtime/cuda/stream_memory.h"
#include "runtime/cuda/trial.h"

namespace sherd::cuda {
namespace {

constexpr std::size_t workspace_bytes = 32 << 20;  // what the library asks for on Hopper
constexpr int most_choices = 8;                    // of the library, of which the fastest is taken
constexpr double most_trial_bytes = 0x1p30;        // of a matrix; larger ones take the first choice
constexpr std::size_t most_products = 4096;        // then all are dropped, for programs with ever new shapes

void check_blas(cublasStatus_t status, std::string_view what) {
  check<DeviceError>(status == CUBLAS_STATUS_SUCCESS, "matmul: {}: cuBLASLt says {}", what,
                     status == CUBLAS_STATUS_SUCCESS ? "" : cublaslt().status_string(status));
}

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return CUDA_R_64F;
    case DType::f16:
      return CUDA_R_16F;
    case DType::bf16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

cudaDataType_t data_type(EightBits eight, DType dtype) {
  switch (eight) {
    case EightBits::e4m3:
      return CUDA_R_8F_E4M3;
    case EightBits::e5m2:
      return CUDA_R_8F_E5M2;
    default:
      return data_type(dtype);
  }
}

/// A descriptor of cuBLASLt, which the destructor gives back to the library.
template <class T>
using Described = std::unique_ptr<T, cublasStatus_t (*)(T*)>;
using Layout = Described<cublasLtMatrixLayoutOpaque_t>;
using Operation = Described<cublasLtMatmulDescOpaque_t>;
using Preference = Described<cublasLtMatmulPreferenceOpaque_t>;

/// A column-major matrix, which is a row-major one transposed.
Layout layout(cudaDataType_t type, std::int64_t rows, std::int64_t cols, std::int64_t ld, std::int64_t batch,
              std::int64_t stride) {
  cublasLtMatrixLayout_t made = nullptr;
  check_blas(cublaslt().layout_create(&made, type, static_cast<std::uint64_t>(rows),
                                      static_cast<std::uint64_t>(cols), ld),
             "layout");
  Layout owned(made, cublaslt().layout_destroy);
  const auto count = static_cast<std::int32_t>(batch);
  check_blas(cublaslt().layout_set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count), "layout");
  check_blas(cublaslt().layout_set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride),
             "layout");
  return owned;
}

Operation operation(const ProductShape& s) {
  const bool wide = s.dtype == DType::f64;
  const cublasComputeType_t compute = wide     ? CUBLAS_COMPUTE_64F
                                      : s.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                               : CUBLAS_COMPUTE_32F;
  cublasLtMatmulDesc_t made = nullptr;
  check_blas(cublaslt().desc_create(&made, compute, wide ? CUDA_R_64F : CUDA_R_32F), "operation");
  Operation owned(made, cublaslt().desc_destroy);
  // The library is column-major and sees C transposed: op(B) transposed comes first.
  const cublasOperation_t first = s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                          second = s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  check_blas(cublaslt().desc_set(made, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "operation");
  check_blas(cublaslt().desc_set(made, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "operation");
  if (s.row_scales) {
    const std::int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    for (const auto attribute : {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE})
      check_blas(cublaslt().desc_set(made, attribute, &mode, sizeof mode), "operation");
  } else if (s.eight_a == EightBits::e4m3 &&
             s.eight_b == EightBits::e4m3) {  // activations bear what it rounds away
    const std::int8_t fast = 1;
    check_blas(cublaslt().desc_set(made, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast), "operation");
  }
  if (s.bias || s.relu) {
    const cublasLtEpilogue_t epilogue = !s.relu  ? CUBLASLT_EPILOGUE_BIAS
                                        : s.bias ? CUBLASLT_EPILOGUE_RELU_BIAS
                                                 : CUBLASLT_EPILOGUE_RELU;
    check_blas(cublaslt().desc_set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue),
               "operation");
  }
  return owned;
}

void set_bias(cublasLtMatmulDesc_t operation, const void* bias) {
  check_blas(cublaslt().desc_set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias), "bias");
}

/// What 8-bit factors are multiplied by. The library's A is our B.
void set_scales(cublasLtMatmulDesc_t operation, const float* of_a, const float* of_b) {
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const float* const& scale) {
    check_blas(cublaslt().desc_set(operation, attribute, &scale, sizeof scale), "scale");
  };
  set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, of_b);
  set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, of_a);
}

Preference preference(const ProductShape& s) {
  cublasLtMatmulPreference_t made = nullptr;
  check_blas(cublaslt().preference_create(&made), "preference");
  Preference owned(made, cublaslt().preference_destroy);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check_blas(cublaslt().preference_set(made, attribute, &value, sizeof value), "preference");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  // Partial sums in the compute type and in the workspace: adding them in place would change bits from run to
  // run.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, s.align_b);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, s.align_a);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, s.align_c);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, s.align_c);
  return owned;
}

double of_batch(const ProductShape& s, double of_matrix) { return of_matrix * static_cast<double>(s.batch); }
bool fits_a_trial(const ProductShape& s) {
  const auto m = static_cast<double>(s.m), n = static_cast<double>(s.n), k = static_cast<double>(s.k);
  return of_batch(s, std::max({m * n, m * k, k * n})) * static_cast<double>(size_of(s.dtype)) <=
         most_trial_bytes;
}
/// Products of at least 2^32 multiplications, which take longer than what else a step does around them.
bool worth_a_search(const ProductShape& s) {
  const auto m = static_cast<double>(s.m), n = static_cast<double>(s.n), k = static_cast<double>(s.k);
  return of_batch(s, m * n * k) >= 0x1p32 && fits_a_trial(s);
}

/// Measures work on a stream, in milliseconds of the device.
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    check_cuda(cudaEventCreate(&from_), "matmul: search");
    check_cuda(cudaEventCreate(&to_), "matmul: search");
  }
  ~Stopwatch() {
    cudaEventDestroy(from_);
    cudaEventDestroy(to_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  void start() const { check_cuda(cudaEventRecord(from_, stream_), "matmul: search"); }
  float stop() const {
    float milliseconds = 0;
    check_cuda(cudaEventRecord(to_, stream_), "matmul: search");
    check_cuda(cudaEventSynchronize(to_), "matmul: search");
    check_cuda(cudaEventElapsedTime(&milliseconds, from_, to_), "matmul: search");
    return milliseconds;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t from_ = nullptr, to_ = nullptr;
};

bool same_bits(const void* a, const void* b, std::size_t bytes, cudaStream_t stream) {
  const StreamMemory differ(sizeof(int), stream);
  if (differ.get() == nullptr) return false;
  int answer = 0;
  check_cuda(cudaMemsetAsync(differ.get(), 0, sizeof answer, stream), "matmul: search");
  launch_compare(a, b, bytes, static_cast<int*>(differ.get()), stream);
  check_cuda(cudaMemcpyAsync(&answer, differ.get(), sizeof answer, cudaMemcpyDeviceToHost, stream),
             "matmul: search");
  check_cuda(cudaStreamSynchronize(stream), "matmul: search");
  return answer == 0;
}

}  // namespace

struct MatMulPlans::Product {
  Operation operation;
  Layout first, second, result;
  bool wide;  // f64
  cublasLtMatmulAlgo_t algorithm{};
  std::vector<cublasLtMatmulAlgo_t> others{};  // until they were searched
};

MatMulPlans::MatMulPlans() { check_blas(cublaslt().create(&handle_), "handle"); }

MatMulPlans::~MatMulPlans() {
  products_.clear();
  for (const auto& [stream, workspace] : workspaces_) cudaFree(workspace);
  if (trials_ != nullptr) cudaStreamDestroy(trials_);
  cublaslt().destroy(handle_);
}

std::unique_ptr<MatMulPlans::Product> MatMulPlans::described(const ProductShape& s) {
  const cudaDataType_t a = data_type(s.eight_a, s.dtype), b = data_type(s.eight_b, s.dtype);
  return std::make_unique<Product>(Product{operation(s),
                                           s.transpose_b ? layout(b, s.k, s.n, s.ldb, s.batch, s.stride_b)
                                                         : layout(b, s.n, s.k, s.ldb, s.batch, s.stride_b),
                                           s.transpose_a ? layout(a, s.m, s.k, s.lda, s.batch, s.stride_a)
                                                         : layout(a, s.k, s.m, s.lda, s.batch, s.stride_a),
                                           layout(data_type(s.dtype), s.n, s.m, s.n, s.batch, s.m * s.n),
                                           s.dtype == DType::f64});
}

MatMulPlans::Product* MatMulPlans::find(const ProductShape& s) {
  if (const auto found = products_.find(s); found != products_.end()) return found->second.get();
  std::unique_ptr<Product> made = described(s);
  const void* const somewhere = made.get();
  if (s.row_scales)  // an algorithm is chosen for vectors that are there
    for (const auto attribute : {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER})
      check_blas(cublaslt().desc_set(made->operation.get(), attribute, &somewhere, sizeof somewhere),
                 "scale");
  cublasLtMatmulHeuristicResult_t choices[most_choices]{};
  int found = 0;
  const cublasStatus_t status = cublaslt().heuristic(
      handle_, made->operation.get(), made->first.get(), made->second.get(), made->result.get(),
      made->result.get(), preference(s).get(), most_choices, choices, &found);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
    made.reset();
  } else {
    made->algorithm = choices[0].algo;
    if (worth_a_search(s))
      for (int i = 1; i < found; ++i) made->others.push_back(choices[i].algo);
  }
  return keep(s, std::move(made));
}

MatMulPlans::Product* MatMulPlans::keep(const ProductShape& s, std::unique_ptr<Product> made) {
  if (products_.size() >= most_products) products_.clear();
  return products_.emplace(s, std::move(made)).first->second.get();
}

MatMulPlans::Product* MatMulPlans::ready(const ProductShape& s, cudaStream_t stream) {
  Product* const found = find(s);
  if (found != nullptr && !found->others.empty()) search(s, *found, stream);
  return found;
}

void* MatMulPlans::workspace_of(cudaStream_t stream) {
  void*& workspace = workspaces_[stream];
  if (workspace == nullptr) {
    const BesideRecording scope;
    check_cuda(cudaMalloc(&workspace, workspace_bytes), "matmul: workspace");
  }
  return workspace;
}

cublasStatus_t MatMulPlans::queue(const Product& p, const cublasLtMatmulAlgo_t& algorithm,
                                  const ProductData& d, cudaStream_t stream) {
  const double one = 1, zero = 0;
  const float one32 = 1, zero32 = 0;
  const void* whole = p.wide ? static_cast<const void*>(&one) : &one32;
  const void* nothing = p.wide ? static_cast<const void*>(&zero) : &zero32;
  return cublaslt().matmul(handle_, p.operation.get(), whole, d.b, p.first.get(), d.a, p.second.get(),
                           d.residual != nullptr ? whole : nothing, d.residual != nullptr ? d.residual : d.c,
                           p.result.get(), d.c, p.result.get(), &algorithm, workspace_of(stream),
                           workspace_bytes, stream);
}

/// A product of noise.
class MatMulPlans::Trial {
 public:
  Trial(const ProductShape& s, Product& p, cudaStream_t stream)
      : dtype_(s.eight_a == EightBits::no ? s.dtype : DType::u8),
        elements_a_((s.batch - 1) * s.stride_a + (s.transpose_a ? s.k : s.m) * s.lda),
        elements_b_((s.batch - 1) * s.stride_b + (s.transpose_b ? s.n : s.k) * s.ldb),
        elements_c_(s.batch * s.m * s.n),
        c_bytes_(static_cast<std::size_t>(elements_c_ * size_of(s.dtype))),
        scale_bytes_(static_cast<std::size_t>(std::max(s.m, s.n)) * sizeof(float)),
        stream_(stream),
        a_(bytes(elements_a_), stream),
        b_(bytes(elements_b_), stream),
        first_(c_bytes_, stream),
        second_(c_bytes_, stream),
        residual_(s.residual ? c_bytes_ : 1, stream),
        bias_(s.bias ? static_cast<std::size_t>(s.n * size_of(s.dtype)) : 1, stream),
        scales_(scale_bytes_, stream) {
    if (!has_memory()) return;
    launch_noise(dtype_, a_.get(), elements_a_, stream);
    launch_noise(dtype_, b_.get(), elements_b_, stream);
    check_cuda(cudaMemsetAsync(scales_.get(), 0x3f, scale_bytes_, stream), "matmul: search");  // 0.747 each
    if (s.eight_a != EightBits::no) {
      const auto* const scale = static_cast<const float*>(scales_.get());
      set_scales(p.operation.get(), scale, scale);
    }
    if (s.residual) launch_noise(s.dtype, residual_.get(), elements_c_, stream);
    if (!s.bias) return;
    launch_noise(s.dtype, bias_.get(), s.n, stream);
    set_bias(p.operation.get(), bias_.get());
  }
  bool has_memory() const {
    return a_.get() && b_.get() && first_.get() && second_.get() && residual_.get() && bias_.get() &&
           scales_.get();
  }
  void* first() const { return first_.get(); }
  void* second() const { return second_.get(); }
  std::int64_t elements() const { return elements_c_; }
  ProductData data(const ProductShape& s, void* c) const {
    return {a_.get(), b_.get(), s.bias ? bias_.get() : nullptr, s.residual ? residual_.get() : nullptr, c};
  }
  /// A row of the product becomes NaN.
  void put_nan() const { check_cuda(cudaMemsetAsync(a_.get(), 0xff, bytes(1), stream_), "matmul: search"); }
  bool gave_same_bits() const { return same_bits(first_.get(), second_.get(), c_bytes_, stream_); }

 private:
  std::size_t bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements * size_of(dtype_));
  }

  DType dtype_;  // of the factors
  std::int64_t elements_a_, elements_b_, elements_c_;
  std::size_t c_bytes_, scale_bytes_;
  cudaStream_t stream_;
  StreamMemory a_, b_, first_, second_, residual_, bias_, scales_;
};

void MatMulPlans::search(const ProductShape& s, Product& p, cudaStream_t stream) {
  const std::vector<cublasLtMatmulAlgo_t> others = std::move(p.others);
  p.others.clear();
  const Trial trial(s, p, stream);
  if (!trial.has_memory()) return;  // the first choice will do
  const Stopwatch watch(stream);
  const auto time = [&](const cublasLtMatmulAlgo_t& algorithm, void* c) {
    const ProductData data = trial.data(s, c);
    bool good = queue(p, algorithm, data, stream) == CUBLAS_STATUS_SUCCESS;
    watch.start();
    for (int i = 0; i < 3; ++i) good = good && queue(p, algorithm, data, stream) == CUBLAS_STATUS_SUCCESS;
    const float milliseconds = watch.stop();
    return good ? milliseconds : std::numeric_limits<float>::infinity();
  };
  float best = time(p.algorithm, trial.first());
  for (const cublasLtMatmulAlgo_t& other : others) {
    const float taken = time(other, trial.second());
    if (taken >= 0.98f * best || !trial.gave_same_bits()) continue;
    best = taken;
    p.algorithm = other;
  }
}

void MatMulPlans::start(Product& p, const ProductShape& s, const ProductData& data, cudaStream_t stream) {
  if (s.bias) set_bias(p.operation.get(), data.bias);
  if (s.eight_a != EightBits::no) set_scales(p.operation.get(), data.unscale_a, data.unscale_b);
  check_blas(queue(p, p.algorithm, data, stream), "product");
}

std::unique_ptr<MatMulPlans::Product> MatMulPlans::with_relu(const ProductShape& s) {
  if (!fits_a_trial(s)) return nullptr;
  const BesideRecording scope;
  if (trials_ == nullptr)
    check_cuda(cudaStreamCreateWithFlags(&trials_, cudaStreamNonBlocking), "matmul: search");
  ProductShape sum = s;
  sum.relu = false;
  Product* const of_sum = ready(sum, trials_);
  if (of_sum == nullptr) return nullptr;
  std::unique_ptr<Product> made = described(s);
  made->algorithm = of_sum->algorithm;
  const Trial trial(s, *made, trials_);
  if (!trial.has_memory() || !takes(*made)) return nullptr;
  trial.put_nan();
  start(*of_sum, sum, trial.data(sum, trial.first()), trials_);
  launch_relu(s.dtype, trial.first(), trial.elements(), trials_);
  start(*made, s, trial.data(s, trial.second()), trials_);
  return trial.gave_same_bits() ? std::move(made) : nullptr;
}

bool MatMulPlans::takes(Product& p) {
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status =
      cublaslt().algorithm_check(handle_, p.operation.get(), p.first.get(), p.second.get(), p.result.get(),
                                 p.result.get(), &p.algorithm, &result);
  return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= workspace_bytes;
}

void MatMulPlans::run(const ProductShape& s, const ProductData& data, cudaStream_t stream) {
  Product* const found = ready(s, stream);
  check<NotImplementedError>(
      found != nullptr,
      "matmul: cuBLASLt has no algorithm for {} of ({}, {}) times ({}, {}), {} times; move it to cpu",
      name_of(s.dtype), s.m, s.k, s.k, s.n, s.batch);
  start(*found, s, data, stream);
}

bool MatMulPlans::run_with_relu(const ProductShape& s, const ProductData& data, cudaStream_t stream) {
  const auto known = products_.find(s);
  Product* const found = known != products_.end() ? known->second.get() : keep(s, with_relu(s));
  if (found != nullptr) start(*found, s, data, stream);
  return found != nullptr;
}

}  // namespace sherd::cuda
