// Faults at random places of random training loops that go on after them: a run ends with the bits of one
// without a fault, or all ranks were told alike that some of them lost a step; never a silent difference.
#include <fmt/ranges.h>
#include <sherd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <thread>

#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "shard/lost_steps.h"
#include "shard/sharded_state.h"
#include "tests/catch.h"
#include "tests/message_of.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"
#include "tests/seeds.h"
#include "tests/shard/random.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

enum class Way { per_parameter, flat, one_flat, grad_op, hybrid, hybrid_flat, replicas };
constexpr std::array all_ways = {Way::per_parameter, Way::flat,        Way::one_flat, Way::grad_op,
                                 Way::hybrid,        Way::hybrid_flat, Way::replicas};
bool is_hybrid(Way way) { return way == Way::hybrid || way == Way::hybrid_flat; }
bool has_replicas(Way way) { return is_hybrid(way) || way == Way::replicas; }

enum class Place {
  before,
  in_forward,
  after_forward,
  in_backward,
  after_backward,
  in_step,
  after_step,  // before the scaler's update
  after_update,
};
constexpr int places = static_cast<int>(Place::after_update) + 1;

struct Fault {
  int rank;
  std::int64_t step;
  Place place;
};

/// A training loop, the same on all ranks, and what goes wrong in it.
struct Program {
  std::uint64_t seed = 0;
  int ranks = 2;
  Way way = Way::per_parameter;
  bool momentum = false;      ///< SGD, else Adam
  bool scales = false;        ///< with a GradScaler
  bool clears_late = false;   ///< gradients at the end of a step, else at its beginning
  bool meets = false;         ///< a call of the program's own in each step
  bool steps_within = false;  ///< the backward
  bool gives_up = false;      ///< where nothing whole is there; else it begins anew
  bool forgets = false;       ///< to clear gradients after a fault, if it does at the end of steps
  std::vector<Fault> faults{};

  /// Without what goes wrong: programs of one key end alike.
  auto key() const { return std::tuple(ranks, way, momentum, scales); }
};

constexpr std::int64_t steps = 4;

std::string describe(const Program& p) {
  std::string text = fmt::format("{} ranks, way {}", p.ranks, static_cast<int>(p.way));
  for (const auto& [on, name] : {std::pair(p.momentum, "momentum"),
                                 {p.scales, "scales"},
                                 {p.clears_late, "clears late"},
                                 {p.meets, "meets"},
                                 {p.steps_within, "steps within"},
                                 {p.gives_up, "gives up"},
                                 {p.forgets, "forgets"}})
    if (on) text += fmt::format(", {}", name);
  for (const Fault& f : p.faults)
    text += fmt::format("; rank {} at step {}, place {}", f.rank, f.step, static_cast<int>(f.place));
  return text;
}

Program draw(std::uint64_t seed) {
  Random random(seed);
  Program p{.seed = seed};
  p.way = all_ways[static_cast<std::size_t>(below(random, std::ssize(all_ways)))];
  p.ranks = is_hybrid(p.way) ? 4 : 2 + below(random, 3);
  p.momentum = once_in(random, 3);
  p.scales = once_in(random, 3);
  p.clears_late = once_in(random, 2);
  p.meets = once_in(random, 2);
  p.steps_within = !p.scales && p.way != Way::replicas && once_in(random, 4);
  p.gives_up = once_in(random, 2);
  // A scaler may have divided on all ranks what is left, and what is added is not.
  p.forgets = p.clears_late && !p.steps_within && !p.scales && once_in(random, 2);
  for (int n = !p.forgets && once_in(random, 4) ? 2 : 1; n > 0; --n) {
    p.faults.push_back(
        {below(random, p.ranks), below(random, steps), static_cast<Place>(below(random, places))});
    Fault& fault = p.faults.back();  // when all ranks have made the model
    if (fault.place < Place::after_backward) fault.step = std::max<std::int64_t>(fault.step, 1);
  }
  return p;
}

struct Body final : nn::Layer<Body> {
  nn::Linear first{5, 6}, second{6, 3}, third{3, 2};
  bool throws = false;
  Tensor forward(const Tensor& x) {
    const Tensor y = second(relu(first(x)));
    if (throws) throw Boom();
    return third(y);
  }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("third", third);
  }
};

/// Throws between its two groups where it is told to.
struct Fragile final : nn::Adam {
  using nn::Adam::Adam;
  bool throws = false;
  int turn = 0;
  void step_group(const Group& group, std::span<const nn::Parameter> params,
                  std::span<Slots* const> slots) override {
    if (throws && turn++ == 1) throw Boom();
    nn::Adam::step_group(group, params, slots);
  }
};

