#include "nn/pretrained.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "nn/digest.h"
#include "nn/lora.h"
#include "nn/on_meta.h"
#include "nn/pretrained_config.h"
#include "nn/pretrained_parts.h"
#include "nn/state_file.h"
#include "nn/state_names.h"
#include "runtime/context.h"
#include "runtime/io/durable.h"
#include "runtime/log.h"
#include "runtime/ops.h"
#include "runtime/shown.h"

namespace sherd::nn {
namespace {

using nlohmann::json;
using Path = FileSystem::Path;

constexpr std::string_view whole_file = "model.safetensors", index_file = "model.safetensors.index.json",
                           config_file = "config.json";

// ---- names ----

/// Where a parameter stands in files.
struct Stored {
  std::string name;
  bool transposed = false;  // (in, out), as GPT-2's Conv1D has its matrices
};

/// What the files of a kind of model call things.
struct Dialect {
  std::string_view trunk;  // what names begin with, but not in files of the model without its head
  Stored (*stored)(const std::string& own);
  bool (*is_derived)(std::string_view name);  // buffers that older files hold, and nobody needs
};

Stored gpt_stored(const std::string& own) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 4> outer = {
      {{"tok.", "transformer.wte."},
       {"pos.", "transformer.wpe."},
       {"ln.", "transformer.ln_f."},
       {"head.", "lm_head."}}};
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 6> inner = {
      {{"ln1.", "ln_1."},
       {"ln2.", "ln_2."},
       {"qkv.", "attn.c_attn."},
       {"out.", "attn.c_proj."},
       {"up.", "mlp.c_fc."},
       {"down.", "mlp.c_proj."}}};
  const auto renamed = [&](const auto& table, std::string_view name) -> std::string {
    for (const auto& [from, to] : table)
      if (name.starts_with(from)) return std::string(to) + std::string(name.substr(from.size()));
    fail<InternalError>("pretrained: Gpt has a parameter '{}' of no known name", own);
  };
  constexpr std::string_view blocks = "blocks.";
  if (!own.starts_with(blocks)) return {renamed(outer, own)};
  const std::size_t dot = own.find('.', blocks.size());
  const std::string name = renamed(inner, std::string_view(own).substr(dot + 1));
  return {"transformer.h." + own.substr(blocks.size(), dot + 1 - blocks.size()) + name,
          name.find(".c_") != std::string::npos && name.ends_with(".weight")};
}

constexpr Dialect gpt_dialect = {"transformer.", gpt_stored, [](std::string_view name) {
                                   return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
                                 }};
constexpr Dialect llama_dialect = {
    "model.", [](const std::string& own) { return Stored{own}; },
    [](std::string_view name) { return name.ends_with(".rotary_emb.inv_freq"); }};

/// A parameter and where it may stand; a tied one has several places.
struct Member {
  Parameter parameter;
  std::vector<Stored> stored;
  std::vector<std::string> own;  ///< what the model calls it there
};

/// The parameters of a model without its adapters, also those that a flat one hides.
std::vector<Member> members_of(const Module& model, const Dialect& dialect) {
  struct Finder final : MemberVisitor {
    const Dialect& dialect;
    std::string prefix;
    std::vector<Member> found;
    std::unordered_map<const void*, std::size_t> places;
    explicit Finder(const Dialect& dialect) : dialect(dialect) {}
    void param(std::string_view name, Param& member) override {
      if (!member.defined()) return;
      const auto [place, is_new] = places.emplace(member.object().id(), found.size());
      if (is_new) found.push_back({member.object(), {}, {}});
      Member& of = found[place->second];
      of.own.push_back(prefix + std::string(name));
      of.stored.push_back(dialect.stored(of.own.back()));
    }
    void child(std::string_view name, Module& member) override {
      if (dynamic_cast<const LoraFactor*>(&member) != nullptr) return;
      const std::string outer = prefix;
      prefix += std::string(name) + ".";
      member.visit_members(*this);
      prefix = outer;
    }
  };
  Finder finder(dialect);
  const_cast<Module&>(model).visit_members(finder);  // `visit` is not const; this only reads
  return std::move(finder.found);
}

// ---- files ----

/// A tensor of one of the files.
struct Place {
  const SafetensorsFile* file = nullptr;
  const TensorEntry* entry = nullptr;
  std::string in;  // the file's name
};

/// The tensors of a folder.
class Weights {
 public:
  Weights(const Path& folder, FileSystem& files) : folder_(folder), files_(files) {
    if (files.exists(folder / whole_file)) {
      add(std::string(whole_file));
      return;
    }
    check<FileError>(files.exists(folder / index_file), "pretrained: '{}': has no {} and no {}",
                     shown(folder.string(), 300), whole_file, index_file);
    add_indexed();
  }

