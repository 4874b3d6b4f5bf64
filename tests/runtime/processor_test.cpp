#include "runtime/processor.h"

#include <string>

#include "runtime/error.h"
#include "tests/catch.h"

using namespace sherd;

TEST_CASE("the processor that runs the tests has what the library was built for") {
  CHECK_NOTHROW(check_processor());
}

TEST_CASE("a processor that lacks instructions is told in one line which, and what to do") {
  const detail::ProcessorFeature features[] = {{"avx2", false}, {"fma", true}, {"avx512f", false}};
  const std::string line = test::message_of<NotImplementedError>(
      [&] { detail::check_processor(std::begin(features), std::end(features)); });
  CHECK(line.starts_with("sherd: this processor lacks avx2 avx512f, which the library was built for"));
  CHECK(line.find("-Dcpu_arch=") != std::string::npos);
  CHECK(line.find('\n') == std::string::npos);
}

TEST_CASE("a list of features too long for the line is cut, not overrun") {
  const std::string name(4000, 'x');
  const detail::ProcessorFeature feature{name.c_str(), false};
  CHECK(test::message_of<NotImplementedError>([&] {
          detail::check_processor(&feature, &feature + 1);
        }).size() < 1024);
}
