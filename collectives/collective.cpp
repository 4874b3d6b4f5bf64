#include "collectives/collective.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "collectives/fault.h"
#include "runtime/shown.h"

namespace sherd {

std::string_view to_string(CollectiveKind kind) {
  constexpr std::string_view names[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                        "all_to_all", "send",           "recv",       "barrier"};
  return names[static_cast<int>(kind)];
}

std::string to_string(const ReduceOp& reduction) {
  constexpr std::string_view names[] = {"sum", "average", "max", "prescaled_sum"};
  std::string text(names[static_cast<int>(reduction.kind)]);
  if (reduction.kind == ReduceOp::Kind::prescaled_sum) text += fmt::format("({})", reduction.scale);
  return text;
}

namespace {

using Kind = CollectiveKind;

bool reduces(Kind kind) { return kind == Kind::reduce_scatter || kind == Kind::all_reduce; }
bool is_message(Kind kind) { return kind == Kind::send || kind == Kind::recv; }

/// Mixes one word into a digest (the finaliser of splitmix64, Steele, Lea and Flood, 2014).
std::uint64_t mix(std::uint64_t digest, std::uint64_t word) {
  std::uint64_t z = (digest ^ word) + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::uint64_t mix_text(std::uint64_t digest, std::string_view text) {
  for (std::size_t at = 0; at < text.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min<std::size_t>(8, text.size() - at));
    digest = mix(digest, word);
  }
  return mix(digest, text.size());
}

bool dense(const Tensor& t) { return t.numel() == 0 || t.is_contiguous(); }

struct Bytes {
  const std::byte* begin;
  std::int64_t size;
  bool overlaps(const Bytes& o) const { return begin < o.begin + o.size && o.begin < begin + size; }
};
Bytes bytes_of(const Tensor& t) {
  return {t.numel() == 0 ? nullptr : t.raw(), t.numel() * size_of(t.dtype())};
}

/// ValueError where input and output overlap other than in place.
void check_overlap(const Collective& c, const Tensor& input, const Tensor& output, int rank) {
  if (input.device().type == DeviceType::meta || input.numel() == 0 || output.numel() == 0) return;
  const Bytes in = bytes_of(input), out = bytes_of(output);
  if (!in.overlaps(out)) return;
  bool in_place = in.begin == out.begin && c.kind != Kind::all_to_all;
  if (c.kind == Kind::all_gather) in_place = in.begin == out.begin + rank * in.size;
  if (c.kind == Kind::reduce_scatter) in_place = out.begin == in.begin + rank * out.size;
  check<ValueError>(
      in_place,
      "{}: input and output overlap, but not in place; in place is {}, anything else needs memory of its own",
      to_string(c.kind),
      c.kind == Kind::all_gather || c.kind == Kind::reduce_scatter ? "this rank's slice of the larger tensor"
      : c.kind == Kind::all_to_all                                 ? "not possible here"
                                                                   : "the same tensor");
}

/// Outputs lie one behind the other, and each input in its own output or apart from all: the common case, in
/// time that grows with the number of segments only.
bool plainly_apart(const Collective& c) {
  const std::byte *begin = nullptr, *end = nullptr;  // of all outputs
  for (const Tensor& output : c.outputs) {
    const Bytes out = bytes_of(output);
    if (out.size == 0) continue;
    if (end > out.begin) return false;
    if (begin == nullptr) begin = out.begin;
    end = out.begin + out.size;
  }
  for (std::size_t i = 0; i < c.inputs.size(); ++i) {
    const Bytes in = bytes_of(c.inputs[i]);
    const Bytes own = i < c.outputs.size() ? bytes_of(c.outputs[i]) : Bytes{nullptr, 0};
    const bool inside = in.begin >= own.begin && in.begin + in.size <= own.begin + own.size;
    if (in.size > 0 && !inside && in.begin < end && begin < in.begin + in.size) return false;
  }
  return true;
}

/// What a segment's output takes is no other segment's.
void check_segments_apart(const Collective& c) {
  if (c.outputs.size() < 2 || c.outputs[0].device().type == DeviceType::meta || plainly_apart(c)) return;
  for (std::size_t i = 0; i < c.outputs.size(); ++i)
    for (std::size_t j = 0; j < c.outputs.size(); ++j) {
      const auto meets = [&](const Tensors& others) {
        return i != j && j < others.size() && bytes_of(c.outputs[i]).overlaps(bytes_of(others[j]));
      };
      check<ValueError>(
          !meets(c.inputs) && !meets(c.outputs),
          "{}: the output of segment {} overlaps segment {}; every output needs memory of its own",
          to_string(c.kind), i, j);
    }
}

void check_sizes(const Collective& c, std::int64_t in, std::int64_t out, int size) {
  const std::string_view name = to_string(c.kind);
  switch (c.kind) {
    case Kind::all_gather:
      return check<ShapeError>(out == in * size,
                               "{}: {} elements from each of {} ranks need an output of {}, not {}", name, in,
                               size, in * size, out);
    case Kind::reduce_scatter:
      return check<ShapeError>(
          in == out * size, "{}: an output of {} elements on each of {} ranks needs an input of {}, not {}",
          name, out, size, out * size, in);
    case Kind::all_to_all:
      check<ShapeError>(in % size == 0, "{}: {} elements do not divide into {} equal slices", name, in, size);
      [[fallthrough]];
    default:
      return check<ShapeError>(in == out, "{}: input and output have {} and {} elements; they must be equal",
                               name, in, out);
  }
}

void check_lists(const Collective& c, int rank) {
  const std::string_view name = to_string(c.kind);
  const std::size_t in = c.inputs.size(), out = c.outputs.size();
  const bool only_in = c.kind == Kind::send;
  const bool only_out = c.kind == Kind::recv || (c.kind == Kind::broadcast && rank != c.peer);
  if (c.kind == Kind::barrier)
    return check<ValueError>(in + out == 0, "barrier: it moves nothing, but was given {} tensors", in + out);
  if (only_in)
    return check<ValueError>(in > 0 && out == 0, "{}: it needs inputs and no outputs, not {} and {}", name,
                             in, out);
  if (only_out)
    return check<ValueError>(out > 0 && in == 0, "{}: it needs outputs and no inputs here, not {} and {}",
                             name, out, in);
  check<ValueError>(in == out && in > 0,
                    "{}: {} inputs and {} outputs; a segment is one of each, and there is at least one", name,
                    in, out);
}

void check_tensors(const Collective& c, const Tensors& tensors, std::string_view what, const Tensor& first) {
  const std::string_view name = to_string(c.kind);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    check<ValueError>(t.defined(), "{}: {} {} is an empty handle; a collective has a tensor on every rank",
                      name, what, i);
    check<DTypeError>(t.dtype() == first.dtype(), "{}: {} {} is {} beside {}; one call has one dtype", name,
                      what, i, name_of(t.dtype()), name_of(first.dtype()));
    if (t.device() != first.device())  // not by `check`, whose arguments would be formatted at every call
      fail<DeviceError>("{}: {} {} is on {} beside {}; one call has one device", name, what, i, t.device(),
                        first.device());
    check<ShapeError>(dense(t), "{}: {} {} of shape {} is a view with strides {}; pass contiguous() of it",
                      name, what, i, t.shape(), t.strides());
  }
}

void check_reduction(const Collective& c, DType dtype) {
  const std::string_view name = to_string(c.kind);
  const bool scales =
      c.reduction.kind == ReduceOp::Kind::average || c.reduction.kind == ReduceOp::Kind::prescaled_sum;
  if (dtype == DType::boolean)
    fail<DTypeError>("{}: bool has no {}; convert to u8", name, to_string(c.reduction));
  if (!is_floating(dtype) && scales)
    fail<DTypeError>("{}: {} of {} is not defined; use sum, or convert to a float", name,
                     to_string(c.reduction), name_of(dtype));
}

}  // namespace

