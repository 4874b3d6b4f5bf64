// The exceptions of the library. A message is one line: the op or call, the rule, both values, and what to
// do.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/export.h"

namespace sherd {

/// Base of everything the library throws. `what()` is one line (beyond 2000 bytes shortened in the middle);
/// `where()` is the line of source that threw.
class SHERD_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, std::source_location where = std::source_location::current());
  ~Error() override;
  const std::source_location& where() const noexcept { return where_; }

 private:
  std::source_location where_;
};

/// A value that the call does not accept (a range, an option, a file's content).
struct SHERD_API ValueError : Error {
  using Error::Error;
  ~ValueError() override;
};
/// Shapes that do not fit together or do not fit the op.
struct SHERD_API ShapeError : Error {
  using Error::Error;
  ~ShapeError() override;
};
/// Dtypes that differ, or a dtype that the op does not take.
struct SHERD_API DTypeError : Error {
  using Error::Error;
  ~DTypeError() override;
};
/// Tensors on different devices, or a device that is not there.
struct SHERD_API DeviceError : Error {
  using Error::Error;
  ~DeviceError() override;
};
/// A call that is right in itself but not now (a freed graph, a changed tensor, a released storage).
struct SHERD_API StateError : Error {
  using Error::Error;
  ~StateError() override;
};
/// A call among ranks that cannot complete: a peer posted another call, left, threw or died. Every rank of
/// the group throws it.
class SHERD_API CollectiveError : public Error {
 public:
  explicit CollectiveError(const std::string& message,
                           std::source_location where = std::source_location::current());
  /// `ranks`: who is at fault, as ranks of the group; `sequence`: number of the call on its channel, from 0.
  CollectiveError(const std::string& message, std::vector<int> ranks, std::uint64_t sequence,
                  std::source_location where = std::source_location::current());
  ~CollectiveError() override;
  const std::vector<int>& ranks() const noexcept { return ranks_; }
  std::uint64_t sequence() const noexcept { return sequence_; }

 private:
  std::vector<int> ranks_;
  std::uint64_t sequence_ = 0;
};
/// No memory for an allocation; names the device and the bytes.
struct SHERD_API OutOfMemoryError : Error {
  using Error::Error;
  ~OutOfMemoryError() override;
};
/// Something this build or this device cannot do.
struct SHERD_API NotImplementedError : Error {
  using Error::Error;
  ~NotImplementedError() override;
};
/// A bug: of the library, or of an op's rule in an application (a gradient rule with a wrong number of
/// entries).
struct SHERD_API InternalError : Error {
  using Error::Error;
  ~InternalError() override;
};
/// The operating system refused a file operation; the message names the path and its reason.
struct SHERD_API FileError : Error {
  using Error::Error;
  ~FileError() override;
};

/// A format string and the place where it was written, which becomes `Error::where()`.
template <class... Args>
struct Message {
  fmt::format_string<Args...> text;
  std::source_location where;
  template <class S>
  consteval Message(const S& s, std::source_location w = std::source_location::current())
      : text(s), where(w) {}
};

/// Throws `E` with the formatted message.
template <class E, class... Args>
[[noreturn, gnu::cold, gnu::noinline]] void fail(Message<std::type_identity_t<Args>...> message,
                                                 Args&&... args) {
  throw E(fmt::format(message.text, std::forward<Args>(args)...), message.where);
}

/// Throws `E` with the formatted message unless `ok`.
template <class E, class... Args>
void check(bool ok, Message<std::type_identity_t<Args>...> message, Args&&... args) {
  if (!ok) [[unlikely]]
    throw E(fmt::format(message.text, std::forward<Args>(args)...), message.where);
}

}  // namespace sherd
