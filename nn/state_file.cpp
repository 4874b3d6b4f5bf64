#include "nn/state_file.h"

#include <cstring>

#include "runtime/io/durable.h"
#include "runtime/ops.h"

namespace sherd::nn {

void write_state(OutputFile& file, const StateDict& state, const TensorMetadata& metadata) {
  std::vector<TensorRecord> records;
  std::vector<Tensor> dense;  // the records point into these
  for (const auto& [name, tensor] : state) {
    const Tensor t = dense.emplace_back(contiguous(to(tensor.detach(), Device::cpu())));
    const std::vector<std::int64_t> shape(t.shape().begin(), t.shape().end());
    records.push_back({name, t.dtype(), shape, {t.raw(), static_cast<std::size_t>(t.spec().bytes())}});
  }
  write_safetensors(file, records, metadata);
}

void save_state(const FileSystem::Path& path, const StateDict& state, const TensorMetadata& metadata,
                FileSystem& files) {
  write_durably(path, [&](OutputFile& file) { write_state(file, state, metadata); }, files);
}

StateDict load_state(const FileSystem::Path& path, FileSystem& files) {
  const SafetensorsFile file(path, files);
  StateDict state;
  for (const TensorRecord& record : file.records()) {
    const Tensor t = empty({Shape(std::span<const std::int64_t>(record.shape)), record.dtype, Device::cpu()});
    std::memcpy(t.raw(), record.bytes.data(), record.bytes.size());
    state.emplace_back(record.name, t);
  }
  return state;
}

}  // namespace sherd::nn
