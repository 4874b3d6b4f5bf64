// The main of every test program. It counts test cases itself, because Catch2 2 knows no skips, and ends with
// one line:
//   sherd-tests: N passed, N failed, N skipped
#define CATCH_CONFIG_RUNNER
#include <iostream>
#include <mutex>
#include <set>
#include <vector>

#include "tests/catch.h"

namespace {

#if __has_include(<catch2/catch_all.hpp>)
using Listener = Catch::EventListenerBase;
const std::string& case_name(const Catch::TestCaseStats& stats) { return stats.testInfo->name; }
#else
using Listener = Catch::TestEventListenerBase;
const std::string& case_name(const Catch::TestCaseStats& stats) { return stats.testInfo.name; }
#endif

struct Tally {
  bool started = false;
  int passed = 0, failed = 0, skipped = 0;
  std::vector<std::string> notes;  // one line per case that failed or was skipped

  std::mutex mutex;  // ranks are threads, so any of them may ask for the skip
  std::set<std::string> reasons;

  void case_ended(const std::string& name, const Catch::Totals& totals) {
    const std::scoped_lock lock(mutex);
    if (totals.testCases.failed > 0) {
      ++failed;
      notes.push_back("failed: " + name);
    } else if (!reasons.empty()) {
      ++skipped;
      std::string line;
      for (const std::string& reason : reasons) line += (line.empty() ? "" : "; ") + reason;
      notes.push_back("skipped: " + name + ": " + line);
    } else if (totals.assertions.total() == 0) {
      ++failed;
      notes.push_back("failed: " + name + ": asserts nothing");
    } else {
      ++passed;
    }
    reasons.clear();
  }
};

Tally& tally() {
  static Tally instance;
  return instance;
}

struct Counter : Listener {
  using Listener::Listener;
  void testRunStarting(const Catch::TestRunInfo&) override { tally().started = true; }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    tally().case_ended(case_name(stats), stats.totals);
  }
};

CATCH_REGISTER_LISTENER(Counter)

}  // namespace

bool sherd::test::skip_if(bool condition, std::string_view reason) {
  if (condition) {
    const std::scoped_lock lock(tally().mutex);
    tally().reasons.emplace(reason);
  }
  return condition;
}

int main(int argc, char** argv) {
  const int code = Catch::Session().run(argc, argv);
  const Tally& t = tally();
  if (!t.started) return code;  // --help, --list-tests, a wrong flag
  for (const std::string& note : t.notes) std::cout << note << '\n';
  std::cout << "sherd-tests: " << t.passed << " passed, " << t.failed << " failed, " << t.skipped
            << " skipped" << std::endl;
  const bool ran = t.passed + t.failed + t.skipped > 0;
  return ran && t.failed == 0 ? 0 : 1;
}
