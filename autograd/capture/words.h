// What a program is for, as numbers to compare.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "autograd/node.h"

namespace sherd {

using Words = std::vector<std::uint64_t>;

/// Whether tensors' gradients are part of what is said of them.
enum class Gradients { wanted, ignored };
/// Appends what a program depends on: shapes, strides, dtypes, devices, which share memory and how, and which
/// require grad.
void describe(std::span<const Tensor> tensors, Gradients gradients, Words& words);

/// "of (8, 3), (5) ", for a message: of the first few, each by `shape_of`; empty where there are none.
template <class Things, class ShapeOf>
std::string shapes_of(const Things& things, const ShapeOf& shape_of) {
  constexpr std::size_t most = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(things.size(), most); ++i)
    text += (text.empty() ? "of " : ", ") + to_string(shape_of(things[i]));
  return text.empty() ? text : text + (things.size() > most ? ", ... " : " ");
}

/// Whether gradients by two edges go to one place.
bool same(const Edge& a, const Edge& b);

}  // namespace sherd
