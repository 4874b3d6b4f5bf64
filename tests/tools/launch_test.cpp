// `sherd launch`: however a process of a job ends, the job ends, says so in one line and leaves nothing.
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "tests/tools/command.h"
#include "tests/tools/on_terminal.h"
#include "tests/tools/programs.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

namespace fs = std::filesystem;

/// Seconds from a rank's end to the job's.
constexpr double in_time = 2;

/// A folder for a job, with a text to train on and a TMPDIR of its own.
class Place {
 public:
  Place() {
    write_file(folder_ / "text", small_text());
    fs::create_directory(folder_ / "tmp");
    ::setenv("TMPDIR", (folder_ / "tmp").c_str(), 1);
  }
  ~Place() { ::unsetenv("TMPDIR"); }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  const TempDirectory& folder() const { return folder_; }
  void check_clean(pid_t launcher) const {
    CHECK(fs::is_empty(folder_ / "tmp"));
    const std::string own = "sherd-launch-" + std::to_string(launcher) + "-";
    for (const auto& entry : fs::directory_iterator("/dev/shm"))
      CHECK_FALSE(entry.path().filename().string().starts_with(own));
  }

 private:
  TempDirectory folder_;
};

/// Trains until it is stopped.
const Arguments endless = {"train",   "--data",    "text", "--layers",  "1",       "--heads",
                           "1",       "--width",   "10",   "--context", "8",       "--batch",
                           "12",      "--threads", "1",    "--steps",   "4000000", "--eval-every",
                           "4000000", "--out",     "run"};

Arguments launch(int ranks, const Arguments& command) {
  return with({"launch", "--events", "events", "-n", std::to_string(ranks)}, command);
}

/// Where the launcher ended the job: it did so within the time, by its own clock, from when it heard of the
/// first rank's end to when there was nothing left. What the machine takes to start processes does not count.
void check_ended_in_time(const TempDirectory& folder) {
  std::ifstream events(folder / "events");
  double first_end = -1, over = -1, seconds = 0;
  bool ended = false;
  for (std::string what; events >> seconds && std::getline(events, what);) {
    if (first_end < 0 && what.starts_with(" rank ") && what.find(" ended ") != std::string::npos)
      first_end = seconds;
    ended |= what.starts_with(" the job is ended");
    if (what == " all is over") over = seconds;
  }
  REQUIRE(first_end >= 0);
  REQUIRE(over >= 0);
  if (ended) CHECK(over - first_end < in_time);
}
/// `sherd train`, but rank `culprit` does `deed` in a shell first.
Arguments train_with(int culprit, const std::string& deed) {
  const std::string script =
      "[ $OMPI_COMM_WORLD_RANK = " + std::to_string(culprit) + " ] && { " + deed + "; }; exec \"$0\" \"$@\"";
  return with({"sh", "-c", script, built::program}, endless);
}

std::ptrdiff_t lines(const std::string& text) { return std::ranges::count(text, '\n'); }

/// Launcher, supervisor, mpirun; a keeper and a program a rank.
std::size_t processes_of(int ranks) { return 3 + 2 * static_cast<std::size_t>(ranks); }

}  // namespace

TEST_CASE("a rank that ends before all have met ends the job at once, in one line") {
  struct Deed {
    std::string script, words;
    int status;
  };
  const Deed deeds[] = {{"exit 3", "ended with status 3", 3},
                        {"exit 0", "ended with status 0", 1},
                        {"kill -9 $$", "ended by signal 9 (Killed)", 137},
                        {"kill -SEGV $$", "ended by signal 11 (Segmentation fault)", 139},
                        {"exec ./nothing 2>/dev/null", "ended with status 127", 127}};
  const Place place;
  for (const int ranks : {1, 2, 4})
    for (const int culprit : {0, ranks - 1})
      for (const Deed& deed : deeds) {
        if (ranks == 1 && deed.status == 1) continue;  // the job's good end
        Command command(place.folder(), launch(ranks, train_with(culprit, deed.script)));
        const pid_t launcher = command.process();
        CHECK(command.wait() == deed.status);
        check_ended_in_time(place.folder());
        INFO(ranks << " ranks, " << deed.script << "\n" << command.out() << command.err());
        CHECK(command.err() ==
              fmt::format("sherd launch: rank {} {}{}\n", culprit, deed.words,
                          ranks > 1 ? " before all ranks had met, so the others are ended too" : ""));
        place.check_clean(launcher);
      }
}

