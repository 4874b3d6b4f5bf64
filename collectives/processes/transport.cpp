#include <array>
#include <map>

#include "collectives/processes/line.h"
#include "collectives/processes/process.h"
#include "collectives/processes/run.h"

namespace sherd::processes {
namespace {

class ProcessTransport final : public Transport {
 public:
  ProcessTransport(std::shared_ptr<Process> process, std::shared_ptr<GroupCore> core)
      : process_(std::move(process)), core_(std::move(core)) {}
  ~ProcessTransport() override {
    if (process_->forked()) return;
    for (auto& [id, line] : lines_)
      if (!line->hopeless() && !line->idle()) process_->adopt(std::move(line));
  }

  int rank() const override { return core_->rank; }
  int size() const override { return static_cast<int>(core_->members.size()); }
  const GroupKey& key() const override { return core_->key; }
  /// The wire's own way is the host's memory, through which the tensors of all devices go.
  bool reaches(Device) const override { return true; }

  Line& channel(int index) override { return line({core_->id, index, -1, -1}); }
  Line& messages(int index, int source, int destination) override {
    return line({core_->id, index, source, destination});
  }

  Offer offer(std::span<const int> members, const std::string&) override {
    const bool first = !members.empty() && members[0] == core_->rank;
    return {process_->next_number(), first ? draw_group_key() : GroupKey{}};
  }
  std::unique_ptr<Transport> join(std::span<const int> members, std::span<const Offer> offers,
                                  const std::string& name) override {
    if (std::ranges::any_of(offers, [](const Offer& offer) { return offer.number <= 0; }))
      refuse_to_join(name);
    // Above every number that a member has used, so no process is in two groups of one number.
    const std::int64_t number = std::ranges::max_element(offers, {}, &Offer::number)->number;
    std::vector<int> processes;
    for (int rank : members) processes.push_back(core_->members[static_cast<std::size_t>(rank)]);
    return std::make_unique<ProcessTransport>(
        process_,
        process_->make_group({core_->id.run, static_cast<std::uint32_t>(number)}, std::move(processes), name,
                             offers[static_cast<std::size_t>(members[0])].key));
  }

  std::unique_ptr<Transport> renew() override {
    process_->begin_renewal(*core_);
    finish_receiving();
    process_->ask_renewal(*core_);
    const Circles::Wait wait(process_->circles(), [&] { return need_of_renewal(); });
    Patience patience(process_->spins());
    for (;;) {
      if (core_->renewal_fault) process_->raise(*core_->renewal_fault, *core_);
      if (core_->renewals.size() == core_->members.size()) break;
      process_->throw_if_deaf();
      // Peers may need this rank's part of other calls before they can renew.
      if (process_->progress() || process_->step_others(nullptr)) {
        patience.reset();
        continue;
      }
      refuse_if_one_is_gone();
      process_->circles().ask();
      patience.pause();
    }
    std::int64_t number = 0;
    for (const auto& [process, renewal] : core_->renewals) number = std::max(number, renewal.number);
    auto renewed = std::make_unique<ProcessTransport>(
        process_, process_->make_group({core_->id.run, static_cast<std::uint32_t>(number)}, core_->members,
                                       core_->name, core_->renewals.at(core_->members[0]).key));
    renewed->renewed_ = true;
    return renewed;
  }
  bool failed() const override {
    process_->progress();
    return core_->fault.has_value();
  }

 private:
  Line& line(const LineId& id) {
    std::unique_ptr<ProcessLine>& line = lines_[id];
    if (line) return *line;
    if (renewed_) process_->forget();  // this rank goes on
    line = std::make_unique<ProcessLine>(process_, core_, id);
    return *line;
  }
  /// What a call had begun to receive when the group failed would else be written over what its owner writes
  /// there after the renewal. The senders go on with it until they have heard that all renew.
  void finish_receiving() {
    for (auto& [id, line] : lines_) line->stop_receiving();
    Patience patience(process_->spins());
    while (std::ranges::any_of(lines_, [](auto& named) { return named.second->still_receives(); })) {
      process_->throw_if_deaf();
      if (process_->progress() || process_->step_others(nullptr))
        patience.reset();
      else
        patience.pause();
    }
  }
  std::optional<Need> need_of_renewal() const {
    if (core_->renewal_fault) return {};
    for (int member : core_->members)
      if (!core_->renewals.contains(member))
        return Need{member, {core_->id},      0, core_.get(), {core_->name, core_->members}, {},
                    true,   process_->heard()};
    return {};
  }
  void refuse_if_one_is_gone() const {
    for (std::size_t rank = 0; rank < core_->members.size(); ++rank) {
      const int member = core_->members[rank];
      if (core_->renewals.contains(member) || !process_->gone(member, core_->id.run)) continue;
      throw CollectiveError(
          fmt::format("renew of group {}: rank {} is gone; only groups without it can go on", core_->name,
                      rank),
          {static_cast<int>(rank)}, 0);
    }
  }

  std::shared_ptr<Process> process_;
  std::shared_ptr<GroupCore> core_;
  bool renewed_ = false;
  std::map<LineId, std::unique_ptr<ProcessLine>> lines_;
};

class RunOnWire final : public ProcessRun {
 public:
  explicit RunOnWire(std::shared_ptr<Process> process)
      : process_(std::move(process)), run_(process_->begin_run()) {}

  std::unique_ptr<Transport> world() override {
    return std::make_unique<ProcessTransport>(process_, process_->make_world());
  }
  void leave(Departure how, const std::string& reason) noexcept override {
    process_->leave(run_, how, reason);
  }

 private:
  std::shared_ptr<Process> process_;
  std::uint32_t run_;
};

}  // namespace

std::unique_ptr<ProcessRun> begin_run(const Launch& launch) {
  return std::make_unique<RunOnWire>(Process::current(launch));
}

}  // namespace sherd::processes
