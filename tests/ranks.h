// Checks made on ranks. Catch2's assertions belong to the thread of the test case; on a rank a failed
// `expect` throws, which wakes the other ranks and reaches the test case through `run_ranks`.
#pragma once

#include <fmt/format.h>

#include <stdexcept>

namespace sherd::test {

struct RankFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Args>
void expect(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) throw RankFailure(fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace sherd::test
