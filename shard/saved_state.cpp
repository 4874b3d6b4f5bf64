#include "shard/saved_state.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "runtime/context.h"
#include "runtime/io/checksum.h"
#include "runtime/io/foreign.h"
#include "runtime/ops.h"
#include "runtime/shown.h"
#include "shard/part_file.h"
#include "shard/partition.h"
#include "shard/state_source.h"

namespace sherd::shard {
namespace {

using nlohmann::json;
using Path = FileSystem::Path;

constexpr std::string_view format_name = "sherd-parts";
constexpr int format_version = 1;
constexpr std::string_view checksum_key = "checksum", checksum_marker = "\"checksum\": \"";
constexpr std::size_t most_index_bytes = std::size_t{1} << 21, most_index_depth = 4;
/// Before a tensor's name in a part's metadata. The value says where the tensor's run belongs: its first
/// element in the whole, and the whole's sizes, with spaces between.
constexpr std::string_view run_key = "sherd.run.";
/// Before the name of a tensor of which several groups of ranks have one each. The value: the number of this
/// one's group, how many there are, and the group in words.
constexpr std::string_view group_key = "sherd.group.";
/// In the metadata of a file without an index: the checksum of the file that it was saved beside.
constexpr std::string_view beside_key = "sherd.saved_beside";
/// In a part's metadata: the most steps that optimizers took of one of its parameters.
constexpr std::string_view steps_key = "sherd.steps";

/// Opens its file for every read, since a process may not have as many files open as there are parts.
class BrieflyOpen final : public InputFile {
 public:
  BrieflyOpen(Path path, FileSystem& files)
      : path_(std::move(path)), files_(files), size_(files_.open(path_)->size()) {}
  std::uint64_t size() const override { return size_; }
  void read(std::uint64_t offset, std::span<std::byte> into) override {
    files_.open(path_)->read(offset, into);
  }

 private:
  Path path_;
  FileSystem& files_;
  std::uint64_t size_;
};

/// The numbers of a note, none if it is not one: at least one, all from 0 on.
std::vector<std::int64_t> numbers_in(std::string_view note) {
  std::vector<std::int64_t> numbers;
  const char *at = note.data(), *const end = at + note.size();
  while (numbers.size() <= max_rank + 1) {
    std::int64_t number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number < 0) return {};
    numbers.push_back(number);
    if (next == end) return numbers;
    if (*next != ' ') return {};
    at = next + 1;
  }
  return {};
}

/// Of a shape; none where there are more than can be counted, or more sizes than a tensor has.
std::optional<std::int64_t> numel_of(std::span<const std::int64_t> shape) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape)
    if (__builtin_mul_overflow(numel, size, &numel)) return std::nullopt;
  return numel;
}

[[noreturn]] void refuse(const Path& file, std::string_view why) {
  fail<ValueError>("checkpoint: '{}': {}", shown(file.string(), 300), why);
}

/// What an index says of one state: a checksum of each part's header.
struct Index {
  std::vector<std::string> checksums;
  std::string own{};  ///< checksum; empty for an index without
  bool sealed() const { return !own.empty(); }
};

Index parsed_index(const std::string& text, std::string_view what) {
  const std::string_view kind = foreign_file(text);
  check<ValueError>(kind.empty(), "{}", kind);
  const json found = json::parse(text, [](int depth, json::parse_event_t, const json&) {
    check<ValueError>(depth <= static_cast<int>(most_index_depth), "nested deeper than {} levels",
                      most_index_depth);
    return true;
  });
  check<ValueError>(found.is_object() && found.value("format", "") == format_name &&
                        found.value("version", 0) == format_version,
                    "is no index of format '{}' and version {}", format_name, format_version);
  const bool sealed = found.contains(checksum_key);
  check<ValueError>(!sealed || seal_of(text, checksum_marker) == Seal::whole,
                    "is damaged: it does not fit its checksum");
  check<ValueError>(found.contains("parts") && found.at("parts").contains(std::string(what)),
                    "has no {}; it was saved without one", what);
  Index index{found.at("parts").at(std::string(what)).get<std::vector<std::string>>()};
  if (sealed) found.at(checksum_key).get_to(index.own);
  check<ValueError>(!index.checksums.empty(), "lists no part");
  return index;
}

Index read_index(const Path& path, std::string_view what, FileSystem& files) {
  try {
    return parsed_index(files.read(path, most_index_bytes), what);
  } catch (const FileError&) {
    throw;  // names it already
  } catch (const std::exception& error) {
    refuse(path, error.what());
  }
}

