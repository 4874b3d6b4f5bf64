// The safetensors file format: a JSON header of names, dtypes and shapes, then the bytes of all tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/export.h"
#include "runtime/io/file_system.h"

namespace sherd {

/// One tensor to write: contiguous elements in row-major order, little-endian. The record does not own its
/// bytes, or reads them when they are asked for.
struct TensorRecord {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes{};
  /// In place of `bytes`: fills memory of as many as there are, twice, since checksums come before the data.
  std::function<void(std::span<std::byte> into)> read{};
};

/// What a file's header says of one tensor.
struct TensorEntry {
  std::string name;
  std::string dtype;  ///< as written, "F32" for one; see `SafetensorsFile::dtype_of`
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, bytes = 0;  ///< where it lies in the data behind the header
  std::string flaw{};                  ///< why it cannot be read, see `Damage`; empty if it can
};

/// Where an entry does not fit its bytes, or these are not there or another's too: whether the file is
/// refused, or that tensor alone, when it is asked for.
enum class Damage { refuses_file, refuses_tensor };

/// Free text that travels with the tensors.
using TensorMetadata = std::map<std::string, std::string>;

/// An open file. Opening reads and checks the header alone, of at most 16 MiB and 131072 tensors; each tensor
/// is read, and checked against its checksum, when it is asked for. Files without checksums (other programs
/// write none) are read as they are.
class SHERD_API SafetensorsFile {
 public:
  /// FileError when the file cannot be read, ValueError for a header that the format forbids, that does not
  /// fit the file's size (unless only a tensor is refused for that), or that was changed after it was
  /// written.
  explicit SafetensorsFile(const FileSystem::Path& path, FileSystem& files = posix_file_system(),
                           Damage damage = Damage::refuses_file);
  /// The same for a file that is open already; `source` names it in errors.
  SafetensorsFile(std::unique_ptr<InputFile> file, std::string_view source,
                  Damage damage = Damage::refuses_file);

  /// The tensors, in the order of the header.
  std::span<const TensorEntry> entries() const { return entries_; }
  const TensorMetadata& metadata() const { return metadata_; }
  /// Whether it was written with checksums.
  bool has_checksums() const { return !checksums_.empty(); }
  /// The checksum of the header, which holds those of all tensors, and so tells this file from every other;
  /// empty for a file without.
  std::string_view header_checksum() const;
  /// The tensor of that name, or null.
  const TensorEntry* find(std::string_view name) const;
  /// ValueError for a dtype that the library lacks, and for an entry with a flaw.
  DType dtype_of(const TensorEntry& entry) const;
  /// Reads a tensor of this file into `into`, which has `entry.bytes` bytes. ValueError when its checksum
  /// does not fit, for an entry with a flaw, and for bool elements other than 0 and 1.
  void read(const TensorEntry& entry, std::span<std::byte> into) const;

 private:
  std::unique_ptr<InputFile> file_;
  std::string source_;
  std::uint64_t data_begin_ = 0;
  std::vector<TensorEntry> entries_;
  std::vector<std::uint32_t> by_name_;  // places in entries_
  TensorMetadata metadata_;
  std::string checksums_;  // of the header and then of every tensor; empty for a file without
};

/// Writes a whole file, with checksums under the metadata key "sherd.xxh3". The header keeps the order of
/// `records`; equal input gives equal bytes; every tensor is aligned to its element. ValueError for a name
/// that is taken twice, reserved or not UTF-8, for bytes that do not fit the shape, and for more than is read
/// back. Of tensors that are read one is held at a time.
SHERD_API void write_safetensors(OutputFile& file, std::span<const TensorRecord> records,
                                 const TensorMetadata& metadata = {});

/// The same into the file `path`, durably: after a crash or an error it is the old file or the complete new
/// one. FileError where the system refuses.
SHERD_API void save_safetensors(const FileSystem::Path& path, std::span<const TensorRecord> records,
                                const TensorMetadata& metadata = {}, FileSystem& files = posix_file_system());

}  // namespace sherd
