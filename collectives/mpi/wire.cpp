#include "collectives/mpi/wire.h"

#include <mpi.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "collectives/mpi/codes.h"
#include "runtime/error.h"

namespace sherd::mpi {
namespace {

using processes::Failure, processes::Frame, processes::frame_bytes;

constexpr int frame_tag = 0, first_tag = 1;
constexpr std::int64_t longest_message = 1 << 30;  // MPI counts in int
constexpr std::int64_t packets_up_to = 32 << 10;   // in packets that MPI sends at once, without asking

/// The frames that MPI may write, until their requests are cancelled: as long as the process, if MPI does not
/// end.
struct Incoming {
  std::array<Frame, 16> frames;
  std::array<MPI_Request, 16> requests;
};
/// Comes among the frames, from which its size tells it: messages of `tag` are not needed any more, and what
/// waits to be received of them is to be received and dropped.
struct Withdrawal {
  std::int32_t from, tag;
  std::int32_t more;  ///< withdrawals of which something is under way; what is not has come before this
};
static_assert(sizeof(Withdrawal) < sizeof(processes::Header));

/// Leaves it to MPI, which may use it while the process ends.
struct LeaveToMpi {
  void operator()([[maybe_unused]] Incoming* incoming) const noexcept {
#if defined(__SANITIZE_ADDRESS__)
    __lsan_ignore_object(incoming);
#endif
  }
};

class MpiWire final : public processes::Wire {
 public:
  explicit MpiWire(const Launch& launch) {
    int finalized = 0;
    check_code(MPI_Finalized(&finalized), "MPI_Finalized");
    check<StateError>(
        finalized == 0,
        "launch: MPI has ended in this process and starts only once; run all bodies on one thread");
    start_mpi();
    meet(launch);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::int32_t last_tag() const override { return last_tag_ - first_tag; }

  void all_gather(const void* own, void* all, std::size_t bytes) override {
    const int count = static_cast<int>(bytes);
    check_code(MPI_Allgather(own, count, MPI_BYTE, all, count, MPI_BYTE, comm_), "MPI_Allgather");
  }
  /// Whatever connections MPI has, the watch reports what happens to a peer.
  Failure open(std::function<void(int)>) override {
    Failure failed;
    for (std::size_t slot = 0; slot < incoming_->frames.size() && failed.empty(); ++slot) {
      incoming_->frames[slot] = Frame::make();
      failed = receive_into(slot);
    }
    return failed;
  }

  Failure send(int to, const Frame& frame, Ticket& ticket) override {
    return start(ticket, "MPI_Isend", [&](MPI_Request* request) {
      return MPI_Isend(frame.bytes.get(), static_cast<int>(frame.size()), MPI_BYTE, to, frame_tag, comm_,
                       request);
    });
  }
  /// MPI matches receives in the order in which they were posted.
  Failure take(Frame& frame, bool& came) override {
    if (!withdrawals_.empty() || !sent_withdrawals_.empty() || !dropped_.empty()) drop_withdrawn();
    int done = 0, bytes = 0;
    MPI_Status status;
    const int code = MPI_Test(&incoming_->requests[next_], &done, &status);
    if (!succeeded(code)) return failure("MPI_Test", code);
    if (done == 0) return {};
    if (succeeded(MPI_Get_count(&status, MPI_BYTE, &bytes)) && bytes == sizeof(Withdrawal)) {
      hear(incoming_->frames[next_]);
    } else {
      came = true;
      std::swap(frame, incoming_->frames[next_]);
    }
    return receive_into(std::exchange(next_, (next_ + 1) % incoming_->frames.size()));
  }

  std::int64_t message_bytes(std::int64_t bytes) const override {
    return bytes <= packets_up_to ? static_cast<std::int64_t>(frame_bytes) : longest_message;
  }
  Failure send(int to, int tag, const std::byte* data, std::int64_t bytes, Ticket& ticket) override {
    return start(ticket, "MPI_Isend", [&](MPI_Request* request) {
      return MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, first_tag + tag, comm_, request);
    });
  }
  Failure receive(int from, int tag, std::byte* data, std::int64_t bytes, Ticket& ticket) override {
    if (withdrawals_.contains({from, tag})) {  // its message is dropped, and the group's fault on its way
      ticket = never;
      return {};
    }
    return start(ticket, "MPI_Irecv", [&](MPI_Request* request) {
      return MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, first_tag + tag, comm_, request);
    });
  }
  Failure test(Ticket& ticket, bool& over) override {
    over = ticket == no_more;
    if (ticket == never || over) return {};
    const Ticket was = ticket;
    MPI_Request request = request_of(ticket);
    int done = 0;
    const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (!succeeded(code)) return failure("MPI_Test", code);
    ticket = ticket_of(request);
    over = done != 0;
    if (over && !withdrawn_.empty()) note_over(was);
    return {};
  }
  Failure cancel(Ticket& ticket) override {
    if (ticket == never || ticket == no_more) {
      ticket = no_more;
      return {};
    }
    MPI_Request request = request_of(ticket);
    const int code = MPI_Cancel(&request);
    return succeeded(code) ? Failure() : failure("MPI_Cancel", code);
  }