/// Comes late by work, which other processes do not make longer than it is, as they do with many yields.
struct Slow {
  Random random;
  double made = 0;
  void dawdle() {
    std::this_thread::yield();
    if (!once_in(random, 6)) return;
    for (int i = below(random, 20'000); i > 0; --i) made += 1.0 / (made + i);
  }
};

std::vector<nn::ParamGroup> halves(const nn::Module& model) {
  const std::vector<nn::Parameter> all = model.parameters();
  const auto middle = all.begin() + (std::ssize(all) + 1) / 2;
  std::vector<nn::ParamGroup> groups{{{all.begin(), middle}}, {{middle, all.end()}}};
  return groups;
}

/// What one rank has at the end.
struct End {
  bool gave_up = false;
  std::vector<std::string> told{};
  std::vector<std::vector<float>> values{};
  double scale = 0;
  int turns = 0;
};

/// A rank that plays a program.
class Player {
 public:
  /// `twice`: a step whose backward runs twice.
  Player(World& world, const Program& program, const std::vector<Fault>& faults, std::int64_t twice)
      : world_(world),
        twice_(twice),
        program_(program),
        faults_(faults),
        slow_{Random(program.seed * 64 + static_cast<std::uint64_t>(world.rank()))} {
    manual_seed(4);
    model_.emplace();
    if (is_hybrid(program.way))
      mesh_ = DeviceMesh(world.group(), {2, 2}, {"replicas", "shards"});
    else
      mesh_ = world.mesh();
    shard();
    if (program.momentum)
      sgd_.emplace(halves(*model_), nn::SgdOptions{.lr = 0.05, .momentum = 0.9});
    else
      adam_.emplace(halves(*model_), nn::AdamOptions{.lr = 0.01});
    first_values_ = shard::full_state_dict(*model_);
    first_state_ = optimizer().state_dict();
    for (auto& [name, tensor] : first_state_) tensor = clone(tensor);
    first_scale_ = scaler_.state_dict();
    for (auto& [name, tensor] : first_scale_) tensor = clone(tensor);
  }

  End play() {
    const Interception slow([&](const ObservedCall& call, const Interception::Proceed& proceed) {
      proceed(call.collective);
      slow_.dawdle();
    });
    while (!turn())
      expect(++end_.turns < 80, "seed {}: goes round, told {}", program_.seed, fmt::join(end_.told, " | "));
    return std::move(end_);
  }

 private:
  void shard() {
    const bool flat = program_.way == Way::flat || program_.way == Way::hybrid_flat;
    shard::Options options{.mesh = mesh_};
    if (flat) options.layout = shard::GroupLayout::flat;
    if (program_.way == Way::grad_op) options.strategy = shard::ShardingStrategy::shard_grad_op;
    if (program_.way == Way::replicas) {
      replicas_.emplace(*model_, world_.group());
    } else if (program_.way == Way::one_flat) {
      shard::FullyShardedDataParallel(*model_, {.mesh = mesh_});
    } else {
      shard::fully_shard(model_->first, options);
      shard::fully_shard(model_->third, options);
      shard::fully_shard(*model_, options);
    }
  }
  nn::Optimizer& optimizer() {
    if (sgd_) return *sgd_;
    return *adam_;
  }
  void break_step(bool throws) {
    if (adam_) adam_->throws = throws, adam_->turn = 0;
  }

  /// Whether this rank is to throw here.
  bool faulty(Place place, std::int64_t step) {
    const auto fault = std::ranges::find_if(faults_, [&](const Fault& f) {
      return f.rank == world_.rank() && f.step == step && f.place == place;
    });
    if (fault == faults_.end()) return false;
    faults_.erase(fault);
    return true;
  }
  void come_to(Place place, std::int64_t step) {
    slow_.dawdle();
    if (faulty(place, step)) throw Boom();
  }

  Tensor input(std::int64_t step) const {
    std::vector<float> values;
    for (int i = 0; i < 10; ++i)
      values.push_back(0.1f * static_cast<float>((world_.rank() * 7 + step * 5 + i * 3) % 11) - 0.4f);
    if (program_.scales && step == 2 && world_.rank() == 0)
      values[0] = std::numeric_limits<float>::infinity();
    return Tensor::from(values, {2, 5}, Device::cpu());
  }
  Tensor loss_at(std::int64_t step) {
    model_->throws = faulty(Place::in_forward, step);
    struct Over {
      bool& throws;
      ~Over() { throws = false; }
    } over{model_->throws};
    Tensor x = input(step);
    if (faulty(Place::in_backward, step)) {
      x.requires_grad_();
      register_hook(x, [](const Tensor&) -> Tensor { throw Boom(); }).keep();
    }
    Tensor loss = mean(square((*model_)(x)));
    return program_.scales ? scaler_.scale(loss) : loss;
  }

  void train(std::int64_t step) {
    come_to(Place::before, step);
    if (!program_.clears_late) optimizer().zero_grad();
    break_step(faulty(Place::in_step, step));
    if (step == twice_) loss_at(step).backward();
    const Tensor loss = loss_at(step);
    come_to(Place::after_forward, step);
    {
      std::optional<shard::StepInBackward> scope;
      if (program_.steps_within) scope.emplace(optimizer());
      loss.backward();
    }
    come_to(Place::after_backward, step);
    if (program_.meets) {
      const Tensor total = loss.detach();
      world_.group().all_reduce(total, ReduceOp::sum(), {.label = "loss"});
    }
    if (program_.scales)
      scaler_.step(optimizer());
    else if (!program_.steps_within)
      optimizer().step();
    break_step(false);
    come_to(Place::after_step, step);
    if (program_.scales) scaler_.update();
    if (program_.clears_late) optimizer().zero_grad();
    come_to(Place::after_update, step);
  }

  /// Compares what ranks have come to, by one more backward.
  void finish() {
    optimizer().zero_grad();
    loss_at(0).backward();
    if (program_.scales) scaler_.unscale_(optimizer()), scaler_.update(scaler_.get_scale());
    optimizer().zero_grad();
    world_.group().barrier({.label = "the end"});
    const nn::StateDict whole = shard::full_state_dict(*model_),
                        state = shard::full_optimizer_state(*model_, optimizer());
    for (const nn::StateDict* dict : {&whole, &state})
      for (const auto& [name, tensor] : *dict)
        end_.values.push_back(to(reshape(tensor, {tensor.numel()}), f32).to_vector<float>());
    end_.scale = scaler_.get_scale();
    world_.group().barrier({.label = "after the end"});
  }

  /// Nothing whole is there: from the first values, as a checkpoint.
  void begin_anew() {
    shard::load_full_state_dict(*model_, first_values_);
    nn::StateDict state = first_state_;
    for (auto& [name, tensor] : state) tensor = clone(tensor);
    optimizer().load_state_dict(std::move(state));
    scaler_.load_state_dict(first_scale_);
    optimizer().zero_grad();
  }

  void act_on(const std::string& told) {
    end_.told.push_back(told);
    optimizer().zero_grad();
    if (told.find("bring_up(model") != std::string::npos)
      next_ = &Player::bring_up;
    else if (told.find("load a checkpoint") != std::string::npos)
      next_ = &Player::begin_anew;
  }
  void bring_up() { shard::bring_up(*model_, optimizer()); }

  /// Whether the program is over.
  bool turn() {
    try {
      if (const auto next = std::exchange(next_, nullptr)) {
        if (next == &Player::begin_anew && program_.gives_up) return end_.gave_up = true;
        (this->*next)();
      }
      const std::int64_t step = shard::steps_taken(*model_);
      if (step < steps) return train(step), false;
      finish();
      return true;
    } catch (const Boom&) {
    } catch (const CollectiveError&) {
    } catch (const StateError& error) {
      act_on(error.what());
      return false;
    }
    next_ = nullptr;
    break_step(false);
    if (!program_.forgets) optimizer().zero_grad();
    mesh_.renew();
    return false;
  }

  World& world_;
  std::int64_t twice_;
  const Program& program_;
  std::vector<Fault> faults_;
  Slow slow_;
  std::optional<Body> model_;
  DeviceMesh mesh_;
  std::optional<shard::DataParallel> replicas_;
  std::optional<nn::Sgd> sgd_;
  std::optional<Fragile> adam_;
  nn::GradScaler scaler_{{.init_scale = 1024, .growth_interval = 2}};
  nn::StateDict first_values_, first_state_, first_scale_;
  void (Player::*next_)() = nullptr;
  End end_;
};

std::vector<End> ends_of(const Program& program, const std::vector<Fault>& faults, std::int64_t twice = -1) {
  std::vector<End> ends(static_cast<std::size_t>(program.ranks));
  run_ranks(program.ranks, [&](World& world) {
    ends[static_cast<std::size_t>(world.rank())] = Player(world, program, faults, twice).play();
  });
  return ends;
}

/// What programs came to.
struct Tally {
  int same = 0, told = 0, gave_up = 0;
};

using Values = std::vector<std::vector<float>>;

/// What a program without a fault comes to.
const Values& expected(const Program& program, std::int64_t twice) {
  static std::map<std::pair<decltype(program.key()), std::int64_t>, Values> known;
  Values& values = known[{program.key(), twice}];
  if (values.empty()) values = ends_of(program, {}, twice)[0].values;
  return values;
}

/// Gradients that a program forgot on all ranks are added to those of the step that is made again.
bool is_right(const Program& program, const Values& values) {
  bool right = values == expected(program, -1);
  for (std::int64_t twice = 0; program.forgets && !right && twice < steps; ++twice)
    right = values == expected(program, twice);
  return right;
}

void play_one(const Program& program, Tally& tally) {
  const std::vector<End> ends = ends_of(program, program.faults);
  const bool gave_up = ends[0].gave_up;
  bool told = false;
  for (const End& end : ends) {
    told = told || !end.told.empty();
    INFO("told: " << fmt::format("{}", fmt::join(end.told, " | ")));
    CHECK(end.gave_up == gave_up);
    if (gave_up) continue;
    const bool right = is_right(program, end.values), alike = end.values == ends[0].values;
    CHECK(right);
    CHECK(alike);
    CHECK(end.scale == ends[0].scale);
  }
  ++(gave_up ? tally.gave_up : told ? tally.told : tally.same);
}

Tally play_seeds(std::uint64_t first, std::uint64_t last) {
  Tally tally;
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    const Program program = draw(seed);
    INFO("seed " << seed << ": " << describe(program));
    CHECK_NOTHROW(play_one(program, tally));
  }
  return tally;
}

}  // namespace

