// Memory, streams and errors of the CUDA backend.
#include <cuda_runtime_api.h>

#include <chrono>
#include <functional>
#include <future>
#include <thread>

#include "runtime/context.h"
#include "runtime/cpu/elementwise_loop.h"
#include "runtime/cuda/rank.h"
#include "tests/cuda/compare.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

std::uint64_t pool_bytes(cudaMemPoolAttr which) {
  cudaMemPool_t pool = nullptr;
  std::uint64_t bytes = 0;
  cudaDeviceSynchronize();
  cudaDeviceGetDefaultMemPool(&pool, 0);
  cudaMemPoolGetAttribute(pool, which, &bytes);
  return bytes;
}
std::uint64_t reserved_bytes() { return pool_bytes(cudaMemPoolAttrReservedMemCurrent); }
std::uint64_t used_bytes() { return pool_bytes(cudaMemPoolAttrUsedMemCurrent); }

}  // namespace

namespace sherd::test {

/// An op of a user, which no backend knows.
struct Cube {
  static constexpr std::string_view name = "cube";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr bool differentiable = false;
  template <class T>
  constexpr T operator()(T x) const {
    return x * x * x;
  }
  bool operator==(const Cube&) const = default;
};

}  // namespace sherd::test

TEST_CASE("cuda: without a GPU the first use says so, and everything else works") {
  if (skip_if(cuda_device_count() > 0, "a GPU is here")) return;
  CHECK_THAT(message_of<DeviceError>([] { zeros({2}, {f32, gpu}); }),
             ContainsSubstring("cuda: no GPU can be used here"));
  CHECK_THAT(message_of<DeviceError>([] { to(ones({2}), gpu); }), ContainsSubstring("use cpu"));
  CHECK(sum(ones({3})).item() == 3);
}

TEST_CASE("cuda: a small block that was freed is the next of its size, on its own rank") {
  if (no_gpu()) return;
  for (const std::int64_t numel : {0, 1, 128, 129, 5000, 1 << 18}) {
    INFO(numel << " elements");
    Tensor x = full({numel}, 1, {f32, gpu});
    const void* block = x.storage().data();
    x = {};
    const Tensor again = empty({numel}, {f32, gpu}), other = empty({numel}, {f32, gpu});
    CHECK(again.storage().data() == block);
    CHECK(other.storage().data() != block);
  }
}

namespace {

/// Holds what is given to a rank's stream from now on until `let_go`, or 20 seconds.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    REQUIRE(cudaLaunchHostFunc(
                stream,
                [](void* gate) { static_cast<Gate*>(gate)->held_.wait_for(std::chrono::seconds(20)); },
                this) == cudaSuccess);
  }
  void let_go() { open_.set_value(); }

 private:
  std::promise<void> open_;
  std::future<void> held_ = open_.get_future();
};

}  // namespace

TEST_CASE("cuda: a block that another thread frees is used again after its maker's work") {
  if (no_gpu()) return;
  const NoGrad guard;
  for (const std::int64_t numel : {100, 1 << 18, 1 << 22})
    for (const bool while_recording : {false, true}) {
      INFO(numel << " elements, maker records: " << while_recording);
      Tensor x = full({numel}, 1, {f32, gpu});
      add_(x, 0);
      x + 1.0;  // what is loaded at the first use is there
      synchronize(gpu);
      Gate gate(sherd::cuda::stream_of(gpu));
      const Tensor seen = x + 1.0;
      add_(x, 5);
      Tensor elsewhere;
      const auto free_elsewhere = [&] {
        std::thread([&] {
          const NoGrad here;
          x = {};
          elsewhere = full({numel}, 7, {f32, gpu});
          gate.let_go();
          synchronize(gpu);
        }).join();
        ones({3}, {f32, gpu});
      };
      if (while_recording)
        CHECK(backend(DeviceType::cuda).record(gpu, {{{0, {}}}, [&](std::uint32_t) { free_elsewhere(); }}) !=
              nullptr);
      else
        free_elsewhere();
      synchronize(gpu);
      CHECK(amin(seen).item() == 2);
      CHECK(amax(seen).item() == 2);
      CHECK(amin(elsewhere).item() == 7);
      CHECK(amax(elsewhere).item() == 7);
    }
}

TEST_CASE("cuda: blocks that others free go back to whoever asks, and a rank keeps no more than its bound") {
  if (no_gpu()) return;
  const std::uint64_t used_before = used_bytes();
  std::thread([&] {
    const std::int64_t many = 3 * static_cast<std::int64_t>(sherd::cuda::BlockCache::most >> 20);
    std::vector<Tensor> blocks;
    for (std::int64_t i = 0; i < many; ++i) blocks.push_back(empty({1 << 20}, {u8, gpu}));
    std::thread([&] {
      blocks.resize(static_cast<std::size_t>(many / 2));  // the other half goes here
      synchronize(gpu);
    }).join();
    blocks.clear();
    synchronize(gpu);
    CHECK(used_bytes() <= used_before + sherd::cuda::BlockCache::most);
  }).join();
  CHECK(used_bytes() <= used_before);
}

TEST_CASE("cuda: memory that was freed is used again") {
  if (no_gpu()) return;
  const auto step = [] {
    const Tensor x = full({1 << 20}, 2, {f32, gpu});
    Tensor y = x;
    for (int i = 0; i < 20; ++i) y = y * 1.01 + x;
    return sum(y).item();
  };
  const double first = step();
  step();
  const std::uint64_t after_two = reserved_bytes();
  for (int i = 0; i < 50; ++i) CHECK(step() == first);
  CHECK(reserved_bytes() == after_two);
}

