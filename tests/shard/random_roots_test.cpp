// Random programs of two models in which ranks differ: which outputs a loss uses, which inputs require grad,
// which parameters a forward reads. Gradients and weights are those of unsharded models with gradients
// averaged by hand, or all ranks are refused alike.
#include <algorithm>
#include <map>

#include "autograd/autograd.h"
#include "nn/compile.h"
#include "shard/build.h"
#include "shard/fully_shard.h"
#include "shard/group.h"

#include "tests/catch.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"
#include "tests/seeds.h"
#include "tests/shard/averaging.h"
#include "tests/shard/random.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr std::int64_t width = 5;
using RankMask = unsigned;
constexpr RankMask all_ranks = ~RankMask{0};
bool has(RankMask mask, int rank) { return (mask >> rank & 1) != 0; }
RankMask draw_mask(Random& random) {
  switch (below(random, 4)) {
    case 0:
      return static_cast<RankMask>(random());
    case 1:
      return 0;
    default:
      return all_ranks;
  }
}

/// Recorded at this place on every rank, with a history.
Tensor marked(const Tensor& y) { return add(y, zeros({width}).requires_grad_()); }

/// Trees of pieces that differ have states that do: the finaliser of SplitMix64 (Steele et al., 2014).
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

/// Calls `act` with the value of the `left`-th piece that comes.
struct Event {
  int left = -1;
  std::function<void(const Tensor&)> act{};
  Tensor pass(const Tensor& y) {
    if (!act || !Context::current().grad_enabled() || left-- != 0) return y;
    const Tensor here = marked(y);
    act(here);
    return here;
  }
};

struct Piece final : nn::Layer<Piece> {
  nn::Linear own{width, width};
  nn::Param scale{rand({2}, {}, 0.5, 1.5)};
  nn::ModuleList<Piece> children;
  // How its next run goes.
  bool uses_own = true, again = false, blind = false;
  bool alike = false;  ///< own is read on all ranks: another model's group has it
  std::vector<std::size_t> order;
  Event* event = nullptr;

  /// Of how it runs next, for programs of it. What an event does is of one run.
  std::int64_t state() const {
    static thread_local std::int64_t runs = 0;
    if (event != nullptr && event->act) return ++runs;
    std::uint64_t all = mixed((uses_own ? 1 : 0) + (again ? 2 : 0) + (blind ? 4 : 0) + 8 * order.size());
    for (const std::size_t child : order)
      all = mixed(mixed(all + child) + static_cast<std::uint64_t>(children[child].state()));
    return static_cast<std::int64_t>(all | std::uint64_t{1} << 63);  // as no number of a run is
  }

  Tensor forward(const Tensor& x, std::int64_t) {
    Tensor y = uses_own ? add(x, mul(tanh(own(x)), sum(scale))) : x;
    if (event != nullptr) y = event->pass(y);
    for (const std::size_t child : order) {
      const GradMode mode(!(blind && child == order[0]) && Context::current().grad_enabled());
      const auto region = [&] { return children[child](y, children[child].state()); };
      y = again ? recompute(region) : region();
    }
    return y;
  }
  void visit(auto&& on) {
    on("own", own);
    on("scale", scale);
    on("children", children);
  }
};

/// What comes of all of it, and what comes of a part, or of no parameter.
struct Model final : nn::Layer<Model> {
  nn::Linear prefix{width, width};
  Piece body;
  nn::Linear head{width, width};
  int second = 0;

  std::pair<Tensor, Tensor> forward(const Tensor& x) {
    const Tensor low = tanh(prefix(x)), y = body(low, body.state());
    return {head(y), second == 0 ? mul(x, 2) : second == 1 ? low : mul(y, 2)};
  }
  void visit(auto&& on) {
    on("prefix", prefix);
    on("body", body);
    on("head", head);
  }
};

struct Models final : nn::Layer<Models> {
  nn::ModuleList<Model> of;
  Tensor forward(const Tensor& x) const { return x; }
  void visit(auto&& on) { on("of", of); }
};

void grow(Piece& piece, Random& random, int depth) {
  const int children = depth == 0 ? 0 : below(random, 3);
  for (int i = 0; i < children; ++i) grow(piece.children.emplace_back(), random, below(random, depth));
}

