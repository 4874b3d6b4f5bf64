// Ops take any arguments: they give a tensor or throw one line of the Error family, and touch no memory but
// their own. The bytes are a small program: each step picks a call, tensors made before, and numbers that are
// near zero, near sizes, or at the ends of i64. To fuzz on (ten minutes of building):
//   CC=clang-19 CXX=clang++-19 meson setup build/fuzz -Doptimization=1 -Ddebug=false -Db_ndebug=true
//     -Db_sanitize=address,undefined -Db_lundef=false -Dcpp_args=-fsanitize=fuzzer-no-link
//     -D{cuda,onednn,openmp,mpi,tests,tools,examples}=disabled
//   ninja -C build/fuzz libsherd_inside.a
//   clang++-19 -std=c++20 -O1 -march=native -DNDEBUG -DSPDLOG_COMPILED_LIB -DSPDLOG_FMT_EXTERNAL -I.
//     -fsanitize=fuzzer,address,undefined tests/fuzz/ops_fuzz.cpp build/fuzz/libsherd_inside.a
//     -lfmt -lspdlog -lxxhash -lpthread -o fuzzer
//   UBSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=allocator_may_return_null=1 fuzzer NEW_CORPUS
//     tests/fuzz/corpus/ops -max_len=256 -max_total_time=60 -rss_limit_mb=8192
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "autograd/autograd.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/fuzz/script.h"

