// Targets of a classification: one class number a row, or the one that says that a row is ignored.
#pragma once

#include <cstdint>

namespace sherd::cpu {

/// The first row whose target is outside [0, classes) and not ignored, or -1.
inline std::int64_t first_bad_target(const std::int64_t* targets, std::int64_t rows, std::int64_t classes,
                                     std::int64_t ignore_index) {
  for (std::int64_t r = 0; r < rows; ++r)
    if (targets[r] != ignore_index && (targets[r] < 0 || targets[r] >= classes)) return r;
  return -1;
}

}  // namespace sherd::cpu
