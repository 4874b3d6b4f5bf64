#include "nn/compile.h"
