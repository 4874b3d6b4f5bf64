#include "collectives/processes/notice.h"

#include <cstring>

namespace sherd::processes {
namespace {

constexpr std::uint32_t longest = 1 << 24;

struct Head {
  std::uint32_t bytes;  // of everything, this included
  Notice::Kind kind;
  Departure how;
  bool flag;
  GroupId group;
  std::uint64_t sequence, value;
  Offer offer;
  std::uint32_t ranks, members, waiters, text;  // `waiters` in bytes, the others in elements

  std::size_t body() const { return (std::size_t{ranks} + members) * sizeof(std::int32_t) + waiters + text; }
};

struct WaiterHead {
  std::int32_t process;
  bool renews;
  LineId line;
  std::uint64_t sequence, wait, received;
  std::uint32_t call, blames;

  std::size_t body() const { return call + std::size_t{blames} * sizeof(int); }
};

template <class T>
void append(std::string& out, const T* data, std::size_t count) {
  out.append(reinterpret_cast<const char*>(data), count * sizeof(T));
}

template <class T>
void take(const std::string& in, std::size_t& at, T* data, std::size_t count) {
  if (count == 0) return;  // an empty vector has no address
  std::memcpy(data, in.data() + at, count * sizeof(T));
  at += count * sizeof(T);
}

std::string packed(const std::vector<Waiter>& waiters) {
  std::string out;
  for (const Waiter& w : waiters) {
    WaiterHead head{};
    head.process = w.process;
    head.renews = w.renews;
    head.line = w.line;
    head.sequence = w.sequence;
    head.wait = w.wait;
    head.received = w.received;
    head.call = static_cast<std::uint32_t>(w.call.size());
    head.blames = static_cast<std::uint32_t>(w.blames.size());
    append(out, &head, 1);
    out += w.call;
    append(out, w.blames.data(), w.blames.size());
  }
  return out;
}

std::vector<Waiter> unpacked(const std::string& in) {
  std::vector<Waiter> waiters;
  for (std::size_t at = 0; at < in.size();) {
    WaiterHead head{};
    check<StateError>(in.size() - at >= sizeof head, "watch: a peer sent {} bytes that are no waiter",
                      in.size() - at);
    take(in, at, &head, 1);
    check<StateError>(in.size() - at >= head.body(), "watch: a peer's waiter has {} of {} bytes",
                      in.size() - at, head.body());
    waiters.push_back({head.process, head.renews, head.line, head.sequence, head.wait, head.received,
                       std::string(head.call, ' '), std::vector<int>(head.blames)});
    take(in, at, waiters.back().call.data(), head.call);
    take(in, at, waiters.back().blames.data(), head.blames);
  }
  return waiters;
}

}  // namespace

void Notice::write(std::string& out) const {
  const std::string chain = packed(waiters);
  Head head{};
  head.kind = kind;
  head.how = how;
  head.flag = flag;
  head.group = group;
  head.sequence = sequence;
  head.value = value;
  head.offer = offer;
  head.ranks = static_cast<std::uint32_t>(ranks.size());
  head.members = static_cast<std::uint32_t>(members.size());
  head.waiters = static_cast<std::uint32_t>(chain.size());
  head.text = static_cast<std::uint32_t>(text.size());
  head.bytes = static_cast<std::uint32_t>(sizeof head + head.body());
  append(out, &head, 1);
  append(out, ranks.data(), ranks.size());
  append(out, members.data(), members.size());
  out += chain;
  out += text;
}

bool Notice::read(const std::string& in, std::size_t& at, Notice& notice) {
  Head head;
  if (in.size() - at < sizeof head) return false;
  std::memcpy(&head, in.data() + at, sizeof head);
  check<StateError>(head.bytes <= longest && head.bytes == sizeof head + head.body(),
                    "watch: a peer sent {} bytes that are no notice", head.bytes);
  if (in.size() - at < head.bytes) return false;
  at += sizeof head;
  notice.kind = head.kind;
  notice.how = head.how;
  notice.flag = head.flag;
  notice.group = head.group;
  notice.sequence = head.sequence;
  notice.value = head.value;
  notice.offer = head.offer;
  notice.ranks.resize(head.ranks);
  notice.members.resize(head.members);
  std::string chain(head.waiters, '\0');
  notice.text.resize(head.text);
  take(in, at, notice.ranks.data(), head.ranks);
  take(in, at, notice.members.data(), head.members);
  take(in, at, chain.data(), head.waiters);
  take(in, at, notice.text.data(), head.text);
  notice.waiters = unpacked(chain);
  return true;
}

}  // namespace sherd::processes
