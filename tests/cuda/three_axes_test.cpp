// Tensors as kernels of folds see them. No GPU is needed.
#include "runtime/cuda/three_axes.h"

#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;
using cuda::as_rows_with_gaps;
using cuda::ThreeAxes;

TEST_CASE("three axes: rows with gaps are the tensor's elements, row by row, where they lie") {
  const Tensor table = arange(0, 6 * 5 * 4 * 8), x = reshape(table, {6, 5, 4, 8});
  struct Case {
    Tensor x;
    Mask axes;
  };
  const std::vector<Case> rows{{narrow(x, 3, 2, 5), 0b0111},
                               {narrow(x, 2, 1, 3), 0b0011},
                               {permute(narrow(x, 3, 0, 4), {0, 1, 2, 3}), 0b0111},
                               {narrow(reshape(x, {120, 8}), 1, 3, 2), 0b01},
                               {narrow(narrow(x, 3, 2, 5), 0, 3, 1), 0b0111}};
  for (const Case& c : rows) {
    INFO(c.x.shape() << " strides " << c.x.strides());
    const std::optional<ThreeAxes> found = as_rows_with_gaps(c.x, c.axes);
    REQUIRE(found);
    CHECK(found->outer == 1);
    CHECK(found->reduce * found->inner == c.x.numel());
    CHECK(found->pitch > found->inner);
    const std::vector<std::int64_t> all = table.to_vector<std::int64_t>(),
                                    own = contiguous(c.x).to_vector<std::int64_t>();
    for (std::int64_t i = 0; i < found->reduce; ++i)
      for (std::int64_t j = 0; j < found->inner; ++j)
        CHECK(own[static_cast<std::size_t>(i * found->inner + j)] ==
              all[static_cast<std::size_t>(c.x.layout().offset + i * found->pitch + j)]);
  }
  const std::vector<Case> none{{x, 0b0111},                                    // dense
                               {narrow(x, 3, 2, 5), 0b1000},                   // along rows
                               {narrow(x, 3, 2, 5), 0b0110},                   // behind an axis that stays
                               {narrow(narrow(x, 3, 2, 5), 1, 0, 3), 0b0111},  // rows at two distances
                               {transpose(x, 2, 3), 0b0111},
                               {expand(narrow(x, 0, 0, 1), {6, 5, 4, 8}), 0b0111},
                               {narrow(x, 3, 2, 1), 0b0111},  // of one element
                               {narrow(x, 0, 0, 0), 0b0111}};
  for (const Case& c : none) {
    INFO(c.x.shape() << " strides " << c.x.strides());
    CHECK(!as_rows_with_gaps(c.x, c.axes));
  }
}