std::vector<Piece*> pieces_of(nn::Module& module) {
  std::vector<Piece*> pieces;
  for (const nn::NamedModule& m : module.named_modules())
    if (auto* piece = dynamic_cast<Piece*>(m.module)) pieces.push_back(piece);
  return pieces;
}

/// One call of a model or of a piece of it.
struct Forward {
  int model = 0;
  int piece = -1;  ///< alone; -1: the whole model
  std::uint64_t seed = 0;
  int from = -1;  ///< the forward whose output it gets
  RankMask wants = 0, detached = 0, first = 0, second = 0;
  int second_kind = 0;
  bool no_grad = false, region = false;
};
/// A parameter, read where no forward runs.
struct Reading {
  std::size_t parameter = 0;
  int before = 0;  ///< the forward
  RankMask used = 0;
};
/// What a hook of all ranks does.
struct Look {
  int forward = -1;
  int at = 0;  ///< piece that comes; -1: output; -2: input
  enum class Kind { read, unshard, run } kind = Kind::read;
  std::size_t parameter = 0;
};
struct Backward {
  std::vector<Forward> forwards;
  std::vector<Reading> readings;
  std::vector<Look> looks;
  bool synchronises = true, twice = false;
};
struct Step {
  std::vector<Backward> backwards;
  bool forwards_first = false, last_first = false;
  bool keeps_gathered = false, optimizes = true, clears = true;
  std::uint64_t freezes = 0;  ///< a seed
  int frozen_model = -1;
  enum class Replaced { nothing, object, values } replaced = Replaced::nothing;
  std::uint64_t seed = 0;
};

struct Shape {
  std::vector<std::vector<bool>> alone;  ///< by model and piece: whether it is sharded
  /// By model and piece, and of the whole model (-1): whether it has a parameter of the other model, which is
  /// trained when this one is frozen.
  std::vector<std::map<int, bool>> tied;
  std::size_t parameters = 0;
  bool no_gather = false;  ///< the prefixes are frozen, and no backward gathers them
};

Step draw_step(Random& random, const Shape& shape) {
  Step step{.forwards_first = once_in(random, 3),
            .last_first = once_in(random, 3),
            .keeps_gathered = once_in(random, 4),
            .optimizes = !once_in(random, 4),
            .clears = !once_in(random, 4),
            .freezes = once_in(random, 2) ? random() | 1 : 0,
            .frozen_model = once_in(random, 6) ? below(random, 2) : -1,
            .replaced =
                once_in(random, 5) ? static_cast<Step::Replaced>(below(random, 3)) : Step::Replaced::nothing,
            .seed = random()};
  const int backwards = once_in(random, 3) ? 2 : 1;
  for (int b = 0; b < backwards; ++b) {
    Backward backward;
    backward.synchronises = b + 1 == backwards || once_in(random, 2);
    backward.twice = once_in(random, 8);
    const int forwards = 1 + below(random, 3);
    for (int f = 0; f < forwards; ++f) {
      Forward forward{.model = below(random, 2), .seed = random()};
      if (once_in(random, 4)) {
        const auto& alone = shape.alone[static_cast<std::size_t>(forward.model)];
        const int piece = below(random, static_cast<int>(alone.size()));
        if (alone[static_cast<std::size_t>(piece)]) forward.piece = piece;
      }
      if (f > 0 && once_in(random, 2)) forward.from = below(random, f);
      forward.wants = draw_mask(random);
      forward.detached = once_in(random, 3) ? draw_mask(random) : 0;
      forward.first = once_in(random, 2) ? all_ranks : draw_mask(random);
      forward.second = once_in(random, 2) ? 0 : draw_mask(random);
      forward.second_kind = below(random, 3);
      forward.no_grad = once_in(random, 8);
      forward.region = once_in(random, 6);
      if (shape.no_gather && forward.piece < 0) {
        forward.wants = 0;
        forward.region = false;  // which would run the prefix again
        if (forward.from >= 0) forward.detached = all_ranks;
      }
      backward.forwards.push_back(forward);
    }
    for (int i = once_in(random, 3) ? 1 + below(random, 2) : 0; i > 0; --i)
      backward.readings.push_back(
          {random() % shape.parameters, below(random, forwards + 1), draw_mask(random)});
    for (int i = once_in(random, 2) ? 1 + below(random, 2) : 0; i > 0; --i)
      backward.looks.push_back({below(random, forwards), below(random, 5) - 2,
                                static_cast<Look::Kind>(once_in(random, 2) ? below(random, 3) : 0),
                                random() % shape.parameters});
    step.backwards.push_back(std::move(backward));
  }
  // What was not averaged is by a backward that comes to both models.
  if (!step.backwards[0].synchronises) {
    Backward all;
    for (const int model : {0, 1})
      all.forwards.push_back({.model = model, .seed = random(), .first = all_ranks});
    step.backwards.push_back(std::move(all));
    step.last_first = false;
    for (std::size_t b = 0; b + 1 < step.backwards.size(); ++b) step.backwards[b].synchronises = false;
  }
  return step;
}

