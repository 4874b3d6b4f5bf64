// Catch2 2 and 3 behind one include, and what every test here needs beside it.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
namespace Catch::Matchers {
inline auto ContainsSubstring(const std::string& text) { return Contains(text); }
}  // namespace Catch::Matchers
#endif

#include <string>
#include <string_view>

#include "tests/message_of.h"

namespace sherd::test {

/// Counts the running test case as skipped, for `reason`, when `condition` holds, and returns `condition`:
/// `if (skip_if(device_count() == 0, "no GPU")) return;`. A failed assertion still makes the case a failure.
[[nodiscard]] bool skip_if(bool condition, std::string_view reason);

}  // namespace sherd::test
