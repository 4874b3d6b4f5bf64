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
      : program_(std::move(program)),
        moves_(program_),
        makers_(program_.trace.storages.size(), none),
        uses_(program_.trace.storages.size()),
        gone_(ops().size()) {
    for (std::uint32_t i = 0; i < ops().size(); ++i)
      each_tensor_of(ops()[i], [&](const TracedTensor& t) {
        if (makers_[t.storage] == none) makers_[t.storage] = i;
        ++uses_[t.storage];
      });
  }

  Recorded run() {
    std::vector<TracedOp> done;
    for (std::uint32_t i = 0; i < ops().size(); ++i) done.push_back(joined(i).value_or(ops()[i]));
    program_.trace.ops = std::move(done);
    gone_.flip();
    keep_ops(program_, gone_);
    return std::move(program_);
  }

 private:
  static constexpr std::uint32_t none = TracedTensor::none;
  const std::vector<TracedOp>& ops() const { return program_.trace.ops; }
  Device device_of(const TracedTensor& t) const { return program_.trace.storages[t.storage].device; }

  /// Op `i` with a product whose result it reads.
  std::optional<TracedOp> joined(std::uint32_t i) {
    const TracedOp& traced = ops()[i];
    const std::shared_ptr<const Region> region = region_of(traced);
    if (!region || region->results.empty() || std::ranges::count(region->written, true) > 0) return {};
    for (std::uint32_t k = 0; k < traced.in.size(); ++k) {
      const std::uint32_t product = maker_of(traced.in[k], i);
      if (product == none) continue;
      gone_[product] = true;
      return one(ops()[product], traced, region, k);
    }
    return {};
  }

  /// The product that gives all of `t` to op `reader` alone, and may run in its place.
  std::uint32_t maker_of(const TracedTensor& t, std::uint32_t reader) const {
    if (t.storage == none || uses_[t.storage] != 2 || makers_[t.storage] >= reader) return none;
    const std::uint32_t maker = makers_[t.storage];
    const TracedOp& product = ops()[maker];
    if (product.once || product.op->is_view() || product.out.size() != 1 || !same_value(product.out[0], t) ||
        !moves_.may_move(maker) || moves_.crosses(maker, reader) || gone_[maker])
      return none;
    Specs specs;
    for (const TracedTensor& in : product.in)
      specs.push_back(in.storage == none ? Spec::none() : Spec{in.layout.shape, in.dtype, device_of(in)});
    return ops::takes_region(*product.op, specs, device_of(t).type) ? maker : none;
  }

  /// That of a fused op, or of an elementwise one alone; null for others.
  std::shared_ptr<const Region> region_of(const TracedOp& traced) const {
    if (ops::region_of(*traced.op) != nullptr)
      return static_cast<const ops::FusedRegion*>(traced.op->value())->region;
    const auto is_given = [](const TracedTensor& t) { return t.storage != none; };
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
  const Moves moves_;                  // of the program as it was given
  std::vector<std::uint32_t> makers_;  // by storage: the first op that has it
  std::vector<std::size_t> uses_;      // by storage: of ops, its maker's among them
  std::vector<bool> gone_;             // by op: it is part of a later one
};

}  // namespace

Recorded epilogues(Recorded program) { return Joining(std::move(program)).run(); }

}  // namespace sherd
