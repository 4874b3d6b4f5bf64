#include "nn/state_file.h"

#include "runtime/io/durable.h"
#include "runtime/log.h"
#include "runtime/ops.h"
#include "runtime/shown.h"

namespace sherd::nn {

void write_state(OutputFile& file, const StateDict& state, const TensorMetadata& metadata) {
  std::vector<TensorRecord> records;
  std::vector<Tensor> dense;  // the records point into these
  for (const auto& [name, tensor] : state) {
    check<ValueError>(tensor.defined(),
                      "save_state: '{}' of the state is an empty handle; assign it a tensor, or leave it out",
                      shown(name));
    const Tensor t = dense.emplace_back(contiguous(to(tensor.detach(), Device::cpu())));
    const std::vector<std::int64_t> shape(t.shape().begin(), t.shape().end());
    records.push_back({name, t.dtype(), shape, {t.raw(), static_cast<std::size_t>(t.spec().bytes())}});
  }
  write_safetensors(file, records, metadata);
}

void save_state(const FileSystem::Path& path, const StateDict& state, const TensorMetadata& metadata,
                FileSystem& files) {
  check<StateError>(state.part.empty(),
                    "save_state: '{}': the state has this rank's part of {}; write all parts with "
                    "shard::save_checkpoint, or the wholes of shard::full_state_dict",
                    shown(path.string(), 300), state.part);
  write_durably(path, [&](OutputFile& file) { write_state(file, state, metadata); }, files);
}

Tensor load_tensor(const SafetensorsFile& file, const TensorEntry& entry) {
  check<ShapeError>(entry.shape.size() <= max_rank,
                    "load_tensor: '{}' has {} dimensions, at most {} are supported", shown(entry.name),
                    entry.shape.size(), max_rank);
  const Tensor tensor = empty({Shape(std::span(entry.shape)), file.dtype_of(entry), Device::cpu()});
  file.read(entry, {tensor.raw(), static_cast<std::size_t>(tensor.spec().bytes())});
  return tensor;
}

std::string why_unread(const SafetensorsFile& file, const TensorEntry& entry) {
  if (entry.shape.size() > static_cast<std::size_t>(max_rank))
    return fmt::format("'{}' has {} dimensions, at most {} are supported", shown(entry.name),
                       entry.shape.size(), max_rank);
  try {
    file.dtype_of(entry);
  } catch (const ValueError& error) {
    return error.what();
  }
  return {};
}

StateDict load_state(const FileSystem::Path& path, FileSystem& files) {
  const SafetensorsFile file(path, files);
  StateDict state;
  for (const TensorEntry& entry : file.entries()) {
    if (std::string why = why_unread(file, entry); why.empty()) {
      state.emplace_back(entry.name, load_tensor(file, entry));
    } else {
      write_log(LogLevel::warning, "load_state: left out, as nothing here can hold it: {}", why);
      state.unread.emplace(entry.name, std::move(why));
    }
  }
  return state;
}

}  // namespace sherd::nn
