// What modules and parameters refuse: use after a move, empty parameters, lvalues in containers, values that
// do not exist, and a visit that does not fit the object.
#include <map>
#include <optional>
#include <type_traits>

#include "nn/gpt.h"
#include "nn/grad_scaler.h"
#include "nn/init.h"
#include "nn/layers.h"
#include "nn/multihead_attention.h"
#include "nn/optimizer.h"
#include "nn/recurrent.h"
#include "nn/state_file.h"
#include "nn/sync_batch_norm.h"
#include "nn/transformer.h"
#include "tests/runtime/harness.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

using Calls = std::map<std::string, std::function<void()>>;

/// Each call throws an `E` whose message is one line and has `word`.
template <class E>
void all_throw(const Calls& calls, const std::string& word) {
  for (const auto& [name, call] : calls) {
    INFO(name);
    CHECK(one_line_about(message_of<E>(call), word));
  }
}

Calls parameter_calls(Parameter p) {
  return {{"tensor", [p] { p.tensor(); }},
          {"local", [p] { p.local(); }},
          {"data", [p] { p.data(); }},
          {"set_data", [p]() mutable { p.set_data(ones({2})); }},
          {"grad", [p] { p.grad(); }},
          {"set_grad", [p]() mutable { p.set_grad(ones({2})); }},
          {"requires_grad", [p] { p.requires_grad(); }},
          {"set_requires_grad", [p]() mutable { p.set_requires_grad(true); }},
          {"shape", [p] { p.shape(); }},
          {"numel", [p] { p.numel(); }},
          {"owner", [p] { p.owner(); }},
          {"leave_owner", [p]() mutable { p.leave_owner(); }},
          {"set_owner", [p]() mutable { p.set_owner({nullptr, ones({2}), ones({2}), {2}}); }},
          {"normal_", [p] { init::normal_(p); }},
          {"uniform_", [p] { init::uniform_(p, 0, 1); }},
          {"constant_", [p] { init::constant_(p, 0); }},
          {"xavier_uniform_", [p] { init::xavier_uniform_(p); }},
          {"xavier_normal_", [p] { init::xavier_normal_(p); }},
          {"kaiming_uniform_", [p] { init::kaiming_uniform_(p); }},
          {"kaiming_normal_", [p] { init::kaiming_normal_(p); }},
          {"trunc_normal_", [p] { init::trunc_normal_(p); }},
          {"orthogonal_", [p] { init::orthogonal_(p); }}};
}

/// What reads or writes a member's values.
Calls value_calls(Param& p) {
  return {{"data", [&p] { p.data(); }},
          {"set_data", [&p] { p.set_data(ones({2})); }},
          {"local", [&p] { p.local(); }},
          {"grad", [&p] { p.grad(); }},
          {"set_grad", [&p] { p.set_grad(ones({2})); }},
          {"shape", [&p] { p.shape(); }},
          {"tie from it",
           [&p] {
             Param other(ones({2}));
             tie(p, other);
           }},
          {"tie to it", [&p] {
             Param other(ones({2}));
             tie(other, p);
           }}};
}

struct Watch final : ModuleObserver {};

