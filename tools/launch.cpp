#include "tools/launch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <system_error>

#include "collectives/launch_report.h"
#include "runtime/error.h"
#include "tools/launch_process.h"
#include "tools/output.h"
#include "tools/terminal.h"

namespace sherd::tools {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Path = std::filesystem::path;
using Kind = LaunchReport::Kind;

/// How long ranks may save when nobody is left to ask them a second time.
constexpr auto grace = 10s;
/// Between one way to end the job and the next, harder one: within two seconds all of it is gone.
constexpr auto step_time = 500ms;
/// A signal that follows another so soon is the same request: who signals a group and its leader, or every
/// process of a job, means it once.
constexpr auto once = 1s;
/// In which mpirun ends its ranks and itself.
constexpr auto mpirun_time = 2s;
/// Between two looks for what nobody tells.
constexpr auto look_time = 1s;

// ---- temporary folders ----

/// A folder of this launch's own, which goes with all that is in it.
class Folder {
 public:
  /// Empty when `parent` lets nobody make one.
  explicit Folder(const Path& parent)
      : path_((parent / fmt::format("sherd-launch-{}-XXXXXX", ::getpid())).string()) {
    if (::mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  ~Folder() { remove(); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  void remove() const {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }

 private:
  std::string path_;
};

/// TMPDIR, unless it is too long for a socket's name.
Path temporary_path() {
  std::error_code error;
  const Path path = std::filesystem::temp_directory_path(error);
  check<FileError>(!error, "launch: TMPDIR cannot be used ({}); unset it, or name a folder that is there",
                   error.message());
  return path.string().size() < 60 ? path : Path("/tmp");
}

struct Folders {
  Folder files{temporary_path()}, memory{"/dev/shm"};
  Folders() {
    check<FileError>(!files.path().empty(), "launch: no folder can be made in {} ({}); set TMPDIR to another",
                     temporary_path().string(), std::generic_category().message(errno));
  }
  void remove() const {
    files.remove();
    memory.remove();
  }
  std::string socket() const { return files.path() + "/reports"; }
  std::string mpi_output() const { return files.path() + "/mpi-output"; }
};

// ---- mpirun ----

/// The signal by which mpirun ends its ranks and itself; it hears no others.
constexpr int end_mpirun = SIGHUP;

/// libevent's epoll, which mpirun uses, complains on the user's terminal of files that were closed in the
/// wrong order, and may hear nothing more; its poll does not.
void keep_from_epoll() { ::setenv(no_epoll_variable, no_epoll_value, 0); }

/// One on which nobody listens, below those that the system gives to connections.
std::string free_port() {
  std::random_device random;
  for (int tries = 0; tries < 100; ++tries) {
    const auto port = static_cast<std::uint16_t>(10000 + random() % 20000);
    const Handle socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    own.sin_port = htons(port);
    if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) == 0)
      return std::to_string(port);
  }
  return {};
}

/// Where ranks of one machine meet that connect by themselves.
void choose_meeting_place() {
  const auto set = [](const char* variable, const std::string& value) {
    if (!value.empty()) ::setenv(variable, value.c_str(), 0);
  };
  std::random_device random;
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", free_port());
  set("SHERD_JOB_TOKEN", fmt::format("{:08x}{:08x}", random(), random()));
}

/// On one machine nobody else has to connect, and what is left of the job lies in folders that go with it.
void keep_to_this_machine(const Folders& folders) {
  const auto set = [](const char* variable, const std::string& value) {
    if (!value.empty()) ::setenv(variable, value.c_str(), 0);
  };
  set("OMPI_MCA_oob_tcp_if_include", "lo");
  set("OMPI_MCA_btl_tcp_if_include", "lo");
  set("OMPI_MCA_btl_vader_backing_directory", folders.memory.path());
  const auto given = [](const char* variable) { return std::getenv(variable) != nullptr; };
  if (!given("OMPI_MCA_orte_local_tmpdir_base") && !given("OMPI_MCA_orte_remote_tmpdir_base"))
    set("OMPI_MCA_orte_tmpdir_base", folders.files.path());
  set("OMPI_MCA_opal_stacktrace_output", "none");  // of a rank that crashes: how it ended is said in one line
}

/// The first paragraph of what OpenMPI said, in one line.
std::string first_words(const std::string& file) {
  std::ifstream in(file);
  std::string words;
  for (std::string line; std::getline(in, line);) {
    const bool empty = line.find_first_not_of(" -") == std::string::npos;
    if (empty && !words.empty()) break;
    if (!empty) words += (words.empty() ? "" : " ") + line;
  }
  return words;
}

// ---- events ----

/// The words that may be files, or what stands behind a '=' in them: of a folder, as `/`, a program does not
/// read all.
std::vector<std::string> files_of(std::vector<std::string> words) {
  for (std::size_t i = 0, n = words.size(); i < n; ++i)
    if (const std::size_t at = words[i].find('='); at != std::string::npos)
      words.push_back(words[i].substr(at + 1));
  std::erase_if(words, [](const std::string& word) {
    std::error_code none;
    return std::filesystem::is_directory(word, none);
  });
  return words;
}

/// What happened when, for whoever asked for it.
class Events {
 public:
  /// FileError where the file may not be replaced.
  explicit Events(const LaunchOptions& options) {
    if (!options.events.empty())
      out_ = begin_output({"--events", options.events, files_of(options.command)}, posix_file_system());
  }
  void note(std::string_view what) {
    if (!out_) return;
    const std::chrono::duration<double> seconds = Clock::now() - begin_;
    try {
      out_->write(std::string_view(fmt::format("{:.3f} {}\n", seconds.count(), what)));
    } catch (const FileError& error) {  // the job matters more
      out_.reset();
      say(fmt::format("--events: {}", error.what()));
    }
  }

