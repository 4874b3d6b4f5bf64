#include "nn/key_values.h"

#include <algorithm>
#include <list>

#include "autograd/capture/effects.h"
#include "runtime/context.h"
#include "runtime/error.h"

namespace sherd::nn {

namespace {

bool alike(std::span<const std::int64_t> seen) {
  return std::ranges::adjacent_find(seen, std::ranges::not_equal_to{}) == seen.end();
}

Tensor on(Device device, std::span<const std::int64_t> numbers, Shape shape) {
  return to(Tensor::from(std::vector<std::int64_t>(numbers.begin(), numbers.end()), shape, Device::cpu()),
            device);
}

/// Rows times steps: `steps` numbers from what each has seen on.
std::vector<std::int64_t> numbered(std::span<const std::int64_t> seen, std::int64_t steps) {
  std::vector<std::int64_t> all;
  for (const std::int64_t first : seen)
    for (std::int64_t i = 0; i < steps; ++i) all.push_back(first + i);
  return all;
}

/// The same with room for `room` positions from the first on, the kept ones at its beginning.
Tensor moved(const Tensor& kept, std::int64_t room) {
  const Shape& s = kept.shape();
  const Tensor wider = empty({s[0], s[1], room, s[3]}, {kept.dtype(), kept.device()});
  if (s[2] > 0) copy_(narrow(wider, 2, 0, s[2]), kept);
  return wider;
}

}  // namespace

/// What layers of one kind would each make alike: turns and masks of the positions at hand.
class CachedTables {
 public:
  RotaryTurns turns(const RotaryOptions& o, std::int64_t width, std::span<const std::int64_t> seen,
                    std::int64_t steps, TensorOptions x) {
    for (Turning& t : turning_)
      if (t.options == o && t.width == width && t.tensor.dtype == x.dtype && t.tensor.device == x.device)
        return of(t, seen, steps);
    turning_.push_back({o, width, x, {}, {}, {}, 0});
    return of(turning_.back(), seen, steps);
  }
  /// (B, 1, 1, keys), true from each row's first key on.
  Tensor own_keys(std::span<const std::int64_t> seen, std::int64_t keys, Device device) {
    if (mask_.defined() && mask_.size(3) == keys && std::ranges::equal(masked_, seen)) return mask_;
    masked_.assign(seen.begin(), seen.end());
    std::vector<std::int64_t> first;
    for (const std::int64_t n : seen) first.push_back(std::max<std::int64_t>(keys - n, 0));
    mask_ = greater_equal(arange(0, keys, 1, {DType::i64, device}),
                          on(device, first, {std::ssize(first), 1, 1, 1}));
    return mask_;
  }

 private:
  /// The turns of one kind of layer: of all positions up to some, and of those at hand.
  struct Turning {
    RotaryOptions options;
    std::int64_t width;
    TensorOptions tensor;
    RotaryTurns all, now;
    std::vector<std::int64_t> seen;
    std::int64_t steps;
  };
  static RotaryTurns of(Turning& t, std::span<const std::int64_t> seen, std::int64_t steps) {
    if (t.now.cosines.defined() && t.steps == steps && std::ranges::equal(t.seen, seen)) return t.now;
    t.now = made(t, seen, steps);
    t.steps = steps;
    t.seen.assign(seen.begin(), seen.end());
    return t.now;
  }
  static RotaryTurns made(Turning& t, std::span<const std::int64_t> seen, std::int64_t steps) {
    const std::int64_t end = std::ranges::max(seen) + steps;
    const RotaryScaling& s = t.options.scaling;
    // There the turns of all positions go by the length of the sequence.
    if (s.kind == RotaryKind::dynamic && static_cast<double>(end) > s.original) return by_row(t, seen, steps);
    if (!t.all.cosines.defined() || t.all.cosines.size(0) < end) {
      std::int64_t most = std::max<std::int64_t>(2 * end, 64);
      if (s.kind == RotaryKind::dynamic)
        most = std::min(most, std::max(static_cast<std::int64_t>(s.original), end));
      t.all = rotary_turns(most, t.width, t.options, t.tensor);
    }
    if (alike(seen))
      return {narrow(t.all.cosines, 0, seen[0], steps), narrow(t.all.sines, 0, seen[0], steps)};
    const std::vector<std::int64_t> numbers = numbered(seen, steps);
    const Tensor index = on(t.tensor.device, numbers, {std::ssize(numbers)});
    return {index_select(t.all.cosines, 0, index), index_select(t.all.sines, 0, index)};
  }
  static RotaryTurns by_row(const Turning& t, std::span<const std::int64_t> seen, std::int64_t steps) {
    std::vector<Tensor> cosines, sines;
    RotaryOptions here = t.options;
    for (const std::int64_t first : seen.first(alike(seen) ? 1 : seen.size())) {
      here.first = first;
      const RotaryTurns row = rotary_turns(steps, t.width, here, t.tensor);
      cosines.push_back(row.cosines), sines.push_back(row.sines);
    }
    return {cat(cosines, 0), cat(sines, 0)};
  }

