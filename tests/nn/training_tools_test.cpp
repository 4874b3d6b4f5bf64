// Epochs, schedules and averages.
#include <algorithm>
#include <cmath>
#include <set>

#include "nn/batch_sampler.h"
#include "nn/ema.h"
#include "nn/layers.h"
#include "nn/schedules.h"
#include "tests/catch.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

TEST_CASE("epochs: every sample comes once, in an order of the epoch's own, whatever the ranks") {
  for (std::int64_t items : {1, 7, 24, 100})
    for (LastBatch last : {LastBatch::drop, LastBatch::keep})
      for (std::int64_t batch : {1, 4}) {
        if (last == LastBatch::drop && items < batch) continue;
        INFO(items << " items in batches of " << batch);
        EpochSampler all(items, {.batch = batch, .seed = 3, .last = last});
        std::vector<std::int64_t> orders[2];
        for (auto& order : orders)
          for (std::int64_t i = 0; i < all.steps_per_epoch(); ++i) {
            const std::vector<std::int64_t> whole = all.next();
            order.insert(order.end(), whole.begin(), whole.end());
            std::vector<std::int64_t> parts;
            for (int rank = 0; rank < 2 && batch % 2 == 0; ++rank) {
              const EpochSampler part(items,
                                      {.batch = batch, .seed = 3, .last = last, .rank = rank, .world = 2});
              for (std::int64_t sample : part.at(all.step() - 1)) parts.push_back(sample);
            }
            if (batch % 2 == 0) CHECK(parts == whole);
          }
        const std::int64_t seen = last == LastBatch::keep ? items : items / batch * batch;
        for (const auto& order : orders) {
          CHECK(std::set(order.begin(), order.end()).size() == static_cast<std::size_t>(seen));
          CHECK(std::ranges::all_of(order, [&](std::int64_t i) { return i >= 0 && i < items; }));
        }
        if (items >= 24) CHECK(orders[0] != orders[1]);
        CHECK(all.epoch() == 2);
      }
}

TEST_CASE("epochs: a run goes on from its step, and without shuffling the order is the samples'") {
  EpochSampler first(30, {.batch = 4, .seed = 9}), second(30, {.batch = 4, .seed = 9});
  for (int i = 0; i < 11; ++i) first.next();
  second.set_step(first.step());
  for (int i = 0; i < 20; ++i) CHECK(first.next() == second.next());
  CHECK(first.at(0) != EpochSampler(30, {.batch = 4, .seed = 10}).at(0));
  const EpochSampler plain(5, {.batch = 2, .shuffle = false, .last = LastBatch::keep});
  CHECK(plain.at(2) == std::vector<std::int64_t>{4});
  CHECK(plain.at(3) == std::vector<std::int64_t>{0, 1});
  CHECK_THROWS_AS(EpochSampler(0), ValueError);
  CHECK_THROWS_AS(EpochSampler(3, {.batch = 4}), ValueError);
  CHECK_THROWS_AS(EpochSampler(8, {.batch = 4, .world = 3}), ValueError);
  CHECK_THROWS_AS(EpochSampler(8, {.rank = 1}), ValueError);
  CHECK_THROWS_AS(plain.at(-1), ValueError);
}

TEST_CASE("schedules: rates are those of PyTorch's") {
  const StepSchedule steps{.lr = 1, .every = 3, .factor = 0.5};
  for (std::int64_t i = 0; i < 9; ++i) CHECK(steps(i) == std::pow(0.5, static_cast<double>(i / 3)));
  const LinearSchedule line{.lr = 2, .first_factor = 0.25, .last_factor = 1, .steps = 4};
  const double on_line[] = {0.5, 0.875, 1.25, 1.625, 2, 2};
  for (std::int64_t i = 0; i < 6; ++i) CHECK(std::abs(line(i) - on_line[i]) < 1e-15);
  // torch.optim.lr_scheduler.OneCycleLR(SGD(lr=1), 1.0, total_steps=10)
  const OneCycleSchedule cycle{.lr = 1, .steps = 10};
  const double of_cycle[] = {0.040000000000000036,
                             0.52,
                             1.0,
                             0.9504846320134737,
                             0.8117456539497631,
                             0.6112620219362893,
                             0.38874197806371075,
                             0.18825834605023697,
                             0.049519367986526286,
                             4e-06};
  for (std::int64_t i = 0; i < 10; ++i) CHECK(std::abs(cycle(i) - of_cycle[i]) < 1e-12);
  CHECK_THROWS_AS(cycle(10), ValueError);
  CHECK_THROWS_AS(steps(-1), ValueError);
  CHECK_THROWS_AS(line(-1), ValueError);
}

