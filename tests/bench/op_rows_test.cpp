// That the table of ops (ops_bench) has a row for every op of the library.
#include "tests/bench/op_rows.h"

#include <map>
#include <set>

#include "runtime/ops/list.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::bench;

namespace {

/// Ops that no row runs, and why.
const std::map<std::string_view, std::string_view> without_a_row{
    {ops::Transfer::name, "between devices: no device's own work"},
    {ops::CopyEach::name,
     "of lists of parameters, as the two below: timed in whole steps (shard_bench, cuda_ranks_bench)"},
    {ops::LargestMagnitude::name, ""},
    {ops::ClipScale::name, ""},
    {ops::Places::name,
     "of devices that are not the host: the rows nonzero, mask_read and mask_write run it there"},
    {ops::PowerSum::name, "what norms and variances are made of where they have no kernel"},
    {ops::Variance::name, "what var and std are made of where they have no kernel"},
    {ops::RunningProduct::name, "of devices that are not the host: the row cumprod runs it there"},
    {ops::Bernoulli::name, "of devices that are not the host: the row bernoulli runs it there"},
    {ops::PutAtGrad::name, "of devices that are not the host: rows of scatter run it there"},
    {ops::Patches::name, "how a convolution is made where no library has one"},
    {ops::PatchesGrad::name, "its gradient"},
    {ops::LinearFp8::name,
     "PyTorch has no op of its own that scales and multiplies: timed in steps (cuda_bench)"},
    {ops::LinearFp8Grad::name, "its gradient"},
};

/// Forward and backward of a row, as it is measured.
void rehearse(const OpRow& row, DType dtype) {
  List in = row.make(1 << 10, dtype);
  if (!row.gradient) {
    row.call(in);
    return;
  }
  List wanted;
  for (Tensor& x : in) {
    x = x.detach();
    if (is_floating(x.dtype())) wanted.push_back(x.requires_grad_());
  }
  const Tensor y = row.call(in);
  CHECK(grad(y, wanted, ones_like(y)).size() == wanted.size());
}

}  // namespace

TEST_CASE("table of ops: a name is one row's, and each row runs", "[one thread]") {
  std::set<std::string> names;
  for (const OpRow& row : op_rows()) {
    INFO(row.name);
    CHECK(names.insert(row.name).second);
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) CHECK_NOTHROW(rehearse(row, dtype));
  }
}

TEST_CASE("table of ops: every op of the library runs in a row", "[one thread]") {
  test::Heard heard;
  {
    const Listening scope(heard);
    for (const OpRow& row : op_rows()) rehearse(row, DType::f32);
  }
  ops::for_each_structural([&]<class O>() {
    INFO(O::name << ": add a row to tests/bench/op_rows.cpp");
    CHECK(heard.names.contains(std::string(O::name)) != without_a_row.contains(O::name));
  });
}
