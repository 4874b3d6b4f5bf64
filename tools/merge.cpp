#include "tools/merge.h"

#include <fmt/format.h>

#include <optional>

#include "runtime/io/safetensors.h"
#include "runtime/shown.h"
#include "shard/checkpoint.h"
#include "tools/checkpoint.h"
#include "tools/output.h"

namespace sherd::tools {

std::string merge(const MergeOptions& options, FileSystem& files) {
  const FileSystem::Path given = options.checkpoint;
  const std::optional<std::int64_t> step = newest_checkpoint(given, files);
  const FileSystem::Path checkpoint = step ? checkpoint_path(given, *step) : given;
  const Output out{"--out",
                   options.out.empty() ? options.part + ".safetensors" : options.out,
                   {checkpoint.string()},
                   {},
                   Holds::tensors};
  check_output(out, files);
  shard::merge_checkpoint(checkpoint, out.path, options.part, files);
  return fmt::format("{} of {} in {}: {} tensors\n", options.part, shown(checkpoint.string(), 300),
                     shown(out.path.string(), 300), SafetensorsFile(out.path, files).entries().size());
}

}  // namespace sherd::tools
