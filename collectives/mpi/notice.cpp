#include "collectives/mpi/notice.h"

#include <cstring>

namespace sherd::mpi {
namespace {

constexpr std::uint32_t longest = 1 << 24;

struct Head {
  std::uint32_t bytes;  // of everything, this included
  Notice::Kind kind;
  Departure how;
  bool flag;
  GroupId group;
  std::uint64_t sequence, value;
  std::uint32_t ranks, members, text;

  std::size_t body() const { return (std::size_t{ranks} + members) * sizeof(std::int32_t) + text; }
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

}  // namespace

void Notice::write(std::string& out) const {
  Head head{};
  head.kind = kind;
  head.how = how;
  head.flag = flag;
  head.group = group;
  head.sequence = sequence;
  head.value = value;
  head.ranks = static_cast<std::uint32_t>(ranks.size());
  head.members = static_cast<std::uint32_t>(members.size());
  head.text = static_cast<std::uint32_t>(text.size());
  head.bytes = static_cast<std::uint32_t>(sizeof head + head.body());
  append(out, &head, 1);
  append(out, ranks.data(), ranks.size());
  append(out, members.data(), members.size());
  append(out, text.data(), text.size());
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
  notice.ranks.resize(head.ranks);
  notice.members.resize(head.members);
  notice.text.resize(head.text);
  take(in, at, notice.ranks.data(), head.ranks);
  take(in, at, notice.members.data(), head.members);
  take(in, at, notice.text.data(), head.text);
  return true;
}

}  // namespace sherd::mpi
