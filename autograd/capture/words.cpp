#include "autograd/capture/words.h"

namespace sherd {

bool same(const Edge& a, const Edge& b) {
  const auto equal = [](const Edge& x, const Edge& y) {
    return x.node == y.node && x.leaf == y.leaf && (!x.node || x.index == y.index);
  };
  return equal(a, b) || (a.node && b.node && equal(followed(a), followed(b)));
}

namespace {
std::uint64_t word(Device device) {
  return static_cast<std::uint64_t>(device.type) << 32 | static_cast<std::uint32_t>(device.index);
}
}  // namespace

void describe(std::span<const Tensor> tensors, Gradients gradients, Words& words) {
  words.push_back(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    const Layout& layout = t.layout();
    words.push_back(static_cast<std::uint64_t>(layout.shape.rank()) << 8 |
                    static_cast<std::uint64_t>(t.dtype()));
    words.push_back(word(t.device()));
    for (int d = 0; d < layout.shape.rank(); ++d) {
      words.push_back(static_cast<std::uint64_t>(layout.shape[d]));
      words.push_back(layout.shape[d] > 1 ? static_cast<std::uint64_t>(layout.strides[d]) : 0);
    }
    std::size_t first = 0;
    while (tensors[first].storage_ref() != t.storage_ref()) ++first;
    words.push_back(first);
    words.push_back(static_cast<std::uint64_t>(layout.offset - tensors[first].layout().offset));
    if (gradients == Gradients::ignored) continue;
    const bool wanted = wants_grad(t);
    std::size_t twin = 0;
    while (wanted && !(wants_grad(tensors[twin]) && same(record_of(tensors[twin])->edge, record_of(t)->edge)))
      ++twin;
    words.push_back(wanted ? twin + 1 : 0);
    words.push_back(static_cast<std::uint64_t>(t.is_leaf()));
    std::size_t handle = 0;
    while (!tensors[handle].is(t)) ++handle;
    words.push_back(handle);
  }
}

}  // namespace sherd
