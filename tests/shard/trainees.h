// One net, trained in many ways on the same data: what must come out the same is in parity_table.h.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shard/data_parallel.h"
#include "tests/shard/nets.h"

namespace sherd::test {

/// What a rank saw of a training.
struct Record {
  std::vector<float> losses;  ///< of this rank's data
  std::vector<double> norms;  ///< of the whole gradient, before it was clipped
  std::vector<std::pair<std::string, std::vector<float>>> values;  ///< whole parameters, at the end
};
/// Where two records differ, in words; empty if they are equal to the bit.
std::string difference(const Record& a, const Record& b);
/// Where the ranks' records differ by more than the catalogue's tolerance for f32. Losses are compared as
/// means over ranks, since the ranks' data may be dealt out otherwise.
std::string difference_beyond_tolerance(const std::vector<Record>& a, const std::vector<Record>& b);

/// A net on a rank, and how its gradients come about.
class Trainee {
 public:
  Trainee(const NetOptions& options, World& world) : net(options), world_(world) {}
  virtual ~Trainee();
  Trainee(const Trainee&) = delete;
  Trainee& operator=(const Trainee&) = delete;

  virtual Tensor loss(int step) { return loss_of(net, batch_of(world_.rank(), step, net.width)); }
  /// Leaves averaged gradients in the net.
  virtual void backward(const Tensor& loss) { loss.backward(); }
  virtual Tensor clip(double max_norm) { return shard::clip_grad_norm_(net.parameters(), max_norm); }
  virtual nn::StateDict whole() { return net.state_dict(); }

  Net net;

 protected:
  World& world_;
};

/// An unsharded replica whose gradients are averaged here, by one call a parameter. `param_dtype` and
/// `reduce_dtype` of `mixed` say in which dtypes it computes and averages.
class Replica : public Trainee {
 public:
  Replica(const NetOptions& options, World& world, shard::MixedPrecisionPolicy mixed = {})
      : Trainee(options, world), mixed_(mixed) {}
  Tensor loss(int step) override;
  void backward(const Tensor& loss) override;
  Tensor clip(double max_norm) override { return nn::clip_grad_norm_(net.parameters(), max_norm); }

 private:
  shard::MixedPrecisionPolicy mixed_;
  std::unique_ptr<Net> computing_;  // the values in the compute dtype, made anew for every loss
};

/// One rank's training on all ranks' data in one batch.
class WholeBatch final : public Trainee {
 public:
  using Trainee::Trainee;
  Tensor loss(int step) override;
  Tensor clip(double max_norm) override { return nn::clip_grad_norm_(net.parameters(), max_norm); }
};

class Parallel final : public Trainee {
 public:
  Parallel(const NetOptions& options, World& world)
      : Trainee(options, world), parallel_(net, world.group(), {.bucket_bytes = 500}) {}
  Tensor clip(double max_norm) override { return nn::clip_grad_norm_(net.parameters(), max_norm); }

 private:
  shard::DataParallel parallel_;
};

/// A net that `wrap` sharded.
class Sharded final : public Trainee {
 public:
  template <class F>
  Sharded(const NetOptions& options, World& world, F&& wrap) : Trainee(options, world) {
    wrap(net);
  }
  nn::StateDict whole() override { return shard::full_state_dict(net); }
};

/// Trains for `steps` steps of Adam on clipped gradients.
Record train(Trainee& trainee, int steps);

}  // namespace sherd::test