// ---- what of it ranks must share ----

/// Whether looks at a forward are made, alike on all ranks.
bool looked_from(const Forward& it) { return it.first == all_ranks && !it.no_grad; }

/// Whether a rank's loss has the history of each forward. `come`: looks, a bit each, to whose pieces a
/// forward comes.
std::vector<bool> reached(const Backward& b, const Step& step, const Shape& shape, int rank, unsigned come) {
  const std::size_t n = b.forwards.size();
  std::vector<bool> grad(n), goes_on(n), reached(n);
  for (std::size_t f = 0; f < n; ++f) {
    const Forward& it = b.forwards[f];
    const bool input = it.from < 0 ? has(it.wants, rank)
                                   : !has(it.detached, rank) && goes_on[static_cast<std::size_t>(it.from)];
    bool trained =
        it.model != step.frozen_model || shape.tied[static_cast<std::size_t>(it.model)].at(it.piece);
    bool marked = false;  // where the history begins anew
    for (std::size_t l = 0; l < b.looks.size(); ++l) {
      if (b.looks[l].forward != static_cast<int>(f) || !looked_from(it)) continue;
      trained = trained || (b.looks[l].at >= 0 && has(come, static_cast<int>(l)));
      marked = marked || b.looks[l].at == -1;
    }
    grad[f] = !it.no_grad && (trained || input);
    goes_on[f] = grad[f] || marked;
  }
  for (std::size_t f = n; f-- > 0;) {
    const Forward& it = b.forwards[f];
    bool used = has(it.first, rank) || (it.piece < 0 && has(it.second, rank));
    for (std::size_t g = f + 1; g < n; ++g)
      used = used ||
             (b.forwards[g].from == static_cast<int>(f) && !has(b.forwards[g].detached, rank) && reached[g]);
    reached[f] = used && grad[f];
  }
  return reached;
}

bool legal(const Backward& b, const Step& step, const Shape& shape, int ranks) {
  for (int rank = 1; rank < ranks; ++rank) {
    for (unsigned come = 0; come < 1u << b.looks.size(); ++come)
      if (reached(b, step, shape, rank, come) != reached(b, step, shape, 0, come)) return false;
    for (const Reading& r : b.readings)
      if (has(r.used, rank) != has(r.used, 0)) return false;  // the read alone reaches no root
  }
  return true;
}

// ---- running ----

/// One rank's run of a program by one of the two holders of models.
struct Run {
  Models& models;
  int rank;
  int frozen_model;
  std::vector<float> seen{};
  std::vector<nn::Parameter> parameters = models.parameters();
  bool sharded = false, blinds = false;

  void plan(Piece& piece, Random& random, Event* event) {
    const RankMask users = once_in(random, 3) ? static_cast<RankMask>(random()) : all_ranks;
    piece.uses_own = piece.alike ? has(users, 0) : has(users, rank);
    piece.again = once_in(random, 5);
    piece.blind = once_in(random, 8) && blinds;
    piece.event = event;
    piece.order.clear();
    const auto n = static_cast<int>(piece.children.size());
    for (int i = n == 0 ? 0 : below(random, n + 2); i > 0; --i)
      piece.order.push_back(static_cast<std::size_t>(below(random, n)));
    for (Piece& child : piece.children) plan(child, random, event);
  }

