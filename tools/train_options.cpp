#include "tools/train_options.h"

#include <nlohmann/json.hpp>

#include "runtime/error.h"

namespace sherd::tools {

using nlohmann::json;

void validate(const TrainOptions& o) {
  visit_settings(o, [](const Setting& s, const auto& value) {
    const auto v = static_cast<double>(value);
    check<ValueError>(v >= s.min && v <= s.max, "--{} {}: takes values from {} to {}; for example --{} {}",
                      s.name, value, s.min, s.max, s.name, s.example);
  });
  check<ValueError>(o.width % o.heads == 0, "--heads {}: does not divide --width {}", o.heads, o.width);
  check<ValueError>(o.micro_batch <= o.batch, "--micro-batch {}: is more than --batch {}", o.micro_batch,
                    o.batch);
  check<ValueError>(o.dropout < 1, "--dropout {}: would drop everything; take a probability below 1",
                    o.dropout);
  check<ValueError>(o.beta2 < 1, "--beta2 {}: must be below 1", o.beta2);
  check<ValueError>(o.lr > 0, "--lr {}: must be above 0", o.lr);
  check<ValueError>(o.min_lr <= o.lr, "--min-lr {}: is above --lr {}", o.min_lr, o.lr);
  check<ValueError>(o.threads >= 0, "--threads {}: takes a number from 1, or 0 for all cores", o.threads);
}

json to_json(const TrainOptions& options) {
  json settings = json::object();
  visit_settings(options, [&](const Setting& s, const auto& value) {
    if (s.on_resume != OnResume::free) settings[std::string(s.name)] = value;
  });
  return settings;
}

TrainOptions settings_from(const json& settings) {
  TrainOptions options;
  visit_settings(options, [&](const Setting& s, auto& value) {
    if (s.on_resume != OnResume::free) settings.at(std::string(s.name)).get_to(value);
  });
  return options;
}

nn::GptOptions model_options(const TrainOptions& o) {
  return {.layers = o.layers,
          .heads = o.heads,
          .width = o.width,
          .context = o.context,
          .vocab = 256,
          .dropout = o.dropout};
}

TrainOptions resumed(const TrainOptions& asked, const TrainOptions& saved, std::int64_t step,
                     std::vector<Change>& changes) {
  TrainOptions result = asked;
  const json before = to_json(saved);
  visit_settings(result, [&](const Setting& s, auto& value) {
    if (s.on_resume == OnResume::free) return;
    const json& old = before.at(std::string(s.name));
    if (!asked.given.contains(s.name)) old.get_to(value);
    if (json(value) == old) return;
    check<ValueError>(s.on_resume == OnResume::recorded,
                      "--{} {}: the run was started with {}; leave the flag out to go on, or start another "
                      "run without --resume",
                      s.name, value, old.dump());
    changes.push_back({step, std::string(s.name), old.dump(), json(value).dump()});
  });
  return result;
}

}  // namespace sherd::tools
