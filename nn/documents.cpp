#include "nn/documents.h"

#include <numeric>

#include "runtime/error.h"
#include "runtime/ops.h"

namespace sherd::nn {

void check_documents(std::string_view module, const Documents& documents, std::int64_t tokens,
                     std::int64_t most) {
  std::int64_t all = 0;
  for (const std::int64_t length : documents.lengths) {
    check<ShapeError>(length >= 1 && length <= most,
                      "{}: a document of {} tokens; each has from 1 to {}, the positions of the model",
                      module, length, most);
    all += length;
  }
  check<ShapeError>(all == tokens, "{}: documents of {} tokens in all, and there are {} tokens", module, all,
                    tokens);
}

Tensor positions_of(const Documents& documents, const Shape& shape, Device device) {
  std::vector<std::int64_t> positions;
  positions.reserve(static_cast<std::size_t>(shape.numel()));
  for (const std::int64_t length : documents.lengths)
    for (std::int64_t i = 0; i < length; ++i) positions.push_back(i);
  return to(Tensor::from(positions, shape, Device::cpu()), device);
}

Tensor by_document(const Documents& documents, const std::vector<Tensor>& inputs,
                   const std::function<Tensor(const std::vector<Tensor>&)>& attend) {
  const std::vector<std::int64_t>& lengths = documents.lengths;
  if (lengths.empty()) return attend(inputs);  // of no tokens
  std::vector<Tensor> results;
  std::int64_t start = 0;
  for (std::size_t first = 0, end = 0; first < lengths.size(); first = end) {
    const std::int64_t length = lengths[first];
    while (end < lengths.size() && lengths[end] == length) ++end;
    const auto count = static_cast<std::int64_t>(end - first);
    std::vector<Tensor> parts;
    for (const Tensor& x : inputs) {
      Shape shape = x.shape();
      shape[0] = count, shape[1] = length;
      parts.push_back(reshape(narrow(x, 1, start, count * length), shape));
    }
    const Tensor y = attend(parts);
    results.push_back(reshape(y, {1, count * length, y.size(2)}));
    start += count * length;
  }
  return results.size() == 1 ? results[0] : cat(results, 1);
}

}  // namespace sherd::nn