/// Before a state without an index is opened, whose file's name says little of what is amiss.
void check_there(const Path& folder, std::string_view what, FileSystem& files) {
  const std::string name = part_name(what, 0, 1), part = part_name(what, 0, 2);
  if (files.exists(folder / name)) return;
  check<FileError>(files.exists(folder),
                   "checkpoint: '{}' is not there; give the folder that save_checkpoint wrote, or a file of "
                   "whole tensors",
                   shown(folder.string(), 300));
  std::string_view why = "give the folder that save_checkpoint wrote";
  if (files.exists(folder / part))
    why = "parts of ranks are there, so the index is lost: copy all files of the save";
  else if (what == "optimizer" && files.exists(folder / part_name("model", 0, 1)))
    why = "it was saved without an optimizer: load the model alone";
  fail<FileError>("checkpoint: '{}' has neither {} nor {}; {}", shown(folder.string(), 300), index_name, name,
                  why);
}

}  // namespace

std::string part_name(std::string_view what, int rank, int ranks) {
  return ranks == 1 ? fmt::format("{}.safetensors", what) : fmt::format("{}.rank-{}.safetensors", what, rank);
}

Path SavedState::path() const { return folder_ / (indexed_ ? std::string(index_name) : names_[0]); }

SavedState::SavedState(Path from, std::string_view what, FileSystem& files) : folder_(std::move(from)) {
  if (files.is_file(folder_)) {
    const std::string name = folder_.filename().string();
    folder_ = folder_.parent_path();
    open_whole(name, files);
  } else if (indexed_ = files.exists(folder_ / index_name); !indexed_) {
    check_there(folder_, what, files);
    open_whole(part_name(what, 0, 1), files);
  } else {
    const Index index = read_index(folder_ / index_name, what, files);
    checksum_ = index.own;
    sealed_ = index.sealed();
    const int ranks = static_cast<int>(index.checksums.size());
    for (int rank = 0; rank < ranks; ++rank) {
      open(part_name(what, rank, ranks), files);
      check_part(index.checksums[static_cast<std::size_t>(rank)]);
    }
  }
  for (std::size_t part = 0; part < parts_.size(); ++part) add_runs(part);
  tie();
}

void SavedState::open(const std::string& name, FileSystem& files) {
  names_.push_back(name);
  const Path path = folder_ / name;
  parts_.emplace_back(std::make_unique<BrieflyOpen>(path, files), path.string());
}

void SavedState::open_whole(const std::string& name, FileSystem& files) {
  open(name, files);
  checksum_ = parts_[0].header_checksum();
  sealed_ = !checksum_.empty();
}

/// The last part is of this save.
void SavedState::check_part(const std::string& checksum) const {
  const std::string_view found = parts_.back().header_checksum();
  const Path part = folder_ / names_.back(), index = folder_ / index_name;
  if (found.empty() == sealed_)
    refuse(sealed_ ? part : index,
           fmt::format("has no checksum, {} beside it has one: it is damaged, or changed by somebody who has "
                       "to take it from all files of the checkpoint",
                       (sealed_ ? index : part).filename().string()));
  if (sealed_ && found != checksum)
    refuse(part, fmt::format(
                     "is a part of another save: its checksum is {}, {} has {}; take all files from one save",
                     found, index_name, shown(checksum)));
}

void SavedState::check_beside(const SavedState& model) const {
  if (indexed_ || model.indexed_) return;  // an index has all parts of both, and they were held against it
  const auto note = parts_[0].metadata().find(std::string(beside_key));
  if (note == parts_[0].metadata().end() || note->second == model.checksum()) return;
  if (!sealed_ && !model.sealed_) return;  // changed on purpose
  refuse(path(),
         fmt::format("is of another save than {}, whose checksum is {}: it was saved beside one of {}; take "
                     "all files from one save",
                     model.path().filename().string(), model.sealed_ ? model.checksum() : "not there",
                     shown(note->second)));
}

