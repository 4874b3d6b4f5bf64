#include "nn/training_text.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "nn/digest.h"
#include "runtime/error.h"
#include "runtime/io/safetensors.h"
#include "runtime/shown.h"

namespace sherd::nn {
namespace training_text {
namespace {

using nlohmann::json;
using Path = FileSystem::Path;

constexpr std::uint64_t most_text_bytes = std::uint64_t{1} << 30, most_line_bytes = std::uint64_t{1} << 24;
constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 20;
constexpr int most_depth = 64;
constexpr std::string_view digest_key = "sherd.training_text";

// ---- files ----

/// Whether it holds something and no zero byte.
bool is_text(InputFile& file) {
  std::vector<std::byte> part;
  for (std::uint64_t at = 0; at < file.size(); at += part.size()) {
    part.resize(std::min(chunk_bytes, file.size() - at));
    file.read(at, part);
    if (std::ranges::find(part, std::byte{0}) != part.end()) return false;
  }
  return file.size() > 0;
}

void add_folder(std::vector<Path>& found, const Path& folder, FileSystem& files) {
  for (const std::string& name : files.list(folder)) {
    const Path path = folder / name;
    if (name.starts_with('.')) continue;
    const std::filesystem::file_type type = files.type(path);
    if (type == std::filesystem::file_type::directory)
      add_folder(found, path, files);
    else if (type == std::filesystem::file_type::regular && is_text(*files.open(path)))
      found.push_back(path);
  }
}

/// The files that are meant.
std::vector<Path> files_of(std::span<const std::string> paths, FileSystem& files) {
  check<ValueError>(!paths.empty(), "data: no file is named");
  std::vector<Path> found;
  for (const Path path : paths) {
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(path, error);
    check<FileError>(std::filesystem::exists(status), "data: '{}': {}", shown(path.string(), 300),
                     error ? error.message() : "no such file or folder");
    if (!std::filesystem::is_directory(status)) {
      found.push_back(path);
      continue;
    }
    const std::size_t before = found.size();
    add_folder(found, path, files);
    check<ValueError>(found.size() > before, "data: the folder '{}' holds no text file",
                      shown(path.string(), 300));
  }
  return found;
}

bool has_lines(const Path& file) { return file.extension() == ".jsonl"; }

// ---- tokens ----

/// Encodes documents for one model.
class Encoder {
 public:
  explicit Encoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer), eos_(tokenizer.eos_token_id()) {}

  void add(TokenizedText& to, std::string_view text) const { to.add(ended(tokenizer_.encode(text))); }

  /// ValueError, which the caller says the place of, for a completion that adds no token.
  void add(TokenizedText& to, const std::string& prompt, const std::string& completion) const {
    const std::vector<std::int64_t> given = tokenizer_.encode(prompt);
    const std::vector<std::int64_t> all = ended(tokenizer_.encode(prompt + completion));
    const auto same = std::ranges::mismatch(given, all).in1 - given.begin();
    check<ValueError>(same < static_cast<std::ptrdiff_t>(all.size()), "its completion is no token");
    to.add(all, same);
  }

 private:
  std::vector<std::int64_t> ended(std::vector<std::int64_t> tokens) const {
    if (eos_ && (tokens.empty() || tokens.back() != *eos_)) tokens.push_back(*eos_);
    check<ValueError>(!tokens.empty(), "its text is no token");
    return tokens;
  }

