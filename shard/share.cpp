#include "shard/share.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::shard {

void share(std::vector<Tensor> tensors, const Group& group, const CallOptions& options, int source) {
  const NoGrad guard;
  std::set<std::tuple<std::uint64_t, std::int64_t, std::int64_t>> given;
  while (!tensors.empty()) {
    const Tensor first = tensors[0];
    const auto alike = [&](const Tensor& t) {
      return t.dtype() == first.dtype() && t.device() == first.device();
    };
    Collective call{.kind = CollectiveKind::broadcast,
                    .peer = source,
                    .channel = options.channel,
                    .label = options.label};
    for (const Tensor& t : tensors) {
      if (!alike(t) || !given.emplace(t.storage().id(), t.layout().offset, t.numel()).second) continue;
      if (group.rank() == source) call.inputs.push_back(t);
      call.outputs.push_back(t);
    }
    group.call(std::move(call));
    std::erase_if(tensors, alike);
  }
}

}  // namespace sherd::shard
