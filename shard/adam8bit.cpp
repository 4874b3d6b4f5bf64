#include "shard/adam8bit.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "collectives/group.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/group.h"
#include "shard/rows.h"
#include "shard/state_source.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

std::array<float, 256> made_code(CodeSign sign) {
  std::array<float, 256> code{0, 1};
  std::size_t at = 2;
  for (int power = 0; power < 7; ++power) {
    const int parts = (sign == CodeSign::both ? 1 : 2) << power;
    for (int i = 0; i < parts; ++i) {
      const double middle = 0.1 + 0.9 * (i + 0.5) / parts;
      const auto value = static_cast<float>(middle * std::pow(10.0, power - 6));
      code[at++] = value;
      if (sign == CodeSign::both) code[at++] = -value;
    }
  }
  std::ranges::sort(code);
  return code;
}

bool is_quantised(const nn::Parameter& p) { return p.numel() >= Adam8bit::least_quantised; }

/// A code as tensors on a device.
struct ByteCode {
  Tensor numbers,
      middles;  ///< f64; before each number, but the first, the middle between it and its neighbour

  ByteCode(CodeSign sign, Device device) {
    const std::span<const float> code = dynamic_code(sign);
    std::vector<double> all(code.begin(), code.end()), between(all);
    for (std::size_t i = 1; i < all.size(); ++i) between[i] = (all[i - 1] + all[i]) / 2;
    numbers = to(Tensor::from(all, {std::ssize(all)}, Device::cpu()), device);
    middles = to(Tensor::from(between, {std::ssize(between)}, Device::cpu()), device);
  }
  Tensor decoded(const Tensor& bytes) const { return index_select(numbers, 0, to(bytes, DType::i64)); }
  /// Of two that are as near the lower: a bisection, of all elements at once.
  Tensor encoded(const Tensor& x) const {
    Tensor place = zeros(x.shape(), {DType::i64, x.device()});
    for (int half = 128; half > 0; half /= 2) {
      const Tensor ahead = add(place, half);
      place = where(greater(x, index_select(middles, 0, ahead)), ahead, place);
    }
    return to(place, DType::u8);
  }
};

/// The blocks of a parameter in which one rank's elements end and another's begin.
std::vector<std::int64_t> cut_blocks(const nn::Parameter& p) {
  std::vector<std::int64_t> cut;
  if (shard_group_of(p) == nullptr || !is_quantised(p)) return cut;
  const auto [members, index] = unit_of(p)->place(p);
  const Partition& partition = members->group->spec().partition;
  for (int rank = 0; rank < partition.ranks(); ++rank) {
    const OwnedPart part = partition.part(static_cast<int>(index), rank);
    const std::int64_t of = part.in_parameter / Adam8bit::block;
    if (part.numel > 0 && part.in_parameter % Adam8bit::block != 0 && (cut.empty() || cut.back() != of))
      cut.push_back(of);
  }
  return cut;
}

void check_cuts(const nn::Parameter& p) {
  const Unit* unit = unit_of(p);
  if (unit != nullptr && (unit->flattened(p) != nullptr || !cut_blocks(p).empty()))
    check_all_hear("Adam8bit", p);
}

/// The numbers of a step that all parameters of a group have.
struct ByteRule {
  double beta1, beta2, eps, weight_decay, sign;
  const Tensor& lr;
};

struct ByteMoment {
  Tensor kept, absmax;
  double beta;
  CodeSign sign;
};

/// One parameter in a step.
class ByteStep {
 public:
  ByteStep(const ByteRule& rule, const nn::Parameter& parameter, std::span<const Tensor> slots)
      : rule_(rule),
        parameter_(parameter),
        p_(parameter.local().detach()),
        moments_{ByteMoment{slots[0], slots[2], rule.beta1, CodeSign::both},
                 ByteMoment{slots[1], slots[3], rule.beta2, CodeSign::positive}},
        step_(slots[4]),
        run_(run_of(parameter)),
        kept_(kept_of(run_, block)),
        cut_(cut_blocks(parameter)) {
    if (is_quantised(parameter))
      codes_ = {ByteCode(CodeSign::both, p_.device()), ByteCode(CodeSign::positive, p_.device())};
  }

  /// Of the blocks that are cut the largest of both moments, as far as this rank has elements; f64.
  Tensor largest_in_cuts() const {
    const Tensor all = zeros({2 * std::ssize(cut_)}, {DType::f64, p_.device()});
    each_own_cut([&](std::int64_t of, std::int64_t at) {
      const std::int64_t begin = std::max(run_.begin, of * block),
                         end = std::min(run_.begin + run_.numel, (of + 1) * block);
      for (std::size_t k = 0; k < 2; ++k)
        copy_(narrow(all, 0, 2 * at + static_cast<std::int64_t>(k), 1),
              reshape(amax(abs(moved(k, begin, end))), {1}));
    });
    return all;
  }

  void take(const Tensor& largest) {
    copy_(step_, add(step_, 1));
    for (std::int64_t begin = run_.begin, end; begin < run_.begin + run_.numel; begin = end) {
      end = std::min((begin / block + piece) * block, run_.begin + run_.numel);
      std::array<Tensor, 2> moved_moments;
      for (std::size_t k = 0; k < 2; ++k) moved_moments[k] = moved(k, begin, end);
      move_parameter(moved_moments, begin, end);
      for (std::size_t k = 0; k < 2; ++k) keep(k, moved_moments[k], largest, begin, end);
    }
  }

 private:
  static constexpr std::int64_t block = Adam8bit::block;
  /// So many blocks at a time: what is computed in f64 is of no more.
  static constexpr std::int64_t piece = 4096;

