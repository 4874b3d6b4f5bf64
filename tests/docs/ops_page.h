// docs/ops.md, made of the lists of ops and of the comments in the headers.
#pragma once

#include <filesystem>
#include <set>
#include <string>

namespace sherd::test {

/// The page. `root` is the folder of the sources, whose headers and kernels are read.
std::string ops_page(const std::filesystem::path& root);

/// Types of ops that sources in this folder of a back end ("cpu", "cuda") enter kernels for, elementwise ones
/// aside: the table itself has those of back ends that this build has, and the page is the same in all
/// builds.
std::set<std::string> kernels_in_sources(const std::filesystem::path& root, const std::string& backend);
/// Those that the table has for the CPU.
std::set<std::string> kernels_in_table();

}  // namespace sherd::test
