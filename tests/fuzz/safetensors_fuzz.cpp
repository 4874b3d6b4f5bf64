// The reader takes any bytes: it returns tensors that lie inside them or throws a ValueError of one line. To
// fuzz on:
//   clang++-19 -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -I.
//     tests/fuzz/safetensors_fuzz.cpp runtime/error.cpp runtime/io/*.cpp -lfmt -o fuzzer
//   fuzzer NEW_CORPUS tests/fuzz/corpus/safetensors -max_len=2048 -max_total_time=300
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/error.h"
#include "runtime/io/safetensors.h"

namespace {

// A broken promise must stop the fuzzer, and the replay, where it is.
void require(bool ok) {
  if (!ok) std::abort();
}

/// Keeps what was written, to read it again.
class Buffer final : public sherd::OutputFile {
 public:
  void write(std::span<const std::byte> more) override {
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  void sync() override {}
  void close() override {}

  std::vector<std::byte> bytes;
};

std::optional<sherd::SafetensorsContent> read(std::span<const std::byte> data) {
  try {
    return sherd::parse_safetensors(data, "fuzz");
  } catch (const sherd::ValueError& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    return std::nullopt;
  }
}

void check_content(const sherd::SafetensorsContent& content, std::span<const std::byte> data) {
  for (const sherd::TensorRecord& record : content.records) {
    require(record.bytes.data() >= data.data());
    require(record.bytes.data() + record.bytes.size() <= data.data() + data.size());
    std::size_t bytes = static_cast<std::size_t>(size_of(record.dtype));
    for (const std::int64_t dim : record.shape) bytes *= static_cast<std::size_t>(dim);
    require(bytes == record.bytes.size());
  }
}

/// What was read can be written, and reads as the same.
void check_round_trip(const sherd::SafetensorsContent& content) {
  Buffer buffer;
  sherd::write_safetensors(buffer, content.records, content.metadata);
  const sherd::SafetensorsContent again = sherd::parse_safetensors(buffer.bytes, "again");
  require(again.metadata == content.metadata && again.records.size() == content.records.size());
  for (std::size_t i = 0; i < again.records.size(); ++i) {
    require(again.records[i].name == content.records[i].name);
    require(again.records[i].shape == content.records[i].shape);
    require(std::ranges::equal(again.records[i].bytes, content.records[i].bytes));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  const std::optional<sherd::SafetensorsContent> content = read(bytes);
  if (content) {
    check_content(*content, bytes);
    check_round_trip(*content);
  }
  return 0;
}