  std::map<std::string, Place, std::less<>> sound;
  std::map<std::string, std::string, std::less<>> damaged;  // and why

  const Place* find(std::string_view name) const {
    const auto found = sound.find(name);
    return found == sound.end() ? nullptr : &found->second;
  }

 private:
  void add(const std::string& name) {
    files_open_.push_back(std::make_unique<SafetensorsFile>(folder_ / name, files_, Damage::refuses_tensor));
    for (const TensorEntry& entry : files_open_.back()->entries()) {
      const auto [place, is_new] = sound.emplace(entry.name, Place{files_open_.back().get(), &entry, name});
      if (!is_new)
        damaged[entry.name] = fmt::format("it is in '{}' and in '{}'", shown(place->second.in), name);
    }
  }

  void add_indexed() {
    // What is parsed takes a multiple in memory; an index of very many tensors still fits.
    constexpr std::uint64_t most_bytes = std::uint64_t{1} << 24;
    const json index = pretrained::read_object(folder_ / index_file, files_, most_bytes);
    const auto map = index.find("weight_map");
    check<ValueError>(map != index.end() && map->is_object(), "pretrained: '{}': has no object weight_map",
                      shown((folder_ / index_file).string(), 300));
    std::map<std::string, std::vector<std::string>> names;  // by file
    for (const auto& [name, file] : map->items()) {
      // A name with folders in it may lead anywhere.
      const bool plain =
          file.is_string() && file.get_ref<const std::string&>().ends_with(".safetensors") &&
          file.get_ref<const std::string&>().find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
      if (plain)
        names[file.get<std::string>()].push_back(name);
      else
        damaged[name] = fmt::format("the index places it in {}, which is no safetensors file of the folder",
                                    shown(file.dump(-1, ' ', true)));
    }
    for (const auto& [file, inside] : names) add_or_note(file, inside);
    for (const auto& [name, why] : damaged) sound.erase(name);
  }

  /// Where the file cannot be read its tensors are damaged.
  void add_or_note(const std::string& file, const std::vector<std::string>& inside) {
    const auto note = [&](const std::string& why) {
      for (const std::string& name : inside) damaged.emplace(name, why);
    };
    try {
      add(file);
    } catch (const FileError& error) {
      return note(error.what());
    } catch (const ValueError& error) {
      return note(error.what());
    }
    for (const std::string& name : inside)
      if (files_open_.back()->find(name) == nullptr)
        damaged.emplace(name, fmt::format("the index places it in '{}', which lacks it", shown(file)));
  }

  Path folder_;
  FileSystem& files_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_open_;
};

// ---- floats of 8 bits ----

/// The numbers behind the 256 codes of a format; null for a dtype that is none.
const std::array<float, 256>* eight_bits(std::string_view dtype) {
  // A sign, `exponent` bits with `bias`, `mantissa` bits (Micikevicius et al., 2022).
  const auto made = [](int mantissa, int bias, auto special) {
    std::array<float, 256> numbers{};
    for (int code = 0; code < 256; ++code) {
      const int size = code & 127, exponent = size >> mantissa, rest = size & ((1 << mantissa) - 1);
      const float number =
          exponent == 0 ? std::ldexp(static_cast<float>(rest), 1 - bias - mantissa)
                        : std::ldexp(static_cast<float>(rest + (1 << mantissa)), exponent - bias - mantissa);
      numbers[static_cast<std::size_t>(code)] =
          std::copysign(special(size, number), code < 128 ? 1.0F : -1.0F);
    }
    return numbers;
  };
  static const auto e4m3 = made(3, 7, [](int size, float x) { return size == 127 ? std::nanf("") : x; });
  static const auto e5m2 = made(2, 15, [](int size, float x) {
    return size > 124 ? std::nanf("") : size == 124 ? HUGE_VALF : x;
  });
  return dtype == "F8_E4M3" ? &e4m3 : dtype == "F8_E5M2" ? &e5m2 : nullptr;
}

/// What stands beside a weight of 8 bits: its scale, and scales of what it is multiplied with.
struct Companions {
  std::vector<std::string> scales, others;
  explicit Companions(const std::string& name) : scales{name + "_scale", name + "_scale_inv"} {
    const std::string layer = name.substr(0, name.rfind('.') + 1);
    others = {layer + "input_scale", layer + "activation_scale"};
  }
};

/// Multiplies `x` (f32) by `scale`: one number, one a row, or one a block.
Tensor scaled(const Tensor& x, const Tensor& scale, std::pair<std::int64_t, std::int64_t> block) {
  if (scale.numel() == 1) return mul(x, reshape(scale, Shape{}));
  const auto parts = [](std::int64_t whole, std::int64_t part) { return (whole + part - 1) / part; };
  if (x.rank() == 2 && scale.numel() == x.size(0) && scale.rank() <= 2 && scale.size(0) == x.size(0))
    return mul(x, reshape(scale, {-1, 1}));
  check<ValueError>(
      x.rank() == 2 && scale.shape() == Shape{parts(x.size(0), block.first), parts(x.size(1), block.second)},
      "its scale has shape {}; one number, one a row and one a block of {} x {} are known", scale.shape(),
      block.first, block.second);
  const std::int64_t columns = x.size(1);
  float* numbers = x.mutable_data<float>();
  const auto scales = scale.to_vector<float>();
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const std::int64_t at = i / columns / block.first * scale.size(1) + i % columns / block.second;
    numbers[i] *= scales[static_cast<std::size_t>(at)];
  }
  return x;
}

