#include "runtime/cuda/nccl.h"

#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>

#include "runtime/cuda/check.h"
#include "runtime/cuda/peer_queue.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/shared_library.h"
#include "runtime/held_signals.h"
#include "runtime/log.h"

namespace sherd::cuda {
namespace {

/// Before it, ranks could not share a GPU.
constexpr int version_that_shares = 23000;

struct Nccl {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config;
  decltype(&ncclCommGetAsyncError) comm_get_async_error;
  decltype(&ncclCommFinalize) comm_finalize;
  decltype(&ncclCommDestroy) comm_destroy;
  decltype(&ncclCommAbort) comm_abort;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) recv;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclGetErrorString) get_error_string;
  decltype(&ncclGetLastError) get_last_error;
  int version;
};

std::optional<Nccl> load() {
  const char* asked = std::getenv("SHERD_NCCL");
  const std::string_view named = asked != nullptr ? asked : "";
  if (named == "off") return {};
  const SharedLibrary library(named.empty() || named == "on" ? "libnccl.so.2" : asked);
  if (!library.found()) {
    write_log(named.empty() ? LogLevel::info : LogLevel::warning,
              "nccl: {} was not found; tensors of GPUs go between processes through the host",
              library.name());
    return {};
  }
  Nccl all{};
  library.load("ncclGetVersion", all.get_version);
  library.load("ncclGetUniqueId", all.get_unique_id);
  library.load("ncclCommInitRankConfig", all.comm_init_rank_config);
  library.load("ncclCommGetAsyncError", all.comm_get_async_error);
  library.load("ncclCommFinalize", all.comm_finalize);
  library.load("ncclCommDestroy", all.comm_destroy);
  library.load("ncclCommAbort", all.comm_abort);
  library.load("ncclGroupStart", all.group_start);
  library.load("ncclGroupEnd", all.group_end);
  library.load("ncclSend", all.send);
  library.load("ncclRecv", all.recv);
  library.load("ncclAllGather", all.all_gather);
  library.load("ncclReduceScatter", all.reduce_scatter);
  library.load("ncclAllReduce", all.all_reduce);
  library.load("ncclGetErrorString", all.get_error_string);
  library.load("ncclGetLastError", all.get_last_error);
  all.get_version(&all.version);
  return all;
}

const Nccl* nccl() {
  static const std::optional<Nccl> functions = load();
  return functions ? &*functions : nullptr;
}

/// DeviceError unless it went well or is under way.
void check_nccl(ncclResult_t result, std::string_view what) {
  if (result == ncclSuccess || result == ncclInProgress) [[likely]]
    return;
  fail<DeviceError>("{}: NCCL says {} ({}); NCCL_DEBUG=WARN tells more", what,
                    nccl()->get_error_string(result), nccl()->get_last_error(nullptr));
}

/// Connections that one GPU has at a time, at most: so many calls find multiprocessors beside each other,
/// whatever the order in which ranks give them.
constexpr int most_connections = 6;

/// Null when a GPU has no room for one more.
std::shared_ptr<const void> room_on(int device) {
  static std::array<std::atomic<int>, most_devices> taken{};
  std::atomic<int>& here = taken[static_cast<std::size_t>(device)];
  std::shared_ptr<std::atomic<int>> room(&here, [](std::atomic<int>* count) { --*count; });
  return ++here <= most_connections ? std::move(room) : nullptr;
}

int multiprocessors(int device) {
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "nccl");
  return count;
}

class NcclNetwork final : public DeviceNetwork {
 public:
  NcclNetwork(DeviceState& state, Device device, NetworkOffer own, const NetworkCard& first, int rank,
              int size)
      : room_(std::move(own.room)), sums_(first.sums), device_(device), queue_(state, device) {
    ncclUniqueId id;
    static_assert(sizeof id.internal == sizeof first.key);
    std::memcpy(id.internal, first.key.data(), sizeof id.internal);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = std::max(1, multiprocessors(device.index) / most_connections);
    use();
    check_nccl(nccl()->comm_init_rank_config(&comm_, size, id, rank, &config), "nccl: connecting");
  }
  ~NcclNetwork() override {
    abort();
    if (ender_.joinable()) ender_.join();
  }

  bool ready() override {
    check<DeviceError>(comm_ != nullptr, "nccl: the connections were broken off");
    ncclResult_t state = ncclSuccess;
    check_nccl(nccl()->comm_get_async_error(comm_, &state), "nccl");
    check_nccl(state, "nccl");
    return state == ncclSuccess;
  }
  PeerQueue& queue() override { return queue_; }

