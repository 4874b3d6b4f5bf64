// The ops, as free functions on tensors. Mixed dtypes and mixed devices are errors; shapes broadcast as in
// NumPy. Floating results of f16 and bf16 are computed in f32 and rounded once.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "runtime/generator.h"
#include "runtime/indexing.h"
#include "runtime/losses.h"
#include "runtime/number.h"
#include "runtime/tensor.h"

namespace sherd {

// ---- creation
// ---------------------------------------------------------------------------------------------------------------

SHERD_API Tensor zeros(Shape shape, TensorOptions options = {});
SHERD_API Tensor ones(Shape shape, TensorOptions options = {});
SHERD_API Tensor full(Shape shape, Number value, TensorOptions options = {});
SHERD_API Tensor zeros_like(const Tensor& x);
SHERD_API Tensor ones_like(const Tensor& x);
SHERD_API Tensor full_like(const Tensor& x, Number value);
/// start, start + step, ... below end (above it for a negative step).
SHERD_API Tensor arange(Number start, Number end, Number step, TensorOptions options);
/// Of i64, or of the default dtype where one of the numbers is not an integer.
SHERD_API Tensor arange(Number start, Number end, Number step = 1);
inline Tensor arange(Number end) { return arange(0, end); }
/// `count` numbers from start to end, evenly spaced, computed in f64.
SHERD_API Tensor linspace(double start, double end, std::int64_t count, TensorOptions options = {});
/// Ones on the diagonal of (rows, columns), zeros elsewhere; as many columns as rows unless they are given.
SHERD_API Tensor eye(std::int64_t rows, std::int64_t columns = -1, TensorOptions options = {});
/// Uniform in [low, high), from the rank's generator.
SHERD_API Tensor rand(Shape shape, TensorOptions options = {}, double low = 0, double high = 1);
/// Normal with the given mean and standard deviation, from the rank's generator.
SHERD_API Tensor randn(Shape shape, TensorOptions options = {}, double mean = 0, double stddev = 1);
/// Integers in [low, high), from the rank's generator.
SHERD_API Tensor randint(std::int64_t low, std::int64_t high, Shape shape,
                         TensorOptions options = {DType::i64});
/// 0 to count - 1 in random order, from the rank's generator.
SHERD_API Tensor randperm(std::int64_t count, TensorOptions options = {DType::i64});
/// 1 with the probability that each element of `p` says, else 0, in its dtype; no gradient. ValueError for
/// one outside [0, 1], which a GPU and a replay, where nobody looks, take as the nearer end, and NaN as 0.
SHERD_API Tensor bernoulli(const Tensor& p);

// ---- elementwise
// ------------------------------------------------------------------------------------------------------------

SHERD_API Tensor neg(const Tensor& x);
SHERD_API Tensor abs(const Tensor& x);
SHERD_API Tensor exp(const Tensor& x);
SHERD_API Tensor log(const Tensor& x);
/// log(1 + x), exact to rounding for small x too.
SHERD_API Tensor log1p(const Tensor& x);
SHERD_API Tensor sqrt(const Tensor& x);
SHERD_API Tensor rsqrt(const Tensor& x);
/// e^x - 1, exact to rounding for small x too.
SHERD_API Tensor expm1(const Tensor& x);
SHERD_API Tensor exp2(const Tensor& x);
SHERD_API Tensor log2(const Tensor& x);
SHERD_API Tensor log10(const Tensor& x);
SHERD_API Tensor sin(const Tensor& x);
SHERD_API Tensor cos(const Tensor& x);
SHERD_API Tensor tan(const Tensor& x);
SHERD_API Tensor asin(const Tensor& x);
SHERD_API Tensor acos(const Tensor& x);
SHERD_API Tensor atan(const Tensor& x);
SHERD_API Tensor sinh(const Tensor& x);
SHERD_API Tensor cosh(const Tensor& x);
SHERD_API Tensor tanh(const Tensor& x);
SHERD_API Tensor asinh(const Tensor& x);
SHERD_API Tensor acosh(const Tensor& x);
SHERD_API Tensor atanh(const Tensor& x);
SHERD_API Tensor sigmoid(const Tensor& x);
SHERD_API Tensor erf(const Tensor& x);
SHERD_API Tensor relu(const Tensor& x);
/// Which form of GELU: the exact distribution function, or its tanh approximation.
enum class GeluForm { erf, tanh };
SHERD_API Tensor gelu(const Tensor& x, GeluForm form = GeluForm::erf);
/// What a layer ends with, in the same op where that has it: ReLU after `batch_norm`, GELU after `linear`.
enum class Activation { none, relu, gelu };
SHERD_API Tensor silu(const Tensor& x);
SHERD_API Tensor leaky_relu(const Tensor& x, double slope = 0.01);
/// log(1 + e^x), without overflow.
SHERD_API Tensor softplus(const Tensor& x);
/// x where positive, alpha (e^x - 1) elsewhere (Clevert et al., 2015).
SHERD_API Tensor elu(const Tensor& x, double alpha = 1);
/// 1.0507 elu(x, 1.6733), which keeps mean and variance (Klambauer et al., 2017).
SHERD_API Tensor selu(const Tensor& x);
SHERD_API Tensor square(const Tensor& x);
SHERD_API Tensor reciprocal(const Tensor& x);
SHERD_API Tensor floor(const Tensor& x);
SHERD_API Tensor ceil(const Tensor& x);
/// Towards 0.
SHERD_API Tensor trunc(const Tensor& x);
/// To the nearest integer, of two to the even one.
SHERD_API Tensor round(const Tensor& x);
/// 1 above 0, -1 below, else 0, of NaN too.
SHERD_API Tensor sign(const Tensor& x);
SHERD_API Tensor clamp(const Tensor& x, Number min, Number max);
/// bool: neither infinite nor NaN.
SHERD_API Tensor isfinite(const Tensor& x);
SHERD_API Tensor isnan(const Tensor& x);
SHERD_API Tensor isinf(const Tensor& x);
SHERD_API Tensor logical_not(const Tensor& x);

SHERD_API Tensor add(const Tensor& a, const Tensor& b);
SHERD_API Tensor sub(const Tensor& a, const Tensor& b);
SHERD_API Tensor mul(const Tensor& a, const Tensor& b);
SHERD_API Tensor div(const Tensor& a, const Tensor& b);
SHERD_API Tensor pow(const Tensor& a, const Tensor& b);
SHERD_API Tensor maximum(const Tensor& a, const Tensor& b);
SHERD_API Tensor minimum(const Tensor& a, const Tensor& b);
/// The angle of (b, a), from -pi to pi.
SHERD_API Tensor atan2(const Tensor& a, const Tensor& b);
/// silu(gate) x (Shazeer, 2020), rounded once.
SHERD_API Tensor swiglu(const Tensor& gate, const Tensor& x);
/// What dividing a by b leaves, of the sign of b. Integers by 0 leave 0.
SHERD_API Tensor remainder(const Tensor& a, const Tensor& b);
/// The integer at or below a / b, a step without a slope; of integers by 0: 0.
SHERD_API Tensor floor_divide(const Tensor& a, const Tensor& b);
SHERD_API Tensor add(const Tensor& a, Number b);
SHERD_API Tensor sub(const Tensor& a, Number b);
SHERD_API Tensor sub(Number a, const Tensor& b);
SHERD_API Tensor mul(const Tensor& a, Number b);
SHERD_API Tensor div(const Tensor& a, Number b);
SHERD_API Tensor div(Number a, const Tensor& b);
SHERD_API Tensor pow(const Tensor& a, Number b);
SHERD_API Tensor pow(Number a, const Tensor& b);
SHERD_API Tensor maximum(const Tensor& a, Number b);
SHERD_API Tensor minimum(const Tensor& a, Number b);
SHERD_API Tensor remainder(const Tensor& a, Number b);
SHERD_API Tensor floor_divide(const Tensor& a, Number b);

inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
inline Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }
inline Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }
inline Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }
inline Tensor operator+(const Tensor& a, Number b) { return add(a, b); }
inline Tensor operator+(Number a, const Tensor& b) { return add(b, a); }
inline Tensor operator-(const Tensor& a, Number b) { return sub(a, b); }
inline Tensor operator-(Number a, const Tensor& b) { return sub(a, b); }
inline Tensor operator*(const Tensor& a, Number b) { return mul(a, b); }
inline Tensor operator*(Number a, const Tensor& b) { return mul(b, a); }
inline Tensor operator/(const Tensor& a, Number b) { return div(a, b); }
inline Tensor operator/(Number a, const Tensor& b) { return div(a, b); }
inline Tensor operator-(const Tensor& x) { return neg(x); }

