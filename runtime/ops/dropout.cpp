#include "runtime/ops/dropout.h"

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/cpu/random.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {

Specs Dropout::infer(SpecSpan in) const {
  check<DTypeError>(is_floating(in[0].dtype), "dropout: takes floating dtypes, got {}; cast the input first",
                    name_of(in[0].dtype));
  return {in[0]};
}

void Dropout::run(Cpu, Inputs in, Outputs out) const {
  const Tensor x = contiguous(in[0]);
  dispatch_floating(name, x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    cpu::dropout(cpu::RandomAt{key.seed, key.offset}, p, x.data<T>(), reinterpret_cast<T*>(out[0].raw()),
                 x.numel());
  });
}

// The same mask on the gradient; linear, so it is its own derivative.
Tensors Dropout::grad(const GradArgs& args) const { return {apply(*this, args.gy[0])}; }

}  // namespace ops

Tensor dropout(const Tensor& x, double p) {
  check<ValueError>(p >= 0 && p <= 1, "dropout: probability {} is outside [0, 1]", p);
  if (p == 0) return x;
  return apply(ops::Dropout{p, Context::current().generator().reserve(x.numel())}, x);
}

}  // namespace sherd
