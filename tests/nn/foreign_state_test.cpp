// Files as other programs leave them: what can be read is read, and what cannot is named with the way out.
#include <cstring>
#include <nlohmann/json.hpp>

#include "nn/pretrained.h"
#include "nn/state_file.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/logged.h"
#include "tests/runtime/harness.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using Path = FileSystem::Path;

namespace {

void write_text(const Path& file, std::string_view text) {
  if (posix_file_system().exists(file)) posix_file_system().remove(file);
  posix_file_system().create(file)->write(text);
}

/// A file with this header.
void write_header(const Path& path, const std::string& header, std::string_view data) {
  const std::uint64_t length = header.size();
  std::string text(sizeof length, '\0');
  std::memcpy(text.data(), &length, sizeof length);
  write_text(path, text + header + std::string(data));
}

struct Tied final : Layer<Tied> {
  Linear in{3, 3, {.bias = Bias::no}}, out{3, 3, {.bias = Bias::no}};
  Tied() { tie(in.weight, out.weight); }
  Tensor forward(const Tensor& x) const { return out(in(x)); }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
  }
};

struct Outer final : Layer<Outer> {
  Linear inner{2, 2};
  Tensor forward(const Tensor& x) const { return inner(x); }
  void visit(auto&& on) { on("inner", inner); }
};

struct HasOdd final : Layer<HasOdd> {
  Buffer odd{ones({2})};
  Tensor forward(const Tensor& x) const { return x; }
  void visit(auto&& on) { on("odd", odd); }
};

Gpt small_gpt(bool tied = true) {
  return Gpt({.layers = 2, .heads = 2, .width = 8, .context = 8, .vocab = 11, .tie_word_embeddings = tied});
}
Llama small_llama(bool tied = true) {
  return Llama({.vocab_size = 11,
                .hidden_size = 8,
                .intermediate_size = 12,
                .num_hidden_layers = 2,
                .num_attention_heads = 2,
                .tie_word_embeddings = tied});
}

void edit(const Path& file, const std::function<void(json&)>& change) {
  json object = json::parse(posix_file_system().read(file));
  change(object);
  write_text(file, object.dump());
}

/// Calls `body` with a model of each kind, what loads it, and what embedding and head are called.
void each_kind(auto&& body) {
  body(
      small_gpt(), [](const Path& p) { return load_gpt(p); }, "transformer.wte.weight",
      [](auto& m) -> Embedding& { return m.tok; });
  body(
      small_llama(), [](const Path& p) { return load_llama(p); }, "model.embed_tokens.weight",
      [](auto& m) -> Embedding& { return m.model.embed_tokens; });
}

}  // namespace

TEST_CASE("foreign states: a tied weight comes under any of its names, or under all with the same values") {
  const Tensor w = rand({3, 3});
  for (const StateDict& state : {StateDict{{"in.weight", w}}, StateDict{{"out.weight", w}},
                                 StateDict{{"in.weight", w}, {"out.weight", clone(w)}},
                                 StateDict{{"out.weight", to(w, f64)}, {"in.weight", w}}}) {
    Tied net;
    CHECK(net.load_state_dict(state).missing.empty());
    CHECK(same_bits(net.in.weight.local().detach(), w));
  }
  Tied net;
  const Tensor before = clone(net.in.weight.local().detach());
  for (const Strict strict : {Strict::yes, Strict::no})
    CHECK_THAT(message_of<ValueError>(
                   [&] { net.load_state_dict({{"in.weight", w}, {"out.weight", w + 1}}, strict); }),
               ContainsSubstring("'in.weight'") && ContainsSubstring("'out.weight'") &&
                   ContainsSubstring("one parameter"));
  CHECK(same_bits(net.in.weight.local().detach(), before));
}

