// Matrix products of one rank on one GPU: the handle, the workspace, and the algorithm chosen for each shape.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "runtime/element.h"

namespace sherd::cuda {

/// Whether a factor is 8 bits wide, and how those are read.
enum class EightBits : std::uint8_t { no, e4m3, e5m2 };

/// C = op(A) op(B) (+ bias) (+ residual), or ReLU of that, row-major and batched; the numbers that decide
/// which algorithm is right.
struct ProductShape {
  DType dtype = DType::f32;  ///< of C, and of factors that are not 8 bits wide
  bool tf32 = false;         ///< f32 factors may be rounded to it
  EightBits eight_a = EightBits::no, eight_b = EightBits::no;  ///< both or none; A as it lies, B transposed
  bool row_scales = false;  ///< of 8-bit factors: one for each row of C and one for each column, not one each
  bool transpose_a = false, transpose_b = false, bias = false;
  bool residual = false;  ///< a matrix that lies as C does
  bool relu = false;      ///< C is ReLU of the sum, by the algorithm of the sum alone
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  std::int64_t lda = 0, ldb = 0;            ///< elements from one stored row to the next; C is dense
  std::int64_t stride_a = 0, stride_b = 0;  ///< from one matrix of the batch to the next
  std::uint32_t align_a = 256, align_b = 256, align_c = 256;  ///< bytes that divide the addresses
  friend auto operator<=>(const ProductShape&, const ProductShape&) = default;
};

/// Where the matrices of a product lie; null where its shape has none.
struct ProductData {
  const void *a, *b, *bias, *residual;
  void* c;
  const float *unscale_a = nullptr,
              *unscale_b = nullptr;  ///< on the device, of 8-bit factors; vectors for `row_scales`
};

class MatMulPlans {
 public:
  /// For the calling thread's current device.
  MatMulPlans();
  ~MatMulPlans();
  MatMulPlans(const MatMulPlans&) = delete;
  MatMulPlans& operator=(const MatMulPlans&) = delete;

  /// Queues the product on `stream`. f32 is computed in f32, in TF32 only where the shape says so; halves
  /// accumulate in f32.
  void run(const ProductShape& shape, const ProductData& data, cudaStream_t stream);
  /// Whether the library has an algorithm for it; `run` throws NotImplementedError where it has none.
  bool has(const ProductShape& shape) { return find(shape) != nullptr; }
  /// The same with `shape.relu`, but false, and nothing queued, where the algorithm takes no ReLU.
  bool run_with_relu(const ProductShape& shape, const ProductData& data, cudaStream_t stream);

 private:
  struct Product;
  class Trial;
  static std::unique_ptr<Product> described(const ProductShape& shape);
  Product* keep(const ProductShape& shape, std::unique_ptr<Product> made);
  Product* find(const ProductShape& shape);
  /// The same, searched.
  Product* ready(const ProductShape& shape, cudaStream_t stream);
  /// What the algorithm of the sum alone makes of it with ReLU; null where it cannot, or has other bits on
  /// noise with a NaN. Tried on a stream of its own, since the caller's may be recording.
  std::unique_ptr<Product> with_relu(const ProductShape& shape);
  /// Whether the product's algorithm can compute it.
  bool takes(Product& product);
  void start(Product& product, const ProductShape& shape, const ProductData& data, cudaStream_t stream);
  cublasStatus_t queue(const Product& product, const cublasLtMatmulAlgo_t& algorithm, const ProductData& data,
                       cudaStream_t stream);
  void* workspace_of(cudaStream_t stream);
  /// Takes the fastest of the library's choices that give the bits of its first on noise, so that bits do not
  /// follow the clock. Waits for the device; a shape is searched once.
  void search(const ProductShape& shape, Product& product, cudaStream_t stream);

  cublasLtHandle_t handle_ = nullptr;
  cudaStream_t trials_ = nullptr;             // made at the first trial
  std::map<cudaStream_t, void*> workspaces_;  // one each, since streams run beside each other
  std::map<ProductShape, std::unique_ptr<Product>> products_;  // null where the library has none
};

}  // namespace sherd::cuda