  void look(const Look& look) {
    const NoGrad guard;
    const nn::Parameter& p = parameters[look.parameter];
    std::size_t nth = look.parameter;
    if (look.kind == Look::Kind::unshard && sharded)
      for (const nn::NamedModule& m : models.named_modules())
        if (shard::is_sharded(*m.module) && nth++ % 3 == 0) shard::unshard(*m.module);
    if (look.kind == Look::Kind::run) {
      Model& model = models.of[look.parameter % 2];
      Random random(look.parameter);
      plan(model.body, random, nullptr);
      seen.push_back(sum(model(ones({1, width})).first).item<float>());
      return;
    }
    seen.push_back(sum(square(p.tensor().detach())).item<float>());
  }

  /// The loss of one backward.
  Tensor loss_of(const Backward& b) {
    std::vector<Tensor> outputs, terms;
    std::vector<std::unique_ptr<Event>> events;
    const auto read = [&](int before) {
      for (const Reading& r : b.readings)
        if (r.before == before) {
          const Tensor term = sum(square(parameters[r.parameter].tensor()));
          if (has(r.used, rank)) terms.push_back(term);
        }
    };
    for (std::size_t f = 0; f < b.forwards.size(); ++f) {
      read(static_cast<int>(f));
      const Forward& it = b.forwards[f];
      manual_seed(it.seed + static_cast<std::uint64_t>(rank));
      Tensor x = randn({3, width});
      if (it.from >= 0) {
        x = outputs[static_cast<std::size_t>(it.from)];
        if (has(it.detached, rank)) x = x.detach();
      } else if (has(it.wants, rank)) {
        x.requires_grad_();
      }
      Model& model = models.of[static_cast<std::size_t>(it.model)];
      model.second = it.second_kind;
      Random random(it.seed);
      // Where nothing is trained, what comes of the inputs decides alone whether there is a history.
      blinds = it.from < 0 && b.looks.empty() && it.model != frozen_model;
      events.push_back(std::make_unique<Event>());
      const Look* at_output = nullptr;
      for (const Look& l : b.looks) {
        if (l.forward != static_cast<int>(f) || !looked_from(it)) continue;
        const auto hook = [this, l](const Tensor&) -> Tensor {
          look(l);
          return {};
        };
        if (l.at == -1) at_output = &l;
        if (l.at == -2 && it.from < 0 && it.wants == all_ranks) register_hook(x, hook).keep();
        if (l.at >= 0) *events.back() = {l.at, [hook](const Tensor& y) { register_hook(y, hook).keep(); }};
      }
      Tensor first, second;
      const GradMode mode(!it.no_grad && Context::current().grad_enabled());
      if (it.piece >= 0) {
        Piece& piece = *pieces_of(model)[static_cast<std::size_t>(it.piece)];
        plan(piece, random, events.back().get());
        const std::int64_t state = piece.state();
        first = it.region ? recompute([&] { return piece(x, state); }) : piece(x, state);
        if (it.no_grad) first = first.detach();  // it may be the input
      } else {
        plan(model.body, random, events.back().get());
        std::tie(first, second) = it.region ? recompute([&] { return model(x); }) : model(x);
      }
      for (Piece* piece : pieces_of(model)) piece->event = nullptr;
      const GradMode again(true);
      if (at_output != nullptr) first = marked(first);
      if (at_output != nullptr)
        register_hook(first, [this, l = *at_output](const Tensor&) -> Tensor {
          look(l);
          return {};
        }).keep();
      outputs.push_back(first);
      if (has(it.first, rank)) terms.push_back(mean(square(first)));
      if (second.defined() && has(it.second, rank)) terms.push_back(mean(square(second)));
    }
    read(static_cast<int>(b.forwards.size()));
    Tensor loss = zeros({});
    for (const Tensor& term : terms) loss = add(loss, term);
    return loss;
  }
};

void run_backward(const Backward& b, const Tensor& loss) {
  if (!loss.requires_grad()) return;
  if (b.twice) loss.backward({}, true);
  loss.backward();
}

