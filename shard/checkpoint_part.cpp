#include "shard/checkpoint_part.h"

#include <algorithm>
#include <bit>
#include <set>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/shown.h"
#include "shard/agree.h"
#include "shard/build.h"
#include "shard/group.h"

namespace sherd::shard {

ShardedStateDict ModelPart::state(const Group& ranks) const {
  ShardedStateDict state;
  together(ranks, saving, [&] { state = sharded_state_dict(model_); });
  if (frozen_ == Frozen::saved) return state;
  std::set<std::string> frozen;
  for (const FoundParameter& p : find_members(model_).parameters)
    if (!p.member->requires_grad()) frozen.insert(p.name);
  std::erase_if(state, [&](const ShardedTensor& t) { return frozen.contains(t.name); });
  return state;
}

void ModelPart::take_unknown(std::vector<std::string> names) {
  if (strict_ == nn::Strict::yes) check_none_left(loading, names, StagedModel::what);
  mismatch_ = {staged_->mismatch().missing, std::move(names)};
}

namespace {

/// Whether an entry is of a parameter that has a number in place of a name.
bool is_by_number(const std::string& entry) {
  const std::string_view key = std::string_view(entry).substr(entry.find('.') + 1);
  const std::size_t end = key.rfind('.');
  return end != key.npos && key.substr(0, end).find_first_not_of("0123456789") == key.npos;
}

}  // namespace

ShardedStateDict OptimizerPart::state(const Group& ranks) const {
  const ShardedStateDict state = sharded_optimizer_state(model_, optimizer_);
  const auto is_state = [](const ShardedTensor& t) { return t.name.starts_with("state."); };
  together(ranks, saving, [&] {
    check<ValueError>(
        std::ranges::none_of(state, is_state) ||
            std::ranges::any_of(state,
                                [&](const ShardedTensor& t) { return is_state(t) && !is_by_number(t.name); }),
        "save_checkpoint: the optimizer '{}' has no parameter of the model that it was added with; "
        "give its own",
        name());
  });
  return state;
}

// ---- averages ----

namespace {

/// Of the averages of a model whose state is `own`, that of `t`: the one of its name, or where its values are
/// a part of a larger one's (a flat parameter's) that part.
Tensor average_of(const ShardedTensor& t, const nn::StateDict& own, const nn::StateDict& averages) {
  const Tensor& values = t.values;
  for (const auto& [name, average] : averages)
    if (name == t.name && average.numel() == values.numel()) return reshape(average, {values.numel()});
  for (std::size_t i = 0; i < own.size() && i < averages.size(); ++i) {
    const Tensor &mine = own[i].second, &its = averages[i].second;
    const std::int64_t first = values.layout().offset - mine.layout().offset;
    if (own[i].first == averages[i].first && mine.shape() == its.shape() &&
        mine.storage_ref() == values.storage_ref() && first >= 0 && first + values.numel() <= mine.numel())
      return narrow(reshape(its, {its.numel()}), 0, first, values.numel());
  }
  fail<StateError>("ema: there is no average of '{}' of shape {}; give the model that it was made of", t.name,
                   t.shape);
}

}  // namespace

ShardedStateDict AveragePart::averages() const {
  const NoGrad guard;
  ShardedStateDict state = sharded_state_dict(model_);  // takes in what was replaced
  const nn::StateDict own = model_.state_dict();
  for (ShardedTensor& t : state) t.values = average_of(t, own, ema_.state_dict());
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
    check<ShapeError>(*shape == t.shape, "{}: '{}' has shape {} in the module and {} in the state{}", loading,
                      t.name, t.shape, *shape, from.whose(t.name));
    used.add(t.name);
    copies_.emplace_back(t.values, to(from.read(t.name, t.begin, t.values.numel()), t.values.dtype()));
  }
  unknown_ = used.others(from);
}

void AveragePart::commit() {
  const NoGrad guard;
  for (const auto& [into, from] : std::exchange(copies_, {})) copy_(into, from);
}

// ---- numbers ----

namespace {

constexpr std::string_view random_entry = "random";
std::string number_entry(std::string_view name) { return fmt::format("number.{}", name); }
std::string scaler_entry(std::string_view name, std::string_view of) {
  return fmt::format("scaler.{}.{}", name, of);
}

/// All ranks have it; the first one's counts.
ShardedTensor of_first_rank(std::string name, const Tensor& number) {
  return {std::move(name), Shape{}, 0, reshape(to(number.detach(), Device::cpu()), {1}), 0, 0};
}
std::int64_t bits(std::uint64_t number) { return std::bit_cast<std::int64_t>(number); }
template <class T>
Tensor tensor_of(std::vector<T> numbers) {
  return Tensor::from(numbers, {std::ssize(numbers)}, Device::cpu());
}

}  // namespace

