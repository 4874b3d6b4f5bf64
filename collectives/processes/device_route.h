// How the tensors of one line travel between processes when they lie on devices.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "collectives/device_moments.h"
#include "runtime/device_network.h"

namespace sherd::processes {

struct GroupCore;

/// The calls that a network was given and that the device may not be through with, oldest first.
class GivenCalls {
 public:
  /// What is given from now on belongs to call `sequence`.
  void begin(PeerQueue& queue, std::uint64_t sequence);
  /// All of it has been given.
  void end(PeerQueue& queue);
  /// The oldest call that the device is not through with.
  std::optional<std::uint64_t> oldest();
  /// Whether the device has waited for peers in that call for longer than what a peer gave before it went may
  /// be on its way, as far as was looked.
  bool waits_too_long();

 private:
  struct Given {
    std::uint64_t sequence;
    std::unique_ptr<DeviceEvent> begun, moved;
    bool ended = false;
    std::optional<std::chrono::steady_clock::time_point> waits_since{};
  };
  std::deque<Given> calls_;
};

/// Connections among devices that no line uses any more, until they are closed.
struct Retired {
  std::unique_ptr<DeviceNetwork> network;
  GivenCalls given;
  std::shared_ptr<GroupCore> core;  ///< so that its faults are heard of
  std::vector<int> processes;
};

/// From device to device where the devices of all ranks of the line reach each other, which they find out
/// from the cards that come with their first such call; else through the hosts' memory. What moves from
/// device to device is given when all ranks have posted the call, and orders itself with the rank's own work
/// by the moments of `DeviceLane`, as among threads.
class DeviceRoute {
 public:
  enum class Way : std::uint8_t { unknown, network, host };

  /// Of the rank on lane `self`, whose tensors lie on `device`.
  DeviceRoute(Device device, std::size_t self);

  Device device() const { return device_; }
  Way way() const { return way_; }
  /// What this rank brings to the choice.
  const NetworkCard& card() const { return offer_.card; }
  /// Chooses by the cards of all lanes, which every rank does with the same ones, and begins to connect.
  void choose(std::span<const NetworkCard> cards);

  /// The tensors of call `sequence` may be read and written after the rank's work so far.
  void posted(std::uint64_t sequence, Device device);
  /// What the rank is to compute from now on finds them so, in whatever scope aside the call was posted.
  void follow_post(std::uint64_t sequence, Device device);

  DeviceNetwork& network() { return *network_; }
  /// What the network is given from now on belongs to call `sequence`.
  void begin(std::uint64_t sequence);
  /// The call has been given whole.
  void end(std::uint64_t sequence);
  /// What the rank computes from now on follows what was given of call `sequence`.
  void follow(std::uint64_t sequence) { own().work_follows(*moments().of(sequence).moved[0]); }
  /// The storages of a call that has been given, which `drop` drops.
  void release(std::span<const Ref<Storage>> storages, const std::function<void()>& drop) const;

  GivenCalls& given() { return given_; }

  /// The network, of which the route makes no use any more.
  std::unique_ptr<DeviceNetwork> leave() { return std::move(network_); }
  /// In a child of `fork`: what there is belongs to the parent.
  void forsake() { (void)network_.release(); }

 private:
  PeerQueue& own() const;
  DeviceLane& moments() const { return moments_->lane(0).on(device_, own()); }

  Device device_;
  std::size_t self_;
  Way way_ = Way::unknown;
  NetworkOffer offer_;
  std::shared_ptr<Moments> moments_ = std::make_shared<Moments>(1);
  std::unique_ptr<DeviceNetwork> network_;
  GivenCalls given_;
};

}  // namespace sherd::processes
