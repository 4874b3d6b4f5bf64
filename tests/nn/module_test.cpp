// What derives from a module's one visit: names, ties, state, copies, moves, modes, observers.
#include "nn/module.h"

#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <sstream>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/recompute.h"
#include "nn/gpt.h"
#include "nn/init.h"
#include "nn/layers.h"
#include "nn/state_file.h"
#include "nn/sync_batch_norm.h"
#include "tests/runtime/harness.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

/// Two linear layers with one weight, a counter that is saved and a scratch that is not.
struct Tied final : Layer<Tied> {
  nn::Linear first{4, 4}, second{4, 4, {Bias::no}};
  Buffer count{Tensor::from<std::int64_t>({3}, {1})};
  Buffer scratch{zeros({2}), Persistence::transient};
  Tied() { tie(first.weight, second.weight); }
  Tensor forward(const Tensor& x) const { return second(relu(first(x))); }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("count", count);
    on("scratch", scratch);
  }
};

std::vector<std::string> names(const std::vector<NamedParameter>& list) {
  std::vector<std::string> out;
  for (const NamedParameter& p : list) out.push_back(p.name);
  return out;
}

std::vector<std::string> keys(const StateDict& state) {
  std::vector<std::string> out;
  for (const auto& [name, tensor] : state) out.push_back(name);
  return out;
}

bool same_values(const Module& a, const Module& b) {
  const StateDict x = a.state_dict(), y = b.state_dict();
  if (keys(x) != keys(y)) return false;
  for (std::size_t i = 0; i < x.size(); ++i)
    if (!same_bits(x[i].second, y[i].second)) return false;
  return true;
}

using Names = std::vector<std::string>;

}  // namespace

static_assert(!std::is_copy_assignable_v<Param> && !std::is_copy_assignable_v<Buffer>);
static_assert(std::is_nothrow_move_constructible_v<Param>);

TEST_CASE("modules: names come from one visit, a tied parameter once or under all of them") {
  Tied m;
  CHECK(names(m.named_parameters()) == Names{"first.weight", "first.bias"});
  CHECK(names(m.named_parameters(Ties::all)) == Names{"first.weight", "first.bias", "second.weight"});
  CHECK(m.parameters().size() == 2);
  CHECK(m.parameter_count() == 20);
  CHECK(keys(m.state_dict()) == Names{"first.weight", "first.bias", "count"});
  CHECK(m.named_buffers().size() == 2);
  Names modules;
  for (const NamedModule& n : m.named_modules())
    modules.push_back(n.name + ":" + std::string(n.module->type_name()));
  CHECK(modules == Names{":Tied", "first:Linear", "second:Linear"});
  CHECK(m.first.weight.object() == m.second.weight.object());
  nn::Linear other(3, 4);
  CHECK_THROWS_AS(tie(m.first.weight, other.weight), ShapeError);
}

TEST_CASE("modules: tied parameters get one gradient of all their uses") {
  Tied m;
  const Tensor x = numbers({3, 4}, f32);
  sum(m(x)).backward();
  CHECK(m.first.weight.grad().defined());
  CHECK(m.first.weight.grad().is(m.second.weight.grad()));
  Tensor w1 = clone(m.first.weight.data()).requires_grad_(), w2 = clone(w1.detach()).requires_grad_();
  sum(linear(relu(linear(x, w1, m.first.bias)), w2)).backward();
  CHECK(distance(m.first.weight.grad(), add(w1.grad(), w2.grad())) < 1e-6);
}

TEST_CASE("modules: a state goes round, through memory and through a file") {
  Tied a, b;
  CHECK_FALSE(same_values(a, b));
  b.load_state_dict(a.state_dict());
  CHECK(same_values(a, b));
  CHECK(b.first.weight.object() == b.second.weight.object());
  const TempDirectory folder;
  save_state(folder / "m.safetensors", a.state_dict());
  Tied c;
  c.load_state_dict(load_state(folder / "m.safetensors"));
  CHECK(same_values(a, c));
  for (DType dtype : {f64, f16, bf16}) {
    a.to(dtype);
    save_state(folder / "n.safetensors", a.state_dict());
    const StateDict read = load_state(folder / "n.safetensors");
    const StateDict given = a.state_dict();
    REQUIRE(keys(read) == keys(given));
    for (std::size_t i = 0; i < read.size(); ++i) CHECK(same_bits(read[i].second, given[i].second));
    c.load_state_dict(read);  // cast to what the module has
    CHECK(c.first.weight.tensor().dtype() == f32);
    CHECK(same_bits(c.first.weight.data(), to(a.first.weight.data(), f32)));
  }
}

TEST_CASE("modules: a state dict shares memory with the module and has no history") {
  Tied m;
  const StateDict state = m.state_dict();
  CHECK_FALSE(state[0].second.requires_grad());
  fill_(state[0].second, 3);
  CHECK(same_bits(m.first.weight.data(), full({4, 4}, 3)));
}