void freeze(Models& models, const Step& step, const Shape& shape) {
  Random random(step.freezes);
  models.set_requires_grad(true);
  for (nn::NamedParameter& p : models.named_parameters()) {
    const bool kept = p.name.find("head") != std::string::npos || p.name.ends_with("scale");
    const bool frozen = step.freezes != 0 && once_in(random, 2) && !kept;
    const bool whole = step.frozen_model >= 0 && p.name.starts_with(fmt::format("of.{}.", step.frozen_model));
    const bool prefix = shape.no_gather && p.name.find("prefix") != std::string::npos;
    if (frozen || whole || prefix) p.parameter.set_requires_grad(false);
  }
}

struct Common {
  std::vector<DeviceMesh> meshes;
  shard::GroupLayout layout;
};

shard::Options draw_options(Random& random, const Common& common) {
  using enum shard::ShardingStrategy;
  constexpr shard::ShardingStrategy strategies[] = {full_shard, full_shard, shard_grad_op, zero1, no_shard};
  const shard::ReshardAfterForward reshard[] = {true, false, 2};
  const DeviceMesh& mesh = common.meshes[random() % common.meshes.size()];
  return {.mesh = mesh,
          .layout = common.layout,
          .strategy = strategies[below(random, 5)],
          .reshard_after_forward = reshard[below(random, mesh.sizes().back() % 2 == 0 ? 3 : 2)],
          .forward_prefetch = below(random, 4),
          .backward_prefetch = once_in(random, 3) ? shard::BackwardPrefetch::post(below(random, 4))
                                                  : shard::BackwardPrefetch::pre(below(random, 4))};
}

std::vector<DeviceMesh> draw_meshes(Random& random, World& world) {
  if (world.size() == 4 && once_in(random, 2)) {
    std::vector<DeviceMesh> meshes{world.mesh({2, 2}, {"replicas", "shards"})};
    if (once_in(random, 3)) meshes.push_back(world.mesh());
    return meshes;
  }
  return {world.mesh()};
}

void shard_pieces(Piece& piece, Random& random, const Common& common) {
  for (Piece& child : piece.children) shard_pieces(child, random, common);
  const shard::Options options = draw_options(random, common);
  if (once_in(random, 2)) shard::fully_shard(piece, options);
}

Shape shard_all(Models& models, Random& random, const Common& common) {
  Shape shape{.no_gather = once_in(random, 4)};
  for (Model& model : models.of) {
    shard::Options options = draw_options(random, common);
    if (shape.no_gather) {
      for (nn::Parameter p : model.prefix.parameters()) p.set_requires_grad(false);
      options.backward_gather = shard::BackwardGather::no;
    }
    if (shape.no_gather || once_in(random, 2)) shard::fully_shard(model.prefix, options);
    shard_pieces(model.body, random, common);
    shard::fully_shard(model, draw_options(random, common));
    std::vector<bool>& alone = shape.alone.emplace_back();
    for (const Piece* piece : pieces_of(model)) alone.push_back(shard::is_sharded(*piece));
  }
  for (std::size_t m = 0; m < 2; ++m) {
    const std::vector<nn::Parameter> others = models.of[1 - m].parameters();
    const auto shares = [&](const nn::Module& module) {
      return std::ranges::any_of(module.parameters(), [&](const nn::Parameter& p) {
        return std::ranges::find(others, p) != others.end();
      });
    };
    // The first model has it where both do.
    std::map<int, bool>& tied = shape.tied.emplace_back();
    tied[-1] = m == 1 && shares(models.of[m]);
    for (const Piece* piece : pieces_of(models.of[m]))
      tied[static_cast<int>(tied.size()) - 1] = m == 1 && shares(*piece);
  }
  shape.parameters = models.parameters().size();
  return shape;
}

void tie_some(Models& models, Random& random) {
  const std::vector<Piece*> pieces = pieces_of(models);
  for (int i = 0; i < 2; ++i) {
    Piece &a = *pieces[random() % pieces.size()], &b = *pieces[random() % pieces.size()];
    nn::tie(a.own.weight, b.own.weight);
    a.alike = b.alike = true;
  }
  // Whose weights are tied by way of a third one.
  for (Piece* piece : pieces) piece->alike = true;
}

