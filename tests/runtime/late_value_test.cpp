// Values that the host reads later, and the marks of devices by which it does.
#include "runtime/late_value.h"

#include <cstring>
#include <vector>

#include "runtime/apply.h"
#include "runtime/kernel.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/ops/list.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// The host's memory as a device that says who waits for it, and for what.
class WatchedBackend final : public Backend {
 public:
  class Mark final : public DeviceMark {
   public:
    Mark(WatchedBackend& on, int number) : on_(on), number_(number) {}
    bool reached() override { return true; }
    void wait() override { on_.waits.push_back(number_); }
    double seconds_since(const DeviceMark& earlier) const override {
      return number_ - dynamic_cast<const Mark&>(earlier).number_;
    }
    void read(void* to, const void* from, std::size_t bytes) override {
      on_.waits.push_back(number_);
      std::memcpy(to, from, bytes);
    }

   private:
    WatchedBackend& on_;
    int number_;
  };

  void* allocate(Device, std::size_t bytes) override { return std::aligned_alloc(64, (bytes / 64 + 1) * 64); }
  void deallocate(Device, void* data, std::size_t) noexcept override { std::free(data); }
  void copy(void* to, Device to_device, const void* from, Device, std::size_t bytes) override {
    if (to_device.is_cpu()) ++reads;
    std::memcpy(to, from, bytes);
  }
  void synchronize(Device) override { ++synchronised; }
  std::unique_ptr<DeviceMark> mark(Device) override { return std::make_unique<Mark>(*this, ++marks); }

  int marks = 0, synchronised = 0, reads = 0;
  std::vector<int> waits;  // numbers of marks
};

WatchedBackend& watched_backend() {
  static WatchedBackend instance;
  return instance;
}

Device watched() {
  static const DeviceType type = [] {
    const DeviceType made = register_backend("watched", watched_backend());
    const auto share = [&]<class O>() { kernel_row<O>().set(made, kernel_row<O>().on(DeviceType::cpu)); };
    ops::Primitives::for_each(share);
    ops::ArithmeticOps::for_each(share);
    return made;
  }();
  return {type, 0};
}

}  // namespace

TEST_CASE("late values: what a tensor held when they were made, in every dtype and layout") {
  for (const DType dtype : {f64, f32, f16, bf16, i64, i32})
    for (const Lay lay : all_lays) {
      Tensor x = laid(numbers({3, 4}, dtype, 7), lay);
      const Tensor element = narrow(narrow(x, 0, 1, 1), 1, 2, 1);
      const double expected = element.item();
      const LateValue late(element);
      fill_(x, 1);
      CHECK(late.read() == expected);
      CHECK(late.read() == expected);
      CHECK(LateValue(element).read() == 1);
    }
  CHECK_THROWS_AS(LateValue(ones({2})), ShapeError);
  CHECK_THROWS_AS(LateValue(ones({0})), ShapeError);
  CHECK_THROWS_AS(LateValue().read(), StateError);
}

TEST_CASE("late values: a history is neither needed nor kept alive") {
  const Tensor x = ones({}).requires_grad_();
  Tensor y = mul(x, 3);
  const LateValue late(y);
  y.backward();
  CHECK(late.read() == 3);
  CHECK(x.grad().item() == 3);
}

TEST_CASE("late values: reading waits for the mark of its own and for nothing else") {
  WatchedBackend& on = watched_backend();
  const Tensor x = to(full({}, 5), watched());
  on.waits.clear();
  on.synchronised = on.reads = 0;
  const LateValue first(x);
  const int mark = on.marks;
  const LateValue second(add(x, 1));  // later work
  CHECK(on.waits.empty());
  CHECK(first.read() == 5);
  CHECK(on.waits == std::vector{mark});
  CHECK(second.read() == 6);
  CHECK(on.waits == std::vector{mark, mark + 1});
  CHECK(on.synchronised == 0);
  CHECK(on.reads == 0);
}

TEST_CASE("marks: on the cpu, time goes on between them and all work before them is done") {
  Backend& cpu = backend(DeviceType::cpu);
  const auto first = cpu.mark(Device::cpu());
  const Tensor x = full({1000}, 2);
  const auto second = cpu.mark(Device::cpu());
  CHECK(second->reached());
  second->wait();
  CHECK(second->seconds_since(*first) >= 0);
  CHECK(first->seconds_since(*second) <= 0);
  float value = 0;
  second->read(&value, x.storage().data(), sizeof value);
  CHECK(value == 2);
}