TEST_CASE("modules: a state that does not fit changes nothing") {
  Tied m;
  Tied before = m.clone();
  const auto refuses = [&](const StateDict& state, auto type, const std::string& name) {
    const std::string text = message_of<typename decltype(type)::type>([&] { m.load_state_dict(state); });
    INFO(text);
    CHECK(one_line_about(text, "load_state_dict"));
    CHECK(one_line_about(text, name));
    CHECK(same_values(m, before));
  };
  const auto with = [&](std::size_t at, const std::string& name, const Tensor& value) {
    StateDict state;
    for (const auto& [n, t] : m.state_dict()) state.emplace_back(n, full(t.shape(), 9, {t.dtype()}));
    if (at < state.size())
      state[at] = {name, value};
    else
      state.emplace_back(name, value);
    return state;
  };
  refuses(with(1, "first.bias", zeros({5})), std::type_identity<ShapeError>{}, "first.bias");
  refuses(with(9, "third", zeros({5})), std::type_identity<ValueError>{}, "third");
  refuses(with(1, "first.biass", zeros({4})), std::type_identity<ValueError>{}, "first.bias");
  refuses(with(1, "first.bias", empty({4}, {f32, Device::meta()})), std::type_identity<DeviceError>{},
          "first.bias");
  refuses(with(9, "first.bias", zeros({4})), std::type_identity<ValueError>{}, "twice");
  StateDict part = with(9, "third", zeros({5}));
  part.erase(part.begin());
  m.load_state_dict(part, Strict::no);
  CHECK(same_bits(m.first.weight.data(), before.first.weight.data()));
  CHECK(same_bits(m.first.bias.data(), full({4}, 9)));
  StateDict renamed = with(0, "second.weight", full({4, 4}, 5));  // a tied one under its other name
  m.load_state_dict(renamed);
  CHECK(same_bits(m.first.weight.data(), full({4, 4}, 5)));
}

TEST_CASE("modules: a state is refused as a whole where elements of one parameter share memory") {
  nn::Linear l(2, 2);
  nn::Parameter bias = l.bias.object();
  bias.set_data(expand(ones({1}), {2}));
  const Tensor before = clone(l.weight.object().local().detach());
  CHECK(one_line_about(
      message_of<StateError>([&] { l.load_state_dict({{"weight", zeros({2, 2})}, {"bias", zeros({2})}}); }),
      "bias"));
  CHECK(same_bits(l.weight.object().local().detach(), before));
}

TEST_CASE("modules: a clone has its own memory, keeps ties, modes and flags, and leaves gradients behind") {
  Tied m;
  m.eval();
  m.first.bias.object();
  for (NamedParameter& p : m.named_parameters())
    if (p.name == "first.bias") p.parameter.set_requires_grad(false);
  sum(m(numbers({1, 4}, f32))).backward();
  Tied copy = m.clone();
  CHECK(same_values(m, copy));
  CHECK_FALSE(copy.training());
  CHECK(copy.first.weight.object() == copy.second.weight.object());
  CHECK_FALSE(copy.first.weight.object() == m.first.weight.object());
  CHECK_FALSE(copy.first.bias.object().requires_grad());
  CHECK_FALSE(copy.first.weight.grad().defined());
  CHECK_FALSE(copy.second.bias.defined());
  fill_(copy.first.weight.data(), 0);
  fill_(copy.count.tensor(), 0);
  CHECK_FALSE(same_bits(m.first.weight.data(), copy.first.weight.data()));
  CHECK(m.count.tensor().item<std::int64_t>() == 3);
  const std::unique_ptr<Module> erased = m.clone_module();
  CHECK(same_values(*erased, m));
  // Two clones are two: the scope of a clone ends with it.
  const Tied again = m.clone();
  CHECK_FALSE(again.first.weight.object() == copy.first.weight.object());
}

TEST_CASE("modules: a silent copy is refused") {
  const Tied m;
  CHECK(one_line_about(message_of<StateError>([&] { const Tied copy = m; }), "clone()"));
  const nn::Linear linear(2, 3);
  CHECK_THROWS_AS(nn::Linear(linear), StateError);
  const Buffer buffer(zeros({1}));
  CHECK_THROWS_AS(Buffer(buffer), StateError);
  CHECK((buffer[0].shape() == Shape{} && buffer[{NewAxis{}, Slice{}}].shape() == Shape{1, 1}));
  CHECK_NOTHROW(m.clone());
  CHECK_THROWS_AS(Tied(m), StateError);  // still, after a clone
}

TEST_CASE("modules: a move takes objects along and keeps slots") {
  nn::Linear a(2, 3);
  const Parameter weight = a.weight.object();
  const Parameter* slot = &a.weight.object();
  nn::Linear b = std::move(a);
  CHECK(b.weight.object() == weight);
  CHECK(&b.weight.object() == slot);
  nn::Linear c(2, 3);
  const Parameter* stays = &c.weight.object();
  c = std::move(b);
  CHECK(c.weight.object() == weight);
  CHECK(&c.weight.object() == stays);
  c.weight = Parameter(zeros({3, 2}));
  CHECK(&c.weight.object() == stays);
  CHECK(same_bits(c(ones({1, 2})), reshape(c.bias.data(), {1, 3})));
}

TEST_CASE("modules: modes and flags reach everything below") {
  Sequential net{nn::Linear(2, 2), nn::Dropout(0.5), Sequential(nn::Linear(2, 2))};
  net.eval();
  for (const NamedModule& m : net.named_modules()) CHECK_FALSE(m.module->training());
  const Tensor x = ones({1, 2});
  CHECK(same_bits(net(x), net(x)));
  net.train();
  for (const NamedModule& m : net.named_modules()) CHECK(m.module->training());
  net.set_requires_grad(false);
  CHECK_FALSE(net(x).requires_grad());
  net.set_requires_grad(true);
  sum(net(x)).backward();
  CHECK(net.parameters()[0].grad().defined());
  net.zero_grad();
  for (const Parameter& p : net.parameters()) CHECK_FALSE(p.grad().defined());
}

