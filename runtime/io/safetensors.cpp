#include "runtime/io/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <bitset>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <unordered_set>
#include <utility>

#include "runtime/error.h"
#include "runtime/io/checksum.h"
#include "runtime/io/durable.h"
#include "runtime/io/foreign.h"
#include "runtime/shown.h"

namespace sherd {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian; bytes are used as they are");

// Limits, so that reading a header takes a small multiple of its size in memory, whatever it says.
constexpr std::uint64_t max_header = std::uint64_t{1} << 24, length_bytes = 8;
constexpr std::size_t max_entries = std::size_t{1} << 17, max_dimensions = 16;
constexpr std::string_view metadata_key = "__metadata__";
// Checksums of the header and then of each tensor in its order. Where the first begins, in the text of a
// header.
constexpr std::string_view checksum_key = "sherd.xxh3", checksum_marker = R"("sherd.xxh3":")";
/// The format's names of dtypes, in the order of `all_dtypes`: "F64", ..., "BOOL".
const std::vector<std::string>& format_names() {
  static const auto names = [] {
    std::vector<std::string> upper;
    for (const DType d : all_dtypes) {
      upper.emplace_back(name_of(d));
      for (char& c : upper.back())
        if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
    }
    return upper;
  }();
  return names;
}

template <class Range>
std::string joined(const Range& values, std::string_view separator) {
  std::string text;
  for (bool first = true; const auto& value : values) {
    if (!std::exchange(first, false)) text += separator;
    fmt::format_to(std::back_inserter(text), "{}", value);
  }
  return text;
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

/// Takes the header event by event, so that a hostile one costs no more memory than its own size and cannot
/// nest deeply.
class HeaderReader final : public nlohmann::json_sax<json> {
 public:
  explicit HeaderReader(std::string_view source) : source_(source) {}

  std::vector<TensorEntry> entries;
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
      open_entry(name);
      at_ = At::top_value;
    } else if (at_ == At::metadata) {
      metadata_key_ = name;
      if (metadata.contains(name)) reject("__metadata__: the key '{}' is taken twice", shown(name));
      if (metadata.size() == max_entries) reject("__metadata__ has more than {} keys", max_entries);
      at_ = At::metadata_value;
    } else {
      open_field(name);
    }
    return true;
  }
  bool end_object() override {
    if (at_ == At::tensor) close_entry();
    at_ = at_ == At::top ? At::done : At::top;
    return true;
  }
  bool start_array(std::size_t) override {
    if (at_ == At::shape) {
      numbers_ = &entries.back().shape;
    } else if (at_ == At::offsets) {
      numbers_ = &offsets_;
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
      entries.back().dtype = text;
      at_ = At::tensor;
    } else {
      unexpected("a string");
    }
    return true;
  }
  bool number_unsigned(std::uint64_t value) override {
    if (at_ != At::numbers) unexpected("a number");
    if (!std::in_range<std::int64_t>(value)) reject_entry("{} is above 2^63 - 1", value);
    if (numbers_->size() == max_dimensions) reject_entry("more than {} numbers in a list", max_dimensions);
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
  bool null() override {
    if (at_ != At::top_value || !in_metadata_) unexpected("null");
    at_ = At::top;  // some programs write none so
    return true;
  }
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

  void open_entry(const std::string& name) {
    in_metadata_ = name == metadata_key;
    if (in_metadata_) {
      if (std::exchange(had_metadata_, true)) reject("the name '{}' is taken twice", name);
      return;
    }
    if (entries.size() == max_entries) reject("more than {} tensors", max_entries);
    entries.emplace_back().name = name;
    offsets_.clear();
    had_.reset();
  }

  void open_field(const std::string& name) {
    static constexpr std::array<std::string_view, 3> names = {"dtype", "shape", "data_offsets"};
    const auto field = static_cast<std::size_t>(std::ranges::find(names, name) - names.begin());
    if (field == names.size())
      reject_entry("an entry has dtype, shape and data_offsets, got '{}'", shown(name));
    if (had_[field]) reject_entry("{} is given twice", name);
    had_.set(field);
    at_ = std::array{At::dtype, At::shape, At::offsets}[field];
  }

  void close_entry() {
    if (!had_[0]) reject_entry("dtype is missing");
    if (!had_[1]) reject_entry("shape is missing");
    if (!had_[2]) reject_entry("data_offsets is missing");
    if (offsets_.size() != 2)
      reject_entry("data_offsets must be [begin, end], got {} numbers", offsets_.size());
    const std::int64_t begin = offsets_[0], end = offsets_[1];
    if (begin > end) reject_entry("data_offsets [{}, {}] end before they begin", begin, end);
    entries.back().begin = static_cast<std::uint64_t>(begin);
    entries.back().bytes = static_cast<std::uint64_t>(end - begin);
  }

  std::string_view source_;
  At at_ = At::start;
  bool in_metadata_ = false, had_metadata_ = false;
  std::string metadata_key_;
  std::bitset<3> had_;  // of the entry that is read: dtype, shape, data_offsets
  std::vector<std::int64_t> offsets_;
  std::vector<std::int64_t>* numbers_ = nullptr;
};

