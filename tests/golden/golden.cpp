#include "tests/golden/golden.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "nn/state_file.h"
#include "runtime/backend.h"
#include "runtime/dtype.h"
#include "runtime/ops.h"
#include "tests/source_root.h"
#include "tests/tolerance.h"

namespace sherd::test {
namespace {

/// How far `actual` lies outside its tolerance; at most 0 when it agrees.
template <class T>
double excess(T actual, T expected, Tolerance allowed, double largest) {
  if constexpr (std::is_floating_point_v<compute_t<T>>) {
    const double a = static_cast<compute_t<T>>(actual), e = static_cast<compute_t<T>>(expected);
    if (std::isnan(e) || std::isnan(a)) return std::isnan(e) && std::isnan(a) ? 0 : HUGE_VAL;
    if (std::isinf(e) || std::isinf(a)) return a == e ? 0 : HUGE_VAL;
    if (allowed.relative == 0) return a == e && std::signbit(a) == std::signbit(e) ? 0 : HUGE_VAL;
    return std::abs(a - e) - (allowed.absolute + allowed.relative * std::max(std::abs(e), largest));
  } else {
    return actual == expected ? 0 : HUGE_VAL;
  }
}

template <class T>
double largest_element(const std::vector<T>& values) {
  double largest = 0;
  for (const T value : values) {
    const auto magnitude = std::abs(static_cast<double>(static_cast<compute_t<T>>(value)));
    if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
  }
  return largest;
}

template <class T>
std::string worst_element(const Tensor& actual, const Tensor& expected, Tolerance allowed, Scale scale) {
  const auto a = actual.to_vector<T>(), e = expected.to_vector<T>();
  const double largest = scale == Scale::largest ? largest_element<T>(e) : 0;
  double worst = 0;
  std::size_t at = 0;
  for (std::size_t i = 0; i < e.size(); ++i) {
    const double x = excess<T>(a[i], e[i], allowed, largest);
    if (x > worst) worst = x, at = i;
  }
  if (worst <= 0) return {};
  return fmt::format("element {} of {} {} is {:.9g}, expected {:.9g}", at, name_of(expected.dtype()),
                     expected.shape(), static_cast<double>(static_cast<compute_t<T>>(a[at])),
                     static_cast<double>(static_cast<compute_t<T>>(e[at])));
}

GoldenCase make_case(const std::string& name, const std::string& text) {
  const auto about = nlohmann::json::parse(text);
  return {name, about.at("op"), about.at("args"), about.value("tolerance", 1.0), {}};
}

}  // namespace

Tensor GoldenCase::find(const std::string& key) const {
  const auto found = tensors.find(key);
  return found == tensors.end() ? Tensor() : found->second;
}

std::vector<Tensor> GoldenCase::list(const std::string& prefix) const {
  std::vector<Tensor> found;
  while (has(prefix + std::to_string(found.size())))
    found.push_back(find(prefix + std::to_string(found.size())));
  return found;
}

std::string golden_path(std::string_view area) {
  return fmt::format("{}/tests/golden/{}.safetensors", source_root, area);
}

std::vector<GoldenCase> load_goldens(std::string_view area) {
  const SafetensorsFile file(golden_path(area));
  std::map<std::string, GoldenCase> cases;
  for (const auto& [name, text] : file.metadata()) {
    if (name != "made with") cases.emplace(name, make_case(name, text));
  }
  for (const TensorEntry& entry : file.entries()) {
    const std::size_t slash = entry.name.rfind('/');
    const auto owner = cases.find(entry.name.substr(0, slash));
    check<ValueError>(slash != std::string::npos && owner != cases.end(),
                      "golden: '{}' belongs to no case of {}", entry.name, area);
    owner->second.tensors.emplace(entry.name.substr(slash + 1), nn::load_tensor(file, entry));
  }
  std::vector<GoldenCase> sorted;
  for (auto& [name, golden] : cases) sorted.push_back(std::move(golden));
  return sorted;
}

double to_number(const nlohmann::json& value) {
  return value.is_string() ? std::stod(value.get<std::string>()) : value.get<double>();
}

DType to_dtype(const std::string& name) {
  for (DType dtype : all_dtypes) {
    if (name_of(dtype) == name) return dtype;
  }
  fail<ValueError>("golden: '{}' is not a dtype", name);
}

std::string difference(const Tensor& actual, const Tensor& expected, double tolerance, Scale scale) {
  if (!actual.defined()) return "nothing, where a tensor is expected";
  if (actual.shape() != expected.shape())
    return fmt::format("shape {}, expected {}", actual.shape(), expected.shape());
  if (actual.dtype() != expected.dtype())
    return fmt::format("dtype {}, expected {}", name_of(actual.dtype()), name_of(expected.dtype()));
  Tolerance allowed = tolerance_of(expected.dtype());
  allowed.relative *= tolerance;
  allowed.absolute *= tolerance;
  return with_element(expected.dtype(),
                      [&]<class T>() { return worst_element<T>(actual, expected, allowed, scale); });
}

Tensor with_holes(const Tensor& tensor) {
  Layout layout{tensor.shape(), contiguous_strides(tensor.shape()), 1};
  for (std::int64_t& stride : layout.strides) stride *= 2;
  const Tensor memory = empty(Shape{2 * tensor.numel() + 2}, {tensor.dtype(), tensor.device()});
  if (!tensor.device().is_cpu()) {
    const Tensor holes = alias(memory, layout);
    copy_(holes, tensor);
    return holes;
  }
  const std::int64_t element = size_of(tensor.dtype());
  std::memset(memory.raw(), 0, static_cast<std::size_t>(memory.numel() * element));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    std::memcpy(memory.raw() + (1 + 2 * i) * element, tensor.raw() + i * element,
                static_cast<std::size_t>(element));
  }
  return alias(memory, layout);
}

bool has_gpu() {
  try {
    return backend(DeviceType::cuda).mark(Device::cuda(0)) != nullptr;
  } catch (const DeviceError&) {
    return false;
  }
}

}  // namespace sherd::test
