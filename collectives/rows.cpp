#include "collectives/rows.h"

#include <algorithm>
#include <numeric>

#include "runtime/context.h"
#include "runtime/given.h"
#include "runtime/ops.h"

namespace sherd {
namespace {

std::int64_t total(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

/// Side by side blocks of `counts` rows as blocks of `each`, filled up with zeros.
Tensor filled_up(const Tensor& rows, const std::vector<std::int64_t>& counts, std::int64_t each) {
  std::vector<Tensor> parts;
  std::int64_t at = 0;
  for (const std::int64_t count : counts) {
    parts.push_back(narrow(rows, 0, at, count));  // none too: its backward takes part in the call
    if (count < each) {
      Shape missing = rows.shape();
      missing[0] = each - count;
      parts.push_back(zeros(missing, {rows.dtype(), rows.device()}));
    }
    at += count;
  }
  return cat(parts);
}

/// The way back.
Tensor without_filling(const Tensor& blocks, const std::vector<std::int64_t>& counts, std::int64_t each) {
  std::vector<Tensor> parts;
  std::int64_t at = 0;
  for (const std::int64_t count : counts) {
    parts.push_back(narrow(blocks, 0, at, count));
    at += each;
  }
  return cat(parts);
}

bool all_are(const std::vector<std::int64_t>& counts, std::int64_t each) {
  return std::ranges::all_of(counts, [&](std::int64_t count) { return count == each; });
}

}  // namespace

std::int64_t RowRoute::rows_sent() const { return total(sent); }
std::int64_t RowRoute::rows_received() const { return total(received); }

RowRoute route_rows(const Group& group, std::span<const std::int64_t> sent, const CallOptions& options) {
  check<StateError>(group.defined(), "route_rows: this rank is not in the group; ask defined() first");
  const auto size = static_cast<std::size_t>(group.size());
  check<ValueError>(sent.size() == size && std::ranges::all_of(sent, [](std::int64_t n) { return n >= 0; }),
                    "route_rows: {} numbers of rows ({}) for {} ranks; give each one from 0 on", sent.size(),
                    fmt::join(sent, ", "), size);
  const NoGrad guard;
  const auto n = static_cast<std::int64_t>(size);
  const Tensor mine = Tensor::from(std::vector<std::int64_t>(sent.begin(), sent.end()), {n}, Device::cpu());
  const Tensor all = empty({n * n}, {DType::i64, Device::cpu()});
  group.all_gather(all, mine, options);
  const std::vector<std::int64_t> counts = all.to_vector<std::int64_t>();
  RowRoute route{group, {sent.begin(), sent.end()}, {}, std::ranges::max(counts)};
  for (std::size_t from = 0; from < size; ++from)
    route.received.push_back(counts[from * size + static_cast<std::size_t>(group.rank())]);
  return route;
}

Tensor exchange_rows(const RowRoute& route, const Tensor& rows, const CallOptions& options) {
  detail::check_given("exchange_rows", rows);
  check<StateError>(route.group.defined(), "exchange_rows: the route has no group; make it by route_rows");
  check<ShapeError>(rows.rank() > 0 && rows.size(0) == route.rows_sent(),
                    "exchange_rows: shape {} for {} rows that are sent ({}); bring as many", rows.shape(),
                    route.rows_sent(), fmt::join(route.sent, ", "));
  const bool is_full = all_are(route.sent, route.most) && all_are(route.received, route.most);
  const Tensor out = all_to_all(
      route.group, all_are(route.sent, route.most) ? rows : filled_up(rows, route.sent, route.most), options);
  return is_full ? out : without_filling(out, route.received, route.most);
}

}  // namespace sherd
