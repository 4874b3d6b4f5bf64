// docs/nn.md, made of the headers of layers, optimizers and what stands around them.
#pragma once

#include <filesystem>
#include <string>

namespace sherd::test {

/// The page. `root` is the folder of the sources, whose headers are read.
std::string nn_page(const std::filesystem::path& root);

}  // namespace sherd::test
