// What the table of cases does not say of indexing: writing under recording, masks, operators, printing, and
// which calls are refused.
#include <array>
#include <cmath>
#include <limits>
#include <sstream>

#include "autograd/autograd.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

Tensor counted(const Shape& shape) { return reshape(arange(0, shape.numel(), 1, {f32}), shape); }
std::vector<double> values(const Tensor& x) { return doubles(x); }
using Doubles = std::vector<double>;

}  // namespace

TEST_CASE("what is listed as no view has memory of its own") {
  const Tensor x = arange(0, 9, 1, {f32}), m = reshape(x, {3, 3});
  for (const Tensor& y :
       {repeat(x, {2, 1}), repeat(x, {1, 1}), repeat(reshape(x, {9, 1}), {1, 2}), repeat(m, {1, 1, 1}),
        pad(x, {0, -1}), pad(m, {-1, 0, 0, 0}), pad(x, {0, 0}), diag(m), diag(m, 1)}) {
    const std::vector<float> before = y.to_vector<float>();
    add_(x, 1);
    CHECK(y.to_vector<float>() == before);
    CHECK_NOTHROW(fill_(y, 0));
  }
}

TEST_CASE("a part is multiplied in place by what wants a gradient") {
  Tensor p = ones({3, 2}).requires_grad_(), w = full({2}, 3).requires_grad_();
  Tensor x = p * 2;
  x[0] *= w;
  x[1] /= w;
  sum(x).backward();
  CHECK(p.grad().to_vector<float>() == std::vector<float>{6, 6, 2 / 3.f, 2 / 3.f, 2, 2});
  const std::vector<float> slope = w.grad().to_vector<float>();
  for (const float s : slope) CHECK(std::fabs(s - (2 - 2 / 9.f)) < 1e-6);
}

TEST_CASE("indexing: reads are views where no tensor picks, and share memory") {
  const Tensor x = counted({3, 4});
  CHECK(values(x[1]) == Doubles{4, 5, 6, 7});
  CHECK(x[-1].shape() == Shape{4});
  CHECK(x[{1, 2}].item() == 6);
  CHECK(values(x[{Slice{}, 1}]) == Doubles{1, 5, 9});
  CHECK(values(x[{Slice{.start = -2}, Slice{.end = 3, .step = 2}}]) == Doubles{4, 6, 8, 10});
  CHECK(x[{Ellipsis{}, NewAxis{}}].shape() == Shape{3, 4, 1});
  CHECK(x[std::initializer_list<At>{}].shape() == x.shape());
  const Tensor row = x[0];
  fill_(row, 9);
  CHECK(values(x[0]) == Doubles{9, 9, 9, 9});
}

TEST_CASE("indexing: a mask and tensors of any integers pick, and 32-bit positions are as good") {
  const Tensor x = counted({4, 2});
  for (DType dtype : {i64, i32, u8})
    CHECK(values(x[to(Tensor::from({3, 0}, {2}), dtype)]) == Doubles{6, 7, 0, 1});
  CHECK(values(x[Tensor::from({3, -4}, {2})]) == Doubles{6, 7, 0, 1});
  CHECK(values(x[x > 5]) == Doubles{6, 7});
  CHECK(values(x[Tensor::from({true, false, true, false}, {4})]) == Doubles{0, 1, 4, 5});
  CHECK(x[x > 100].shape() == Shape{0});
  CHECK(values(embedding(x, Tensor::from({2}, {1}))) == Doubles{4, 5});
  CHECK(values(gather(x, Tensor::from({1, 0, 1, 0}, {4, 1}))) == Doubles{1, 2, 5, 6});
  CHECK(nonzero(x > 5).to_vector<std::int64_t>() == std::vector<std::int64_t>{3, 0, 3, 1});
  CHECK(values(masked_select(x, Tensor::from({true, false}, {2}))) == Doubles{0, 2, 4, 6});
}

TEST_CASE(
    "indexing: a tensor of one element without an axis is picked from and written as one with an axis is") {
  const Tensor first = Tensor::scalar(0, {i64}), yes = ones({}, {boolean}), no = zeros({}, {boolean});
  for (DType dtype : {f32, bf16, i64, boolean}) {
    INFO(name_of(dtype));
    const Tensor one = ones({}, {dtype}), none = zeros({}, {dtype});
    CHECK(gather(one, 0, first).shape().empty());
    CHECK(values(gather(one, -1, zeros({3}, {i64}))) == Doubles{1, 1, 1});
    CHECK(values(gather(ones({1}, {dtype}), 0, first)) == Doubles{1});
    CHECK(values(scatter(none, 0, first, one)) == Doubles{1});
    CHECK(scatter(none, 0, zeros({2}, {i64}), 1).shape().empty());
    if (dtype != boolean) CHECK(values(scatter_add(one, 0, first, one)) == Doubles{2});
    CHECK(values(one[yes]) == Doubles{1});
    CHECK(one[no].shape() == Shape{0});
    const Tensor matrix = ones({2, 3}, {dtype});
    CHECK(matrix[yes].shape() == Shape{1, 2, 3});
    CHECK(matrix[{0, no}].shape() == Shape{0, 3});
    Tensor written = zeros({}, {dtype});
    written[yes] = 1;
    CHECK(values(written) == Doubles{1});
    written[no] = 0;
    CHECK(values(written) == Doubles{1});
    written[written > 0] = ones({1}, {dtype});
    CHECK(values(written) == Doubles{1});
    matrix[{1, yes}] = zeros({1, 3}, {dtype});
    CHECK(values(matrix) == Doubles{1, 1, 1, 0, 0, 0});
  }
  Tensor w = Tensor::scalar(3.0).requires_grad_();
  Tensor y = w * 2;
  y[y > 1] = w * w;
  (y + gather(w, 0, first)).backward();
  CHECK(w.grad().item<double>() == 7);
  CHECK(one_line_about(message_of<Error>([&] { (void)gather(w, 0, Tensor::scalar(1, {i64})); }), "index 1"));
  CHECK(one_line_about(message_of<Error>([&] { (void)gather(w, 0, zeros({1, 1}, {i64})); }), "(1, 1)"));
}

