// The handle: values in and out, views, printing, refusals.
#include "runtime/tensor.h"

#include <array>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

template <class T>
std::vector<T> values(const Tensor& x) {
  return x.to_vector<T>();
}

using Floats = std::vector<float>;

Tensor counted(const Shape& shape) {
  return to(reshape(arange(0, static_cast<double>(shape.numel())), shape), f32);
}

}  // namespace

TEST_CASE("tensor: values go in and come out, in every dtype") {
  for (DType dtype : all_dtypes) {
    INFO(name_of(dtype));
    const Tensor x = numbers({2, 3}, dtype);
    with_element(dtype, [&]<class T>() {
      const std::vector<T> host = values<T>(x);
      REQUIRE(host.size() == 6);
      const Tensor again = with_element(dtype, [&]<class>() {
        Tensor t = empty({2, 3}, {dtype});
        auto* at = t.mutable_data<T>();
        for (std::size_t i = 0; i < host.size(); ++i) at[i] = host[i];
        return t;
      });
      CHECK(same_bits(again, x));
      CHECK(select(select(x, 0, 1), 0, 2).item() == static_cast<double>(static_cast<compute_t<T>>(host[5])));
    });
    CHECK(Tensor::scalar(1, {dtype}).item() == 1);
    CHECK(Tensor::scalar(1, {dtype}).spec() == Spec{{}, dtype, Device::cpu()});
  }
}

TEST_CASE("tensor: values in braces or in a list alone are a row, in nested braces rows") {
  const std::vector<float> list{1, 2, 3};
  CHECK(same_bits(Tensor::from({1.0F, 2.0F, 3.0F}), Tensor::from(list, {3})));
  CHECK(same_bits(Tensor::from(list), Tensor::from(list, {3})));
  CHECK(same_bits(Tensor::from(std::span(list)), Tensor::from(list, {3})));
  CHECK(same_bits(Tensor::from({{1, 2, 3}, {4, 5, 6}}), Tensor::from({1, 2, 3, 4, 5, 6}, {2, 3})));
  CHECK(same_bits(Tensor::from({{true}, {false}}), Tensor::from({true, false}, {2, 1})));
  CHECK(same_bits(Tensor::from({true, false}), Tensor::from(std::vector<bool>{true, false})));
  CHECK(Tensor::from(std::vector<double>{}).spec() == Spec{{0}, f64, Device::cpu()});
  const std::string message = message_of<ShapeError>([] { (void)Tensor::from({{1, 2}, {3}}); });
  CHECK(one_line_about(message, "from"));
}

TEST_CASE("tensor: integers keep every digit") {
  const std::int64_t big = (std::int64_t{1} << 53) + 1;
  const Tensor x = Tensor::from<std::int64_t>({big}, {1});
  CHECK(x.item<std::int64_t>() == big);
  CHECK(values<std::int64_t>(x)[0] == big);
  CHECK(to_string(x).find(std::to_string(big)) != std::string::npos);
}

TEST_CASE("tensor: handles share, and an empty one says so") {
  const Tensor none;
  CHECK_FALSE(none.defined());
  CHECK(to_string(none) == "tensor(none)");
  const Tensor x = counted({3}), same = x, view = narrow(x, 0, 0, 3);
  CHECK(same.is(x));
  CHECK_FALSE(view.is(x));
  CHECK(view.is_view());
  fill_(same, 7);
  CHECK(values<float>(view) == Floats{7, 7, 7});
}

TEST_CASE("tensor: an empty handle is refused wherever a tensor is needed") {
  const Tensor none, x = numbers({3}, f32);
  const std::function<void()> calls[] = {[&] { add(x, none); },
                                         [&] { add(none, x); },
                                         [&] { neg(none); },
                                         [&] { matmul(x, none); },
                                         [&] { sum(none); },
                                         [&] { reshape(none, {1}); },
                                         [&] { clone(none); },
                                         [&] { copy_(none, x); },
                                         [&] { (void)none.shape(); },
                                         [&] { (void)none.to_vector<float>(); },
                                         [&] { (void)none.item(); },
                                         [&] { (void)none.data<float>(); },
                                         [&] { none.detach(); },
                                         [&] { cat(std::vector{x, none}); },
                                         [&] { where(none, x, x); },
                                         [&] { embedding(x, none); },
                                         [&] { Tensor(none).requires_grad_(); }};
  int i = 0;
  for (const auto& call : calls) {
    INFO(i++);
    CHECK_THROWS_AS(call(), Error);
  }
}

