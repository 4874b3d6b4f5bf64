// What is below a module that runs outermost: what its units ignore, which buffers it casts, and which of its
// parameters other modules' units have.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "nn/module.h"
#include "shard/group.h"

namespace sherd::shard {

class Unit;

/// What a unit leaves to the program, by names below its module.
struct Ignored {
  std::set<std::string, std::less<>> parameters, modules;
  bool empty() const { return parameters.empty() && modules.empty(); }
  /// Whether it names a member, or a module that holds it.
  bool covers(std::string_view name) const;
  /// Takes over what a module named `name` ignores.
  void add(std::string_view name, const Ignored& of_inner);
};

class Below {
 public:
  /// Looks through `root`, and makes all units below parts of `unit`'s root, unless nothing has changed since
  /// the last time. It visits all members to know that: containers of modules move without telling anybody,
  /// and what was put in unsharded would be trained by each rank alone. StateError for that.
  void look(nn::Module& root, Unit& unit);
  /// The next time it does, whatever has changed.
  void forget() { looked_ = false; }
  /// Groups of units that are not below, of which a member below has a parameter; and groups that nobody
  /// gathers, of which another module below may read one without anybody noticing.
  std::vector<std::shared_ptr<ParameterGroup>> tied() const;
  /// Gives buffers the dtypes that their units say, once each, since members and names change seldom.
  void cast_buffers(nn::Module& root, const Unit& unit, Precision precision);

 private:
  void find_buffers(nn::Module& root, const Unit& unit);

  bool looked_ = false;
  std::uint64_t roots_changed_ = 0;    ///< the engine's, when it last did
  std::vector<const void*> ids_;       ///< of the parameters, by member
  std::vector<nn::Parameter> held_;    ///< those, so that no new one passes for one that is gone
  std::vector<nn::Parameter> tied_;    ///< to members of other roots
  std::vector<nn::Parameter> shared_;  ///< of several members below
  Ignored ignored_;
  /// How buffers are cast, in the order of members.
  struct BufferCast {
    bool left_alone;
    std::optional<DType> dtype;
  };
  std::vector<BufferCast> buffer_casts_;
  bool casts_buffers_ = false;  ///< any unit's
};

}  // namespace sherd::shard
