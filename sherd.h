// Everything a user of Sherd includes.
#pragma once

#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/error.h"
#include "runtime/half.h"
#include "runtime/parallel.h"
#include "runtime/processor.h"
#include "runtime/shape.h"