void replace_one(Models& models, Models& by_hand, const Step& step) {
  if (step.replaced == Step::Replaced::nothing) return;
  const auto members = shard::find_members(models).parameters,
             others = shard::find_members(by_hand).parameters;
  Random random(step.seed + 7);
  const std::size_t i = random() % members.size();
  nn::Param &member = *members[i].member, &other = *others[i].member;
  for (Model& model : models.of) shard::reshard(model);
  manual_seed(step.seed);
  const Tensor whole = randn(other.shape());
  const Tensor part = shard::part_of(member.object(), whole);
  if (step.replaced == Step::Replaced::values) {
    member.set_data(part);
    other.set_data(whole);
  } else if (members[i].slots.size() == 1) {
    member = nn::Parameter(part);
    other = nn::Parameter(whole);
    for (Model& model : models.of) shard::full_state_dict(model);  // takes it in
  }
}

enum class Outcome : int { fine, refused, failed };

/// What became of `act` on all ranks: the least and the most.
std::pair<Outcome, Outcome> attempt(World& world, const Common& common, std::string& words,
                                    const std::function<void()>& act) {
  Outcome mine = Outcome::fine;
  try {
    act();
  } catch (const CollectiveError& e) {
    mine = Outcome::failed, words = e.what();
  } catch (const StateError& e) {
    mine = Outcome::refused, words = e.what();
  }
  bool met = true;
  try {
    world.group().barrier();
  } catch (const CollectiveError& e) {
    met = false;
    if (mine == Outcome::fine) mine = Outcome::failed, words = e.what();
  }
  const auto renew = [&] {
    for (const DeviceMesh& mesh : common.meshes) mesh.renew();
    world.group().renew();
  };
  if (mine != Outcome::fine || !met) renew();
  const Tensor codes = Tensor::from<int>({static_cast<int>(mine), -static_cast<int>(mine)}, {2});
  world.group().all_reduce(codes, ReduceOp::max());
  const std::vector<int> most = codes.to_vector<int>();
  return {static_cast<Outcome>(-most[1]), static_cast<Outcome>(most[0])};
}

