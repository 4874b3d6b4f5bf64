// What holds for every group on every transport.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "collectives/observe.h"
#include "runtime/ops.h"
#include "tests/collectives/suite.h"
#include "tests/ranks.h"

namespace sherd::test {
namespace {

using Kind = CollectiveKind;

void every_case(const Group& group) {
  bool blocking = false;
  for (const CallCase& c : all_cases(group.size())) {
    Part part(group, c);
    if ((blocking = !blocking)) {
      part.call();
    } else {
      part.post();
      part.wait();
      part.wait_inputs();
    }
    part.check();
  }
}

/// Short and long calls of all kinds on three channels.
std::vector<CallCase> some_cases(int world, int count) {
  constexpr Kind kinds[] = {Kind::all_gather, Kind::all_reduce, Kind::send,          Kind::all_to_all,
                            Kind::broadcast,  Kind::barrier,    Kind::reduce_scatter};
  std::vector<CallCase> cases;
  for (int i = 0; i < count; ++i) {
    const Kind kind = kinds[i % 7];
    if (kind == Kind::send && world == 1) continue;
    CallCase c{.kind = kind, .sizes = {i % 4 == 0 ? 3 : 900, i}, .seed = static_cast<std::uint64_t>(i)};
    if (kind == Kind::barrier) c.sizes.clear();
    c.root = i % world;
    c.destination = (i + 1) % world;
    c.channel = i % 3;
    cases.push_back(c);
  }
  return cases;
}

void any_order_of_waits(const Group& group) {
  const int rank = group.rank();
  for (std::uint64_t round = 0; round < 4; ++round) {
    std::vector<Part> parts;
    for (const CallCase& c : some_cases(group.size(), 60)) {  // 20 a channel: more than a line holds
      parts.emplace_back(group, c);
      parts.back().post();
    }
    std::vector<std::size_t> order(parts.size());
    std::iota(order.begin(), order.end(), 0);
    if (round == 1) std::ranges::reverse(order);
    if (round >= 2)
      std::ranges::shuffle(order, std::mt19937_64(round * 100 + static_cast<std::uint64_t>(rank)));
    for (std::size_t i : order) {
      if ((i + round) % 2 == 0) parts[i].wait_inputs();
      parts[i].wait();
      parts[i].wait();  // once more changes nothing
      parts[i].wait_inputs();
      parts[i].check();
    }
  }
}

void dropped_works(const Group& group) {
  for (int round = 0; round < 3; ++round) {
    for (const CallCase& c : some_cases(group.size(), 40)) Part(group, c).post();
    // Whoever allocates now must not find memory that a call still writes.
    std::vector<Tensor> fresh;
    for (int i = 0; i < 40; ++i)
      fresh.push_back(full({i % 4 == 0 ? 6 : 903}, 5.0, {f32, CasesOn::current()}));
    for (int channel : {0, 1, 2}) {
      Part last(group, {.kind = Kind::all_reduce, .sizes = {900}, .channel = channel});
      last.call();
      last.check();
    }
    for (const Tensor& t : fresh)
      for (float x : t.to_vector<float>()) expect(x == 5, "a dropped call wrote {} to memory of others", x);
  }
}

void polling(const Group& group) {
  Part part(group, {.kind = Kind::all_reduce, .sizes = {5000}});
  Work work = group.enqueue(part.collective());
  while (!work.done()) std::this_thread::yield();
  work.wait();
  part.check();
  expect(Work().done(), "no call is always done");
}

void inputs_are_free_after_wait_inputs(const Group& group) {
  for (std::int64_t n : {3, 5000}) {
    const TensorOptions as{f32, CasesOn::current()};
    const Tensor x = full({n}, group.rank() + 1.0, as), sum = empty({n}, as);
    Work work = group.enqueue({.kind = Kind::all_reduce, .inputs = {x}, .outputs = {sum}});
    work.wait_inputs();
    fill_(x, 1e6);
    work.wait();
    const auto expected = static_cast<float>(group.size() * (group.size() + 1) / 2);
    for (float s : sum.to_vector<float>()) expect(s == expected, "{} is not {}", s, expected);
  }
}

void sequences(const Group& group) {
  const Group fresh = group.blocks(group.size());
  for (int channel : {0, 5, max_channels - 1})
    for (std::uint64_t i = 0; i < 12; ++i) {
      Work work = fresh.enqueue({.channel = channel});
      expect(work.sequence() == i, "call {} of channel {} has number {}", i, channel, work.sequence());
      if (i % 3 == 0) work.wait();
    }
  const std::uint64_t before = collective_calls();
  fresh.barrier();
  expect(collective_calls() == before + 1, "a barrier is {} calls", collective_calls() - before);
}

void expect_members(const Group& group, const std::vector<int>& ranks) {
  expect(std::ranges::equal(group.world_ranks(), ranks), "{} has other members", group.name());
  expect(ranks[static_cast<std::size_t>(group.rank())] ==
                 group.world_ranks()[static_cast<std::size_t>(group.rank())] &&
             group.size() == static_cast<int>(ranks.size()),
         "{}: rank {} of {}", group.name(), group.rank(), group.size());
}

void run_one(const Group& group, std::int64_t n) {
  const Tensor x = full({n}, group.rank() + 1.0, {f32, CasesOn::current()});
  group.all_reduce(x);
}

void run_some(const Group& group) {
  for (const CallCase& c : some_cases(group.size(), 21)) {
    Part part(group, c);
    part.call();
    part.check();
  }
}

void sub_groups(const Group& group) {
  const int size = group.size(), rank = group.rank();
  std::vector<Group> groups;
  for (int count = 1; count <= size; ++count) {
    if (size % count != 0) continue;
    std::vector<int> block, stride;
    for (int r = rank / count * count; block.size() < static_cast<std::size_t>(count); ++r)
      block.push_back(r);
    for (int r = rank % count; r < size; r += count) stride.push_back(r);
    expect_members(groups.emplace_back(group.blocks(count)), block);
    expect_members(groups.emplace_back(group.strided(count)), stride);
  }
  std::vector<int> backwards, odd;
  for (int r = size - 1; r >= 0; --r) backwards.push_back(r);
  for (int r = 1; r < size; r += 2) odd.push_back(r);
  expect_members(groups.emplace_back(group.subgroup(backwards)), backwards);
  if (!odd.empty()) {
    const Group some = group.subgroup(odd);
    expect(some.defined() == (rank % 2 == 1), "rank {} is wrongly in or out of the odd ranks", rank);
    if (some.defined()) expect_members(groups.emplace_back(some), odd);
  }
  for (const Group& g : groups) run_some(g);
  const Group again = groups.front().blocks(groups.front().size());  // a group of a group
  run_some(again);
}

/// This rank's key, on every rank of the group and no other: `seen` are those of other groups.
void expect_own_key(const Group& group, std::vector<GroupKey>& seen) {
  const GroupKey& key = group.key();
  const Tensor own = zeros({128}, {u8}), all = zeros({128 * group.size()}, {u8});
  std::memcpy(own.mutable_data<std::uint8_t>(), key.data(), key.size());
  group.all_gather(all, own);
  for (int rank = 0; rank < group.size(); ++rank)
    expect(std::memcmp(all.data<std::uint8_t>() + 128 * rank, key.data(), 128) == 0,
           "rank {} of {} has another key", rank, group.name());
  expect(std::ranges::count(seen, key) == 0, "{} has the key of another group", group.name());
  expect(std::ranges::count(key, std::byte{}) < 64, "the key of {} is mostly zeros", group.name());
  seen.push_back(key);
}

void keys(const Group& group) {
  std::vector<GroupKey> seen;
  expect_own_key(group, seen);
  const Group all = group.strided(1);  // of the same ranks
  expect_own_key(all, seen);
  expect_own_key(all.blocks(all.size()), seen);
  std::vector<int> backwards, odd;
  for (int r = group.size() - 1; r >= 0; --r) backwards.push_back(r);
  for (int r = 1; r < group.size(); r += 2) odd.push_back(r);
  const Group turned = all.subgroup(backwards);
  expect_own_key(turned, seen);
  if (odd.empty()) return;
  const Group some = turned.subgroup(odd);
  if (some.defined()) {
    expect_own_key(some, seen);
    expect_own_key(some.strided(1), seen);
  }
}

/// Memory that a call still reads or writes outlives works, tensors and the handle of the group.
void dropped_groups(const Group& group) {
  for (std::int64_t n : {3, 5000}) {
    {
      const Group all = group.blocks(group.size());
      const TensorOptions as{f32, CasesOn::current()};
      if (group.rank() == 0)
        (void)all.enqueue(
            {.kind = Kind::all_reduce, .inputs = {full({n}, 1.0, as)}, .outputs = {empty({n}, as)}});
      else
        run_one(all, n);
    }
    run_some(group);
  }
}

/// Counts the bytes of tensors for as long as anything holds them.
class Counted {
 public:
  Tensor tensor(std::int64_t numel) {
    const std::int64_t bytes = numel * size_of(f32);
    auto memory = std::make_shared<std::vector<float>>(static_cast<std::size_t>(numel), 1.0f);
    *bytes_ += bytes;
    float* const data = memory->data();
    return from_blob(data, {numel}, f32,
                     [held = bytes_, bytes, kept = std::move(memory)] { *held -= bytes; });
  }
  std::int64_t bytes() const { return *bytes_; }

