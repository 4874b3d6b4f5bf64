// The text of an expected error.
#pragma once

#include <string>

namespace sherd::test {

/// The message of the `E` that `body` throws; says so when nothing was thrown. Other exceptions pass.
template <class E, class F>
std::string message_of(F&& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}

}  // namespace sherd::test
