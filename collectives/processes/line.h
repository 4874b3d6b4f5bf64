// One sequence of calls between processes.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/movement.h"
#include "collectives/processes/device_route.h"
#include "collectives/processes/process.h"
#include "collectives/transport.h"

namespace sherd::processes {

/// The collectives of one channel, or the messages of one pair of ranks, between processes.
class ProcessLine final : public Line {
 public:
  ProcessLine(std::shared_ptr<Process> process, std::shared_ptr<GroupCore> core, LineId id);
  ~ProcessLine() override;

  std::uint64_t post(const Collective& collective, const Signature& signature, WhenFull full) override;
  void wait(std::uint64_t sequence) override;
  void wait_inputs(std::uint64_t sequence) override;
  bool done(std::uint64_t sequence) override;
  bool inputs_done(std::uint64_t sequence) override;
  std::uint64_t posted() const override { return posted_ + queue_.size(); }

  const GroupCore& core() const { return *core_; }
  /// Takes a frame of this line that has arrived.
  void take(Frame frame);
  /// Advances calls as far as what has arrived allows; says whether anything happened. Never waits.
  bool step();
  /// For a group that has failed: the wire is to write no more of what it has not begun.
  void stop_receiving();
  /// Whether it still writes what it had begun.
  bool still_receives();
  /// No call is under way.
  bool idle();
  /// The calls under way can never complete: the group has failed, or a peer is gone.
  bool hopeless() { return core_->fault || !missing().empty(); }
  /// Peers' devices wait for what this rank is about to give to its own.
  bool owes() {
    return (stage_ == Stage::connecting || stage_ == Stage::exchanging || stage_ == Stage::spreading) &&
           !hopeless();
  }
  /// Frees the memory of calls that are over and that the wire has read; says whether none is held any more.
  bool let_go();

 private:
  static constexpr std::uint64_t depth = 8;  ///< calls under way
  /// Of the calls that a rank has posted, a peer may not have ended so many: it has posted what this one has
  /// ended.
  static constexpr std::uint64_t open_at_peers = 2 * depth;

  struct Part {
    const std::byte* in;
    std::byte* out;
    std::int64_t count;  ///< elements, as `Signature::total` counts them
  };
  /// A tensor on a device: of a part the same place of `Call::device_inputs` or `device_outputs`.
  struct OnDevice {
    Ref<Storage> storage;  ///< null where the part has none
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  /// What a call has put into the host's memory for a device.
  struct Landing {
    OnDevice to;
    Ref<Storage> host;
  };
  struct Message {
    Wire::Ticket ticket;
    std::size_t lane;
    int tag;
  };
  struct Call {
    std::uint64_t sequence = 0;
    Signature signature;
    Movement movement{CollectiveKind::barrier};
    ReduceOp reduction;
    std::int64_t element = 1;
    bool moves = false;             ///< there are bytes to move: not on meta
    Device device = Device::cpu();  ///< of the tensors that move
    std::vector<Part> parts;
    std::vector<OnDevice> device_inputs, device_outputs;
    Ref<Storage> peers_parts;                   ///< on the device, where what peers send is combined
    std::vector<Ref<Storage>> inputs, outputs;  ///< as long as they are needed
    std::vector<Landing> landings;              ///< until the rank waits for the call, or one after it
    std::vector<Message> sends;
  };
  /// Of the oldest unfinished call.
  enum class Stage { calls, first_round, inputs_read, second_round, connecting, exchanging, spreading };

  std::size_t lanes() const { return processes_.size(); }
  int rank_of(std::size_t lane) const;
  CallPlace place(std::uint64_t sequence) const;
  Call& call(std::uint64_t sequence) { return calls_[sequence % depth]; }
  std::vector<int>& tags(std::uint64_t sequence) { return tags_[sequence % tags_.size()]; }
  const Header& header(std::size_t lane) const { return inbox_[lane].front().header(); }