/// Comparisons give bool; with NaN only `not_equal` is true.
SHERD_API Tensor equal(const Tensor& a, const Tensor& b);
SHERD_API Tensor not_equal(const Tensor& a, const Tensor& b);
SHERD_API Tensor less(const Tensor& a, const Tensor& b);
SHERD_API Tensor less_equal(const Tensor& a, const Tensor& b);
SHERD_API Tensor greater(const Tensor& a, const Tensor& b);
SHERD_API Tensor greater_equal(const Tensor& a, const Tensor& b);
SHERD_API Tensor equal(const Tensor& a, Number b);
SHERD_API Tensor not_equal(const Tensor& a, Number b);
SHERD_API Tensor less(const Tensor& a, Number b);
SHERD_API Tensor less_equal(const Tensor& a, Number b);
SHERD_API Tensor greater(const Tensor& a, Number b);
SHERD_API Tensor greater_equal(const Tensor& a, Number b);
SHERD_API Tensor logical_and(const Tensor& a, const Tensor& b);
SHERD_API Tensor logical_or(const Tensor& a, const Tensor& b);
/// bool, element by element: a loop's condition asks `.item<bool>()` of `all` or `any` of them.
inline Tensor operator==(const Tensor& a, const Tensor& b) { return equal(a, b); }
inline Tensor operator!=(const Tensor& a, const Tensor& b) { return not_equal(a, b); }
inline Tensor operator<(const Tensor& a, const Tensor& b) { return less(a, b); }
inline Tensor operator<=(const Tensor& a, const Tensor& b) { return less_equal(a, b); }
inline Tensor operator>(const Tensor& a, const Tensor& b) { return greater(a, b); }
inline Tensor operator>=(const Tensor& a, const Tensor& b) { return greater_equal(a, b); }
inline Tensor operator==(const Tensor& a, Number b) { return equal(a, b); }
inline Tensor operator!=(const Tensor& a, Number b) { return not_equal(a, b); }
inline Tensor operator<(const Tensor& a, Number b) { return less(a, b); }
inline Tensor operator<=(const Tensor& a, Number b) { return less_equal(a, b); }
inline Tensor operator>(const Tensor& a, Number b) { return greater(a, b); }
inline Tensor operator>=(const Tensor& a, Number b) { return greater_equal(a, b); }
inline Tensor operator==(Number a, const Tensor& b) { return equal(b, a); }
inline Tensor operator!=(Number a, const Tensor& b) { return not_equal(b, a); }
inline Tensor operator<(Number a, const Tensor& b) { return greater(b, a); }
inline Tensor operator<=(Number a, const Tensor& b) { return greater_equal(b, a); }
inline Tensor operator>(Number a, const Tensor& b) { return less(b, a); }
inline Tensor operator>=(Number a, const Tensor& b) { return less_equal(b, a); }
/// Of bool tensors; DTypeError for others.
SHERD_API Tensor operator&(const Tensor& a, const Tensor& b);
SHERD_API Tensor operator|(const Tensor& a, const Tensor& b);
SHERD_API Tensor operator~(const Tensor& a);