TEST_CASE(
    "indexing: a mask picks and writes what its positions do, over any of the axes and beside other picks",
    "[one thread]") {
  for (DType dtype : all_dtypes)
    for (const Shape& shape : {Shape{3, 4, 5}, Shape{70, 300, 3}, Shape{2, 0, 3}})
      for (Lay lay : all_lays) {
        INFO(name_of(dtype) << " " << to_string(lay));
        const Tensor x = laid(numbers(shape, dtype), lay);
        const Tensor flat = laid(numbers({shape[0], shape[1]}, boolean, 3), lay);
        const Tensor found = nonzero(flat), rows = select(found, 1, 0), columns = select(found, 1, 1);
        CHECK(found.shape()[0] == sum(flat).item<std::int64_t>());
        CHECK(same_bits(contiguous(x[flat]), contiguous(x[{rows, columns}])));
        const Tensor middle = laid(numbers({shape[1]}, boolean, 4), lay), first = zeros({1}, {i64});
        const Tensor places = select(nonzero(middle), 1, 0);
        CHECK(same_bits(contiguous(x[{Slice{}, middle}]), contiguous(x[{Slice{}, places}])));
        CHECK(same_bits(contiguous(x[{Slice{}, middle, first}]), contiguous(x[{Slice{}, places, first}])));
        const Tensor one = ones({}, {dtype}), by_mask = laid(clone(x), lay), by_places = clone(x);
        by_mask[flat] = 1;
        index_put_(by_places, {rows, columns}, one);
        CHECK(same_bits(contiguous(by_mask), by_places));
        const Tensor lines = numbers({found.shape()[0], shape[2]}, dtype, 5);
        index_put_(by_mask, {flat}, lines);
        index_put_(by_places, {rows, columns}, lines);
        CHECK(same_bits(contiguous(by_mask), by_places));
      }
  const Tensor x = counted({3, 4});
  CHECK(one_line_about(message_of<ShapeError>([&] { x[ones({4}, {boolean})] = 1; }), "index"));
  CHECK(one_line_about(
      message_of<ShapeError>([&] { index_put_(x, {ones({3}, {boolean})}, ones({1, 1, 1})); }), "index_put_"));
  Tensor w = ones({4}).requires_grad_(), v = Tensor::scalar(3, {f32}).requires_grad_();
  const Tensor y = mul(w, 2), mask = Tensor::from({true, false, true, false}, {4});
  y[mask] = v;
  const Tensor both[] = {w, v};
  const std::vector<Tensor> g = grad(sum(mul(y, Tensor::from<float>({1, 2, 3, 4}, {4}))), both);
  CHECK(values(g[0]) == Doubles{0, 4, 0, 8});
  CHECK(g[1].item() == 4);
}

TEST_CASE("indexing: writes reach the tensor, of every dtype and layout") {
  for (DType dtype : all_dtypes)
    for (Lay lay : all_lays) {
      INFO(name_of(dtype) << " " << to_string(lay));
      const auto fresh = [&] { return laid(zeros({3, 4}, {dtype}), lay); };
      const Tensor one = ones({}, {dtype});
      Tensor x = fresh();
      x[{1, Slice{1, 3}}] = one;
      CHECK(values(x) == Doubles{0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0});
      x = fresh();
      x[Tensor::from({2, 0, -1}, {3})] = one;
      CHECK(values(x) == Doubles{1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1});
      x = fresh();
      x[{Slice{}, Tensor::from({3, 0}, {2})}] = 1;
      CHECK(values(x) == Doubles{1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1});
      x[x == 0] = 1;
      CHECK(all(x).item<bool>());
      x = fresh();
      x[{Slice{.start = 1, .step = INT64_MAX}, Slice{.step = INT64_MAX}}] = one;
      CHECK(values(x) == Doubles{0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0});
      x = laid(ones({3, 4}, {dtype}), lay);
      if (dtype == boolean) continue;
      x[0] += one;
      x[{0, 0}] *= 3;
      CHECK(values(x[0]) == Doubles{6, 2, 2, 2});
      x[0] -= 1;
      if (is_floating(dtype)) x[0] /= 2;
      CHECK(values(x[0])[0] == (is_floating(dtype) ? 2.5 : 5));
    }
}

