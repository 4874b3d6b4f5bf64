// By which texts and files are known.
#pragma once

#include <string>
#include <string_view>

#include "runtime/io/file_system.h"

namespace sherd::nn {

/// Of a row of texts and files.
class Digest {
 public:
  void add(std::string_view text);
  /// Its size, and its bytes.
  void add(InputFile& file);
  /// Sixteen hexadecimal digits; empty of nothing.
  const std::string& value() const { return value_; }

 private:
  std::string value_;
};

/// The bytes of `file` from `begin` to `end`.
std::string read_part(InputFile& file, std::uint64_t begin, std::uint64_t end);

}  // namespace sherd::nn
