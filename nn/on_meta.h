// Whether there are no values yet.
#pragma once

#include "nn/parameter.h"

namespace sherd::nn {

inline bool on_meta(const Tensor& t) { return t.device().type == DeviceType::meta; }
inline bool on_meta(const Parameter& p) { return on_meta(p.local()); }

}  // namespace sherd::nn