TEST_CASE("indexing: of repeated positions the last is written, all are added, and gradients follow") {
  const Tensor at = Tensor::from({1, 1, 0}, {3});
  for (DType dtype : {f64, f32, bf16, i64}) {
    const Tensor v = to(Tensor::from({1.0, 2.0, 3.0}, {3}), dtype);
    Tensor x = zeros({2}, {dtype});
    x[at] = v;
    CHECK(values(x) == Doubles{3, 2});
    index_put_(x, {at}, v, Put::add);
    CHECK(values(x) == Doubles{6, 5});
  }
  Tensor v = Tensor::from({1.0, 2.0, 3.0}, {3}).requires_grad_(), w = ones({2}, {f64}).requires_grad_();
  const Tensor y = mul(w, 1);
  y[at] = v;
  const Tensor both[] = {v, w};
  const std::vector<Tensor> g = grad(sum(mul(y, Tensor::from({10.0, 20.0}, {2}))), both);
  CHECK(values(g[0]) == Doubles{0, 20, 10});
  CHECK(values(g[1]) == Doubles{0, 0});
}

TEST_CASE("indexing: what is written under recording has its history, and a leaf is not written") {
  Tensor w = numbers({3, 4}, f64).requires_grad_(), v = numbers({4}, f64, 2).requires_grad_();
  const Tensor x = mul(w, 2);
  x[1] = v;
  x[{Slice{}, 0}] += 1;
  const Tensor leaves[] = {w, v};
  const std::vector<Tensor> g = grad(sum(square(x)), leaves);
  Tensor expected = mul(w.detach(), 8);
  expected[{Slice{}, 0}] += 4;
  expected[1] = 0;
  CHECK(distance(g[0], expected) < 1e-12);
  Tensor of_row = mul(v.detach(), 2);
  of_row[0] += 2;
  CHECK(distance(g[1], of_row) < 1e-12);
  const std::string text = message_of<StateError>([&] { w[0] = 1; });
  CHECK(one_line_about(text, "leaf"));
  const NoGrad guard;
  w[0] = 1;
  CHECK(values(w[0]) == Doubles{1, 1, 1, 1});
}

TEST_CASE("indexing: a tensor may be written with a part of itself") {
  Tensor x = counted({5});
  x[Slice{1}] = x[Slice{0, -1}];
  CHECK(values(x) == Doubles{0, 0, 1, 2, 3});
  x[0] = x[-1];
  CHECK(x[0].item() == 3);
}

TEST_CASE("indexing: a mask may be another view of what it writes, and holds as it was before") {
  Tensor x =
      Tensor::from(std::vector<bool>{false, true, true, false, false, true, false, false, false}, {3, 3});
  const Tensor expected = logical_or(x, transpose(x, 0, 1));
  x[transpose(x, 0, 1)] = 1;
  CHECK(same_bits(x, expected));
}