  bool room();
  void publish(const Collective& c, const Signature& signature);
  void fill(Call& call, const Collective& c, const Signature& signature);
  void fill_parts(Call& call, const Collective& c);
  void send_to(std::size_t lane, Call& call);
  void send_pieces(std::size_t lane, Call& call);
  std::int64_t bytes_between(const Call& call, int round, std::size_t from, std::size_t to) const;
  /// Calls `visit(part, piece)` for what `to` takes from `from`.
  template <class Visit>
  void pieces(const Call& call, int round, std::size_t from, std::size_t to, const Visit& visit) const;
  void send_piece(Call& call, std::size_t lane, int tag, const std::byte* data, std::int64_t bytes);
  void receive_piece(std::size_t lane, int tag, std::byte* data, std::int64_t bytes);

  bool all_called();
  std::vector<RankCall> posts();
  bool within_frame(const Call& call, std::int64_t bytes) const {
    return call.device.is_cpu() && bytes <= static_cast<std::int64_t>(eager_bytes);
  }
  void begin_first_round();
  void receive_placed(std::size_t lane, Call& call, int round, int tag);
  void place_pieces(std::size_t lane, Call& call);
  void combine_parts(Call& call);
  void begin_second_round();
  void end_call();

  // ---- on a device: line_on_device.cpp ----
  void use_device(Device device);
  void post_on_device(Call& call);
  void begin_on_device(Call& call);
  bool step_on_device(Call& call);
  void exchange(Call& call, int round);
  void gather(Call& call);
  void combine_on_device(Call& call);
  bool network_sums(const Call& call);
  void sum(Call& call);
  void bring_to_host(Call& call);
  void land(std::uint64_t end);
  void reach(std::uint64_t sequence);
  void look_at_device();
  void fail_on_device(std::string_view what);
  void release_on_device(Call& call);
  void leave_device();

  void release(Call& call);

  bool received();
  bool sent(Call& call);
  Abandoned::Sent leave(const Message& message) const {
    return {processes_[message.lane], message.tag, {message.ticket}};
  }
  std::vector<Abandoned::Sent> leave_tags();
  void decline();
  bool completed(Call& call, Message& message);
  std::vector<Ref<Storage>> memory_of(const Call& call) const;
  void break_off(const Call& call, std::size_t lane, const Failure& failed);

  template <class Ready, class First>
  void until(const Ready& ready, const First& first);
  std::optional<Need> need(std::uint64_t sequence) const;
  void throw_if_failed();
  void step_all();
  std::vector<std::size_t> missing();
  void look_for_the_missing();

  std::shared_ptr<Process> process_;
  std::shared_ptr<GroupCore> core_;
  LineId id_;
  std::vector<int> processes_;  ///< a lane
  std::size_t self_;
  std::vector<std::deque<Frame>> inbox_;
  std::vector<std::optional<Signature>> last_;  ///< each lane's last call that is finished here
  std::vector<Call> calls_;
  std::vector<std::vector<int>> tags_;  ///< by call, of this rank's long payloads, a lane; -1: none
  std::uint64_t posted_ = 0, finished_ = 0, released_ = 0;  // released: memory of calls before it is freed
  std::uint64_t landed_ = 0;                            // what calls before it put on the host lies in place
  bool holds_ = false;                                  // the process knows that some is not
  std::deque<std::pair<Collective, Signature>> queue_;  // numbered on from `posted_`
  Stage stage_ = Stage::calls;
  std::vector<Message> receives_;
  bool broken_ = false;  ///< a message of this line could not be moved
  Ref<Storage> staging_;
  std::vector<const std::byte*> from_lane_;  ///< where each lane's pieces lie, side by side
  std::vector<const std::byte*> sources_;
  std::optional<DeviceRoute> route_;  ///< once a call had tensors on a device
  Signature given_;                   ///< the last call that the devices were given
  bool stepping_ = false;             ///< a wait for the device within a step goes on with other lines only
  std::optional<std::pair<std::string, std::chrono::steady_clock::time_point>> network_failure_;
};

template <class Visit>
void ProcessLine::pieces(const Call& call, int round, std::size_t from, std::size_t to,
                         const Visit& visit) const {
  if (!call.moves) return;
  for (std::size_t i = 0; i < call.parts.size(); ++i) {
    const Piece piece =
        call.movement.piece(round, static_cast<int>(from), static_cast<int>(to), call.parts[i].count);
    if (piece.count > 0) visit(call.parts[i], piece);
  }
}

}  // namespace sherd::processes
