#include "runtime/cuda/cublaslt.h"

#include "runtime/cuda/shared_library.h"

namespace sherd::cuda {
namespace {

CublasLt load_all() {
  const SharedLibrary library(fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR));
  check<DeviceError>(library.found(),
                     "matmul: {} was not found, nor in {}; install cuBLAS or put its folder into "
                     "LD_LIBRARY_PATH",
                     library.name(), SHERD_CUDA_LIBRARIES);
  CublasLt lt{};
  library.load("cublasLtCreate", lt.create);
  library.load("cublasLtDestroy", lt.destroy);
  library.load("cublasLtMatmulDescCreate", lt.desc_create);
  library.load("cublasLtMatmulDescDestroy", lt.desc_destroy);
  library.load("cublasLtMatmulDescSetAttribute", lt.desc_set);
  library.load("cublasLtMatrixLayoutCreate", lt.layout_create);
  library.load("cublasLtMatrixLayoutDestroy", lt.layout_destroy);
  library.load("cublasLtMatrixLayoutSetAttribute", lt.layout_set);
  library.load("cublasLtMatmulPreferenceCreate", lt.preference_create);
  library.load("cublasLtMatmulPreferenceDestroy", lt.preference_destroy);
  library.load("cublasLtMatmulPreferenceSetAttribute", lt.preference_set);
  library.load("cublasLtMatmulAlgoGetHeuristic", lt.heuristic);
  library.load("cublasLtMatmulAlgoCheck", lt.algorithm_check);
  library.load("cublasLtMatmul", lt.matmul);
  library.load("cublasLtGetStatusString", lt.status_string);
  return lt;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt functions = load_all();
  return functions;
}

}  // namespace sherd::cuda