/// Every public member of a module.
Calls module_calls(Module& m) {
  return {{"visit_members",
           [&m] {
             MemberVisitor nothing;
             m.visit_members(nothing);
           }},
          {"call", [&m] { m.call(ones({2, 2})); }},
          {"clone_module", [&m] { m.clone_module(); }},
          {"named_parameters", [&m] { m.named_parameters(); }},
          {"parameters", [&m] { m.parameters(); }},
          {"named_buffers", [&m] { m.named_buffers(); }},
          {"named_modules", [&m] { m.named_modules(); }},
          {"parameter_count", [&m] { m.parameter_count(); }},
          {"training", [&m] { m.training(); }},
          {"train", [&m] { m.train(); }},
          {"eval", [&m] { m.eval(); }},
          {"to a device", [&m] { m.to(Device::cpu()); }},
          {"to meta", [&m] { m.to(Device::meta()); }},
          {"to a dtype", [&m] { m.to(f64); }},
          {"materialize", [&m] { m.materialize(Device::cpu(), [](const std::string&, const Tensor&) {}); }},
          {"set_requires_grad", [&m] { m.set_requires_grad(false); }},
          {"zero_grad", [&m] { m.zero_grad(); }},
          {"state_dict", [&m] { m.state_dict(); }},
          {"load_state_dict", [&m] { m.load_state_dict({}); }},
          {"observe",
           [&m] {
             Watch watch;
             m.observe(watch);
           }},
          {"extend", [&m] { m.extend(nullptr); }},
          {"extension", [&m] { m.extension(); }}};
}

TransformerOptions small_transformer() {
  return {.width = 4, .heads = 2, .encoder_layers = 1, .decoder_layers = 1, .feedforward = 4};
}

/// Moves one of type `M` away and uses what is left.
template <class M>
void check_moved_from(M made) {
  M module = std::move(made);
  const M kept = std::move(module);
  INFO(kept.type_name());
  CHECK(module.type_name() == kept.type_name());
  all_throw<StateError>(module_calls(module), std::string(kept.type_name()));
  CHECK_THROWS_AS(module.clone(), StateError);
  CHECK_THROWS_AS(M(std::move(module)).parameters(), StateError);
}

struct Holder final : Layer<Holder> {
  nn::Linear fc{2, 2};
  Tensor forward(const Tensor& x) const { return fc(x); }
  void visit(auto&& on) { on("fc", fc); }
};

}  // namespace

TEST_CASE("layers and calls of training refuse empty handles in their own name") {
  const TempDirectory folder;
  const Tensor none, x = ones({2, 3, 4});
  const std::pair<std::string, std::function<void()>> calls[] = {
      {"Lstm", [&] { nn::Lstm(4, 2)(none); }},
      {"Gru", [&] { nn::Gru(4, 2)(none); }},
      {"Rnn", [&] { nn::Rnn(4, 2)(none); }},
      {"BatchNorm1d",
       [&] {
         nn::BatchNorm1d layer(3);
         layer(none);
       }},
      {"BatchNorm2d",
       [&] {
         nn::BatchNorm2d layer(3);
         layer(none);
       }},
      {"SyncBatchNorm",
       [&] {
         nn::SyncBatchNorm layer(3);
         layer(none);
       }},
      {"MultiheadAttention", [&] { nn::MultiheadAttention(4, 2)(none, x, x); }},
      {"MultiheadAttention", [&] { nn::MultiheadAttention(4, 2)(x, x, none); }},
      {"GradScaler::scale", [&] { nn::GradScaler().scale(none); }},
      {"save_state: 'w'", [&] { nn::save_state(folder / "state", {{"v", x}, {"w", none}}); }},
  };
  for (const auto& [name, call] : calls) {
    const std::string message = message_of<Error>(call);
    INFO(name << ": " << message);
    CHECK(message.starts_with(name));
    CHECK(message.find("is an empty handle") != std::string::npos);
  }
}

TEST_CASE("clipping refuses a parameter that is listed twice, in its own name") {
  nn::Linear a(3, 2), b(3, 2);
  sum(add(a(ones({2, 3})), b(ones({2, 3})))).backward();
  const std::vector<float> before = a.weight.grad().to_vector<float>();
  const std::vector<nn::Parameter> twice = {a.weight, b.weight, a.weight};
  CHECK(message_of<ValueError>([&] {
          nn::clip_grad_norm_(twice, 0.1);
        }).starts_with("clip_grad_norm_: a parameter of shape (2, 3) is listed twice"));
  CHECK(message_of<ValueError>([&] {
          nn::clip_grads_with_norm_(twice, 0.1, Tensor::scalar(1.0));
        }).starts_with("clip_grads_with_norm_: a parameter of shape (2, 3) is listed twice"));
  CHECK(a.weight.grad().to_vector<float>() == before);
  CHECK_NOTHROW(nn::clip_grad_norm_(std::vector<nn::Parameter>{a.weight, b.weight}, 0.1));
}