TEST_CASE("modules: moving and casting keep objects, ties, gradients and hooks") {
  Tied m;
  const Parameter weight = m.first.weight.object();
  int hooked = 0;
  register_post_accumulate_hook(weight.tensor(), [&](Leaf&) { ++hooked; }).keep();
  sum(m(ones({1, 4}))).backward();
  CHECK(hooked == 1);
  const Tensor values = clone(weight.data()), gradient = clone(weight.grad());
  m.to(f64);
  CHECK(m.first.weight.object() == weight);
  CHECK(m.second.weight.object() == weight);
  CHECK(weight.tensor().dtype() == f64);
  CHECK(weight.grad().dtype() == f64);
  CHECK(distance(weight.grad(), gradient) == 0);
  CHECK(m.count.tensor().dtype() == i64);
  CHECK(m.scratch.tensor().dtype() == f64);
  m.to(Device::cpu(1));
  CHECK(weight.tensor().device() == Device::cpu(1));
  CHECK(weight.grad().device() == Device::cpu(1));
  CHECK(m.count.tensor().device() == Device::cpu(1));
  CHECK_THROWS_AS(m(ones({1, 4}, {f64})), DeviceError);
  sum(m(ones({1, 4}, {f64, Device::cpu(1)}))).backward();
  CHECK(hooked == 2);
  CHECK(distance(weight.grad(), mul(to(gradient, f64), 2.0)) < 1e-6);
  m.to(Device::cpu());
  m.to(f32);
  CHECK(same_bits(weight.data(), values));
}

TEST_CASE("modules: planned on meta, made real later") {
  nn::Linear m(3, 2, {.tensor = {f32, Device::meta()}});
  CHECK(m(empty({4, 3}, {f32, Device::meta()})).shape() == Shape{4, 2});
  const Parameter weight = m.weight.object();
  m.materialize(Device::cpu(), [](const std::string&, const Tensor& whole) { zero_(whole); });
  CHECK(m.weight.object() == weight);
  m.load_state_dict(nn::Linear(3, 2).state_dict());
  CHECK(m(ones({1, 3})).to_vector<float>().size() == 2);
}

TEST_CASE("observers: see tensors in and out in the order they came, and may replace them") {
  struct Watch final : ModuleObserver {
    Watch(std::string name, std::string& log) : name(std::move(name)), log(log) {}
    void before_forward(Module& m, std::span<Tensor* const> inputs) override {
      log += name + "<" + std::to_string(inputs.size());
      module = &m;
      for (Tensor* t : inputs) *t = add(*t, 1.0);
    }
    void after_forward(Module&, std::span<Tensor* const> outputs) override {
      log += name + ">" + std::to_string(outputs.size());
      for (Tensor* t : outputs) *t = mul(*t, 10.0);
    }
    std::string name;
    std::string& log;
    Module* module = nullptr;
  };
  std::string log;
  Watch a("a", log), b("b", log);
  nn::Relu m;
  Tensor x = ones({1});
  {
    const Subscription first = m.observe(a);
    Subscription second = m.observe(b);
    CHECK(m(x).item() == 300);
    CHECK(log == "a<1b<1a>1b>1");
    CHECK(x.item() == 1);  // the caller's stays
    CHECK(a.module == &m);
    second.reset();
    CHECK(m(x).item() == 20);
    nn::Relu moved = std::move(m);
    CHECK(moved(x).item() == 20);
    CHECK(a.module == &moved);
    const nn::Relu copy = moved.clone();
    CHECK(copy(x).item() == 1);
    m = std::move(moved);
  }
  log.clear();
  CHECK(m(x).item() == 1);
  CHECK(log.empty());
  Subscription orphan;
  {
    nn::Relu gone;
    orphan = gone.observe(a);
  }
  orphan.reset();
}

TEST_CASE("observers: one that subscribed twice hears twice, and each handle ends its own") {
  struct Count final : ModuleObserver {
    void before_forward(Module&, std::span<Tensor* const>) override { ++calls; }
    int calls = 0;
  } count;
  nn::Relu m;
  const auto hear = [&] {
    count.calls = 0;
    m(ones({1}));
    return count.calls;
  };
  Subscription first = m.observe(count), second = m.observe(count);
  CHECK(hear() == 2);
  second.reset();
  CHECK(hear() == 1);
  second.reset();
  CHECK(hear() == 1);
  Subscription third = m.observe(count);
  first.reset();
  CHECK(hear() == 1);
  third.keep();
  third.reset();
  CHECK(hear() == 1);
}

TEST_CASE("observers: one whose subscription another one ends is not told any more") {
  struct Ends final : ModuleObserver {
    void before_forward(Module&, std::span<Tensor* const>) override { other->reset(); }
    Subscription* other = nullptr;
  } ends;
  struct Count final : ModuleObserver {
    void before_forward(Module&, std::span<Tensor* const>) override { ++calls; }
    int calls = 0;
  };
  nn::Relu m;
  const Subscription on_ends = m.observe(ends);
  auto count = std::make_unique<Count>();
  Subscription on_count = m.observe(*count);
  ends.other = &on_count;
  m(ones({1}));
  CHECK(count->calls == 0);
  count.reset();
  CHECK_NOTHROW(m(ones({1})));
}

TEST_CASE("observers: what forward fills is the caller's, not a copy") {
  struct Silent final : ModuleObserver {
  } silent;
  manual_seed(1);
  Gpt gpt({.layers = 2, .heads = 2, .width = 8, .context = 8, .vocab = 16});
  const NoGrad guard;
  const Subscription on_model = gpt.observe(silent), on_block = gpt.blocks[0].observe(silent);
  const Tensor tokens = numbers({1, 6}, i64, 1, 0, 15);
  KeyValueCache cache;
  gpt(narrow(tokens, 1, 0, 4), cache);
  REQUIRE(cache.size() == 2);
  CHECK(cache[0].keys().size(2) == 4);
  gpt(narrow(tokens, 1, 4, 2), cache);
  CHECK(cache[1].values().size(2) == 6);
}

TEST_CASE("observers: hear every layer of a model, with a cache too") {
  struct Count final : ModuleObserver {
    void before_forward(Module& m, std::span<Tensor* const>) override { ++calls[&m]; }
    std::map<Module*, int> calls;
  } count;
  Gpt gpt({.layers = 2, .heads = 2, .width = 8, .context = 8, .vocab = 16});
  std::vector<Subscription> subscriptions;
  for (const NamedModule& m : gpt.named_modules()) subscriptions.push_back(m.module->observe(count));
  const Tensor tokens = numbers({1, 3}, i64, 1, 0, 15);
  const NoGrad guard;
  gpt(tokens);
  const auto plain = count.calls;
  count.calls.clear();
  KeyValueCache cache;
  gpt(tokens, cache);
  CHECK(count.calls == plain);
  CHECK(count.calls.at(&gpt.blocks[1]) == 1);
}

