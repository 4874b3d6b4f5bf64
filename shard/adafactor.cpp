#include "shard/adafactor.h"

#include "collectives/group.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/rows.h"
#include "shard/state_source.h"

namespace sherd::shard {
namespace {

bool is_factored(const nn::Parameter& p) { return p.shape().rank() > 1 && p.numel() > 0; }

double resolution_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 0x1p-52;
    case DType::f16:
      return 0x1p-10;
    case DType::bf16:
      return 0x1p-7;
    default:
      return 0x1p-23;
  }
}

/// This rank's part of the matrices of a parameter's last two dimensions, with zeros where others have some:
/// of one matrix its rows that the part has some of, of several those matrices.
class FactoredPart {
 public:
  explicit FactoredPart(const nn::Parameter& p)
      : run_(run_of(p)),
        columns_(p.shape()[p.shape().rank() - 1]),
        rows_(p.shape()[p.shape().rank() - 2]),
        count_(p.numel() / (rows_ * columns_)),
        cut_(run_.begin, run_.numel, count_ == 1 ? columns_ : rows_ * columns_) {}

  /// Behind one another, for all of the parameter: the sums of its rows, then those of its columns.
  Tensor sums(const Tensor& part) const {
    const Tensor x = reshape(cut_.of(part), own());
    const Tensor all = zeros({(rows_ + columns_) * count_}, {DType::f64, part.device()});
    const auto put = [&](std::int64_t at, const Tensor& some) {
      copy_(narrow(all, 0, at, some.numel()), reshape(some, {some.numel()}));
    };
    if (cut_.numel == 0) return all;
    put(first_row(), sum(x, {2}));
    put(rows_ * count_ + (count_ == 1 ? 0 : cut_.first * columns_), sum(x, {1}));
    return all;
  }
  Tensor rows_in(const Tensor& sums) const { return narrow(sums, 0, 0, rows_ * count_); }
  Tensor columns_in(const Tensor& sums) const { return narrow(sums, 0, rows_ * count_, columns_ * count_); }
  double row_length() const { return static_cast<double>(columns_); }
  double column_length() const { return static_cast<double>(rows_); }

  /// What the statistics say of the part's elements, in one dimension.
  Tensor product(const Tensor& row_var, const Tensor& col_var, double eps) const {
    const Shape own = this->own();
    const std::int64_t first = count_ == 1 ? 0 : cut_.first;
    const auto of_own = [&](const Tensor& of_all, std::int64_t each) {
      return reshape(narrow(reshape(of_all, {-1}), 0, first * each, own[0] * each), {own[0], each});
    };
    const Tensor whole = of_own(row_var, rows_);
    const Tensor row =
        reshape(narrow(reshape(row_var, {-1}), 0, first_row(), own[0] * own[1]), {own[0], own[1], 1});
    const Tensor column = reshape(of_own(col_var, columns_), {own[0], 1, columns_});
    const Tensor means = reshape(maximum(mean(whole, {1}), eps), {own[0], 1, 1});
    return cut_.elements(div(mul(row, column), means));
  }

 private:
  Shape own() const {
    return count_ == 1 ? Shape{1, cut_.count, columns_} : Shape{cut_.count, rows_, columns_};
  }
  std::int64_t first_row() const { return count_ == 1 ? cut_.first : cut_.first * rows_; }

  Run run_;
  std::int64_t columns_, rows_, count_;
  Rows cut_;
};

/// a becomes a + share (b - a).
void move_towards(const Tensor& a, const Tensor& b, const Tensor& share) {
  copy_(a, add(a, mul(sub(reshape(b, a.shape()), a), to(share, a.dtype()))));
}

/// One parameter in a step.
struct FactoredStep {
  const nn::Parameter& parameter;
  Tensor p, row_var, col_var, variance, step;
  double sign, eps;
  Tensor sums{};          ///< of squares over all ranks: rows, columns, the parameter's own
  Tensor sum_of_steps{};  ///< of squares of `update`

  Tensor wide(const Tensor& t) const { return to(to(t, p.device()), step_dtype()); }
  DType step_dtype() const { return variance.dtype(); }
  Tensor gradient() const { return mul(wide(parameter.grad()), sign); }
  static Tensor sum_of_squares(const Tensor& t) { return reshape(to(sum(square(t)), DType::f64), {1}); }
  double numel() const { return static_cast<double>(parameter.numel()); }