/// Where the elements lie that a part has.
void SavedState::add_runs(std::size_t part) {
  const SafetensorsFile& file = parts_[part];
  for (const TensorEntry& entry : file.entries()) {
    const auto note = file.metadata().find(std::string(run_key) + entry.name);
    Run run{&entry, entry.shape, part, 0, 0};
    if (note == file.metadata().end()) {
      run.numel = numel_of(entry.shape).value_or(0);  // the file's header was held against its bytes
    } else {
      const std::vector<std::int64_t> numbers = numbers_in(note->second);
      if (numbers.empty() || entry.shape.size() != 1)
        refuse(folder_ / names_[part],
               fmt::format("tensor '{}' has shape [{}] and the note '{}', which does "
                           "not say where its elements belong",
                           shown(entry.name), fmt::join(entry.shape, ", "), shown(note->second)));
      run.begin = numbers[0];
      run.numel = entry.shape[0];
      run.shape = shapes_.emplace_back(numbers.begin() + 1, numbers.end());
    }
    add_group(run);
    runs_.push_back(run);
  }
}

/// Whose tensor of the name a run is of.
void SavedState::add_group(Run& run) const {
  const TensorMetadata& notes = parts_[run.part].metadata();
  const auto note = notes.find(std::string(group_key) + run.entry->name);
  if (note == notes.end()) return;
  const std::string_view text = note->second;
  const char *at = text.data(), *const end = at + text.size();
  const auto [first_end, first_error] = std::from_chars(at, end, run.group);
  const bool two = first_error == std::errc() && first_end != end && *first_end == ' ';
  const auto [last_end, last_error] = std::from_chars(two ? first_end + 1 : end, end, run.groups);
  if (!two || last_error != std::errc() || run.group < 0 || run.group >= run.groups ||
      (last_end != end && *last_end != ' '))
    refuse(folder_ / names_[run.part],
           fmt::format("tensor '{}' has the note '{}', which does not say of which group of ranks it is",
                       shown(run.entry->name), shown(text)));
  if (last_end == end) return;
  run.saved_by = text.substr(static_cast<std::size_t>(last_end + 1 - at));
  const auto [rank_end, no_rank] = std::from_chars(last_end + 1, end, run.first_rank);
  if (no_rank == std::errc() && rank_end != end && *rank_end == ' ')
    run.saved_by = text.substr(static_cast<std::size_t>(rank_end + 1 - at));
  else
    run.first_rank = -1;  // of a save that did not note it
}

namespace {

/// What names a tensor whose groups have one each.
std::string of_group(std::string_view name, int group, int groups, std::string_view saved_by) {
  if (groups == 1) return fmt::format("'{}'", shown(name));
  return fmt::format("'{}' of group {} of {} ({})", shown(name), group, groups, shown(saved_by));
}

}  // namespace

void SavedState::refuse_run(const Run& run, const Run& first, std::int64_t expected) const {
  refuse(
      folder_ / names_[run.part],
      fmt::format("does not fit the other parts: {} is {} [{}] from element {} on, expected is {} [{}] from "
                  "{} on; take all files from one save",
                  of_group(run.entry->name, run.group, run.groups, run.saved_by), shown(run.entry->dtype),
                  fmt::join(run.shape, ", "), run.begin, shown(first.entry->dtype),
                  fmt::join(first.shape, ", "), expected));
}

/// Runs of one name and group are one tensor, which they cover without gap or overlap.
void SavedState::tie() {
  std::ranges::sort(runs_, {}, [](const Run& r) {
    return std::tuple(std::string_view(r.entry->name), r.group, r.begin, r.numel, r.part);
  });
  for (std::size_t i = 0; i < runs_.size();) {
    const Run& first = runs_[i];
    SavedTensor tensor{first.entry->name, first.shape,   i, 0, first.group, first.groups,
                       first.first_rank,  first.saved_by};
    std::int64_t at = 0;
    for (; i < runs_.size() && runs_[i].entry->name == tensor.name && runs_[i].group == tensor.group;
         ++i, ++tensor.runs) {
      const Run& run = runs_[i];
      if (run.begin != at || run.entry->dtype != first.entry->dtype || run.groups != first.groups ||
          !std::ranges::equal(run.shape, tensor.shape))
        refuse_run(run, first, at);
      at += run.numel;  // fits: a file has that many bytes
    }
    if (at != numel_of(tensor.shape))
      refuse(path(), fmt::format("no part has the elements of {} from {} on",
                                 of_group(tensor.name, tensor.group, tensor.groups, tensor.saved_by), at));
    tensors_.push_back(tensor);
  }
  check_groups();
}