TEST_CASE("tensor: views share memory with what they view, copies do not") {
  const Tensor x = counted({2, 3, 4});
  const std::vector<Tensor> views = {reshape(x, {6, 4}),
                                     view(x, {24}),
                                     flatten(x),
                                     permute(x, {2, 0, 1}),
                                     transpose(x, 0, 2),
                                     unsqueeze(x, 1),
                                     squeeze(narrow(x, 0, 1, 1), 0),
                                     expand(x, {5, 2, 3, 4}),
                                     slice(x, 2, 1, 4, 2),
                                     narrow(x, 1, 1, 2),
                                     select(x, 0, 1),
                                     split(x, 2, 1)[1],
                                     contiguous(x),
                                     to(x, f32),
                                     to(x, Device::cpu()),
                                     x.detach(),
                                     alias(x, {{2}, {5}, 3})};
  for (const Tensor& v : views) CHECK(&v.storage() == &x.storage());
  const std::vector<Tensor> copies = {clone(x),
                                      to(x, f64),
                                      to(x, Device::cpu(1)),
                                      contiguous(transpose(x, 0, 2)),
                                      reshape(transpose(x, 0, 2), {24}),
                                      cat(std::span(&x, 1))};
  for (const Tensor& c : copies) CHECK(&c.storage() != &x.storage());
}

TEST_CASE("tensor: reshape and views lay elements out in row-major order") {
  const Tensor x = counted({2, 3, 4});
  const std::vector<float> flat = values<float>(x);
  for (const Shape& shape : {Shape{24}, Shape{4, 6}, Shape{2, 12}, Shape{1, 24, 1}, Shape{2, 2, 3, 2}}) {
    CHECK(values<float>(reshape(x, shape)) == flat);
    CHECK(values<float>(reshape(transpose(clone(transpose(x, 0, 2)), 0, 2), shape)) == flat);
  }
  CHECK(reshape(x, {-1, 8}).shape() == Shape{3, 8});
  CHECK(reshape(x, {2, -1, 1}).shape() == Shape{2, 12, 1});
  CHECK(view(transpose(x, 0, 1), {3, 2, 2, 2}).shape() == Shape{3, 2, 2, 2});  // splits an axis: no copy
  CHECK_THROWS_AS(view(transpose(x, 0, 1), {6, 4}), ShapeError);
  CHECK(values<float>(permute(x, {2, 0, 1})) == values<float>(contiguous(permute(x, {2, 0, 1}))));
  CHECK(select(x, -1, -1).to_vector<float>() == Floats{3, 7, 11, 15, 19, 23});
  CHECK(values<float>(slice(x, 2, -3, 100, 2)) == values<float>(slice(x, 2, 1, 4, 2)));
  CHECK(slice(x, 0, 2, 1).shape() == Shape{0, 3, 4});
  CHECK(x.size(-1) == 4);
  CHECK(flatten(Tensor::scalar(1)).shape() == Shape{1});
  CHECK(reshape(zeros({0, 4}), {2, 0}).shape() == Shape{2, 0});
  CHECK(view(slice(zeros({0, 6}), 1, 0, 6, 2), {0}).shape() == Shape{0});
  const std::vector<Tensor> pieces = split(x, 2, 1);
  REQUIRE(pieces.size() == 2);
  CHECK(pieces[1].shape() == Shape{2, 1, 4});
  CHECK(same_bits(cat(pieces, 1), x));
}

TEST_CASE("tensor: contiguity is a fact about strides, not about how a view was made") {
  const Tensor x = counted({2, 3, 4});
  CHECK(x.is_contiguous());
  CHECK_FALSE(transpose(x, 0, 1).is_contiguous());
  CHECK(transpose(transpose(x, 0, 1), 0, 1).is_contiguous());
  CHECK(narrow(x, 0, 1, 1).is_contiguous());
  CHECK_FALSE(narrow(x, 1, 0, 2).is_contiguous());
  CHECK(transpose(counted({1, 5}), 0, 1).is_contiguous());
  CHECK(slice(zeros({0, 6}), 1, 0, 6, 2).is_contiguous());
  CHECK_FALSE(expand(counted({1}), {4}).is_contiguous());
}