// ---- loading ----

class Loader {
 public:
  Loader(Module& model, const Dialect& dialect, const Path& folder, const LoadOptions& options)
      : model_(model),
        dialect_(dialect),
        folder_(folder),
        options_(options),
        weights_(folder, options.files) {}

  /// Whether the files have other values under a second name of a parameter. Changes nothing.
  bool has_untied() {
    find(members_of(model_, dialect_));
    return untied_;
  }

  /// All that the files have for the model, under the model's names, for as long as this lives. Errors as of
  /// a strict `load`.
  std::vector<TensorRecord> records(DType dtype) {
    find(members_of(model_, dialect_));
    refuse("nothing was read", every_one);
    std::vector<TensorRecord> records;
    for (const Source& source : sources_) {
      const Shape shape = source.parameter.shape();
      records.push_back({source.own,
                         dtype,
                         {shape.begin(), shape.end()},
                         {},
                         [this, &source, dtype](std::span<std::byte> into) { read(source, dtype, into); }});
    }
    return records;
  }

  LoadReport load() {
    const std::vector<Member> members = members_of(model_, dialect_);
    find(members);
    if (options_.strict == Strict::yes) refuse("nothing was changed");
    give_memory(members);
    for (const Source& source : sources_) {
      if (const std::optional<Tensor> values = read(source)) pretrained::give(source.parameter, *values);
    }
    if (options_.strict == Strict::yes) refuse("the others were loaded");
    return std::move(report_);
  }

 private:
  struct Source {
    Parameter parameter;
    std::string name;
    Place place;
    bool transposed = false;
    std::string own;
  };

  static constexpr std::string_view every_one = "all of them are needed";

  /// Compares names and headers with the model.
  void find(const std::vector<Member>& members) {
    std::set<std::string, std::less<>> used;
    for (const auto& [name, why] : weights_.damaged) report_.damaged.push_back({name, why});
    for (const Member& member : members) find(member, used);
    for (const auto& [name, place] : weights_.sound)
      if (!used.contains(name) && !dialect_.is_derived(name)) report_.unknown.push_back(name);
    std::ranges::sort(report_.missing);
  }

  /// The first of a member's names that the files have gives the values; its others are known too.
  void find(const Member& member, std::set<std::string, std::less<>>& used) {
    bool seen = false, found = false;
    Source first;
    for (const Stored& stored : member.stored) {
      for (const std::string& name : {stored.name, without_trunk(stored.name)}) {
        seen = seen || weights_.damaged.contains(name);
        const Place* place = weights_.find(name);
        if (place == nullptr || !used.insert(name).second) continue;
        Source source{member.parameter, name, *place, stored.transposed, member.own.front()};
        if (std::exchange(found, true))
          compare(first, source);
        else
          add(first = source, used);
      }
    }
    if (!seen && !found) report_.missing.push_back(member.stored.front().name);
  }

  /// A second name of what the model has once: damaged where its values are others.
  void compare(const Source& first, const Source& second) {
    if (!flaw_of(first).empty()) return;  // is reported
    std::string why = flaw_of(second);
    if (why.empty()) {
      const std::optional<Tensor> a = read(first), b = read(second);
      if (!a || !b || same_values(*a, *b)) return;
      untied_ = true;
      why = fmt::format(
          "its values are not those of '{}', and the model has one parameter for both; make it "
          "with tie_word_embeddings = false, as load_gpt and load_llama do",
          shown(first.name));
    }
    report_.damaged.push_back({second.name, std::move(why)});
  }

  std::string without_trunk(const std::string& name) const {
    return name.starts_with(dialect_.trunk) ? name.substr(dialect_.trunk.size()) : name;
  }

