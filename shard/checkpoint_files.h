// Checkpoints of any parts: in which order ranks write and read them, and agree.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "shard/checkpoint.h"
#include "shard/checkpoint_part.h"

namespace sherd::shard {

/// The part that has the numbers of a run. Of one rank it says which files of others it was saved beside.
inline constexpr std::string_view run_name = "run";

/// Letters, digits, '_' and '-', and some.
bool is_part_name(std::string_view name);
/// ValueError, under the name of `call`, for another name.
void check_part_name(std::string_view call, std::string_view part);

void save_parts(std::span<CheckpointPart* const> parts, const FileSystem::Path& folder, const Group& ranks,
                const CheckpointOptions& options);
void load_parts(std::span<CheckpointPart* const> parts, const FileSystem::Path& folder, const Group& ranks,
                FileSystem& files);

}  // namespace sherd::shard