TEST_CASE("tensor: from_blob uses the caller's memory and tells when it is done") {
  std::vector<float> memory{1, 2, 3, 4, 5, 6};
  int freed = 0;
  {
    Tensor part;
    {
      const Tensor x = from_blob(memory.data(), {2, 3}, f32, [&] { ++freed; });
      CHECK(x.data<float>() == memory.data());
      part = select(x, 0, 1);
      mul_(x, 2.0);
    }
    CHECK(freed == 0);
    CHECK(memory[5] == 12);
    CHECK(values<float>(part) == Floats{8, 10, 12});
  }
  CHECK(freed == 1);
  CHECK(from_blob(nullptr, {0, 3}, f32).numel() == 0);
  CHECK(one_line_about(message_of<ValueError>([] { from_blob(nullptr, {2}, f32); }), "from_blob"));
  CHECK(one_line_about(message_of<ShapeError>([&] { from_blob(memory.data(), {-1}, f32); }), "from_blob"));
}

TEST_CASE("tensor: absurd sizes are refused before anything is allocated") {
  CHECK_THROWS_AS(empty({-1}), ShapeError);
  CHECK_THROWS_AS(zeros({std::int64_t{1} << 40, std::int64_t{1} << 40}), Error);
  CHECK_THROWS_AS(empty({std::int64_t{1} << 62, 8}, {f64}), Error);
  CHECK_THROWS_AS(empty({std::int64_t{1} << 50}), OutOfMemoryError);
  CHECK_THROWS_AS((Shape{1, 1, 1, 1, 1, 1, 1, 1, 1}), ShapeError);
  CHECK_THROWS_AS(unsqueeze(zeros({1, 1, 1, 1, 1, 1, 1, 1}), 0), ShapeError);
}

TEST_CASE("tensor: sizes whose product cannot be counted are refused wherever they are given") {
  const std::int64_t half = std::int64_t{1} << 32, most = INT64_MAX;
  float memory[4] = {};
  for (const Shape& shape : {Shape{half, half}, Shape{half, half, half, half}, Shape{most, 2},
                             Shape{most, most}, Shape{3, half, half}}) {
    CHECK(shape.numel() == most);
    CHECK(Spec{shape, u8, {}}.bytes() == most);
    CHECK_THROWS_AS(empty(shape), ShapeError);
    CHECK_THROWS_AS(empty(shape, {u8, Device::meta()}), ShapeError);
    CHECK_THROWS_AS(from_blob(memory, shape, f32), ShapeError);
    CHECK_THROWS_AS(Tensor::from(std::span<const float>(), shape), ShapeError);
    CHECK_THROWS_AS(rand(shape), ShapeError);
    CHECK_THROWS_AS(alias(zeros({4}), {shape, shape, 0}), Error);
  }
  CHECK_THROWS_AS(Tensor::from<float>({1, 2, 3}, {-1, -3}), ShapeError);
  CHECK((Shape{most, 0, most}.numel()) == 0);
  // Beside a size of 0 too: strides, views and products of sizes are counted all the same.
  for (const Shape& shape : {Shape{most, 0, most}, Shape{0, most, 3}, Shape{half, half, 0}, Shape{most, 0}}) {
    CHECK_THROWS_WITH(empty(shape), Catch::Matchers::ContainsSubstring("sizes of 0 aside"));
    CHECK_THROWS_AS(alias(zeros({4}), {shape, shape, 0}), ShapeError);
    CHECK_THROWS_AS(expand(zeros({1, 0, 1}), shape), ShapeError);
  }
  const Tensor wide = empty({most / 4, 0});
  CHECK(wide.is_contiguous());
  CHECK(to_string(wide).find("[]") != std::string::npos);
  CHECK(slice(wide, 0, most / 8, most / 4, 3).raw() == wide.raw());
  CHECK(sum(wide).item() == 0);
  const Tensor nowhere = alias(zeros({4}), {{0, 3, 2}, {most, most, 1}, most});
  CHECK(nowhere.raw() == slice(transpose(nowhere, 0, 1), 0, 2, 3).raw());
}

