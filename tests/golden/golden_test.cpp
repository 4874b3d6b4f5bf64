// Every op against what PyTorch answers: values and gradients, with dense and with strided inputs.
#include "tests/golden/golden.h"

#include <cmath>
#include <functional>
#include <set>

#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/golden/runs.h"

namespace sherd::test {

Device place = Device::cpu();

namespace {

// ---- families of ops ----

Run unary(Tensor (*op)(const Tensor&)) {
  return [op](const json&, const TensorList& in) { return Tensors{op(in.at(0))}; };
}

using TensorForm = Tensor (*)(const Tensor&, const Tensor&);
using ScalarForm = Tensor (*)(const Tensor&, Number);
using ReverseForm = Tensor (*)(Number, const Tensor&);

/// Two tensors; a tensor and a scalar; or a scalar and a tensor.
Run binary(TensorForm tensors, ScalarForm scalar = nullptr, ReverseForm reverse = nullptr) {
  return [=](const json& args, const TensorList& in) {
    if (args.value("reverse", false)) return Tensors{reverse(number(args, "scalar"), in.at(0))};
    if (args.contains("scalar")) return Tensors{scalar(in.at(0), number(args, "scalar"))};
    return Tensors{tensors(in.at(0), in.at(1))};
  };
}

Run reduction(Tensor (*op)(const Tensor&, Shape, Keep)) {
  return [op](const json& args, const TensorList& in) {
    return Tensors{op(in.at(0), shape_of(args, "dims"), keep(args))};
  };
}

Run along_axis(Tensor (*op)(const Tensor&, std::int64_t)) {
  return [op](const json& args, const TensorList& in) { return Tensors{op(in.at(0), integer(args, "dim"))}; };
}

Run to_shape(const char* key, Tensor (*op)(const Tensor&, Shape)) {
  return [=](const json& args, const TensorList& in) { return Tensors{op(in.at(0), shape_of(args, key))}; };
}

Run joining(Tensor (*op)(std::span<const Tensor>, std::int64_t)) {
  return [op](const json& args, const TensorList& in) { return Tensors{op(in, integer(args, "dim"))}; };
}

Run creation(Tensor (*op)(Shape, TensorOptions)) {
  return [op](const json& args, const TensorList&) {
    return Tensors{op(shape_of(args, "shape"), options_of(args))};
  };
}

// ---- single ops ----

Tensors run_clamp(const json& args, const TensorList& in) {
  const auto bound = [&](const char* key, double none) {
    return args.contains(key) ? number(args, key) : none;
  };
  return {clamp(in.at(0), bound("min", -HUGE_VAL), bound("max", HUGE_VAL))};
}

Tensors run_gelu(const json& args, const TensorList& in) {
  return {gelu(in.at(0), args.at("approximate") == "tanh" ? GeluForm::tanh : GeluForm::erf)};
}

Tensors run_arange(const json& args, const TensorList&) {
  return {arange(number(args, "start"), number(args, "end"), number(args, "step"), options_of(args))};
}

Tensors run_slice(const json& args, const TensorList& in) {
  return {slice(in.at(0), integer(args, "dim"), integer(args, "start"), integer(args, "end"),
                integer(args, "step"))};
}

Tensors run_topk(const json& args, const TensorList& in) {
  TopK top = topk(in.at(0), integer(args, "k"));
  return {top.values, top.indices};
}

Tensors run_cross_entropy(const json& args, const TensorList& in) {
  return {cross_entropy(in.at(0), in.at(1),
                        {.reduction = reduction_of(args), .ignore_index = integer(args, "ignore_index")})};
}

Tensors run_attention(const json& args, const TensorList& in) {
  AttentionOptions options;
  options.causal = args.at("causal").get<bool>();
  if (args.contains("scale")) options.scale = number(args, "scale");
  return {attention(in.at(0), in.at(1), in.at(2), options)};
}

// ---- the mapping, by area ----

Runs elementwise_runs() {
  return {{"neg", unary(neg)},
          {"abs", unary(abs)},
          {"exp", unary(exp)},
          {"log", unary(log)},
          {"log1p", unary(log1p)},
          {"sqrt", unary(sqrt)},
          {"rsqrt", unary(rsqrt)},
          {"sin", unary(sin)},
          {"cos", unary(cos)},
          {"tanh", unary(tanh)},
          {"erf", unary(erf)},
          {"sigmoid", unary(sigmoid)},
          {"relu", unary(relu)},
          {"silu", unary(silu)},
          {"square", unary(square)},
          {"reciprocal", unary(reciprocal)},
          {"floor", unary(floor)},
          {"isfinite", unary(isfinite)},
          {"ceil", unary(ceil)},
          {"trunc", unary(trunc)},
          {"round", unary(round)},
          {"sign", unary(sign)},
          {"tan", unary(tan)},
          {"asin", unary(asin)},
          {"acos", unary(acos)},
          {"atan", unary(atan)},
          {"sinh", unary(sinh)},
          {"cosh", unary(cosh)},
          {"asinh", unary(asinh)},
          {"acosh", unary(acosh)},
          {"atanh", unary(atanh)},
          {"exp2", unary(exp2)},
          {"expm1", unary(expm1)},
          {"log2", unary(log2)},
          {"log10", unary(log10)},
          {"softplus", unary(softplus)},
          {"selu", unary(selu)},
          {"isnan", unary(isnan)},
          {"isinf", unary(isinf)},
          {"elu", [](const json& args,
                     const TensorList& in) { return Tensors{elu(in.at(0), number(args, "alpha"))}; }},
          {"atan2", binary(atan2)},
          {"remainder", binary(remainder, remainder)},
          {"floor_divide", binary(floor_divide, floor_divide)},
          {"logical_not", unary(logical_not)},
          {"gelu", run_gelu},
          {"clamp", run_clamp},
          {"leaky_relu",
           [](const json& args, const TensorList& in) {
             return Tensors{leaky_relu(in.at(0), number(args, "slope"))};
           }},
          {"add", binary(add, add)},
          {"sub", binary(sub, sub, sub)},
          {"mul", binary(mul, mul)},
          {"div", binary(div, div, div)},
          {"pow", binary(pow, pow)},
          {"maximum", binary(maximum)},
          {"minimum", binary(minimum)},
          {"eq", binary(equal, equal)},
          {"ne", binary(not_equal, not_equal)},
          {"lt", binary(less, less)},
          {"le", binary(less_equal, less_equal)},
          {"gt", binary(greater, greater)},
          {"ge", binary(greater_equal, greater_equal)},
          {"logical_and", binary(logical_and)},
          {"logical_or", binary(logical_or)},
          {"where",
           [](const json&, const TensorList& in) { return Tensors{where(in.at(0), in.at(1), in.at(2))}; }},
          {"masked_fill", [](const json& args, const TensorList& in) {
             return Tensors{masked_fill(in.at(0), in.at(1), number(args, "value"))};
           }}};
}

Runs views_runs() {
  return {{"arange", run_arange},
          {"zeros", creation(zeros)},
          {"ones", creation(ones)},
          {"full",
           [](const json& args, const TensorList&) {
             return Tensors{full(shape_of(args, "shape"), number(args, "value"), options_of(args))};
           }},
          {"cast", [](const json& args,
                      const TensorList& in) { return Tensors{to(in.at(0), to_dtype(args.at("dtype")))}; }},
          {"reshape", to_shape("shape", reshape)},
          {"expand", to_shape("shape", expand)},
          {"permute", to_shape("dims", permute)},
          {"flatten",
           [](const json& args, const TensorList& in) {
             return Tensors{flatten(in.at(0), integer(args, "start"), integer(args, "end"))};
           }},
          {"transpose",
           [](const json& args, const TensorList& in) {
             return Tensors{transpose(in.at(0), integer(args, "dim0"), integer(args, "dim1"))};
           }},
          {"slice", run_slice},
          {"select",
           [](const json& args, const TensorList& in) {
             return Tensors{select(in.at(0), integer(args, "dim"), integer(args, "index"))};
           }},
          {"narrow",
           [](const json& args, const TensorList& in) {
             return Tensors{
                 narrow(in.at(0), integer(args, "dim"), integer(args, "start"), integer(args, "length"))};
           }},
          {"squeeze", along_axis(squeeze)},
          {"unsqueeze", along_axis(unsqueeze)},
          {"split",
           [](const json& args, const TensorList& in) {
             return outputs(split(in.at(0), integer(args, "size"), integer(args, "dim")));
           }},
          {"cat", joining(cat)},
          {"stack", joining(stack)},
          {"gather", binary(gather)},
          {"index_select", [](const json& args, const TensorList& in) {
             return Tensors{index_select(in.at(0), integer(args, "dim"), in.at(1))};
           }}};
}

Runs reduce_runs() {
  return {{"sum", reduction(sum)},
          {"mean", reduction(mean)},
          {"amax", reduction(amax)},
          {"amin", reduction(amin)},
          {"topk", run_topk},
          {"argmax", [](const json& args, const TensorList& in) {
             return Tensors{argmax(in.at(0), integer(args, "dim"), keep(args))};
           }}};
}

Runs linalg_runs() {
  return {{"matmul", binary(matmul)}, {"linear", [](const json&, const TensorList& in) {
                                         return Tensors{linear(in.at(0), in.at(1), optional_input(in, 2))};
                                       }}};
}

Runs nn_runs() {
  return {
      {"softmax", along_axis(softmax)},
      {"log_softmax", along_axis(log_softmax)},
      {"cross_entropy", run_cross_entropy},
      {"attention", run_attention},
      {"self_attention",
       [](const json& args, const TensorList& in) {
         AttentionOptions options;
         options.causal = args.at("causal").get<bool>();
         return Tensors{self_attention(in.at(0), integer(args, "heads"), options)};
       }},
      {"embedding", [](const json&, const TensorList& in) { return Tensors{embedding(in.at(0), in.at(1))}; }},
      {"layer_norm", [](const json& args, const TensorList& in) {
         return Tensors{
             layer_norm(in.at(0), optional_input(in, 1), optional_input(in, 2), number(args, "eps"))};
       }}};
}

Tensors run_batch_norm(const json& args, const TensorList& in) {
  const auto statistics = [&](const char* key) {
    const auto values = args.at(key).get<std::vector<double>>();
    return to(to(Tensor::from<double>(values, {static_cast<std::int64_t>(values.size())}), in.at(0).dtype()),
              in.at(0).device());
  };
  const Tensor mean = statistics("mean"), var = statistics("var");
  const Tensor y =
      batch_norm(in.at(0), mean, var, optional_input(in, 1), optional_input(in, 2),
                 {args.at("training").get<bool>(), number(args, "momentum"), number(args, "eps")});
  return {y, mean, var};
}

Runs layers_runs() {
  return {{"batch_norm", run_batch_norm},
          {"conv2d", [](const json& args, const TensorList& in) {
             return Tensors{conv2d(in.at(0), in.at(1), optional_input(in, 2),
                                   {integer(args, "stride"), integer(args, "padding")})};
           }}};
}

// ---- running a case ----

/// What is wrong with a case; empty when nothing is.
class Findings {
 public:
  explicit Findings(const GoldenCase& golden) : golden_(golden) {}