  /// A source, unless its entry tells that it is none.
  void add(Source source, std::set<std::string, std::less<>>& used) {
    if (eight_bits(source.place.entry->dtype) != nullptr) {
      const Companions beside(source.name);
      for (const auto* list : {&beside.scales, &beside.others})
        for (const std::string& name : *list)
          if (weights_.find(name) != nullptr) used.insert(name);
    }
    if (std::string why = flaw_of(source); !why.empty())
      report_.damaged.push_back({source.name, std::move(why)});
    else
      sources_.push_back(std::move(source));
  }

  static std::string flaw_of(const Source& s) {
    const TensorEntry& entry = *s.place.entry;
    Shape wanted = s.parameter.shape();
    if (s.transposed) std::swap(wanted[0], wanted[1]);
    try {
      const bool eight = entry.flaw.empty() && eight_bits(entry.dtype) != nullptr;
      const bool floating = eight || is_floating(s.place.file->dtype_of(entry));
      if (!floating)
        return fmt::format("it holds {} in '{}', the model takes floats", entry.dtype, s.place.in);
      if (!std::ranges::equal(entry.shape, wanted))
        return fmt::format("it has shape [{}] in '{}', the model takes {}",
                           shown(fmt::format("{}", fmt::join(entry.shape, ", "))), s.place.in, wanted);
      if (eight && entry.bytes != static_cast<std::uint64_t>(wanted.numel()))
        return fmt::format("it has {} bytes in '{}' for {} elements of {}", entry.bytes, s.place.in,
                           wanted.numel(), entry.dtype);
    } catch (const ValueError& error) {
      return error.what();
    }
    return {};
  }

  /// The values as the model has them; none, and a report, where they cannot be read.
  std::optional<Tensor> read(const Source& source) {
    const auto damaged = [&](const Error& error) {
      report_.damaged.push_back({source.name, error.what()});
      return std::nullopt;
    };
    try {
      const auto* codes = eight_bits(source.place.entry->dtype);
      const Tensor values = codes != nullptr ? read_eight_bits(source, *codes)
                                             : load_tensor(*source.place.file, *source.place.entry);
      return source.transposed ? transpose(values, 0, 1) : values;
    } catch (const FileError& error) {
      return damaged(error);
    } catch (const ValueError& error) {
      return damaged(error);
    } catch (const ShapeError& error) {
      return damaged(error);
    }
  }

  void read(const Source& source, DType dtype, std::span<std::byte> into) {
    const NoGrad guard;
    const std::optional<Tensor> values = read(source);
    if (!values) refuse("reading ended there", every_one);
    copy_(from_blob(into.data(), source.parameter.shape(), dtype), *values);
  }

  /// In f32.
  Tensor read_eight_bits(const Source& source, const std::array<float, 256>& numbers) {
    const TensorEntry& entry = *source.place.entry;
    std::vector<std::byte> bytes(entry.bytes);
    source.place.file->read(entry, bytes);
    Tensor values = empty(Shape(std::span(entry.shape)), {f32, Device::cpu()});
    std::ranges::transform(bytes, values.mutable_data<float>(),
                           [&](std::byte b) { return numbers[std::to_integer<std::size_t>(b)]; });
    for (const std::string& name : Companions(source.name).scales) {
      check<ValueError>(!weights_.damaged.contains(name), "its scale '{}' is damaged", shown(name));
      const Place* scale = weights_.find(name);
      if (scale == nullptr) continue;
      if (!scale_block_) scale_block_ = pretrained::scale_block(folder_, options_.files);
      values = scaled(values, to(load_tensor(*scale->file, *scale->entry), f32), *scale_block_);
    }
    return values;
  }

  /// Gives parameters on `meta` their memory.
  void give_memory(const std::vector<Member>& members) {
    if (std::ranges::none_of(members, [](const Member& m) { return on_meta(m.parameter); })) return;
    check<DeviceError>(
        sources_.size() == members.size(),
        "load_pretrained: '{}': has values for {} of {} parameters, and the others are on meta, "
        "where they hold none; make the model on a device",
        shown(folder_.string(), 300), sources_.size(), members.size());
    for (const Parameter& p : lora_parameters(model_))
      check<DeviceError>(!on_meta(p),
                         "load_pretrained: '{}': has no values for the model's adapters, and these are on "
                         "meta; call add_lora after it",
                         shown(folder_.string(), 300));
    model_.materialize(options_.device, [](const std::string&, const Tensor& whole) { fill_(whole, 0); });
  }