TEST_CASE("cuda: every rank has a stream of its own, and ranks do not disturb each other") {
  if (no_gpu()) return;
  constexpr int ranks = 4;
  std::vector<double> results(ranks);
  std::vector<cudaStream_t> streams(ranks);
  const auto work = [](int rank) {
    const NoGrad guard;
    Tensor x = full({50000}, rank + 1, {f64, gpu});
    for (int i = 0; i < 200; ++i) x = x * 0.5 + static_cast<double>(rank);
    return sum(x).item();
  };
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] {
        streams[static_cast<std::size_t>(r)] = sherd::cuda::stream_of(gpu);
        results[static_cast<std::size_t>(r)] = work(r);
      });
  }
  for (int r = 0; r < ranks; ++r) CHECK(results[static_cast<std::size_t>(r)] == work(r));
  CHECK(sherd::cuda::stream_of(gpu) == sherd::cuda::stream_of(gpu));
  CHECK(sherd::cuda::stream_of(gpu) != cudaStream_t{});
}

TEST_CASE("cuda: a tensor may outlive the thread that made it") {
  if (no_gpu()) return;
  Tensor x;
  std::jthread([&] {
    x = full({1000}, 3, {f32, gpu}) * 2.0;
    backend(DeviceType::cuda).synchronize(gpu);
  }).join();
  CHECK(sum(x).item() == 6000);
}

TEST_CASE("cuda: the host's values may change as soon as a copy returns") {
  if (no_gpu()) return;
  constexpr std::int64_t n = 1 << 22;
  std::vector<float> values(n, 1.f);
  const Tensor x = Tensor::from(values, {n}, gpu);
  std::fill(values.begin(), values.end(), 2.f);
  CHECK(sum(x).item() == n);

  float* pinned = nullptr;
  REQUIRE(cudaMallocHost(reinterpret_cast<void**>(&pinned), n * sizeof(float)) == cudaSuccess);
  const Tensor host = from_blob(pinned, {n}, f32, [pinned] { cudaFreeHost(pinned); });
  fill_(host, 1);
  const Tensor y = to(host, gpu);
  fill_(host, 2);
  CHECK(sum(y).item() == n);
  copy_(host, y * 3.0);
  CHECK(pinned[n - 1] == 3.f);
}

TEST_CASE("cuda: values of the host go to the GPU while it works on what came before") {
  if (no_gpu()) return;
  for (const std::int64_t n : {16, 1 << 18, 3 << 20}) {
    const Tensor host = arange(0, static_cast<double>(n), 1, {f32});
    sum(to(host, gpu)).item();  // what is made at the first use is there
    std::promise<void> returned;
    std::future<void> gate = returned.get_future();
    bool in_time = false;
    const auto hold = [&] { in_time = gate.wait_for(std::chrono::seconds(20)) == std::future_status::ready; };
    std::function<void()> held = hold;
    REQUIRE(cudaLaunchHostFunc(
                sherd::cuda::stream_of(gpu), [](void* f) { (*static_cast<std::function<void()>*>(f))(); },
                &held) == cudaSuccess);
    const Tensor x = to(host, gpu);
    returned.set_value();
    CHECK(x.to_vector<float>() == host.to_vector<float>());
    INFO(n);
    CHECK(in_time);
  }
}

TEST_CASE("cuda: tensors between two GPUs") {
  if (one_gpu()) return;
  const Device other = Device::cuda(1);
  for (int i = 0; i < 20; ++i) {
    const Tensor x = full({1 << 18}, i, {f32, gpu}) + 1.0;
    const Tensor y = to(x, other) * 2.0;
    CHECK(y.device() == other);
    CHECK(sum(to(y, gpu) - x).item() == (i + 1.0) * (1 << 18));
  }
  CHECK_THAT(message_of<DeviceError>([&] { ones({2}, {f32, gpu}) + ones({2}, {f32, other}); }),
             ContainsSubstring("cuda:0 and cuda:1"));
}

TEST_CASE("cuda: reading values on the host") {
  if (no_gpu()) return;
  const Tensor x = arange(0, 6, 1, {f32, gpu});
  CHECK(select(x, 0, 4).item() == 4);
  CHECK(transpose(reshape(x, {2, 3}), 0, 1).to_vector<float>() == std::vector<float>{0, 3, 1, 4, 2, 5});
  CHECK(to_string(slice(x, 0, 0, 2)) == "tensor([0, 1], shape=(2), dtype=f32, device=cuda:0)");
}

TEST_CASE("cuda: mistakes are one clear line and leave the device usable") {
  if (no_gpu()) return;
  const Tensor x = ones({3}, {f32, gpu});
  CHECK_THAT(message_of<DeviceError>([&] { x + ones({3}); }),
             ContainsSubstring("add: inputs are on cuda:0 and cpu:0"));
  CHECK_THAT(message_of<NotImplementedError>([&] { apply(Cube{}, x); }),
             ContainsSubstring("cube: has no kernel for cuda:0"));
  cpu::add_elementwise<Cube>();
  CHECK(apply(Cube{}, full({2}, 2)).to_vector<float>() == std::vector<float>{8, 8});
  CHECK_THAT(message_of<DeviceError>([] { zeros({2}, {f32, Device::cuda(99)}); }),
             ContainsSubstring("cuda:99: this machine has"));
  const std::string memory = message_of<OutOfMemoryError>([] { empty({std::int64_t{1} << 50}, {f64, gpu}); });
  CHECK_THAT(memory, ContainsSubstring("cuda:0: no memory for 9007199254740992 bytes"));
  CHECK(memory.find('\n') == std::string::npos);
  CHECK(sum(x).item() == 3);
}