/// `a` where the bool `condition` holds, `b` elsewhere. A number has the dtype of the tensor beside it.
SHERD_API Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
SHERD_API Tensor where(const Tensor& condition, const Tensor& a, Number b);
SHERD_API Tensor where(const Tensor& condition, Number a, const Tensor& b);
/// Of i64, or of the default dtype where one of the numbers is not an integer.
SHERD_API Tensor where(const Tensor& condition, Number a, Number b);
/// `x` with `value` where the bool `mask` holds.
SHERD_API Tensor masked_fill(const Tensor& x, const Tensor& mask, Number value);
SHERD_API Tensor masked_fill(const Tensor& x, const Tensor& mask, const Tensor& value);

// In-place forms write their first argument and return it. `b` may be of a lower floating precision (f32 +=
// bf16).
SHERD_API Tensor add_(const Tensor& a, const Tensor& b);
SHERD_API Tensor sub_(const Tensor& a, const Tensor& b);
SHERD_API Tensor mul_(const Tensor& a, const Tensor& b);
SHERD_API Tensor div_(const Tensor& a, const Tensor& b);
SHERD_API Tensor add_(const Tensor& a, Number b);
SHERD_API Tensor sub_(const Tensor& a, Number b);
SHERD_API Tensor mul_(const Tensor& a, Number b);
SHERD_API Tensor div_(const Tensor& a, Number b);
SHERD_API Tensor relu_(const Tensor& x);
SHERD_API Tensor exp_(const Tensor& x);
SHERD_API Tensor fill_(const Tensor& x, Number value);
SHERD_API Tensor zero_(const Tensor& x);
SHERD_API Tensor masked_fill_(const Tensor& x, const Tensor& mask, Number value);
inline Tensor& operator+=(Tensor& a, const Tensor& b) { return a = add_(a, b); }
inline Tensor& operator-=(Tensor& a, const Tensor& b) { return a = sub_(a, b); }
inline Tensor& operator*=(Tensor& a, const Tensor& b) { return a = mul_(a, b); }
inline Tensor& operator/=(Tensor& a, const Tensor& b) { return a = div_(a, b); }
inline Tensor& operator+=(Tensor& a, Number b) { return a = add_(a, b); }
inline Tensor& operator-=(Tensor& a, Number b) { return a = sub_(a, b); }
inline Tensor& operator*=(Tensor& a, Number b) { return a = mul_(a, b); }
inline Tensor& operator/=(Tensor& a, Number b) { return a = div_(a, b); }
/// The same of a parameter or a buffer, whose values are written.
template <TensorLike T>
  requires(!std::derived_from<T, Tensor>)
T& operator+=(T& a, const Tensor& b) {
  return add_(a, b), a;
}
template <TensorLike T>
  requires(!std::derived_from<T, Tensor>)
T& operator-=(T& a, const Tensor& b) {
  return sub_(a, b), a;
}
template <TensorLike T>
  requires(!std::derived_from<T, Tensor>)
T& operator*=(T& a, const Tensor& b) {
  return mul_(a, b), a;
}
template <TensorLike T>
  requires(!std::derived_from<T, Tensor>)
T& operator/=(T& a, const Tensor& b) {
  return div_(a, b), a;
}
template <TensorLike T>
  requires(!std::derived_from<T, Tensor>)