/// The header's text; ValueError where its length is over the limit or over the file.
std::string header_of(InputFile& file, std::string_view source) {
  check<ValueError>(
      file.size() >= length_bytes,
      "safetensors: '{}': the file is cut short: it starts with an 8-byte length and has {} bytes", source,
      file.size());
  std::uint64_t length = 0;
  file.read(0, std::as_writable_bytes(std::span(&length, 1)));
  std::string beginning(std::min<std::uint64_t>(file.size(), 32), '\0');
  file.read(0, std::as_writable_bytes(std::span(beginning)));
  if (const std::string_view kind = foreign_file(beginning); !kind.empty())
    fail<ValueError>("safetensors: '{}': {}", source, kind);
  check<ValueError>(
      length <= max_header,
      "safetensors: '{}': the header's length is {} bytes, the limit is {}; is this a safetensors file?",
      source, length, max_header);
  check<ValueError>(length <= file.size() - length_bytes,
                    "safetensors: '{}': the file is cut short: the header takes {} bytes, {} are there",
                    source, length, file.size() - length_bytes);
  std::string header(length, '\0');
  file.read(length_bytes, std::as_writable_bytes(std::span(header)));
  check<ValueError>(header.starts_with('{'), "safetensors: '{}': the header must start with '{{', got {}",
                    source, header.empty() ? "nothing" : "'" + shown(header.substr(0, 1)) + "'");
  return header;
}

std::optional<DType> dtype_named(std::string_view name) {
  const auto found = std::ranges::find(format_names(), name);
  if (found == format_names().end()) return std::nullopt;
  return all_dtypes[found - format_names().begin()];
}

/// Why shape and bytes of an entry do not fit; empty where they do. The size of a dtype that the library
/// lacks is unknown, and an error only when that tensor is read.
std::string flaw_of_size(const TensorEntry& entry) {
  const std::optional<DType> dtype = dtype_named(entry.dtype);
  if (!dtype) return {};
  const auto bytes = bytes_of(*dtype, entry.shape);
  if (!bytes)
    return fmt::format("the bytes of shape [{}] with dtype {} are above 2^63 - 1",
                       shown(joined(entry.shape, ", ")), entry.dtype);
  if (entry.bytes == static_cast<std::uint64_t>(*bytes)) return {};
  return fmt::format("shape [{}] with dtype {} takes {} bytes, data_offsets [{}, {}] give {}",
                     shown(joined(entry.shape, ", ")), entry.dtype, *bytes, entry.begin,
                     entry.begin + entry.bytes, entry.bytes);
}

/// ValueError for an entry with a flaw.
void check_sound(const TensorEntry& entry, std::string_view source) {
  check<ValueError>(entry.flaw.empty(), "safetensors: '{}': tensor '{}': {}", source, shown(entry.name),
                    entry.flaw);
}

/// The entries in the order of their bytes.
std::vector<TensorEntry*> by_place(std::span<TensorEntry> entries) {
  std::vector<TensorEntry*> placed(entries.size());
  std::ranges::transform(entries, placed.begin(), [](TensorEntry& e) { return &e; });
  std::ranges::sort(placed, {}, [](const TensorEntry* e) { return std::pair(e->begin, e->bytes); });
  return placed;
}

/// The tensors must lie one behind the other and fill the data, in whatever order the header names them.
void check_places(std::span<TensorEntry> entries, std::uint64_t there, std::string_view source) {
  std::uint64_t end = 0;
  for (const TensorEntry* entry : by_place(entries)) {
    if (entry->begin != end) {
      fail<ValueError>(
          "safetensors: '{}': tensor '{}': starts at byte {} of the data, the tensor before it ends at {} "
          "({})",
          source, shown(entry->name), entry->begin, end, entry->begin < end ? "they overlap" : "a hole");
    }
    end += entry->bytes;
  }
  check<ValueError>(end <= there,
                    "safetensors: '{}': the file is cut short: the tensors take {} bytes, {} are there",
                    source, end, there);
  check<ValueError>(end == there,
                    "safetensors: '{}': the tensors take {} bytes, {} are there; the rest belongs to none",
                    source, end, there);
}

