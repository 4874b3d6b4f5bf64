// What attention keeps of the positions that a model has seen.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/ops.h"

namespace sherd::nn {

class CachedTables;

/// Keys and values of one layer for the positions seen so far, (B, H, K, D) each, the newest of every row
/// last. Rows may have seen unlike numbers of positions: of a row that has seen fewer than K the first ones
/// are none of its own. Their memory grows by doubling, and positions that no later query sees make room.
class SHERD_API KeyValues {
 public:
  KeyValues();
  /// With memory of its own.
  KeyValues(const KeyValues& other);
  KeyValues(KeyValues&&) = default;
  KeyValues& operator=(KeyValues other);
  ~KeyValues() = default;
  /// How many positions each row has seen; empty before the first.
  std::span<const std::int64_t> rows() const { return seen_; }
  /// How many the row has seen that has seen most.
  std::int64_t seen() const;
  /// Views of what is kept; undefined before the first.
  Tensor keys() const { return part(keys_); }
  Tensor values() const { return part(values_); }

  /// Puts those of T further positions, (B, H, T, D), behind. With a window the first of them sees, beside
  /// itself, the last `window` - 1. Gradients flow through what is put there while they are recorded.
  /// ShapeError unless there are as many rows as before.
  void append(const Tensor& keys, const Tensor& values, std::optional<std::int64_t> window = {});

  // ---- for the newest `steps` positions, behind which the cache stands already ----
  /// Which of the kept keys they see, (B or 1, 1, steps or 1, K), true where they do; undefined where that is
  /// all up to their own.
  Tensor mask(std::int64_t steps, std::optional<std::int64_t> window = {}) const;

  // ---- for `steps` further positions ----
  /// How they turn heads of `width` features of x's dtype: rows for `steps`, or of rows that have seen unlike
  /// numbers for B `steps`.
  RotaryTurns turns(const RotaryOptions& options, std::int64_t width, std::int64_t steps,
                    TensorOptions x) const;
  /// Their numbers where rows have seen unlike ones, (B, steps) i64; undefined where they are `seen()` and
  /// on.
  Tensor positions(std::int64_t steps, Device device) const;

  /// Rows `rows` of these, in that order; one may be there several times or not at all.
  void select(std::span<const std::int64_t> rows);
  /// The rows of `other` behind its own.
  void join(const KeyValues& other);

 private:
  friend class KeyValueCache;
  Tensor part(const Tensor& room) const;
  void swap(KeyValues& other);
  void make_room(const Tensor& like, std::int64_t steps);

  Tensor keys_, values_;                  // (B, H, room, D)
  std::int64_t first_ = 0, count_ = 0;    // what of the room is kept
  std::vector<std::int64_t> seen_;        // by row
  std::shared_ptr<CachedTables> tables_;  // shared by the layers of a cache
};

/// For each layer its keys and values; pass an empty one first. Rows leave a batch and join it without that
/// anything is computed again. A copy has memory of its own.
class SHERD_API KeyValueCache {
 public:
  KeyValueCache() = default;
  KeyValueCache(const KeyValueCache& other);
  KeyValueCache(KeyValueCache&&) = default;
  KeyValueCache& operator=(KeyValueCache other);
  ~KeyValueCache() = default;
  std::size_t size() const { return layers_.size(); }
  bool empty() const { return layers_.empty(); }
  KeyValues& operator[](std::size_t layer) { return layers_[layer]; }
  const KeyValues& operator[](std::size_t layer) const { return layers_[layer]; }
  /// Layers that are made share the numbers of positions and what follows from these alone.
  void resize(std::size_t layers);
  void clear() { layers_.clear(); }
  /// How many positions each row has seen.
  std::span<const std::int64_t> rows() const;

  /// `KeyValues::select` and `join`, of all layers. ValueError for a row that is not there, or other layers.
  void select(std::span<const std::int64_t> rows);
  void join(const KeyValueCache& other);

 private:
  std::vector<KeyValues> layers_;
};

}  // namespace sherd::nn