  void exchange(std::span<const NetworkMessage> messages) override {
    group("nccl: send and receive", [&] {
      for (const NetworkMessage& m : messages)
        check_nccl(m.way == NetworkMessage::Way::send
                       ? nccl()->send(m.data, m.bytes, ncclInt8, m.rank, comm_, queue_.stream())
                       : nccl()->recv(m.data, m.bytes, ncclInt8, m.rank, comm_, queue_.stream()),
                   "nccl: send and receive");
    });
  }
  void gather(std::span<const NetworkGather> gathers) override {
    group("nccl: gather", [&] {
      for (const NetworkGather& g : gathers)
        check_nccl(nccl()->all_gather(g.in, g.out, g.bytes, ncclInt8, comm_, queue_.stream()),
                   "nccl: gather");
    });
  }

  bool sums(DType dtype, ReduceOp reduction) const override {
    return sums_ && type_of(dtype) && rule_of(reduction);
  }
  void sum(DType dtype, ReduceOp reduction, NetworkShare share, std::span<const NetworkSum> all) override {
    const auto add = share == NetworkShare::slice ? nccl()->reduce_scatter : nccl()->all_reduce;
    group("nccl: sum", [&] {
      for (const NetworkSum& s : all)
        check_nccl(add(s.in, s.out, static_cast<std::size_t>(s.count), *type_of(dtype), *rule_of(reduction),
                       comm_, queue_.stream()),
                   "nccl: sum");
    });
  }

  void abort() noexcept override { end(nccl()->comm_abort); }
  bool close() override {
    use();
    if (!last_) {
      last_ = queue_.make_event();
      queue_.mark(*last_);
    }
    if (!last_->reached()) return false;
    if (comm_ != nullptr) {
      if (!std::exchange(finalizes_, true)) check_nccl(nccl()->comm_finalize(comm_), "nccl: closing");
      if (!ready()) return false;
      end(nccl()->comm_destroy);
    }
    return ended_.load();
  }

 private:
  void use() const { check_cuda(cudaSetDevice(device_.index), "nccl"); }
  /// On a thread of its own: it waits until the other ranks come to it too, for which they may wait for this
  /// rank's host.
  void end(decltype(&ncclCommAbort) how) noexcept {
    if (comm_ == nullptr) return;
    const auto work = [this, how, comm = std::exchange(comm_, nullptr)] {
      cudaSetDevice(device_.index);
      how(comm);
      ended_.store(true);
    };
    try {
      const detail::SignalsHeld held;  // they go to the program's own threads
      ender_ = std::thread(work);
    } catch (const std::system_error&) {
      work();
    }
  }
  /// What `give` gives goes as one.
  template <class Give>
  void group(std::string_view what, const Give& give) {
    use();
    check_nccl(nccl()->group_start(), what);
    try {
      give();
    } catch (...) {
      nccl()->group_end();
      throw;
    }
    check_nccl(nccl()->group_end(), what);
  }

  static std::optional<ncclDataType_t> type_of(DType dtype) {
    switch (dtype) {
      case f64:
        return ncclFloat64;
      case f32:
        return ncclFloat32;
      case f16:
        return ncclFloat16;
      case bf16:
        return ncclBfloat16;
      case i64:
        return ncclInt64;
      case i32:
        return ncclInt32;
      default:
        return {};
    }
  }
  static std::optional<ncclRedOp_t> rule_of(ReduceOp reduction) {
    if (reduction.kind == ReduceOp::Kind::sum) return ncclSum;
    if (reduction.kind == ReduceOp::Kind::average) return ncclAvg;
    return {};
  }

  const std::shared_ptr<const void> room_;
  const bool sums_;
  Device device_;
  CudaPeerQueue queue_;
  ncclComm_t comm_ = nullptr;
  std::unique_ptr<DeviceEvent> last_;  ///< once it is being closed
  bool finalizes_ = false;
  std::thread ender_;
  std::atomic<bool> ended_{false};
};

bool may_share() {
  const char* enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return nccl()->version >= version_that_shares && enabled != nullptr && std::string_view(enabled) == "1";
}

}  // namespace

NetworkOffer nccl_offer(Device device, bool first) {
  NetworkOffer offer;
  NetworkCard& card = offer.card;
  if (nccl() == nullptr) return offer;
  if (first) {
    ncclUniqueId id;
    check_nccl(nccl()->get_unique_id(&id), "nccl: a name for the connections");
    std::memcpy(card.key.data(), id.internal, sizeof id.internal);
  }
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device.index), "nccl");
  std::array<std::uint64_t, 2> uuid;
  static_assert(sizeof uuid == sizeof properties.uuid);
  std::memcpy(uuid.data(), &properties.uuid, sizeof uuid);
  card.device = uuid[0] ^ uuid[1];
  offer.room = room_on(device.index);
  card.reaches = offer.room != nullptr;
  card.shares = may_share();
  const char* sums = std::getenv("SHERD_NCCL_SUMS");
  card.sums = sums != nullptr && std::string_view(sums) == "own";
  return offer;
}

std::unique_ptr<DeviceNetwork> nccl_connect(DeviceState& state, Device device, NetworkOffer own,
                                            const NetworkCard& first, int rank, int size) {
  return std::make_unique<NcclNetwork>(state, device, std::move(own), first, rank, size);
}

}  // namespace sherd::cuda