TEST_CASE("containers: of layers name their members and keep their order") {
  Sequential net;
  net.append(nn::Linear(2, 3));
  net.append(nn::Gelu());
  net.append(nn::Linear(3, 1));
  CHECK(net.size() == 3);
  CHECK(names(net.named_parameters()) == Names{"0.weight", "0.bias", "2.weight", "2.bias"});
  CHECK(net[1].type_name() == "Gelu");
  CHECK_THROWS_AS(net[3], ValueError);
  const Tensor x = numbers({5, 2}, f32);
  CHECK(same_bits(net(x), net[2].call(net[1].call(net[0].call(x)))));
  Sequential copy = net.clone();
  CHECK(same_bits(copy(x), net(x)));
  fill_(copy.parameters()[0].data(), 0);
  CHECK_FALSE(same_bits(copy(x), net(x)));
  ModuleList<nn::Linear> list;
  for (int i = 0; i < 20; ++i) list.emplace_back(2, 2);
  const nn::Linear* first = &list[0];
  list.emplace_back(2, 2);
  CHECK(&list[0] == first);
  CHECK(list.named_parameters().size() == 42);
  CHECK(list.named_parameters().back().name == "20.bias");
  int seen = 0;
  for (const nn::Linear& layer : list) seen += layer.weight.defined();
  CHECK(seen == 21);
  CHECK(list.clone().size() == 21);
  ModuleList<Module> several;
  nn::Linear& there = several.append(nn::Linear(2, 2));
  several.append(nn::Dropout(0.5));
  several.append(Sequential{nn::Linear(2, 3), nn::Relu()});
  CHECK(&several[0] == &there);
  CHECK(several.named_parameters().back().name == "2.0.bias");
  ModuleList<Module> others = several.clone();
  CHECK(others[2].type_name() == "Sequential");
  CHECK(same_bits(others[2].call(x), several[2].call(x)));
  fill_(others.parameters()[0].data(), 0);
  CHECK_FALSE(same_bits(others[0].call(x), several[0].call(x)));
  list.append(nn::Linear(2, 2));
  CHECK(list.size() == 22);
  Sequential wrong{nn::Relu()};
  wrong.append(ModuleList<nn::Linear>());
  CHECK(one_line_about(message_of<StateError>([&] { wrong(x); }), "ModuleList"));
}

namespace held {
struct Batch {
  Tensor tokens;
  int other = 0;
};
void tensors_in(Batch& batch, auto&& visit) { visit(batch.tokens); }
}  // namespace held

TEST_CASE("containers: tensors are found in whatever holds them") {
  const Tensor t = zeros({1});
  std::tuple<Tensor, std::pair<int, Tensor>, std::vector<std::optional<Tensor>>,
             std::map<std::string, std::array<Tensor, 2>>, held::Batch, std::string, double,
             std::optional<Tensor>>
      value{t, {1, t}, {t, std::nullopt}, {{"a", {t, t}}}, {t}, "text", 2.0, std::nullopt};
  int count = 0;
  each_tensor(value, [&](Tensor& found) {
    ++count;
    found = {};
  });
  CHECK(count == 6);
  CHECK_FALSE(std::get<4>(value).tokens.defined());
  static_assert(may_hold_tensors<decltype(value)>());
  static_assert(may_hold_tensors<const std::vector<std::optional<Tensor>>&>());
  static_assert(may_hold_tensors<held::Batch>());
  static_assert(!may_hold_tensors<KeyValueCache&>());
  static_assert(!may_hold_tensors<std::string>() && !may_hold_tensors<std::tuple<int, double>>() &&
                !may_hold_tensors<int*>());
}

TEST_CASE("parameters: their data changes, the object stays") {
  Parameter p(numbers({2, 3}, f32));
  const Parameter same = p;
  CHECK(same == p);
  CHECK(p.requires_grad());
  CHECK(p.tensor().requires_grad());
  CHECK_FALSE(p.data().requires_grad());
  p.set_data(zeros({4}));
  CHECK(same.shape() == Shape{4});
  CHECK(same.tensor().requires_grad());
  p.set_grad(numbers({2}, f16));
  CHECK(same.grad().dtype() == f16);
  CHECK_THROWS_AS(Parameter(zeros({2}, {i64})), DTypeError);
  CHECK_FALSE(Parameter(zeros({2}, {i64}), false).requires_grad());
  CHECK_FALSE(Parameter().defined());
  const Param none;
  CHECK_FALSE(none.defined());
  CHECK_FALSE(none.tensor().defined());
}

