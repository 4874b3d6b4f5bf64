// Checkpoints of sharded training: each rank writes what it has, an index ties the parts together, and any
// ranks, in any layout and strategy, load them.
//
//   shard::save_checkpoint(model, optimizer, "runs/7/step-100", world.group());
//   shard::load_checkpoint(model, optimizer, "runs/7/step-100", world.group());
#pragma once

#include <functional>

#include "nn/optimizer.h"
#include "runtime/io/durable.h"

namespace sherd::shard {

/// What a checkpoint has of a model's parameters that require no gradient, as those beneath adapters
/// (nn/lora.h): their values, or nothing, where whoever loads has them from elsewhere.
enum class Frozen { saved, left_out };

struct CheckpointOptions {
  /// Adds further files to a folder that is saved, on the first rank: a step, a seed.
  std::function<void(DirectoryWriter&)> also{};
  Frozen frozen = Frozen::saved;
  FileSystem& files = posix_file_system();
};

/// Writes the folder `folder`, whose parent exists: every rank of `ranks` a file with its part of the model
/// and one of the optimizer's state, the first rank an index of them. Where several ranks hold the same, each
/// writes a share. One rank writes whole tensors, without an index: model.safetensors and
/// optimizer.safetensors, which other programs read. A tensor is copied only to bring it to the host.
///
/// Collective: all ranks that hold the model call with the same folder, which all reach, and nobody else
/// writes it. It takes its name when every part is on the disk; a folder of that name is replaced as a whole
/// then. So a crash of any rank at any moment leaves the old one or the new one, and beside it perhaps what
/// the next save of that name, and `recover_directory`, clear away. FileError where the system refuses;
/// ValueError where the ranks together do not hold the model. What one rank throws, all throw, and the group
/// goes on.
SHERD_API void save_checkpoint(nn::Module& model, const nn::Optimizer& optimizer,
                               const FileSystem::Path& folder, const Group& ranks,
                               const CheckpointOptions& options = {});
/// The same of a model alone.
SHERD_API void save_checkpoint(nn::Module& model, const FileSystem::Path& folder, const Group& ranks,
                               const CheckpointOptions& options = {});

/// Reads what any number of ranks saved, or whole tensors of another program, into a model and an optimizer
/// that lie on the ranks of `ranks`, or with an undefined group on this rank alone. A rank reads the parts
/// that have something of its own, one at a time, and holds them, beside what it had, until all ranks have
/// read; then they take the values. Collective. FileError and ValueError name the file that is missing, cut,
/// damaged, of another save or of another model; DeviceError on `meta`. What one rank throws, all throw; then
/// nothing is changed on any.
SHERD_API void load_checkpoint(nn::Module& model, nn::Optimizer& optimizer, const FileSystem::Path& folder,
                               const Group& ranks, FileSystem& files = posix_file_system());
/// The same of the model alone; the folder may hold no optimizer.
SHERD_API void load_checkpoint(nn::Module& model, const FileSystem::Path& folder, const Group& ranks,
                               FileSystem& files = posix_file_system());

/// For a load of some of a model, or under other names.
struct LoadCheckpointOptions {
  nn::Strict strict = nn::Strict::yes;
  /// What the model calls a tensor of the save; nothing: it is left out.
  std::function<std::string(const std::string& saved)> rename{};
  std::string part = "model";  ///< of a checkpoint's folder; an average's for one
  /// `left_out`: of what requires no gradient that which the save lacks keeps its values, and is not missing.
  Frozen frozen = Frozen::saved;
  FileSystem& files = posix_file_system();
};
/// Reads a checkpoint, or one file of whole tensors whatever it is named, into a model that is sharded or
/// not, as `Module::load_state_dict` reads a state whose names were changed so: a parameter that the save
/// lacks is an error, or keeps its values, and what one side alone has is returned. Of a rank's own
/// parameters in groups of a mesh `missing` has those of this rank, `unknown` has what no rank has. Other
/// errors as above, and ValueError where two tensors get one name.
SHERD_API nn::Mismatch load_checkpoint(nn::Module& model, const FileSystem::Path& from, const Group& ranks,
                                       const LoadCheckpointOptions& options);
/// The same of the model, and its optimizer's state beside it, by the model's own names.
SHERD_API nn::Mismatch load_checkpoint(nn::Module& model, nn::Optimizer& optimizer,
                                       const FileSystem::Path& folder, const Group& ranks,
                                       const LoadCheckpointOptions& options);

}  // namespace sherd::shard