 private:
  std::shared_ptr<std::atomic<std::int64_t>> bytes_ = std::make_shared<std::atomic<std::int64_t>>(0);
};

/// This rank's part in a call of counted tensors; a message goes from rank 0 to rank 1.
std::optional<Collective> counted_call(Counted& counted, const Group& group, Kind kind, std::int64_t n,
                                       bool in_place, int channel) {
  const std::int64_t size = group.size(), rank = group.rank();
  Collective c{.kind = kind, .channel = channel};
  const auto brings = [&](const Tensor& t) { c.inputs.push_back(t); };
  const auto gets = [&](const Tensor& t) { c.outputs.push_back(t); };
  const std::int64_t in = kind == Kind::reduce_scatter || kind == Kind::all_to_all ? n * size : n;
  const std::int64_t out = kind == Kind::all_gather || kind == Kind::all_to_all ? n * size : n;
  if (kind == Kind::broadcast) {
    c.peer = 0;
    gets(counted.tensor(n));
    if (rank == 0) brings(c.outputs[0]);
  } else if (kind == Kind::send) {
    if (rank > 1) return {};
    c.kind = rank == 0 ? Kind::send : Kind::recv;
    c.peer = rank == 0 ? 1 : 0;
    rank == 0 ? brings(counted.tensor(n)) : gets(counted.tensor(n));
  } else if (in_place && kind != Kind::all_to_all) {
    const Tensor whole = counted.tensor(std::max(in, out));
    const Tensor own = in == out ? whole : narrow(whole, 0, rank * n, n);
    brings(in < out ? own : whole);
    gets(out < in ? own : whole);
  } else {
    brings(counted.tensor(in));
    gets(counted.tensor(out));
  }
  return c;
}

/// A call that is over and was waited for holds nothing, whatever else its line and others have had.
void calls_that_are_over_hold_nothing(const Group& group) {
  for (const Kind kind : {Kind::all_gather, Kind::all_reduce, Kind::reduce_scatter, Kind::all_to_all,
                          Kind::broadcast, Kind::send}) {
    if (kind == Kind::send && group.size() == 1) continue;
    for (const std::int64_t n : {3, 5000, 100000})
      for (const bool in_place : {false, true}) {
        Counted counted;
        for (int i = 0; i < 20; ++i) {
          const auto c = counted_call(counted, group, kind, n, in_place, i % 3);
          if (c) group.call(*c);
        }
        expect(counted.bytes() == 0, "{} of {}: {} bytes are held", to_string(kind), n, counted.bytes());
      }
  }
}

void poll(const Work& work) {
  while (!work.done()) std::this_thread::yield();
}

/// Of calls for whose inputs nobody waits nothing is held once the peers have read them, however many lines
/// there were: the next call of the rank, on whatever line, gives it back.
void lines_hold_nothing_that_was_read(const Group& group) {
  const int rank = group.rank(), size = group.size();
  for (const std::int64_t n : {3, 5000, 100000})
    for (const int count : {1, 6}) {
      std::vector<Group> groups;
      for (int i = 0; i < count; ++i) groups.push_back(group.blocks(size));
      Counted counted;
      std::vector<Work> works;
      for (const Group& g : groups)
        for (int channel = 0; channel < max_channels; channel += 3)
          for (const Kind kind : {Kind::all_gather, Kind::reduce_scatter, Kind::broadcast})
            works.push_back(g.enqueue(*counted_call(counted, g, kind, n, kind == Kind::all_gather, channel)));
      if (rank > 0) {  // waits for nothing before the first rank has waited for everything
        const Tensor token = zeros({1});
        poll(group.enqueue({.kind = Kind::recv, .outputs = {token}, .peer = 0}));
      }
      for (Work& work : works) work.wait();
      works.clear();
      if (rank == 0)
        for (int peer = 1; peer < size; ++peer)
          (void)group.enqueue({.kind = Kind::send, .inputs = {zeros({1})}, .peer = peer});
      group.barrier();  // all have waited, and so read
      expect(counted.bytes() == 0, "{} groups, {} elements: {} bytes are held", count, n, counted.bytes());
    }
}

/// A peer waits for this rank's part of one call before it comes to another one, which this rank polls.
void polling_moves_every_line(const Group& group) {
  for (const int poller : {0, group.size() - 1}) {
    const TensorOptions as{f32, CasesOn::current()};
    const Tensor large = full({100000}, 1.0, as), small = full({4}, 2.0, as);
    const auto reduce = [&](const Tensor& t, int channel) {
      return group.enqueue({.kind = Kind::all_reduce, .inputs = {t}, .outputs = {t}, .channel = channel});
    };
    Work first = reduce(large, 0), second;
    if (group.rank() != poller) first.wait();
    second = reduce(small, 1);
    if (group.rank() == poller) poll(second);
    second.wait();
    first.wait();
    const auto size = static_cast<float>(group.size());
    expect(large.to_vector<float>().back() == size && small.to_vector<float>().back() == 2 * size,
           "not the sums");
  }
}

void views(const Group& group) {
  const std::int64_t size = group.size();
  const Tensor grid = zeros({size, 6});  // a row is dense, a column is not
  group.all_gather(grid, full({6}, group.rank() + 1.0));
  for (std::int64_t r = 0; r < size; ++r)
    for (float x : narrow(grid, 0, r, 1).to_vector<float>())
      expect(x == static_cast<float>(r + 1), "row {} holds {}", r, x);
  group.all_reduce(narrow(grid, 0, size - 1, 1));
  expect(narrow(grid, 0, size - 1, 1).to_vector<float>()[5] == static_cast<float>(size * size),
         "the last row was not summed in place");
}

// ---- what is refused ----

template <class E>
void expect_refused(const Group& group, const Collective& c, std::initializer_list<std::string_view> words) {
  for (bool blocking : {false, true}) {
    std::string text = "(nothing was thrown)";
    try {
      if (blocking)
        group.call(c);
      else
        (void)group.enqueue(c);
    } catch (const E& error) {
      text = error.what();
    }
    expect(text.find(to_string(c.kind)) == 0 || c.kind == Kind::barrier, "the text does not open with {}: {}",
           to_string(c.kind), text);
    for (std::string_view word : words)
      expect(text.find(word) != std::string::npos, "'{}' is not in: {}", word, text);
  }
}

void refusals_of_sizes(const Group& group) {
  const int size = group.size();
  const auto n = [](std::int64_t count) { return zeros({count}); };
  const auto number = [](std::int64_t count) { return std::to_string(count); };
  expect_refused<ShapeError>(
      group, {Kind::all_gather, {n(3)}, {n(3 * size + 1)}},
      {"3 elements from each of " + number(size), number(3 * size), number(3 * size + 1)});
  expect_refused<ShapeError>(group, {Kind::reduce_scatter, {n(3 * size + 1)}, {n(3)}},
                             {"output of 3", number(3 * size), number(3 * size + 1)});
  expect_refused<ShapeError>(group, {Kind::all_reduce, {n(3)}, {n(4)}}, {"equal", "3 and 4"});
  expect_refused<ShapeError>(group, {Kind::all_reduce, {n(5), n(3)}, {n(5), n(4)}}, {"equal", "3 and 4"});
  expect_refused<ShapeError>(group, {Kind::all_to_all, {n(size)}, {n(2 * size)}},
                             {"equal", number(2 * size)});
  if (size > 1)
    expect_refused<ShapeError>(group, {Kind::all_to_all, {n(size + 1)}, {n(size + 1)}},
                               {number(size + 1) + " elements", "divide", number(size) + " equal slices"});
  const Tensor column = narrow(zeros({4, 6}), 1, 2, 1);
  expect_refused<ShapeError>(group, {Kind::all_reduce, {column}, {column}},
                             {"(4, 1)", "strides", "contiguous()"});
  const Tensor turned = transpose(zeros({2, 3}), 0, 1);
  expect_refused<ShapeError>(group, {Kind::all_reduce, {n(6)}, {turned}},
                             {"output 0", "(3, 2)", "contiguous()"});
}

void refusals_of_values(const Group& group) {
  const int size = group.size(), rank = group.rank();
  const auto number = [](std::int64_t count) { return std::to_string(count); };
  const Tensor x = zeros({4}), y = zeros({4});
  for (int channel : {-1, max_channels, 1000})
    expect_refused<ValueError>(group, {Kind::all_reduce, {x}, {x}, {}, -1, channel},
                               {"channel " + number(channel), "0..15"});
  for (int root : {-1, size})
    expect_refused<ValueError>(group, {Kind::broadcast, {}, {x}, {}, root},
                               {"rank " + number(root), "0.." + number(size - 1)});
  expect_refused<ValueError>(group, {Kind::send, {x}, {}, {}, size}, {"rank " + number(size)});
  expect_refused<ValueError>(group, {Kind::recv, {}, {x}, {}, -1}, {"rank -1"});
  expect_refused<ValueError>(group, {Kind::send, {x}, {}, {}, rank}, {"rank " + number(rank), "own peer"});

  expect_refused<ValueError>(group, {Kind::barrier, {x}, {x}}, {"moves nothing", "2 tensors"});
  expect_refused<ValueError>(group, {Kind::all_reduce, {x, y}, {x}},
                             {"2 inputs and 1 outputs", "at least one"});
  expect_refused<ValueError>(group, {Kind::all_gather}, {"0 inputs and 0 outputs", "at least one"});
  expect_refused<ValueError>(group, {Kind::broadcast, {}, {x}, {}, rank}, {"0 inputs and 1 outputs"});
  if (size > 1) {
    const int other = (rank + 1) % size;
    expect_refused<ValueError>(group, {Kind::send, {x}, {y}, {}, other}, {"no outputs", "1 and 1"});
    expect_refused<ValueError>(group, {Kind::recv, {x}, {y}, {}, other}, {"no inputs", "1 and 1"});
    expect_refused<ValueError>(group, {Kind::broadcast, {x}, {y}, {}, other}, {"no inputs", "1 and 1"});
  }
  expect_refused<ValueError>(group, {Kind::all_reduce, {Tensor()}, {x}}, {"empty handle"});
  expect_refused<ValueError>(group, {Kind::all_reduce, {x}, {Tensor()}}, {"output 0", "empty handle"});
}

void refusals_of_dtypes(const Group& group) {
  const auto of = [](DType dtype) { return zeros({4}, {dtype}); };
  expect_refused<DTypeError>(group, {Kind::all_reduce, {of(f32)}, {of(f16)}},
                             {"output 0", "f16 beside f32", "one dtype"});
  expect_refused<DTypeError>(group, {Kind::all_reduce, {of(f32), of(i32)}, {of(f32), of(i32)}},
                             {"input 1", "i32 beside f32"});
  for (DType dtype : {i32, i64, u8})
    for (const ReduceOp& reduction : {ReduceOp::average(), ReduceOp::prescaled_sum(0.5f)})
      for (Kind kind : {Kind::all_reduce, Kind::reduce_scatter})
        expect_refused<DTypeError>(group, {kind, {of(dtype)}, {of(dtype)}, reduction},
                                   {to_string(reduction), name_of(dtype), "use sum"});
  expect_refused<DTypeError>(group, {Kind::all_reduce, {of(boolean)}, {of(boolean)}}, {"bool", "sum", "u8"});
  const Tensor second = zeros({4}, {f32, Device::cpu(1)});
  expect_refused<DeviceError>(group, {Kind::all_reduce, {of(f32)}, {second}}, {"cpu:0", "cpu:1"});
}

void refusals_of_overlap(const Group& group) {
  const int size = group.size(), rank = group.rank();
  const Tensor all = zeros({4 * size + 1});
  const auto part = [&](std::int64_t begin, std::int64_t count) { return narrow(all, 0, begin, count); };
  expect_refused<ValueError>(group, {Kind::all_reduce, {part(0, 4)}, {part(1, 4)}},
                             {"overlap", "same tensor"});
  expect_refused<ValueError>(group, {Kind::all_gather, {part(4 * rank + 1, 4)}, {part(0, 4 * size)}},
                             {"overlap", "slice"});
  expect_refused<ValueError>(group, {Kind::reduce_scatter, {part(0, 4 * size)}, {part(4 * rank + 1, 4)}},
                             {"overlap", "slice"});
  expect_refused<ValueError>(group, {Kind::all_to_all, {part(0, 4 * size)}, {part(0, 4 * size)}},
                             {"overlap", "not possible"});
  // One segment's output in the way of another segment.
  const Tensor several = zeros({16});
  const auto at = [&](std::int64_t begin, std::int64_t count) { return narrow(several, 0, begin, count); };
  const std::pair<Tensors, Tensors> crossed[] = {{{at(0, 4), at(4, 4)}, {at(4, 4), at(0, 4)}},
                                                 {{at(0, 4), at(4, 4)}, {at(8, 4), at(8, 4)}},
                                                 {{at(8, 4), at(12, 4)}, {at(0, 4), at(3, 4)}},
                                                 {{at(0, 4), at(2, 4)}, {at(4, 4), at(12, 4)}}};
  for (const auto& [inputs, outputs] : crossed)
    expect_refused<ValueError>(group, {Kind::all_reduce, inputs, outputs}, {"overlap", "segment"});
  group.all_reduce(at(0, 4));
  group.call({Kind::all_reduce, {at(0, 4), at(2, 4)}, {at(12, 4), at(8, 4)}});
}

void refusals(const Group& group) {
  refusals_of_sizes(group);
  refusals_of_values(group);
  refusals_of_dtypes(group);
  refusals_of_overlap(group);
  expect(!group.failed(), "a refused call is no fault");
  run_some(group);
}

template <class E, class F>
void expect_throws(F&& body, std::string_view word) {
  std::string text = "(nothing was thrown)";
  try {
    body();
  } catch (const E& error) {
    text = error.what();
  }
  expect(text.find(word) != std::string::npos, "'{}' is not in: {}", word, text);
}

void refused_groups(const Group& group) {
  const int size = group.size();
  for (int count : {0, -1, size + 1}) {
    expect_throws<ValueError>([&] { group.blocks(count); }, fmt::format("{} ranks", size));
    expect_throws<ValueError>([&] { group.strided(count); }, fmt::format("{}", count));
  }
  expect_throws<ValueError>([&] { group.subgroup({size}); }, fmt::format("rank {} is not in", size));
  expect_throws<ValueError>([&] { group.subgroup({0, 0}); }, "listed twice");
  expect_throws<StateError>([] { Group().barrier(); }, "not in the group");
  expect_throws<StateError>([] { (void)Group().size(); }, "defined()");
  run_some(group);
}

void wrong_thread(const Group& group) {
  const Tensor x = zeros({4});
  Work work = group.enqueue({.kind = Kind::all_reduce, .inputs = {x}, .outputs = {x}});
  const std::function<void()> uses[] = {[&] { group.barrier(); },     [&] { group.all_reduce(zeros({2})); },
                                        [&] { group.subgroup({0}); }, [&] { group.renew(); },
                                        [&] { work.wait(); },         [&] { work.wait_inputs(); },
                                        [&] { (void)work.done(); }};
  for (const auto& use : uses) {
    std::string failure;  // a foreign thread must not throw through its end
    std::thread([&] {
      try {
        expect_throws<StateError>(use, "belongs to another thread");
      } catch (const std::exception& error) {
        failure = error.what();
      }
    }).join();
    expect(failure.empty(), "{}", failure);
  }
  work.wait();
  run_some(group);
}

void random_programs(const Group& group) { random_program(group, static_cast<std::uint64_t>(group.size())); }

constexpr Section all[] = {
    {"every call gives the bits of the reference", every_case},
    {"calls may be waited for in any order, on every rank in another", any_order_of_waits},
    {"works may be dropped", dropped_works},
    {"handles of groups may be dropped with calls under way", dropped_groups},
    {"a call may be polled", polling},
    {"who polls a call goes on with all others", polling_moves_every_line},
    {"inputs may be written after wait_inputs", inputs_are_free_after_wait_inputs},
    {"groups are cut from groups", sub_groups},
    {"random programs", random_programs},
    // ---- from here on tensors of the host ----
    {"calls are numbered by channel", sequences},
    {"a call that is over holds no memory", calls_that_are_over_hold_nothing},
    {"no line holds what was read", lines_hold_nothing_that_was_read},
    {"a group has a key of its own, alike on all of its ranks", keys},
    {"dense views are sent where they lie", views},
    {"a call that cannot be right is refused here, and harms nothing", refusals},
    {"a group that cannot be is refused here", refused_groups},
    {"another thread is refused", wrong_thread},
};

}  // namespace

std::span<const Section> sections() { return all; }
std::span<const Section> device_sections() { return std::span(all).first(9); }

}  // namespace sherd::test
