#include "tools/forecast.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <fstream>

#include "runtime/error.h"

namespace sherd::tools {
namespace {

/// A parameter costs this much beside its values: handle, shape, storage.
constexpr double bytes_a_tensor = 256;

/// Elements, and tensors, of all parameters. All blocks are alike, so one is made, on meta.
struct Count {
  double values = 0, tensors = 0;
  void add(const nn::NamedParameter& p, double times) {
    values += times * static_cast<double>(p.parameter.shape().numel());
    tensors += times;
  }
};

Count parameters_of(const TrainOptions& o) {
  nn::GptOptions sizes = model_options(o);
  sizes.layers = 1;
  sizes.tensor.device = Device::meta();
  const nn::Gpt model(sizes);
  Count count;
  for (const nn::NamedParameter& p : model.named_parameters())
    count.add(p, p.name.starts_with("blocks.") ? static_cast<double>(o.layers) : 1);
  return count;
}

/// Bytes of f32 parameters, or of one of what lies beside them.
double bytes_of(const Count& count) { return 4 * count.values + bytes_a_tensor * count.tensors; }

/// What backward needs of a position: 16 rows of each block (both norms and their inputs, queries, keys and
/// values, the attention's result, 4 + 4 of the inner layer) and the logits.
double bytes_a_position(const TrainOptions& o) {
  const auto width = static_cast<double>(o.width), layers = static_cast<double>(o.layers);
  return static_cast<double>(size_of(dtype_named(o.param_dtype))) * (16 * width * layers + 256);
}

std::string size_text(double bytes) { return fmt::format("{:.1f} GB", bytes / 1e9); }

}  // namespace

Forecast training_needs(const TrainOptions& o) {
  const double one = bytes_of(parameters_of(o));
  const auto ranks = static_cast<double>(std::max<std::int64_t>(o.ranks, 1));
  const bool replicas = o.strategy == "no_shard" || o.strategy == "data_parallel";
  const bool whole_gradients = replicas || o.strategy == "zero1";
  const auto batch = static_cast<double>(o.batch);
  const double at_once =
      o.micro_batch > 0 ? std::min(static_cast<double>(o.micro_batch) * ranks, batch) : batch;
  return {.parameters = one * (replicas ? ranks : 1),
          .gradients = one * (whole_gradients ? ranks : 1),
          .moments = 2 * one * (replicas ? ranks : 1),
          .activations = 8 * batch + at_once * static_cast<double>(o.context) * bytes_a_position(o)};
}

Forecast sampling_needs(const TrainOptions& o) { return {.parameters = bytes_of(parameters_of(o))}; }

double memory_of_machine() {
  struct sysinfo info{};
  ::sysinfo(&info);
  const double machine = static_cast<double>(info.totalram + info.totalswap) * info.mem_unit;
  double container = machine;
  std::ifstream("/sys/fs/cgroup/memory.max") >> container;  // "max", or no such file: the machine's
  return container > 0 ? std::min(machine, container) : machine;
}

void check_fits(const Forecast& needs, const TrainOptions& o, double memory, double share) {
  check<ValueError>(
      needs.total() * share <= memory,
      "--layers {} --width {} --context {} --batch {}: takes at least {} here (parameters {}, gradients {}, "
      "moments {}, activations {}), this machine has {}; take smaller sizes, more machines or a "
      "--micro-batch",
      o.layers, o.width, o.context, o.batch, size_text(needs.total() * share),
      size_text(needs.parameters * share), size_text(needs.gradients * share),
      size_text(needs.moments * share), size_text(needs.activations * share), size_text(memory));
}

}  // namespace sherd::tools