T& operator+=(T& a, Number b) {
  return add_(a, b), a;
}
template <TensorLike T>
  requires(!std::derived_from<T, Tensor>)
T& operator-=(T& a, Number b) {
  return sub_(a, b), a;
}
template <TensorLike T>
  requires(!std::derived_from<T, Tensor>)
T& operator*=(T& a, Number b) {
  return mul_(a, b), a;
}
template <TensorLike T>
  requires(!std::derived_from<T, Tensor>)
T& operator/=(T& a, Number b) {
  return div_(a, b), a;
}
/// Writes `from`'s values into `to`, broadcast and cast, across devices.
SHERD_API Tensor copy_(const Tensor& to, const Tensor& from);
/// Writes random values: uniform in [low, high), or normal.
SHERD_API Tensor uniform_(const Tensor& x, double low, double high);
SHERD_API Tensor normal_(const Tensor& x, double mean, double stddev);

// ---- dtype, device, memory
// --------------------------------------------------------------------------------------------------

/// The same values in another dtype; `x` itself if it has it already.
SHERD_API Tensor to(const Tensor& x, DType dtype);
/// The same values on another device; `x` itself if it is there already.
SHERD_API Tensor to(const Tensor& x, Device device);
/// A dense copy.
SHERD_API Tensor clone(const Tensor& x);
/// `x` if it is dense already, else a dense copy.
SHERD_API Tensor contiguous(const Tensor& x);

// ---- views: they share memory with `x`
// --------------------------------------------------------------------------------------

/// Another shape of as many elements, one of which may be -1; a view where the strides allow it, else a copy.
SHERD_API Tensor reshape(const Tensor& x, Shape shape);
/// The same, but a ShapeError where it would have to copy.
SHERD_API Tensor view(const Tensor& x, Shape shape);
SHERD_API Tensor flatten(const Tensor& x, std::int64_t first = 0, std::int64_t last = -1);
/// Output axis i is input axis axes[i].
SHERD_API Tensor permute(const Tensor& x, Shape axes);
SHERD_API Tensor transpose(const Tensor& x, std::int64_t a, std::int64_t b);
SHERD_API Tensor squeeze(const Tensor& x, std::int64_t axis);
/// Without all axes of size 1.
SHERD_API Tensor squeeze(const Tensor& x);
SHERD_API Tensor unsqueeze(const Tensor& x, std::int64_t axis);
/// Size-1 axes repeated without copying; -1 keeps an axis.
SHERD_API Tensor expand(const Tensor& x, Shape shape);
/// Elements start, start+step, ... below end along `axis`; negative start and end count from the end, both
/// are clamped.
SHERD_API Tensor slice(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t end,
                       std::int64_t step = 1);
/// `length` elements from `start` along `axis`; out of range is an error.
SHERD_API Tensor narrow(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t length);
/// One position along `axis`, which disappears.
SHERD_API Tensor select(const Tensor& x, std::int64_t axis, std::int64_t index);
/// Pieces of `size` along `axis`, the last one shorter where it does not divide.
SHERD_API std::vector<Tensor> split(const Tensor& x, std::int64_t size, std::int64_t axis = 0);
/// At most `count` pieces along `axis`, all of one size but the last, which may be shorter.
SHERD_API std::vector<Tensor> chunk(const Tensor& x, std::int64_t count, std::int64_t axis = 0);
/// `select` of every position along `axis`.
SHERD_API std::vector<Tensor> unbind(const Tensor& x, std::int64_t axis = 0);
/// The diagonal of the matrices in axes `a` and `b`, as the last axis; with an offset one above (positive) or
/// below.
SHERD_API Tensor diagonal(const Tensor& x, std::int64_t offset = 0, std::int64_t a = 0, std::int64_t b = 1);

// ---- joining and picking
// ----------------------------------------------------------------------------------------------------