TEST_CASE("wherever a rank is killed on its way in, the job ends and its death is named") {
  const Place place;
  for (int hundredths = 0; hundredths <= 40; hundredths += 4) {
    const std::string deed = fmt::format("(sleep 0.{:02}; kill -9 $$) &", hundredths);
    INFO(deed);
    Command command(place.folder(), launch(3, train_with(1, deed + " true")));
    const pid_t launcher = command.process();
    CHECK(command.wait() == 137);
    check_ended_in_time(place.folder());
    CHECK_THAT(command.err(), ContainsSubstring("sherd launch: rank 1 ended by signal 9 (Killed)"));
    CHECK_THAT(command.err(), !ContainsSubstring("PMIX"));
    place.check_clean(launcher);
    fs::remove_all(place.folder() / "run");
  }
}

TEST_CASE("an mpirun that does not end when all ranks have is ended, and what was written is read first") {
  const Place place;
  const std::string mpirun = (place.folder() / "mpirun").string();
  write_file(mpirun, "#!/bin/sh\nPATH=${PATH#*:}\nmpirun \"$@\"\nexec sleep 600\n");
  fs::permissions(mpirun, fs::perms::owner_all);
  const std::string path = "PATH=" + place.folder().path().string() + ":" + std::getenv("PATH");
  Command command(place.folder(), launch(2, {"sh", "-c", "echo \"<$EVENT_NOEPOLL>\""}), {},
                  {"/usr/bin/env", path});
  CHECK(command.wait() == 0);
  CHECK(command.out() == "<>\n<>\n");
  CHECK(command.err().empty());
  place.check_clean(command.process());
}

TEST_CASE("why a rank failed is said, though mpirun crashes before that is heard") {
  const Place place;
  // It stops the launcher's process that listens until the rank has spoken and mpirun is dead.
  const std::string mpirun = (place.folder() / "mpirun").string();
  write_file(mpirun,
             "#!/bin/bash\nwhile [[ $1 != */sherd ]]; do shift; done\n"
             "kill -STOP $PPID\nOMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 \"$@\"\n"
             "(until [[ $(</proc/$$/stat) == *') Z '* ]]; do :; done; kill -CONT $PPID) &\nkill -SEGV $$\n");
  fs::permissions(mpirun, fs::perms::owner_all);
  const std::string path = "PATH=" + place.folder().path().string() + ":" + std::getenv("PATH");
  Command command(place.folder(), launch(1, {built::program, "train", "--data", "text", "--steps", "0"}), {},
                  {"/usr/bin/env", path});
  CHECK(command.wait() == 1);
  CHECK(command.err().starts_with("sherd: --steps 0: takes values from 1 to "));
  CHECK(lines(command.err()) == 1);
  place.check_clean(command.process());
}

TEST_CASE("ranks that follow a killed mpirun are no news, though they are heard first") {
  const Place place;
  // It stops the launcher's process that listens until mpirun is dead and the ranks have followed it.
  const std::string mpirun = (place.folder() / "mpirun").string();
  write_file(
      mpirun,
      "#!/bin/bash\nwhile [[ $1 != */sherd ]]; do shift; done\n"
      "export OMPI_COMM_WORLD_SIZE=2 listener=$PPID keepers=\n"
      "for rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank \"$@\" & keepers+=\" $!\"; done\n"
      "until [[ -s up0 && -s up1 ]]; do :; done\nkill -STOP $PPID\n"
      "(for one in $keepers; do until [[ ! -e /proc/$one || $(</proc/$one/stat) == *') Z '* ]]; do :; done; "
      "done; kill -CONT $listener) &\n"
      "kill -KILL $$\n");
  fs::permissions(mpirun, fs::perms::owner_all);
  const std::string path = "PATH=" + place.folder().path().string() + ":" + std::getenv("PATH");
  Command command(place.folder(), launch(2, {"sh", "-c", "echo >up$OMPI_COMM_WORLD_RANK; sleep 600; true"}),
                  {}, {"/usr/bin/env", path});
  CHECK(command.wait() == 137);
  CHECK(command.err() == "sherd launch: mpirun ended by signal 9 (Killed), so its ranks are ended\n");
  place.check_clean(command.process());
}

