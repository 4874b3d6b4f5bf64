#include "shard/checkpoint_part.h"

#include <algorithm>
#include <bit>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/shown.h"
#include "shard/agree.h"
#include "shard/group.h"

namespace sherd::shard {

ShardedStateDict ModelPart::state(const Group& ranks) const {
  ShardedStateDict state;
  together(ranks, saving, [&] { state = sharded_state_dict(model_); });
  return state;
}

ShardedStateDict OptimizerPart::state(const Group&) const {
  return sharded_optimizer_state(model_, optimizer_);
}

// ---- averages ----

namespace {

/// Of a state that lies as `own` does, what is in the place of `values`, which are one of them or a part of
/// one.
Tensor in_place_of(const Tensor& values, const nn::StateDict& own, const nn::StateDict& other,
                   const std::string& name) {
  for (std::size_t i = 0; i < own.size() && i < other.size(); ++i) {
    const Tensor &mine = own[i].second, &its = other[i].second;
    const std::int64_t first = values.layout().offset - mine.layout().offset;
    if (own[i].first != other[i].first || mine.shape() != its.shape() ||
        mine.storage_ref() != values.storage_ref() || first < 0 || first + values.numel() > mine.numel())
      continue;
    return narrow(reshape(its, {its.numel()}), 0, first, values.numel());
  }
  fail<StateError>("ema: there is no average of '{}' of shape {}; give the model that it was made of", name,
                   values.shape());
}

}  // namespace

ShardedStateDict AveragePart::averages() const {
  const NoGrad guard;
  const nn::StateDict own = model_.state_dict();
  ShardedStateDict state = sharded_state_dict(model_);
  for (ShardedTensor& t : state) t.values = in_place_of(t.values, own, ema_.state_dict(), t.name);
  return state;
}

ShardedStateDict AveragePart::state(const Group& ranks) const {
  ShardedStateDict state;
  together(ranks, saving, [&] { state = averages(); });
  return state;
}

void AveragePart::stage(const StateSource& from) {
  copies_.clear();
  UsedNames used;
  for (const ShardedTensor& t : averages()) {
    const std::optional<Shape> shape = from.shape(t.name);
    check<ValueError>(shape.has_value(), "{}: the state lacks '{}'{}", loading, t.name,
                      from.instead_of(t.name));
    check<ShapeError>(*shape == t.shape, "{}: '{}' has shape {} in the module and {} in the state", loading,
                      t.name, t.shape, *shape);
    used.add(t.name);
    copies_.emplace_back(t.values, to(from.read(t.name, t.begin, t.values.numel()), t.values.dtype()));
  }
  used.check_all(loading, from, "average");
}

void AveragePart::commit() {
  const NoGrad guard;
  for (const auto& [into, from] : std::exchange(copies_, {})) copy_(into, from);
}

// ---- numbers ----

namespace {

constexpr std::string_view random_entry = "random";

/// All ranks have it; the first one's counts.
ShardedTensor of_first_rank(std::string name, const Tensor& number) {
  return {std::move(name), Shape{}, 0, reshape(to(number.detach(), Device::cpu()), {1}), 0, 0};
}
std::int64_t bits(std::uint64_t number) { return std::bit_cast<std::int64_t>(number); }

}  // namespace

ShardedStateDict NumbersPart::state(const Group& ranks) const {
  const NoGrad guard;
  const RankOfGroup me(ranks);
  ShardedStateDict state;
  for (const Number& number : numbers_)
    std::visit(
        [&](const auto& get) {
          state.push_back(of_first_rank(number.name, Tensor::from(std::vector{get()}, {1}, Device::cpu())));
        },
        number.get);
  for (const Scaler& of : scalers_)
    for (const auto& [name, tensor] : of.scaler->state_dict())
      state.push_back(of_first_rank(of.name + "." + name, tensor));
  const RandomKey key = Context::current().generator().state();
  state.push_back({std::string(random_entry), Shape{me.ranks, 2}, 2 * me.rank,
                   Tensor::from(std::vector{bits(key.seed), bits(key.offset)}, {2}, Device::cpu()), 0, 1});
  return state;
}

namespace {

/// The generator of rank `rank`, of which more may load than have saved.
RandomKey generator_in(const StateSource& from, std::int64_t rank) {
  const std::string name(random_entry);
  const std::optional<Shape> shape = from.shape(name);
  check<ValueError>(shape && shape->rank() == 2 && (*shape)[0] > 0 && (*shape)[1] == 2,
                    "{}: the save has no '{}' of two numbers a rank", loading, name);
  const std::int64_t ranks = (*shape)[0];
  const auto row = [&](std::int64_t r) {
    const std::vector<std::int64_t> numbers =
        to(from.read(name, 2 * r, 2), DType::i64).to_vector<std::int64_t>();
    return RandomKey{std::bit_cast<std::uint64_t>(numbers[0]), std::bit_cast<std::uint64_t>(numbers[1])};
  };
  if (rank < ranks) return row(rank);
  RandomKey key = row(0);
  const bool alike = ranks == 1 || row(1) == key;
  if (!alike) key.seed = derived_seed(key.seed, static_cast<std::uint64_t>(rank));
  return key;
}

}  // namespace

void NumbersPart::stage(const StateSource& from) {
  UsedNames used;
  const auto read = [&](const std::string& name, const char* what) {
    const std::optional<Shape> shape = from.shape(name);
    check<ValueError>(shape.has_value(), "{}: the save has no {} '{}'{}", loading, what, name,
                      from.instead_of(name));
    check<ShapeError>(shape->numel() == 1, "{}: '{}' has shape {} in the save, and is one number here",
                      loading, name, *shape);
    used.add(name);
    return from.read(name, 0, 1);
  };
  values_.clear();
  for (const Number& number : numbers_) {
    values_.push_back(read(number.name, "number"));
    const bool counts = std::holds_alternative<std::function<std::int64_t()>>(number.get);
    check<DTypeError>(values_.back().dtype() == (counts ? DType::i64 : DType::f64),
                      "{}: '{}' is {} in the save, and {} here", loading, number.name,
                      name_of(values_.back().dtype()), name_of(counts ? DType::i64 : DType::f64));
  }
  for (Scaler& of : scalers_) {
    of.state.clear();
    for (const auto& [name, tensor] : of.scaler->state_dict())
      of.state.emplace_back(name, reshape(read(of.name + "." + name, "scaler"), {}));
  }
  random_ = generator_in(from, rank_);
  used.add(std::string(random_entry));
  for (const std::string& name : from.names())
    if (name.starts_with(checksum_entry(""))) used.add(name);
  used.check_all(loading, from, "number");
}

void NumbersPart::settle() {
  commits_.clear();
  for (const Scaler& of : scalers_) commits_.push_back(of.scaler->stage_state_dict(of.state));
}

void NumbersPart::commit() {
  for (const auto& commit : std::exchange(commits_, {})) commit();
  for (std::size_t i = 0; i < numbers_.size(); ++i)
    std::visit([&]<class T>(const std::function<void(T)>& set) { set(values_[i].item<T>()); },
               numbers_[i].set);
  Context::current().generator().set_state(random_);
}

}  // namespace sherd::shard
