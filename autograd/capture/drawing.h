// A program as a picture.
#pragma once

#include <string>

#include "autograd/capture/program.h"

namespace sherd {

/// An SVG document of its own (`to_svg`).
std::string drawing(const Program::Impl& program);

}  // namespace sherd
