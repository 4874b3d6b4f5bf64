// What all ranks throw of one fault.
#pragma once

#include <string>

#include "collectives/world.h"
#include "runtime/ops.h"
#include "tests/ranks.h"

namespace sherd::test {

/// What `call` throws, on one rank of those that must all have thrown, in one line.
template <class F>
std::string message_on_all(const World& world, F&& call) {
  std::string message;
  try {
    call();
  } catch (const CollectiveError&) {
    throw;
  } catch (const Error& error) {
    message = error.what();
  }
  const Tensor threw = Tensor::scalar(message.empty() ? 0 : 1, {i64});
  world.group().all_reduce(threw, ReduceOp::sum());
  expect(threw.item<std::int64_t>() == world.size(), "{} of {} ranks threw; here '{}'",
         threw.item<std::int64_t>(), world.size(), message);
  expect(message.find('\n') == std::string::npos, "more than a line: '{}'", message);
  return message;
}

}  // namespace sherd::test
