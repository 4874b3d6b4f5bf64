#include "tests/collectives/fault_memory.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <limits>
#include <vector>

#include "sherd.h"
#include "tests/allocated.h"
#include "tests/ranks.h"

namespace sherd::test {
namespace {

using Kind = CollectiveKind;

/// Bytes that allocators, and MPI, keep for what was under way at once, whatever the number of faults, in
/// most rounds.
constexpr std::int64_t noise = 128 << 10;

/// Bytes that this rank's tensors hold, whoever holds the tensors.
std::int64_t held() { return Context::current().memory().held(DeviceType::cpu).total(); }

/// That nobody will wait for.
void post(const Group& group, Collective call) {
  [[maybe_unused]] const Work work = group.enqueue(std::move(call));
}

Collective all_reduce_of(std::int64_t n, int channel = 0) {
  const Tensor x = zeros({n});
  return {.kind = Kind::all_reduce, .inputs = {x}, .outputs = {x}, .channel = channel};
}

struct Way {
  bool renews;  ///< else it fails a group of its own, which is dropped
  std::function<void(const Group&, std::int64_t n)> fail;
};

const std::vector<Way>& ways() {
  static const std::vector<Way> all = {
      // calls that differ, after which nobody asks for what the others have posted
      {true, [](const Group& g, std::int64_t n) { g.all_reduce(zeros({g.rank() == 1 ? n + 1 : n})); }},
      // one renews, whatever the others have under way
      {true,
       [](const Group& g, std::int64_t n) {
         for (int channel = 0; channel < 3 && g.rank() != 1; ++channel) post(g, all_reduce_of(n, channel));
       }},
      // all renew in the middle of a call that goes well
      {true, [](const Group& g, std::int64_t n) { post(g, all_reduce_of(n)); }},
      // what was posted goes well, and what comes after it does not
      {true,
       [](const Group& g, std::int64_t n) {
         for (int call = 0; call < 4; ++call) post(g, all_reduce_of(n));
         g.all_gather(zeros({g.size() * (g.rank() == 0 ? n : n - 1)}), zeros({g.rank() == 0 ? n : n - 1}));
       }},
      // a message that nobody takes, and one that nobody sends
      {true,
       [](const Group& g, std::int64_t n) {
         const Tensor x = zeros({n});
         if (g.rank() == 0) post(g, {.kind = Kind::send, .inputs = {x}, .peer = 1});
         if (g.rank() == 1) post(g, {.kind = Kind::recv, .outputs = {x}, .peer = 0, .channel = 1});
       }},
      // a group of its own that is dropped once it has failed
      {false,
       [](const Group& g, std::int64_t n) {
         const Group own = g.blocks(g.size());
         post(own, all_reduce_of(n, 2));
         own.broadcast(zeros({n}), own.rank() == 1 ? 1 : 0);
       }},
  };
  return all;
}

struct Left {
  std::int64_t tensors, beside;  ///< bytes
};

/// What is left of more than `tensors` bytes of tensors and `bytes` of all memory of the process, once no
/// rank has any, or some have it for long: what peers have not read yet they read while calls are made.
Left left_on(const Group& group, std::int64_t tensors, std::int64_t bytes) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(sanitized ? 60 : 10);
  for (;;) {
    const std::int64_t kept = held() - tensors;
    const Left here{std::max<std::int64_t>(kept, 0),
                    std::max<std::int64_t>(allocated_bytes() - kept - bytes, 0)};
    const Tensor most = Tensor::from<std::int64_t>(
        {here.tensors, here.beside, std::chrono::steady_clock::now() < end ? 0 : 1}, {3}, Device::cpu());
    group.all_reduce(most, ReduceOp::max());
    const std::vector<std::int64_t> of_all = most.to_vector<std::int64_t>();
    if ((of_all[0] == 0 && of_all[1] == 0) || of_all[2] == 1) return {of_all[0], of_all[1]};
  }
}

}  // namespace

void faults_leave_nothing(World& world, int faults, std::int64_t elements) {
  const Group& group = world.group();
  const auto fail = [&](int count) {
    for (int i = 0; i < count; ++i) {
      const Way& way = ways()[static_cast<std::size_t>(i) % ways().size()];
      try {
        group.barrier();  // who is slow hears here of the fault already
        way.fail(group, elements);
      } catch (const CollectiveError&) {
      }
      if (way.renews) group.renew();
    }
  };
  group.barrier();
  const std::int64_t tensors = held();
  fail(static_cast<int>(ways().size()) * 10);  // what is made once is made
  left_on(group, tensors, std::numeric_limits<std::int64_t>::max() / 2);
  // What faults leave grows with each round; what allocators and MPI keep grows in the rounds in which more
  // was under way at once than ever before.
  Left left{};
  for (int round = 0; round < 3; ++round) {
    group.barrier();
    const std::int64_t before = allocated_bytes();
    group.barrier();
    fail(faults);
    left = left_on(group, tensors, before + noise);
    if (left.tensors == 0 && left.beside == 0) return;
  }
  expect(false,
         "in each of 3 rounds {} faults left memory: {} bytes of tensors, {} more than noise beside them",
         faults, left.tensors, left.beside);
}

}  // namespace sherd::test
