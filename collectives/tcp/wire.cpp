#include "collectives/tcp/wire.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "collectives/tcp/meeting.h"
#include "runtime/error.h"

namespace sherd::tcp {
namespace {

using processes::Descriptor, processes::Door, processes::Failure, processes::Frame, processes::Header;

/// What a connection carries. A message is sent when its receiver has asked for it, so it is read to where it
/// belongs, and no message that nobody asked for stands before a frame.
enum class Kind : std::uint32_t {
  frame,
  request,
  message,
  withdrawal,  ///< no message of `tag` comes any more; the answer is
  farewell,    ///< no request of `tag` comes any more
  refusal,     ///< the same of requests, and a withdrawal is the answer where one waited for its message
};
struct Head {
  Kind kind;
  std::int32_t tag;
  std::uint64_t bytes;  ///< that follow; of a request, those that are asked for
};

/// Bytes read at once where they do not go to their place.
constexpr std::size_t buffer_bytes = 64 << 10;
/// What a pass reads of one process before it looks at the next.
constexpr std::size_t most_at_once = 4 << 20;

class TcpWire final : public processes::Wire {
 public:
  TcpWire(const Launch& launch, const MeetingPlace& place, std::chrono::milliseconds time)
      : rank_(launch.rank),
        peers_(static_cast<std::size_t>(launch.size)),
        poll_(::epoll_create1(EPOLL_CLOEXEC)) {
    check<StateError>(poll_.open(), "processes: the system gives no epoll ({})",
                      processes::system_text(errno));
    const bool alone = launch.local_size == launch.size;
    processes::Entrance entrance(alone ? processes::Reach::this_machine : processes::Reach::network,
                                 "the wire between the processes");
    meeting_.emplace(launch, place, entrance.door(), time);
    std::vector<Descriptor> sockets;
    hearing_of_ends([&] { sockets = entrance.connect(rank_, meeting_->doors(), meeting_->vigil()); });
    for (std::size_t p = 0; p < peers_.size(); ++p) {
      peers_[p].socket = std::move(sockets[p]);
      if (!peers_[p].socket.open()) continue;
      peers_[p].buffer.resize(buffer_bytes);
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.u64 = p;
      check<StateError>(::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, peers_[p].socket.get(), &event) == 0,
                        "processes: the system watches no socket ({})", processes::system_text(errno));
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  std::int32_t last_tag() const override { return std::int32_t{1} << 30; }

  void all_gather(const void* own, void* all, std::size_t bytes) override {
    auto* to = static_cast<std::byte*>(all);
    const processes::Vigil& vigil = meeting_->vigil();
    for (const Peer& peer : peers_)
      if (peer.socket.open()) require(processes::send_all(peer.socket.get(), own, bytes, vigil), peer);
    for (Peer& peer : peers_) {
      if (peer.socket.open())
        require(processes::receive_all(peer.socket.get(), to, bytes, vigil), peer);
      else
        std::memcpy(to, own, bytes);
      to += bytes;
    }
  }
  void meet(const std::function<void(const processes::Vigil&)>& connect) override {
    hearing_of_ends([&] {
      connect(meeting_->vigil());
      meeting_->conclude();
    });
    meeting_.reset();
  }
  Failure open(std::function<void(int)> lost) override {
    lost_ = std::move(lost);
    return {};
  }

  Failure send(int to, const Frame& frame, Ticket& ticket) override {
    ticket = new_ticket();
    queue(to, {{Kind::frame, 0, frame.size()}, frame.bytes.get(), ticket});
    return {};
  }
  Failure take(Frame& frame, bool& came) override {
    if (came_.empty()) pass();
    if (came_.empty()) return {};
    std::swap(frame, came_.front());
    spare_.push_back(std::move(came_.front()));
    came_.pop_front();
    came = true;
    return {};
  }

  std::int64_t message_bytes(std::int64_t) const override { return std::int64_t{1} << 40; }
  Failure send(int to, int tag, const std::byte* data, std::int64_t bytes, Ticket& ticket) override {
    ticket = new_ticket();
    Peer& p = peer(to);
    const Outgoing message{{Kind::message, tag, static_cast<std::uint64_t>(bytes)}, data, ticket};
    if (!p.socket.open()) {
      finish(ticket);
    } else if (const auto asked = p.asked.find(tag); asked != p.asked.end()) {
      if (--asked->second == 0) p.asked.erase(asked);
      queue(to, message);
    } else {
      p.unasked[tag].push_back(message);
    }
    return {};
  }
  Failure receive(int from, int tag, std::byte* data, std::int64_t bytes, Ticket& ticket) override {
    ticket = new_ticket();
    peer(from).expected[tag].push_back({data, static_cast<std::uint64_t>(bytes), ticket});
    queue(from, {{Kind::request, tag, static_cast<std::uint64_t>(bytes)}, nullptr, none});
    return {};
  }
  Failure test(Ticket& ticket, bool& over) override {
    over = over_[ticket];
    if (!over) return {};
    over_[ticket] = false;
    free_.push_back(ticket);
    return {};
  }
  /// The message, which is on its way or will be, is read and dropped.
  Failure cancel(Ticket& ticket) override {
    const auto drop = [&](Expected& e) {
      if (e.ticket == ticket) e = {nullptr, e.bytes, none};
    };
    for (Peer& p : peers_) {
      if (p.into) drop(*p.into);
      for (auto& [tag, list] : p.expected) std::ranges::for_each(list, drop);
    }
    finish(ticket);
    return {};
  }

  void withdraw(int to, int tag, std::span<const Ticket> sent) override {
    Peer& p = peer(to);
    if (!p.socket.open() || sent.empty()) return;  // what is over was asked for
    if (const auto list = p.unasked.find(tag); list != p.unasked.end()) {
      for (const Outgoing& o : list->second) finish(o.ticket);
      p.unasked.erase(list);
    }
    p.asked.erase(tag);
    p.withdrawn.insert(tag);
    queue(to, {{Kind::withdrawal, tag, 0}, nullptr, none});
  }
  void decline(int from, int tag) override { queue(from, {{Kind::refusal, tag, 0}, nullptr, none}); }

  bool end() override {
    for (Peer& p : peers_) p.socket.close();
    return true;
  }

 private:
  static constexpr Ticket none = ~Ticket{0};

  struct Outgoing {
    Head head;
    const std::byte* data;  ///< `head.bytes` of them follow; null where none do
    Ticket ticket;
    std::size_t written = 0;  ///< of head and data

    std::size_t size() const { return sizeof(Head) + (data != nullptr ? head.bytes : 0); }
  };
  /// A message that this process has asked for; what comes is dropped where there is no `data`.
  struct Expected {
    std::byte* data;
    std::uint64_t bytes;
    Ticket ticket;
  };
  struct Peer {
    Descriptor socket;
    std::vector<std::byte> buffer;  ///< what was read and has not gone to its place
    std::size_t begin = 0, end = 0;
    std::optional<Frame> frame;    ///< that is coming, or
    std::optional<Expected> into;  ///< the message that is coming
    std::uint64_t got = 0, coming = 0;
    std::map<int, std::deque<Expected>> expected;  ///< by tag
    std::deque<Outgoing> out;
    std::map<int, std::deque<Outgoing>> unasked;  ///< messages that were not asked for yet
    std::map<int, int> asked;                     ///< how many messages that are not there yet
    std::set<int> withdrawn;                      ///< tags of which requests may be on their way

    std::size_t held() const { return end - begin; }
  };
  Peer& peer(int process) { return peers_[static_cast<std::size_t>(process)]; }
  int number_of(const Peer& p) const { return static_cast<int>(&p - peers_.data()); }

  /// Whatever is felt here of a rank that ends, that rank is named.
  void hearing_of_ends(const std::function<void()>& act) {
    try {
      act();
    } catch (const StateError&) {
      meeting_->look_for_the_cause();
      throw;
    }
  }
  void require(bool ok, const Peer& peer) const {
    check<StateError>(ok, "launch: rank {} ended or stopped before all {} processes had met", number_of(peer),
                      size());
  }

  Ticket new_ticket() {
    if (free_.empty()) {
      over_.push_back(false);
      return over_.size() - 1;
    }
    const Ticket ticket = free_.back();
    free_.pop_back();
    return ticket;
  }
  void finish(Ticket ticket) {
    if (ticket != none) over_[ticket] = true;
  }

  void queue(int to, Outgoing outgoing) {
    Peer& p = peer(to);
    if (!p.socket.open()) return finish(outgoing.ticket);  // nobody will read it: the watch says so
    p.out.push_back(outgoing);
    if (p.out.size() == 1) write(p);
  }

  /// Writes and reads what can be without waiting.
  void pass() {
    for (Peer& p : peers_)
      if (!p.out.empty()) write(p);
    epoll_event events[64];
    const int ready = ::epoll_wait(poll_.get(), events, 64, 0);
    for (int i = 0; i < ready; ++i) read(peers_[events[i].data.u64]);
  }

  void write(Peer& p) {
    while (!p.out.empty()) {
      iovec parts[32];
      std::size_t count = 0, bytes = 0;
      for (auto o = p.out.begin(); o != p.out.end() && count + 2 <= std::size(parts); ++o) {
        const std::size_t head = std::min(o->written, sizeof(Head)), body = o->written - head;
        if (head < sizeof(Head))
          parts[count++] = {reinterpret_cast<std::byte*>(&o->head) + head, sizeof(Head) - head};
        if (o->size() > sizeof(Head))
          parts[count++] = {const_cast<std::byte*>(o->data) + body, o->size() - sizeof(Head) - body};
        bytes += o->size() - o->written;
      }
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = count;
      const auto sent = ::sendmsg(p.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (sent < 0) return lose(p);
      auto left = static_cast<std::size_t>(sent);
      while (!p.out.empty()) {
        Outgoing& first = p.out.front();
        const std::size_t step = std::min(left, first.size() - first.written);
        first.written += step;
        left -= step;
        if (first.written < first.size()) break;
        finish(first.ticket);
        p.out.pop_front();
      }
      if (static_cast<std::size_t>(sent) < bytes) return;
    }
  }

  void read(Peer& p) {
    for (std::size_t total = 0; p.socket.open() && total < most_at_once;) {
      if (!digest(p)) return lose(p);
      if (!p.socket.open()) return;
      std::memmove(p.buffer.data(), p.buffer.data() + p.begin, p.held());
      p.end = p.held();
      p.begin = 0;
      // What belongs to a message goes straight to its place.
      const bool placed = p.into && p.into->data != nullptr && p.end == 0;
      std::byte* const to = placed ? p.into->data + p.got : p.buffer.data() + p.end;
      const std::size_t room = placed ? p.coming - p.got : p.buffer.size() - p.end;
      const auto got = ::recv(p.socket.get(), to, room, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return;
      if (got <= 0) return lose(p);
      (placed ? p.got : p.end) += static_cast<std::size_t>(got);
      total += static_cast<std::size_t>(got);
      if (!digest(p)) return lose(p);
      if (static_cast<std::size_t>(got) < room) return;
    }
  }

  /// Brings what is in the buffer to its place; false for what no process of ours sends.
  bool digest(Peer& p) {
    for (;;) {
      if (p.frame || p.into) {
        const std::size_t step = std::min<std::uint64_t>(p.held(), p.coming - p.got);
        std::byte* const to = p.frame ? p.frame->bytes.get() : p.into->data;
        if (to != nullptr) std::memcpy(to + p.got, p.buffer.data() + p.begin, step);
        p.begin += step;
        p.got += step;
        if (p.got < p.coming) return true;
        if (!arrived(p)) return false;
        continue;
      }
      if (p.held() < sizeof(Head)) return true;
      Head head;
      std::memcpy(&head, p.buffer.data() + p.begin, sizeof head);
      p.begin += sizeof head;
      if (!begins(p, head)) return false;
    }
  }
  bool begins(Peer& p, const Head& head) {
    p.got = 0;
    p.coming = head.bytes;
    switch (head.kind) {
      case Kind::frame:
        if (head.bytes < sizeof(Header) || head.bytes > processes::frame_bytes) return false;
        p.frame = spare_.empty() ? Frame::make() : std::move(spare_.back());
        if (!spare_.empty()) spare_.pop_back();
        return true;
      case Kind::request:
        ask(p, head.tag);
        return true;
      case Kind::message: {
        const auto list = p.expected.find(head.tag);
        if (list == p.expected.end() || list->second.front().bytes != head.bytes) return false;
        p.into = list->second.front();
        list->second.pop_front();
        if (list->second.empty()) p.expected.erase(list);
        return true;
      }
      case Kind::withdrawal:
        p.expected.erase(head.tag);
        queue(number_of(p), {{Kind::farewell, head.tag, 0}, nullptr, none});
        return true;
      case Kind::farewell:
        p.withdrawn.erase(head.tag);
        return true;
      case Kind::refusal:
        if (p.asked.erase(head.tag) > 0)
          queue(number_of(p), {{Kind::withdrawal, head.tag, 0}, nullptr, none});
        return true;
    }
    return false;
  }
  bool arrived(Peer& p) {
    if (p.into) {
      finish(p.into->ticket);
      p.into.reset();
      return true;
    }
    if (p.frame->header().from != number_of(p) || p.frame->size() != p.coming) return false;
    came_.push_back(std::move(*p.frame));
    p.frame.reset();
    return true;
  }
  /// A process wants the next message of `tag`.
  void ask(Peer& p, int tag) {
    if (p.withdrawn.contains(tag)) return;
    const auto list = p.unasked.find(tag);
    if (list == p.unasked.end()) {
      ++p.asked[tag];
      return;
    }
    const Outgoing message = list->second.front();
    list->second.pop_front();
    if (list->second.empty()) p.unasked.erase(list);
    queue(number_of(p), message);
  }

  /// The connection has ended: nobody reads what goes there. Whether its process has, the watch says.
  void lose(Peer& p) {
    if (!p.socket.open()) return;
    p.socket.close();
    for (const Outgoing& o : p.out) finish(o.ticket);
    for (const auto& [tag, list] : p.unasked)
      for (const Outgoing& o : list) finish(o.ticket);
    p.out.clear();
    p.unasked.clear();
    p.asked.clear();
    p.withdrawn.clear();
    if (lost_) lost_(number_of(p));
  }

  int rank_;
  std::vector<Peer> peers_;
  Descriptor poll_;
  std::optional<Meeting> meeting_;  ///< until all are connected
  std::function<void(int)> lost_;
  std::vector<bool> over_;  ///< a ticket
  std::vector<Ticket> free_;
  std::deque<Frame> came_;
  std::vector<Frame> spare_;
};

}  // namespace

std::unique_ptr<processes::Wire> connect(const Launch& launch, const MeetingPlace& place,
                                         std::chrono::milliseconds time) {
  return std::make_unique<TcpWire>(launch, place, time);
}

}  // namespace sherd::tcp
