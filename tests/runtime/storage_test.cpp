// Memory that may be away: release, provide, owners, pins, ids.
#include "runtime/storage.h"

#include <thread>

#include "runtime/apply.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Brings one tensor's values back, as a sharded group would.
struct Keeper final : StorageOwner {
  explicit Keeper(const Tensor& x) : values(clone(x)) {}
  void need(Storage& storage) override {
    ++needs;
    if (refuses) fail<StateError>("keeper: not now");
    storage.provide();
    const Tensor back(make_ref<TensorImpl>(Ref<Storage>(&storage),
                                           Layout{values.shape(), values.strides(), 0}, values.dtype()));
    copy_(back, values);
  }
  void storage_gone(Storage&) noexcept override { ++gone; }
  Tensor values;
  int needs = 0, gone = 0;
  bool refuses = false;
};

struct Held {
  Tensor x = numbers({3, 4}, f32);
  std::shared_ptr<Keeper> keeper = std::make_shared<Keeper>(x);
  Held() { x.storage().set_owner(keeper); }
};

}  // namespace

TEST_CASE("storage: a released one keeps its identity, and its views come back with it") {
  Held h;
  const Tensor view = transpose(h.x, 0, 1), expected = clone(view);
  const std::uint64_t id = h.x.storage().id();
  const std::uint32_t version = h.x.storage().version();
  for (int round = 1; round <= 3; ++round) {
    h.x.storage().release();
    CHECK_FALSE(h.x.storage().resident());
    CHECK(same_bits(clone(view), expected));  // needing brings back
    CHECK(h.keeper->needs == round);
    CHECK(h.x.storage().resident());
  }
  CHECK(h.x.storage().id() == id);
  CHECK(h.x.storage().version() > version);  // the keeper's own copy_ is a write
  CHECK(h.x.storage().pins() == 0);
}

TEST_CASE("storage: a host read of a released one throws and never gathers") {
  Held h;
  const Tensor one = select(select(h.x, 0, 0), 0, 0);
  h.x.storage().release();
  CHECK(one_line_about(message_of<StateError>([&] { (void)h.x.to_vector<float>(); }), "released"));
  CHECK_THROWS_AS(to_string(h.x), StateError);
  CHECK_THROWS_AS(one.item(), StateError);
  CHECK_THROWS_AS(h.x.data<float>(), StateError);
  CHECK(h.keeper->needs == 0);
}

TEST_CASE("storage: release needs an owner and no reader") {
  const Tensor plain = zeros({2});
  CHECK(one_line_about(message_of<StateError>([&] { plain.storage().release(); }), "owner"));
  Held h;
  h.x.storage().pin();
  CHECK(one_line_about(message_of<StateError>([&] { h.x.storage().release(); }), "release"));
  h.x.storage().unpin();
  h.x.storage().release();
  CHECK_NOTHROW(h.x.storage().release());  // away already
}

TEST_CASE("storage: inputs of one call are pinned together") {
  struct Evicting final : StorageOwner {
    std::vector<Storage*> all;
    int refused = 0;
    void need(Storage& storage) override {
      for (Storage* other : all) {
        if (other == &storage || !other->resident()) continue;
        if (other->pins() > 0)
          ++refused;
        else
          other->release();
      }
      storage.provide();
      std::fill_n(static_cast<float*>(storage.data()), 4, 2.f);
    }
  };
  const auto owner = std::make_shared<Evicting>();
  const Tensor a = full({4}, 2), b = full({4}, 2);
  for (const Tensor* t : {&a, &b}) {
    t->storage().set_owner(owner);
    owner->all.push_back(&t->storage());
    t->storage().release();
  }
  CHECK(same_bits(add(a, b), full({4}, 4)));
  CHECK(owner->refused == 1);
  CHECK(a.storage().pins() == 0);
  CHECK(b.storage().pins() == 0);
}

TEST_CASE("storage: an owner that throws leaves no pin behind") {
  Held h;
  const Tensor other = clone(h.x);
  other.storage().set_owner(h.keeper);
  h.x.storage().release();
  h.keeper->refuses = true;
  CHECK(message_of<StateError>([&] { add(other, h.x); }) == "keeper: not now");
  CHECK(h.x.storage().pins() == 0);
  CHECK(other.storage().pins() == 0);
  h.keeper->refuses = false;
  CHECK_NOTHROW(add(other, h.x));
}

TEST_CASE("storage: memory can be handed over, if it fits") {
  Held h;
  CHECK_THROWS_AS(h.x.storage().provide(), StateError);  // it is here
  h.x.storage().release();
  CHECK(one_line_about(
      message_of<ValueError>([&] { h.x.storage().provide(Storage::allocate(Device::cpu(), 4)); }), "bytes"));
  CHECK(one_line_about(
      message_of<DeviceError>([&] { h.x.storage().provide(Storage::allocate(Device::cpu(1), 48)); }),
      "cpu:1"));
  const Ref<Storage> memory = Storage::allocate(Device::cpu(), 64);
  h.x.storage().provide(memory);
  CHECK(h.x.storage().data() == memory->data());
  CHECK(memory->use_count() == 2);
  h.x.storage().release();
  CHECK(memory->use_count() == 1);
}

TEST_CASE("storage: the owner hears of the end, and a caller's memory is given back once") {
  const auto keeper = std::make_shared<Keeper>(zeros({2}));
  int freed = 0;
  float memory[2] = {};
  {
    const Tensor x = from_blob(memory, {2}, f32, [&] { ++freed; });
    x.storage().set_owner(keeper);
    const Tensor y = x;
  }
  CHECK(keeper->gone == 1);
  CHECK(freed == 1);
}

TEST_CASE("storage: ids are unique, and those who listen hear of deaths") {
  struct Deaths final : Listener {
    void after(const AnyOp&, Inputs, Outputs) override {}
    void storage_gone(std::uint64_t id) noexcept override { ids.push_back(id); }
    std::vector<std::uint64_t> ids;
  } deaths;
  const Listening scope(deaths);
  std::set<std::uint64_t> seen;
  for (int i = 0; i < 20; ++i) seen.insert(zeros({4}).storage().id());  // the same address again and again
  CHECK(seen.size() == 20);
  CHECK(deaths.ids.size() == 20);
  {
    const Tensor silent = zeros({4});
  }
  CHECK(deaths.ids.size() == 20);
}

TEST_CASE("storage: what one thread makes another may free") {
  std::vector<Tensor> made;
  std::thread([&] {
    for (int i = 0; i < 100; ++i) made.push_back(full({static_cast<std::int64_t>(i * i)}, i));
  }).join();
  for (int i = 0; i < 100; ++i)
    for (double v : doubles(made[static_cast<std::size_t>(i)])) REQUIRE(v == i);
  std::thread([&] { made.clear(); }).join();
  CHECK(made.empty());
}

TEST_CASE("storage: on meta bytes are only counted") {
  const Tensor x = empty({std::int64_t{1} << 40}, {f32, Device::meta()});
  CHECK(x.storage().bytes() == std::size_t{1} << 42);
  CHECK(x.storage().resident());
  CHECK_THROWS_AS(x.raw(), DeviceError);
}
