// What is read of config.json of Hugging Face's models, key by key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nn/pretrained_config.h"
#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::nn::pretrained {

using nlohmann::json;

// Limits of sizes, under which no product of them is beyond 2^63.
inline constexpr std::int64_t many = std::int64_t{1} << 24, wide = std::int64_t{1} << 20,
                              heads = std::int64_t{1} << 14, deep = std::int64_t{1} << 12;

/// Settings of config.json, asked for by key; null stands for none.
class Config {
 public:
  Config(std::string file, json object) : file_(std::move(file)), object_(std::move(object)) {}
  Config(const FileSystem::Path& folder, FileSystem& files)
      : Config(shown((folder / "config.json").string(), 300), read_object(folder / "config.json", files)) {}

  /// Lets `key` be asked for where the file has it as `alias`. Refuses both with other values.
  void rename(const std::string& alias, const std::string& key) {
    const json* value = find(alias);
    if (value == nullptr) return;
    if (const json* own = find(key); own != nullptr && *own != *value)
      refuse(alias,
             fmt::format("that of {}, which it is another word for, {}", key, own->dump(-1, ' ', true)));
    object_[key] = json(*value);
  }
  /// An integer from 1 to `most`.
  std::int64_t size(const std::string& key, std::int64_t fallback, std::int64_t most) const {
    return size(key, most).value_or(fallback);
  }
  std::optional<std::int64_t> size(const std::string& key, std::int64_t most) const {
    return size_or_none(key, {}, most);
  }
  /// `fallback` stands for a key that is not there, and none for null.
  std::optional<std::int64_t> size_or_none(const std::string& key, std::optional<std::int64_t> fallback,
                                           std::int64_t most) const {
    const json* value = find(key);
    if (value == nullptr) return says_none(key) ? std::nullopt : fallback;
    const bool fits = value->is_number_unsigned() && value->get<std::uint64_t>() >= 1 &&
                      value->get<std::uint64_t>() <= static_cast<std::uint64_t>(most);
    if (!fits) refuse(key, fmt::format("an integer from 1 to {}", most));
    return value->get<std::int64_t>();
  }
  std::int64_t size_from_zero(const std::string& key, std::int64_t fallback, std::int64_t most) const {
    const json* value = find(key);
    return value != nullptr && *value == 0 ? 0 : size(key, fallback, most);
  }
  /// Two such integers.
  std::pair<std::int64_t, std::int64_t> pair(const std::string& key,
                                             std::pair<std::int64_t, std::int64_t> fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    const auto fits = [](const json& n) {
      return n.is_number_unsigned() && n.get<std::uint64_t>() >= 1 && n.get<std::uint64_t>() <= many;
    };
    if (!value->is_array() || value->size() != 2 || !fits(value->at(0)) || !fits(value->at(1)))
      refuse(key, "two integers from 1");
    return {value->at(0).get<std::int64_t>(), value->at(1).get<std::int64_t>()};
  }
  /// A number above 0, so far as f32 goes.
  double positive(const std::string& key, double fallback) const {
    return positive_or_none(key, fallback).value_or(fallback);
  }
  std::optional<double> positive_or_none(const std::string& key, std::optional<double> fallback) const {
    const json* value = find(key);
    if (value == nullptr) return says_none(key) ? std::nullopt : fallback;
    if (!value->is_number() || !(value->get<double>() > 0 && value->get<double>() < 1e38))
      refuse(key, "a number above 0");
    return value->get<double>();
  }
  /// A probability below 1.
  double dropout(const std::string& key, double fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_number() || !(value->get<double>() >= 0 && value->get<double>() < 1))
      refuse(key, "a number from 0, below 1");
    return value->get<double>();
  }
  bool flag(const std::string& key, bool fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(key, "true, false");
    return value->get<bool>();
  }
  /// One of `choices`, whose text it gives.
  template <class T>
  T choice(const std::string& key, T fallback,
           const std::vector<std::pair<std::string_view, T>>& choices) const {
    const json* value = find(key);
    return value == nullptr ? fallback : one_of(key, *value, choices);
  }
  /// A list of such; empty if not there.
  template <class T>
  std::vector<T> choices(const std::string& key,
                         const std::vector<std::pair<std::string_view, T>>& choices) const {
    std::vector<T> all;
    const json* value = find(key);
    if (value == nullptr) return all;
    if (!value->is_array()) refuse(key, "a list");
    for (const json& each : *value) all.push_back(one_of(key, each, choices));
    return all;
  }
  /// A list of texts, or the single text `instead`; empty if not there.
  std::vector<std::string> texts(const std::string& key, std::string_view instead) const {
    const json* value = find(key);
    if (value == nullptr) return {};
    if (value->is_string() && value->get_ref<const std::string&>() == instead) return {std::string(instead)};
    const bool fits = value->is_array() && std::ranges::all_of(*value, &json::is_string);
    if (!fits) refuse(key, fmt::format("a list of names, \"{}\"", instead));
    return value->get<std::vector<std::string>>();
  }
  /// Refuses every other value.
  void only(const std::string& key, const json& value) const {
    if (const json* given = find(key); given != nullptr && *given != value) refuse(key, value.dump());
  }
  void only_unless_asked(const std::string& key, const json& value) const {
    if (!asked_.contains(key)) only(key, value);
  }
  void refuse_unless_none(const std::string& key) const {
    if (find(key) != nullptr) refuse(key, "null");
  }
  /// Whatever its value, it does not count.
  void pass_over(const std::string& key) const { asked_.insert(key); }
  std::vector<std::string> keys() const {
    std::vector<std::string> all;
    for (const auto& [key, value] : object_.items()) all.push_back(key);
    return all;
  }
  std::optional<Config> object(const std::string& key) const {
    const json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_object()) refuse(key, "an object");
    return Config(fmt::format("{}': '{}", file_, key), *value);
  }
  /// Refuses keys that nobody has asked for, unless they say nothing of what a model computes from tokens, or
  /// are null.
  void nothing_unknown() const {
    for (const auto& [key, value] : object_.items())
      check<ValueError>(value.is_null() || asked_.contains(key) || meaningless(key),
                        "pretrained: '{}': {} is not a key that is known of this model; known: {}", file_,
                        shown(key), fmt::join(asked_, ", "));
  }
  /// Refuses keys that are none of these.
  void no_others(const std::set<std::string>& keys) const {
    for (const auto& [key, value] : object_.items())
      if (!keys.contains(key)) refuse(key, fmt::format("{}", fmt::join(keys, ", ")));
  }
  void need(const std::string& key) const {
    check<ValueError>(find(key) != nullptr, "pretrained: '{}': {} is missing", file_, key);
  }

  [[noreturn]] void refuse(const std::string& key, std::string_view supported) const {
    const json* given = find(key);
    fail<ValueError>("pretrained: '{}': {} is {}; supported: {}", file_, shown(key),
                     given ? shown(given->dump(-1, ' ', true)) : "not there, or null", supported);
  }

 private:
  static bool meaningless(std::string_view key);
  template <class T>
  T one_of(const std::string& key, const json& value,
           const std::vector<std::pair<std::string_view, T>>& choices) const {
    std::string names;
    for (const auto& [name, meaning] : choices) {
      if (value.is_string() && value.get_ref<const std::string&>() == name) return meaning;
      names += (names.empty() ? "" : ", ") + std::string(name);
    }
    refuse(key, names);
  }
  bool says_none(const std::string& key) const { return object_.contains(key) && object_.at(key).is_null(); }
  const json* find(const std::string& key) const {
    asked_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  std::string file_;
  json object_;
  mutable std::set<std::string> asked_;
};

/// Refuses parts that no model here has, which files may say that it has not.
void check_plain_decoder(const Config& c);

/// `dtype`, or as it was called before, `torch_dtype`.
DType dtype_of(const Config& c);
std::string_view name_in_config(DType dtype);

/// Weights of 8-bit floats are read to floats; other forms are not.
std::optional<Config> quantization_of(const Config& c);

/// `from` without what `own` says anew, or what would contradict it.
json merged(json from, const json& own);

}  // namespace sherd::nn::pretrained
