// How the names of a state meet those of a module: the rule of every call that loads one.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "nn/module.h"

namespace sherd::nn {

/// A tensor and what a state calls it.
using NamedValues = std::pair<std::string, Tensor>;

/// Whether both hold the same numbers, bit for bit where their dtypes are one.
bool same_values(const Tensor& a, const Tensor& b);

/// A state may have a parameter of several names under any of them, or under several with the same values:
/// ValueError, under the name of `call`, where the values differ.
void check_tied(std::string_view call, const NamedValues& first, const NamedValues& second);

/// The end of a message that a state lacks `wanted`: why the file's was not read, or what the state has in
/// its place and the way out; empty where it has nothing like it.
std::string names_beside(const StateDict& state, std::string_view wanted);
/// The same of names alone.
std::string names_beside(std::span<const std::string> names, std::string_view wanted);

}  // namespace sherd::nn
