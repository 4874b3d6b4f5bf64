#include "runtime/apply.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/reach.h"

namespace sherd {

AnyOp::~AnyOp() = default;

namespace {

/// Makes the inputs of a call resident and keeps them so until the scope ends. For storage without an owner
/// this is one look.
class Pinned {
 public:
  explicit Pinned(Inputs in) : in_(in) {
    for (const Tensor& t : in)
      if (t.defined() && t.storage().owned()) [[unlikely]]
        pin(t.storage());
  }
  ~Pinned() { unpin(); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  void pin(Storage& storage) {
    // Pin all first: bringing one input here must not evict another.
    if (!pinned_) {
      for (const Tensor& t : in_)
        if (t.defined() && t.storage().owned()) t.storage().pin();
      pinned_ = true;
    }
    if (!storage.resident()) {
      try {
        storage.owner()->need(storage);
      } catch (...) {
        unpin();
        throw;
      }
    }
  }
  void unpin() {
    if (pinned_)
      for (const Tensor& t : in_)
        if (t.defined() && t.storage().owned()) t.storage().unpin();
  }
  Inputs in_;
  bool pinned_ = false;
};

/// A scope in which a kernel runs: listeners are not told of the ops that it applies.
class InsideOp {
 public:
  explicit InsideOp(Context& context) : context_(context), outer_(context.inside_op()) {
    context.set_inside_op(true);
  }
  ~InsideOp() { context_.set_inside_op(outer_); }
  InsideOp(const InsideOp&) = delete;
  InsideOp& operator=(const InsideOp&) = delete;

