// Layers of images beside convolutions and pooling.
#include "nn/image_layers.h"

#include "autograd/autograd.h"
#include "nn/compile.h"
#include "nn/layers.h"
#include "runtime/distances.h"
#include "runtime/order.h"
#include "tests/message_of.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

struct Net final : nn::Layer<Net> {
  nn::Conv2d conv{3, 8, 3, {.padding = 1}};
  nn::InstanceNorm norm{2, {.affine = nn::Affine::yes}};
  nn::PixelShuffle shuffle{2};
  Tensor forward(const Tensor& x) const {
    const Tensor y = norm(shuffle(conv(x)));
    const Tensor theta = unsqueeze(Tensor::from<float>({{0.9F, 0.1F, 0.05F}, {-0.1F, 0.8F, 0}}), 0);
    const Tensor grid = expand(affine_grid(theta, {5, 4}), {x.size(0), 5, 4, 2});
    const Tensor seen = flatten(grid_sample(y, grid, {.outside = GridPadding::reflection}), 1);
    const Tensor place = to(searchsorted(Tensor::from<float>({-1, 0, 1}), seen.detach()), f32);
    return add(sum(cdist(seen, flip(seen, {0}))),
               sum(mul(median(mul(seen, place), 1).values, quantile(seen, 0.3, 1))));
  }
  void visit(auto&& on) {
    on("conv", conv);
    on("norm", norm);
    on("shuffle", shuffle);
  }
};

}  // namespace

TEST_CASE(
    "image layers: an instance norm has parameters where it is asked for them, and one statistic a channel") {
  CHECK(nn::InstanceNorm(3).parameters().empty());
  nn::InstanceNorm norm(3, {.eps = 0, .affine = nn::Affine::yes});
  CHECK(norm.state_dict().size() == 2);
  const NoGrad guard;
  fill_(norm.weight->object().local(), 2);
  fill_(norm.bias->object().local(), 5);
  for (const Shape& shape : {Shape{2, 3, 7}, Shape{2, 3, 4, 5}, Shape{1, 3, 2, 3, 2}}) {
    const Tensor lines = flatten(norm(randn(shape, {f32}, 4, 3)), 2);
    CHECK(allclose(mean(lines, {2}), full({shape[0], 3}, 5), 1e-4, 1e-4));
    CHECK(allclose(stddev(lines, {2}, Keep::drop, 0), full({shape[0], 3}, 2), 1e-4, 1e-4));
  }
  CHECK_THAT(message_of<ShapeError>([&] { norm(zeros({1, 2, 4})); }),
             ContainsSubstring("InstanceNorm: takes (N, 3, ...), got shape (1, 2, 4)"));
  CHECK_THAT(message_of<ValueError>([] { nn::InstanceNorm(0); }),
             ContainsSubstring("InstanceNorm: 0 channels"));
}

TEST_CASE(
    "image layers: in compiled calls they, and what images are sampled by, give the bits of eager calls") {
  manual_seed(3);
  Net eager;
  Net compiled = eager.clone();
  nn::compile(compiled);
  for (int step = 0; step < 3; ++step) {
    const Tensor x = randn({2, 3, 4, 4});
    const Tensor one = eager(x), other = compiled(x);
    CHECK(same_bits(one.detach(), other.detach()));
    one.backward();
    other.backward();
    const auto left = eager.parameters(), right = compiled.parameters();
    for (std::size_t i = 0; i < left.size(); ++i) CHECK(same_bits(left[i].grad(), right[i].grad()));
  }
}
