// Sherd inside an application that has an Eigen of its own: two ops of its own, a small model, inference from
// four threads, and two ranks. It builds against an installed sherd in any of these ways:
//   g++ -std=c++20 main.cpp $(pkg-config --cflags --libs sherd eigen3)
//   cmake -B build && cmake --build build
//   meson setup build && ninja -C build
#include <sherd.h>

#include <Eigen/Dense>
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "runtime/cpu/elementwise_loop.h"

namespace {

using namespace sherd;

/// x / (1 + |x|): an elementwise op is a call on one number and the gradient beside it.
struct Softsign {
  static constexpr std::string_view name = "softsign";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  static constexpr T denominator(T x) {
    using math::where;
    return T(1) + where(x < T(0), T(-x), x);
  }
  template <class T>
  constexpr T operator()(T x) const {
    return x / denominator(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (denominator(x) * denominator(x));
  }
  bool operator==(const Softsign&) const = default;
};

/// Sums along the rows of a matrix: y[i][j] = x[i][0] + ... + x[i][j], or from the other end. A structural op
/// checks its inputs and names its gradient in ops; how it is computed is a kernel's affair.
struct CumulativeSum {
  static constexpr std::string_view name = "cumulative_sum";
  static constexpr Reads reads{};
  bool reverse = false;

  Specs infer(SpecSpan in) const {
    check<ShapeError>(in[0].shape.rank() == 2, "cumulative_sum: takes a matrix, got shape {}", in[0].shape);
    check<DTypeError>(in[0].dtype == f32 || in[0].dtype == f64, "cumulative_sum: takes f32 and f64, got {}",
                      name_of(in[0].dtype));
    return {in[0]};
  }
  Tensors grad(const GradArgs& args) const { return {apply(CumulativeSum{!reverse}, args.gy[0])}; }
  void fields(auto&& on) const { on("reverse", reverse); }
  bool operator==(const CumulativeSum&) const = default;
};

template <class T>
void sum_up(bool reverse, const Tensor& x, const Tensor& y) {
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic> strides(x.strides()[0], x.strides()[1]);
  const Eigen::Map<const Matrix, 0, decltype(strides)> from(x.data<T>(), x.size(0), x.size(1), strides);
  Eigen::Map<Matrix> to(y.mutable_data<T>(), y.size(0), y.size(1));
  const Eigen::Index last = to.cols() - 1;
  for (Eigen::Index i = 0; i <= last; ++i) {
    const Eigen::Index at = reverse ? last - i : i, before = reverse ? at + 1 : at - 1;
    to.col(at) = from.col(at);
    if (i > 0) to.col(at) += to.col(before);
  }
}

/// Its kernel for the CPU, with the application's Eigen.
void cumulative_sum(const CumulativeSum& op, Inputs in, Outputs out) {
  in[0].dtype() == f32 ? sum_up<float>(op.reverse, in[0], out[0]) : sum_up<double>(op.reverse, in[0], out[0]);
}

struct Net final : nn::Layer<Net> {
  nn::Linear in{8, 16}, out{16, 8};

  Tensor forward(const Tensor& x) const { return out(apply(CumulativeSum{}, apply(Softsign{}, in(x)))); }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
  }
};

/// The application's own numbers: what a straight line misses at least, by least squares.
double linear_loss(const Tensor& x, const Tensor& y) {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Map<const Matrix> inputs(x.data<float>(), x.size(0), x.size(1)),
      targets(y.data<float>(), y.size(0), y.size(1));
  Eigen::MatrixXf a(inputs.rows(), inputs.cols() + 1);
  a << inputs, Eigen::VectorXf::Ones(inputs.rows());
  return (a * a.colPivHouseholderQr().solve(targets) - targets).array().square().mean();
}

Tensor loss_of(const Net& net, const Tensor& x, const Tensor& y) { return mean(square(net(x) - y)); }

/// Threads whose answers differ from `expected` in any bit.
int differing_threads(const Net& net, const Tensor& x, const std::vector<float>& expected) {
  std::atomic<int> differing = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const NoGrad guard;
      for (int repeat = 0; repeat < 20; ++repeat) {
        if (net(x).to_vector<float>() != expected) {
          ++differing;
          return;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return differing;
}

/// Whether the gradients of the two ops agree with finite differences.
bool ops_are_right() {
  const Tensor x = Tensor::from({0.5, -1.5, 2.0, -0.25, 1.0, 3.0}, {2, 3}).requires_grad_();
  const double error = gradcheck(
      [](std::span<const Tensor> in) { return apply(CumulativeSum{true}, apply(Softsign{}, in[0])); },
      std::span(&x, 1));
  std::printf("embed: gradients of the two ops are off by %.1e\n", error);
  return error < 1e-6;
}

/// Whether training beats the linear model and every thread answers alike.
bool training_works() {
  manual_seed(1);
  const Tensor x = randn({256, 8});
  const Tensor y = apply(CumulativeSum{}, sin(x * 2.0));

  Net net;
  nn::AdamW optimizer(net.parameters(), {.lr = 1e-2, .weight_decay = 0});
  const double before = loss_of(net, x, y).item();
  for (int step = 0; step < 400; ++step) {
    loss_of(net, x, y).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  const NoGrad guard;
  const double after = loss_of(net, x, y).item(), linear = linear_loss(x, y);
  const int differing = differing_threads(net, x, net(x).to_vector<float>());
  std::printf(
      "embed: loss %.4f before, %.4f after training, %.4f of the best linear model; %d of 4 threads differ\n",
      before, after, linear, differing);
  return after < 0.5 * linear && differing == 0;
}

/// Whether both ranks have the sum of what each brought.
bool ranks_work() {
  std::atomic<int> right = 0;
  run_ranks(2, [&](World& world) {
    const Tensor sum = full({1}, world.rank() + 1.0);
    world.group().all_reduce(sum);
    if (sum.item() == 3.0) ++right;
  });
  std::printf("embed: %d of 2 ranks have the sum\n", right.load());
  return right == 2;
}

}  // namespace

int main() {
  try {
    cpu::add_elementwise<Softsign>();
    add_kernel<cumulative_sum>(DeviceType::cpu);
    return ops_are_right() && training_works() && ranks_work() ? 0 : 1;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
