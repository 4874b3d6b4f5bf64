// The one list of ops that are not elementwise (those are in elementwise_list.h). Tests and docs iterate it.
#pragma once

#include "runtime/functor.h"
#include "runtime/ops/absolute_error.h"
#include "runtime/ops/arange.h"
#include "runtime/ops/attention.h"
#include "runtime/ops/batch_norm.h"
#include "runtime/ops/bce.h"
#include "runtime/ops/bce_with_logits.h"
#include "runtime/ops/cat.h"
#include "runtime/ops/conv2d.h"
#include "runtime/ops/copy.h"
#include "runtime/ops/cross_entropy.h"
#include "runtime/ops/diagonal.h"
#include "runtime/ops/dropout.h"
#include "runtime/ops/expand.h"
#include "runtime/ops/extreme.h"
#include "runtime/ops/flip.h"
#include "runtime/ops/full.h"
#include "runtime/ops/group_norm.h"
#include "runtime/ops/huber.h"
#include "runtime/ops/index.h"
#include "runtime/ops/interpolate.h"
#include "runtime/ops/layer_norm.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/linear_cross_entropy.h"
#include "runtime/ops/linear_fp8.h"
#include "runtime/ops/linear_gelu.h"
#include "runtime/ops/loss_total.h"
#include "runtime/ops/matmul.h"
#include "runtime/ops/multinomial.h"
#include "runtime/ops/nll.h"
#include "runtime/ops/optimizer_steps.h"
#include "runtime/ops/order_free_norm.h"
#include "runtime/ops/patches.h"
#include "runtime/ops/permute.h"
#include "runtime/ops/picking.h"
#include "runtime/ops/pool2d.h"
#include "runtime/ops/prod.h"
#include "runtime/ops/random.h"
#include "runtime/ops/recurrence.h"
#include "runtime/ops/recurrent.h"
#include "runtime/ops/rms_norm.h"
#include "runtime/ops/rotary.h"
#include "runtime/ops/slice.h"
#include "runtime/ops/softmax.h"
#include "runtime/ops/squared_error.h"
#include "runtime/ops/sum.h"
#include "runtime/ops/topk.h"
#include "runtime/ops/triangle.h"
#include "runtime/ops/view_as.h"

namespace sherd::ops {

using CreationOps = OpList<Full, Fill, Arange, Uniform, Normal, RandomInteger, RandomOrder, Bernoulli>;
using ViewOps = OpList<ViewAs, Permute, Expand, Slice, Diagonal>;
using MovingOps = OpList<Cast, Clone, Transfer, CopyInto, CopyEach, Unslice, WriteBox, Cat, ElementNumbers,
                         Places, FillWhere, Take, PutAt, PutAtGrad, PutAtInPlace, TopK, Flip, Roll, Triangle>;
using ReductionOps = OpList<Sum, PowerSum, Norm, Variance, VarianceGrad, Spread, LogSumExp, Prod, ProdGrad,
                            Extreme, ArgMax, Recurrence, RunningProduct, Multinomial, ManyDraws, MaxPool2d,
                            MaxPool2dGrad, AvgPool2d, AvgPool2dGrad, Interpolate, InterpolateGrad>;
using ProductOps = OpList<MatMul, Linear, Patches, PatchesGrad, Conv2d, Conv2dGradInput, Conv2dGradWeight>;
using FusedOps =
    OpList<LinearGelu, GeluGradSums, LinearFp8, LinearFp8Grad, Softmax, SoftmaxGrad, LayerNorm, LayerNormGrad,
           LayerNormGradSums, GroupNorm, GroupNormGrad, RmsNorm, RmsNormGrad, RotaryTable, Rotary, BatchNorm,
           BatchNormGrad, RunningStatistics, CrossEntropy, CrossEntropyGrad, CrossEntropyGradInPlace,
           CrossEntropyInPlace, ScaleUnlessOne, LinearCrossEntropy, LinearCrossEntropyGrad, Nll, NllGrad,
           LossTotal<SquaredError>, LossTotalGrad<SquaredError>, LossTotal<AbsoluteError>,
           LossTotalGrad<AbsoluteError>, LossTotal<Huber>, LossTotalGrad<Huber>, LossTotal<Bce>,
           LossTotalGrad<Bce>, LossTotal<BceWithLogits>, LossTotalGrad<BceWithLogits>, Dropout, Attention,
           AttentionGrad, MaskedAttention, MaskedAttentionGrad, SelfAttention, SelfAttentionGrad, Recurrent,
           RecurrentGrad>;
using OptimizerOps = OpList<AdamStep, SgdStep, RmspropStep, LionStep, AdagradStep, LargestMagnitude,
                            SquareSums, NormOfSums, ClipScale>;

/// What all other ops come down to, beside the elementwise ones: whoever has kernels for these runs
/// everything, and they are what a program is decomposed to.
using Primitives = OpList<Full, Arange, Uniform, Normal, RandomInteger, Cast, Clone, CopyInto, Take, PutAt,
                          TopK, Sum, Extreme, ArgMax, Multinomial, MatMul, SquareSums, NormOfSums>;

/// Calls `f.operator()<O>()` for every op of the library that is not elementwise.
template <class F>
void for_each_structural(F&& f) {
  CreationOps::for_each(f);
  ViewOps::for_each(f);
  MovingOps::for_each(f);
  ReductionOps::for_each(f);
  ProductOps::for_each(f);
  FusedOps::for_each(f);
  OptimizerOps::for_each(f);
}

}  // namespace sherd::ops
