// Optimizers against their formulas, and what they leave alone.
#include "nn/optimizer.h"

#include <cmath>
#include <limits>

#include "autograd/capture/capture.h"
#include "nn/layers.h"
#include "nn/schedules.h"
#include "nn/state_file.h"
#include "tests/runtime/harness.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

Parameter parameter(const Shape& shape, unsigned seed, DType dtype = f32, Device device = Device::cpu()) {
  return Parameter(to(numbers(shape, dtype, seed), device));
}

void give_gradient(Parameter p, unsigned seed) {
  p.set_grad(to(to(numbers(p.shape(), f32, seed), p.tensor().dtype()), p.tensor().device()));
}

/// Adam and AdamW in plain doubles.
struct ByHand {
  AdamOptions o;
  bool decoupled;
  std::vector<double> p, m, v, most;
  int t = 0;
  ByHand(const Parameter& start, AdamOptions o, bool decoupled)
      : o(o), decoupled(decoupled), p(doubles(start.data())), m(p.size()), v(p.size()), most(p.size()) {}
  void step(const std::vector<double>& gradient) {
    ++t;
    for (std::size_t i = 0; i < p.size(); ++i) {
      double g = o.maximize ? -gradient[i] : gradient[i];
      if (decoupled)
        p[i] -= o.lr * o.weight_decay * p[i];
      else
        g += o.weight_decay * p[i];
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
      most[i] = std::max(most[i], v[i]);
      const double scale = o.amsgrad ? most[i] : v[i];
      p[i] -= o.lr * (m[i] / (1 - std::pow(o.beta1, t))) /
              (std::sqrt(scale / (1 - std::pow(o.beta2, t))) + o.eps);
    }
  }
};

double far(const Parameter& p, const std::vector<double>& expected) {
  return distance(to(p.data(), f64), Tensor::from(expected, p.shape(), Device::cpu()));
}

}  // namespace

TEST_CASE("optimizers: Adam and AdamW follow their formulas, in every dtype and on every device") {
  for (bool decoupled : {false, true})
    for (DType dtype : {f32, f64, bf16})
      for (Device device : {Device::cpu(), Device::cpu(1)}) {
        INFO(decoupled << name_of(dtype) << to_string(device));
        const AdamOptions o{.lr = 0.03, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1};
        const Parameter p = parameter({17}, 1, dtype, device);
        ByHand hand(p, o, decoupled);
        const std::unique_ptr<Optimizer> optimizer =
            decoupled
                ? std::unique_ptr<Optimizer>(new AdamW({p}, {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay}))
                : std::unique_ptr<Optimizer>(new Adam({p}, o));
        for (unsigned k = 0; k < 10; ++k) {
          give_gradient(p, 20 + k);
          optimizer->step();
          hand.step(doubles(p.grad()));
        }
        CHECK(far(p, hand.p) < (dtype == f64 ? 1e-12 : dtype == f32 ? 1e-5 : 0.1));
        CHECK(p.tensor().device() == device);
      }
}

TEST_CASE(
    "optimizers: amsgrad and maximize follow their formulas, with masters and without, as lists and not") {
  for (const bool decoupled : {false, true})
    for (const DType dtype : {f32, f64, bf16})
      for (const Masters masters : {Masters::none, Masters::in_f32})
        for (const bool maximize : {false, true})
          for (const bool foreach : {false, true}) {
            if (masters == Masters::in_f32 && dtype == f64) continue;
            INFO(decoupled << name_of(dtype) << maximize << foreach << (masters == Masters::in_f32));
            const AdamOptions o{.lr = 0.03,
                                .beta1 = 0.8,
                                .beta2 = 0.6,
                                .weight_decay = 0.1,
                                .foreach = foreach,
                                .masters = masters,
                                .amsgrad = true,
                                .maximize = maximize};
            const Parameter p = parameter({17}, 1, dtype), q = parameter({3}, 2, dtype);
            ByHand hand(p, o, decoupled);
            const std::unique_ptr<Optimizer> optimizer =
                decoupled ? std::unique_ptr<Optimizer>(
                                new AdamW({p, q}, {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, foreach,
                                                   masters, o.amsgrad, maximize}))
                          : std::unique_ptr<Optimizer>(new Adam({p, q}, o));
            for (unsigned k = 0; k < 10; ++k) {
              give_gradient(p, 20 + k);
              if (k > 3) Parameter(p).set_grad(mul(p.grad(), 0.1));  // so that the largest is of long ago
              optimizer->step();
              hand.step(doubles(p.grad()));
            }
            CHECK(far(p, hand.p) < (dtype == f64 ? 1e-12 : dtype == f32 ? 1e-5 : 0.1));
            if (dtype == f64)
              CHECK(distance(optimizer->state_dict().at("state.0.max_exp_avg_sq"),
                             Tensor::from(hand.most, {17}, Device::cpu())) < 1e-12);
          }
}

TEST_CASE("optimizers: Lion and Adagrad follow their formulas") {
  for (const DType dtype : {f64, f32})
    for (const bool foreach : {false, true})
      for (const double decay : {0.0, 0.1}) {
        INFO(name_of(dtype) << " foreach " << foreach << " decay " << decay);
        Parameter p = parameter({17}, 1, dtype), q = parameter({17}, 1, dtype);
        Lion lion(std::vector{p},
                  {.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = decay, .foreach = foreach});
        Adagrad adagrad(std::vector{q}, {.lr = 0.1,
                                         .lr_decay = 0.25,
                                         .weight_decay = decay,
                                         .initial_accumulator_value = 0.5,
                                         .foreach = foreach});
        std::vector<double> of_lion = doubles(p.data()), average(17, 0.0), of_adagrad = of_lion, sum(17, 0.5);
        for (unsigned step = 1; step <= 10; ++step) {
          give_gradient(p, step);
          q.set_grad(clone(p.grad()));
          const std::vector<double> gradient = doubles(p.grad());
          for (std::size_t i = 0; i < 17; ++i) {
            const double mixed = 0.8 * average[i] + 0.2 * gradient[i];
            of_lion[i] = of_lion[i] * (1 - 0.01 * decay) - 0.01 * (mixed > 0 ? 1 : mixed < 0 ? -1 : 0);
            average[i] = 0.95 * average[i] + 0.05 * gradient[i];
            const double g = gradient[i] + decay * of_adagrad[i];
            sum[i] += g * g;
            of_adagrad[i] -= 0.1 / (1 + (step - 1) * 0.25) * g / (std::sqrt(sum[i]) + 1e-10);
          }
          lion.step();
          adagrad.step();
        }
        CHECK(far(p, of_lion) < (dtype == f64 ? 1e-12 : 1e-5));
        CHECK(far(q, of_adagrad) < (dtype == f64 ? 1e-12 : 1e-5));
        CHECK(lion.state_dict().contains("state.0.exp_avg"));
        CHECK(adagrad.state_dict().at("state.0.step").item() == 10);
      }
  CHECK_THROWS_AS(Adagrad({parameter({2}, 1)}, {.initial_accumulator_value = -1}), ValueError);
  CHECK_THROWS_AS(Lion({parameter({2}, 1)}, {.beta1 = 1}), ValueError);
}

