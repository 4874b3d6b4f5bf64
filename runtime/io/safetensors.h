// The safetensors file format: a JSON header of names, dtypes and shapes, then the bytes of all tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/export.h"
#include "runtime/io/file_system.h"

namespace sherd {

/// One tensor of a file: contiguous elements in row-major order, little-endian. The record does not own its
/// bytes, and bytes read from a file may be unaligned for their dtype: copy, do not cast.
struct TensorRecord {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// Free text that travels with the tensors.
using TensorMetadata = std::map<std::string, std::string>;

/// What a safetensors file says, in the order of its header.
struct SafetensorsContent {
  std::vector<TensorRecord> records;
  TensorMetadata metadata;
};

/// Reads a file that lies in memory; the records point into `data`. `source` names it in errors. ValueError
/// for everything the format forbids, for dtypes the library lacks, and for bool elements other than 0 and 1.
SHERD_API SafetensorsContent parse_safetensors(std::span<const std::byte> data, std::string_view source);

/// An open file, mapped, so that its bytes are read when they are used and never held twice.
class SHERD_API SafetensorsFile {
 public:
  /// FileError when the file cannot be read, ValueError as `parse_safetensors`.
  explicit SafetensorsFile(const FileSystem::Path& path, FileSystem& files = posix_file_system());

  /// In the order of the header; the bytes stay valid as long as this object, also when it is moved.
  std::span<const TensorRecord> records() const { return content_.records; }
  const TensorMetadata& metadata() const { return content_.metadata; }
  /// The tensor of that name, or null.
  const TensorRecord* find(std::string_view name) const;

 private:
  MappedFile mapping_;
  SafetensorsContent content_;
};

/// Writes a whole file. The header keeps the order of `records`; equal input gives equal bytes; every tensor
/// is aligned to its element. ValueError for a name that is taken twice, reserved or not UTF-8, and for bytes
/// that do not fit the shape.
SHERD_API void write_safetensors(OutputFile& file, std::span<const TensorRecord> records,
                                 const TensorMetadata& metadata = {});

/// The same into the file `path`, which a crash leaves as it was.
SHERD_API void save_safetensors(const FileSystem::Path& path, std::span<const TensorRecord> records,
                                const TensorMetadata& metadata = {}, FileSystem& files = posix_file_system());

}  // namespace sherd
