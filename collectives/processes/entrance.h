// How the processes of a job connect to each other over TCP, and nobody else to them.
#pragma once

#include <poll.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sherd::processes {

/// The address of a process's listening socket; sent as these bytes.
struct Door {
  std::array<char, 64> machine;
  std::array<std::uint32_t, 4> addresses;  ///< IPv4, network order; 0: none
  std::uint16_t port;                      ///< network order
  std::array<char, 16> token;              ///< random; that of process 0 opens every connection
};

/// Owns a file descriptor; -1 is none.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { close(); }
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close();

 private:
  int fd_;
};

/// Whether the socket listens on loopback only, or on all addresses.
enum class Reach : std::uint8_t { this_machine, network };

/// Listens on `port` (host order; 0: any), which then has its number; not open, with `errno`, where it
/// cannot.
Descriptor listen_on(Reach reach, std::uint16_t& port);
/// Keep-alive, since a machine that is switched off sends no end, while the kernel of a stopped process still
/// answers; nothing waits to fill a packet, nor for the peer.
void prepare_socket(int fd);
/// Until when one waits, and whom one looks at meanwhile.
struct Vigil {
  using Deadline = std::optional<std::chrono::steady_clock::time_point>;
  Deadline end{};
  std::function<void(std::vector<pollfd>&)> watch{};  ///< appends sockets; none where it is empty
  std::function<void()> look{};  ///< called when something has come there; what it throws ends the waiting

  /// Of `time` from now on.
  static Vigil of(std::chrono::milliseconds time) { return {std::chrono::steady_clock::now() + time}; }
  /// The same until `time` from now on, if that comes first.
  Vigil at_most(std::chrono::steady_clock::duration time) const;
};
/// Waits until something is at `own` or at whom the vigil looks, which is looked at; false at the end.
bool wait_for(std::vector<pollfd>& own, const Vigil& vigil);
/// How long to wait for all processes of a job to come.
constexpr std::chrono::minutes meeting_time{5};
/// After so long it is logged who is missing, or after half of the time that there is.
constexpr std::chrono::seconds before_naming{10};

/// A connection to one address (IPv4 and port in network order), whose calls do not wait; not open, with
/// `errno`, where there is none within 5 s: an address that only the other machine's own network has may
/// answer nothing at all.
Descriptor connect_to(std::uint32_t address, std::uint16_t port, const Vigil& vigil = {});
/// Sends or receives all of it, waiting; false when the peer ends the connection, or at the end.
bool send_all(int fd, const void* data, std::size_t bytes, const Vigil& vigil = {});
bool receive_all(int fd, void* data, std::size_t bytes, const Vigil& vigil = {});
/// What the system says about `error`.
std::string system_text(int error);
/// 16 random bytes that nobody guesses.
std::array<char, 16> draw_token();

/// Who is let in at a listening socket.
struct Guests {
  std::size_t greeting;  ///< bytes with which each has to begin
  /// Takes the connection over whose bytes are right and returns ""; else why it is not let in.
  std::function<std::string(Descriptor& socket, const std::byte* said)> admit;
  std::function<bool()> enough;
  std::function<std::string()> missing{};  ///< who has not come, in words: logged once it takes long
};
/// Accepts connections until there are enough, or until the end, which whom one looks at may bring nearer.
/// Strangers, silent or not, delay nobody: they are refused, and logged.
void welcome(int listener, const Guests& guests, const Vigil& vigil = {});

/// A process's own listening socket, on a port that the system chooses. StateError where a socket cannot be
/// made or reached.
class Entrance {
 public:
  /// `whose`: what connects by it, for errors.
  Entrance(Reach reach, std::string_view whose);
  const Door& door() const { return door_; }
  /// Connects to all others; every process calls it with the doors of all, in order. Returns a prepared
  /// socket for each; none in its own place. Then nobody listens any more. StateError when one does not come
  /// in time.
  std::vector<Descriptor> connect(int process, std::span<const Door> doors,
                                  const Vigil& vigil = Vigil::of(meeting_time));

 private:
  Descriptor reach(const Door& to, int process, const Vigil& vigil) const;

  std::string_view whose_;
  Door door_{};
  Descriptor listener_;
};

}  // namespace sherd::processes
