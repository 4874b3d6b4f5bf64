#include "shard/convert.h"

#include <algorithm>
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
  for (const SavedTensor& t : saved->tensors()) whole.groups = std::max(whole.groups, t.groups);
  for (TensorRecord& record : whole.tensors)
    record.read = [saved, read = std::move(record.read)](std::span<std::byte> into) { read(into); };
  return whole;
}

namespace {

/// ValueError for a file of the checkpoint itself, which would be no checkpoint any more.
void check_apart(const FileSystem::Path& from, const FileSystem::Path& file, FileSystem& files) {
  std::error_code none;
  const FileSystem::Path folder = file.has_parent_path() ? file.parent_path() : ".";
  check<ValueError>(!files.exists(file) || !std::filesystem::equivalent(folder, from, none),
                    "merge_checkpoint: '{}' is a file of the checkpoint that is read; name another",
                    shown(file.string(), 300));
}

}  // namespace

void merge_checkpoint(const FileSystem::Path& from, const FileSystem::Path& file,
                      const CheckpointTensorsOptions& options) {
  const WholeTensors whole = checkpoint_tensors(from, options);
  check_apart(from, file, options.files);
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
  for (std::size_t i = 0; i < parts.size(); ++i) {
    check_part_name("split_checkpoint", parts[i].part);
    check<ValueError>(std::ranges::none_of(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(i),
                                           [&](const auto& other) { return other.part == parts[i].part; }),
                      "split_checkpoint: two parts are named '{}'; name each once", parts[i].part);
  }
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
