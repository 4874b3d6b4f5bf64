// What the test programs have in common, compiled once for each of them. A test includes what it uses all the same.
#include <sherd.h>

#include "tests/catch.h"