SHERD_API Tensor cat(std::span<const Tensor> parts, std::int64_t axis = 0);
SHERD_API Tensor stack(std::span<const Tensor> parts, std::int64_t axis = 0);
inline Tensor cat(std::initializer_list<Tensor> parts, std::int64_t axis = 0) {
  return cat(std::span(parts.begin(), parts.size()), axis);
}
inline Tensor stack(std::initializer_list<Tensor> parts, std::int64_t axis = 0) {
  return stack(std::span(parts.begin(), parts.size()), axis);
}
/// `x` many times along each axis; more counts than axes add axes in front.
SHERD_API Tensor repeat(const Tensor& x, Shape counts);
/// The order of the elements along these axes turned round.
SHERD_API Tensor flip(const Tensor& x, Shape axes);
/// Elements moved on by `shift` along `axis`; what leaves the end comes in at the beginning.
SHERD_API Tensor roll(const Tensor& x, std::int64_t shift, std::int64_t axis);
/// What stands around a padded tensor: a number, its elements mirrored at the edge, the edge's own, or those
/// of the other side.
enum class Padding { constant, reflect, replicate, circular };
/// `x` with so many elements more before and after, as PyTorch lists them: {before, after} of the last axis,
/// then of the one before it, and so on, of four axes at most. Negative counts take elements away.
SHERD_API Tensor pad(const Tensor& x, Shape counts, Padding padding = Padding::constant, Number value = 0);
/// Rows `index` (integers, any shape) of `table` (rows, width): shape index + (width). Repeated rows add up
/// in the gradient.
SHERD_API Tensor embedding(const Tensor& table, const Tensor& index);
/// Slices of `x` at `index` (integers, 1-D) along `axis`.
SHERD_API Tensor index_select(const Tensor& x, std::int64_t axis, const Tensor& index);
/// Along the last axis: x[..., index[..., j]] at j, for an index (integers) of x's other sizes. Repeated
/// positions add up in the gradient. See runtime/indexing.h for any axis, and for `x[...]`.
SHERD_API Tensor gather(const Tensor& x, const Tensor& index);
/// Elements and where they were; i64.
struct Picked {
  Tensor values, indices;
};
using TopK = Picked;
enum class Order { ascending, descending };
/// The first k of `sort(x, axis, order)`: the largest, or the smallest.
SHERD_API TopK topk(const Tensor& x, std::int64_t k, std::int64_t axis = -1, Order order = Order::descending);
/// Values in order along `axis`, and where each was; equal ones by position, NaN as the largest.
SHERD_API Picked sort(const Tensor& x, std::int64_t axis = -1, Order order = Order::ascending);
SHERD_API Tensor argsort(const Tensor& x, std::int64_t axis = -1, Order order = Order::ascending);
/// i64 (shape of index + classes): 1 at the class that `index` (integers in [0, classes)) names, 0 elsewhere.
SHERD_API Tensor one_hot(const Tensor& index, std::int64_t classes);
/// One index drawn along the last axis with probability proportional to `weights`, from the rank's generator;
/// i64.
SHERD_API Tensor multinomial(const Tensor& weights);
/// Whether what was drawn may be drawn again.
enum class Replacement { with, without };
/// `count` indices a row, along a new last axis. Without replacement no two of a row are equal; ValueError
/// for a row with fewer weights above 0, where a GPU draws those of 0 last.
SHERD_API Tensor multinomial(const Tensor& weights, std::int64_t count,
                             Replacement replacement = Replacement::with);

// ---- reductions
// -------------------------------------------------------------------------------------------------------------

/// Whether a reduced axis stays with size 1.
enum class Keep { drop, dims };
/// Over the given axes; no axes means all.
SHERD_API Tensor sum(const Tensor& x, Shape axes = {}, Keep keep = Keep::drop);
SHERD_API Tensor mean(const Tensor& x, Shape axes = {}, Keep keep = Keep::drop);
/// Largest and smallest values; NaN wins; equal ones share the gradient. An empty axis is an error.
SHERD_API Tensor amax(const Tensor& x, Shape axes = {}, Keep keep = Keep::drop);
SHERD_API Tensor amin(const Tensor& x, Shape axes = {}, Keep keep = Keep::drop);
/// Position of the first largest, or smallest, value along `axis`; i64. NaN wins.
SHERD_API Tensor argmax(const Tensor& x, std::int64_t axis, Keep keep = Keep::drop);
SHERD_API Tensor argmin(const Tensor& x, std::int64_t axis, Keep keep = Keep::drop);
/// The largest, or smallest, values along `axis` and their first positions, which alone have a gradient.
SHERD_API Picked max(const Tensor& x, std::int64_t axis, Keep keep = Keep::drop);
SHERD_API Picked min(const Tensor& x, std::int64_t axis, Keep keep = Keep::drop);
/// Whether any element, or every one, is not zero; bool. Of none: false and true.
SHERD_API Tensor any(const Tensor& x, Shape axes = {}, Keep keep = Keep::drop);
SHERD_API Tensor all(const Tensor& x, Shape axes = {}, Keep keep = Keep::drop);
/// Whether |a - b| <= absolute + relative |b| everywhere; equal infinities count, NaN equals nothing. Waits
/// for the device.
SHERD_API bool allclose(const Tensor& a, const Tensor& b, double relative = 1e-5, double absolute = 1e-8);
/// The product; integers and bools multiply in i64.
SHERD_API Tensor prod(const Tensor& x, Shape axes = {}, Keep keep = Keep::drop);
/// Mean of the squared deviations from the mean times n / (n - correction), and its square root, whose
/// gradient is 0 where all elements are equal. NaN for n <= correction.
SHERD_API Tensor var(const Tensor& x, Shape axes = {}, Keep keep = Keep::drop, double correction = 1);
SHERD_API Tensor stddev(const Tensor& x, Shape axes = {}, Keep keep = Keep::drop, double correction = 1);
/// (sum of |x|^p)^(1/p); infinite p: the largest |x|, or the smallest; p = 0: how many are not 0. The
/// gradient of a Euclidean norm of 0 is 0.
SHERD_API Tensor norm(const Tensor& x, double p = 2, Shape axes = {}, Keep keep = Keep::drop);
/// log of the sum of e^x, without overflow.
SHERD_API Tensor logsumexp(const Tensor& x, Shape axes = {}, Keep keep = Keep::drop);
/// log of the sum of e^x over the elements up to each, along `axis`, without overflow.
SHERD_API Tensor logcumsumexp(const Tensor& x, std::int64_t axis);
/// Sums and products of the elements up to each, along `axis`; integers and bools in i64.
SHERD_API Tensor cumsum(const Tensor& x, std::int64_t axis);
SHERD_API Tensor cumprod(const Tensor& x, std::int64_t axis);
/// Euclidean norm of all elements of all tensors, the same to the bit however they are ordered or cut; f64,
/// 0-d, no gradient.
SHERD_API Tensor order_free_norm(std::span<const Tensor> tensors);

