#include "runtime/cuda/matmul_plans.h"

#include "runtime/cuda/check.h"
#include "runtime/cuda/cublaslt.h"

namespace sherd::cuda {
namespace {

constexpr std::size_t workspace_bytes = 32 << 20;  // what the library asks for on Hopper
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
  cublasLtMatmulDesc_t made = nullptr;
  check_blas(cublaslt().desc_create(&made, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                    wide ? CUDA_R_64F : CUDA_R_32F),
             "operation");
  Operation owned(made, cublaslt().desc_destroy);
  // The library is column-major and sees C transposed: op(B) transposed comes first.
  const cublasOperation_t first = s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                          second = s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  check_blas(cublaslt().desc_set(made, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "operation");
  check_blas(cublaslt().desc_set(made, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "operation");
  if (s.bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    check_blas(cublaslt().desc_set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue),
               "operation");
  }
  return owned;
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

}  // namespace

struct MatMulPlans::Product {
  Operation operation;
  Layout first, second, result;
  cublasLtMatmulAlgo_t algorithm{};
};

MatMulPlans::MatMulPlans() {
  check_blas(cublaslt().create(&handle_), "handle");
  check_cuda(cudaMalloc(&workspace_, workspace_bytes), "matmul: workspace");
}

MatMulPlans::~MatMulPlans() {
  products_.clear();
  cudaFree(workspace_);
  cublaslt().destroy(handle_);
}

MatMulPlans::Product& MatMulPlans::product(const ProductShape& s) {
  if (const auto found = products_.find(s); found != products_.end()) return *found->second;
  const cudaDataType_t type = data_type(s.dtype);
  auto made =
      std::make_unique<Product>(Product{operation(s),
                                        s.transpose_b ? layout(type, s.k, s.n, s.ldb, s.batch, s.stride_b)
                                                      : layout(type, s.n, s.k, s.ldb, s.batch, s.stride_b),
                                        s.transpose_a ? layout(type, s.m, s.k, s.lda, s.batch, s.stride_a)
                                                      : layout(type, s.k, s.m, s.lda, s.batch, s.stride_a),
                                        layout(type, s.n, s.m, s.n, s.batch, s.m * s.n)});
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t status =
      cublaslt().heuristic(handle_, made->operation.get(), made->first.get(), made->second.get(),
                           made->result.get(), made->result.get(), preference(s).get(), 1, &best, &found);
  check<NotImplementedError>(
      status == CUBLAS_STATUS_SUCCESS && found > 0,
      "matmul: cuBLASLt has no algorithm for {} of ({}, {}) times ({}, {}), {} times; move it to cpu",
      name_of(s.dtype), s.m, s.k, s.k, s.n, s.batch);
  made->algorithm = best.algo;
  if (products_.size() >= most_products) products_.clear();
  return *products_.emplace(s, std::move(made)).first->second;
}

void MatMulPlans::run(const ProductShape& s, const void* a, const void* b, const void* bias, void* c,
                      cudaStream_t stream) {
  Product& p = product(s);
  if (s.bias)
    check_blas(cublaslt().desc_set(p.operation.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias),
               "bias");
  const double one = 1, zero = 0;
  const float one32 = 1, zero32 = 0;
  const bool wide = s.dtype == DType::f64;
  const void* alpha = wide ? static_cast<const void*>(&one) : &one32;
  const void* beta = wide ? static_cast<const void*>(&zero) : &zero32;
  check_blas(
      cublaslt().matmul(handle_, p.operation.get(), alpha, b, p.first.get(), a, p.second.get(), beta, c,
                        p.result.get(), c, p.result.get(), &p.algorithm, workspace_, workspace_bytes, stream),
      "product");
}

}  // namespace sherd::cuda