  void compare(const std::string& key, const Tensor& actual, Scale scale = Scale::element) {
    const Tensor expected = golden_.find(key);
    if (!expected.defined()) {
      if (actual.defined()) text_ += fmt::format("\n  {} is there, PyTorch has none", key);
    } else if (const std::string found = difference(actual, expected, golden_.tolerance, scale);
               !found.empty()) {
      text_ += fmt::format("\n  {}: {}", key, found);
    }
  }
  void add(const std::string& text) { text_ += "\n  " + text; }
  const std::string& text() const { return text_; }

 private:
  const GoldenCase& golden_;
  std::string text_;
};

/// A gradient in 16 bits is made from inputs and outputs that were rounded before: its small elements carry
/// the errors of the large.
Scale gradient_scale(DType dtype) { return size_of(dtype) == 2 ? Scale::largest : Scale::element; }

std::string numbered(const char* prefix, std::size_t i) { return prefix + std::to_string(i); }

/// Every upstream gradient of the case goes through the outputs.
void backward(const GoldenCase& golden, const Tensors& out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const Tensor upstream = golden.find(numbered("gy", i));
    if (upstream.defined()) out[i].backward(to(upstream, place), /*retain_graph=*/true);
  }
}

void run_case(const GoldenCase& golden, const Run& run, TensorList in, Findings& findings) {
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (golden.has(numbered("gin", i))) in[i].requires_grad_();
  }
  const Tensors out = run(golden.args, in);
  for (std::size_t i = 0; i < out.size() || golden.has(numbered("out", i)); ++i)
    findings.compare(numbered("out", i), i < out.size() ? out[i].detach() : Tensor());
  backward(golden, out);
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (golden.has(numbered("gin", i)))
      findings.compare(numbered("gin", i), in[i].grad(), gradient_scale(in[i].dtype()));
  }
}