TEST_CASE("a program that cannot be started is one line, whatever its name") {
  const Place place;
  for (const std::string name : {"./nothing", "no such thing", "two\nlines", "/", "\x1b[2K\r"})
    for (const int ranks : {1, 3}) {
      Command command(place.folder(), launch(ranks, {name}));
      CHECK(command.wait() == 127);
      INFO(command.err());
      CHECK(lines(command.err()) == 1);
      CHECK(control_in(command.err()) == -1);
      CHECK_THAT(command.err(), ContainsSubstring("cannot be started ("));
    }
}

TEST_CASE("what ranks write is for where the launcher writes, whatever terminal mpirun gives them") {
  const Place place;
  const Arguments train = {built::program, "train", "--data",    "text", "--layers", "1", "--heads",   "1",
                           "--width",      "8",     "--context", "8",    "--batch",  "4", "--threads", "1",
                           "--steps",      "4",     "--out"};
  for (const int ranks : {1, 2}) {
    const std::string out = "file-" + std::to_string(ranks);
    Command file(place.folder(), launch(ranks, with(train, {out})));
    CHECK(file.wait() == 0);
    CHECK_THAT(file.out(), ContainsSubstring("final: step=4 "));
    CHECK(control_in(file.out()) == -1);
    CHECK(control_in(file.err()) == -1);
  }
  const Arguments launched = with(with({built::program}, launch(2, train)), {"terminal"});
  CHECK_THAT(output_on(Terminal::own, place.folder(), launched), ContainsSubstring("\x1b[K"));
}

TEST_CASE("a signal to the launcher saves, and its status is that of the ranks") {
  const Place place;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    INFO("signal " << signal);
    Command command(place.folder(), launch(2, with({built::program}, endless)));
    const pid_t launcher = command.process();
    REQUIRE(command.prints("step 1/"));
    command.signal(signal);
    CHECK(command.wait() == 0);
    CHECK_THAT(command.out(), ContainsSubstring("stopped after step "));
    CHECK(command.err().empty());
    CHECK(tools::saved_steps(place.folder() / "run", posix_file_system()).back() > 0);
    fs::remove_all(place.folder() / "run");
    place.check_clean(launcher);

    // A program that does not listen ends by it; one that refuses to end is ended the second time.
    Command idle(place.folder(), launch(2, {"sh", "-c", "echo up; exec sleep 600"}));
    REQUIRE(idle.prints("up\nup\n"));
    idle.signal(signal);
    CHECK(idle.wait() == 128 + (signal == SIGINT ? SIGINT : SIGTERM));
    CHECK(idle.err().empty());
    const std::string stubborn = "trap 'echo heard' INT TERM; echo up; while :; do sleep 0.05; done";
    Command deaf(place.folder(), launch(2, {"sh", "-c", stubborn}));
    REQUIRE(deaf.prints("up\nup\n"));
    deaf.signal(signal);
    REQUIRE(deaf.prints("heard\nheard\n"));
    insist(deaf, SIGTERM);
    CHECK(deaf.wait() > 128);
  }
}