 private:
  Context& context_;
  bool outer_;
};

Device device_of(const AnyOp& op, Inputs in, Outputs out) {
  const Device* device = nullptr;
  Device first;
  for (const Tensor& t : in) {
    if (!t.defined()) continue;
    if (device == nullptr) {
      first = t.device();
      device = &first;
    } else if (t.device() != first && !op.crosses_devices()) [[unlikely]] {
      // Not by `check`, whose arguments would be formatted at every call.
      const bool no_values = first.type == DeviceType::meta || t.device().type == DeviceType::meta;
      fail<DeviceError>(
          "{}: inputs are on {} and {}; {}", op.name(), to_string(first), t.device(),
          no_values ? "give what is on meta values first (materialize)" : "move one with to(device)");
    }
  }
  return device != nullptr || out.empty() ? first : out[0].device();
}

/// Calls `body` with the inputs as a kernel of `op` takes them: where `op.dense(i)`, without holes.
template <class F>
void with_dense(const AnyOp& op, Inputs in, F&& body) {
  std::size_t first = 0;
  const auto has_holes = [&](std::size_t i) {
    return op.dense(i) && in[i].defined() && !in[i].is_contiguous();
  };
  while (first < in.size() && !has_holes(first)) ++first;
  if (first == in.size()) return body(in);
  Tensors all(in);
  for (std::size_t i = first; i < in.size(); ++i) {
    if (!has_holes(i)) continue;
    check<StateError>(
        !op.writes(i),
        "{}: writes input {} and needs it dense, but it has shape {} and strides {}; write a dense "
        "tensor, then copy_",
        op.name(), i, in[i].shape(), in[i].strides());
    all[i] = clone(in[i]);
  }
  body(Inputs(all.begin(), all.size()));
}

void run_inside(const AnyOp& op, Inputs in, Outputs out, Context& context) {
  if (op.is_view()) return;
  const Device device = device_of(op, in, out);
  const InsideOp inside(context);
  if (const Kernel kernel = op.kernels().on(device.type))
    return with_dense(op, in, [&](Inputs dense) { kernel(op.value(), dense, out); });
  if (op.run_itself(in, out) || device.type == DeviceType::meta) return;
  if (!op.run_reference(in, out)) [[unlikely]]
    fail<NotImplementedError>(
        "{}: has no kernel for {}, and no form in other ops; {}add one (add_kernel, or cpu::add_elementwise "
        "for an "
        "elementwise op)",
        op.name(), device, device.is_cpu() ? "" : "work on cpu, or ");
}

}  // namespace

Tensors apply(const AnyOp& op, Inputs in) {
  Context& context = Context::current();
  const Pinned pinned(in);
  const bool heard = !context.inside_op();
  Tensors out;
  // Devices before shapes: a tensor on the wrong device is the likelier mistake.
  if (in.size() > 1) device_of(op, in, {});
  op.prepare(in, out);
  if (op.mutating()) {
    // Listeners and owners may refuse the write: before anything is written.
    if (heard)
      for (Listener* listener : context.listeners()) listener->before_write(op, in);
    for (std::size_t i = 0; i < in.size(); ++i)
      if (op.writes(i) && in[i].defined() && in[i].storage().owned()) [[unlikely]]
        in[i].storage().owner()->before_write(in[i].storage());
  }
  // Counted before the kernel runs, because one that throws halfway has written too.
  if (op.mutating())
    for (std::size_t i = 0; i < in.size(); ++i)
      if (op.writes(i) && in[i].defined()) in[i].storage().bump_version();
  run_inside(op, in, out, context);
  if (heard)
    for (Listener* listener : context.listeners()) listener->after(op, in, out);
  return out;
}

void run_again(const AnyOp& op, Inputs in, Outputs out) {
  const Pinned pinned(in);
  run_inside(op, in, out, Context::current());
}

namespace detail {

void check_inputs(std::string_view op, Arity arity, Mask optional, Inputs in) {
  if (in.size() < arity.least || in.size() > arity.most) [[unlikely]]
    fail<ValueError>("{}: takes {}{} inputs, got {}", op, arity.most > arity.least ? "at least " : "",
                     arity.least, in.size());
  for (std::size_t i = 0; i < in.size(); ++i)
    if (!in[i].defined() && !has(optional, i)) [[unlikely]]
      fail<ValueError>("{}: input {} is an empty handle; assign it a tensor first", op, i);
}

void check_fits(std::string_view op, std::string_view field, Number value, DType dtype) {
  if (!fits(value, dtype)) [[unlikely]]
    fail<DTypeError>("{}: {} {} does not fit a tensor of {}; use another dtype", op, field, value,
                     name_of(dtype));
}

namespace {

/// Bytes of a storage that a tensor's elements lie in: [low, high), and the common step between their
/// addresses.
struct Extent {
  const Storage* storage;
  std::int64_t low, high, step, element;
  std::size_t input;
  bool written;
};

Extent extent_of(const Tensor& t, std::size_t input, bool written) {
  const Layout& layout = t.layout();
  const std::int64_t size = size_of(t.dtype());
  const Reach reach = *Reach::of(layout);
  std::int64_t step = 0;
  for (int i = 0; i < layout.shape.rank(); ++i)
    if (layout.shape[i] > 1) step = std::gcd(step, layout.strides[i]);
  return {&t.storage(), reach.low * size, (reach.high + 1) * size, step * size, size, input, written};
}

bool same_elements(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.layout().offset == b.layout().offset && a.shape() == b.shape() &&
         a.strides() == b.strides();
}

/// Whether two tensors are blocks of one array that have no place in common, as columns, heads and tiles of a
/// matrix are. The strides of both make up the array's; a block is a range along each of them.
bool blocks_apart(const Layout& a, const Layout& b) {
  std::vector<std::int64_t> strides{1};
  for (const Layout* layout : {&a, &b})
    for (int i = 0; i < layout->shape.rank(); ++i) {
      if (layout->shape[i] == 1) continue;
      if (layout->strides[i] <= 0) return false;
      strides.push_back(layout->strides[i]);
    }
  std::sort(strides.begin(), strides.end(), std::greater<>{});
  strides.erase(std::unique(strides.begin(), strides.end()), strides.end());
  bool apart = false;
  std::int64_t rest_a = a.offset, rest_b = b.offset;
  for (std::size_t k = 0; k < strides.size(); ++k) {
    const auto range = [&](const Layout& layout, std::int64_t& rest) {
      std::int64_t size = 1;
      for (int i = 0; i < layout.shape.rank(); ++i)
        if (layout.shape[i] > 1 && layout.strides[i] == strides[k]) size = size > 1 ? -1 : layout.shape[i];
      const std::int64_t first = rest / strides[k];
      rest %= strides[k];
      // A range that runs over into the next larger stride is no block.
      const bool fits =
          size > 0 &&
          (k == 0 || (strides[k - 1] % strides[k] == 0 && first + size <= strides[k - 1] / strides[k]));
      return std::pair(first, fits ? first + size : std::int64_t{-1});
    };
    const auto [begin_a, end_a] = range(a, rest_a);
    const auto [begin_b, end_b] = range(b, rest_b);
    if (end_a < 0 || end_b < 0) return false;
    apart = apart || end_a <= begin_b || end_b <= begin_a;
  }
  return apart;
}

/// Whether two tensors of one storage may have an element in common. Columns of one matrix interleave and
/// have none: their addresses differ by no multiple of the common step.
bool may_meet(const Extent& a, const Extent& b) {
  if (a.high <= b.low || b.high <= a.low) return false;
  if (a.element != b.element) return true;
  const std::int64_t step = std::gcd(a.step, b.step);
  return step == 0 || (a.low - b.low) % step == 0;
}

void check_pair(const AnyOp& op, Inputs in, const Extent& a, const Extent& b) {
  if (!(a.written || b.written) || !may_meet(a, b)) return;
  if (a.element == b.element && blocks_apart(in[a.input].layout(), in[b.input].layout())) return;
  const bool both = a.written && b.written;
  if (!both && same_elements(in[a.input], in[b.input])) return;  // each is read before it is written
  const Extent &target = a.written ? a : b, &other = a.written ? b : a;
  fail<StateError>("{}: input {} is {} the memory being written (input {}); clone it first", op.name(),
                   other.input, both ? "written too and shares" : "another view of", target.input);
}

void check_distinct_elements(const AnyOp& op, const Tensor& t) {
  if (shows_twice(t.layout())) [[unlikely]]
    fail<StateError>(
        "{}: elements of the tensor being written share memory (shape {}, strides {}); clone it first",
        op.name(), t.shape(), t.strides());
}

}  // namespace

void check_overlap(const AnyOp& op, Inputs in) {
  for (std::size_t i = 0; i < in.size(); ++i)
    if (op.writes(i) && in[i].defined()) check_distinct_elements(op, in[i]);
  if (in.size() < 2) return;
  if (in.size() == 2) {  // the common case, without a list
    if (!in[0].defined() || !in[1].defined() || in[0].storage_ref() != in[1].storage_ref()) return;
    if (in[0].numel() > 0 && in[1].numel() > 0)
      check_pair(op, in, extent_of(in[0], 0, op.writes(0)), extent_of(in[1], 1, op.writes(1)));
    return;
  }
  std::vector<Extent> extents;
  extents.reserve(in.size());
  for (std::size_t i = 0; i < in.size(); ++i)
    if (in[i].defined() && in[i].numel() > 0) extents.push_back(extent_of(in[i], i, op.writes(i)));
  // Side by side in memory order, so that a list of parameters costs no more than its sorting.
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return a.storage != b.storage ? a.storage < b.storage : a.low < b.low;
  });
  for (std::size_t i = 0; i < extents.size(); ++i)
    for (std::size_t j = i + 1;
         j < extents.size() && extents[j].storage == extents[i].storage && extents[j].low < extents[i].high;
         ++j)
      check_pair(op, in, extents[i], extents[j]);
}

void adopt_reference(std::string_view op, Tensors results, Outputs out) {
  check<InternalError>(results.size() == out.size(), "{}: its reference gives {} outputs, the op {}", op,
                       results.size(), out.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    check<InternalError>(results[i].defined() && results[i].dtype() == out[i].dtype(),
                         "{}: its reference gives output {} as {}, the op as {}", op, i,
                         results[i].defined() ? name_of(results[i].dtype()) : "an empty handle",
                         name_of(out[i].dtype()));
    check<InternalError>(results[i].shape() == out[i].shape(),
                         "{}: its reference gives output {} of shape {}, the op of shape {}", op, i,
                         results[i].shape(), out[i].shape());
    copy_(alias(out[i], out[i].layout()), results[i]);
  }
}

void make_view(std::string_view op, const Tensor& base, Layout layout, Tensors& out) {
  layout = checked_layout(op, base.storage(), std::move(layout), base.dtype());
  auto impl = make_ref<TensorImpl>(base.storage_ref(), std::move(layout), base.dtype());
  impl->view = true;
  impl->view_version = base.storage().version();
  impl->alias = base.impl()->alias;
  out.emplace_back(std::move(impl));
}

}  // namespace detail
}  // namespace sherd

fmt::format_context::iterator fmt::formatter<sherd::Number>::format(sherd::Number n,
                                                                    fmt::format_context& ctx) const {
  if (n.is_floating()) return fmt::format_to(ctx.out(), "{}", n.as<double>());
  if (n.kind() == sherd::Number::Kind::boolean) return fmt::format_to(ctx.out(), "{}", n.as<bool>());
  return fmt::format_to(ctx.out(), "{}", n.as<std::int64_t>());
}
