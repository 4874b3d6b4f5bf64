#include "nn/tokenizer/wire.h"

#include <cstring>

#include "runtime/error.h"

namespace sherd::nn::tokens {
namespace {

// Kinds of values.
constexpr std::uint32_t varints = 0, of_64_bits = 1, lengths = 2, of_32_bits = 5;

}  // namespace

void Wire::refuse(std::string_view what) const {
  fail<ValueError>("{}: is no SentencePiece model: {}", *where_, what);
}

bool Wire::next() {
  if (rest_.empty()) return false;
  const std::uint64_t tag = varint();
  field_ = static_cast<std::uint32_t>(tag >> 3);
  kind_ = static_cast<std::uint32_t>(tag & 7);
  if (tag >> 3 == 0 || tag >> 32 != 0) refuse("a field without a number");
  switch (kind_) {
    case varints:
      number_ = varint();
      break;
    case of_64_bits:
      bytes_ = take(8);
      break;
    case lengths:
      bytes_ = take(varint());
      break;
    case of_32_bits:
      bytes_ = take(4);
      break;
    default:
      refuse("a field of an unknown kind");
  }
  return true;
}

std::uint64_t Wire::number() const {
  if (kind_ != varints) refuse("another kind of value where a number belongs");
  return number_;
}

float Wire::real() const {
  if (kind_ != of_32_bits) refuse("another kind of value where a score belongs");
  std::uint32_t bits = 0;
  for (int i = 3; i >= 0; --i)
    bits = bits << 8 | static_cast<unsigned char>(bytes_[static_cast<std::size_t>(i)]);
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::string_view Wire::bytes() const {
  if (kind_ != lengths) refuse("another kind of value where a text belongs");
  return bytes_;
}

std::uint64_t Wire::varint() {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const auto byte = static_cast<unsigned char>(take(1)[0]);
    value |= std::uint64_t{byte & 0x7FU} << shift;
    if (byte < 0x80) return value;
  }
  refuse("a number of more than 64 bits");
}

std::string_view Wire::take(std::uint64_t bytes) {
  if (bytes > rest_.size()) refuse("it ends within a field; the file may be cut short");
  const std::string_view taken = rest_.substr(0, bytes);
  rest_.remove_prefix(bytes);
  return taken;
}

}  // namespace sherd::nn::tokens