TEST_CASE("init: gains and deviations are PyTorch's") {
  using enum init::Nonlinearity;
  CHECK(init::calculate_gain(linear) == 1);
  CHECK(init::calculate_gain(sigmoid) == 1);
  CHECK(init::calculate_gain(init::Nonlinearity::tanh) == 5.0 / 3);
  CHECK(std::abs(init::calculate_gain(relu) - 1.4142135623730951) < 1e-15);
  CHECK(std::abs(init::calculate_gain(leaky_relu) - 1.4141428569978354) < 1e-15);
  CHECK(std::abs(init::calculate_gain(leaky_relu, 0.5) - 1.2649110640673518) < 1e-15);
  CHECK(init::calculate_gain(selu) == 0.75);

  // (out, in, ...): fan_in is 30 * 3 and fan_out 50 * 3.
  const Shape shape{50, 30, 3};
  const auto spread = [&](const auto& fill) {
    manual_seed(4);
    const Parameter p(empty(shape, {f64}));
    fill(p);
    return std::pair(stddev(p.data()).item(), amax(abs(p.data())).item());
  };
  const auto near = [](double got, double want) { return std::abs(got - want) < 0.02 * want; };
  const double root3 = std::sqrt(3.0);
  const std::pair<init::KaimingOptions, double> kaiming[] = {
      {{}, std::sqrt(2.0 / 90)},
      {{.nonlinearity = relu}, std::sqrt(2.0 / 90)},
      {{.nonlinearity = relu, .mode = init::Fan::out}, std::sqrt(2.0 / 150)},
      {{.slope = 2}, std::sqrt(0.4 / 90)},
      {{.nonlinearity = linear}, std::sqrt(1.0 / 90)}};
  for (const auto& [options, deviation] : kaiming) {
    CHECK(near(spread([&](const Parameter& p) { init::kaiming_normal_(p, options); }).first, deviation));
    const auto [uniform, most] = spread([&](const Parameter& p) { init::kaiming_uniform_(p, options); });
    CHECK(near(uniform, deviation));
    CHECK((most < root3 * deviation && most > 0.99 * root3 * deviation));
  }
  for (const double gain : {1.0, 2.5}) {
    const double deviation = gain * std::sqrt(2.0 / 240);
    CHECK(near(spread([&](const Parameter& p) { init::xavier_normal_(p, gain); }).first, deviation));
    CHECK(
        near(spread([&](const Parameter& p) { init::xavier_uniform_(p, gain); }).second, root3 * deviation));
  }
  for (const Shape& none : {Shape{0, 3}, Shape{3, 0}, Shape{0, 0, 2}}) {  // nothing to draw, and no failure
    const Parameter p(empty(none));
    init::kaiming_normal_(p), init::kaiming_uniform_(p), init::xavier_normal_(p), init::xavier_uniform_(p);
    init::orthogonal_(p), init::trunc_normal_(p);
  }
}

TEST_CASE("init: trunc_normal_ draws the normal distribution between its bounds") {
  struct Part {
    double mean, stddev, low, high;
  };
  for (const DType dtype : {f32, f64, bf16, f16})
    for (const Part& part :
         {Part{0, 1, -2, 2}, Part{1, 0.5, 0, 1.25}, Part{0, 0.02, -2, 2}, Part{0, 1, 1, 3},
          Part{0, 1, -HUGE_VAL, HUGE_VAL}, Part{0, 1, 3.5, 9}, Part{1, 2, -HUGE_VAL, -6}}) {
      INFO(name_of(dtype) << " " << part.mean << " " << part.stddev << " " << part.low << " " << part.high);
      manual_seed(6);
      const Parameter p(empty({100, 400}, {dtype}));
      init::trunc_normal_(p, part.mean, part.stddev, part.low, part.high);
      std::vector<double> got = doubles(p.data());
      std::ranges::sort(got);
      const double room = is_floating(dtype) && size_of(dtype) == 2 ? 1e-2 : 0;
      CHECK((got.front() >= part.low - room && got.back() <= part.high + room));
      // As many lie below each value as the distribution says.
      const auto cdf = [&](double x) {
        return 0.5 * (1 + std::erf((x - part.mean) / part.stddev / std::sqrt(2.0)));
      };
      const double from = cdf(part.low), to = cdf(part.high);
      for (const double share : {0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99}) {
        const double at = got[static_cast<std::size_t>(share * static_cast<double>(got.size()))];
        const double half = std::abs(at) * (dtype == bf16  ? 0x1p-8
                                            : dtype == f16 ? 0x1p-11
                                                           : 0);  // by rounding
        CHECK((cdf(at - half) - from) / (to - from) < share + 0.01);
        CHECK((cdf(at + half) - from) / (to - from) > share - 0.01);
      }
    }
  const Parameter p(empty({4, 4}));
  CHECK(one_line_about(message_of<ValueError>([&] { init::trunc_normal_(p, 0, 0); }), "trunc_normal_"));
  CHECK(one_line_about(message_of<ValueError>([&] { init::trunc_normal_(p, 0, 1, 2, 2); }), "trunc_normal_"));
  CHECK(one_line_about(message_of<ValueError>([&] { init::trunc_normal_(p, 0, 1, 6, 7); }), "trunc_normal_"));
}

TEST_CASE("init: orthogonal_ gives orthonormal rows, or columns, times the gain") {
  for (const DType dtype : {f32, f64, bf16, f16})
    for (const Shape& shape :
         {Shape{5, 5}, Shape{1, 7}, Shape{7, 1}, Shape{3, 2, 2, 2}, Shape{130, 129}, Shape{70, 300}})
      for (const double gain : {1.0, 2.0}) {
        INFO(name_of(dtype) << " " << to_string(shape) << " " << gain);
        const Parameter p(empty(shape, {dtype}));
        init::orthogonal_(p, gain);
        const Tensor x = to(reshape(p.data(), {shape[0], -1}), f64);
        const Tensor y = x.size(0) <= x.size(1) ? x : transpose(x, 0, 1);
        const double near = dtype == f64 ? 1e-13 : dtype == f32 ? 1e-6 : dtype == f16 ? 1e-2 : 5e-2;
        CHECK(distance(matmul(y, transpose(y, 0, 1)), mul(eye(y.size(0), -1, {f64}), gain * gain)) < near);
      }
  for (const auto& fill : {init::orthogonal_, init::xavier_normal_})
    CHECK_THROWS_AS(fill(Parameter(empty({4})), 1), ShapeError);
  CHECK_THROWS_AS(init::kaiming_normal_(Parameter(empty({4}))), ShapeError);
  CHECK_THROWS_AS(init::kaiming_uniform_(Parameter(empty({4}))), ShapeError);
}

