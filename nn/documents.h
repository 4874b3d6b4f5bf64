// Texts that lie one behind another in the tokens of a forward, and do not see each other.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/tensor.h"

namespace sherd::nn {

/// The lengths of texts that lie one behind another in tokens (B, T), row after row, and fill them: they add
/// up to B T. Each has positions from 0 on and sees itself alone, so that a forward gives what it gives for
/// each alone, to rounding, and computes nothing more. Equal lengths beside each other are computed at once.
/// None are of no tokens: (1, 0).
struct Documents {
  std::vector<std::int64_t> lengths;
};
/// They hold no tensors; numbers of theirs are what a compiled module is compiled for.
template <class F>
void tensors_in(Documents& /*documents*/, F&& /*visit*/) {}
template <class F>
void values_in(const Documents& documents, F&& visit) {
  for (const std::int64_t length : documents.lengths) visit(length);
}

/// ShapeError, in the name of `module`, unless each length is from 1 to `most` and all add up to `tokens`.
SHERD_API void check_documents(std::string_view module, const Documents& documents, std::int64_t tokens,
                               std::int64_t most);
/// The position of each token in its document: i64 of `shape`, whose elements the documents fill.
SHERD_API Tensor positions_of(const Documents& documents, const Shape& shape, Device device);
/// What `attend` makes of the documents: it is called for documents of one length that lie beside each other,
/// with each of `inputs` (1, N, ...) cut down to them as (documents, length, ...), and gives (documents,
/// length, F). Together (1, N, F).
SHERD_API Tensor by_document(const Documents& documents, const std::vector<Tensor>& inputs,
                             const std::function<Tensor(const std::vector<Tensor>&)>& attend);

}  // namespace sherd::nn
