// Processes that meet and move bytes over TCP, here threads: strangers change nothing, whatever the order of
// sends and receives.
#include <arpa/inet.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <deque>
#include <functional>
#include <sstream>
#include <thread>

#include "collectives/tcp/meeting.h"
#include "collectives/tcp/wire.h"
#include "tests/catch.h"
#include "tests/free_port.h"
#include "tests/sanitizer.h"

using namespace sherd;
using namespace sherd::processes;
using Catch::Matchers::ContainsSubstring;
using sherd::test::message_of;
using namespace std::chrono_literals;

namespace {

Launch launch_of(int rank, int size) { return {Launcher::torchrun, rank, size, rank, size}; }

MeetingPlace new_place() { return {"127.0.0.1", test::free_port(), "a token"}; }

void on_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

/// What the library logs while this lives.
class Logged {
 public:
  Logged() {
    spdlog::register_logger(
        std::make_shared<spdlog::logger>("sherd", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_)));
  }
  ~Logged() { spdlog::drop("sherd"); }
  std::ptrdiff_t count(const std::string& words) const {
    const std::string all = text_.str();
    std::ptrdiff_t found = 0;
    for (std::size_t at = all.find(words); at != std::string::npos; at = all.find(words, at + 1)) ++found;
    return found;
  }

 private:
  std::ostringstream text_;
};

/// Comes to the place as soon as somebody listens there.
Descriptor visit(const MeetingPlace& place) {
  for (;;)
    if (Descriptor fd = connect_to(htonl(INADDR_LOOPBACK), htons(static_cast<std::uint16_t>(place.port)));
        fd.open())
      return fd;
}

/// A rank of a world of wires. The check macros are not for threads, so what is wrong is thrown.
struct Rank {
  std::unique_ptr<Wire> wire;
  Frame next = Frame::make();

  Wire::Ticket send(int to, int tag, const std::vector<std::byte>& data) {
    Wire::Ticket ticket;
    wire->send(to, tag, data.data(), std::ssize(data), ticket);
    return ticket;
  }
  Wire::Ticket receive(int from, int tag, std::vector<std::byte>& data) {
    Wire::Ticket ticket;
    wire->receive(from, tag, data.data(), std::ssize(data), ticket);
    return ticket;
  }
  /// The numbers of frames that have come, by sender.
  std::vector<std::vector<std::uint64_t>> frames;

  void look() {
    for (bool came = true; came;) {
      came = false;
      wire->take(next, came);
      if (came) frames[static_cast<std::size_t>(next.header().from)].push_back(next.header().sequence);
    }
  }
  void until_over(std::vector<Wire::Ticket> tickets) {
    while (!tickets.empty()) {
      look();
      std::erase_if(tickets, [&](Wire::Ticket& ticket) {
        bool over = false;
        wire->test(ticket, over);
        return over;
      });
    }
  }
};

/// `body` on each of `size` ranks, connected.
void among(int size, const std::function<void(Rank&)>& body) {
  const MeetingPlace place = new_place();
  on_threads(size, [&](int rank) {
    Rank own{tcp::connect(launch_of(rank, size), place)};
    own.frames.resize(static_cast<std::size_t>(size));
    own.wire->meet([](const Vigil&) {});
    body(own);
  });
}

std::vector<std::byte> content(int from, int to, int tag, std::size_t bytes) {
  std::vector<std::byte> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>(static_cast<std::size_t>(31 * from + 7 * to + 3 * tag) + i + i / 251);
  return data;
}

}  // namespace

