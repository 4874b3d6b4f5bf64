// The one door through which every file goes that a command is told to write.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/io/file_system.h"

namespace sherd::tools {

/// Files of tensors are named as those of checkpoints are, and so lie in no checkpoint's folder.
enum class Holds : std::uint8_t { text, tensors };

/// A file that a flag names.
struct Output {
  std::string_view flag;  ///< "--trace"
  FileSystem::Path path;
  std::vector<std::string> taken{};  ///< files and folders that the command reads, and what else it writes
  std::vector<std::string> made{};   ///< folders that it makes, where they are not there yet
  Holds holds = Holds::text;
};

/// FileError unless nothing is there, or a regular file that is no run's or checkpoint's and none of `taken`,
/// nor in a folder of these; and for a name that a folder of `made` or a checkpoint in it will have, or in a
/// folder that will not be there. Asked before a command's work, so that none is done in vain.
void check_output(const Output& output, FileSystem& files);

/// For a folder that a command makes: FileError where something has that name, or its parent is not there, or
/// is or lies in one of the folders `taken`.
void check_new_folder(std::string_view flag, const FileSystem::Path& path,
                      const std::vector<std::string>& taken, FileSystem& files);

/// Whether `path` would be read with the folder `folder`, as what begins with a dot is not.
bool is_read_with(const FileSystem::Path& folder, const FileSystem::Path& path);

/// Checks, and replaces the file as a whole. FileError.
void write_output(const Output& output, std::string_view content, FileSystem& files);

/// Checks, and puts an empty file in its place, which is open at its end: for what comes line by line.
std::unique_ptr<OutputFile> begin_output(const Output& output, FileSystem& files);

/// A file of the command's own, open at its end. FileError where something else than a regular file is there:
/// a link would lead to what is another's.
std::unique_ptr<OutputFile> go_on_with(const FileSystem::Path& path, FileSystem& files);

}  // namespace sherd::tools