/// Notes why tensors cannot be read whose bytes are not there, or another's too; a hole spoils none.
void note_places(std::span<TensorEntry> entries, std::uint64_t there) {
  const auto note = [](TensorEntry& entry, std::string flaw) {
    if (entry.flaw.empty()) entry.flaw = std::move(flaw);
  };
  TensorEntry* before = nullptr;  // of those that begin earlier the one that ends last
  for (TensorEntry* entry : by_place(entries)) {
    const std::uint64_t end = entry->begin + entry->bytes;
    if (end > there)
      note(*entry, fmt::format("the file is cut short: it takes the bytes {} to {} of the data, {} are there",
                               entry->begin, end, there));
    if (before != nullptr && entry->bytes > 0 && entry->begin < before->begin + before->bytes) {
      note(*entry, fmt::format("its bytes are those of '{}' too", shown(before->name)));
      note(*before, fmt::format("its bytes are those of '{}' too", shown(entry->name)));
    }
    if (before == nullptr || end > before->begin + before->bytes) before = entry;
  }
}

/// Indices of the entries, sorted by name. ValueError for a name that is taken twice.
std::vector<std::uint32_t> sorted_by_name(std::span<const TensorEntry> entries, std::string_view source) {
  std::vector<std::uint32_t> order(entries.size());
  std::iota(order.begin(), order.end(), 0U);
  const auto name = [&](std::uint32_t i) -> const std::string& { return entries[i].name; };
  std::ranges::sort(order, {}, name);
  const auto twice = std::ranges::adjacent_find(order, {}, name);
  if (twice != order.end())
    fail<ValueError>("safetensors: '{}': the name '{}' is taken twice", source, shown(name(*twice)));
  return order;
}

/// Takes the checksums out of the metadata; empty where there are none.
std::string taken_checksums(const std::string& header, TensorMetadata& metadata, std::size_t tensors,
                            std::string_view source) {
  const auto found = metadata.find(std::string(checksum_key));
  if (found == metadata.end()) return {};
  std::string checksums = std::move(found->second);
  metadata.erase(found);
  check<ValueError>(
      seal_of(header, checksum_marker) == Seal::whole && checksums.size() == checksum_digits * (1 + tensors),
      "safetensors: '{}': the header is damaged: it does not fit its checksum; a file that was "
      "changed on purpose must not keep the metadata '{}'",
      source, checksum_key);
  return checksums;
}

void check_booleans(std::span<const std::byte> bytes, const TensorEntry& entry, std::string_view source) {
  const auto bad = std::ranges::find_if(bytes, [](std::byte b) { return b > std::byte{1}; });
  if (bad == bytes.end()) return;
  fail<ValueError>("safetensors: '{}': tensor '{}': BOOL elements must be 0 or 1, element {} is {}", source,
                   shown(entry.name), bad - bytes.begin(), std::to_integer<int>(*bad));
}

// ---- writing ----

/// Of all its elements; `check_record` knows that they fit.
std::size_t size_of_data(const TensorRecord& record) {
  return record.read ? static_cast<std::size_t>(*bytes_of(record.dtype, record.shape)) : record.bytes.size();
}

/// `f(bytes)`, which are read where the record has none.
template <class F>
void with_data(const TensorRecord& record, const F& f) {
  if (!record.read) return f(record.bytes);
  std::vector<std::byte> bytes(size_of_data(record));
  record.read(bytes);
  f(std::span<const std::byte>(bytes));
}

void check_record(const TensorRecord& record) {
  const auto bytes = bytes_of(record.dtype, record.shape);
  check<ValueError>(record.shape.size() <= max_dimensions,
                    "write_safetensors: tensor '{}': has {} dimensions, the limit is {}", shown(record.name),
                    record.shape.size(), max_dimensions);
  const auto given = static_cast<std::int64_t>(record.bytes.size());
  if (bytes && (record.read || *bytes == given)) return;
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
  for (const std::size_t i : order) begins[i] = std::exchange(end, end + size_of_data(records[i]));

  TensorMetadata all = metadata;
  std::string& checksums = all[std::string(checksum_key)];
  checksums.assign(checksum_digits, '0');
  for (const TensorRecord& record : records)
    with_data(record, [&](std::span<const std::byte> bytes) { checksums += checksum_of(bytes); });

  std::vector<std::string> parts, pairs;
  for (const auto& [key, value] : all) pairs.push_back(json_text(key) + ":" + json_text(value));
  parts.push_back(fmt::format("{}:{{{}}}", json_text(metadata_key), joined(pairs, ",")));
  for (std::size_t i = 0; i < records.size(); ++i) {
    const TensorRecord& r = records[i];
    parts.push_back(fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                                json_text(r.name), format_names()[static_cast<std::size_t>(r.dtype)],
                                joined(r.shape, ","), begins[i], begins[i] + size_of_data(r)));
  }
  std::string text = fmt::format("{{{}}}", joined(parts, ","));
  text.resize((text.size() + 7) / 8 * 8, ' ');
  seal(text, checksum_marker);
  return text;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const FileSystem::Path& path, FileSystem& files, Damage damage)
    : SafetensorsFile(files.open(path), path.string(), damage) {}