  /// ValueError for what there is to report.
  void refuse(std::string_view state,
              std::string_view way_out = "pass Strict::no for a report in place of this") const {
    if (report_.complete()) return;
    std::vector<std::string> parts;
    const auto add = [&](std::string_view what, const std::vector<std::string>& names) {
      if (names.empty()) return;
      constexpr std::size_t few = 3;
      const auto shown_names = std::span(names).first(std::min(few, names.size()));
      parts.push_back(fmt::format("{} {} ({}{})", names.size(), what, fmt::join(shown_names, ", "),
                                  names.size() > few ? ", ..." : ""));
    };
    std::vector<std::string> damaged, missing, unknown;
    for (const auto& [name, why] : report_.damaged)
      damaged.push_back(fmt::format("'{}': {}", shown(name), shown(why, 400)));
    for (const std::string& name : report_.missing) missing.push_back(fmt::format("'{}'", shown(name)));
    for (const std::string& name : report_.unknown) unknown.push_back(fmt::format("'{}'", shown(name)));
    add("damaged", damaged);
    add("missing", missing);
    add("unknown", unknown);
    fail<ValueError>("load_pretrained: '{}': tensors are {}; {}; {}{}", shown(folder_.string(), 300),
                     fmt::join(parts, ", "), state, way_out,
                     report_.missing.empty() ? "" : names_beside(report_.unknown, report_.missing[0]));
  }

  Module& model_;
  const Dialect& dialect_;
  const Path& folder_;
  const LoadOptions& options_;
  Weights weights_;
  std::vector<Source> sources_;
  std::optional<std::pair<std::int64_t, std::int64_t>> scale_block_;
  LoadReport report_;
  bool untied_ = false;
};

LoadReport load(Module& model, const Dialect& dialect, const Path& folder, const LoadOptions& options) {
  const NoGrad guard;
  return Loader(model, dialect, folder, options).load();
}

/// Whether the folder has other values for the head than for the embedding with which `tied` has one
/// parameter for both.
template <class Model>
bool has_head_of_its_own(Model tied, const Path& folder, FileSystem& files) {
  const LoadOptions options{Strict::no, {}, files};
  constexpr bool gpt = std::is_same_v<Model, Gpt>;
  return Loader(tied, gpt ? gpt_dialect : llama_dialect, folder, options).has_untied();
}

/// A model made on `meta`, so that the files are looked at before it takes memory.
template <class Model, class Options>
Model loaded(Options options, const Path& folder, std::optional<DType> dtype, Device device,
             FileSystem& files) {
  options.tensor = {dtype.value_or(options.tensor.dtype), Device::meta()};
  if (options.tie_word_embeddings && has_head_of_its_own(Model(options), folder, files)) {
    options.tie_word_embeddings = false;
    write_log(LogLevel::warning,
              "pretrained: '{}': tie_word_embeddings is true, and the head's values are not the embedding's: "
              "the file's head is taken, without the tie",
              shown(folder.string(), 300));
  }
  Model model(options);
  load_pretrained(model, folder, {Strict::yes, device, files});
  model.options.tensor.device = device;
  return model;
}

// ---- saving ----

void put(const Tensor& values, std::span<std::byte> into) {
  const NoGrad guard;
  copy_(from_blob(into.data(), values.shape(), values.dtype()), to(values, Device::cpu()));
}

std::vector<TensorRecord> records_of(const StateDict& state) {
  std::vector<TensorRecord> records;
  for (const auto& [name, t] : state)
    records.push_back(
        {name, t.dtype(), {t.shape().begin(), t.shape().end()}, {}, [&values = t](std::span<std::byte> into) {
           put(values, into);
         }});
  return records;
}

std::uint64_t bytes_of(const TensorRecord& record) {
  return static_cast<std::uint64_t>(Shape(std::span(record.shape)).numel()) * size_of(record.dtype);
}

/// The model's values under the names of files; transposed ones are views.
StateDict stored_state(const Module& model, const Dialect& dialect) {
  StateDict state;
  for (const Member& member : members_of(model, dialect)) {
    const auto& [name, transposed] = member.stored.front();
    const Parameter& p = member.parameter;
    const Tensor values = pretrained::whole_of(p, name, "save_pretrained");
    state.emplace_back(name, transposed ? transpose(values, 0, 1) : values);
  }
  return state;
}

/// FileError where the folder that is replaced holds something that is not written anew.
void check_replaceable(const Path& folder, FileSystem& files) {
  if (!files.is_directory(folder)) return;
  for (const std::string& name : files.list(folder))
    check<FileError>(
        name == config_file || name == index_file || name == whole_file ||
            (name.starts_with("model-") && name.ends_with(".safetensors")),
        "save_pretrained: '{}': holds '{}', which replacing the folder would remove; name another folder",
        shown(folder.string(), 300), shown(name));
}