// ---- products
// ---------------------------------------------------------------------------------------------------------------

/// (..., m, k) times (..., k, n), batch axes broadcast; a 1-D operand is a row or a column that disappears.
/// Integers are multiplied on the CPU alone (DTypeError) and wrap around in their dtype.
SHERD_API Tensor matmul(const Tensor& a, const Tensor& b);
/// Products summed as the equation says: "ik,kj->ij" is a matrix product, "bij,bj->bi" one a batch, "ii->i" a
/// diagonal. Letters name axes, `...` any further ones, spaces mean nothing; without "->" the letters that
/// occur once stay, in the order of the alphabet. Operands are multiplied from left to right. Sums of
/// integers and bools outside a product of matrices are i64.
SHERD_API Tensor einsum(std::string_view equation, std::span<const Tensor> operands);
inline Tensor einsum(std::string_view equation, std::initializer_list<Tensor> operands) {
  return einsum(equation, std::span(operands.begin(), operands.size()));
}
/// a (n) times b (m): (n, m).
SHERD_API Tensor outer(const Tensor& a, const Tensor& b);
/// The matrices in the last two axes with zeros above, or below, the diagonal `offset` places above
/// (positive) or below the main one.
SHERD_API Tensor tril(const Tensor& x, std::int64_t offset = 0);
SHERD_API Tensor triu(const Tensor& x, std::int64_t offset = 0);
/// A matrix with `x` (n) on that diagonal; or the diagonal of a matrix.
SHERD_API Tensor diag(const Tensor& x, std::int64_t offset = 0);
/// x (..., in) times weight (out, in) transposed, plus bias (out) and residual (..., out) unless they are
/// none.
SHERD_API Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const Tensor& residual = {});
/// gelu(linear(x, weight, bias)) as one op, which is faster; 16-bit results may be a rounding apart.
SHERD_API Tensor linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias = {});
/// What 8-bit factors are scaled by: one number a tensor, or one for each row of x, of the weight and of the
/// gradient, and for each of their columns where a product of the gradient turns them.
enum class EightScales { of_tensors, of_rows };
/// linear(x, weight, bias) whose products, those of its gradient too, are taken of 8-bit numbers: x and
/// weight rounded to e4m3 and gradients to e5m2 (with scales of rows: to e4m3), with sums in f32. As precise
/// as such numbers are (about 4 and 3 bits); of rows, an outlier costs its own row bits and no other. Fast
/// where a GPU multiplies them: bf16 or f16 with sizes that 16 divides. No second derivative.
SHERD_API Tensor linear_fp8(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                            EightScales scales = EightScales::of_tensors);
/// A number of pixels along the height of an image, and one along its width.
struct PerAxis {
  std::int64_t down, across;
  constexpr PerAxis(std::int64_t both) : down(both), across(both) {}
  constexpr PerAxis(std::int64_t down, std::int64_t across) : down(down), across(across) {}
  friend bool operator==(const PerAxis&, const PerAxis&) = default;
};
/// Of a convolution: `Conv2dOptions` of images (`Axis` is `PerAxis`), `Conv1dOptions` along one axis (a
/// number). Passed by reference everywhere: g++ 12 with AVX-512 stores a padding of 1 when it passes the
/// defaults by value.
template <class Axis>
struct ConvOptions {
  Axis stride = 1, padding = 0;  ///< zeros around the image
  Axis dilation = 1;             ///< pixels between those that a kernel sees
  std::int64_t groups = 1;       ///< each sees its own C / groups channels and gives out / groups
};
using Conv2dOptions = ConvOptions<PerAxis>;
using Conv1dOptions = ConvOptions<std::int64_t>;
/// Cross-correlation of x (N, C, H, W) with weight (out, C / groups, height, width), plus bias (out) unless
/// it is none.
SHERD_API Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const Conv2dOptions& options = {});
/// The same along one axis: x (N, C, L), weight (out, C / groups, length).
SHERD_API Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const Conv1dOptions& options = {});
/// As `ConvOptions`: `ConvTranspose2dOptions`, `ConvTranspose1dOptions`.
template <class Axis>
struct ConvTransposeOptions {
  Axis stride = 1, padding = 0;
  Axis output_padding = 0;  ///< pixels more at the end: less than the stride, or than the dilation
  Axis dilation = 1;
  std::int64_t groups = 1;
};
using ConvTranspose2dOptions = ConvTransposeOptions<PerAxis>;
using ConvTranspose1dOptions = ConvTransposeOptions<std::int64_t>;
/// Transposed convolution of x (N, C, H, W) with weight (C, out / groups, height, width), plus bias (out)
/// unless it is none: what conv2d with these options and this weight gives back to its input. Along each axis
/// of n pixels it has (n - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1.
SHERD_API Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                                  const ConvTranspose2dOptions& options = {});
/// The same along one axis: x (N, C, L), weight (C, out / groups, length).
SHERD_API Tensor conv_transpose1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                                  const ConvTranspose1dOptions& options = {});
/// Of windows, as `ConvOptions` of kernels: `Pool2dOptions`, `Pool1dOptions`.
template <class Axis>
struct PoolOptions {
  Axis stride = 0;         ///< the kernel's size along an axis where it is 0
  Axis padding = 0;        ///< at most half the kernel
  bool ceil_mode = false;  ///< pixels left over at the end have a window too, which begins before the padding
};
using Pool2dOptions = PoolOptions<PerAxis>;
using Pool1dOptions = PoolOptions<std::int64_t>;
/// Of windows of which means are taken: `AvgPool2dOptions`, `AvgPool1dOptions`.
template <class Axis>
struct AvgPoolOptions {
  Axis stride = 0;                ///< the kernel's size along an axis where it is 0
  Axis padding = 0;               ///< at most half the kernel
  bool ceil_mode = false;         ///< as in `PoolOptions`; what lies beyond the padding never counts
  bool count_include_pad = true;  ///< padding counts as zeros; else a mean is of pixels alone
  std::optional<std::int64_t> divisor_override{};  ///< of sums, instead of how many pixels count; not 0
};
using AvgPool2dOptions = AvgPoolOptions<PerAxis>;
using AvgPool1dOptions = AvgPoolOptions<std::int64_t>;
/// The largest of each window of kernel pixels of x (N, C, H, W); the first of equal ones has the gradient.
SHERD_API Tensor max_pool2d(const Tensor& x, PerAxis kernel, const Pool2dOptions& options = {});
/// The mean of each window, of as many pixels as the options count.
SHERD_API Tensor avg_pool2d(const Tensor& x, PerAxis kernel, const AvgPool2dOptions& options = {});
/// The same along one axis: x (N, C, L).
SHERD_API Tensor max_pool1d(const Tensor& x, std::int64_t kernel, const Pool1dOptions& options = {});
SHERD_API Tensor avg_pool1d(const Tensor& x, std::int64_t kernel, const AvgPool1dOptions& options = {});
/// Means of down x across windows that cover the image, whatever its size.
SHERD_API Tensor adaptive_avg_pool2d(const Tensor& x, std::int64_t down, std::int64_t across);
inline Tensor adaptive_avg_pool2d(const Tensor& x, PerAxis size) {
  return adaptive_avg_pool2d(x, size.down, size.across);
}
/// Largest values of the same windows; the first of equal ones has the gradient.
SHERD_API Tensor adaptive_max_pool2d(const Tensor& x, std::int64_t down, std::int64_t across);
inline Tensor adaptive_max_pool2d(const Tensor& x, PerAxis size) {
  return adaptive_max_pool2d(x, size.down, size.across);
}
/// What stands between the pixels of an image: the nearest one, or a straight line along both axes.
enum class Interpolation { nearest, bilinear };
/// A factor along the height of an image, and one along its width.
struct ScalePerAxis {
  double down, across;
  constexpr ScalePerAxis(double both) : down(both), across(both) {}
  constexpr ScalePerAxis(double down, double across) : down(down), across(across) {}
  friend bool operator==(const ScalePerAxis&, const ScalePerAxis&) = default;
};
/// Either the size or the scale is given; the other one is 0.
struct InterpolateOptions {
  PerAxis size = 0;        ///< pixels of the result
  ScalePerAxis scale = 0;  ///< of the pixels; a result that is no whole number is rounded down
  Interpolation mode = Interpolation::nearest;
  bool align_corners = false;  ///< bilinear: the middles of the corner pixels stay, not their outer edges
};
/// Images x (N, C, H, W) of another size, by PyTorch's rules: pixel i is the one of x at i / scale, rounded
/// down, where a size says the scale too; bilinear: it lies at (i + 1/2) / scale - 1/2, between two, within
/// x. The mode nearest takes any dtype, the other one floating ones.
SHERD_API Tensor interpolate(const Tensor& x, const InterpolateOptions& options);