TEST_CASE("tensor: a view stays inside its storage, whatever its layout says") {
  const Tensor x = counted({10});
  const std::int64_t most = INT64_MAX;
  for (const Layout& bad :
       {Layout{{2}, {most}, 0}, Layout{{3}, {most}, 0}, Layout{{3}, {-most}, 9}, Layout{{2}, {1}, most},
        Layout{{2, 2}, {most, most}, 1}, Layout{{11}, {1}, 0}, Layout{{2}, {10}, 0}, Layout{{1}, {1}, -1},
        Layout{{most}, {2}, 0}, Layout{{2}, {INT64_MIN}, 0}})
    CHECK_THROWS_AS(alias(x, bad), Error);
  CHECK_THROWS_AS(alias(x, {{-1}, {1}, 0}), ShapeError);
  CHECK_THROWS_AS(alias(x, {{2, 2}, {1}, 0}), ShapeError);
  CHECK(values<float>(alias(x, {{3}, {-4}, 9})) == Floats{9, 5, 1});
  CHECK(values<float>(alias(x, {{1, 2}, {most, 5}, 4})) == Floats{4, 9});
  CHECK(alias(x, {{0, 5}, {most, most}, most}).numel() == 0);
}

TEST_CASE("tensor: messages name empty handles, not their sizes") {
  const Tensor none, x = numbers({3}, f32);
  const std::function<void()> calls[] = {
      [&] { add(x, none); },       [&] { add(none, x); },      [&] { neg(none); },
      [&] { matmul(x, none); },    [&] { matmul(none, x); },   [&] { sum(none); },
      [&] { softmax(none); },      [&] { where(none, x, x); }, [&] { topk(none, 1); },
      [&] { dropout(none, 0.5); }, [&] { contiguous(none); },  [&] { to(none, f64); },
      [&] { copy_(x, none); }};
  int i = 0;
  for (const auto& call : calls) {
    INFO(i++);
    const std::string message = message_of<Error>(call);
    INFO(message);
    CHECK(message.find("-1") == std::string::npos);
    CHECK((message.find("empty") != std::string::npos || message.find("none") != std::string::npos));
  }
}

namespace {

/// The host's memory as a device of its own, which counts what the host copies from it.
class CountingBackend final : public Backend {
 public:
  void* allocate(Device, std::size_t bytes) override { return std::aligned_alloc(64, (bytes / 64 + 1) * 64); }
  void deallocate(Device, void* data, std::size_t) noexcept override { std::free(data); }
  void copy(void* to, Device to_device, const void* from, Device, std::size_t bytes) override {
    if (to_device.is_cpu()) copied += bytes;
    std::memcpy(to, from, bytes);
  }
  void synchronize(Device) override {}
  std::size_t copied = 0;
};

}  // namespace

TEST_CASE("tensor: the host copies from a device what a view covers, and no more") {
  static CountingBackend counting;  // registered for good
  const Device device{register_backend("counting", counting), 0};
  const auto copied_by = [&](const auto& read) {
    counting.copied = 0;
    read();
    return counting.copied;
  };
  std::vector<float> host(1000);
  for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(i);
  const Tensor x = Tensor::from<float>(host, {10, 100}, device);
  for (std::int64_t i : {0, 1, 537, 999}) {
    CHECK(copied_by([&] { CHECK(alias(x, {{}, {}, i}).item() == static_cast<double>(i)); }) == 4);
    CHECK(copied_by([&] { CHECK(alias(x, {{1, 1}, {7, 7}, i}).item<int>() == i); }) == 4);
  }
  CHECK(copied_by([&] { CHECK(values<float>(alias(x, {{3}, {2}, 10})) == Floats{10, 12, 14}); }) == 5 * 4);
  CHECK(copied_by([&] { CHECK(values<float>(alias(x, {{3}, {-2}, 10})) == Floats{10, 8, 6}); }) == 5 * 4);
  CHECK(copied_by([&] { CHECK(to_string(alias(x, {{2}, {0}, 5})).find("[5, 5]") != std::string::npos); }) ==
        4);
  CHECK(copied_by([&] { CHECK(values<float>(x) == host); }) == 4000);
  CHECK(copied_by([&] { CHECK(values<float>(alias(x, {{0}, {1}, 3})).empty()); }) == 0);
}