namespace {

struct Net final : Layer<Net> {
  nn::Linear in{4, 8}, other{4, 8};
  ModuleList<nn::Linear> blocks;
  Sequential out{nn::Relu(), nn::Linear(8, 2, {Bias::no})};
  Param scale{ones({1})};
  Net() {
    for (int i = 0; i < 3; ++i) blocks.emplace_back(8, 8);
    blocks.emplace_back(8, 8, LinearOptions{Bias::no});
  }
  Tensor forward(const Tensor& x) const { return out(in(x)) * scale.tensor(); }
  void visit(auto&& on) {
    on("in", in);
    on("other", other);
    on("blocks", blocks);
    on("out", out);
    on("scale", scale);
  }
};

}  // namespace

TEST_CASE("modules print as a tree of names, classes and shapes") {
  const Net net;
  const std::string expected =
      "Net(\n"
      "  scale (1)\n"
      "  (in): Linear(weight (8, 4), bias (8))\n"
      "  (other): Linear(weight (8, 4), bias (8))\n"
      "  (blocks): ModuleList(\n"
      "    (0-2): 3 x Linear(weight (8, 8), bias (8))\n"
      "    (3): Linear(weight (8, 8))\n"
      "  )\n"
      "  (out): Sequential(\n"
      "    (0): Relu()\n"
      "    (1): Linear(weight (2, 8))\n"
      "  )\n"
      ")\n"
      "377 parameters";
  CHECK(to_string(net) == expected);
  std::ostringstream out;
  out << net;
  CHECK(out.str() == expected);
  CHECK(to_string(nn::Relu()) == "Relu()\n0 parameters");
  CHECK(to_string(nn::RmsNorm(1)) == "RmsNorm(weight (1))\n1 parameter");
  Tied tied;  // counts the weight that both have once
  CHECK(to_string(tied).ends_with(")\n20 parameters"));
  const Tied moved = std::move(tied);
  CHECK_THROWS_AS(to_string(tied), StateError);
}

TEST_CASE("init: values are in their bounds and come from the seed") {
  manual_seed(2);
  nn::Linear m(16, 200);
  for (double v : doubles(m.weight.data())) REQUIRE(std::abs(v) <= 0.25);
  for (double v : doubles(m.bias.data())) REQUIRE(std::abs(v) <= 0.25);
  CHECK(amax(m.weight.data()).item() > 0.2);
  manual_seed(2);
  CHECK(same_values(nn::Linear(16, 200), m));
  init::xavier_uniform_(m.weight.object());
  for (double v : doubles(m.weight.data())) REQUIRE(std::abs(v) <= std::sqrt(6.0 / 216));
  init::normal_(m.weight.object(), 1, 0.5);
  CHECK(std::abs(mean(m.weight.data()).item() - 1) < 0.05);
  init::uniform_(m.weight.object(), 3, 4);
  for (double v : doubles(m.weight.data())) REQUIRE((v >= 3 && v < 4));
  init::constant_(m.bias.object(), 7);
  CHECK(same_bits(m.bias.data(), full({200}, 7)));
  CHECK(m.weight.tensor().requires_grad());
  CHECK_THROWS_AS(init::xavier_uniform_(m.bias.object()), ShapeError);
  CHECK(same_bits(nn::LayerNorm(3).weight.data(), ones({3})));
  CHECK(same_bits(nn::RmsNorm(3).weight.data(), ones({3})));
  CHECK(same_bits(nn::LayerNorm(3).bias.data(), zeros({3})));
  CHECK_THROWS_AS(nn::Linear(0, 3), ValueError);
  CHECK_THROWS_AS(nn::Dropout(1.1), ValueError);
}

TEST_CASE("modules: batch normalisation counts its training batches and uses what it learned in eval mode") {
  BatchNorm2d norm(3);
  CHECK(keys(norm.state_dict()) ==
        Names{"weight", "bias", "running_mean", "running_var", "num_batches_tracked"});
  CHECK(norm.type_name() == "BatchNorm2d");
  CHECK(norm.parameter_count() == 6);
  const Tensor x = numbers({4, 3, 2, 2}, f32);
  Tensor mean = zeros({3}), var = ones({3});
  for (int step = 1; step <= 3; ++step) {
    const Tensor y = norm(x);
    CHECK(same_bits(y.detach(), batch_norm(x, mean, var, ones({3}), zeros({3}), {.training = true})));
    CHECK(norm.num_batches_tracked.tensor().item<std::int64_t>() == step);
  }
  CHECK(same_bits(norm.running_mean, mean));
  CHECK(same_bits(norm.running_var, var));
  norm.eval();
  BatchNorm2d copy = norm.clone();
  CHECK(same_bits(norm(x).detach(), batch_norm(x, mean, var, ones({3}), zeros({3}))));
  CHECK(same_bits(norm.running_mean, mean));
  copy.train();
  copy(x);
  CHECK(same_bits(norm.running_mean, mean));
  CHECK(norm.num_batches_tracked.tensor().item<std::int64_t>() == 3);
  norm.to(f16);
  CHECK(norm.running_var.tensor().dtype() == f16);
  CHECK(norm.num_batches_tracked.tensor().dtype() == i64);
  CHECK(one_line_about(message_of<ShapeError>([&] { norm(zeros({4, 3}, {f16})); }), "BatchNorm2d"));
  BatchNorm1d rows(3);
  CHECK(one_line_about(message_of<ShapeError>([&] { rows(x); }), "BatchNorm1d"));
  CHECK(rows(zeros({2, 3})).shape() == Shape{2, 3});
  CHECK(rows(zeros({2, 3, 4})).shape() == Shape{2, 3, 4});
}