 private:
  Clock::time_point begin_ = Clock::now();
  std::unique_ptr<OutputFile> out_;
};

// ---- ranks ----

/// A process that may be anybody's child; its number is nobody else's as long as this lives.
class OtherProcess {
 public:
  OtherProcess() = default;
  explicit OtherProcess(pid_t process) : handle_(static_cast<int>(::syscall(SYS_pidfd_open, process, 0))) {}
  bool known() const { return handle_.open(); }
  /// Becomes readable when it ends.
  int descriptor() const { return handle_.get(); }
  void signal(int number) const {
    if (known()) ::syscall(SYS_pidfd_send_signal, handle_.get(), number, nullptr, 0);
  }

 private:
  Handle handle_;
};

struct Rank {
  OtherProcess keeper;
  pid_t keeper_id = 0;
  pid_t program = 0;
  bool joining = false, joined = false;
  bool spoke = false;           ///< it said why it ends
  std::optional<int> status{};  ///< as from `waitpid`, once it has ended
  int unstartable = 0;          ///< errno

  bool failed() const { return unstartable != 0 || (status && *status != 0); }
  bool waits() const { return joining && !joined && !status; }
};

Handle listen_at(const std::string& path) {
  sockaddr_un own{};
  own.sun_family = AF_UNIX;
  path.copy(own.sun_path, sizeof own.sun_path - 1);
  Handle socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  check<StateError>(
      socket.open() && ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) == 0,
      "launch: no socket can be made at {} ({})", path, std::generic_category().message(errno));
  return socket;
}

/// Starts the ranks and sees them to their end.
class Supervisor {
 public:
  Supervisor(const LaunchOptions& options, const Folders& folders, Events& events, pid_t launcher)
      : options_(options),
        folders_(folders),
        launcher_(launcher),
        events_(events),
        ranks_(static_cast<std::size_t>(options.ranks)),
        socket_(listen_at(folders.socket())),
        signal_source_(::signalfd(-1, &signals_.held(), SFD_CLOEXEC | SFD_NONBLOCK)) {}