void validate(const Collective& c, int rank, int size) {
  const std::string_view name = to_string(c.kind);
  check<ValueError>(c.channel >= 0 && c.channel < max_channels, "{}: channel {} is not in 0..{}", name,
                    c.channel, max_channels - 1);
  if (is_message(c.kind) || c.kind == Kind::broadcast)
    check<ValueError>(c.peer >= 0 && c.peer < size, "{}: rank {} is not in 0..{} of the group", name, c.peer,
                      size - 1);
  check<ValueError>(!is_message(c.kind) || c.peer != rank,
                    "{}: rank {} would be its own peer; copy the tensor instead", name, rank);
  check_lists(c, rank);
  if (c.kind == Kind::barrier) return;
  const Tensor& first = c.inputs.empty() ? c.outputs[0] : c.inputs[0];
  check<ValueError>(first.defined(),
                    "{}: tensor 0 is an empty handle; a collective has a tensor on every rank", name);
  check_tensors(c, c.inputs, "input", first);
  check_tensors(c, c.outputs, "output", first);
  if (reduces(c.kind)) check_reduction(c, first.dtype());
  check_segments_apart(c);
  if (c.inputs.size() != c.outputs.size()) return;
  for (std::size_t i = 0; i < c.inputs.size(); ++i) {
    check_sizes(c, c.inputs[i].numel(), c.outputs[i].numel(), size);
    check_overlap(c, c.inputs[i], c.outputs[i], rank);
  }
}