  void begin() {
    copy_(step, add(step, 1));
    const Tensor own = sum_of_squares(wide(p));
    sums = is_factored(parameter) ? cat({FactoredPart(parameter).sums(square(gradient())), own}) : own;
  }
  void average(const Tensor& share) {
    if (!is_factored(parameter)) return move_towards(variance, square(gradient()), share);
    const FactoredPart m(parameter);
    move_towards(row_var, to(div(m.rows_in(sums), m.row_length()), row_var.dtype()), share);
    move_towards(col_var, to(div(m.columns_in(sums), m.column_length()), col_var.dtype()), share);
  }
  /// Made twice, so that no more than one parameter's is there at a time.
  Tensor update() const {
    const Tensor v = is_factored(parameter)
                         ? reshape(FactoredPart(parameter).product(row_var, col_var, eps), p.shape())
                         : variance;
    return mul(rsqrt(maximum(v, eps * eps)), gradient());
  }
  /// The root of the mean, over the whole parameter, of squares with this sum.
  Tensor mean_root(const Tensor& sum) const { return sqrt(div(reshape(sum, {}), numel())); }
};

}  // namespace

Adafactor::Adafactor(std::vector<nn::ParamGroup> groups, AdafactorOptions o)
    : Optimizer(std::move(groups), {{"lr", o.lr},
                                    {"beta2_decay", o.beta2_decay, nn::OptionRange::at_most_0},
                                    {"eps1", o.eps1},
                                    {"eps2", o.eps2},
                                    {"d", o.d},
                                    {"weight_decay", o.weight_decay},
                                    {"maximize", o.maximize ? 1.0 : 0.0, nn::OptionRange::yes_or_no}}) {
  for (std::size_t g = 0; g < group_count(); ++g)
    for (const nn::Parameter& p : parameters(g)) check_all_hear("Adafactor", p);
}

DType Adafactor::state_dtype(DType dtype) const { return compute_dtype(dtype); }

nn::StateForm Adafactor::state_form(std::string_view name, const nn::Parameter& p) const {
  if (name == "step") return Optimizer::state_form(name, p);
  const DType dtype = state_dtype(p.local().dtype());
  Shape shape = p.shape();
  if (is_factored(p) == (name == "variance")) return {{0}, dtype, 0};
  if (name == "variance") return {p.local().shape(), dtype};
  shape[shape.rank() - (name == "row_var" ? 1 : 2)] = 1;
  return {shape, dtype, 0};
}

void Adafactor::step_group(const Group& group, std::span<const nn::Parameter> params,
                           std::span<Slots* const> slots) {
  for (const nn::Parameter& p : params) check_all_hear("Adafactor", p);  // also of groups that came later
  const double eps1 = group.option("eps1"), d = group.option("d");
  std::vector<FactoredStep> all;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Slots& s = *slots[i];
    const Tensor p = params[i].local().detach();
    all.push_back({params[i], p, s[0], s[1], s[2], s[3], group.option("maximize") != 0 ? -1.0 : 1.0,
                   eps1 == 0 ? resolution_of(p.dtype()) : eps1});
  }
  std::vector<Tensor> numbers;
  for (FactoredStep& s : all) {
    s.begin();
    numbers.push_back(s.sums);
  }
  agree(params, numbers, ReduceOp::sum(), "Adafactor: squares");
  numbers.clear();
  for (FactoredStep& s : all) {
    s.average(pow(s.step, group.option("beta2_decay")));
    numbers.push_back(s.sum_of_steps = FactoredStep::sum_of_squares(s.update()));
  }
  agree(params, numbers, ReduceOp::sum(), "Adafactor: sizes of steps");
  for (const FactoredStep& s : all) {
    const Tensor lr = to(group.lr, s.p.device());
    const Tensor size = maximum(s.mean_root(narrow(s.sums, 0, s.sums.numel() - 1, 1)), group.option("eps2"));
    const Tensor rate = mul(size, minimum(lr, rsqrt(s.step)));
    const Tensor scale = div(rate, maximum(div(s.mean_root(s.sum_of_steps), d), 1));
    const Tensor keep = sub(1, mul(lr, group.option("weight_decay")));
    copy_(s.p, sub(mul(s.wide(s.p), s.wide(keep)), mul(s.update(), s.wide(scale))));
  }
}

}  // namespace sherd::shard