  int run(std::vector<std::string> command, const sigset_t& mask) {
    if (!start(command, mask)) return 1;
    while (!mpirun_status_ || (ranks_are_left() && steps_ <= last_step)) {
      if (mpirun_status_) end_job();  // it went before its ranks
      wait_for_news();
      hear_signals();
      hear_reports();
      look_for_lost_keepers();
      look_for_missing_keepers();
      look_at_mpirun();
      judge();
      judge_end_of_mpirun();
      if (next_step_ && Clock::now() >= *next_step_) end_harder();
    }
    hear_reports();
    if (!told_ && !others_fault_.empty()) speak(others_fault_);
    events_.note("all is over");
    return verdict();
  }

 private:
  bool start(std::vector<std::string>& command, const sigset_t& mask) {
    const Handle output = output_for_mpi(folders_.mpi_output().c_str());
    if (options_.hosts.empty()) keep_to_this_machine(folders_), choose_meeting_place();
    keep_from_epoll();
    std::vector<char*> words;
    for (std::string& word : command) words.push_back(word.data());
    words.push_back(nullptr);
    // Asked to stop, mpirun would give the ranks a second, which is too short to save.
    sigset_t held = mask;
    for (const int signal : {SIGINT, SIGTERM}) ::sigaddset(&held, signal);
    int failure = 0;
    mpirun_ = start_process(words, {.at_parents_end = end_mpirun, .mask = &held}, failure);
    if (failure != 0)
      tell(cannot_start(command[0], failure) +
           "; install OpenMPI (on Debian and Ubuntu openmpi-bin), or run the program alone: its ranks are "
           "threads then");
    return failure == 0;
  }

