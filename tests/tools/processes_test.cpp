// `sherd train` under `sherd launch`: ranks as processes train to the bits of ranks as threads.
#include "tests/tools/command.h"
#include "tests/tools/kills.h"
#include "tests/tools/programs.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Of 0 ranks: as many as a launcher starts.
Arguments train(int ranks, const Arguments& more) {
  Arguments sizes = {"train", "--data",    "text", "--layers",  "1",   "--heads",   "1", "--width",
                     "10",    "--context", "8",    "--dropout", "0.1", "--threads", "1"};
  if (ranks > 0) sizes = with(sizes, {"--ranks", std::to_string(ranks)});
  return with(sizes, more);
}
Arguments launched(int processes, const Arguments& command) {
  return with({"launch", "-n", std::to_string(processes), built::program}, command);
}

/// The command's exit code; what it said is shown when something is wrong.
int run(const TempDirectory& folder, const Arguments& arguments) {
  Command command(folder, arguments);
  const int code = command.wait();
  if (code != 0) WARN(command.out() << command.err());
  return code;
}

/// One rank is killed, or all at once: the programs that have no children.
void check_killed_processes(int rounds) {
  check_kills(
      rounds, [](const Arguments& train) { return launched(2, train); },
      [](const Command& command, std::mt19937& random) {
        std::vector<pid_t> programs = family(command.process());
        std::erase_if(programs, [](pid_t process) { return family(process).size() > 1; });
        const std::size_t whom = random() % (programs.size() + 1);
        for (std::size_t i = 0; i < programs.size(); ++i)
          if (whom == i || whom == programs.size()) ::kill(programs[i], SIGKILL);
      });
}

}  // namespace

TEST_CASE("processes train to the bits of threads, and take over from each other") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  for (const int ranks : {2, 4}) {
    for (const std::string layout : {"flat", "per-parameter"}) {
      const std::string name = std::to_string(ranks) + layout, threads = name + "threads";
      const std::string processes = name + "processes";
      const Arguments how = {"--layout", layout,    "--steps", "40",   "--eval-every",
                             "20",       "--batch", "4",       "--out"};
      INFO(name);
      REQUIRE(run(folder, train(ranks, with(how, {threads}))) == 0);
      const auto expected = contents(folder / threads);
      REQUIRE(expected.contains("step-20/model.rank-1.safetensors"));
      REQUIRE(run(folder, launched(ranks, train(ranks, with(how, {processes})))) == 0);
      CHECK(contents(folder / processes) == expected);

      std::filesystem::remove_all(folder / processes / "step-40");
      REQUIRE(run(folder, {"train", "--resume", "--out", processes}) == 0);
      CHECK(contents(folder / processes) == expected);
      std::filesystem::remove_all(folder / threads / "step-40");
      REQUIRE(run(folder, launched(ranks, {"train", "--resume", "--out", threads})) == 0);
      CHECK(contents(folder / threads) == expected);
    }
  }
}

TEST_CASE("processes write one trace, in which each is a process") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  REQUIRE(run(folder, launched(3, train(3, {"--steps", "4", "--batch", "6", "--trace", "trace.json"}))) == 0);
  const nlohmann::json trace = nlohmann::json::parse(posix_file_system().read(folder / "trace.json"));
  std::map<int, int> backwards;
  for (const nlohmann::json& event : trace)
    if (event["name"] == "backward") ++backwards[event["pid"].get<int>()];
  CHECK(backwards == std::map<int, int>{{0, 4}, {1, 4}, {2, 4}});
}

TEST_CASE("a launched bench reports once") {
  const TempDirectory folder;
  Command command(folder, launched(2, {"bench", "--ranks", "2", "--layers", "1", "--width", "16", "--context",
                                       "8", "--batch", "4", "--steps", "3", "--out", "report.json"}));
  CHECK(command.wait() == 0);
  INFO(command.out() << command.err());
  const std::size_t first = command.out().find("tokens/s");
  CHECK(first != std::string::npos);
  CHECK(command.out().find("tokens/s", first + 1) == std::string::npos);
  CHECK(posix_file_system().exists(folder / "report.json"));
}

