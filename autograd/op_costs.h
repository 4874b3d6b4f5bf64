// What ops take, measured: what a compiled call's backward makes again goes by it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/export.h"

namespace sherd {

/// Times of ops, each by device, fields (of random ones without their key), dtypes and shapes of its inputs,
/// or without any of its results. They are of the machine on which they were measured.
class SHERD_API OpCosts {
 public:
  /// None is measured: estimates from bytes and operations stand.
  OpCosts() = default;
  /// Calls `step` once and then `rounds` times more, and takes each op's median time in these, forward and
  /// backward. The device is waited for behind each op, and what the host does before an op is part of it: of
  /// small ops it is all. Of code that is called as it is: compiled calls and replays tell of none of their
  /// ops. ValueError for no rounds.
  static OpCosts measure(const std::function<void()>& step, int rounds = 5);
  /// What `write` wrote. FileError where it cannot be read; ValueError that names the line which is not of
  /// such a file.
  static OpCosts read(const std::filesystem::path& path);
  /// As text, a line an op; replaces a file as a whole. FileError.
  void write(const std::filesystem::path& path) const;

  std::size_t size() const { return times_ ? times_->size() : 0; }
  /// Of an op by its line in the file, "cpu square(f32 (8, 3))"; none where it was not measured.
  std::optional<std::int64_t> nanoseconds(std::string_view op) const;

 private:
  using Times = std::map<std::string, std::int64_t, std::less<>>;
  std::shared_ptr<const Times> times_;  // nanoseconds by line
};

}  // namespace sherd