void play_step(World& world, std::uint64_t seed, int number, const Step& step, const Shape& shape,
               const Common& common, Models& models, Models& by_hand) {
  const auto where = [&] { return fmt::format("seed {}, {} ranks, step {}", seed, world.size(), number); };
  replace_one(models, by_hand, step);
  for (Models* m : {&models, &by_hand}) {
    freeze(*m, step, shape);
    if (step.clears) m->zero_grad();
  }
  for (Model& model : models.of) shard::set_reshard_after_backward(model, !step.keeps_gathered);
  std::vector<const Backward*> order;
  for (const Backward& b : step.backwards) order.push_back(&b);
  if (step.forwards_first && step.last_first) std::ranges::reverse(order);
  const bool is_legal =
      std::ranges::all_of(order, [&](const Backward* b) { return legal(*b, step, shape, world.size()); });

  Run run{.models = models, .rank = world.rank(), .frozen_model = step.frozen_model, .sharded = true};
  std::string words;
  const auto [least, most] = attempt(world, common, words, [&] {
    std::vector<Tensor> losses;
    if (step.forwards_first)
      for (const Backward* b : order) losses.push_back(run.loss_of(*b));
    for (std::size_t b = 0; b < order.size(); ++b) {
      const Tensor loss = step.forwards_first ? losses[b] : run.loss_of(*order[b]);
      const bool synchronises = b + 1 == order.size() || order[b]->synchronises;
      std::optional<shard::NoSync> first, second;
      if (!synchronises) first.emplace(models.of[0]), second.emplace(models.of[1]);
      run_backward(*order[b], loss);
    }
  });
  expect(least == most || (!is_legal && least != Outcome::fine),
         "{}: ranks differ, from {} to {}; legal {}; here: {}", where(), static_cast<int>(least),
         static_cast<int>(most), is_legal, words);
  if (most != Outcome::fine) {
    const bool allowed = most == Outcome::refused || !is_legal;
    expect(allowed, "{}: {}", where(), words);
    for (Models* m : {&models, &by_hand}) m->zero_grad();
    for (Model& model : models.of) shard::reshard(model);
    return;
  }

  const Gradients before = gradients(by_hand);
  std::vector<std::vector<Gradients>> brought;
  std::vector<float> seen;
  // Backwards that average are a sum of averages; those between two averages are one.
  for (std::size_t b = 0; b < order.size(); ++b)
    for (int times = 0; times < (order[b]->twice ? 2 : 1); ++times) {
      std::vector<Gradients>& of_ranks = brought.emplace_back();
      for (int rank = 0; rank < world.size(); ++rank) {
        by_hand.zero_grad();
        Run theirs{.models = by_hand, .rank = rank, .frozen_model = step.frozen_model};
        const Tensor loss = theirs.loss_of(*order[b]);
        if (loss.requires_grad()) loss.backward();
        if (rank == world.rank()) std::ranges::move(theirs.seen, std::back_inserter(seen));
        of_ranks.push_back(gradients(by_hand));
      }
    }
  Gradients total = before;
  std::vector<std::vector<Gradients>> list;
  std::size_t next = 0;
  for (std::size_t b = 0; b < order.size(); ++b) {
    const bool synchronises = b + 1 == order.size() || order[b]->synchronises;
    for (int times = 0; times < (order[b]->twice ? 2 : 1); ++times) {
      list.push_back(brought[next++]);
      if (!synchronises) continue;
      total = with_averages(total, list, Unaveraged::own, models);
      list.clear();
    }
  }
  set_gradients(by_hand, total);
  const std::string found = difference(whole_gradients(models, world.group()), total);
  expect(found.empty(), "{}: {}; legal {}", where(), found, is_legal);
  // A hook runs as often, but of two forwards that ran first in another order.
  std::ranges::sort(run.seen), std::ranges::sort(seen);
  expect(run.seen == seen, "{}: hooks saw {} values for {}", where(), run.seen.size(), seen.size());
  if (step.optimizes) {
    nn::Sgd(models.parameters(), {.lr = 0.1}).step();
    nn::Sgd(by_hand.parameters(), {.lr = 0.1}).step();
  }
}

enum class Compiles { nothing, layers, pieces };

/// Compiles some layers, or pieces with what is sharded in them, not the same ones on all ranks: what each
/// calls stays as it was.
void compile_some(Models& models, std::uint64_t seed, int rank, Compiles what) {
  Random random(seed + 1000 * static_cast<std::uint64_t>(rank + 1));
  for (Piece* piece : pieces_of(models))
    if (what == Compiles::pieces && static_cast<nn::Module*>(piece)->compiled() == nullptr &&
        once_in(random, 2))
      nn::compile(*piece,
                  {.executor = static_cast<Executor>(random() % 3), .sharding_hooks = ShardingHooks::inside});
  for (const nn::NamedModule& m : models.named_modules())
    if (what == Compiles::layers && dynamic_cast<nn::Linear*>(m.module) != nullptr && !once_in(random, 3))
      nn::compile(*m.module, {.executor = static_cast<Executor>(random() % 3),
                              .managed_parameters = once_in(random, 2) ? ManagedParameters::trusted
                                                                       : ManagedParameters::guarded});
}

/// Pieces of rank 0 whose programs ran, and had forwards of sharded modules in them.
int programs_around_units(Models& models) {
  int programs = 0;
  for (Piece* piece : pieces_of(models)) {
    const nn::Module& module = *piece;
    if (module.compiled() == nullptr) continue;
    const CompiledPrograms& of = nn::compiled_programs(module);
    programs += of.stats().hits > 0 && of.text().find("\nbegin ") != std::string::npos ? 1 : 0;
  }
  return programs;
}

