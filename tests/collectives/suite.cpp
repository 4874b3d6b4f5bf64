#include "tests/collectives/suite.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/dtype.h"
#include "runtime/ops.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"

namespace sherd::test {
namespace {

using Kind = CollectiveKind;

/// splitmix64 (Steele, Lea and Flood, 2014).
std::uint64_t scramble(std::uint64_t z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

bool reduces(Kind kind) { return kind == Kind::reduce_scatter || kind == Kind::all_reduce; }

template <class T>
T number(std::uint64_t bits) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    if (bits % 509 == 0) return static_cast<T>(static_cast<compute_t<T>>(bits & 512 ? INFINITY : -INFINITY));
    if (bits % 251 == 0) return static_cast<T>(static_cast<compute_t<T>>(NAN));
    // Sign, an exponent of -6 to 6, and 52 bits of fraction.
    const std::uint64_t sign = bits & 32 ? 0 : std::uint64_t{1} << 63, exponent = 1023 - 6 + bits % 13;
    return static_cast<T>(
        static_cast<compute_t<T>>(std::bit_cast<double>(sign | exponent << 52 | bits >> 12)));
  }
}

template <class T>
T at(const Bytes& bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void put(Bytes& bytes, std::size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
}

template <class A>
A plus(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

template <class A>
A reduce(ReduceOp op, std::span<const A> terms) {
  A result = terms[0];
  if constexpr (std::is_floating_point_v<A>) {
    if (op.kind == ReduceOp::Kind::prescaled_sum) result = terms[0] * static_cast<A>(op.scale);
  }
  for (A term : terms.subspan(1)) {
    if constexpr (std::is_floating_point_v<A>) {
      if (op.kind == ReduceOp::Kind::prescaled_sum) term = term * static_cast<A>(op.scale);
      if (op.kind == ReduceOp::Kind::max && (std::isnan(result) || std::isnan(term))) {
        result = NAN;
        continue;
      }
    }
    result = op.kind == ReduceOp::Kind::max ? std::max(result, term) : plus(result, term);
  }
  if constexpr (std::is_floating_point_v<A>) {
    if (op.kind == ReduceOp::Kind::average) result = result / static_cast<A>(terms.size());
  }
  return result;
}

void set_bytes(const Tensor& t, const Bytes& bytes) {
  if (!bytes.empty())
    backend(t.device().type).copy(t.raw(), t.device(), bytes.data(), Device::cpu(), bytes.size());
}
Tensor tensor_of(DType dtype, const Bytes& bytes) {
  const std::int64_t n = static_cast<std::int64_t>(bytes.size()) / size_of(dtype);
  // Not where the storage begins: calls take views.
  const Tensor t = narrow(empty({n + 3}, {dtype, CasesOn::current()}), 0, 3, n);
  set_bytes(t, bytes);
  return t;
}
Bytes bytes_of(const Tensor& t) {
  Bytes bytes(static_cast<std::size_t>(t.numel() * size_of(t.dtype())));
  if (!bytes.empty())
    backend(t.device().type).copy(bytes.data(), Device::cpu(), t.raw(), t.device(), bytes.size());
  return bytes;
}
Bytes garbage(std::int64_t bytes) { return Bytes(static_cast<std::size_t>(bytes), std::byte{0xA5}); }

}  // namespace

struct CaseDevice {
  Device device;
};
CasesOn::CasesOn(Device device) { Context::current().slot<CaseDevice>().device = device; }
CasesOn::~CasesOn() { Context::current().slot<CaseDevice>().device = Device::cpu(); }
Device CasesOn::current() { return Context::current().slot<CaseDevice>().device; }

std::string CallCase::text() const {
  return fmt::format("{}({}, {} segments of {}, {}, {}, root {}, to {}, channel {}, seed {})",
                     to_string(kind), name_of(dtype), sizes.size(),
                     fmt::join(std::span(sizes).first(std::min<std::size_t>(sizes.size(), 6)), " "),
                     to_string(reduction), in_place ? "in place" : "out of place", root, destination, channel,
                     seed);
}

Bytes values_of(DType dtype, std::int64_t count, std::uint64_t seed, bool raw) {
  Bytes bytes(static_cast<std::size_t>(count * size_of(dtype)));
  with_element(dtype, [&]<class T>() {
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      const std::uint64_t bits = scramble(seed + i);
      if (raw)
        std::memcpy(bytes.data() + i * sizeof(T), &bits, sizeof(T));
      else if constexpr (!std::is_same_v<T, bool>)
        put(bytes, i, number<T>(bits));
    }
  });
  return bytes;
}

Bytes reference_combine(DType dtype, ReduceOp reduction, std::span<const Bytes> inputs) {
  Bytes out(inputs[0].size());
  with_element(dtype, [&]<class T>() {
    using A = compute_t<T>;
    if constexpr (!std::is_same_v<T, bool>) {
      std::vector<A> terms(inputs.size());
      for (std::size_t i = 0; i < out.size() / sizeof(T); ++i) {
        for (std::size_t r = 0; r < inputs.size(); ++r) terms[r] = static_cast<A>(at<T>(inputs[r], i));
        put(out, i, static_cast<T>(reduce<A>(reduction, terms)));
      }
    }
  });
  return out;
}

bool same_values(DType dtype, const Bytes& a, const Bytes& b, bool numbers) {
  if (a == b) return true;
  if (a.size() != b.size() || !numbers || !is_floating(dtype)) return false;
  return with_element(dtype, [&]<class T>() {
    for (std::size_t i = 0; i < a.size() / sizeof(T); ++i) {
      if (std::memcmp(&a[i * sizeof(T)], &b[i * sizeof(T)], sizeof(T)) == 0) continue;
      const auto x = static_cast<compute_t<T>>(at<T>(a, i)), y = static_cast<compute_t<T>>(at<T>(b, i));
      if (x == x || y == y) return false;  // integers equal themselves too
    }
    return true;
  });
}

// ---- one rank's part ----

Bytes Part::input(int rank, std::size_t segment) const {
  const bool all = case_.kind == Kind::reduce_scatter || case_.kind == Kind::all_to_all;
  return input(rank, segment, 0, case_.sizes[segment] * (all ? group_.size() : 1));
}
Bytes Part::input(int rank, std::size_t segment, std::int64_t first, std::int64_t count) const {
  const std::uint64_t seed =
      scramble(case_.seed) ^ scramble(static_cast<std::uint64_t>(rank) << 32 | segment);
  return values_of(case_.dtype, count, seed + static_cast<std::uint64_t>(first), !reduces(case_.kind));
}

Part::Part(const Group& group, CallCase what) : group_(group), case_(std::move(what)) {
  const int rank = group_.rank(), size = group_.size();
  const bool message = case_.kind == Kind::send;
  takes_part_ = !message || rank == case_.root || rank == case_.destination;
  if (!takes_part_) return;
  Collective& c = collective_;
  c.kind = message && rank == case_.destination ? Kind::recv : case_.kind;
  c.reduction = case_.reduction;
  c.peer = c.kind == Kind::send                       ? case_.destination
           : message || case_.kind == Kind::broadcast ? case_.root
                                                      : -1;
  c.channel = case_.channel;
  c.label = case_.label;
  if (c.kind == Kind::barrier) return;

  const std::int64_t element = size_of(case_.dtype);
  const bool has_input = c.kind != Kind::recv && (c.kind != Kind::broadcast || rank == case_.root);
  for (std::size_t s = 0; s < case_.sizes.size(); ++s) {
    const std::int64_t n = case_.sizes[s];
    const Bytes in = has_input ? input(rank, s) : Bytes{};
    const bool larger = c.kind == Kind::all_gather || c.kind == Kind::all_to_all;
    const Bytes blank = garbage(n * (larger ? size : 1) * element);
    if (!has_input) {
      c.outputs.push_back(tensor_of(case_.dtype, blank));
    } else if (c.kind == Kind::send) {
      c.inputs.push_back(tensor_of(case_.dtype, in));
    } else if (!case_.in_place || c.kind == Kind::all_to_all) {
      c.inputs.push_back(tensor_of(case_.dtype, in));
      c.outputs.push_back(tensor_of(case_.dtype, blank));
    } else if (c.kind == Kind::all_gather) {
      c.outputs.push_back(tensor_of(case_.dtype, blank));
      c.inputs.push_back(narrow(c.outputs[s], 0, rank * n, n));
      set_bytes(c.inputs[s], in);
    } else {
      c.inputs.push_back(tensor_of(case_.dtype, in));
      c.outputs.push_back(c.kind == Kind::reduce_scatter ? narrow(c.inputs[s], 0, rank * n, n) : c.inputs[s]);
    }
  }
}

void Part::call() const {
  if (takes_part_) group_.call(collective_);
}
void Part::post() {
  if (takes_part_) work_ = group_.enqueue(collective_);
}
void Part::wait() { work_.wait(); }
void Part::wait_inputs() { work_.wait_inputs(); }

Bytes Part::expected(std::size_t s) const {
  if (case_.kind == Kind::broadcast || case_.kind == Kind::send) return input(case_.root, s);
  // Of what each rank gives, this rank's part where it gets a part.
  const std::int64_t n = case_.sizes[s];
  const bool part = case_.kind == Kind::reduce_scatter || case_.kind == Kind::all_to_all;
  std::vector<Bytes> inputs;
  for (int r = 0; r < group_.size(); ++r) inputs.push_back(input(r, s, part ? group_.rank() * n : 0, n));
  if (reduces(case_.kind)) return reference_combine(case_.dtype, case_.reduction, inputs);
  Bytes joined;
  for (const Bytes& in : inputs) joined.insert(joined.end(), in.begin(), in.end());
  return joined;
}

void Part::check() const {
  const auto where = [&] {
    return fmt::format("{} on rank {} of {} in {}", case_.text(), group_.rank(), group_.size(),
                       group_.name());
  };
  for (std::size_t s = 0; s < collective_.outputs.size(); ++s)
    expect(same_values(case_.dtype, bytes_of(collective_.outputs[s]), expected(s), reduces(case_.kind)),
           "segment {} of {} is not the reference", s, where());
  if (case_.in_place) return;
  for (std::size_t s = 0; s < collective_.inputs.size(); ++s)
    expect(bytes_of(collective_.inputs[s]) == input(group_.rank(), s), "input {} of {} was written", s,
           where());
}

std::uint64_t Part::digest() const {
  std::uint64_t digest = 0;
  for (const Tensor& t : collective_.outputs)
    for (std::byte b : bytes_of(t)) digest = (digest ^ static_cast<std::uint64_t>(b)) * 0x100000001b3u;
  return digest;
}

// ---- the grid ----

namespace {

/// More elements than any buffer on the way holds. The thread sanitizer takes a minute for what takes a
/// second, and orders threads by calls, not by bytes.
constexpr std::int64_t long_call = thread_sanitizer ? 10007 : 100003;

/// 0, 1, primes, both sides of the limit up to which calls travel in the post box (it counts a rank's input),
/// a large prime, unequal segments with an empty one, and more segments than a small list holds.
std::vector<std::vector<std::int64_t>> sizes_for(Kind kind, DType dtype, int world) {
  const bool all = kind == Kind::reduce_scatter || kind == Kind::all_to_all;
  const std::int64_t limit = 1024 / size_of(dtype) / (all ? world : 1);
  std::vector<std::int64_t> many;
  for (std::int64_t i = 0; i < 70; ++i) many.push_back(i * 7 % 11);
  return {{0}, {1}, {7}, {127}, {limit - 1}, {limit}, {limit + 1}, {long_call}, {5, 0, 1031, 1}, many};
}

std::vector<ReduceOp> reductions_for(Kind kind, DType dtype) {
  if (!reduces(kind)) return {{}};
  if (!is_floating(dtype)) return {ReduceOp::sum(), ReduceOp::max()};
  return {ReduceOp::sum(), ReduceOp::average(), ReduceOp::max(), ReduceOp::prescaled_sum(0.3f)};
}

}  // namespace

std::vector<CallCase> all_cases(int world) {
  std::vector<CallCase> cases{{.kind = Kind::barrier, .sizes = {}}};
  for (Kind kind : {Kind::all_gather, Kind::reduce_scatter, Kind::all_reduce, Kind::broadcast,
                    Kind::all_to_all, Kind::send})
    for (DType dtype : {f32, f64, f16, bf16, i32, i64, u8})
      for (const ReduceOp& reduction : reductions_for(kind, dtype))
        for (const auto& sizes : sizes_for(kind, dtype, world))
          for (bool in_place : {false, true}) {
            if (in_place && (kind == Kind::all_to_all || kind == Kind::send)) continue;
            if (kind == Kind::send && world == 1) continue;  // nobody is its own peer
            const int turn = static_cast<int>(cases.size());
            // Long calls cost the suite most of its time: each goes by one placement, dtypes taking turns.
            const bool takes_turns = sizes[0] == long_call && kind != Kind::all_to_all && kind != Kind::send;
            if (takes_turns && in_place != (static_cast<int>(dtype) % 2 == 0)) continue;
            cases.push_back({.kind = kind,
                             .dtype = dtype,
                             .reduction = reduction,
                             .sizes = sizes,
                             .in_place = in_place,
                             .root = turn % world,
                             .destination = (turn + 1) % world,
                             .channel = turn % max_channels,
                             .label = turn % 3 == 0 ? "" : fmt::format("case {}", turn),
                             .seed = static_cast<std::uint64_t>(turn)});
          }
  return cases;
}

}  // namespace sherd::test