TEST_CASE(
    "foreign states: where names have a prefix more or less, the error says what is there and what to do") {
  Sequential net{Linear(2, 2), Linear(2, 2)};
  for (const char* prefix :
       {"module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.", "model.", "a.b."}) {
    INFO(prefix);
    StateDict wrapped;
    for (const auto& [name, t] : net.state_dict()) wrapped.emplace_back(prefix + name, t);
    const std::string message = message_of<ValueError>([&] { net.load_state_dict(wrapped); });
    CHECK_THAT(message, ContainsSubstring("it has '" + std::string(prefix)) &&
                            ContainsSubstring("take '" + std::string(prefix) + "' off the front") &&
                            ContainsSubstring(fmt::format("name.erase(0, {})", std::strlen(prefix))));
    for (auto& [name, t] : wrapped) name.erase(0, std::strlen(prefix));
    CHECK_NOTHROW(net.load_state_dict(wrapped));
  }
  for (const char* wrapper :
       {"module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."}) {
    StateDict inside;
    for (const auto& [name, t] : net.state_dict())
      inside.emplace_back(name.substr(0, 2) + wrapper + name.substr(2), t);
    CHECK_THAT(message_of<ValueError>([&] { net.load_state_dict(inside); }),
               ContainsSubstring(std::string(".") + wrapper) && ContainsSubstring("wrapper of PyTorch"));
  }
  Linear bare(2, 2);
  Outer outer;
  CHECK_THAT(message_of<ValueError>([&] { outer.load_state_dict(bare.state_dict()); }),
             ContainsSubstring("put 'inner.' in front"));
}

TEST_CASE("foreign states: a tensor of a dtype that is not here leaves the others readable") {
  const TempDirectory folder;
  for (const char* dtype : {"I8", "I16", "U16", "U32", "U64", "F8_E4M3", "F8_E5M2", "F4", "COMPLEX"}) {
    INFO(dtype);
    const Logged log;
    write_header(folder / "x",
                 fmt::format(R"({{"odd":{{"dtype":"{}","shape":[2],"data_offsets":[0,16]}},)"
                             R"("w":{{"dtype":"U8","shape":[2],"data_offsets":[16,18]}}}})",
                             dtype),
                 std::string(18, '\1'));
    const StateDict state = load_state(folder / "x");
    CHECK(state.size() == 1);
    CHECK(state.at("w").to_vector<std::uint8_t>() == std::vector<std::uint8_t>{1, 1});
    CHECK_THAT(message_of<ValueError>([&] { static_cast<void>(state.at("odd")); }),
               ContainsSubstring("'odd'") && ContainsSubstring(dtype));
    CHECK_THAT(log.text(), ContainsSubstring("'odd'") && ContainsSubstring(dtype));
    HasOdd net;
    CHECK_THAT(message_of<ValueError>([&] { net.load_state_dict(state); }),
               ContainsSubstring("lacks 'odd'") && ContainsSubstring(dtype));
    CHECK(net.load_state_dict(state, Strict::no).missing == std::vector<std::string>{"odd"});
  }
}

TEST_CASE("foreign states: metadata may be null") {
  const TempDirectory folder;
  write_header(folder / "x", R"({"__metadata__":null,"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
               "\5");
  CHECK(load_state(folder / "x").at("w").to_vector<std::uint8_t>() == std::vector<std::uint8_t>{5});
  for (const char* bad : {R"({"w":null})", R"({"__metadata__":{"a":null}})", R"({"__metadata__":3})"}) {
    write_header(folder / "x", bad, "");
    CHECK_THROWS_AS(load_state(folder / "x"), ValueError);
  }
}

TEST_CASE("foreign states: a file that is something else is named as that, wherever it stands") {
  using namespace std::string_literals;
  const TempDirectory folder;
  const std::pair<std::string, const char*> kinds[] = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"},
      {"PK\x03\x04 and the rest of a zip archive", "torch.save"},
      {"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 \x6aP"s, "torch.save"},
      {"GGUF\x03\0\0\0 and more"s, "GGUF"},
      {"\x89HDF\r\n\x1a\n and more", "HDF5"},
      {"<!DOCTYPE html><html>not found</html>", "web page"}};
  for (const auto& [text, said] : kinds) {
    INFO(said);
    write_text(folder / "x.safetensors", text);
    CHECK_THAT(message_of<ValueError>([&] { load_state(folder / "x.safetensors"); }),
               ContainsSubstring("x.safetensors") && ContainsSubstring(said));
    each_kind([&](auto model, auto load, const char*, auto) {
      for (const char* file : {"config.json", "model.safetensors"}) {
        const TempDirectory root;
        save_pretrained(model, root / "m");
        write_text(root / "m" / file, text);
        CHECK_THAT(message_of<ValueError>([&] { load(root / "m"); }),
                   ContainsSubstring(file) && ContainsSubstring(said));
      }
    });
  }
}

