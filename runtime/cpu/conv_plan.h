// The calls of oneDNN that a tile of a convolution is made of.
#pragma once

#include <unordered_map>

#include "runtime/cpu/conv_tiles.h"
#include "runtime/cpu/onednn.h"
#include "runtime/cpu/scratch.h"
#include "runtime/tensor.h"

namespace sherd::cpu::conv {

using Arguments = std::unordered_map<int, dnnl::memory>;

/// Working memory; OutOfMemoryError without it.
Scratch<std::byte> memory_for(std::size_t bytes);
/// The same on the rank's own thread, of its pool, which keeps what is large.
Tensor room_of(std::size_t bytes);

struct Call {
  dnnl::primitive run;
  dnnl::memory::desc room;  // what it works in
  explicit operator bool() const { return bool(run); }
};
void execute(const Call& call, dnnl::stream& stream, Arguments arguments);

/// A tensor's dims, and its strides in the caller's memory.
struct Lain {
  dnnl::memory::dims dims, strides;
  dnnl::memory::desc plain(dnnl::memory::data_type type) const { return {dims, type, strides}; }
  dnnl::memory::desc dense(dnnl::memory::data_type type) const {
    dnnl::memory::dims steps(dims.size(), 1);
    for (std::size_t i = dims.size() - 1; i > 0; --i) steps[i - 1] = steps[i] * dims[i];
    return {dims, type, steps};
  }
  dnnl::memory::desc any(dnnl::memory::data_type type) const {
    return {dims, type, dnnl::memory::format_tag::any};
  }
};
Lain kernels_of(const Conv& c, const Tile& t);

/// One of a call's tensors: as it lies in the caller's memory, as the call wants it, and the copy from one to
/// the other, empty where they are the same.
struct Side {
  dnnl::memory::desc plain, wanted;
  Call copy;

  Side() = default;
  Side(dnnl::memory::desc lies, dnnl::memory::desc wants, bool is_result);
  std::size_t room() const { return copy ? (wanted.get_size() + 63) / 64 * 64 : 0; }
  /// What the call is given, the caller's memory or `room`; `filled` if the call reads it.
  dnnl::memory here(const std::byte* lies, std::byte* room) const {
    return argument(wanted, copy ? room : lies);
  }
  dnnl::memory filled(const std::byte* lies, std::byte* room, dnnl::stream& stream) const {
    dnnl::memory given = here(lies, room);
    if (copy) execute(copy, stream, {{DNNL_ARG_FROM, argument(plain, lies)}, {DNNL_ARG_TO, given}});
    return given;
  }
  void give_back(const dnnl::memory& result, std::byte* lies, dnnl::stream& stream) const {
    if (copy) execute(copy, stream, {{DNNL_ARG_FROM, result}, {DNNL_ARG_TO, argument(plain, lies)}});
  }
};

struct Plan {
  bool fast = false;  // else nothing of it is set
  Side x, weight, y;
  dnnl::memory::desc bias;
  Call call;
};

/// `lie_as` says how the kernels lie, for tiles that share them; null leaves it to the library.
Plan plan_of(const Conv& c, Way way, dnnl::memory::data_type type, const Tile& t, bool has_bias,
             const dnnl::memory::desc* lie_as);

}  // namespace sherd::cpu::conv
