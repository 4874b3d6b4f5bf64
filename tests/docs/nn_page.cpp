#include "tests/docs/nn_page.h"

#include <sstream>
#include <string_view>

#include "tests/docs/header.h"

namespace sherd::test {

namespace {

/// In the order of the page.
constexpr std::string_view headers[] = {"layers",
                                        "activations",
                                        "image_layers",
                                        "recurrent",
                                        "multihead_attention",
                                        "sync_batch_norm",
                                        "transformer",
                                        "key_values",
                                        "gpt",
                                        "llama",
                                        "documents",
                                        "optimizer",
                                        "schedules",
                                        "grad_scaler",
                                        "ema",
                                        "init",
                                        "batch_sampler",
                                        "data_loader",
                                        "packing",
                                        "generate",
                                        "perplexity",
                                        "pretrained",
                                        "lora",
                                        "low_rank",
                                        "tokenizer",
                                        "training_text",
                                        "text_stream",
                                        "hooks",
                                        "functional_call"};

}  // namespace

std::string nn_page(const std::filesystem::path& root) {
  std::ostringstream out;
  out << R"(# Layers, optimizers, schedules

Made of the headers of `nn/` by `tests/docs/print_ops`; a test compares. Do not edit it.

All of it is in the namespace `sherd::nn` and comes with `#include <sherd.h>`. An options struct is shown as one
writes it, `{.a = 1, .b = 2}`, with its members in the order that C++ wants and with their defaults; leave out what
shall keep them. What every layer has (names, states, moving, cloning, hooks) is in `nn/module.h`, what
every optimizer has under `Optimizer`. A layer is called, `layer(x)`, which runs its `forward`.
)";
  for (const std::string_view name : headers) {
    const std::string file = "nn/" + std::string(name) + ".h";
    out << "\n## " << file << "\n\n" << head_of(root / file) << "\n";
    std::string functions;
    for (const Declaration& d : declarations_of(root / file)) {
      using Kind = Declaration::Kind;
      if (d.kind == Kind::type || d.kind == Kind::enumeration) out << entry(d, "###");
      if (d.kind == Kind::function && d.text.find("SHERD_API ") != std::string::npos) functions += row(d);
    }
    if (!functions.empty()) out << "\n### Functions\n\n| function | |\n|---|---|\n" << functions;
  }
  return std::move(out).str();
}

}  // namespace sherd::test