TEST_CASE("parameters: an empty one says so, whatever it is asked") {
  all_throw<StateError>(parameter_calls({}), "empty");
  nn::Linear linear(2, 2, {Bias::no});
  all_throw<StateError>(value_calls(linear.bias), "empty");
  CHECK_FALSE(linear.bias.defined());
  STATIC_REQUIRE_FALSE(
      std::is_constructible_v<bool, const nn::Param&>);  // of values, or of whether it is there?
  CHECK_FALSE(linear.bias.tensor().defined());
  CHECK_FALSE(linear.bias.object().defined());
  CHECK(linear.bias.object() == Parameter{});
  CHECK(linear.bias.object().id() == nullptr);
  CHECK_THROWS_AS(Parameter(Tensor{}), StateError);
  CHECK_THROWS_AS(Param(Tensor{}), StateError);
  CHECK_THROWS_AS(linear.weight.set_data({}), StateError);
  const Parameter list[] = {Parameter{}};
  CHECK_THROWS_AS(clip_grad_norm_(list, 1), StateError);
  linear.bias = Parameter(zeros({2}));
  CHECK(linear.bias.shape() == Shape{2});
}

TEST_CASE("parameters: a member that was moved from throws until it is given another") {
  Param p(ones({2}));
  const Param kept = std::move(p);
  Calls calls = value_calls(p);
  calls["tensor"] = [&] { p.tensor(); };
  calls["object"] = [&] { p.object(); };
  calls["conversion"] = [&] { add(p, 1.0); };
  all_throw<StateError>(calls, "moved from");
  CHECK_FALSE(p.defined());
  p = Parameter(zeros({3}));
  CHECK(p.shape() == Shape{3});
  Param again(ones({4}));
  const Param taken = std::move(again);
  again = Param(ones({5}));
  CHECK(again.shape() == Shape{5});
}

TEST_CASE("modules: one that was moved from throws whatever it is asked") {
  check_moved_from(nn::Linear(2, 2));
  check_moved_from(nn::Linear(2, 2, {Bias::no}));
  check_moved_from(nn::Conv2d(1, 1, 1));
  check_moved_from(nn::ConvTranspose2d(1, 1, 1));
  check_moved_from(nn::ConvTranspose1d(1, 1, 1));
  check_moved_from(nn::Upsample({.scale = 2}));
  check_moved_from(nn::Embedding(2, 2));
  check_moved_from(nn::LayerNorm(2));
  check_moved_from(nn::RmsNorm(2));
  check_moved_from(BatchNorm1d(2));
  check_moved_from(BatchNorm2d(2));
  check_moved_from(nn::Dropout(0.5));
  check_moved_from(nn::Gelu());
  check_moved_from(nn::Relu());
  check_moved_from(Sequential(nn::Linear(2, 2)));
  check_moved_from(ModuleList<nn::Linear>());
  check_moved_from(MultiheadAttention(4, 2));
  check_moved_from(TransformerEncoderLayer(small_transformer()));
  check_moved_from(TransformerDecoderLayer(small_transformer()));
  check_moved_from(TransformerEncoder(small_transformer()));
  check_moved_from(TransformerDecoder(small_transformer()));
  check_moved_from(Transformer(small_transformer()));
  const GptOptions gpt{.layers = 1, .heads = 1, .width = 2, .context = 2, .vocab = 2};
  check_moved_from(GptBlock(gpt));
  check_moved_from(Gpt(gpt));
}

