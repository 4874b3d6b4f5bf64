// A scenario of the catalogue as a value: its grid, the ranks that it owes a run on, and what a rank does.
#pragma once

#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collectives/world.h"
#include "tests/scenarios/checks.h"

namespace sherd::scenarios {

/// Where models are built.
inline constexpr Device host = Device::cpu(0);
/// Where they compute: another device, so that every move shows. cpu:1, or what the environment variable
/// SHERD_TEST_DEVICE says, as `rank_device` of the rank that asks: "cuda:0", "cuda:each", or "late:0" or
/// "late-network:0" of tests/late_device.h.
struct ComputeDevice {
  operator Device() const;
};
inline constexpr ComputeDevice compute;

/// A rank of a scenario's world, and what it found.
struct Rank {
  DeviceMesh mesh;
  Checks check{};
  const Group& group() const { return mesh.group(); }
  int index() const { return group().rank(); }
  int world() const { return group().size(); }
};

template <class T>
struct Axis {
  std::string name;
  std::vector<T> values;
};

/// All combinations of the axes' values, the last axis fastest; one combination without axes.
template <class... T>
class Grid {
 public:
  explicit Grid(Axis<T>... axes) : axes_(std::move(axes)...) {}

  int size() const {
    return std::apply([](const auto&... axis) { return (1 * ... * static_cast<int>(axis.values.size())); },
                      axes_);
  }
  std::tuple<T...> operator[](int combination) const {
    return pick(combination, [](const auto&, const auto& value) { return value; });
  }
  std::string text(int combination) const {
    std::string text;
    const auto join = [&](const auto&... part) { ((text += (text.empty() ? "" : ", ") + part), ...); };
    std::apply(join, pick(combination,
                          [](const auto& axis, const auto& value) { return axis.name + "=" + show(value); }));
    return text.empty() ? "-" : text;
  }

 private:
  auto pick(int combination, auto&& of) const {
    return pick(combination, of, std::index_sequence_for<T...>());
  }
  template <std::size_t... i>
  auto pick(int combination, auto&& of, std::index_sequence<i...>) const {
    [[maybe_unused]] int after = size();  // combinations that share the values of the axes so far
    [[maybe_unused]] const auto value = [&](const auto& axis) {
      const int count = static_cast<int>(axis.values.size());
      after /= count;
      return of(axis, axis.values[static_cast<std::size_t>(combination / after % count)]);
    };
    return std::tuple{value(std::get<i>(axes_))...};
  }

  std::tuple<Axis<T>...> axes_;
};

/// What the catalogue runs a scenario on: processes are owed beside threads, or threads are enough.
enum class Harness { threads, processes };

struct Scenario {
  std::string id, test;
  Harness harness;
  std::vector<int> worlds;  ///< a combination runs at each of them
  int combinations;
  std::function<std::string(int)> text;
  std::function<void(Rank&, int)> body;
  std::string not_here{};  ///< why this machine cannot run it; empty where it can
};

/// `body(rank, values...)` for every combination of the grid.
template <class... T, class Body>
Scenario scenario(std::string id, std::string test, Harness harness, std::vector<int> worlds, Grid<T...> grid,
                  Body body) {
  return {std::move(id),
          std::move(test),
          harness,
          std::move(worlds),
          grid.size(),
          [grid](int i) { return grid.text(i); },
          [grid, body](Rank& rank, int i) {
            std::apply([&](const auto&... values) { body(rank, values...); }, grid[i]);
          },
          {}};
}

std::vector<Scenario> s1();
std::vector<Scenario> s2();
std::vector<Scenario> s3_training();
std::vector<Scenario> s3_casts();
std::vector<Scenario> s4();
std::vector<Scenario> s4_training();
std::vector<Scenario> s5_compile();
std::vector<Scenario> s5_training();
std::vector<Scenario> s5_forwards();
std::vector<Scenario> s5_writeback();
std::vector<Scenario> s5_views();
/// All of them, in the order of the catalogue.
const std::vector<Scenario>& all_scenarios();

/// Ranks that run a scenario.
struct Place {
  Harness harness = Harness::threads;
  int world = 1;  ///< as the scenario sees it
  int ranks = 1;  ///< as they were started: several worlds side by side when it is larger
  bool speaks = true;
  std::string text() const;
};
/// What SHERD_TEST_DEVICE says, "cpu:1" where it is not set.
const std::string& compute_name();
/// Prints what a scenario's combinations run on, "threads x 2; processes x 2; ...", and why it does not run
/// here if it does not, for tools/scenarios.
void print_owed(const Scenario& scenario);

struct Outcome {
  std::int64_t comparisons = 0;  ///< of all ranks
  double seconds = 0;
  std::string error{};  ///< empty: passed
};
/// Runs all combinations one after another on the same ranks, with new models each, so that what a failed
/// step leaves behind meets the next combination. Prints a line for each, which tools/scenarios reads.
std::vector<Outcome> run(const Scenario& scenario, const Place& place);

}  // namespace sherd::scenarios