TEST_CASE("ranks are the processes that were launched, and --ranks may not say another number") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  for (const Arguments& command : {train(3, {"--batch", "6"}),
                                   Arguments{"bench", "--ranks", "3"},
                                   {"train", "--resume", "--ranks", "3"}}) {
    Command refused(folder, launched(2, command));
    CHECK(refused.wait() == 1);
    INFO(refused.err());
    CHECK_THAT(refused.err(), ContainsSubstring("sherd: --ranks 3: the launcher started 2 processes"));
  }
  // What goes on does so on the ranks that there are now.
  REQUIRE(run(folder, launched(3, train(0, {"--steps", "2", "--batch", "6", "--out", "run"}))) == 0);
  CHECK(tools::read_config(folder / "run/step-2", posix_file_system()).options.ranks == 3);
  REQUIRE(run(folder, launched(2, {"train", "--resume", "--steps", "3", "--out", "run"})) == 0);
  CHECK(tools::read_config(folder / "run/step-3", posix_file_system()).options.ranks == 2);
  REQUIRE(run(folder, {"train", "--resume", "--steps", "4", "--out", "run"}) == 0);
  CHECK(tools::read_config(folder / "run/step-4", posix_file_system()).options.ranks == 2);
}

TEST_CASE("one process speaks for all") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  Command command(folder, launched(3, train(0, {"--steps", "3", "--batch", "6"})));
  CHECK(command.wait() == 0);
  INFO(command.out() << command.err());
  for (const std::string line : {"run runs/1:", "step 3/3 ", "sample:", "final: step=3 "}) {
    const std::size_t first = command.out().find(line);
    CHECK(first != std::string::npos);
    CHECK(command.out().find(line, first + 1) == std::string::npos);
  }
  CHECK(tools::read_config(folder / "runs/1/step-3", posix_file_system()).options.ranks == 3);
}

TEST_CASE("one fault of a launched job is one line, whichever rank it is of and however many see it") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments trains = {built::program, "train", "--data",    "text", "--layers",  "1", "--heads", "1",
                            "--width",      "32",    "--context", "8",    "--threads", "1"};
  const auto said = [&](const std::string& script, const Arguments& more, int status = 1) {
    const Arguments command = with({"sh", "-c", script + "; exec \"$0\" \"$@\" $MORE"}, with(trains, more));
    Command run(folder, with({"launch", "-n", "3"}, command));
    CHECK(run.wait() == status);
    INFO(run.err());
    CHECK(std::ranges::count(run.err(), '\n') == 1);
    return run.err();
  };
  for (const char* wire : {"mpi", "tcp"}) {
    INFO(wire);
    // What OpenMPI shares between processes are files too, which `ulimit` would forbid it.
    const std::string over =
        fmt::format("SHERD_WIRE={}; OMPI_MCA_btl=self,tcp; export SHERD_WIRE OMPI_MCA_btl; ", wire);
    // Which all of them meet.
    const std::string all_full =
        said(over + "ulimit -f 8", {"--batch", "6", "--steps", "2", "--out", std::string(wire)});
    CHECK_THAT(all_full, ContainsSubstring(fmt::format("sherd: rank 0: write: '{}/step-0", wire)));
    for (const int culprit : {0, 1, 2}) {
      const std::string is_culprit = fmt::format("[ $OMPI_COMM_WORLD_RANK = {} ] && ", culprit);
      const std::string out = fmt::format("{}-{}", wire, culprit);
      const std::string full =
          said(over + is_culprit + "ulimit -f 8", {"--batch", "6", "--steps", "2", "--out", out});
      CHECK_THAT(full, ContainsSubstring(fmt::format("sherd: rank {}: write: '{}/step-0", culprit, out)));
      CHECK_THAT(full, ContainsSubstring("File too large"));
      const std::string mixed =
          said(over + is_culprit + "MORE=--resume", {"--batch", "6", "--steps", "2", "--out", "mixed"});
      CHECK_THAT(mixed, ContainsSubstring(fmt::format("--resume: rank {} was started with it", culprit)));
    }
  }
  // What all of them meet is one fault too; so is a word that none of them knows.
  CHECK(said("true", {"--steps", "0"}).starts_with("sherd: --steps 0: takes values"));
  CHECK_THAT(said("true", {"--batch", "7"}), ContainsSubstring("--ranks 3: does not divide --batch 7"));
  CHECK_THAT(said("true", {"--stpes", "7"}), ContainsSubstring("did you mean --steps?"));
  CHECK_THAT(said("MASTER_PORT=abc; SHERD_WIRE=tcp; export MASTER_PORT SHERD_WIRE", {}),
             ContainsSubstring("sherd: launch: MASTER_PORT is 'abc'"));
}