TEST_CASE("modules: forward of one that was moved from throws, also without its call") {
  const auto moved = [](auto module) {
    auto kept = std::move(module);
    return std::pair(std::move(kept), std::move(module));
  };
  const Tensor x = ones({2, 2}), image = ones({1, 1, 2, 2}), steps = ones({1, 2, 4});
  const Tensor tokens = zeros({1, 2}, {i64});
  const GptOptions gpt{.layers = 1, .heads = 1, .width = 2, .context = 2, .vocab = 2};
  KeyValueCache cache;
  all_throw<StateError>(
      {{"Linear", [&] { moved(nn::Linear(2, 2)).second.forward(x); }},
       {"Conv2d", [&] { moved(nn::Conv2d(1, 1, 1)).second.forward(image); }},
       {"Embedding", [&] { moved(nn::Embedding(2, 2)).second.forward(tokens); }},
       {"LayerNorm", [&] { moved(nn::LayerNorm(2)).second.forward(x); }},
       {"RmsNorm", [&] { moved(nn::RmsNorm(2)).second.forward(x); }},
       {"BatchNorm1d", [&] { moved(BatchNorm1d(2)).second.forward(x); }},
       {"Dropout", [&] { moved(nn::Dropout(0.5)).second.forward(x); }},
       {"Sequential", [&] { moved(Sequential(nn::Relu())).second.forward(x); }},
       {"MultiheadAttention", [&] { moved(MultiheadAttention(4, 2)).second.forward(steps, steps, steps); }},
       {"Transformer", [&] { moved(Transformer(small_transformer())).second.forward(steps, steps); }},
       {"Gpt", [&] { moved(Gpt(gpt)).second.forward(tokens); }},
       {"Gpt with a cache", [&] { moved(Gpt(gpt)).second.forward(tokens, cache); }},
       {"Linear's call", [&] { moved(nn::Linear(2, 2)).second(x); }},
       {"Relu's call", [&] { moved(nn::Relu()).second(x); }}},
      "moved from");
}

TEST_CASE("modules: a container that was moved from throws; one that another is moved into lives again") {
  Sequential net{nn::Linear(2, 2)};
  Sequential kept = std::move(net);
  all_throw<StateError>(
      {{"append", [&] { net.append(nn::Relu()); }}, {"size", [&] { net.size(); }}, {"[]", [&] { net[0]; }}},
      "Sequential");
  ModuleList<nn::Linear> list;
  list.emplace_back(2, 2);
  const ModuleList<nn::Linear> kept_list = std::move(list);
  all_throw<StateError>({{"emplace_back", [&] { list.emplace_back(2, 2); }},
                         {"size", [&] { list.size(); }},
                         {"[]", [&] { list[0]; }},
                         {"const []", [&] { std::as_const(list)[0]; }},
                         {"begin", [&] { list.begin(); }},
                         {"end", [&] { list.end(); }},
                         {"const begin", [&] { std::as_const(list).begin(); }},
                         {"const end", [&] { std::as_const(list).end(); }}},
                        "ModuleList");
  CHECK(one_line_about(message_of<ValueError>([&] { kept[1]; }), "no layer 1"));
  CHECK(one_line_about(message_of<ValueError>([&] { kept_list[1]; }), "no layer 1"));
  net = std::move(kept);
  CHECK(net.size() == 1);
  CHECK(net(ones({1, 2})).shape() == Shape{1, 2});
  Holder holder;
  const nn::Linear stolen = std::move(holder.fc);
  CHECK(one_line_about(message_of<StateError>([&] { holder.parameters(); }), "Linear"));
  CHECK(one_line_about(message_of<StateError>([&] { holder(ones({1, 2})); }), "Linear"));
  holder.fc = nn::Linear(2, 3);
  CHECK(holder(ones({1, 2})).shape() == Shape{1, 3});
}

