#include "runtime/replay.h"

#include <utility>

#include "runtime/context.h"

namespace sherd {

RandomReplay& random_replay() { return Context::current().slot<RandomReplay>(); }

RandomKey key_to_draw(RandomKey key) {
  const RandomReplay& replay = random_replay();
  if (!replay.covers(key)) return key;
  return {replay.start.seed, replay.start.offset + (key.offset - replay.first.offset)};
}

ReplayingRandom::ReplayingRandom(const RandomReplay& replay)
    : outer_(std::exchange(random_replay(), replay)) {}
ReplayingRandom::~ReplayingRandom() { random_replay() = outer_; }

}  // namespace sherd
