// Where a tensor is not zero.
#include <algorithm>
#include <numeric>
#include <string_view>
#include <vector>

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/indexing.h"
#include "runtime/ops.h"
#include "runtime/ops/index.h"
#include "runtime/parallel.h"

namespace sherd {
namespace {

/// Where `given` holds, on the host, which reads it.
Tensor places_on_host(const Tensor& given) {
  const Tensor mask = contiguous(to(given, Device::cpu()));
  const auto* holds = reinterpret_cast<const std::uint8_t*>(mask.data<bool>());  // of bools none is a vector
  constexpr std::int64_t block = 1 << 14, piece = 512;
  const std::int64_t n = mask.numel(), blocks = (n + block - 1) / block;
  std::vector<std::int64_t> first(static_cast<std::size_t>(blocks) + 1);
  parallel_for(n, block, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t count = 0;
    for (std::int64_t i = begin; i < end; ++i) count += holds[i];
    first[static_cast<std::size_t>(begin / block) + 1] = count;
  });
  std::partial_sum(first.begin(), first.end(), first.begin());
  const Tensor found = empty({{first.back()}, DType::i64, Device::cpu()});
  parallel_for(n, block, [&](std::int64_t begin, std::int64_t end) {
    auto* to = reinterpret_cast<std::int64_t*>(found.raw()) + first[static_cast<std::size_t>(begin / block)];
    for (std::int64_t i = begin; i < end; i += piece) {
      std::int64_t some[piece], count = 0;  // each place is written, and counts where the mask holds
      for (std::int64_t j = i; j < std::min(i + piece, end); ++j) {
        some[count] = j;
        count += holds[j];
      }
      to = std::copy_n(some, count, to);
    }
  });
  return found;
}

}  // namespace

namespace ops {

Specs Places::infer(SpecSpan in) const {
  check<DTypeError>(in[0].dtype == DType::boolean, "places: takes bool, got {}", name_of(in[0].dtype));
  return {{{count}, DType::i64, in[0].device}};
}

Tensors Places::reference(Inputs in) const { return {to(places_on_host(in[0]), in[0].device())}; }

}  // namespace ops

Tensor detail::places_where(std::string_view call, const Tensor& x) {
  check<DeviceError>(x.device().type != DeviceType::meta,
                     "{}: a tensor on meta has no values to look at; move it to a device", call);
  const Tensor mask = to(x.detach(), DType::boolean);
  try {
    if (mask.device().type == DeviceType::cpu) return places_on_host(mask);
    return apply(ops::Places{sum(mask).item<std::int64_t>()}, mask);
  } catch (const StateError& refused) {
    const std::string_view why = refused.what();
    if (!why.starts_with("capture:") && !why.starts_with("compile:")) throw;
    fail<StateError>(
        "{}: how many elements are picked is a value, which the host reads and a captured step "
        "cannot follow; where(mask, x, 0) and masked_fill have a shape of their own ({})",
        call, why);
  }
}

namespace {

/// Places as positions along each axis, (places, axes).
Tensor positions_on_host(const Tensor& places, const Shape& shape) {
  const std::int64_t count = places.numel(), rank = shape.rank();
  const Tensor found = empty({{count, rank}, DType::i64, Device::cpu()});
  const std::int64_t* place = places.data<std::int64_t>();
  auto* at = reinterpret_cast<std::int64_t*>(found.raw());
  parallel_for(count, 1 << 12, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      for (std::int64_t rest = place[i], axis = rank - 1; axis >= 0; --axis) {
        const std::int64_t size = shape[static_cast<int>(axis)];
        at[i * rank + axis] = rest % size;
        rest /= size;
      }
  });
  return found;
}

/// The same by ops of the places' device.
Tensor positions_of(const Tensor& places, const Shape& shape) {
  std::vector<Tensor> along;
  std::int64_t below = std::max<std::int64_t>(shape.numel(), 1);
  for (const std::int64_t size : shape) {
    below /= std::max<std::int64_t>(size, 1);
    along.push_back(remainder(floor_divide(places, below), std::max<std::int64_t>(size, 1)));
  }
  return along.empty() ? zeros({places.numel(), 0}, {DType::i64, places.device()}) : stack(along, 1);
}

}  // namespace

Tensor nonzero(const Tensor& x) {
  detail::check_given("nonzero", x);
  const Tensor places = detail::places_where("nonzero", x);
  if (x.rank() == 1) return unsqueeze(places, 1);
  return x.device().type == DeviceType::cpu ? positions_on_host(places, x.shape())
                                            : positions_of(places, x.shape());
}

Tensor masked_select(const Tensor& x, const Tensor& mask) {
  detail::check_given("masked_select", x, mask);
  check<DTypeError>(mask.dtype() == DType::boolean, "masked_select: the mask must be bool, got {}",
                    name_of(mask.dtype()));
  const Shape shape = broadcast_shapes("masked_select", x.shape(), mask.shape());
  const Shape list{shape.numel()};
  return index(reshape(expand(x, shape), list), {At(reshape(expand(mask, shape), list))});
}

}  // namespace sherd