  /// MPI takes back no send: the receiver has to receive it, also what MPI has sent without being asked,
  /// which is over here.
  void withdraw(int to, int tag, std::span<const Ticket> sent) override {
    tell(to, {rank_, tag, sent.empty() ? 0 : 1});
    if (!sent.empty()) withdrawn_.push_back({to, tag, {sent.begin(), sent.end()}});
  }
  void decline(int, int) override {}

  bool end() override {
    for (MPI_Request& request : incoming_->requests)
      if (!succeeded(MPI_Cancel(&request)) || !succeeded(MPI_Wait(&request, MPI_STATUS_IGNORE))) return false;
    if (!succeeded(MPI_Comm_free(&comm_)) || !owns_mpi_ || !succeeded(MPI_Finalize())) return false;
    std::unique_ptr<Incoming>(incoming_.release()).reset();
    return true;
  }

 private:
  static constexpr Ticket never = ~Ticket{0};        ///< a receive that waits for its end
  static constexpr Ticket no_more = ~Ticket{0} - 1;  ///< and one that has ended
  static_assert(sizeof(MPI_Request) <= sizeof(Ticket) && std::is_trivially_copyable_v<MPI_Request>);
  static MPI_Request request_of(Ticket ticket) {
    MPI_Request request;
    std::memcpy(&request, &ticket, sizeof request);
    return request;
  }
  static Ticket ticket_of(MPI_Request request) {
    Ticket ticket = 0;
    std::memcpy(&ticket, &request, sizeof request);
    return ticket;
  }
  template <class Call>
  static Failure start(Ticket& ticket, std::string_view function, const Call& call) {
    MPI_Request request;
    const int code = call(&request);
    if (!succeeded(code)) return failure(function, code);
    ticket = ticket_of(request);
    return {};
  }

