#include "collectives/tcp/meeting.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "runtime/error.h"
#include "runtime/io/checksum.h"

namespace sherd::tcp {
namespace {

using Clock = std::chrono::steady_clock;
using processes::Deadline, processes::Descriptor, processes::Door, processes::Reach, processes::system_text;

constexpr std::array<char, 8> opening = {'s', 'h', 'e', 'r', 'd', 'j', 'o', '1'};
constexpr int between_tries = 20;  // ms, while rank 0 does not listen yet

static_assert(std::is_trivially_copyable_v<Claim>);

/// Of the secret, so that it is not sent itself.
std::array<char, 16> digest_of(const std::string& secret) {
  const std::string checksum = checksum_of(std::as_bytes(std::span(secret)));
  std::array<char, checksum_digits> digest{};
  std::ranges::copy(checksum, digest.begin());
  return digest;
}

Reach reach_of(const Launch& launch) {
  return launch.local_size == launch.size ? Reach::this_machine : Reach::network;
}

std::vector<Door> host(const Launch& launch, const MeetingPlace& place, const Door& own,
                       std::chrono::milliseconds time) {
  const Clock::time_point end = Clock::now() + time;
  auto port = static_cast<std::uint16_t>(place.port);
  const Descriptor listener = processes::listen_on(reach_of(launch), port);
  check<StateError>(listener.open(),
                    "launch: rank 0 cannot listen on MASTER_PORT, which gives {} ({}); set it to a free port",
                    place.port, system_text(errno));
  const auto size = static_cast<std::size_t>(launch.size);
  std::vector<Door> doors(size);
  std::vector<Descriptor> guests(size);
  doors[0] = own;
  const Claim expected = claim_of(launch, place, own);
  const auto admit = [&](Descriptor& socket, const std::byte* said) {
    Claim claim;
    std::memcpy(&claim, said, sizeof claim);
    if (claim.opening != opening || claim.token != expected.token || claim.size != launch.size ||
        claim.rank < 1 || claim.rank >= launch.size)
      return false;
    const auto rank = static_cast<std::size_t>(claim.rank);
    if (guests[rank].open()) return false;
    guests[rank] = std::move(socket);
    doors[rank] = claim.door;
    return true;
  };
  const auto came = [](const Descriptor& guest) { return guest.open(); };
  processes::welcome(
      listener.get(), sizeof(Claim), admit,
      [&] { return std::all_of(guests.begin() + 1, guests.end(), came); }, end);
  std::string missing;
  for (std::size_t rank = 1; rank < size; ++rank)
    if (!guests[rank].open()) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
  check<StateError>(missing.empty(),
                    "launch: of {} processes these ranks did not come to port {} within {} s: {}",
                    launch.size, place.port, time.count() / 1000, missing);
  for (std::size_t rank = 1; rank < size; ++rank)
    check<StateError>(processes::send_all(guests[rank].get(), opening.data(), opening.size(), end) &&
                          processes::send_all(guests[rank].get(), doors.data(), size * sizeof(Door), end),
                      "launch: rank {} ended before all {} processes had met", rank, launch.size);
  return doors;
}

/// The IPv4 addresses of `host`, in network order; empty while none is known.
std::vector<std::uint32_t> addresses_of(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  std::vector<std::uint32_t> found;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &list) != 0) return found;
  for (const addrinfo* i = list; i != nullptr; i = i->ai_next)
    found.push_back(reinterpret_cast<const sockaddr_in*>(i->ai_addr)->sin_addr.s_addr);
  ::freeaddrinfo(list);
  return found;
}

std::vector<Door> join(const Launch& launch, const MeetingPlace& place, const Door& own,
                       std::chrono::milliseconds time) {
  const Clock::time_point end = Clock::now() + time;
  Descriptor socket;
  std::string why;
  while (!socket.open()) {
    why = "no IPv4 address of that name is known";
    const auto addresses = reach_of(launch) == Reach::this_machine
                               ? std::vector<std::uint32_t>{htonl(INADDR_LOOPBACK)}
                               : addresses_of(place.host);
    for (std::size_t i = 0; i < addresses.size() && !socket.open(); ++i) {
      socket = processes::connect_to(addresses[i], htons(static_cast<std::uint16_t>(place.port)));
      if (!socket.open()) why = system_text(errno);
    }
    if (socket.open()) break;
    check<StateError>(Clock::now() < end,
                      "launch: rank {} cannot reach rank 0 at MASTER_ADDR {}, port {} ({})", launch.rank,
                      place.host, place.port, why);
    ::poll(nullptr, 0, between_tries);  // it may not have started yet
  }
  const Claim claim = claim_of(launch, place, own);
  std::array<char, 8> answer{};
  std::vector<Door> doors(static_cast<std::size_t>(launch.size));
  const bool met = processes::send_all(socket.get(), &claim, sizeof claim, end) &&
                   processes::receive_all(socket.get(), answer.data(), answer.size(), end) &&
                   answer == opening &&
                   processes::receive_all(socket.get(), doors.data(), doors.size() * sizeof(Door), end);
  check<StateError>(met,
                    "launch: rank {} of {} was not let in at MASTER_ADDR {}, port {}: rank 0 ended, or who "
                    "listens there has another SHERD_JOB_TOKEN or size, or knows this rank already",
                    launch.rank, launch.size, place.host, place.port);
  return doors;
}

}  // namespace

Claim claim_of(const Launch& launch, const MeetingPlace& place, const Door& own) {
  Claim claim{};
  claim.opening = opening;
  claim.rank = launch.rank;
  claim.size = launch.size;
  claim.token = digest_of(place.token);
  claim.door = own;
  return claim;
}

std::vector<Door> meet(const Launch& launch, const MeetingPlace& place, const Door& own,
                       std::chrono::milliseconds time) {
  return launch.rank == 0 ? host(launch, place, own, time) : join(launch, place, own, time);
}

}  // namespace sherd::tcp