TEST_CASE("faults at random places of training loops leave no silent difference", "[faults][threads meet]") {
  const Tally tally = play_seeds(1, thread_sanitizer ? 40 : address_sanitizer ? 100 : 400);
  CHECK(tally.same > 0);
  CHECK(tally.told + tally.gave_up > 0);  // how a loop ends that was told depends on who was slow
}

TEST_CASE("many faults at random places of training loops leave no silent difference", "[.soak]") {
  const auto [first, last] = test::soak_seeds({401, 100000});
  const Tally tally = play_seeds(first, last);
  WARN(tally.same << " ended as without a fault, " << tally.told << " too after ranks were told, "
                  << tally.gave_up << " gave up");
}

namespace {

constexpr std::array meshes = {Way::per_parameter, Way::one_flat, Way::hybrid, Way::replicas};

/// A model of two ranks and an optimizer that has stepped it once; of two times two where shards have
/// replicas.
struct Trained {
  explicit Trained(World& world, Way way, int steps = 1)
      : all(world.group().blocks(world.size())),
        mesh(way == Way::hybrid ? DeviceMesh(world.group(), {2, world.size() / 2}, {"replicas", "shards"})
                                : world.mesh()) {
    manual_seed(4);
    model.emplace();
    if (way == Way::replicas)
      replicas.emplace(*model, world.group());
    else if (way == Way::one_flat)
      shard::FullyShardedDataParallel(*model, {.mesh = mesh});
    else
      shard::fully_shard(*model, {.mesh = mesh});
    optimizer.emplace(model->parameters(), nn::AdamWOptions{.lr = 0.1});
    for (int i = 0; i < steps; ++i) {
      backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  void backward() { mean(square((*model)(ones({2, 5})))).backward(); }
  /// When no rank is in the step before.
  void renew() const {
    all.barrier();
    mesh.renew();
  }
  std::string told() {
    return message_of<StateError>([&] { backward(); });
  }

  Group all;  ///< of its own
  DeviceMesh mesh;
  std::optional<Body> model;
  std::optional<shard::DataParallel> replicas;
  std::optional<nn::AdamW> optimizer;
};

template <class F>
void on_each_way(F&& body) {
  for (const Way way : meshes) {
    INFO("way " << static_cast<int>(way));
    CHECK_NOTHROW(run_ranks(way == Way::hybrid ? 4 : 2, [&](World& world) { body(world, way); }));
  }
}

void expect_text(const std::string& text, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts)
    expect(text.find(part) != std::string::npos, "'{}' is not in: {}", part, text);
}

}  // namespace

TEST_CASE("ranks that lost a step are named with their counts, until a checkpoint is loaded", "[faults]") {
  const TempDirectory place;
  on_each_way([&](World& world, Way way) {
    Trained t(world, way);
    const std::string folder = (place.path() / std::to_string(static_cast<int>(way))).string();
    shard::save_checkpoint(*t.model, *t.optimizer, folder, world.group());
    t.backward();
    if (world.rank() != 1) t.optimizer->step();
    t.optimizer->zero_grad();
    t.renew();
    for (int times = 0; times < 2; ++times) {
      const std::string told = t.told();
      expect_text(told, {"2 on rank", "1 on rank 1", folder, "load a checkpoint"});
      expect((told.find("bring_up") != std::string::npos) == has_replicas(way), "{}", told);
    }
    shard::load_checkpoint(*t.model, *t.optimizer, folder, world.group());
    expect(shard::steps_taken(*t.model) == 1, "{} steps", shard::steps_taken(*t.model));
    t.backward();
  });
}

TEST_CASE("the optimizer's state is of one step too before a model goes on", "[faults]") {
  on_each_way([&](World& world, Way way) {
    Trained t(world, way);
    const nn::StateDict values = shard::full_state_dict(*t.model);
    t.backward();
    if (world.rank() != 1) t.optimizer->step();
    t.optimizer->zero_grad();
    t.renew();
    shard::load_full_state_dict(*t.model, values);
    expect_text(t.told(), {"state are", "2 on rank", "1 on rank 1"});
    t.optimizer.emplace(t.model->parameters());
    t.backward();
  });
}

TEST_CASE("a checkpoint without an optimizer's state is gone back to and saved again, whoever had some",
          "[faults]") {
  const TempDirectory folder;
  for (const int culprit : {0, 1})
    on_each_way([&](World& world, Way way) {
      const std::string place =
          (folder.path() / fmt::format("{} {}", static_cast<int>(way), culprit)).string();
      Trained t(world, way, 0);
      std::filesystem::create_directories(place);
      shard::save_checkpoint(*t.model, *t.optimizer, place + "/first", world.group());
      t.backward();
      if (world.rank() == culprit) t.optimizer->step();
      t.renew();
      shard::load_checkpoint(*t.model, *t.optimizer, place + "/first", world.group());
      shard::save_checkpoint(*t.model, *t.optimizer, place + "/again", world.group());
      t.optimizer->zero_grad();
      t.backward();
      t.optimizer->step();
      Trained other(world, way, 0);
      shard::load_checkpoint(*other.model, *other.optimizer, place + "/again", world.group());
      other.backward();
      other.optimizer->step();
      const nn::StateDict found = shard::full_state_dict(*t.model),
                          expected = shard::full_state_dict(*other.model);
      for (std::size_t i = 0; i < found.size(); ++i)
        expect(found[i].second.to_vector<float>() == expected[i].second.to_vector<float>(), "'{}' differs",
               found[i].first);
    });
}

TEST_CASE("averages that are left on some ranks are told of before others are added", "[faults]") {
  on_each_way([&](World& world, Way way) {
    Trained t(world, way);
    for (const bool clears : {true, false}) {
      t.backward();
      if (world.rank() == 1 && clears) t.optimizer->zero_grad();
      if (world.rank() == 1 && !clears)
        for (nn::Parameter p : t.model->parameters())
          if (p.grad().defined()) mul_(p.grad(), 0.5);
      t.renew();
      expect_text(t.told(), {"zero_grad", "1 on rank"});
      t.optimizer->zero_grad();
      t.backward();
      t.optimizer->zero_grad();
    }
  });
}

TEST_CASE("averages that are left on some ranks keep no checkpoint from being saved", "[faults]") {
  const TempDirectory place;
  on_each_way([&](World& world, Way way) {
    Trained t(world, way);
    const std::string folder = (place.path() / std::to_string(static_cast<int>(way))).string();
    shard::save_checkpoint(*t.model, *t.optimizer, folder, world.group());
    t.backward();
    if (world.rank() == 1) t.optimizer->zero_grad();
    t.renew();
    shard::load_checkpoint(*t.model, *t.optimizer, folder, world.group());
    shard::save_checkpoint(*t.model, *t.optimizer, folder, world.group());
    shard::save_checkpoint(*t.model, folder, world.group());
    expect_text(t.told(), {"zero_grad", "1 on rank"});
    t.optimizer->zero_grad();
    t.backward();
  });
}

TEST_CASE("gradients that all ranks have clipped or unscaled are alike, those of some are not", "[faults]") {
  on_each_way([&](World& world, Way way) {
    for (const bool adds : {false, true})
      for (const int times : {0, 1, 2})
        for (const bool here_alone : {false, true}) {
          Trained t(world, way);
          const std::vector<nn::Parameter> params = t.model->parameters();
          const auto clip = [&] { shard::clip_grad_norm_(params, 0.001); };
          for (int i = 0; i <= (adds ? 1 : 0); ++i) t.backward();
          for (int i = 0; i < times; ++i) clip();
          if (here_alone && world.rank() == 1) nn::clip_grads_with_norm_(params, 0.001, ones({}));
          t.renew();
          if (here_alone)
            expect_text(t.told(), {"zero_grad", fmt::format("{} on rank", adds ? 2 : 1)});
          else
            t.backward();
        }
  });
}

TEST_CASE("what a program writes into averages counts, until they are cleared", "[faults]") {
  const auto halve = [](nn::Module& model, bool in_place) {
    const NoGrad guard;
    for (nn::Parameter p : model.parameters())
      if (const Tensor g = p.grad(); g.defined()) {
        if (in_place)
          mul_(g, 0.5);
        else
          p.set_grad(mul(g, 0.5));
      }
  };
  on_each_way([&](World& world, Way way) {
    for (const bool in_place : {true, false})
      for (const int before : {0, 1})
        for (const bool here_alone : {false, true}) {
          Trained t(world, way);
          t.backward();
          if (before == 1) halve(*t.model, in_place);
          t.backward();
          if (!here_alone || world.rank() == 1) halve(*t.model, in_place);
          t.renew();
          if (here_alone)
            expect_text(t.told(), {"zero_grad", "2 on rank"});
          else
            t.backward();
        }
    Trained t(world, way);
    t.backward();
    if (world.rank() == 1) nn::clip_grad_value_(t.model->parameters(), 1e-3);
    t.renew();
    expect_text(t.told(), {"zero_grad"});
    t.optimizer->zero_grad(nn::ZeroGrad::to_zero);
    for (int times = 0; times < 2; ++times) t.backward();
    t.renew();
    t.backward();
  });
}

TEST_CASE("a group without all ranks of a model that is renewed is not enough", "[faults]") {
  CHECK_NOTHROW(run_ranks(4, [&](World& world) {
    Trained t(world, Way::hybrid);
    t.all.barrier();
    t.mesh.group("shards").renew();
    expect_text(t.told(), {"shards", "renew() the mesh"});
    t.renew();
    t.backward();
  }));
}

TEST_CASE("a replica is brought up to the one that has taken most steps", "[faults]") {
  on_each_way([&](World& world, Way way) {
    Trained t(world, way);
    const bool first = way == Way::hybrid ? t.mesh.coordinate("replicas") == 0 : world.rank() == 0;
    if (!has_replicas(way)) {
      t.backward();
      if (first) t.optimizer->step();
      t.renew();
      const std::string told = message_of<StateError>([&] { shard::bring_up(*t.model, *t.optimizer); });
      return expect_text(told, {"no replicas", "load a checkpoint"});
    }
    t.backward();
    t.optimizer->set_lr(first ? 0.2 : 0.1);
    if (first) t.optimizer->step();
    t.optimizer->zero_grad();
    t.renew();
    expect_text(t.told(), {"bring_up"});
    shard::bring_up(*t.model, *t.optimizer);
    expect(t.optimizer->lr() == 0.2 && shard::steps_taken(*t.model) == 2, "options or counts");
    t.backward();
    t.optimizer->step();
    const nn::StateDict values = shard::full_state_dict(*t.model),
                        state = shard::full_optimizer_state(*t.optimizer);
    for (const nn::StateDict* dict : {&values, &state})
      for (const auto& [name, tensor] : *dict) {
        const Tensor theirs = clone(tensor);
        world.group().broadcast(theirs, 0);
        expect(to(theirs, f64).to_vector<double>() == to(tensor, f64).to_vector<double>(), "'{}' differs",
               name);
      }
  });
}

TEST_CASE("a replica is brought up to options with which an optimizer keeps other state", "[faults]") {
  on_each_way([&](World& world, Way way) {
    if (!has_replicas(way)) return;
    for (const double before : {0.0, 0.9}) {
      Trained t(world, way);
      nn::Sgd sgd(t.model->parameters(), {.lr = 0.1, .momentum = before});
      const auto step = [&] {
        t.backward();
        sgd.step();
        sgd.zero_grad();
      };
      step();
      const bool first = way == Way::hybrid ? t.mesh.coordinate("replicas") == 0 : world.rank() == 0;
      t.backward();
      if (first) {
        sgd.set_option("momentum", 0.9 - before);
        sgd.step();
      }
      sgd.zero_grad();
      t.renew();
      shard::bring_up(*t.model, sgd);
      step();
      for (const nn::StateDict& dict : {shard::full_state_dict(*t.model), shard::full_optimizer_state(sgd)}) {
        const Tensor entries = Tensor::from({static_cast<double>(dict.size())}, {1});
        world.group().all_reduce(entries, ReduceOp::max());
        expect(entries.item() == static_cast<double>(dict.size()), "{} entries", dict.size());
        for (const auto& [name, tensor] : dict) {
          const Tensor theirs = clone(tensor);
          world.group().broadcast(theirs, 0);
          expect(to(theirs, f64).to_vector<double>() == to(tensor, f64).to_vector<double>(), "'{}' differs",
                 name);
        }
      }
    }
  });
}

namespace {

struct Both final : nn::Layer<Both> {
  nn::Linear alone{5, 6};
  nn::BatchNorm1d norm{6};
  Tensor forward(const Tensor& x) { return norm(alone(x)); }
  void visit(auto&& on) {
    on("alone", alone);
    on("norm", norm);
  }
};

}  // namespace

TEST_CASE("buffers of data parallel modules are brought up beside sharded ones of the same ranks",
          "[faults]") {
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    manual_seed(4);
    Both model;
    const DeviceMesh mesh = world.mesh();
    shard::fully_shard(model.alone, {.mesh = mesh, .strategy = shard::ShardingStrategy::no_shard});
    const shard::DataParallel replicas(model.norm, mesh.all(),
                                       {.broadcast_buffers = shard::BroadcastBuffers::no});
    nn::AdamW optimizer(model.parameters());
    mean(square(model(ones({4, 5}) * Tensor::from({1.f, 2.f, 3.f, world.rank() + 4.f}, {4, 1})))).backward();
    optimizer.step();
    const std::vector<nn::NamedBuffer> buffers = model.named_buffers();
    expect(!buffers.empty(), "no buffers");
    shard::bring_up(model, optimizer);
    for (const nn::NamedBuffer& b : buffers) {
      const Tensor theirs = clone(b.tensor);
      mesh.all().broadcast(theirs, 0);
      expect(to(theirs, f64).to_vector<double>() == to(b.tensor, f64).to_vector<double>(), "'{}' differs",
             b.name);
    }
  }));
}