TEST_CASE("strangers at the meeting place are refused and logged, and the job comes together") {
  using Speech = std::function<std::string(const tcp::Claim& right)>;
  const auto bytes = [](const tcp::Claim& claim) {
    return std::string(reinterpret_cast<const char*>(&claim), sizeof claim);
  };
  const auto changed = [&](auto change) -> Speech {
    return [=](tcp::Claim claim) {
      change(claim);
      return bytes(claim);
    };
  };
  const std::vector<Speech> speeches = {
      [](const tcp::Claim&) { return std::string(); },
      [](const tcp::Claim&) { return std::string("GET / HTTP/1.1\r\n\r\n"); },
      [](const tcp::Claim&) { return std::string(100000, '\xff'); },
      [&](const tcp::Claim& claim) { return bytes(claim).substr(0, sizeof claim - 1); },
      changed([](tcp::Claim& c) { c.token.back() ^= 1; }),
      changed([](tcp::Claim& c) { c.opening[7] = '9'; }),
      changed([](tcp::Claim& c) { ++c.size; }),
      changed([](tcp::Claim& c) { c.rank = 0; }),
      changed([](tcp::Claim& c) { c.rank = -1; }),
      changed([](tcp::Claim& c) { c.rank = c.size; }),
  };
  for (const int size : {2, 4})
    for (const Speech& speech : speeches) {
      const Logged logged;
      const MeetingPlace place = new_place();
      std::vector<std::vector<Door>> doors(static_cast<std::size_t>(size));
      const auto come = [&](int rank) {
        Door own{};
        own.port = static_cast<std::uint16_t>(rank);
        tcp::Meeting meeting(launch_of(rank, size), place, own);
        meeting.conclude();
        doors[static_cast<std::size_t>(rank)] = meeting.doors();
      };
      std::thread first(come, 0);
      std::vector<Descriptor> strangers;
      for (int i = 0; i < 20; ++i) {
        strangers.push_back(visit(place));
        const std::string said = speech(tcp::claim_of(launch_of(1, size), place, {}));
        ::send(strangers.back().get(), said.data(), said.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      }
      on_threads(size - 1, [&](int i) { come(i + 1); });
      first.join();
      for (const auto& of_rank : doors) {
        REQUIRE(of_rank.size() == static_cast<std::size_t>(size));
        for (int rank = 0; rank < size; ++rank) CHECK(of_rank[static_cast<std::size_t>(rank)].port == rank);
      }
      for (const Descriptor& stranger : strangers) {
        char nothing;
        CHECK_FALSE(receive_all(stranger.get(), &nothing, 1));  // closed
      }
      CHECK(logged.count("a connection from 127.0.0.1:") == std::ssize(strangers));
    }
}

TEST_CASE("who does not come to the meeting, or is not let in, is named") {
  const MeetingPlace place = new_place();
  CHECK_THAT(message_of<StateError>([&] { tcp::Meeting(launch_of(0, 4), place, {}, 10ms); }),
             ContainsSubstring("1, 2, 3"));
  const std::string unreachable =
      message_of<StateError>([&] { tcp::Meeting(launch_of(2, 4), place, {}, 10ms); });
  CHECK_THAT(unreachable, ContainsSubstring("rank 2") && ContainsSubstring(std::to_string(place.port)));

  std::uint16_t port = 0;
  const Descriptor taken = listen_on(Reach::this_machine, port);
  CHECK_THAT(message_of<StateError>(
                 [&] { tcp::Meeting(launch_of(0, 2), {"127.0.0.1", port, "a token"}, {}, 10ms); }),
             ContainsSubstring("cannot listen on MASTER_PORT"));

  // One with another token hears it at once, and the others meet.
  std::string refused;
  std::thread host([&] { tcp::Meeting(launch_of(0, 2), place, {}).conclude(); });
  refused = message_of<StateError>(
      [&] { tcp::Meeting(launch_of(1, 2), {place.host, place.port, "another token"}, {}); });
  CHECK_THAT(refused, ContainsSubstring("SHERD_JOB_TOKEN"));
  tcp::Meeting meeting(launch_of(1, 2), place, {});
  CHECK(meeting.doors().size() == 2);
  meeting.conclude();
  host.join();
}

TEST_CASE("it is logged who is missing, and why somebody is refused") {
  const Logged logged;
  const MeetingPlace place = new_place();
  message_of<StateError>([&] { tcp::Meeting(launch_of(0, 4), place, {}, 20ms); });
  CHECK(logged.count(fmt::format("these ranks of 4 have not come to port {}: 1, 2, 3", place.port)) == 1);
  message_of<StateError>([&] { tcp::Meeting(launch_of(2, 4), place, {}, 100ms); });
  CHECK(logged.count("rank 2 still waits for rank 0 at MASTER_ADDR 127.0.0.1") == 1);

  std::thread host([&] { tcp::Meeting(launch_of(0, 2), place, {}).conclude(); });
  message_of<StateError>([&] { tcp::Meeting(launch_of(1, 3), place, {}); });
  message_of<StateError>(
      [&] { tcp::Meeting(launch_of(1, 2), {place.host, place.port, "another token"}, {}); });
  tcp::Meeting(launch_of(1, 2), place, {}).conclude();
  host.join();
  CHECK(logged.count("is refused, since it is rank 1 of 3, and here 2 processes meet") == 1);
  CHECK(logged.count("is refused, since it has another SHERD_JOB_TOKEN") == 1);
}

TEST_CASE("once somebody who had come has ended, those who come later hear of it too") {
  for (const int later : {0, 1, 2}) {  // of the two others, those who come after the end
    const MeetingPlace place = new_place();
    std::array<std::string, 4> told;
    const auto come = [&](int rank) {
      told[static_cast<std::size_t>(rank)] =
          message_of<StateError>([&] { tcp::Meeting(launch_of(rank, 4), place, {}).conclude(); });
    };
    std::thread host(come, 0);
    std::deque<std::thread> others;
    for (int rank = 3; rank > 1 + later; --rank) others.emplace_back(come, rank);
    {
      const Descriptor socket = visit(place);
      const tcp::Claim claim = tcp::claim_of(launch_of(1, 4), place, {});
      REQUIRE(send_all(socket.get(), &claim, sizeof claim));
    }
    for (int rank = 2; rank <= 1 + later; ++rank) others.emplace_back(come, rank);
    for (std::thread& other : others) other.join();
    host.join();
    for (const int rank : {0, 2, 3})
      CHECK_THAT(told[static_cast<std::size_t>(rank)], ContainsSubstring("rank 1 ended before all 4"));
  }
}

TEST_CASE("who has connected and not yet greeted when somebody ends hears of it once it greets") {
  const MeetingPlace place = new_place();
  std::array<std::string, 4> told;
  const auto come = [&](int rank) {
    told[static_cast<std::size_t>(rank)] =
        message_of<StateError>([&] { tcp::Meeting(launch_of(rank, 4), place, {}).conclude(); });
  };
  const auto greet = [&](const Descriptor& socket, int rank) {
    const tcp::Claim claim = tcp::claim_of(launch_of(rank, 4), place, {});
    REQUIRE(send_all(socket.get(), &claim, sizeof claim));
  };
  std::thread host(come, 0), other(come, 3);
  const Descriptor slow = visit(place);
  greet(visit(place), 1);  // and ends
  other.join();            // has heard, so rank 0 has
  greet(slow, 2);
  struct {
    char opening[8];
    std::int32_t lost;
  } answer{};
  CHECK(receive_all(slow.get(), &answer, sizeof answer));
  CHECK(answer.lost == 1);
  host.join();
  for (const int rank : {0, 3})
    CHECK_THAT(told[static_cast<std::size_t>(rank)], ContainsSubstring("rank 1 ended before all 4"));
}

TEST_CASE("who lies once it is let in keeps nobody past the time that there is to connect") {
  using Lie = std::function<void(int socket)>;
  const auto say = [](const std::string& text) -> Lie {
    return [text](int socket) { ::send(socket, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT); };
  };
  const std::vector<Lie> lies = {
      say(""),
      say("sherdjo"),
      say("sherdjo2"),
      say(std::string(12, '\xff')),
      say(std::string(100000, 'x')),
      [](int socket) { ::shutdown(socket, SHUT_WR); },
      [](int socket) { ::shutdown(socket, SHUT_RDWR); },
  };
  for (const Lie& lie : lies) {
    const MeetingPlace place = new_place();
    std::array<std::string, 3> told;
    const auto come = [&](int rank) {
      told[static_cast<std::size_t>(rank)] =
          message_of<StateError>([&] { tcp::Meeting(launch_of(rank, 3), place, {}, 2s).conclude(); });
    };
    const auto start = std::chrono::steady_clock::now();
    std::thread host(come, 0), honest(come, 2);
    const Descriptor socket = visit(place);
    const tcp::Claim claim = tcp::claim_of(launch_of(1, 3), place, {});
    REQUIRE(send_all(socket.get(), &claim, sizeof claim));
    lie(socket.get());
    host.join();
    honest.join();
    CHECK(std::chrono::steady_clock::now() - start < (test::sanitized ? 60s : 6s));
    CHECK_THAT(told[0], ContainsSubstring("rank 1 "));
    CHECK_THAT(told[2], ContainsSubstring("rank 1 ") || ContainsSubstring("rank 0 "));
  }
}

TEST_CASE("who meets and then connects in part keeps nobody past the time that there is to connect") {
  // How far it goes: to the meeting, to half a greeting, to silence, to half of what all give each other.
  for (const int steps : {0, 1, 2, 3}) {
    const MeetingPlace place = new_place();
    std::string told;
    std::atomic<bool> over = false;
    std::thread honest([&] {
      told = message_of<StateError>([&] {
        const auto wire = tcp::connect(launch_of(0, 2), place, 500ms);
        wire->meet([&](const Vigil&) {
          std::array<char, 100> own{}, all[2];
          wire->all_gather(own.data(), all, own.size());
        });
      });
      over = true;
      over.notify_one();
    });
    {
      tcp::Meeting meeting(launch_of(1, 2), place, {});
      const Door& door = meeting.doors()[0];
      struct {
        std::array<char, 16> token;
        std::int32_t process;
      } const hello{door.token, 1};
      Descriptor socket(-1);
      if (steps > 0) {
        socket = connect_to(htonl(INADDR_LOOPBACK), door.port);
        REQUIRE(send_all(socket.get(), &hello, steps == 1 ? sizeof hello / 2 : sizeof hello));
      }
      if (steps == 3) REQUIRE(send_all(socket.get(), std::array<char, 50>{}.data(), 50));
      over.wait(false);
    }
    honest.join();
    CHECK_THAT(told, ContainsSubstring("rank 1 ") || ContainsSubstring("process 1 "));
  }
}

TEST_CASE("where nobody listens no connection comes about, however often one is tried") {
  // Of the ports that are given to connections, and of the half that Linux gives to them first.
  std::uint16_t port = 0;
  do {
    port = 0;
    REQUIRE(listen_on(Reach::this_machine, port).open());
    port ^= 1;
  } while (!listen_on(Reach::this_machine, port).open());
  int connections = 0;
  for (int i = 0; i < 40000; ++i) connections += connect_to(htonl(INADDR_LOOPBACK), htons(port)).open();
  CHECK(connections == 0);
  CHECK(listen_on(Reach::this_machine, port).open());
}

TEST_CASE("a process that ends after the meeting and before it connects is named") {
  std::deque<Entrance> entrances;
  std::vector<Door> doors;
  for (int process = 0; process < 3; ++process)
    doors.push_back(entrances.emplace_back(Reach::this_machine, "the wire").door());
  std::array<std::string, 2> told;
  on_threads(2, [&](int process) {
    const auto place = static_cast<std::size_t>(process);
    told[place] = message_of<StateError>([&] { entrances[place].connect(process, doors, Vigil::of(50ms)); });
  });
  for (const std::string& text : told) CHECK_THAT(text, ContainsSubstring("process 2 has not connected"));
}

TEST_CASE("messages arrive whatever the order of sends and receives, and frames in theirs") {
  for (const int size : {2, 3})
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{5000}, std::size_t{3} << 20})
      for (const bool sends_first : {false, true}) {
        constexpr int tags = 5, frames = 300;
        std::atomic<int> wrong = 0;
        std::barrier all(size);
        among(size, [&](Rank& own) {
          const int rank = own.wire->rank();
          std::vector<Wire::Ticket> tickets;
          std::deque<std::vector<std::byte>> out, in;
          std::deque<Frame> kept;
          const auto send = [&](int to) {
            for (int tag = 0; tag < tags; ++tag) {
              out.push_back(content(rank, to, tag, bytes));
              tickets.push_back(own.send(to, tag, out.back()));
            }
            for (std::uint64_t number = 0; number < frames; ++number) {
              kept.push_back(Frame::make());
              Header header;
              header.sequence = number;
              header.from = rank;
              header.bytes = static_cast<std::uint32_t>(13 * number % eager_bytes);
              std::memcpy(kept.back().bytes.get(), &header, sizeof header);
              std::memset(kept.back().payload(), 0, header.bytes);
              Wire::Ticket ticket;
              own.wire->send(to, kept.back(), ticket);
              tickets.push_back(ticket);
            }
          };
          const auto receive = [&](int from) {
            for (int tag = tags - 1; tag >= 0; --tag) {
              in.emplace_back(bytes);
              tickets.push_back(own.receive(from, tag, in.back()));
            }
          };
          const bool sends = sends_first == (rank % 2 == 0);
          for (const bool now : {sends, !sends}) {
            for (int peer = 0; peer < size; ++peer) {
              if (peer == rank) continue;
              if (now)
                send(peer);
              else
                receive(peer);
            }
            own.look();
          }
          own.until_over(tickets);
          const auto complete = [&] {
            for (int peer = 0; peer < size; ++peer)
              if (peer != rank && own.frames[static_cast<std::size_t>(peer)].size() < frames) return false;
            return true;
          };
          while (!complete()) own.look();
          auto got = in.begin();
          for (int peer = 0; peer < size; ++peer) {
            if (peer == rank) continue;
            for (int tag = tags - 1; tag >= 0; --tag) wrong += *got++ != content(peer, rank, tag, bytes);
            for (std::uint64_t number = 0; number < frames; ++number)
              wrong += own.frames[static_cast<std::size_t>(peer)][number] != number;
          }
          all.arrive_and_wait();  // nobody leaves while another one still reads
        });
        CHECK(wrong == 0);
      }
}

