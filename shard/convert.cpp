#include "shard/convert.h"

#include <memory>
#include <utility>

#include "runtime/shown.h"
#include "shard/checkpoint_files.h"
#include "shard/part_file.h"
#include "shard/saved_state.h"

namespace sherd::shard {

WholeTensors checkpoint_tensors(const FileSystem::Path& from, const CheckpointTensorsOptions& options) {
  check_part_name("checkpoint_tensors", options.part);
  const auto saved = std::make_shared<const SavedState>(committed_directory(from, options.files),
                                                        options.part, options.files);
  WholeTensors whole{saved->records(options.group), saved->notes()};
  for (TensorRecord& record : whole.tensors)
    record.read = [saved, read = std::move(record.read)](std::span<std::byte> into) { read(into); };
  return whole;
}

void merge_checkpoint(const FileSystem::Path& from, const FileSystem::Path& file,
                      const CheckpointTensorsOptions& options) {
  const WholeTensors whole = checkpoint_tensors(from, options);
  save_safetensors(file, whole.tensors, whole.notes, options.files);
}

namespace {

void write_parts_of(const NamedTensors& named, const FileSystem::Path& partial, int ranks, std::string beside,
                    FileSystem& files) {
  DirectoryWriter writer(files, partial);
  for (int rank = 0; rank < ranks; ++rank) {
    RankOfGroup me{Group()};
    me.rank = rank, me.ranks = ranks;
    writer.add(part_name(named.part, rank, ranks), [&](OutputFile& file) {
      write_rows(file, named.whole.tensors, me, notes_beside(named.whole.notes, beside));
    });
  }
}

}  // namespace

void split_checkpoint(const std::vector<NamedTensors>& parts, const FileSystem::Path& folder, int ranks,
                      FileSystem& files) {
  check<ValueError>(ranks > 0 && !parts.empty(),
                    "split_checkpoint: {} parts for {} ranks; give at least one of each", parts.size(),
                    ranks);
  for (const NamedTensors& named : parts) check_part_name("split_checkpoint", named.part);
  const FileSystem::Path partial = PendingDirectory::partial_of(folder);
  PendingDirectory pending(folder, files);
  std::vector<std::string_view> names;
  std::string beside;  // the model's checksum, where one rank has an optimizer too
  for (const NamedTensors& named : parts) {
    write_parts_of(named, partial, ranks, named.part == "optimizer" ? beside : std::string(), files);
    if (ranks == 1 && named.part == "model") beside = signature_of(partial, named.part, files).checksum;
    names.push_back(named.part);
  }
  if (ranks > 1) {
    const std::string index = index_of(partial, names, ranks, files);
    DirectoryWriter(files, partial).add(index_name, [&](OutputFile& file) { file.write(index); });
  }
  pending.commit();
}

}  // namespace sherd::shard
