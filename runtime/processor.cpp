// Built without -march: nothing here, and nothing it calls, may use the instructions that it tests for. That
// rules out templates (std::string's appending too), since the linker may keep the copy from a file that was
// built with -march.
#include "runtime/processor.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <cstddef>
#include <iterator>

#include "runtime/error.h"
#include "runtime/processor_config.h"

namespace sherd {
namespace {

struct Line {
  char text[1024] = {};
  std::size_t size = 0;

  void add(const char* more) {
    while (*more != '\0' && size + 1 < sizeof text) text[size++] = *more++;
  }
};

}  // namespace

void detail::check_processor(const ProcessorFeature* begin, const ProcessorFeature* end) {
  Line missing;
  for (const ProcessorFeature* feature = begin; feature != end; ++feature) {
    if (feature->present) continue;
    missing.add(" ");
    missing.add(feature->name);
  }
  if (missing.size == 0) return;
  Line line;
  line.add("sherd: this processor lacks");
  line.add(missing.text);
  line.add(", which the library was built for (cpu_arch=" SHERD_CPU_ARCH
           "); build it on this machine or with -Dcpu_arch=" SHERD_FALLBACK_ARCH);
  throw NotImplementedError(line.text);
}

void check_processor() {
#if defined(__aarch64__)  // g++ learnt this question late there; the kernel always answers it
#define SHERD_FEATURE(name, word, bit) {name, (getauxval(word) & (bit)) != 0},
#else
#define SHERD_FEATURE(name) {name, __builtin_cpu_supports(name) != 0},
#endif
  // The last entry keeps the list from being empty where the build asks for nothing.
  const detail::ProcessorFeature features[] = {SHERD_PROCESSOR_NEEDS(SHERD_FEATURE){"baseline", true}};
#undef SHERD_FEATURE
  detail::check_processor(std::begin(features), std::end(features));
}

}  // namespace sherd