TEST_CASE("indexing: calls that mean nothing are refused in one line") {
  const Tensor x = counted({3, 4}), s = Tensor::scalar(1), at = Tensor::from({0}, {1});
  const auto refused = [](auto call, const char* word) {
    const std::string text = message_of<Error>(call);
    INFO(text);
    CHECK(one_line_about(text, word));
  };
  refused([&] { (void)x[3]; }, "index: position 3 is outside axis 0 of shape (3, 4), which has -3 to 2");
  refused([&] { (void)x[-4]; }, "position -4");
  refused([&] { (void)x[{0, 0, 0}]; }, "index: entries for 3 axes, but shape (3, 4) has 2");
  refused([&] { (void)s[0]; }, "axes");
  refused([&] { (void)x[{Ellipsis{}, Ellipsis{}}]; }, "Ellipsis");
  refused([&] { (void)x[Slice{.step = 0}]; }, "step 0");
  refused([&] { (void)x[Slice{.step = -1}]; }, "flip");
  refused([&] { (void)x[Tensor::from({3}, {1})]; }, "index: index 3 at position 0 is outside [0, 3)");
  refused([&] { (void)x[Tensor::from({0, -4}, {2})]; }, "-4");
  refused([&] { (void)x[{at, Tensor::from({4}, {1})}]; }, "index 4 at position 0 is outside [0, 4)");
  refused([&] { (void)x[{Tensor::from({0, 1}, {2}), Tensor::from({0, 1, 2}, {3})}]; }, "(2)");
  refused([&] { (void)x[s]; }, "integers");
  refused([&] { (void)x[ones({4}, {boolean})]; }, "mask of shape (4)");
  refused([&] { (void)x[to(at, Device::cpu(1))]; }, "cpu:1");
  refused([&] { x[0] = ones({3}); }, "values of shape (3) do not fit into (4)");
  refused([&] { x[{at}] = ones({2, 4}); }, "(2, 4)");
  refused([&] { x[Tensor::from({7}, {1})] = 1; }, "index 7");
  refused([&] { index_put_(clone(x), {Tensor::from({7}, {1})}, s); }, "index_put_: index 7");
  refused([&] { to(x, i64)[0] = 0.5; }, "0.5");
  refused([&] { gather(x, 2, at); }, "gather");
  refused([&] { gather(x, 0, at); }, "gather: an index of shape (1) for shape (3, 4)");
  refused([&] { gather(x, 0, ones({1, 5}, {i64})); }, "axis 1 of the index has 5");
  refused([&] { scatter(x, 0, zeros({1, 2}, {i64}), ones({1, 1})); }, "scatter");
  refused([&] { scatter(x, 0, full({1, 1}, 3, {i64}), 1); }, "scatter: index 3");
  refused([&] { scatter_add(x, 0, zeros({1, 1}, {i64}), ones({1, 1}, {f64})); },
          "scatter_add: f64 values for f32");
  refused([&] { nonzero(empty({2}, {f32, Device::meta()})); }, "nonzero");
  refused([&] { masked_select(x, x); }, "masked_select");
  refused([&] { one_hot(at, 0); }, "one_hot");
  refused([&] { one_hot(Tensor::from({5}, {1}), 5); }, "index 5");
  refused([&] { chunk(x, 0); }, "chunk");
  refused([&] { repeat(x, {2}); }, "repeat");
  refused([&] { repeat(x, {2, -1}); }, "repeat");
  refused([&] { flip(x, {2}); }, "flip");
  refused([&] { pad(x, {1}); }, "pad");
  refused([&] { pad(x, {-3, -2}); }, "pad");
  refused([&] { pad(x, {4, 0}, Padding::reflect); }, "pad: 4 before and 0 after axis 1 of shape (3, 4)");
  refused([&] { tril(at); }, "tril");
  refused([&] { diag(s); }, "diag");
  refused([&] { diagonal(x, 0, 0, -2); }, "diagonal");
  refused([&] { stack({x, ones({3, 5})}); }, "stack: shapes (3, 4) and (3, 5) differ");
  refused([&] { attention(ones({1, 4, 3, 8}), ones({1, 2, 5, 8}), ones({1, 2, 5, 6})); },
          "k and v (B, H, Tk, D) of one shape, got (1, 2, 5, 8) and (1, 2, 5, 6)");
  refused([&] { outer(x, x); }, "outer");
  refused([&] { einsum("ij,jk", {x}); }, "einsum");
  refused([&] { einsum("ij,kj->ik", {x, counted({2, 3})}); }, "einsum: axis j");
  refused([&] { einsum("ij->k", {x}); }, "names axis k");
  refused([&] { einsum("ij->ii", {x}); }, "twice");
  refused([&] { einsum("ijk", {x}); }, "3 axes");
  refused([&] { einsum("i1", {x}); }, "'1'");
  refused([&] { einsum("ii", {x}); }, "3 and 4");
  refused([&] { var(at); }, "var");
  refused([&] { norm(x, NAN); }, "norm");
  refused([&] { prod(x, {0, 0}); }, "prod");
  refused([&] { cumsum(x, 2); }, "cumsum");
  refused([&] { argmin(zeros({2, 0}), 1); }, "argmin");
  refused([&] { mse_loss(x, to(x, f64)); }, "mse_loss");
  refused([&] { mse_loss(x, ones({3})); }, "mse_loss");
  refused([&] { huber_loss(x, x, 0); }, "huber_loss: delta 0");
  refused([&] { cross_entropy(x, zeros({3}, {i64}), {.label_smoothing = 2}); }, "smoothing 2");
  refused([&] { cross_entropy(x, zeros({3}, {i64}), {.weight = ones({3})}); }, "weights of shape (3) for 4");
  refused([&] { cross_entropy(x, zeros({3}, {i64}), {.weight = ones({4}, {f64})}); }, "f64 weights");
  refused([&] { cross_entropy(counted({2, 3, 4}), zeros({2, 3}, {i64})); }, "cross_entropy");
  refused([&] { cross_entropy_(clone(x), zeros({3}, {i64}), {.label_smoothing = 0.1}); }, "cross_entropy_");
  refused([&] { nll_loss(x, full({3}, 4, {i64})); }, "4");
  const Tensor image = ones({1, 4, 5, 5}), kernel = ones({2, 2, 3, 3});
  refused([&] { conv2d(image, kernel, {}, {.groups = 3}); }, "3 groups");
  refused([&] { conv2d(image, kernel, {}, {.groups = 0}); }, "0 groups");
  refused([&] { conv2d(image, kernel, {}, {.dilation = 3, .groups = 2}); }, "spread by 3 and 3");
  refused([&] { conv2d(image, kernel, {}, {.stride = {1, 0}, .groups = 2}); }, "conv2d: stride 0");
  refused([&] { conv1d(image, kernel); }, "conv1d");
  refused([&] { conv1d(ones({1, 2, 3}), ones({1, 2, 3}), {}, {.dilation = 0}); }, "conv1d");
  const Tensor line = ones({1, 4, 5}), turned = ones({4, 2, 3, 3});
  refused([&] { conv_transpose2d(image, turned, {}, {.groups = 3}); },
          "conv_transpose2d: input of 4 channels");
  refused([&] { conv_transpose2d(image, turned, {}, {.groups = 0}); }, "conv_transpose2d: 0 groups");
  refused([&] { conv_transpose2d(image, kernel); }, "conv_transpose2d: input of 4 channels, weight");
  refused([&] { conv_transpose2d(line, turned); }, "conv_transpose2d: input (N, C, H, W)");
  refused([&] { conv_transpose2d(image, turned, ones({3})); }, "conv_transpose2d: bias of shape (3) for 2");
  refused([&] { conv_transpose2d(image, to(turned, f64)); },
          "conv_transpose2d: input is f32 and its weight f64");
  refused([&] { conv_transpose2d(image, turned, ones({2}, {f64})); },
          "conv_transpose2d: input is f32 and its bias");
  refused([&] { conv_transpose2d(to(image, i32), to(turned, i32)); }, "conv_transpose2d: takes floating");
  refused([&] { conv_transpose2d(image, turned, {}, {.stride = {1, 0}}); }, "conv_transpose2d: stride 0");
  refused([&] { conv_transpose2d(image, turned, {}, {.padding = 4}); },
          "conv_transpose2d: 5 pixels become 7");
  refused([&] { conv_transpose2d(image, turned, {}, {.stride = 2, .output_padding = 2}); },
          "output padding 2");
  refused([&] { conv_transpose2d(image, turned, {}, {.output_padding = {0, -1}}); }, "output padding -1");
  refused([&] { conv_transpose2d(ones({1, 4, 0, 5}), turned); }, "conv_transpose2d: images and kernels");
  for (const std::int64_t huge :
       {std::int64_t{1} << 31, std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::max()}) {
    refused([&] { conv_transpose2d(image, turned, {}, {.stride = huge}); }, "conv_transpose2d");
    refused([&] { conv_transpose2d(image, turned, {}, {.dilation = huge}); }, "conv_transpose2d");
    refused([&] { conv_transpose2d(image, turned, {}, {.padding = huge}); }, "conv_transpose2d");
    refused([&] { conv_transpose2d(image, turned, {}, {.output_padding = huge}); }, "conv_transpose2d");
    refused([&] { max_pool2d(image, huge, {.padding = huge / 2}); }, "max_pool2d");
    refused([&] { interpolate(image, {.size = huge}); }, "interpolate");
  }
  refused([&] { conv_transpose2d(image, turned, {}, {.dilation = (std::int64_t{1} << 31) - 1}); },
          "conv_transpose2d: 5 pixels become");
  refused([&] { conv_transpose1d(image, turned); }, "conv_transpose1d: input (N, C, L)");
  refused([&] { conv_transpose1d(line, ones({4, 2, 3}), {}, {.output_padding = 1}); },
          "conv_transpose1d: output padding");
  refused([&] { max_pool1d(image, 2); }, "max_pool1d: input (N, C, L)");
  refused([&] { avg_pool1d(line, 6); }, "avg_pool1d: windows of 6 do not fit");
  refused([&] { max_pool1d(line, 2, {.padding = 2}); }, "max_pool1d: kernel 2");
  refused([&] { avg_pool1d(to(line, i32), 2); }, "avg_pool1d: takes floating");
  refused([&] { avg_pool2d(image, {2, 3}, {.padding = {0, 2}}); }, "avg_pool2d: kernel 3 and stride 3");
  refused([&] { interpolate(line, {.scale = 2}); }, "interpolate: input (N, C, H, W)");
  refused([&] { interpolate(ones({1, 1, 0, 2}), {.scale = 2}); }, "interpolate: input");
  refused([&] { interpolate(image, {}); }, "interpolate: a size or a scale, one of them");
  refused([&] { interpolate(image, {.size = 2, .scale = 2}); },
          "interpolate: a size or a scale, one of them");
  refused([&] { interpolate(image, {.size = {2, 0}}); }, "interpolate: 5 pixels to a size of 0");
  refused([&] { interpolate(image, {.size = {-1, 2}}); }, "interpolate: 5 pixels to a size of -1");
  refused([&] { interpolate(image, {.scale = 0.1}); }, "interpolate: 5 pixels");
  refused([&] { interpolate(image, {.size = (1 << 24) + 1}); }, "results have 1 to 16777216 a side");
  for (const double scale : {-1.0, double(NAN), HUGE_VAL, 1e300})
    refused([&] { interpolate(image, {.scale = {1, scale}}); }, "interpolate: 5 pixels");
  refused([&] { interpolate(image, {.scale = 2, .align_corners = true}); }, "interpolate: align_corners");
  refused([&] { interpolate(to(image, i32), {.scale = 2, .mode = Interpolation::bilinear}); },
          "interpolate: lines");
  refused([&] { max_pool2d(x, 2); }, "max_pool2d");
  refused([&] { max_pool2d(image, 6); }, "max_pool2d: windows of 6 x 6");
  refused([&] { avg_pool2d(image, 2, {.padding = 2}); }, "avg_pool2d");
  refused([&] { adaptive_avg_pool2d(image, 0, 1); }, "adaptive_avg_pool2d");
  refused([&] { adaptive_max_pool2d(image, 1, 0); }, "adaptive_max_pool2d");
  refused([&] { rotary(ones({2, 4}), {.scaling = {.factor = 0}}); }, "rotary: scaling by 0");
  refused([&] { rotary(ones({2, 4}), {.scaling = {.amplitude = 0}}); }, "rotary: amplitude 0");
  refused([&] { rotary(ones({2, 2}), {.scaling = {.kind = RotaryKind::dynamic}}); }, "of 2 features");
  refused([&] { rotary(ones({2, 4}), {.scaling = {.factor = 0.5, .kind = RotaryKind::dynamic}}); }, "by 0.5");
  for (const RotaryKind yarn : {RotaryKind::yarn, RotaryKind::yarn_fractional}) {
    refused([&] { rotary(ones({2, 4}), {.base = 1, .scaling = {.kind = yarn}}); }, "rotary: yarn");
    refused([&] { rotary(ones({2, 4}), {.scaling = {.low = 0, .kind = yarn}}); }, "rotary: yarn");
  }
  refused([&] { group_norm(image, 3); }, "group_norm: 3 groups");
  refused([&] { group_norm(image, 2, ones({3})); }, "(3)");
  refused([&] { rotary(ones({2, 3})); }, "rotary");
  const Tensor q = ones({1, 4, 2, 2}), kv = ones({1, 3, 2, 2});
  refused([&] { attention(q, kv, kv); }, "attention");
  refused([&] { attention(q, q, q, {.mask = ones({3, 3}, {boolean})}); }, "attention");
  refused([&] { attention(q, q, q, {.mask = ones({2, 2}, {i64})}); }, "attention: a mask");
  CHECK(amax(attention(q, q, q, {.mask = zeros({2, 2}, {boolean})})).item() == 0);
  refused([&] { linspace(0, HUGE_VAL, 2); }, "linspace");
  refused([&] { eye(-2); }, "eye");
  refused([&] { randperm(-1); }, "randperm");
  CHECK_THROWS_AS(randperm(2050, {f16}), DTypeError);  // 2049 is no number of f16
  CHECK(sort(to(randperm(2049, {f16}), f32)).values.to_vector<float>().back() == 2048);
  refused([&] { bernoulli(at); }, "bernoulli");
  for (const DType dtype : {f32, f64, f16, bf16})
    for (const double p : {-0.5, 1.5, HUGE_VAL, std::nan("")}) {
      const Tensor probabilities = cat({zeros({2}, {dtype}), full({1}, p, {dtype}), ones({1}, {dtype})});
      refused([&] { bernoulli(probabilities); }, "bernoulli: probability");
      refused([&] { bernoulli(expand(unsqueeze(slice(probabilities, 0, 0, 4, 2), 0), {2, 2})); },
              "at position 1");
    }
  CHECK(same_bits(bernoulli(Tensor::from<float>({0, 1}, {2})), Tensor::from<float>({0, 1}, {2})));
  CHECK(bernoulli(zeros({0})).shape() == Shape{0});
  CHECK(bernoulli(full({2}, 3, {f32, Device::meta()})).shape() == Shape{2});
  refused([&] { one_hot(Tensor::from({0, -1}, {2}), 3); },
          "one_hot: index -1 at position 1 is outside [0, 3)");
  refused([&] { norm(zeros({0}), HUGE_VAL); }, "norm: ");
  refused([&] { norm(zeros({2, 0}), -HUGE_VAL, {1}); }, "norm: ");
  refused([&] { norm(x, 2, {2}); }, "norm: ");
  refused([&] { norm(x, 2, {0, -2}); }, "norm: axis -2");
  using Place = Tensor (*)(const Tensor&, std::int64_t, const Tensor&, const Tensor&);
  refused([&] { rotary(ones({2, 4}), {.first = std::numeric_limits<std::int64_t>::max()}); },
          "rotary: 2 steps");
  const TensorOptions positions{i64, Device::meta()}, floats{f32, Device::meta()};
  for (const auto& f : {Place(scatter), Place(scatter_add)}) {
    refused([&] { f(ones({3, 4}), 0, zeros({1, 4}, positions), ones({1, 4})); }, "scatter");
    refused([&] { f(ones({3, 4}), 0, zeros({1, 4}, {i64}), ones({1, 4}, floats)); }, "scatter");
    refused([&] { f(ones({3, 4}, floats), 0, zeros({1, 4}, {i64}), ones({1, 4}, floats)); }, "scatter");
    CHECK(f(ones({3, 4}, floats), 0, zeros({1, 4}, positions), ones({1, 4}, floats)).shape() == Shape{3, 4});
  }
  CHECK(norm(zeros({2, 0}), HUGE_VAL, {0}).shape() == Shape{0});
  CHECK(norm(zeros({0})).item() == 0);
}

