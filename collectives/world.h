// Starting ranks: threads of this process, or processes that a launcher started.
#pragma once

#include <functional>

#include "collectives/group.h"
#include "collectives/mesh.h"

namespace sherd {

/// A rank's place among all ranks. Used on the rank's thread.
class SHERD_API World {
 public:
  World(Group group, int local_rank, int local_size);
  /// This rank's world: of the innermost `run_ranks` it runs in, or what `init` made. Throws StateError
  /// outside both.
  static World& current();
  /// The same, or null outside both.
  static World* current_or_null();

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  /// Rank and number of ranks on this machine, for example to choose a GPU.
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  /// All ranks.
  const Group& group() const { return group_; }
  /// All ranks in one dimension, named "world".
  const DeviceMesh& mesh() const { return mesh_; }
  /// All ranks in a grid; every rank calls it. Errors as `DeviceMesh`.
  DeviceMesh mesh(std::vector<int> sizes, std::vector<std::string> names) const;

 private:
  Group group_;
  DeviceMesh mesh_;
  int local_rank_, local_size_;
};

/// Ranks that one process may have as threads: more would only wait for each other.
inline constexpr int max_thread_ranks = 512;

/// Runs `body` on `ranks` ranks and returns when those of this process are done.
///
/// In a program that a launcher started as several processes (mpirun, srun, `sherd launch`), a call outside
/// any rank runs `body` once, as this process's rank; `ranks` must be their number, or 0 for whatever it is
/// (ValueError). Everywhere else `ranks` threads are started (0: one a core; ValueError above
/// `max_thread_ranks`, StateError when the system starts fewer). A call from within a body always starts
/// threads, as a world of its own.
///
/// Processes that are not bound to cores share those of their machine equally, unless `Context::set_threads`
/// was called before.
///
/// A rank's thread starts with its parent's random generator (seed and position, the same on every rank), its
/// grad mode, and an equal share of its threads, at least one. Nothing else is inherited: no listeners,
/// interceptions or logs. Tensors pass between it and its parent without further ado: `run_ranks` first waits
/// for what the calling thread gave to its devices (`synchronize`, which may throw), and each rank at its end
/// for its own.
///
/// Throws what a rank threw: of several, the lowest rank's that is not a CollectiveError, since those tell of
/// others' failures; else the lowest rank's.
SHERD_API void run_ranks(int ranks, const std::function<void(World&)>& body);

/// Processes of the job that a launcher started this one in, 1 where none did. ValueError for variables of a
/// launcher that are no ranks.
SHERD_API int launched_ranks();

/// The world of a program that a launcher started as one of several ranks, without a `run_ranks` around it:
/// made on the first call; the rank leaves when the calling thread ends. Without a launcher a world of one
/// rank.
SHERD_API World& init();

}  // namespace sherd