TEST_CASE("foreign states: a trained head beside tie_word_embeddings is kept, and the log says so") {
  each_kind([&](auto model, auto load, const char* embedding, auto) {
    const TempDirectory root;
    save_pretrained(model, root / "m");
    StateDict state = load_state(root / "m" / "model.safetensors");
    for (const double more : {0.0, 1.0}) {
      StateDict both = state;
      both.emplace_back("lm_head.weight", state.at(embedding) + more);
      posix_file_system().remove(root / "m" / "model.safetensors");
      save_state(root / "m" / "model.safetensors", both);
      const Logged log;
      const auto loaded = load(root / "m");
      CHECK(loaded.options.tie_word_embeddings == (more == 0));
      CHECK(loaded.state_dict().size() == model.state_dict().size() + (more == 0 ? 0 : 1));
      CHECK((log.text().find("tie_word_embeddings") != std::string::npos) == (more != 0));
      if (more == 0) continue;
      const std::string head = loaded.state_dict().contains("head.weight") ? "head.weight" : "lm_head.weight";
      CHECK(same_bits(loaded.state_dict().at(head), both.at("lm_head.weight")));
      // A model that is tied already cannot have both.
      CHECK_THAT(message_of<ValueError>([&] { load_pretrained(model, root / "m"); }),
                 ContainsSubstring("'lm_head.weight'") && ContainsSubstring("tie_word_embeddings = false") &&
                     ContainsSubstring("nothing was changed"));
      const LoadReport report = load_pretrained(model, root / "m", {Strict::no});
      CHECK(report.damaged.size() == 1);
      save_pretrained(loaded, root / "again");
      CHECK_FALSE(load(root / "again").options.tie_word_embeddings);
    }
  });
}

TEST_CASE("foreign states: other words of the Hub's configs mean what GPT-2's own do") {
  const std::pair<const char*, const char*> words[] = {{"n_embd", "hidden_size"},
                                                       {"n_positions", "max_position_embeddings"},
                                                       {"n_head", "num_attention_heads"},
                                                       {"n_layer", "num_hidden_layers"}};
  const TempDirectory root;
  save_pretrained(small_gpt(), root / "m");
  const Path config = root / "m" / "config.json";
  const std::string text = posix_file_system().read(config);
  for (const auto& [own, alias] : words) {
    INFO(alias);
    write_text(config, text);
    edit(config, [&](json& o) {
      o[alias] = o[own];
      o.erase(own);
    });
    CHECK_NOTHROW(load_gpt(root / "m"));
    save_pretrained(load_gpt(root / "m"), root / "n", {.config_from = root / "m"});
    CHECK_NOTHROW(load_gpt(root / "n"));
    edit(config, [&](json& o) { o[own] = o[alias]; });
    CHECK_NOTHROW(load_gpt(root / "m"));
    edit(config, [&](json& o) { o[own] = o[alias].get<int>() * 2; });
    CHECK_THAT(message_of<ValueError>([&] { gpt_options(root / "m"); }),
               ContainsSubstring(own) && ContainsSubstring(alias));
  }
}

TEST_CASE("foreign states: a vocabulary grown by hand is saved as a folder that loads") {
  each_kind([&](auto model, auto load, const char* embedding, auto table) {
    const TempDirectory root;
    auto grown = [&](std::int64_t rows) {
      Embedding larger(rows, 8);
      const NoGrad guard;
      copy_(narrow(larger.weight.local().detach(), 0, 0, 11), table(model).weight.local().detach());
      return larger;
    };
    const auto head = [](auto& m) -> Linear& {
      if constexpr (requires { m.lm_head; })
        return m.lm_head;
      else
        return m.head;
    };
    auto bigger = model.clone();
    table(bigger) = grown(14);
    head(bigger) = Linear(8, 14, {.bias = Bias::no});
    tie(table(bigger).weight, head(bigger).weight);
    save_pretrained(bigger, root / "tied");
    const auto again = load(root / "tied");
    CHECK(load_state(root / "tied" / "model.safetensors").at(embedding).shape() == Shape{14, 8});
    CHECK(again.options.tie_word_embeddings);
    for (const auto& [name, t] : bigger.state_dict()) CHECK(same_bits(again.state_dict().at(name), t));

    auto untied = model.clone();
    table(untied) = grown(14);  // the head keeps 11 rows
    CHECK_THAT(message_of<StateError>([&] { save_pretrained(untied, root / "untied"); }),
               ContainsSubstring("'lm_head.weight'") && ContainsSubstring("(11, 8)") &&
                   ContainsSubstring("(14, 8)"));
    CHECK_FALSE(std::filesystem::exists(root / "untied"));
  });
}
