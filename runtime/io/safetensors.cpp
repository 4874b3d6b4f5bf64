#include "runtime/io/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <unordered_set>
#include <utility>

#include "runtime/error.h"
#include "runtime/io/durable.h"

namespace sherd {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian; bytes are used as they are");

constexpr std::uint64_t max_header = 100'000'000, length_bytes = 8;
constexpr std::string_view metadata_key = "__metadata__";
// In the order of DType.
constexpr std::array<std::string_view, 8> format_names = {"F64", "F32", "F16", "BF16",
                                                          "I64", "I32", "U8",  "BOOL"};

template <class Range>
std::string joined(const Range& values, std::string_view separator) {
  std::string text;
  for (bool first = true; const auto& value : values) {
    if (!std::exchange(first, false)) text += separator;
    fmt::format_to(std::back_inserter(text), "{}", value);
  }
  return text;
}

/// Text from a file, fit for one line of an error.
std::string shown(std::string_view text) {
  constexpr std::size_t limit = 100;
  std::string line(text.substr(0, limit));
  // Cut before a whole character, not inside it.
  if (text.size() > limit) {
    while (!line.empty() && (line.back() & 0xc0) == 0x80) line.pop_back();
    if (!line.empty() && (line.back() & 0x80) != 0) line.pop_back();
    line += "...";
  }
  std::ranges::replace_if(line, [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return line;
}

/// Bytes of a tensor, or nothing when a dimension is negative or the product does not fit. A dimension of 0
/// counts as 1 for that, so that the strides of an empty tensor fit too.
std::optional<std::int64_t> bytes_of(DType dtype, std::span<const std::int64_t> shape) {
  std::int64_t bytes = size_of(dtype);
  for (const std::int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, std::max<std::int64_t>(dim, 1), &bytes)) return std::nullopt;
  }
  return std::ranges::find(shape, 0) == shape.end() ? bytes : 0;
}

/// A header entry while it is read.
struct Entry {
  std::string name;
  std::optional<DType> dtype;
  std::optional<std::vector<std::int64_t>> shape;
  std::optional<std::vector<std::int64_t>> offsets;
};

/// Takes the header event by event, so that a hostile one costs no more memory than its own size and cannot
/// nest deeply.
class HeaderReader final : public nlohmann::json_sax<json> {
 public:
  explicit HeaderReader(std::string_view source) : source_(source) {}

  std::vector<Entry> entries;
  TensorMetadata metadata;