std::string check_case(const GoldenCase& golden, const Run& run, bool holes) {
  Findings findings(golden);
  TensorList in = golden.list("in");
  // Each pass needs leaves of its own: a gradient stays with the tensor.
  for (Tensor& tensor : in) {
    const Tensor there = to(tensor, place);
    tensor = holes ? with_holes(there) : alias(there, there.layout());
  }
  try {
    run_case(golden, run, std::move(in), findings);
  } catch (const Error& error) {
    findings.add(error.what());
  }
  return findings.text();
}

void check_area(std::string_view area, const Runs& runs, const std::set<std::string>& elsewhere = {}) {
  std::set<std::string> unused;
  for (const auto& [op, run] : runs) unused.insert(op);
  for (const GoldenCase& golden : load_goldens(area)) {
    if (elsewhere.contains(golden.op)) continue;
    const auto run = runs.find(golden.op);
    if (run == runs.end()) {
      FAIL_CHECK(golden.name << ": no mapping for op " << golden.op);
      continue;
    }
    unused.erase(golden.op);
    for (bool holes : {false, true}) {
      INFO(golden.name << (holes ? " with strided inputs" : ""));
      CHECK(check_case(golden, run->second, holes) == "");
    }
  }
  for (const std::string& op : unused) FAIL_CHECK(area << ": no case for op " << op);
}

