// Which ranks hold a whole of what together. Over a mesh of which some modules have one dimension alone, each
// group along that dimension has values of its own under the same names, or names of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nn/module.h"
#include "shard/group.h"

namespace sherd::shard {

/// Who shares a parameter; none: nobody says.
std::optional<Ranks> sharers_of(const nn::Parameter& p);
/// In words: "world.shards of the ranks 2, 3".
std::string words_of(const Ranks& holders);

/// The group of a tensor among those that have another one each of its name.
struct GroupOfName {
  int number = 0, groups = 1;
  bool is_first = false;  ///< this rank is the group's first
  int first = 0;          ///< that one's number among all ranks
  Ranks holders{};        ///< of a name that not all ranks hold together
  std::string words{};    ///< the same, in words; empty where all do
};

class Announced;
struct FirstsOfNames;

/// A name and who holds what it stands for; none: nobody says, so all ranks do.
using Held = std::pair<std::string, std::optional<Ranks>>;

/// Of every parameter and saved buffer of a module. A buffer that no `DataParallel` has goes with the
/// parameters of its module, or of the next one around it that has some. Where nobody says who holds a name
/// that other ranks hold in groups, each such rank has a value of its own.
class NameGroups {
 public:
  NameGroups() = default;
  /// Collective over `ranks`, whose calls have the name `call`; without ranks this one has all.
  NameGroups(std::string_view call, nn::Module& module, const Group& ranks);
  /// The same of other names, which `list` gives; it may throw on some ranks, and then all do. ValueError for
  /// a name that all ranks hold together on some of them, and fewer on others.
  NameGroups(std::string_view call, const std::function<std::vector<Held>()>& list, const Group& ranks);
  /// The group of `name`; all ranks for a name that the module does not have.
  const GroupOfName& of(const std::string& name) const;
  /// ValueError for a parameter that has holders who are not among the ranks.
  void check_complete(std::string_view call) const;

 private:
  /// Who holds the names that are not limited, as it is announced.
  using Said = std::map<std::string, std::int64_t>;
  void number(const Announced& all, const Said& others, const Group& ranks, const CallOptions& options);
  void add_alone(const FirstsOfNames& all, const Said& others, const Group& ranks, std::string_view call);

  int rank_ = 0, ranks_ = 1;
  GroupOfName all_{};
  std::map<std::string, GroupOfName> limited_{};
  std::optional<std::pair<std::string, Ranks>> beyond_{};  ///< a name that others hold too
};

/// The groups of what a state has for parameters, under names that have the parameters' in them.
struct EntryGroups {
  const NameGroups& groups;
  std::string (*parameter_of)(const std::string& entry);
  const GroupOfName& of(const std::string& entry) const { return groups.of(parameter_of(entry)); }
};
/// Of a model's values and their averages.
inline std::string entry_itself(const std::string& entry) { return entry; }
/// Of an optimizer's state, "state.blocks.0.weight.exp_avg" for one; of its options none.
std::string parameter_of_state(const std::string& entry);

/// For each key whether this rank is the first of `ranks` that has it. Collective.
std::vector<bool> first_to_have(const Group& ranks, std::span<const std::int64_t> keys,
                                std::string_view call);
/// A number that stands for a text.
std::int64_t key_of(std::string_view text);

}  // namespace sherd::shard