TEST_CASE("modules: a batch normalisation ends with a residual and an activation") {
  for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu})
    for (const std::optional<double> momentum : {std::optional(0.1), std::optional<double>()})
      for (const bool tracked : {true, false}) {
        const nn::BatchNormLayerOptions options{
            .momentum = momentum, .track_running_stats = tracked, .activation = activation};
        BatchNorm2d norm(3, options), plain(3, {.momentum = momentum, .track_running_stats = tracked});
        BatchNorm1d rows(3, options);
        const Tensor x = numbers({4, 3, 2, 2}, f32, 1), r = numbers({4, 3, 2, 2}, f32, 2);
        const auto after = [&](const Tensor& y) {
          return activation == Activation::none ? y : activation == Activation::relu ? relu(y) : gelu(y);
        };
        for (const bool training : {true, false}) {
          norm.train(training), plain.train(training), rows.train(training);
          const Tensor y = plain(x);
          CHECK(same_bits(norm(x), after(y)));
          CHECK(same_bits(norm.clone()(x, r), after(add(plain.clone()(x), r))));
          CHECK(same_bits(reshape(rows(reshape(x, {4, 3, 4})), {4, 3, 2, 2}), after(y)));
          if (tracked) CHECK(same_bits(norm.running_var, plain.running_var));
        }
        const std::string message = message_of<ShapeError>([&] { norm(x, zeros({3, 1, 1})); });
        CHECK(one_line_about(message, "batch_norm: residual of shape"));
      }
}

TEST_CASE("modules: a captured step moves the running statistics as the step itself does") {
  const Sequential eager(Conv2d(2, 3, 2), BatchNorm2d(3));
  const Sequential captured = eager.clone();
  const auto step = [](const Sequential& model) {
    return [&model](std::span<const Tensor> in) {
      return std::vector<Tensor>{sherd::mean(square(model(in[0])))};
    };
  };
  const std::vector<Tensor> first = {numbers({2, 2, 4, 4}, f32, 1)}, next = {numbers({2, 2, 4, 4}, f32, 2)};
  const NoGrad guard;
  Program program = capture(step(captured), first);
  step(eager)(first);
  for (const auto& in : {next, first, next}) {
    CHECK(same_bits(program.replay(in)[0], step(eager)(in)[0]));
    CHECK(same_values(captured, eager));
  }
}

TEST_CASE("modules: a region that recomputes may hold a batch normalisation in eval mode alone") {
  Sequential model(Conv2d(2, 3, 2), BatchNorm2d(3));
  const Tensor x = numbers({2, 2, 4, 4}, f32);
  CHECK(one_line_about(message_of<StateError>([&] { recompute([&] { return model(x); }); }),
                       "running_statistics_"));
  model.eval();
  Sequential plain = model.clone();
  sum(square(recompute([&] { return model(x); }))).backward();
  sum(square(plain(x))).backward();
  const auto a = model.named_parameters(), b = plain.named_parameters();
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(same_bits(a[i].parameter.grad(), b[i].parameter.grad()));
}

TEST_CASE("modules: a convolution starts within PyTorch's bounds and maps images to images") {
  manual_seed(1);
  Conv2d conv(3, 5, 2, {.stride = 2, .padding = 1});
  CHECK(keys(conv.state_dict()) == Names{"weight", "bias"});
  CHECK(conv.weight.shape() == Shape{5, 3, 2, 2});
  const double bound = 1 / std::sqrt(12.0);
  for (const Tensor& t : {conv.weight.data(), conv.bias.data()})
    for (double v : doubles(t)) CHECK(std::abs(v) <= bound);
  const Tensor x = numbers({2, 3, 5, 4}, f32);
  CHECK(same_bits(conv(x).detach(), conv2d(x, conv.weight, conv.bias, {2, 1}).detach()));
  CHECK(conv(x).shape() == Shape{2, 5, 3, 3});
  CHECK(keys(Conv2d(1, 1, 1, {.bias = Bias::no}).state_dict()) == Names{"weight"});
  CHECK(one_line_about(message_of<ValueError>([] { Conv2d(3, 5, 0); }), "Conv2d"));
}

TEST_CASE("modules: transposed convolutions draw as convolutions do, within PyTorch's bounds") {
  manual_seed(1);
  const nn::ConvTranspose2d conv(6, 4, {2, 3}, {.stride = {2, 1}, .output_padding = {1, 0}, .groups = 2});
  CHECK(conv.weight.shape() == Shape{6, 2, 2, 3});
  CHECK(conv.bias.shape() == Shape{4});
  // A convolution of the same fan-in has the same numbers.
  manual_seed(1);
  const Conv2d same(4, 6, {2, 3}, {.bias = nn::Bias::no, .groups = 2});
  CHECK(same_bits(conv.weight.data(), same.weight.data()));
  const double bound = 1 / std::sqrt(12.0);
  for (double v : doubles(conv.bias.data())) CHECK(std::abs(v) <= bound);
  const Tensor x = numbers({2, 6, 3, 4}, f32);
  CHECK(conv(x).shape() == Shape{2, 4, 7, 6});
  const nn::ConvTranspose1d line(6, 4, 3, {.stride = 2, .bias = nn::Bias::no});
  CHECK(line.weight.shape() == Shape{6, 4, 3});
  CHECK(line(numbers({2, 6, 5}, f32)).shape() == Shape{2, 4, 11});
  CHECK(one_line_about(message_of<ValueError>([] { nn::ConvTranspose2d(3, 5, 0); }), "ConvTranspose2d"));
  CHECK(one_line_about(message_of<ValueError>([] { nn::ConvTranspose1d(3, 5, 1, {.groups = 2}); }),
                       "ConvTranspose1d: 2 groups"));
}

