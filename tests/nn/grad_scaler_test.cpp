// GradScaler: what scaling leaves alone, which steps are skipped, and how the scale moves.
#include "nn/grad_scaler.h"

#include <cmath>
#include <limits>
#include <optional>
#include <random>

#include "autograd/capture/capture.h"
#include "nn/layers.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

struct Net final : Layer<Net> {
  Linear a{5, 7}, b{7, 1};
  Tensor forward(const Tensor& x) const { return b(gelu(a(x))); }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
  }
};

Net net_of(std::uint64_t seed) {
  manual_seed(seed);
  return {};
}

Tensor loss_of(Net& net, unsigned step) { return mean(square(net(numbers({6, 5}, f32, 10 + step)))); }

bool same_values(const Module& a, const Module& b) {
  const std::vector<Parameter> left = a.parameters(), right = b.parameters();
  for (std::size_t i = 0; i < left.size(); ++i)
    if (!same_bits(left[i].data(), right[i].data())) return false;
  return true;
}

/// Writes `value` into one element of one gradient.
void plant(const Module& net, std::size_t parameter, std::int64_t element, double value) {
  fill_(narrow(flatten(net.parameters()[parameter].grad()), 0, element, 1), value);
}

void plant_in(const Parameter& p, double value) { fill_(narrow(p.grad(), 0, 1, 1), value); }

std::unique_ptr<Optimizer> optimizer_of(std::string_view name, std::vector<Parameter> params) {
  if (name == "sgd") return std::make_unique<Sgd>(params, SgdOptions{.lr = 0.1, .momentum = 0.9});
  if (name == "adam") return std::make_unique<Adam>(params, AdamOptions{.lr = 0.1});
  return std::make_unique<AdamW>(params, AdamWOptions{.lr = 0.1});
}

/// The rule for the scale, in plain numbers.
struct ByHand {
  GradScalerOptions o;
  float scale = static_cast<float>(o.init_scale);
  std::int64_t tracker = 0;
  void update(bool found) {
    if (found) {
      scale = static_cast<float>(scale * o.backoff_factor);
      tracker = 0;
    } else if (++tracker == o.growth_interval) {
      const auto grown = static_cast<float>(scale * o.growth_factor);
      if (std::isfinite(grown)) scale = grown;
      tracker = 0;
    }
  }
};

double value_of(const StateDict& state, std::string_view name) {
  for (const auto& [key, tensor] : state)
    if (key == name) return tensor.item();
  return not_a_number;
}

}  // namespace

TEST_CASE("GradScaler: a power of two as scale changes no bit of a step, clipped or not") {
  for (const std::string_view name : {"sgd", "adam", "adamw"})
    for (const double limit : {infinity, 0.01})
      for (const double scale : {1.0, 0x1p-3, 0x1p16}) {
        INFO(name << " clipped to " << limit << ", scaled by " << scale);
        Net plain = net_of(1), scaled = net_of(1);
        const auto one = optimizer_of(name, plain.parameters()),
                   other = optimizer_of(name, scaled.parameters());
        GradScaler scaler({.init_scale = scale, .growth_interval = 2});
        for (unsigned step = 0; step < 5; ++step) {
          loss_of(plain, step).backward();
          scaler.scale(loss_of(scaled, step)).backward();
          if (std::isfinite(limit)) {
            scaler.unscale_(*other);
            CHECK(clip_grad_norm_(scaled.parameters(), limit).item() ==
                  clip_grad_norm_(plain.parameters(), limit).item());
          }
          one->step();
          CHECK(scaler.step(*other).item() == 0);
          scaler.update();
          one->zero_grad();
          other->zero_grad();
          CHECK(same_values(plain, scaled));
        }
        CHECK(scaler.scale_tensor().item() == scale * 4);
      }
}

