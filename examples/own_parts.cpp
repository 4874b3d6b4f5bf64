// Parts of one's own: a loss, which is an elementwise op, a structural op with its kernel, a module that owns
// a part by pointer, and an optimizer whose rule is one pass over all parameters.
#include <sherd.h>

#include <cstdio>
#include <memory>
#include <vector>

using namespace sherd;

/// sqrt(1 + d^2) - 1 of the difference d: an elementwise op is a call on numbers and the gradients beside it.
/// Loops, broadcasting, dtypes and the second derivative follow; of a loss, which takes input and target, its
/// mean and sum in one pass too, and on a GPU all of it, by `cuda::add_loss<PseudoHuber>()` in a file of
/// nvcc's.
struct PseudoHuber : Functor<"pseudo_huber", 2, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 0b11}, reads_b{.inputs = 0b11};

  template <class T>
  constexpr T operator()(T x, T t) const {
    using math::sqrt;
    const T d = x - t;
    return sqrt(T(1) + d * d) - T(1);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T t, T) const {
    using math::sqrt;
    const T d = x - t;
    return gy * d / sqrt(T(1) + d * d);
  }
  constexpr auto grad_b(auto gy, auto x, auto t, auto y) const { return -grad_a(gy, x, t, y); }
};

/// The running maximum along the rows of a matrix, and where it stands: a structural op infers its outputs
/// and names its gradient in ops.
struct RunningMax {
  static constexpr std::string_view name = "running_max";
  static constexpr Reads reads{.outputs = 2};
  static constexpr Mask dense = 1;

  Specs infer(SpecSpan in) const {
    check<ShapeError>(in[0].shape.rank() == 2, "running_max: takes a matrix, got shape {}", in[0].shape);
    check<DTypeError>(in[0].dtype == f32, "running_max: takes f32, got {}; cast it", name_of(in[0].dtype));
    return {in[0], {in[0].shape, i64, in[0].device}};
  }
  /// Each maximum came from one place, to which its gradient goes.
  Tensors grad(const GradArgs& args) const {
    const Spec& x = args.specs[0];
    return {scatter_add(zeros(x.shape, {x.dtype, x.device}), 1, args.outputs[1], args.gy[0])};
  }
  bool operator==(const RunningMax&) const = default;
};

void running_max(const RunningMax&, Inputs in, Outputs out) {
  const float* x = in[0].data<float>();
  float* largest = out[0].mutable_data<float>();
  auto* place = out[1].mutable_data<std::int64_t>();
  for (std::int64_t i = 0, columns = in[0].size(1); i < in[0].numel(); ++i) {
    const bool newer = i % columns == 0 || x[i] > largest[i - 1];
    largest[i] = newer ? x[i] : largest[i - 1];
    place[i] = newer ? i % columns : place[i - 1];
  }
}

/// A module that holds another one by pointer, which may be null.
struct Net final : nn::Layer<Net> {
  nn::Linear in{6, 16}, out{16, 6};
  std::unique_ptr<nn::LayerNorm> norm = std::make_unique<nn::LayerNorm>(16);

  Tensor forward(const Tensor& x) const {
    const Tensor h = norm ? (*norm)(in(x)) : in(x);
    return out(apply(RunningMax{}, h));  // the first output; `apply_many` gives both
  }
  void visit(auto&& on) {
    on("in", in);
    on("norm", norm);
    on("out", out);
  }
};

/// Lion (Chen et al., 2023): the sign of an average of gradients. A rule over lists of tensors gives the new
/// value of an element and of what is kept beside it; the loop over all parameters follows, and on a GPU the
/// kernel, by `cuda::add_list_step<LionStep>()` in a file of nvcc's.
struct LionStep : ListStep<LionStep> {
  static constexpr std::string_view name = "lion_step_";
  static constexpr std::string_view states[] = {"momentum"};

  /// What is one number for a whole step: here the rate alone.
  template <class D, class Rounded>
  constexpr auto factors(D lr, D, const Rounded& rounded) const {
    return rounded(-lr);
  }
  template <class T>
  constexpr Stepped<T, 1> operator()(T rate, T p, T g, T m) const {
    using math::fma;
    using math::where;
    const T ahead = fma(T(0.1), g, m * T(0.9));
    const T sign = where(ahead > T(0), T(1), where(ahead < T(0), T(-1), T(0)));
    return {fma(rate, sign, p), {fma(T(0.01), g, m * T(0.99))}};
  }
  bool operator==(const LionStep&) const = default;
};

class Lion final : public nn::Optimizer {
 public:
  Lion(std::vector<nn::Parameter> params, double lr) : Optimizer({{std::move(params)}}, {{"lr", lr}}) {}
  std::vector<std::string> state_names() const override { return {"momentum"}; }

 protected:
  Slots fresh(const Tensor& p) const override { return {zeros_like(p)}; }
  void step_group(const Group& group, std::span<const nn::Parameter> params,
                  std::span<Slots* const> slots) override {
    if (params.empty()) return;
    std::vector<Tensor> all{to(group.lr, params[0].local().device())};
    for (std::size_t i = 0; i < params.size(); ++i)
      all.insert(all.end(), {params[i].local().detach(), params[i].grad(), (*slots[i])[0]});
    apply_many(LionStep{}, all);
  }
};

int main() {
  cpu::add_loss<PseudoHuber>();
  add_kernel<running_max>(DeviceType::cpu);
  cpu::add_list_step<LionStep>();
  manual_seed(0);
  Net net;
  Lion optimizer(net.parameters(), 3e-3);
  const Tensor x = randn({64, 6}), y = cumsum(x, 1);
  double last = 0;
  for (int step = 0; step < 100; ++step) {
    const Tensor loss = elementwise_loss(PseudoHuber{}, net(x), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item();
    if (step % 20 == 0) std::printf("loss.%d %.9g\n", step, last);
  }

  const Tensor points = randn({4, 3}, {f64}).requires_grad_(),
               targets = randn({4, 3}, {f64}).requires_grad_();
  const double error =
      gradcheck([](auto in) { return elementwise_loss(PseudoHuber{}, in[0], in[1]); }, {points, targets});
  return error < 1e-6 && last < 0.5 ? 0 : 1;
}
