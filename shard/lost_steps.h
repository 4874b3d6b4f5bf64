// Steps that a fault cost some ranks of a model, and how these come back to where the others are.
//
//   for (bool done = false, apart = false, renewed = false; !done;) try {
//       if (std::exchange(renewed, false)) {  // some may have heard of it in their last call of bring_up
//         const Tensor any = Tensor::scalar(apart);
//         mesh.all().all_reduce(any, ReduceOp::max());
//         apart = any.item() != 0;
//       }
//       if (apart) shard::bring_up(model, optimizer);
//       apart = false;
//       const auto step = shard::steps_taken(model);
//       if (step < steps) train(model, optimizer, batch(step));
//       else mesh.all().barrier(), done = true;  // who has taken all steps stays for who has not
//     } catch (const CollectiveError&) {
//       mesh.renew();
//       renewed = true;
//     } catch (const StateError&) {  // on all ranks: some have taken another number of steps
//       if (apart) throw;            // nothing whole is there: load a checkpoint
//       apart = true;
//     }
#pragma once

#include <cstdint>

#include "nn/optimizer.h"

namespace sherd::shard {

/// The steps that optimizers took of a model's parameters, those that were left out (`step_unless`) included,
/// and those of a checkpoint that it was loaded from: the most of any. After a fault ranks may differ in it.
SHERD_API std::int64_t steps_taken(const nn::Module& model);

/// Gives all ranks of a sharded model with replicas, or of a `DataParallel` one, the values of the replica
/// that has taken most steps, whole on all of its ranks, and what `optimizer` keeps for them: state, options
/// and counts. Of `DataParallel` buffers too. Collective, with every optimizer of the model in turn; concerns
/// the parameters of the model that `optimizer` has. StateError on all ranks where there is no replica whose
/// ranks have all taken the same steps, as of shards without replicas: load a checkpoint then. A rank that
/// throws otherwise leaves the model refused.
SHERD_API void bring_up(nn::Module& model, nn::Optimizer& optimizer);

}  // namespace sherd::shard