TEST_CASE("whichever processes of a job a signal reaches, it is one request to save and end") {
  const Place place;
  std::vector<std::pair<int, std::vector<std::size_t>>> ways;
  std::vector<std::size_t> all(processes_of(2));
  std::iota(all.begin(), all.end(), 0);
  const std::vector<std::size_t> reversed(all.rbegin(), all.rend());
  for (const int signal : {SIGINT, SIGTERM})
    for (const auto& order : {all, reversed}) ways.emplace_back(signal, order);
  for (const std::size_t one : all) ways.emplace_back(SIGTERM, std::vector{one});
  ways.emplace_back(SIGTERM, std::vector<std::size_t>{0, 0, 0});  // as `timeout` does, to child and group
  for (const auto& [signal, whom] : ways) {
    Command command(place.folder(), launch(2, with({built::program}, endless)));
    REQUIRE(command.prints("step 1/"));
    const std::vector<pid_t> processes = family_of(command.process(), processes_of(2));
    REQUIRE(processes.size() == processes_of(2));
    for (const std::size_t i : whom) ::kill(processes[i], signal);
    CHECK(command.wait() == 0);
    INFO("signal " << signal << " to " << whom.size() << " from " << whom[0] << " on\n" << command.out());
    const std::string stopped = "stopped after step ";
    const std::size_t line = command.out().find(stopped);
    CHECK(line != std::string::npos);
    CHECK(command.out().find(stopped, line + 1) == std::string::npos);
    CHECK(command.err() == "");
    CHECK(tools::saved_steps(place.folder() / "run", posix_file_system()).back() > 0);
    fs::remove_all(place.folder() / "run");
  }
}

TEST_CASE("what a rank that ended well leaves behind does not hold up the launcher, and ends") {
  const Place place;
  const std::string own = "pid$OMPI_COMM_WORLD_RANK",
                    sleeper = "sh -c 'echo $$ >" + own + "; exec sleep 600'";
  for (const std::string how : {"", "setsid ", "trap '' TERM INT HUP; ", "setsid setsid "}) {
    INFO(how);
    const std::string waits = " & until [ -s " + own + " ]; do :; done; echo up";
    Command command(place.folder(), launch(2, {"sh", "-c", how + sleeper + waits}));
    CHECK(command.wait() == 0);
    CHECK(command.out() == "up\nup\n");
    CHECK(command.err() == "");
    for (const std::string rank : {"0", "1"}) {
      const pid_t left = std::stoi(posix_file_system().read(place.folder() / ("pid" + rank)));
      CHECK(::kill(left, 0) != 0);
      fs::remove(place.folder() / ("pid" + rank));
    }
  }
  // Its last words are heard.
  Command words(place.folder(),
                launch(2, {"sh", "-c", "(while kill -0 $$ 2>/dev/null; do :; done; echo last) & exit 0"}));
  CHECK(words.wait() == 0);
  CHECK(words.out() == "last\nlast\n");
}

TEST_CASE("what connects to mpirun and says nothing holds up the start for a time that is known") {
  const Place place;
  // What stands in the environment of a rank is where it has to connect to.
  const std::string silent =
      "exec 9<>/dev/tcp/127.0.0.1/$(env | sed -n 's/^PMIX_SERVER_URI.*tcp4:.*:\\([0-9]*\\)$/\\1/p' | head "
      "-1); "
      "exec \"$0\" \"$@\"";
  Command command(
      place.folder(),
      with({"launch", "-n", "2", "--connect-within", "2", "bash", "-c", silent, built::program}, endless));
  std::vector<Witness> witnesses;
  for (const pid_t process : family_of(command.process(), processes_of(2))) witnesses.emplace_back(process);
  CHECK(command.wait() == 1);
  INFO(command.err());
  CHECK(lines(command.err()) == 1);
  CHECK_THAT(command.err(), ContainsSubstring("mpirun has not connected the ranks in 2 s"));
  for (const Witness& witness : witnesses) CHECK(witness.ends());
}

