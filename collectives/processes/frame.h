// The unit in which processes tell each other of their calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "collectives/collective.h"
#include "collectives/fault.h"
#include "collectives/processes/notice.h"

namespace sherd::processes {

/// Bytes of a frame on the wire. With MPI's own header it stays below what shared memory and TCP carry
/// without asking the receiver first.
inline constexpr std::size_t frame_bytes = 4000;

/// Opens a frame: one rank's part in one call, for one peer. Payloads up to a frame's end come with it;
/// longer ones follow as messages with `tag`, and those of the second round with `tag + 1`.
struct Header {
  LineId line;
  std::int32_t tag = 0;
  std::uint64_t sequence = 0;
  std::uint32_t bytes = 0;  ///< of the payload in this frame
  std::int32_t from = 0;    ///< process
  Signature signature;
};
inline constexpr std::size_t eager_bytes = frame_bytes - sizeof(Header);

/// A frame in memory.
struct Frame {
  std::unique_ptr<std::byte[]> bytes;

  static Frame make() { return {std::make_unique_for_overwrite<std::byte[]>(frame_bytes)}; }
  const Header& header() const { return *reinterpret_cast<const Header*>(bytes.get()); }
  std::byte* payload() const { return bytes.get() + sizeof(Header); }
  std::size_t size() const { return sizeof(Header) + header().bytes; }
};

}  // namespace sherd::processes
