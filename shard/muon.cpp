#include "shard/muon.h"

#include <algorithm>
#include <cmath>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "shard/rows.h"

namespace sherd::shard {
namespace {

/// What each rank can tell of a parameter before it steps, with the same answer on all of them.
void check_whole_matrix(const nn::Parameter& p) {
  check<ValueError>(
      p.shape().rank() == 2,
      "Muon: a parameter of shape {} is no matrix; step it by nn::AdamW in an optimizer of its own",
      p.shape());
  check_all_hear("Muon", p);
}

double scale_of(MuonScale scale, const Shape& matrix) {
  const auto rows = static_cast<double>(matrix[0]), columns = static_cast<double>(matrix[1]);
  return scale == MuonScale::original ? std::sqrt(std::max(1.0, rows / columns))
                                      : 0.2 * std::sqrt(std::max(rows, columns));
}

/// a + share (b - a).
Tensor towards(const Tensor& a, const Tensor& b, double share) { return add(a, mul(sub(b, a), share)); }

}  // namespace

Tensor orthogonalized(const Tensor& x, int iterations, double eps) {
  check<ShapeError>(x.rank() == 2, "orthogonalized: takes a matrix, got shape {}", x.shape());
  const bool tall = x.size(0) > x.size(1);
  Tensor y = tall ? transpose(x, 0, 1) : x;
  y = div(y, maximum(norm(y), Tensor::scalar(eps, {y.dtype(), y.device()})));
  // Products are of 16 bits, and sums of them rounded once.
  const auto wide = [](const Tensor& t) { return to(t, compute_dtype(t.dtype())); };
  for (int i = 0; i < iterations; ++i) {
    const Tensor gram = matmul(y, transpose(y, 0, 1)), square = matmul(gram, gram);
    const Tensor mixed = to(add(mul(wide(gram), -4.775), mul(wide(square), 2.0315)), x.dtype());
    y = to(add(mul(wide(y), 3.4445), wide(matmul(mixed, y))), x.dtype());
  }
  return tall ? transpose(y, 0, 1) : y;
}

Muon::Muon(std::vector<nn::ParamGroup> groups, MuonOptions o)
    : Optimizer(std::move(groups), {{"lr", o.lr},
                                    {"momentum", o.momentum},
                                    {"weight_decay", o.weight_decay},
                                    {"eps", o.eps},
                                    {"nesterov", o.nesterov ? 1.0 : 0.0, nn::OptionRange::yes_or_no}}),
      options_(o) {
  check<ValueError>(o.iterations >= 0 && o.iterations < 100, "Muon: {} iterations; give 0 to 99, mostly 5",
                    o.iterations);
  check<DTypeError>(is_floating(o.precision), "Muon: iterations in {}; give a floating dtype",
                    name_of(o.precision));
  for (std::size_t g = 0; g < group_count(); ++g)
    for (const nn::Parameter& p : parameters(g)) check_whole_matrix(p);
}

DType Muon::state_dtype(DType dtype) const { return compute_dtype(dtype); }

void Muon::step_group(const Group& group, std::span<const nn::Parameter> params,
                      std::span<Slots* const> slots) {
  for (const nn::Parameter& p : params) check_whole_matrix(p);  // also of groups that came later
  const double momentum = group.option("momentum"), eps = group.option("eps");
  const Tensor keep = sub(1, mul(group.lr, group.option("weight_decay")));
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Tensor p = params[i].local().detach(), m = (*slots[i])[0];
    const Tensor g = to(to(params[i].grad(), p.device()), m.dtype());
    copy_(m, towards(m, g, 1 - momentum));
    const Tensor part = to(group.option("nesterov") != 0 ? towards(g, m, momentum) : m, options_.precision);
    const Tensor whole = orthogonalized(gather_whole(params[i], part), options_.iterations, eps);
    const double scale = scale_of(options_.scale, params[i].shape());
    const auto number = [&](const Tensor& t) { return to(to(t, m.dtype()), p.device()); };
    const Tensor move = mul(to(part_of(params[i], whole), m.dtype()), number(mul(group.lr, scale)));
    copy_(p, sub(mul(to(p, m.dtype()), number(keep)), move));
  }
}

}  // namespace sherd::shard