  bool start_object(std::size_t) override {
    switch (at_) {
      case At::start:
        at_ = At::top;
        return true;
      case At::top_value:
        enter_top_value();
        return true;
      default:
        unexpected("an object");
    }
  }
  bool key(std::string& name) override {
    if (at_ == At::top) {
      if (!names_.insert(name).second) reject("the name '{}' is taken twice", shown(name));
      in_metadata_ = name == metadata_key;
      if (!in_metadata_) entries.push_back({name, {}, {}, {}});
      at_ = At::top_value;
    } else if (at_ == At::metadata) {
      metadata_key_ = name;
      if (metadata.contains(name)) reject("__metadata__: the key '{}' is taken twice", shown(name));
      at_ = At::metadata_value;
    } else {
      open_field(name);
    }
    return true;
  }
  bool end_object() override {
    if (at_ == At::tensor) require_fields();
    at_ = at_ == At::top ? At::done : At::top;
    return true;
  }
  bool start_array(std::size_t) override {
    if (at_ == At::shape) {
      numbers_ = &entries.back().shape.emplace();
    } else if (at_ == At::offsets) {
      numbers_ = &entries.back().offsets.emplace();
    } else {
      unexpected("an array");
    }
    at_ = At::numbers;
    return true;
  }
  bool end_array() override {
    at_ = At::tensor;
    return true;
  }
  bool string(std::string& text) override {
    if (at_ == At::metadata_value) {
      metadata.emplace(metadata_key_, text);
      at_ = At::metadata;
    } else if (at_ == At::dtype) {
      const auto found = std::ranges::find(format_names, text);
      if (found == format_names.end()) {
        reject_entry("dtype '{}' is unknown; the library reads {}", shown(text), joined(format_names, " "));
      }
      entries.back().dtype = all_dtypes[found - format_names.begin()];
      at_ = At::tensor;
    } else {
      unexpected("a string");
    }
    return true;
  }
  bool number_unsigned(std::uint64_t value) override {
    if (at_ != At::numbers) unexpected("a number");
    if (!std::in_range<std::int64_t>(value)) reject_entry("{} is above 2^63 - 1", value);
    numbers_->push_back(static_cast<std::int64_t>(value));
    return true;
  }
  bool number_integer(std::int64_t value) override {
    if (at_ != At::numbers) unexpected("a number");
    reject_entry("shape and data_offsets take integers from 0, got {}", value);
  }
  bool number_float(double, const std::string& text) override {
    if (at_ != At::numbers) unexpected("a number");
    reject_entry("shape and data_offsets take integers from 0 below 2^63, got {}", shown(text));
  }
  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool binary(json::binary_t&) override { unexpected("binary data"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    std::string_view reason = error.what();
    reason.remove_prefix(std::min(reason.find("syntax error"), reason.size()));
    reason = reason.substr(0, reason.find("; last read"));  // what follows is raw content
    reject("the header is not valid JSON at its byte {}: {}", position, shown(reason));
  }

 private:
  enum class At {
    start,
    top,
    top_value,
    metadata,
    metadata_value,
    tensor,
    dtype,
    shape,
    offsets,
    numbers,
    done
  };

  template <class... Args>
  [[noreturn]] void reject(fmt::format_string<Args...> rule, Args&&... args) const {
    fail<ValueError>("safetensors: '{}': {}", source_, fmt::format(rule, std::forward<Args>(args)...));
  }
  template <class... Args>
  [[noreturn]] void reject_entry(fmt::format_string<Args...> rule, Args&&... args) const {
    reject("tensor '{}': {}", shown(entries.back().name), fmt::format(rule, std::forward<Args>(args)...));
  }

  [[noreturn]] void unexpected(std::string_view got) const {
    switch (at_) {
      case At::top_value:
        if (in_metadata_) reject("__metadata__ must be an object of strings, got {}", got);
        reject_entry("an entry must be an object with dtype, shape and data_offsets, got {}", got);
      case At::metadata_value:
        reject("__metadata__: '{}' must be a string, got {}", shown(metadata_key_), got);
      case At::dtype:
        reject_entry("dtype must be a string, got {}", got);
      case At::shape:
        reject_entry("shape must be an array of integers, got {}", got);
      case At::offsets:
        reject_entry("data_offsets must be an array of two integers, got {}", got);
      case At::numbers:
        reject_entry("shape and data_offsets take integers only, got {}", got);
      default:
        fail<InternalError>("safetensors: the JSON parser sent {} out of turn", got);
    }
  }

  void enter_top_value() { at_ = in_metadata_ ? At::metadata : At::tensor; }

  void open_field(const std::string& name) {
    const Entry& entry = entries.back();
    const auto open = [&](At field, bool taken) {
      if (taken) reject_entry("{} is given twice", name);
      at_ = field;
    };
    if (name == "dtype") {
      open(At::dtype, entry.dtype.has_value());
    } else if (name == "shape") {
      open(At::shape, entry.shape.has_value());
    } else if (name == "data_offsets") {
      open(At::offsets, entry.offsets.has_value());
    } else {
      reject_entry("an entry has dtype, shape and data_offsets, got '{}'", shown(name));
    }
  }

  void require_fields() const {
    const Entry& entry = entries.back();
    if (!entry.dtype) reject_entry("dtype is missing");
    if (!entry.shape) reject_entry("shape is missing");
    if (!entry.offsets) reject_entry("data_offsets is missing");
    if (entry.offsets->size() != 2)
      reject_entry("data_offsets must be [begin, end], got {} numbers", entry.offsets->size());
  }

  std::string source_;
  At at_ = At::start;
  bool in_metadata_ = false;
  std::string metadata_key_;
  std::vector<std::int64_t>* numbers_ = nullptr;
  std::unordered_set<std::string> names_;
};

/// The header's text, after its length was found to be believable.
std::string_view header_of(std::span<const std::byte> data, std::string_view source) {
  check<ValueError>(
      data.size() >= length_bytes,
      "safetensors: '{}': the file is cut short: it starts with an 8-byte length and has {} bytes", source,
      data.size());
  std::uint64_t length = 0;
  std::memcpy(&length, data.data(), sizeof(length));
  check<ValueError>(
      length <= max_header,
      "safetensors: '{}': the header's length is {} bytes, the limit is {}; is this a safetensors file?",
      source, length, max_header);
  check<ValueError>(length <= data.size() - length_bytes,
                    "safetensors: '{}': the file is cut short: the header takes {} bytes, {} are there",
                    source, length, data.size() - length_bytes);
  const std::string_view header(reinterpret_cast<const char*>(data.data()) + length_bytes, length);
  check<ValueError>(header.starts_with('{'), "safetensors: '{}': the header must start with '{{', got {}",
                    source, header.empty() ? "nothing" : "'" + shown(header.substr(0, 1)) + "'");
  return header;
}

void check_size(const Entry& entry, std::string_view source) {
  const auto bytes = bytes_of(*entry.dtype, *entry.shape);
  const std::string_view dtype = format_names[static_cast<std::size_t>(*entry.dtype)];
  const std::int64_t begin = entry.offsets->front(), end = entry.offsets->back();
  if (!bytes) {
    fail<ValueError>(
        "safetensors: '{}': tensor '{}': the bytes of shape [{}] with dtype {} are above 2^63 - 1", source,
        shown(entry.name), shown(joined(*entry.shape, ", ")), dtype);
  }
  if (begin > end || end - begin != *bytes) {
    fail<ValueError>(
        "safetensors: '{}': tensor '{}': shape [{}] with dtype {} takes {} bytes, data_offsets [{}, {}] give "
        "{}",
        source, shown(entry.name), shown(joined(*entry.shape, ", ")), dtype, *bytes, begin, end, end - begin);
  }
}

/// The tensors must lie one behind the other and fill the data, in whatever order the header names them.
void check_places(std::span<const Entry> entries, std::size_t data_bytes, std::string_view source) {
  std::vector<const Entry*> placed(entries.size());
  std::ranges::transform(entries, placed.begin(), [](const Entry& e) { return &e; });
  std::ranges::sort(placed, {},
                    [](const Entry* e) { return std::pair(e->offsets->front(), e->offsets->back()); });
  std::int64_t end = 0;
  for (const Entry* entry : placed) {
    const std::int64_t begin = entry->offsets->front();
    if (begin != end) {
      fail<ValueError>(
          "safetensors: '{}': tensor '{}': starts at byte {} of the data, the tensor before it ends at {} "
          "({})",
          source, shown(entry->name), begin, end, begin < end ? "they overlap" : "a hole");
    }
    end = entry->offsets->back();
  }
  const auto there = static_cast<std::int64_t>(data_bytes);
  check<ValueError>(end <= there,
                    "safetensors: '{}': the file is cut short: the tensors take {} bytes, {} are there",
                    source, end, there);
  check<ValueError>(end == there,
                    "safetensors: '{}': the tensors take {} bytes, {} are there; the rest belongs to none",
                    source, end, there);
}

void check_booleans(const TensorRecord& record, std::string_view source) {
  if (record.dtype != DType::boolean) return;
  const auto bad = std::ranges::find_if(record.bytes, [](std::byte b) { return b > std::byte{1}; });
  if (bad == record.bytes.end()) return;
  fail<ValueError>("safetensors: '{}': tensor '{}': BOOL elements must be 0 or 1, element {} is {}", source,
                   shown(record.name), bad - record.bytes.begin(), std::to_integer<int>(*bad));
}

// ---- writing ----

void check_record(const TensorRecord& record) {
  const auto bytes = bytes_of(record.dtype, record.shape);
  const auto given = static_cast<std::int64_t>(record.bytes.size());
  if (bytes == given) return;
  fail<ValueError>("write_safetensors: tensor '{}': shape [{}] with dtype {} takes {} bytes, got {}",
                   shown(record.name), joined(record.shape, ", "), name_of(record.dtype),
                   bytes ? fmt::to_string(*bytes) : "more than 2^63 - 1", given);
}

/// Text as a JSON string.
std::string json_text(std::string_view text) {
  try {
    return json(text).dump();
  } catch (const json::exception&) {
    fail<ValueError>("write_safetensors: the text '{}' is not valid UTF-8", shown(text));
  }
}

/// Larger elements first, so that each tensor starts at a multiple of its element without a gap, which the
/// format forbids.
std::vector<std::size_t> data_order(std::span<const TensorRecord> records) {
  std::vector<std::size_t> order(records.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater<>(), [&](std::size_t i) { return size_of(records[i].dtype); });
  return order;
}

std::string header_text(std::span<const TensorRecord> records, std::span<const std::size_t> order,
                        const TensorMetadata& metadata) {
  std::vector<std::size_t> begins(records.size());
  std::size_t end = 0;
  for (const std::size_t i : order) begins[i] = std::exchange(end, end + records[i].bytes.size());

  std::vector<std::string> parts;
  if (!metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) pairs.push_back(json_text(key) + ":" + json_text(value));
    parts.push_back(fmt::format("{}:{{{}}}", json_text(metadata_key), joined(pairs, ",")));
  }
  for (std::size_t i = 0; i < records.size(); ++i) {
    const TensorRecord& r = records[i];
    parts.push_back(fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                                json_text(r.name), format_names[static_cast<std::size_t>(r.dtype)],
                                joined(r.shape, ","), begins[i], begins[i] + r.bytes.size()));
  }
  std::string text = fmt::format("{{{}}}", joined(parts, ","));
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

}  // namespace