// A container takes what is given away, and never moves from a name that is used again.
static_assert(std::is_constructible_v<Sequential, nn::Linear>);
static_assert(std::is_constructible_v<Sequential, nn::Linear, nn::Relu>);
static_assert(!std::is_constructible_v<Sequential, nn::Linear&>);
static_assert(!std::is_constructible_v<Sequential, const nn::Linear&>);
static_assert(!std::is_constructible_v<Sequential, const nn::Linear>);
static_assert(!std::is_constructible_v<Sequential, nn::Relu, nn::Linear&>);
static_assert(!std::is_constructible_v<Sequential, int>);
template <class M, class L>
concept Takes = requires(M& list, L&& layer) { list.append(std::forward<L>(layer)); };
static_assert(Takes<Sequential, nn::Linear> && !Takes<Sequential, nn::Linear&> &&
              !Takes<Sequential, const nn::Linear&>);
template <class M, class L>
concept Holds = requires(M& list, L&& layer) { list.emplace_back(std::forward<L>(layer)); };
static_assert(Holds<ModuleList<nn::Linear>, nn::Linear> && !Holds<ModuleList<nn::Linear>, nn::Linear&> &&
              !Holds<ModuleList<nn::Linear>, const nn::Linear&>);

TEST_CASE("modules: a container of a clone leaves the original whole") {
  nn::Linear l(2, 2);
  Sequential net(l.clone(), std::move(l));
  CHECK(net.size() == 2);
  CHECK_THROWS_AS(l.parameters(), StateError);
}

// ---- meta ----

TEST_CASE("modules: what is on meta gets values from materialize alone") {
  const Device meta = Device::meta();
  const auto planned = [&] {
    Sequential net(nn::Linear(3, 2, {.tensor = {f32, meta}}), BatchNorm1d(2, {.tensor = {f32, meta}}));
    return net;
  };
  Sequential net = planned();
  const auto refuses = [&](const std::function<void()>& act, const std::string& name) {
    const std::string text = message_of<DeviceError>(act);
    INFO(text);
    CHECK(one_line_about(text, name));
    CHECK(one_line_about(text, "materialize()"));
    for (const Parameter& p : net.parameters()) CHECK(p.local().device() == meta);
    for (const NamedBuffer& b : net.named_buffers()) CHECK(b.tensor.device() == meta);
  };
  refuses([&] { net.to(Device::cpu()); }, "0.weight");
  refuses([&] { net.to(Device::cpu(1)); }, "0.weight");
  refuses([&] { net.load_state_dict(Sequential(nn::Linear(3, 2), BatchNorm1d(2)).state_dict()); },
          "0.weight");
  refuses([&] { net.parameters()[0].data().to_vector<float>(); }, "materialize()");
  const TempDirectory folder;
  CHECK_THROWS_AS(save_state(folder / "m.safetensors", net.state_dict()), DeviceError);
  CHECK_THROWS_AS(net.materialize(meta, [](const std::string&, const Tensor&) {}), DeviceError);
  CHECK_NOTHROW(net.to(meta));
  CHECK_NOTHROW(net.to(f64));
  CHECK_NOTHROW(net.to(f32));
  CHECK(net.clone().parameters()[0].local().device() == meta);

  for (const std::string last : {"0.weight", "1.weight", "1.running_var"}) {
    const auto gives_up = [&](const std::string& name, const Tensor& whole) {
      zero_(whole);
      if (name == last) fail<ValueError>("no values for {}", name);
    };
    CHECK_THROWS_AS(net.materialize(Device::cpu(), gives_up), ValueError);
    refuses([&] { net.to(Device::cpu()); }, "0.weight");
  }
  const Parameter weight = net.parameters()[0];
  std::vector<std::string> filled;
  const auto fill = [&](const std::string& name, const Tensor& whole) {
    filled.push_back(name);
    fill_(whole, static_cast<double>(filled.size()));
  };
  net.materialize(Device::cpu(), fill);
  CHECK(filled == std::vector<std::string>{"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean",
                                           "1.running_var", "1.num_batches_tracked"});
  CHECK(net.parameters()[0] == weight);
  CHECK(same_bits(weight.data(), full({2, 3}, 1)));
  const StateDict state = net.state_dict();
  for (std::size_t i = 0; i < state.size(); ++i)
    CHECK(
        same_bits(state[i].second, full(state[i].second.shape(), double(i + 1), {state[i].second.dtype()})));

  filled.clear();
  net.materialize(Device::cpu(), fill);  // what has values keeps them
  CHECK(filled.empty());
  Holder half;
  half.fc.bias.set_data(empty({2}, {f32, meta}));
  const Tensor kept = clone(half.fc.weight.data());
  CHECK(one_line_about(message_of<DeviceError>([&] { half.to(Device::cpu(1)); }), "fc.bias"));
  half.materialize(Device::cpu(), fill);
  CHECK(filled == std::vector<std::string>{"fc.bias"});
  CHECK(same_bits(half.fc.weight.data(), kept));

  // Ties are filled once, and a buffer alone counts too.
  nn::Linear a(2, 2, {Bias::no, {f32, meta}}), b(2, 2, {Bias::no, {f32, meta}});
  tie(a.weight, b.weight);
  Sequential tied(std::move(a), std::move(b));
  filled.clear();
  tied.materialize(Device::cpu(), fill);
  CHECK(filled == std::vector<std::string>{"0.weight"});
  BatchNorm1d norm(2);
  norm.running_var.set(empty({2}, {f32, meta}));
  CHECK(one_line_about(message_of<DeviceError>([&] { norm.to(Device::cpu(1)); }), "running_var"));
}

