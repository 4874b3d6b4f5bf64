// What all ranks call the calls of a model's parameters.
#pragma once

#include <string>

namespace sherd::shard {

/// From the second model on among some ranks with that model's number, so that like calls of two models never
/// pass for each other's.
inline std::string of_model(const std::string& name, int number) {
  return number > 1 ? name + " of model " + std::to_string(number) : name;
}

/// Of a group of parameters. Numbers are those of its model among the group's ranks; 0: none has run.
struct CallName {
  std::string module = "?";  ///< its name, once its root has run
  int on_shard = 0, on_replicas = 0, on_block = 0;
  std::string among_shard() const { return of_model(module, on_shard); }
  std::string among_replicas() const { return of_model(module, on_replicas); }
  std::string among_block() const { return of_model(module, on_block); }
};

}  // namespace sherd::shard
