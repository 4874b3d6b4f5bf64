// What the source that is made of the pages calls.
#pragma once

#include <string>

#include "tests/catch.h"

namespace sherd::test {

/// The block whose fence stands in this line was run, or is compiled and says why it cannot be.
void ran(int line);
void compiled(int line);

/// Runs the page's code in a fresh folder. Each of its fences with C++ must have been told to one of the two.
void check_page(const std::string& page, void (*run)());

}  // namespace sherd::test
