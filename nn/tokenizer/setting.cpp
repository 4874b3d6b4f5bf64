#include "nn/tokenizer/setting.h"

#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::nn::tokens {

using Json = nlohmann::json;

void Setting::refuse(std::string_view supported) const {
  fail<ValueError>("{}: {} is {}; supported: {}", where_, path_,
                   is_null() ? "not there, or null" : shown(value_->dump(-1, ' ', true)), supported);
}

void Setting::fault(std::string_view what) const { fail<ValueError>("{}: {}: {}", where_, path_, what); }

Setting Setting::at(const std::string& key) const {
  static const Json nothing;
  if (!value_->is_object()) refuse("an object");
  const auto found = value_->find(key);
  return {found == value_->end() ? nothing : *found, where_, path_ + "." + shown(key)};
}

std::vector<Setting> Setting::elements() const {
  if (!value_->is_array()) refuse("an array");
  std::vector<Setting> all;
  for (std::size_t i = 0; i < value_->size(); ++i)
    all.emplace_back((*value_)[i], where_, path_ + "[" + std::to_string(i) + "]");
  return all;
}

std::vector<std::string> Setting::keys() const {
  if (!value_->is_object()) refuse("an object");
  std::vector<std::string> all;
  for (const auto& [key, value] : value_->items()) all.push_back(key);
  return all;
}

const std::string& Setting::text() const {
  if (!value_->is_string()) refuse("a text");
  return value_->get_ref<const std::string&>();
}

std::int64_t Setting::integer(std::int64_t least, std::int64_t most) const {
  const bool fits = value_->is_number_integer() &&
                    !(value_->is_number_unsigned() && value_->get<std::uint64_t>() >> 62) &&
                    value_->get<std::int64_t>() >= least && value_->get<std::int64_t>() <= most;
  if (!fits) refuse("an integer from " + std::to_string(least) + " to " + std::to_string(most));
  return value_->get<std::int64_t>();
}

bool Setting::flag() const {
  if (!value_->is_boolean()) refuse("true, false");
  return value_->get<bool>();
}

}  // namespace sherd::nn::tokens