TEST_CASE("a scaler that lost an update has the others' scale, and its gradients do not count", "[faults]") {
  on_each_way([&](World& world, Way way) {
    Trained t(world, way);
    nn::GradScaler scaler({.init_scale = 4, .growth_interval = 1});
    const auto backward = [&] { scaler.scale(mean(square((*t.model)(ones({2, 5}))))).backward(); };
    backward();
    scaler.step(*t.optimizer);
    if (world.rank() == 0) scaler.update();
    t.optimizer->zero_grad();
    t.renew();
    backward();
    const std::string told = message_of<StateError>([&] { scaler.step(*t.optimizer); });
    expect_text(told, {"cost some ranks an update", "8"});
    expect(scaler.get_scale() == 8, "a scale of {}", scaler.get_scale());
    for (const nn::Parameter& p : t.model->parameters()) expect(!p.grad().defined(), "gradients are left");
    backward();
    scaler.step(*t.optimizer);
    scaler.update();
    expect(scaler.get_scale() == 16, "a scale of {}", scaler.get_scale());
  });
}

TEST_CASE("a scaler that lost an update keeps no gradients of unlike scales, of no optimizer", "[faults]") {
  on_each_way([&](World& world, Way way) {
    Trained a(world, way), b(world, way);
    nn::GradScaler scaler({.init_scale = 4, .growth_interval = 1});
    const Tensor x = ones({2, 5});
    const auto backward = [&] {
      scaler.scale(add(mean(square((*a.model)(x))), mean(square((*b.model)(x))))).backward();
    };
    backward();
    scaler.step(*a.optimizer);
    scaler.step(*b.optimizer);
    if (world.rank() == 0) scaler.update();
    a.renew();
    b.renew();
    a.optimizer->zero_grad();
    b.optimizer->zero_grad();
    backward();
    expect_text(message_of<StateError>([&] { scaler.step(*a.optimizer); }), {"cost some ranks an update"});
    for (Trained* t : {&a, &b})
      for (const nn::Parameter& p : t->model->parameters()) expect(!p.grad().defined(), "gradients are left");
    backward();
    scaler.step(*a.optimizer);
    scaler.step(*b.optimizer);
    scaler.update();
    expect(scaler.get_scale() == 16, "a scale of {}", scaler.get_scale());
  });
}

