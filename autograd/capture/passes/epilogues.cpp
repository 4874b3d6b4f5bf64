#include "autograd/capture/passes/epilogues.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "autograd/capture/passes/moves.h"
#include "autograd/capture/passes/rewrite.h"
#include "runtime/fused_product.h"

namespace sherd {
namespace {

using ops::Lies;
using ops::Region;

class Joining {
 public:
  explicit Joining(Recorded program)
      : program_(std::move(program)), moves_(program_), gone_(program_.trace.ops.size()) {}

  Recorded run() {
    std::vector<TracedOp> done;
    for (std::uint32_t i = 0; i < ops().size(); ++i) done.push_back(joined(i).value_or(ops()[i]));
    program_.trace.ops = std::move(done);
    gone_.flip();
    keep_ops(program_, gone_);
    return std::move(program_);
  }

 private:
  const std::vector<TracedOp>& ops() const { return program_.trace.ops; }
  Device device_of(const TracedTensor& t) const { return program_.trace.storages[t.storage].device; }

  /// Op `i` with a product whose result it reads.
  std::optional<TracedOp> joined(std::uint32_t i) {
    const TracedOp& traced = ops()[i];
    const std::shared_ptr<const Region> region = region_of(traced);
    if (!region || region->results.empty() || std::ranges::count(region->written, true) > 0) return {};
    for (std::uint32_t k = 0; k < traced.in.size(); ++k) {
      const std::optional<std::size_t> product = moves_.maker_for(traced.in[k], i);
      if (!product || gone_[*product] || !takes_region(*product, *region)) continue;
      gone_[*product] = true;
      return one(ops()[*product], traced, region, k);
    }
    return {};
  }

  /// Whether op `i` is a product whose device has a kernel that goes on with a region.
  bool takes_region(std::size_t i, const Region& region) const {
    const TracedOp& product = ops()[i];
    Specs specs;
    for (const TracedTensor& in : product.in)
      specs.push_back(in.storage == TracedTensor::none ? Spec::none()
                                                       : Spec{in.layout.shape, in.dtype, device_of(in)});
    return ops::takes_region(*product.op, specs, region, device_of(product.out[0]).type);
  }

  /// That of a fused op, or of an elementwise one alone; null for others.
  std::shared_ptr<const Region> region_of(const TracedOp& traced) const {
    if (ops::region_of(*traced.op) != nullptr)
      return static_cast<const ops::FusedRegion*>(traced.op->value())->region;
    const auto is_given = [](const TracedTensor& t) { return t.storage != TracedTensor::none; };
    if (traced.out.size() != 1 || traced.in.empty() || traced.once || traced.op->is_view() ||
        traced.op->mutating() || !std::ranges::all_of(traced.in, is_given) ||
        !ops::joins_regions(*traced.op, device_of(traced.out[0]).type) || !ops::effort_of(*traced.op))
      return nullptr;
    const TracedTensor& out = traced.out[0];
    auto region = std::make_shared<Region>();
    region->space.shape = out.layout.shape;
    Region::Member member{traced.op, {}, {out.layout.shape, out.dtype, device_of(out)}};
    for (const TracedTensor& t : traced.in) {
      if (!ops::lies_over(region->space, t.layout, out.layout.shape)) return nullptr;
      member.in.push_back({static_cast<std::uint32_t>(region->inputs.size()), t.layout});
      region->inputs.emplace_back(t.dtype, t.layout);
      region->written.push_back(false);
    }
    region->results.push_back(static_cast<std::uint32_t>(region->inputs.size()));
    region->members.push_back(std::move(member));
    return region;
  }

  TracedOp one(const TracedOp& product, const TracedOp& reader, std::shared_ptr<const Region> region,
               std::uint32_t result) const {
    TracedOp both = reader;
    both.precision = product.precision;
    both.in = product.in;
    for (std::uint32_t k = 0; k < reader.in.size(); ++k)
      if (k != result) both.in.push_back(reader.in[k]);
    const auto of = std::make_shared<ops::ProductRegion>();
    of->product = product.op;
    of->operands = product.in.size();
    of->region = std::move(region);
    of->result = result;
    both.op = make_ref<const OpModel<ops::FusedProduct>>(ops::FusedProduct{of});
    return both;
  }

  Recorded program_;
  const Moves moves_;       // of the program as it was given
  std::vector<bool> gone_;  // by op: it is part of a later one
};

}  // namespace

Recorded epilogues(Recorded program) { return Joining(std::move(program)).run(); }

}  // namespace sherd
