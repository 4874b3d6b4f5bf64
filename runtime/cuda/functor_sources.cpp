#include "runtime/cuda/functor_source.h"

#include <mutex>
#include <sstream>
#include <unordered_map>

#include "runtime/cuda/region_source.h"
#include "runtime/fused_region.h"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {
namespace {

/// A source, and the kernel that it stands for.
struct SourceOfKernel {
  FunctorSource source;
  Kernel kernel;
};
struct Sources {
  std::mutex mutex;
  std::unordered_map<const KernelRow*, SourceOfKernel> of{};
};
/// Never destroyed, as rows of kernels are not.
Sources& sources() {
  static auto& all = *std::make_unique<Sources>().release();
  return all;
}

/// The text without what includes others.
std::string without_includes(const std::string& header) {
  std::string text;
  std::istringstream lines(header);
  for (std::string line; std::getline(lines, line);) {
    std::string words = line;
    std::erase_if(words, [](char c) { return c == ' ' || c == '\t'; });
    if (!words.starts_with("#include") && !words.starts_with("#pragmaonce")) text += line + "\n";
  }
  return text;
}

/// Empty where nobody told of the op, or its kernel is another one now.
FunctorSource source_of(const AnyOp& op) {
  const std::scoped_lock lock(sources().mutex);
  const auto its = sources().of.find(&op.kernels());
  const bool stands = its != sources().of.end() && its->second.kernel != nullptr &&
                      its->second.kernel == op.kernels().on(DeviceType::cuda);
  return stands ? its->second.source : FunctorSource{};
}

}  // namespace

void set_functor_source(const KernelRow& row, FunctorSource source) {
  source.header = without_includes(source.header);
  ops::set_effort(row, source.light ? ops::Effort::light : ops::Effort::heavy);
  const std::scoped_lock lock(sources().mutex);
  sources().of[&row] = {std::move(source), row.on(DeviceType::cuda)};
}

std::string functor_source(const AnyOp& op) {
  const FunctorSource source = source_of(op);
  if (source.type.empty()) return {};
  return fmt::format("functor<{}>({})", source.type, source.bytes(op.value()));
}

std::string functor_header(const AnyOp& op) { return source_of(op).header; }

void add_functor_sources() {
  const auto all = []<class O>() { add_functor_source<O>(); };
  ops::UnaryOps::for_each(all);
  ops::ArithmeticOps::for_each(all);
  ops::ComparisonOps::for_each(all);
  ops::BoundRight::for_each([]<class O>() { add_functor_source<WithScalar<O>>(); });
  ops::BoundLeft::for_each([]<class O>() { add_functor_source<ScalarWith<O>>(); });
  add_functor_source<ops::Where>();
}

}  // namespace sherd::cuda