TEST_CASE("GradScaler: a gradient that is finite when scaled and infinite when divided skips the step") {
  for (const std::string_view name : {"sgd", "adam", "adamw"})
    for (const DType dtype : {f32, bf16, f64})
      for (const double scale : {0.5, 0x1p-3, 0x1p-20, 1.0, 4.0})
        for (const bool unscaled_before : {false, true}) {
          INFO(name << " " << name_of(dtype) << " scaled by " << scale);
          Parameter p(ones({3}, {dtype}));
          const auto optimizer = optimizer_of(name, {p});
          GradScaler scaler({.init_scale = scale});
          scaler.scale(sum(p.tensor())).backward();
          const double most = dtype == f64 ? 0x1p1023 : 0x1p127;  // a power of two: bf16 has it too
          plant_in(p, most);
          const bool infinite = scale < 1;
          if (unscaled_before) scaler.unscale_(*optimizer);
          CHECK(scaler.step(*optimizer).item() == (infinite ? 1 : 0));
          CHECK(same_bits(p.data(), ones({3}, {dtype})) == infinite);
          scaler.update();
          CHECK(scaler.get_scale() == (infinite ? scale / 2 : scale));
        }
}

TEST_CASE("GradScaler: a step is skipped as if it had never been, and the scale follows its rule") {
  std::mt19937 random(5);
  for (const std::string_view name : {"sgd", "adam", "adamw"})
    for (const bool clipped : {false, true})
      for (const GradScalerOptions& o :
           {GradScalerOptions{.init_scale = 256, .growth_interval = 2},
            GradScalerOptions{
                .init_scale = 3, .growth_factor = 1.5, .backoff_factor = 0.25, .growth_interval = 3},
            GradScalerOptions{.init_scale = 1024, .growth_interval = 1}}) {
        INFO(name << " clipped: " << clipped << ", interval " << o.growth_interval);
        Net net = net_of(2), without = net_of(2);
        const auto optimizer = optimizer_of(name, net.parameters()),
                   expected = optimizer_of(name, without.parameters());
        GradScaler scaler(o);
        ByHand hand{o};
        int skips = 0;
        for (unsigned step = 0; step < 24; ++step) {
          const float before = hand.scale;
          scaler.scale(loss_of(net, step)).backward();
          const bool bad = random() % 3 == 0;
          if (bad) {
            const std::size_t parameter = random() % 4;
            const std::int64_t numel = net.parameters()[parameter].numel();
            const double values[] = {infinity, -infinity, not_a_number};
            plant(net, parameter, static_cast<std::int64_t>(random()) % numel, values[random() % 3]);
          } else {
            mul(loss_of(without, step), before).backward();
            for (const Parameter& p : without.parameters())
              mul_(p.grad(), to(Tensor::scalar(1.0 / static_cast<double>(before), {f64}), f32));
            if (clipped) clip_grad_norm_(without.parameters(), 0.1);
            expected->step();
          }
          if (clipped) {
            scaler.unscale_(*optimizer);
            clip_grad_norm_(net.parameters(), 0.1);
          }
          CHECK((scaler.step(*optimizer).item() != 0) == bad);
          scaler.update();
          hand.update(bad);
          skips += bad;
          CHECK(scaler.scale_tensor().item() == hand.scale);
          CHECK(value_of(scaler.state_dict(), "growth_tracker") == static_cast<double>(hand.tracker));
          CHECK(same_values(net, without));
          optimizer->zero_grad();
          expected->zero_grad();
        }
        CHECK(skips > 0);
        const StateDict state = optimizer->state_dict(), other = expected->state_dict();
        REQUIRE(state.size() == other.size());
        for (std::size_t i = 0; i < state.size(); ++i) CHECK(same_bits(state[i].second, other[i].second));
      }
}

TEST_CASE("GradScaler: one check finds an inf or NaN wherever it is, in every dtype and on every device") {
  for (const DType dtype : {f64, f32, bf16})
    for (const Device device : {Device::cpu(), Device::cpu(1)})
      for (const double special : {0.0, infinity, -infinity, not_a_number})
        for (std::size_t at = 0; at < 3; ++at) {
          INFO(name_of(dtype) << " on " << to_string(device) << ": " << special << " in parameter " << at);
          std::vector<Parameter> params;
          for (const Shape& shape : {Shape{3}, Shape{2, 5}, Shape{1}}) {
            params.emplace_back(to(numbers(shape, dtype), device));
            params.back().set_grad(to(numbers(shape, dtype, 2), device));
          }
          params.emplace_back(to(numbers({4}, dtype), device));  // without a gradient
          params.emplace_back(zeros({0}, {dtype, device}));
          params.back().set_grad(zeros({0}, {dtype, device}));
          if (special != 0) fill_(narrow(flatten(params[at].grad()), 0, params[at].numel() - 1, 1), special);
          const std::vector<double> before = doubles(to(params[0].grad(), Device::cpu()));
          Sgd sgd(params);
          GradScaler scaler({.init_scale = 4});
          scaler.scale(zeros({}, {f32, device}));
          CHECK(scaler.scale_tensor().device() == device);
          scaler.unscale_(sgd);
          CHECK(params[0].grad().dtype() == dtype);
          if (special == 0) {
            const std::vector<double> after = doubles(to(params[0].grad(), Device::cpu()));
            for (std::size_t i = 0; i < after.size(); ++i) CHECK(after[i] == before[i] / 4);
          }
          CHECK(scaler.step(sgd).item() == (special == 0 ? 0 : 1));
        }
}