Signature signature_of(const Collective& c) {
  Signature s;
  s.kind = c.kind;
  const Tensors& tensors = counted(c);
  s.segments = static_cast<std::uint32_t>(tensors.size());
  if (!tensors.empty()) {
    s.dtype = tensors[0].dtype();
    s.first = tensors[0].numel();
    s.device = tensors[0].device().type;
  }
  if (c.kind == Kind::broadcast) s.root = c.peer;
  if (reduces(c.kind)) {
    s.op = c.reduction.kind;
    s.scale = c.reduction.scale;
  }
  const auto kind = c.kind == Kind::recv ? Kind::send : c.kind;  // send and recv are the two ends of one call
  std::uint64_t digest =
      mix(static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(s.dtype) << 8 |
              static_cast<std::uint64_t>(s.op) << 16 | static_cast<std::uint64_t>(s.device) << 24 |
              static_cast<std::uint64_t>(s.segments) << 32,
          std::bit_cast<std::uint32_t>(s.scale) | static_cast<std::uint64_t>(s.root) << 32);
  for (const Tensor& t : tensors) {
    s.total += t.numel();
    digest = mix(digest, static_cast<std::uint64_t>(t.numel()));
  }
  s.digest = mix_text(digest, c.label);
  s.label_length = static_cast<std::uint8_t>(std::min(c.label.size(), Signature::label_bytes));
  std::memcpy(s.label, c.label.data(), s.label_length);
  return s;
}

namespace {
std::string type_name(DeviceType type) {
  const std::string text = to_string(Device{type, 0});
  return text.substr(0, text.find(':'));
}
}  // namespace

std::string Signature::text() const {
  std::string text(to_string(kind));
  if (kind != Kind::barrier) {
    text += fmt::format("({}, ", name_of(dtype));
    if (segments > 1) text += fmt::format("{} segments beginning with {}, ", segments, first);
    text += fmt::format("{} elements", total);
    if (device != DeviceType::cpu && device != DeviceType::meta) text += " on " + type_name(device);
    if (reduces(kind)) text += ", " + to_string(ReduceOp{op, scale});
    if (kind == Kind::broadcast) text += fmt::format(", root {}", root);
    text += ')';
  }
  if (label_length > 0) text += fmt::format(" of '{}'", one_line(std::string(label, label_length)));
  return text;
}

}  // namespace sherd