TEST_CASE("a loop of two optimizers goes on after a lost update of their scaler", "[faults]") {
  on_each_way([&](World& world, Way way) {
    Trained a(world, way), b(world, way);
    nn::GradScaler scaler({.init_scale = 4, .growth_interval = 100});
    const Tensor x = ones({2, 5});
    const auto iteration = [&] {
      a.optimizer->zero_grad();
      b.optimizer->zero_grad();
      scaler.scale(add(mean(square((*a.model)(x))), mean(square((*b.model)(x))))).backward();
      scaler.step(*a.optimizer);
      scaler.step(*b.optimizer);
      if (world.rank() == 0 || scaler.get_scale() == 5) scaler.update(5);
    };
    iteration();
    a.renew();
    b.renew();
    int told = 0;
    for (int i = 0; i < 4; ++i) try {
        iteration();
      } catch (const StateError&) {
        ++told;
      }
    expect(told == 1, "{} of 4 iterations were refused", told);
    expect(scaler.get_scale() == 5, "a scale of {}", scaler.get_scale());
  });
}

TEST_CASE("checkpoints and sharded states keep the count, and runs of unlike counts are not loaded") {
  const TempDirectory place;
  const std::string saved = (place.path() / "saved").string();
  for (const int ranks : {2, 3})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Trained t(world, Way::per_parameter);
      shard::save_checkpoint(*t.model, *t.optimizer, saved, world.group());
      shard::ShardedStateDict state = shard::sharded_state_dict(*t.model);
      for (shard::ShardedTensor& tensor : state) tensor.values = clone(tensor.values);
      Trained other(world, Way::one_flat);
      nn::Module& model = *other.model;
      shard::load_full_state_dict(model, shard::full_state_dict(*t.model));
      expect(shard::steps_taken(model) == 0, "of a state without a count");
      shard::load_sharded_state_dict(model, state, world.group());
      expect(shard::steps_taken(model) == 1, "of a sharded state");
      if (world.rank() == 1)
        for (shard::ShardedTensor& tensor : state) tensor.steps = 5;
      const std::string told =
          message_of<ValueError>([&] { shard::load_sharded_state_dict(model, state, world.group()); });
      expect_text(told, {"1 steps", "5"});
    }));
  manual_seed(5);
  Body alone;
  shard::load_checkpoint(alone, saved, {});
  CHECK(shard::steps_taken(alone) == 1);
}