TEST_CASE("GradScaler: parameters in two places, and without any gradient, step as one list") {
  const Parameter here(numbers({3}, f32)), there(to(numbers({3}, f32), Device::cpu(1)));
  Sgd sgd({here, there}, {.lr = 1});
  GradScaler scaler;
  scaler.scale(zeros({}));
  CHECK(scaler.step(sgd).item() == 0);  // no gradient is none that overflowed
  scaler.update();
  for (const double special : {0.0, infinity}) {
    const std::vector<double> before = doubles(here.data());
    for (Parameter p : {here, there}) p.set_grad(to(ones({3}), p.local().device()));
    fill_(there.grad(), special == 0 ? 65536 : special);
    scaler.step(sgd);
    scaler.update();
    CHECK((doubles(here.data()) == before) == (special != 0));
  }
}

TEST_CASE("GradScaler: every optimizer skips for its own gradients, and the scale for any") {
  for (const bool first_is_bad : {false, true}) {
    Net net = net_of(3);
    Sgd one({net.a.weight.object()}), two({net.b.weight.object()});
    GradScaler scaler({.init_scale = 64});
    scaler.scale(loss_of(net, 0)).backward();
    plant(net, first_is_bad ? 0 : 2, 1, infinity);
    CHECK(scaler.step(one).item() == (first_is_bad ? 1 : 0));
    CHECK(scaler.step(two).item() == (first_is_bad ? 0 : 1));
    scaler.update();
    CHECK(scaler.scale_tensor().item() == 32);
  }
}

TEST_CASE("GradScaler: calls out of order are refused by name, and change nothing") {
  Net net = net_of(4);
  Sgd sgd(net.parameters());
  GradScaler scaler({.init_scale = 8});
  CHECK_THAT(message_of<StateError>([&] { scaler.unscale_(sgd); }), ContainsSubstring("scale(loss)"));
  CHECK_THAT(message_of<StateError>([&] { scaler.step(sgd); }), ContainsSubstring("scale(loss)"));
  CHECK_THAT(message_of<StateError>([&] { scaler.update(); }), ContainsSubstring("update"));
  scaler.scale(loss_of(net, 0)).backward();
  scaler.unscale_(sgd);
  const std::vector<double> unscaled = doubles(net.a.weight.grad());
  CHECK_THAT(message_of<StateError>([&] { scaler.unscale_(sgd); }), ContainsSubstring("unscaled already"));
  CHECK(doubles(net.a.weight.grad()) == unscaled);
  scaler.step(sgd);
  const std::vector<double> stepped = doubles(net.a.weight.data());
  CHECK_THAT(message_of<StateError>([&] { scaler.step(sgd); }), ContainsSubstring("update()"));
  CHECK_THAT(message_of<StateError>([&] { scaler.unscale_(sgd); }), ContainsSubstring("stepped already"));
  CHECK(doubles(net.a.weight.data()) == stepped);
  scaler.update();
  scaler.step(sgd);  // a new round

  const Parameter half(numbers({3}, f16));
  Parameter(half).set_grad(numbers({3}, f16));
  Sgd other({half});
  CHECK_THAT(message_of<DTypeError>([&] { scaler.unscale_(other); }), ContainsSubstring("f16"));

  for (const GradScalerOptions& bad :
       {GradScalerOptions{.init_scale = 0}, GradScalerOptions{.init_scale = 1e39},
        GradScalerOptions{.init_scale = 2e38}, GradScalerOptions{.init_scale = 2e-39},
        GradScalerOptions{.init_scale = 1e-60}, GradScalerOptions{.init_scale = not_a_number},
        GradScalerOptions{.growth_factor = 1}, GradScalerOptions{.growth_factor = infinity},
        GradScalerOptions{.backoff_factor = 1}, GradScalerOptions{.backoff_factor = 0},
        GradScalerOptions{.growth_interval = 0}})
    CHECK_THAT(message_of<ValueError>([&] { GradScaler made(bad); }), ContainsSubstring("GradScaler"));
  for (const double bad : {-1.0, 1e-60, 3e38})
    CHECK(one_line_about(message_of<ValueError>([&] { scaler.update(bad); }), "2^-126"));
}