TEST_CASE("optimizers: maximize steps as by gradients of the other sign, to the bit") {
  for (const DType dtype : {f32, f64, bf16, f16}) {
    const auto make = [](const Parameter& p, bool up) {
      std::vector<std::unique_ptr<Optimizer>> all;
      for (const bool more : {false, true}) {
        all.push_back(std::make_unique<Sgd>(std::vector{p}, SgdOptions{.lr = 0.1,
                                                                       .momentum = more ? 0.9 : 0,
                                                                       .weight_decay = 0.1,
                                                                       .nesterov = more,
                                                                       .maximize = up}));
        all.push_back(std::make_unique<Rmsprop>(
            std::vector{p}, RmspropOptions{.momentum = more ? 0.5 : 0, .centered = more, .maximize = up}));
        all.push_back(
            std::make_unique<Adam>(std::vector{p}, AdamOptions{.weight_decay = 0.1, .maximize = up}));
        all.push_back(std::make_unique<AdamW>(std::vector{p}, AdamWOptions{.amsgrad = more, .maximize = up}));
        all.push_back(
            std::make_unique<Lion>(std::vector{p}, LionOptions{.weight_decay = 0.1, .maximize = up}));
        all.push_back(std::make_unique<Adagrad>(std::vector{p},
                                                AdagradOptions{.lr_decay = more ? 0.5 : 0, .maximize = up}));
      }
      return all;
    };
    for (std::size_t kind = 0; kind < 12; ++kind) {
      INFO(name_of(dtype) << " " << kind);
      Parameter p = parameter({33}, 1, dtype), q = parameter({33}, 1, dtype);
      const auto up = std::move(make(p, true)[kind]), down = std::move(make(q, false)[kind]);
      for (unsigned k = 0; k < 4; ++k) {
        give_gradient(p, 30 + k);
        q.set_grad(neg(p.grad()));
        up->step();
        down->step();
        CHECK(same_bits(p.data(), q.data()));
      }
      const StateDict a = up->state_dict(), b = down->state_dict();
      for (const auto& [name, t] : a)
        if (name.starts_with("state.")) CHECK(same_bits(t, b.at(name)));
      CHECK(a.at("group.0.maximize").item() == 1);
    }
  }
}

TEST_CASE(
    "optimizers: amsgrad is an option of groups, whose state has PyTorch's names and goes on to the bit") {
  const auto named = [](const Optimizer& o, const char* name) { return o.state_dict().contains(name); };
  for (const Masters masters : {Masters::none, Masters::in_f32}) {
    const DType dtype = masters == Masters::none ? f32 : bf16;
    const auto make = [&](const Parameter& a, const Parameter& b) {
      return std::make_unique<Adam>(
          std::vector<ParamGroup>{{.params = {a}, .options = {{"amsgrad", 1}}}, {.params = {b}}},
          AdamOptions{.lr = 0.1, .beta2 = 0.5, .masters = masters});
    };
    Parameter a = parameter({5}, 1, dtype), b = parameter({4}, 2, dtype), lone = parameter({4}, 2, dtype);
    const auto both = make(a, b);
    Adam plain({lone}, {.lr = 0.1, .beta2 = 0.5, .masters = masters});
    const auto step = [&](Optimizer& o, unsigned k) {
      give_gradient(a, k);
      give_gradient(b, 10 + k);
      o.step();
    };
    for (unsigned k = 0; k < 3; ++k) {
      step(*both, k);
      give_gradient(lone, 10 + k);
      plain.step();
    }
    CHECK(same_bits(b.data(), lone.data()));  // the group without it steps as without it
    CHECK(named(*both, "state.0.max_exp_avg_sq"));
    CHECK_FALSE(named(plain, "state.0.max_exp_avg_sq"));
    Parameter c(clone(a.data())), d(clone(b.data()));
    const auto other = make(c, d);
    StateDict state;
    for (const auto& [name, t] : both->state_dict()) state.emplace_back(name, clone(t));
    other->load_state_dict(state);
    step(*both, 7);
    c.set_grad(clone(a.grad()));
    d.set_grad(clone(b.grad()));
    other->step();
    CHECK(same_bits(a.data(), c.data()));
    CHECK(same_bits(b.data(), d.data()));
    Adam more({lone}, {.masters = masters, .amsgrad = true});
    more.load_state_dict(plain.state_dict());  // with the options of its groups
    CHECK(more.option("amsgrad") == 0);
    StateDict lacks = state;
    std::erase_if(lacks, [](const auto& entry) { return entry.first == "state.0.max_exp_avg_sq"; });
    CHECK(one_line_about(message_of<ValueError>([&] { other->load_state_dict(lacks); }), "max_exp_avg_sq"));
    both->set_option("amsgrad", 0);
    CHECK_FALSE(named(*both, "state.0.max_exp_avg_sq"));
    step(*both, 8);
    CHECK_THROWS_AS(both->set_option("amsgrad", 0.5), ValueError);
  }
}

TEST_CASE("optimizers: in bf16 a second moment does not fall, with masters it does") {
  for (const Masters masters : {Masters::none, Masters::in_f32}) {
    Parameter p = parameter({8}, 1, bf16);
    Adam adam({p}, {.masters = masters});
    p.set_grad(ones({8}, {bf16}));
    adam.step();
    const Tensor first = clone(adam.state_dict().at("state.0.exp_avg_sq"));
    p.set_grad(zeros({8}, {bf16}));
    for (int k = 0; k < 50; ++k) adam.step();
    CHECK(same_bits(adam.state_dict().at("state.0.exp_avg_sq"), first) == (masters == Masters::none));
  }
}

TEST_CASE("optimizers: SGD follows its formula, momentum starting as the gradient") {
  for (double momentum : {0.0, 0.9})
    for (DType dtype : {f32, f64})
      for (Device device : {Device::cpu(), Device::cpu(1)}) {
        const Parameter p = parameter({5}, 1, dtype, device);
        std::vector<double> x = doubles(p.data()), v;
        Sgd sgd({p}, {0.1, momentum, 0.01});
        for (unsigned k = 0; k < 5; ++k) {
          give_gradient(p, 30 + k);
          std::vector<double> g = doubles(p.grad());
          for (std::size_t i = 0; i < g.size(); ++i) g[i] += 0.01 * x[i];
          if (v.empty())
            v = g;
          else
            for (std::size_t i = 0; i < g.size(); ++i) v[i] = momentum * v[i] + g[i];
          for (std::size_t i = 0; i < g.size(); ++i) x[i] -= 0.1 * v[i];
          sgd.step();
        }
        CHECK(far(p, x) < (dtype == f64 ? 1e-12 : 1e-5));
      }
}

TEST_CASE("optimizers: a parameter without a gradient is left alone, decay and step count included") {
  const Parameter a = parameter({3}, 1), b = parameter({3}, 2), never = parameter({3}, 3);
  const Tensor untouched = clone(never.data());
  AdamW adam({a, b, never}, {.lr = 0.1, .weight_decay = 0.5});
  ByHand hand(b, {.lr = 0.1, .weight_decay = 0.5}, true);
  for (unsigned k = 0; k < 6; ++k) {
    adam.zero_grad();
    give_gradient(a, k);
    if (k % 2 == 1) {
      give_gradient(b, 10 + k);
      hand.step(doubles(b.grad()));
    }
    const Tensor before = clone(b.data());
    adam.step();
    if (k % 2 == 0) CHECK(same_bits(b.data(), before));
  }
  CHECK(far(b, hand.p) < 1e-5);  // three steps counted, not six
  CHECK(same_bits(never.data(), untouched));
  for (const auto& [name, t] : adam.state_dict()) CHECK_FALSE(name.starts_with("state.2"));
}

TEST_CASE("optimizers: groups have rates and decays of their own, and may be empty") {
  const Parameter a = parameter({3}, 1), b = parameter({3}, 2);
  const Tensor a0 = clone(a.data()), b0 = clone(b.data());
  Sgd sgd(std::vector<ParamGroup>{{{a}, 1.0, 0.0}, {{}, 5.0}, {{b}, std::nullopt, 0.5}}, {.lr = 0.1});
  CHECK(sgd.group_count() == 3);
  CHECK(sgd.lr(1) == 5);
  give_gradient(a, 5);
  give_gradient(b, 6);
  sgd.step();
  CHECK(distance(a.data(), sub(a0, a.grad())) < 1e-6);
  CHECK(distance(b.data(), sub(b0, mul(add(b.grad(), mul(b0, 0.5)), 0.1))) < 1e-6);
  sgd.set_lr(2, 0.7);
  CHECK(sgd.lr(0) == 1);
  CHECK(sgd.lr(2) == 0.7);
  sgd.set_lr(0.2);
  CHECK(sgd.lr(1) == 0.2);
  CHECK_THROWS_AS(sgd.set_lr(3, 1), ValueError);
  CHECK_THROWS_AS(sgd.lr(3), ValueError);
  CHECK_THROWS_AS(sgd.parameters(3), ValueError);
  CHECK(one_line_about(message_of<ValueError>([&] { Sgd(std::vector<ParamGroup>{{{a}}, {{a}}}); }),
                       "optimizer"));
  CHECK(one_line_about(message_of<ValueError>([&] { Sgd({Parameter{}}); }), "optimizer"));
  CHECK_THROWS_AS(Adam({a}, {.beta1 = 1}), ValueError);
  CHECK_THROWS_AS(Sgd({a}, {.lr = -1}), ValueError);
  Sgd nothing(std::vector<Parameter>{});
  CHECK_NOTHROW(nothing.step());
  CHECK_NOTHROW(nothing.zero_grad());
}