  std::list<Turning> turning_;  // one or two
  Tensor mask_;
  std::vector<std::int64_t> masked_;
};

KeyValues::KeyValues() : tables_(std::make_shared<CachedTables>()) {}
KeyValues::KeyValues(const KeyValues& other)
    : first_(other.first_),
      count_(other.count_),
      seen_(other.seen_),
      tables_(std::make_shared<CachedTables>()) {
  if (!other.keys_.defined()) return;
  keys_ = clone(other.keys_), values_ = clone(other.values_);
}
KeyValues& KeyValues::operator=(KeyValues other) {
  swap(other);
  return *this;
}
void KeyValues::swap(KeyValues& other) {
  std::swap(keys_, other.keys_), std::swap(values_, other.values_);
  std::swap(first_, other.first_), std::swap(count_, other.count_);
  std::swap(seen_, other.seen_), std::swap(tables_, other.tables_);
}

std::int64_t KeyValues::seen() const { return seen_.empty() ? 0 : std::ranges::max(seen_); }

Tensor KeyValues::part(const Tensor& room) const {
  return room.defined() ? narrow(room, 2, first_, count_) : Tensor{};
}

/// Room behind what is kept, which moves to the beginning or into a room twice as large.
void KeyValues::make_room(const Tensor& like, std::int64_t steps) {
  if (keys_.defined() && first_ + count_ + steps <= keys_.size(2)) return;
  const Shape& s = like.shape();
  const auto kept = [&](const Tensor& room) {
    return room.defined() ? part(room) : empty({s[0], s[1], 0, s[3]}, {like.dtype(), like.device()});
  };
  const std::int64_t room = std::max<std::int64_t>(2 * (count_ + steps), 16);
  keys_ = moved(kept(keys_), room), values_ = moved(kept(values_), room);
  first_ = 0;
}

void KeyValues::append(const Tensor& keys, const Tensor& values, std::optional<std::int64_t> window) {
  refuse_in_frames("compile: a cache of keys and values is written inside");
  const std::int64_t rows = keys.size(0), steps = keys.size(2);
  check<ShapeError>(seen_.empty() || std::ssize(seen_) == rows,
                    "KeyValueCache: {} rows behind those of {}; give an empty cache to another batch", rows,
                    seen_.size());
  if (window && count_ > *window - 1) {
    first_ += count_ - (*window - 1);
    count_ = *window - 1;
  }
  if (Context::current().grad_enabled()) {
    const auto with = [&](const Tensor& room, const Tensor& x) {
      return count_ > 0 ? cat({part(room), x}, 2) : contiguous(x);
    };
    keys_ = with(keys_, keys), values_ = with(values_, values);
    first_ = 0;
  } else {
    const NoGrad guard;
    make_room(keys, steps);
    copy_(narrow(keys_, 2, first_ + count_, steps), keys);
    copy_(narrow(values_, 2, first_ + count_, steps), values);
  }
  count_ += steps;
  seen_.resize(static_cast<std::size_t>(rows));
  for (std::int64_t& n : seen_) n += steps;
}

Tensor KeyValues::mask(std::int64_t steps, std::optional<std::int64_t> window) const {
  Tensor seen;
  const Device device = keys_.device();
  if (window && count_ > *window)
    seen = triu(ones({steps, count_}, {DType::boolean, device}), count_ - steps - *window + 1);
  if (std::ranges::all_of(seen_, [&](std::int64_t n) { return n >= count_; })) return seen;
  const Tensor own = tables_->own_keys(seen_, count_, device);
  return seen.defined() ? logical_and(own, seen) : own;
}

RotaryTurns KeyValues::turns(const RotaryOptions& options, std::int64_t width, std::int64_t steps,
                             TensorOptions x) const {
  constexpr std::int64_t none = 0;
  return tables_->turns(options, width, seen_.empty() ? std::span(&none, 1) : std::span(seen_), steps, x);
}

Tensor KeyValues::positions(std::int64_t steps, Device device) const {
  if (alike(seen_)) return {};
  return on(device, numbered(seen_, steps), {std::ssize(seen_), steps});
}

void KeyValues::select(std::span<const std::int64_t> rows) {
  std::vector<std::int64_t> seen;
  for (const std::int64_t row : rows) {
    check<ValueError>(row >= 0 && row < std::ssize(seen_), "KeyValueCache: row {} of {}", row, seen_.size());
    seen.push_back(seen_[static_cast<std::size_t>(row)]);
  }
  seen_ = std::move(seen);
  if (!keys_.defined()) return;
  const NoGrad guard;
  // What no row that stays has seen goes.
  const std::int64_t most = std::min(count_, this->seen());
  first_ += count_ - most, count_ = most;
  const Tensor index = on(keys_.device(), rows, {std::ssize(rows)});
  keys_ = index_select(keys_, 0, index), values_ = index_select(values_, 0, index);
}

void KeyValues::join(const KeyValues& other) {
  if (other.seen_.empty()) return;
  if (seen_.empty()) {
    std::shared_ptr<CachedTables> own = tables_;
    *this = other;
    tables_ = std::move(own);
    return;
  }
  const NoGrad guard;
  const std::int64_t most = std::max(count_, other.count_), room = std::max<std::int64_t>(2 * most, 16);
  const std::int64_t rows = std::ssize(seen_), more = std::ssize(other.seen_);
  const auto together = [&](const Tensor& mine, const Tensor& its) {
    const Shape& s = mine.shape();
    // Zeros, since what a mask hides is multiplied by zero all the same.
    const Tensor all = zeros({rows + more, s[1], room, s[3]}, {mine.dtype(), mine.device()});
    copy_(narrow(narrow(all, 0, 0, rows), 2, most - count_, count_), part(mine));
    copy_(narrow(narrow(all, 0, rows, more), 2, most - other.count_, other.count_), other.part(its));
    return all;
  };
  keys_ = together(keys_, other.keys_), values_ = together(values_, other.values_);
  first_ = 0, count_ = most;
  seen_.insert(seen_.end(), other.seen_.begin(), other.seen_.end());
}

KeyValueCache::KeyValueCache(const KeyValueCache& other) : layers_(other.layers_) {
  for (KeyValues& layer : layers_) layer.tables_ = layers_[0].tables_;
}
KeyValueCache& KeyValueCache::operator=(KeyValueCache other) {
  std::swap(layers_, other.layers_);
  return *this;
}

void KeyValueCache::resize(std::size_t layers) {
  const std::size_t before = layers_.size();
  layers_.resize(layers);
  for (std::size_t i = before; i < layers; ++i) layers_[i].tables_ = layers_[0].tables_;
}

std::span<const std::int64_t> KeyValueCache::rows() const {
  return layers_.empty() ? std::span<const std::int64_t>{} : layers_[0].rows();
}

void KeyValueCache::select(std::span<const std::int64_t> rows) {
  for (KeyValues& layer : layers_) layer.select(rows);
}

void KeyValueCache::join(const KeyValueCache& other) {
  if (other.empty()) return;
  if (empty()) resize(other.size());
  check<ValueError>(size() == other.size(), "KeyValueCache: {} layers and {} cannot be joined", size(),
                    other.size());
  for (std::size_t i = 0; i < layers_.size(); ++i) layers_[i].join(other.layers_[i]);
}

}  // namespace sherd::nn
