// Pass: norms as statistics and what they do to each element, which regions then take in.
#pragma once

#include "autograd/capture/recorded.h"

namespace sherd {

/// Batch norms in training, on a device where an element's part has the bits of the whole (on GPUs, of
/// channels that lie side by side), become their statistics and `Normalise`, between casts where x is of 16
/// bits. On other devices, and where these ops join no regions, they stay.
Recorded split_norms(Recorded program);

}  // namespace sherd