TEST_CASE("a rank that is killed is one line, of the launcher that saw it") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments endless = {"--steps", "4000000", "--eval-every", "4000000", "--batch", "6", "--out"};
  for (std::size_t whom = 0; whom < 3; ++whom) {
    Command command(folder, launched(3, train(3, with(endless, {std::to_string(whom)}))));
    REQUIRE(command.prints("step 1/"));
    std::vector<pid_t> programs = family(command.process());
    std::erase_if(programs, [](pid_t process) { return family(process).size() > 1; });
    REQUIRE(programs.size() == 3);
    ::kill(programs[whom], SIGKILL);
    CHECK(command.wait() == 128 + SIGKILL);
    INFO(command.err());
    CHECK(std::ranges::count(command.err(), '\n') == 1);
    CHECK_THAT(command.err(), ContainsSubstring("ended by signal 9 (Killed)"));
  }
}

TEST_CASE("what a rank says goes where its own errors go, too") {
  const TempDirectory folder;
  Command run(folder, launched(2, {"train", "--steps", "0"}));
  CHECK(run.wait() == 1);
  Command apart(folder, {"launch", "-n", "2", "sh", "-c",
                         fmt::format("exec {} train --steps 0 2>err-$OMPI_COMM_WORLD_RANK", built::program)});
  CHECK(apart.wait() == 1);
  CHECK(std::ranges::count(apart.err(), '\n') == 1);
  std::string own;
  for (const std::string rank : {"0", "1"}) {
    const auto file = folder / ("err-" + rank);
    if (!posix_file_system().exists(file)) continue;  // it was ended with the first
    const std::string its = posix_file_system().read(file);
    CHECK((its.empty() || its.starts_with("sherd: rank " + rank + ": --steps 0: takes")));
    own += its;
  }
  CHECK_FALSE(own.empty());
}

TEST_CASE("ranks of one machine meet over TCP without being told where") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments sizes = {"--steps", "3", "--batch", "4", "--out"};
  REQUIRE(run(folder, train(2, with(sizes, {"threads"}))) == 0);
  const Arguments over_tcp = {"/usr/bin/env", "-u", "MASTER_ADDR", "-u", "MASTER_PORT", "SHERD_WIRE=tcp"};
  Command tcp(folder, launched(2, train(2, with(sizes, {"tcp"}))), {}, over_tcp);
  const int code = tcp.wait();
  INFO(tcp.err());
  CHECK(code == 0);
  CHECK(contents(folder / "tcp") == contents(folder / "threads"));
}

TEST_CASE("a polite kill ends all processes at one step, with a checkpoint to go on from") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments end = {"--steps", "4000000", "--eval-every", "4000000", "--batch", "4", "--out"};
  Command command(folder, launched(2, train(2, with(end, {"run"}))));
  REQUIRE(command.prints("step 1/"));
  command.signal(SIGTERM);
  command.wait();
  INFO(command.out() << command.err());
  CHECK_THAT(command.out(), ContainsSubstring("stopped after step "));
  CHECK(tools::saved_steps(folder / "run", posix_file_system()).back() > 0);
}

TEST_CASE("killed while they save, processes go on from the last good checkpoint to the same bits") {
  check_killed_processes(4);
}

TEST_CASE("processes are killed 200 times while they save", "[.soak]") { check_killed_processes(200); }
