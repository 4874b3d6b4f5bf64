// The bytes to train on and to validate with.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/io/file_system.h"

namespace sherd::tools {

/// Text cut for training: the last tenth of every file is for validation, and each part is joined over the
/// files in their order.
struct Text {
  std::vector<std::uint8_t> train, validation;
  std::int64_t files = 0;
  std::uint64_t digest = 0;  ///< of the bytes of all files and where they are cut
};

/// Reads files as they are, and of folders, in the order of their paths, every file below that is text: not
/// empty, not hidden, without zero bytes. Links inside a folder are not followed. FileError for what cannot
/// be read, devices and FIFOs among it, ValueError for a file or folder without text and for more than 2^30
/// bytes.
Text read_text(std::span<const std::string> paths, FileSystem& files);

/// Mean loss in nats a byte of predicting each byte of `validation` from the one before it, by counts of the
/// pairs in `train` with one added to each: P(b | a) = (pairs(a, b) + 1) / (pairs(a) + 256).
double bigram_loss(const Text& text);

}  // namespace sherd::tools
