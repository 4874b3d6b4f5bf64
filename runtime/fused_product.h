// A product of matrices and the elementwise ops behind it as one op, which a pass makes of them.
#pragma once

#include <atomic>
#include <memory>

#include "runtime/fused_region.h"

namespace sherd::ops {

/// Whether a device has a kernel for this product of such inputs that goes on with the region, which reads it
/// alone.
using TakesRegion = bool (*)(const AnyOp& product, SpecSpan in, const Region& region);
SHERD_API bool takes_region(const AnyOp& product, SpecSpan in, const Region& region, DeviceType device);
/// A back end that has one says so.
SHERD_API void set_takes_region(DeviceType device, TakesRegion takes);

/// Whether a region is ReLU of its one input and nothing else.
SHERD_API bool is_relu(const Region& region);

/// A product, and the region that alone reads its result, of elementwise ops over the result's rows.
struct ProductRegion {
  Ref<const AnyOp> product;
  std::size_t operands;  ///< of the product: the first inputs, some of which may be none
  std::shared_ptr<const Region> region;
  std::uint32_t result;  ///< the region's input that the product gives; its others follow
  mutable std::atomic<std::shared_ptr<const void>> plan{};  ///< a kernel's own

  const std::pair<DType, Layout>& of_result() const { return region->inputs[result]; }
  std::int64_t bytes_of_result() const {
    return of_result().second.shape.numel() * size_of(of_result().first);
  }
  bool operator==(const ProductRegion& other) const {
    return product->equals(*other.product) && result == other.result && *region == *other.region;
  }
};

/// The product, then the region. Outputs: the region's results.
struct FusedProduct {
  static constexpr std::string_view name = "fused_product";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr Mask optional = all_of_them;
  static constexpr bool differentiable = false;
  std::shared_ptr<const ProductRegion> of;

  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  void fields(auto&& on) const {
    on("product", of->product->text());
    on("ops", of->region->text());
  }
  bool operator==(const FusedProduct& other) const { return of == other.of || *of == *other.of; }
};

/// What such an op consists of; null for others.
SHERD_API const ProductRegion* product_region_of(const AnyOp& op);

}  // namespace sherd::ops