TEST_CASE("GradScaler: the scale grows and shrinks to where f32 holds it and its inverse, and may be set") {
  Net net = net_of(5);
  Sgd sgd(net.parameters());
  GradScaler scaler({.init_scale = 0x1p125, .growth_interval = 1});
  for (const double expected : {0x1p126, 0x1p126, 0x1p126}) {
    scaler.scale(zeros({}));
    scaler.step(sgd);
    scaler.update();
    CHECK(scaler.scale_tensor().item() == expected);
  }
  scaler.update(0x1p-125);
  for (const double expected : {0x1p-126, 0x1p-126, 0x1p-126}) {
    scaler.scale(loss_of(net, 0)).backward();
    plant(net, 0, 1, infinity);
    CHECK(scaler.step(sgd).item() == 1);
    scaler.update();
    sgd.zero_grad();
    CHECK(scaler.scale_tensor().item() == expected);
  }
  Parameter p(ones({3}));
  Sgd healthy({p});
  scaler.scale(sum(p.tensor())).backward();
  CHECK(scaler.step(healthy).item() == 0);
  scaler.update(12);
  CHECK(scaler.scale_tensor().item() == 12);
}

TEST_CASE("GradScaler: what was done for an optimizer is not another one's that has its address") {
  Parameter a(ones({3})), b(ones({3}));
  GradScaler scaler({.init_scale = 1024});
  std::optional<Sgd> sgd(std::in_place, std::vector{a}, SgdOptions{.lr = 1});
  for (int round = 0; round < 3; ++round) {
    scaler.scale(sum(a.tensor()) + sum(b.tensor())).backward();
    scaler.unscale_(*sgd);
    sgd.emplace(std::vector{b}, SgdOptions{.lr = 1});
    const Tensor before = clone(b.data());
    CHECK(scaler.step(*sgd).item() == 0);
    CHECK(same_bits(b.data(), before - 1.0));
    scaler.update();
    sgd.emplace(std::vector{a}, SgdOptions{.lr = 1});
    a.set_grad({});
    b.set_grad({});
  }
}

TEST_CASE("GradScaler: a run that goes on from its state is the run that was never stopped") {
  const auto run = [&](GradScaler& scaler, Net& net, Sgd& sgd, unsigned from, unsigned to) {
    for (unsigned step = from; step < to; ++step) {
      scaler.scale(loss_of(net, step)).backward();
      if (step % 4 == 2) plant(net, 1, 2, infinity);
      scaler.step(sgd);
      scaler.update();
      sgd.zero_grad();
    }
  };
  const GradScalerOptions options{
      .init_scale = 128, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 2};
  for (unsigned stop = 0; stop < 10; ++stop) {
    Net whole = net_of(6), parts = net_of(6);
    Sgd one(whole.parameters()), other(parts.parameters());
    GradScaler uninterrupted(options), first(options), second;  // with other options of its own
    run(uninterrupted, whole, one, 0, 10);
    run(first, parts, other, 0, stop);
    second.load_state_dict(first.state_dict());
    run(second, parts, other, stop, 10);
    CHECK(second.scale_tensor().item() == uninterrupted.scale_tensor().item());
    CHECK(second.options().growth_factor == 3);
    CHECK(same_values(whole, parts));
  }
}