  const Tokenizer& tokenizer_;
  std::optional<std::int64_t> eos_;
};

// ---- plain text ----

void add_plain(TrainingText& text, const Path& path, const Encoder& encoder, FileSystem& files) {
  const std::unique_ptr<InputFile> file = files.open(path);
  const std::uint64_t size = file->size();
  check<ValueError>(size > 0, "data: the file '{}' is empty", shown(path.string(), 300));
  check<ValueError>(size <= most_text_bytes,
                    "data: '{}': has {} bytes; a text has at most {}, cut it into files",
                    shown(path.string(), 300), size, most_text_bytes);
  const std::string whole = read_part(*file, 0, size);
  std::size_t cut = size / 10 * 9 + size % 10 * 9 / 10;
  while (cut > 0 && (static_cast<unsigned char>(whole[cut]) & 0xC0U) == 0x80U) --cut;  // within a character
  const std::string_view all = whole;
  if (cut > 0) encoder.add(text.train, all.substr(0, cut));
  if (cut < size) encoder.add(cut > 0 ? text.validation : text.train, all.substr(cut));
}

// ---- lines of JSON ----

/// Calls `on(number, line)` with each line, from 1.
template <class F>
void each_line(InputFile& file, F&& on) {
  std::string line;
  std::int64_t number = 1;
  for (std::uint64_t at = 0; at < file.size();) {
    const std::uint64_t end = std::min(at + chunk_bytes, file.size());
    const std::string part = read_part(file, at, end);
    at = end;
    for (std::string_view rest = part; !rest.empty();) {
      const std::size_t length = rest.find('\n');
      line += rest.substr(0, length);
      check<ValueError>(line.size() <= most_line_bytes, "line {}: has more than {} bytes", number,
                        most_line_bytes);
      if (length == rest.npos) break;
      on(number++, line);
      line.clear();
      rest.remove_prefix(length + 1);
    }
  }
  if (!line.empty()) on(number, line);
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == line.npos; }

/// Of what lies within values nothing is kept.
json parsed(std::string_view line) {
  try {
    return json::parse(line, [](int depth, json::parse_event_t, const json&) {
      check<ValueError>(depth <= most_depth, "is nested deeper than {} levels", most_depth);
      return depth <= 1;
    });
  } catch (const json::parse_error& error) {
    fail<ValueError>("is no JSON from its byte {} on", error.byte);
  } catch (const json::out_of_range&) {
    fail<ValueError>("has a number that is too large for f64");
  }
}

/// The string of that name, if it is there. ValueError for something else and for an empty one.
const std::string* text_in(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return nullptr;
  check<ValueError>(found->is_string(), "its {} is {}, it takes a string", key, found->type_name());
  const std::string& text = found->get_ref<const std::string&>();
  check<ValueError>(!text.empty(), "its {} is empty", key);
  return &text;
}

void add_line(TokenizedText& to, std::string_view line, const Encoder& encoder) {
  const json object = parsed(line);
  check<ValueError>(object.is_object(), "is {}, a line is an object", object.type_name());
  const std::string *text = text_in(object, "text"), *prompt = text_in(object, "prompt"),
                    *completion = text_in(object, "completion");
  const bool plain = text != nullptr && prompt == nullptr && completion == nullptr,
             pair = text == nullptr && prompt != nullptr && completion != nullptr;
  std::string keys;
  for (const auto& [key, value] : object.items()) keys += (keys.empty() ? "" : ", ") + key;
  check<ValueError>(plain || pair, "has the keys ({}); it takes text, or prompt and completion", shown(keys));
  if (plain)
    encoder.add(to, *text);
  else
    encoder.add(to, *prompt, *completion);
}

TokenizedText read_lines(const Path& path, const Encoder& encoder, FileSystem& files) {
  const std::unique_ptr<InputFile> file = files.open(path);
  TokenizedText all;
  std::int64_t at = 0;
  try {
    each_line(*file, [&](std::int64_t number, std::string_view line) {
      constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
      if (number == 1 && line.starts_with(byte_order_mark)) line.remove_prefix(byte_order_mark.size());
      at = number;
      if (!is_blank(line)) add_line(all, line, encoder);
      at = 0;
    });
  } catch (const ValueError& error) {
    fail<ValueError>("data: '{}': {}{}", shown(path.string(), 300),
                     at > 0 ? fmt::format("line {}: ", at) : "", error.what());
  }
  check<ValueError>(all.documents() > 0, "data: '{}': has no line with a document",
                    shown(path.string(), 300));
  return all;
}

/// Documents from `first` on go to the end of `to`.
void append(TokenizedText& to, const TokenizedText& from, std::int64_t first, std::int64_t end) {
  for (auto d = static_cast<std::size_t>(first); d < static_cast<std::size_t>(end); ++d) {
    const std::int64_t begin = d == 0 ? 0 : from.ends[d - 1];
    to.tokens.insert(to.tokens.end(), from.tokens.begin() + begin, from.tokens.begin() + from.ends[d]);
    to.ends.push_back(static_cast<std::int64_t>(to.tokens.size()));
    to.prompts.push_back(from.prompts[d]);
  }
}

void drop_last(TokenizedText& text) {
  text.ends.pop_back(), text.prompts.pop_back();
  text.tokens.resize(text.ends.empty() ? 0 : static_cast<std::size_t>(text.ends.back()));
}

/// Training and validation have a document each.
void share_out(TrainingText& text) {
  if (text.validation.documents() > 0 && text.train.documents() > 0) return;
  check<ValueError>(
      text.train.documents() + text.validation.documents() >= 2,
      "data: makes one document; one to train on and one to validate with are needed, give more");
  TokenizedText &has = text.train.documents() > 0 ? text.train : text.validation,
                &lacks = text.train.documents() > 0 ? text.validation : text.train;
  append(lacks, has, has.documents() - 1, has.documents());
  drop_last(has);
}

// ---- the file of tokens ----

template <class T>
TensorRecord record(std::string name, DType dtype, const std::vector<T>& values) {
  return {
      std::move(name), dtype, {static_cast<std::int64_t>(values.size())}, std::as_bytes(std::span(values))};
}

template <class T>
std::vector<T> values_in(const SafetensorsFile& file, const std::string& name, DType dtype) {
  const TensorEntry* entry = file.find(name);
  check<ValueError>(entry != nullptr && entry->shape.size() == 1 && file.dtype_of(*entry) == dtype,
                    "has no list '{}' of {}", name, name_of(dtype));
  std::vector<T> values(static_cast<std::size_t>(entry->shape[0]));
  file.read(*entry, std::as_writable_bytes(std::span(values)));
  return values;
}

TokenizedText part_in(const SafetensorsFile& file, const std::string& part) {
  TokenizedText text{values_in<std::int32_t>(file, part + ".tokens", i32),
                     values_in<std::int64_t>(file, part + ".ends", i64),
                     values_in<std::int64_t>(file, part + ".prompts", i64)};
  text.check();
  return text;
}

}  // namespace
}  // namespace training_text