void save(std::span<const TensorRecord> tensors, const Path& folder, const json& config,
          const SavePretrainedOptions& options) {
  check<ValueError>(options.max_shard_size > 0, "save_pretrained: max_shard_size is 0, it is 1 byte or more");
  check_replaceable(folder, options.files);
  std::vector<std::vector<TensorRecord>> shards;
  std::uint64_t in_shard = 0, in_all = 0;
  for (const TensorRecord& tensor : tensors) {
    const std::uint64_t bytes = bytes_of(tensor);
    if (shards.empty() || in_shard + bytes > options.max_shard_size) {
      shards.emplace_back();
      in_shard = 0;
    }
    shards.back().push_back(tensor);
    in_shard += bytes;
    in_all += bytes;
  }
  const auto name_of_shard = [&](std::size_t i) {
    return shards.size() == 1 ? std::string(whole_file)
                              : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  };
  json index = {{"metadata", {{"total_size", in_all}}}, {"weight_map", json::object()}};
  for (std::size_t i = 0; i < shards.size(); ++i)
    for (const TensorRecord& tensor : shards[i]) index["weight_map"][tensor.name] = name_of_shard(i);
  const auto text = [](const json& object) {
    return object.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  };
  write_directory_durably(
      folder,
      [&](DirectoryWriter& writer) {
        for (std::size_t i = 0; i < shards.size(); ++i)
          writer.add(name_of_shard(i),
                     [&](OutputFile& file) { write_safetensors(file, shards[i], {{"format", "pt"}}); });
        if (shards.size() > 1) writer.add(index_file, [&](OutputFile& file) { file.write(text(index)); });
        writer.add(config_file, [&](OutputFile& file) { file.write(text(config)); });
      },
      options.files);
}

std::int64_t& vocabulary(GptOptions& o) { return o.vocab; }
std::int64_t& vocabulary(LlamaOptions& o) { return o.vocab_size; }

/// The model's options with the vocabulary and the tie that its weights have now. StateError where they have
/// other shapes or names than such a model: the folder would not load.
template <class Model>
auto options_of_weights(const Model& model, const StateDict& state, const Dialect& dialect) {
  auto options = model.options;
  vocabulary(options) = state.front().second.size(0);  // the embedding, which is every model's first
  options.tie_word_embeddings =
      std::ranges::any_of(members_of(model, dialect), [](const Member& m) { return m.stored.size() > 1; });
  options.tensor.device = Device::meta();
  std::map<std::string, Shape, std::less<>> expected;
  for (const Member& m : members_of(Model(options), dialect)) {
    Shape shape = m.parameter.shape();
    if (m.stored.front().transposed) std::swap(shape[0], shape[1]);
    expected.emplace(m.stored.front().name, shape);
  }
  for (const auto& [name, tensor] : state) {
    const auto found = expected.find(name);
    check<StateError>(found != expected.end() && found->second == tensor.shape(),
                      "save_pretrained: '{}' has shape {}, a model of these options has {}; what is written "
                      "would not load: make a model of the new sizes and copy the weights into it",
                      name, tensor.shape(),
                      found == expected.end() ? "none of that name" : to_string(found->second));
    expected.erase(found);
  }
  check<StateError>(expected.empty(), "save_pretrained: the model lacks '{}', which its options ask for",
                    expected.empty() ? "" : expected.begin()->first);
  return options;
}

json config_from(const SavePretrainedOptions& options) {
  return options.config_from ? pretrained::read_object(*options.config_from / config_file, options.files)
                             : json::object();
}

template <class Model>
void save_model(const Model& model, const Dialect& dialect, const Path& folder,
                const SavePretrainedOptions& options) {
  check<StateError>(lora_parameters(model).empty(),
                    "save_pretrained: the {} has adapters, for which the folder has no place; save them with "
                    "save_lora, or merge them first",
                    model.type_name());
  const StateDict state = stored_state(model, dialect);
  const auto described = options_of_weights(model, state, dialect);
  const DType dtype = state.front().second.dtype();
  save(records_of(state), folder, pretrained::config_of(described, dtype, config_from(options)), options);
}

// ---- without a model ----

/// What kind of model a folder's config.json describes: `f` is called with its options and its dialect.
template <class F>
auto with_kind(const Path& folder, FileSystem& files, F&& f) {
  const PretrainedOptions options = pretrained_options(folder, files);
  if (const auto* gpt = std::get_if<GptOptions>(&options))
    return f(std::type_identity<Gpt>(), *gpt, gpt_dialect);
  return f(std::type_identity<Llama>(), std::get<LlamaOptions>(options), llama_dialect);
}

/// A folder that is read as long as somebody may ask for a tensor.
template <class Model>
struct OpenFolder {
  Path folder;
  LoadOptions options;
  Model model;
  Loader loader;
  template <class Options>
  OpenFolder(const Options& of_model, const Dialect& dialect, Path path, FileSystem& files)
      : folder(std::move(path)),
        options{Strict::yes, {}, files},
        model(of_model),
        loader(model, dialect, folder, options) {}
};