namespace {

using namespace sherd;
using namespace sherd::test;

/// A shape of a new tensor that does not ask for much memory; what is refused anyway may be as large as it
/// likes.
Shape small(Shape s) {
  std::int64_t n = 1;
  for (std::int64_t d : s) {
    if (d < 0) return s;
    if (__builtin_mul_overflow(n, d, &n)) return s;
  }
  return n <= 4096 || n > (std::int64_t{1} << 50) ? s : Shape{3};
}

/// Picking, writing and arranging, and what is made of other ops.
Tensor call_of_parts(std::uint8_t which, Script& in, const std::vector<Tensor>& made) {
  const auto pick = [&]() -> const Tensor& { return made[in.byte() % made.size()]; };
  const auto few = [&] { return in.integer() % 64; };  // what memory is asked for
  const auto keep = [&] { return in.byte() % 2 ? Keep::dims : Keep::drop; };
  const auto entries = [&] {
    std::vector<At> list;
    for (int n = in.byte() % 5; n > 0; --n) {
      const std::uint8_t kind = in.byte() % 6;
      const auto end = [&] { return in.byte() % 2 ? std::optional(in.integer()) : std::nullopt; };
      if (kind < 2) {
        list.emplace_back(in.integer());
      } else if (kind == 2) {
        const auto from = end(), to = end();
        list.emplace_back(Slice{from, to, in.byte() % 4 ? 1 : in.integer()});
      } else if (kind == 3) {
        list.emplace_back(pick());
      } else if (kind == 4) {
        list.emplace_back(Ellipsis{});
      } else {
        list.emplace_back(NewAxis{});
      }
    }
    return list;
  };
  const Tensor& x = pick();
  switch (which) {
    case 0:
    case 1:
    case 2:
      return index(x, entries());
    case 3:
    case 4:
    case 5: {
      const std::vector<At> at = entries();
      return index_put_(x, at, pick(), in.byte() % 2 ? Put::add : Put::replace);
    }
    case 6:
      return gather(x, in.integer(), pick());
    case 7: {
      const Tensor& at = pick();
      return scatter(x, in.integer(), at, pick());
    }
    case 8: {
      const Tensor& at = pick();
      return scatter_add(x, in.integer(), at, pick());
    }
    case 9:
      return nonzero(x);
    case 10:
      return masked_select(x, pick());
    case 11:
      return chunk(x, in.integer(), in.integer()).back();
    case 12: {
      Shape counts;
      for (int n = in.byte() % 4; n > 0; --n) counts.push_back(in.integer() % 8);
      return repeat(x, counts);
    }
    case 13:
      return flip(x, in.shape());
    case 14: {
      const std::int64_t shift = in.integer();
      return roll(x, shift, in.integer());
    }
    case 15: {
      Shape counts;
      for (int n = in.byte() % 6; n > 0; --n) counts.push_back(few());
      return pad(x, counts, static_cast<Padding>(in.byte() % 4), in.number());
    }
    case 16:
      return in.byte() % 2 ? tril(x, in.integer()) : triu(x, in.integer());
    case 17:
      return diag(x, few());
    case 18: {
      const std::int64_t offset = in.integer(), a = in.integer();
      return diagonal(x, offset, a, in.integer());
    }
    case 19:
      return in.byte() % 2 ? var(x, in.shape(), keep()) : stddev(x, in.shape(), keep());
    case 20:
      return norm(x, in.number().as<double>(), in.shape(), keep());
    case 21:
      return logsumexp(x, in.shape(), keep());
    case 22:
      return prod(x, in.shape(), keep());
    case 23:
      return in.byte() % 2 ? cumsum(x, in.integer()) : cumprod(x, in.integer());
    case 24:
      return max(x, in.integer(), keep()).values;
    case 25:
      return sort(x, in.integer(), in.byte() % 2 ? Order::ascending : Order::descending).values;
    case 26: {
      static constexpr const char* equations[] = {"ij,jk->ik", "ii",     "...i,...i->...", "ij->ji",
                                                  "i,j",       "abc,cd", "i...j->...",     "ij,ij,ij->j"};
      const char* equation = equations[in.byte() % 8];
      std::vector<Tensor> list{x};
      for (int n = in.byte() % 3; n > 0; --n) list.push_back(pick());
      return einsum(equation, list);
    }
    case 27:
      return one_hot(x, few());
    case 28:
      return cross_entropy(x, pick(), {.ignore_index = in.integer(), .label_smoothing = 0.5});
    case 29:
      return in.byte() % 2 ? mse_loss(x, pick()) : bce_with_logits(x, pick());
    case 30:
      return in.byte() % 2 ? eye(few(), few()) : linspace(-1, in.number().as<double>(), few());
    default:
      return any(x, in.shape(), keep());
  }
}

Tensor call(Script& in, const std::vector<Tensor>& made) {
  const auto pick = [&]() -> const Tensor& { return made[in.byte() % made.size()]; };
  const std::uint8_t which = in.byte();
  if (which >= 224) return call_of_parts(which - 224, in, made);
  switch (which % 56) {
    case 0:
      return full(small(in.shape()), in.number(), {in.dtype()});
    case 1:
      return narrow(pick(), in.integer(), in.integer(), in.integer());
    case 2:
      return slice(pick(), in.integer(), in.integer(), in.integer(), in.integer());
    case 3:
      return select(pick(), in.integer(), in.integer());
    case 4:
      return reshape(pick(), in.shape());
    case 5:
      return view(pick(), in.shape());
    case 6:
      return permute(pick(), in.shape());
    case 7:
      return transpose(pick(), in.integer(), in.integer());
    case 8:
      return squeeze(pick(), in.integer());
    case 9:
      return unsqueeze(pick(), in.integer());
    case 10:
      return expand(pick(), in.shape());
    case 11:
      return flatten(pick(), in.integer(), in.integer());
    case 12:
      return add(pick(), pick());
    case 13:
      return add(pick(), in.number());
    case 14:
      return sub(in.number(), pick());
    case 15:
      return mul_(pick(), pick());
    case 16:
      return copy_(pick(), pick());
    case 17:
      return fill_(pick(), in.number());
    case 18:
      return where(pick(), pick(), pick());
    case 19:
      return sum(pick(), in.shape(), in.byte() % 2 ? Keep::dims : Keep::drop);
    case 20:
      return mean(pick(), in.shape());
    case 21:
      return amax(pick(), in.shape());
    case 22:
      return argmax(pick(), in.integer());
    case 23:
      return softmax(pick(), in.integer());
    case 24:
      return log_softmax(pick(), in.integer());
    case 25:
      return matmul(pick(), pick());
    case 26:
      return linear(pick(), pick(), in.byte() % 2 ? pick() : Tensor());
    case 27:
      return conv2d(pick(), pick(), {}, {in.integer(), in.integer() % 64});
    case 28:
      return cross_entropy(pick(), pick(), {Reduction::mean, in.integer()});
    case 29:
      return layer_norm(pick(), pick(), pick());
    case 30:
      return batch_norm(pick(), {}, {}, {}, {},
                        {.training = true,
                         .residual = in.byte() % 2 ? pick() : Tensor(),
                         .activation = static_cast<Activation>(in.byte() % 3)});
    case 31:
      return attention(pick(), pick(), pick(), {.causal = in.byte() % 2 == 0});
    case 32:
      return self_attention(pick(), in.integer());
    case 33:
      return embedding(pick(), pick());
    case 34:
      return index_select(pick(), in.integer(), pick());
    case 35:
      return gather(pick(), pick());
    case 36:
      return topk(pick(), in.integer()).values;
    case 37:
      return to(pick(), in.dtype());
    case 38:
      return clone(pick());
    case 39:
      return less(pick(), in.number());
    case 40:
      return clamp(pick(), in.number(), in.number());
    case 41:
      return pow(pick(), pick());
    case 42:
      return gelu(pick());
    case 43:
      return dropout(pick(), 0.5);
    case 44:
      return multinomial(pick());
    case 45: {
      const Tensor parts[] = {pick(), pick(), pick()};
      return cat(parts, in.integer());
    }
    case 46: {
      const Tensor parts[] = {pick(), pick()};
      return stack(parts, in.integer());
    }
    case 47: {
      const std::int64_t size = in.integer();
      const Tensor& x = pick();
      return split(x, size, in.integer()).back();
    }
    case 48: {
      const Number start = in.number(), end = in.number(), step = in.number();
      const double count = (end.as<double>() - start.as<double>()) / step.as<double>();
      if (count > 4096 && count < 1e18) return made[0];
      return arange(start, end, step, {in.dtype()});
    }
    case 49:
      return randint(in.integer(), in.integer(), {3}, {in.dtype()});
    case 50:
      return exp(pick());
    case 51:
      return masked_fill(pick(), pick(), in.number());
    case 52: {
      Tensor leaf = to(pick(), f64).detach();
      leaf.requires_grad_();
      return mul(leaf, leaf);
    }
    case 53: {
      const Tensor& y = pick();
      if (y.requires_grad()) y.backward(ones_like(y), true);
      return y;
    }
    case 54:
      return alias(pick(), {in.shape(), in.shape(), in.integer()});
    default:
      return pick().detach();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Context::current().set_threads(1);
  manual_seed(1);
  Script script(data, size);
  std::vector<Tensor> made = {arange(0, 12, 1, {f32}), reshape(arange(0, 6), {2, 3}), ones({2, 3, 4, 2}),
                              ones({3}, {boolean})};
  while (!script.done() && made.size() < 24) {
    try {
      Tensor out = call(script, made);
      require(out.defined() && out.numel() >= 0);
      if (out.numel() > (1 << 16)) continue;  // a view of little memory may be large; it is not worked on
      clone(out.detach());                    // reads every element
      made.push_back(std::move(out));
    } catch (const Error& error) {
      require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    }
  }
  return 0;
}
