// Convolutions, products and recurrent layers of random shapes, which go through oneDNN's code for them, in
// memory between pages that nobody may touch; values are compared with sums of terms in f64. What oneDNN runs
// depends on the processor and the shape, so this is for each level of instructions that a processor has:
//   onednn_fuzz LEVEL [CASES [SEED]]     LEVEL as ONEDNN_MAX_CPU_ISA has it; case i is `1 SEED+i` alone
// Ends with 77 where the processor has no such level.
#include <oneapi/dnnl/dnnl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <map>
#include <random>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/ops/conv2d.h"
#include "runtime/ops/matmul.h"
#include "runtime/ops/recurrent.h"

namespace {

using namespace sherd;
using std::int64_t;

std::string now;  // what runs, for the one who finds the process dead

extern "C" void say_and_die(int signal) {
  [[maybe_unused]] const auto written = write(STDERR_FILENO, now.data(), now.size());
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

/// Bytes that end where a page begins that may not be touched, or begin where one ends. The rest of their own
/// pages holds a pattern.
class Guarded {
 public:
  Guarded(std::size_t bytes, bool at_end) : bytes_(bytes), room_((bytes + page - 1) / page * page) {
    void* const all = mmap(nullptr, room_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check<OutOfMemoryError>(all != MAP_FAILED, "onednn_fuzz: no memory for {} bytes", room_);
    first_ = static_cast<std::byte*>(all) + page;
    mprotect(first_, room_, PROT_READ | PROT_WRITE);
    std::memset(first_, int(pattern), room_);
    data_ = at_end ? first_ + (room_ - bytes_) : first_;
  }
  ~Guarded() { munmap(first_ - page, room_ + 2 * page); }
  Guarded(const Guarded&) = delete;
  std::byte* data() const { return data_; }
  bool is_intact() const {
    const auto kept = [](std::byte b) { return b == std::byte{pattern}; };
    return std::all_of(first_, data_, kept) && std::all_of(data_ + bytes_, first_ + room_, kept);
  }

 private:
  static constexpr std::size_t page = 4096, pattern = 0xff;  // NaN in every dtype: what nobody writes is seen
  std::size_t bytes_, room_;
  std::byte *first_, *data_;
};

/// What a value should be.
struct Sum {
  double value = 0, size = 0;
  int64_t terms = 0;
  void add(double term) { value += term, size += std::abs(term), ++terms; }
  /// What f32 may be off by.
  double slack() const { return size * double(terms + 1) / (1 << 24); }
};

/// Half a step of the dtype at 1; at 0 it is 3e-8 of f16.
double rounding(DType t) { return t == bf16 ? 1.0 / 256 : t == f16 ? 1.0 / 2048 : 1.0 / (1 << 24); }

std::vector<double> values(const Tensor& x) {
  return x.defined() ? to(x, f64).to_vector<double>() : std::vector<double>();
}

class Case {
 public:
  explicit Case(int64_t seed) : random_(seed) {
    dtype = pick({f32, bf16, f16, bf16});
    at_end_ = below(3) > 0;
    Context::current().set_threads(int(1 + below(3)));
  }

  DType dtype;
  std::string text;
  bool ok = true;

  int64_t below(int64_t n) { return std::int64_t(random_() % n); }
  template <class T>
  T pick(std::initializer_list<T> of) {
    return of.begin()[below(of.size())];
  }
  /// Random values, in rows with `gap` elements between them.
  Tensor given(const Shape& shape, double most = 2, int64_t gap = 0) {
    Shape strides = shape;
    int64_t step = 1, elements = 1;
    for (int axis = shape.rank() - 1; axis >= 0; --axis) {
      strides[axis] = step, elements += (shape[axis] - 1) * step;
      step *= shape[axis] + std::exchange(gap, 0);
    }
    const Tensor x = alias(room({elements}), {shape, strides, 0});
    std::vector<double> numbers(shape.numel());
    for (double& v : numbers) v = most * double(below(4097) - 2048) / 2048;
    copy_(x, to(Tensor::from(numbers, shape), dtype));
    return x;
  }
  /// The op's outputs, in guarded memory too.
  template <class O>
  Tensors run(const O& op, std::initializer_list<Tensor> in) {
    const OpModel<O> model(op);
    text = fmt::format("{}, page {}:", model.text(), at_end_ ? "behind" : "before");
    Specs specs;
    for (const Tensor& x : in) {
      specs.push_back(x.defined() ? x.spec() : Spec::none());
      if (x.defined()) text += fmt::format(" {} {}", name_of(dtype), x.shape());
    }
    now = text + ": the process died here\n";
    Tensors out;
    for (const Spec& spec : op.infer(SpecSpan(specs.begin(), specs.size()))) out.push_back(room(spec.shape));
    run_again(model, Inputs(in.begin(), in.size()), Outputs(out.begin(), out.size()));
    return out;
  }
  void expect(std::string_view what, bool holds) {
    if (!holds) fmt::print("{}: {}\n", text, what), ok = false;
  }
  void near(std::string_view what, double is, double wanted, double slack) {
    const double allowed = slack + rounding(dtype) * (std::abs(wanted) + slack) + 3e-8;
    if (ok && !(std::abs(is - wanted) <= allowed))
      expect(fmt::format("{} is {} and not {} +- {}", what, is, wanted, allowed), false);
  }
  void near(std::string_view what, const Tensor& is, const std::vector<Sum>& wanted) {
    const std::vector<double> all = values(is);
    expect("a result of another size", all.size() == wanted.size());
    for (std::size_t i = 0; i < all.size() && ok; ++i) near(what, all[i], wanted[i].value, wanted[i].slack());
  }
  bool is_intact() const {
    return std::ranges::all_of(held_, [](const auto& memory) { return memory->is_intact(); });
  }

 private:
  Tensor room(const Shape& shape) {
    held_.push_back(std::make_unique<Guarded>(shape.numel() * size_of(dtype), at_end_));
    return from_blob(held_.back()->data(), shape, dtype);
  }
  std::mt19937_64 random_;
  bool at_end_;
  std::vector<std::unique_ptr<Guarded>> held_;
};

/// A convolution and both its gradients.
void convolution(Case& c) {
  ops::ConvRule rule;
  auto& [by_row, by_column, groups] = rule;
  int64_t images, channels, outputs, rows, columns, height, width, down, across, terms;
  const auto windows = [&](ops::ConvRule::Axis& a, int64_t pixels, int64_t taps) {
    a = {1 + c.below(5), c.below(2) * c.below(taps), 1 + c.below(4) / 3};
    const int64_t left = pixels + 2 * a.padding - (taps - 1) * a.dilation - 1;
    return left < 0 ? 0 : left / a.stride + 1;
  };
  const auto breadth = [&] { return c.below(2) ? 1 + c.below(70) : c.pick<int64_t>({16, 32, 64, 128}); };
  do {
    groups = c.pick<int64_t>({1, 1, 1, 2, 3, 32});
    images = 1 + c.below(4), channels = groups > 3 ? 1 : breadth(), outputs = groups > 3 ? 1 : breadth();
    rows = 1 + c.below(60), columns = 1 + c.below(60), height = 1 + c.below(5), width = 1 + c.below(5);
    down = windows(by_row, rows, height), across = windows(by_column, columns, width);
    terms = images * groups * outputs * down * across * channels * height * width;
  } while (terms == 0 || terms > 2'000'000);
  const Shape image{images, groups * channels, rows, columns},
      kernel{groups * outputs, channels, height, width};
  const Tensor x = c.given(image), w = c.given(kernel), gy = c.given({images, kernel[0], down, across}),
               bias = c.below(2) ? c.given({kernel[0]}) : Tensor();
  const std::vector<double> xs = values(x), ws = values(w), gs = values(gy), bs = values(bias);
  std::vector<Sum> ys(gs.size()), gxs(xs.size()), gws(ws.size());
  const int64_t weights = channels * height * width;
  for (int64_t at = 0; at < gy.numel(); ++at) {
    const int64_t j = at % across, i = at / across % down, o = at / across / down % kernel[0],
                  n = at / across / down / kernel[0], plane = n * image[1] + o / outputs * channels;
    if (bias.defined()) ys[at].add(bs[o]);
    for (int64_t tap = 0; tap < weights; ++tap) {
      const int64_t b = tap % width, a = tap / width % height, k = tap / width / height,
                    row = i * by_row.stride - by_row.padding + a * by_row.dilation,
                    column = j * by_column.stride - by_column.padding + b * by_column.dilation;
      if (row < 0 || row >= rows || column < 0 || column >= columns) continue;
      const int64_t pixel = ((plane + k) * rows + row) * columns + column, of = o * weights + tap;
      ys[at].add(xs[pixel] * ws[of]), gxs[pixel].add(gs[at] * ws[of]), gws[of].add(gs[at] * xs[pixel]);
    }
  }
  c.near("forward", c.run(ops::Conv2d{rule}, {x, w, bias})[0], ys);
  c.near("gradient of images", c.run(ops::Conv2dGradInput{rule, rows, columns}, {gy, w, {}})[0], gxs);
  c.near("gradient of kernels", c.run(ops::Conv2dGradWeight{rule, height, width}, {gy, x})[0], gws);
}

void product(Case& c) {
  const int64_t batch = c.pick<int64_t>({1, 1, 1, 2, 7}), most = batch > 1 ? 60 : 150, m = 1 + c.below(most),
                n = 1 + c.below(most), k = 1 + c.below(most);
  const ops::MatMul op{c.below(2) > 0, c.below(2) > 0};
  const auto matrix = [&](int64_t height, int64_t width) {
    const Shape shape = batch > 1 ? Shape{batch, height, width} : Shape{height, width};
    return c.given(shape, 2, c.below(2) * c.below(5));
  };
  const Tensor a = op.transpose_a ? matrix(k, m) : matrix(m, k),
               b = op.transpose_b ? matrix(n, k) : matrix(k, n), y = c.run(op, {a, b})[0];
  const std::vector<double> as = values(a), bs = values(b);
  std::vector<Sum> ys(batch * m * n);
  for (int64_t at = 0; at < y.numel(); ++at) {
    const int64_t of = at / (m * n), i = at / n % m, j = at % n;
    for (int64_t p = 0; p < k; ++p)
      ys[at].add(as[of * m * k + (op.transpose_a ? p * m + i : i * k + p)] *
                 bs[of * k * n + (op.transpose_b ? j * k + p : p * n + j)]);
  }
  c.near("product", y, ys);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// Each step from the state that the library gives before it, so that no error grows; of an LSTM's gradient
/// the product that the first step passes on.
void recurrent(Case& c) {
  using Cell = ops::RecurrentCell;
  const ops::Recurrent op{c.pick({Cell::lstm, Cell::gru}), c.below(2) > 0};
  const bool lstm = op.cell == Cell::lstm;
  const int64_t gates = op.gates(), steps = 1 + c.below(4), batch = 1 + c.below(70), n = 1 + c.below(70);
  const Tensor x = c.given({steps, batch, gates * n}), w = c.given({gates * n, n}, 1 / std::sqrt(double(n))),
               b = c.given({gates * n}), h0 = c.given({batch, n}), c0 = lstm ? c.given({batch, n}) : Tensor(),
               gy = c.given({steps, batch, n});
  const Tensors out = c.run(op, {x, w, b, h0, c0});
  const Tensors back = c.run(ops::RecurrentGrad{op}, {gy, {}, w, h0, c0, out[0], out[1], out[2]});
  const std::vector<double> xs = values(x), ws = values(w), bs = values(b), first = values(h0),
                            cell0 = values(c0), hs = values(out[0]), cells = values(out[1]),
                            gs = values(back[0]), ghs = values(back[2]);
  const auto slack = [&](const Sum& sum) {
    return sum.slack() + rounding(c.dtype) * (std::abs(sum.value) + sum.slack()) + 4e-6;
  };
  for (int64_t i = 0; i < steps * batch * n && c.ok; ++i) {
    const int64_t j = i % n, row = i / n % batch, step = i / (batch * n),
                  t = op.reverse ? steps - 1 - step : step, at = t * batch + row,
                  from = step == 0 ? row : (op.reverse ? t + 1 : t - 1) * batch + row;
    const std::vector<double>&h = step == 0 ? first : hs, &cell = step == 0 ? cell0 : cells;
    const auto in = [&](int64_t gate) { return xs[(at * gates + gate) * n + j]; };
    double m[4] = {}, e = 0;  // the products, and what the worst of them may be off by
    for (int64_t gate = 0; gate < gates; ++gate) {
      Sum sum;
      sum.add(bs[gate * n + j]);
      for (int64_t p = 0; p < n; ++p) sum.add(ws[(gate * n + j) * n + p] * h[from * n + p]);
      m[gate] = sum.value, e = std::max(e, slack(sum));
    }
    if (lstm) {
      const double was = cell[from * n + j],
                   is = sigmoid(in(1) + m[1]) * was + sigmoid(in(0) + m[0]) * std::tanh(in(2) + m[2]),
                   off = e * (std::abs(was) / 4 + 1.25);
      c.near("cell", cells[at * n + j], is, off);
      c.near("state of an LSTM", hs[at * n + j], sigmoid(in(3) + m[3]) * std::tanh(is), off + e / 4);
    } else {
      const double was = h[from * n + j], z = sigmoid(in(1) + m[1]),
                   fresh = std::tanh(in(2) + sigmoid(in(0) + m[0]) * m[2]),
                   off = e * (std::abs(m[2]) / 4 + 1);
      c.near("state of a GRU", hs[at * n + j], fresh + z * (was - fresh),
             off + e / 4 * (std::abs(was - fresh) + off));
    }
    if (step > 0 || !lstm) continue;
    Sum sum;
    for (int64_t p = 0; p < gates * n; ++p) sum.add(gs[at * gates * n + p] * ws[p * n + j]);
    c.near("gradient of the first state", ghs[row * n + j], sum.value, slack(sum));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, dnnl_cpu_isa_t> levels{{"SSE41", dnnl_cpu_isa_sse41},
                                                     {"AVX2", dnnl_cpu_isa_avx2},
                                                     {"AVX512_CORE", dnnl_cpu_isa_avx512_core},
                                                     {"AVX512_CORE_BF16", dnnl_cpu_isa_avx512_core_bf16},
                                                     {"AVX512_CORE_AMX", dnnl_cpu_isa_avx512_core_amx}};
  const std::string level = argc > 1 ? argv[1] : "";
  if (!levels.contains(level)) {
    fmt::print("usage: onednn_fuzz LEVEL [CASES [SEED]]\n");
    return 2;
  }
  setenv("ONEDNN_MAX_CPU_ISA", argv[1], 1);  // read at oneDNN's first call
  if (dnnl_get_effective_cpu_isa() != levels.at(level)) {
    fmt::print("skipped: this processor has no {}, or oneDNN takes no limit\n", level);
    return 77;
  }
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGABRT}) std::signal(signal, say_and_die);
  const int64_t cases = argc > 2 ? std::atoll(argv[2]) : 400, seed = argc > 3 ? std::atoll(argv[3]) : 1;
  int64_t failed = 0;
  for (int64_t i = 0; i < cases; ++i) {
    Case c(seed + i);
    const int64_t kind = c.below(4);
    kind < 2 ? convolution(c) : kind == 2 ? product(c) : recurrent(c);
    c.expect("it wrote beside its memory", c.is_intact());
    if (!c.ok) fmt::print("  again: onednn_fuzz {} 1 {}\n", level, seed + i), ++failed;
  }
  fmt::print("{}: {} cases, {} wrong\n", level, cases, failed);
  return failed > 0;
}