// ---- layers
// -----------------------------------------------------------------------------------------------------------------

SHERD_API Tensor softmax(const Tensor& x, std::int64_t axis = -1);
SHERD_API Tensor log_softmax(const Tensor& x, std::int64_t axis = -1);
/// (x - mean) / sqrt(var + eps) over the last axis, times weight, plus bias (Ba, Kiros and Hinton, 2016);
/// either may be none.
SHERD_API Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps = 1e-5);
/// x / sqrt(mean of x^2 + eps) over the last axis, times weight unless it is none (Zhang and Sennrich, 2019).
SHERD_API Tensor rms_norm(const Tensor& x, const Tensor& weight = {}, double eps = 1e-5);
/// (x - mean) / sqrt(var + eps) over each of `groups` groups of channels of x (N, C, ...), times weight (C),
/// plus bias (C), either of which may be none (Wu and He, 2018).
SHERD_API Tensor group_norm(const Tensor& x, std::int64_t groups, const Tensor& weight = {},
                            const Tensor& bias = {}, double eps = 1e-5);
struct BatchNormOptions {
  bool training = false;  ///< by the batch's statistics, which the running ones then follow
  double momentum = 0.1;  ///< share of the batch in the new running statistics
  double eps = 1e-5;
  Tensor residual{};  ///< of the shape and dtype of x; added to the result unless it is none
  Activation activation = Activation::none;  ///< of the sum
};
/// (x - mean) / sqrt(var + eps) for each channel of x (N, C, ...), times weight, plus bias (Ioffe and
/// Szegedy, 2015). Training writes the running statistics (var without bias) and they may be none, else they
/// are the mean and var; weight and bias may be none, and f32 where x has 16 bits. `relu(batch_norm(x) + r)`
/// as one op has the bits of the three and reads and writes less memory, in the backward too.
SHERD_API Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                            const Tensor& weight = {}, const Tensor& bias = {},
                            BatchNormOptions options = {});
