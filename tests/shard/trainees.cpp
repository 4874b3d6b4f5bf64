#include "tests/shard/trainees.h"

#include <fmt/format.h>

#include <cmath>

namespace sherd::test {

Trainee::~Trainee() = default;

namespace {

/// The first place where `near` does not hold.
template <class T, class F>
std::string difference(const std::string& what, const std::vector<T>& a, const std::vector<T>& b, F&& near) {
  if (a.size() != b.size()) return fmt::format("{}: {} against {} of them", what, a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!near(a[i], b[i])) return fmt::format("{} {}: {} against {}", what, i, a[i], b[i]);
  return {};
}

template <class F>
std::string difference_of_values(const Record& a, const Record& b, F&& near) {
  if (a.values.size() != b.values.size())
    return fmt::format("{} against {} parameters", a.values.size(), b.values.size());
  for (std::size_t p = 0; p < a.values.size(); ++p) {
    const auto& [name, values] = a.values[p];
    const auto& [other_name, others] = b.values[p];
    if (name != other_name) return fmt::format("'{}' against '{}'", name, other_name);
    const std::string found = difference(name, values, others, near);
    if (!found.empty()) return found;
  }
  return {};
}

std::string first_of(std::initializer_list<std::string> differences) {
  for (const std::string& d : differences)
    if (!d.empty()) return d;
  return {};
}

std::vector<float> mean_losses(const std::vector<Record>& records) {
  std::vector<float> means = records[0].losses;
  for (std::size_t step = 0; step < means.size(); ++step) {
    double sum = 0;
    for (const Record& r : records) sum += r.losses.at(step);
    means[step] = static_cast<float>(sum / static_cast<double>(records.size()));
  }
  return means;
}

}  // namespace

std::string difference(const Record& a, const Record& b) {
  const auto equal = [](auto x, auto y) { return x == y; };
  return first_of({difference("loss", a.losses, b.losses, equal), difference("norm", a.norms, b.norms, equal),
                   difference_of_values(a, b, equal)});
}

std::string difference_beyond_tolerance(const std::vector<Record>& a, const std::vector<Record>& b) {
  const auto near = [](double x, double y) { return std::abs(x - y) <= 1e-5 + 1.3e-6 * std::abs(y); };
  std::string found = difference("loss", mean_losses(a), mean_losses(b), near);
  for (std::size_t rank = 0; rank < a.size() && found.empty(); ++rank)
    found = first_of({difference("norm", a[rank].norms, b[rank].norms, near),
                      difference_of_values(a[rank], b[rank], near)});
  return found;
}

Tensor Replica::loss(int step) {
  if (!mixed_.param_dtype) return Trainee::loss(step);
  computing_ = std::make_unique<Net>(net.clone());
  computing_->to(*mixed_.param_dtype);
  Batch batch = batch_of(world_.rank(), step, net.width);
  batch.x = to(batch.x, *mixed_.param_dtype);
  return loss_of(*computing_, batch);
}

void Replica::backward(const Tensor& loss) {
  loss.backward();
  const std::vector<nn::Parameter> computed = (computing_ ? *computing_ : net).parameters();
  std::vector<nn::Parameter> kept = net.parameters();
  for (std::size_t p = 0; p < kept.size(); ++p) {
    const Tensor grad = computed[p].grad();
    if (!grad.defined()) continue;
    const Tensor average = clone(to(grad, mixed_.reduce_dtype.value_or(grad.dtype())));
    world_.group().all_reduce(average, ReduceOp::average());
    kept[p].set_grad(to(average, kept[p].local().dtype()));
  }
}

Tensor WholeBatch::loss(int step) {
  std::vector<Tensor> x, target;
  for (int rank = 0; rank < world_.size(); ++rank) {
    const Batch part = batch_of(rank, step, net.width);
    x.push_back(part.x);
    target.push_back(part.target);
  }
  return loss_of(net, {cat(x), cat(target)});
}

Record train(Trainee& trainee, int steps) {
  Record record;
  nn::Adam adam(trainee.net.parameters(), {.lr = 1e-2});
  for (int step = 0; step < steps; ++step) {
    adam.zero_grad();
    const Tensor loss = trainee.loss(step);
    record.losses.push_back(loss.item<float>());
    trainee.backward(loss);
    record.norms.push_back(trainee.clip(0.25).item());
    adam.step();
  }
  for (const auto& [name, tensor] : trainee.whole())
    record.values.emplace_back(name, to(tensor, DType::f32).to_vector<float>());
  return record;
}

}  // namespace sherd::test