  void each_own_cut(const auto& act) const {
    for (std::size_t i = 0; i < cut_.size(); ++i)
      if (cut_[i] >= kept_.begin && cut_[i] < kept_.begin + kept_.numel)
        act(cut_[i], static_cast<std::int64_t>(i));
  }
  /// The elements of what lies as the parameter does, from `begin` to `end` in the whole.
  Tensor in(const Tensor& t, std::int64_t begin, std::int64_t end) const {
    return narrow(reshape(t, {t.numel()}), 0, begin - run_.begin, end - begin);
  }
  Tensor absmax_in(std::size_t k, const Rows& rows) const {
    return narrow(moments_[k].absmax, 0, rows.first - kept_.begin, rows.count);
  }
  /// A moment's elements after this step's gradient, in f64.
  Tensor moved(std::size_t k, std::int64_t begin, std::int64_t end) const {
    const ByteMoment& m = moments_[k];
    Tensor old = in(m.kept, begin, end);
    if (is_quantised(parameter_)) {
      const Rows rows(begin, end - begin, block);
      const Tensor scale = reshape(to(absmax_in(k, rows), DType::f64), {rows.count, 1});
      old = rows.elements(mul(rows.of(codes_[k].decoded(old)), scale));
    }
    const Tensor g = mul(to(to(in(parameter_.grad(), begin, end), p_.device()), DType::f64), rule_.sign);
    return add(mul(to(old, DType::f64), m.beta), mul(k == 0 ? g : square(g), 1 - m.beta));
  }
  void keep(std::size_t k, const Tensor& moment, const Tensor& largest, std::int64_t begin,
            std::int64_t end) const {
    const Tensor kept = in(moments_[k].kept, begin, end);
    if (!is_quantised(parameter_)) return copy_(kept, moment), void();
    const Rows rows(begin, end - begin, block);
    const Tensor x = rows.of(moment), absmax = absmax_in(k, rows);
    copy_(absmax, amax(abs(x), {1}));
    each_own_cut([&](std::int64_t of, std::int64_t at) {
      if (of >= rows.first && of < rows.first + rows.count)
        copy_(narrow(absmax, 0, of - rows.first, 1),
              narrow(largest, 0, 2 * at + static_cast<std::int64_t>(k), 1));
    });
    const Tensor scale = reshape(to(absmax, DType::f64), {rows.count, 1});
    copy_(kept, codes_[k].encoded(rows.elements(div(x, where(equal(scale, 0), 1.0, scale)))));
  }
  void move_parameter(const std::array<Tensor, 2>& moved, std::int64_t begin, std::int64_t end) const {
    const Tensor p = in(p_, begin, end), lr = to(rule_.lr, p_.device());
    const auto unbiased = [&](std::size_t k) {
      return div(moved[k], sub(1, pow(Number(moments_[k].beta), step_)));
    };
    const Tensor move = div(unbiased(0), add(sqrt(unbiased(1)), rule_.eps));
    copy_(p, sub(mul(to(p, DType::f64), sub(1, mul(lr, rule_.weight_decay))), mul(move, lr)));
  }

  const ByteRule& rule_;
  const nn::Parameter& parameter_;
  Tensor p_;
  std::array<ByteMoment, 2> moments_;
  Tensor step_;
  Run run_, kept_;
  std::vector<std::int64_t> cut_;
  std::vector<ByteCode> codes_;
};

}  // namespace

std::span<const float> dynamic_code(CodeSign sign) {
  static const std::array<float, 256> both = made_code(CodeSign::both),
                                      positive = made_code(CodeSign::positive);
  return sign == CodeSign::both ? both : positive;
}

Adam8bit::Adam8bit(std::vector<nn::ParamGroup> groups, Adam8bitOptions o)
    : Optimizer(std::move(groups), {{"lr", o.lr},
                                    {"beta1", o.beta1, nn::OptionRange::below_1},
                                    {"beta2", o.beta2, nn::OptionRange::below_1},
                                    {"eps", o.eps},
                                    {"weight_decay", o.weight_decay},
                                    {"maximize", o.maximize ? 1.0 : 0.0, nn::OptionRange::yes_or_no}}) {
  for (std::size_t g = 0; g < group_count(); ++g)
    for (const nn::Parameter& p : parameters(g)) check_cuts(p);
}

nn::StateForm Adam8bit::state_form(std::string_view name, const nn::Parameter& p) const {
  if (name == "step") return Optimizer::state_form(name, p);
  const bool is_absmax = name.ends_with("_absmax");
  if (!is_absmax) return {p.local().shape(), is_quantised(p) ? DType::u8 : DType::f32};
  if (!is_quantised(p)) return {{0}, DType::f32, 0};
  return {{kept_of(run_of(p), block).numel}, DType::f32, block};
}

void Adam8bit::step_group(const Group& group, std::span<const nn::Parameter> params,
                          std::span<Slots* const> slots) {
  for (const nn::Parameter& p : params) check_cuts(p);  // also of groups that came later
  const ByteRule rule{group.option("beta1"),
                      group.option("beta2"),
                      group.option("eps"),
                      group.option("weight_decay"),
                      group.option("maximize") != 0 ? -1.0 : 1.0,
                      group.lr};
  std::vector<ByteStep> all;
  std::vector<Tensor> largest;
  for (std::size_t i = 0; i < params.size(); ++i)
    largest.push_back(all.emplace_back(rule, params[i], *slots[i]).largest_in_cuts());
  agree(params, largest, ReduceOp::max(), "Adam8bit: largest in blocks that ranks share");
  for (std::size_t i = 0; i < params.size(); ++i) all[i].take(largest[i]);
}

}  // namespace sherd::shard