TEST_CASE("device: indices count from 0, and others are refused") {
  for (int index : {-1, -128, 128, 255, 256, INT_MIN, INT_MAX}) {
    CHECK(one_line_about(message_of<ValueError>([&] { (void)Device::cpu(index); }), "device"));
    CHECK(one_line_about(message_of<ValueError>([&] { (void)Device::cuda(index); }), "device"));
    CHECK_THROWS_AS(Device::parse(fmt::format("cpu:{}", index)), ValueError);
    CHECK_THROWS_AS(Device::parse(fmt::format("cuda:{}", index)), ValueError);
  }
  for (int index : {0, 1, 127}) CHECK(to_string(Device::cuda(index)) == fmt::format("cuda:{}", index));
}

TEST_CASE("tensor: reading and writing as another type is refused in one line") {
  const Tensor x = counted({2, 2});
  CHECK(one_line_about(message_of<DTypeError>([&] { (void)x.data<double>(); }), "f64"));
  CHECK(one_line_about(message_of<DTypeError>([&] { (void)x.mutable_data<std::int64_t>(); }), "f32"));
  CHECK(one_line_about(message_of<DTypeError>([&] { (void)x.to_vector<double>(); }), "to_vector"));
  CHECK(one_line_about(message_of<ShapeError>([&] { (void)x.item(); }), "item"));
  CHECK(one_line_about(message_of<ShapeError>([] { Tensor::from<float>({1, 2, 3}, {2}); }), "from"));
  CHECK(one_line_about(message_of<ValueError>([&] { alias(x, {{3}, {2}, 0}); }), "alias"));
  CHECK(one_line_about(message_of<ValueError>([&] { alias(x, {{2}, {-1}, 0}); }), "alias"));
  const Tensor meta = empty({1}, {f32, Device::meta()});
  CHECK(one_line_about(message_of<DeviceError>([&] { (void)meta.item(); }), "meta"));
  CHECK_THROWS_AS(meta.to_vector<float>(), Error);
  CHECK(to_string(meta).find("...") != std::string::npos);
}

TEST_CASE("tensor: its truth is that of its one element") {
  for (const DType dtype : all_dtypes)
    for (const Shape& shape : {Shape{}, Shape{1}, Shape{1, 1}}) {
      INFO(name_of(dtype) << " " << shape);
      CHECK(static_cast<bool>(full(shape, 1, {dtype})));
      CHECK_FALSE(static_cast<bool>(zeros(shape, {dtype})));
    }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double value : {0.5, -0.25, nan}) CHECK(static_cast<bool>(full({}, value)));
  CHECK_FALSE(static_cast<bool>(full({}, -0.0)));
  CHECK(static_cast<bool>(full({}, std::numeric_limits<std::int64_t>::min(), {i64})));
  const Tensor loss = full({}, 0.5);
  CHECK((loss < 0.6 && !(loss < 0.4)));
  for (const Tensor& many : {zeros({2, 3}), zeros({0})})
    CHECK(one_line_about(message_of<ShapeError>([&] { (void)static_cast<bool>(many); }), "any(x)"));
  CHECK(one_line_about(message_of<ValueError>([] { (void)static_cast<bool>(Tensor{}); }), "defined()"));
  CHECK(one_line_about(
      message_of<DeviceError>([] { (void)static_cast<bool>(zeros({}, {f32, Device::meta()})); }), "meta"));
}