SafetensorsFile::SafetensorsFile(std::unique_ptr<InputFile> file, std::string_view source, Damage damage)
    : file_(std::move(file)), source_(shown(source, 300)) {
  const std::string header = header_of(*file_, source_);
  data_begin_ = length_bytes + header.size();
  HeaderReader reader(source_);
  json::sax_parse(header.begin(), header.end(), &reader);
  checksums_ = taken_checksums(header, reader.metadata, reader.entries.size(), source_);
  by_name_ = sorted_by_name(reader.entries, source_);
  const std::uint64_t there = file_->size() - data_begin_;
  for (TensorEntry& entry : reader.entries) entry.flaw = flaw_of_size(entry);
  if (damage == Damage::refuses_tensor) {
    note_places(reader.entries, there);
  } else {
    for (const TensorEntry& entry : reader.entries) check_sound(entry, source_);
    check_places(reader.entries, there, source_);
  }
  entries_ = std::move(reader.entries);
  metadata_ = std::move(reader.metadata);
}

std::string_view SafetensorsFile::header_checksum() const {
  return std::string_view(checksums_).substr(0, checksum_digits);
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto name_at = [&](std::uint32_t i) -> std::string_view { return entries_[i].name; };
  const auto found = std::ranges::lower_bound(by_name_, name, {}, name_at);
  return found == by_name_.end() || name_at(*found) != name ? nullptr : &entries_[*found];
}

DType SafetensorsFile::dtype_of(const TensorEntry& entry) const {
  check_sound(entry, source_);
  const std::optional<DType> dtype = dtype_named(entry.dtype);
  if (!dtype)
    fail<ValueError>("safetensors: '{}': tensor '{}': dtype '{}' is unknown; the library reads {}", source_,
                     shown(entry.name), shown(entry.dtype), joined(format_names(), " "));
  return *dtype;
}

void SafetensorsFile::read(const TensorEntry& entry, std::span<std::byte> into) const {
  check_sound(entry, source_);
  check<ValueError>(into.size() == entry.bytes, "safetensors: '{}': tensor '{}' has {} bytes, not {}",
                    source_, shown(entry.name), entry.bytes, into.size());
  file_->read(data_begin_ + entry.begin, into);
  if (!checksums_.empty()) {
    // Of this list at once; a copy is looked for.
    const std::less<const TensorEntry*> before;
    const TensorEntry *const first = entries_.data(), *const last = first + entries_.size();
    const auto own = !before(&entry, first) && before(&entry, last)
                         ? entries_.begin() + (&entry - first)
                         : std::ranges::find(entries_, entry.name, &TensorEntry::name);
    check<ValueError>(own != entries_.end() && own->begin == entry.begin && own->bytes == entry.bytes,
                      "safetensors: '{}': tensor '{}' is of another file", source_, shown(entry.name));
    const auto place = static_cast<std::size_t>(own - entries_.begin());
    const std::string written = checksums_.substr((1 + place) * checksum_digits, checksum_digits);
    const std::string found = checksum_of(into);
    check<ValueError>(written == found,
                      "safetensors: '{}': tensor '{}' is damaged: its checksum is {}, not {}", source_,
                      shown(entry.name), found, written);
  }
  if (dtype_named(entry.dtype) == DType::boolean) check_booleans(into, entry, source_);
}

void write_safetensors(OutputFile& file, std::span<const TensorRecord> records,
                       const TensorMetadata& metadata) {
  check<ValueError>(records.size() <= max_entries && metadata.size() < max_entries,
                    "write_safetensors: {} tensors and {} metadata keys, the limit is {} each",
                    records.size(), metadata.size(), max_entries);
  check<ValueError>(!metadata.contains(std::string(checksum_key)),
                    "write_safetensors: the metadata key '{}' is reserved for checksums", checksum_key);
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
  for (const std::size_t i : order)
    with_data(records[i], [&](std::span<const std::byte> bytes) { file.write(bytes); });
}

void save_safetensors(const FileSystem::Path& path, std::span<const TensorRecord> records,
                      const TensorMetadata& metadata, FileSystem& files) {
  write_durably(path, [&](OutputFile& file) { write_safetensors(file, records, metadata); }, files);
}

}  // namespace sherd