ShardedTensor NumbersPart::of_part(std::string_view part, std::uint64_t checksum) {
  return of_first_rank(checksum_entry(part), tensor_of<std::int64_t>({bits(checksum)}));
}

std::string NumbersPart::description() const {
  std::string names = name();
  for (const Number& number : numbers_) names += " " + number.name;
  for (const Scaler& of : scalers_) names += " " + of.name;
  return names;
}

ShardedStateDict NumbersPart::state(const Group& ranks) const {
  const NoGrad guard;
  const RankOfGroup me(ranks);
  ShardedStateDict state;
  together(ranks, saving, [&] {
    for (const Number& number : numbers_)
      std::visit(
          [&](const auto& get) {
            state.push_back(of_first_rank(number_entry(number.name), tensor_of(std::vector{get()})));
          },
          number.get);
    for (const Scaler& of : scalers_)
      for (const auto& [name, tensor] : of.scaler->state_dict())
        state.push_back(of_first_rank(scaler_entry(of.name, name), tensor));
    const RandomKey key = Context::current().generator().state();
    state.push_back({std::string(random_entry), Shape{me.ranks, 2}, 2 * me.rank,
                     tensor_of<std::int64_t>({bits(key.seed), bits(key.offset)}), 0, 1});
  });
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
  const std::vector<std::int64_t> numbers =
      to(from.read(name, 0, 2 * ranks), DType::i64).to_vector<std::int64_t>();
  const auto row = [&](std::int64_t r) {
    const auto at = static_cast<std::size_t>(2 * r);
    return RandomKey{std::bit_cast<std::uint64_t>(numbers[at]),
                     std::bit_cast<std::uint64_t>(numbers[at + 1])};
  };
  if (rank < ranks) return row(rank);
  RandomKey key = row(0);
  for (std::int64_t r = 1; r < ranks; ++r)
    if (!(row(r) == row(0))) {
      key.seed = derived_seed(key.seed, static_cast<std::uint64_t>(rank));
      break;
    }
  return key;
}

}  // namespace

void NumbersPart::stage(const StateSource& from) {
  std::vector<std::string> left = from.names();
  std::erase(left, random_entry);
  std::erase_if(left, [](const std::string& name) { return name.starts_with(checksum_entry("")); });
  const auto read = [&](const std::string& entry, const std::string& name, std::string_view way_out) {
    const std::optional<Shape> shape = from.shape(entry);
    check<ValueError>(shape.has_value(), "{}: the save has no '{}'; {}", loading, name, way_out);
    check<ShapeError>(shape->numel() == 1, "{}: '{}' has shape {} in the save, and is one number here",
                      loading, name, *shape);
    std::erase(left, entry);
    return from.read(entry, 0, 1);
  };
  values_.clear();
  for (const Number& number : numbers_) {
    values_.push_back(read(number_entry(number.name), number.name, "leave it out, and set it yourself"));
    const bool counts = std::holds_alternative<std::function<std::int64_t()>>(number.get);
    const DType saved = values_.back().dtype(), own = counts ? DType::i64 : DType::f64;
    check<ValueError>(saved == own, "{}: '{}' is {} in the save, and {} here; add it as it was saved",
                      loading, number.name, name_of(saved), name_of(own));
  }
  for (Scaler& of : scalers_) {
    of.state.clear();
    for (const auto& [name, tensor] : of.scaler->state_dict())
      of.state.emplace_back(name, reshape(read(scaler_entry(of.name, name), of.name + "." + name,
                                               "it was saved while scaling was off: leave the scaler out"),
                                          {}));
    // Of one that is off nothing is loaded.
    std::erase_if(left, [&](const std::string& name) { return name.starts_with(scaler_entry(of.name, "")); });
  }
  check<ValueError>(left.empty(),
                    "{}: the save has '{}', which is no part of this run; add it as it was saved", loading,
                    left.empty() ? "" : shown(left[0].substr(left[0].find('.') + 1)));
  random_ = generator_in(from, rank_);
}

void NumbersPart::settle() {
  for (const Scaler& of : scalers_) commits_.push_back(of.scaler->stage_state_dict(of.state));
  for (std::size_t i = 0; i < numbers_.size(); ++i)
    std::visit(
        [&]<class T>(const std::function<void(T)>& set) {
          const T before = std::get<std::function<T()>>(numbers_[i].get)();
          set(values_[i].item<T>());
          undos_.push_back([&set, before] { set(before); });  // of what was taken
        },
        numbers_[i].set);
}

void NumbersPart::commit() {
  for (const auto& commit : std::exchange(commits_, {})) commit();
  undos_.clear();
  Context::current().generator().set_state(random_);
}

void NumbersPart::undo() {
  commits_.clear();
  for (const auto& undo : std::exchange(undos_, {})) undo();
}

}  // namespace sherd::shard