TrainingText read_training_text(std::span<const std::string> paths, const Tokenizer& tokenizer,
                                FileSystem& files) {
  namespace t = training_text;
  const t::Encoder encoder(tokenizer);
  TrainingText text;
  for (const FileSystem::Path& path : t::files_of(paths, files)) {
    ++text.files;
    if (!t::has_lines(path)) {
      t::add_plain(text, path, encoder, files);
      continue;
    }
    const TokenizedText lines = t::read_lines(path, encoder, files);
    const std::int64_t all = lines.documents(), trained = all - all / 10;
    t::append(text.train, lines, 0, trained);
    t::append(text.validation, lines, trained, all);
  }
  t::share_out(text);
  return text;
}

std::string training_text_digest(std::span<const std::string> paths, const FileSystem::Path& tokenizer,
                                 FileSystem& files) {
  Digest digest;
  for (const char* name :
       {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"}) {
    digest.add(name);
    if (files.exists(tokenizer / name)) digest.add(*files.open(tokenizer / name));
  }
  for (const FileSystem::Path& path : training_text::files_of(paths, files)) {
    digest.add(training_text::has_lines(path) ? "lines" : "text");
    digest.add(*files.open(path));
  }
  return digest.value();
}

void save_training_text(const TrainingText& text, const std::string& digest, const FileSystem::Path& file,
                        FileSystem& files) {
  using training_text::record;
  std::vector<TensorRecord> records;
  for (const auto& [name, part] :
       {std::pair("train", &text.train), std::pair("validation", &text.validation)}) {
    const std::string prefix = std::string(name) + ".";
    records.push_back(record(prefix + "tokens", i32, part->tokens));
    records.push_back(record(prefix + "ends", i64, part->ends));
    records.push_back(record(prefix + "prompts", i64, part->prompts));
  }
  save_safetensors(file, records,
                   {{std::string(training_text::digest_key), digest}, {"files", std::to_string(text.files)}},
                   files);
}

TrainingText load_training_text(const FileSystem::Path& file, const std::string& digest, FileSystem& files) {
  const std::string where = shown(file.string(), 300);
  const SafetensorsFile tokens(file, files);
  const auto note = [&](std::string_view key) {
    const auto found = tokens.metadata().find(std::string(key));
    return found == tokens.metadata().end() ? std::string() : found->second;
  };
  const std::string its = note(training_text::digest_key), count = note("files");
  check<ValueError>(its == digest && tokens.has_checksums(),
                    "data: '{}': has tokens of other data ({}, in place of {})", where,
                    its.empty() ? "none named" : shown(its), digest);
  try {
    TrainingText text{training_text::part_in(tokens, "train"), training_text::part_in(tokens, "validation")};
    std::from_chars(count.data(), count.data() + count.size(), text.files);
    return text;
  } catch (const ValueError& error) {
    fail<ValueError>("data: '{}': {}", where, error.what());
  }
}

}  // namespace sherd::nn