TEST_CASE("GradScaler: a state that does not fit is refused and changes nothing") {
  GradScaler scaler({.init_scale = 16});
  const StateDict good = GradScaler({.init_scale = 32}).state_dict();
  const auto with = [&](std::string_view name, double value) {
    StateDict state = good;
    for (auto& [key, tensor] : state)
      if (key == name) tensor = Tensor::scalar(value, {f64});
    return state;
  };
  std::vector<StateDict> bad = {
      with("scale", 0),          with("scale", not_a_number),  with("growth_factor", 0.5),
      with("backoff_factor", 2), with("growth_interval", 1.5), with("growth_tracker", -1),
      with("growth_interval", 0)};
  for (std::size_t i = 0; i < good.size(); ++i) {
    bad.push_back(good);
    bad.back().erase(bad.back().begin() + static_cast<std::ptrdiff_t>(i));
    bad.push_back(good);
    bad.back().push_back(good[i]);
  }
  bad.push_back(good);
  bad.back().emplace_back("momentum", Tensor::scalar(1));
  for (const StateDict& state : bad) {
    CHECK_THAT(message_of<ValueError>([&] { scaler.load_state_dict(state); }),
               ContainsSubstring("GradScaler"));
    CHECK(scaler.scale_tensor().item() == 16);
  }
  scaler.load_state_dict(good);
  CHECK(scaler.scale_tensor().item() == 32);
}

TEST_CASE("GradScaler: switched off it only steps") {
  Net plain = net_of(7), scaled = net_of(7);
  Sgd one(plain.parameters()), other(scaled.parameters());
  GradScaler scaler({.scaling = Scaling::off});
  loss_of(plain, 0).backward();
  scaler.scale(loss_of(scaled, 0)).backward();
  scaler.unscale_(other);
  scaler.unscale_(other);
  one.step();
  CHECK(scaler.step(other).item() == 0);
  scaler.update();
  CHECK(same_values(plain, scaled));
  CHECK(scaler.state_dict().empty());
  CHECK(scaler.scale_tensor().item() == 1);
}

/// Steps by its own rule, and knows nothing of flags on a device.
class Plain final : public Optimizer {
 public:
  explicit Plain(std::vector<Parameter> params) : Optimizer({{std::move(params)}}, {{"lr", 0.1}}) {}
  std::vector<std::string> state_names() const override { return {}; }

 protected:
  Slots fresh(const Tensor&) const override { return {}; }
  void step_group(const Group&, std::span<const Parameter> params, std::span<Slots* const>) override {
    CHECK_FALSE(skip().defined());
    for (const Parameter& p : params) sub_(p.local().detach(), p.grad());
  }
};

TEST_CASE("optimizers: step_unless steps for 0, and for anything else it is as if it had not been called") {
  for (const std::string_view name : {"sgd", "adam", "adamw", "plain", "alone"})
    for (const DType dtype : {f32, f64, i32, boolean})
      for (const double skip : {0.0, 1.0, -1.0, not_a_number}) {
        if (std::isnan(skip) && !is_floating(dtype)) continue;
        INFO(name << " skips by " << skip << " in " << name_of(dtype));
        Net net = net_of(8), expected = net_of(8);
        if (name == "alone")  // no list takes them
          for (Net* one : {&net, &expected}) one->to(f64);
        const auto make = [&](const Net& of) -> std::unique_ptr<Optimizer> {
          if (name == "plain") return std::make_unique<Plain>(of.parameters());
          return optimizer_of(name, of.parameters());
        };
        const auto one = make(net), other = make(expected);
        for (unsigned step = 0; step < 4; ++step) {
          const auto back = [&](Net& of) {
            const DType in = of.a.weight.data().dtype();
            mean(square(of(numbers({6, 5}, in, 10 + step)))).backward();
          };
          back(net);
          back(expected);
          const double flag = step % 2 == 0 ? skip : 0;
          if (flag == 0) other->step();
          one->step_unless(to(Tensor::scalar(flag, {f64}), dtype));
          one->zero_grad();
          other->zero_grad();
          CHECK(same_values(net, expected));
        }
      }
  Net net = net_of(8);
  AdamW optimizer(net.parameters());
  CHECK_THROWS_AS(optimizer.step_unless(zeros({2})), ShapeError);
}