TEST_CASE("memory of a message that is cancelled is written no more, and what follows comes") {
  for (const bool asked_first : {false, true})
    for (const std::size_t bytes : {std::size_t{10}, std::size_t{8} << 20}) {
      std::atomic<int> wrong = 0;
      std::barrier both(2);
      among(2, [&](Rank& own) {
        const auto first = content(0, 1, 0, bytes), second = content(0, 1, 1, bytes);
        if (own.wire->rank() == 0) {
          if (asked_first) both.arrive_and_wait();
          own.until_over({own.send(1, 7, first), own.send(1, 7, second)});
          if (!asked_first) both.arrive_and_wait();
          both.arrive_and_wait();
          return;
        }
        std::vector<std::byte> dropped(bytes), kept(bytes);
        Wire::Ticket ticket = own.receive(0, 7, dropped);
        if (!asked_first) own.look();
        own.wire->cancel(ticket);
        const std::vector<std::byte> as_cancelled = dropped;
        own.until_over({ticket});
        if (asked_first) both.arrive_and_wait();
        own.until_over({own.receive(0, 7, kept)});
        wrong += dropped != as_cancelled;
        wrong += kept != second;
        if (!asked_first) both.arrive_and_wait();
        both.arrive_and_wait();
      });
      CHECK(wrong == 0);
    }
}