/// Zeroes each element with probability p and scales the others by 1 / (1 - p).
SHERD_API Tensor dropout(const Tensor& x, double p);
struct AttentionOptions {
  bool causal = false;            ///< position i of the query sees keys up to i + Tk - Tq
  double dropout = 0;             ///< on the weights
  std::optional<double> scale{};  ///< 1 / sqrt(D) by default
  /// Broadcasts to (B, H, Tq, Tk): bool, true where a query sees a key; or added to the scores, in q's dtype,
  /// where -inf hides a key. A query that sees none gives zeros.
  Tensor mask{};
};
/// softmax(q k^T scale) v for q (B, H, Tq, D), k and v (B, H, Tk, D), any strides; never stores Tq x Tk, but
/// for the gradient of a mask. Blocks of keys that a mask hides from neighbouring queries are passed over. k
/// and v may have fewer heads, which groups of q's then share (Ainslie et al., 2023).
SHERD_API Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionOptions options = {});
/// The same on a packed projection (B, T, 3 * heads * D) of q, k and v, as nanoGPT and GPT-2 lay it out;
/// gives (B, T, heads * D).
SHERD_API Tensor self_attention(const Tensor& qkv, std::int64_t heads, AttentionOptions options = {});
/// Which features turn together: i and i + D / 2 (Llama as Hugging Face has it), or 2 i and 2 i + 1.
enum class RotaryPairs { halves, neighbours };
/// Slower turning for contexts longer than the `original` positions that a model was trained with, as the
/// `rope_type` of Hugging Face's files: `linear` slows all pairs by `factor` (Chen et al., 2023); `dynamic`
/// has base (factor L / original - factor + 1)^(D / (D - 2)) in place of base where L = first + T is beyond
/// `original` (D above 2). The others slow by `factor` the pairs that turn less than `low` times in
/// `original` positions and leave alone those that turn more than `high` times; between them is a mixture,
/// which follows the turns in `llama3` (Llama 3.1) and the numbers of pairs in `yarn` (Peng et al., 2023; low
/// above 0 and base above 1), from whole pair to whole pair but in `yarn_fractional`.
enum class RotaryKind { linear, dynamic, llama3, yarn, yarn_fractional };
struct RotaryScaling {
  double factor = 1, low = 1, high = 4, original = 8192;
  RotaryKind kind = RotaryKind::llama3;
  double amplitude = 1;  ///< what is turned is multiplied by it
  bool operator==(const RotaryScaling&) const = default;
};
struct RotaryOptions {
  std::int64_t first = 0;  ///< position of the first step
  double base = 10000;
  RotaryPairs pairs = RotaryPairs::halves;
  RotaryScaling scaling{};
  bool operator==(const RotaryOptions&) const = default;
};
/// Rotary position embedding of x (..., T, D), D even: pair i of step t is turned by (first + t) base^(-2 i /
/// D) (Su et al., 2021).
SHERD_API Tensor rotary(const Tensor& x, RotaryOptions options = {});
/// Cosines and sines of T steps by D / 2 pairs.
struct RotaryTurns {
  Tensor cosines, sines;
};
/// Those by which `rotary` turns `steps` steps of `width` features, in the dtype that `tensor.dtype` is
/// computed in.
SHERD_API RotaryTurns rotary_turns(std::int64_t steps, std::int64_t width, const RotaryOptions& options,
                                   TensorOptions tensor);
/// The same of steps at any positions: those of which `turns` has the rows.
SHERD_API Tensor rotary(const Tensor& x, const RotaryTurns& turns, RotaryPairs pairs = RotaryPairs::halves);

}  // namespace sherd