/// Tensors by what a model calls them.
class GivenTensors {
 public:
  explicit GivenTensors(std::span<const TensorRecord> tensors) {
    for (const TensorRecord& t : tensors)
      check<ValueError>(left_.emplace(t.name, &t).second, "save_pretrained: '{}' is there twice",
                        shown(t.name));
  }
  const TensorRecord* find(const Member& member) const {
    for (const std::string& name : member.own)
      if (const auto found = left_.find(name); found != left_.end()) return found->second;
    return nullptr;
  }
  bool have_all(const std::vector<Member>& members) const {
    return std::ranges::all_of(members, [&](const Member& m) { return find(m) != nullptr; });
  }
  const TensorRecord& take(const Member& member) {
    const TensorRecord* found = find(member);
    check<ValueError>(found != nullptr, "save_pretrained: the tensors lack '{}' of such a model",
                      member.own.front());
    check<ValueError>(std::ranges::equal(found->shape, member.parameter.shape()),
                      "save_pretrained: '{}' has shape [{}], such a model takes {}; give the config.json of "
                      "the model that it is of",
                      shown(found->name), fmt::join(found->shape, ", "), member.parameter.shape());
    for (const std::string& name : member.own) left_.erase(name);
    return *found;
  }
  void check_all_taken() const {
    check<ValueError>(left_.empty(), "save_pretrained: such a model has no '{}' ({} unknown in all)",
                      left_.empty() ? "" : shown(left_.begin()->first), left_.size());
  }

 private:
  std::map<std::string, const TensorRecord*, std::less<>> left_;
};

void read_bytes(const TensorRecord& record, std::span<std::byte> into) {
  if (record.read)
    record.read(into);
  else
    std::ranges::copy(record.bytes, into.begin());
}

/// As the files have it.
TensorRecord stored_record(const TensorRecord& own, const Stored& stored) {
  TensorRecord record{
      stored.name, own.dtype, own.shape, {}, [&own](std::span<std::byte> into) { read_bytes(own, into); }};
  if (!stored.transposed) return record;
  std::swap(record.shape[0], record.shape[1]);
  record.read = [&own](std::span<std::byte> into) {
    const Tensor values = empty(Shape(std::span(own.shape)), {own.dtype, Device::cpu()});
    read_bytes(own, {values.raw(), into.size()});
    put(transpose(values, 0, 1), into);
  };
  return record;
}

template <class Model, class Options>
void save_records(Options model, const Dialect& dialect, std::span<const TensorRecord> tensors,
                  const Path& folder, const SavePretrainedOptions& options) {
  model.tensor.device = Device::meta();
  GivenTensors given(tensors);
  if (const TensorRecord* embedding = given.find(members_of(Model(model), dialect).front());
      embedding != nullptr && !embedding->shape.empty())
    vocabulary(model) = embedding->shape[0];
  Options untied = model;
  untied.tie_word_embeddings = false;
  model.tie_word_embeddings =
      model.tie_word_embeddings && !given.have_all(members_of(Model(untied), dialect));
  std::vector<TensorRecord> stored;
  for (const Member& member : members_of(Model(model), dialect))
    stored.push_back(stored_record(given.take(member), member.stored.front()));
  given.check_all_taken();
  save(stored, folder, pretrained::config_of(model, stored.front().dtype, config_from(options)), options);
}

}  // namespace

std::string pretrained::stored_name(const Module& model, const std::string& own) {
  return dynamic_cast<const Gpt*>(&model) != nullptr ? gpt_stored(own).name : own;
}

void pretrained::give(const Parameter& p, const Tensor& whole) {
  if (p.owner() == nullptr)
    copy_(p.local().detach(), whole);
  else
    p.owner()->set_whole(p, contiguous(to(to(whole, p.local().dtype()), p.local().device())));
}

Tensor pretrained::whole_of(const Parameter& p, const std::string& name, std::string_view call) {
  check<StateError>(!on_meta(p), "{}: '{}' is on meta and holds no values", call, name);
  const Tensor values = p.owner() != nullptr ? p.owner()->state(p) : p.local().detach();
  check<StateError>(values.shape() == p.shape(),
                    "{}: '{}' of shape {} is sharded, here is a part of shape {}; save within "
                    "shard::summon_full_params",
                    call, name, p.shape(), values.shape());
  return values;
}

LoadReport load_pretrained(Gpt& model, const Path& folder, const LoadOptions& options) {
  return load(model, gpt_dialect, folder, options);
}
LoadReport load_pretrained(Llama& model, const Path& folder, const LoadOptions& options) {
  return load(model, llama_dialect, folder, options);
}

