#include "runtime/cuda/cublaslt.h"

#include <dlfcn.h>

#include "runtime/error.h"

namespace sherd::cuda {
namespace {

void* open_library() {
  const std::string name = fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR);
  // By name, where the loader searches; then in the folder of the toolkit that this was built with.
  for (const std::string& path : {name, SHERD_CUDA_LIBRARIES "/" + name})
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  fail<DeviceError>(
      "matmul: {} was not found, nor in {}; install cuBLAS or put its folder into LD_LIBRARY_PATH", name,
      SHERD_CUDA_LIBRARIES);
}

template <class F>
void load(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  check<DeviceError>(function != nullptr,
                     "matmul: cuBLASLt has no function {}; install the version of the toolkit, {}", name,
                     CUBLAS_VER_MAJOR);
}

CublasLt load_all() {
  void* library = open_library();
  CublasLt lt{};
  load(library, "cublasLtCreate", lt.create);
  load(library, "cublasLtDestroy", lt.destroy);
  load(library, "cublasLtMatmulDescCreate", lt.desc_create);
  load(library, "cublasLtMatmulDescDestroy", lt.desc_destroy);
  load(library, "cublasLtMatmulDescSetAttribute", lt.desc_set);
  load(library, "cublasLtMatrixLayoutCreate", lt.layout_create);
  load(library, "cublasLtMatrixLayoutDestroy", lt.layout_destroy);
  load(library, "cublasLtMatrixLayoutSetAttribute", lt.layout_set);
  load(library, "cublasLtMatmulPreferenceCreate", lt.preference_create);
  load(library, "cublasLtMatmulPreferenceDestroy", lt.preference_destroy);
  load(library, "cublasLtMatmulPreferenceSetAttribute", lt.preference_set);
  load(library, "cublasLtMatmulAlgoGetHeuristic", lt.heuristic);
  load(library, "cublasLtMatmul", lt.matmul);
  load(library, "cublasLtGetStatusString", lt.status_string);
  return lt;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt functions = load_all();  // never unloaded, since handles of it may be destroyed last
  return functions;
}

}  // namespace sherd::cuda
