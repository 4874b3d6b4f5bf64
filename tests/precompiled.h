// What the test programs have in common, compiled once for all of them. A test includes what it uses all the
// same.
#include <sherd.h>

#include "tests/catch.h"
