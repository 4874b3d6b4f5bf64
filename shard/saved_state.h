// A state in the files of a checkpoint: in one, or in a part of every rank that an index ties together.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nn/state_file.h"
#include "shard/sharded_state.h"

namespace sherd::shard {

/// The name of the index in a checkpoint's folder, and of rank `rank`'s part of `what` ("model",
/// "optimizer") of `ranks`; of one rank the part is the whole and has no number.
inline constexpr std::string_view index_name = "index.json";
SHERD_API std::string part_name(std::string_view what, int rank, int ranks);

/// A whole tensor of a saved state. What it refers to is the state's.
struct SavedTensor {
  std::string_view name;
  std::span<const std::int64_t> shape;
  std::size_t first_run = 0, runs = 0;  ///< where its elements are
  int group = 0, groups = 1;            ///< of ranks, each of which saved another tensor of the name
  int first_rank = -1;                  ///< of that group, among all that saved; -1 where nothing says
  std::string_view saved_by{};          ///< that group in words; empty where all ranks saved it together
};

/// The model or the optimizer of a checkpoint. Opening reads and checks headers alone: every part is there,
/// complete and of this save, and has the runs of elements that no other has.
class SHERD_API SavedState {
 public:
  /// Of a checkpoint's folder, or one file of whole tensors, whatever it is named. FileError for a file that
  /// cannot be read; ValueError, in one line with the file's name, for a part that is cut or damaged or of
  /// another save, and for elements that no part has. `files` lives longer.
  SavedState(FileSystem::Path from, std::string_view what, FileSystem& files = posix_file_system());

  /// By name, those of one name by their groups.
  std::span<const SavedTensor> tensors() const { return tensors_; }
  /// The tensor of that name, of several the one of a group (below `SavedTensor::groups`); or null.
  const SavedTensor* find(std::string_view name, int group = 0) const;
  /// `numel` elements of a tensor from `begin` on, in one dimension, on the CPU, in the dtype that was saved.
  /// Every part that has some of them is read as far as it has this tensor, and checked: at most as much as
  /// the whole tensor at once. FileError, ValueError for damaged values and for a dtype that the library
  /// lacks.
  Tensor read(const SavedTensor& tensor, std::int64_t begin, std::int64_t numel) const;
  /// Why nothing here can hold a tensor of its dtype or dimensions; empty where it can be read.
  std::string why_unread(const SavedTensor& tensor) const;
  /// That optimizers took of the parameters beside which it was saved; 0 where the files do not say.
  std::int64_t steps(std::string_view name) const;
  /// The file that says what there is: the whole's, or the index.
  FileSystem::Path path() const;
  /// Whether all files were written with checksums; else none was.
  bool has_checksums() const { return sealed_; }
  /// That of the file which `path` names. It follows from all that was saved, and so is the save's; empty
  /// without checksums.
  std::string_view checksum() const { return checksum_; }
  /// All of the tensor into as many bytes, straight from the parts. Errors as `read`.
  void read_whole(const SavedTensor& tensor, std::span<std::byte> into) const;
  /// All of it as records that are read when they are asked for, while this is there, and what a file of them
  /// notes. Of what several groups of ranks have each the tensors of one: ValueError without it, for a number
  /// that is none of theirs, and where it is for unlike groups of unlike names.
  std::vector<TensorRecord> records(std::optional<int> group = {}) const;
  TensorMetadata notes() const;
  /// ValueError unless this optimizer was saved beside that model, as far as their files say.
  void check_beside(const SavedState& model) const;

 private:
  struct Run {
    const TensorEntry* entry;
    std::span<const std::int64_t> shape;  ///< of the whole
    std::size_t part;
    std::int64_t begin, numel;
    int group = 0, groups = 1, first_rank = -1;
    std::string_view saved_by{};
  };
  void open(const std::string& name, FileSystem& files);
  void open_whole(const std::string& name, FileSystem& files);
  void check_part(const std::string& checksum) const;
  void add_runs(std::size_t part);
  void add_group(Run& run) const;
  void tie();
  void check_groups() const;
  void check_group(const SavedTensor& tensor, std::optional<int> group) const;
  [[noreturn]] void refuse_run(const Run& run, const Run& first, std::int64_t expected) const;

  FileSystem::Path folder_;
  bool indexed_ = false, sealed_ = false;
  std::string checksum_;
  std::vector<std::string> names_;  ///< of the parts
  std::vector<SafetensorsFile> parts_;
  std::deque<std::vector<std::int64_t>> shapes_;  ///< of tensors that were cut; stay where they are
  std::vector<Run> runs_;
  std::vector<SavedTensor> tensors_;
};

/// What `SavedState` says of its path and checksum, without a look at the parts of an index.
struct Signature {
  std::string file, checksum;
};
SHERD_API Signature signature_of(const FileSystem::Path& folder, std::string_view what, FileSystem& files);

}  // namespace sherd::shard