TEST_CASE("optimizers: state goes neither into meta nor out of it") {
  const Parameter real(ones({2})), planned(empty({2}, {f32, Device::meta()}));
  Adam adam({real}), shape({planned});
  Parameter(real).set_grad(ones({2}));
  Parameter(planned).set_grad(empty({2}, {f32, Device::meta()}));
  adam.step();
  shape.step();
  const StateDict values = adam.state_dict(), none = shape.state_dict();
  CHECK(one_line_about(message_of<DeviceError>([&] { shape.load_state_dict(values); }), "exp_avg"));
  CHECK(one_line_about(message_of<DeviceError>([&] { adam.load_state_dict(none); }), "exp_avg"));
}

// ---- visit ----

namespace {

/// Two members, under names that a test chooses.
struct Named final : Layer<Named> {
  Param a{ones({1})};
  nn::Linear b{1, 1};
  Buffer c{ones({1})};
  std::string first, second, third;
  Named(std::string first, std::string second, std::string third)
      : first(std::move(first)), second(std::move(second)), third(std::move(third)) {}
  void visit(auto&& on) {
    on(first, a);
    on(second, b);
    on(third, c);
  }
};

/// What a visit may forget.
enum class Forgets { nothing, param, buffer, child, empty_param, in_optional, in_list, below };

struct Forgetful final : Layer<Forgetful> {
  Forgets forgets;
  Param weight{ones({2, 3})}, none;
  Buffer count{ones({1})};
  nn::Linear fc{2, 2};
  std::optional<nn::Relu> maybe{std::in_place};
  ModuleList<nn::Linear> list;
  explicit Forgetful(Forgets forgets) : forgets(forgets) { list.emplace_back(1, 1); }
  void visit(auto&& on) {
    if (forgets != Forgets::param) on("weight", weight);
    if (forgets != Forgets::empty_param) on("none", none);
    if (forgets != Forgets::buffer) on("count", count);
    if (forgets != Forgets::child) on("fc", fc);
    if (forgets != Forgets::in_optional && maybe) on("maybe", *maybe);
    if (forgets != Forgets::in_list) on("list", list);
  }
};

struct Above final : Layer<Above> {
  Forgetful inner;
  explicit Above(Forgets forgets) : inner(forgets) {}
  void visit(auto&& on) { on("inner", inner); }
};

/// Looks at its members while it is copied.
struct Looks final : Layer<Looks> {
  nn::Linear fc{2, 2};
  std::size_t seen = 0;
  Looks() = default;
  Looks(const Looks& other) : Layer<Looks>(other), fc(other.fc), seen(parameters().size()) {}
  void visit(auto&& on) { on("fc", fc); }
};

/// Changes what it copies, and throws where that is not.
struct Meddles final : Layer<Meddles> {
  nn::Linear fc{2, 2};
  Meddles() = default;
  Meddles(const Meddles& other) : Layer<Meddles>(other), fc(other.fc) {
    for (const Parameter& p : parameters()) zero_(p.data());
    zero_(fc.weight.data());
  }
  void visit(auto&& on) { on("fc", fc); }
};

}  // namespace

