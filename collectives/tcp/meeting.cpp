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
#include "runtime/log.h"

namespace sherd::tcp {
namespace {

using Clock = std::chrono::steady_clock;
using processes::Descriptor, processes::Door, processes::Reach, processes::system_text, processes::Vigil;
using namespace std::chrono_literals;

constexpr std::array<char, 8> opening = {'s', 'h', 'e', 'r', 'd', 'j', 'o', '2'};
constexpr int between_tries = 20;  // ms, while rank 0 does not listen yet

/// For one guest to take what it came for.
constexpr auto handing_time = 5s;
/// For all to be connected once they have met. Who comes is at it, so this is much.
constexpr auto connecting_time = 30s;
/// In which who comes late still hears that the meeting has failed.
constexpr auto telling_time = 1500ms;
/// In which an end that has been felt on one connection is heard of on another.
constexpr auto hearing_time = 1s;

static_assert(std::is_trivially_copyable_v<Claim>);

/// What a guest gets from rank 0: first with the doors behind it, then each as it comes to be.
struct Word {
  std::array<char, 8> opening;
  std::int32_t lost;  ///< a rank that has ended; -1: none
};
constexpr Word all_well{opening, -1};

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

Meeting::Meeting(const Launch& launch, const MeetingPlace& place, const Door& own,
                 std::chrono::milliseconds time)
    : launch_(launch),
      doors_(static_cast<std::size_t>(launch.size)),
      sockets_(doors_.size()),
      connected_(doors_.size()) {
  if (launch.rank == 0)
    host(place, own, time);
  else
    join(place, own, time);
  // Rank 0 knows who is missing, so the others wait until it has said so.
  const auto longer = launch.rank == 0 ? Clock::duration::zero() : Clock::duration(hearing_time);
  vigil_ = {Clock::now() + std::min<Clock::duration>(connecting_time + launch.size * 2ms, time) + longer,
            [this](auto& sockets) { watch(sockets); }, [this] { look(); }};
}

// ---- rank 0 ----

void Meeting::host(const MeetingPlace& place, const Door& own, std::chrono::milliseconds time) {
  const Clock::time_point end = Clock::now() + time;
  auto port = static_cast<std::uint16_t>(place.port);
  const Descriptor listener = processes::listen_on(reach_of(launch_), port);
  check<StateError>(listener.open(),
                    "launch: rank 0 cannot listen on MASTER_PORT, which gives {} ({}); set it to a free port",
                    place.port, system_text(errno));
  doors_[0] = own;
  const Claim expected = claim_of(launch_, place, own);
  const auto admit = [&](Descriptor& socket, const std::byte* said) -> std::string {
    Claim claim;
    std::memcpy(&claim, said, sizeof claim);
    if (claim.opening != opening) return "does not greet as one of this job's processes";
    if (claim.token != expected.token) return "has another SHERD_JOB_TOKEN";
    if (claim.size != launch_.size || claim.rank < 1 || claim.rank >= launch_.size)
      return fmt::format("is rank {} of {}, and here {} processes meet", claim.rank, claim.size,
                         launch_.size);
    const auto rank = static_cast<std::size_t>(claim.rank);
    if (sockets_[rank].open()) return fmt::format("is rank {}, which has come already", claim.rank);
    sockets_[rank] = std::move(socket);
    doors_[rank] = claim.door;
    if (lost_ >= 0) tell_of_loss(rank);
    return {};
  };
  const auto all_came = [&] { return this->all_came(); };
  const auto naming = [&] {
    return fmt::format("these ranks of {} have not come to port {}: {}", launch_.size, place.port, missing());
  };
  Vigil vigil{.end = end};
  vigil.watch = [this](auto& sockets) {
    if (lost_ < 0) watch(sockets);
  };
  vigil.look = [&] {
    hear();
    if (lost_ < 0) return;
    tell_all_of_loss();
    vigil.end = Clock::now() + telling_time;
  };
  processes::welcome(listener.get(), {sizeof(Claim), admit, all_came, naming}, vigil);
  if (lost_ >= 0) fail_for_loss();
  check<StateError>(all_came(), "launch: of {} processes these ranks did not come to port {} within {} s: {}",
                    launch_.size, place.port, time.count() / 1000, missing());
  for (std::size_t rank = 1; rank < sockets_.size() && lost_ < 0; ++rank) {
    const int guest = sockets_[rank].get();
    const Vigil vigil = Vigil::of(handing_time);
    if (!processes::send_all(guest, &all_well, sizeof all_well, vigil) ||
        !processes::send_all(guest, doors_.data(), doors_.size() * sizeof(Door), vigil))
      lost_ = static_cast<int>(rank);
  }
  if (lost_ >= 0) look();
}

bool Meeting::all_came() const {
  return std::ranges::all_of(sockets_.begin() + 1, sockets_.end(), &Descriptor::open);
}

std::string Meeting::missing() const {
  std::string names;
  for (std::size_t rank = 1; rank < sockets_.size(); ++rank)
    if (!sockets_[rank].open()) names += fmt::format("{}{}", names.empty() ? "" : ", ", rank);
  return names;
}

void Meeting::tell_all_of_loss() {
  for (std::size_t rank = 1; rank < sockets_.size(); ++rank) tell_of_loss(rank);
}

void Meeting::tell_of_loss(std::size_t rank) {
  if (!sockets_[rank].open() || static_cast<int>(rank) == lost_) return;
  const Word word{opening, lost_};
  ::send(sockets_[rank].get(), &word, sizeof word, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// ---- the others ----

void Meeting::join(const MeetingPlace& place, const Door& own, std::chrono::milliseconds time) {
  const Clock::time_point start = Clock::now(), end = start + time;
  Descriptor& socket = sockets_[0];
  std::string why;
  for (bool said = false; !socket.open();) {
    why = "no IPv4 address of that name is known";
    const auto addresses = reach_of(launch_) == Reach::this_machine
                               ? std::vector<std::uint32_t>{htonl(INADDR_LOOPBACK)}
                               : addresses_of(place.host);
    for (std::size_t i = 0; i < addresses.size() && !socket.open(); ++i) {
      socket = processes::connect_to(addresses[i], htons(static_cast<std::uint16_t>(place.port)), {end});
      if (!socket.open()) why = system_text(errno);
    }
    if (socket.open()) break;
    check<StateError>(Clock::now() < end,
                      "launch: rank {} cannot reach rank 0 at MASTER_ADDR {}, port {} ({})", launch_.rank,
                      place.host, place.port, why);
    if (!said && Clock::now() > start + std::min<Clock::duration>(processes::before_naming, time / 2)) {
      said = true;
      write_log(LogLevel::warning, "launch: rank {} still waits for rank 0 at MASTER_ADDR {}, port {} ({})",
                launch_.rank, place.host, place.port, why);
    }
    ::poll(nullptr, 0, between_tries);  // it may not have started yet
  }
  const Claim claim = claim_of(launch_, place, own);
  Word answer{};
  const Vigil vigil{end};
  const bool answered = processes::send_all(socket.get(), &claim, sizeof claim, vigil) &&
                        processes::receive_all(socket.get(), &answer, sizeof answer, vigil) &&
                        answer.opening == opening;
  lost_ = answered ? answer.lost : -1;
  if (lost_ >= 0) fail_for_loss();
  check<StateError>(
      answered && processes::receive_all(socket.get(), doors_.data(), doors_.size() * sizeof(Door), vigil),
      "launch: rank {} of {} was not let in at MASTER_ADDR {}, port {}: rank 0 ended, or who "
      "listens there has another SHERD_JOB_TOKEN or size, or knows this rank already",
      launch_.rank, launch_.size, place.host, place.port);
}

// ---- all ----

void Meeting::watch(std::vector<pollfd>& sockets) const {
  for (const Descriptor& socket : sockets_)
    if (socket.open()) sockets.push_back({socket.get(), POLLIN, 0});
}

/// Takes what has come: that somebody is connected, or has ended.
void Meeting::hear() {
  for (std::size_t rank = 0; rank < sockets_.size() && lost_ < 0; ++rank) {
    Word word{};
    if (!sockets_[rank].open()) continue;
    const auto got = ::recv(sockets_[rank].get(), &word, sizeof word, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (got != sizeof word || word.opening != opening)
      lost_ = static_cast<int>(rank);
    else if (word.lost >= 0)
      lost_ = word.lost;
    else
      connected_[rank] = true;
  }
}

void Meeting::look() {
  hear();
  if (lost_ < 0) return;
  if (launch_.rank == 0) tell_all_of_loss();
  fail_for_loss();
}

void Meeting::fail_for_loss() const {
  fail<StateError>("launch: rank {} ended before all {} processes had met", lost_, launch_.size);
}

void Meeting::look_for_the_cause() {
  look();
  const Vigil vigil = vigil_.at_most(hearing_time);
  for (std::vector<pollfd> none; processes::wait_for(none, vigil);) {
  }
}

void Meeting::conclude() {
  const bool first = launch_.rank == 0;
  if (!first && !processes::send_all(sockets_[0].get(), &all_well, sizeof all_well, vigil_))
    look_for_the_cause();
  for (std::size_t rank = 0; rank < sockets_.size(); ++rank)
    for (std::vector<pollfd> none; sockets_[rank].open() && !connected_[rank];)
      check<StateError>(processes::wait_for(none, vigil_),
                        "launch: rank {} is not connected to all {} processes in time; look what holds it up",
                        rank, launch_.size);
  // From here on all see each other's end themselves.
  for (const Descriptor& socket : sockets_)
    if (first && socket.open()) ::send(socket.get(), &all_well, sizeof all_well, MSG_NOSIGNAL | MSG_DONTWAIT);
  sockets_.clear();
}

}  // namespace sherd::tcp
