// The reader takes any bytes: it gives what can be written again or throws a ValueError of one line, and a
// written file that is damaged says nothing wrong. To fuzz on:
//   clang++-19 -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -I.
//     tests/fuzz/safetensors_fuzz.cpp runtime/error.cpp runtime/shown.cpp runtime/io/*.cpp -lfmt -o fuzzer
//   fuzzer NEW_CORPUS tests/fuzz/corpus/safetensors -max_len=2048 -max_total_time=300
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/error.h"
#include "runtime/io/checksum.h"
#include "runtime/io/safetensors.h"
#include "tests/memory_file.h"

namespace {

using namespace sherd;
using namespace sherd::test;

// A broken promise must stop the fuzzer, and the replay, where it is.
void require(bool ok) {
  if (!ok) std::abort();
}

std::optional<SafetensorsFile> open(std::span<const std::byte> data) {
  try {
    return SafetensorsFile(std::make_unique<MemoryInput>(data), "fuzz");
  } catch (const ValueError& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    return std::nullopt;
  }
}

/// A tensor's bytes; none where it is refused.
std::optional<Bytes> read(const SafetensorsFile& file, const TensorEntry& entry) {
  try {
    file.dtype_of(entry);
    Bytes bytes(entry.bytes);
    file.read(entry, bytes);
    return bytes;
  } catch (const ValueError& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    return std::nullopt;
  }
}

/// What was read can be written, and reads as the same.
void check_round_trip(const SafetensorsFile& file, std::span<const TensorRecord> records) {
  MemoryOutput output;
  write_safetensors(output, records, file.metadata());
  const SafetensorsFile again(std::make_unique<MemoryInput>(output.bytes), "again");
  require(again.metadata() == file.metadata() && again.entries().size() == records.size());
  for (std::size_t i = 0; i < records.size(); ++i) {
    const TensorEntry& entry = again.entries()[i];
    require(entry.name == records[i].name && entry.shape == records[i].shape);
    const std::optional<Bytes> bytes = read(again, entry);
    require(bytes && std::ranges::equal(*bytes, records[i].bytes));
  }
}

/// A whole file with one byte changed is refused, or still says the same of every tensor.
void check_damage(std::span<const TensorRecord> records, std::size_t seed) {
  MemoryOutput output;
  write_safetensors(output, records);
  output.bytes[seed % output.bytes.size()] ^= static_cast<std::byte>(1 + seed % 255);
  const std::optional<SafetensorsFile> file = open(output.bytes);
  if (!file) return;
  require(file->entries().size() == records.size());
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::optional<Bytes> bytes = read(*file, file->entries()[i]);
    require(!bytes ||
            (file->entries()[i].name == records[i].name && file->entries()[i].shape == records[i].shape &&
             std::ranges::equal(*bytes, records[i].bytes)));
  }
}

/// What a file holds can be read or is refused, can be written again, and is missed when it is damaged.
void check_file(std::span<const std::byte> bytes) {
  const std::optional<SafetensorsFile> file = open(bytes);
  if (!file) return;
  std::deque<Bytes> storage;
  std::vector<TensorRecord> records;
  for (const TensorEntry& entry : file->entries()) {
    std::optional<Bytes> held = read(*file, entry);
    if (!held) continue;
    storage.push_back(std::move(*held));
    records.push_back({entry.name, file->dtype_of(entry), entry.shape, storage.back()});
  }
  check_round_trip(*file, records);
  check_damage(records, std::stoull(checksum_of(bytes), nullptr, 16));
}

/// The same file with the right checksum of its header, where it has one: what lies behind that check.
std::optional<Bytes> resealed(std::span<const std::byte> bytes) {
  constexpr std::string_view marker = R"("sherd.xxh3":")";
  if (bytes.size() < 8) return std::nullopt;
  std::string header(reinterpret_cast<const char*>(bytes.data()) + 8, bytes.size() - 8);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  std::string data = header.substr(std::min<std::uint64_t>(length, header.size()));
  header.resize(header.size() - data.size());
  if (seal_of(header, marker) == Seal::none) return std::nullopt;
  seal(header, marker);
  MemoryOutput output;
  output.write(bytes.first(8));
  output.OutputFile::write(header);
  output.OutputFile::write(data);
  return output.bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  check_file(bytes);
  if (const std::optional<Bytes> sealed = resealed(bytes)) check_file(*sealed);
  return 0;
}