TEST_CASE("tensor: a shape is an integer, or a list of them of any integer type") {
  CHECK(zeros(3).shape() == Shape{3});
  CHECK(zeros(std::size_t{3}).shape() == Shape{3});
  CHECK(zeros(std::vector<int>{2, 3}).shape() == Shape{2, 3});
  CHECK(zeros(std::vector<std::size_t>{2, 3}).shape() == Shape{2, 3});
  CHECK(zeros(std::array<std::int64_t, 2>{2, 3}).shape() == Shape{2, 3});
  const std::size_t rows = 2;
  CHECK(zeros({rows, 3}).shape() == Shape{2, 3});
  CHECK(zeros({rows, 3U, std::int64_t{4}, short{5}}).shape() == Shape{2, 3, 4, 5});
  CHECK(zeros({}).shape() == Shape());
  CHECK_THROWS_AS(zeros({rows - 3, 3}), ShapeError);
  const Tensor x = reshape(arange(0, 6), {2, 3});
  CHECK(same_bits(sum(x, 1), sum(x, {1})));
  CHECK(same_bits(mean(to(x, f32), -1, Keep::dims), mean(to(x, f32), {-1}, Keep::dims)));
  CHECK(same_bits(flip(x, 0), flip(x, {0})));
  CHECK(x.shape() == std::vector{2, 3});
  CHECK_THROWS_AS(zeros(std::vector<int>(max_rank + 1, 1)), ShapeError);
  const std::vector<std::size_t> none;
  for (const auto& wrapped : {none.size() - 1, std::string::npos})
    CHECK(one_line_about(message_of<ShapeError>([&] { (void)Shape(wrapped); }), "shape"));
  CHECK_THROWS_AS(zeros(std::vector{std::size_t{2}, none.size() - 1}), ShapeError);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<wchar_t, Shape>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<std::u32string, Shape>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<bool, Shape>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<std::string, Shape>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<const char*, Shape>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<double, Shape>);
}

TEST_CASE("tensor: shapes, dtypes and devices are written to streams as messages name them") {
  std::ostringstream out;
  out << Shape{2, 3} << " " << Shape{} << " " << bf16 << " " << Device::cpu() << " " << Device::meta();
  CHECK(out.str() == "(2, 3) () bf16 cpu:0 meta");
}

TEST_CASE("tensor: an item fits the type that it is asked for as, or is refused") {
  const auto of = [](double value, DType dtype) { return full({}, value, {dtype}); };
  CHECK(of(-129, i64).item<std::int16_t>() == -129);
  CHECK(of(2.75, f32).item<int>() == 2);
  CHECK(of(3e9, i64).item<std::uint32_t>() == 3000000000u);
  CHECK(one_line_about(message_of<ValueError>([&] { (void)of(-129, i64).item<std::int8_t>(); }), "-129"));
  CHECK(one_line_about(message_of<ValueError>([&] { (void)of(3e9, i64).item<int>(); }), "item"));
  CHECK(one_line_about(message_of<ValueError>([&] { (void)of(-1, i32).item<std::uint64_t>(); }), "sign"));
  for (const DType dtype : {f64, f32, bf16})
    for (const double value : {1e30, -1e30, std::nan(""), double(INFINITY)})
      CHECK(one_line_about(message_of<ValueError>([&] { (void)of(value, dtype).item<int>(); }), "item"));
}

TEST_CASE("tensor: a host write counts as a write, a host read does not") {
  const Tensor x = counted({2});
  const std::uint32_t version = x.storage().version();
  (void)x.data<float>();
  (void)x.to_vector<float>();
  CHECK(x.storage().version() == version);
  (void)x.mutable_data<float>();
  CHECK(x.storage().version() > version);
}

TEST_CASE("tensor: printing shows values, and shortens what is long") {
  CHECK(to_string(Tensor::from<float>({1, -0.5f}, {2})).find("[1, -0.5]") != std::string::npos);
  CHECK(to_string(Tensor::from<std::int64_t>({3, -4}, {1, 2})).find("[[ 3, -4]]") != std::string::npos);
  CHECK(to_string(greater(counted({2}), 0.5)).find("[false, true]") != std::string::npos);
  CHECK(to_string(Tensor::scalar(2.5)).find("2.5") != std::string::npos);
  CHECK(to_string(zeros({0, 3})).find("[]") != std::string::npos);
  CHECK(to_string(transpose(counted({2, 2}), 0, 1)).find("[[0, 2],\n        [1, 3]]") != std::string::npos);
  CHECK(to_string(full({1}, std::numeric_limits<double>::infinity())).find("inf") != std::string::npos);
  const std::string text = to_string(counted({100, 100}));
  CHECK(text.size() < 1000);
  CHECK(text.find("...") != std::string::npos);
  CHECK(text.find("9999") != std::string::npos);
  CHECK(text.find("shape=(100, 100), dtype=f32, device=cpu:0") != std::string::npos);
  for (const char* name : {"cpu:0", "cpu:1", "cuda:3", "meta"}) CHECK(to_string(Device::parse(name)) == name);
  CHECK(Device::parse("cpu") == Device::cpu());
  for (const char* name : {"", "gpu", "cpu:", "cpu:x", "cpu:-1", "cuda:999", "meta:1x"})
    CHECK_THROWS_AS(Device::parse(name), ValueError);
}

