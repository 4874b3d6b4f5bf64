// The wire format of protocol buffers, read.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sherd::nn::tokens {

/// The fields of a message, one after the other. Errors are a ValueError that begins with `where`.
class Wire {
 public:
  Wire(std::string_view message, const std::string& where) : rest_(message), where_(&where) {}

  /// Goes to the next field; false at the end.
  bool next();
  std::uint32_t field() const { return field_; }
  /// The value of the field: of a number, ...
  std::uint64_t number() const;
  float real() const;
  /// ... or of a text or message.
  std::string_view bytes() const;

 private:
  [[noreturn]] void refuse(std::string_view what) const;
  std::uint64_t varint();
  std::string_view take(std::uint64_t bytes);

  std::string_view rest_, bytes_;
  const std::string* where_;
  std::uint32_t field_ = 0, kind_ = 0;
  std::uint64_t number_ = 0;
};

}  // namespace sherd::nn::tokens
