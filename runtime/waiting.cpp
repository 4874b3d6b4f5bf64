#include "runtime/waiting.h"

#include <algorithm>
#include <vector>

#include "runtime/context.h"

namespace sherd {
namespace {

struct All {
  std::vector<WaitingWork*> works;
};
std::vector<WaitingWork*>& all() { return Context::current().slot<All>().works; }

}  // namespace

WaitingWork::WaitingWork() { all().push_back(this); }
WaitingWork::~WaitingWork() { std::erase(all(), this); }

bool works_while_waiting() noexcept { return Context::current_or_null() != nullptr && !all().empty(); }

void work_while_waiting() noexcept {
  if (Context::current_or_null() == nullptr) return;
  for (std::size_t i = 0; i < all().size(); ++i) all()[i]->go_on();
}

}  // namespace sherd
