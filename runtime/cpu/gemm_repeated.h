// Products of one shape with the same B, one after another, as the steps of a sequence make them.
#pragma once

#include <memory>

#include "runtime/cpu/gemm.h"
#include "runtime/cpu/scratch.h"

namespace sherd::cpu {

class PackedB;

/// Lays B once as the products read it fastest.
template <class T>
class RepeatedGemm {
 public:
  /// `g` is one product without a batch; its A and C are those of each call.
  explicit RepeatedGemm(const Gemm<T>& g);
  void operator()(const T* a, T* c) const;

 private:
  Gemm<T> g_;
  Scratch<T> columns_;
  std::shared_ptr<PackedB> packed_;
};

}  // namespace sherd::cpu
