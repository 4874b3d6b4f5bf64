// The files of a checkpoint, written: a part a rank, and the index that ties them together.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/io/safetensors.h"
#include "shard/holders.h"
#include "shard/sharded_state.h"

namespace sherd::shard {

/// A rank's part of a state.
struct PartOfState {
  ShardedStateDict tensors;
  std::vector<GroupOfName> groups;  ///< of each
  /// Of one rank the optimizer's file takes the checksum of the model's; of several an index has all.
  std::string beside{};
};
/// Writes it: of what several ranks hold alike this one's share. Tensors that it has as a whole are written
/// as they are, others in one dimension with a note of where they belong; where groups have a name each, with
/// a note of the group. Errors as `nn::write_state`.
void write_part(OutputFile& file, const PartOfState& part);
/// `notes` with the checksum of what the file was saved beside, if there is one.
TensorMetadata notes_beside(TensorMetadata notes, const std::string& checksum);
/// Writes a rank's rows of whole tensors, cut as in the layout `per_parameter`, and what a file of them
/// notes. One tensor is held at a time, twice where it is cut.
void write_rows(OutputFile& file, std::span<const TensorRecord> tensors, const RankOfGroup& me,
                TensorMetadata notes);
/// The index of the parts in `folder` of each of `what`, whose headers it reads.
std::string index_of(const FileSystem::Path& folder, std::span<const std::string_view> what, int ranks,
                     FileSystem& files);

}  // namespace sherd::shard