TEST_CASE("optimizers: step_clipped has the bits of clipping and then stepping, in every dtype") {
  for (const std::string_view name : {"sgd", "adam", "adamw", "masters", "plain"})
    for (const DType dtype : {f32, f64, bf16, f16})
      for (const double limit : {0.0, 1e-3, 0.5, 1e9}) {
        if (name == "masters" && size_of(dtype) != 2) continue;
        INFO(name << " in " << name_of(dtype) << ", limit " << limit);
        Net net = net_of(8), expected = net_of(8);
        for (Net* one : {&net, &expected}) one->to(dtype);
        const auto make = [&](const Net& of) -> std::unique_ptr<Optimizer> {
          if (name == "plain") return std::make_unique<Plain>(of.parameters());
          if (name == "masters")
            return std::make_unique<AdamW>(of.parameters(),
                                           AdamWOptions{.lr = 0.1, .masters = Masters::in_f32});
          return optimizer_of(name, of.parameters());
        };
        const auto one = make(net), other = make(expected);
        for (unsigned step = 0; step < 3; ++step) {
          for (Net* of : {&net, &expected}) mean(square((*of)(numbers({6, 5}, dtype, 10 + step)))).backward();
          const Tensor norm = clip_grad_norm_(expected.parameters(), limit);
          other->step();
          const Tensor mine = grad_norm(net.parameters());
          CHECK(same_bits(mine, norm));
          one->step_clipped(mine, limit);
          one->zero_grad();
          other->zero_grad();
          CHECK(same_values(net, expected));
        }
      }
  Net net = net_of(8);
  AdamW optimizer(net.parameters());
  const Tensor norm = Tensor::scalar(1, {f64});
  CHECK(
      one_line_about(message_of<ShapeError>([&] { optimizer.step_clipped(zeros({2}), 1); }), "step_clipped"));
  for (const double limit : {-1.0, not_a_number})
    CHECK(
        one_line_about(message_of<ValueError>([&] { optimizer.step_clipped(norm, limit); }), "step_clipped"));
}

TEST_CASE("optimizers: a NaN norm makes a clipped step one of NaN, as clipping does") {
  for (const std::string_view name : {"sgd", "adam", "plain"}) {
    Net net = net_of(8);
    const std::unique_ptr<Optimizer> optimizer =
        name == "plain" ? std::make_unique<Plain>(net.parameters()) : optimizer_of(name, net.parameters());
    mean(square(net(numbers({6, 5}, f32, 10)))).backward();
    optimizer->step_clipped(Tensor::scalar(not_a_number), 1);
    for (const Parameter& p : net.parameters())
      for (const double v : doubles(p.data())) CHECK(std::isnan(v));
  }
}

TEST_CASE("GradScaler: a captured step skips and scales as the step itself, and reads nothing on the host") {
  for (const std::string_view name : {"sgd", "adam", "adamw"}) {
    const auto run = [&](bool captured) {
      Net net = net_of(9);
      const auto optimizer = optimizer_of(name, net.parameters());
      GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
      const Step step = [&](std::span<const Tensor> in) {
        const Tensor loss = mean(square(net(in[0])));
        scaler.scale(loss).backward();
        scaler.unscale_(*optimizer);
        clip_grad_norm_(net.parameters(), 1.0);
        const Tensor skipped = scaler.step(*optimizer);
        scaler.update();
        optimizer->zero_grad();
        return std::vector{loss, clone(skipped)};
      };
      std::vector<double> seen;
      std::optional<Program> program;
      for (unsigned i = 0; i < 9; ++i) {
        const Tensor x = mul(numbers({6, 5}, f32, 20 + i), i % 4 == 3 ? infinity : 1.0);
        std::vector<Tensor> out;
        if (!captured || i == 0)
          out = step(std::span(&x, 1));
        else if (!program)
          out = (program = capture(step, {x}))->outputs();
        else
          out = program->replay({x});
        CHECK((out[1].item() != 0) == (i % 4 == 3));
        seen.push_back(scaler.scale_tensor().item());
        for (const Parameter& p : net.parameters())
          for (const double v : doubles(p.data())) seen.push_back(v);
      }
      return seen;
    };
    INFO(name);
    CHECK(run(true) == run(false));
  }
}

TEST_CASE("GradScaler: a loss in f16 is scaled in f32, one in f64 in f64") {
  GradScaler scaler;
  for (const DType dtype : {f16, bf16, f32, f64}) {
    const Tensor scaled = scaler.scale(full({}, 2, {dtype}));
    CHECK(scaled.dtype() == (dtype == f64 ? f64 : f32));
    CHECK(scaled.item() == 131072);
  }
}
