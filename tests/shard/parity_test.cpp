// Sharding changes where numbers live, not the numbers: the table of what is equal, and to what extent.
#include "tests/shard/parity_table.h"

#include <map>
#include <set>

#include "tests/catch.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// The ranks' records of a way; each is trained once.
class Records {
 public:
  const std::vector<Record>& of(std::string_view way, int world) {
    const std::pair key{std::string(way), world};
    if (const auto found = records_.find(key); found != records_.end()) return found->second;
    std::vector<Record> records(static_cast<std::size_t>(world));
    run_ranks(world, [&](World& w) { records[static_cast<std::size_t>(w.rank())] = record_of(way, w); });
    return records_.emplace(key, std::move(records)).first->second;
  }

 private:
  std::map<std::pair<std::string, int>, std::vector<Record>> records_;
};

std::string first_difference(const std::vector<Record>& a, const std::vector<Record>& b, Equality equality) {
  if (equality == Equality::within_tolerance) return difference_beyond_tolerance(a, b);
  for (std::size_t rank = 0; rank < a.size(); ++rank) {
    const std::string found = difference(a[rank], b[rank]);
    if (!found.empty()) return fmt::format("rank {}, {}", rank, found);
  }
  return {};
}

}  // namespace

TEST_CASE("the table of parity has every way, and only ways") {
  std::set<std::string, std::less<>> known, named;
  for (const Way& way : ways()) CHECK(known.insert(way.name).second);
  for (const ParityRow& row : parity_table) {
    named.emplace(row.reference);
    for (const std::string_view way : row.ways) named.emplace(way);
  }
  CHECK(known == named);
}

TEST_CASE("what the table of parity says is equal is equal", "[threads meet]") {
  Records records;
  for (const ParityRow& row : parity_table)
    for (const int world : row.worlds)
      for (const std::string_view way : row.ways) {
        INFO(way << " against " << row.reference << ", world of " << world);
        try {
          CHECK(first_difference(records.of(way, world), records.of(row.reference, world), row.equality) ==
                "");
        } catch (const std::exception& error) {
          FAIL_CHECK(error.what());
        }
      }
}

TEST_CASE("records differ where they differ") {
  std::vector<Record> a(2), b(2);
  for (std::vector<Record>* records : {&a, &b})
    for (Record& r : *records) r = {{1, 2}, {3}, {{"weight", {4, 5}}}};
  CHECK(first_difference(a, b, Equality::to_the_bit) == "");
  b[1].values[0].second[1] = std::nextafter(5.f, 6.f);
  CHECK(first_difference(a, b, Equality::to_the_bit) != "");
  CHECK(first_difference(a, b, Equality::within_tolerance) == "");
  b[1].values[0].second[1] = 5.0001f;
  CHECK(first_difference(a, b, Equality::within_tolerance) != "");
  b = a;
  b[0].norms[0] = 1.5;
  CHECK(first_difference(a, b, Equality::within_tolerance) != "");
  b = a;
  b[1].losses.pop_back();
  CHECK(first_difference(a, b, Equality::to_the_bit) != "");
  b = a;
  b[0].values[0].first = "bias";
  CHECK(first_difference(a, b, Equality::to_the_bit) != "");
}