TEST_CASE(
    "modules: a visit that gives two members one name, or no name, is refused before anybody sees them") {
  CHECK(Named("a", "b", "c").named_parameters().size() == 3);
  const auto refuses = [](Named module, const std::string& word) {
    std::size_t seen = 0;
    struct Count final : MemberVisitor {
      std::size_t& seen;
      explicit Count(std::size_t& seen) : seen(seen) {}
      void param(std::string_view, Param&) override { ++seen; }
    } count(seen);
    const std::string text = message_of<ValueError>([&] { module.visit_members(count); });
    INFO(text);
    CHECK(one_line_about(text, "Named"));
    CHECK(one_line_about(text, word));
    CHECK(seen == 0);
    CHECK_THROWS_AS(module.state_dict(), ValueError);
    CHECK_THROWS_AS(module.named_modules(), ValueError);
  };
  refuses(Named("twice", "twice", "c"), "'twice'");
  refuses(Named("twice", "b", "twice"), "'twice'");
  refuses(Named("a", "twice", "twice"), "'twice'");
  refuses(Named("", "b", "c"), "''");
  refuses(Named("a.b", "b", "c"), "'a.b'");
}

TEST_CASE("modules: a member that visit forgot is named") {
  CHECK(Forgetful(Forgets::nothing).parameters().size() == 5);
  CHECK(Above(Forgets::nothing).parameters().size() == 5);
  const std::map<Forgets, std::string> words{{Forgets::param, ": Param of shape (2, 3)"},
                                             {Forgets::buffer, ": Buffer"},
                                             {Forgets::child, ": Linear"},
                                             {Forgets::in_optional, ": Relu"},
                                             {Forgets::in_list, ": ModuleList"}};
  for (const auto& [forgets, word] : words)
    for (const bool above : {false, true}) {
      Forgetful own(forgets);
      Above outer(forgets);
      Module& module = above ? static_cast<Module&>(outer) : own;
      for (int repeat : {1, 2}) {
        INFO(word << repeat);
        const std::string text = message_of<StateError>([&] { module.parameters(); });
        INFO(text);
        CHECK(one_line_about(text, "Forgetful"));
        CHECK(one_line_about(text, word));
      }
    }
  CHECK_NOTHROW(Forgetful(Forgets::empty_param).parameters());  // nothing is lost
  Forgetful without(Forgets::nothing);
  without.maybe.reset();
  CHECK_NOTHROW(without.parameters());
  without.maybe.emplace();
  CHECK_NOTHROW(without.parameters());
}

