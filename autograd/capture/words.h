// What a program is for, as numbers to compare.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "autograd/node.h"

namespace sherd {

using Words = std::vector<std::uint64_t>;

/// Whether tensors' gradients are part of what is said of them.
enum class Gradients { wanted, ignored };
/// Appends what a program depends on: shapes, strides, dtypes, devices, which share memory and how, and which
/// require grad.
void describe(std::span<const Tensor> tensors, Gradients gradients, Words& words);

/// Whether gradients by two edges go to one place.
bool same(const Edge& a, const Edge& b);

}  // namespace sherd
