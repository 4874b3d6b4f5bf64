#include "tests/scenarios/parity.h"

#include <algorithm>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::scenarios {
namespace {

/// This rank's rows of rank 0's values, cut as the per-parameter layout cuts them.
Tensor rows_of_first(const Rank& rank, const Tensor& whole) {
  const NoGrad guard;
  const Tensor first = clone(whole.detach());
  rank.group().broadcast(first, 0);
  const std::int64_t rows = first.size(0), most = (rows + rank.world() - 1) / rank.world();
  const std::int64_t begin = std::min(rank.index() * most, rows), end = std::min(begin + most, rows);
  return narrow(first, 0, begin, end - begin);
}

}  // namespace

void check_sharded_parity(Rank& rank, const nn::Module& reference, const nn::Module& sharded) {
  const std::vector<nn::NamedParameter> expected = reference.named_parameters();
  const std::vector<nn::NamedParameter> actual = sharded.named_parameters();
  rank.check.eq(actual.size(), expected.size(), "parameters");
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::string& name = expected[i].name;
    const nn::Parameter &shard = actual[i].parameter, &whole = expected[i].parameter;
    rank.check.eq(actual[i].name, name, "name");
    rank.check.eq(shard.shape(), whole.shape(), name);
    rank.check.close(shard.local(), rows_of_first(rank, whole.local()), name);
    rank.check.eq(shard.grad().defined(), whole.grad().defined(), name + " has a gradient");
    if (whole.grad().defined())
      rank.check.close(shard.grad(), rows_of_first(rank, whole.grad()), name + "'s gradient");
  }
}

WatchedCalls::WatchedCalls(Rank& rank, DType reduced)
    : rank_(rank),
      reduced_(reduced),
      interception_([this](const ObservedCall& call, const Interception::Proceed& proceed) {
        see(call);
        proceed(call.collective);
      }) {}

void WatchedCalls::see(const ObservedCall& call) {
  const bool all = call.group.size() == rank_.world();
  if (call.collective.kind == CollectiveKind::all_gather) ++(all ? gathers_ : smaller_gathers_);
  if (call.collective.kind != CollectiveKind::reduce_scatter) return;
  ++reduce_scatters_;
  for (const Tensor& output : call.collective.outputs)
    rank_.check.eq(output.dtype(), reduced_, "dtype of a reduce_scatter's output");
}

}  // namespace sherd::scenarios