void check_nn() {
  check_area("nn", nn_runs(),
             {"initialisation", "nn.Linear", "nn.Embedding", "nn.LayerNorm", "nn.GELU", "nn.Dropout",
              "nn.Sequential"});
}
void check_networks() {
  check_area("networks", networks_runs(),
             {"initialisation", "nn.RNN", "nn.LSTM", "nn.GRU", "nn.GroupNorm", "nn.Conv1d",
              "nn.Embedding.padding", "ConvNet", "SwiGlu", "Llama"});
}
void check_images() {
  check_area("images", images_runs(),
             {"initialisation", "nn.ConvTranspose2d", "nn.ConvTranspose1d", "UpNet", "LineNet"});
}
void check_layers() {
  check_area("layers", layers_runs(),
             {"initialisation", "nn.BatchNorm1d", "nn.BatchNorm2d", "nn.Conv2d", "nn.MultiheadAttention",
              "nn.TransformerEncoderLayer", "nn.TransformerDecoderLayer", "nn.Transformer"});
}

}  // namespace

TEST_CASE("elementwise ops agree with PyTorch") { check_area("elementwise", elementwise_runs()); }
TEST_CASE("creation, casts, views and joins agree with PyTorch") { check_area("views", views_runs()); }
TEST_CASE("reductions agree with PyTorch") { check_area("reduce", reduce_runs()); }
TEST_CASE("products agree with PyTorch") { check_area("linalg", linalg_runs()); }
TEST_CASE("what networks are made of agrees with PyTorch") { check_nn(); }
TEST_CASE("what other networks are made of agrees with PyTorch") { check_layers(); }

TEST_CASE("indexing and elements in another order agree with PyTorch") {
  check_area("indexing", indexing_runs());
}
TEST_CASE("statistics, order and sums of products agree with PyTorch") {
  check_area("statistics", statistics_runs());
}
TEST_CASE("pooling, convolutions and attention with options agree with PyTorch") { check_networks(); }
TEST_CASE("transposed convolutions, scaled images and oblong windows agree with PyTorch") { check_images(); }
TEST_CASE("windows, places, order and distances agree with PyTorch") {
  check_area("compositions", compositions_runs());
}
TEST_CASE("losses agree with PyTorch") { check_area("losses", losses_runs()); }

TEST_CASE("cuda: every op agrees with PyTorch") {
  if (skip_if(!has_gpu(), "no GPU here")) return;
  struct There {
    There() { place = Device::cuda(0); }
    ~There() { place = Device::cpu(); }
  };
  const There there;
  check_area("elementwise", elementwise_runs());
  check_area("views", views_runs());
  check_area("reduce", reduce_runs());
  check_area("linalg", linalg_runs());
  check_nn();
  check_layers();
  check_area("indexing", indexing_runs());
  check_area("statistics", statistics_runs());
  check_area("losses", losses_runs());
  check_area("compositions", compositions_runs());
  check_networks();
  check_images();
}

}  // namespace sherd::test