TEST_CASE("indexing: a diagonal shares memory whatever the axes and strides") {
  const Tensor base = counted({3, 4, 5});
  for (const Shape& order : {Shape{0, 1, 2}, Shape{2, 0, 1}, Shape{1, 2, 0}, Shape{2, 1, 0}})
    for (int a = 0; a < 3; ++a)
      for (int b = 0; b < 3; ++b)
        for (int offset = -4; offset <= 4; ++offset) {
          if (a == b) continue;
          const Tensor x = permute(clone(base), order), d = diagonal(x, offset, a, b);
          INFO(order << " " << a << " " << b << " " << offset);
          CHECK(d.storage().id() == x.storage().id());
          const int rest = 3 - a - b;
          const std::int64_t first = std::max(0, -offset), second = std::max(0, offset);
          REQUIRE(d.shape() ==
                  Shape{x.shape()[rest],
                        std::max<std::int64_t>(0, std::min(x.shape()[a] - first, x.shape()[b] - second))});
          for (std::int64_t i = 0; i < d.shape()[0]; ++i)
            for (std::int64_t j = 0; j < d.shape()[1]; ++j) {
              const auto along = [&](int axis) { return axis == a ? first + j : axis == b ? second + j : i; };
              CHECK(d[{i, j}].item() == x[{along(0), along(1), along(2)}].item());
            }
          const double before = sum(x).item(), taken = sum(d).item();
          fill_(d, 0);
          CHECK(sum(x).item() == before - taken);
        }
}