TEST_CASE("schedules: warm restarts are cosines one after the other, each so many times as long") {
  for (const std::int64_t factor : {1, 2, 3}) {
    const WarmRestartsSchedule restarts{.lr = 2, .min_lr = 0.5, .first = 7, .factor = factor};
    std::int64_t step = 0, length = 7;
    for (int cycle = 0; cycle < 4; ++cycle, length *= factor) {
      const CosineSchedule one{.lr = 2, .min_lr = 0.5, .warmup = 0, .steps = length};
      for (std::int64_t i = 0; i < length; ++i) CHECK(std::abs(restarts(step++) - one(i)) < 1e-12);
    }
  }
  // torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(SGD(lr=1), 3, 2), steps 0, 1, 4 and 8
  const WarmRestartsSchedule three{.lr = 1, .first = 3, .factor = 2};
  CHECK(three(0) == 1);
  CHECK(std::abs(three(1) - 0.75) < 1e-12);
  CHECK(std::abs(three(4) - 0.9330127018922194) < 1e-12);
  CHECK(std::abs(three(8) - 0.06698729810778059) < 1e-12);
  CHECK(WarmRestartsSchedule{.first = 1, .factor = 1 << 20}(std::int64_t{1} << 62) > 0);
  CHECK_THROWS_AS(three(-1), ValueError);
  CHECK_THROWS_AS(WarmRestartsSchedule{.first = 0}(0), ValueError);
  CHECK_THROWS_AS((WarmRestartsSchedule{.lr = 1, .min_lr = 2}(0)), ValueError);
}

TEST_CASE("schedules: a rate falls after so many values that are not better, and a state goes on") {
  for (const Better better : {Better::lower, Better::higher})
    for (const Threshold threshold : {Threshold::relative, Threshold::absolute}) {
      const double sign = better == Better::lower ? 1 : -1;
      const PlateauOptions options{.lr = 1,
                                   .factor = 0.5,
                                   .min_lr = 0.2,
                                   .patience = 2,
                                   .cooldown = 1,
                                   .better = better,
                                   .threshold = 0.1,
                                   .threshold_is = threshold};
      PlateauSchedule schedule(options);
      CHECK(schedule.lr() == 1);
      const auto tell = [&](double distance) { return schedule(10 + sign * distance); };
      CHECK(tell(0) == 1);
      const double little = threshold == Threshold::relative ? 0.9 : 0.09;  // less than the threshold
      for (int i = 0; i < 2; ++i) CHECK(tell(-little) == 1);
      CHECK(tell(0) == 0.5);
      for (int i = 0; i < 3; ++i) CHECK(tell(0) == 0.5);  // the first of them cools, two are waited
      const PlateauSchedule::State at = schedule.state();
      CHECK(tell(0) == 0.25);
      PlateauSchedule other(options);
      other.load_state(at);
      CHECK(other(10) == 0.25);
      CHECK(other.state() == schedule.state());
      for (int i = 0; i < 4; ++i) tell(0);
      CHECK(schedule.lr() == 0.2);  // the least
      for (int i = 0; i < 3; ++i) tell(0);
      CHECK(tell(-5) == 0.2);  // better: waits anew
      CHECK(schedule.state().waited == 0);
      CHECK(schedule.state().best == 10 - sign * 5);
      CHECK_THROWS_AS(schedule(std::nan("")), ValueError);
    }
  CHECK_THROWS_AS(PlateauSchedule({.factor = 1}), ValueError);
  CHECK_THROWS_AS(PlateauSchedule({.patience = -1}), ValueError);
}

