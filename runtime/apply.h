// Running ops: `apply` is the only way an op is run on tensors.
#pragma once

#include "runtime/op.h"

namespace sherd {

/// Makes every input resident and pins it, checks that all are on one device (DeviceError), lets the op check
/// them and allocate its outputs, runs its kernel on that device, and tells this rank's listeners. Without a
/// kernel the op's own `run` or its `reference` runs; with none of them NotImplementedError. On `meta`
/// nothing is computed. Throws also what the op's checks throw; ValueError for a wrong number of inputs or an
/// empty handle.
SHERD_API Tensors apply(const AnyOp& op, Inputs in);

/// Runs `op` into `out`, which an earlier `apply` of it had made or which have the same specs. Checks
/// nothing, counts no write and tells no listener: for recomputation and replay.
SHERD_API void run_again(const AnyOp& op, Inputs in, Outputs out);

namespace detail {

/// The handles of one call as an array, without owning them: counting each would cost two atomic operations.
/// The caller's handles must outlive this.
template <std::size_t N>
class BorrowedInputs {
 public:
  template <class... T>
  explicit BorrowedInputs(const T&... in) : slots_{Slot(in)...} {}
  Inputs span() const { return {&slots_[0].tensor, N}; }

 private:
  union Slot {
    explicit Slot(const Tensor& t) : tensor(Ref<TensorImpl>::borrow(t.impl())) {}
    ~Slot() {}  // nothing is owned
    Tensor tensor;
  };
  static_assert(sizeof(Slot) == sizeof(Tensor));
  Slot slots_[N];
};
template <>
class BorrowedInputs<0> {
 public:
  Inputs span() const { return {}; }
};

template <class O, class... T>
Tensor apply_to(const O& op, const T&... in) {
  const BorrowedInputs<sizeof...(T)> inputs(in...);
  const OpModel<O> model(op);
  Tensors out = apply(static_cast<const AnyOp&>(model), inputs.span());
  check<ValueError>(!out.empty(), "{}: has no output; call apply_many", model.name());
  return std::move(out[0]);
}

}  // namespace detail

/// Applies a typed op with one output. Besides tensors it takes what is one: a parameter, a part `x[0]`.
template <class O, TensorLike... T>
requires(sizeof...(T) != 1 || !OpValue<O>) Tensor apply(const O& op, const T&... in) {
  return detail::apply_to(op, static_cast<const Tensor&>(in)...);
}
/// With one input it takes anything, as `std::apply` does, which would fit better beside `using namespace
/// std`.
template <class O, class T>
requires(OpValue<std::remove_cvref_t<O>>&& TensorLike<std::remove_cvref_t<T>>) Tensor apply(O&& op, T&& in) {
  return detail::apply_to<std::remove_cvref_t<O>>(op, static_cast<const Tensor&>(in));
}

/// Applies a typed op to a list of inputs, with all its outputs.
template <class O>
Tensors apply_many(const O& op, Inputs in) {
  const OpModel<O> model(op);
  return apply(static_cast<const AnyOp&>(model), in);
}
template <class O>
Tensors apply_many(const O& op, std::initializer_list<Tensor> in) {
  return apply_many(op, Inputs(in.begin(), in.size()));
}

}  // namespace sherd