  /// Sends of one tag that were withdrawn and are not over.
  struct Withdrawn {
    int to, tag;
    std::vector<Ticket> tickets;
  };
  struct Sent {
    Withdrawal withdrawal;
    MPI_Request request;
  };
  /// A message that is received to be dropped.
  struct Dropped {
    std::unique_ptr<std::byte[]> bytes;
    MPI_Request request;
  };
  void tell(int to, const Withdrawal& withdrawal) {
    Sent& sent = sent_withdrawals_.emplace_back(withdrawal);
    if (!succeeded(MPI_Isend(&sent.withdrawal, sizeof sent.withdrawal, MPI_BYTE, to, frame_tag, comm_,
                             &sent.request)))
      sent_withdrawals_.pop_back();  // what was sent stays under way
  }
  void note_over(Ticket ticket) {
    std::erase_if(withdrawn_, [&](Withdrawn& w) {
      if (std::erase(w.tickets, ticket) == 0 || !w.tickets.empty()) return false;
      tell(w.to, {rank_, w.tag, -1});
      return true;
    });
  }
  void hear(const Frame& frame) {
    Withdrawal said;
    std::memcpy(&said, frame.bytes.get(), sizeof said);
    while (drop(said.from, said.tag)) {
    }
    const auto found = withdrawals_.try_emplace({said.from, said.tag}, 0).first;
    if ((found->second += said.more) == 0) withdrawals_.erase(found);
  }
  /// Begins to receive a message, if one has come.
  bool drop(int from, int tag) {
    int there = 0, bytes = 0;
    MPI_Status status;
    if (!succeeded(MPI_Iprobe(from, first_tag + tag, comm_, &there, &status)) || there == 0 ||
        !succeeded(MPI_Get_count(&status, MPI_BYTE, &bytes)))
      return false;
    Dropped drop{std::unique_ptr<std::byte[]>(new (std::nothrow) std::byte[static_cast<std::size_t>(bytes)]),
                 MPI_REQUEST_NULL};
    if (!drop.bytes ||
        !succeeded(MPI_Irecv(drop.bytes.get(), bytes, MPI_BYTE, from, first_tag + tag, comm_, &drop.request)))
      return false;
    dropped_.push_back(std::move(drop));
    return true;
  }
  /// Begins to receive what was withdrawn and has come, and forgets what is over.
  void drop_withdrawn() {
    const auto over = [](auto& part) {
      int done = 0;
      return !succeeded(MPI_Test(&part.request, &done, MPI_STATUS_IGNORE)) || done != 0;
    };
    while (!sent_withdrawals_.empty() && over(sent_withdrawals_.front())) sent_withdrawals_.pop_front();
    std::erase_if(dropped_, over);
    for (const auto& [place, count] : withdrawals_) drop(place.first, place.second);
  }
  Failure receive_into(std::size_t slot) {
    const int code = MPI_Irecv(incoming_->frames[slot].bytes.get(), frame_bytes, MPI_BYTE, MPI_ANY_SOURCE,
                               frame_tag, comm_, &incoming_->requests[slot]);
    return succeeded(code) ? Failure() : failure("MPI_Irecv", code);
  }

  /// Starts MPI unless the program has, and checks that it allows what is done here.
  void start_mpi() {
    int initialized = 0, level = MPI_THREAD_SINGLE;
    check_code(MPI_Initialized(&initialized), "MPI_Initialized");
    if (initialized != 0) {
      check_code(MPI_Query_thread(&level), "MPI_Query_thread");
      return check_level(level);
    }
    ::setenv("OMPI_MCA_mpi_yield_when_idle", "0",
             0);  // else OpenMPI yields in every look; `Patience` decides when
    check_code(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    owns_mpi_ = true;
    check_level(level);
    check_code(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }

  /// The watch is a thread beside the one that calls MPI; who calls MPI on another thread than the one that
  /// initialised it needs one level more.
  static void check_level(int level) {
    int is_main = 0;
    check_code(MPI_Is_thread_main(&is_main), "MPI_Is_thread_main");
    const int needed = is_main != 0 ? MPI_THREAD_FUNNELED : MPI_THREAD_SERIALIZED;
    check<StateError>(level >= needed,
                      "run_ranks: MPI grants {} and {} is needed on this thread; initialise it with that, or "
                      "use an MPI that grants it",
                      level_name(level), level_name(needed));
  }

  void meet(const Launch& launch) {
    check_code(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
    check_code(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check<StateError>(
        size_ == launch.size && rank_ == launch.rank,
        "launch: the environment says rank {} of {}, but MPI says rank {} of {}; start the program with "
        "the mpirun or srun that belongs to this build's MPI, or with `sherd launch -n {}`, or set "
        "SHERD_WIRE=tcp",
        launch.rank, launch.size, rank_, size_, launch.size);
    check_code(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
    // The watch reports what happens to a peer.
    check_code(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    int* limit = nullptr;
    int found = 0;
    check_code(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&limit), &found),
               "MPI_Comm_get_attr");
    last_tag_ = found != 0 ? *limit : 32767;
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  bool owns_mpi_ = false;
  int rank_ = 0, size_ = 0;
  std::int32_t last_tag_ = 0;
  std::unique_ptr<Incoming, LeaveToMpi> incoming_{std::make_unique<Incoming>().release()};
  std::size_t next_ = 0;
  std::vector<Withdrawn> withdrawn_;
  std::deque<Sent> sent_withdrawals_;
  std::map<std::pair<int, int>, int>
      withdrawals_;  ///< by peers, of a rank and its tag: how many are not over
  std::vector<Dropped> dropped_;
};

}  // namespace

std::unique_ptr<processes::Wire> connect(const Launch& launch) { return std::make_unique<MpiWire>(launch); }

}  // namespace sherd::mpi
