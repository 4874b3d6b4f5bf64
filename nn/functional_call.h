// A module's forward with other tensors in place of its parameters, for gradients through what makes them:
// meta-learning, networks that give weights, ensembles.
//
//   const Tensor loss = cross_entropy(nn::functional_call(model, {{"weight", w}, {"bias", b}}, x), y);
#pragma once

#include <utility>
#include <vector>

#include "nn/module.h"

namespace sherd::nn {

/// Other tensors in members of a module, for as long as this lives. A tied parameter is replaced in all of
/// its places, whichever of its names is given. Not while another thread uses the module.
class SHERD_API Substitution {
 public:
  /// ValueError for a name that the module lacks or that is there twice, an empty handle, and two tensors for
  /// the names of one tied parameter; ShapeError for another shape; StateError for a module that is sharded,
  /// whose ranks hold its parameters together, and for a compiled one, which is so for the tensors it has.
  Substitution(Module& module, const StateDict& values);
  ~Substitution();
  Substitution(const Substitution&) = delete;
  Substitution& operator=(const Substitution&) = delete;

 private:
  std::vector<std::pair<Param*, Parameter>> parameters_;  // and what they held
  std::vector<std::pair<Buffer*, Buffer>> buffers_;
};

/// `module(args...)` with the tensors of `values` in place of the parameters and buffers of these names; the
/// module keeps the others, and has its own again behind it. A backward goes on into what the tensors were
/// computed from. Errors are those of `Substitution`.
template <class D, class... A>
  requires std::derived_from<D, Module>
auto functional_call(D& module, const StateDict& values, A&&... args) {
  const Substitution in_place(module, values);
  return module(std::forward<A>(args)...);
}

}  // namespace sherd::nn
