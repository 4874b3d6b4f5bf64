// How processes find each other without MPI: all come to the first one's port and get the doors of all.
#pragma once

#include <memory>
#include <vector>

#include "collectives/launch.h"
#include "collectives/processes/entrance.h"

namespace sherd::tcp {

/// What a process says when it comes; sent as these bytes.
struct Claim {
  std::array<char, 8> opening;
  std::int32_t rank, size;
  std::array<char, 16> token;  ///< a digest of the place's
  processes::Door door;
};
Claim claim_of(const Launch& launch, const MeetingPlace& place, const processes::Door& own);

/// The connections between rank 0 and the others from when they come until all are connected in every way: by
/// them everybody hears within that time who has ended. Stays where it was made.
class Meeting {
 public:
  /// Gives the others `own` and gets the doors of all. Rank 0 listens at the place; connections that do not
  /// know the token are refused, and logged. StateError when not all come within `time`, when rank 0 cannot
  /// listen there, for whom it refuses, and when one who had come ends. Once all have come they are to be
  /// connected within half a minute, or `time` if that is shorter.
  Meeting(const Launch& launch, const MeetingPlace& place, const processes::Door& own,
          std::chrono::milliseconds time = processes::meeting_time);
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  /// In the order of their ranks.
  const std::vector<processes::Door>& doors() const { return doors_; }
  /// How to wait for the others from then on, which throws a StateError that names who has ended.
  const processes::Vigil& vigil() const { return vigil_; }
  /// Something went wrong between the others and this one: if that is because one has ended, it will be heard
  /// of here, and is thrown.
  void look_for_the_cause();
  /// This process is connected to all; waits until all say so. StateError.
  void conclude();

 private:
  void host(const MeetingPlace& place, const processes::Door& own, std::chrono::milliseconds time);
  void join(const MeetingPlace& place, const processes::Door& own, std::chrono::milliseconds time);
  void watch(std::vector<pollfd>& sockets) const;
  void hear();
  void look();
  void tell_of_loss(std::size_t rank);
  void tell_all_of_loss();
  [[noreturn]] void fail_for_loss() const;
  bool all_came() const;
  std::string missing() const;

  Launch launch_;
  std::vector<processes::Door> doors_;
  /// By rank; of those but rank 0, who has one to each, only the one to rank 0.
  std::vector<processes::Descriptor> sockets_;
  std::vector<bool> connected_;  ///< said so
  int lost_ = -1;                ///< the first rank that ended
  processes::Vigil vigil_;
};

}  // namespace sherd::tcp
