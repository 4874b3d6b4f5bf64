// Normalisation of sets of planes, which batch norm (a set is a channel of all images) and group norm (a
// group of one image) share, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"
#include "runtime/cuda/norm_epilogue.h"

namespace sherd::cuda {

/// Dense planes (images * channels, inner) of `dtype`; a set's are `per_set` of them, `channels` apart (batch
/// norm) or neighbours. Arrays of one value a set or a channel are of the compute type.
struct PlaneNormCall {
  enum class Sets { channels, neighbours };
  enum class Spread { variance, rstd };  ///< what `spread` holds
  DType dtype = DType::f32;
  Sets sets = Sets::channels;
  Spread spread_is = Spread::variance;
  std::int64_t planes = 0, channels = 0, inner = 0, per_set = 0;
  double eps = 0;
  const void *x = nullptr, *weight = nullptr, *bias = nullptr;  ///< weight and bias may be null
  void *mean = nullptr, *spread = nullptr, *y = nullptr;
  NormEpilogue epilogue{};  ///< not of a gradient, which has its own
  cudaStream_t stream = nullptr;
  /// Pieces that a plane is cut into, so that few planes keep many blocks busy.
  std::int64_t pieces() const;
  double* sums = nullptr;  ///< room for 2 planes pieces()

  std::int64_t set_count() const { return planes / per_set; }
};
/// Writes mean and spread.
void launch_plane_statistics(const PlaneNormCall& call);
/// Writes y = (x - mean) / deviation weight + bias, after the epilogue.
void launch_plane_norm(const PlaneNormCall& call);

struct PlaneNormGradCall {
  PlaneNormCall forward;  ///< all but bias and y
  bool through_statistics = true;
  const void* gy = nullptr;
  void *gx = nullptr, *gweight = nullptr, *gbias = nullptr;
  void* of_sets = nullptr;  ///< room for 2 values of the compute type a set
  NormEpilogueGrad epilogue{};
};
void launch_plane_norm_grad(const PlaneNormGradCall& call);

/// Memory that a call points to, which must live until it was launched.
Tensor room_for_sums(PlaneNormCall& call, Device device);
/// `like`: of the compute type.
Tensor room_for_sets(PlaneNormGradCall& call, const Tensor& like);

}  // namespace sherd::cuda