TEST_CASE("a replay of a captured step compares after a renewal", "[faults]") {
  on_each_way([&](World& world, Way way) {
    Trained t(world, way);
    for (int i = 0; i < 2; ++i) {
      t.backward();
      t.optimizer->step();
      t.optimizer->zero_grad();
    }
    const Tensor x = ones({2, 5});
    sherd::Program step = capture(
        [&](std::span<const Tensor> in) {
          const Tensor loss = mean(square((*t.model)(in[0])));
          loss.backward();
          t.optimizer->step();
          t.optimizer->zero_grad();
          return std::vector{loss.detach()};
        },
        {x});
    step.replay({x});
    expect(shard::steps_taken(*t.model) == 5, "{} steps", shard::steps_taken(*t.model));
    if (world.rank() == 0)
      for (const nn::Parameter& p : t.model->parameters()) ++p.step_count().steps;
    t.renew();
    expect_text(message_of<StateError>([&] { step.replay({x}); }), {"load a checkpoint"});
  });
}

TEST_CASE("a forward after a capture compares, since only replays of that do", "[faults]") {
  on_each_way([&](World& world, Way way) {
    if (way == Way::replicas) return;  // its forwards compare nothing
    Trained t(world, way);
    t.backward();
    if (world.rank() != 1) t.optimizer->step();
    t.optimizer->zero_grad();
    t.renew();
    const Tensor x = ones({2, 5});
    const NoGrad guard;
    const sherd::Program kept =
        capture([&](std::span<const Tensor> in) { return std::vector{(*t.model)(in[0])}; }, {x});
    expect_text(message_of<StateError>([&] { (*t.model)(x); }), {"2 on rank", "1 on rank 1"});
  });
}