TEST_CASE("optimizers: zero_grad leaves none, or zeros in place") {
  const Parameter a = parameter({3}, 1), b = parameter({3}, 2);
  Sgd sgd({a, b});
  give_gradient(a, 3);
  const Tensor held = a.grad();
  sgd.zero_grad(ZeroGrad::to_zero);
  CHECK(a.grad().is(held));
  CHECK(same_bits(held, zeros({3})));
  CHECK_FALSE(b.grad().defined());
  sgd.zero_grad();
  CHECK_FALSE(a.grad().defined());
}

TEST_CASE("optimizers: empty parameters, views as gradients and gradients of another dtype are fine") {
  const Parameter none = parameter({0, 3}, 1), m = parameter({2, 3}, 2), h = parameter({4}, 3);
  const Tensor m0 = clone(m.data()), h0 = clone(h.data());
  for (bool adam : {false, true}) {
    Parameter n = none, p = m, q = h;
    n.set_grad(zeros({0, 3}));
    p.set_grad(transpose(numbers({3, 2}, f32, 4), 0, 1));
    q.set_grad(numbers({4}, f64, 5));
    std::unique_ptr<Optimizer> o = adam ? std::unique_ptr<Optimizer>(new Adam({n, p, q}))
                                        : std::unique_ptr<Optimizer>(new Sgd({n, p, q}, {.lr = 1}));
    o->step();
    if (adam) continue;
    CHECK(distance(m.data(), sub(m0, p.grad())) < 1e-6);
    CHECK(distance(h.data(), sub(h0, to(q.grad(), f32))) < 1e-6);
  }
}

TEST_CASE(
    "optimizers: masters step in f32, and 16-bit parameters, which f32 ones may stand beside, are them "
    "rounded") {
  for (const DType dtype : {bf16, f16})
    for (const bool foreach : {true, false})
      for (const bool decoupled : {false, true}) {
        INFO(name_of(dtype) << (foreach ? ", as a list" : ", one by one"));
        std::vector<Parameter> narrow, wide;
        for (unsigned i = 0; i < 4; ++i) {
          narrow.push_back(parameter({static_cast<std::int64_t>(i), 9}, i, i == 2 ? f32 : dtype));
          wide.emplace_back(to(clone(narrow[i].data()), f32));
        }
        const auto make = [&](std::vector<Parameter> params, Masters masters) -> std::unique_ptr<Adam> {
          const double decay = 0.1, rate = 1e-3;
          if (!decoupled)
            return std::make_unique<Adam>(
                params,
                AdamOptions{.lr = rate, .weight_decay = decay, .foreach = foreach, .masters = masters});
          return std::make_unique<AdamW>(
              params,
              AdamWOptions{.lr = rate, .weight_decay = decay, .foreach = foreach, .masters = masters});
        };
        auto one = make(narrow, Masters::in_f32), other = make(wide, Masters::none);
        for (unsigned step = 0; step < 6; ++step) {
          for (unsigned i = 0; i < 4; ++i) {
            give_gradient(narrow[i], 10 * step + i);
            wide[i].set_grad(to(narrow[i].grad(), f32));
          }
          if (step == 3) {  // a saved one goes on from its masters
            auto again = make(narrow, Masters::in_f32);
            again->load_state_dict(one->state_dict());
            one = std::move(again);
          }
          one->step();
          other->step();
          for (unsigned i = 0; i < 4; ++i)
            CHECK(same_bits(narrow[i].data(), to(wide[i].data(), narrow[i].data().dtype())));
        }
      }
  AdamW optimizer(std::vector{parameter({2}, 1, f64)}, {.masters = Masters::in_f32});
  give_gradient(optimizer.parameters(0)[0], 2);
  CHECK(one_line_about(message_of<DTypeError>([&] { optimizer.step(); }), "masters"));
}

TEST_CASE("optimizers: a saved one goes on to the same bits") {
  const TempDirectory folder;
  for (int kind = 0; kind < 7; ++kind) {
    INFO(kind);
    const auto make = [kind](const std::vector<Parameter>& p) -> std::unique_ptr<Optimizer> {
      std::vector<ParamGroup> groups{{{p[0]}}, {{p[1], p[2]}, 0.05}};
      if (kind == 0) return std::make_unique<AdamW>(groups);
      if (kind == 3) return std::make_unique<Rmsprop>(groups);
      if (kind == 4)
        return std::make_unique<Rmsprop>(groups, RmspropOptions{.momentum = 0.9, .centered = true});
      if (kind == 5) return std::make_unique<Lion>(groups, LionOptions{.weight_decay = 0.1});
      if (kind == 6) return std::make_unique<Adagrad>(groups, AdagradOptions{.lr_decay = 0.5});
      return std::make_unique<Sgd>(groups, SgdOptions{.lr = 0.1, .momentum = kind == 1 ? 0.9 : 0.0});
    };
    const std::vector<Parameter> a = {parameter({3}, 1), parameter({2, 2}, 2), parameter({1}, 3)};
    const auto optimizer = make(a);
    const auto step = [](const std::vector<Parameter>& list, Optimizer& o, unsigned k) {
      o.zero_grad();
      give_gradient(list[0], k);
      if (k > 2) give_gradient(list[1], 100 + k);
      o.step();
    };
    for (unsigned k = 0; k < 4; ++k) step(a, *optimizer, k);
    optimizer->set_lr(1, 0.03);
    save_state(folder / "o.safetensors", optimizer->state_dict());
    std::vector<Parameter> b;
    for (const Parameter& p : a) b.emplace_back(clone(p.data()));
    const auto other = make(b);
    other->load_state_dict(load_state(folder / "o.safetensors"));
    CHECK(other->lr(1) == 0.03);
    for (unsigned k = 4; k < 8; ++k) {
      step(a, *optimizer, k);
      step(b, *other, k);
    }
    for (std::size_t i = 0; i < a.size(); ++i) CHECK(same_bits(a[i].data(), b[i].data()));
    const StateDict x = optimizer->state_dict(), y = other->state_dict();
    REQUIRE(x.size() == y.size());
    for (std::size_t i = 0; i < x.size(); ++i)
      CHECK((x[i].first == y[i].first && same_bits(x[i].second, y[i].second)));
  }
}