/// Of a name of several groups each has a tensor.
void SavedState::check_groups() const {
  int expected = 0;
  for (const SavedTensor& t : tensors_) {
    if (t.group != expected)
      refuse(path(), fmt::format("no part has '{}' of group {} of {}", shown(t.name), expected, t.groups));
    expected = t.group + 1 == t.groups ? 0 : t.group + 1;
    const bool goes_on = &t != &tensors_.back() && (&t + 1)->name == t.name && (&t + 1)->groups == t.groups;
    if (goes_on != (expected != 0))
      refuse(path(), fmt::format("no part has '{}' of group {} of {}", shown(t.name), t.group + 1, t.groups));
  }
}

const SavedTensor* SavedState::find(std::string_view name, int group) const {
  auto found = std::ranges::lower_bound(tensors_, name, {}, &SavedTensor::name);
  if (found == tensors_.end() || found->name != name) return nullptr;
  if (found->groups > 1) found += group;
  return &*found;
}

Tensor SavedState::read(const SavedTensor& tensor, std::int64_t begin, std::int64_t numel) const {
  const NoGrad guard;
  const std::span<const Run> runs = std::span(runs_).subspan(tensor.first_run, tensor.runs);
  const auto piece = [&](const Run& run) {
    return reshape(nn::load_tensor(parts_[run.part], *run.entry), {run.numel});
  };
  for (const Run& run : runs)
    if (run.begin == begin && run.numel == numel) return piece(run);
  const Tensor all = empty({numel}, {parts_[runs[0].part].dtype_of(*runs[0].entry), Device::cpu()});
  for (const Run& run : runs) {
    const std::int64_t from = std::max(begin, run.begin), to = std::min(begin + numel, run.begin + run.numel);
    if (from < to)
      copy_(narrow(all, 0, from - begin, to - from), narrow(piece(run), 0, from - run.begin, to - from));
  }
  return all;
}

std::string SavedState::why_unread(const SavedTensor& tensor) const {
  const Run& run = runs_[tensor.first_run];
  return nn::why_unread(parts_[run.part], *run.entry);
}

std::int64_t SavedState::steps(std::string_view name) const {
  const SavedTensor* tensor = find(name);
  if (tensor == nullptr || tensor->runs == 0) return 0;
  const TensorMetadata& notes = parts_[runs_[tensor->first_run].part].metadata();
  const auto note = notes.find(std::string(steps_key));
  const std::vector<std::int64_t> number =
      note == notes.end() ? std::vector<std::int64_t>() : numbers_in(note->second);
  return number.size() == 1 ? number[0] : 0;
}

void SavedState::read_whole(const SavedTensor& tensor, std::span<std::byte> into) const {
  std::size_t at = 0;  // runs are in order and touch
  for (const Run& run : std::span(runs_).subspan(tensor.first_run, tensor.runs)) {
    const auto bytes = static_cast<std::size_t>(run.entry->bytes);
    parts_[run.part].read(*run.entry, into.subspan(at, bytes));
    at += bytes;
  }
}

void SavedState::check_group(const SavedTensor& t, std::optional<int> group) const {
  check<ValueError>(group && *group >= 0 && *group < t.groups,
                    "checkpoint: '{}': '{}' is {} tensors, one of each group of ranks (the first of {}), "
                    "and {}; name one group of 0 to {}",
                    shown(path().string(), 300), shown(t.name), t.groups, shown(t.saved_by),
                    group ? fmt::format("{} is the number of none", *group) : "one is written", t.groups - 1);
}

std::vector<TensorRecord> SavedState::records(std::optional<int> group) const {
  std::vector<TensorRecord> records;
  const SavedTensor* chosen = nullptr;  // the first of several groups
  for (const SavedTensor& t : tensors_) {
    if (t.groups > 1) {
      check_group(t, group);
      if (t.group != *group) continue;
      if (chosen == nullptr) chosen = &t;
      check<ValueError>(
          t.first_rank == chosen->first_rank,
          "checkpoint: '{}': group {} of '{}' is {} and of '{}' {}, and no model has both; load it "
          "over as many ranks as saved it, and write what is wanted from there",
          shown(path().string(), 300), *group, shown(chosen->name), shown(chosen->saved_by), shown(t.name),
          shown(t.saved_by));
    }
    const Run& first = runs_[t.first_run];
    records.push_back({std::string(t.name),
                       parts_[first.part].dtype_of(*first.entry),
                       {t.shape.begin(), t.shape.end()},
                       {},
                       [this, &t](std::span<std::byte> into) { read_whole(t, into); }});
  }
  return records;
}

TensorMetadata SavedState::notes() const {
  std::int64_t most = 0;
  for (const SavedTensor& t : tensors_) most = std::max(most, steps(t.name));
  return most > 0 ? TensorMetadata{{std::string(steps_key), std::to_string(most)}} : TensorMetadata{};
}