TEST_CASE("a message that is withdrawn is over whether it was asked for or not, and what follows comes") {
  enum class Asked { before, meanwhile, never };
  for (const Asked asked : {Asked::before, Asked::meanwhile, Asked::never})
    for (const std::size_t bytes : {std::size_t{10}, std::size_t{8} << 20}) {
      std::atomic<int> wrong = 0;
      std::barrier both(2);
      among(2, [&](Rank& own) {
        const auto first = content(0, 1, 0, bytes), second = content(0, 1, 1, bytes);
        if (own.wire->rank() == 0) {
          const Wire::Ticket sent = own.send(1, 7, first);
          both.arrive_and_wait();
          if (asked == Asked::before) own.until_over({sent});
          const std::array<Wire::Ticket, 1> under_way = {sent};
          own.wire->withdraw(1, 7, asked == Asked::before ? std::span<const Wire::Ticket>() : under_way);
          if (asked != Asked::before) own.until_over({sent});
          own.until_over({own.send(1, 9, second)});
          both.arrive_and_wait();
          return;
        }
        std::vector<std::byte> early(bytes), kept(bytes);
        if (asked == Asked::never) both.arrive_and_wait();
        const Wire::Ticket receiving = asked == Asked::never ? 0 : own.receive(0, 7, early);
        if (asked != Asked::never) both.arrive_and_wait();
        own.until_over({own.receive(0, 9, kept)});
        wrong += kept != second;
        if (Wire::Ticket ticket = receiving; asked != Asked::never) {
          if (asked == Asked::meanwhile) own.wire->cancel(ticket);
          own.until_over({ticket});
          own.wire->decline(0, 7);
        }
        if (asked == Asked::before) wrong += early != first;
        both.arrive_and_wait();
      });
      CHECK(wrong == 0);
    }
}

TEST_CASE("a connection that ends is told once, and what goes there is over") {
  std::vector<int> told;
  bool over = true;
  among(2, [&](Rank& own) {
    if (own.wire->rank() == 1) return;  // its wire ends
    own.wire->open([&](int process) { told.push_back(process); });
    const std::vector<std::byte> data(100);
    const Wire::Ticket early = own.send(1, 3, data);
    while (told.empty()) own.look();
    own.until_over({early, own.send(1, 4, data)});
    std::vector<std::byte> never(10);
    Wire::Ticket ticket = own.receive(1, 3, never);
    own.look();
    own.wire->test(ticket, over);
  });
  CHECK(told == std::vector{1});
  CHECK_FALSE(over);
}
