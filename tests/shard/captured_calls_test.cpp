// Captured steps whose calls among ranks the devices make, on a device that works later.
#include "tests/captured_calls.h"

#include "tests/late_device.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("captured calls of every kind give the step's bits where devices make them") {
  late_device();
  check_captured_calls("late:each", {2, 3, 4}, Makes::devices);
}

TEST_CASE("captured calls of ranks that share a device are made by the hosts") {
  late_device();
  check_captured_calls("late:0", {2, 3}, Makes::hosts);
}

TEST_CASE("a rank that does not run what devices are to meet in is named, and nobody waits for it") {
  late_device();
  check_captured_faults("late:each");
}