  bool ranks_are_left() const {
    return std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.keeper.known() && !rank.status; });
  }

  enum class Cause { own, mpirun_or_job };

  // ---- what happens ----

  void wait_for_news() const {
    std::vector<pollfd> sources = {{socket_.get(), POLLIN, 0}, {signal_source_.get(), POLLIN, 0}};
    for (const Rank& rank : ranks_)
      if (rank.keeper.known() && !rank.status) sources.push_back({rank.keeper.descriptor(), POLLIN, 0});
    Clock::duration time = look_time;
    if (next_step_) time = std::clamp<Clock::duration>(*next_step_ - Clock::now(), 0s, look_time);
    const auto timeout = std::chrono::ceil<std::chrono::milliseconds>(time);
    ::poll(sources.data(), sources.size(), static_cast<int>(timeout.count()));
  }

  void hear_signals() {
    signalfd_siginfo info{};
    while (::read(signal_source_.get(), &info, sizeof info) == sizeof info) {
      const int signal = static_cast<int>(info.ssi_signo);
      if (signal == SIGCHLD) {
        hear_mpirun();
      } else if (signal == parent_died) {
        ask_to_stop(SIGTERM);
        next_step_ = Clock::now() + grace;
      } else {
        // What tells every process of the job to stop tells this one too; only the launcher knows of a second
        // time.
        const bool passed_on = static_cast<pid_t>(info.ssi_pid) == launcher_;
        if (passed_on && std::exchange(launcher_asked_, true))
          end_job();
        else
          ask_to_stop(signal);
      }
    }
  }

  /// Its ranks follow it, and may be heard while it is still ending: that is no news of theirs.
  void hear_mpirun() {
    int status = 0;
    if (mpirun_status_ || ::waitpid(mpirun_, &status, is_ending(mpirun_) ? 0 : WNOHANG) != mpirun_) return;
    mpirun_status_ = status;
    events_.note("mpirun " + how_it_ended(status));
    if (!WIFSIGNALED(status)) return;
    hear_reports();  // it may have crashed as ranks ended, who said why
    if (asked_ == 0 && !ending_ && !told_) {
      tell("mpirun " + how_it_ended(status) + ", so its ranks are ended");
      first_failure_ = exit_status(status);
    }
    end_job();
  }

  void hear_reports() {
    LaunchReport report;
    std::string bytes(sizeof report + most_report_text, '\0');
    for (ssize_t got = 0; (got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0)) >=
                          static_cast<ssize_t>(sizeof report);) {
      std::memcpy(&report, bytes.data(), sizeof report);
      if (report.rank >= 0 && report.rank < options_.ranks)
        note(report, ranks_[static_cast<std::size_t>(report.rank)],
             std::string_view(bytes).substr(sizeof report, static_cast<std::size_t>(got) - sizeof report));
    }
  }

  void note(const LaunchReport& report, Rank& rank, std::string_view text) {
    switch (report.kind) {
      case Kind::born:
        rank.program = report.program;
        break;
      case Kind::started:
        if (report.program != 0) events_.note(fmt::format("rank {} started", report.rank));
        if (rank.keeper.known()) break;
        rank.keeper = OtherProcess(report.value);
        rank.keeper_id = report.value;
        if (asked_ != 0) rank.keeper.signal(asked_);
        if (ending_) rank.keeper.signal(SIGQUIT);
        break;
      case Kind::joining:
        rank.joining = true;
        events_.note(fmt::format("rank {} waits for all others", report.rank));
        break;
      case Kind::joined:
        rank.joined = true;
        events_.note(fmt::format("rank {} has met all others", report.rank));
        break;
      case Kind::unstartable:
        rank.unstartable = report.value;
        end_of(rank, 127 << 8);
        break;
      case Kind::ended:
        end_of(rank, report.value);
        break;
      case Kind::followed:
        end_of(rank, report.value, Cause::mpirun_or_job);
        break;
      case Kind::last_words:
        rank.spoke = true;
        hear_words(rank, report.value != 0, std::string(text));
        break;
    }
  }

  // ---- one fault, one line ----

  /// Whose fault it is says so at once, of ranks that say the same the first. Who tells of another's fault is
  /// heard at the end, when nobody else has said anything: that one may have told everybody but this process.
  void hear_words(const Rank& rank, bool own, const std::string& text) {
    const std::string line = own && rank.joined ? fmt::format("rank {}: {}", number_of(rank), text) : text;
    if (!own)
      others_fault_ = others_fault_.empty() ? line : others_fault_;
    else if (words_.insert(text).second)
      speak(line);
  }
  void speak(const std::string& line) {
    told_ = true;
    say_as_program(line);
  }
  void tell(std::string_view text) {
    told_ = true;
    say(text);
  }
  void tell(int rank, std::string_view text) { tell(fmt::format("rank {} {}", rank, text)); }

  /// A keeper that is gone without a word took its program with it, but not what that had started.
  void look_for_lost_keepers() {
    for (Rank& rank : ranks_) {
      pollfd keeper{rank.keeper.descriptor(), POLLIN, 0};
      if (!rank.keeper.known() || rank.status || ::poll(&keeper, 1, 0) != 1) continue;
      hear_reports();
      if (rank.status) continue;
      if (rank.program > 0) ::kill(-rank.program, SIGKILL);
      end_of(rank, SIGKILL);
    }
  }

  /// A keeper that ended before it was heard, or was never started, is nobody's news: the others would wait
  /// for its rank for ever. It is missing once mpirun has no child that may become it, and sleeps.
  void look_for_missing_keepers() {
    if (!options_.hosts.empty() || mpirun_status_ || ending_) return;
    const auto unheard = [](const Rank& rank) { return !rank.keeper.known() && !rank.status; };
    if (std::ranges::none_of(ranks_, unheard)) return missing_since_.reset();
    const Activity now = activity_of(mpirun_);
    const auto lives = [&](pid_t process) {
      return std::ranges::find(now.children, process) != now.children.end();
    };
    const auto is_keeper = [&](pid_t process) {
      return std::ranges::any_of(ranks_, [&](const Rank& rank) { return rank.keeper_id == process; });
    };
    const auto missing =
        std::ranges::find_if(ranks_, [&](const Rank& r) { return unheard(r) && !lives(r.keeper_id); });
    // Before the first rank it may think for long; afterwards it is at work while ranks print.
    const bool some = std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.keeper_id != 0; });
    const bool works = !now.sleeps || (!some && now.ticks != std::exchange(ticks_, now.ticks));
    if (missing == ranks_.end() || works || !std::ranges::all_of(now.children, is_keeper))
      return missing_since_.reset();
    if (!missing_since_) missing_since_ = Clock::now();
    if (Clock::now() - *missing_since_ < (some ? Clock::duration(look_time) : Clock::duration(grace))) return;
    hear_reports();
    if (!unheard(*missing)) return;
    constexpr std::string_view way_out =
        "look at --mpirun-arg and at the limits of processes (ulimit -u) and open files (ulimit -n)";
    if (asked_ == 0)
      tell(some
               ? fmt::format(
                     "rank {} never reported, its process ended before it could start the program or was not "
                     "started, so the others are ended too; if nobody killed it {}",
                     number_of(*missing), way_out)
               : fmt::format("mpirun starts no rank and waits, so it is ended; {}", way_out));
    if (first_failure_ == 0) first_failure_ = 1;
    end_job();
  }

  /// A signal to mpirun alone is meant for the job.
  void look_at_mpirun() {
    for (const int signal : {SIGINT, SIGTERM})
      if (asked_ == 0 && !mpirun_status_ && is_pending(mpirun_, signal)) ask_to_stop(signal);
  }

  void end_of(Rank& rank, int status, Cause cause = Cause::own) {
    if (rank.status) return;
    rank.status = status;
    events_.note(fmt::format("rank {} {}", number_of(rank), how_it_ended(status)));
    if (!rank.failed()) return;
    hear_mpirun();
    if (cause != Cause::own) return;  // what ended mpirun or the job is the news
    // Who was killed is why the others failed, though they may be heard first.
    const bool killed = WIFSIGNALED(status) && !ending_;
    if (first_failure_ == 0 || (killed && first_failure_ < 128)) first_failure_ = exit_status(status);
    // When the job has to end every rank does, and of a signal that was asked for nobody needs to be told. A
    // status that follows another's may follow from it.
    const bool expected = ending_ || (asked_ != 0 && exit_status(status) == 128 + asked_);
    const bool is_news = killed || (!rank.spoke && !told_);
    if (rank.joined && !expected && is_news) tell(number_of(rank), how_it_ended(status));
  }

  // ---- what follows ----

  int number_of(const Rank& rank) const { return static_cast<int>(&rank - ranks_.data()); }

  /// Ranks that have joined the others hear of each other's end. Those that wait for one that never comes do
  /// not: the job has to end.
  void judge() {
    if (ending_) return;
    const auto waiting = std::ranges::find_if(ranks_, &Rank::waits);
    for (const Rank& rank : ranks_) {
      if (!rank.status || rank.joined) continue;
      if (!rank.failed() && waiting == ranks_.end()) continue;
      if (rank.unstartable != 0)
        tell(cannot_start(options_.command[0], rank.unstartable));
      else if (asked_ == 0 && !rank.spoke)
        tell(number_of(rank),
             how_it_ended(*rank.status) +
                 (ranks_.size() > 1 ? " before all ranks had met, so the others are ended too" : ""));
      if (first_failure_ == 0) first_failure_ = 1;
      return end_job();
    }
    judge_mpirun();
  }

  /// mpirun reads what connects to its port one after the other, and waits for each: one that is silent holds
  /// up all.
  void judge_mpirun() {
    if (!options_.hosts.empty() || !std::ranges::all_of(ranks_, &Rank::waits)) return waiting_since_.reset();
    if (!waiting_since_) waiting_since_ = Clock::now();
    if (Clock::now() - *waiting_since_ < std::chrono::seconds(options_.connect_within)) return;
    tell(fmt::format(
        "mpirun has not connected the ranks in {} s, though all wait for it, so they are ended; "
        "what connects to its port and says nothing holds it up (--connect-within takes more seconds)",
        options_.connect_within));
    if (first_failure_ == 0) first_failure_ = 1;
    end_job();
  }

  /// When all ranks have ended mpirun passes on what they wrote and ends. One that does not, though who reads
  /// takes all, has lost the news of their end.
  void judge_end_of_mpirun() {
    const bool over = !mpirun_status_ && !ending_ &&
                      std::ranges::all_of(ranks_, [](const Rank& rank) { return rank.status.has_value(); });
    if (!over || !output_flows()) return all_over_since_.reset();
    if (!all_over_since_) all_over_since_ = Clock::now();
    if (Clock::now() - *all_over_since_ < grace) return;
    events_.note("mpirun does not end by itself");
    end_job();
  }
  static bool output_flows() {
    pollfd streams[] = {{STDOUT_FILENO, POLLOUT, 0}, {STDERR_FILENO, POLLOUT, 0}};
    return ::poll(streams, std::size(streams), 0) == std::ssize(streams);
  }

  void tell_keepers(int signal) const {
    for (const Rank& rank : ranks_)
      if (!rank.status) rank.keeper.signal(signal);
  }

  void ask_to_stop(int signal) {
    if (asked_ != 0) return;
    asked_ = signal == SIGINT ? SIGINT : SIGTERM;
    events_.note("the ranks are asked to stop");
    tell_keepers(asked_);
    if (options_.hosts.empty() &&
        std::ranges::none_of(ranks_, [](const Rank& rank) { return rank.keeper_id != 0; }))
      end_job();  // nobody is there to hear it
    if (!options_.hosts.empty())
      ::kill(mpirun_, end_mpirun);  // whose ranks elsewhere have keepers of their own
  }

  void end_job() {
    if (ending_) return;
    next_step_ = Clock::now();
    end_harder();
  }

  static constexpr int last_step = 2;
  void end_harder() {
    ending_ = true;
    if (steps_ == 0) tell_keepers(SIGQUIT);
    if (steps_ == 1) tell_keepers(SIGKILL);
    if (steps_ >= 1 && !mpirun_status_) ::kill(mpirun_, steps_ < last_step ? end_mpirun : SIGKILL);
    events_.note(fmt::format("the job is ended, step {} of {}", ++steps_, last_step + 1));
    *next_step_ += step_time;  // however late this one was
  }

  int verdict() const {
    const bool all_well =
        std::ranges::all_of(ranks_, [](const Rank& rank) { return rank.status && *rank.status == 0; });
    if (all_well) return 0;
    if (asked_ != 0) return 128 + asked_;
    if (first_failure_ != 0) return first_failure_;
    int own = exit_status(*mpirun_status_);
    if (own == 0 && std::ranges::any_of(ranks_, &Rank::failed)) own = 1;  // they followed it
    if (own == 0 || told_) return own;
    const std::string words = first_words(folders_.mpi_output());
    say(fmt::format("mpirun {}{}{}", how_it_ended(*mpirun_status_), words.empty() ? "" : ": ", words));
    return own;
  }

  const LaunchOptions& options_;
  const Folders& folders_;
  pid_t launcher_;
  HeldSignals signals_{SIGINT, SIGTERM, SIGHUP, SIGCHLD, parent_died};
  Events& events_;
  std::vector<Rank> ranks_;
  Handle socket_, signal_source_;
  pid_t mpirun_ = 0;
  std::optional<int> mpirun_status_;
  std::optional<Clock::time_point> missing_since_;   ///< a keeper, as far as mpirun can tell
  std::uint64_t ticks_ = 0;                          ///< of mpirun, at the last look
  std::optional<Clock::time_point> waiting_since_;   ///< all ranks, for mpirun to connect them
  std::optional<Clock::time_point> all_over_since_;  ///< all ranks have ended, and mpirun has not
  std::set<std::string> words_;                      ///< that ranks said at their end
  std::string others_fault_;  ///< what the first rank said that ended by another's fault
  bool told_ = false;         ///< something was said of why the job ends
  bool launcher_asked_ = false;
  int asked_ = 0;          ///< the signal by which ranks were asked to stop
  int first_failure_ = 0;  ///< exit status
  bool ending_ = false;
  int steps_ = 0;
  std::optional<Clock::time_point> next_step_;
};