TEST_CASE("a cast leaves out what it is told to, to the bit, and the model trains", "[one thread]") {
  for (DType dtype : {f16, bf16}) {
    INFO(name_of(dtype));
    manual_seed(1);
    Sequential model(Conv2d(1, 3, 3), Sequential(BatchNorm2d(3), Relu()), Conv2d(3, 2, 3), SyncBatchNorm(2));
    for (const nn::NamedParameter& p : model.named_parameters()) nn::init::normal_(p.parameter, 1, 0.3);
    std::vector<Tensor> before;
    for (const auto& [name, tensor] : model.state_dict()) before.push_back(clone(tensor));
    model.to(dtype, nn::is_batch_norm);
    int kept = 0;
    std::size_t i = 0;
    for (const auto& [name, tensor] : model.state_dict()) {
      INFO(name);
      const bool norm = name.starts_with("1.") || name.starts_with("3.");
      kept += norm;
      CHECK(same_bits(tensor, norm ? before[i] : to(before[i], dtype)));
      ++i;
    }
    CHECK(kept == 10);
    const Tensor x = randn({4, 1, 6, 6}, {dtype});
    const Tensor y = model(x);
    CHECK(y.dtype() == dtype);
    mean(square(y)).backward();
    for (const nn::NamedParameter& p : model.named_parameters()) {
      INFO(p.name);
      CHECK(p.parameter.grad().dtype() == p.parameter.data().dtype());
    }
    model.to(dtype, [](const nn::Module& m) { return m.type_name() == "Sequential"; });  // all of it
    CHECK(model.state_dict().at("1.0.weight").dtype() == f32);
    model.to(dtype);
    CHECK(model.state_dict().at("1.0.weight").dtype() == dtype);
  }
}

TEST_CASE("modules: the norms of mixed precision run, or refuse their backward, as the catalogue says") {
  const auto run = [](DType low, bool cast_statistics, bool norm_in_f32) {
    Sequential model(Conv2d(1, 5, 3), BatchNorm2d(5), Conv2d(5, 4, 3));
    auto& norm = static_cast<BatchNorm2d&>(model[1]);
    for (std::size_t i : {0, 1, 2})
      if (i != 1 || !norm_in_f32) model[i].to(low);
    if (!cast_statistics) {
      norm.running_mean.set(zeros({5}));
      norm.running_var.set(ones({5}));
    }
    const Tensor z = model(numbers({3, 1, 9, 9}, low));
    CHECK((z.dtype() == low && z.shape() == Shape{3, 4, 5, 5}));
    return message_of<DTypeError>([&] {
      sum(z).backward();
      fail<DTypeError>("ok");
    });
  };
  for (DType low : {f16, bf16}) {
    CHECK(run(low, true, false).find("ok") == 0);
    CHECK(run(low, false, true).find("ok") == 0);
    const std::string text = run(low, false, false);
    CHECK(text.find(low == f16 ? "Expected running_mean to have type Half but got Float"
                               : "Expected running_mean to have type BFloat16 but got Float") == 0);
  }
}

namespace {

/// Gives a part of its input, as an `x[...]`.
struct First final : Layer<First> {
  auto forward(const Tensor& x) const { return x[0]; }
  void visit(auto&&) {}
};

struct Counting final : ModuleObserver {
  std::size_t inputs = 0, outputs = 0;
  void before_forward(Module&, std::span<Tensor* const> in) override { inputs += in.size(); }
  void after_forward(Module&, std::span<Tensor* const> out) override {
    outputs += out.size();
    *out[0] = mul(*out[0], 2);
  }
};

}  // namespace

TEST_CASE("modules: an x[...] is a tensor to observers and containers, as argument and as result") {
  First first;
  Counting counting;
  const Subscription watching = first.observe(counting);
  const Tensor x = numbers({2, 3, 4}, f32);
  CHECK(same_bits(first(x[0]), mul(select(select(x, 0, 0), 0, 0), 2)));
  CHECK(counting.inputs == 1);
  CHECK(counting.outputs == 1);
  Sequential list(First{}, First{});
  CHECK(same_bits(list(x), select(select(x, 0, 0), 0, 0)));
}

TEST_CASE("modules: parameters go where tensors go, and say what they are") {
  Linear layer(3, 4, {.tensor = {.dtype = bf16}});
  for (const Parameter& p : layer.parameters()) {
    CHECK(same_bits(sum(square(p)), sum(square(p.tensor()))));
    CHECK(p.dtype() == bf16);
    CHECK(p.device() == Device::cpu());
  }
  CHECK((layer.weight.dtype() == bf16 && layer.weight.numel() == 12));
  CHECK(same_bits(layer.weight[1], select(layer.weight, 0, 1)));
}

TEST_CASE("modules: a parameter's values are computed with in place, without history alone") {
  nn::Linear layer(3, 2);
  sum(layer(ones({1, 3}))).backward();
  const Tensor before = clone(layer.weight.data());
  const void* const memory = layer.weight.tensor().data<float>();
  {
    const NoGrad no_grad;
    layer.weight -= 0.5 * layer.weight.grad();
    layer.bias *= 3;
    layer.bias += layer.bias;
    layer.weight /= layer.weight;
  }
  CHECK(same_bits(layer.weight.data(), ones({2, 3})));
  CHECK(layer.weight.tensor().data<float>() == memory);
  CHECK(layer.bias.requires_grad());
  CHECK_THROWS_AS(layer.weight += before, StateError);
  nn::BatchNorm1d norm(2);
  norm.running_mean += 1;
  CHECK(same_bits(norm.running_mean.tensor(), ones({2})));
}

TEST_CASE("modules: what takes a layer's place gives x as it came, and batch norms say what they take") {
  const Tensor x = randn({2, 3});
  nn::Sequential net{nn::Linear(3, 3), nn::Identity()};
  CHECK(same_bits(net(x), linear(x, net.parameters()[0], net.parameters()[1])));
  CHECK(nn::Identity()(x).storage_ref() == x.storage_ref());
  CHECK(net.parameters().size() == 2);
  const std::string message = message_of<ShapeError>([&] { nn::BatchNorm2d(3)(x); });
  CHECK(one_line_about(message, "BatchNorm2d"));
  CHECK(message.find("(N, C, H, W)") != std::string::npos);
}