TEST_CASE("optimizers: a state that is given away is kept without a copy, and what others hold is copied") {
  const Parameter p = parameter({30}, 1), q = parameter({30}, 1);
  Adam source({p}), holder({q});
  give_gradient(p, 2);
  source.step();
  const auto copied = [&] {
    StateDict state;
    for (const auto& [name, t] : source.state_dict()) state.emplace_back(name, clone(t));
    return state;
  };
  const auto pointers = [](const StateDict& state) {
    std::vector<const void*> all;
    for (const auto& [name, t] : state)
      if (!name.starts_with("group.")) all.push_back(t.raw());
    return all;
  };
  StateDict given = copied();
  const auto theirs = pointers(given);
  SECTION("given away") {
    holder.load_state_dict(std::move(given));
    CHECK(pointers(holder.state_dict()) == theirs);
  }
  SECTION("held by the caller") {
    holder.load_state_dict(given);
    for (const void* pointer : pointers(holder.state_dict()))
      CHECK(std::ranges::find(theirs, pointer) == theirs.end());
  }
  SECTION("held by another optimizer, or under two names") {
    holder.load_state_dict(source.state_dict());
    for (const void* pointer : pointers(holder.state_dict()))
      for (const void* other : pointers(source.state_dict())) CHECK(pointer != other);
    StateDict twice = copied();
    const auto entry = [&](std::string_view name) {
      return std::ranges::find(twice, name, [](const auto& e) -> std::string_view { return e.first; });
    };
    entry("state.0.exp_avg")->second = entry("state.0.exp_avg_sq")->second;
    Adam another({parameter({30}, 1)});
    another.load_state_dict(std::move(twice));
    const auto own = pointers(another.state_dict());
    CHECK(own[0] != own[1]);
  }
  SECTION("where there is state already, it stays where it is") {
    give_gradient(q, 5);
    holder.step();
    const auto own = pointers(holder.state_dict());
    holder.load_state_dict(std::move(given));
    CHECK(pointers(holder.state_dict()) == own);
  }
  for (const auto& [name, t] : source.state_dict())
    if (name == "state.0.exp_avg_sq") CHECK(same_bits(t, holder.state_dict().at(name)));
}

TEST_CASE("optimizers: a state that does not fit changes nothing") {
  const Parameter p = parameter({3}, 1);
  Adam adam({p});
  give_gradient(p, 2);
  adam.step();
  StateDict before;
  for (const auto& [name, t] : adam.state_dict()) before.emplace_back(name, clone(t));
  const auto refuses = [&](const StateDict& state, const std::string& word) {
    std::string text = "(nothing was thrown)";
    try {
      adam.load_state_dict(state);
    } catch (const Error& error) {
      text = error.what();
    }
    INFO(text);
    CHECK(one_line_about(text, "optimizer"));
    CHECK(one_line_about(text, word));
    const StateDict now = adam.state_dict();
    REQUIRE(now.size() == before.size());
    for (std::size_t i = 0; i < now.size(); ++i) CHECK(same_bits(now[i].second, before[i].second));
  };
  const auto changed = [&](std::string_view at, const std::string& name, const Tensor& t) {
    StateDict state;
    for (const auto& [n, v] : before) {
      const bool beta = n.starts_with("group.0.beta"),
                 flag = n.ends_with("amsgrad") || n.ends_with("maximize");
      state.emplace_back(n == at ? name : n, n == at ? t
                                                     : full(v.shape(),
                                                            flag   ? 0
                                                            : beta ? 0.5
                                                                   : 5,
                                                            {v.dtype()}));
    }
    return state;
  };
  refuses(changed("group.0.lr", "group.7.lr", Tensor::scalar(1, {f64})), "group");
  refuses(changed("state.0.exp_avg", "state.0.exp_avg", zeros({4})), "state.0.exp_avg");
  refuses(changed("state.0.exp_avg_sq", "state.0.exp_avg_squared", zeros({3})), "state.0.exp_avg_sq");
  refuses(changed("state.0.exp_avg", "state.9.exp_avg", zeros({3})), "no parameter");
  refuses(changed("state.0.exp_avg", "group.0.lr", Tensor::scalar(1, {f64})), "twice");
  refuses(changed("group.0.lr", "group.0.lr", zeros({2}, {f64})), "group.0.lr");
  refuses(changed("group.0.lr", "group.0.lr", Tensor::scalar(-1, {f64})), "group.0.lr -1");
  refuses(changed("group.0.beta1", "group.0.beta1", Tensor::scalar(1, {f64})), "group.0.beta1 1");
  refuses(changed("group.0.eps", "group.0.momentum", Tensor::scalar(1, {f64})), "no parameter");
}

TEST_CASE("clip_grad_norm_: one norm for every order and cut, and a limit on it") {
  const Tensor whole = numbers({1003}, f32, 1, -3, 3);
  const auto norm_of = [&](std::vector<std::pair<std::int64_t, std::int64_t>> cuts) {
    std::vector<Parameter> params;
    for (const auto& [start, size] : cuts) {
      params.push_back(parameter({size}, 9));
      params.back().set_grad(clone(narrow(whole, 0, start, size)));
      params.push_back(parameter({2}, 8));  // has none
    }
    const double norm = clip_grad_norm_(params, 2).item();
    double after = 0;
    for (const Parameter& p : params)
      if (p.grad().defined())
        for (double v : doubles(p.grad())) after += v * v;
    CHECK(std::abs(std::sqrt(after) - 2) < 1e-4);
    return norm;
  };
  const double norm = norm_of({{0, 1003}});
  CHECK(norm_of({{500, 503}, {0, 500}}) == norm);
  CHECK(norm_of({{0, 1}, {1, 7}, {8, 995}}) == norm);
  Parameter small = parameter({3}, 1);
  small.set_grad(full({3}, 0.1));
  clip_grad_norm_(std::span(&small, 1), 100);
  CHECK(same_bits(small.grad(), full({3}, 0.1)));
  small.set_grad({});
  CHECK(clip_grad_norm_(std::span(&small, 1), 1).item() == 0);
}

TEST_CASE("clip_grad_norm_: a limit of 0, infinities and NaN do what they do in PyTorch, in every dtype") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  const auto clipped = [](DType dtype, std::vector<double> values, double limit) {
    std::vector<Parameter> params;
    for (double v : values) {
      params.push_back(parameter({1}, 1, dtype));
      params.back().set_grad(full({1}, v, {dtype}));
    }
    const double norm = clip_grad_norm_(params, limit).item();
    std::vector<double> after{norm};
    for (const Parameter& p : params) after.push_back(doubles(p.grad())[0]);
    return after;
  };
  const auto same = [](const std::vector<double>& a, const std::vector<double>& b) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](double x, double y) {
             return x == y || (std::isnan(x) && std::isnan(y));
           });
  };
  for (DType dtype : {f32, f64, f16, bf16}) {
    INFO(name_of(dtype));
    CHECK(same(clipped(dtype, {3, 4}, 0), {5, 0, 0}));
    CHECK(same(clipped(dtype, {0, 0}, 0), {0, 0, 0}));
    CHECK(same(clipped(dtype, {3, nan, 4}, 1), {nan, nan, nan, nan}));
    CHECK(same(clipped(dtype, {3, nan}, 100), {nan, nan, nan}));
    CHECK(same(clipped(dtype, {3, -inf}, 1), {inf, 0, nan}));
    CHECK(same(clipped(dtype, {3, inf, nan}, 1), {nan, nan, nan, nan}));
    CHECK(same(clipped(dtype, {3, 4}, inf), {5, 3, 4}));
  }
  Parameter p = parameter({1}, 1);
  for (double limit : {-1.0, nan, -inf})
    CHECK_THROWS_AS(clip_grad_norm_(std::span(&p, 1), limit), ValueError);
}

TEST_CASE("optimizers: parameters in 16 bits without masters step as f32 copies, rounded once") {
  using Make = std::function<std::unique_ptr<Optimizer>(std::vector<Parameter>, bool foreach)>;
  const std::vector<Make> makes = {
      [](auto params, bool foreach) {
        return std::make_unique<AdamW>(params, AdamWOptions{.lr = 1e-2, .foreach = foreach});
      },
      [](auto params, bool foreach) {
        return std::make_unique<Sgd>(params, SgdOptions{.lr = 1e-2, .momentum = 0.9, .foreach = foreach});
      },
      [](auto params, bool foreach) {
        return std::make_unique<Rmsprop>(params, RmspropOptions{.lr = 1e-2, .foreach = foreach});
      },
      [](auto params, bool foreach) {
        return std::make_unique<Lion>(params, LionOptions{.lr = 1e-2, .foreach = foreach});
      },
      [](auto params, bool foreach) {
        return std::make_unique<Adagrad>(params, AdagradOptions{.lr = 1e-2, .foreach = foreach});
      }};
  for (const DType dtype : {bf16, f16})
    for (const Make& make : makes) {
      std::vector<Parameter> listed, alone, wide;
      for (unsigned i = 0; i < 5; ++i) {
        listed.push_back(parameter({static_cast<std::int64_t>(i), 33}, i, i == 2 ? f32 : dtype));
        alone.emplace_back(clone(listed[i].data()));
        wide.emplace_back(to(clone(listed[i].data()), f32));
      }
      const auto in_list = make(listed, true), one_by_one = make(alone, false), in_f32 = make(wide, true);
      for (unsigned step = 0; step < 3; ++step) {
        for (unsigned i = 0; i < 5; ++i) {
          give_gradient(listed[i], 10 * step + i);
          alone[i].set_grad(clone(listed[i].grad()));
          wide[i].set_grad(to(listed[i].grad(), f32));
        }
        for (const auto& each : {in_list.get(), one_by_one.get(), in_f32.get()}) each->step();
        for (unsigned i = 0; i < 5; ++i) {
          CHECK(same_bits(listed[i].data(), alone[i].data()));
          if (step == 0) CHECK(same_bits(listed[i].data(), to(wide[i].data(), listed[i].data().dtype())));
        }
      }
    }
}

