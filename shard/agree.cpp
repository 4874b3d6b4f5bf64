#include "shard/agree.h"

#include <algorithm>
#include <exception>
#include <string>
#include <typeinfo>
#include <vector>

#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/ops.h"
#include "shard/group.h"

namespace sherd::shard {
namespace {

/// What a rank came to, in the order in which others throw it.
enum class End : std::int64_t { well, file, value, state };

struct Outcome {
  End end = End::well;
  std::string message{};
  std::exception_ptr error{};
  std::uint64_t returned = 0;
};

Outcome outcome_of(const std::function<std::uint64_t()>& act) {
  try {
    return {.returned = act()};
  } catch (const CollectiveError&) {
    throw;  // its group carries nothing any more
  } catch (const FileError& error) {
    return {End::file, error.what(), std::current_exception()};
  } catch (const ValueError& error) {
    return {End::value, error.what(), std::current_exception()};
  } catch (const std::exception& error) {
    return {End::state, error.what(), std::current_exception()};
  } catch (...) {
    return {End::state, "it threw what is no std::exception", std::current_exception()};
  }
}

template <class E>
struct Told final : E, OfAnotherRank {
  Told(int rank, const std::string& text) : E(fmt::format("rank {}: {}", rank, text)), OfAnotherRank(rank) {}
};

/// What this rank threw as well.
template <class E>
struct Beside final : E, OfAnotherRank {
  Beside(const E& own, int first) : E(own), OfAnotherRank(first) {}
};

/// Throws the error itself, as one beside that of rank `first` where it is of the library.
template <class... Known>
[[noreturn]] void throw_beside(const std::exception_ptr& error, int first) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& own) {
    const auto try_as = [&]<class E>(const E*) {
      if (typeid(own) == typeid(E)) throw Beside<E>(static_cast<const E&>(own), first);
    };
    (try_as(static_cast<const Known*>(nullptr)), ...);
    throw;
  }
}

/// The bytes of rank `from`'s text, of which all know the size.
std::string text_of(const Group& ranks, int from, std::string text, std::size_t size) {
  text.resize(size);
  if (size > 0)
    ranks.broadcast(from_blob(text.data(), {static_cast<std::int64_t>(size)}, DType::u8), from,
                    {.label = "what went wrong"});
  return text;
}

}  // namespace

OfAnotherRank::~OfAnotherRank() = default;

void together(const Group& ranks, std::string_view call, const std::function<void()>& act) {
  together_all(ranks, call, [&] {
    act();
    return std::uint64_t{0};
  });
}

std::vector<std::uint64_t> together_all(const Group& ranks, std::string_view call,
                                        const std::function<std::uint64_t()>& act) {
  if (!ranks.defined() || ranks.size() == 1) return {act()};
  const Outcome mine = outcome_of(act);
  const NoGrad guard;
  constexpr std::size_t words = 3;
  const std::int64_t own[words] = {static_cast<std::int64_t>(mine.end),
                                   static_cast<std::int64_t>(mine.message.size()),
                                   static_cast<std::int64_t>(mine.returned)};
  std::vector<std::int64_t> ends;
  try {
    ends = of_all_ranks(ranks, own, {.label = std::string(call)});
  } catch (const CollectiveError&) {
    if (mine.error) std::rethrow_exception(mine.error);  // the others are in the midst of `act`, or gone
    throw;
  }
  int first = 0;
  while (first < ranks.size() && ends[words * static_cast<std::size_t>(first)] == 0) ++first;
  if (first == ranks.size()) {
    std::vector<std::uint64_t> returned;
    for (std::size_t i = 2; i < ends.size(); i += words)
      returned.push_back(static_cast<std::uint64_t>(ends[i]));
    return returned;
  }
  const std::size_t at = words * static_cast<std::size_t>(first);
  const std::string theirs = text_of(ranks, first, mine.message, static_cast<std::size_t>(ends[at + 1]));
  if (mine.error && first == ranks.rank()) std::rethrow_exception(mine.error);
  if (mine.error)
    throw_beside<ValueError, ShapeError, DTypeError, DeviceError, StateError, FileError, NotImplementedError>(
        mine.error, first);
  switch (static_cast<End>(ends[at])) {
    case End::file:
      throw Told<FileError>(first, theirs);
    case End::value:
      throw Told<ValueError>(first, theirs);
    default:
      throw Told<StateError>(first, theirs);
  }
}

std::vector<std::int64_t> of_all_ranks(const Group& ranks, std::span<const std::int64_t> own,
                                       const CallOptions& options) {
  if (!ranks.defined()) return {own.begin(), own.end()};
  const Tensor mine = Tensor::from(own, {std::ssize(own)}, Device::cpu());
  const Tensor all = empty({ranks.size() * mine.numel()}, {DType::i64, Device::cpu()});
  ranks.all_gather(all, mine, options);
  return all.to_vector<std::int64_t>();
}

std::vector<std::vector<std::int64_t>> lists_of_all(const Group& ranks, std::span<const std::int64_t> own,
                                                    const CallOptions& options) {
  const std::int64_t count[] = {std::ssize(own)};
  const std::vector<std::int64_t> counts = of_all_ranks(ranks, count, options);
  const auto most = static_cast<std::size_t>(*std::ranges::max_element(counts));
  std::vector<std::vector<std::int64_t>> lists(counts.size());
  if (most == 0) return lists;
  std::vector<std::int64_t> padded(own.begin(), own.end());
  padded.resize(most);
  const std::vector<std::int64_t> all = of_all_ranks(ranks, padded, options);
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(rank * most);
    lists[rank].assign(first, first + counts[rank]);
  }
  return lists;
}

std::vector<bool> said_by_any(const Group& ranks, const std::vector<bool>& flags, std::string_view label) {
  if (!ranks.defined()) return flags;
  const std::vector<int> own(flags.begin(), flags.end());
  const Tensor any = Tensor::from(own, {std::ssize(own)}, Device::cpu());
  ranks.all_reduce(any, ReduceOp::max(), {.label = std::string(label), .channel = gather_channel});
  const std::vector<int> all = any.to_vector<int>();
  return {all.begin(), all.end()};
}

}  // namespace sherd::shard