// ---- the launcher ----

/// Whoever opens something must not find it under the number of a stream that was closed.
void open_standard_streams() {
  for (int fd = 0; fd <= STDERR_FILENO;) {
    fd = ::open("/dev/null", O_RDWR);
    if (fd < 0 || fd > STDERR_FILENO) {
      ::close(fd);
      return;
    }
  }
}

bool is_ignored(int signal) {
  struct sigaction now{};
  ::sigaction(signal, nullptr, &now);
  return now.sa_handler == SIG_IGN;
}

std::string own_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

/// In a process of its own, so that neither its death nor the launcher's leaves anything behind.
[[noreturn]] void supervise(const LaunchOptions& options, const Folders& folders, Events& events,
                            pid_t launcher, std::vector<std::string> command, const sigset_t& mask) {
  int status = 1;
  try {
    ::setpgid(0, 0);  // Ctrl-C is the launcher's to hear
    const HeldSignals held{parent_died};
    const bool has_parent = end_with_parent(parent_died, launcher);
    Supervisor supervisor(options, folders, events, launcher);
    if (has_parent) status = supervisor.run(std::move(command), mask);
  } catch (const std::exception& error) {
    say(error.what());
  }
  folders.remove();  // the launcher does so too, unless it was killed
  ::_exit(status);
}