TEST_CASE("optimizers: a loaded state is kept in no memory that a caller lent") {
  using Make = std::function<std::unique_ptr<Optimizer>(std::vector<Parameter>)>;
  const std::vector<Make> makes = {
      [](auto p) { return std::make_unique<AdamW>(p, AdamWOptions{.lr = 1e-2}); },
      [](auto p) { return std::make_unique<Sgd>(p, SgdOptions{.lr = 1e-2, .momentum = 0.9}); },
      [](auto p) { return std::make_unique<Rmsprop>(p, RmspropOptions{.lr = 1e-2, .momentum = 0.9}); },
      [](auto p) { return std::make_unique<Lion>(p); }, [](auto p) { return std::make_unique<Adagrad>(p); }};
  for (const DType dtype : {f64, f32, bf16})
    for (const Make& make : makes)
      for (const bool stepped : {false, true}) {  // into a state that is there, and into none
        std::vector<Parameter> from{parameter({5}, 1, dtype)}, into{parameter({5}, 1, dtype)};
        const auto source = make(from), target = make(into);
        give_gradient(from[0], 1);
        source->step();
        give_gradient(into[0], 1);
        if (stepped) target->step();
        std::vector<Tensor> memory, before;
        StateDict lent;
        for (const auto& [name, value] : source->state_dict()) {
          memory.push_back(clone(value));
          before.push_back(clone(value));
          lent.emplace_back(name, from_blob(memory.back().raw(), value.shape(), value.dtype()));
        }
        target->load_state_dict(std::move(lent));
        for (int i = 0; i < 3; ++i) target->step();
        for (std::size_t i = 0; i < memory.size(); ++i) CHECK(same_bits(memory[i], before[i]));
      }
}

TEST_CASE(
    "optimizers: parameters in 16 bits over one memory, and gradients of integers, step as by themselves") {
  const Tensor memory = numbers({9}, bf16, 1);
  for (const bool foreach : {true, false}) {
    const Tensor here = clone(memory);
    std::vector<Parameter> both = {Parameter(narrow(here, 0, 0, 6)), Parameter(narrow(here, 0, 3, 6))};
    for (Parameter& p : both) p.set_grad(full({6}, 2, {i64}));
    Sgd integers(both, {.lr = 0.5, .foreach = foreach});
    integers.step();
    CHECK(same_bits(narrow(here, 0, 0, 3), sub(narrow(memory, 0, 0, 3), 1)));
    for (Parameter& p : both) p.set_grad(full({6}, 2, {bf16}));
    integers.step();
    CHECK(same_bits(narrow(here, 0, 6, 3), sub(sub(narrow(memory, 0, 6, 3), 1), 1)));
  }
}

TEST_CASE("optimizers: with a beta of 0 a moment is this step's gradient, whatever came before") {
  for (DType dtype : {f32, f64, bf16})
    for (bool decoupled : {false, true}) {
      INFO(name_of(dtype) << decoupled);
      const Parameter p = parameter({9}, 1, dtype), fresh = parameter({9}, 1, dtype);
      const AdamOptions o{.lr = 0, .beta1 = 0, .beta2 = 0};
      const auto make = [&](const Parameter& of) -> std::unique_ptr<Optimizer> {
        if (decoupled) return std::make_unique<AdamW>(std::vector{of}, AdamWOptions{0, 0, 0});
        return std::make_unique<Adam>(std::vector{of}, o);
      };
      const auto one = make(p), other = make(fresh);
      Parameter(p).set_grad(full({9}, 1e8, {dtype}));
      one->step();
      for (const Parameter& each : {p, fresh}) give_gradient(each, 4);
      one->step();
      other->step();
      const StateDict a = one->state_dict(), b = other->state_dict();
      for (const char* name : {"state.0.exp_avg", "state.0.exp_avg_sq"})
        CHECK(same_bits(a.at(name), b.at(name)));
      CHECK(same_bits(a.at("state.0.exp_avg"), p.grad()));
    }
}

TEST_CASE("optimizers: rates, decays and numbers that cannot be are refused wherever they are set") {
  const Parameter p = parameter({3}, 1);
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (double bad : {-1.0, inf, -inf, nan}) {
    INFO(bad);
    CHECK_THROWS_AS(Adam({p}, {.lr = bad}), ValueError);
    CHECK_THROWS_AS(Adam({p}, {.beta1 = bad}), ValueError);
    CHECK_THROWS_AS(Adam({p}, {.beta2 = bad}), ValueError);
    CHECK_THROWS_AS(Adam({p}, {.eps = bad}), ValueError);
    CHECK_THROWS_AS(AdamW({p}, {.weight_decay = bad}), ValueError);
    CHECK_THROWS_AS(Sgd({p}, {.lr = bad}), ValueError);
    CHECK_THROWS_AS(Sgd({p}, {.momentum = bad}), ValueError);
    CHECK_THROWS_AS(Sgd({p}, {.dampening = bad}), ValueError);
    CHECK_THROWS_AS(Rmsprop({p}, {.alpha = bad}), ValueError);
    CHECK_THROWS_AS(Rmsprop({p}, {.eps = bad}), ValueError);
    CHECK_THROWS_AS(Rmsprop({p}, {.momentum = bad}), ValueError);
    CHECK_THROWS_AS(Sgd({p}, {.weight_decay = bad}), ValueError);
    CHECK_THROWS_AS(Sgd(std::vector<ParamGroup>{{{p}, bad}}), ValueError);
    CHECK_THROWS_AS(Sgd(std::vector<ParamGroup>{{{p}, 0.1, bad}}), ValueError);
    Sgd sgd({p}, {.lr = 0.1});
    CHECK_THROWS_AS(sgd.set_lr(bad), ValueError);
    CHECK_THROWS_AS(sgd.set_lr(0, bad), ValueError);
    CHECK_THROWS_AS(sgd.load_state_dict({{"group.0.lr", Tensor::scalar(bad, {f64})}}), ValueError);
    CHECK(sgd.lr() == 0.1);
  }
  Sgd sgd({p}, {.lr = 0});
  sgd.set_lr(0);
  CHECK(one_line_about(message_of<ValueError>([&] { Sgd({p, p}); }), "list it once"));
}

TEST_CASE("optimizers: a gradient of another shape is refused before anything is stepped") {
  for (DType dtype : {f32, f64}) {
    const Parameter a = parameter({3}, 1, dtype), b = parameter({2, 3}, 2, dtype);
    const Tensor before = clone(a.data());
    give_gradient(a, 3);
    Parameter(b).set_grad(ones({3}, {dtype}));
    Sgd sgd({a, b}, {.lr = 1, .momentum = 0.5});
    Adam adam({a, b});
    for (Optimizer* o : {static_cast<Optimizer*>(&sgd), static_cast<Optimizer*>(&adam)}) {
      CHECK(one_line_about(message_of<ShapeError>([&] { o->step(); }), "(2, 3)"));
      for (const auto& [name, t] : o->state_dict()) CHECK(name.starts_with("group."));
    }
    CHECK(same_bits(a.data(), before));
  }
}

