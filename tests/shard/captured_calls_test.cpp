// Captured steps whose calls among ranks the devices make, on a device that works later.
#include "tests/captured_calls.h"

#include "tests/late_device.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("captured calls of every kind give the step's bits where devices make them", "[threads meet]") {
  late_device();
  check_captured_calls("late:each", {2, 3, 4}, Makes::devices);
}

TEST_CASE("captured calls of ranks that share a device are made by the hosts", "[threads meet]") {
  late_device();
  check_captured_calls("late:0", {2, 3}, Makes::hosts);
}

TEST_CASE("a rank that does not run what devices are to meet in is named, and nobody waits for it",
          "[threads meet]") {
  late_device();
  check_captured_faults("late:each");
}

TEST_CASE("a graph gives back inputs as they were given") {
  const Device device = late_device();
  const NoGrad guard;
  const Step step = [](std::span<const Tensor> in) {
    add_(in[0], 1);
    return std::vector{in[0], narrow(in[0], 0, 1, 2), in[1]};
  };
  const auto x = [&](double value) { return full({4}, value, {f32, device}); };
  const Tensor other = x(9);
  Program program = capture(step, {x(0), other});
  std::vector<std::vector<Tensor>> got;
  std::vector<Tensor> given;
  for (int i = 1; i < 5; ++i) {
    given.push_back(x(10 * i));
    got.push_back(program.replay({given.back(), other}));
  }
  REQUIRE(program.is_device_graph());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CHECK(got[i][0].storage_ref() == given[i].storage_ref());
    CHECK(got[i][1].storage_ref() == given[i].storage_ref());
    CHECK(got[i][2].storage_ref() == other.storage_ref());
    CHECK(got[i][1].to_vector<float>() == std::vector<float>(2, 10 * (static_cast<float>(i) + 1) + 1));
  }
}

namespace {

/// Ranks that make other calls than their peers, on groups and in messages that only they have; or all of
/// them more on a second group than devices make.
enum class Apart { subgroup, message, too_many };

void check_apart(Apart how) {
  CHECK_NOTHROW(run_ranks(3, [&](World& world) {
    const Device device = rank_device("late:each");
    const NoGrad guard;
    const Group pair = world.group().split({{0, 1}, {2}}, "pair");
    const Group other = world.group().split({{0, 1, 2}}, "other");
    const Tensor many = zeros({(1 << 20) / 3 / 4}, {f32, device});  // a MiB arrives
    const int rank = world.rank();
    const Step step = [&](std::span<const Tensor> in) {
      Tensor sum = mul(in[0], 2), own = mul(in[0], 3);
      if (how == Apart::subgroup && rank < 2) pair.all_reduce(own);
      if (how == Apart::too_many)
        for (int i = 0; i < 65; ++i) other.all_reduce(many);
      if (how == Apart::message && rank == 0) world.group().send(own, 1);
      if (how == Apart::message && rank == 1) world.group().recv(own, 0);
      world.group().all_reduce(sum);
      return std::vector{sum, own};
    };
    const auto x = [&](int i) { return full({5}, i + rank, {f32, device}); };
    Program program = capture(step, {x(0)});
    for (int i = 1; i < 5; ++i) {
      const std::vector<Tensor> wanted = step(std::vector{x(i)}), got = program.replay({x(i)});
      for (std::size_t k = 0; k < wanted.size(); ++k)
        expect(same_bits(got[k], wanted[k]), "result {} differs", k);
    }
    expect(program.is_device_graph(), "not a graph");
  }));
}

Program sum_program(World& world, std::int64_t n, Device device) {
  const Group group = world.group();
  const NoGrad guard;
  return capture(
      [group](std::span<const Tensor> in) {
        Tensor sum = mul(in[0], 2);
        group.all_reduce(sum);
        return std::vector{sum};
      },
      {ones({n}, {f32, device})});
}

}  // namespace

TEST_CASE("ranks whose calls devices cannot make agree with ranks whose calls they can") {
  late_device();
  check_apart(Apart::subgroup);
  check_apart(Apart::message);
  check_apart(Apart::too_many);
}

TEST_CASE("ranks that replay another program are told so, and find their way by renewal") {
  late_device();
  for (const std::int64_t other : {7, 8}) {  // elements of the other program: as many, or not
    std::array<std::string, 2> heard;
    CHECK_NOTHROW(run_ranks(2, [&](World& world) {
      const Device device = rank_device("late:each");
      const NoGrad guard;
      Program first = sum_program(world, 7, device), second = sum_program(world, other, device);
      const auto replay = [&](Program& program, std::int64_t n) {
        return program.replay({ones({n}, {f32, device})})[0].to_vector<float>()[0];
      };
      for (int i = 0; i < 3; ++i) expect(replay(first, 7) == 4 && replay(second, other) == 4, "not the sum");
      heard[static_cast<std::size_t>(world.rank())] =
          message_of<CollectiveError>([&] { world.rank() == 0 ? replay(first, 7) : replay(second, other); });
      world.group().renew();
      for (int i = 0; i < 3; ++i) expect(replay(first, 7) == 4 && replay(second, other) == 4, "not the sum");
      expect(first.is_device_graph() && second.is_device_graph(), "no graphs after the renewal");
      const std::uint64_t before = collective_calls();
      replay(first, 7);
      expect(collective_calls() - before == 1, "the hosts make the calls after the renewal");
    }));
    for (const std::string& text : heard)
      CHECK_THAT(text, Catch::Matchers::ContainsSubstring("a captured step of 1 calls"));
  }
}

TEST_CASE("what looks at the first replays leaves the later ones to devices") {
  late_device();
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    const Device device = rank_device("late:each");
    const NoGrad guard;
    Program program = sum_program(world, 7, device);
    const Tensor x = ones({7}, {f32, device});
    {
      std::optional<OrderLog> log;
      if (world.rank() == 1) log.emplace();
      for (int i = 0; i < 4; ++i) program.replay({x});
      if (log) expect(log->lines().back().find("captured") == std::string::npos, "no call of the step's own");
    }
    for (int i = 0; i < 2; ++i) program.replay({x});
    const std::uint64_t before = collective_calls();
    expect(program.replay({x})[0].to_vector<float>()[0] == 4, "not the sum");
    expect(collective_calls() - before == 1, "the hosts make the calls");
  }));
}
