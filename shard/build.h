// From a module and its options to a unit: who is in which group, and this rank's shard.
#pragma once

#include "nn/module.h"
#include "shard/options.h"
#include "shard/unit.h"

namespace sherd::shard {

/// What the two public forms do differently.
struct UnitForm {
  InputCast input_cast = InputCast::never;
  InputCast without_parameters = InputCast::never;  ///< in place of `with_parameters`
  bool one_flat_param = false;
};

/// Makes `module` a unit of those parameters of its own and below that no unit has.
void build_unit(nn::Module& module, const Options& options, const UnitForm& form);

/// A parameter under its first name, also where a flat parameter hides it.
struct FoundParameter {
  std::string name;
  nn::Param* member;
  std::vector<Slot> slots{};         ///< of this member and of those tied to it
  std::vector<std::string> names{};  ///< of each
};
struct FoundBuffer {
  std::string name;
  nn::Buffer* member;
};
struct Found {
  std::vector<FoundParameter> parameters;
  std::vector<FoundBuffer> buffers;
};
/// All of a module and those below, in the order of members.
Found find_members(nn::Module& module);
/// What a unit of `module` would take: neither sharded nor ignored so far.
std::vector<FoundParameter> to_shard(nn::Module& module, const Options& options);

}  // namespace sherd::shard