TEST_CASE("optimizers: two over one parameter step it in turn, each with state of its own") {
  const Parameter p = parameter({3}, 1), q = parameter({3}, 1);
  Sgd first({p}, {.lr = 0.1, .momentum = 0.9}), second({p}, {.lr = 0.2, .momentum = 0.5});
  Tensor x = clone(q.data()), v1 = zeros({3}), v2 = zeros({3});
  for (unsigned k = 0; k < 4; ++k) {
    give_gradient(p, k);
    first.step();
    second.step();
    v1 = add(mul(v1, 0.9), p.grad());
    v2 = add(mul(v2, 0.5), p.grad());
    x = sub(sub(x, mul(v1, 0.1)), mul(v2, 0.2));
  }
  CHECK(distance(p.data(), x) < 1e-5);
  first.zero_grad();
  CHECK_FALSE(p.grad().defined());
  CHECK_NOTHROW(second.step());
}

TEST_CASE("schedules: warm up, come down by a cosine, stay") {
  const CosineSchedule schedule{.lr = 1, .min_lr = 0.1, .warmup = 10, .steps = 110};
  CHECK(schedule(0) == Approx(0.1));
  for (int i = 1; i < 10; ++i) CHECK(schedule(i) > schedule(i - 1));
  CHECK(schedule(10) == Approx(1));
  for (int i = 11; i <= 110; ++i) CHECK(schedule(i) < schedule(i - 1));
  CHECK(schedule(60) == Approx(0.55));
  CHECK(schedule(110) == Approx(0.1));
  CHECK(schedule(100000) == 0.1);
  CHECK(CosineSchedule{.lr = 1, .min_lr = 0.1, .warmup = 0, .steps = 0}(0) == 0.1);
  CHECK_THROWS_AS((CosineSchedule{.lr = 1, .warmup = 0, .steps = 0}(-5)), ValueError);
  CHECK_THROWS_AS((CosineSchedule{.lr = 1, .steps = 50}(0)), ValueError);     // the default warm-up takes 100
  CHECK_THROWS_AS((CosineSchedule{.lr = 2e-5, .warmup = 0}(0)), ValueError);  // below the default min_lr
}

TEST_CASE("optimizers: a step that cannot be done changes nothing") {
  for (const bool momentum : {false, true})
    for (const DType dtype : {f64, bf16}) {
      nn::Linear model(3, 2);
      std::unique_ptr<nn::Optimizer> optimizer;
      if (momentum)
        optimizer = std::make_unique<nn::Sgd>(model.parameters(), nn::SgdOptions{.lr = 0.1, .momentum = 0.9});
      else
        optimizer =
            std::make_unique<nn::AdamW>(model.parameters(), nn::AdamWOptions{.lr = 0.1, .weight_decay = 0.1});
      const auto backward = [&](DType d) { sum(model(numbers({4, 3}, d))).backward(); };
      backward(f32);
      optimizer->step();
      optimizer->zero_grad();
      model.to(dtype);
      backward(dtype);
      const auto all = [&] {
        std::vector<Tensor> values;
        for (const auto& [name, t] : optimizer->state_dict()) values.push_back(clone(t));
        for (const nn::Parameter& p : model.parameters()) values.push_back(clone(p.local().detach()));
        return values;
      };
      const std::vector<Tensor> before = all();
      for (int again = 0; again < 3; ++again)
        CHECK(one_line_about(message_of<StateError>([&] { optimizer->step(); }), "optimizer"));
      const std::vector<Tensor> after = all();
      for (std::size_t i = 0; i < before.size(); ++i) CHECK(same_bits(before[i], after[i]));
    }
}

namespace {

/// Every kind of optimizer with every branch of its formula.
std::vector<std::unique_ptr<Optimizer>> optimizers(const std::vector<Parameter>& over, bool foreach) {
  std::vector<std::unique_ptr<Optimizer>> all;
  for (const double decay : {0.0, 0.1}) {
    all.push_back(
        std::make_unique<Adam>(over, AdamOptions{.lr = 0.1, .weight_decay = decay, .foreach = foreach}));
    all.push_back(
        std::make_unique<AdamW>(over, AdamWOptions{.lr = 0.1, .weight_decay = decay, .foreach = foreach}));
    for (const double momentum : {0.0, 0.9})
      all.push_back(std::make_unique<Sgd>(
          over, SgdOptions{.lr = 0.1, .momentum = momentum, .weight_decay = decay, .foreach = foreach}));
    for (const bool nesterov : {false, true}) {
      all.push_back(std::make_unique<Sgd>(over, SgdOptions{.lr = 0.1,
                                                           .momentum = 0.9,
                                                           .weight_decay = decay,
                                                           .foreach = foreach,
                                                           .dampening = 0.2,
                                                           .nesterov = nesterov}));
      for (const double momentum : {0.0, 0.9})
        all.push_back(std::make_unique<Rmsprop>(over, RmspropOptions{.lr = 0.1,
                                                                     .weight_decay = decay,
                                                                     .momentum = momentum,
                                                                     .centered = nesterov,
                                                                     .foreach = foreach}));
    }
  }
  return all;
}

}  // namespace

TEST_CASE("optimizers: one by one parameters go to the bits of the list, moments and counts too") {
  for (std::size_t kind = 0; kind < optimizers({}, true).size(); ++kind) {
    INFO(kind);
    std::vector<std::vector<Tensor>> results;
    for (const bool foreach : {true, false}) {
      std::vector<Parameter> over;
      for (const Shape& shape : {Shape{}, Shape{0}, Shape{7}, Shape{3, 1000}, Shape{1 << 15}})
        over.push_back(parameter(shape, 3 + static_cast<unsigned>(shape.rank())));
      const auto optimizer = std::move(optimizers(over, foreach)[kind]);
      for (unsigned step = 0; step < 5; ++step) {
        for (const Parameter& p : over) give_gradient(p, 50 + step);
        optimizer->step();
      }
      std::vector<Tensor>& result = results.emplace_back();
      for (const Parameter& p : over) result.push_back(p.data());
      for (const auto& [name, t] : optimizer->state_dict()) result.push_back(t);
    }
    REQUIRE(results[0].size() == results[1].size());
    for (std::size_t i = 0; i < results[0].size(); ++i) CHECK(same_bits(results[0][i], results[1][i]));
  }
}

TEST_CASE("optimizers: a captured step is the step, in every dtype, for a list and one by one") {
  for (const DType dtype : {f32, f64, bf16, f16})
    for (const bool foreach : {true, false})
      for (std::size_t kind = 0; kind < optimizers({}, true).size(); ++kind) {
        INFO(name_of(dtype) << foreach << kind);
        const auto make = [&] {
          std::vector<Parameter> over{parameter({4, 5}, 1, dtype), parameter({3}, 2, dtype)};
          for (const Parameter& p : over) give_gradient(p, 7);
          return std::pair(over, std::move(optimizers(over, foreach)[kind]));
        };
        const auto eager = make(), captured = make();
        for (int k = 0; k < 3; ++k) eager.second->step();
        captured.second->step();
        Program program = capture(
            [&](std::span<const Tensor>) {
              captured.second->step();
              return std::vector<Tensor>{};
            },
            {});
        program.replay({});
        for (std::size_t i = 0; i < eager.first.size(); ++i)
          CHECK(same_bits(eager.first[i].data(), captured.first[i].data()));
        // The rate is read anew.
        for (Optimizer* o : {eager.second.get(), captured.second.get()}) o->set_lr(0.5);
        eager.second->step();
        program.replay({});
        CHECK(same_bits(eager.first[0].data(), captured.first[0].data()));
      }
}

namespace {

/// Parameters in groups, each optimizer of them made by `make`.
struct Grouped {
  std::vector<Parameter> params{parameter({3}, 1), parameter({2, 2}, 2), parameter({1}, 3)};
  std::unique_ptr<Optimizer> optimizer;

