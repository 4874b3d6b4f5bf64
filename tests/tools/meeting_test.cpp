// `sherd train` as ranks that meet over TCP.
#include <arpa/inet.h>

#include "collectives/processes/entrance.h"
#include "tests/free_port.h"
#include "tests/tools/command.h"
#include "tests/tools/small_run.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Where ranks meet, each in a folder of its own.
struct Place {
  int port = free_port();
  TempDirectory data;
  Place() { write_file(data / "text", small_text()); }

  Arguments train() const {
    return {"train",
            "--out",
            (data / "run").string(),
            "--data",
            (data / "text").string(),
            "--layers",
            "1",
            "--heads",
            "1",
            "--width",
            "10",
            "--context",
            "8",
            "--batch",
            "6",
            "--warmup",
            "1",
            "--steps",
            "3",
            "--threads",
            "1"};
  }
  Arguments as(int rank, int size) const {
    const auto is = [](const char* name, auto value) { return fmt::format("{}={}", name, value); };
    return {"/usr/bin/env",
            is("RANK", rank),
            is("LOCAL_RANK", rank),
            is("WORLD_SIZE", size),
            is("LOCAL_WORLD_SIZE", size),
            is("MASTER_PORT", port),
            "MASTER_ADDR=127.0.0.1",
            "SHERD_JOB_TOKEN=ours",
            "SHERD_WIRE=tcp"};
  }
  /// Returns once rank 0 listens; a stranger to it.
  processes::Descriptor visit() const {
    for (;;)
      if (auto fd = processes::connect_to(htonl(INADDR_LOOPBACK), htons(static_cast<std::uint16_t>(port)));
          fd.open())
        return fd;
  }
};

}  // namespace

TEST_CASE("who is refused where ranks meet is told on stderr, and the others go on") {
  const Place place;
  const TempDirectory first, second, third;
  Command host(first, place.train(), {}, place.as(0, 2));
  place.visit();
  Command stranger(second, place.train(), {}, place.as(1, 3));
  CHECK(stranger.wait() == 1);
  CHECK_THAT(stranger.err(), ContainsSubstring("launch: rank 1 of 3 was not let in"));
  Command guest(third, place.train(), {}, place.as(1, 2));
  const int of_guest = guest.wait(), of_host = host.wait();
  INFO(guest.err() << host.err());
  CHECK(of_guest == 0);
  CHECK(of_host == 0);
  CHECK_THAT(host.err(), ContainsSubstring("sherd: processes: a connection from 127.0.0.1:") &&
                             ContainsSubstring("it is rank 1 of 3, and here 2 processes meet\n"));
}

TEST_CASE("a rank that waits for others ends at once when it is asked to") {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
    const Place place;
    const TempDirectory folder;
    Command host(folder, place.train(), {}, place.as(0, 2));
    place.visit();
    host.signal(signal);
    CHECK(host.wait() == 128 + signal);
    CHECK_FALSE(std::filesystem::exists(place.data / "run"));
  }
}