TEST_CASE("ema: averages follow the parameters, buffers are copied, and a state goes on") {
  BatchNorm1d model(3);
  Ema ema(model, 0.9);
  const NoGrad guard;
  double expected = 1;
  for (int i = 1; i <= 5; ++i) {
    fill_(model.weight.data(), i);
    fill_(model.running_mean.tensor(), i);
    ema.update(model);
    expected = 0.9 * expected + 0.1 * i;
  }
  CHECK(distance(ema.state_dict().at("weight"), full({3}, expected)) < 1e-6);
  CHECK(distance(ema.state_dict().at("running_mean"), full({3}, 5)) == 0);
  BatchNorm1d other(3);
  other.load_state_dict(ema.state_dict());
  CHECK(same_bits(other.weight.data(), ema.state_dict().at("weight")));
  Ema again(other, 0.9);
  again.load_state_dict(ema.state_dict());
  again.update(model);
  ema.update(model);
  CHECK(same_bits(again.state_dict().at("weight"), ema.state_dict().at("weight")));
  BatchNorm1d larger(4);
  CHECK(one_line_about(message_of<StateError>([&] { ema.update(larger); }), "weight"));
  CHECK_THROWS_AS(ema.load_state_dict(larger.state_dict()), ShapeError);
  CHECK_THROWS_AS(Ema(model, 1.5), ValueError);
}

TEST_CASE("ema: neither the average nor the value is lost where the two are far apart, or infinite") {
  const NoGrad guard;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : {f64, f32})
    for (const double decay : {0.0, 0.125, 0.5, 0.875, 1.0})
      for (const double first : {1.0, 1e8, -1e8, infinity, -infinity})
        for (const double second : {1.0, 1e8, 3.0}) {
          INFO(name_of(dtype) << " " << decay << " from " << first << " to " << second);
          BatchNorm1d model(3, {.tensor = {dtype}});
          fill_(model.weight.data(), first);
          Ema ema(model, decay);
          fill_(model.weight.data(), second);
          ema.update(model);
          // A weight of 0 leaves nothing of an infinity.
          const double expected = decay == 0   ? second
                                  : decay == 1 ? first
                                               : decay * first + (1 - decay) * second;
          const double got = ema.state_dict().at("weight")[0].item();
          const double ulp = dtype == f64 ? 0x1p-52 : 0x1p-23;
          if (decay == 0 || decay == 1)
            CHECK(got == expected);
          else if (std::isinf(expected))
            CHECK_FALSE(std::isfinite(got));
          else
            CHECK(std::abs(got - expected) <= 2 * ulp * std::max(std::abs(first) * decay, second));
        }
}

TEST_CASE("ema: an average follows however small its steps are, in every dtype of the model") {
  const NoGrad guard;
  for (const DType dtype : {f64, f32, f16, bf16})
    for (const double decay : {0.5, 0.99, 0.999, 0.9999}) {
      INFO(name_of(dtype) << " " << decay);
      BatchNorm1d model(3, {.tensor = {dtype}});
      fill_(model.weight.data(), 0);
      Ema ema(model, decay);
      fill_(model.weight.data(), 1);
      const int steps = 3000;
      for (int i = 0; i < steps; ++i) ema.update(model);
      const Tensor average = ema.state_dict().at("weight");
      CHECK(average.dtype() == compute_dtype(dtype));
      CHECK(distance(average, full({3}, 1 - std::pow(decay, steps))) < 2e-3);
      CHECK(ema.state_dict().at("running_var").dtype() == dtype);  // copied as it is
      BatchNorm1d other(3, {.tensor = {dtype}});
      other.load_state_dict(ema.state_dict());
      CHECK(same_bits(other.weight.data(), to(average, dtype)));
      Ema again(other, decay);
      again.load_state_dict(ema.state_dict());
      CHECK(same_bits(again.state_dict().at("weight"), average));
    }
}
