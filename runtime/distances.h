// How far vectors are from each other. All of it is made of other ops.
#pragma once

#include "runtime/ops.h"

namespace sherd {

/// a b / (max(|a|, eps) max(|b|, eps)) along `axis` of tensors that broadcast.
SHERD_API Tensor cosine_similarity(const Tensor& a, const Tensor& b, std::int64_t axis = 1,
                                   double eps = 1e-8);
/// The p-norm of a - b + eps along the last axis.
SHERD_API Tensor pairwise_distance(const Tensor& a, const Tensor& b, double p = 2, double eps = 1e-6,
                                   Keep keep = Keep::drop);
/// The p-norms of all differences of rows a (..., P, M) and b (..., R, M): (..., P, R). With p = 2 and more
/// than 25 rows on a side it is made of a product, as sqrt(|a|^2 + |b|^2 - 2 a b), which is as fast as that
/// and loses the digits that a distance is smaller by; else all differences are held. Equal rows have no
/// gradient.
SHERD_API Tensor cdist(const Tensor& a, const Tensor& b, double p = 2);

}  // namespace sherd