Signature signature_of(const Path& folder, std::string_view what, FileSystem& files) {
  if (files.exists(folder / index_name))
    return {std::string(index_name), read_index(folder / index_name, what, files).own};
  std::string name = part_name(what, 0, 1);
  const SafetensorsFile file(folder / name, files);
  return {std::move(name), std::string(file.header_checksum())};
}

namespace {

/// Says of a part's tensor where its elements belong.
void add_run_note(TensorMetadata& notes, const std::string& name, std::int64_t begin, const Shape& whole) {
  notes[std::string(run_key) + name] =
      fmt::format("{} {}", begin, fmt::join(whole.begin(), whole.end(), " "));
}

/// The part of a whole tensor's elements that a rank has of those cut along their rows.
OwnedPart rows_of(const Shape& whole, const RankOfGroup& me) {
  if (whole.rank() == 0 || whole.numel() == 0 || me.ranks == 1)
    return {.numel = me.rank == 0 ? whole.numel() : 0};
  return Partition::per_parameter({&whole, 1}, me.ranks).part(0, me.rank);
}

}  // namespace

TensorMetadata notes_beside(TensorMetadata notes, const std::string& checksum) {
  if (!checksum.empty()) notes.emplace(beside_key, checksum);
  return notes;
}

void write_rows(OutputFile& file, std::span<const TensorRecord> tensors, const RankOfGroup& me,
                TensorMetadata notes) {
  std::vector<TensorRecord> rows;
  for (const TensorRecord& t : tensors) {
    const Shape whole(std::span(t.shape));
    const OwnedPart own = rows_of(whole, me);
    if (own.numel == whole.numel()) {
      if (own.numel > 0 || me.rank == 0) rows.push_back(t);
      continue;
    }
    if (own.numel == 0) continue;
    const std::size_t size = size_of(t.dtype), all = size * static_cast<std::size_t>(whole.numel());
    rows.push_back({t.name, t.dtype, {own.numel}, {}, [&t, own, size, all](std::span<std::byte> into) {
                      std::vector<std::byte> values(t.read ? all : 0);
                      if (t.read) t.read(values);
                      const std::span<const std::byte> from = t.read ? values : t.bytes;
                      std::ranges::copy(
                          from.subspan(size * static_cast<std::size_t>(own.in_parameter), into.size()),
                          into.begin());
                    }});
    add_run_note(notes, t.name, own.in_parameter, whole);
  }
  write_safetensors(file, rows, notes);
}

void write_part(OutputFile& file, const PartOfState& part) {
  nn::StateDict written;
  TensorMetadata notes = notes_beside({}, part.beside);
  std::int64_t steps = 0;
  for (const ShardedTensor& t : part.tensors) steps = std::max(steps, t.steps);
  if (steps > 0) notes.emplace(steps_key, std::to_string(steps));
  for (std::size_t i = 0; i < part.tensors.size(); ++i) {
    const ShardedTensor& t = part.tensors[i];
    const GroupOfName& group = part.groups[i];
    const ShardedTensor share = share_of(t, group.is_first ? 0 : 1);
    const std::int64_t numel = share.values.numel();
    const bool is_whole = numel == t.shape.numel();
    if (is_whole ? numel == 0 && !group.is_first : numel == 0) continue;
    written.emplace_back(t.name, is_whole ? reshape(share.values, t.shape) : share.values);
    if (!is_whole) add_run_note(notes, t.name, share.begin, t.shape);
    if (group.groups > 1)
      notes[std::string(group_key) + t.name] =
          fmt::format("{} {} {} {}", group.number, group.groups, group.first, group.words);
  }
  nn::write_state(file, written, notes);
}

std::string index_of(const Path& folder, std::span<const std::string_view> what, int ranks,
                     FileSystem& files) {
  json parts = json::object();
  for (const std::string_view state : what)
    for (int rank = 0; rank < ranks; ++rank) {
      const Path path = folder / part_name(state, rank, ranks);
      parts[std::string(state)].push_back(SafetensorsFile(path, files).header_checksum());
    }
  const json index = {{"format", format_name},
                      {"version", format_version},
                      {"parts", parts},
                      {checksum_key, std::string(checksum_digits, '0')}};
  std::string text = index.dump(2) + "\n";
  seal(text, checksum_marker);
  return text;
}

}  // namespace sherd::shard