Gpt load_gpt(const Path& folder, std::optional<DType> dtype, Device device, FileSystem& files) {
  return loaded<Gpt>(gpt_options(folder, files), folder, dtype, device, files);
}
Llama load_llama(const Path& folder, std::optional<DType> dtype, Device device, FileSystem& files) {
  return loaded<Llama>(llama_options(folder, files), folder, dtype, device, files);
}

PretrainedOptions pretrained_options(const Path& folder, FileSystem& files) {
  const json config = pretrained::read_object(folder / config_file, files);
  const auto type = config.find("model_type");
  if (type == config.end() || *type == "gpt2") return gpt_options(folder, files);
  return llama_options(folder, files);  // which refuses others
}

std::variant<Gpt, Llama> load_gpt_or_llama(const Path& folder, std::optional<DType> dtype, Device device,
                                           FileSystem& files) {
  return with_kind(folder, files,
                   [&]<class Model>(std::type_identity<Model>, const auto& options, const Dialect&) {
                     return std::variant<Gpt, Llama>(loaded<Model>(options, folder, dtype, device, files));
                   });
}

std::string pretrained_digest(const Path& folder, FileSystem& files) {
  std::vector<std::string> names = {std::string(whole_file)};
  if (!files.exists(folder / whole_file)) {
    names = files.list(folder);
    std::erase_if(
        names, [](const std::string& name) { return name != index_file && !name.ends_with(".safetensors"); });
    std::ranges::sort(names);
  }
  names.emplace_back(config_file);
  Digest digest;
  for (const std::string& name : names) {
    digest.add(name);
    digest.add(*files.open(folder / name));
  }
  return digest.value();
}

void save_pretrained(const Gpt& model, const Path& folder, const SavePretrainedOptions& options) {
  save_model(model, gpt_dialect, folder, options);
}
void save_pretrained(const Llama& model, const Path& folder, const SavePretrainedOptions& options) {
  save_model(model, llama_dialect, folder, options);
}

void save_pretrained(const GptOptions& model, std::span<const TensorRecord> tensors, const Path& folder,
                     const SavePretrainedOptions& options) {
  save_records<Gpt>(model, gpt_dialect, tensors, folder, options);
}
void save_pretrained(const LlamaOptions& model, std::span<const TensorRecord> tensors, const Path& folder,
                     const SavePretrainedOptions& options) {
  save_records<Llama>(model, llama_dialect, tensors, folder, options);
}
void save_pretrained(std::span<const TensorRecord> tensors, const Path& folder,
                     const SavePretrainedOptions& options) {
  check<ValueError>(
      options.config_from.has_value(),
      "save_pretrained: tensors alone do not say of what model they are; name a folder with its "
      "config.json as config_from");
  with_kind(*options.config_from, options.files,
            [&]<class Model>(std::type_identity<Model>, const auto& model, const Dialect& dialect) {
              save_records<Model>(model, dialect, tensors, folder, options);
            });
}

std::vector<TensorRecord> pretrained_tensors(const Path& folder, FileSystem& files) {
  return with_kind(
      folder, files, [&]<class Model>(std::type_identity<Model>, auto options, const Dialect& dialect) {
        const NoGrad guard;
        const DType dtype = options.tensor.dtype;
        options.tensor.device = Device::meta();
        options.tie_word_embeddings =
            options.tie_word_embeddings && !has_head_of_its_own(Model(options), folder, files);
        const auto open = std::make_shared<OpenFolder<Model>>(options, dialect, folder, files);
        std::vector<TensorRecord> records = open->loader.records(dtype);
        for (TensorRecord& record : records)
          record.read = [open, read = std::move(record.read)](std::span<std::byte> into) { read(into); };
        return records;
      });
}

std::vector<std::int64_t> end_tokens(const Path& folder, FileSystem& files) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    if (!files.exists(folder / name)) continue;
    const nlohmann::json config = pretrained::read_object(folder / name, files);
    const auto found = config.find("eos_token_id");
    if (found == config.end() || found->is_null()) continue;
    std::vector<std::int64_t> tokens;
    for (const nlohmann::json& token : found->is_array() ? *found : nlohmann::json::array({*found})) {
      const bool fits = token.is_number_unsigned() && token.get<std::uint64_t>() < std::uint64_t{1} << 31;
      check<ValueError>(
          fits, "pretrained: '{}': eos_token_id is {}; supported: the number of a token, or a list of such",
          shown((folder / name).string(), 300), shown(found->dump(-1, ' ', true)));
      tokens.push_back(token.get<std::int64_t>());
    }
    return tokens;
  }
  return {};
}

bool is_pretrained(const Path& folder, FileSystem& files) {
  return files.type(folder) != std::filesystem::file_type::regular && files.exists(folder / config_file) &&
         pretrained::read_object(folder / config_file, files).contains("model_type");
}

}  // namespace sherd::nn
