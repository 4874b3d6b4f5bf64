#include "runtime/cuda/nvrtc.h"

#include <nvrtc.h>

#include <memory>
#include <optional>
#include <vector>

#include "runtime/cuda/check.h"
#include "runtime/cuda/shared_library.h"

namespace sherd::cuda {
namespace {

struct Nvrtc {
  decltype(&nvrtcVersion) version;
  decltype(&nvrtcCreateProgram) create;
  decltype(&nvrtcDestroyProgram) destroy;
  decltype(&nvrtcCompileProgram) compile;
  decltype(&nvrtcGetProgramLogSize) log_size;
  decltype(&nvrtcGetProgramLog) log;
  decltype(&nvrtcGetCUBINSize) code_size;
  decltype(&nvrtcGetCUBIN) code;
};

std::optional<Nvrtc> load_all() {
  const SharedLibrary library(fmt::format("libnvrtc.so.{}", CUDART_VERSION / 1000));
  if (!library.found()) return std::nullopt;
  Nvrtc all{};
  library.load("nvrtcVersion", all.version);
  library.load("nvrtcCreateProgram", all.create);
  library.load("nvrtcDestroyProgram", all.destroy);
  library.load("nvrtcCompileProgram", all.compile);
  library.load("nvrtcGetProgramLogSize", all.log_size);
  library.load("nvrtcGetProgramLog", all.log);
  library.load("nvrtcGetCUBINSize", all.code_size);
  library.load("nvrtcGetCUBIN", all.code);
  return all;
}

const std::optional<Nvrtc>& nvrtc() {
  static const std::optional<Nvrtc> functions = load_all();
  return functions;
}

// As nvcc compiles the library's kernels: an element has the same bits by either.
constexpr const char* options[] = {"--std=c++20", "--fmad=false", "--device-as-default-execution-space",
                                   "--disable-warnings"};

}  // namespace

bool has_nvrtc() { return nvrtc().has_value(); }

std::string nvrtc_identity(const std::string& architecture) {
  int major = 0, minor = 0;
  nvrtc()->version(&major, &minor);
  std::string text = fmt::format("NVRTC {}.{} {}", major, minor, architecture);
  for (const char* const option : options) text += fmt::format(" {}", option);
  return text;
}

std::string compile_source(const std::string& source, const std::string& architecture) {
  const Nvrtc& with = *nvrtc();
  nvrtcProgram made = nullptr;
  check<DeviceError>(with.create(&made, source.c_str(), "region.cu", 0, nullptr, nullptr) == NVRTC_SUCCESS,
                     "nvrtc: it makes no program");
  const auto destroy = [&](nvrtcProgram p) { with.destroy(&p); };
  const std::unique_ptr<std::remove_pointer_t<nvrtcProgram>, decltype(destroy)> program(made, destroy);
  const std::string target = "--gpu-architecture=" + architecture;
  std::vector<const char*> all(std::begin(options), std::end(options));
  all.push_back(target.c_str());
  if (with.compile(made, static_cast<int>(all.size()), all.data()) != NVRTC_SUCCESS) {
    std::size_t bytes = 0;
    with.log_size(made, &bytes);
    std::string log(bytes, '\0');
    with.log(made, log.data());
    fail<DeviceError>("nvrtc: {}", log.substr(0, 400));
  }
  std::size_t bytes = 0;
  with.code_size(made, &bytes);
  std::string code(bytes, '\0');
  check<DeviceError>(with.code(made, code.data()) == NVRTC_SUCCESS, "nvrtc: it gives no code for {}",
                     architecture);
  return code;
}

}  // namespace sherd::cuda
