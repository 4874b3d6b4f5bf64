// A value of a tokenizer.json that is asked for by key, and named in errors.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::nn::tokens {

class Setting {
 public:
  Setting(const nlohmann::json& value, std::string where, std::string path)
      : value_(&value), where_(std::move(where)), path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  bool is_null() const { return value_->is_null(); }
  /// The member `key`; null, and a setting all the same, where there is none.
  Setting at(const std::string& key) const;
  /// The elements of an array.
  std::vector<Setting> elements() const;
  /// Names of the members of an object.
  std::vector<std::string> keys() const;
  const std::string& text() const;
  std::int64_t integer(std::int64_t least, std::int64_t most) const;
  bool flag() const;
  bool flag(bool fallback) const { return is_null() ? fallback : flag(); }
  /// The member `type`.
  const std::string& type() const { return at("type").text(); }

  /// ValueError: the value is not one of these.
  [[noreturn]] void refuse(std::string_view supported) const;
  /// ValueError: of these values.
  [[noreturn]] void fault(std::string_view what) const;

 private:
  const nlohmann::json* value_;
  std::string where_, path_;
};

}  // namespace sherd::nn::tokens