TEST_CASE("modules: looking for forgotten members changes nothing and copies no values") {
  manual_seed(1);
  Gpt gpt({.layers = 1, .heads = 1, .width = 2, .context = 2, .vocab = 2});
  const Tensor before = clone(gpt.tok.weight.data());
  const Tensor next = rand({1});
  manual_seed(1);
  Gpt again({.layers = 1, .heads = 1, .width = 2, .context = 2, .vocab = 2});
  CHECK(same_bits(rand({1}), next));
  CHECK(again.tok.weight.object() == again.head.weight.object());
  CHECK(same_bits(again.tok.weight.data(), before));
  const Looks looks;
  const Meddles meddles;
  const Tensor values = clone(meddles.fc.weight.data());
  CHECK(meddles.parameters().size() == 2);
  CHECK(same_bits(meddles.fc.weight.data(), values));
  CHECK(looks.clone().seen == 2);
  CHECK(looks.parameters().size() == 2);
  CHECK_THROWS_AS(Looks(looks), StateError);
  const Looks copy = looks.clone();
  CHECK_FALSE(copy.fc.weight.object() == looks.fc.weight.object());
}

// ---- buffers ----

TEST_CASE("buffers: one that computes in another dtype is saved in its own") {
  BatchNorm1d norm(2);
  norm.running_mean.set(numbers({2}, f32));
  const Tensor values = clone(norm.running_mean.tensor());
  norm.running_mean.compute_in(bf16);
  CHECK(norm.running_mean.tensor().dtype() == bf16);
  CHECK(norm.running_mean.own_dtype() == f32);
  const auto saved = [&](BatchNorm1d& m) {
    for (const auto& [name, t] : m.state_dict())
      if (name == "running_mean") return t;
    return Tensor{};
  };
  CHECK(same_bits(saved(norm), values));
  CHECK(norm.clone().running_mean.own_dtype() == f32);
  BatchNorm1d copy = norm.clone();
  CHECK(same_bits(saved(copy), values));
  CHECK(same_bits(copy.running_mean.tensor(), norm.running_mean.tensor()));
  norm.to(Device::cpu(1));
  CHECK(norm.running_mean.own_dtype() == f32);
  norm.to(Device::cpu());
  norm.running_mean.compute_in(f16);
  CHECK(norm.running_mean.own_dtype() == f32);
  norm.load_state_dict(norm.state_dict());
  CHECK(norm.running_mean.tensor().dtype() == f16);
  CHECK(same_bits(saved(norm), values));
  CHECK(same_bits(norm.running_mean.tensor(), to(values, f16)));
  norm.running_mean.compute_in(f32);
  norm.running_mean.set(zeros({2}, {f64}));
  CHECK(norm.running_mean.own_dtype() == f64);
  norm.running_mean.compute_in(f32);
  norm.to(bf16);
  CHECK(norm.running_mean.own_dtype() == bf16);
}

TEST_CASE("buffers: a cast keeps the values, until the tensor that computes is written or replaced") {
  for (const DType own : {bf16, f16, f32, f64})
    for (const DType used : {bf16, f16, f32, f64}) {
      CAPTURE(name_of(own), name_of(used));
      const Tensor values = full({3}, 1.001, {own}), other = full({3}, 2.003, {used});
      nn::Buffer buffer(clone(values));
      const auto cast_and_back = [&](const std::function<void()>& between, const Tensor& expected) {
        buffer.set(clone(values));
        buffer.compute_in(used);
        between();
        CHECK(same_bits(buffer.values(), expected));
        buffer.compute_in(own);
        CHECK(same_bits(buffer.tensor(), expected));
        CHECK(same_bits(buffer.values(), expected));
      };
      cast_and_back([] {}, values);
      cast_and_back([&] { buffer.compute_in(f32); }, values);
      cast_and_back([&] { copy_(buffer.tensor(), other); }, to(other, own));
      cast_and_back([&] { buffer.set(clone(other)); }, to(other, own));
      cast_and_back([&] { buffer.load(full({3}, 1.002, {f64})); }, full({3}, 1.002, {own}));
      cast_and_back([&] { buffer.change([](const Tensor& t) { return to(t, Device::cpu(1)); }); },
                    to(values, Device::cpu(1)));
      buffer.compute_in(used);
      CHECK_THROWS_AS(buffer.load(ones({4})), ShapeError);
    }
}
