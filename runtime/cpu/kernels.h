// The CPU's part of the table of kernels.
#pragma once

namespace sherd::cpu {

/// Adds the kernels of every file of this folder that has some; its build file lists them.
void add_kernels();

}  // namespace sherd::cpu