  std::vector<ParamGroup> groups() const { return {{{params[0]}}, {{params[1], params[2]}, 0.05}}; }
  void step(unsigned k) const {
    optimizer->zero_grad();
    for (const Parameter& p : params) give_gradient(p, k);
    optimizer->step();
  }
};

void check_alike(const Grouped& a, const Grouped& b) {
  for (std::size_t i = 0; i < a.params.size(); ++i) CHECK(same_bits(a.params[i].data(), b.params[i].data()));
  const StateDict x = a.optimizer->state_dict(), y = b.optimizer->state_dict();
  REQUIRE(x.size() == y.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    INFO(x[i].first);
    CHECK((x[i].first == y[i].first && same_bits(x[i].second, y[i].second)));
  }
}

}  // namespace

TEST_CASE("optimizers: a group that is added is one that was there, before whose time nothing was stepped") {
  for (int kind = 0; kind < 3; ++kind) {
    INFO(kind);
    const auto make = [kind](std::vector<ParamGroup> groups) -> std::unique_ptr<Optimizer> {
      if (kind == 0) return std::make_unique<AdamW>(groups);
      if (kind == 1) return std::make_unique<Sgd>(groups, SgdOptions{.momentum = 0.9});
      return std::make_unique<Rmsprop>(groups);
    };
    Grouped late, there;
    there.optimizer = make(there.groups());
    late.optimizer = make({late.groups()[0]});
    for (const Grouped* g : {&there, &late}) {
      give_gradient(g->params[0], 4);
      g->optimizer->step();
    }
    late.optimizer->add_param_group(late.groups()[1]);
    CHECK(late.optimizer->lr(1) == 0.05);
    for (unsigned k = 5; k < 8; ++k)
      for (const Grouped* g : {&there, &late}) g->step(k);
    check_alike(late, there);
  }
}

TEST_CASE("optimizers: a group or an option that does not fit changes nothing") {
  Grouped g;
  g.optimizer = std::make_unique<Sgd>(g.groups(), SgdOptions{.momentum = 0.9});
  g.step(1);
  StateDict before;
  for (const auto& [name, t] : g.optimizer->state_dict()) before.emplace_back(name, clone(t));
  const Parameter other = parameter({2}, 7);
  const auto refuses = [&](ParamGroup group, const std::string& word) {
    CHECK(one_line_about(message_of<ValueError>([&] { g.optimizer->add_param_group(group); }), word));
  };
  refuses({{other, g.params[1]}}, "in group 1 and again in 2");
  refuses({{other, other}}, "in group 2 and again in 2");
  refuses({{other, Parameter()}}, "empty");
  refuses({.params = {other}, .lr = -1}, "lr -1");
  refuses({.params = {other}, .options = {{"beta1", 0.5}}}, "no option 'beta1'");
  refuses({.params = {other}, .options = {{"nesterov", 0.5}}}, "must be 0 or 1");
  CHECK_THROWS_AS(g.optimizer->set_option("momentum", NAN), ValueError);
  CHECK_THROWS_AS(g.optimizer->set_option("alpha", 0.5), ValueError);
  CHECK_THROWS_AS(g.optimizer->option("alpha"), ValueError);
  CHECK_THROWS_AS(g.optimizer->set_option(2, "momentum", 0.5), ValueError);
  CHECK(g.optimizer->group_count() == 2);
  const StateDict now = g.optimizer->state_dict();
  REQUIRE(now.size() == before.size());
  for (std::size_t i = 0; i < now.size(); ++i) CHECK(same_bits(now[i].second, before[i].second));
  g.optimizer->add_param_group({{other}});
  CHECK(g.optimizer->option("momentum", 2) == 0.9);
}

TEST_CASE(
    "optimizers: every option of a state is restored, and state goes with the options that call for it") {
  const TempDirectory folder;
  for (const bool rms : {false, true}) {
    INFO(rms);
    Grouped a, b;
    if (rms) {
      a.optimizer = std::make_unique<Rmsprop>(a.groups(), RmspropOptions{.alpha = 0.7, .eps = 1e-3});
      b.optimizer = std::make_unique<Rmsprop>(b.groups(), RmspropOptions{.momentum = 0.5, .centered = true});
    } else {
      a.optimizer = std::make_unique<Sgd>(a.groups(), SgdOptions{.dampening = 0.1});
      b.optimizer = std::make_unique<Sgd>(b.groups(), SgdOptions{.momentum = 0.5, .nesterov = true});
    }
    a.step(1);
    b.step(2);
    const auto square = [&] { return a.optimizer->state_dict().at("state.0.square_avg").to_vector<float>(); };
    const std::vector<float> kept = rms ? square() : std::vector<float>();
    a.optimizer->set_option(1, "momentum", 0.25);
    if (rms) CHECK(square() == kept);
    CHECK(a.optimizer->state_dict().contains("state.0.momentum"));
    for (const std::string& name : a.optimizer->option_names())
      if (name != "nesterov" && name != "centered" && name != "maximize") {
        const double value = a.optimizer->option(name) + 0.125;
        a.optimizer->set_option(0, name, value);
        CHECK(a.optimizer->option(name) == value);
        CHECK(a.optimizer->option(name, 1) != value);
      }
    a.optimizer->set_option(rms ? "centered" : "nesterov", 1);
    for (unsigned k = 2; k < 5; ++k) a.step(k);
    save_state(folder / "a.safetensors", a.optimizer->state_dict());
    for (std::size_t i = 0; i < 3; ++i) Parameter(b.params[i]).set_data(clone(a.params[i].data()));
    b.optimizer->load_state_dict(load_state(folder / "a.safetensors"));
    check_alike(a, b);
    for (unsigned k = 5; k < 8; ++k)
      for (const Grouped* g : {&a, &b}) g->step(k);
    check_alike(a, b);
    // An optimizer that keeps nothing of the kind takes a state that has it.
    Grouped c;
    if (rms)
      c.optimizer = std::make_unique<Rmsprop>(c.groups());
    else
      c.optimizer = std::make_unique<Sgd>(c.groups());
    for (std::size_t i = 0; i < 3; ++i) Parameter(c.params[i]).set_data(clone(a.params[i].data()));
    c.optimizer->load_state_dict(a.optimizer->state_dict());
    for (const Grouped* g : {&a, &c}) g->step(9);
    check_alike(a, c);
    a.optimizer->set_option("momentum", 0);
    CHECK(!a.optimizer->state_dict().contains("state.0.momentum"));
    StateDict old = c.optimizer->state_dict();  // one from before there were such entries
    std::erase_if(old,
                  [](const auto& e) { return e.first.starts_with("group.") && !e.first.ends_with(".lr"); });
    c.optimizer->set_option("weight_decay", 0.5);
    c.optimizer->load_state_dict(old);
    CHECK(c.optimizer->option("weight_decay", 1) == 0.5);
  }
}

TEST_CASE("optimizers: loaded state goes where the state is, so a captured step uses it") {
  nn::Linear model(3, 2);
  nn::Adam optimizer(model.parameters());
  sum(model(numbers({4, 3}, f32))).backward();
  optimizer.step();
  const nn::StateDict now = optimizer.state_dict();
  nn::StateDict other;
  for (const auto& [name, t] : now) other.emplace_back(name, mul(t, name.starts_with("group.") ? 0.5 : 3.0));
  optimizer.load_state_dict(other);
  for (std::size_t i = 0; i < now.size(); ++i) {
    CHECK(same_bits(now[i].second, other[i].second));
    CHECK(optimizer.state_dict()[i].second.storage_ref() == now[i].second.storage_ref());
  }
}

TEST_CASE("optimizers: what one parameter lacks is refused before any is stepped") {
  for (const bool foreach : {true, false})
    for (std::size_t kind = 0; kind < optimizers({}, true).size(); ++kind) {
      const Parameter good = parameter({3}, 1), wide = parameter({3}, 2), other = parameter({3}, 3);
      for (const Parameter& p : {good, wide, other}) give_gradient(p, 7);
      const Tensor before = clone(good.data());
      const auto one = std::move(optimizers({good, wide}, foreach)[kind]),
                 two = std::move(optimizers({good, other}, foreach)[kind]);
      Parameter(wide).set_data(expand(zeros({1}), {3}));
      CHECK(one_line_about(message_of<StateError>([&] { one->step(); }), "share memory"));
      Parameter(other).set_grad(zeros({3}, {f32, Device::meta()}));
      CHECK(one_line_about(message_of<DeviceError>([&] { two->step(); }), "meta"));
      CHECK(same_bits(good.data(), before));
    }
}