/// Gives `programs_around_units`.
int play(World& world, std::uint64_t seed, Compiles compiles) {
  Random random(seed);
  manual_seed(seed);
  Models by_hand;
  for (int i = 0; i < 2; ++i) grow(by_hand.of.emplace_back().body, random, 2);
  if (once_in(random, 4)) tie_some(by_hand, random);
  Models models = by_hand.clone();
  const std::vector<Piece*> from = pieces_of(by_hand), to = pieces_of(models);
  for (std::size_t i = 0; i < to.size(); ++i) to[i]->alike = from[i]->alike;
  const Common common{draw_meshes(random, world),
                      once_in(random, 2) ? shard::GroupLayout::flat : shard::GroupLayout::per_parameter};
  const Shape shape = shard_all(models, random, common);
  if (compiles != Compiles::nothing) compile_some(models, seed, world.rank(), compiles);
  for (int i = 0; i < 3; ++i) {
    Step step = draw_step(random, shape);
    const auto shared = [&](const Backward& b) { return legal(b, step, shape, world.size()); };
    while (!std::ranges::all_of(step.backwards, shared)) step = draw_step(random, shape);
    const bool optimizes = std::exchange(step.optimizes, false);
    if (compiles == Compiles::pieces)  // and then by programs
      for (int times = 0; times < 2; ++times) play_step(world, seed, i, step, shape, common, models, by_hand);
    step.optimizes = optimizes;
    play_step(world, seed, i, step, shape, common, models, by_hand);
  }
  const nn::StateDict whole = shard::full_state_dict(models), expected = by_hand.state_dict();
  for (std::size_t p = 0; p < whole.size(); ++p)
    expect(whole[p].second.to_vector<float>() == expected[p].second.to_vector<float>(),
           "seed {}, {} ranks: '{}' differs", seed, world.size(), whole[p].first);
  return programs_around_units(models);
}

}  // namespace

namespace {

/// How many of `all` the build at hand plays.
std::uint64_t seeds(std::uint64_t all) {
  return test::thread_sanitizer ? 2 : test::address_sanitizer ? all / 5 : all;
}
/// Gives `programs_around_units` of all.
int play_seeds(std::uint64_t first, std::uint64_t last, Compiles compiles = Compiles::nothing) {
  int programs = 0;
  for (std::uint64_t seed = first; seed <= last; ++seed)
    for (const int ranks : {1, 2, 3, 4}) {
      INFO("seed " << seed << ", " << ranks << " ranks");
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        const int here = play(world, seed, compiles);
        if (world.rank() == 0) programs += here;
      }));
    }
  return programs;
}

}  // namespace

TEST_CASE("random programs of two models, in which ranks differ, train like models by hand") {
  play_seeds(1, seeds(60));
}
TEST_CASE("programs whose forwards begin with what others keep, or are frozen, train like models by hand") {
  for (const std::uint64_t seed : {489, 613, 20168, 20644, 20936, 21024, 21286, 21478, 21702, 22004, 1000560,
                                   3000278, 5000291, 6000635, 7000071, 14000494, 32000646})
    play_seeds(seed, seed);
}
TEST_CASE("random programs of two models, of which ranks compile some layers, train like models by hand") {
  play_seeds(1, seeds(40), Compiles::layers);
}
TEST_CASE("random programs of two models, of which ranks compile pieces whole, train like models by hand") {
  CHECK(play_seeds(1, seeds(40), Compiles::pieces) >= static_cast<int>(seeds(40) / 4));
}
TEST_CASE("compiled layers read, and ask after a renewal, as eager ones do on other ranks") {
  for (const std::uint64_t seed : {952, 1904, 3267, 5136, 6075, 22080, 16000794, 17000130})
    play_seeds(seed, seed, Compiles::layers);
}
TEST_CASE("many random programs of two models, in which ranks differ, train like models by hand", "[.soak]") {
  const auto [first, last] = test::soak_seeds({61, 20000});
  play_seeds(first, last);
}
TEST_CASE("many random programs of two models, of which ranks compile some layers, train like models by hand",
          "[.soak]") {
  const auto [first, last] = test::soak_seeds({41, 20000});
  play_seeds(first, last, Compiles::layers);
}
TEST_CASE(
    "many random programs of two models, of which ranks compile pieces whole, train like models by hand",
    "[.soak]") {
  const auto [first, last] = test::soak_seeds({41, 20000});
  play_seeds(first, last, Compiles::pieces);
}
