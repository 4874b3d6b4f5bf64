#include "tests/scenarios/scenario.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>

#include "runtime/ops.h"
#include "tests/late_device.h"
#include "tests/rank_device.h"
#include "tests/sanitizer.h"

namespace sherd::scenarios {
namespace {

const char* name_of(Harness harness) { return harness == Harness::threads ? "threads" : "processes"; }

std::string asked_for() {
  const char* name = std::getenv("SHERD_TEST_DEVICE");
  if (name == nullptr) return "cpu:1";
  if (std::string_view(name).starts_with("late")) {
    test::late_device();
    test::late_network_device();
  }
  return name;
}

/// The world of a scenario among the ranks that were started.
DeviceMesh mesh_of(const World& ranks, int world) {
  const Group group = ranks.size() == world ? ranks.group() : ranks.group().blocks(world);
  return {group, {world}, {"ranks"}};
}

std::int64_t total_over(const Group& group, std::int64_t count) {
  const Tensor total = Tensor::from({count}, {1});
  group.all_reduce(total);
  return total.item<std::int64_t>();
}

Outcome run_one(const Scenario& scenario, int combination, const World& ranks, Rank& rank) {
  const auto begin = std::chrono::steady_clock::now();
  rank.check = {};
  scenario.body(rank, combination);
  rank.check.end();
  const std::int64_t comparisons = total_over(ranks.group(), rank.check.count());  // and a barrier
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return {comparisons, took.count()};
}

/// A device that dawdles sees no more of a wide grid than a sanitizer does.
bool left_to_other_runs(std::size_t combination, std::size_t combinations) {
  const bool slow = test::sanitized || Device(compute).type > DeviceType::meta;
  return slow && combinations > 24 && combination % 11 != 0;
}

/// The separators of a line do not occur in its fields.
std::string field(std::string text) {
  std::ranges::replace_if(text, [](char c) { return c == '|' || c == '\n' || c == '"'; }, ' ');
  return text;
}

void print(const Scenario& s, const Place& place, std::size_t combination, const Outcome& outcome) {
  if (!place.speaks) return;
  std::cout << fmt::format("scenario: {} | {} | {} | {} | {} | {:.3f} | {}", s.id, place.text(),
                           s.text(static_cast<int>(combination)), outcome.error.empty() ? "ok" : "failed",
                           outcome.comparisons, outcome.seconds, field(outcome.error))
            << std::endl;
}

}  // namespace

ComputeDevice::operator Device() const { return test::rank_device(compute_name()); }

const std::string& compute_name() {
  static const std::string name = asked_for();
  return name;
}

std::string Place::text() const { return fmt::format("{} x {}", name_of(harness), world); }

const std::vector<Scenario>& all_scenarios() {
  static const std::vector<Scenario> all = [] {
    std::vector<Scenario> list;
    for (auto part : {s1, s2, s3_training, s3_casts, s4, s4_training, s5_compile, s5_training, s5_forwards,
                      s5_writeback, s5_views})
      std::ranges::move(part(), std::back_inserter(list));
    return list;
  }();
  return all;
}

void print_owed(const Scenario& scenario) {
  std::string places;
  for (Harness harness : {Harness::threads, Harness::processes}) {
    if (harness == Harness::processes && scenario.harness == Harness::threads) continue;
    for (int world : scenario.worlds)
      places += (places.empty() ? "" : "; ") + Place{harness, world, world}.text();
  }
  std::cout << fmt::format("scenario-owes: {} | {} | {} | {}", scenario.id, scenario.combinations, places,
                           field(scenario.not_here))
            << std::endl;
}

std::vector<Outcome> run(const Scenario& scenario, const Place& place) {
  const auto combinations = static_cast<std::size_t>(scenario.combinations);
  std::vector<Outcome> outcomes;
  while (outcomes.size() < combinations) {
    try {
      run_ranks(place.ranks, [&, first = outcomes.size()](World& ranks) {
        Rank rank{mesh_of(ranks, place.world)};
        for (std::size_t i = first; i < combinations; ++i) {
          if (left_to_other_runs(i, combinations)) {
            if (place.harness == Harness::processes || ranks.rank() == 0) outcomes.push_back({});
            continue;
          }
          const Outcome outcome = run_one(scenario, static_cast<int>(i), ranks, rank);
          if (place.harness == Harness::threads && ranks.rank() != 0) continue;
          print(scenario, place, i, outcome);
          outcomes.push_back(outcome);
        }
      });
    } catch (const std::exception& error) {
      outcomes.push_back({.error = error.what()});
      print(scenario, place, outcomes.size() - 1, outcomes.back());
    }
  }
  return outcomes;
}

}  // namespace sherd::scenarios
