#include "collectives/offer.h"

#include <sys/random.h>

#include "runtime/error.h"

namespace sherd {

GroupKey draw_group_key() {
  GroupKey key;
  const auto drawn = ::getrandom(key.data(), key.size(), 0);
  check<StateError>(drawn == static_cast<ssize_t>(key.size()),
                    "group: the system gave {} of the {} random bytes of a new group's key", drawn,
                    key.size());
  return key;
}

}  // namespace sherd