TEST_CASE("a program may stand behind two dashes, and has its flags to itself") {
  const Place place;
  for (const Arguments& dashes : {Arguments{}, Arguments{"--"}})
    for (const Arguments& words :
         {Arguments{"a"}, Arguments{"--", "-n", "--help"}, Arguments{"-n", "3", "--"}}) {
      Command command(place.folder(),
                      launch(2, with(with(dashes, {"sh", "-c", "echo \"$# $*\"", "sh"}), words)));
      CHECK(command.wait() == 0);
      const std::string line = fmt::format("{} {}\n", words.size(), fmt::join(words, " "));
      CHECK(command.out() == line + line);
      CHECK(command.err() == "");
    }
  Command none(place.folder(), launch(2, {"--"}));
  CHECK(none.wait() == 1);
  CHECK_THAT(none.err(), ContainsSubstring("no program was named"));
}

TEST_CASE("a signal at any moment of the start ends the job") {
  const Place place;
  for (const int signal : {SIGINT, SIGTERM})
    for (std::size_t members = 2; members <= processes_of(2); ++members) {
      INFO("signal " << signal << " when there were " << members << " processes");
      Command command(place.folder(), launch(2, with({built::program}, endless)));
      const pid_t launcher = command.process();
      std::vector<Witness> witnesses;
      for (const pid_t process : family_of(launcher, members)) witnesses.emplace_back(process);
      command.signal(signal);
      const int status = command.wait();
      CHECK((status == 0 || status == 128 + signal));
      for (const Witness& witness : witnesses) CHECK(witness.ends());
      place.check_clean(launcher);
      fs::remove_all(place.folder() / "run");
    }
}

TEST_CASE("whichever process of a job is killed, the others end and nothing is left") {
  const Place place;
  const Arguments trains = with({built::program}, endless),
                  idles = {"sh", "-c", "echo step 1/; sleep 600; true"};
  // Rank 0 speaks for all that train; of the others each has to be past its word, which it could not say
  // later.
  for (const auto& [program, up] : {std::pair(trains, "step 1/"), std::pair(idles, "step 1/\nstep 1/\n")})
    for (std::size_t victim = 0; victim < 5; ++victim) {
      INFO(program[0] << ", process " << victim);
      std::vector<Witness> witnesses;
      Command command(place.folder(), launch(2, program));
      const pid_t launcher = command.process();
      REQUIRE(command.prints(up));
      // In order of generations: the fourth is the first rank's keeper, the last one a program.
      const std::vector<pid_t> all = family_of(launcher, processes_of(2));
      REQUIRE(all.size() >= processes_of(2));
      for (const pid_t process : all) witnesses.emplace_back(process);
      ::kill(victim < 4 ? all[victim] : all[5], SIGKILL);
      CHECK(command.wait() == 137);
      if (victim == 2)
        CHECK(command.err() == "sherd launch: mpirun ended by signal 9 (Killed), so its ranks are ended\n");
      if (victim != 0) CHECK(lines(command.err()) == 1);
      for (std::size_t i = 0; i < witnesses.size(); ++i) {
        INFO("of the family number " << i);
        CHECK(witnesses[i].ends());
      }
      if (victim != 1) place.check_clean(launcher);  // mpirun may still write what the launcher removed
      fs::remove_all(place.folder() / "tmp");
      fs::create_directory(place.folder() / "tmp");
      fs::remove_all(place.folder() / "run");
    }
}

TEST_CASE("a fault of a rank is one line, of one among several or of one alone") {
  const Place place;
  {
    INFO("a crash within OpenMPI");
    Command command(place.folder(), launch(2, with({built::program}, endless)));
    const pid_t launcher = command.process();
    REQUIRE(command.prints("step 1/"));
    const std::vector<pid_t> all = family_of(launcher, processes_of(2));
    REQUIRE(all.size() >= processes_of(2));
    ::kill(all[5], SIGSEGV);
    CHECK(command.wait() == 139);
    CHECK(command.err().ends_with(" ended by signal 11 (Segmentation fault)\n"));
    CHECK(std::ranges::count(command.err(), '\n') == 1);
  }
  for (const int ranks : {1, 2}) {
    INFO(ranks << " ranks that are asked for the impossible");
    Command command(place.folder(),
                    launch(ranks, {built::program, "train", "--data", "text", "--steps", "0"}));
    CHECK(command.wait() == 1);
    CHECK(command.err().starts_with("sherd: --steps 0: takes values from 1 to "));
    CHECK(std::ranges::count(command.err(), '\n') == 1);
  }
}

