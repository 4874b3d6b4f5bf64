// What all ranks call the calls of a model's parameters.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "collectives/group_key.h"

namespace sherd::shard {

/// A model among the ranks that have it, by the order in which they make theirs: the same on all of them.
struct ModelNumber {
  int model = 0;  ///< from 1; 0: no ranks
  int part = 0;   ///< of its modules that were sharded before it, which run alone; 0: all of it
  bool operator==(const ModelNumber&) const = default;

  /// For a call's label, so that like calls of two models never pass for each other's.
  std::string called(std::string name) const {
    if (part > 0) name += ", part " + std::to_string(part);
    if (model > 1) name += " of model " + std::to_string(model);
    return name;
  }
};

/// The same on all ranks with that key, whatever was made and lost on some of them before they had it.
inline std::int64_t identity_of(const GroupKey& ranks, ModelNumber number) {
  std::uint64_t begin = 0;
  std::memcpy(&begin, ranks.data(), sizeof begin);
  return static_cast<std::int64_t>(begin >> 2) + number.model;  // more than what stands for none
}

/// Of a model when it was made, among the ranks that it has.
struct Identity {
  std::int64_t on_shard = 0, on_replicas = 0;
};

/// Of a group of parameters.
struct CallName {
  std::string module = "?";  ///< its name, once its root has run
  ModelNumber on_shard{}, on_replicas{}, on_block{};
  std::string among_shard() const { return on_shard.called(module); }
  std::string among_replicas() const { return on_replicas.called(module); }
  std::string among_block() const { return on_block.called(module); }
};

}  // namespace sherd::shard