TEST_CASE("clip_grad_norm_: gradients of any layout and dtypes are scaled alike") {
  const Parameter a = parameter({2, 3}, 1), b = parameter({4}, 2, f64), c = parameter({2, 3}, 3);
  Parameter(a).set_grad(transpose(numbers({3, 2}, f32, 4), 0, 1));
  Parameter(b).set_grad(numbers({4}, f64, 5));
  Parameter(c).set_grad(contiguous(a.grad()));
  const std::vector<Parameter> all{b, a, c};
  clip_grad_norm_(all, 0.1);
  CHECK(same_bits(contiguous(a.grad()), c.grad()));
  CHECK(clip_grad_norm_(all, 0.1).item() == Approx(0.1).epsilon(1e-4));
}

TEST_CASE("optimizers: a state without a parameter's entry begins anew, for captured steps too") {
  const auto make = [] {
    const Parameter p = parameter({3}, 1);
    give_gradient(p, 7);
    return std::pair(p, std::make_unique<Sgd>(std::vector{p}, SgdOptions{.lr = 1, .momentum = 0.9}));
  };
  const auto eager = make(), captured = make();
  StateDict initial;
  for (const auto& [name, t] : eager.second->state_dict()) initial.emplace_back(name, clone(t));
  eager.second->step();
  eager.second->step();
  captured.second->step();
  Program program = capture(
      [&](std::span<const Tensor>) {
        captured.second->step();
        return std::vector<Tensor>{};
      },
      {});
  for (Sgd* sgd : {eager.second.get(), captured.second.get()}) sgd->load_state_dict(initial);
  eager.second->step();
  program.replay({});
  CHECK(same_bits(eager.first.data(), captured.first.data()));
}

namespace {

/// Of whoever writes an optimizer and gets its state wrong.
struct OwnState final : Optimizer {
  std::function<Slots(const Tensor&)> make;
  OwnState(const Parameter& p, std::function<Slots(const Tensor&)> how)
      : Optimizer({{{p}}}, {{"lr", 0.1}}), make(std::move(how)) {}
  std::vector<std::string> state_names() const override { return {"a", "step"}; }
  Slots fresh(const Tensor& p) const override { return make(p); }
  void step_group(const Group&, std::span<const Parameter> params, std::span<Slots* const>) override {
    fill_(params[0].local().detach(), 0);
  }
};

}  // namespace

TEST_CASE("optimizers: state that an own optimizer makes is held against its names at the first step") {
  const Tensor count = zeros({}, {f64});
  const std::function<std::vector<Tensor>(const Tensor&)> wrong[] = {
      [](const Tensor& p) { return std::vector{zeros_like(p)}; },
      [&](const Tensor& p) { return std::vector{zeros_like(p), count, count}; },
      [&](const Tensor& p) { return std::vector{to(p, f64), count}; },
      [&](const Tensor& p) { return std::vector{to(p, Device::meta()), count}; },
      [&](const Tensor&) { return std::vector{Tensor(), count}; }};
  for (const auto& make : wrong) {
    const Parameter p = parameter({3}, 1);
    give_gradient(p, 2);
    OwnState optimizer(p, make);
    for (int again = 0; again < 2; ++again)
      CHECK(one_line_about(message_of<StateError>([&] { optimizer.step(); }), "fresh gives"));
    CHECK(same_bits(p.data(), parameter({3}, 1).data()));
    CHECK(optimizer.state_dict().size() == 1);
  }
  const Parameter p = parameter({3}, 1);
  give_gradient(p, 2);
  OwnState right(p, [&](const Tensor& t) { return std::vector{zeros_like(t), count}; });
  right.step();
  CHECK(right.state_dict().size() == 3);
}

TEST_CASE("optimizers: a parameter replaced by one of another shape is refused before any is stepped") {
  for (const bool momentum : {false, true})
    for (const DType dtype : {f64, f32, bf16})
      for (const Shape& later : {Shape{3, 2}, Shape{1, 2}, Shape{4}}) {
        nn::Parameter a(ones({2}, {dtype})), b(ones({1, 1}, {dtype}));
        const std::vector<nn::ParamGroup> groups{{{a}}, {{b}}};
        std::unique_ptr<nn::Optimizer> optimizer;
        if (momentum)
          optimizer = std::make_unique<nn::Sgd>(groups, nn::SgdOptions{.lr = 0.1, .momentum = 0.9});
        else
          optimizer = std::make_unique<nn::Adam>(groups, nn::AdamOptions{.lr = 0.1});
        a.set_grad(ones({2}, {dtype}));
        b.set_grad(ones({1, 1}, {dtype}));
        optimizer->step();
        b.set_data(ones(later, {dtype}));
        b.set_grad(ones(later, {dtype}));
        const Tensor before = clone(a.local().detach());
        CHECK(one_line_about(message_of<StateError>([&] { optimizer->step(); }), "shape"));
        CHECK(same_bits(a.local().detach(), before));
        CHECK(same_bits(b.local().detach(), ones(later, {dtype})));
      }
}

TEST_CASE("optimizers: a count of steps that is none is refused, and nothing is changed") {
  nn::Parameter p(ones({2}));
  nn::Adam optimizer(std::vector{p}, {.lr = 0.1});
  p.set_grad(ones({2}));
  optimizer.step();
  for (const double count : {-1.0, 0.5, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    StateDict state;
    for (const auto& [name, t] : optimizer.state_dict())
      state.emplace_back(name,
                         name.ends_with("step") ? full({}, count, {f64}) : zeros(t.shape(), {t.dtype()}));
    const std::vector<Tensor> before = [&] {
      std::vector<Tensor> all;
      for (const auto& [name, t] : optimizer.state_dict()) all.push_back(clone(t));
      return all;
    }();
    INFO(count);
    CHECK(one_line_about(message_of<ValueError>([&] { optimizer.load_state_dict(state); }), "step"));
    std::size_t i = 0;
    for (const auto& [name, t] : optimizer.state_dict()) CHECK(same_bits(t, before[i++]));
  }
}

TEST_CASE("clip_grad_norm_: the factor is not rounded to the gradients' dtype") {
  for (const double limit : {1e-6, 1e-7}) {
    nn::Parameter p(ones({2}));
    p.set_grad(full({2}, 3e38));
    nn::clip_grad_norm_(std::vector{p}, limit);
    CHECK(doubles(p.grad())[0] == Approx(limit / std::sqrt(2.0)).epsilon(1e-5));
  }
}

TEST_CASE("optimizers: clipping by value bounds each element, keeps NaN, and refuses a limit below 0") {
  for (const DType dtype : {f32, f64, f16, bf16}) {
    nn::Parameter p(zeros({5}, {dtype})), without(zeros({2}, {dtype}));
    p.set_grad(to(Tensor::from({-3.0, -0.5, 0.0, 0.5, 2.0}), dtype));
    const void* const memory = p.grad().raw();
    nn::clip_grad_value_(std::vector{p, without}, 0.5);
    CHECK(to(p.grad(), f64).to_vector<double>() == std::vector{-0.5, -0.5, 0.0, 0.5, 0.5});
    CHECK(p.grad().raw() == memory);
    CHECK_FALSE(without.grad().defined());
  }
  nn::Parameter p(zeros({1}));
  p.set_grad(full({1}, std::nan("")));
  nn::clip_grad_value_(std::vector{p}, 1);
  CHECK(std::isnan(p.grad().item()));
  CHECK_THROWS_AS(nn::clip_grad_value_(std::vector{p}, -1), ValueError);
  CHECK_THROWS_AS(nn::clip_grad_value_(std::vector{p}, std::nan("")), ValueError);
}