TEST_CASE("tensor: casts keep values where they fit and round to nearest where they do not") {
  const Tensor x = Tensor::from<float>({0, 1, -2.75f, 3.99f, 300.5f}, {5});
  CHECK(values<std::int64_t>(to(x, i64)) == std::vector<std::int64_t>{0, 1, -2, 3, 300});
  CHECK(values<bool>(to(x, boolean)) == std::vector<bool>{false, true, true, true, true});
  CHECK(same_bits(to(to(x, f64), f32), x));
  CHECK(same_bits(to(to(x, f16), f32), x) == false);
  for (DType dtype : {f16, bf16, i32, i64})
    CHECK(same_bits(to(to(counted({100}), dtype), f32), counted({100})));
}

TEST_CASE("tensor: copy_ writes broadcast values in the target's dtype and layout") {
  const Tensor into = zeros({2, 3}, {f64});
  copy_(transpose(into, 0, 1), Tensor::from<float>({1, 2}, {2}));
  CHECK(values<double>(into) == std::vector<double>{1, 1, 1, 2, 2, 2});
  copy_(into, Tensor::scalar(4, {i64}));
  CHECK(values<double>(into) == std::vector<double>(6, 4));
  copy_(into, to(counted({2, 3}), Device::cpu(1)));
  CHECK(values<double>(into) == std::vector<double>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("tensor: in-place forms take a lower precision, never a higher one") {
  Tensor x = full({3}, 1);
  add_(x, full({3}, 2, {bf16}));
  CHECK(values<float>(x) == Floats{3, 3, 3});
  CHECK_THROWS_AS(add_(x, full({3}, 2, {f64})), DTypeError);
  CHECK_THROWS_AS(add(x, full({3}, 2, {bf16})), DTypeError);
  CHECK_THROWS_AS(add_(x, full({3}, 2, {i64})), DTypeError);
}

TEST_CASE("shape: axes count from both ends, and broadcasting is NumPy's") {
  for (int rank : {1, 2, 5})
    for (int i = 0; i < rank; ++i) {
      CHECK(normalize_axis("t", i, rank) == i);
      CHECK(normalize_axis("t", i - rank, rank) == i);
    }
  CHECK_THROWS_AS(normalize_axis("t", 2, 2), ShapeError);
  CHECK_THROWS_AS(normalize_axis("t", -3, 2), ShapeError);
  CHECK(broadcast_shapes("t", {3, 1}, {4}) == Shape{3, 4});
  CHECK(broadcast_shapes("t", {}, {2, 0}) == Shape{2, 0});
  CHECK(broadcast_shapes("t", {1}, {0}) == Shape{0});
  CHECK_THROWS_AS(broadcast_shapes("t", {2}, {0}), ShapeError);
  CHECK(to_string(Shape{2, 3}) == "(2, 3)");
  CHECK(Shape{}.numel() == 1);
}

TEST_CASE("tensor: arange takes any step whose values fit") {
  CHECK(doubles(arange(5, 0, -1, {u8})) == std::vector<double>{5, 4, 3, 2, 1});
  CHECK(doubles(arange(250, 0, -125, {u8})) == std::vector<double>{250, 125});
  CHECK_THROWS_AS(arange(5, -3, -1, {u8}), DTypeError);
  CHECK_THROWS_AS(arange(0, 600, 500, {u8}), DTypeError);
}

TEST_CASE("tensor: the gradient of gathered elements adds up in full, however many are one") {
  for (const DType dtype : {f16, bf16, f32}) {
    const Tensor x = zeros({2, 4}, {dtype}).requires_grad_();
    sum(gather(x, zeros({2, 5000}, {i64}))).backward();
    CHECK(doubles(select(x.grad(), 1, 0))[1] == Approx(5000).epsilon(dtype == bf16 ? 4e-3 : 0));
  }
}
