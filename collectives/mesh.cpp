#include "collectives/mesh.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace sherd {
namespace {

/// Coordinates of a row-major index.
std::vector<int> coordinates_of(int index, const std::vector<int>& sizes) {
  std::vector<int> at(sizes.size());
  for (std::size_t d = sizes.size(); d-- > 0; index /= sizes[d]) at[d] = index % sizes[d];
  return at;
}

/// The ranks that differ in the dimensions `free` only, one list for each choice of the other coordinates;
/// within a list the dimensions of `free` run row-major, in the order given.
std::vector<std::vector<int>> lines_of(const std::vector<int>& sizes, const std::vector<std::size_t>& free) {
  const int total = std::accumulate(sizes.begin(), sizes.end(), 1, std::multiplies<>());
  std::vector<int> free_sizes, fixed_sizes;
  std::vector<std::size_t> fixed;
  for (std::size_t d : free) free_sizes.push_back(sizes[d]);
  for (std::size_t d = 0; d < sizes.size(); ++d)
    if (std::ranges::find(free, d) == free.end()) fixed.push_back(d), fixed_sizes.push_back(sizes[d]);
  const int length = std::accumulate(free_sizes.begin(), free_sizes.end(), 1, std::multiplies<>());
  std::vector<std::vector<int>> lines(static_cast<std::size_t>(length == 0 ? 0 : total / length));
  for (std::size_t line = 0; line < lines.size(); ++line) {
    const std::vector<int> outer = coordinates_of(static_cast<int>(line), fixed_sizes);
    for (int i = 0; i < length; ++i) {
      const std::vector<int> inner = coordinates_of(i, free_sizes);
      std::vector<int> at(sizes.size());
      for (std::size_t d = 0; d < fixed.size(); ++d) at[fixed[d]] = outer[d];
      for (std::size_t d = 0; d < free.size(); ++d) at[free[d]] = inner[d];
      int index = 0;
      for (std::size_t d = 0; d < sizes.size(); ++d) index = index * sizes[d] + at[d];
      lines[line].push_back(index);
    }
  }
  return lines;
}

void check_names(const std::vector<int>& sizes, const std::vector<std::string>& names) {
  check<ValueError>(!sizes.empty() && names.size() == sizes.size(),
                    "mesh: {} sizes and {} names; there is one name a dimension, and at least one dimension",
                    sizes.size(), names.size());
  for (std::size_t d = 0; d < names.size(); ++d)
    check<ValueError>(std::count(names.begin(), names.end(), names[d]) == 1,
                      "mesh: two dimensions are named '{}'", names[d]);
}

}  // namespace

DeviceMesh::DeviceMesh(const Group& group, std::vector<int> sizes, std::vector<std::string> names)
    : all_(group), sizes_(std::move(sizes)), names_(std::move(names)) {
  check_names(sizes_, names_);
  std::int64_t total = 1;
  for (int size : sizes_) {
    check<ShapeError>(size > 0, "mesh: a dimension of size {}; sizes are at least 1", size);
    total *= size;
  }
  check<ShapeError>(total == group.size(),
                    "mesh: {} has {} places for the {} ranks of group {}; make them equal",
                    fmt::format("{}", sizes_), total, group.size(), group.name());
  coordinates_ = coordinates_of(group.rank(), sizes_);
  for (std::size_t d = 0; d < sizes_.size(); ++d)
    along_.push_back(sizes_.size() == 1 ? group : group.split(lines_of(sizes_, {d}), names_[d]));
}

std::size_t DeviceMesh::index(std::string_view name) const {
  const auto found = std::ranges::find(names_, name);
  check<ValueError>(found != names_.end(), "mesh: no dimension is named '{}'; there are {}", name,
                    fmt::format("{}", names_));
  return static_cast<std::size_t>(found - names_.begin());
}

const Group& DeviceMesh::group() const {
  check<ValueError>(dimensions() == 1, "mesh: it has {} dimensions; name one of {}", dimensions(),
                    fmt::format("{}", names_));
  return along_[0];
}

void DeviceMesh::renew() const {
  for (const Group& group : along_)
    if (group.defined() && group != all_) group.renew();
  if (all_.defined()) all_.renew();
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  if (names == names_) return *this;
  std::vector<std::size_t> free;
  DeviceMesh mesh;
  for (const std::string& name : names) {
    const std::size_t d = index(name);
    free.push_back(d);
    mesh.sizes_.push_back(sizes_[d]);
    mesh.coordinates_.push_back(coordinates_[d]);
    mesh.along_.push_back(along_[d]);
  }
  mesh.names_ = names;
  check_names(mesh.sizes_, mesh.names_);
  mesh.all_ = free.size() == 1 ? mesh.along_[0]
                               : all_.split(lines_of(sizes_, free), fmt::format("{}", fmt::join(names, "+")));
  return mesh;
}

}  // namespace sherd