SafetensorsContent parse_safetensors(std::span<const std::byte> data, std::string_view source) {
  const std::string name = shown(source);
  const std::string_view header = header_of(data, name);
  HeaderReader reader(name);
  json::sax_parse(header.begin(), header.end(), &reader);

  const std::span<const std::byte> payload = data.subspan(length_bytes + header.size());
  for (const Entry& entry : reader.entries) check_size(entry, name);
  check_places(reader.entries, payload.size(), name);

  SafetensorsContent content;
  content.metadata = std::move(reader.metadata);
  content.records.reserve(reader.entries.size());
  for (Entry& entry : reader.entries) {
    const auto begin = static_cast<std::size_t>(entry.offsets->front());
    const auto end = static_cast<std::size_t>(entry.offsets->back());
    content.records.push_back(
        {std::move(entry.name), *entry.dtype, std::move(*entry.shape), payload.subspan(begin, end - begin)});
    check_booleans(content.records.back(), name);
  }
  return content;
}

SafetensorsFile::SafetensorsFile(const FileSystem::Path& path, FileSystem& files)
    : mapping_(files.map(path)), content_(parse_safetensors(mapping_.bytes(), path.string())) {}

const TensorRecord* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::ranges::find(content_.records, name, &TensorRecord::name);
  return found == content_.records.end() ? nullptr : &*found;
}

void write_safetensors(OutputFile& file, std::span<const TensorRecord> records,
                       const TensorMetadata& metadata) {
  std::unordered_set<std::string_view> names = {metadata_key};
  for (const TensorRecord& record : records) {
    check<ValueError>(names.insert(record.name).second, "write_safetensors: the name '{}' is {}",
                      shown(record.name), record.name == metadata_key ? "reserved" : "taken twice");
    check_record(record);
  }
  const std::vector<std::size_t> order = data_order(records);
  const std::string header = header_text(records, order, metadata);
  const std::uint64_t length = header.size();
  check<ValueError>(length <= max_header, "write_safetensors: the header takes {} bytes, the limit is {}",
                    length, max_header);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(header);
  for (const std::size_t i : order) file.write(records[i].bytes);
}

void save_safetensors(const FileSystem::Path& path, std::span<const TensorRecord> records,
                      const TensorMetadata& metadata, FileSystem& files) {
  write_durably(path, [&](OutputFile& file) { write_safetensors(file, records, metadata); }, files);
}

}  // namespace sherd
