#include "collectives/dry_run.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>

#include "collectives/fault.h"
#include "collectives/group_end.h"
#include "collectives/movement.h"
#include "runtime/shown.h"

namespace sherd {

/// What all groups of a dry run write to.
struct DryRun::Record {
  DryRunOptions::Done done;
  std::vector<DryStep> steps;
};

namespace {

/// Ranks of a message, whose calls are numbered apart from the channel's; -1 for other calls.
struct Ends {
  int source = -1, destination = -1;
};

std::string words_of(const Signature& signature, const Ends& ends) {
  std::string words = signature.text();
  if (signature.kind == CollectiveKind::send) words += fmt::format(" to rank {}", ends.destination);
  if (signature.kind == CollectiveKind::recv) words += fmt::format(" from rank {}", ends.source);
  return words;
}

void count_bytes(DryStep& step, const Collective& c, const Movement& movement, int self) {
  for (const Tensor& t : counted(c))
    for (int round = 0; round < movement.rounds; ++round)
      for (int peer = 0; peer < movement.size; ++peer) {
        if (peer == self) continue;
        const std::int64_t element = size_of(t.dtype());
        step.sent += movement.piece(round, self, peer, t.numel()).count * element;
        step.received += movement.piece(round, peer, self, t.numel()).count * element;
      }
}

}  // namespace

class DryRun::DryLine final : public Line {
 public:
  DryLine(std::shared_ptr<Record> record, std::string group, int rank, int size, int channel, Ends ends)
      : record_(std::move(record)),
        group_(std::move(group)),
        rank_(rank),
        size_(size),
        channel_(channel),
        ends_(ends) {}

  std::uint64_t post(const Collective& c, const Signature& signature, WhenFull) override {
    DryStep step{DryStep::Kind::post,       c.kind, group_, channel_, posted(), one_line(c.label),
                 words_of(signature, ends_)};
    count_bytes(step, c, movement_of(c), self());
    record_->steps.push_back(step);
    calls_.push_back(std::move(step));
    return posted() - 1;
  }
  void wait(std::uint64_t sequence) override {
    waited_ = std::max(waited_, sequence + 1);
    note(DryStep::Kind::wait, sequence);
  }
  void wait_inputs(std::uint64_t sequence) override { note(DryStep::Kind::wait_inputs, sequence); }
  bool done(std::uint64_t sequence) override {
    return record_->done == DryRunOptions::Done::always || sequence < waited_;
  }
  bool inputs_done(std::uint64_t sequence) override { return done(sequence); }
  std::uint64_t posted() const override { return calls_.size(); }

 private:
  bool is_message() const { return ends_.source >= 0; }
  int self() const { return is_message() ? (rank_ == ends_.source ? 0 : 1) : rank_; }
  Movement movement_of(const Collective& c) const {
    return Movement::of(c, is_message() ? 2 : size_, c.kind == CollectiveKind::all_reduce ? 2 : 1);
  }
  void note(DryStep::Kind kind, std::uint64_t sequence) {
    DryStep step = calls_.at(sequence);
    step.kind = kind;
    step.sent = step.received = 0;
    record_->steps.push_back(std::move(step));
  }

  std::shared_ptr<Record> record_;
  std::string group_;
  int rank_, size_, channel_;
  Ends ends_;
  std::vector<DryStep> calls_;
  std::uint64_t waited_ = 0;
};

class DryRun::DryTransport final : public Transport {
 public:
  DryTransport(std::shared_ptr<Record> record, std::string group, int rank, int size)
      : record_(std::move(record)), group_(std::move(group)), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool has_peers() const override { return false; }
  const GroupKey& key() const override { return key_; }

  Line& channel(int index) override { return line(index, {}); }
  Line& messages(int index, int source, int destination) override {
    return line(index, {source, destination});
  }

  Offer offer(std::span<const int>, const std::string&) override { return {}; }
  std::unique_ptr<Transport> join(std::span<const int> members, std::span<const Offer>,
                                  const std::string& name) override {
    const auto place = std::ranges::find(members, rank_) - members.begin();
    return std::make_unique<DryTransport>(record_, name, static_cast<int>(place),
                                          static_cast<int>(members.size()));
  }
  std::unique_ptr<Transport> renew() override {
    return std::make_unique<DryTransport>(record_, group_, rank_, size_);
  }
  bool failed() const override { return false; }

 private:
  DryLine& line(int index, Ends ends) {
    std::unique_ptr<DryLine>& line = lines_[{index, ends.source, ends.destination}];
    if (!line) line = std::make_unique<DryLine>(record_, group_, rank_, size_, index, ends);
    return *line;
  }

  std::shared_ptr<Record> record_;
  std::string group_;
  int rank_, size_;
  GroupKey key_ = draw_group_key();
  std::map<std::array<int, 3>, std::unique_ptr<DryLine>> lines_;
};

std::string DryStep::text() const {
  const std::string place = fmt::format("{}{}:", group == "world" ? "" : group + " ", channel);
  if (kind == Kind::post) return place + words;
  return fmt::format("{}{} {}{}", place, kind == Kind::wait ? "wait" : "wait_inputs", to_string(call),
                     label.empty() ? fmt::format(" #{}", sequence) : fmt::format(" of '{}'", label));
}

std::string DryStep::brief() const {
  constexpr std::string_view verbs[] = {"", "wait ", "wait_inputs "};
  return fmt::format("{}{}({})", verbs[static_cast<int>(kind)], to_string(call),
                     label.empty() ? fmt::format("#{}", sequence) : label);
}

DryRun::DryRun(DryRunOptions options) : record_(std::make_shared<Record>(Record{options.done, {}})) {
  check<ValueError>(options.size > 0 && options.rank >= 0 && options.rank < options.size,
                    "dry run: rank {} of a world of {}; a rank is in 0..size-1, and a world has at least one",
                    options.rank, options.size);
  const int local_size = options.local_size == 0 ? options.size : options.local_size;
  check<ValueError>(
      local_size > 0 && options.size % local_size == 0,
      "dry run: {} ranks do not divide into machines of {}; give a divisor, or 0 for one machine",
      options.size, local_size);
  std::vector<int> ranks(static_cast<std::size_t>(options.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  auto transport = std::make_unique<DryTransport>(record_, "world", options.rank, options.size);
  world_ = std::make_unique<World>(
      Group(std::make_shared<GroupEnd>(std::move(transport), "world", std::move(ranks))),
      options.rank % local_size, local_size);
}

DryRun::~DryRun() = default;

const World& DryRun::world() const { return *world_; }
const std::vector<DryStep>& DryRun::steps() const { return record_->steps; }
void DryRun::clear() { record_->steps.clear(); }

std::string DryRun::log() const {
  std::vector<std::string> lines;
  for (const DryStep& step : record_->steps) lines.push_back(step.text());
  return fmt::format("{}", fmt::join(lines, "\n"));
}

std::string DryRun::brief() const {
  std::vector<std::string> words;
  for (const DryStep& step : record_->steps) words.push_back(step.brief());
  return fmt::format("{}", fmt::join(words, ", "));
}

DryRun::Traffic DryRun::traffic(CollectiveKind kind) const {
  Traffic traffic;
  for (const DryStep& step : record_->steps) {
    if (step.kind != DryStep::Kind::post || step.call != kind) continue;
    ++traffic.calls;
    traffic.sent += step.sent;
    traffic.received += step.received;
  }
  return traffic;
}

}  // namespace sherd