/// Its exit status. Passes on what asks it to end.
int see_through(pid_t supervisor, const HeldSignals& signals) {
  std::optional<Clock::time_point> passed_on;
  for (int status = 0;;) {
    if (::waitpid(supervisor, &status, WNOHANG) == supervisor) {
      if (WIFSIGNALED(status)) {
        say(fmt::format("its supervisor {}; the ranks are ended", how_it_ended(status)));
        // By mpirun, which heard of it too; what that leaves, it leaves to this process.
        end_children(mpirun_time, [&] {
          signals.next(100ms);
          return false;
        });
      }
      return exit_status(status);
    }
    const int signal = signals.next();
    if (signal == SIGCHLD || (passed_on && Clock::now() - *passed_on < once)) continue;
    passed_on = Clock::now();
    ::kill(supervisor, signal);
  }
}

}  // namespace

std::vector<std::string> launch_command(const LaunchOptions& o, bool root, const std::string& sherd,
                                        const std::string& socket) {
  check<ValueError>(!o.command.empty(), "launch: no program was named; sherd launch -n {} PROGRAM [ARGS...]",
                    o.ranks);
  check<ValueError>(o.ranks >= 1 && o.ranks <= 4096, "launch: -n is {}; 1 to 4096 ranks can be started",
                    o.ranks);
  check<ValueError>(o.connect_within >= 1 && o.connect_within <= 1'000'000,
                    "launch: --connect-within is {}; takes 1 to 1000000 seconds", o.connect_within);
  std::vector<std::string> command = {"mpirun",    "-n",   std::to_string(o.ranks), "--enable-recovery",
                                      "--bind-to", "none", "--oversubscribe"};
  if (root) command.emplace_back("--allow-run-as-root");
  if (!o.hosts.empty()) command.insert(command.end(), {"--host", o.hosts});
  command.insert(command.end(), o.mpirun_args.begin(), o.mpirun_args.end());
  command.insert(command.end(), {sherd, keeper_command, socket});
  command.insert(command.end(), o.command.begin(), o.command.end());
  return command;
}

int launch(const LaunchOptions& options) {
  open_standard_streams();
  ::signal(SIGCHLD, SIG_DFL);  // who ignores it never hears how a child ended
  announce_terminal(STDOUT_FILENO);
  const Folders folders;
  std::vector<std::string> command =
      launch_command(options, ::geteuid() == 0, own_program(), folders.socket());
  Events events(options);
  // Under nohup a terminal that goes is no reason to stop.
  const HeldSignals signals{SIGINT, SIGTERM, SIGCHLD, is_ignored(SIGHUP) ? SIGCHLD : SIGHUP};
  adopt_orphans();
  const pid_t launcher = ::getpid(), supervisor = ::fork();
  if (supervisor == 0) supervise(options, folders, events, launcher, std::move(command), signals.before());
  check<StateError>(supervisor > 0, "launch: no process can be started ({})",
                    std::generic_category().message(errno));
  return see_through(supervisor, signals);
}

}  // namespace sherd::tools
