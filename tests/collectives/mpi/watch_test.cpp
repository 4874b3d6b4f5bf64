// The connections between processes, here between threads: who is no process of the job holds up nobody.
#include "collectives/processes/watch.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>

#include "tests/catch.h"

using namespace sherd;
using namespace sherd::processes;

namespace {

using Clock = std::chrono::steady_clock;

/// Not open when nobody listens there.
Descriptor visit(std::uint32_t address, std::uint16_t port) {
  Descriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = address;
  to.sin_port = port;
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) fd.close();
  return fd;
}

/// This machine's addresses but loopback.
std::vector<std::uint32_t> addresses() {
  std::vector<std::uint32_t> found;
  ifaddrs* list = nullptr;
  REQUIRE(::getifaddrs(&list) == 0);
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET) continue;
    const std::uint32_t address = reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr.s_addr;
    if (address != htonl(INADDR_LOOPBACK)) found.push_back(address);
  }
  ::freeifaddrs(list);
  return found;
}

using Strangers = std::vector<Descriptor>;
/// What a stranger says to a door.
using Speech = std::function<std::string(const Door&)>;

/// `size` processes connect while strangers are at every door, `crowd` at each; then each tells every other
/// its number.
void connect_among(int size, int crowd, const Speech& speech) {
  std::vector<std::unique_ptr<Watch>> watches;
  std::vector<Door> doors;
  for (int p = 0; p < size; ++p) {
    watches.push_back(std::make_unique<Watch>(p, size, Reach::this_machine));
    doors.push_back(watches.back()->door());
  }
  Strangers strangers;
  for (const Door& door : doors)
    for (int i = 0; i < crowd; ++i) {
      strangers.push_back(visit(htonl(INADDR_LOOPBACK), door.port));
      const std::string said = speech(door);
      ::send(strangers.back().get(), said.data(), said.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  const auto begin = Clock::now();
  std::vector<std::thread> threads;
  for (const auto& watch : watches) threads.emplace_back([&] { watch->connect(doors); });
  for (std::thread& thread : threads) thread.join();
  CHECK(std::chrono::duration<double>(Clock::now() - begin).count() < 1);

  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to) {
      if (from == to) continue;
      Notice notice;
      notice.value = static_cast<std::uint64_t>(from);
      watches[static_cast<std::size_t>(from)]->send(to, notice);
    }
  for (const auto& watch : watches) {
    std::vector<Watch::News> news;
    while (news.size() < static_cast<std::size_t>(size) - 1) {
      for (Watch::News& n : watch->take_news()) news.push_back(std::move(n));
      std::this_thread::yield();
    }
    for (const Watch::News& n : news) {
      CHECK(n.notice.kind == Notice::Kind::departed);
      CHECK(n.notice.value == static_cast<std::uint64_t>(n.process));
    }
  }
}

std::string greeting(const std::array<char, 16>& token, std::int32_t process) {
  std::string said(token.begin(), token.end());
  return said.append(reinterpret_cast<const char*>(&process), sizeof process);
}

}  // namespace

TEST_CASE("strangers at the doors, silent or not, hold up no process") {
  const std::vector<Speech> speeches = {
      [](const Door&) { return std::string(); },
      [](const Door&) { return std::string("GET / HTTP/1.1\r\n\r\n"); },
      [](const Door&) { return std::string(100000, '\xff'); },
      [](const Door&) { return std::string(20, '\0'); },
      [](const Door&) { return greeting({}, 1); },
      [](const Door& door) { return greeting(door.token, 1).substr(0, 19); },
      [](const Door& door) { return greeting(door.token, -1); },
      [](const Door& door) { return greeting(door.token, 1 << 30); },
  };
  for (const int size : {2, 3, 8}) {
    connect_among(size, 0, speeches[0]);
    for (const Speech& speech : speeches) connect_among(size, 50, speech);
  }
  connect_among(3, 1000 / 3, speeches[0]);
}

TEST_CASE("on one machine nobody listens beyond it") {
  const Watch watch(0, 2, Reach::this_machine), open(0, 2, Reach::network);
  CHECK(visit(htonl(INADDR_LOOPBACK), watch.door().port).open());
  for (const std::uint32_t number : watch.door().addresses) CHECK(number == 0);
  for (const std::uint32_t address : addresses()) {
    CHECK_FALSE(visit(address, watch.door().port).open());
    CHECK(visit(address, open.door().port).open());
  }
}

TEST_CASE("a child of fork that ends takes nobody's connections along") {
  std::vector<Door> doors;
  std::vector<std::unique_ptr<Watch>> watches;
  for (int p = 0; p < 2; ++p) {
    watches.push_back(std::make_unique<Watch>(p, 2, Reach::this_machine));
    doors.push_back(watches.back()->door());
  }
  std::thread other([&] { watches[1]->connect(doors); });
  watches[0]->connect(doors);
  other.join();
  const pid_t child = ::fork();
  if (child == 0) {
    watches.clear();
    ::_exit(0);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  Notice notice;
  notice.value = 42;
  watches[0]->send(1, notice);
  std::vector<Watch::News> news;
  while (news.empty()) {
    news = watches[1]->take_news();
    std::this_thread::yield();
  }
  CHECK(news[0].notice.kind == Notice::Kind::departed);
  CHECK(news[0].notice.value == 42);
}