TEST_CASE("indexing: a diagonal that lies outside is empty, of matrices without rows or columns too") {
  for (const std::int64_t rows : {0, 1, 3, 16})
    for (const std::int64_t columns : {0, 1, 4, 16})
      for (std::int64_t offset = -17; offset <= 17; ++offset) {
        INFO(rows << " x " << columns << ", " << offset);
        const Tensor x = counted({rows, columns}).requires_grad_();
        const std::int64_t length = std::max<std::int64_t>(
            0, offset >= 0 ? std::min(rows, columns - offset) : std::min(rows + offset, columns));
        const Tensor d = diag(x, offset), view = diagonal(x, offset);
        REQUIRE(d.shape() == Shape{length});
        CHECK(same_bits(d.detach(), view.detach()));
        const std::vector<float> got = d.to_vector<float>();
        for (std::int64_t i = 0; i < length; ++i)
          CHECK(got[static_cast<std::size_t>(i)] ==
                x[{i + std::max<std::int64_t>(0, -offset), i + std::max<std::int64_t>(0, offset)}].item());
        CHECK(sum(grad(sum(d), {x})[0]).item() == static_cast<double>(length));
      }
}

TEST_CASE("indexing: operators are the ops by their names") {
  const Tensor a = counted({2, 3}), b = full({3}, 2);
  CHECK(same_bits(a == b, equal(a, b)));
  CHECK(same_bits(a != b, not_equal(a, b)));
  CHECK(same_bits(a < b, less(a, b)));
  CHECK(same_bits(a <= 2, less_equal(a, 2)));
  CHECK(same_bits(a > 2, greater(a, 2)));
  CHECK(same_bits(a >= b, greater_equal(a, b)));
  CHECK(same_bits(2 < a, greater(a, 2)));
  CHECK(same_bits(2 >= a, less_equal(a, 2)));
  CHECK(same_bits(a == 2, equal(a, 2)));
  CHECK(same_bits(~(a < 2) & (a < 4), logical_and(greater_equal(a, 2), less(a, 4))));
  CHECK(same_bits((a < 1) | (a > 4), logical_or(less(a, 1), greater(a, 4))));
  for (const Tensor& numbers : {arange(3), zeros({3})})
    for (const auto& joined : std::vector<std::function<void()>>{
             [&] { numbers&(numbers < 1); }, [&] { (numbers < 1) | numbers; }, [&] { ~numbers; }})
      CHECK(one_line_about(message_of<DTypeError>(joined), "operator"));
  CHECK(same_bits(0 == a, equal(a, 0)));
  CHECK(same_bits(0 != a, not_equal(a, 0)));
  Tensor c = clone(a);
  const Tensor same = c;
  c += b;
  c *= 2;
  c -= 1;
  c /= b;
  CHECK(c.is(same));
  CHECK(distance(c, div(sub(mul(add(a, b), 2), 1), b)) == 0);
  CHECK(same_bits(where(a > 2, a, 0), where(a > 2, a, zeros({2, 3}))));
  CHECK(same_bits(where(a > 2, 0, a), where(a > 2, zeros({2, 3}), a)));
  CHECK(same_bits(masked_fill_(clone(a), a > 2, 7), where(a > 2, 7, a)));
  CHECK(same_bits(cat({a, a}, 1), cat(std::vector{a, a}, 1)));
  CHECK(same_bits(stack({a, a}), stack(std::vector{a, a})));
}

