// A sharded model beside its reference, and the calls that its engine makes.
#pragma once

#include "collectives/observe.h"
#include "nn/module.h"
#include "tests/scenarios/scenario.h"

namespace sherd::scenarios {

/// Names, this rank's rows of values and of gradients are those of rank 0's reference. Both modules lie on
/// the compute device.
void check_sharded_parity(Rank& rank, const nn::Module& reference, const nn::Module& sharded);

/// While it lives, counts the rank's calls and checks the dtype of what every reduce_scatter gives.
class WatchedCalls {
 public:
  WatchedCalls(Rank& rank, DType reduced);
  int reduce_scatters() const { return reduce_scatters_; }
  /// Among all ranks of the world, and among fewer.
  int gathers() const { return gathers_; }
  int smaller_gathers() const { return smaller_gathers_; }

 private:
  void see(const ObservedCall& call);

  Rank& rank_;
  DType reduced_;
  int reduce_scatters_ = 0, gathers_ = 0, smaller_gathers_ = 0;
  Interception interception_;
};

}  // namespace sherd::scenarios
