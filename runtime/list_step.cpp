#include "runtime/list_step.h"

#include <vector>

#include "runtime/ops.h"
#include "runtime/ops/order_free_norm.h"

namespace sherd::detail {
namespace {

constexpr std::string_view gradients = "gradient";

bool is_narrow(DType dtype) { return is_floating(dtype) && size_of(dtype) == 2; }
bool is_stepped(DType dtype) { return dtype == DType::f32 || is_narrow(dtype); }

/// The tensors of one parameter have one shape, and but for the gradient one dtype.
void check_parameter(std::string_view op, const Spec& p, const Spec& other, std::string_view what) {
  check<DTypeError>(
      is_stepped(p.dtype) && is_stepped(other.dtype) && (what == gradients || p.dtype == other.dtype),
      "{}: parameters and gradients must be f32, bf16 or f16, and state as its parameter; got a {} "
      "parameter with a {} {}",
      op, name_of(p.dtype), name_of(other.dtype), what);
  check<ShapeError>(p.shape == other.shape, "{}: a parameter of shape {} has a {} of shape {}", op, p.shape,
                    what, other.shape);
}

void check_scalar(std::string_view op, std::string_view what, const Spec& s) {
  check<DTypeError>(s.dtype == DType::f64 && s.shape.rank() == 0,
                    "{}: {} must be a 0-d f64 tensor, got {} {}", op, what, name_of(s.dtype), s.shape);
}

/// What comes before the parameters.
void check_first(const StepLists& lists, SpecSpan in) {
  const std::string_view op = lists.name;
  check_scalar(op, "the rate", in[0]);
  if (lists.skippable) {
    check<ValueError>(in.size() > 1, "{}: a skippable step takes a flag after the rate, got no second input",
                      op);
    check<DTypeError>(in[1].dtype == DType::f32 && in[1].shape.rank() == 0,
                      "{}: the flag must be a 0-d f32 tensor, got {} {}", op, name_of(in[1].dtype),
                      in[1].shape);
  }
  if (lists.clipped) {
    check<ValueError>(in.size() >= lists.first(),
                      "{}: a clipped step takes a factor before the parameters, got {} inputs", op,
                      in.size());
    check_scalar(op, "the factor", in[lists.factor()]);
  }
}

/// One parameter with what belongs to it.
void check_one(const StepLists& lists, SpecSpan in) {
  const std::string_view op = lists.name;
  const Spec& p = in[0];
  check_parameter(op, p, in[1], gradients);
  for (std::size_t k = 0, at = 2; k < lists.states.size(); ++k)
    if (has(lists.kept, k)) check_parameter(op, p, in[at++], lists.states[k]);
  if (lists.counts) check_scalar(op, "a count of steps", in[lists.count()]);
  if (!lists.twins) return;
  const Spec& twin = in[lists.twin()];
  check<DTypeError>(is_narrow(twin.dtype), "{}: a parameter's twin must be bf16 or f16, got {}", op,
                    name_of(twin.dtype));
  check<ShapeError>(p.shape == twin.shape, "{}: a parameter of shape {} has a twin of shape {}", op, p.shape,
                    twin.shape);
}

/// A gradient as the step takes it.
Tensor gradient(const StepLists& lists, Inputs in, const Tensor& g, DType dtype) {
  if (!lists.clipped) return to(g, dtype);
  return to(ops::times_factor(g, in[lists.factor()]), dtype);
}

}  // namespace

void check_lists(const StepLists& lists, SpecSpan in) {
  check_first(lists, in);
  const std::size_t tensors = in.size() - lists.first(), each = lists.stride();
  check<ValueError>(tensors % each == 0, "{}: {} tensors after the rate, and each parameter brings {}",
                    lists.name, tensors, each);
  for (std::size_t i = lists.first(); i < in.size(); i += each) check_one(lists, in.subspan(i, each));
}

std::byte* dense_data(std::string_view op, const Tensor& t) {
  check<StateError>(t.is_contiguous(), "{}: a tensor of shape {} and strides {} is not dense; clone it", op,
                    t.shape(), t.strides());
  return t.raw();
}

Expr rounded_to(const Expr& x, DType dtype) { return x.is_number() ? x : Expr(to(x.tensor(), dtype)); }

Tensors step_in_ops(const StepLists& lists, Inputs in, const std::function<Tensors(Inputs)>& step) {
  std::vector<Tensor> before;
  Tensors after;
  const auto write = [&](const Tensor& old, Tensor changed) {
    before.push_back(old);
    after.push_back(std::move(changed));
  };
  for (std::size_t i = lists.first(); i < in.size(); i += lists.stride()) {
    const Inputs one = in.subspan(i, lists.stride());
    const Tensor count = lists.counts ? add(one[lists.count()], 1) : Tensor();
    const DType narrow = one[0].dtype(), wide = compute_dtype(narrow);
    std::vector<Tensor> given{in[0], count, to(one[0], wide), gradient(lists, in, one[1], wide)};
    for (std::size_t k = 0, at = 2; k < lists.states.size(); ++k)
      given.push_back(has(lists.kept, k) ? to(one[at++], wide) : Tensor());
    const Tensors stepped = step(given);
    write(one[0], to(stepped[0], narrow));
    for (std::size_t k = 0, at = 2; k < lists.states.size(); ++k)
      if (has(lists.kept, k)) write(one[at++], to(stepped[1 + k], narrow));
    if (lists.counts) write(one[lists.count()], count);
    if (lists.twins) write(one[lists.twin()], to(stepped[0], one[lists.twin()].dtype()));
  }
  if (!lists.skippable) return after;
  const Tensor skipped = not_equal(in[1], 0);
  for (std::size_t i = 0; i < after.size(); ++i) after[i] = where(skipped, before[i], after[i]);
  return after;
}

}  // namespace sherd::detail
