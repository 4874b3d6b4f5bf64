// gradcheck on memory that the host cannot touch.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/ops/list.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Memory of its own pages, which only its kernels and copies open.
class FarBackend final : public Backend {
 public:
  void* allocate(Device, std::size_t bytes) override {
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t whole = (bytes / page + 1) * page;
    void* data = mmap(nullptr, whole, access(), MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check<OutOfMemoryError>(data != MAP_FAILED, "far: {} bytes", whole);
    blocks_[data] = whole;
    return data;
  }
  void deallocate(Device, void* data, std::size_t) noexcept override {
    munmap(data, blocks_.at(data));
    blocks_.erase(data);
  }
  void copy(void* to, Device, const void* from, Device, std::size_t bytes) override {
    const Open open;
    std::memcpy(to, from, bytes);
  }
  void synchronize(Device) override {}

  static FarBackend& instance() {
    static FarBackend far;
    return far;
  }

  class Open {
   public:
    Open() {
      if (instance().open_++ == 0) instance().protect();
    }
    ~Open() {
      if (--instance().open_ == 0) instance().protect();
    }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;
  };

 private:
  int access() const { return open_ > 0 ? PROT_READ | PROT_WRITE : PROT_NONE; }
  void protect() {
    for (const auto& [data, bytes] : blocks_) mprotect(data, bytes, access());
  }
  std::map<void*, std::size_t> blocks_;
  int open_ = 0;  // kernels and copies under way, one inside the other
};

/// The CPU's kernel, on memory that is open for its time.
template <class O>
void run_opened(const void* op, Inputs in, Outputs out) {
  const FarBackend::Open open;
  kernel_row<O>().on(DeviceType::cpu)(op, in, out);
}

Device far() {
  static const DeviceType type = [] {
    const DeviceType made = register_backend("far", FarBackend::instance());
    backend(DeviceType::cpu);
    const auto share = [&]<class O>() { kernel_row<O>().set(made, &run_opened<O>); };
    ops::Primitives::for_each(share);
    ops::UnaryOps::for_each(share);
    ops::ArithmeticOps::for_each(share);
    ops::ComparisonOps::for_each(share);
    share.operator()<ops::Where>();
    return made;
  }();
  return {type, 0};
}

}  // namespace

TEST_CASE("gradcheck: varies inputs where they live, and finds the same there") {
  using Function = std::function<Tensor(std::span<const Tensor>)>;
  const Function right[] = {
      [](std::span<const Tensor> in) { return mul(exp(in[0]), tanh(in[1])); },
      [](std::span<const Tensor> in) { return matmul(in[0], transpose(in[1], 0, 1)); },
      [](std::span<const Tensor> in) { return sum(square(add(in[0], in[1]))); },
      [](std::span<const Tensor> in) { return reshape(narrow(mul(in[0], in[1]), 1, 0, 2), {4}); },
  };
  const Function wrong = [](std::span<const Tensor> in) { return mul(in[0], in[1].detach()); };
  const std::vector<Tensor> here{numbers({2, 3}, f64), numbers({2, 3}, f64, 2)};
  const std::vector<Tensor> there{to(here[0], far()), to(here[1], far())};
  for (const Function& fn : right) {
    CHECK(gradcheck(fn, here) < 1e-7);
    CHECK(gradcheck(fn, there) < 1e-7);
  }
  CHECK(gradcheck(wrong, here) > 1e-3);
  CHECK(gradcheck(wrong, there) > 1e-3);
  for (std::size_t i = 0; i < here.size(); ++i) CHECK(same_bits(to(there[i], Device::cpu()), here[i]));
}
