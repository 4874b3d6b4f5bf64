// Ranks arranged in a grid with named dimensions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/group.h"

namespace sherd {

/// An N-dimensional arrangement of a group's ranks, row-major: neighbours in the last dimension have
/// consecutive ranks. Along every dimension there is one group for each line of ranks, of which this rank is
/// in one. Copies are the same mesh. A name that is no dimension is a ValueError.
class SHERD_API DeviceMesh {
 public:
  DeviceMesh() = default;
  /// Every rank of `group` calls, with the same arguments. The product of `sizes` is the group's size
  /// (ShapeError); as many `names` as sizes, all different (ValueError).
  DeviceMesh(const Group& group, std::vector<int> sizes, std::vector<std::string> names);

  int dimensions() const { return static_cast<int>(sizes_.size()); }
  const std::vector<int>& sizes() const { return sizes_; }
  const std::vector<std::string>& names() const { return names_; }
  /// Length of a dimension.
  int size(std::string_view name) const { return sizes_[index(name)]; }
  /// This rank's index along a dimension, from 0.
  int coordinate(std::string_view name) const { return coordinates_[index(name)]; }
  const std::vector<int>& coordinates() const { return coordinates_; }

  /// The ranks that differ from this one along `name` only.
  const Group& group(std::string_view name) const { return along_[index(name)]; }
  /// The only dimension's group (ValueError with several).
  const Group& group() const;
  /// All ranks of the mesh.
  const Group& all() const { return all_; }
  /// After a CollectiveError in any of its groups: `Group::renew` of the groups along all dimensions and of
  /// `all()`, so that every rank of `all()` calls it.
  void renew() const;

  /// The mesh of the named dimensions, in that order, through this rank. Every rank of `all()` calls it with
  /// the same arguments, because it makes groups; a single dimension, or all of them in order, needs no call.
  /// ValueError for a name that is no dimension, or comes twice.
  DeviceMesh slice(const std::vector<std::string>& names) const;
  DeviceMesh operator[](const std::string& name) const { return slice({name}); }

 private:
  std::size_t index(std::string_view name) const;

  Group all_;
  std::vector<int> sizes_, coordinates_;
  std::vector<std::string> names_;
  std::vector<Group> along_;
};

}  // namespace sherd