TEST_CASE("indexing: tensors print in rows, and large ones as a summary") {
  std::ostringstream out;
  out << Tensor::from<float>({1, -20, 0.5, 3}, {2, 2});
  CHECK(out.str() == "tensor([[  1, -20],\n        [0.5,   3]], shape=(2, 2), dtype=f32, device=cpu:0)");
  CHECK(to_string(counted({2, 1, 2})) ==
        "tensor([[[0, 1]],\n\n        [[2, 3]]], shape=(2, 1, 2), dtype=f32, device=cpu:0)");
  const std::string large = to_string(counted({40, 50}));
  CHECK(std::count(large.begin(), large.end(), '\n') == 6);
  CHECK(large.starts_with("tensor([[   0,    1,    2, ...,   47,   48,   49],\n"));
  CHECK(large.find("        ...,\n        [1850, 1851") != std::string::npos);
  for (const std::string& text : {large, to_string(counted({900}))}) {
    std::istringstream lines(text.substr(0, text.find(", shape")));
    for (std::string line; std::getline(lines, line);) CHECK(line.size() < 110);
  }
}

TEST_CASE("indexing: values come from what C++ programs have") {
  CHECK(Tensor::from({3, 0}, {2}).dtype() == i32);
  CHECK(Tensor::from(std::vector<bool>{true, false}, {2}).to_vector<bool>() ==
        std::vector<bool>{true, false});
  CHECK(Tensor::from(std::vector<std::size_t>{1, 2}, {2}).dtype() == i64);
  CHECK(Tensor::from(std::vector<long long>{-1, 2}, {2}).dtype() == i64);
  CHECK(Tensor::from(std::vector<std::int16_t>{-1, 2}, {2}).dtype() == i32);
  CHECK(values(Tensor::from(std::vector<unsigned>{1, 4000000000u}, {2})) == Doubles{1, 4000000000.0});
  CHECK(values(Tensor::from(std::array{1.5, 2.5}, {2})) == Doubles{1.5, 2.5});
  std::vector<float> list{1, 2, 3};
  CHECK(values(Tensor::from(std::span(list), {3})) == Doubles{1, 2, 3});
  CHECK(values(Tensor::from(std::span(list).first<2>(), {2})) == Doubles{1, 2});
  CHECK(one_line_about(
      message_of<ValueError>([] { Tensor::from(std::vector<std::size_t>{~std::size_t{0}}, {1}); }), "from"));
}