TEST_CASE("a launcher without streams of its own starts its ranks") {
  const Place place;
  const std::string done = (place.folder() / "done").string();
  for (const std::string streams : {">&-", "2>&-", "<&-", "<&- >&- 2>&-", ">/dev/full"}) {
    INFO(streams);
    const std::string command = fmt::format(
        "{} launch -n 2 sh -c 'echo out; echo err >&2; echo done >>{}' {}", built::program, done, streams);
    CHECK(std::system(("exec 2>/dev/null; " + command).c_str()) == 0);
    CHECK(posix_file_system().read(done) == "done\ndone\n");
    fs::remove(done);
  }
}

TEST_CASE("a keeper that never reports ends the job in one line") {
  const Place place;
  // An mpirun that starts all ranks but one, or none and waits.
  const std::string mpirun = (place.folder() / "mpirun").string();
  write_file(mpirun,
             "#!/bin/bash\nwhile [[ $1 != */sherd ]]; do shift; done\n"
             "for rank in $STARTED; do OMPI_COMM_WORLD_RANK=$rank \"$@\" & done\n"
             "trap 'exit 1' HUP\nexec 3<>fifo; read -u 3\n");
  fs::permissions(mpirun, fs::perms::owner_all);
  REQUIRE(::mkfifo((place.folder() / "fifo").c_str(), 0600) == 0);
  const std::string path = "PATH=" + place.folder().path().string() + ":" + std::getenv("PATH");
  for (const std::string started : {"0 1", "1 2", "0 2", ""}) {
    INFO("ranks " << started);
    Command command(place.folder(), launch(3, {"sleep", "600"}), {},
                    {"/usr/bin/env", path, "STARTED=" + started});
    const pid_t launcher = command.process();
    CHECK(command.wait() == 1);
    INFO(command.err());
    CHECK(lines(command.err()) == 1);
    CHECK_THAT(command.err(), ContainsSubstring("ulimit -u"));
    place.check_clean(launcher);
    // A signal is heard though there is no keeper to pass it on to.
    if (!started.empty()) continue;
    Command asked(place.folder(), launch(3, {"sleep", "600"}), {}, {"/usr/bin/env", path, "STARTED="});
    REQUIRE(family_of(asked.process(), 3).size() >= 3);
    asked.signal(SIGTERM);
    CHECK(asked.wait() == 128 + SIGTERM);
  }
}

TEST_CASE("events go into no file that is not regular, nor into the program") {
  const Place place;
  const fs::path fifo = place.folder() / "fifo", program = place.folder() / "program";
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  write_file(program, "#!/bin/sh\n");
  fs::permissions(program, fs::perms::owner_all);
  for (const std::string events : {"fifo", "/dev/full", "program", "tmp"}) {
    INFO(events);
    Command command(place.folder(), {"launch", "--events", events, "-n", "1", "./program"});
    CHECK(command.wait() == 1);
    CHECK(lines(command.err()) == 1);
    CHECK_THAT(command.err(), ContainsSubstring("--events: '" + events + "'"));
  }
  CHECK(posix_file_system().read(program) == "#!/bin/sh\n");
  CHECK(fs::is_fifo(fifo));
}

TEST_CASE("many ranks on few cores start, and one of them ends all") {
  const Place place;
  Command all(place.folder(), launch(64, {"echo", "here"}));
  CHECK(all.wait() == 0);
  CHECK(lines(all.out()) == 64);
  Command one(place.folder(),
              launch(64, {"sh", "-c", "[ $OMPI_COMM_WORLD_RANK = 63 ] && exit 5; exec sleep 600"}));
  CHECK(one.wait() == 5);
  CHECK(lines(one.err()) == 1);
}
