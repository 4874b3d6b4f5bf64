#include "tools/predict.h"

#include <fmt/format.h>

#include "nn/perplexity.h"
#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::tools {

std::string predict(const PredictOptions& o, FileSystem& files) {
  const PretrainedModel from = read_pretrained(o.model, files);
  nn::Perplexity all;
  for (const std::string& file : o.data) {
    check<ValueError>(!files.is_directory(file), "--data '{}': is a folder; name its files",
                      shown(file, 300));
    const std::vector<std::int64_t> tokens = from.tokenizer.encode(files.read(file));
    all += from.with([&](const auto& model) {
      return nn::perplexity(model, tokens, {.context = o.context, .stride = o.stride});
    });
  }
  check<ValueError>(all.tokens > 0,
                    "--data: has no token behind another one, so there is nothing to predict");
  return fmt::format("tokens={} loss={:.6f} perplexity={:.6f}\n", all.tokens, all.per_token(),
                     all.value());
}

}  // namespace sherd::tools