TEST_CASE(
    "indexing: what a padding or a repetition would take beyond memory is asked for at once, and refused") {
  CpuPool& pool = Context::current().cpu_pool();
  pool.set_limit(pool.system_bytes() + (1 << 20));
  for (const Padding padding : {Padding::constant, Padding::replicate})
    CHECK_THROWS_AS(pad(counted({2}), {std::int64_t{1} << 39, 0}, padding), OutOfMemoryError);
  CHECK_THROWS_AS(repeat(counted({2}), {std::int64_t{1} << 39}), OutOfMemoryError);
  CHECK_THROWS_AS(repeat(counted({2}), {std::int64_t{1} << 39, -1}), ValueError);
  for (const std::int64_t more : {std::int64_t{1} << 30, INT64_MAX})
    CHECK_THROWS_AS(repeat(counted({2}), {std::int64_t{1} << 39, more}), ShapeError);
  pool.set_limit(CpuPool::no_limit);
}

TEST_CASE("indexing: random orders hold every number once, and draws follow their probability") {
  manual_seed(1);
  for (std::int64_t n : {0, 1, 1000}) {
    const Tensor order = randperm(n);
    CHECK(same_bits(sort(order).values, arange(0, n)));
    if (n == 1000) CHECK_FALSE(same_bits(order, randperm(n)));
  }
  manual_seed(2);
  const Tensor first = randperm(50, {i32});
  manual_seed(2);
  CHECK(same_bits(randperm(50, {i32}), first));
  CHECK(randperm(5, {i64, Device::meta()}).shape() == Shape{5});
  const Tensor p = expand(Tensor::from<float>({0, 0.25, 1}, {3}), {20000, 3}), drawn = bernoulli(p);
  CHECK(drawn.dtype() == f32);
  const std::vector<double> shares = values(mean(drawn, {0}));
  CHECK(shares[0] == 0);
  CHECK(std::abs(shares[1] - 0.25) < 0.02);
  CHECK(shares[2] == 1);
}

TEST_CASE("indexing: positions far outside are named, on whatever axis they are") {
  const Tensor x = zeros({3, 5});
  for (const std::int64_t far : {std::numeric_limits<std::int64_t>::max(),
                                 std::numeric_limits<std::int64_t>::min(), std::int64_t{5}, std::int64_t{-6}})
    for (const bool first : {false, true}) {
      const Tensor good = Tensor::from<std::int64_t>({2, 1}), bad = Tensor::from<std::int64_t>({0, far});
      const std::string message =
          message_of<ValueError>([&] { (void)index(x, {first ? bad : good, first ? good : bad}); });
      CHECK(one_line_about(message, fmt::format("index {} at position 1 is outside", far)));
    }
}

TEST_CASE(
    "indexing: adding to a bool tensor is refused in the name of index_put_, however its part is named") {
  const Tensor x = zeros({4, 3}, {boolean}), one = ones({}, {boolean});
  const Tensor rows = Tensor::from<std::int64_t>({1, 2}, {2}), mask = ones({4}, {boolean});
  for (const At& at : {At(1), At(Slice{1, 3}), At(rows), At(mask)})
    CHECK(one_line_about(message_of<DTypeError>([&] { index_put_(x, {at}, one, Put::add); }), "index_put_"));
  CHECK(sum(x).item() == 0);
}
