// Properties of pooling, over sizes and options.
#include <cmath>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("images: pooling along an axis is that of each line, whatever the other axis") {
  for (const std::int64_t kernel : {1, 2, 3, 5})
    for (const std::int64_t stride : {0, 1, 2, 7})
      for (std::int64_t padding = 0; padding <= kernel / 2; ++padding) {
        INFO(kernel << " " << stride << " " << padding);
        const Tensor x = numbers({2, 3, 4, 9}, f32), lines = reshape(x, {2, 12, 9});
        const PoolOptions o{.stride = {1, stride}, .padding = {0, padding}};
        const Pool1dOptions line{stride, padding};
        const Tensor most = max_pool2d(x, {1, kernel}, o), mean = avg_pool2d(x, {1, kernel}, o);
        const std::int64_t count = (9 + 2 * padding - kernel) / (stride > 0 ? stride : kernel) + 1;
        CHECK(most.shape() == Shape{2, 3, 4, count});
        CHECK(same_bits(reshape(most, {2, 12, count}), max_pool1d(lines, kernel, line)));
        CHECK(same_bits(reshape(mean, {2, 12, count}), avg_pool1d(lines, kernel, line)));
        const PoolOptions turned{.stride = {stride, 1}, .padding = {padding, 0}};
        CHECK(same_bits(transpose(max_pool2d(transpose(x, 2, 3), {kernel, 1}, turned), 2, 3), most));
        CHECK(same_bits(transpose(avg_pool2d(transpose(x, 2, 3), {kernel, 1}, turned), 2, 3), mean));
      }
}
